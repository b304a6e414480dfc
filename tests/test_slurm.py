"""docs/slurm.sh, with programs in Slurm's place: sbatch starts it, srun starts torchrun, scontrol notes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import REPOSITORY, Finished, Workplace

SCRIPT = REPOSITORY / "docs" / "slurm.sh"
JOB = "SLURM_JOB_ID=$PPID SLURM_JOB_NODELIST=here SLURM_NNODES=1 SLURM_GPUS_ON_NODE=2 SLURM_CPUS_PER_TASK=4"
SBATCH = f'export {JOB}\nexec bash "$@"'
SCONTROL = '[ "$1" = show ] && echo 127.0.0.1\n[ "$1" = requeue ] && echo "$2" >> "$NOTES/requeued"\nexit 0'
# Slurm's own hands signals on; in the place of torchrun's process, this one is the one that gets them.
SRUN = '[ "$2" = --cpus-per-task=4 ] || exit 3\nshift 3\nexec "{python}" -m torch.distributed.run "$@"'
SLEEP = '[ "$1" = 600 ] && touch "$NOTES/waited" && exit\nexec /bin/sleep "$@"'
LEAVES = """trap 'sleep 0.5; touch "$NOTES/left"; exit {}' TERM
touch "$NOTES/ready"
while :; do sleep 0.1; done"""


class Slurm:
    """A folder with the programs, which comes first on PATH."""

    def __init__(self, folder: Path, srun: str) -> None:
        self.folder = folder
        (folder / "bin").mkdir()
        for name, text in (("sbatch", SBATCH), ("scontrol", SCONTROL), ("srun", srun), ("sleep", SLEEP)):
            (folder / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
            (folder / "bin" / name).chmod(0o755)

    def start(self, *words: str) -> "subprocess.Popen[str]":
        """Submits the script with some words."""
        environment = {
            **os.environ,
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "NOTES": str(self.folder),
            "CUDA_VISIBLE_DEVICES": "",
        }
        with (self.folder / "log").open("a") as log:
            return subprocess.Popen(
                ["sbatch", str(SCRIPT), *words], stdout=log, stderr=log, text=True, cwd=REPOSITORY, env=environment
            )

    @property
    def requeued(self) -> int:
        """How many times a job was put into the queue again."""
        notes = self.folder / "requeued"
        return len(notes.read_text().splitlines()) if notes.exists() else 0


def test_the_script_is_one_and_asks_for_a_signal_and_requeueing() -> None:
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True)
    lines = SCRIPT.read_text().splitlines()
    commands = [number for number, line in enumerate(lines) if line and not line.startswith("#")]
    asked = [line for line in lines[: commands[0]] if line.startswith("#SBATCH ")]
    assert {"#SBATCH --requeue", "#SBATCH --signal=B:USR1@120", "#SBATCH --ntasks-per-node=1"} <= set(asked)


@pytest.mark.parametrize(
    ("srun", "signals", "status", "requeued"),
    [
        ("exit 0", [], 0, 0),
        ("exit 1", [], 1, 0),
        (LEAVES.format(1), [signal.SIGUSR1], 1, 1),
        (LEAVES.format(0), [signal.SIGUSR1], 0, 0),
        (LEAVES.format(1), [signal.SIGTERM], 1, 0),
        (LEAVES.format(1), [signal.SIGUSR1, signal.SIGTERM], 1, 1),
    ],
    ids=["finished", "failed", "interrupted", "finished meanwhile", "preempted", "both"],
)
def test_only_what_was_interrupted_is_put_into_the_queue_again(
    tmp_path: Path, srun: str, signals: list[signal.Signals], status: int, requeued: int
) -> None:
    """By its time's end. What Slurm itself ends, it puts back or not, if it is still there; training saves first."""
    slurm = Slurm(tmp_path, srun)
    job = slurm.start("tiny", "datasets/")
    while signals and not (tmp_path / "ready").exists():
        time.sleep(0.02)
    for number in signals:
        job.send_signal(number)
        time.sleep(0.1)
    assert job.wait(30) == status
    assert (tmp_path / "left").exists() == bool(signals)
    assert slurm.requeued == requeued
    assert (tmp_path / "waited").exists() == (signals == [signal.SIGTERM])


@pytest.mark.slow
def test_a_job_whose_time_is_over_saves_and_goes_on(workplace: Workplace) -> None:
    """With torchrun and training as they are: one checkpoint more, one time into the queue, and the second job ends."""
    steps = 200
    config = workplace.write_config(
        data={"train_tokens": steps * 128, "epochs": 1, "validation_start": 29_000},
        batch={"accumulation": 1, "microbatch": 2},
        evaluation={"every": None},
        checkpoint={"every": 20},
    )
    slurm = Slurm(workplace.folder, SRUN.format(python=sys.executable))
    words = [str(config), str(workplace.datasets), "--output", str(workplace.checkpoints)]
    run = Finished(0, "", "", workplace.checkpoints / "run")
    job = slurm.start(*words)
    while not (run.folder / "latest").exists():
        assert job.poll() is None, (workplace.folder / "log").read_text()
        time.sleep(0.02)
    job.send_signal(signal.SIGUSR1)
    assert job.wait(120) == 1
    assert [line["event"] for line in run.of_kind("event")][-1] == "interrupted"
    assert slurm.requeued == 1
    assert slurm.start(*words).wait(120) == 0, (workplace.folder / "log").read_text()
    assert slurm.requeued == 1
    assert [line["step"] for line in run.of_kind("train")] == list(range(1, steps + 1))
