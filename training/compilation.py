"""--compile: torch.compile for the blocks, tried before it counts."""

import time

import torch

from model.dropout import dropout_keys
from model.gpt import GPT
from training.config import RunConfig
from training.distributed import Group
from training.errors import UserError
from training.step import autocast


def refuse_to_compile(config: RunConfig) -> None:
    """Refuses what would break a promise.

    Raises:
        UserError: in bitwise mode, whose last bits are those of the kernels that are not compiled.
    """
    if config.bitwise:
        raise UserError(
            "--compile: with reproducibility: bitwise the kernels stay the same wherever the run goes on, and compiled "
            "ones round otherwise; leave the option out, or train with reproducibility: rounding"
        )


def compile_blocks(model: GPT, config: RunConfig, microbatch: int, group: Group) -> str:
    """Compiles the blocks, of which all share one piece of code, and tries one; what came of it. Every rank must call.

    Where any rank cannot compile, none does.
    """
    started = time.perf_counter()
    problem = _problem(model, config, microbatch, group.process.device)
    failed = torch.tensor(problem is not None, dtype=torch.int32, device=group.process.device)
    if group.maximum(failed).item():
        for block in model.blocks:
            block._compiled_call_impl = None  # as it was: there is no public way back
        reason = problem or "on another rank"
        return f"--compile: is not possible here ({reason}); going on without, which is the same run"
    # Other shapes, of documents or of a smaller microbatch, and evaluation are compiled when they come; what cannot be
    # compiled then goes on as it is written.
    import torch._dynamo.config as compiler

    compiler.suppress_errors = True
    return f"compiled in {time.perf_counter() - started:.0f} s"


def _problem(model: GPT, config: RunConfig, microbatch: int, device: torch.device) -> str | None:
    """Compiles; why that cannot be done, for the forward and backward of a microbatch, or None."""
    shape = config.model
    x = torch.zeros(microbatch, shape.context_length, shape.emb_dim, device=device, requires_grad=True)
    keys = None
    if shape.dropout:
        keys = dropout_keys(0, 0, range(microbatch), shape).to(device)[:, 1 : 3 + shape.n_heads]
    first = model.blocks[0]
    try:
        import torch._dynamo.config as compiler  # not before it is wanted: it takes a second to import

        compiler.suppress_errors = False  # as long as it is tried
        for block in model.blocks:
            block.compile()
        with autocast(config.precision, device):
            output = first(x, keys)
        torch.autograd.grad(output.sum(), [x, *first.parameters()])
    except Exception as error:  # compilers fail in many ways, and each has its own type
        return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return None
