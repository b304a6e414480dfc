"""Documents as sequences: which tokens are targets, padding, truncation, steps, and all a file can have wrong.

Names like G05 are those of public reports against other tools.
"""

from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from known_model import ONE_TO_FOUR, ONE_TO_FOUR_LOSS, SMALL, known_gpt
from ranks import on_ranks
from safetensors.numpy import save
from small_configs import small_config, write_positions
from small_documents import documents_of_targets, write_documents

from model.gpt import GPTConfig, build_gpt
from training import document_rows
from training.config import Batch, Data, Optimizer, Precision, RunConfig
from training.data import TrainingData, open_training_data, open_validation
from training.distributed import Group
from training.document_rows import DocumentRows, DocumentSummary
from training.errors import UserError
from training.evaluation import Evaluated, evaluate
from training.gradients import AveragedGradients
from training.layout import Layout, plan_layout
from training.loss import IGNORED, SequenceLoss
from training.optimizer import build_optimizer
from training.rows import TokenFile
from training.step import Trainer
from training.step_records import StepReader, StepRecord

DOCUMENTS = [[10, 11, 12, 13], [20], [30, 31], [40, 41, 42, 43, 44, 45]]
MASKS = [[1, 0, 1, 1], [1], [0, 1], [0, 0, 0, 0, 1, 1]]
__ = IGNORED


def opened(folder: Path, *content: Any, context: int = 8, **tensors: Any) -> DocumentRows:
    return DocumentRows(TokenFile(write_documents(folder / "train.safetensors", *content, **tensors)), context)


def test_documents_are_rows_padded_to_the_longest_of_those_asked_for(tmp_path: Path) -> None:
    found = opened(tmp_path, DOCUMENTS, MASKS)
    assert (found.count, found.start, found.stop, found.summary.tokens) == (4, 0, 13, 9)
    inputs, targets = found.read([2, 0])
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.tolist() == [[30, 0, 0], [10, 11, 12]]
    assert targets.tolist() == [[31, __, __], [__, 12, 13]]
    inputs, targets = found.read(range(3, 4))
    assert inputs.tolist() == [[40, 41, 42, 43, 44]]
    assert targets.tolist() == [[__, __, __, 44, 45]]


def test_a_document_of_one_token_makes_a_row_of_one_position(tmp_path: Path) -> None:
    found = opened(tmp_path, DOCUMENTS, MASKS)
    inputs, targets = found.read([1])
    assert (inputs.shape, targets.tolist()) == ((1, 1), [[__]])
    assert found.input_tokens([1, 3]).tolist() == [0, 5]


@pytest.mark.parametrize("masks", [None, [[1] * 5] * 2, [[0, 1, 1, 1, 1]] * 2])
def test_g05_the_first_token_of_a_document_is_never_a_target(tmp_path: Path, masks: Any) -> None:
    """Two documents of 5 tokens have 8 targets, not 10, whatever the mask says of the first ones."""
    found = opened(tmp_path, [[3] * 5] * 2, masks)
    assert found.target_counts([0, 1]).tolist() == [4, 4]
    assert found.read([0, 1])[1].tolist() == [[3] * 4] * 2


@pytest.mark.parametrize(("most", "targets"), [(6, 0), (7, 1), (8, 2), (9, 2)])
def test_g70_truncation_takes_targets_away_and_tells(tmp_path: Path, most: int, targets: int) -> None:
    """Prompt 6 tokens, answer 2, at most 6, 7, 8 tokens: 0, 1, 2 targets; only such documents: refused."""
    document, mask = list(range(8)), [0] * 6 + [1] * 2
    path = tmp_path / "train.safetensors"
    if not targets:
        problem = f"^{path}: none of its 1 documents has a target within the first 6 tokens .*: raise model.context"
        with pytest.raises(UserError, match=problem):
            opened(tmp_path, [document], [mask], context=most - 1)
    found = opened(tmp_path, [document, [1, 2]], [mask, [0, 1]], context=most - 1)
    assert found.target_counts([0, 1]).tolist() == [targets, 1]
    assert int((found.read([0])[1] != IGNORED).sum()) == targets
    cut = max(0, 8 - most)
    assert found.summary == DocumentSummary(2, 7 - cut + 1, targets + 1, int(cut > 0), cut, int(targets == 0))


