"""Tokenizes documents in several processes, block after block; what comes out does not depend on their number."""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from training.errors import RunError, UserError
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
        self.encoder = TextEncoder(load_tokenizer(recipe.tokenizer), recipe.vocab_size, recipe.end_of_text)
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
            tokens = self.encoder.encode(text)
            if not tokens:  # a normalizer may leave nothing of a text
                block.empty += 1
                continue
            tokens += self.end_of_text
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


def tokenize_blocks(blocks: Iterable[list[str]], recipe: Recipe, workers: int) -> Generator[Block, None, None]:
    """Yields the blocks in their order, tokenized by `workers` processes that are a few blocks ahead, or by this one.

    The processes end with it, also where it is closed before its end.

    Raises:
        UserError: a document cannot be tokenized.
        RunError: a process was killed from outside, or cannot be started.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes, which inherit it, are the parallelism
    if workers == 1:
        yield from map(BlockTokenizer(recipe), blocks)
        return
    crew: list[_Worker] = []
    waiting: deque[tuple[int, _Worker]] = deque()
    with ExitStack() as stack:
        for number, block in enumerate(blocks):
            size = sum(map(len, block))
            while waiting and (len(waiting) > 2 * workers or sum(n for n, _ in waiting) + size > IN_FLIGHT):
                yield waiting.popleft()[1].result()
            if number < workers:
                crew.append(stack.enter_context(_worker(recipe)))
            worker = crew[number % workers]
            worker.hand(block)
            waiting.append((size, worker))
        while waiting:
            yield waiting.popleft()[1].result()


@dataclass(frozen=True)
class _Worker:
    """A process that tokenizes, and the connection to it, whose ends nobody else holds.

    So it may be killed at any moment: each end reads an end of file when the process at the other one is gone, and no
    other process ever waits for this one. It reads while it tokenizes and sends, so handing it a block never waits for
    somebody to take its results.
    """

    process: SpawnProcess
    connection: "Connection[Any, Any]"

    def hand(self, block: list[str]) -> None:
        """Gives it a block, whose result comes behind those of the blocks before."""
        try:
            self.connection.send(block)
        except OSError:
            raise self._ended() from None

    def result(self) -> Block:
        """Waits for the result of the first block that has none."""
        try:
            outcome: Block | Exception = self.connection.recv()
        except (EOFError, OSError):
            raise self._ended() from None
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def _ended(self) -> RunError:
        self.process.join()
        status = self.process.exitcode or 0
        how = "was killed" if status < 0 else f"ended with status {status}"
        return RunError(
            f"a process that tokenizes {how}, perhaps for want of memory; the same command goes on where this one "
            "ended; give it fewer --workers"
        )


@contextmanager
def _worker(recipe: Recipe) -> Iterator[_Worker]:
    # Forked processes would inherit threads' locks, and the ends of others' connections; spawned ones begin with
    # nothing.
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_work, args=(there, recipe), daemon=True)
    try:
        try:
            with _without_interrupts():
                process.start()
        except OSError as error:
            raise RunError(f"a process cannot be started ({error}); give it fewer --workers") from error
        finally:
            there.close()
        yield _Worker(process, here)
    finally:
        here.close()
        if process.pid is not None:
            process.kill()
            process.join()


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Ctrl-C goes to all processes of a terminal: those started here inherit that they do not notice."""
    resource_tracker.ensure_running()  # else it is started with the first process, and lets interrupts in again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _work(connection: "Connection[Any, Any]", recipe: Recipe) -> None:
    """What a worker process does: a result, or the mistake instead of it, for each block, until it is ended."""
    blocks: SimpleQueue[list[str]] = SimpleQueue()
    threading.Thread(target=_receive, args=(connection, blocks), daemon=True).start()
    tokenizer: BlockTokenizer | None = None
    while True:
        texts = blocks.get()
        outcome: Block | Exception
        try:
            tokenizer = tokenizer or BlockTokenizer(recipe)
            outcome = tokenizer(texts)
        except (UserError, RunError) as mistake:
            outcome = mistake
        with suppress(OSError):  # nobody is there any more: the other thread notices, too
            connection.send(outcome)


def _receive(connection: "Connection[Any, Any]", blocks: "SimpleQueue[list[str]]") -> None:
    """Reads blocks, and ends the process when the one that sends them is gone, however that was."""
    try:
        with suppress(EOFError, OSError):
            while True:
                blocks.put(connection.recv())
    finally:
        os._exit(1)
