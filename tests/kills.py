"""kill -9 of a random process of a run at a random moment, gone on with each time; the run must be what it would be.

    python tests/kills.py --kills 40 --seed 7

Workers and launchers, on 1 to 3 processes, while a run starts, trains, evaluates, saves and ends; when it has finished
it is compared with the undisturbed one, and starts again until there were so many kills. The moments depend on the
machine too, so that a seed repeats what is chosen, not what is met. tests/test_kills.py does it with few.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPOSITORY)]  # python starts this file by its path

from training.checkpoint_files import find_checkpoint, number_of  # noqa: E402
from training.errors import UserError  # noqa: E402
from training.file_digest import file_digest  # noqa: E402
from training.torchrun import training_command  # noqa: E402

STEPS = 40
MOST_SECONDS = 120.0
"""Within which a run must start, finish, or leave after a kill."""
CONFIG = {
    "model": {"vocab_size": 97, "context_length": 16, "emb_dim": 16, "n_heads": 2, "n_layers": 2, "dropout": 0.1},
    "data": {"dataset": "data", "train_tokens": STEPS * 12 * 16, "shuffle": True}
    | {"validation_start": 10_000, "validation_tokens": 640},
    "batch": {"world_size": 2, "microbatch": 6, "accumulation": 1},
    "reproducibility": "bitwise",
    "precision": {"amp": "off"},
    "schedule": {"name": "cosine", "warmup_percent": 10},
    "evaluation": {"every": 7},
    "checkpoint": {"every": 1, "keep": 2},
}


class Fault(Exception):  # noqa: N818  (what is looked for)
    """A run that is not what it would have been."""


@dataclass(frozen=True)
class Kill:
    """What was killed, and when."""

    victim: str
    phase: str
    processes: int
    step: int
    """Of the newest checkpoint then."""


@dataclass(frozen=True)
class Place:
    """A folder with the dataset and the config, and the run in it."""

    folder: Path

    def write(self) -> None:
        tokens = np.random.default_rng(5).integers(0, 97, 11_000).astype(np.uint16)
        (self.folder / "datasets" / "data").mkdir(parents=True)
        save_file({"tokens": tokens}, self.folder / "datasets" / "data" / "train.safetensors")
        (self.folder / "run.yaml").write_text(json.dumps(CONFIG))

    @property
    def run(self) -> Path:
        return self.folder / "checkpoints" / "run"

    @property
    def said(self) -> str:
        return (self.folder / "said").read_text()

    def launch(self, processes: int, *options: str) -> "subprocess.Popen[bytes]":
        """Starts training, as a user would."""
        output = ["--output", str(self.run.parent), *options]
        command = training_command(str(self.folder / "run.yaml"), self.folder / "datasets", processes, *output)
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        with (self.folder / "said").open("w") as said:
            return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=said, stderr=said)

    def processes(self) -> dict[int, int]:
        """The run's processes and the parent of each, also those whose parent is gone."""
        listing = subprocess.run(
            ["ps", "-ww", "-eo", "pid,ppid,stat,args"], capture_output=True, text=True, check=True
        ).stdout
        rows = [line.split(None, 3) for line in listing.splitlines()[1:]]
        found = [row for row in rows if str(self.folder) in row[3] and not row[2].startswith("Z")]
        return {int(pid): int(parent) for pid, parent, _, _ in found}

    def records(self, kind: str) -> list[dict[str, object]]:
        """The whole lines of metrics.jsonl that are of a kind."""
        path = self.run / "metrics.jsonl"
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        rows = [json.loads(line) for line in lines if line.endswith(b"\n")]
        return [row for row in rows if row["kind"] == kind]

    def newest(self) -> int:
        """The step of the newest checkpoint, verified; -1 without one."""
        try:
            return number_of(find_checkpoint(self.run, "latest").path)
        except UserError:
            return -1

    def recorded(self) -> int:
        """The step of the newest checkpoint that metrics.jsonl tells of; -1 without one."""
        steps = [int(str(row["step"])) for row in self.records("event") if row["event"] == "checkpoint"]
        return max(steps, default=-1)

    def result(self) -> tuple[str, list[tuple[object, object]]]:
        """What the run has come to: the digest of its weights, and the loss of each step and validation."""
        losses = [(row["step"], row["loss"]) for row in (*self.records("train"), *self.records("validation"))]
        return file_digest(self.run / "latest" / "model.safetensors"), losses


