"""From a trained run to transformers' format and back, through the commands, and what else an import makes a run of."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import REPOSITORY, Workplace
from fake_hub import FakeHub
from safetensors.torch import load_file, save_file
from small_exports import SHAPE, noisy_model, run_config, without_transformers, write_tokenizer
from test_foreign_model import THEIR_CONFIG, forerunners, write_gpt2

from model.generation import generate
from model.gpt import GPT, GPTConfig
from training.checkpoint_evaluation import evaluate_checkpoint
from training.config_file import load_run_config
from training.data import tokenizer_file
from training.errors import UserError
from training.exchange.export import export_model
from training.exchange.gpt2_format import config_to_gpt2, to_gpt2
from training.exchange.import_model import LIKE, import_model, imported_config
from training.lookup import find_checkpoint_and_config, find_tokenizer
from training.restore import load_model
from training.run_folder import open_run
from training.tokenizer import load_tokenizer, train_tokenizer

PROMPT = "Every effort"
STEP = "step_00000004"


def isobatch(
    *arguments: object, status: int = 0, environment: dict[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    """Runs the command in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "training.cli", *map(str, arguments)],
        cwd=REPOSITORY,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", **(environment or {})},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status, done.stderr
    return done


class Round:
    """A run of four steps on bytes; its export; that export imported as the run `back`; and the export of that."""

    def __init__(self, folder: Path) -> None:
        self.place = Workplace(folder)
        self.place.write_tokens()
        train_tokenizer([PROMPT], 257).save(str(self.place.datasets / "data" / "tokenizer.json"))
        self.config = self.place.write_config("run", data={"train_tokens": 4 * 512}, model={"dropout": 0.1})
        self.place.train_here(self.config)
        self.run, self.back = self.place.checkpoints / "run", self.place.checkpoints / "back"
        datasets = ("--datasets", self.place.datasets)
        # Where the repository is on the path, with its folder `datasets`.
        on_path = {"PYTHONPATH": str(REPOSITORY)}
        self.exported = isobatch("export", self.run, "--output", folder / "tiny-export", *datasets, environment=on_path)
        like = ("--like", self.config, "--output", self.place.checkpoints, *datasets)
        self.imported = isobatch("import", folder / "tiny-export", "--name", "back", *like)


@pytest.fixture(scope="module")
def round_trip(tmp_path_factory: pytest.TempPathFactory) -> Round:
    return Round(tmp_path_factory.mktemp("round"))


@pytest.mark.slow
def test_the_command_exports_and_says_how_it_was_checked(round_trip: Round) -> None:
    """By transformers, which must not take the repository's folder `datasets` for Hugging Face's library."""
    folder = round_trip.place.folder / "tiny-export"
    files, check = round_trip.exported.stdout.splitlines()
    assert (
        files
        == f"{folder}: config.json, generation_config.json, model.safetensors, tokenizer.json, tokenizer_config.json"
    )
    assert check.startswith("loaded with transformers ")
    assert "no missing, unexpected or mismatched keys" in check
    assert "20 greedy tokens equal, the tokenizer's ids equal" in check
    assert round_trip.exported.stderr == "the export is written and is now being checked\n"
    assert sorted(path.name for path in folder.parent.iterdir() if path.name.startswith(".")) == []


@pytest.mark.slow
def test_an_import_is_a_run_that_says_where_it_is_from(round_trip: Round) -> None:
    source = round_trip.place.folder / "tiny-export"
    said = f"{round_trip.back}: 110,688 parameters, transformers' GPT-2 format, from {source}\n"
    assert round_trip.imported.stdout == said
    names = {path.name for path in round_trip.back.iterdir()}
    assert names == {"config.yaml", "metrics.jsonl", "step_00000000", "latest", "tokenizer.json"}
    (event,) = [json.loads(line) for line in (round_trip.back / "metrics.jsonl").read_text().splitlines()]
    assert (event["event"], event["step"], event["source"], event["revision"]) == ("import", 0, str(source), None)
    assert event["files"].keys() == {path.name for path in source.iterdir()}
    config = find_checkpoint_and_config(str(round_trip.back))[1]
    assert config.data.tokenizer == str(round_trip.back / "tokenizer.json")
    assert config.model == find_checkpoint_and_config(str(round_trip.run))[1].model


