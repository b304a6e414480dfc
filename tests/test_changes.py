"""What may change when a run goes on: every key of the config, and the cases that depend on what has been done."""

from pathlib import Path
from typing import Any

import pytest
from small_configs import small_config

from training.changes import Passes, change_lines, compare_configs, refuse_changes
from training.config import RunConfig, config_mapping
from training.errors import UserError

# Another value for every key; of a run of 10 steps of 64 tokens, 5 of them done.
REFUSED: dict[str, Any] = {
    "model.vocab_size": 2049,
    "model.context_length": 16,
    "model.emb_dim": 64,
    "model.n_heads": 4,
    "model.n_layers": 3,
    "model.dropout": 0.1,
    "model.qkv_bias": True,
    "model.tie_weights": True,
    "model.init": "gpt2",
    "data.dataset": "other",
    "data.revision": "a" * 40,
    "data.train_start": 8,
    "data.shuffle": True,
    "batch.world_size": 3,
    "batch.microbatch": 3,
    "batch.accumulation": 3,
    "seeds.weights": 1,
    "seeds.training": 1,
    "init_from": "checkpoints/other/step_00000004",
}
TAKEN: dict[str, Any] = {
    "data.train_tokens": 1280,
    "data.epochs": 2,
    "data.validation_start": 8,
    "data.validation_tokens": 64,
    "data.tokenizer": "other.json",
    "precision.amp": "bf16",
    "precision.matmul": "highest",
    "optimizer.learning_rate": 1e-3,
    "optimizer.weight_decay": 0.01,
    "optimizer.betas": [0.9, 0.95],
    "optimizer.eps": 1e-7,
    "optimizer.decay": "matrices",
    "optimizer.clip_norm": 1.0,
    "schedule.name": "cosine",
    "loss.reduction": "sum",
    "evaluation.every": 3,
    "evaluation.tokens": 64,
    "checkpoint.every": None,
    "checkpoint.keep": 1,
    "hub.private": False,
}
IS_THE_RECORD: dict[str, Any] = {"interventions": ["no-dropout"], "overrides": ["checkpoint.keep=1"]}
ONLY_VALUE = {"optimizer.name", "reproducibility", "resolved", "hub.repo"}
"""Keys that have one valid value, so far."""


def flat(mapping: dict[str, Any]) -> dict[str, Any]:
    """Dotted keys of a mapping of sections."""
    pairs: dict[str, Any] = {}
    for key, value in mapping.items():
        pairs |= {f"{key}.{name}": item for name, item in value.items()} if isinstance(value, dict) else {key: value}
    return pairs


def run_of(**sections: Any) -> RunConfig:
    return small_config(**{**sections, "data": {"train_tokens": 640, **sections.get("data", {})}})


def changed(key: str, value: Any) -> RunConfig:
    section, _, name = key.partition(".")
    return run_of(**{section: {name: value} if name else value})


def test_every_key_of_a_config_is_classified() -> None:
    """A new one fails here until somebody has thought about it."""
    assert flat(config_mapping(run_of())).keys() == {*REFUSED, *TAKEN, *IS_THE_RECORD, *ONLY_VALUE}
    assert len({*REFUSED, *TAKEN, *IS_THE_RECORD, *ONLY_VALUE}) == sum(
        map(len, (REFUSED, TAKEN, IS_THE_RECORD, ONLY_VALUE))
    )


@pytest.mark.parametrize("key", REFUSED)
def test_what_the_steps_so_far_depended_on_is_refused(key: str) -> None:
    before, after = run_of(), changed(key, REFUSED[key])
    for old, new in ((before, after), (after, before)):
        [problem] = compare_configs(old, new, done=5).refused
        assert problem.startswith(f"{key} ")
        assert compare_configs(old, new, done=5).taken == {}
    assert compare_configs(after, after, done=5).refused == []


@pytest.mark.parametrize("key", TAKEN)
def test_what_only_steps_to_come_depend_on_is_taken(key: str) -> None:
    before, after = run_of(), changed(key, TAKEN[key])
    was, now = flat(config_mapping(before))[key], flat(config_mapping(after))[key]
    assert was != now
    for old, new, values in ((before, after, [was, now]), (after, before, [now, was])):
        changes = compare_configs(old, new, done=5)
        assert changes.refused == []
        assert changes.taken[key] == values
        assert set(changes.taken) == {key} or key == "schedule.name"
    assert compare_configs(after, after, done=5).taken == {}


@pytest.mark.parametrize("key", IS_THE_RECORD)
def test_how_a_config_came_about_is_not_compared(key: str) -> None:
    changes = compare_configs(run_of(), changed(key, IS_THE_RECORD[key]), done=5)
    assert (changes.refused, changes.taken) == ([], {})


def test_a_key_that_only_one_schedule_has_is_null_in_the_other() -> None:
    taken = compare_configs(run_of(), changed("schedule.name", "cosine"), done=5).taken
    assert taken == {
        "schedule.final_fraction": [None, 0.1],
        "schedule.name": ["constant", "cosine"],
        "schedule.warmup_percent": [None, 5.0],
    }


