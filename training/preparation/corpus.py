"""A packed dataset from documents: an optional first pass over them, then tokenizing, then the description."""

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from tqdm import tqdm

from training.errors import UserError
from training.file_digest import file_digest
from training.preparation.contamination import NgramWriter, open_ngrams, shares_ngram
from training.preparation.dataset_files import fingerprint, fraction_of, token_type, write_description
from training.preparation.document_reader import read_documents
from training.preparation.sources import Source
from training.preparation.staging import Progress, Staging, staging
from training.preparation.tokenizing import Recipe, cut_blocks, tokenize_blocks
from training.preparation.vocabulary import Sample, Vocabulary, read_vocabulary, trained_vocabulary
from training.tokenizer import TOKENIZER


@dataclass(frozen=True)
class Settings:
    """How documents are read and split."""

    text_key: str
    """Of the text, in a JSON object or a row of Parquet."""
    separator: str | None
    """Between the documents of a text file; None: it is one."""
    validation_share: float
    """Of the documents; 0 = there is no validation split."""
    decontaminate: int | None
    """Words of an n-gram that a training document must not share with the validation split; None = it may."""


def prepare_documents(
    sources: Sequence[Source], output: Path, settings: Settings, vocabulary: Vocabulary | int, workers: int
) -> None:
    """Writes the packed dataset `output`: documents in the order of the sources, an end of text after each.

    The same sources, settings and vocabulary give the same bytes. Killed, the same command goes on where it was.

    Args:
        sources: where the documents are.
        output: the new folder.
        settings: see there.
        vocabulary: the tokenizer, or of how many tokens to train one on the training documents.
        workers: processes that tokenize.

    Raises:
        UserError: naming the file and the place in it that cannot be read, or what leaves a split empty.
        RunError: a file could not be written, or a process was killed.
    """
    states = [source.state for source in sources]
    command = {
        "sources": states,
        "tokenizer": [vocabulary.digest, vocabulary.end_of_text] if isinstance(vocabulary, Vocabulary) else vocabulary,
        "settings": asdict(settings),
    }
    with staging(output, command) as place:
        if not place.progress.surveyed:
            _survey(place, sources, settings, vocabulary)
        began, before = time.monotonic(), _bytes_read(place.progress)
        vocabulary = read_vocabulary(place.dataset)
        _tokenize(place, output.name, sources, settings, vocabulary, workers)
        speed = (_bytes_read(place.progress) - before) / (time.monotonic() - began) / 1e6
        _check_splits(place.progress, sources, settings)
        if [source.state for source in sources] != states:
            raise UserError("SOURCE: a file was changed while it was read; start again when nothing writes to it")
        _describe(place, output.name, sources, settings, vocabulary)
    print(f"{output.name}: {_summary(place.progress, settings)}, {speed:.1f} MB/s, in {output}", file=sys.stderr)


def _survey(place: Staging, sources: Sequence[Source], settings: Settings, vocabulary: Vocabulary | int) -> None:
    """Writes tokenizer.json and the n-grams; reads the documents where one of the two needs them."""
    length, ngrams = settings.decontaminate, place.ngrams
    training = not isinstance(vocabulary, Vocabulary)
    sample = Sample()
    with ExitStack() as stack:
        writer = stack.enter_context(NgramWriter(ngrams, length)) if length else None
        for text in _documents(sources, settings, "first pass") if writer or training else ():
            fraction = fraction_of(text)
            if fraction >= settings.validation_share:
                if training and text.strip():
                    sample.add(fraction, text)
            elif writer:
                writer.add(text)
    if not isinstance(vocabulary, Vocabulary):
        texts = sample.texts()
        if length:
            known = open_ngrams(ngrams)
            texts = (text for text in texts if not shares_ngram(text, length, known))
        vocabulary = trained_vocabulary(texts, vocabulary)
    (place.dataset / TOKENIZER).write_bytes(vocabulary.content)
    # Until the description takes its place: read_vocabulary looks there for the end of text.
    (place.dataset / "dataset.json").write_text(json.dumps({"end_of_text": vocabulary.end_of_text}), encoding="utf-8")
    place.finish_survey()


