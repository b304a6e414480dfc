"""The check of an export: each kind of wrong folder is caught, by transformers and by the built-in one. R92, R96."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_exports import SHAPE, noisy_model, run_config, save_noisy, without_transformers, write_tokenizer
from torch import Tensor

from model.generation import generate
from model.gpt import GPT
from training.errors import RunError
from training.exchange import export_check
from training.exchange.export import export_model
from training.exchange.export_check import Answer, ask_built_in, ask_transformers, compare, questions
from training.restore import load_model
from training.tokenizer import load_tokenizer

WITH_BIAS = dataclasses.replace(SHAPE, qkv_bias=True)
# Several folders answered by one process: importing transformers takes it ten seconds.
PROGRAM = """
import importlib.util, json, sys
spec = importlib.util.spec_from_file_location("program", sys.argv[1])
program = importlib.util.module_from_spec(spec)
spec.loader.exec_module(program)
question = json.loads(sys.argv[2])
for folder in sys.argv[3:]:
    values, logits = program.answer(folder, question)
    print(json.dumps([values, {key: value.tolist() for key, value in logits.items()}]))
"""


def tensors_changed(change: Callable[[dict[str, Tensor]], None]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file({key: value.contiguous() for key, value in tensors.items()}, folder / "model.safetensors")

    return apply


def config_changed(**values: Any) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | values))

    return apply


def transpose_square(tensors: dict[str, Tensor]) -> None:
    tensors["transformer.h.1.attn.c_proj.weight"] = tensors["transformer.h.1.attn.c_proj.weight"].T


def swap_query_and_key(tensors: dict[str, Tensor]) -> None:
    query, key, value = tensors["transformer.h.0.attn.c_attn.weight"].chunk(3, dim=1)
    tensors["transformer.h.0.attn.c_attn.weight"] = torch.cat([key, query, value], dim=1)


def drop_bias(tensors: dict[str, Tensor]) -> None:
    del tensors["transformer.h.1.attn.c_attn.bias"]


def shift_positions(tensors: dict[str, Tensor]) -> None:
    tensors["transformer.wpe.weight"] = tensors["transformer.wpe.weight"].roll(1, dims=0)


FAULTS = {
    "square matrix not transposed": tensors_changed(transpose_square),
    "query and key swapped": tensors_changed(swap_query_and_key),
    "bias missing": tensors_changed(drop_bias),
    "positions shifted": tensors_changed(shift_positions),
    "wrong number of heads": config_changed(n_head=8),
    "exact GELU": config_changed(activation_function="gelu"),
    "wrong epsilon": config_changed(layer_norm_epsilon=1e-3),
    "slightly wrong epsilon": config_changed(layer_norm_epsilon=1e-6),
}


class Folders:
    """A right export, and one for each fault."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        without_transformers(folder, patch)
        checkpoint = save_noisy(folder / "run", WITH_BIAS)
        tokenizer = write_tokenizer(folder / "data")
        self.right = export_model(checkpoint, run_config(WITH_BIAS), folder / "right", "float32", tokenizer).folder
        patch.undo()
        self.vocabulary = load_tokenizer(tokenizer)
        self.checkpoint = checkpoint
        self.question = questions(self.model, self.vocabulary)
        self.wrong = {}
        for name, damage in FAULTS.items():
            self.wrong[name] = shutil.copytree(self.right, folder / name.replace(" ", "-"))
            damage(self.wrong[name])

    @property
    def model(self) -> GPT:
        """The run's."""
        return load_model(self.checkpoint)

    def compare(self, answer: Answer) -> str:
        """The sentence, or a RunError."""
        return compare(self.question, answer, self.model.double(), self.vocabulary)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    with pytest.MonkeyPatch.context() as patch:
        return Folders(tmp_path_factory.mktemp("check"), patch)


