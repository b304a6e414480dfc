"""The rows that each step and each process reads, and everything that a dataset can have wrong."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Workplace
from numpy.typing import NDArray
from small_configs import small_config, write_positions, write_sparse, write_tokens

from training.config import Data, RunConfig
from training.config_file import load_run_config
from training.data import (
    TrainingData,
    check_described_vocabulary,
    check_vocabulary,
    open_training_data,
    open_validation,
    permuted,
    provide_dataset,
    tokenizer_file,
)
from training.distributed import Group, Process
from training.errors import UserError
from training.layout import Layout, plan_layout
from training.rows import Rows, TokenFile


@pytest.fixture
def group() -> Iterator[Group]:
    """One process."""
    with Process.from_environment().group() as group:
        yield group


def offsets(data: TrainingData, layout: Layout, first: int, last: int) -> list[list[int]]:
    """The offsets of the rows that each step from `first` up to `last` trains on, microbatch after microbatch."""
    steps = []
    for step in range(first, last):
        microbatches = [layout.microbatches(rank) for rank in range(layout.world_size)]
        by_number = [ranges[k] for k in range(layout.accumulation) for ranges in microbatches if k < len(ranges)]
        steps.append([int(row[0]) for positions in by_number for row in data.read(step, positions)[0]])
    return steps


def base_run(folder: Path, tokens: int = 1025, **sections: Any) -> tuple[RunConfig, TrainingData]:
    config = small_config(**sections)
    write_positions(folder / "train.safetensors", tokens)
    return config, open_training_data(config, folder)


# Ranges


@pytest.mark.parametrize(
    ("tokens", "batch", "start", "needed"),
    [
        (8, {"world_size": 1, "microbatch": 1, "accumulation": 1}, 0, 9),
        (64, {}, 0, 65),
        (64, {}, 1, 66),
        (9, {}, 1000, 1065),
        (0, {}, 0, 65),
        (1, {}, 0, 65),
    ],
)
def test_too_few_tokens(tmp_path: Path, tokens: int, batch: dict[str, int], start: int, needed: int) -> None:
    """R73: the file, what it needs and what it has, to the token; with all the data as with a length."""
    write_positions(tmp_path / "train.safetensors", tokens)
    for length in (-1, 1):
        config = small_config(batch=batch, data={"train_tokens": length, "train_start": start})
        with pytest.raises(
            UserError, match=rf"train.safetensors: needs at least {needed:,} tokens .*, has {tokens:,};"
        ):
            open_training_data(config, tmp_path)


def test_just_enough_tokens(tmp_path: Path) -> None:
    """R73: nine tokens are one sequence of eight."""
    one = {"world_size": 1, "microbatch": 1, "accumulation": 1}
    _, data = base_run(tmp_path, 9, batch=one)
    assert (data.rows.count, data.total_steps, data.rows.stop) == (1, 1, 9)
    assert base_run(tmp_path, 65)[1].total_steps == 1
    assert base_run(tmp_path, 128)[1].total_steps == 1
    assert base_run(tmp_path, 129)[1].total_steps == 2


def test_every_token_is_an_input_once_and_a_target_once(tmp_path: Path) -> None:
    """R75: P(17) with context 8: the targets are 1 to 16."""
    one = {"world_size": 1, "microbatch": 1, "accumulation": 1}
    _, data = base_run(tmp_path, 17, batch=one)
    batches = [data.read(step, range(1)) for step in range(data.total_steps)]
    assert torch.cat([inputs.flatten() for inputs, _ in batches]).tolist() == list(range(16))
    assert torch.cat([targets.flatten() for _, targets in batches]).tolist() == list(range(1, 17))


@pytest.mark.parametrize(
    ("start", "steps_by_length"),
    [
        (0, {1: 1, 64: 1, 65: 2, 128: 2, 129: 3, 960: 15, 961: 16, 1024: 16, -1: 16}),
        (1, {960: 15, -1: 15}),
        (960, {-1: 1}),
    ],
)
def test_a_length_is_rounded_up_to_whole_steps(tmp_path: Path, start: int, steps_by_length: dict[int, int]) -> None:
    """And -1 means as many whole steps as the file holds."""
    for length, steps in steps_by_length.items():
        config, data = base_run(tmp_path, data={"train_tokens": length, "train_start": start})
        assert data.total_steps == data.steps_per_epoch == steps
        assert config.total_steps in (None, steps)
        assert offsets(data, plan_layout(config.batch, 1), 0, 1)[0][0] == start
        assert data.rows.stop == start + 64 * steps + 1
    with pytest.raises(UserError, match=f"needs at least {1025 + (start or 1):,} tokens .* has 1,025"):
        base_run(tmp_path, data={"train_tokens": 961, "train_start": start or 1})


def test_epochs_are_passes_over_the_range(tmp_path: Path) -> None:
    config, data = base_run(tmp_path, data={"train_tokens": 100, "train_start": 8, "epochs": 3})
    assert (data.steps_per_epoch, data.total_steps, config.total_steps) == (2, 6, 6)
    first, second = range(8, 72, 8), range(72, 136, 8)
    assert offsets(data, plan_layout(config.batch, 1), 0, 6) == [[*first], [*second]] * 3


def test_the_forerunner_s_numbers(tmp_path: Path) -> None:
    """Oracles: 33,165 steps, 3,260,252,160 tokens seen; its file has to hold one more for the last target."""
    config = load_run_config("1xrtx3090-baseline")
    path = write_sparse(tmp_path / "train.safetensors", 3_260_252_161)
    data = open_training_data(config, tmp_path)
    assert (data.total_steps, data.rows.count * 1024, data.rows.stop) == (33_165, 3_260_252_160, 3_260_252_161)
    assert open_training_data(load_run_config("original"), tmp_path).total_steps == 530_630
    write_sparse(path, 3_260_252_160)
    with pytest.raises(UserError, match=r"needs at least 3,260,252,161 tokens .*33,165 whole steps.*has 3,260,252,160"):
        open_training_data(config, tmp_path)


@pytest.mark.parametrize(
    ("tokens", "start", "count"),
    [(-1, 0, 12), (-1, 4, 12), (-1, 5, 11), (100, 0, 12), (64, 0, 8), (71, 0, 8), (8, 92, 1), (63, 1, 7)],
)
def test_a_validation_range_is_rounded_down_to_whole_sequences(
    tmp_path: Path, tokens: int, start: int, count: int
) -> None:
    """R100: the configured rows; never none."""
    config, data = base_run(tmp_path, data={"validation_tokens": tokens, "validation_start": start})
    write_positions(tmp_path / "validation.safetensors", 101)
    rows = open_validation(config, tmp_path, data.rows)
    assert (rows.start, rows.count) == (start, count)
    assert rows.file.path.name == "validation.safetensors"


@pytest.mark.parametrize(
    ("tokens", "start", "needed"), [(104, 0, 105), (-1, 93, 102), (8, 93, 102), (-1, 10**6, 10**6 + 9), (96, 5, 102)]
)
def test_a_validation_range_that_does_not_fit(tmp_path: Path, tokens: int, start: int, needed: int) -> None:
    config, data = base_run(tmp_path, data={"validation_tokens": tokens, "validation_start": start})
    write_positions(tmp_path / "validation.safetensors", 101)
    with pytest.raises(UserError, match=rf"validation.safetensors: needs at least {needed:,} tokens .*, has 101;"):
        open_validation(config, tmp_path, data.rows)


def test_ranges_of_one_file_must_not_overlap(tmp_path: Path) -> None:
    """R76: tokens 0 to 1024 are trained on: a validation from 1024 is refused, one from 1025 is not."""
    ranges = {"train_tokens": 1024, "validation_tokens": 64}
    for start, fits in ((0, False), (1024, False), (1025, True), (1016, False)):
        config, data = base_run(tmp_path, 2000, data={**ranges, "validation_start": start})
        if fits:
            assert open_validation(config, tmp_path, data.rows).count == 8
            continue
        overlap = rf"training tokens \[0, 1,025\) and the validation tokens \[{start:,}, {start + 65:,}\) overlap"
        with pytest.raises(UserError, match=f"train.safetensors: the {overlap}; move data.validation_start to 1,025"):
            open_validation(config, tmp_path, data.rows)
    for start, fits in ((64, False), (65, True)):  # validation before training
        config, data = base_run(tmp_path, 2000, data={**ranges, "train_start": start})
        if fits:
            assert open_validation(config, tmp_path, data.rows).count == 8
        else:
            with pytest.raises(UserError, match="overlap"):
                open_validation(config, tmp_path, data.rows)


def test_one_file_without_ranges(tmp_path: Path) -> None:
    """R76: everything is trained on, and all of it would be validated on; so too where validation is a link to it."""
    config, data = base_run(tmp_path)
    with pytest.raises(UserError, match="overlap"):
        open_validation(config, tmp_path, data.rows)
    for link in (Path.symlink_to, Path.hardlink_to):
        link(tmp_path / "validation.safetensors", tmp_path / "train.safetensors")
        with pytest.raises(UserError, match="overlap"):
            open_validation(config, tmp_path, data.rows)
        (tmp_path / "validation.safetensors").unlink()
    (tmp_path / "validation.safetensors").symlink_to("nowhere")
    with pytest.raises(UserError, match=r"validation.safetensors: not a whole safetensors file"):
        open_validation(config, tmp_path, data.rows)


def test_validation_without_the_training_file(tmp_path: Path) -> None:
    """The training file is opened only where the validation is in it, be it through a link."""
    config = small_config(data={"train_tokens": 1024, "validation_start": 1025})
    validation, train = tmp_path / "validation.safetensors", tmp_path / "train.safetensors"
    with pytest.raises(UserError, match=r"train.safetensors: there is no such file"):
        open_validation(config, tmp_path)
    write_positions(validation, 2000)
    assert open_validation(config, tmp_path).file.path == validation
    train.write_bytes(b"not a token file")
    assert open_validation(config, tmp_path).count == 121
    train.unlink()
    validation.rename(train)
    for link in (None, Path.symlink_to, Path.hardlink_to):
        if link is not None:
            link(validation, train)
        assert open_validation(config, tmp_path).file.path == train
        with pytest.raises(UserError, match="overlap"):
            open_validation(small_config(data={"train_tokens": 1024, "validation_start": 1024}), tmp_path)
        validation.unlink(missing_ok=True)


# Ids and the vocabulary


def vocabulary_problem(group: Group, path: Path, tokens: Any, dtype: Any, vocab_size: int, start: int = 0) -> str:
    file = TokenFile(write_tokens(path, tokens, dtype))
    with pytest.raises(UserError) as caught:
        check_vocabulary(Rows(file, start, (file.length - start - 1) // 8, 8), vocab_size, group)
    return str(caught.value)


def test_a_plan_refuses_ids_that_the_model_has_not(tmp_path: Path) -> None:
    """Where the description gives reason to look; ids that are only possible are no reason to refuse."""
    config = small_config(data={"train_tokens": 512})
    tokens = np.arange(1001) % config.model.vocab_size
    write_tokens(tmp_path / "train.safetensors", tokens)
    check_described_vocabulary(config, tmp_path / "nowhere")
    for described in ('{"vocab_size": 5000}', "{}", "[]", "nonsense"):
        (tmp_path / "dataset.json").write_text(described)
        check_described_vocabulary(config, tmp_path)
    (tmp_path / "dataset.json").write_text('{"vocab_size": 5000}')
    tokens[100] = 4999
    write_tokens(tmp_path / "train.safetensors", tokens)
    with pytest.raises(UserError, match=r"the id 4999 at offset 100 .* set model.vocab_size=5000"):
        check_described_vocabulary(config, tmp_path)


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32, np.int32, np.int64])
def test_an_id_that_the_vocabulary_has_not(tmp_path: Path, group: Group, dtype: Any) -> None:
    """R72: file, offset, id, vocabulary; the first of several, counted from the file's beginning."""
    tokens = np.arange(2001) % 50
    tokens[[1000, 1500]] = 50, 60
    path = tmp_path / "train.safetensors"
    expected = (
        f"{path}: the id 50 at offset 1,000 is not in the model's vocabulary of 50 (model.vocab_size); "
        "the data belongs to another tokenizer"
    )
    assert vocabulary_problem(group, path, tokens, dtype, 50) == expected
    assert vocabulary_problem(group, path, tokens, dtype, 50, start=993) == expected
    (tmp_path / "dataset.json").write_text('{"vocab_size": 61}')
    assert vocabulary_problem(group, path, tokens, dtype, 50) == f"{expected}: 61 ids; set model.vocab_size=61"
    file = TokenFile(path)
    check_vocabulary(Rows(file, 0, 124, 8), 50, group)  # up to 992, the last target
    check_vocabulary(Rows(file, 0, 250, 8), 61, group)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("vocab_size", [50, 2**31 - 1, 2**40])
