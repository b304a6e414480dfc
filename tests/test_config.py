"""The run config: what a person means, who has precedence, and every mistake told in one message."""

import json
import re
import socket
import time
from typing import Any

import pytest
from conftest import Workplace
from small_configs import LEAST, Configs

from training.config import RunConfig
from training.config_file import load_run_config
from training.errors import UserError
from training.optimizer import learning_rate_at


def value_of(config: RunConfig, key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def section(key: str, text: str) -> str:
    """The YAML that sets a dotted key; the keys that are needed lie in sections of their own."""
    for part in reversed(key.split(".")):
        text = f"{{{part}: {text}}}"
    return text[1:-1]


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("optimizer.learning_rate", "1e-3", 0.001),
        ("optimizer.learning_rate", "6E-4", 0.0006),
        ("optimizer.learning_rate", "1", 1.0),
        ("optimizer.betas", "[9e-1, 0.95]", (0.9, 0.95)),
        ("optimizer.betas", "[0, 0.999]", (0.0, 0.999)),
        ("optimizer.weight_decay", "0", 0.0),
        ("evaluation.every", "1e3", 1000),
        ("evaluation.tokens", "1_048_576", 1_048_576),
        ("evaluation.tokens", "3.0e6", 3_000_000),
        ("checkpoint.keep", "2.0", 2),
        ("seeds.weights", "010", 10),
        ("seeds.weights", str(2**63 - 1), 2**63 - 1),
    ],
)
def test_numbers_are_what_a_person_means(configs: Configs, key: str, text: str, value: Any) -> None:
    """R64: in lists too, and through --set."""
    for config in (
        configs.load(section(key, text)),
        configs.load("", f"{key}={text}"),
        configs.load("", f"{key} = {text}"),
    ):
        read = value_of(config, key)
        assert read == value
        assert type(read) is type(value)


@pytest.mark.parametrize(
    ("text", "overrides", "problem"),
    [
        ("seeds: {weights: 1}\nseeds: {training: 1}", (), "run.yaml, line 4: the key seeds stands twice (line 3)"),
        ("optimizer: {eps: 1e-8, eps: 1e-9}", (), "run.yaml, line 3: the key eps stands twice (line 3)"),
        ("", ("optimizer={eps: 1e-8, eps: 1e-9}",), "--set optimizer={eps: 1e-8, eps: 1e-9}, line 1: the key eps"),
    ],
)
def test_a_key_that_stands_twice(configs: Configs, text: str, overrides: tuple[str, ...], problem: str) -> None:
    """R65."""
    with pytest.raises(UserError, match=re.escape(problem)):
        configs.load(text, *overrides)


def test_a_merge_key_takes_a_section_over(configs: Configs) -> None:
    """R65: overridden once, which is no duplicate."""
    config = configs.load("model: {emb_dim: 48, n_heads: 4}\nseeds: &seeds {weights: 1}\n")
    merged = configs.load("seeds: &seeds {weights: 1, training: 2}\n", "seeds={training: 5}")
    assert (config.seeds.weights, config.seeds.training) == (1, 42)
    assert (merged.seeds.weights, merged.seeds.training) == (1, 5)


MISPLACED = """\
learning_rate: 1e-3
optimiser: {learning_rate: 1e-3}
micro_batch_size: 12
colour: blue
optimizer: {learning-rate: 1e-3, learning_rte: 1e-3, dropout: 0.1}
model: {vocabsize: 100, n_head: 12, batch: {world_size: 8}}
schedule: {name: constant, warmup_percent: 5}
name: other
overrides: [seeds.weights=1]
"""

REPOSITORY_RULE = (
    "as a repository on the Hub is called (letters, digits, '_', '-' and '.', no '--', '..' or '.git', 96 characters "
    "at most)"
)


