"""The loss of a checkpoint over a range of tokens: its run's validation range, or any that is stated."""

import math
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from numpy.typing import NDArray

from training.config import NAME_PATTERN, Amp, Data, Precision, RunConfig
from training.config_check import refuse_fp16_without_gpu
from training.data import check_vocabulary, open_training_data, open_validation, provide_dataset
from training.distributed import Process
from training.document_rows import AnyRows, DocumentRows
from training.errors import UserError
from training.evaluation import Evaluated, evaluate
from training.lookup import find_tokenizer_if_any
from training.loss import SequenceLoss
from training.preparation.dataset_files import SPLITS
from training.restore import load_model
from training.rows import Rows, TokenFile
from training.tokenizer import TOKENIZER, load_tokenizer, token_byte_lengths

AMP = get_args(Amp)


@dataclass(frozen=True)
class Range:
    """Which tokens to evaluate. What is None is the run's own; of another dataset, all there is."""

    dataset: str | None = None
    split: str = "validation"
    start: int | None = None
    tokens: int | None = None

    def __post_init__(self) -> None:
        """Raises UserError: there is no such split, or the dataset's name would leave its folder."""
        if self.split not in SPLITS:
            raise UserError(f"--split: must be one of {', '.join(SPLITS)}, got {self.split!r}")
        if self.dataset is not None and not re.fullmatch(f"{NAME_PATTERN}(/{NAME_PATTERN})?", self.dataset):
            raise UserError(
                f"--dataset {self.dataset!r}: must be the name of a folder in DATASETS, or owner/name on the Hub"
            )


@dataclass(frozen=True)
class Measured:
    """What was measured, over what, and how."""

    checkpoint: Path
    dataset: str
    split: str
    """validation or train."""
    file: str
    """The one that the tokens are in: a validation range may lie in train.safetensors."""
    start: int
    tokens: int
    """Input tokens; the targets are one further."""
    documents: int | None
    """How many there are, where the dataset holds documents; all of them are evaluated."""
    precision: Precision
    evaluated: Evaluated

    @property
    def perplexity(self) -> float:
        """exp(loss); infinite where that overflows."""
        return math.exp(self.evaluated.loss) if self.evaluated.loss < 700 else math.inf

    def values(self) -> dict[str, Any]:
        """For scripts."""
        return {
            "checkpoint": str(self.checkpoint),
            "dataset": self.dataset,
            "split": self.split,
            "file": self.file,
            "start": self.start,
            "tokens": self.tokens,
            "documents": self.documents,
            "amp": self.precision.amp,
            "matmul": self.precision.matmul,
            "loss": self.evaluated.loss,
            "perplexity": self.perplexity,
            "bits_per_byte": self.evaluated.bits_per_byte,
            "target_tokens": self.evaluated.target_tokens,
        }

    def lines(self) -> list[str]:
        """For people."""
        covered = f"tokens {self.start:,} to {self.start + self.tokens - 1:,}"
        if self.documents is not None:
            covered = f"all {self.documents:,} documents"
        amp = "float32" if self.precision.amp == "off" else f"{self.precision.amp} autocast"
        bits = self.evaluated.bits_per_byte
        return [
            f"{self.checkpoint}: {self.evaluated.target_tokens:,} {self.split} tokens of {self.dataset}",
            f"range          {covered}",
            f"precision      {amp}, float32 products {self.precision.matmul}",
            f"loss           {self.evaluated.loss:.6f} nats per token",
            f"perplexity     {self.perplexity:,.2f}",
            *([] if bits is None else [f"bits per byte  {bits:.4f}"]),
        ]


def evaluate_checkpoint(
    folder: Path,
    config: RunConfig,
    datasets: Path,
    wanted: Range = Range(),
    amp: str | None = None,
    microbatch: int | None = None,
    tokenizer: Path | None = None,
) -> Measured:
    """Evaluates a checkpoint; unless told otherwise, as its run's last validation does.

    Args:
        folder: the checkpoint.
        config: its run's.
        datasets: folder of the datasets; what is missing is fetched into it.
        wanted: the range.
        amp: off, bf16 or fp16, instead of the run's precision.amp: the same loss up to rounding.
        microbatch: sequences at once; None = the run's. The loss is the same up to rounding.
        tokenizer: a tokenizer.json for bits per byte, instead of the dataset's.

    Raises:
        UserError: the checkpoint or the data are not whole, the range does not fit, the data belong to another
            tokenizer, or this machine lacks the precision.
    """
    process, precision = Process.from_environment(), precision_of(config, amp)
    elsewhere = "evaluate it on a machine with one, or in another precision, --amp off"
    refuse_fp16_without_gpu(precision, process.device.type != "cpu", elsewhere, f"{folder}: ")
    torch.set_float32_matmul_precision(precision.matmul)
    data = config.data
    if wanted.dataset not in (None, data.dataset):
        data = data.model_copy(update={"dataset": wanted.dataset, "revision": None})
    provide_dataset(data, datasets)
    rows = open_range(config, datasets / data.dataset, wanted)
    lengths = byte_lengths(config, data, datasets, tokenizer)
    module = SequenceLoss(load_model(folder).to(process.device))
    with process.group() as group:
        check_vocabulary(rows, config.model.vocab_size, group)
        size = microbatch or config.batch.microbatch
        evaluated = evaluate(module, rows, range(rows.count), size, precision, group, lengths)
    return Measured(
        checkpoint=folder,
        dataset=data.dataset,
        split=wanted.split,
        file=rows.file.path.name,
        start=rows.start,
        tokens=int(rows.input_tokens(range(rows.count)).sum()),
        documents=rows.count if isinstance(rows, DocumentRows) else None,
        precision=precision,
        evaluated=evaluated,
    )