def test_a_negative_id(tmp_path: Path, group: Group, dtype: Any, vocab_size: int) -> None:
    """R71, R72: not the 65535 that a cast would make of it."""
    tokens = np.zeros(1001)
    tokens[777] = -1
    assert "the id -1 at offset 777 is not" in vocabulary_problem(
        group, tmp_path / "train.safetensors", tokens, dtype, vocab_size
    )


def test_ids_at_the_edge_of_their_type(tmp_path: Path, group: Group) -> None:
    path = tmp_path / "train.safetensors"
    tokens = [0] * 8 + [2**16 - 1]
    file = TokenFile(write_tokens(path, tokens))
    check_vocabulary(Rows(file, 0, 1, 8), 2**16, group)
    assert file.first_bad_token(0, 9, 2**16) is None
    assert "the id 65535 at offset 8 is not" in vocabulary_problem(group, path, tokens, np.uint16, 65535)
    large = [0] * 8 + [2**32 - 1]
    assert f"the id {2**32 - 1} at offset 8 is not" in vocabulary_problem(group, path, large, np.uint32, 2**32 - 1)
    assert f"the id {2**60} at offset 8 is not" in vocabulary_problem(group, path, [0] * 8 + [2**60], np.int64, 50257)


@pytest.mark.slow
def test_two_processes_tell_of_a_bad_id_once(workplace: Workplace) -> None:
    """R72: each checks a part; the one message names the first, though the other process found it."""
    tokens = np.zeros(5121)
    tokens[[4000, 5000]] = 257
    workplace.write_tokens(tokens=tokens.astype(np.uint16))
    config = workplace.write_config(data={"train_tokens": 5120}, evaluation={"every": None})
    run = workplace.train(config, processes=2)
    assert run.status == 1
    assert run.errors.count("the id 257 at offset 4,000 is not in the model's vocabulary of 257") == 1
    assert "offset 5,000" not in run.errors
    assert not run.folder.exists()


