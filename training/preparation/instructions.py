"""Instruction data: JSON lines of prompts and responses become a document dataset whose prompts are no targets."""

import json
import sys
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from training.errors import UserError
from training.preparation.dataset_files import (
    fingerprint,
    fraction_of,
    staged_folder,
    write_description,
    write_split,
)
from training.preparation.document_reader import Progress, check_text, parse_object, read_lines
from training.preparation.sources import Source, SourceFile
from training.preparation.text_encoder import encode_texts, reserved_ids
from training.preparation.vocabulary import Vocabulary, read_vocabulary
from training.tokenizer import DOCUMENTS_PER_BATCH, TOKENIZER

# The prompts that Stanford Alpaca was trained with (github.com/tatsu-lab/stanford_alpaca, README), word for word.
ALPACA = (
    "Below is an instruction that describes a task. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:"
)
ALPACA_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:"
)
RECORD = "a record is a JSON object with the texts prompt and response, or instruction, output and optionally input"

Record = tuple[str, str]
"""A prompt and its response."""


@dataclass
class _Split:
    """The documents of a split so far, in rows that grow: 5 bytes a token, 8 a document."""

    tokens: "array[int]" = field(default_factory=lambda: array("I"))
    mask: "array[int]" = field(default_factory=lambda: array("B"))
    ends: "array[int]" = field(default_factory=lambda: array("q"))

    def add(self, prompt: Sequence[int], response: Sequence[int]) -> None:
        self.tokens.extend(prompt)
        self.tokens.extend(response)
        self.mask.extend([0] * len(prompt) + [1] * len(response))
        self.ends.append(len(self.tokens))

    def write(self, folder: Path, name: str, vocab_size: int) -> dict[str, int | str]:
        """Writes the split's file, if it has a document; returns its entry in dataset.json."""
        mask, ends = np.asarray(self.mask), np.asarray(self.ends)
        counts = {"documents": len(ends), "targets": int(mask.sum())}
        tokens = np.asarray(self.tokens)
        return write_split(folder, name, counts, tokens, vocab_size, document_ends=ends, loss_mask=mask)


def prepare_instructions(sources: Sequence[Source], output: Path, tokenizer: Path, validation_share: float) -> None:
    """Writes the document dataset `output` from instruction data.

    A document is a prompt, its response and the end of text. Prompt and response are tokenized apart, so that the
    border between them is one between tokens; only response and end of text are targets. A literal special token in a
    text is the ordinary text it is there. Which records are validated on depends on each record alone, so equal ones
    are on the same side. The same sources and tokenizer give the same bytes.

    Args:
        sources: JSON lines, in order, also compressed; see `read_records`.
        output: the new folder.
        tokenizer: what `read_vocabulary` reads, such as another dataset.
        validation_share: of the records, in [0, 1); 0 writes no validation file.

    Raises:
        UserError: naming the file and line that is wrong.
        RunError: a file could not be read or written.
    """
    vocabulary = read_vocabulary(tokenizer, for_texts=True)
    files = [file for source in sources for file in source.files]
    total = sum(file.path.stat().st_size for file in files)
    with (
        staged_folder(output) as folder,
        tqdm(total=total, desc=output.name, unit="B", unit_scale=True, disable=None, leave=False) as bar,
    ):
        records = (record for file in files for record in read_records(file, bar.update))
        splits = _split(records, vocabulary, validation_share)
        if not splits["train"].ends:
            raise UserError(
                f"{files[0].label}: leaves no record to train on, and {len(splits['validation'].ends):,} to validate "
                "on; a dataset needs one to train on; give more records, or a smaller --validation-share"
            )
        counts = {name: split.write(folder, name, vocabulary.size) for name, split in splits.items() if split.ends}
        (folder / TOKENIZER).write_bytes(vocabulary.content)
        write_description(
            folder,
            name=output.name,
            kind="documents",
            vocab_size=vocabulary.size,
            end_of_text=vocabulary.end_of_text,
            source=[entry for source in sources for entry in source.description],
            licence=None,
            validation_share=validation_share,
            fingerprint=fingerprint(vocabulary.digest, vocabulary.end_of_text, counts),
            splits=counts,
        )
    _tell(output, counts)


def _split(records: Iterator[Record], vocabulary: Vocabulary, validation_share: float) -> dict[str, _Split]:
    splits = {"train": _Split(), "validation": _Split()}
    for (prompt, response), prompt_ids, response_ids in _encoded(records, vocabulary):
        share = fraction_of(json.dumps([prompt, response]))
        split = splits["validation" if share < validation_share else "train"]
        split.add(prompt_ids, [*response_ids, vocabulary.end_of_text])
    return splits


def _tell(output: Path, counts: dict[str, dict[str, int | str]]) -> None:
    said = ", ".join(
        f"{name} {count['documents']:,} documents of {count['tokens']:,} tokens, {count['targets']:,} of them targets"
        for name, count in counts.items()
    )
    without = "" if "validation" in counts else "; nothing to validate on, so evaluation.every must be null"
    print(f"{output.name}: {said}, in {output}{without}", file=sys.stderr)


def read_records(file: SourceFile, progress: Progress) -> Iterator[Record]:
    """Yields (prompt, response) of each line of a JSONL file; lines of nothing but white space are passed over.

    A record is {"prompt", "response"}, or Alpaca's {"instruction", "output"} with an optional "input", which is
    rendered with the published template. Other keys are left alone.

    Args:
        file: of lines in UTF-8.
        progress: is told how many bytes have been read.

    Raises:
        UserError: naming file and line, and what is wrong with it.
    """
    for number, line in read_lines(file, progress):
        try:
            record = _record(parse_object(line))
        except ValueError as error:
            raise UserError(f"{file.label}, line {number}: {error}; {RECORD}; correct or remove the line") from None
        yield record


def _record(record: dict[str, Any]) -> Record:
    """Takes prompt and response out of a JSON object.

    Raises:
        ValueError: saying what is wrong.
    """
    plain = "prompt" in record or "response" in record
    keys = ("prompt", "response") if plain else ("instruction", "output")
    missing = [key for key in keys if key not in record]
    if missing:
        raise ValueError(f"has no {' and no '.join(missing)}")
    optional = record.get("input")
    texts = {key: record[key] for key in keys} | ({} if plain or optional is None else {"input": optional})
    for key, text in texts.items():
        check_text(key, text)
    prompt, response = (texts[key] for key in keys)
    if not prompt.strip():
        raise ValueError(f"{keys[0]} is empty")
    if not plain:
        prompt = (ALPACA_WITH_INPUT if texts.get("input") else ALPACA).format_map(texts)
    return prompt, response


def _encoded(records: Iterator[Record], vocabulary: Vocabulary) -> Iterator[tuple[Record, list[int], list[int]]]:
    """Each record with the ids of its prompt and of its response, some records at a time."""
    reserved = reserved_ids(vocabulary.tokenizer, vocabulary.end_of_text)
    while batch := list(islice(records, DOCUMENTS_PER_BATCH)):
        texts = [text for record in batch for text in record]
        ids = encode_texts(vocabulary.tokenizer, texts, reserved)
        yield from zip(batch, ids[::2], ids[1::2], strict=True)
