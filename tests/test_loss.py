"""What each target of a step weighs, and the sums of token losses that the weights multiply."""

import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from known_model import SMALL, known_gpt, rows
from torch import Tensor

from model.dropout import dropout_keys
from model.gpt import GPT, GPTConfig, build_gpt
from training import loss as loss_module
from training.loss import IGNORED, Reduction, SequenceLoss, target_weights

# (sum of the token losses, targets) of each microbatch of one sequence; right; the mean of the microbatches' means
EXAMPLES: dict[str, tuple[list[tuple[float, int]], float, float]] = {
    "4 and 8 targets": ([(10, 4), (17, 8)], 27 / 12, 2.3125),
    "3 and 6 targets": ([(1.5, 3), (6.0, 6)], 0.833333, 0.75),
    "3 and 6 targets of equal means": ([(1.5, 3), (3.0, 6)], 0.5, 0.5),
    "two ranks of two microbatches": ([(6, 2), (4, 4), (1, 1), (3, 3)], 1.4, 1.5),
    "100 and 1000 targets": ([(400.0, 100), (2000.0, 1000)], 2.181818, 3.0),
    # One weight w = 0, logistic loss: an example (x, y) has the gradient (1/2 - y) x.
    "gradients of (2,1) and (1,0) (1,0) (4,1)": ([(-1.0, 1), (0.5 + 0.5 - 2.0, 3)], -0.5, -0.666667),
    "the fifth microbatch in windows of four": ([(1.0, 1)], 1.0, 1.0),
    "all targets ignored": ([(0.0, 0), (0.0, 0)], 0.0, 0.0),
    "one microbatch without targets": ([(0.0, 0), (6.0, 4)], 1.5, 1.5),
}


@pytest.mark.parametrize("example", EXAMPLES)
def test_worked_examples(example: str) -> None:
    microbatches, right, mean_of_means = EXAMPLES[example]
    sums = np.array([loss_sum for loss_sum, _ in microbatches])
    counts = np.array([count for _, count in microbatches])
    expected: dict[Reduction, float] = {"token": right, "microbatch_mean": mean_of_means, "sum": sums.sum()}
    for reduction, value in expected.items():
        weights = target_weights(reduction, counts, microbatch=1)
        assert weights.dtype == np.float64
        assert weights @ sums == pytest.approx(value, abs=1e-6)


def test_the_documented_examples_are_these() -> None:
    """docs/loss.md shows them as tables; a step without targets has no value there, as there is no update."""
    text = (Path(__file__).parent.parent / "docs" / "loss.md").read_text(encoding="utf-8")
    documented = {}
    for line in text.splitlines():
        microbatches = re.findall(r"\((-?[\d.]+), (\d+)\)", line)
        values = [cell.strip() for cell in line.strip("|").split("|")][1:]
        if line.startswith("| ") and microbatches:
            documented[tuple((float(total), int(count)) for total, count in microbatches)] = values
    assert len(documented) == len(EXAMPLES) - 1, "all but the window of one microbatch, which is in the text"
    for example, values in documented.items():
        right, mean_of_means = next(found[1:] for found in EXAMPLES.values() if found[0] == list(example))
        expected = [right, mean_of_means, sum(total for total, _ in example)]
        if any(count for _, count in example):
            assert [float(value) for value in values] == pytest.approx(expected, abs=1e-6)
        else:
            assert values == ["no update"] * 3


def test_microbatch_mean_goes_by_the_configs_microbatches() -> None:
    """Microbatches of 2 with 3, 0 and 5 targets, the last one short: the mean of two means."""
    weights = target_weights("microbatch_mean", np.array([1, 2, 0, 0, 5]), microbatch=2)
    assert weights[[0, 1, 4]] == pytest.approx([1 / 6, 1 / 6, 1 / 10])
    assert np.isfinite(weights).all()
    assert target_weights("microbatch_mean", np.full(6, 32), microbatch=2) == pytest.approx(
        target_weights("token", np.full(6, 32), microbatch=2)
    ), "with equal counts there is no difference"


@pytest.mark.parametrize("reduction", ["token", "microbatch_mean", "sum"])
def test_weights_are_finite_without_any_target(reduction: Reduction) -> None:
    assert np.isfinite(target_weights(reduction, np.zeros(5, dtype=np.int64), microbatch=2)).all()


def test_sums_are_of_the_targets_only() -> None:
    sequences = ((0, 1, 2, 3), (3,), ())
    expected = [-math.log(0.1 * 0.2 * 0.3 * 0.4), -math.log(0.4), 0.0]
    sums: Tensor = SequenceLoss(known_gpt())(*rows(sequences, SMALL.context_length))
    assert sums.dtype == torch.float32
    assert sums.tolist() == pytest.approx(expected, abs=1e-6)


def test_a_model_in_float64_has_its_loss_in_float64() -> None:
    sums: Tensor = SequenceLoss(known_gpt().double())(*rows(((0, 1, 2, 3),), SMALL.context_length))
    assert sums.dtype == torch.float64
    # The head's column holds float32 logarithms.
    column = [math.log(n) if n == 1 else torch.tensor(float(n)).log().double().item() for n in (1, 2, 3, 4)]
    total = math.log(sum(map(math.exp, column)))
    assert sums.item() == pytest.approx(sum(total - value for value in column), rel=1e-14)


