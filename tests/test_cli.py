"""`isobatch` on runs that were trained by the real command: R105, and every mistake a user can make."""

import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import REPOSITORY, Finished, Workplace
from safetensors.torch import load_file, save
from small_exports import PADDED, TOKENS, save_noisy, write_tokenizer

from model.generation import generate
from training import cli
from training.restore import load_model
from training.tokenizer import END_OF_TEXT, load_tokenizer, train_tokenizer

PROMPT = "Every effort"
REPORT = ("report.md", "loss.png", "grad_norm.png", "learning_rate.png")


def isobatch(*arguments: object, status: int = 0) -> "subprocess.CompletedProcess[str]":
    """Runs the command in a process of its own, on the CPU, and checks its exit status."""
    done = subprocess.run(
        [sys.executable, "-m", "training.cli", *map(str, arguments)],
        cwd=REPOSITORY,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == status, done.stderr
    return done


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """Two runs of four steps, `tied` and `untied`, checkpoints and validations after 2 and 4; tokens are bytes."""
    place = Workplace(tmp_path_factory.mktemp("cli"))
    place.write_tokens()
    train_tokenizer([PROMPT], 257).save(str(place.datasets / "data" / "tokenizer.json"))
    for name in ("tied", "untied"):
        config = place.write_config(
            name,
            model={"tie_weights": name == "tied"},
            data={"train_tokens": 4 * 512},
            evaluation={"every": 2, "tokens": 320 if name == "tied" else None},
            checkpoint={"every": 2},
        )
        place.train_here(config)
    return place


def validations(run: Path) -> list[dict[str, Any]]:
    return Finished(0, "", "", run).of_kind("validation")


BOTH = pytest.mark.parametrize("name", ["tied", "untied"])


@pytest.mark.slow
@BOTH
def test_r105_evaluate_gives_the_runs_final_validation(place: Workplace, name: str) -> None:
    run = place.checkpoints / name
    recorded = validations(run)[-1]
    printed = json.loads(isobatch("evaluate", run, place.datasets, "--json").stdout)
    assert printed["checkpoint"] == str(run / "step_00000004")
    assert printed["target_tokens"] == recorded["target_tokens"] == 640
    assert printed["loss"] == pytest.approx(recorded["loss"], abs=1e-6)
    assert printed["bits_per_byte"] == pytest.approx(recorded["bits_per_byte"], abs=1e-6)
    assert printed["perplexity"] == pytest.approx(math.exp(recorded["loss"]))


@pytest.mark.slow
@BOTH
def test_r105_greedy_sample_is_the_models_each_time(place: Workplace, name: str) -> None:
    run = place.checkpoints / name
    arguments = ("sample", run, PROMPT, "--temperature", 0, "--tokens", 20, "--datasets", place.datasets)
    text = isobatch(*arguments, "--number", 2).stdout
    tokenizer = load_tokenizer(place.datasets / "data" / "tokenizer.json")
    ids = tokenizer.encode(PROMPT).ids
    greedy = tokenizer.decode(ids + generate(load_model(run / "step_00000004"), ids, 20))
    assert text == f"--- seed 0\n{greedy}\n--- seed 1\n{greedy}\n"


@pytest.mark.slow
def test_r105_report_is_written_again_as_training_wrote_it(place: Workplace) -> None:
    run = place.checkpoints / "untied"
    written = {file: (run / file).read_bytes() for file in REPORT}
    for file in REPORT:
        (run / file).unlink()
    assert isobatch("report", "untied", "--output", place.checkpoints).stdout == f"{run / 'report.md'}\n"
    assert {file: (run / file).read_bytes() for file in REPORT} == written


def test_a_damaged_latest_checkpoint_is_passed_over_aloud(place: Workplace, tmp_path: Path) -> None:
    copy = shutil.copytree(place.checkpoints / "tied", tmp_path / "run", symlinks=True)
    (copy / "step_00000004" / "model.safetensors").write_bytes(b"")
    done = isobatch("sample", copy, PROMPT, "--datasets", place.datasets, "--tokens", 1)
    assert done.stderr.startswith("passed over step_00000004: model.safetensors has 0 bytes")


def test_a_mistake_is_one_sentence_and_status_2(place: Workplace, tmp_path: Path) -> None:
    half = shutil.copytree(place.checkpoints / "tied" / "step_00000004", tmp_path / "half")
    rewrite_config(half, precision={"amp": "fp16", "matmul": "high"})
    done = isobatch("evaluate", half, place.datasets, status=2)
    sentence = (
        f"error: {half}: precision.amp: fp16 needs a GPU, on a CPU it is hundreds of times slower than bf16; "
        "evaluate it on a machine with one, or in another precision, "
        "--amp off\n"
    )
    assert (done.stdout, done.stderr) == ("", sentence)


def test_help_does_not_wait_for_heavy_imports() -> None:
    code = """
import sys
from training.cli import main
for verb in ([], *([name] for name in sys.argv[1:])):
    sys.argv = ["isobatch", *verb, "--help"]
    try:
        main()
    except SystemExit as end:
        assert not end.code
    heavy = {"torch", "numpy", "matplotlib", "scipy", "plotly", "tokenizers", "huggingface_hub", "rich.live"}
    heavy &= set(sys.modules)
    assert not heavy, (verb, heavy)
"""
    verbs = ["prepare", "push", "push-dataset", "report", "sample", "export", "import", "evaluate", "verify", "compare"]
    verbs += ["study", "bench"]
    assert len(verbs) == len(cli.app.registered_commands)
    command = [sys.executable, "-c", code, *verbs]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [line.split()[2] for line in done.stdout.splitlines() if line.startswith("Usage:")][1:] == verbs


# In this process, which has imported PyTorch already.

Command = Callable[..., str]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs the command and returns what it printed; with a status of 2, that is one sentence of an error."""

    def run_here(*arguments: object, status: int = 0) -> str:
        monkeypatch.setattr(sys, "argv", ["isobatch", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        printed = capsys.readouterr()
        assert (end.value.code or 0) == status, printed.err
        if status == 0:
            return printed.out
        (sentence,) = printed.err.splitlines()
        assert not printed.out
        assert sentence.startswith("error: ")
        return sentence

    return run_here


def test_an_earlier_checkpoint_has_its_own_validation(place: Workplace, command: Command) -> None:
    folder = place.checkpoints / "untied"
    first, second = validations(folder)
    for name, line in (("step_00000002", first), ("best", second)):
        printed = json.loads(command("evaluate", folder / name, place.datasets, "--json"))
        assert printed["loss"] == pytest.approx(line["loss"], abs=1e-6)
    text = command("evaluate", folder, place.datasets)
    assert "step_00000004: 640 validation tokens of data\n" in text
    assert "range          tokens 25,000 to 25,639\n" in text
    assert json.loads(command("evaluate", folder, place.datasets, "--json"))["file"] == "train.safetensors"
    assert f"loss           {second['loss']:.6f} nats per token\n" in text
    assert f"bits per byte  {second['bits_per_byte']:.4f}\n" in text


def test_a_stated_range_is_evaluated(place: Workplace, command: Command) -> None:
    """Two halves of the run's range add up to it."""
    folder = place.checkpoints / "untied"
    first, second, whole = (
        json.loads(command("evaluate", folder, place.datasets, "--split", "train", *options, "--json"))
        for options in (
            ("--start", 25_000, "--tokens", 320),
            ("--start", 25_320, "--tokens", 320, "--microbatch", 1),
            ("--dataset", "data", "--start", 25_000, "--tokens", 640, "--amp", "off"),
        )
    )
    assert [first["start"], second["start"], whole["start"]] == [25_000, 25_320, 25_000]
    assert whole["loss"] == pytest.approx((first["loss"] + second["loss"]) / 2)
    assert whole["loss"] == pytest.approx(validations(folder)[-1]["loss"], abs=1e-6)
    sentence = command("evaluate", folder, place.datasets, "--split", "train", "--start", 30_000, status=2)
    assert "needs at least 32,049 tokens (--start 30,000 + " in sentence


def test_the_repositorys_own_datasets_are_the_default(command: Command, place: Workplace, tmp_path: Path) -> None:
    copy = shutil.copytree(place.checkpoints / "untied" / "step_00000004", tmp_path / "copy")
    rewrite_config(copy, data={"dataset": "nix"})
    assert command("evaluate", copy, status=2).startswith(f"error: {REPOSITORY}/datasets/nix: there is no such dataset")


def test_bits_per_byte_need_a_tokenizer(place: Workplace, command: Command, tmp_path: Path) -> None:
    folder = place.checkpoints / "untied"
    shutil.copytree(place.datasets / "data", tmp_path / "data", ignore=shutil.ignore_patterns("tokenizer.json"))
    assert json.loads(command("evaluate", folder, tmp_path, "--json"))["bits_per_byte"] is None
    assert "bits per byte" not in command("evaluate", folder, tmp_path)


def test_evaluation_does_without_the_training_file(place: Workplace, command: Command, tmp_path: Path) -> None:
    folder = place.checkpoints / "untied"
    data = shutil.copytree(place.datasets / "data", tmp_path / "data")
    (data / "train.safetensors").rename(data / "validation.safetensors")
    with_it, without = (command("evaluate", folder, datasets) for datasets in (place.datasets, tmp_path))
    assert with_it == without


def test_samples_differ_by_their_seed_alone(place: Workplace, command: Command) -> None:
    folder = place.checkpoints / "untied"
    arguments = ("sample", folder, PROMPT, "--datasets", place.datasets, "--tokens", 30, "--top-k", 0)
    both = command(*arguments, "--number", 2, "--seed", 3)
    one, other = (command(*arguments, "--seed", seed) for seed in (3, 4))
    assert one != other
    assert both == f"--- seed 3\n{one}--- seed 4\n{other}"
    likeliest = command(*arguments, "--temperature", 0)
    assert command(*arguments, "--top-k", 1) == likeliest


def test_several_checkpoints_are_headed(place: Workplace, command: Command) -> None:
    """Each as alone, below its name; as JSON, all in one object."""
    names = (place.checkpoints / "untied", place.checkpoints / "tied" / "step_00000002")
    options = (PROMPT, "--datasets", place.datasets, "--tokens", 5, "--number", 2, "--seed", 3)
    alone = [command("sample", name, *options) for name in names]
    heads = [f"=== {names[0]} (step_00000004)\n", f"=== {names[1]} (step_00000002)\n"]
    assert command("sample", *names, *options) == "".join(map("".join, zip(heads, alone, strict=True)))
    found = json.loads(command("sample", *names, *options, "--json"))
    assert (found["prompt"], found["temperature"], found["top_k"]) == (PROMPT, 0.8, 50)
    texts = [f"--- seed {sample['seed']}\n{sample['text']}\n" for sample in found["samples"]]
    assert "".join(texts) == "".join(alone)
    assert [sample["checkpoint"] for sample in found["samples"]] == [str(name) for name in names for _ in range(2)]


def test_a_sample_ends_at_the_end_of_text(place: Workplace, command: Command, tmp_path: Path) -> None:
    """Declares the token that comes first the end of text: in dataset.json, or as the tokenizer's special token."""
    folder = place.checkpoints / "untied"
    tokenizer_json = (place.datasets / "data" / "tokenizer.json").read_text()
    tokenizer = load_tokenizer(place.datasets / "data" / "tokenizer.json")
    first, *more = generate(load_model(folder / "step_00000004"), tokenizer.encode(PROMPT).ids, 20)
    assert set(more) != {first}
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "tokenizer.json").write_text(tokenizer_json)
    arguments = ("sample", folder, PROMPT, "--temperature", 0, "--tokens", 20, "--datasets", tmp_path)
    assert len(command(*arguments)) > len(PROMPT) + 2
    (tmp_path / "data" / "dataset.json").write_text(json.dumps({"end_of_text": first}))
    assert command(*arguments) == tokenizer.decode([*tokenizer.encode(PROMPT).ids, first]) + "\n"

    (tmp_path / "data" / "dataset.json").unlink()
    swapped = json.loads(tokenizer_json)
    letter = tokenizer.id_to_token(first)
    swapped["model"]["vocab"] |= {letter: 256}
    swapped["added_tokens"][0]["id"] = swapped["model"]["vocab"][END_OF_TEXT] = first
    (tmp_path / "data" / "tokenizer.json").write_text(json.dumps(swapped))
    assert command(*arguments) == f"{PROMPT}\n", "a special token is not shown"


