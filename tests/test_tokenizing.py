"""Blocks of documents, tokenized by other processes: in order, the same whatever their number, and with their end."""

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from small_corpora import small_texts
from tokenizers import normalizers

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


def test_a_text_of_which_a_normalizer_leaves_nothing_is_counted_as_empty(recipe: Recipe) -> None:
    tokenizer = byte_vocabulary().tokenizer
    tokenizer.normalizer = normalizers.Replace("\u200b", "")
    tokenizer.save(str(recipe.tokenizer))
    block = BlockTokenizer(recipe)(["\u200b\u200b", "a\u200b"])
    assert (block.documents, block.empty) == (2, 1)
    assert sum(part.counts.documents for part in block.splits.values()) == 1


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


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(1)


def kill_all() -> None:
    for child in multiprocessing.active_children():
        os.kill(child.pid or 0, signal.SIGKILL)


def kill_one() -> None:
    os.kill(multiprocessing.active_children()[0].pid or 0, signal.SIGKILL)


def find_mistake() -> None:
    raise UserError("line 7")


KILLED = "a process that tokenizes was killed, perhaps for want of memory; the same"


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("event", "error", "sentence"),
    [
        (find_mistake, UserError, "line 7"),
        (interrupt, KeyboardInterrupt, "^$"),
        (kill_one, RunError, KILLED),
        (kill_all, RunError, KILLED),
    ],
)
def test_whatever_ends_it_leaves_no_process(
    recipe: Recipe, event: Callable[[], None], error: type[BaseException], sentence: str
) -> None:
    """Also one in the middle of a result that no pipe has room for, whether its end shows when a block is handed out
    or when one is awaited."""
    draw = random.Random(1)

    def blocks(before: int, after: int) -> Iterator[list[str]]:
        yield from [["a" * 260_000]] * before
        time.sleep(draw.uniform(0, 0.2))
        event()
        yield from [["a" * 260_000]] * after

    for before, after in ((8, 50), (7, 0)):
        with pytest.raises(error, match=sentence):
            list(tokenize_blocks(blocks(before, after), recipe, 2))
        assert multiprocessing.active_children() == []


def test_who_takes_no_more_ends_the_processes(recipe: Recipe) -> None:
    """As where the disk is full, while they wait to be rid of their results."""
    with closing(tokenize_blocks(iter([["a" * 260_000]] * 9), recipe, 2)) as blocks:
        next(blocks)
        time.sleep(0.5)
        assert len(multiprocessing.active_children()) == 2
    assert multiprocessing.active_children() == []


def test_what_a_process_cannot_tokenize_is_said_by_this_one(recipe: Recipe) -> None:
    strict = Recipe(**{**vars(recipe), "end_of_text": 300})
    with pytest.raises(UserError, match=r"tokenizer\.json: token id 300 at position 0; the vocabulary of 257"):
        list(tokenize_blocks(iter([["a"], ["b"], ["c"]]), strict, 2))
    assert multiprocessing.active_children() == []