def test_the_summary_is_a_sentence() -> None:
    whole = DocumentSummary(1200, 9, 5000, 0, 0, 0)
    assert whole.sentence(8) == "1,200 documents with 5,000 targets"
    cut = DocumentSummary(4, 9, 5, 2, 1003, 1)
    assert cut.sentence(1024) == (
        "4 documents with 5 targets, 2 truncated to 1,025 tokens (1,003 left out), 1 without a target"
    )


def test_g71_an_end_of_text_is_a_target_though_it_pads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding is known by its position: with the id of the end of text as padding, [0, 1, 3] has the targets 1, 3."""
    found = opened(tmp_path, [[0, 1, 3], [0] * 6])
    for padding in (3, 0, 5):
        monkeypatch.setattr(document_rows, "PADDING", padding)
        inputs, targets = found.read([0, 1])
        assert inputs[0].tolist() == [0, 1, padding, padding, padding]
        assert targets[0].tolist() == [1, 3, __, __, __]


def test_g73_padding_changes_no_loss_and_no_gradient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that is all padding, and any padding id: the loss and the gradient of the others are as without."""
    config = GPTConfig(vocab_size=50, context_length=8, emb_dim=16, n_heads=2, n_layers=2, dropout=0.0)
    found = opened(tmp_path, DOCUMENTS, MASKS)

    def loss_and_gradient(*batches: list[int]) -> torch.Tensor:
        module = SequenceLoss(build_gpt(config, seed=3))
        loss = torch.stack([module(*found.read(numbers))[0] for numbers in batches]).sum()
        loss.backward()
        return torch.cat([loss[None].detach(), *[p.grad.flatten() for p in module.parameters() if p.grad is not None]])

    alone = loss_and_gradient([0], [2], [3])
    assert alone.isfinite().all()
    for padding in (0, 49):
        monkeypatch.setattr(document_rows, "PADDING", padding)
        assert torch.allclose(loss_and_gradient([1, 0, 3, 2]), alone, rtol=1e-5, atol=1e-6)