@pytest.mark.slow
def test_an_import_evaluates_and_samples_as_the_run_does(round_trip: Round) -> None:
    datasets = round_trip.place.datasets
    losses = [
        evaluate_checkpoint(*find_checkpoint_and_config(str(run)), datasets).evaluated.loss
        for run in (round_trip.run, round_trip.back)
    ]
    assert losses[0] == losses[1]
    options = (PROMPT, "--temperature", 0, "--tokens", 20, "--datasets", datasets.parent / "none")
    text = isobatch("sample", round_trip.back, *options).stdout
    tokenizer = load_tokenizer(round_trip.back / "tokenizer.json")
    ids = tokenizer.encode(PROMPT).ids
    assert text == tokenizer.decode(ids + generate(load_model(round_trip.run / STEP), ids, 20)) + "\n"


@pytest.mark.slow
def test_export_import_export_gives_the_same_bytes(
    round_trip: Round, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_transformers(tmp_path, monkeypatch)
    checkpoint, config = find_checkpoint_and_config(str(round_trip.back))
    folder = export_model(checkpoint, config, tmp_path / "out", tokenizer=find_tokenizer(config, tmp_path)).folder
    for path in (round_trip.place.folder / "tiny-export").iterdir():
        assert path.read_bytes() == (folder / path.name).read_bytes(), path.name


@pytest.mark.slow
def test_a_run_starts_from_an_import(round_trip: Round) -> None:
    """init_from: the first loss is the imported model's, not that of fresh weights."""
    back = round_trip.back / "latest"
    sections: dict[str, Any] = {"data": {"train_tokens": 3 * 512}, "init_from": str(back)}
    config = round_trip.place.write_config("further", model={"dropout": 0.0}, **sections)
    run = round_trip.place.train_here(config)
    assert len(run.losses) == 3
    fresh = round_trip.place.train_here(round_trip.place.write_config("fresh", data={"train_tokens": 512}))
    assert run.losses[0] < fresh.losses[0] - 0.05
    with pytest.raises(UserError, match="holds a run already"):
        open_run(round_trip.back, find_checkpoint_and_config(str(back))[1], None, overwrite=False)


def import_here(source: object, tmp_path: Path, **options: Any) -> str:
    """Imports in this process, into tmp_path/checkpoints, as the run `it` unless another name is given."""
    settings = {
        "name": "it",
        "like": None,
        "revision": None,
        "heads": None,
        "datasets": tmp_path / "datasets",
        **options,
    }
    return import_model(str(source), output=tmp_path / "checkpoints", **settings)


def test_an_import_without_like_gets_the_defaults(tmp_path: Path) -> None:
    said = import_here(write_gpt2(tmp_path / "source"), tmp_path)
    assert said.endswith("; it has no tokenizer")
    checkpoint, config = find_checkpoint_and_config(str(tmp_path / "checkpoints" / "it"))
    assert checkpoint.name == "step_00000000"
    assert config.model == SHAPE
    assert config.data.dataset == "gpjt/fineweb-gpt2-tokens"
    assert (config.data.validation_start, config.data.validation_tokens) == (50_000_000, 19_660_800)
    assert config.data.tokenizer is None
    assert config.precision.amp == "off", "a CPU can evaluate it"
    import_here(tmp_path / "source", tmp_path, name="asked", like=LIKE)
    assert find_checkpoint_and_config(str(tmp_path / "checkpoints" / "asked"))[1].precision.amp == "fp16"
    assert len(load_file(checkpoint / "optimizer.safetensors")) == 0


def test_a_folder_may_have_any_name(tmp_path: Path) -> None:
    """It stands in config.yaml, in one comment."""
    import_here(write_gpt2(tmp_path / "nl\nname: [evil"), tmp_path)
    text = (tmp_path / "checkpoints" / "it" / "config.yaml").read_text()
    assert text.startswith("# An imported model: ")
    assert "nl\\nname: [evil. The other" in text.splitlines()[0]
    assert find_checkpoint_and_config(str(tmp_path / "checkpoints" / "it"))[1].model == SHAPE


def test_the_forerunners_models_become_runs(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    save_file(forerunners(SHAPE), source / "model.safetensors")
    (source / "model.json").write_text(json.dumps({**THEIR_CONFIG, "qkv_bias": False}))
    import_here(source, tmp_path)
    model = load_model(tmp_path / "checkpoints" / "it" / "step_00000000")
    ids = torch.arange(32).view(1, 32)
    with torch.no_grad():
        assert torch.equal(model(ids), noisy_model(SHAPE).eval()(ids))


def test_what_cannot_be_imported_leaves_nothing(tmp_path: Path) -> None:
    source = write_gpt2(tmp_path / "source")
    mistakes: tuple[tuple[dict[str, Any], str], ...] = (
        ({"name": "../it"}, r"--name '\.\./it': must be a name of letters"),
        ({"revision": "main"}, "--revision main: is for a model on the Hub"),
        ({"like": "nix"}, "nix: there is no configs/nix.yaml"),
        ({"heads": 8}, "--heads is 8"),
        ({"source": tmp_path / "nix"}, r"nix': there is no such folder; give one that holds model\.safetensors"),
        ({"source": "gpt2"}, r"'gpt2': there is no such folder.*owner/name, such as openai-community/gpt2"),
        ({"source": "a/b/c"}, "'a/b/c': there is no such folder"),
        ({"source": "a/b--c"}, "'a/b--c': there is no such folder"),
        ({"source": "../a"}, "there is no such folder"),
        ({"source": ""}, "'': there is no such folder"),
    )
    for options, said in mistakes:
        with pytest.raises(UserError, match=said):
            import_here(options.pop("source", source), tmp_path, **options)
    assert not (tmp_path / "checkpoints").exists()
    import_here(source, tmp_path)
    with pytest.raises(UserError, match="checkpoints/it: exists already; an import overwrites nothing"):
        import_here(source, tmp_path)
    write_gpt2(tmp_path / "wide", n_inner=7)
    with pytest.raises(UserError, match="wide: n_inner is 7"):
        import_here(tmp_path / "wide", tmp_path, name="wide")
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["it"]


def test_a_dataset_with_another_tokenizer_is_refused(tmp_path: Path) -> None:
    source = write_gpt2(tmp_path / "source")
    write_tokenizer(source)
    own = tmp_path / "datasets" / "gpjt" / "fineweb-gpt2-tokens"
    own.mkdir(parents=True)
    train_tokenizer(["other"], 257).save(str(own / "tokenizer.json"))
    with pytest.raises(
        UserError, match=r"--like 8xa100m40-baseline: its dataset has another tokenizer, .*tokens/token"
    ):
        import_here(source, tmp_path)
    (own / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
    import_here(source, tmp_path)


def test_a_tokenizer_may_be_named_as_seen_from_the_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a checkout can be moved with its imported runs; found whatever the current folder is."""
    monkeypatch.chdir(tmp_path)
    data = run_config(SHAPE, data={"dataset": "data", "tokenizer": "checkpoints/README.md"}).data
    assert tokenizer_file(data, tmp_path) == REPOSITORY / "checkpoints" / "README.md"
    run = imported_config(load_run_config(LIKE), "it", SHAPE, REPOSITORY / "checkpoints" / "it")
    assert run.data.tokenizer == "checkpoints/it/tokenizer.json"


@pytest.mark.slow
def test_a_model_on_the_hub(tmp_path: Path) -> None:
    """By name and revision, in parts, with the old tokenizer files; the pickle beside them is left where it is."""
    source = write_gpt2(tmp_path / "source")
    tokenizer = json.loads(write_tokenizer(tmp_path / "tokens").read_text())
    tensors = load_file(source / "model.safetensors")
    names = sorted(tensors)
    index: dict[str, str] = {}
    files = {"config.json": (source / "config.json").read_bytes(), "pytorch_model.bin": b"pickled"}
    for number, part in enumerate((names[:9], names[9:]), start=1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, tmp_path / file)
        files[file] = (tmp_path / file).read_bytes()
        index |= dict.fromkeys(part, file)
    files["model.safetensors.index.json"] = json.dumps({"weight_map": index}).encode()
    files["vocab.json"] = json.dumps(tokenizer["model"]["vocab"] | {"<|endoftext|>": 280}).encode()
    files["merges.txt"] = "\n".join(
        ["#version: 0.2", *(" ".join(pair) for pair in tokenizer["model"]["merges"])]
    ).encode()
    files["onnx/model.safetensors"] = b"of another kind"
    with FakeHub() as hub:
        sha = hub.add("model", "owner/gpt", files, "v1")
        hub.add("model", "owner/gpt", {"pytorch_model.bin": b"pickled"})
        environment = hub.environment(tmp_path / "home")
        output = ("--output", tmp_path / "checkpoints", "--datasets", tmp_path)
        done = isobatch("import", "owner/gpt", "--revision", "v1", "--name", "it", *output, environment=environment)
        assert "from owner/gpt\n" in done.stdout
        assert hub.downloads("pytorch_model.bin") == hub.downloads("onnx/model.safetensors") == 0
        refused = isobatch("import", "owner/gpt", "--name", "other", *output, status=2, environment=environment)
        assert (
            "model owner/gpt: the repository has no model.safetensors, only pytorch_model.bin; pickled"
            in refused.stderr
        )
        missing = isobatch("import", "owner/nix", "--name", "other", *output, status=2, environment=environment)
        assert "model owner/nix: the Hub has no such repository" in missing.stderr
    run = tmp_path / "checkpoints" / "it"
    event = json.loads((run / "metrics.jsonl").read_text())
    assert (event["source"], event["revision"]) == ("owner/gpt", sha)
    assert (
        load_tokenizer(run / "tokenizer.json").encode(PROMPT).ids
        == load_tokenizer(tmp_path / "tokens" / "tokenizer.json").encode(PROMPT).ids
    )
    ids = torch.arange(32).view(1, 32)
    with torch.no_grad():
        assert torch.equal(load_model(run / "step_00000000")(ids), noisy_model(SHAPE).eval()(ids))
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["it"]


@pytest.mark.slow
def test_gpt2_small_is_imported_within_three_gigabytes(tmp_path: Path) -> None:
    """124 million weights, 0.5 GB."""
    config = GPTConfig(qkv_bias=True, tie_weights=True)
    with torch.device("meta"):
        shapes = to_gpt2(dict(GPT(config).named_parameters()), config)
    (tmp_path / "gpt2").mkdir()
    save_file({name: torch.full(t.shape, 0.01) for name, t in shapes.items()}, tmp_path / "gpt2" / "model.safetensors")
    (tmp_path / "gpt2" / "config.json").write_text(json.dumps(config_to_gpt2(config, "float32", None)))
    command = [sys.executable, "-m", "training.cli", "import", str(tmp_path / "gpt2"), "--name", "gpt2"]
    command += ["--output", str(tmp_path / "checkpoints"), "--datasets", str(tmp_path)]
    with (tmp_path / "said").open("w") as said:
        process = subprocess.Popen(command, cwd=REPOSITORY, stdout=said)
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    assert "gpt2: 124,4" in (tmp_path / "said").read_text()
    assert usage.ru_maxrss * 1024 < 3e9
