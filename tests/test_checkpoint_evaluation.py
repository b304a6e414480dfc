"""The loss of a checkpoint over a stated range, compared with a plain computation from the same tokens."""

import dataclasses
import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import golden_tokens
from safetensors.numpy import save_file
from small_configs import write_tokens
from small_exports import SHAPE, TEXT, TOKENS, run_config, save_noisy, write_tokenizer
from torch.nn.functional import cross_entropy

from training.checkpoint_evaluation import Measured, Range, evaluate_checkpoint
from training.config import RunConfig
from training.errors import UserError
from training.restore import load_model
from training.tokenizer import load_tokenizer, train_tokenizer

CONTEXT = SHAPE.context_length
TEXT_IDS = "Every effort moves you.\n"


@dataclasses.dataclass(frozen=True)
class Place:
    """A checkpoint, the config of its run and its datasets."""

    checkpoint: Path
    config: RunConfig
    datasets: Path

    def measure(self, wanted: Range = Range(), **options: Any) -> Measured:  # noqa: B008
        return evaluate_checkpoint(self.checkpoint, self.config, self.datasets, wanted, **options)

    def refusal(self, wanted: Range, **options: Any) -> str:
        with pytest.raises(UserError) as refused:
            self.measure(wanted, **options)
        return str(refused.value)

    def tokens(self, dataset: str, split: str) -> torch.Tensor:
        """As they were written."""
        return torch.from_numpy(STREAMS[dataset, split].astype(np.int64))

    def loss(self, tokens: torch.Tensor) -> float:
        """Over whole sequences of some tokens, one after another, without anything of ours but the model."""
        model, sums, count = load_model(self.checkpoint), 0.0, 0
        for start in range(0, len(tokens) - CONTEXT, CONTEXT):
            row = tokens[start : start + CONTEXT + 1]
            with torch.no_grad():
                sums += cross_entropy(model(row[None, :-1])[0], row[1:], reduction="sum").item()
            count += CONTEXT
        return sums / count


GOLDEN = golden_tokens(3000)
STREAMS = {
    ("data", "train"): GOLDEN[:2000],
    ("data", "validation"): GOLDEN[2000:],
    ("owner/other", "train"): GOLDEN[1000:1500],
    ("owner/other", "validation"): GOLDEN[:301],
}
"""Tokens of each file."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """The run validates on 320 tokens of `data` from 100 on, and trains on 512; `other` has the same tokenizer."""
    folder = tmp_path_factory.mktemp("evaluation")
    for (dataset, split), tokens in STREAMS.items():
        write_tokens(folder / "datasets" / dataset / f"{split}.safetensors", tokens)
        write_tokenizer(folder / "datasets" / dataset)
    data = {
        "dataset": "data",
        "train_start": 64,
        "train_tokens": 512,
        "validation_start": 100,
        "validation_tokens": 330,
    }
    return Place(save_noisy(folder / "run", SHAPE), run_config(SHAPE, data=data), folder / "datasets")


@pytest.mark.parametrize(
    ("wanted", "start", "tokens"),
    [
        (Range(), 100, 320),
        (Range(dataset="data", start=0), 0, 320),
        (Range(tokens=64), 100, 64),
        (Range(start=200, tokens=95), 200, 64),
        (Range(start=935, tokens=64), 935, 64),
        (Range(split="train"), 64, 512),
        (Range(split="train", start=1000), 1000, 512),
        (Range(dataset="owner/other"), 0, 288),
        (Range(dataset="owner/other", split="train", start=403), 403, 96),
    ],
)
def test_a_range_and_its_loss(place: Place, wanted: Range, start: int, tokens: int) -> None:
    """Whole sequences; of another dataset all there is. Bits per byte by the dataset's tokenizer."""
    measured = place.measure(wanted)
    stream = place.tokens(measured.dataset, wanted.split)[start : start + tokens + 1]
    assert (measured.dataset, measured.split) == (wanted.dataset or "data", wanted.split)
    assert (measured.start, measured.tokens, measured.evaluated.target_tokens) == (start, tokens, tokens)
    assert measured.evaluated.loss == pytest.approx(place.loss(stream), rel=1e-6)
    tokenizer = load_tokenizer(place.datasets / measured.dataset / "tokenizer.json")
    lengths = [0 if token == TOKENS - 1 else len(str(tokenizer.id_to_token(token))) for token in stream[1:].tolist()]
    bits = measured.evaluated.loss * tokens / math.log(2) / sum(lengths)
    assert measured.evaluated.bits_per_byte == pytest.approx(bits)


def test_what_is_printed(place: Place) -> None:
    measured = place.measure(Range(start=200, tokens=64), amp="bf16", microbatch=1)
    first, *lines = measured.lines()
    assert first == f"{place.checkpoint}: 64 validation tokens of data"
    assert lines[:2] == ["range          tokens 200 to 263", "precision      bf16 autocast, float32 products high"]
    assert lines[2] == f"loss           {measured.evaluated.loss:.6f} nats per token"
    assert lines[3].startswith("perplexity ")
    assert lines[4].startswith("bits per byte ")
    values = json.loads(json.dumps(measured.values()))
    assert values | {"loss": 0, "perplexity": 0, "bits_per_byte": 0} == {
        "checkpoint": str(place.checkpoint),
        "dataset": "data",
        "split": "validation",
        "file": "validation.safetensors",
        "start": 200,
        "tokens": 64,
        "documents": None,
        "amp": "bf16",
        "matmul": "high",
        "loss": 0,
        "perplexity": 0,
        "bits_per_byte": 0,
        "target_tokens": 64,
    }
    exact = place.measure(Range(start=200, tokens=64)).evaluated.loss
    assert 0 < abs(values["loss"] - exact) < 0.02 * exact, "bf16 is another precision, not another loss"


