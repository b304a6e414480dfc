"""Tokenizes documents in several processes, block after block; what comes out does not depend on their number."""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from training.errors import RunError
from training.preparation.contamination import open_ngrams, shares_ngram
from training.preparation.dataset_files import checked_tokens, fraction_of
from training.preparation.text_encoder import TextEncoder
from training.tokenizer import load_tokenizer

BLOCK = 2**18
"""Characters of text in a block, or one document of more."""
IN_FLIGHT = 2**27
"""Characters handed out at most, unless it is a single block."""


@dataclass(frozen=True)
class Recipe:
    """What is done with a document; a worker process gets it when it starts."""

    tokenizer: Path
    end_of_text: int
    vocab_size: int
    validation_share: float
    ngrams: Path | None = None
    """Of the validation split; a training document that shares one is dropped."""
    words: int = 0
    """In an n-gram."""


@dataclass
class Counts:
    """How much there is of something."""

    documents: int = 0
    bytes: int = 0
    tokens: int = 0

    def add(self, other: "Counts") -> None:
        """Adds what another one counts."""
        self.documents += other.documents
        self.bytes += other.bytes
        self.tokens += other.tokens


@dataclass
class Part:
    """What a block adds to a split."""

    counts: Counts = field(default_factory=Counts)
    tokens: list[bytes] = field(default_factory=list)


@dataclass
class Block:
    """Some documents in a row, tokenized."""

    documents: int
    splits: dict[str, Part] = field(default_factory=lambda: {"train": Part(), "validation": Part()})
    empty: int = 0
    dropped: Counts = field(default_factory=Counts)
    """Training documents that share an n-gram with the validation split."""


class BlockTokenizer:
    """Tokenizes blocks by one recipe."""

    def __init__(self, recipe: Recipe) -> None:
        """Reads the recipe's files."""
        self.recipe = recipe
        self.encoder = TextEncoder(load_tokenizer(recipe.tokenizer), recipe.vocab_size)
        end_of_text = checked_tokens(recipe.tokenizer.name, [recipe.end_of_text], recipe.vocab_size)
        self.end_of_text = end_of_text.tobytes()
        self.known = open_ngrams(recipe.ngrams) if recipe.ngrams else None

    def __call__(self, texts: list[str]) -> Block:
        """Splits, drops and tokenizes some documents."""
        block, recipe = Block(len(texts)), self.recipe
        for text in texts:
            if not text.strip():
                block.empty += 1
                continue
            size = len(text.encode())
            split = "validation" if fraction_of(text) < recipe.validation_share else "train"
            if split == "train" and self.known is not None and shares_ngram(text, recipe.words, self.known):
                block.dropped.add(Counts(documents=1, bytes=size))
                continue
            tokens = self.encoder.encode(text) + self.end_of_text
            block.splits[split].tokens.append(tokens)
            block.splits[split].counts.add(Counts(1, size, len(tokens) // len(self.end_of_text)))
        return block


def cut_blocks(documents: Iterable[str]) -> Iterator[list[str]]:
    """Puts documents together to blocks of about BLOCK characters."""
    block: list[str] = []
    room = BLOCK
    for text in documents:
        block.append(text)
        room -= len(text) + 1
        if room <= 0:
            yield block
            block, room = [], BLOCK
    if block:
        yield block


def tokenize_blocks(blocks: Iterable[list[str]], recipe: Recipe, workers: int) -> Iterator[Block]:
    """Yields the blocks in their order, tokenized by `workers` processes that are a few blocks ahead, or by this one.

    Raises:
        RunError: a process was killed from outside.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes, which inherit it, are the parallelism
    if workers == 1:
        yield from map(BlockTokenizer(recipe), blocks)
        return
    waiting: deque[tuple[int, Future[Block]]] = deque()
    try:
        with _pool(recipe, workers) as pool:
            for block in blocks:
                size = sum(map(len, block))
                while waiting and (len(waiting) > 2 * workers or sum(n for n, _ in waiting) + size > IN_FLIGHT):
                    yield waiting.popleft()[1].result()
                with _without_interrupts():
                    waiting.append((size, pool.submit(_tokenize, block)))
            while waiting:
                yield waiting.popleft()[1].result()
    except BrokenProcessPool:
        raise RunError(
            "a process that tokenizes was killed, perhaps for want of memory; the same command goes on where this one "
            "ended; give it fewer --workers"
        ) from None


@contextmanager
def _pool(recipe: Recipe, workers: int) -> Iterator[ProcessPoolExecutor]:
    """Processes that tokenize; where something goes wrong here, they do not finish their block first."""
    others = set(multiprocessing.active_children())
    # Forked processes would inherit threads' locks; spawned ones begin with nothing.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, initializer=_start, initargs=(recipe,))
    try:
        yield pool
    except BaseException:
        for child in set(multiprocessing.active_children()) - others:
            child.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Ctrl-C goes to all processes of a terminal: those started here inherit that they do not notice."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_tokenizer: BlockTokenizer | None = None
"""Of a worker process."""


def _start(recipe: Recipe) -> None:
    global _tokenizer
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _tokenizer = BlockTokenizer(recipe)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "only a worker process does this"
    parent.join()  # also where it was killed
    os._exit(1)


def _tokenize(texts: list[str]) -> Block:
    assert _tokenizer is not None, "the process has started"
    return _tokenizer(texts)
