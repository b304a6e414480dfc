"""benchmarks/scaling.py: the model of a step's time, worked out on paper, and the table in the documents."""

import pytest
from conftest import REPOSITORY
from scaling import BUCKET, Link, Work, check, efficiency, exchange_seconds, exposed_seconds, step_seconds, table

FOUR_BUCKETS = Work(microbatch_seconds=1.5, update_seconds=0.5, gradient_bytes=4 * BUCKET)
LINK = Link("a link", within=BUCKET, between=BUCKET / 2, latency=0.0)
"""A bucket a second; between machines half of it."""


def test_a_ring_sends_twice_the_gradients_but_for_a_share() -> None:
    """2 (n - 1) / n times 4 buckets, and as many turns of a latency for each bucket."""
    assert exchange_seconds(FOUR_BUCKETS, LINK, 1) == 0
    assert exchange_seconds(FOUR_BUCKETS, LINK, 2) == 4
    assert exchange_seconds(FOUR_BUCKETS, LINK, 8) == 7
    assert exchange_seconds(FOUR_BUCKETS, LINK, 16) == 2 * 7.5, "the narrow link between machines"
    assert exchange_seconds(FOUR_BUCKETS, Link("slow to begin", BUCKET, BUCKET, latency=0.25), 2) == 4 + 4 * 2 * 0.25


def test_the_last_backward_hides_all_but_the_last_bucket() -> None:
    """The backward takes a second, three quarters of which lie behind the first of four buckets."""
    assert exposed_seconds(FOUR_BUCKETS, 0.0) == 0
    assert exposed_seconds(FOUR_BUCKETS, 0.4) == pytest.approx(0.1)
    assert exposed_seconds(FOUR_BUCKETS, 4.0) == pytest.approx(3.25)
    assert exposed_seconds(Work(1.5, 0.5, 1.0), 4.0) == 4.0, "one bucket is full when there is nothing left to compute"


def test_accumulation_does_not_change_what_is_exchanged() -> None:
    for accumulation in (1, 4, 16):
        assert step_seconds(FOUR_BUCKETS, accumulation, 4.0) == pytest.approx(1.5 * accumulation + 0.5 + 3.25)
    assert efficiency(FOUR_BUCKETS, LINK, 2, 1) == pytest.approx(2 / 5.25)
    assert efficiency(FOUR_BUCKETS, LINK, 1, 1) == 1


def test_a_prediction_is_set_beside_what_was_measured() -> None:
    def row(accumulation: int, exchange: float, tokens_per_second: float) -> dict[str, object]:
        parts = {"data": 0.0, "forward": 0.5 * accumulation, "backward": 1.0 * accumulation}
        parts |= {"all-reduce": exchange, "optimizer": 0.25, "logging": 0.125, "rest": 0.125}
        return {
            "world_size": 2,
            "microbatch": 3,
            "accumulation": accumulation,
            "part_seconds": parts,
            "tokens_per_second": {"median": tokens_per_second},
        }

    rows = [row(1, 4.0, 100.0), row(16, 9.0, 1000.0)]
    lines = check({"rows": rows, "parameters": BUCKET, "context_length": 100})
    # Steps of 2 x 3 x 100 tokens x accumulation; predicted 1.5 and 24, each with 0.5 + 3.25 behind.
    assert lines[2:] == [
        "| 2 x 3 x 1 | 4,000.0 | 5,250.0 | 6,000.0 | 0.88 |",
        "| 2 x 3 x 16 | 4,000.0 | 27,750.0 | 9,600.0 | 2.89 |",
    ]


def test_the_documents_have_the_table() -> None:
    assert "\n".join(table()) in (REPOSITORY / "docs" / "performance.md").read_text()