# Which sequences a step reads

LAYOUTS = [(1, 8), (1, 4), (1, 3), (1, 1), (2, 2), (2, 1), (3, 2), (3, 1), (4, 2), (5, 3), (8, 1), (9, 1)]


@pytest.mark.parametrize(("world_size", "microbatch"), LAYOUTS)
def test_every_row_once_and_in_order_however_often_it_stops(tmp_path: Path, world_size: int, microbatch: int) -> None:
    """R31, R32, R37: the 128 offsets of the base run, split anywhere, on any number of processes.

    R40: no process loads rows ahead of the step that asks for them, so none could have begun elsewhere.
    """
    config, data = base_run(tmp_path)
    layout = plan_layout(config.batch, world_size, microbatch)
    whole = [[64 * step + 8 * number for number in range(8)] for step in range(16)]
    assert data.total_steps == 16
    for stop in range(1, 16):
        again = open_training_data(config, tmp_path)
        assert offsets(data, layout, 0, stop) + offsets(again, layout, stop, 16) == whole


def test_every_row_once_with_another_layout_after_each_stop(tmp_path: Path) -> None:
    """R31, R33, R37: four parts on four layouts are disjoint, and together they are everything."""
    config, data = base_run(tmp_path)
    parts = [
        offsets(data, plan_layout(config.batch, *layout), start, start + 4)
        for start, layout in zip(range(0, 16, 4), [(2, 2), (1, 3), (3, 1), (7, 2)], strict=True)
    ]
    flat = [offset for part in parts for step in part for offset in step]
    assert flat == list(range(0, 1024, 8))


