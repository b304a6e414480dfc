"""What a run will do, in a few lines, before it does it."""

from model.attention import QUERY_ROWS
from model.gpt import parameter_count
from training.config import CosineSchedule, RunConfig
from training.document_rows import DocumentSummary
from training.layout import Layout, describe

GIB = 2**30


def plan_lines(
    config: RunConfig, layout: Layout, total_steps: int | None, device: str, documents: DocumentSummary | None = None
) -> list[str]:
    """The plan of a run: steps, tokens, parameters, data, layout, learning rate, precision, memory.

    Args:
        config: the run's config.
        layout: the split of the global batch over the processes that were started.
        total_steps: of the run; None while the length of the data is not known.
        device: "cpu" or "cuda".
        documents: what is trained on, where that is documents: their steps differ in length.
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
    return [
        f"run {config.name}{interventions}: {parameter_count(config.model):,} parameters, {steps}",
        *([f"data: {documents.sentence(config.model.context_length)}"] if documents else []),
        f"layout: {describe(layout, config.batch)}",
        f"learning rate: {_schedule(config, total_steps)}",
        f"precision: {precision}, float32 products {config.precision.matmul}, {exchanged}on {device}{refused}",
        f"memory: about {estimated_memory(config, layout.microbatch, device) / GIB:.1f} GiB per process",
    ]


def _schedule(config: RunConfig, total_steps: int | None) -> str:
    peak = config.optimizer.learning_rate
    if not isinstance(config.schedule, CosineSchedule):
        return f"{peak:g}, constant"
    warmup = f"{config.schedule.warmup_percent:g} % of the steps"
    if total_steps is not None:
        warmup = f"{config.warmup_steps(total_steps):,} steps"
    return f"{peak:g} after a warm-up of {warmup}, then a cosine to {peak * config.schedule.final_fraction:g}"


def estimated_memory(config: RunConfig, microbatch: int, device: str) -> int:
    """A rough estimate, in bytes, of what one process needs at its peak beside the libraries.

    Weights, gradients and AdamW's two moments in float32, in bitwise mode sums in int64 as well; activations kept for
    the backward, about 18 numbers per token and width in each block, with dropout the masks of its two branches as
    well; the attention weights of the rows that are computed at once, with dropout, which no fused kernel does for
    us; the logits of one chunk of the head, and the head's gradient.
    """
    from training.loss import CHUNK_ROWS

    model = config.model
    tokens = microbatch * model.context_length
    size = 4 if config.precision.amp == "off" else 2
    block = (20 if model.dropout else 18) * tokens * model.emb_dim * size
    weights = 0
    if model.dropout:
        # In the backward: weights, mask and slopes in float32, the slopes' product, what was dropped, hashes.
        rows = min(QUERY_ROWS[device], model.context_length)
        weights = microbatch * model.n_heads * rows * model.context_length * (3 * 4 + 2 * size + 4)
    # Logits, their logarithms and slopes, and the head's gradient before it is added to the others.
    logits = min(tokens, CHUNK_ROWS[device]) * model.vocab_size * (4 + 2 * size) + 4 * model.vocab_size * model.emb_dim
    per_parameter = 24 if config.bitwise else 16
    return per_parameter * parameter_count(model) + model.n_layers * block + weights + logits