def test_counts_agree_with_what_is_read_wherever_the_pieces_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random documents and masks; the one pass goes in pieces of any size."""
    generator = np.random.default_rng(7)
    lengths = [1, 1, 40, *generator.integers(1, 12, size=60).tolist(), 1]
    documents = [generator.integers(0, 50, size=length).tolist() for length in lengths]
    masks = [generator.integers(0, 2, size=length).tolist() for length in lengths]
    file = TokenFile(write_documents(tmp_path / "train.safetensors", documents, masks))
    expected = [sum(mask[1:10]) for mask in masks]
    for piece in (1, 2, 7, 64, file.length - 1, file.length, file.length + 1, 2**20):
        monkeypatch.setattr(document_rows, "CHECKED_AT_ONCE", piece)
        found = DocumentRows(file, context=9)
        assert found.target_counts(range(len(lengths))).tolist() == expected
    _, targets = found.read(range(len(lengths)))
    assert (targets != IGNORED).sum(dim=1).tolist() == expected
    assert found.summary.targets == sum(expected)
    assert found.input_tokens(range(len(lengths))).tolist() == [min(length - 1, 9) for length in lengths]


@pytest.mark.parametrize(("tokens", "count"), [(1, 1), (3, 2), (4, 3), (8, 3), (9, 4), (100, 4)])
def test_the_first_documents_within_some_tokens(tmp_path: Path, tokens: int, count: int) -> None:
    """They hold 3, 0, 1 and 5 input tokens; at least one document."""
    assert opened(tmp_path, DOCUMENTS, MASKS).within(tokens) == count


def test_the_fingerprint_tells_of_ends_tokens_and_mask(tmp_path: Path) -> None:
    first = opened(tmp_path, DOCUMENTS, MASKS).file.fingerprint()
    assert opened(tmp_path, DOCUMENTS, MASKS).file.fingerprint() == first
    others = [
        opened(tmp_path, DOCUMENTS, [[1, 1, 0, 1], *MASKS[1:]]),
        opened(tmp_path, [[10, 11, 12, 14], *DOCUMENTS[1:]], MASKS),
        opened(tmp_path, [[10, 11, 12], [13, 20], *DOCUMENTS[2:]], MASKS),
        opened(tmp_path, DOCUMENTS),
    ]
    assert len({first, *(other.file.fingerprint() for other in others)}) == 5


@pytest.mark.parametrize(
    ("tensors", "problem"),
    [
        (
            {"document_ends": np.array([4, 13], dtype=np.int32)},
            "`document_ends` has type I32 and shape .2.; it must be",
        ),
        ({"document_ends": np.array([4.0, 13.0])}, "`document_ends` has type F64"),
        (
            {"document_ends": np.array([[4, 13]])},
            r"`document_ends` has type I64 and shape \[1, 2\]; it must be one row",
        ),
        ({"document_ends": np.zeros(0, dtype=np.int64)}, "`document_ends` is empty; a dataset needs a document"),
        ({"document_ends": np.array([4, 4, 13])}, "`document_ends` has 4 at document 1, after 4; ends are exclusive"),
        ({"document_ends": np.array([5, 4, 13])}, "`document_ends` has 4 at document 1, after 5"),
        ({"document_ends": np.array([0, 13])}, "`document_ends` has 0 at document 0, after 0"),
        ({"document_ends": np.array([-1, 13])}, "`document_ends` has -1 at document 0, after 0"),
        ({"document_ends": np.array([4, 12])}, "the last of `document_ends` is 12, but there are 13 tokens; the last"),
        ({"document_ends": np.array([4, 14])}, "the last of `document_ends` is 14, but there are 13 tokens"),
        ({"loss_mask": np.ones(12, dtype=np.uint8)}, r"type U8 and shape \[12\]; .* uint8 as long as `tokens`, 13;"),
        ({"loss_mask": np.ones(14, dtype=np.uint8)}, r"`loss_mask` has type U8 and shape \[14\]"),
        ({"loss_mask": np.ones((13, 1), dtype=np.uint8)}, r"`loss_mask` has type U8 and shape \[13, 1\]"),
        ({"loss_mask": np.ones(13, dtype=np.int64)}, "`loss_mask` has type I64"),
        ({"loss_mask": np.ones(13, dtype=np.bool_)}, "`loss_mask` has type BOOL"),
        (
            {"loss_mask": np.array([1] * 7 + [2] + [1] * 5, dtype=np.uint8)},
            "`loss_mask` is 2 at offset 7; it must be 1",
        ),
        ({"loss_mask": np.full(13, 255, dtype=np.uint8)}, "`loss_mask` is 255 at offset 0"),
        ({"loss_mask": np.zeros(13, dtype=np.uint8)}, "none of its 4 documents has a target within the first 9 tokens"),
        ({"loss_mask": np.eye(1, 13, dtype=np.uint8)[0]}, "none of its 4 documents has a target"),
    ],
)
def test_a_malformed_document_file_is_refused_in_one_sentence(
    tmp_path: Path, tensors: dict[str, Any], problem: str
) -> None:
    """File, what, rule, remedy."""
    with pytest.raises(UserError, match=f"^{tmp_path / 'train.safetensors'}: .*{problem}") as caught:
        opened(tmp_path, DOCUMENTS, MASKS, **tensors)
    assert ";" in str(caught.value)


def test_a_document_file_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    tensors = {"tokens": np.zeros(9, dtype=np.uint16), "document_ends": np.array([9])}
    (tmp_path / "train.safetensors").write_bytes(save(tensors)[:-1])
    with pytest.raises(UserError, match="not a whole safetensors file"):
        TokenFile(tmp_path / "train.safetensors")


# Steps and validation


def document_run(folder: Path, count: int, **sections: Any) -> TrainingData:
    """Documents of 2 to 4 tokens, of which the first is the document's number; a global batch of 8."""
    write_documents(folder / "train.safetensors", [[number] * (2 + number % 3) for number in range(count)])
    return open_training_data(small_config(**sections), folder)


