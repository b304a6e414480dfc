"""Digests of what a run reads: equal exactly where the same tokens come in the same steps."""

import hashlib
import itertools
import json
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Workplace
from numpy.typing import ArrayLike
from small_configs import small_config, write_positions, write_tokens
from small_documents import write_documents

from training import digests
from training.data import TrainingData, open_training_data, open_validation
from training.digests import data_order_digest, validation_digest
from training.rows import Rows, TokenFile
from training.tokenizer import train_tokenizer


def order_of(folder: Path, tokens: ArrayLike, dtype: Any = np.uint16, **sections: Any) -> str:
    """The digest of a run on some tokens, in steps of two sequences of 8 unless sections say otherwise."""
    write_tokens(folder / "train.safetensors", tokens, dtype)
    batch = {"world_size": 1, "microbatch": 2, "accumulation": 1}
    return data_order_digest(open_training_data(small_config(**{"batch": batch, **sections}), folder))


def test_the_digest_of_a_small_run_worked_out_by_hand(tmp_path: Path) -> None:
    """Two steps of two sequences: the sizes of the steps, the lengths of the sequences, their inputs, their targets."""
    sequences = [range(start, start + 8) for start in (0, 8, 16, 24)]
    content = b"2 steps of 2" + struct.pack("<4q", 8, 8, 8, 8)
    content += struct.pack("<32i", *itertools.chain(*sequences))
    content += struct.pack("<32i", *(token + 1 for token in itertools.chain(*sequences)))
    assert order_of(tmp_path, np.arange(33)) == hashlib.sha256(content).hexdigest()


def test_where_the_tokens_lie_and_who_computes_does_not_show(tmp_path: Path) -> None:
    """Another type, tokens before and behind the range, another split of the batch, a seed that orders nothing."""
    tokens = np.arange(100, 165)
    length = {"train_tokens": 64}
    digest = order_of(tmp_path, tokens, data=length)
    assert order_of(tmp_path, tokens, np.int64, data=length) == digest
    assert order_of(tmp_path, [1, 2, 3, *tokens, 4, 5], data={**length, "train_start": 3}) == digest
    split = {"world_size": 2, "microbatch": 1, "accumulation": 1}
    assert order_of(tmp_path, tokens, data=length, batch=split, seeds={"weights": 1, "training": 1}) == digest
    twice = [*tokens[:32], *tokens[:32], tokens[0]]
    again = order_of(tmp_path, twice[:33], data={"epochs": 2})
    assert order_of(tmp_path, twice) == again, "two passes are the same steps as one over the tokens twice"


def test_what_is_trained_on_in_which_step_shows(tmp_path: Path) -> None:
    tokens = np.arange(100, 229)
    seen = {"as it is": order_of(tmp_path, tokens)}
    for place in (0, 77, 128):
        seen[f"token {place}"] = order_of(tmp_path, np.where(np.arange(129) == place, 7, tokens))
    changes: dict[str, dict[str, Any]] = {
        "fewer steps": {"data": {"train_tokens": 112}},
        "another part": {"data": {"train_start": 1, "train_tokens": 112}},
        "two epochs": {"data": {"epochs": 2}},
        "another global batch": {"batch": {"world_size": 1, "microbatch": 4, "accumulation": 1}},
        "another context": {"model": {"context_length": 16}, "batch": {"microbatch": 1}},
        "shuffled": {"data": {"shuffle": True}},
        "otherwise shuffled": {"data": {"shuffle": True}, "seeds": {"weights": 42, "training": 43}},
        "shuffled, two epochs": {"data": {"shuffle": True, "epochs": 2}},
    }
    for name, sections in changes.items():
        seen[name] = order_of(tmp_path, tokens, **sections)
    assert len(set(seen.values())) == len(seen), seen
    other_weights = order_of(tmp_path, tokens, data={"shuffle": True}, seeds={"weights": 43, "training": 42})
    assert other_weights == seen["shuffled"]


def test_the_sizes_of_steps_are_said_alike_only_if_they_are_alike(tmp_path: Path) -> None:
    """Every small run: so many rows, so many in a step, so many epochs, the last step of each smaller."""
    file = TokenFile(write_positions(tmp_path / "train.safetensors", 100))
    said: dict[tuple[int, ...], str] = {}
    for count, global_batch, epochs in itertools.product(range(1, 9), range(1, 9), range(1, 4)):
        data = TrainingData(Rows(file, 0, count, 8), global_batch, epochs, None)
        sizes = tuple(len(data.sequences(step)) for step in range(data.total_steps))
        assert said.setdefault(sizes, digests._step_sizes(data)) == digests._step_sizes(data)
    assert len(set(said.values())) == len(said)


@pytest.mark.parametrize("shuffle_seed", [None, 5])
def test_places_in_a_run_are_those_of_its_steps(tmp_path: Path, shuffle_seed: int | None) -> None:
    file = TokenFile(write_positions(tmp_path / "train.safetensors", 100))
    data = TrainingData(Rows(file, 0, 11, 8), 4, 3, shuffle_seed)
    expected = [number for step in range(data.total_steps) for number in data.sequences(step)]
    assert data.sequences_at(np.arange(33)).tolist() == expected
    some = np.array([0, 10, 11, 32])
    assert data.sequences_at(some).tolist() == [expected[place] for place in some]


