"""Study files: the runs they make, the shipped ones against the configs they stand for, and every mistake at once."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from small_configs import LEAST, Configs

from training.changes import compare_configs
from training.config import RunConfig
from training.config_check import ConfigError
from training.config_file import load_run_config
from training.laboratory.study_file import STUDIES, load_study

ONE_SEED = "seeds: [{weights: 1, training: 2}]\n"
BASE = LEAST + "checkpoint: {every: 10}\nevaluation: {every: 8, tokens: 2048}\n"
SERIES = {
    "baseline-w42-t42": "8xa100m40-baseline",
    "baseline-w22-t22": "8xa100m40-baseline-3",
    "baseline-w67-t67": "8xa100m40-baseline-4",
    "baseline-w42-t23": "8xa100m40-baseline-5",
    "baseline-w42-t67": "8xa100m40-baseline-6",
    "baseline-w23-t23": "8xa100m40-baseline-7",
    "baseline-w67-t23": "8xa100m40-baseline-8",
    "gradient-clipping-w42-t42": "8xa100m40-gradient-clipping",
    "qkv-bias-w42-t42": "8xa100m40-qkv-bias",
    "weight-decay-gpt2-w42-t42": "8xa100m40-weight-decay-gpt2",
    "weight-decay-cerebras-w42-t42": "8xa100m40-weight-decay-cerebras",
    "no-dropout-w42-t42": "8xa100m40-remove-dropout",
    "schedule-learning-rate-w42-t42": "8xa100m40-schedule-learning-rate",
    "weight-tying-w42-t42": "8xa100m40-weight-tying",
    "no-amp-w42-t42": "8xa100m80-no-amp",
    "stacked-interventions-1-w42-t42": "8xa100m40-stacked-interventions-1",
    "stacked-interventions-2-w42-t42": "8xa100m40-stacked-interventions-2",
    "stacked-interventions-3-w42-t42": "8xa100m40-stacked-interventions-3",
}
BATCH_SIZES = {
    "batch-96-w42-t42": "8xa100m40-baseline",
    "batch-6-w42-t42": "original",
    "batch-104-w42-t42": "8xa100m40",
    "batch-216-w42-t42": "8xh100m80",
    "batch-224-w42-t42": "8xa100m80",
    "batch-512-w42-t42": "8xb200m160",
}


def write_study(configs: Configs, text: str) -> str:
    """Writes a study beside its base, a config with what is needed."""
    configs.write(BASE, "small")
    return str(configs.write("base: small\n" + text, "mine"))


def problems(configs: Configs, text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_study(write_study(configs, text))
    where = str(configs.folder / "mine.yaml")
    first, *rest = str(caught.value).split("\n  - ")
    assert first.startswith(where)
    return rest or [first.removeprefix(f"{where}: ")]


def differences(config: RunConfig, other: RunConfig) -> set[str]:
    """The sections in which two configs differ."""
    changes = compare_configs(config, other, 0)
    assert not changes.refused
    return {key.split(".")[0] for key in changes.taken}


def test_the_rows_of_a_study(configs: Configs) -> None:
    """The baseline, each intervention alone, the stacks; seed by seed, and the baseline at its further seeds."""
    text = """