@pytest.mark.parametrize("accumulation", [1, 2, 4])
def test_the_same_rows_for_every_accumulation(tmp_path: Path, accumulation: int) -> None:
    """R32: positions count in sequences, not in microbatches."""
    batch = {"world_size": 1, "microbatch": 8 // accumulation, "accumulation": accumulation}
    config, data = base_run(tmp_path, batch=batch)
    assert offsets(data, plan_layout(config.batch, 1), 5, 6) == [list(range(320, 384, 8))]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("stop", [1, 14, 16, 17, 31])
def test_every_epoch_has_all_rows_after_a_stop_in_the_middle(tmp_path: Path, shuffle: bool, stop: int) -> None:
    """R35: the position is applied once, not at the beginning of each epoch."""
    config, data = base_run(tmp_path, data={"epochs": 2, "shuffle": shuffle})
    before = offsets(data, plan_layout(config.batch, 2), 0, stop)
    steps = before + offsets(open_training_data(config, tmp_path), plan_layout(config.batch, 3, 1), stop, 32)
    assert steps == offsets(data, plan_layout(config.batch, 1), 0, 32)
    epochs = [[offset for step in steps[:16] for offset in step], [offset for step in steps[16:] for offset in step]]
    for epoch in epochs:
        assert sorted(epoch) == list(range(0, 1024, 8))
    assert (epochs[0] == epochs[1]) == (not shuffle)


def test_a_shuffled_row_is_read_whole(tmp_path: Path) -> None:
    _, data = base_run(tmp_path, data={"shuffle": True, "train_start": 1, "train_tokens": 960}, seeds={"training": 7})
    assert data.shuffle_seed == 7
    numbers = data.sequences(3, range(8))
    inputs, targets = data.read(3, range(8))
    assert inputs[:, 0].tolist() == [1 + 8 * number for number in numbers]
    assert torch.equal(inputs + 1, targets)
    assert data.sequences(3, range(2, 5)) == numbers[2:5]


def test_targets_of_a_step_are_known_without_reading(tmp_path: Path) -> None:
    _, data = base_run(tmp_path)
    assert data.target_counts(0).tolist() == [8] * 8


# The permutation


@pytest.mark.parametrize("count", [*range(1, 18), 31, 32, 33, 127, 128, 129, 1000, 1024, 1025])
def test_the_order_of_an_epoch_is_a_permutation(count: int) -> None:
    for seed, epoch in ((42, 0), (42, 1), (0, 7), (2**63 - 1, 10**6)):
        assert sorted(permuted(np.arange(count), count, seed, epoch).tolist()) == list(range(count))


def test_the_order_depends_on_seed_and_epoch_and_on_nothing_else() -> None:
    def order(seed: int, epoch: int) -> tuple[int, ...]:
        return tuple(permuted(np.arange(1000), 1000, seed, epoch).tolist())

    orders = [order(seed, epoch) for seed in (0, 1, 42, 43, 2**32 + 42) for epoch in range(3)]
    assert len(set(orders)) == len(orders)
    assert order(42, 1) == orders[7]
    assert permuted(np.array([999, 3, 500]), 1000, 42, 0).tolist() == [orders[6][n] for n in (999, 3, 500)]


def test_the_order_is_the_one_of_all_earlier_versions() -> None:
    """A run resumed with a later version must find the rest of its epoch."""
    first = [9, 11, 8, 4, 15, 13, 5, 3, 7, 6, 14, 2, 0, 1, 10, 12]
    assert permuted(np.arange(16), 16, 42, 0).tolist() == first
    assert permuted(np.array([0, 1, 3_183_839]), 33_165 * 96, 42, 3).tolist() == [951_867, 533_879, 2_491_789]


def test_the_order_is_mixed_well() -> None:
    """Neighbours part, few stay where they were, and over the epochs a place takes sequences from everywhere."""
    order = permuted(np.arange(4096), 4096, 42, 0)
    assert (np.diff(order) == 1).sum() < 12  # 1 expected
    assert (order == np.arange(4096)).sum() < 12  # 1 expected
    assert abs(np.corrcoef(order, np.arange(4096))[0, 1]) < 0.08  # standard deviation 1/64
    places: NDArray[np.int64] = np.array([permuted(np.arange(8), 8, 42, epoch) for epoch in range(800)])
    counts = np.stack([np.bincount(places[:, place], minlength=8) for place in range(8)])
    assert counts.min() > 50  # 100 expected, standard deviation 9.4
    assert counts.max() < 150


# Datasets and tokenizers


def test_a_dataset_that_is_not_there(tmp_path: Path) -> None:
    """The message says what would do; and nothing is left behind."""
    with pytest.raises(UserError, match=r"datasets/nowhere: there is no such dataset; .*owner/name.*python-library"):
        provide_dataset(Data(dataset="nowhere"), tmp_path / "datasets")
    assert not (tmp_path / "datasets").exists()
    with pytest.raises(UserError, match=r"python-libary: there is no such dataset; did you mean python-library\? data"):
        provide_dataset(Data(dataset="python-libary"), tmp_path / "datasets")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="no such dataset"):
        provide_dataset(Data(dataset="nowhere"), tmp_path / "file")