@pytest.fixture(scope="module")
def by_transformers(folders: Folders) -> dict[str, Answer]:
    """The answers of the check's own program for every folder."""
    names = ["right", *FAULTS]
    command = [sys.executable, "-P", "-c", PROGRAM, str(export_check.PROGRAM), json.dumps(folders.question)]
    done = subprocess.run(
        [*command, *(str(folders.wrong.get(name, folders.right)) for name in names)],
        env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answers = {}
    for name, line in zip(names, done.stdout.splitlines(), strict=True):
        values, logits = json.loads(line)
        rows = [torch.tensor(logits[str(number)], dtype=torch.float64) for number in range(3)]
        answers[name] = Answer("transformers", values["keys"], rows, values["greedy"], values["texts"])
    return answers


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_r92_r96_transformers_shows_each_fault(
    folders: Folders, by_transformers: dict[str, Answer], fault: str
) -> None:
    """R92, R96: and it finds nothing wrong with the right folder."""
    assert folders.compare(by_transformers["right"]).startswith(
        "transformers: no missing, unexpected or mismatched keys"
    )
    said = (
        "missing keys: transformer.h.1.attn.c_attn.bias" if fault == "bias missing" else "logits differ from the model"
    )
    with pytest.raises(RunError, match=said):
        folders.compare(by_transformers[fault])


@pytest.mark.parametrize("fault", FAULTS)
def test_r92_r96_the_built_in_check_shows_each_fault(folders: Folders, fault: str) -> None:
    """R92, R96: all of them, as it does not share the mapping that wrote the folder."""
    said = "do not fit each other .*c_attn.bias" if fault == "bias missing" else "logits differ from the model"
    with pytest.raises(RunError, match=said):
        folders.compare(ask_built_in(folders.wrong[fault], folders.question, "reason"))
    right = folders.compare(ask_built_in(folders.right, folders.question, "reason"))
    assert right.startswith("read back by the built-in check, not by transformers (reason): logits within ")


def test_a_folder_that_transformers_does_not_load_is_a_failure(
    folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only where it cannot be imported does the built-in check take its place."""
    without_transformers(tmp_path, monkeypatch)
    assert ask_transformers(folders.right, folders.question) == "ImportError: blocked here"
    (tmp_path / "blocked" / "transformers" / "__init__.py").write_text("raise ValueError('not such a model')")
    with pytest.raises(RunError, match=r"transformers does not load the export \(ValueError: not such a model\)"):
        ask_transformers(folders.right, folders.question)


def test_a_near_tie_is_no_failure_and_another_text_is() -> None:
    """Two tokens whose logits are equal: rounding may put either first, and the comparison ends there."""
    model = noisy_model(SHAPE).double().eval()
    question = {**questions(model, None), "greedy": 4}

    def compared(greedy: list[int]) -> str:
        with torch.no_grad():
            rows = [model.head(model.hidden(torch.tensor([row]))[0, -16:]) for row in question["rows"]]
        return compare(question, Answer("somebody", {}, rows, greedy, None), model, None)

    first, second, third, fourth = generate(model, question["prompt"], 4)
    assert "4 greedy tokens equal" in compared([first, second, third, fourth])
    rival = max({first, second, third, fourth}) + 1  # of two equal logits, that of the lower id is taken
    with pytest.raises(RunError, match="continues a text otherwise after 2 greedy tokens"):
        compared([first, second, rival, fourth])
    with torch.no_grad():
        model.head.weight[rival] = model.head.weight[third]
    assert "2 greedy tokens equal" in compared([first, second, rival, fourth])


def test_a_wrong_tokenizer_and_nan_are_failures(folders: Folders) -> None:
    right = ask_built_in(folders.right, folders.question, "reason")
    assert right.texts is not None
    with pytest.raises(RunError, match="tokenizer gives other ids"):
        folders.compare(dataclasses.replace(right, texts=[*right.texts[:-1], [1]]))
    with pytest.raises(RunError, match="logits differ from the model's by nan"):
        folders.compare(dataclasses.replace(right, logits=[row * torch.nan for row in right.logits]))


def test_the_program_ends_with_who_asked(tmp_path: Path) -> None:
    """However that one ended; and takes its files along."""
    folder = tmp_path / "asked"
    folder.mkdir()
    (folder / "question.json").write_text("{}")
    command = [sys.executable, "-P", str(export_check.PROGRAM), str(tmp_path), str(folder / "question.json"), "answer"]
    with subprocess.Popen(command, cwd=folder, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as program:
        assert program.stdin is not None
        program.stdin.close()
        assert program.wait(60) == 1
        assert program.stderr is not None
        assert program.stderr.read() == b""
    assert not folder.exists()