interventions: [no-dropout, gradient-clipping]
stacks: {both: [no-dropout, gradient-clipping]}
seeds: [{weights: 1, training: 2}]
baseline_seeds: [{weights: 1, training: 2}, {weights: 3, training: 4}]
set: {optimizer: {learning_rate: 1e-3}, precision: {amp: off}, data: {shuffle: yes}, evaluation: {every: 0}}
"""
    study = load_study(write_study(configs, text))
    assert (study.name, study.baseline, study.batch_sizes) == ("mine", "baseline", ())
    assert [(run.group, run.name) for run in study.runs] == [
        ("baseline", "baseline-w1-t2"),
        ("no-dropout", "no-dropout-w1-t2"),
        ("gradient-clipping", "gradient-clipping-w1-t2"),
        ("both", "both-w1-t2"),
        ("baseline", "baseline-w3-t4"),
    ]
    found = [
        (run.config.model.dropout, run.config.optimizer.clip_norm, run.config.seeds.weights, run.config.interventions)
        for run in study.runs
    ]
    assert found == [
        (0.1, None, 1, ()),
        (0.0, None, 1, ("no-dropout",)),
        (0.1, 3.5, 1, ("gradient-clipping",)),
        (0.0, 3.5, 1, ("no-dropout", "gradient-clipping")),
        (0.1, None, 3, ()),
    ]
    for run in study.runs:
        config = run.config
        assert (config.optimizer.learning_rate, config.precision.amp, config.data.shuffle) == (1e-3, "off", True)
        assert (config.evaluation.every, config.evaluation.tokens) == (0, 2048)
        assert config.overrides == ()


def test_batch_sizes_are_at_equal_tokens(configs: Configs) -> None:
    """The base's own size, 16 here, comes first; evaluations and checkpoints keep their distance in tokens."""
    text = ONE_SEED + "batch_sizes: [4, 16, 5, 80]\nset: {data: {train_tokens: 327_680}}"
    study = load_study(write_study(configs, text))
    assert (study.baseline, study.batch_sizes) == ("batch-16", (4, 16, 5, 80))
    found = {run.group: run.config for run in study.runs}
    assert list(found) == ["batch-16", "batch-4", "batch-5", "batch-80"]
    for group, config in found.items():
        assert config.global_batch == int(group.removeprefix("batch-"))
        assert config.data.train_tokens == 327_680
        assert config.total_steps == 320 // config.global_batch
    splits = {group: (config.batch.world_size, config.batch.microbatch) for group, config in found.items()}
    assert splits == {"batch-16": (2, 8), "batch-4": (2, 2), "batch-5": (1, 5), "batch-80": (2, 40)}
    intervals = {group: (config.evaluation.every, config.checkpoint.every) for group, config in found.items()}
    assert intervals == {"batch-16": (8, 10), "batch-4": (32, 40), "batch-5": (26, 32), "batch-80": (2, 2)}


@pytest.mark.parametrize(
    ("study", "expected"), [("forerunner", SERIES), ("forerunner-batch-size", BATCH_SIZES)], ids=["series", "batch"]
)
def test_the_forerunners_studies_are_its_configs(study: str, expected: dict[str, str]) -> None:
    """In everything but when they are evaluated and what is kept."""
    runs = {run.name: run.config for run in load_study(study).runs}
    assert runs.keys() == expected.keys()
    for name, config in runs.items():
        assert differences(load_run_config(expected[name]), config) <= {"evaluation", "checkpoint"}, name
        assert config.checkpoint.keep == 1


@pytest.mark.parametrize("path", sorted(STUDIES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_study_loads_and_says_how_it_is_run(path: Path) -> None:
    study = load_study(path.stem)
    assert study.path == path
    assert path.read_text().startswith(f"# isobatch study {path.stem} datasets/")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ["seeds: is needed"]),
        (
            "interventions: [no-dropuot]\nseedz: [{weights: 1, training: 2}]\n",
            [
                r"seedz: unknown key; did you mean seeds\?",
                r"interventions: no-dropuot is no .*; did you mean no-dropout\?",
            ],
        ),
        (ONE_SEED, ["a study compares either interventions .* or batch_sizes; give one of the two"]),
        (
            ONE_SEED + "intervention: [no-dropout]\nset: {optimizer: {learning_rat: 1}}",
            [r"intervention: unknown key; did you mean interventions\?"],
        ),
        (
            ONE_SEED + "interventions: no-dropout\nevaluation: {every: 1}\noptimizer: {eps: 1}\nseed: 3\n"
            "stacks: {a b: [x, y], c: [x]}",
            [
                "interventions: must be a list, got 'no-dropout'",
                r"stacks.a b.*: must be a name of letters, digits",
                r"stacks.c: must have at least 2 items, got \[\"x\"\]",
                r"evaluation: unknown key; a run's own keys stand in `set`: write set: \{evaluation: ...\}",
                r"optimizer: unknown key; a run's own keys stand in `set`: write set: \{optimizer: ...\}",
                r"seed: unknown key; did you mean seeds\?",
            ],
        ),
        (
            "interventions: [no-dropout]\nseeds: [{weights: 1}, {weight: 1, training: -2}]",
            [
                r"seeds\[0\].training: is needed",
                r"seeds\[1\].weights: is needed",
                r"seeds\[1\].training: must be greater than or equal to 0, got -2",
                r"seeds\[1\].weight: unknown key; did you mean weights\?",
            ],
        ),
        (
            ONE_SEED + "interventions: [no-dropuot, qkv-bias, qkv-bias]\nstacks: {baseline: [qkv-bias, x], qkv-bias: "
            "[qkv-bias, no-amp]}\nbaseline_seeds: [{weights: 2, training: 2}]\n"
            "set: {seeds: {weights: 1}}",
            [
                "interventions: qkv-bias stands there twice; keep one",
                r"baseline_seeds: lacks \{weights: 1, training: 2\}; the baseline needs a run at each",
                r"interventions: no-dropuot is no intervention; did you mean no-dropout\?",
                "stacks.baseline: x is no intervention; there are gradient-clipping",
                "stacks.baseline: is the name of the baseline; choose another",
                "stacks.qkv-bias: is the name of an intervention; choose another",
                "set.seeds: is for the study's own keys to say; leave it out",
            ],
        ),
        (
            ONE_SEED + "batch_sizes: [8, 8]\nbaseline_seeds: [{weights: 1, training: 2}]\nset: {batch: {}}",
            [
                "batch_sizes: one size has nothing to be compared with; give at least two",
                "batch_sizes: 8 stands there twice; keep one",
                "baseline_seeds: with batch_sizes every size has the same seeds",
                "set.batch: is for the study's own keys",
            ],
        ),
        (
            ONE_SEED + "interventions: [no-dropout]\nset: {optimizer: {learning_rat: 1}, evaluation: {evry: 1}}",
            [
                r"optimizer.learning_rat: unknown key; did you mean optimizer.learning_rate\?",
                r"evaluation.evry: unknown key; did you mean evaluation.every\?",
            ],
        ),
        (
            ONE_SEED + "interventions: [no-dropout]\nset: {evaluation: {every: null}}",
            ["evaluation.every: must not be null: a study compares validation losses"],
        ),
        (
            ONE_SEED + "interventions: [no-dropout]\nset: {hub: {repo: me/mine}}",
            ["hub.repo: must be null in a study, whose runs would replace each other there"],
        ),
        (
            ONE_SEED + "interventions: [no-dropout, qkv-bias]\nset: {model: {dropout: 0}}",
            ["no-dropout: trains the same as baseline; leave one of them out"],
        ),
    ],
)
def test_every_mistake_is_told_at_once(configs: Configs, text: str, expected: list[str]) -> None:
    found = problems(configs, text)
    assert len(found) == len(expected), found
    for problem, pattern in zip(found, expected, strict=True):
        assert re.match(pattern, problem), problem


