"""Which rows of a dataset a step or the validation reads, and where the dataset comes from."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from model.hashing import hash64
from training.config import REPOSITORY, Data, RunConfig
from training.datasets_folder import nearest_dataset
from training.distributed import Group
from training.document_rows import AnyRows, DocumentRows
from training.errors import UserError
from training.rows import Batch, Rows, TokenFile, checked_pieces, described_vocabulary


@dataclass(frozen=True)
class TrainingData:
    """Which sequences each step trains on: `epochs` passes over the rows.

    A packed range holds whole steps. An epoch of documents ends with a smaller step, where it does not divide.
    """

    rows: AnyRows
    global_batch: int
    epochs: int
    shuffle_seed: int | None

    @property
    def steps_per_epoch(self) -> int:
        """Steps of one pass."""
        return -(-self.rows.count // self.global_batch)

    @property
    def total_steps(self) -> int:
        """Steps of the whole run."""
        return self.epochs * self.steps_per_epoch

    def target_counts(self, step: int) -> NDArray[np.int64]:
        """Targets of each sequence of a step, in order; known without reading any data. (sequences,)"""
        return self.rows.target_counts(self.sequences(step))

    def input_tokens(self, step: int) -> int:
        """Input tokens of a step, without padding."""
        return int(self.rows.input_tokens(self.sequences(step)).sum())

    def sequences(self, step: int, positions: range | None = None) -> list[int]:
        """Numbers, within the rows, of the sequences at some or all positions of a step: a pure function."""
        epoch, step_in_epoch = divmod(step, self.steps_per_epoch)
        first = step_in_epoch * self.global_batch
        numbers = range(first, min(first + self.global_batch, self.rows.count))
        order = (
            list(numbers) if self.shuffle_seed is None else _order(numbers, self.rows.count, self.shuffle_seed, epoch)
        )
        return order if positions is None else order[positions.start : positions.stop]

    def spans(self, step: int, positions: Sequence[int]) -> list[tuple[int, int]]:
        """Where in the file the sequences at some positions of a step lie: the first token, and behind the last."""
        numbers = self.sequences(step)
        return [self.rows.span(numbers[position]) for position in positions]

    def sequences_at(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Numbers, within the rows, of the sequences at some places, increasing, from the run's beginning; same shape.

        Place n is that of the n-th sequence trained on, from 0, over steps and epochs.
        """
        epochs, positions = np.divmod(places, self.rows.count)
        if self.shuffle_seed is None:
            return positions
        firsts = np.flatnonzero(np.diff(epochs, prepend=-1))
        parts = zip(epochs[firsts].tolist(), np.split(positions, firsts[1:]), strict=True)
        return np.concatenate([permuted(part, self.rows.count, self.shuffle_seed, epoch) for epoch, part in parts])

    def read(self, step: int, positions: range) -> Batch:
        """Inputs and targets, each (B, T) int64, of the sequences at some positions of a step."""
        return self.rows.read(self.sequences(step, positions))


@lru_cache(maxsize=1)
def _order(numbers: range, count: int, seed: int, epoch: int) -> list[int]:
    """A step's part of a permutation, kept because the step asks for it with each microbatch."""
    order: list[int] = permuted(np.array(numbers), count, seed, epoch).tolist()
    return order