def test_misspelt_and_misplaced_keys_are_told_all_at_once(configs: Configs) -> None:
    """R66: in one message, each with the nearest valid key; so are values that are wrong besides."""
    problems = configs.problems(LEAST + MISPLACED + "evaluation: {every: -1}\ninterventions: [no-dropuot]\n")
    assert sorted(problems) == sorted(
        [
            "learning_rate: unknown key; did you mean optimizer.learning_rate?",
            "optimiser: unknown key; did you mean optimizer?",
            "micro_batch_size: unknown key; did you mean batch.microbatch?",
            "colour: unknown key; the keys here are base, batch, checkpoint, data, evaluation, hub, init_from, "
            "interventions, loss, model, optimizer, precision, reproducibility, schedule, seeds, tracking",
            "optimizer.learning-rate: unknown key; did you mean optimizer.learning_rate?",
            "optimizer.learning_rte: unknown key; did you mean optimizer.learning_rate?",
            "optimizer.dropout: unknown key; did you mean model.dropout?",
            "model.vocabsize: unknown key; did you mean model.vocab_size?",
            "model.n_head: unknown key; did you mean model.n_heads?",
            "model.batch: unknown key; did you mean batch?",
            "schedule.warmup_percent: unknown key; it belongs to schedule.name cosine",
            "name: unknown key; the run's name is that of its file",
            "overrides: unknown key; the run's name is that of its file",
            "evaluation.every: must be greater than or equal to 0, got -1",
            "interventions: no-dropuot is not one; did you mean no-dropout?",
        ]
    )


def test_a_problem_behind_another_is_told_with_it(configs: Configs) -> None:
    """R66: what only shows once other keys are valid, but not what an invalid key's default would do."""
    problems = configs.problems(
        "data: {dataset: ../x, train_tokens: 0, validation_tokens: 0}\n"
        "model: {n_heads: abc, emb_dim: 770, context_length: 64, dropout: 1}\n"
        "batch: {world_size: 0}\nschedule: {name: cosin, warmup_percent: 200}\nhub: {repo: ./out, every: -1}\n"
        "evaluation: {tokens: 63}\n"
    )
    assert sorted(problems) == [
        "batch.accumulation: is needed",
        "batch.microbatch: is needed",
        "batch.world_size: must be greater than or equal to 1, got 0",
        "data.dataset: must be a name of letters, digits, '.', '_' and '-' that stays in its folder, got '../x'",
        "data.train_tokens: must be positive, or -1 for all there is, got 0",
        "data.validation_tokens: must be positive, or -1 for all there is, got 0",
        "evaluation.tokens: must hold a sequence of model.context_length 64, got 63",
        "hub.every: must be greater than or equal to 0, got -1",
        "hub.repo: must be owner/name, " + REPOSITORY_RULE + ", got './out'",
        "model.dropout: must be a number from 0 to below 1, got 1.0",
        "model.n_heads: must be a valid integer, got 'abc'",
        "schedule.name: must be one of 'constant', 'cosine', got 'cosin'",
        "schedule.warmup_percent: must be less than 100, got 200",
    ]


PROBLEMS = {
    "model.n_heads=7": "model.emb_dim: must be divisible by n_heads (7), got 768",
    "model.emb_dim=770": "model.emb_dim: must be divisible by n_heads (12), got 770",
    "model.dropout=1": "model.dropout: must be a number from 0 to below 1, got 1.0",
    "model.init=other": "model.init: must be 'pytorch' or 'gpt2', got 'other'",
    "data.train_tokens=0": "data.train_tokens: must be positive, or -1 for all there is, got 0",
    "data.epochs=0": "data.epochs: must be greater than or equal to 1, got 0",
    "data.validation_tokens=9": "data.validation_tokens: must hold a sequence of model.context_length 1024, got 9",
    "batch.world_size=abc": "batch.world_size: must be a valid integer, got 'abc'",
    "precision.amp=fp17": "precision.amp: must be 'off', 'bf16' or 'fp16', got 'fp17'",
    "optimizer.betas=[0.9]": "optimizer.betas.1: is needed",
    "optimizer.lerning_rate=1": "optimizer.lerning_rate: unknown key; did you mean optimizer.learning_rate?",
    "schedule.name=cosin": "schedule.name: must be one of 'constant', 'cosine', got 'cosin'",
    "loss=5": "loss: must be a section with keys, got 5",
    "seeds.weights=-1": "seeds.weights: must be greater than or equal to 0, got -1",
    "evaluation.tokens=9": "evaluation.tokens: must hold a sequence of model.context_length 1024, got 9",
    "checkpoint.keep=0": "checkpoint.keep: must be greater than or equal to 1, got 0",
    "tracking.trackers=[wandb, tensorbord]": (
        "tracking.trackers.1: must be 'tensorboard', 'trackio' or 'wandb', got 'tensorbord'"
    ),
    "hub.repo=datasets/u/x": f"hub.repo: must be owner/name, {REPOSITORY_RULE}, got 'datasets/u/x'",
    "reproducibility=exact": "reproducibility: must be 'rounding' or 'bitwise', got 'exact'",
    "interventions=[no-dropuot]": "interventions: no-dropuot is not one; did you mean no-dropout?",
}