def numbers_of(data: TrainingData, layout: Layout, first: int, last: int) -> list[list[int]]:
    """The documents that some steps train on, in the order of the step, read through a layout."""
    steps = []
    for step in range(first, last):
        size = len(data.target_counts(step))
        parts = [part for rank in range(layout.world_size) for part in layout.microbatches(rank, size)]
        rows = [data.read(step, part)[0][:, 0].tolist() for part in sorted(parts, key=lambda part: part.start)]
        steps.append([number for row in rows for number in row])
    return steps


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("count", [8, 9, 15, 19, 24])
def test_an_epoch_of_documents_ends_with_a_smaller_step(tmp_path: Path, count: int, shuffle: bool) -> None:
    """Each document once an epoch, on any layout; targets and tokens of a step are those of its documents.

    G28: no step is of two epochs, so none has two denominators. G30: what is left of an epoch is one step.
    """
    data = document_run(tmp_path, count, data={"epochs": 2, "shuffle": shuffle})
    per_epoch = -(-count // 8)
    assert (data.steps_per_epoch, data.total_steps) == (per_epoch, 2 * per_epoch)
    config = small_config()
    for layout in ((1, None), (2, 2), (3, 1), (5, 3)):
        steps = numbers_of(data, plan_layout(config.batch, *layout), 0, 2 * per_epoch)
        assert [len(step) for step in steps] == [*[8] * (per_epoch - 1), count - 8 * (per_epoch - 1)] * 2
        assert steps == [data.sequences(step) for step in range(2 * per_epoch)]
    first, second = (list(chain(*steps[start : start + per_epoch])) for start in (0, per_epoch))
    assert sorted(first) == sorted(second) == list(range(count))
    assert (first == second) == (not shuffle)
    for step, numbers in enumerate(steps):
        assert data.target_counts(step).tolist() == [1 + number % 3 for number in numbers]
        assert data.input_tokens(step) == sum(1 + number % 3 for number in numbers)
    assert data.rows.summary is not None
    assert data.rows.summary.tokens == sum(1 + number % 3 for number in range(count))


@pytest.mark.parametrize("shuffle", [False, True])
def test_g88_documents_after_a_stop_in_the_middle_of_an_epoch(tmp_path: Path, shuffle: bool) -> None:
    """64 documents, 2 epochs, stopped in each: none twice, none left out, the order of no stop."""
    sections = {"data": {"epochs": 2, "shuffle": shuffle}}
    data, again = (document_run(tmp_path, 64, **sections) for _ in range(2))
    layouts = [plan_layout(small_config().batch, *layout) for layout in ((2, 2), (1, 3), (3, 1))]
    parts = zip([0, 3, 11], [3, 11, 16], layouts, strict=True)
    steps = [step for first, last, layout in parts for step in numbers_of(again, layout, first, last)]
    assert steps == numbers_of(data, layouts[0], 0, 16)
    assert all(sorted(chain(*steps[start : start + 8])) == list(range(64)) for start in (0, 8))


def test_g26_fewer_documents_than_a_global_batch_are_one_step_an_epoch(tmp_path: Path) -> None:
    data = document_run(tmp_path, 3, data={"epochs": 5})
    assert (data.total_steps, data.target_counts(4).tolist()) == (5, [1, 2, 3])


@pytest.mark.parametrize(
    ("key", "value", "whole"),
    [("train_tokens", 64, -1), ("train_start", 1, 0), ("validation_tokens", 64, -1), ("validation_start", 8, 0)],
)
def test_a_range_of_documents_is_refused(tmp_path: Path, key: str, value: int, whole: int) -> None:
    path = write_documents(tmp_path / f"{key.split('_')[0]}.safetensors", [[1, 2, 3]])
    config = small_config(data={key: value})
    with pytest.raises(
        UserError, match=rf"^data\.{key}: is {value}, but {path} holds documents; .*; set it to {whole}$"
    ):
        (open_training_data if key.startswith("train") else open_validation)(config, tmp_path)


def test_validation_of_documents(tmp_path: Path) -> None:
    """From a file of its own, packed or not, whatever is trained on; never from the training file."""
    train, validation = (tmp_path / f"{split}.safetensors" for split in ("train", "validation"))
    config = small_config()
    write_documents(train, [[1, 2, 3]] * 9)
    for make in (None, Path.symlink_to):
        if make is not None:
            make(validation, train)
        for rows in (None, open_training_data(config, tmp_path).rows):
            with pytest.raises(UserError, match=r"there is no such file, .*share, or set evaluation.every to null$"):
                open_validation(config, tmp_path, rows)
    validation.unlink()
    write_positions(validation, 101)
    assert open_validation(config, tmp_path, open_training_data(config, tmp_path).rows).count == 12
    write_documents(validation, [[1, 2, 3]] * 7)
    write_positions(train, 101)
    assert open_validation(config, tmp_path, open_training_data(config, tmp_path).rows).count == 7


def test_validation_documents_in_the_loop_must_hold_a_target(tmp_path: Path) -> None:
    write_documents(tmp_path / "validation.safetensors", [[1] * 9, [1, 2]], [[0] * 9, [0, 1]])
    with pytest.raises(UserError, match=r"^evaluation.tokens: the first documents of .* up to 8 tokens hold no target"):
        open_validation(small_config(evaluation={"tokens": 8}), tmp_path)
    assert open_validation(small_config(evaluation={"tokens": 9}), tmp_path).count == 2


# Through the real step, and the real evaluation

SPLITS = (None, 4, 2, 1)
"""Values of --microbatch for a config of 1 x 4 x 1 sequences."""


def build_trainer(group: Group, folder: Path, microbatch: int | None, optimizer: Optimizer) -> Trainer:
    """The real trainer of the known model, on the documents of a folder, four of them a step."""
    model = known_gpt()
    batch = Batch(world_size=1, microbatch=4, accumulation=1)
    precision = Precision(amp="off", matmul="highest")
    config = RunConfig(
        name="test",
        model=model.config,
        data=Data(dataset="test"),
        batch=batch,
        precision=precision,
        optimizer=optimizer,
    )
    layout = plan_layout(batch, group.process.world_size, microbatch)
    gradients = AveragedGradients(SequenceLoss(model), group)
    data = open_training_data(config, folder)
    return Trainer(config, group.process, layout, data, gradients, build_optimizer(model, optimizer), None)


def train_all(group: Group, folder: Path) -> list[tuple[StepRecord, list[float]]]:
    """Each step on each split of it: its record, and the gradient of the four numbers that the loss depends on."""
    found = []
    for microbatch in SPLITS:
        trainer = build_trainer(group, folder, microbatch, Optimizer(learning_rate=1e-30, weight_decay=0.0))
        reader = StepReader(group)
        for step in range(trainer.data.total_steps):
            reader.add(step + 1, trainer.step(step))
            gradient = trainer.module.model.head.weight.grad
            assert gradient is not None
            found.append((reader.read()[0][0], gradient[:4, 0].tolist()))
    return found


def evaluate_all(group: Group, folder: Path) -> list[Evaluated]:
    """All documents of a folder's validation, for each size of the microbatch."""
    rows = DocumentRows(TokenFile(folder / "validation.safetensors"), 12)
    model = known_gpt(replace(SMALL, context_length=12))
    precision = Precision(amp="off", matmul="highest")
    lengths = np.array([1, 2, 3, 4, 100, 100])
    return [evaluate(SequenceLoss(model), rows, range(rows.count), m, precision, group, lengths) for m in (1, 2, 3, 4)]


ZERO, ONLY_3 = (0.0,) * 4, (0.1, 0.2, 0.3, -0.6)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2, 3, 4])
def test_documents_weigh_by_their_targets_on_every_layout(tmp_path: Path, processes: int) -> None:
    """The one-to-four fixture; G37: documents without targets beside others; a short last step; G05."""
    fixture, masks = documents_of_targets(ONE_TO_FOUR)
    masked = [[3] * 4] * 3
    documents = [*fixture, [5, 3, 3, 3, 3], *masked, [3] * 5, [4]]
    write_documents(tmp_path / "train.safetensors", documents, [*masks, [1] * 5, *[[0] * 4] * 3, [1] * 5, [1]])
    for found in on_ranks(processes, train_all, tmp_path):
        assert len(found) == 3 * len(SPLITS)
        for number, (record, gradient) in enumerate(found):
            targets, loss, expected, tokens = [
                (10, ONE_TO_FOUR_LOSS, ZERO, 10), (4, 0.916291, ONLY_3, 13), (4, 0.916291, ONLY_3, 4),
            ][number % 3]  # fmt: skip
            assert (record.target_tokens, record.input_tokens) == (targets, tokens)
            assert record.loss == pytest.approx(loss, abs=1e-6)
            assert gradient == pytest.approx(expected, abs=1e-6)


