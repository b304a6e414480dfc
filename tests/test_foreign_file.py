"""Files that are not what they should be: each kind, in each place, is one sentence that names it and helps.

One process reads them all as training does. What this cannot show: a file that may not be read, as the tests may run as
root, who may read everything; it is the same OSError as that of a folder.
"""

import pickle
import re
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import Workplace
from numpy.typing import ArrayLike
from safetensors.numpy import save_file
from safetensors.torch import load_file
from safetensors.torch import save_file as save_tensors
from small_checkpoints import TINY, adamw, state_at, train
from small_configs import small_config, write_tokens
from torch import Tensor

import ddp_train
from model.gpt import build_gpt
from training.checkpoint import write_checkpoint
from training.checkpoint_files import find_checkpoint
from training.command import run_command
from training.config_file import load_run_config
from training.data import open_training_data, open_validation
from training.errors import UserError
from training.foreign_file import instead
from training.restore import load_model, load_optimizer, load_weights, read_state
from training.snapshot import take_snapshot
from training.tokenizer import end_of_text_id, load_tokenizer, train_tokenizer

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n"
PAGE = b"\n<!DOCTYPE html>\n<html><head><title>404</title></head><body>Not found</body></html>\n"


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def one_byte_more(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


# What has become of a file, and what its reader must say of it; None = the reader's own words.
DAMAGES: dict[str, tuple[Callable[[Path], object], str | None]] = {
    "empty": (lambda path: path.write_bytes(b""), "it is empty"),
    "cut": (cut, None),
    "one byte more": (one_byte_more, None),
    "pointer": (lambda path: path.write_bytes(LFS), "it is a Git LFS pointer; `git lfs pull` fetches the file itself"),
    "page": (lambda path: path.write_bytes(PAGE), "it is an HTML or XML page"),
    "pickle": (lambda path: path.write_bytes(pickle.dumps({"a": 1})), "it is a pickle, which is never opened"),
    "archive": (lambda path: torch.save({}, path), "it is a zip archive"),
    "folder": (folder, "it is a folder"),
}


def tokens(**tensors: ArrayLike) -> Callable[[Path], object]:
    return lambda path: save_file({key: np.asarray(value) for key, value in tensors.items()}, path)


NUMBERS = np.arange(200)
WRONG_TOKENS = {
    "another key": (tokens(ids=NUMBERS.astype(np.uint16)), "has no `tokens`, only ids"),
    **{
        f"of {kind.__name__}": (tokens(tokens=NUMBERS.astype(kind)), r"`tokens` has type .* must be one row of uint16")
        for kind in (np.float32, np.float16, np.uint8, np.int8, np.uint64, np.bool_)
    },
    "2-D": (tokens(tokens=NUMBERS.astype(np.uint16).reshape(2, -1)), r"shape \[2, 100\]; it must be one row"),
    "a single number": (tokens(tokens=np.uint16(5)), r"shape \[\]; it must be one row"),
    "too few": (tokens(tokens=NUMBERS[:8].astype(np.uint16)), r"needs at least \d+ tokens .*, has 8; lower data\."),
    "none": (tokens(tokens=NUMBERS[:0].astype(np.uint16)), r"needs at least \d+ tokens .*, has 0; lower data\."),
}


def told(read: Callable[[], object], path: Path) -> str:
    """The sentence in which a reader refuses a file."""
    with pytest.raises(UserError) as refusal:
        read()
    sentence = str(refusal.value)
    assert sentence.startswith(f"{path}: "), "it says which"
    assert "\n" not in sentence
    return sentence


def check(read: Callable[[], object], path: Path, words: str | None, remedy: str) -> None:
    """The sentence says what is there instead, if that can be told, and what to do."""
    sentence = told(read, path)
    if words is not None:
        assert words in sentence
    assert remedy in sentence.rpartition(";")[2]


@pytest.mark.parametrize("damage", DAMAGES)
def test_token_files(tmp_path: Path, damage: str) -> None:
    spoil, words = DAMAGES[damage]
    config = small_config()
    train = write_tokens(tmp_path / "train.safetensors", NUMBERS)
    validation = write_tokens(tmp_path / "validation.safetensors", NUMBERS)
    spoil(validation)
    check(lambda: open_validation(config, tmp_path), validation, words, " download or prepare it again")
    spoil(train)
    if damage == "folder":
        words, remedy = "there is no such file", "a dataset's folder must hold train.safetensors"
    else:
        remedy = "download or prepare it again"
    check(lambda: open_training_data(config, tmp_path), train, words, remedy)


@pytest.mark.parametrize("content", WRONG_TOKENS)
def test_token_files_of_something_else(tmp_path: Path, content: str) -> None:
    write, sentence = WRONG_TOKENS[content]
    for name in ("validation", "train"):
        path = write_tokens(tmp_path / f"{name}.safetensors", NUMBERS)
        write(path)
        with pytest.raises(UserError, match=rf"^{path}: .*{sentence}"):
            (open_training_data if name == "train" else open_validation)(small_config(), tmp_path)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """One of a model that has been trained a little."""
    model = build_gpt(TINY, seed=0)
    optimizer = adamw(model)
    train(model, optimizer)
    return write_checkpoint(tmp_path, take_snapshot(model, optimizer, state_at(4)))


@pytest.mark.parametrize("damage", DAMAGES)
def test_files_of_a_checkpoint(tmp_path: Path, checkpoint: Path, damage: str) -> None:
    """Asked for by name it is refused, by size or digest; and each reader says the same of a foreign one."""
    spoil, words = DAMAGES[damage]
    model = build_gpt(TINY, seed=0)
    readers: dict[str, Callable[[], object]] = {
        "model.safetensors": lambda: load_weights(checkpoint, model),
        "optimizer.safetensors": lambda: load_optimizer(checkpoint, model, adamw(model)),
        "state.json": lambda: read_state(checkpoint),
    }
    for name, read in readers.items():
        spoil(checkpoint / name)
        found = told(lambda: find_checkpoint(tmp_path, checkpoint.name), checkpoint)
        assert name in found
        assert "copy a whole one there" in found
        # A folder cannot be opened, and that is what is said of it.
        check(
            read, checkpoint / name, None if (name, damage) == ("state.json", "folder") else words, "another checkpoint"
        )
        (checkpoint / name).rename(tmp_path / f"spoilt-{name}")
        write_checkpoint(tmp_path, take_snapshot(model, adamw(model), state_at(4)))
    spoil(checkpoint / "manifest.json")
    for read in (lambda: find_checkpoint(tmp_path, checkpoint.name), lambda: load_model(checkpoint)):
        assert "manifest.json " in told(read, checkpoint)


def changed(change: Callable[[Tensor], Tensor]) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        tensors = {name: change(tensor).contiguous() for name, tensor in load_file(path).items()}
        path.unlink()
        save_tensors(tensors, path)

    return write


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.uint8, torch.int64, torch.bool])
def test_weights_of_another_type_are_not_rounded_in_silence(checkpoint: Path, dtype: torch.dtype) -> None:
    """Their size and digest may even be right, where somebody has rewritten the manifest."""
    model = build_gpt(TINY, seed=0)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    for name in ("model.safetensors", "optimizer.safetensors"):
        changed(lambda tensor: tensor.to(dtype))(checkpoint / name)
    sentence = rf": token_embedding\.weight: saved as {dtype}, not as torch\.float32; the model must be the saved one"
    with pytest.raises(UserError, match=f"^{checkpoint / 'model.safetensors'}{sentence}$"):
        load_weights(checkpoint, model)
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    sentence = rf": token_embedding\.weight: exp_avg: saved as {dtype}, not as torch\.float32; the checkpoint must be"
    with pytest.raises(UserError, match=f"^{checkpoint / 'optimizer.safetensors'}{sentence}"):
        load_optimizer(checkpoint, model, adamw(model))