@pytest.mark.parametrize("one", PROBLEMS)
def test_no_problem_hides_one_of_another_section(configs: Configs, one: str) -> None:
    """R66: in whichever pass of the checks each of two problems shows."""
    assert configs.problems(LEAST, one) == [PROBLEMS[one]]
    for other, problem in PROBLEMS.items():
        if one.partition(".")[0] != other.partition(".")[0]:
            assert sorted(configs.problems(LEAST, one, other)) == sorted([PROBLEMS[one], problem])


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_command_refuses_before_it_does_anything(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch, processes: int
) -> None:
    """R66: status 2 and one message from one process, before any download (the Hub is ours) or any folder."""
    config = workplace.write_config(
        data={"dataset": "owner/tokens"}, optimizer={"learning-rate": 1e-3}, model={"learning_rate": 1e-3}
    )
    with socket.create_server(("127.0.0.1", 0)) as hub:
        hub.settimeout(0)
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{hub.getsockname()[1]}")
        run = workplace.train(config, "--set", "seeds.wieghts=1", processes=processes)
        with pytest.raises(BlockingIOError):
            hub.accept()
    message = (
        f"error: {config} with --set has 3 problems:\n"
        "  - model.learning_rate: unknown key; did you mean optimizer.learning_rate?\n"
        "  - optimizer.learning-rate: unknown key; did you mean optimizer.learning_rate?\n"
        "  - seeds.wieghts: unknown key; did you mean seeds.weights?\n"
    )
    if processes == 1:
        assert (run.status, run.errors) == (2, message)
    else:
        assert run.status == 1  # torchrun's own
        assert run.errors.count(message) == 1
        assert run.errors.count("learning-rate") == 1
    assert run.output == ""
    assert not run.folder.exists()
    assert not (workplace.datasets / "owner").exists()


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("precision.amp", "off", "off"),
        ("precision.amp", "'off'", "off"),
        ("data.dataset", "no", "no"),
        ("data.dataset", "On", "On"),
        ("data.tokenizer", "yes", "yes"),
        ("init_from", "off", "off"),
        ("model.qkv_bias", "yes", True),
        ("model.qkv_bias", "ON", True),
        ("model.tie_weights", "no", False),
        ("data.shuffle", "Off", False),
        ("hub.private", "true", True),
    ],
)
def test_bare_words_are_text_or_a_boolean_as_the_key_wants(configs: Configs, key: str, text: str, value: Any) -> None:
    """R67."""
    read = value_of(configs.load("", f"{key}={text}"), key)
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    ("key", "text", "problem"),
    [
        ("model.qkv_bias", "'yes'", "must be true or false, got 'yes'"),
        ("model.qkv_bias", "'false'", "must be true or false, got 'false'"),
        ("data.shuffle", "0", "must be true or false, got 0"),
        ("hub.private", "null", "must be true or false, got null"),
        ("data.epochs", "yes", "must be a valid integer, got 'yes'"),
        ("data.epochs", "true", "must be a valid integer, got true"),
        ("evaluation.every", "off", "must be a valid integer, got 'off'"),
        ("optimizer.clip_norm", "no", "must be a valid number, got 'no'"),
        ("precision.amp", "no", "must be 'off', 'bf16' or 'fp16', got 'no'"),
        ("precision.amp", "false", "must be 'off', 'bf16' or 'fp16', got false"),
        ("data.dataset", "true", "must be text (quote a number that is meant as text), got true"),
        ("data.dataset", "2024", "must be text (quote a number that is meant as text), got 2024"),
    ],
)
def test_words_that_are_neither(configs: Configs, key: str, text: str, problem: str) -> None:
    """R67: no truthiness, and True is not 1."""
    assert configs.problems(LEAST, f"{key}={text}") == [f"{key}: {problem}"]


