"""Whether runs may be compared, by which measure, and in what their configs and their beginnings differ. Pure."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from training.changes import flat_values
from training.config import Batch, RunConfig, config_mapping
from training.config_check import written
from training.errors import one_line
from training.laboratory.results import RunResult, identity

Measure = Literal["loss", "bits_per_byte"]
UNITS: dict[Measure, str] = {"loss": "nats per token", "bits_per_byte": "bits per byte"}

SAME_TEXT = 0.01
"""Share by which the bytes validated on may differ, as tokens of two tokenizers do not end at the same ones."""
SAME_LENGTH = 0.01
"""Share by which the tokens trained on may differ, as each batch size rounds them up to its own whole steps."""
NOT_VERIFIED = "validation data not verified: no digest is recorded, the config's keys and the number of targets agree"


def choose_measure(results: Sequence[RunResult], reference: RunResult) -> Measure:
    """Loss per token, or bits per byte as soon as a run that has them has another tokenizer than the reference."""
    others = [result for result in results if has_other_tokenizer(result, reference)]
    if reference.bits_per_byte is not None and any(result.bits_per_byte is not None for result in others):
        return "bits_per_byte"
    return "loss"


def value_of(result: RunResult, measure: Measure) -> float | None:
    """A run's result in the measure."""
    return result.loss if measure == "loss" else result.bits_per_byte


def has_other_tokenizer(result: RunResult, reference: RunResult) -> bool:
    """By their digests where both are recorded, else by the size of the vocabulary.

    Runs that were validated on the same ids compare, whatever the files of their tokenizers are.
    """
    if result.digests.validation and result.digests.validation == reference.digests.validation:
        return False
    own, other = result.digests.tokenizer, reference.digests.tokenizer
    if own is not None and other is not None:
        return own != other
    return result.config.model.vocab_size != reference.config.model.vocab_size


def obstacle(result: RunResult, reference: RunResult | None, measure: Measure) -> str | None:
    """Why a run's result is not compared with the reference's; None if it is. Without a reference: if there is one."""
    if not result.finished and not result.imported:
        of_all = "" if result.total_steps is None else f" of {result.total_steps:,}"
        return f"not finished: step {result.step:,}{of_all}"
    if result.loss is None:
        return "no validation loss"
    if reference is None:
        return None
    if has_other_tokenizer(result, reference):
        if measure == "loss" or result.bits_per_byte is None:
            return "other tokenizer, and no bits per byte"
        read, against = validated_bytes(result), validated_bytes(reference)
        if read is None or against is None or abs(read - against) <= SAME_TEXT * against:
            return None
        return f"other validation text: {read:,} bytes against {against:,}"
    if value_of(result, measure) is None:
        return "no bits per byte"
    own, other = result.digests.validation, reference.digests.validation
    same = own == other if own and other else _validation_keys(result) == _validation_keys(reference)
    if not same or result.target_tokens != reference.target_tokens:
        return "other validation data"
    return None


def remarks_on(result: RunResult, reference: RunResult) -> list[str]:
    """What is to be known of a run that is compared with the reference."""
    remarks = []
    if has_other_tokenizer(result, reference):
        remarks.append(_tokenizer_remark(result, reference))
    elif not (result.digests.validation and reference.digests.validation) and result is not reference:
        remarks.append(NOT_VERIFIED)
    if not result.imported and not reference.imported and not equally_long(result, reference):
        remarks.append(f"other token count: trained on {result.train_tokens:,} against {reference.train_tokens:,}")
    return remarks


def equally_long(result: RunResult, reference: RunResult) -> bool:
    """Whether two runs were trained on as many tokens, but for the rounding to whole steps."""
    apart = abs(result.train_tokens - reference.train_tokens)
    step = max(result.tokens_per_step, reference.tokens_per_step)
    return apart == 0 or (apart < step and apart <= SAME_LENGTH * reference.train_tokens)


def length_problems(configs: Mapping[str, RunConfig]) -> list[str]:
    """Which batch sizes cannot be compared at equal tokens, as their steps are too long for the run."""
    known = {group: config.total_steps for group, config in configs.items()}
    tokens = {group: steps * configs[group].tokens_per_step for group, steps in known.items() if steps is not None}
    least = min(tokens.values(), default=0)
    return [
        f"{group}: its whole steps make {count:,} tokens, those of other sizes {least:,}, and sizes are compared at "
        "equal tokens; leave this one out, or train on more"
        for group, count in tokens.items()
        if count > (1 + SAME_LENGTH) * least
    ]


