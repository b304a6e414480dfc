"""`isobatch prepare`: a dataset made from the user's own documents, or from instructions."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from training.errors import UserError
from training.preparation.corpus import Settings, prepare_documents
from training.preparation.document_reader import parse_object, read_lines
from training.preparation.sources import Source, SourceFile, find_sources
from training.preparation.vocabulary import SMALLEST, Vocabulary, byte_vocabulary, read_vocabulary

TEXT_KEY = "text"
VALIDATION_SHARE, VALIDATION_SHARE_OF_INSTRUCTIONS = 0.01, 0.05
INSTRUCTIONS = ({"prompt", "response"}, {"instruction", "output"})


@dataclass(frozen=True)
class Options:
    """What the command line says of a dataset, besides its sources; None where it says nothing."""

    tokenizer: str | None = None
    """A tokenizer.json, a folder, or a model on the Hub."""
    train_bpe: int | None = None
    """Tokens of a byte-level BPE to train."""
    bytes: bool = False
    text_key: str | None = None
    separator: str | None = None
    validation_share: float | None = None
    decontaminate: int | None = None
    """Words of an n-gram that a training document must not share with the validation split."""


def prepare(
    names: Sequence[str],
    output: Path,
    options: Options,
    revision: str | None = None,
    patterns: Sequence[str] = (),
    workers: int = 1,
) -> None:
    """Writes the dataset `output`: packed from documents, or of documents from instructions.

    The first record of JSON lines decides which. Where it has both a text and instructions it is taken for
    instructions, unless `text_key` is given.

    Args:
        names: files, folders or dataset repositories; see `find_sources`.
        output: the new folder.
        options: see there.
        revision: of repositories.
        patterns: which files of folders and repositories to take.
        workers: processes that tokenize; the result does not depend on it.

    Raises:
        UserError: naming the option, or the file and the place in it, that is wrong.
        RunError: a file could not be written, or a process was killed.
    """
    _check(options)
    sources = find_sources(names, revision, patterns)
    if options.text_key is None and _holds_instructions(sources[0].files[0]):
        _prepare_instructions(sources, output, options)
        return
    share = VALIDATION_SHARE if options.validation_share is None else options.validation_share
    settings = Settings(options.text_key or TEXT_KEY, options.separator, share, options.decontaminate)
    if options.tokenizer is not None:
        path = _tokenizer_path(options.tokenizer, output.parent)
        vocabulary: Vocabulary | int = read_vocabulary(path, for_texts=True)
    else:
        vocabulary = options.train_bpe or byte_vocabulary()
    prepare_documents(sources, output, settings, vocabulary, workers)


def _check(options: Options) -> None:
    """Refuses options that make no sense, before anything is read."""
    given = [options.tokenizer is not None, options.train_bpe is not None, options.bytes]
    if sum(given) != 1:
        raise UserError(
            f"--tokenizer, --train-bpe, --bytes: {'none is' if not any(given) else 'several are'} given; a dataset has "
            "one tokenizer; give one of --tokenizer FILE-OR-NAME, --train-bpe TOKENS and --bytes"
        )
    if options.train_bpe is not None and not SMALLEST <= options.train_bpe <= 2**24:
        raise UserError(
            f"--train-bpe: is {options.train_bpe:,}; a byte-level BPE has {SMALLEST} tokens, the bytes and the end of "
            f"text, or more; give {SMALLEST} to {2**24:,}"
        )
    share = options.validation_share
    if share is not None and not 0 <= share < 1:
        raise UserError(
            f"--validation-share: is {share:g}; it is a share of the documents, from 0 to below 1; correct it"
        )
    separator = options.separator
    if separator == "":
        raise UserError("--separator: is empty; it is the text between two documents; give one, or leave it out")
    if separator is not None and separator != separator.encode("utf-8", "replace").decode():
        raise UserError(f"--separator: is {separator!r}, which is not UTF-8, as all texts are; give it in UTF-8")
    if options.decontaminate is not None and options.decontaminate < 1:
        raise UserError(
            f"--decontaminate: is {options.decontaminate}; it is a number of words, such as 13; correct it or leave it "
            "out"
        )
    if options.decontaminate is not None and share == 0:
        raise UserError("--decontaminate: needs a validation split; leave it out, or --validation-share 0")


def _holds_instructions(file: SourceFile) -> bool:
    if file.format != "JSON lines":
        return False
    size = file.path.stat().st_size
    with tqdm(total=size, desc="first record", unit="B", unit_scale=True, disable=None, leave=False) as bar:
        for _, line in read_lines(file, bar.update):
            try:
                keys = set(parse_object(line))
            except ValueError:
                return False  # said where the file is read
            whole = any(kind <= keys for kind in INSTRUCTIONS)
            return whole or (TEXT_KEY not in keys and any(kind & keys for kind in INSTRUCTIONS))
    return False


def _prepare_instructions(sources: Sequence[Source], output: Path, options: Options) -> None:
    from training.preparation.instructions import prepare_instructions

    if options.tokenizer is None:
        raise UserError(
            f"{sources[0].files[0].label}: holds instructions, which need the tokenizer of the model to train on them; "
            "give --tokenizer, or the key of a text with --text-key"
        )
    if options.decontaminate is not None:
        raise UserError("--decontaminate: is for running text; leave it out for instructions")
    share = options.validation_share
    tokenizer = _tokenizer_path(options.tokenizer, output.parent)
    prepare_instructions(sources, output, tokenizer, VALIDATION_SHARE_OF_INSTRUCTIONS if share is None else share)


def _tokenizer_path(tokenizer: str, datasets: Path) -> Path:
    """Where a tokenizer lies; one of the Hub is downloaded beside the datasets, as a run's data.tokenizer is."""
    path = Path(tokenizer)
    if os.path.exists(path) or path.suffix == ".json":
        return path
    from training.config import repository_problem  # imports torch

    if repository_problem(tokenizer):
        return path
    file = datasets / ".tokenizers" / tokenizer / "tokenizer.json"
    if not file.exists():
        from training.hub.hub_client import download_tokenizer

        download_tokenizer(tokenizer, file)
    return file