def test_warm_up(configs: Configs) -> None:
    """R70: two of seven steps, then down to a tenth; the warm-up of a run is always shorter than the run."""
    schedule = "optimizer: {learning_rate: 1}\nschedule: {name: cosine, warmup_percent: 29, final_fraction: 0.1}\n"
    config = configs.load(schedule)
    assert config.warmup_steps(7) == 2
    rates = [learning_rate_at(step, config, 7) for step in range(7)]
    assert rates == pytest.approx([1e-5, 0.5, 1, 0.9141, 0.6891, 0.4109, 0.1859], abs=1e-4)
    without = configs.load(schedule, "schedule.warmup_percent=0")
    assert learning_rate_at(0, without, 7) == 1
    longest = configs.load(schedule, "schedule.warmup_percent=99.99")
    assert all(longest.warmup_steps(steps) < steps for steps in range(1, 2000))
    assert configs.problems(LEAST + schedule, "schedule.warmup_percent=100") == [
        "schedule.warmup_percent: must be less than 100, got 100"
    ]


@pytest.mark.parametrize(
    ("percent", "steps", "warmup"),
    [
        ("5", 33_165, 1_658),
        ("5", 46_957, 2_347),
        ("5", 11_162, 558),
        ("5", 4, 0),
        ("0.57", 10_000, 57),
        ("1e-3", 99_999, 0),
    ],
)
def test_warm_up_steps_are_exact(configs: Configs, percent: str, steps: int, warmup: int) -> None:
    """The percentage as it is written: 10,000 x 0.57 / 100 is 56.99... in floats."""
    config = configs.load(f"schedule: {{name: cosine, warmup_percent: {percent}}}")
    assert config.warmup_steps(steps) == warmup
    assert configs.load().warmup_steps(steps) == 0


def test_defaults_are_the_baseline(configs: Configs) -> None:
    config = configs.load()
    assert config.name == "run"
    assert (config.model.n_layers, config.model.dropout) == (12, 0.1)
    assert (config.optimizer.learning_rate, config.schedule.name) == (4e-4, "constant")
    assert config.warmup_steps(100) == 0
    assert (config.global_batch, config.tokens_per_step, config.total_steps) == (16, 16_384, 1)
    assert config.interventions == config.overrides == ()