def test_a_range_that_does_not_fit_names_both_numbers(place: Place) -> None:
    assert place.refusal(Range(start=936, tokens=64)) == (
        f"{place.datasets}/data/validation.safetensors: needs at least 1,001 tokens (--start 936 + 2 sequences of 32 + "
        "1 for the last target), has 1,000; lower --start or --tokens"
    )
    assert "needs at least 50,000,033 tokens" in place.refusal(Range(dataset="owner/other", start=50_000_000))
    assert place.refusal(Range(tokens=31)) == "--tokens: must hold a sequence of 32 (model.context_length), got 31"


def test_what_is_no_range(place: Place) -> None:
    for dataset in ("../data", "a/b/c", ""):
        with pytest.raises(UserError, match=r"^--dataset '"):
            Range(dataset=dataset)
    with pytest.raises(UserError, match=r"^--split: must be one of train, validation, got 'test'$"):
        Range(split="test")
    assert "there is no such dataset" in place.refusal(Range(dataset="nix"))
    assert place.refusal(Range(), amp="fp32") == "--amp: must be one of off, bf16, fp16, got 'fp32'"
    assert "precision.amp: fp16 needs a GPU" in place.refusal(Range(), amp="fp16")


def test_a_split_that_is_not_there(place: Place, tmp_path: Path) -> None:
    shutil.copytree(place.datasets / "data", tmp_path / "data", ignore=shutil.ignore_patterns("validation*"))
    half = dataclasses.replace(place, datasets=tmp_path)
    path = tmp_path / "data" / "validation.safetensors"
    assert half.refusal(Range(start=0)) == f"{path}: there is no such file; choose --split train"
    (tmp_path / "data" / "train.safetensors").unlink()
    assert half.refusal(Range(start=0)).endswith("there is no such file; download or prepare the dataset again")


def test_another_tokenizer_is_refused(place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where all of its ids would be known; where one of the two has none, it is said."""
    shutil.copytree(place.datasets, tmp_path, dirs_exist_ok=True)
    other = tmp_path / "owner" / "other" / "tokenizer.json"
    train_tokenizer(["quite another text, " * 9], 270).save(str(other))
    moved = dataclasses.replace(place, datasets=tmp_path)
    wanted = Range(dataset="owner/other")
    assert moved.refusal(wanted).startswith(f"{other}: is another tokenizer than the run's, {tmp_path}/data/")
    moved.measure()
    assert capsys.readouterr().err == ""
    other.unlink()
    assert moved.measure(wanted).evaluated == place.measure(wanted).evaluated, "bytes by the run's tokenizer"
    assert "owner/other: whether it was made with the run's tokenizer cannot be told" in capsys.readouterr().err
    (tmp_path / "data" / "tokenizer.json").unlink()
    assert moved.measure(wanted).evaluated.bits_per_byte is None
    tokenizer = place.datasets / "data" / "tokenizer.json"
    given = moved.measure(wanted, tokenizer=tokenizer)
    assert given.evaluated == place.measure(wanted).evaluated


def test_ids_that_the_model_does_not_know_are_refused(place: Place, tmp_path: Path) -> None:
    write_tokens(tmp_path / "data" / "validation.safetensors", [5] * 400 + [TOKENS] + [5] * 400)
    sentence = dataclasses.replace(place, datasets=tmp_path).refusal(Range(start=369, tokens=64))
    assert f"the id {TOKENS} at offset 400 is not in the model's vocabulary of {TOKENS}" in sentence


def test_documents_are_evaluated_as_a_whole(place: Place, tmp_path: Path) -> None:
    """Two documents of 20 and 11 tokens: 19 and 10 targets, of which the second is padded, as nothing sees."""
    tokens = GOLDEN[:31].astype(np.uint16)
    folder = tmp_path / "talks"
    folder.mkdir()
    save_file({"tokens": tokens, "document_ends": np.array([20, 31])}, folder / "validation.safetensors")
    there = dataclasses.replace(place, datasets=tmp_path)
    measured = there.measure(Range(dataset="talks"))
    assert (measured.documents, measured.evaluated.target_tokens, measured.tokens) == (2, 29, 29)
    assert "range          all 2 documents" in measured.lines()
    assert "leave out --start and --tokens" in there.refusal(Range(dataset="talks", tokens=64))


def test_text_of_the_runs_own_tokenizer(place: Place, tmp_path: Path) -> None:
    """Bytes per token are right: a text of 24 bytes, evaluated from its second token on."""
    tokenizer = load_tokenizer(place.datasets / "data" / "tokenizer.json")
    ids = tokenizer.encode(TEXT + TEXT_IDS * 4).ids
    count = (len(ids) - 1) // CONTEXT * CONTEXT
    write_tokens(tmp_path / "words" / "validation.safetensors", ids)
    write_tokenizer(tmp_path / "words")
    shutil.copytree(place.datasets / "data", tmp_path / "data")
    measured = dataclasses.replace(place, datasets=tmp_path).measure(Range(dataset="words"))
    text = tokenizer.decode(ids[1 : count + 1])
    assert measured.evaluated.target_bytes == len(text.encode())