def _tokenize(
    place: Staging, name: str, sources: Sequence[Source], settings: Settings, vocabulary: Vocabulary, workers: int
) -> None:
    """Writes the token files from where they end."""
    recipe = Recipe(
        place.dataset / TOKENIZER,
        vocabulary.end_of_text,
        vocabulary.size,
        settings.validation_share,
        place.ngrams if settings.decontaminate else None,
        settings.decontaminate or 0,
    )
    dtype = token_type(TOKENIZER, vocabulary.size)
    documents = islice(_documents(sources, settings, name), place.progress.documents, None)
    # Closed, so that its processes end also where writing fails.
    with closing(tokenize_blocks(cut_blocks(documents), recipe, workers)) as blocks:
        place.write(blocks, dtype)
    if settings.validation_share == 0:
        (place.dataset / "validation.safetensors").unlink()


def _documents(sources: Sequence[Source], settings: Settings, what: str) -> Iterator[str]:
    """All documents in order, with a progress bar of the bytes read."""
    files = [file for source in sources for file in source.files]
    total = sum(file.path.stat().st_size for file in files)
    with tqdm(total=total, desc=what, unit="B", unit_scale=True, disable=None, leave=False) as bar:
        for file in files:
            yield from read_documents(file, settings.text_key, settings.separator, bar.update)


def _bytes_read(progress: Progress) -> int:
    return sum(counts.bytes for counts in (*progress.splits.values(), progress.dropped))


def _check_splits(progress: Progress, sources: Sequence[Source], settings: Settings) -> None:
    """Refuses a dataset that cannot be trained or, though it was asked for, validated on."""
    train, validation = (progress.splits[split].documents for split in ("train", "validation"))
    if train and (validation or not settings.validation_share):
        return
    file = sources[0].files[0].label
    many = f"{file}{' and so on' if sum(len(source.files) for source in sources) > 1 else ''}"
    texts = any(file.format == "text" for source in sources for file in source.files) and settings.separator is None
    remedy = " a --separator, as a text file is one document without it," if texts else ""
    raise UserError(
        f"{many}: {train:,} documents to train on, {validation:,} to validate on, {progress.empty:,} empty, "
        f"{progress.dropped.documents:,} dropped by --decontaminate; a dataset needs some of both, with a "
        f"--validation-share of {settings.validation_share:g}; give more documents,{remedy} or another "
        "--validation-share (0 = nothing to validate on)"
    )


def _describe(place: Staging, name: str, sources: Sequence[Source], settings: Settings, vocabulary: Vocabulary) -> None:
    """Writes dataset.json; its fingerprint is over all that fixes what a run on the dataset sees."""
    splits: dict[str, dict[str, Any]] = {}
    for split, counts in place.progress.splits.items():
        file = place.dataset / f"{split}.safetensors"
        if file.exists():
            splits[split] = {**asdict(counts), "sha256": file_digest(file)}
    dropped = place.progress.dropped
    training = place.progress.splits["train"].documents + dropped.documents
    decontamination = {
        "words": settings.decontaminate,
        "dropped": {"documents": dropped.documents, "bytes": dropped.bytes},
        "share": dropped.documents / training,
    }
    write_description(
        place.dataset,
        name=name,
        kind="packed",
        vocab_size=vocabulary.size,
        end_of_text=vocabulary.end_of_text,
        source=[entry for source in sources for entry in source.description],
        licence=None,
        **{key: value for key, value in asdict(settings).items() if key != "decontaminate"},
        empty_documents=place.progress.empty,
        decontamination=decontamination if settings.decontaminate else None,
        fingerprint=fingerprint(vocabulary.digest, vocabulary.end_of_text, splits),
        splits=splits,
    )


def _summary(progress: Progress, settings: Settings) -> str:
    parts = [
        f"{split} {counts.documents:,} documents of {counts.tokens:,} tokens"
        for split, counts in progress.splits.items()
        if counts.documents
    ]
    size, tokens = (sum(getattr(counts, key) for counts in progress.splits.values()) for key in ("bytes", "tokens"))
    parts.append(f"{size / tokens:.2f} bytes per token")
    if progress.empty:
        parts.append(f"{progress.empty:,} empty documents left out")
    if settings.decontaminate:
        dropped = progress.dropped.documents
        share = dropped / (dropped + progress.splits["train"].documents)
        parts.append(
            f"{dropped:,} documents dropped ({share:.2%} of the training documents) that share "
            f"{settings.decontaminate} words in a row with validation"
        )
    return ", ".join(parts)
