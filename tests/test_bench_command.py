"""isobatch bench, the whole command in real processes, and what it refuses."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPOSITORY, Workplace

from training.benchmark.bench_command import bench, write_random_tokens
from training.errors import UserError
from training.rows import TokenFile


@pytest.mark.parametrize("vocab_size", [50_257, 2**16, 2**16 + 1])
def test_the_tokens_are_of_the_vocabulary(tmp_path: Path, vocab_size: int) -> None:
    write_random_tokens(tmp_path, vocab_size, 100_000)
    file = TokenFile(tmp_path / "train.safetensors")
    assert file.length == 100_000
    assert file.first_bad_token(0, file.length, vocab_size) is None
    assert file.first_bad_token(0, file.length, vocab_size // 2) is not None, "and not of half of it"


def test_fp16_needs_a_gpu(workplace: Workplace) -> None:
    with pytest.raises(UserError, match=r"fp16.*--set precision.amp=bf16"):
        bench(str(workplace.write_config(precision={"amp": "fp16"})))


@pytest.mark.slow
def test_the_whole_command(workplace: Workplace) -> None:
    """On one process and on two, without a dataset; a round is shown when it begins, and nothing is left behind."""
    options = ["--rounds", "1", "--accumulation", "2", "--accumulation", "1", "--json"]
    temporary = workplace.folder / "tmp"
    temporary.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "training.cli", "bench", str(workplace.write_config()), *options],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=workplace.folder,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(REPOSITORY), "TMPDIR": str(temporary)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "2 processes: round 1 of 1\n" in done.stderr
    result = json.loads(done.stdout)
    layouts = [(row["world_size"], row["microbatch"], row["accumulation"]) for row in result["rows"]]
    assert layouts == [(1, 4, 1), (1, 4, 2), (2, 4, 1), (2, 4, 2)]
    for row in result["rows"]:
        parts = row["part_seconds"]
        assert all(parts[part] > 0 for part in ("data", "forward", "backward", "optimizer", "logging"))
        assert parts["all-reduce"] < parts["backward"] < parts["step"]
        assert 0 < row["share"]["median"] < 1
        assert row["peak_memory"] > 50 * 2**20
    assert result["rows"][2]["part_seconds"]["all-reduce"] > 0
    assert set(result["without_group"]) == {"1", "2"}
    assert set(result["efficiency"]) == {"2"}
    assert sorted(path.name for path in workplace.folder.iterdir()) == ["datasets", "run.yaml", "tmp"]
    assert not list(temporary.glob("isobatch*")), "torchrun and inductor leave folders of their own"