def wait_for(what: Callable[[], object], fault: str) -> None:
    """Waits until something is true, but not for ever."""
    deadline = time.monotonic() + MOST_SECONDS
    while not what():
        if time.monotonic() > deadline:
            raise Fault(fault)
        time.sleep(0.02)


def finish(place: Place, process: "subprocess.Popen[bytes]") -> None:
    """Waits for a run's end, which must be a good one."""
    wait_for(lambda: process.poll() is not None, "the run does not come to its end")
    if process.returncode != 0:
        raise Fault(f"the run has failed:\n{place.said}")


def kill(place: Place, draw: random.Random, processes: int) -> Kill | None:
    """Goes on with a run and kills one of its processes; None if the run came to its end before."""
    before = place.newest()
    process = place.launch(processes, "--resume", "auto")
    starting = draw.random() < 0.2
    moment, which = draw.uniform(0, 6.0 if starting else 1.5), draw.random()

    def has_begun() -> bool:
        return process.poll() is not None or "run: going on" in place.said or "run: starting" in place.said

    if not starting:
        wait_for(has_begun, "the run does not start")
    time.sleep(moment)
    phase = "training" if has_begun() else "starting"
    workers = [pid for pid, parent in place.processes().items() if parent == process.pid] if processes > 1 else []
    if phase == "training" and processes > 1 and len(workers) < processes:  # the run is over, well or not
        wait_for(lambda: process.poll() is not None, "the launcher does not end")
    victims = [process.pid, *workers]
    number = int(which * len(victims))
    if process.poll() is not None:
        finish(place, process)
        return None
    os.kill(victims[number], signal.SIGKILL)
    wait_for(lambda: process.poll() is not None, "the launcher does not end")
    wait_for(lambda: not place.processes(), "a process has outlived the launcher")
    if phase == "training" and any(place.run.glob(".step_*")):
        phase = "saving"
    newest = place.newest()
    if newest < max(before, place.recorded()):
        raise Fault(f"step {newest} is the newest checkpoint, where {max(before, place.recorded())} was saved")
    victim = "the only process" if processes == 1 else "launcher" if number == 0 else "worker"
    return Kill(victim, phase, processes, newest)


def until_killed(place: Place, kills: int, seed: int) -> list[Kill]:
    """Kills so many times, and compares each run that has come to its end, the last one after the last kill.

    Raises:
        Fault: a checkpoint was lost, a process stayed, or a run has become another one.
    """
    draw, killed = random.Random(seed), list[Kill]()
    finish(place, place.launch(1))
    expected = place.result()
    whole = place.run.rename(place.folder / "undisturbed")
    print(f"undisturbed: {STEPS} steps, weights {expected[0][:12]}, in {whole}", flush=True)
    while True:
        processes = draw.choice([1, 2, 2, 3])
        if len(killed) == kills:
            finish(place, place.launch(processes, "--resume", "auto"))
            done = None
        else:
            done = kill(place, draw, processes)
        if done is not None:
            killed.append(done)
            where = f"{done.victim} of {done.processes}" if done.processes > 1 else done.victim
            print(f"kill {len(killed)}: {where}, {done.phase}, newest checkpoint {done.step}", flush=True)
            continue
        found = place.result()
        if found != expected:
            raise Fault(f"weights {found[0]}, not {expected[0]}; losses {found[1]}, not {expected[1]}\n{place.said}")
        print(
            f"the run has finished, on {processes} processes: weights {found[0][:12]}, all losses the same", flush=True
        )
        if len(killed) == kills:
            return killed
        place.run.rename(place.folder / f"finished after {len(killed)} kills")


def main(arguments: list[str]) -> int:
    """1 where a run became another one, lost a checkpoint, or left a process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    options = parser.parse_args(arguments)
    print(f"seed {options.seed}", flush=True)
    with tempfile.TemporaryDirectory() as name:
        place = Place(Path(name))
        place.write()
        try:
            killed = until_killed(place, options.kills, options.seed)
        except Fault as fault:
            print(f"FAULT: {fault}")
            return 1
        finally:
            for process_id in place.processes():
                os.kill(process_id, signal.SIGKILL)
    for (victim, phase), count in sorted(Counter((each.victim, each.phase) for each in killed).items()):
        print(f"{count:4} x {victim}, {phase}")
    print(
        f"{len(killed)} kills: no checkpoint was lost, no process stayed, each run that finished is the undisturbed one"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