def validated_bytes(result: RunResult) -> int | None:
    """Bytes of the text that the final validation covered; None where it was not measured, or was not finite."""
    loss, bits, targets = result.loss, result.bits_per_byte, result.target_tokens
    if loss is None or targets is None or not bits or not math.isfinite(loss):
        return None
    return round(loss * targets / (math.log(2) * bits))


def _tokenizer_remark(result: RunResult, reference: RunResult) -> str:
    sizes = [validated_bytes(result), validated_bytes(reference)]
    over = [f"{size:,}" for size in sizes if size is not None]
    text = f"over {over[0]} and {over[1]} bytes of text" if len(over) == 2 else "each over its own text"
    return f"other tokenizer: what compares is bits per byte, {text}"


def _validation_keys(result: RunResult) -> tuple[Any, ...]:
    data = result.config.data
    context = result.config.model.context_length
    return data.dataset, result.dataset_revision, data.validation_start, context, result.target_tokens


def describe_changes(config: RunConfig, baseline: RunConfig, interventions: Mapping[str, dict[str, Any]]) -> str:
    """In what a config differs from the baseline's: interventions by name, the rest by key; empty if in nothing.

    Args:
        config: of a run.
        baseline: of the run to compare with.
        interventions: what each known intervention sets, in sections.
    """
    before, after = flat_values(identity(baseline)), flat_values(identity(config))
    changed = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
    added = [name for name in config.interventions if name not in baseline.interventions]
    dropped = [name for name in baseline.interventions if name not in config.interventions]
    for names, values in ((added, after), (dropped, before)):
        for name in names:
            sets = flat_values(interventions.get(name, {}))
            changed -= {key for key, value in sets.items() if values.get(key) == value}
    parts = [*added, *(f"without {name}" for name in dropped)]
    if any(key.startswith("batch.") for key in changed):
        changed = {key for key in changed if not key.startswith("batch.")}
        parts.append(_batch_change(config, baseline))
    parts += [f"{key} {_shown(before.get(key))} → {_shown(after.get(key))}" for key in sorted(changed)]
    return ", ".join(parts)


def _batch_change(config: RunConfig, baseline: RunConfig) -> str:
    if config.global_batch != baseline.global_batch:
        return f"global batch {baseline.global_batch:,} → {config.global_batch:,}"
    return f"the same global batch as {_split(config.batch)} instead of {_split(baseline.batch)}"


def _split(batch: Batch) -> str:
    return f"{batch.world_size} x {batch.microbatch} x {batch.accumulation}"


def _shown(value: Any) -> str:
    return one_line(value) if isinstance(value, str) else written(value)


def same_beginnings(results: Iterable[RunResult]) -> list[str]:
    """Whether runs whose configs promise the same initial weights, or the same data in the same order, had them."""
    sentences = []
    trained = [result for result in results if not result.imported]
    weights = [(result.name, result.digests.weights, _weights_promise(result.config)) for result in trained]
    order = [(result.name, result.digests.data_order, _order_promise(result.config)) for result in trained]
    for what, beginnings in (("Initial weights", weights), ("Data and their order", order)):
        known: list[tuple[Any, str, str]] = []
        same, other = 0, []
        for name, digest, promise in beginnings:
            if digest is None:
                continue
            earlier = next((item for item in known if item[0] == promise), None)
            if earlier is None:
                known.append((promise, digest, name))
            elif earlier[1] == digest:
                same += 1
            else:
                other.append(f"{name} and {earlier[2]}")
        if other:
            shown = ", ".join(other[:3]) + (f" and {len(other) - 3} more" if len(other) > 3 else "")
            sentences.append(
                f"{what} are NOT the same, although configs and seeds promise it: {shown} (sha256 differ); "
                "these runs began apart, on other machines or with other versions or data"
            )
        elif same:
            sentences.append(f"{what} are the same bytes (sha256) wherever configs and seeds promise it")
    return sentences


def _weights_promise(config: RunConfig) -> Any:
    model = {key: value for key, value in config_mapping(config)["model"].items() if key != "dropout"}
    return model, config.seeds.weights, config.init_from


def _order_promise(config: RunConfig) -> Any:
    data = config.data
    return (
        data.dataset,
        data.revision,
        (data.train_start, data.train_tokens, data.epochs),
        config.seeds.training if data.shuffle else None,
        (config.global_batch, config.model.context_length),
    )