@pytest.mark.parametrize(
    ("data", "steps"),
    [
        ("train_tokens: 1", 1),
        ("train_tokens: 16384", 1),
        ("train_tokens: 16385", 2),
        ("train_tokens: 16385, epochs: 3", 6),
        ("train_tokens: -1", None),
        ("train_tokens: -1, epochs: 3", None),
        ("train_tokens: 1e15", 10**15 // 16_384),
    ],
)
def test_total_steps(configs: Configs, data: str, steps: int | None) -> None:
    assert configs.load("", f"data={{{data}}}").total_steps == steps


@pytest.mark.parametrize("name", ["model", "data", "batch", "schedule", "optimizer", "hub"])
def test_a_section_that_is_no_section(configs: Configs, name: str) -> None:
    """One problem, not one for each key that is missing in it."""
    for text in ("5", "'text'", "true", "[1, 2]", "null", "''"):
        assert configs.problems(LEAST, f"{name}={text}") == [f"{name}: must be a section with keys, got {text}"]


def test_what_is_needed(configs: Configs) -> None:
    assert configs.problems("seeds: {weights: 1}\n") == ["data: is needed", "batch: is needed"]
    assert configs.problems("data: {}\nbatch: {microbatch: 1}\nschedule: {}\n") == [
        "data.dataset: is needed",
        "batch.world_size: is needed",
        "batch.accumulation: is needed",
        "schedule.name: is needed",
    ]


COUNTS = ["batch.world_size", "batch.microbatch", "batch.accumulation", "data.epochs", "checkpoint.keep"]
COUNTS += ["evaluation.tokens", "model.vocab_size", "model.context_length", "model.emb_dim", "model.n_heads"]
COUNTS += ["model.n_layers"]
FROM_ZERO = ["data.train_start", "data.validation_start", "seeds.weights", "seeds.training", "evaluation.every"]
FROM_ZERO += ["checkpoint.every", "hub.every"]
OR_ALL = ["data.train_tokens", "data.validation_tokens"]
NUMBERS = ["optimizer.learning_rate", "optimizer.weight_decay", "optimizer.eps", "optimizer.clip_norm", "model.dropout"]
FLAGS = ["model.qkv_bias", "model.tie_weights", "data.shuffle", "hub.private"]
CHOICES = ["model.init", "precision.amp", "precision.matmul", "precision.gradients", "optimizer.name"]
CHOICES += ["optimizer.decay", "schedule.name", "loss.reduction", "reproducibility"]
TEXTS = ["data.dataset", "data.revision", "data.tokenizer", "tracking.space", "hub.repo", "hub.licence", "init_from"]
MAY_BE_NULL = {
    "evaluation.tokens",
    "evaluation.every",
    "checkpoint.every",
    "hub.every",
    "optimizer.clip_norm",
    *TEXTS[1:],
}

NO_NUMBERS = ["true", "abc", "'1'", "[1]", "{a: 1}", ".inf", "-.inf", ".nan", "1e400", "''", "off", "null"]
BAD_VALUES = (
    [(key, [*NO_NUMBERS, "1.5", "0", "-1"]) for key in COUNTS]
    + [(key, [*NO_NUMBERS, "1.5", "-1"]) for key in FROM_ZERO]
    + [(key, [*NO_NUMBERS, "1.5", "0", "-2"]) for key in OR_ALL]
    + [(key, [*NO_NUMBERS, "-1"]) for key in NUMBERS]
    + [(key, ["0", "1", "'true'", "'yes'", "''", "null", "[true]", "maybe"]) for key in FLAGS]
    + [(key, ["true", "1", "null", "''", "other", "[off]", "{a: 1}"]) for key in CHOICES]
    + [(key, ["true", "1", "1.5", "''", "[a]", "{a: b}", "null"]) for key in TEXTS]
    + [("seeds.weights", [str(2**63)]), ("optimizer.learning_rate", ["0", "1e-400"]), ("optimizer.clip_norm", ["0"])]
    + [("model.dropout", ["1"]), ("model.emb_dim", ["770"]), ("optimizer.eps", ["0", "1e-39"])]
    + [("optimizer.betas", ["0.9", "null", "true", "'ab'", "{a: 1, b: 2}", "[0.9, 0.95, 0.99]"])]
)


@pytest.mark.parametrize(("key", "texts"), BAD_VALUES)
def test_a_bad_value_is_one_problem_with_key_rule_and_value(configs: Configs, key: str, texts: list[str]) -> None:
    """Negative, zero, not whole, not finite, of another type: each by its key, in words without Python or pydantic."""
    for text in texts:
        if text == "null" and key in MAY_BE_NULL:
            assert value_of(configs.load("", f"{key}={text}"), key) is None
            continue
        [problem] = configs.problems(LEAST, f"{key}={text}")
        assert re.fullmatch(rf"{re.escape(key)}: (must be|must not be|must have) [^\n]+, got [^\n]+", problem), problem
        for foreign in ("Input", "None", "True", "Tuple", "array", "object", "String"):
            assert foreign not in problem


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        ("[1, 0]", ["optimizer.betas.0: must be less than 1, got 1"]),
        ("[-0.1, 2]", ["betas.0: must be greater than or equal to 0, got -0.1", "betas.1: must be less than 1, got 2"]),
        ("['0.9', true]", ["betas.0: must be a valid number, got '0.9'", "betas.1: must be a valid number, got true"]),
        ("[0.9]", ["optimizer.betas.1: is needed"]),
        ("[0.9, 1e400]", ["optimizer.betas.1: must be a finite number, got Infinity"]),
        ("[0.9, 0.95, 0.99]", ["optimizer.betas: must have no more than 2 items, got [0.9, 0.95, 0.99]"]),
    ],
)
def test_bad_items_of_a_list(configs: Configs, text: str, problems: list[str]) -> None:
    found = configs.problems(LEAST, f"optimizer.betas={text}")
    assert len(found) == len(problems)
    assert all(one.endswith(end) for one, end in zip(found, problems, strict=True)), found


