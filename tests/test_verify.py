"""isobatch verify: the layouts it compares, what it calls the same, and the whole command in real processes."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

import pytest
from conftest import REPOSITORY, Workplace
from small_configs import small_config

from training.errors import UserError
from training.verify import Measured, agrees, default_layouts, parse_layout, table, tolerance_of

FIRST = Measured("1 x 4 x 4", [5.0, 4.0], [0.5, 0.4], [(512, False), (512, False)], "ab" * 32, 1, 3.0)


def config_of(**sections: Any) -> Any:
    return small_config(batch={"world_size": 2, "microbatch": 4, "accumulation": 2}, **sections)


@pytest.mark.parametrize(("text", "expected"), [("1", (1, None)), ("12", (12, None)), ("2x4", (2, 4))])
def test_a_layout_is_processes_and_microbatch(text: str, expected: tuple[int, int | None]) -> None:
    assert parse_layout(text) == expected


@pytest.mark.parametrize("text", ["", "0", "2x0", "x3", "2x3x4", "-1", "two", "1.5", "²", "9" * 5000])
def test_what_is_no_layout_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"must be a number of processes, or processes x microbatch as in 2x4"):
        parse_layout(text)


def test_the_layouts_of_a_machine() -> None:
    """One that does not divide among them, no more processes than GPUs, and in bitwise mode no other microbatch."""
    config = config_of()
    assert default_layouts(config, gpus=0) == [(1, None), (1, 2), (2, None), (3, None), (4, None)]
    assert default_layouts(config, gpus=1) == [(1, None), (1, 2)]
    assert [count for count, _ in default_layouts(config, gpus=8)] == [1, 1, 2, 3, 4, 8]
    bitwise = config_of(reproducibility="bitwise")
    assert default_layouts(bitwise, gpus=0) == [(1, None), (2, None), (3, None), (4, None)]
    assert default_layouts(bitwise, gpus=1) == [(1, None), (1, None)], "from run to run"


def test_the_tolerance_follows_the_precision_of_the_products() -> None:
    assert tolerance_of(config_of(precision={"amp": "off", "matmul": "high"}), gpus=0) == 1e-5  # no TF32 on a CPU
    assert tolerance_of(config_of(precision={"amp": "off", "matmul": "highest"}), gpus=2) == 1e-5
    assert tolerance_of(config_of(precision={"amp": "off", "matmul": "high"}), gpus=2) == 1e-3
    assert tolerance_of(config_of(precision={"amp": "bf16"}), gpus=2) == 2e-3


@pytest.mark.parametrize(
    ("changes", "rounding", "bitwise"),
    [
        ({}, True, True),
        ({"digest": "cd" * 32, "loss_difference": 9e-6}, True, False),
        ({"loss_difference": 3e-8}, True, False),
        ({"loss_difference": 1.1e-5}, False, False),
        ({"loss_difference": math.nan}, False, False),
        ({"losses": [math.nan, 4.0]}, True, True),  # a step without targets has no loss on any layout
        ({"norm_difference": 9e-5}, True, True),
        ({"norm_difference": 1.1e-4}, False, True),
        ({"counts": [(512, False), (511, False)]}, False, True),
        ({"counts": [(512, False), (512, True)]}, False, True),
    ],
)
def test_what_is_called_the_same_run(changes: dict[str, Any], rounding: bool, bitwise: bool) -> None:
    """Up to rounding losses, gradient norms and counts decide; in bitwise mode weights and losses, to the last bit."""
    assert agrees(replace(FIRST, **changes), FIRST, False, 1e-5) is rounding
    assert agrees(replace(FIRST, **changes), FIRST, True, 1e-5) is bitwise


def test_the_table_has_a_line_for_each_layout() -> None:
    lines = table([FIRST, replace(FIRST, layout="3 x 2 x 3", loss_difference=2e-8)])
    assert len(lines) == 3
    assert lines[0].split()[:5] == ["layout", "loss", "1", "loss", "2"]
    assert lines[2].startswith("3 x 2 x 3  5.0000000  4.0000000  2.0e-08")


def verify(workplace: Workplace, *options: str) -> "subprocess.CompletedProcess[str]":
    config = workplace.write_config(batch={"world_size": 1, "microbatch": 4, "accumulation": 2})
    command = [sys.executable, "-m", "training.cli", "verify", str(config), str(workplace.datasets), *options]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(REPOSITORY)}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=240, cwd=workplace.folder, env=environment, check=False
    )


@pytest.mark.slow
def test_the_whole_command(workplace: Workplace) -> None:
    """Status 0 where the layouts agree, 1 where they do not; nothing is left behind."""
    done = verify(workplace, "--layout", "1", "--layout", "3x1", "--tolerance", "0", "--steps", "9")
    assert done.returncode == 1, done.stderr
    assert "the layouts differ by more than rounding" in done.stderr
    first, second = (re.split(r" {2,}", line) for line in done.stdout.splitlines()[1:3])
    assert (first[0], second[0]) == ("1 x 4 x 2", "3 x 1 x 3")
    assert [float(loss) for loss in second[1:4]] == pytest.approx([float(loss) for loss in first[1:4]], rel=1e-6)
    assert (first[-2].strip(), second[-2].strip()) == ("1", "1"), "all-reduces"
    assert "not the same run: expected losses within 0," in done.stdout
    assert sorted(path.name for path in workplace.folder.iterdir()) == ["datasets", "run.yaml"]

    bitwise = verify(workplace, "--set", "reproducibility=bitwise", "--layout", "1", "--layout", "2", "--json")
    assert bitwise.returncode == 0, bitwise.stderr
    result = json.loads(bitwise.stdout)
    layouts = result["layouts"]
    assert result["same"] is True
    assert layouts[0]["digest"] == layouts[1]["digest"]
    assert layouts[0]["losses"] == layouts[1]["losses"]


@pytest.mark.slow
def test_interrupted_it_says_so_and_ends_what_it_started(workplace: Workplace) -> None:
    """Though the signal comes to it alone: the pipe closes when the last process that holds it is gone."""
    command = [sys.executable, "-m", "training.cli", "verify", str(workplace.write_config()), str(workplace.datasets)]
    with subprocess.Popen(
        [*command, "--layout", "2", "--layout", "1", "--steps", "16"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "TMPDIR": str(workplace.folder)},
    ) as process:
        while not list(workplace.folder.glob("isobatch-verify-*")):
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.05)
        time.sleep(1)  # torchrun has started its workers, which import PyTorch
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=120)
    assert (process.returncode, errors) == (1, "interrupted\n")
    assert sorted(path.name for path in workplace.folder.iterdir()) == ["datasets", "run.yaml"]


@pytest.mark.slow
def test_mistakes_are_told_before_anything_starts(workplace: Workplace) -> None:
    bad = verify(workplace, "--set", "reproducibility=bitwise", "--layout", "1", "--layout", "1x2")
    assert (bad.returncode, bad.stdout) == (2, "")
    assert bad.stderr.startswith("error: --layout 1x2: with reproducibility: bitwise the microbatch stays")
    assert "Traceback" not in bad.stderr
    alone = verify(workplace, "--layout", "1")
    assert (alone.returncode, alone.stdout) == (2, "")
    assert alone.stderr == "error: --layout: one layout has nothing to be compared with; give at least two\n"
