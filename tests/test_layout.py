"""How a global batch is split: every sequence once, whatever the numbers, and the config's own split exactly."""

import pytest

from training.config import Batch
from training.layout import Layout, describe, plan_layout


def batch(world_size: int, microbatch: int, accumulation: int) -> Batch:
    return Batch(world_size=world_size, microbatch=microbatch, accumulation=accumulation)


def sizes(layout: Layout) -> list[list[int]]:
    """By rank: the sizes of its microbatches."""
    return [[len(part) for part in layout.microbatches(rank)] for rank in range(layout.world_size)]


@pytest.mark.parametrize(
    ("world_size", "microbatch", "accumulation"), [(1, 6, 16), (8, 12, 1), (2, 4, 2), (3, 5, 7), (1, 1, 1), (4, 1, 3)]
)
def test_the_configs_own_layout_is_exactly_the_configs(world_size: int, microbatch: int, accumulation: int) -> None:
    """Microbatch ((step x accumulation) + k) x world size + rank of the run holds the next `microbatch` sequences."""
    own = batch(world_size, microbatch, accumulation)
    layout = plan_layout(own, world_size)
    assert (layout.world_size, layout.microbatch, layout.accumulation) == (world_size, microbatch, accumulation)
    assert layout.idle_share == 0
    for step in (0, 3):
        for rank in range(world_size):
            for k, positions in enumerate(layout.microbatches(rank)):
                number = ((step * accumulation) + k) * world_size + rank
                first = step * layout.global_batch + positions.start
                assert (first, len(positions)) == (number * microbatch, microbatch)


def test_every_split_covers_each_sequence_once() -> None:
    """Also steps shorter than a global batch; no microbatch larger than allowed, no two differing by more than one."""
    for global_batch in (1, 2, 7, 12, 16, 40, 96):
        for world_size in (1, 2, 3, 5, 8, 32):
            for largest in (1, 2, 3, 5, 12, 100):
                layout = plan_layout(batch(1, global_batch, 1), world_size, largest)
                for sequences in {1, global_batch // 2, global_batch - 1, global_batch} - {0}:
                    check_split(layout, sequences, largest)


def check_split(layout: Layout, sequences: int, largest: int) -> None:
    parts = [part for rank in range(layout.world_size) for part in layout.microbatches(rank, sequences)]
    parts.sort(key=lambda part: part.start)
    assert [position for part in parts for position in part] == list(range(sequences))
    lengths = {len(part) for part in parts}
    assert max(lengths) <= largest
    assert max(lengths) - min(lengths) <= 1
    per_rank = [sum(map(len, layout.microbatches(rank, sequences))) for rank in range(layout.world_size)]
    assert per_rank[0] == max(per_rank), "idle_share takes rank 0 for the busiest"
    assert max(per_rank) - min(per_rank) <= layout.accumulation
    assert all(len(layout.microbatches(rank, sequences)) <= layout.accumulation for rank in range(layout.world_size))


def test_the_deal_goes_round_the_processes() -> None:
    layout = plan_layout(batch(2, 4, 2), 3)
    assert sizes(layout) == [[3, 3], [3, 2], [3, 2]]
    assert layout.microbatches(0) == [range(0, 3), range(9, 12)]
    assert layout.microbatches(1) == [range(3, 6), range(12, 14)]
    assert layout.microbatches(2) == [range(6, 9), range(14, 16)]
    assert layout.microbatches(0, 2) == [range(0, 1)]
    assert layout.microbatches(2, 2) == []


@pytest.mark.parametrize(
    ("own", "world_size", "microbatch", "accumulation", "sentence"),
    [
        # 96 sequences on 5
        (
            batch(8, 12, 1),
            5,
            None,
            2,
            "96 sequences per step over 5 processes x microbatch 10 x accumulation 2, uneven: 4.0 % idle "
            "(the config says 8 x 12 x 1: the same run)",
        ),
        (batch(8, 12, 1), 5, 4, 5, "96 sequences per step over 5 processes x microbatch 4 x accumulation 5"),
        # 7 on 4
        (batch(1, 7, 1), 4, None, 1, "7 sequences per step over 4 processes x microbatch 2 x accumulation 1, uneven"),
        # G13: 40 microbatches of 12 on 2 and on 3, 16 on 32
        (batch(1, 12, 40), 2, None, 20, "480 sequences per step = 2 processes x microbatch 12 x accumulation 20"),
        (batch(1, 12, 40), 3, None, 14, "480 sequences per step over 3 processes x microbatch 12 x accumulation 14"),
        (
            batch(1, 1, 16),
            32,
            None,
            1,
            "16 sequences per step over 32 processes x microbatch 1 x accumulation 1, uneven: 50.0 % idle, "
            "no sequence for ranks from 16 on (the config says 1 x 1 x 16: the same run)",
        ),
        (batch(1, 4, 4), 3, None, 2, "16 sequences per step over 3 processes x microbatch 3 x accumulation 2"),
        (batch(2, 2, 4), 2, None, 4, "16 sequences per step = 2 processes x microbatch 2 x accumulation 4"),
        (batch(8, 12, 1), 1, 6, 16, "96 sequences per step = 1 process x microbatch 6 x accumulation 16 (the config"),
    ],
)
def test_planner_examples(
    own: Batch, world_size: int, microbatch: int | None, accumulation: int, sentence: str
) -> None:
    layout = plan_layout(own, world_size, microbatch)
    assert (layout.world_size, layout.accumulation) == (world_size, accumulation)
    assert layout.global_batch == own.world_size * own.microbatch * own.accumulation, "never changed"
    assert sum(map(sum, sizes(layout))) == layout.global_batch
    assert describe(layout, own).startswith(sentence)


def test_g13_tokens_of_a_step() -> None:
    """40 microbatches of 12 x 1024 tokens: 20 on each of two processes, 491,520 tokens."""
    layout = plan_layout(batch(1, 12, 40), 2)
    assert sizes(layout) == [[12] * 20] * 2
    assert layout.global_batch * 1024 == 491_520


def test_another_layout_is_the_same_run() -> None:
    own = batch(8, 12, 1)
    assert describe(plan_layout(own, 4), own).endswith("(the config says 8 x 12 x 1: the same run)")


def test_the_configs_own_layout_is_announced_plainly() -> None:
    own = batch(8, 12, 1)
    assert describe(plan_layout(own, 8), own) == "96 sequences per step = 8 processes x microbatch 12 x accumulation 1"


def test_in_bitwise_mode_the_configs_microbatches_are_dealt_whole() -> None:
    """Only their owners change; the last of a short step is cut, and processes can get one less, or none."""
    own = batch(2, 4, 2)
    for world_size in (1, 2, 3, 5):
        layout = plan_layout(own, world_size, bitwise=True)
        parts = {part for rank in range(world_size) for part in layout.microbatches(rank)}
        assert parts == {range(0, 4), range(4, 8), range(8, 12), range(12, 16)}
        assert layout.microbatch == 4
    layout = plan_layout(own, 3, bitwise=True)
    assert [layout.microbatches(rank) for rank in range(3)] == [
        [range(0, 4), range(12, 16)],
        [range(4, 8)],
        [range(8, 12)],
    ]
    assert layout.idle_share == pytest.approx(1 / 3)
    assert [layout.microbatches(rank, 6) for rank in range(3)] == [[range(0, 4)], [range(4, 6)], []]
    assert plan_layout(own, 5, bitwise=True).microbatches(4) == []
    assert "uneven: 33.3 % idle" in describe(layout, own)
