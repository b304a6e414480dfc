"""Texts that models write: greedy is the chain of likeliest tokens, and several checkpoints get the same prompt."""

import dataclasses
from pathlib import Path

import pytest
import torch
from small_checkpoints import adamw, state_at
from small_exports import PADDED, SHAPE, TOKENS, noisy_model, run_config, write_tokenizer
from tokenizers import Tokenizer

from model.gpt import GPT, GPTConfig
from training.checkpoint import write_checkpoint
from training.config import config_mapping
from training.errors import UserError
from training.sampling import Draw, Writer, continue_text, sample_checkpoints, write
from training.snapshot import take_snapshot
from training.tokenizer import END_OF_TEXT, decode_known, load_tokenizer, train_tokenizer

PROMPT = "Every effort"
GREEDY = Draw(tokens=20, temperature=0)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def likeliest_chain(model: GPT, ids: list[int], length: int, known: int) -> list[int]:
    """The likeliest of the first `known` tokens, read off the whole context each time."""
    text = list(ids)
    for _ in range(length):
        with torch.no_grad():
            text.append(int(model.eval()(torch.tensor([text[-SHAPE.context_length :]]))[0, -1, :known].argmax()))
    return text[len(ids) :]


def test_greedy_is_the_chain_of_likeliest_tokens(tokenizer: Tokenizer) -> None:
    """At temperature 0, whatever the seed and top_k; also where a row that stands for no token is the likeliest."""
    ids = tokenizer.encode(PROMPT).ids
    for config in (SHAPE, PADDED):
        model = noisy_model(config)
        if config is PADDED:
            with torch.no_grad():
                model.head.weight[TOKENS:] *= 30
            assert max(likeliest_chain(model, ids, 20, PADDED.vocab_size)) >= TOKENS
        chain = likeliest_chain(model, ids, 20, TOKENS)
        assert len(set(chain)) > 3
        for draw in (GREEDY, dataclasses.replace(GREEDY, seed=7, top_k=3)):
            assert continue_text(model, ids, tokenizer, None, draw) == chain


def test_a_text_that_its_model_ends(tokenizer: Tokenizer, tmp_path: Path) -> None:
    ids = tokenizer.encode(PROMPT).ids
    model = noisy_model(SHAPE)
    chain = likeliest_chain(model, ids, 20, TOKENS)
    end = chain[4]
    length = chain.index(end) + 1
    ended = write(Writer("run", tmp_path, tokenizer, ids, end), model, GREEDY)
    assert (ended.tokens, ended.ended) == (length, True)
    assert ended.text == decode_known(tokenizer, [*ids, *chain[:length]])
    whole = write(Writer("run", tmp_path, tokenizer, ids, None), model, GREEDY)
    assert (whole.tokens, whole.ended) == (20, False)


def save_run(folder: Path, config: GPTConfig, dataset: str) -> Path:
    """A checkpoint that knows its run's config."""
    model = noisy_model(config)
    mapping = config_mapping(run_config(config, data={"dataset": dataset}))
    state = dataclasses.replace(state_at(3), config=mapping)
    return write_checkpoint(folder, take_snapshot(model, adamw(model), state))


def test_several_checkpoints_with_the_same_prompt_and_seeds(tmp_path: Path) -> None:
    """In the order given, each as alone and with its own tokenizer; a mistake is found before the first word."""
    first = load_tokenizer(write_tokenizer(tmp_path / "data"))
    second = train_tokenizer(["quite another text, " * 9], 270)
    (tmp_path / "words").mkdir()
    second.save(str(tmp_path / "words" / "tokenizer.json"))
    shapes = (SHAPE, dataclasses.replace(SHAPE, vocab_size=270, n_layers=1))
    names = [
        str(save_run(tmp_path / name, shape, dataset))
        for name, shape, dataset in zip(("one", "two"), shapes, ("data", "words"), strict=True)
    ]
    draw = Draw(tokens=12, temperature=0.9, top_k=20, seed=5)
    samples = list(sample_checkpoints(names, PROMPT, draw, 2, tmp_path, None))
    assert [(sample.checkpoint, sample.seed) for sample in samples] == [
        (names[0], 5),
        (names[0], 6),
        (names[1], 5),
        (names[1], 6),
    ]
    for sample, tokenizer, shape in zip(
        samples, (first, first, second, second), (shapes[0], shapes[0], *shapes[1:] * 2), strict=True
    ):
        ids = tokenizer.encode(PROMPT).ids
        end = tokenizer.token_to_id(END_OF_TEXT)
        added = continue_text(noisy_model(shape), ids, tokenizer, end, dataclasses.replace(draw, seed=sample.seed))
        assert sample.text == decode_known(tokenizer, [*ids, *added])
        assert sample.values()["folder"] == str(sample.folder) == sample.checkpoint
    assert len({sample.text for sample in samples}) == 4
    for wrong in ([*names, "nix"], [*names, str(save_run(tmp_path / "three", SHAPE, "nowhere"))]):
        with pytest.raises(UserError, match=r"there is no such"):
            next(sample_checkpoints(wrong, PROMPT, draw, 1, tmp_path, None))
