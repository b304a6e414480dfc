"""Which rows of a dataset a step or the validation reads, and where the dataset comes from."""

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from model.hashing import hash64
from training.config import Data, RunConfig
from training.distributed import Group
from training.errors import UserError
from training.rows import Batch, Rows, TokenFile


@dataclass(frozen=True)
class TrainingData:
    """Which sequences each step trains on: `epochs` passes over a range, each of whole steps."""

    rows: Rows
    global_batch: int
    epochs: int
    shuffle_seed: int | None

    @property
    def steps_per_epoch(self) -> int:
        """Steps of one pass."""
        return self.rows.count // self.global_batch

    @property
    def total_steps(self) -> int:
        """Steps of the whole run."""
        return self.epochs * self.steps_per_epoch

    def target_counts(self, step: int) -> NDArray[np.int64]:
        """Targets of each sequence of a step, in order; known without reading any data. (sequences,)"""
        return np.full(self.global_batch, self.rows.context)

    def sequences(self, step: int, positions: range) -> list[int]:
        """Numbers, within the range, of the sequences at some positions of a step: a pure function."""
        epoch, step_in_epoch = divmod(step, self.steps_per_epoch)
        numbers = [step_in_epoch * self.global_batch + position for position in positions]
        if self.shuffle_seed is None:
            return numbers
        return [permuted(number, self.rows.count, self.shuffle_seed, epoch) for number in numbers]

    def read(self, step: int, positions: range) -> Batch:
        """Inputs and targets, each (B, T) int64, of the sequences at some positions of a step."""
        return self.rows.read(self.sequences(step, positions))


def permuted(number: int, count: int, seed: int, epoch: int) -> int:
    """Where a permutation of range(count), fixed by (seed, epoch), sends a number.

    A Feistel network over the next even power of two, walked until the result lies in range (Black and Rogaway,
    "Ciphers with arbitrary finite domains", 2002): no table to keep, and nothing of a library's random generator
    that could change between versions.
    """
    half = max(1, -(-(count - 1).bit_length() // 2))
    mask = (1 << half) - 1
    while True:
        left, right = number >> half, number & mask
        for round_number in range(6):
            left, right = right, left ^ (hash64(right, seed, epoch, round_number) & mask)
        number = left << half | right
        if number < count:
            return number


def open_training_data(config: RunConfig, folder: Path) -> TrainingData:
    """Finds the training range in a dataset's folder.

    Raises:
        UserError: the file is missing or holds too few tokens; both numbers are named.
    """
    file = TokenFile(_existing(folder, "train.safetensors"))
    data, context = config.data, config.model.context_length
    per_step = config.tokens_per_step
    available = file.length - data.train_start - 1  # the last target
    steps = -(-data.train_tokens // per_step) if data.train_tokens != -1 else available // per_step
    needed = data.train_start + max(steps, 1) * per_step + 1
    if file.length < needed:
        raise UserError(
            f"{file.path}: needs at least {needed:,} tokens (data.train_start {data.train_start:,} + {max(steps, 1):,} "
            f"whole steps of {per_step:,} + 1 for the last target), has {file.length:,}; "
            "lower data.train_tokens or use more data"
        )
    rows = Rows(file, data.train_start, steps * config.global_batch, context)
    return TrainingData(rows, config.global_batch, data.epochs, config.seeds.training if data.shuffle else None)


def open_validation(config: RunConfig, folder: Path, train: Rows | None = None) -> Rows:
    """Finds the validation range: in validation.safetensors, or in train.safetensors where there is none.

    Args:
        config: the run's.
        folder: the dataset's.
        train: the training range, if it is open; else train.safetensors is opened only where the validation is in it.

    Raises:
        UserError: it does not fit its file, holds no whole sequence, or overlaps the training range.
    """
    data, context = config.data, config.model.context_length
    path, training = folder / "validation.safetensors", folder / "train.safetensors"
    # A link that leads nowhere is an error, and one to the training file is that file.
    separate = os.path.lexists(path) and not (path.exists() and training.exists() and path.samefile(training))
    if separate:
        train = None  # cannot overlap
    elif train is None:
        train = open_training_data(config, folder).rows
    file = TokenFile(path) if train is None else train.file
    count = (
        data.validation_tokens // context
        if data.validation_tokens != -1
        else (file.length - data.validation_start - 1) // context
    )
    rows = Rows(file, data.validation_start, max(count, 1), context)
    if file.length < rows.stop:
        raise UserError(
            f"{file.path}: needs at least {rows.stop:,} tokens (data.validation_start {data.validation_start:,} + "
            f"{rows.count:,} sequences of {context:,} + 1 for the last target), has {file.length:,}; "
            "lower data.validation_start or data.validation_tokens"
        )
    if train is not None and rows.start < train.stop and train.start < rows.stop:
        raise UserError(
            f"{file.path}: the training tokens [{train.start:,}, {train.stop:,}) and the validation tokens "
            f"[{rows.start:,}, {rows.stop:,}) overlap; move data.validation_start to {train.stop:,} or later"
        )
    return rows


def check_vocabulary(rows: Rows, vocab_size: int, group: Group) -> None:
    """Checks every id of a range, so that a foreign tokenizer is found before training. Every rank must call this.

    Each process checks a part.

    Raises:
        UserError: on every rank, naming file, offset, id and vocabulary.
    """
    file, process = rows.file, group.process
    bounds = [
        rows.start + (rows.stop - rows.start) * part // process.world_size for part in range(process.world_size + 1)
    ]
    offset = file.first_bad_token(bounds[process.rank], bounds[process.rank + 1], vocab_size)
    nearest = torch.tensor(-file.length if offset is None else -offset, device=process.device)
    first = -int(group.maximum(nearest))
    if first < file.length:
        raise UserError(
            f"{file.path}: the id {file.read(first, first + 1)[0]} at offset {first:,} is not in the model's "
            f"vocabulary of {vocab_size:,} (model.vocab_size); the data belongs to another tokenizer"
        )


def provide_dataset(data: Data, datasets: Path) -> str | None:
    """Downloads or prepares what is not on disk of a dataset; returns its Hub revision where that is known.

    Raises:
        UserError: there is no such dataset or tokenizer, or the dataset on disk is of another revision.
    """
    from training import hub, prepare

    folder = datasets / data.dataset
    if not folder.is_dir():
        if data.dataset == prepare.PYTHON_LIBRARY:
            prepare.prepare_python_library(folder)
        elif "/" in data.dataset:
            hub.download_dataset(data.dataset, data.revision, folder)
        else:
            raise UserError(
                f"{folder}: there is no such dataset; data.dataset must name a folder in {datasets}, a dataset on the "
                f"Hub (owner/name) or {prepare.PYTHON_LIBRARY}"
            )
    tokenizer = tokenizer_file(data, datasets)
    if tokenizer is not None and not tokenizer.exists():
        hub.download_tokenizer(str(data.tokenizer), tokenizer)
    return hub.recorded_revision(folder, data.revision)


def tokenizer_file(data: Data, datasets: Path) -> Path | None:
    """Where the tokenizer of a dataset is: its own, else the one that data.tokenizer names, else none."""
    own = datasets / data.dataset / "tokenizer.json"
    if own.exists() or data.tokenizer is None:
        return own if own.exists() else None
    path = Path(data.tokenizer)
    return path if path.exists() else datasets / ".tokenizers" / data.tokenizer / "tokenizer.json"


def _existing(folder: Path, name: str) -> Path:
    path = folder / name
    if not path.is_file():
        raise UserError(f"{path}: there is no such file; a dataset's folder must hold {name}")
    return path