def permuted(numbers: NDArray[np.int64], count: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Where a permutation of range(count), fixed by (seed, epoch), sends some numbers; same shape, 1-D.

    A Feistel network over the next even power of two, walked until the result lies in range (Black and Rogaway,
    "Ciphers with arbitrary finite domains", 2002): no table to keep, and nothing of a library's random generator
    that could change between versions.
    """
    bits = max(1, -(-(count - 1).bit_length() // 2))
    half, mask = np.uint64(bits), np.uint64((1 << bits) - 1)
    walked = numbers.astype(np.uint64)
    outside = np.arange(len(walked))
    while len(outside):
        left, right = walked[outside] >> half, walked[outside] & mask
        for round_number in range(6):
            left, right = right, left ^ (hash64(right, seed, epoch, round_number) & mask)
        walked[outside] = left << half | right
        outside = outside[walked[outside] >= count]
    return walked.astype(np.int64)


def open_training_data(config: RunConfig, folder: Path) -> TrainingData:
    """Finds what to train on in a dataset's folder: a range of tokens, or all documents.

    Raises:
        UserError: the file is missing or malformed, or holds too few tokens; both numbers are named.
    """
    file = TokenFile(_existing(folder, "train.safetensors"))
    data, context = config.data, config.model.context_length
    shuffle_seed = config.seeds.training if data.shuffle else None
    if file.has_documents:
        documents = _all_documents(file, context, "train", data.train_start, data.train_tokens)
        return TrainingData(documents, config.global_batch, data.epochs, shuffle_seed)
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
    return TrainingData(rows, config.global_batch, data.epochs, shuffle_seed)


def _all_documents(file: TokenFile, context: int, split: str, start: int, tokens: int) -> DocumentRows:
    for key, value, whole in (("start", start, 0), ("tokens", tokens, -1)):
        if value != whole:
            raise UserError(
                f"data.{split}_{key}: is {value:,}, but {file.path} holds documents; they are all used, and a range of "
                f"tokens would cut them; set it to {whole}"
            )
    return DocumentRows(file, context)


def open_validation(config: RunConfig, folder: Path, train: AnyRows | None = None) -> AnyRows:
    """Finds the validation range: in validation.safetensors, or in train.safetensors where there is none.

    Documents are validated on as a whole, and only from a file of their own.

    Args:
        config: the run's.
        folder: the dataset's.
        train: the training range, if it is open; else train.safetensors is opened only where the validation is in it.

    Raises:
        UserError: it does not fit its file, holds no whole sequence or no target, or overlaps the training range.
    """
    data, context = config.data, config.model.context_length
    path, training = folder / "validation.safetensors", folder / "train.safetensors"
    # A link that leads nowhere is an error, and one to the training file is that file.
    separate = os.path.lexists(path) and not (path.exists() and training.exists() and path.samefile(training))
    if separate:
        train = None  # cannot overlap
    elif train is None:
        train = open_training_data(config, folder).rows
    if isinstance(train, DocumentRows):
        raise UserError(
            f"{path}: there is no such file, and all documents of {training} are trained on; validation needs others: "
            "prepare the dataset with a validation share, or set evaluation.every to null"
        )
    file = TokenFile(path) if train is None else train.file
    if file.has_documents:
        return _validation_documents(config, file)
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


def _validation_documents(config: RunConfig, file: TokenFile) -> DocumentRows:
    data, in_loop = config.data, config.evaluation.tokens
    rows = _all_documents(
        file, config.model.context_length, "validation", data.validation_start, data.validation_tokens
    )
    if in_loop is not None and not rows.target_counts(range(rows.within(in_loop))).any():
        raise UserError(
            f"evaluation.tokens: the first documents of {file.path} up to {in_loop:,} tokens hold no target; the loop "
            "would have nothing to measure; raise it, or write null for all documents"
        )
    return rows


def check_vocabulary(rows: AnyRows, vocab_size: int, group: Group) -> None:
    """Checks ids of a range, so that a foreign tokenizer is found before training. Every rank must call this.

    Each process checks a part. Of a long range not all is looked at now; what is read later is checked then.

    Raises:
        UserError: on every rank, naming file, offset, id and vocabulary.
    """
    file, process = rows.file, group.process
    pieces = checked_pieces(rows.start, rows.stop)[process.rank :: process.world_size]
    offset = _first_bad(file, pieces, vocab_size)
    nearest = torch.tensor(-file.length if offset is None else -offset, device=process.device)
    first = -int(group.maximum(nearest))
    if first < file.length:
        raise UserError(file.foreign_id(first, vocab_size))
    file.vocab_size = vocab_size


def check_described_vocabulary(config: RunConfig, folder: Path) -> None:
    """The same for a plan: looks at the training ids where the dataset's description has more than the model.

    Raises:
        UserError: naming file, offset, id and vocabulary.
    """
    described = described_vocabulary(folder)
    if described is None or described <= config.model.vocab_size:
        return
    rows = open_training_data(config, folder).rows
    offset = _first_bad(rows.file, checked_pieces(rows.start, rows.stop), config.model.vocab_size)
    if offset is not None:
        raise UserError(rows.file.foreign_id(offset, config.model.vocab_size))


def _first_bad(file: TokenFile, pieces: Sequence[range], vocab_size: int) -> int | None:
    found = (file.first_bad_token(piece.start, piece.stop, vocab_size) for piece in pieces)
    return next((offset for offset in found if offset is not None), None)


def provide_dataset(data: Data, datasets: Path) -> str | None:
    """Downloads or prepares what is not on disk of a dataset; returns its Hub revision where that is known.

    Raises:
        UserError: there is no such dataset or tokenizer, or the dataset on disk is of another revision.
    """
    from training.hub import hub_client
    from training.preparation import python_library

    folder = datasets / data.dataset
    if not folder.is_dir():
        if data.dataset == python_library.PYTHON_LIBRARY:
            python_library.prepare_python_library(folder)
        elif "/" in data.dataset:
            hub_client.download_dataset(data.dataset, data.revision, folder)
        else:
            meant = nearest_dataset(data.dataset, datasets)
            raise UserError(
                f"{folder}: there is no such dataset;{meant} data.dataset must name a folder in {datasets}, a "
                f"dataset on the Hub (owner/name) or {python_library.PYTHON_LIBRARY}"
            )
    tokenizer = tokenizer_file(data, datasets)
    if tokenizer is not None and not tokenizer.exists():
        hub_client.download_tokenizer(str(data.tokenizer), tokenizer)
    return hub_client.recorded_revision(folder, data.revision)


def tokenizer_file(data: Data, datasets: Path) -> Path | None:
    """Where the tokenizer of a dataset is: its own, else the one that data.tokenizer names, else none."""
    own = datasets / data.dataset / "tokenizer.json"
    return own if own.exists() else named_tokenizer_file(data, datasets)


def named_tokenizer_file(data: Data, datasets: Path) -> Path | None:
    """Where the tokenizer that data.tokenizer names is, or will be once it is downloaded; None without one."""
    if data.tokenizer is None:
        return None
    for path in (Path(data.tokenizer), REPOSITORY / data.tokenizer):
        if path.exists():
            return path
    return datasets / ".tokenizers" / data.tokenizer / "tokenizer.json"


def _existing(folder: Path, name: str) -> Path:
    path = folder / name
    if not path.is_file():
        raise UserError(f"{path}: there is no such file; a dataset's folder must hold {name}")
    return path