def test_a_fault_of_one_row_names_it(configs: Configs, monkeypatch: pytest.MonkeyPatch) -> None:
    """An intervention whose values do not go with the base, and one that takes the seeds for itself."""
    known: dict[str, Any] = {
        "wide": {"set": {"model": {"emb_dim": 50}}},
        "lucky": {"set": {"seeds": {"weights": 7}}},
    }
    path = configs.write(yaml.safe_dump(known), "interventions")
    for module in ("training.config_file", "training.laboratory.study_file"):
        monkeypatch.setattr(f"{module}.INTERVENTIONS", path)
    found = problems(configs, ONE_SEED + "interventions: [wide, lucky]")
    assert len(found) == 2
    assert re.match(r"wide: model.emb_dim: .*50", found[0]), found
    assert found[1] == "lucky: an intervention sets the seeds, which are the study's to choose"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("forruner", r"forruner: there is no such study in configs/studies/; did you mean forerunner\?"),
        ("a/b.yaml", "a/b.yaml: there is no such file; give a YAML file or the name of a study"),
        ("x" * 5000, "there is no such study"),
    ],
)
def test_a_study_that_is_not_there(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_study(name)


def test_a_base_that_is_not_there(configs: Configs) -> None:
    path = configs.write(f"base: nowhere\ninterventions: [no-dropout]\n{ONE_SEED}", "mine")
    with pytest.raises(ConfigError, match=r"mine.yaml: .*base: nowhere: there is no configs/nowhere.yaml"):
        load_study(str(path))


def test_batch_sizes_that_cannot_have_equal_tokens_are_refused(configs: Configs) -> None:
    """163,840 tokens are 160 sequences, 162 in whole steps of 9; the 161 of 7 are within a hundredth."""
    found = problems(configs, ONE_SEED + "batch_sizes: [16, 1000, 9, 7]\nset: {data: {train_tokens: 163_840}}")
    assert [problem.partition(", and")[0] for problem in found] == [
        "batch-1000: its whole steps make 1,024,000 tokens, those of other sizes 163,840",
        "batch-9: its whole steps make 165,888 tokens, those of other sizes 163,840",
    ]
    load_study(write_study(configs, ONE_SEED + "batch_sizes: [16, 1000]\nset: {data: {train_tokens: -1}}"))


@pytest.mark.parametrize("name", ["..", ".", "a\nb", "\x1b[31mred", "a|b", "<b>", "-x"])
def test_a_name_that_leaves_its_folder_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / f"{name}.yaml"
    path.write_text(ONE_SEED)
    with pytest.raises(ConfigError, match=r"the study's name, .* must be a name of letters, digits"):
        load_study(str(path))