def test_weights_of_another_shape(checkpoint: Path) -> None:
    changed(lambda tensor: tensor.unsqueeze(0))(checkpoint / "model.safetensors")
    with pytest.raises(UserError, match=r"token_embedding\.weight: saved with model\.vocab_size 1, configured 64"):
        load_weights(checkpoint, build_gpt(TINY, seed=0))


@pytest.mark.parametrize("damage", DAMAGES)
def test_tokenizers_and_descriptions_of_datasets(tmp_path: Path, damage: str) -> None:
    spoil, words = DAMAGES[damage]
    tokenizer = train_tokenizer(["abc"], 257)
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    spoil(path)
    remedy = "set data.tokenizer" if damage == "folder" else "have it downloaded again"
    check(lambda: load_tokenizer(path), path, None if damage == "folder" else words, remedy)
    description = tmp_path / "dataset.json"
    description.write_text('{"end_of_text": 3}')
    spoil(description)
    if damage != "folder":  # which is no description
        check(lambda: end_of_text_id(tokenizer, description), description, words, "restore the file")


YAML = {
    "not UTF-8": (b"# caf\xe9\n", "cannot be read as text: .*; it must be a file in UTF-8"),
    "UTF-16": ("a: 1\n".encode("utf-16"), "cannot be read as text: .*; it must be a file in UTF-8"),
    "a tab": (b"model:\n\temb_dim: 48\n", "a tab stands where blanks must; indent with blanks"),
    "deep": (b"a: " + 5000 * b"[", "not YAML: it is nested too deeply"),
    "a program": (b"a: !!python/object/apply:os.system ['true']", "the tag .* cannot be used in a config"),
    "a pointer": (LFS, "and holds none; it is a Git LFS pointer"),
    "a page": (PAGE, "and holds none; it is an HTML or XML page"),
    "nothing": (b"", "and holds none; it is empty"),
}


