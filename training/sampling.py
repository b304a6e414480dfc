"""Texts that models write: how one is drawn, and the same prompt given to several checkpoints."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from model.generation import generate
from model.gpt import GPT
from training.distributed import Process
from training.errors import UserError
from training.lookup import find_checkpoint_and_config, find_tokenizer
from training.restore import load_model
from training.tokenizer import decode_known, end_of_text_id, ids_without_token, load_tokenizer


@dataclass(frozen=True)
class Draw:
    """How tokens are drawn."""

    tokens: int
    """At most; the end of the text comes first."""
    temperature: float = 0.8
    """0 takes the likeliest token each time."""
    top_k: int | None = 50
    """Draw among so many likeliest tokens; None = among all."""
    seed: int = 0


@dataclass(frozen=True)
class Sample:
    """A text that a checkpoint wrote."""

    checkpoint: str
    """As the user named it."""
    folder: Path
    seed: int
    text: str
    """With the prompt."""
    tokens: int
    """How many were added, the end of text included."""
    ended: bool
    """Whether the model ended the text."""

    def values(self) -> dict[str, Any]:
        """For scripts."""
        return {**asdict(self), "folder": str(self.folder)}

    def lines(self, headed: bool, numbered: bool, first_seed: int) -> list[str]:
        """For people: below the checkpoint's name, where there are several, and the seed, where there are several."""
        head = [f"=== {self.checkpoint} ({self.folder.name})"] if headed and self.seed == first_seed else []
        return [*head, *([f"--- seed {self.seed}"] if numbered else []), self.text]


@dataclass(frozen=True)
class Writer:
    """A checkpoint that is to go on with a prompt, and what its ids mean."""

    checkpoint: str
    folder: Path
    tokenizer: Tokenizer
    ids: list[int]
    """Of the prompt."""
    end_of_text: int | None


def sample_checkpoints(
    checkpoints: Sequence[str], prompt: str, draw: Draw, number: int, datasets: Path, tokenizer: Path | None
) -> Iterator[Sample]:
    """Lets each checkpoint in turn continue a prompt, in float32, `number` times: from seed `draw.seed` on.

    Args:
        checkpoints: as the user names them.
        prompt: the beginning of the text, in words: each checkpoint has its own tokenizer.
        draw: how to draw.
        number: texts of each checkpoint.
        datasets: folder of the datasets, which hold the tokenizers.
        tokenizer: a tokenizer.json, instead of the runs' own.

    Raises:
        UserError: a checkpoint or a tokenizer is not there or damaged, which is found before anything is written; or
            the prompt is nothing that a model can go on with.
    """
    if prompt != prompt.encode("utf-8", "replace").decode("utf-8"):
        raise UserError("PROMPT: is not UTF-8 text; give it in UTF-8")
    for writer in [find_writer(checkpoint, prompt, datasets, tokenizer) for checkpoint in checkpoints]:
        model = load_model(writer.folder).to(Process.from_environment().device)
        for index in range(number):
            yield write(writer, model, replace(draw, seed=draw.seed + index))


def find_writer(checkpoint: str, prompt: str, datasets: Path, tokenizer: Path | None) -> Writer:
    """Finds a checkpoint and its tokenizer, and encodes the prompt with it."""
    folder, config = find_checkpoint_and_config(checkpoint)
    vocabulary = load_tokenizer(tokenizer or find_tokenizer(config, datasets))
    ids = vocabulary.encode(prompt, add_special_tokens=False).ids
    if not ids:
        raise UserError("PROMPT: is empty; the model continues a text: give at least one character")
    end_of_text = end_of_text_id(vocabulary, datasets / config.data.dataset / "dataset.json")
    return Writer(checkpoint, folder, vocabulary, ids, end_of_text)


def write(writer: Writer, model: GPT, draw: Draw) -> Sample:
    """One text."""
    try:
        added = continue_text(model, writer.ids, writer.tokenizer, writer.end_of_text, draw)
    except ValueError as error:
        raise UserError(
            f"{error}; change that option, or give the model's own tokenizer.json with --tokenizer"
        ) from None
    text = decode_known(writer.tokenizer, [*writer.ids, *added])
    ended = added[-1:] == [writer.end_of_text]
    return Sample(writer.checkpoint, writer.folder, draw.seed, text, tokens=len(added), ended=ended)


def continue_text(model: GPT, ids: list[int], tokenizer: Tokenizer, end_of_text: int | None, draw: Draw) -> list[int]:
    """The ids with which a model goes on, never one that stands for no token.

    Raises:
        ValueError: as `generate` does.
    """
    forbidden = ids_without_token(tokenizer, model.config.vocab_size, end_of_text)
    with torch.no_grad():
        return generate(model, ids, draw.tokens, draw.temperature, draw.top_k, draw.seed, end_of_text, forbidden)