def test_dropout_keys_reach_the_model() -> None:
    config = replace(WIDE, dropout=0.3)
    module, ids = SequenceLoss(build_gpt(config, seed=1)), torch.arange(64).view(1, 64)
    one, again, other = (module(ids, ids, dropout_keys(1, step, [0], config)) for step in (0, 0, 1))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    with pytest.raises(ValueError, match="needs keys"):
        module(ids, ids)


@pytest.mark.parametrize("label", [-1, SMALL.vocab_size])
def test_g75_only_the_documented_mark_is_ignored(label: int) -> None:
    """-1, as other tools write it, and an id beyond the vocabulary are errors, not a loss."""
    inputs, targets = rows(((0, 1),), SMALL.context_length)
    targets[0, 2] = label
    with pytest.raises(IndexError, match=f"{label} is out of bounds"):
        SequenceLoss(known_gpt())(inputs, targets)


@pytest.mark.parametrize(("vocab_size", "loss"), [(50257, 10.824905), (50304, 10.825840)])
@pytest.mark.parametrize("chunk", [loss_module.CHUNK_LOGITS, 4 * 50304])
@pytest.mark.parametrize("cast", [False, True])
def test_g77_the_loss_is_computed_in_float32(
    vocab_size: int, loss: float, chunk: int, cast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ln V on logits of 0, under autocast or with weights in bf16; in bf16 both vocabularies would read 10.8125."""
    monkeypatch.setattr(loss_module, "CHUNK_LOGITS", chunk)
    model = build_gpt(GPTConfig(vocab_size, context_length=8, emb_dim=4, n_heads=1, n_layers=1, dropout=0.0), seed=1)
    torch.nn.init.zeros_(model.head.weight)
    if cast:
        model.bfloat16()
    ids = torch.zeros(2, 8, dtype=torch.long)
    with torch.autocast("cpu", torch.bfloat16, enabled=not cast):
        sums: Tensor = SequenceLoss(model)(ids, ids)
    assert sums.dtype == torch.float32
    assert (sums / 8).tolist() == pytest.approx([loss, loss], abs=1e-4)


# In chunks

WIDE = GPTConfig(vocab_size=300, context_length=64, emb_dim=32, n_heads=2, n_layers=1, dropout=0.0)


def sums_and_gradients(model: GPT, amp: bool, grad: bool = True) -> tuple[Tensor, list[Tensor]]:
    """Losses of 7 sequences, some targets ignored, and all gradients of their mean."""
    ids = torch.randint(WIDE.vocab_size, (7, WIDE.context_length + 1), generator=torch.Generator().manual_seed(0))
    targets = ids[:, 1:].masked_fill(ids[:, :-1] % 5 == 0, IGNORED)
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=amp), torch.set_grad_enabled(grad):
        sums: Tensor = SequenceLoss(model)(ids[:, :-1], targets)
    if grad:
        (sums.sum() / (targets != IGNORED).sum()).backward()
    return sums.detach(), [p.grad for p in model.parameters() if p.grad is not None]


def relative_error(found: list[Tensor], exact: list[Tensor]) -> list[float]:
    """Of each gradient: norm of the error, relative to that of the exact one."""
    return [((a - b).norm() / b.norm()).item() for a, b in zip(found, exact, strict=True)]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("rows_at_once", [1, 61, 447])
def test_chunks_change_neither_loss_nor_gradient(
    tied: bool, rows_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """448 positions at once, or in 448, 8 or 2 uneven pieces."""
    model = build_gpt(replace(WIDE, tie_weights=tied), seed=1)
    sums, gradients = sums_and_gradients(model, amp=False)
    monkeypatch.setattr(loss_module, "CHUNK_LOGITS", rows_at_once * WIDE.vocab_size)
    chunked_sums, chunked_gradients = sums_and_gradients(model, amp=False)
    torch.testing.assert_close(chunked_sums, sums, rtol=1e-6, atol=0)
    assert max(relative_error(chunked_gradients, gradients)) < 1e-6
    assert torch.equal(sums_and_gradients(model, amp=False, grad=False)[0], chunked_sums)


def test_chunks_under_autocast_are_added_up_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """The head's gradient is no further from the exact one than in one piece; added up in bf16 it is, 6 times."""
    model = build_gpt(WIDE, seed=1)
    exact = sums_and_gradients(model, amp=False)[1]
    sums, gradients = sums_and_gradients(model, amp=True)
    monkeypatch.setattr(loss_module, "CHUNK_LOGITS", 7 * WIDE.vocab_size)
    chunked_sums, chunked_gradients = sums_and_gradients(model, amp=True)
    assert chunked_sums.dtype == torch.float32
    torch.testing.assert_close(chunked_sums, sums, rtol=1e-6, atol=0)
    assert {gradient.dtype for gradient in chunked_gradients} == {torch.float32}
    for chunked, whole in zip(relative_error(chunked_gradients, exact), relative_error(gradients, exact), strict=True):
        assert chunked < 1.2 * whole
