"""What dropout that follows from a place in the run costs, against torch's own dropout and against none.

    OMP_NUM_THREADS=2 python benchmarks/dropout.py

Times a forward and backward in float32, in rounds: each of them runs every variant once, so that whatever else the
machine does falls on all. Prints the medians. On a CPU that only emulates bfloat16, times in it would mean nothing.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from model.dropout import dropout_keys
from model.gpt import GPT, Block, GPTConfig, build_gpt
from training.loss import SequenceLoss

CONFIG = GPTConfig(vocab_size=8192, context_length=256, emb_dim=256, n_heads=4, n_layers=4, dropout=0.1)
MICROBATCH = 8


class TorchDropoutGPT(GPT):
    """The same network with torch's own dropout, whose masks follow from torch's random state."""

    def hidden(self, ids: Tensor, keys: Tensor | None = None) -> Tensor:
        """See GPT.hidden; the keys are not looked at."""
        p = self.config.dropout
        x = self.token_embedding(ids) + self.position_embedding(torch.arange(ids.shape[1], device=ids.device))
        x = F.dropout(x, p)
        for block in self.blocks:
            assert isinstance(block, Block)
            normed, attention = block.attention_norm(x), block.attention
            query, key, value = (
                projection(normed).unflatten(-1, (self.config.n_heads, -1)).transpose(1, 2)
                for projection in (attention.query, attention.key, attention.value)
            )
            mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=p, is_causal=True)
            x = x + F.dropout(attention.output(mixed.transpose(1, 2).flatten(2)), p)
            x = x + F.dropout(block.mlp(block.mlp_norm(x)), p)
        normalised: Tensor = self.final_norm(x)
        return normalised


def one_step(module: SequenceLoss, step: int, clock: Callable[[], float]) -> float:
    """Seconds of a forward and backward, keys included."""
    config = module.model.config
    ids = torch.randint(config.vocab_size, (MICROBATCH, config.context_length + 1))
    module.zero_grad()
    started = clock()
    keys = dropout_keys(42, step, range(MICROBATCH), config) if config.dropout else None
    module(ids[:, :-1], ids[:, 1:], keys, torch.full((len(ids),), 1 / ids[:, 1:].numel()))[0].backward()
    return clock() - started


def main() -> None:
    """Measures and prints the table."""
    parser = argparse.ArgumentParser(description="Time of a step with and without dropout.")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--cpu-time", action="store_true", help="seconds of this thread, for a busy machine; with OMP_NUM_THREADS=1"
    )
    rounds, cpu_time = (arguments := parser.parse_args()).rounds, arguments.cpu_time
    clock = time.thread_time if cpu_time else time.perf_counter
    torch.manual_seed(0)
    modules = {
        "no dropout": SequenceLoss(build_gpt(replace(CONFIG, dropout=0.0), seed=1)),
        "torch's own dropout": SequenceLoss(TorchDropoutGPT(CONFIG)),
        "dropout from keys": SequenceLoss(build_gpt(CONFIG, seed=1)),
    }
    times: dict[str, list[float]] = {name: [] for name in modules}
    for step in range(-2, rounds):  # the first two to warm up
        for name, module in modules.items():
            seconds = one_step(module, max(step, 0), clock)
            if step >= 0:
                times[name].append(seconds)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {rounds} rounds")
    print("| a step of 8 x 256 tokens | median, ms | against torch's own |\n|---|---|---|")
    for name, measured in times.items():
        ratio = median(mine / other for mine, other in zip(measured, times["torch's own dropout"], strict=True))
        print(f"| {name} | {1000 * median(measured):.0f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