@pytest.mark.parametrize("content", YAML)
def test_configs(tmp_path: Path, content: str) -> None:
    path = tmp_path / "run.yaml"
    text, sentence = YAML[content]
    path.write_bytes(text)
    with pytest.raises(UserError, match=f"^{path}(, line \\d)?: .*{sentence}"):
        load_run_config(str(path))


def test_a_config_in_whose_place_is_a_folder(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").mkdir()
    with pytest.raises(UserError, match=r"run\.yaml: is a folder; the run comes first"):
        load_run_config(str(tmp_path / "run.yaml"))


def test_what_cannot_be_told(tmp_path: Path) -> None:
    assert instead(tmp_path / "missing") == ""
    (tmp_path / "words").write_text("just text")
    assert instead(tmp_path / "words") == ""


def place_file(path: Path) -> None:
    """A file in the place of a folder: what root, too, may not write into."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("")


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda place: cut(place.datasets / "data" / "train.safetensors"), "not a whole safetensors file"),
        (
            lambda place: place.write_tokens(tokens=np.full(6000, 300)),
            "the id 300 at offset 0 is not in the model's voc",
        ),
        (lambda place: place.write_tokens(tokens=np.zeros(100, np.uint16)), "needs at least 5,121 tokens"),
        (lambda place: (place.datasets / "data" / "tokenizer.json").write_bytes(LFS), "it is a Git LFS pointer"),
        (lambda place: place_file(place.checkpoints), "cannot be written .*; choose another folder with --output"),
        (lambda place: (place.folder / "run.yaml").write_bytes(b"model:\n\tn_heads: 2"), "a tab stands where"),
    ],
)
def test_the_command_ends_with_one_sentence_and_status_2(
    workplace: Workplace,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    spoil: Callable[[Workplace], object],
    sentence: str,
) -> None:
    config = workplace.write_config(data={"validation_start": 0}, evaluation={"every": None})
    spoil(workplace)
    command = ["ddp_train.py", str(config), str(workplace.datasets), "--output", str(workplace.checkpoints)]
    monkeypatch.setattr(sys, "argv", command)
    monkeypatch.setattr("training.command._be_ended_like_ctrl_c", lambda: None)  # in the process of the tests
    with pytest.raises(SystemExit) as ended:
        run_command(ddp_train.app)
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    (line,) = said.err.splitlines()
    assert line.startswith("error: ")
    assert re.search(sentence, line)