def precision_of(config: RunConfig, amp: str | None) -> Precision:
    """The run's precision, with another autocast where one is given."""
    if amp is None:
        return config.precision
    if amp not in AMP:
        raise UserError(f"--amp: must be one of {', '.join(AMP)}, got {amp!r}")
    return config.precision.model_copy(update={"amp": amp})


def open_range(config: RunConfig, folder: Path, wanted: Range) -> AnyRows:
    """Opens what is to be evaluated: whole sequences, from the start of the range on.

    Args:
        config: the run's.
        folder: the dataset's.
        wanted: the range.

    Raises:
        UserError: there is no such file, or the range does not fit it; both numbers are named.
    """
    data, context = config.data, config.model.context_length
    own = wanted.dataset in (None, data.dataset)
    if own and wanted.start is None and wanted.tokens is None:
        return (
            open_validation(config, folder) if wanted.split == "validation" else open_training_data(config, folder).rows
        )
    file = TokenFile(_file(folder, wanted.split))
    if file.has_documents:
        if wanted.start is not None or wanted.tokens is not None:
            raise UserError(
                f"{file.path}: holds documents, which a range of tokens would cut; all of them are evaluated: leave "
                "out --start and --tokens"
            )
        return DocumentRows(file, context)
    start, tokens = _start_and_tokens(data if own else None, wanted)
    if 0 < tokens < context:
        raise UserError(f"--tokens: must hold a sequence of {context:,} (model.context_length), got {tokens:,}")
    count = max(1, tokens // context if tokens != -1 else (file.length - start - 1) // context)
    rows = Rows(file, start, count, context)
    if file.length < rows.stop:
        raise UserError(
            f"{file.path}: needs at least {rows.stop:,} tokens (--start {start:,} + {count:,} sequences of {context:,} "
            f"+ 1 for the last target), has {file.length:,}; lower --start or --tokens"
        )
    return rows


def _start_and_tokens(own: Data | None, wanted: Range) -> tuple[int, int]:
    start, tokens = 0, -1
    if own is not None and wanted.split == "validation":
        start, tokens = own.validation_start, own.validation_tokens
    elif own is not None:
        start, tokens = own.train_start, own.train_tokens
    return start if wanted.start is None else wanted.start, tokens if wanted.tokens is None else wanted.tokens


def _file(folder: Path, split: str) -> Path:
    path = folder / f"{split}.safetensors"
    if not path.is_file():
        others = [name for name in SPLITS if (folder / f"{name}.safetensors").is_file()]
        remedy = f"choose --split {others[0]}" if others else "download or prepare the dataset again"
        raise UserError(f"{path}: there is no such file; {remedy}")
    return path


def byte_lengths(config: RunConfig, data: Data, datasets: Path, tokenizer: Path | None) -> NDArray[Any] | None:
    """Bytes of each token, by the tokenizer given, the dataset's, or the run's; None where there is none of them.

    Args:
        config: the run's.
        data: the same as in `config`, or with another dataset.
        datasets: folder of the datasets.
        tokenizer: a tokenizer.json.

    Raises:
        UserError: another dataset has another tokenizer than the run: its ids mean something else to the model.
    """
    own = find_tokenizer_if_any(config, datasets)
    other = datasets / data.dataset / TOKENIZER
    if data.dataset == config.data.dataset:
        path = tokenizer or own
    elif own is not None and other.is_file():
        if load_tokenizer(own).get_vocab() != load_tokenizer(other).get_vocab():
            raise UserError(
                f"{other}: is another tokenizer than the run's, {own}; to the model its ids mean something else: "
                "choose a dataset that was made with the run's tokenizer"
            )
        path = tokenizer or other
    else:
        path = tokenizer or (other if other.is_file() else own)
        print(
            f"{data.dataset}: whether it was made with the run's tokenizer cannot be told, as "
            f"{'the run' if own is None else 'the dataset'} has none here; if not, the loss means nothing",
            file=sys.stderr,
        )
    return None if path is None else token_byte_lengths(load_tokenizer(path), config.model.vocab_size)