@pytest.mark.parametrize("name", ["owner/tokens", "python-library"])
def test_a_dataset_that_cannot_be_put_where_it_belongs(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=rf"^{tmp_path}/file.*(cannot write there|exists already)"):
        provide_dataset(Data(dataset=name), tmp_path / "file")


def test_a_dataset_on_the_disk_is_used_as_it_is(tmp_path: Path) -> None:
    """R82: no network; its revision where it was downloaded."""
    folder = tmp_path / "owner" / "tokens"
    folder.mkdir(parents=True)
    assert provide_dataset(Data(dataset="owner/tokens"), tmp_path) is None
    commit, other = "a" * 40, "b" * 40
    assert provide_dataset(Data(dataset="owner/tokens", revision=commit), tmp_path) is None
    (folder / "download.json").write_text(json.dumps({"repository": "owner/tokens", "revision": commit}))
    assert provide_dataset(Data(dataset="owner/tokens"), tmp_path) == commit
    assert provide_dataset(Data(dataset="owner/tokens", revision=commit), tmp_path) == commit
    with pytest.raises(UserError, match=f"holds revision {commit}, but data.revision says {other}; remove the folder"):
        provide_dataset(Data(dataset="owner/tokens", revision=other), tmp_path)
    record = {"repository": "owner/tokens", "revision": commit, "requested": "v1.0"}
    (folder / "download.json").write_text(json.dumps(record))
    assert provide_dataset(Data(dataset="owner/tokens", revision="v1.0"), tmp_path) == commit
    with pytest.raises(UserError, match=r"data\.revision says main"):
        provide_dataset(Data(dataset="owner/tokens", revision="main"), tmp_path)
    (folder / "download.json").write_text("{}")
    with pytest.raises(UserError, match=r"download.json: not a record of a download"):
        provide_dataset(Data(dataset="owner/tokens"), tmp_path)