def test_no_such_run_or_checkpoint(place: Workplace, command: Command) -> None:
    folder = place.checkpoints / "untied"
    for arguments in (("sample", "nix", PROMPT), ("evaluate", "nix/best", place.datasets)):
        assert "there is no such run or checkpoint" in command(*arguments, status=2)
    sentence = command("evaluate", folder / "step_7", place.datasets, status=2)
    assert "there is no checkpoint 'step_7'; those there are: step_00000002, step_00000004" in sentence
    for watch in ((), ("--watch",)):
        assert "there is no such run" in command("report", "nix", "--output", place.checkpoints, *watch, status=2)
    assert "--watch: needs a terminal" in command("report", folder, "--watch", status=2)


@pytest.mark.parametrize("name", ["model.safetensors", "state.json", "manifest.json"])
def test_a_damaged_checkpoint(place: Workplace, command: Command, tmp_path: Path, name: str) -> None:
    folder = place.checkpoints / "untied"
    for copy in (tmp_path / "alone", tmp_path / "run" / "step_00000004"):
        shutil.copytree(folder / "step_00000004", copy)
        content = bytearray((copy / name).read_bytes())
        content[len(content) // 2] ^= 1
        (copy / name).write_bytes(content)
        assert name in command("sample", copy, PROMPT, "--datasets", place.datasets, status=2)
        assert name in command("evaluate", copy, place.datasets, status=2)


def test_no_tokenizer(place: Workplace, command: Command, tmp_path: Path) -> None:
    folder = place.checkpoints / "untied"
    sentence = command("sample", folder, PROMPT, "--datasets", tmp_path, status=2)
    assert f"{tmp_path}/data/tokenizer.json: there is no such file" in sentence
    assert "--tokenizer" in sentence
    assert "--datasets" in sentence
    missing = tmp_path / "missing.json"
    assert f"{missing}: no such file" in command("sample", folder, PROMPT, "--tokenizer", missing, status=2)
    missing.write_text("{}")
    assert "not a tokenizer.json" in command("sample", folder, PROMPT, "--tokenizer", missing, status=2)


def test_a_file_name_needs_the_format_of_a_file(place: Workplace, command: Command, tmp_path: Path) -> None:
    sentence = command("export", place.checkpoints / "untied", "--output", tmp_path / "x.gguf", status=2)
    assert "x.gguf: is the name of a GGUF file; add --format gguf" in sentence
    assert not list(tmp_path.iterdir())
    (tmp_path / "metrics.jsonl").touch()
    sentence = command("export", place.checkpoints / "untied", "--output", tmp_path / "latest", status=2)
    assert "latest: is a name that the run's own files have in its folder; choose another --output" in sentence


def test_what_cannot_be_sampled(place: Workplace, command: Command, tmp_path: Path) -> None:
    folder = place.checkpoints / "untied"
    for arguments in ((folder,), ()):
        assert "takes a checkpoint and a prompt" in command("sample", *arguments, status=2)
    assert "PROMPT: is empty" in command("sample", folder, "", "--datasets", place.datasets, status=2)
    larger = tmp_path / "larger.json"
    train_tokenizer([PROMPT] * 9, 300).save(str(larger))
    sentence = command("sample", folder, PROMPT, "--tokenizer", larger, status=2)
    assert "of the prompt is outside vocab_size 257" in sentence
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dataset.json").write_text("[1]")
    tokenizer = ("--tokenizer", place.datasets / "data" / "tokenizer.json")
    assert "dataset.json: must be a JSON object" in command(
        "sample", folder, PROMPT, *tokenizer, "--datasets", tmp_path, status=2
    )


def test_r95_a_row_that_stands_for_no_token_is_never_drawn(command: Command, tmp_path: Path) -> None:
    """R95: also where it is the likeliest; the tokenizer could not say it, and the text would stay as it is."""
    tokenizer, checkpoint = write_tokenizer(tmp_path / "data"), save_noisy(tmp_path / "run", PADDED)
    weights = load_file(checkpoint / "model.safetensors")
    weights["head.weight"][TOKENS] = weights["head.weight"].std() * 1e4 * weights["final_norm.bias"].sign()
    weights["final_norm.weight"].zero_()
    (checkpoint / "model.safetensors").write_bytes(save(weights))
    content = (checkpoint / "model.safetensors").read_bytes()
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["model.safetensors"] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    batch = {"world_size": 1, "microbatch": 1, "accumulation": 1}
    rewrite_config(checkpoint, data={"dataset": "data"}, batch=batch)
    ids = load_tokenizer(tokenizer).encode(PROMPT).ids
    assert generate(load_model(checkpoint), ids, 3) == [TOKENS] * 3
    for temperature in (0, 1):
        text = command("sample", checkpoint, PROMPT, "--datasets", tmp_path, "--temperature", temperature)
        assert len(text) > len(PROMPT) + 1


def test_words_that_export_does_not_know(command: Command, tmp_path: Path) -> None:
    for option, word, known in (
        ("--format", "onnx", "transformers, gguf"),
        ("--dtype", "q4_0", "float32, bfloat16, float16"),
    ):
        sentence = command("export", "nix", "--output", tmp_path / "out", option, word, status=2)
        assert sentence == f"error: {option}: must be one of {known}, got {word!r}"


def test_what_cannot_be_evaluated(place: Workplace, command: Command, tmp_path: Path) -> None:
    folder = place.checkpoints / "untied"
    assert f"{tmp_path}/data: there is no such dataset" in command("evaluate", folder, tmp_path, status=2)
    foreign = shutil.copytree(folder / "step_00000004", tmp_path / "foreign")
    rewrite_config(foreign, precision={"amp": "fp17"})
    assert "state.json: precision.amp: " in command("evaluate", foreign, place.datasets, status=2)


def rewrite_config(checkpoint: Path, **sections: Any) -> None:
    """Changes the config in a checkpoint's state, and the manifest with it."""
    state = json.loads((checkpoint / "state.json").read_text())
    state["config"] |= sections
    content = json.dumps(state).encode()
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["state.json"] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (checkpoint / "state.json").write_bytes(content)
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
