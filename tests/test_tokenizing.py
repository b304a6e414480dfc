"""Blocks of documents, tokenized by other processes: in order, the same whatever their number, and with their end."""

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from small_corpora import small_texts

from training.errors import RunError, UserError
from training.preparation import tokenizing
from training.preparation.contamination import NgramWriter
from training.preparation.dataset_files import fraction_of
from training.preparation.tokenizing import BlockTokenizer, Counts, Recipe, cut_blocks, tokenize_blocks
from training.preparation.vocabulary import byte_vocabulary


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    """A token is a byte; a fifth is for validation."""
    (tmp_path / "tokenizer.json").write_bytes(byte_vocabulary().content)
    return Recipe(tmp_path / "tokenizer.json", 256, 257, 0.2)


def test_blocks_hold_the_documents_in_order_and_about_so_many_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizing, "BLOCK", 10)
    texts = ["a" * 4, "b" * 5, "c" * 30, "", *"defghij"]
    assert list(cut_blocks(texts)) == [["a" * 4, "b" * 5], ["c" * 30], ["", *"defgh"], ["i", "j"]]
    assert list(cut_blocks([])) == []


def test_a_block_is_split_by_document_and_each_ends_with_the_end_of_text(recipe: Recipe) -> None:
    """What is empty is counted and left out; a literal end of text is text."""
    texts = ["<|endoftext|>", " \n\t", "", *small_texts(100)]
    block = BlockTokenizer(recipe)(texts)
    assert (block.documents, block.empty) == (103, 2)
    expected: dict[str, bytes] = {"train": b"", "validation": b""}
    for text in texts:
        if text.strip():
            row = np.array([*text.encode(), 256], dtype=np.uint16)
            expected["validation" if fraction_of(text) < 0.2 else "train"] += row.tobytes()
    assert {split: b"".join(part.tokens) for split, part in block.splits.items()} == expected
    for split, part in block.splits.items():
        rows = np.frombuffer(expected[split], dtype=np.uint16)
        ends = int(np.sum(rows == 256))
        assert part.counts == Counts(documents=ends, bytes=len(rows) - ends, tokens=len(rows))


def test_training_documents_that_share_words_with_validation_are_dropped(recipe: Recipe, tmp_path: Path) -> None:
    validation = next(text for text in small_texts(100) if fraction_of(text) < 0.2 and len(text.split()) > 20)
    with NgramWriter(tmp_path / "ngrams", 5) as writer:
        writer.add(validation)
    texts = [validation, *(f"{start} {validation[20:]}" for start in range(50)), "another one", validation[:3]]
    strict = Recipe(**{**vars(recipe), "ngrams": tmp_path / "ngrams", "words": 5})
    block = BlockTokenizer(strict)(texts)
    leaking = [text for text in texts[1:51] if fraction_of(text) >= 0.2]
    assert block.dropped == Counts(documents=len(leaking), bytes=sum(len(text.encode()) for text in leaking))
    assert block.splits["train"].counts.documents + block.splits["validation"].counts.documents == 53 - len(leaking)


@pytest.mark.slow
def test_any_number_of_processes_gives_the_same_blocks_in_order(recipe: Recipe) -> None:
    """Of which no more are read ahead than a few for each process."""
    blocks = [small_texts(20, seed) for seed in range(30)]
    read = 0

    def reading() -> Iterator[list[str]]:
        nonlocal read
        for block in blocks:
            read += 1
            yield block

    results = []
    for workers in (1, 2, 3):
        read, found = 0, []
        for block in tokenize_blocks(reading(), recipe, workers):
            found.append(block)
            assert read <= len(found) + 2 * workers + 1
        results.append(found)
    assert results[0] == results[1] == results[2] == [BlockTokenizer(recipe)(block) for block in blocks]
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("noticed", [False, True])
def test_a_process_that_is_killed_ends_it_with_a_sentence(recipe: Recipe, noticed: bool) -> None:
    """Whether that shows when a block is awaited, or when the next one is to be handed out."""

    def blocks() -> Iterator[list[str]]:
        yield from (small_texts(20, seed) for seed in range(2 if noticed else 5))
        for child in multiprocessing.active_children():
            os.kill(child.pid or 0, signal.SIGKILL)
        if noticed:
            time.sleep(1)
        yield from (small_texts(20, seed) for seed in range(50))

    with pytest.raises(RunError, match="a process that tokenizes was killed, perhaps for want of memory; the same"):
        list(tokenize_blocks(blocks(), recipe, 2))
    assert multiprocessing.active_children() == []


def test_a_mistake_in_reading_ends_the_processes(recipe: Recipe) -> None:
    def blocks() -> Iterator[list[str]]:
        yield small_texts(20)
        raise UserError("line 7")

    with pytest.raises(UserError, match="line 7"):
        list(tokenize_blocks(blocks(), recipe, 2))
    assert multiprocessing.active_children() == []
