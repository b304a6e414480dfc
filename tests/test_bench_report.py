"""What isobatch bench makes of times, worked out by hand."""

import pytest
from small_configs import small_config

from model.gpt import flops_per_token
from training.benchmark.bench_process import Launched, Measured
from training.benchmark.bench_report import Spread, build_report, report_lines
from training.benchmark.step_parts import PARTS

CONFIG = small_config(batch={"world_size": 4, "microbatch": 5, "accumulation": 3})
TOKENS = 5 * CONFIG.model.context_length
"""Of a microbatch."""
PARTS_OF_ONE = dict.fromkeys((*PARTS, "rest", "step"), 0.5)


def measured(accumulation: int, exchanged: bool, *seconds: float, rate: float = 1e9) -> Measured:
    """Steps of some seconds, a quarter of it for logging, one a round."""
    return Measured(
        accumulation,
        exchanged,
        step_seconds=[0.75 * value for value in seconds],
        logging_seconds=[0.25 * value for value in seconds],
        peak_memory=[2**30, 2**31, 2**30],
        rates=[rate] * len(seconds),
        parts=PARTS_OF_ONE,
    )


def launched(processes: int, *found: Measured, device: str = "cpu") -> Launched:
    return Launched(processes, 2 // processes, device, "a machine, 2 cores", "2.13", "float32", list(found))


ONE = launched(1, measured(1, True, 1, 1, 2), measured(4, True, 4, 5, 4), measured(4, False, 4, 4, 4))
TWO = launched(2, measured(1, True, 2, 2, 2), measured(4, True, 8, 10, 16), measured(4, False, 8, 8, 8))


def test_rates_and_shares_are_medians_with_their_extremes() -> None:
    """Of tokens of all processes, logging included; R is that of the same round."""
    report = build_report(CONFIG, [ONE, TWO])
    assert [(row.world_size, row.microbatch, row.accumulation) for row in report.rows] == [
        (1, 5, 1),
        (1, 5, 4),
        (2, 5, 1),
        (2, 5, 4),
    ]
    rates = [row.tokens_per_second for row in report.rows]
    assert rates[0] == Spread(TOKENS, TOKENS / 2, TOKENS)
    assert rates[3] == Spread(8 * TOKENS / 10, 8 * TOKENS / 16, TOKENS)
    per_token = flops_per_token(CONFIG.model)
    assert report.flops_per_token == per_token
    assert report.rows[0].flops_per_second.median == pytest.approx(per_token * TOKENS)
    assert report.rows[0].share.low == pytest.approx(per_token * TOKENS / 2 / 1e9)
    assert report.rows[0].logging_share.median == 0.25
    assert report.rows[0].peak_memory == 2**31


def test_the_group_and_further_processes_are_compared_round_by_round() -> None:
    report = build_report(CONFIG, [ONE, TWO])
    assert report.without_group == {
        1: Spread(1, 4 / 5, 1),
        2: Spread(8 / 10, 8 / 16, 1),
    }
    assert report.efficiency == {2: Spread(1, 2 * 4 / 16, 1)}, "twice the work of a step, on the same cores"
    on_gpus = build_report(
        CONFIG, [launched(1, *ONE.measured, device="cuda"), launched(2, *TWO.measured, device="cuda")]
    )
    assert on_gpus.efficiency[2].median == pytest.approx(0.5), "each GPU has the same work"


def test_in_bitwise_mode_there_is_nothing_to_compare_the_group_with() -> None:
    report = build_report(CONFIG, [launched(1, measured(1, True, 1), measured(4, True, 4))])
    assert (len(report.rows), report.without_group, report.efficiency) == (2, {}, {})


def test_the_table_says_what_it_shows() -> None:
    config = small_config(precision={"amp": "bf16"})
    lines = report_lines(build_report(config, [ONE, TWO]))
    assert lines[0].startswith("run run: ")
    assert lines[1].startswith("R = 1.0 GFLOP/s on 1 process x 2 threads: float32 products of 4096x768x3072")
    assert lines[1].endswith("; this CPU has no instructions for bf16 and computes through float32")
    assert lines[4].split()[:4] == ["layout", "tokens/s", "GFLOP/s", "%"]
    assert lines[5].startswith("1 x 2 x 1  16 (8-16)")
    assert "accumulation 4 on 2 processes: 80.0 (50.0-100.0) % of the tokens/s without a process group" in lines
    assert (
        lines[-2]
        == "accumulation 4 on 2 processes x 1 thread: 100.0 (50.0-100.0) % of the tokens/s on 1 process x 2 threads"
    )
    assert lines[-1] == "logging and metrics: 25.00 % of the time at most"