def test_of_a_long_run_evenly_spread_sequences_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 101 sequences 5: 0, 25, 50, 75, 100; a token in one of them shows, the order of all of them does."""
    monkeypatch.setattr(digests, "SAMPLES", 5)
    monkeypatch.setattr(digests, "WHOLE_SEQUENCES", 100)
    tokens = np.arange(809)
    one = {"world_size": 1, "microbatch": 1, "accumulation": 1}
    digest = order_of(tmp_path, tokens, batch=one)
    changed = {
        sequence: order_of(tmp_path, np.where(np.arange(809) == 8 * sequence + 3, 7, tokens), batch=one) != digest
        for sequence in (0, 1, 24, 25, 50, 74, 75, 99, 100)
    }
    assert [sequence for sequence, shows in changed.items() if shows] == [0, 25, 50, 75, 100]
    assert order_of(tmp_path, np.roll(tokens, 1), batch=one) != digest
    assert order_of(tmp_path, tokens, batch=one, data={"shuffle": True}) != digest
    monkeypatch.setattr(digests, "WHOLE_SEQUENCES", 101)
    whole = order_of(tmp_path, tokens, batch=one)
    assert whole != digest
    assert order_of(tmp_path, np.where(np.arange(809) == 11, 7, tokens), batch=one) != whole
    monkeypatch.setattr(digests, "WHOLE_TOKENS", 807)
    assert order_of(tmp_path, tokens, batch=one) == digest


@pytest.mark.parametrize(("steps", "global_batch", "shuffle_seed"), [(33_165, 96, 42), (530_630, 6, None)])
def test_the_longest_runs_take_no_time(tmp_path: Path, steps: int, global_batch: int, shuffle_seed: int | None) -> None:
    """3.26 billion tokens (a file of holes), not read before: tenths of a second; the bound is for busy machines."""
    size = 2 * (steps * global_batch * 1024 + 1)
    header = json.dumps({"tokens": {"dtype": "U16", "shape": [size // 2], "data_offsets": [0, size]}}).encode()
    header += b" " * (-len(header) % 8)
    path = tmp_path / "train.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + size)
    data = TrainingData(Rows(TokenFile(path), 0, steps * global_batch, 1024), global_batch, 1, shuffle_seed)
    began = time.process_time()
    data_order_digest(data)
    assert time.process_time() - began < 2


def documents_digest(folder: Path, documents: Sequence[Sequence[int]], masks: Any = None, **sections: Any) -> str:
    write_positions(folder / "train.safetensors", 200)
    write_documents(folder / "validation.safetensors", documents, masks)
    return validation_digest(open_validation(small_config(**sections), folder))


def test_a_validation_is_its_inputs_and_targets(tmp_path: Path) -> None:
    """Documents: a mask, an end, a token show; what is cut off at the context and what the loop leaves out do not."""
    documents = [[1, 2, 3], [4, 5], [6, *range(20, 40)], [7]] + [[9, 8, 9]] * 70
    digest = documents_digest(tmp_path, documents)
    assert documents_digest(tmp_path, documents, evaluation={"every": 1, "tokens": 8}) == digest
    assert documents_digest(tmp_path, documents, [[1] * len(document) for document in documents]) == digest
    cut = [document[:9] for document in documents]
    assert documents_digest(tmp_path, cut) == digest
    masked = [[0] * 3] + [[1] * len(document) for document in documents[1:]]
    others = [
        documents_digest(tmp_path, documents, masked),
        documents_digest(tmp_path, [[1, 2], [3, 4, 5], *documents[2:]]),
        documents_digest(tmp_path, [*documents[:-1], [9, 8, 8]]),
        documents_digest(tmp_path, documents[:-1]),
    ]
    assert len({digest, *others}) == 5


def test_a_packed_validation(tmp_path: Path) -> None:
    """The range counts, not the file: 4 sequences of 8 and the last target; in longer sequences losses are others."""

    def digest(tokens: ArrayLike, **sections: Any) -> str:
        write_tokens(tmp_path / "validation.safetensors", tokens)
        return validation_digest(open_validation(small_config(**sections), tmp_path))

    whole = digest(np.arange(33))
    assert digest(np.arange(50), data={"validation_tokens": 39}) == whole
    assert digest([5, *range(33)], data={"validation_start": 1}) == whole
    assert digest([*range(32), 7]) != whole
    assert digest(np.arange(25)) != whole
    assert digest(np.arange(33), model={"context_length": 16}) != whole


@pytest.mark.slow
def test_seeds_act_separately_and_a_run_records_what_it_shares_with_others(workplace: Workplace) -> None:
    """seeds.weights: the initial weights alone. seeds.training: dropout and order alone. Resumed on another layout."""
    tokenizer = workplace.datasets / "data" / "tokenizer.json"
    train_tokenizer(["some text"], 257).save(str(tokenizer))
    config = workplace.write_config(model={"dropout": 0.1}, data={"shuffle": True})

    def trained(output: str, *overrides: str, **options: Any) -> tuple[dict[str, Any], list[float]]:
        run = workplace.train_here(config, output=output, overrides=list(overrides), **options)
        return [line for line in run.of_kind("event") if line["event"] in ("start", "resume")][-1], run.losses

    base, losses = trained("base", stop_after=1)
    weights, _ = trained("weights", "seeds.weights=43", stop_after=1)
    training, other_losses = trained("training", "seeds.training=43", stop_after=1)
    assert base["weights_sha256"] == training["weights_sha256"] != weights["weights_sha256"]
    assert base["data_order_sha256"] == weights["data_order_sha256"] != training["data_order_sha256"]
    assert losses[0] != other_losses[0]
    assert len({event["validation_sha256"] for event in (base, weights, training)}) == 1
    assert base["tokenizer_sha256"] == hashlib.sha256(tokenizer.read_bytes()).hexdigest()
    resumed, _ = trained("base", stop_after=2, resume="latest", microbatch=3)
    assert resumed["event"] == "resume"
    for key in ("weights_sha256", "data_order_sha256", "validation_sha256", "tokenizer_sha256"):
        assert resumed[key] == base[key], key