@pytest.mark.parametrize("text", ["'" + "x" * 5000 + "'", "9" * 400, "9" * 5000, "[" + "1, " * 5000 + "1]"])
def test_a_huge_value_is_told_in_short(configs: Configs, text: str) -> None:
    [problem] = configs.problems(LEAST, f"optimizer.learning_rate={text}")
    assert len(problem) < 250


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["model.emb_dim=50", "model.n_heads=4"], "model.emb_dim: must be divisible by n_heads (4), got 50"),
        (["evaluation.tokens=1023"], "evaluation.tokens: must hold a sequence of model.context_length 1024, got 1023"),
        (
            ["data.validation_tokens=9"],
            "data.validation_tokens: must hold a sequence of model.context_length 1024, got 9",
        ),
        (["hub.every=10"], "hub.every: must be null without a repo to upload to"),
        (["tracking.trackers=[wandb, wandb]"], "tracking.trackers: must name each once, got wandb, wandb"),
        (
            ["reproducibility=bitwise", "precision.gradients=bf16"],
            "precision.gradients: must be float32 in bitwise mode, whose exchange is of integers",
        ),
        (["tracking.space=a/b"], "tracking.space: must be null without trackio among the trackers"),
    ],
)
def test_impossible_combinations(configs: Configs, overrides: list[str], problem: str) -> None:
    assert configs.problems(LEAST, *overrides) == [problem]


@pytest.mark.parametrize("name", ["./out", "a/b/c", "datasets/u/x", "datasets/x", "u/x--y", "", "x", "u/x.git", "~/x"])
def test_r90_a_name_that_is_no_repository_is_refused(configs: Configs, name: str) -> None:
    """A path in particular, and with the key."""
    [problem] = configs.problems(f"{LEAST}hub: {{repo: '{name}'}}\n")
    assert problem.startswith("hub.repo: must ")
    assert configs.load("", "hub.repo=A_.b/c-d.e").hub.repo == "A_.b/c-d.e"


def test_validation_that_never_happens_needs_no_sequence(configs: Configs) -> None:
    config = configs.load("", "evaluation.every=null", "data.validation_tokens=9", "evaluation.tokens=9")
    assert config.evaluation.every is None


@pytest.mark.parametrize(
    "name",
    ["../x", "/x", "a/../b", "a/b/c", "..", ".", "a/..", "../a/b", ".a", "a b", "a//b", "a\\b", "~", "a\n", "\u00fc"],
)
def test_a_dataset_cannot_leave_its_folder(configs: Configs, name: str) -> None:
    [problem] = configs.problems(LEAST, f"data.dataset={json.dumps(name)}")
    assert problem.startswith(
        "data.dataset: must be a name of letters, digits, '.', '_' and '-' that stays in its folder"
    )


@pytest.mark.parametrize(
    "text",
    [
        "x: " + "[" * 190 + "]" * 190,
        "model: " + "{a: " * 190 + "1" + "}" * 190,
        "optimizer: {betas: " + "[" * 190 + "]" * 190 + "}",
        "seeds: {weights: " + "9" * 100_000 + "}",
        "optimizer: {learning_rate: 1" + "0" * 100_000 + "e-100000}",
        "data: &a {dataset: *a}",
        "model: &a {<<: *a}",
        "\n".join(f"key{number}: {number}" for number in range(1000)),
    ],
)
def test_hostile_configs_are_refused_at_once(configs: Configs, text: str) -> None:
    started = time.monotonic()
    with pytest.raises(UserError, match=r"^[^\n]*run.yaml"):
        load_run_config(str(configs.write(text)))
    assert time.monotonic() - started < 5