def skip_a_step(group: Group, folder: Path) -> tuple[list[StepRecord], list[bool]]:
    """Three steps of real updates; the records, and whether each left the weights as they were."""
    trainer = build_trainer(group, folder, 1, Optimizer(learning_rate=1e-3, weight_decay=0.1))
    head, reader, still = trainer.module.model.head.weight, StepReader(group), []
    for step in range(3):
        before = head.detach().clone()
        reader.add(step + 1, trainer.step(step))
        still.append(torch.equal(head, before))
    return reader.read()[0], still


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_g69_a_step_whose_targets_are_all_masked_is_skipped(tmp_path: Path, processes: int) -> None:
    documents, masks = [[5, 0, 3]] * 12, [[0, 1, 1]] * 4 + [[1, 0, 0]] * 4 + [[0, 1, 1]] * 4
    write_documents(tmp_path / "train.safetensors", documents, masks)
    for records, still in on_ranks(processes, skip_a_step, tmp_path):
        assert still == [record.skipped for record in records] == [False, True, False]
        assert [record.target_tokens for record in records] == [8, 0, 8]
        assert records[1].loss is None


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2, 4])
def test_g60_g62_g63_the_validation_loss_of_documents(tmp_path: Path, processes: int) -> None:
    """The mean over all targets, for every size of the microbatch and number of processes; bytes of targets alone."""
    cases: dict[str, tuple[tuple[tuple[int, ...], ...], float, int]] = {
        "G60": (((0,), (3,) * 9), 1.054920, 37),
        "G62": (ONE_TO_FOUR, ONE_TO_FOUR_LOSS, 30),
        "G63": (((0,), (3,), (3,), (3,), (3,)), 1.193550, 17),
    }
    for name, (sequences, loss, size) in cases.items():
        documents, masks = documents_of_targets(sequences)
        path = tmp_path / name / "validation.safetensors"
        write_documents(path, [*documents, [0, 0, 0]], [*masks, [1, 0, 0]])
        for found in on_ranks(processes, evaluate_all, tmp_path / name):
            for evaluated in found:
                assert evaluated.loss == pytest.approx(loss, abs=1e-6)
                assert (evaluated.target_tokens, evaluated.target_bytes) == (sum(map(len, sequences)), size)
