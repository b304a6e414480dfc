"""Which runs may be compared, by which measure, and how what differs is told."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from recorded_runs import event, train_row, write_run
from small_results import CONFIG, DIGESTS, write_import, write_result

from training.laboratory.comparability import (
    NOT_VERIFIED,
    choose_measure,
    describe_changes,
    obstacle,
    remarks_on,
    same_beginnings,
)
from training.laboratory.results import RunResult, read_result

OTHER = {**DIGESTS, "validation_sha256": "ee" * 32}
WORDS = {**OTHER, "tokenizer_sha256": "ff" * 32}


def result_of(folder: Path, loss: float = 4.2, **options: Any) -> RunResult:
    return read_result(write_result(folder, loss, **options))


def test_runs_validated_on_the_same_are_compared(tmp_path: Path) -> None:
    reference, result = result_of(tmp_path / "a"), result_of(tmp_path / "b")
    assert obstacle(result, reference, "loss") is None
    assert remarks_on(result, reference) == []


@pytest.mark.parametrize("options", [{"begin": OTHER}, {"target_tokens": 8192}])
def test_other_validation_data_are_an_obstacle(tmp_path: Path, options: dict[str, Any]) -> None:
    reference, result = result_of(tmp_path / "a"), result_of(tmp_path / "b", **options)
    assert obstacle(result, reference, "loss") == "other validation data"


def test_same_digest_counts_wherever_the_data_lie(tmp_path: Path) -> None:
    """The same tokens under another name, or further back in another file."""
    reference = result_of(tmp_path / "a")
    result = result_of(tmp_path / "b", data={"dataset": "copy", "validation_start": 32})
    assert obstacle(result, reference, "loss") is None


@pytest.mark.parametrize(
    "sections",
    [
        {"data": {"dataset": "copy"}},
        {"data": {"validation_start": 32}},
        {"data": {"revision": "abc"}},
        {"model": {"context_length": 64}},
    ],
)
def test_without_digests_the_configs_decide_and_it_is_said(tmp_path: Path, sections: dict[str, Any]) -> None:
    reference, same = result_of(tmp_path / "a", begin={}), result_of(tmp_path / "b", begin={})
    assert obstacle(same, reference, "loss") is None
    assert remarks_on(same, reference) == [NOT_VERIFIED]
    assert obstacle(result_of(tmp_path / "c", begin={}, **sections), reference, "loss") == "other validation data"


def test_other_tokenizers_are_compared_in_bits_per_byte(tmp_path: Path) -> None:
    """Over the same text: 4.2 x 4,096 / (ln 2 x 1.3) bytes, and 8.4 x 2,048 / (ln 2 x 1.3), up to 1 %."""
    reference = result_of(tmp_path / "a", bits_per_byte=1.3)
    result = result_of(tmp_path / "b", 8.4, bits_per_byte=1.29, target_tokens=2048, begin=WORDS)
    assert choose_measure([reference, result], reference) == "bits_per_byte"
    assert obstacle(result, reference, "bits_per_byte") is None
    assert remarks_on(result, reference) == [
        "other tokenizer: what compares is bits per byte, over 19,240 and 19,092 bytes of text"
    ]
    assert choose_measure([reference, reference], reference) == "loss"


def test_other_tokenizers_over_other_text_are_not_compared(tmp_path: Path) -> None:
    reference = result_of(tmp_path / "a", bits_per_byte=1.3)
    result = result_of(tmp_path / "b", 8.4, bits_per_byte=1.28, target_tokens=2048, begin=WORDS)
    assert obstacle(result, reference, "bits_per_byte") == "other validation text: 19,390 bytes against 19,092"
    diverged = read_result(write_result(tmp_path / "c", None, begin=WORDS))  # its bytes are not known
    assert obstacle(diverged, reference, "bits_per_byte") is None
    assert remarks_on(diverged, reference) == [
        "other tokenizer: what compares is bits per byte, each over its own text"
    ]


def test_other_tokenizer_without_bytes_is_an_obstacle(tmp_path: Path) -> None:
    reference = result_of(tmp_path / "a", bits_per_byte=1.3)
    result = result_of(tmp_path / "b", begin=WORDS)
    assert choose_measure([reference, result], reference) == "loss"
    assert obstacle(result, reference, "loss") == "other tokenizer, and no bits per byte"


def test_same_ids_compare_whatever_the_file_of_the_tokenizer(tmp_path: Path) -> None:
    reference = result_of(tmp_path / "a")
    result = result_of(tmp_path / "b", begin={**DIGESTS, "tokenizer_sha256": "ff" * 32})
    assert obstacle(result, reference, "loss") is None
    assert remarks_on(result, reference) == []


def test_vocabularies_tell_tokenizers_apart_where_no_digest_does(tmp_path: Path) -> None:
    reference = result_of(tmp_path / "a", begin={})
    result = result_of(tmp_path / "b", begin={}, model={"vocab_size": 512})
    assert obstacle(result, reference, "loss") == "other tokenizer, and no bits per byte"


def test_what_has_no_result_is_no_result(tmp_path: Path) -> None:
    unfinished = result_of(tmp_path / "a", steps=10, end="interrupted")
    assert obstacle(unfinished, None, "loss") == "not finished: step 10 of 20"
    blind = read_result(write_run(tmp_path / "b", [train_row(1), event(1, "finished")], CONFIG))
    assert obstacle(blind, None, "loss") == "no validation loss"
    assert obstacle(read_result(write_import(tmp_path / "c", 3.5)), None, "loss") is None
    assert obstacle(read_result(write_import(tmp_path / "d", None)), None, "loss") == "no validation loss"


def test_lengths_that_differ_by_a_step_are_the_same(tmp_path: Path) -> None:
    """train_tokens is rounded up to whole steps, so batches of other sizes end apart, if only by a hundredth."""
    reference = replace(result_of(tmp_path / "a"), train_tokens=204_800)
    assert remarks_on(replace(reference, train_tokens=204_800 + 1023), reference) == []
    longer = replace(reference, name="b", train_tokens=204_800 + 1024)
    assert remarks_on(longer, reference) == ["other token count: trained on 205,824 against 204,800"]
    assert remarks_on(replace(longer, tokens_per_step=2048), reference) == []
    assert remarks_on(replace(longer, tokens_per_step=4096, train_tokens=204_800 + 2048), reference) == []
    one_step = replace(longer, tokens_per_step=16_000, train_tokens=16_000)
    short = replace(reference, train_tokens=2560)
    assert remarks_on(one_step, short) == ["other token count: trained on 16,000 against 2,560"]


def test_changes_are_told_by_intervention_and_by_key(tmp_path: Path) -> None:
    baseline = result_of(tmp_path / "a", interventions=["old"], optimizer={"eps": 1e-6}).config
    config = result_of(
        tmp_path / "b",
        interventions=["clipping"],
        optimizer={"clip_norm": 3.5, "weight_decay": 0.2},
        precision={"amp": "off"},
        seeds={"weights": 1, "training": 2},
    ).config
    known = {"clipping": {"optimizer": {"clip_norm": 3.5}}, "old": {"optimizer": {"eps": 1e-6}}}
    told = describe_changes(config, baseline, known)
    assert told == "clipping, without old, optimizer.weight_decay 0.1 → 0.2, precision.amp fp16 → off"
    assert describe_changes(baseline, baseline, known) == ""


def test_intervention_of_another_value_does_not_hide_the_key(tmp_path: Path) -> None:
    baseline = result_of(tmp_path / "a").config
    config = result_of(tmp_path / "b", interventions=["clipping"], optimizer={"clip_norm": 1.0}).config
    told = describe_changes(config, baseline, {"clipping": {"optimizer": {"clip_norm": 3.5}}})
    assert told == "clipping, optimizer.clip_norm null → 1.0"


def test_another_split_of_the_batch_is_no_other_batch(tmp_path: Path) -> None:
    baseline = result_of(tmp_path / "a").config
    split = result_of(tmp_path / "b", batch={"world_size": 1, "accumulation": 8}).config
    assert describe_changes(split, baseline, {}) == "the same global batch as 1 x 4 x 8 instead of 2 x 4 x 4"
    larger = result_of(tmp_path / "c", batch={"accumulation": 8}).config
    assert describe_changes(larger, baseline, {}) == "global batch 32 → 64"


def test_same_seeds_mean_the_same_beginning_and_it_is_looked_at(tmp_path: Path) -> None:
    first = result_of(tmp_path / "a")
    second = result_of(tmp_path / "b", optimizer={"eps": 1e-6})
    assert same_beginnings([first, second]) == [
        "Initial weights are the same bytes (sha256) wherever configs and seeds promise it",
        "Data and their order are the same bytes (sha256) wherever configs and seeds promise it",
    ]
    elsewhere = result_of(tmp_path / "c", begin={**DIGESTS, "weights_sha256": "99" * 32})
    weights, order = same_beginnings([first, second, elsewhere])
    assert weights.startswith("Initial weights are NOT the same, although configs and seeds promise it: c and a (")
    assert order.startswith("Data and their order are the same")


def test_other_seeds_or_models_promise_nothing(tmp_path: Path) -> None:
    other = {**DIGESTS, "weights_sha256": "99" * 32}
    results = [
        result_of(tmp_path / "a"),
        result_of(tmp_path / "b", begin=other, seeds={"weights": 1, "training": 42}),
        result_of(tmp_path / "c", begin={**other, "weights_sha256": "77"}, model={"tie_weights": True}),
        result_of(tmp_path / "d", begin={"weights_sha256": None}),
    ]
    assert [text for text in same_beginnings(results) if text.startswith("Initial")] == []
