"""What each target of a step weighs, and the sums of token losses that the weights multiply."""

import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812  (the field's name for it)
from known_model import SMALL, known_gpt, rows
from torch import Tensor

from model.dropout import dropout_keys
from model.gpt import GPTConfig, build_gpt
from training import loss as loss_module
from training.loss import IGNORED, Reduction, SequenceLoss, head_loss, target_weights

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
    sums: Tensor = SequenceLoss(known_gpt())(*rows(sequences, SMALL.context_length))[1]
    assert sums.dtype == torch.float32
    assert sums.tolist() == pytest.approx(expected, abs=1e-6)


def test_a_model_in_float64_has_its_loss_in_float64() -> None:
    sums: Tensor = SequenceLoss(known_gpt().double())(*rows(((0, 1, 2, 3),), SMALL.context_length))[1]
    assert sums.dtype == torch.float64
    # The head's column holds float32 logarithms.
    column = [math.log(n) if n == 1 else torch.tensor(float(n)).log().double().item() for n in (1, 2, 3, 4)]
    total = math.log(sum(map(math.exp, column)))
    assert sums.item() == pytest.approx(sum(total - value for value in column), rel=1e-14)


def test_dropout_keys_reach_the_model() -> None:
    config = replace(WIDE, dropout=0.3)
    module, ids = SequenceLoss(build_gpt(config, seed=1)), torch.arange(64).view(1, 64)
    one, again, other = (module(ids, ids, dropout_keys(1, step, [0], config))[1] for step in (0, 0, 1))
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
@pytest.mark.parametrize("chunk", [loss_module.CHUNK_ROWS["cpu"], 4])
@pytest.mark.parametrize("cast", [False, True])
def test_g77_the_loss_is_computed_in_float32(
    vocab_size: int, loss: float, chunk: int, cast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ln V on logits of 0, under autocast or with weights in bf16; in bf16 both vocabularies would read 10.8125."""
    monkeypatch.setitem(loss_module.CHUNK_ROWS, "cpu", chunk)
    model = build_gpt(GPTConfig(vocab_size, context_length=8, emb_dim=4, n_heads=1, n_layers=1, dropout=0.0), seed=1)
    torch.nn.init.zeros_(model.head.weight)
    if cast:
        model.bfloat16()
    ids = torch.zeros(2, 8, dtype=torch.long)
    with torch.autocast("cpu", torch.bfloat16, enabled=not cast):
        sums: Tensor = SequenceLoss(model)(ids, ids)[1]
    assert sums.dtype == torch.float32
    assert (sums / 8).tolist() == pytest.approx([loss, loss], abs=1e-4)


# The head

WIDE = GPTConfig(vocab_size=300, context_length=64, emb_dim=32, n_heads=2, n_layers=1, dropout=0.0)
WEIGHTS = torch.tensor([0.5, 1.0, 0.0, 3.0, 0.25, 1.0, 2.0], dtype=torch.float64) / 400

Found = tuple[Tensor, Tensor, list[Tensor]]


class PlainLoss(SequenceLoss):
    """All logits at once, and autograd."""

    def forward(
        self, inputs: Tensor, targets: Tensor, keys: Tensor | None = None, weights: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """See SequenceLoss."""
        assert weights is not None
        logits: Tensor = self.model(inputs, keys)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).transpose(1, 2)
        sums = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="none").sum(1)
        return (sums * weights.to(sums.dtype)).sum(), sums.detach()


def batch() -> tuple[Tensor, Tensor]:
    """7 sequences, 448 positions, some targets ignored."""
    ids = torch.randint(WIDE.vocab_size, (7, WIDE.context_length + 1), generator=torch.Generator().manual_seed(0))
    return ids[:, :-1], ids[:, 1:].masked_fill(ids[:, :-1] % 5 == 0, IGNORED)


def found_by(module: SequenceLoss, amp: bool = False, weights: Tensor = WEIGHTS) -> Found:
    """The weighted loss, the sums, and all gradients."""
    module.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=amp):
        loss, sums = module(*batch(), None, weights)
    loss.backward()
    return loss.detach(), sums, [p.grad for p in module.parameters() if p.grad is not None]


def relative_error(found: list[Tensor], exact: list[Tensor]) -> list[float]:
    """Of each gradient: norm of the error, relative to that of the exact one."""
    return [((a - b).norm() / b.norm()).item() for a, b in zip(found, exact, strict=True)]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("rows_at_once", [1, 61, 447, 512])
def test_the_head_in_chunks_is_the_plain_one(
    tied: bool, dtype: torch.dtype, rows_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """448 positions at once, or in 448, 8 or 2 uneven pieces: losses and gradients to a few roundings."""
    monkeypatch.setitem(loss_module.CHUNK_ROWS, "cpu", rows_at_once)
    model = build_gpt(replace(WIDE, tie_weights=tied), seed=1).to(dtype)
    loss, sums, gradients = found_by(SequenceLoss(model))
    gradients = [gradient.clone() for gradient in gradients]
    plain_loss, plain_sums, plain_gradients = found_by(PlainLoss(model))
    rounding = 16 * torch.finfo(dtype).eps
    assert sums.dtype == loss.dtype == dtype
    torch.testing.assert_close(loss, plain_loss, rtol=rounding, atol=0)
    torch.testing.assert_close(sums, plain_sums, rtol=rounding, atol=0)
    assert max(relative_error(gradients, plain_gradients)) < rounding
    with torch.no_grad():
        evaluated_loss, evaluated = SequenceLoss(model)(*batch(), None, WEIGHTS)
    assert torch.equal(evaluated, sums)
    assert torch.equal(evaluated_loss, loss)


def test_the_gradient_of_the_head_by_differences() -> None:
    """Of float64, with an ignored target, weights that are 0, and a gradient from above that is not 1."""
    generator = torch.Generator().manual_seed(3)
    hidden, head = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((5, 3), (7, 3)))
    targets, weights = torch.tensor([0, 6, IGNORED, 3, 3]), torch.tensor([0.5, 2.0, 1.0, 0.0, 1.0]).double()

    def thrice(hidden: Tensor, head: Tensor) -> Tensor:
        return 3 * head_loss(hidden, head, targets, weights, torch.float64)[0]

    assert torch.autograd.gradcheck(thrice, (hidden.requires_grad_(), head.requires_grad_()), atol=1e-9)


@pytest.mark.parametrize("tied", [False, True])
def test_the_head_under_autocast_is_no_further_from_the_exact_one_than_the_plain_one(
    tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its gradient is added up in float32; in bf16, over 64 chunks, its error would be 6 times the plain one's."""
    model = build_gpt(replace(WIDE, tie_weights=tied), seed=1)
    exact = [gradient.clone() for gradient in found_by(PlainLoss(model))[2]]
    plain_sums, plain = (found_by(PlainLoss(model), amp=True)[part] for part in (1, 2))
    plain_errors = relative_error(list(plain), exact)
    for rows_at_once in (7, 512):
        monkeypatch.setitem(loss_module.CHUNK_ROWS, "cpu", rows_at_once)
        _, sums, gradients = found_by(SequenceLoss(model), amp=True)
        torch.testing.assert_close(sums, plain_sums, rtol=1e-6, atol=0)
        assert {gradient.dtype for gradient in gradients} == {torch.float32}
        for mine, plains in zip(relative_error(gradients, exact), plain_errors, strict=True):
            assert mine < 1.2 * plains


def test_small_gradients_of_fp16_do_not_vanish_if_the_scale_is_in_the_weights() -> None:
    """A weight of 1e-7 makes slopes that fp16 rounds to 0; 2**16 times as large they are as good as bf16's."""
    hidden, head = torch.randn(4, 8).half().requires_grad_(), torch.zeros(300, 8).half().requires_grad_()
    targets, weights = torch.arange(4), torch.full((4,), 1e-7)
    found = []
    for scale in (1, 2**16):
        loss = head_loss(hidden, head, targets, scale * weights, torch.float16)[0]
        found.append(torch.autograd.grad(loss, head)[0].double() / scale)
    slopes = (torch.full((4, 300), 1 / 300) - F.one_hot(targets, 300)).double() * 1e-7
    expected = slopes.T @ hidden.detach().double()
    assert found[0][4:].abs().max() == 0
    assert ((found[1] - expected).norm() / expected.norm()).item() < 1e-3


def test_sequences_that_weigh_nothing_have_no_gradient_but_a_loss() -> None:
    """A process without a sequence takes part in the exchange with one of these."""
    module = SequenceLoss(build_gpt(WIDE, seed=1))
    loss, sums, gradients = found_by(module, weights=torch.zeros(7))
    assert loss == 0
    assert (sums > 100).all()
    assert len(gradients) == len(list(module.parameters()))
    assert all((gradient == 0).all() for gradient in gradients)


def test_large_logits_lose_nothing_where_they_cancel() -> None:
    """All of them 10,000 larger: the losses and the slopes are the same, and each row's slopes add up to nothing."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.ones(6, 2)
    head = torch.stack([torch.randn(40, generator=generator), torch.full((40,), 1e4)], dim=1).requires_grad_()
    losses = head_loss(hidden, head, torch.arange(6), torch.ones(6), torch.float32)
    losses[0].backward()
    logits = head.detach()[:, 0].add(1e4).expand(6, 40)
    torch.testing.assert_close(losses[1], torch.nn.functional.cross_entropy(logits, torch.arange(6), reduction="none"))
    assert head.grad is not None
    assert head.grad[:, 0].sum().abs() < 2e-6
