"""What a run will do, in a few lines, before it does it."""

from model.attention import QUERY_ROWS
from model.gpt import parameter_count
from training.config import CosineSchedule, RunConfig
from training.document_rows import DocumentSummary
from training.layout import Layout, describe

GIB = 2**30
LIBRARIES = {"cpu": 8 * 2**20, "cuda": 8 * 2**20}
"""Bytes that the libraries' products work in."""


def plan_lines(
    config: RunConfig,
    layout: Layout,
    total_steps: int | None,
    device: str,
    documents: DocumentSummary | None = None,
    recomputing: bool = False,
) -> list[str]:
    """The plan of a run: steps, tokens, parameters, data, layout, learning rate, precision, memory.

    Args:
        config: the run's config.
        layout: the split of the global batch over the processes that were started.
        total_steps: of the run; None while the length of the data is not known.
        device: "cpu" or "cuda".
        documents: what is trained on, where that is documents: their steps differ in length.
        recomputing: whether activations are checkpointed.
    """
    tokens, epochs = config.tokens_per_step, config.data.epochs
    if total_steps is None:
        steps = f"as many steps of {tokens:,} tokens as {config.data.dataset} holds"
    elif documents is not None:
        passes = f"{documents.documents:,} documents" + (f" x {epochs:,} epochs" if epochs > 1 else "")
        steps = f"{total_steps:,} steps over {passes}: {epochs * documents.tokens:,} tokens"
    else:
        steps = f"{total_steps:,} steps of {tokens:,} tokens: {total_steps * tokens:,} tokens"
    interventions = f" with {', '.join(config.interventions)}" if config.interventions else ""
    precision = "float32" if config.precision.amp == "off" else f"{config.precision.amp} autocast"
    exchanged = "gradients exchanged in bf16, " if config.precision.gradients == "bf16" else ""
    refused = " (refused here: fp16 needs a GPU)" if (config.precision.amp, device) == ("fp16", "cpu") else ""
    memory = estimated_memory(config, layout.microbatch, device, recomputing)
    return [
        f"run {config.name}{interventions}: {parameter_count(config.model):,} parameters, {steps}",
        *([f"data: {documents.sentence(config.model.context_length)}"] if documents else []),
        f"layout: {describe(layout, config.batch)}",
        f"learning rate: {_schedule(config, total_steps)}",
        f"precision: {precision}, float32 products {config.precision.matmul}, {exchanged}on {device}{refused}",
        f"memory: about {_size(memory)} of tensors per process" + " with activation checkpointing" * recomputing,
    ]


def _size(count: int) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / 2**20:.0f} MiB"


def _schedule(config: RunConfig, total_steps: int | None) -> str:
    peak = config.optimizer.learning_rate
    if not isinstance(config.schedule, CosineSchedule):
        return f"{peak:g}, constant"
    warmup = f"{config.schedule.warmup_percent:g} % of the steps"
    if total_steps is not None:
        warmup = f"{config.warmup_steps(total_steps):,} steps"
    return f"{peak:g} after a warm-up of {warmup}, then a cosine to {peak * config.schedule.final_fraction:g}"


def estimated_memory(config: RunConfig, microbatch: int, device: str, recomputing: bool = False) -> int:
    """What the tensors of one process take at their peak, in bytes, beside the libraries.

    Weights, gradients and AdamW's two moments in float32, in bitwise mode sums in int64 as well; what the backward
    needs of the activations; and what comes for a moment on top: the logits of one chunk of the head with the head's
    gradient, or the gradients inside one block. An allocator that cannot use every gap needs more than this.

    Args:
        config: the run's.
        microbatch: sequences at once.
        device: "cpu" or "cuda".
        recomputing: whether activations are checkpointed.
    """
    from model.attention import BLOCKS_ARE_FASTER
    from model.half_products import product_type
    from training.loss import CHUNK_ROWS
    from training.step import AMP_DTYPES

    model, dtype = config.model, AMP_DTYPES[config.precision.amp]
    size, product = dtype.itemsize, product_type(dtype, device).itemsize
    half, in_blocks = size == 2, bool(model.dropout) or BLOCKS_ARE_FASTER.get(device, False)
    stream = microbatch * model.context_length * model.emb_dim  # numbers of the residual stream
    # What a block keeps of each: the inputs of its norms; of its products, where those of query, key and value share
    # theirs but under autocast; of the activation; query, key and value; what attention makes of them, where that is
    # not the product's input itself; two masks.
    inputs = (9 if half else 7) * product
    attention = (3 + in_blocks) * size if in_blocks or product == size else 4 * product
    block = stream * (2 * 4 + inputs + 4 * size + attention + 2 * bool(model.dropout) * size)
    copies = 12 * model.emb_dim**2 * product if half else 0  # of the weights, in the type of the products
    within = stream * (4 + 4 * product)  # the gradients around the activation, where the block's are freed by turns
    if model.dropout:
        # In the backward: weights, mask and slopes in float32, the slopes' product, what was dropped, hashes.
        rows = min(QUERY_ROWS[device], model.context_length)
        within = max(within, microbatch * model.n_heads * rows * model.context_length * (3 * 4 + 2 * size + 4))
    kept = model.n_layers * (block + copies)
    if recomputing:
        kept, within = model.n_layers * (stream * 4 + copies), block + within
    table = 4 * model.vocab_size * model.emb_dim
    chunk = min(microbatch * model.context_length, CHUNK_ROWS[device]) * model.vocab_size * (4 + size)
    ends = stream * 4 * (4 if model.dropout else 3)  # around the final norm, and the embedding's mask
    per_parameter = 24 if config.bitwise else 16
    return (
        per_parameter * parameter_count(model) + kept + ends + max(chunk + table, 2 * table, within) + LIBRARIES[device]
    )