@pytest.mark.parametrize("now", [(1, 8, 1), (2, 4, 1), (8, 1, 1), (1, 2, 4)])
def test_the_split_of_the_global_batch_may_change(now: tuple[int, int, int]) -> None:
    """R29: 8 sequences per step all the same; another microbatch not where the loss was a mean of their means."""
    batch = dict(zip(("world_size", "microbatch", "accumulation"), now, strict=True))
    for reduction in ("token", "sum", "microbatch_mean"):
        loss = {"reduction": reduction}
        changes = compare_configs(run_of(loss=loss), run_of(loss=loss, batch=batch), done=5)
        refused = reduction == "microbatch_mean" and now[1] != 2
        assert bool(changes.refused) == refused
        assert any(key.startswith("batch.") for key in changes.taken) != refused
    changes = compare_configs(run_of(), run_of(loss={"reduction": "microbatch_mean"}, batch=batch), done=5)
    assert changes.refused == [], "steps to come have it"


# Runs of 64 tokens per step: train_tokens and epochs before and after, shuffle, steps done, and what is said of it.
LENGTHS = [
    ((640, 1), (1280, 1), False, 5, ""),
    ((640, 1), (1280, 1), False, 10, ""),
    ((640, 1), (1280, 1), True, 5, "data.shuffle orders another number of sequences otherwise"),
    ((640, 1), (1280, 1), True, 0, ""),
    ((640, 1), (600, 1), True, 5, ""),  # whole steps: the same range
    ((640, 1), (640, 3), True, 5, ""),
    ((640, 3), (640, 2), True, 15, ""),
    ((640, 2), (1280, 1), False, 10, ""),
    ((640, 2), (1280, 1), False, 11, "the steps from 11 on would have been in another epoch"),
    ((1280, 1), (640, 2), False, 11, "the steps from 11 on would have been in another epoch"),
    ((640, 2), (1280, 2), False, 15, "the steps from 11 on would have been in another epoch"),
    ((640, 1), (384, 1), False, 5, ""),
    ((640, 1), (320, 1), False, 5, "5 steps in all instead of 10, and 5 are done"),
    ((640, 1), (256, 1), False, 5, "4 steps in all instead of 10, and 5 are done"),
    ((640, 2), (640, 1), False, 12, "10 steps in all instead of 20, and 12 are done"),
]


@pytest.mark.parametrize(("before", "after", "shuffle", "done", "problem"), LENGTHS)
def test_the_length_may_change_where_the_steps_so_far_stay_the_same(
    before: tuple[int, int], after: tuple[int, int], shuffle: bool, done: int, problem: str
) -> None:
    """R18, R35: judged by the configs, and alike by the data where the config says -1, all there is."""
    old, new = (
        run_of(data={"train_tokens": tokens, "epochs": epochs, "shuffle": shuffle})
        for tokens, epochs in (before, after)
    )
    changes = compare_configs(old, new, done)
    assert changes.refused == [] if not problem else changes.refused[0].endswith(f" ({problem})")
    assert set(changes.taken) <= {"data.train_tokens", "data.epochs"}
    assert bool(changes.taken) != bool(problem)

    everything = run_of(data={"train_tokens": -1, "epochs": before[1], "shuffle": shuffle})
    assert compare_configs(everything, new, done).refused == [], "not known yet"
    steps = [-(-tokens // 64) for tokens, _ in (before, after)]
    passes = (Passes(steps[0], before[1]), Passes(steps[1], after[1]))
    refused = compare_configs(everything, new, done, passes).refused
    assert refused == [] if not problem else refused[0].endswith(f" ({problem})")


def test_all_that_is_refused_is_in_one_sentence() -> None:
    old = run_of()
    new = run_of(
        model={"dropout": 0.1, "init": "gpt2"},
        data={"train_tokens": 128, "epochs": 2},
        batch={"world_size": 3, "microbatch": 4},
        optimizer={"learning_rate": 1e-3},
        init_from="checkpoints/other/latest",
    )
    changes = compare_configs(old, new, done=5)
    with pytest.raises(UserError) as caught:
        refuse_changes(changes, Path("checkpoints/run"), done=5)
    assert str(caught.value) == (
        "checkpoints/run: after 5 steps these changes would make it another run: "
        "init_from null -> checkpoints/other/latest, model.dropout 0.0 -> 0.1, model.init pytorch -> gpt2, "
        "batch.microbatch 2 -> 4, batch.world_size 2 -> 3 (the global batch 8 -> 24), "
        "data.train_tokens 640 -> 128, data.epochs 1 -> 2 (2 steps in all instead of 10, and 5 are done); "
        "a run keeps its model, seeds, global batch and the order of its data: undo them, or start another run "
        "(another name, or --overwrite)"
    )
    assert list(changes.taken) == ["optimizer.learning_rate"]
    refuse_changes(compare_configs(old, old, done=5), Path("checkpoints/run"), done=5)


def test_what_is_told_of_a_change() -> None:
    changed = {"optimizer.clip_norm": [None, 1.0], "schedule.name": ["constant", "cosine"]}
    assert change_lines(changed, done=1234) == [
        "optimizer.clip_norm: null -> 1.0 from step 1,235 on",
        "schedule.name: constant -> cosine from step 1,235 on",
    ]
    for key in ("evaluation.tokens", "data.validation_start", "data.validation_tokens"):
        line, remark = change_lines({key: [64, 128]}, done=20)
        assert line == f"{key}: 64 -> 128 from step 21 on"
        assert remark.startswith("validation losses up to step 20 do not compare with those to come: ")