def test_a_folder_without_a_training_file(tmp_path: Path) -> None:
    problem = r"train.safetensors: there is no such file; a dataset's folder must hold"
    with pytest.raises(UserError, match=problem):
        open_training_data(small_config(), tmp_path)
    (tmp_path / "train.safetensors").mkdir()
    with pytest.raises(UserError, match=problem):
        open_training_data(small_config(), tmp_path)


def test_where_the_tokenizer_is(tmp_path: Path) -> None:
    """The dataset's own goes before the one that data.tokenizer names, a path before a name on the Hub."""
    own, other = tmp_path / "tokens" / "tokenizer.json", tmp_path / "other.json"
    assert tokenizer_file(Data(dataset="tokens"), tmp_path) is None
    named = Data(dataset="tokens", tokenizer=str(other))
    on_hub = Data(dataset="tokens", tokenizer="openai-community/gpt2")
    other.write_text("{}")
    assert tokenizer_file(named, tmp_path) == other
    assert tokenizer_file(on_hub, tmp_path) == tmp_path / ".tokenizers/openai-community/gpt2/tokenizer.json"
    own.parent.mkdir()
    own.write_text("{}")
    assert [tokenizer_file(data, tmp_path) for data in (Data(dataset="tokens"), named, on_hub)] == [own] * 3
