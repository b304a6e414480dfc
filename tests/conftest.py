"""What several test modules need: small datasets, configs, and runs of the real command in real processes."""

import contextlib
import io
import json
import os

from small_configs import Configs

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: two cores, and several processes at a time

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from fake_hub import FakeHub
from hub_process import Client
from numpy.typing import ArrayLike
from ranks import as_workers
from safetensors.numpy import save_file

import ddp_train
from training.preparation.python_library import prepare_python_library

REPOSITORY = Path(__file__).resolve().parent.parent
# Started in the background by a script, this process ignores Ctrl-C, and all that it starts would.
if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)


# The model of oracles' golden curves: 110,688 parameters.
SMALL_MODEL = {"vocab_size": 257, "context_length": 32, "emb_dim": 48, "n_heads": 4, "n_layers": 3, "dropout": 0.0}


def golden_tokens(count: int) -> np.ndarray:
    """The token stream of the golden curves: a linear congruential generator with an uneven distribution."""
    tokens, state = [], 1
    for _ in range(count):
        state = (1103515245 * state + 12345) % 2**31
        tokens.append(((state >> 16) % 1000) % (1 + (state >> 8) % 97))
    return np.array(tokens)


@dataclass(frozen=True)
class Finished:
    """A command that ended."""

    status: int
    output: str
    errors: str
    folder: Path
    """checkpoints/<run>."""

    @property
    def lines(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl."""
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        """The lines of one kind."""
        return [line for line in self.lines if line["kind"] == kind]

    @property
    def losses(self) -> list[float]:
        """The training loss of each step."""
        return [line["loss"] for line in self.of_kind("train")]


def train_in_folder(config: str, datasets: Path, output: Path, options: dict[str, Any]) -> None:
    """What a worker of Workplace.train_on_ranks does."""
    ddp_train.main(config, datasets, output=output, **options)


class Workplace:
    """A folder with configs, datasets and checkpoints of its own, and the command that trains in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.datasets = folder / "datasets"
        self.checkpoints = folder / "checkpoints"
        self.environment: dict[str, str] = {}
        """What the commands started here find in their environment besides."""

    def write_tokens(self, name: str = "data", file: str = "train", tokens: ArrayLike | None = None) -> Path:
        """Writes a token file of a dataset; the golden tokens unless others are given."""
        path = self.datasets / name / f"{file}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        values = golden_tokens(30_000).astype(np.uint16) if tokens is None else np.asarray(tokens)
        save_file({"tokens": values}, path)
        return path

    def write_config(self, name: str = "run", **sections: Any) -> Path:
        """Writes a config: 10 steps of 512 golden tokens on the small model, but for the sections given."""
        config: dict[str, Any] = {
            "model": SMALL_MODEL,
            "data": {"dataset": "data", "train_tokens": 5120, "validation_start": 25_000, "validation_tokens": 640},
            "batch": {"world_size": 2, "microbatch": 4, "accumulation": 2},
            "precision": {"amp": "off", "matmul": "highest"},
            "evaluation": {"every": 4},
            "checkpoint": {"every": 5},
        }
        for section, values in sections.items():
            if isinstance(values, dict) and isinstance(config.get(section), dict):
                values = {**config[section], **values}
            config[section] = values
        path = self.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(config))
        return path

    def train(
        self, config: Path | str, *options: str, processes: int = 1, output: str = "checkpoints", timeout: float = 240
    ) -> Finished:
        """Runs ddp_train.py, under torchrun if there are several processes."""
        process = self.start(config, *options, processes=processes, output=output)
        out, errors = process.communicate(timeout=timeout)
        return Finished(process.returncode, out, errors, self.folder / output / Path(config).stem)

    def train_here(self, config: Path | str, output: str = "checkpoints", **options: Any) -> Finished:
        """The same for one process, without starting another: the arguments of ddp_train.main."""
        ddp_train.main(str(config), self.datasets, output=self.folder / output, **options)
        return Finished(0, "", "", self.folder / output / Path(config).stem)

    def train_on_ranks(
        self, config: Path | str, processes: int, output: str = "checkpoints", **options: Any
    ) -> Finished:
        """The same as train_here on several processes, without torchrun and its seconds of imports."""
        as_workers(processes, train_in_folder, str(config), self.datasets, self.folder / output, options)
        return Finished(0, "", "", self.folder / output / Path(config).stem)

    def start(
        self, config: Path | str, *options: str, processes: int = 1, output: str = "checkpoints"
    ) -> "subprocess.Popen[str]":
        """Starts ddp_train.py without waiting for it."""
        launcher = [sys.executable]
        if processes > 1:
            launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        command = [*launcher, str(REPOSITORY / "ddp_train.py"), str(config), str(self.datasets)]
        return subprocess.Popen(
            [*command, "--output", str(self.folder / output), *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            cwd=self.folder,
            env={
                **os.environ,
                "CUDA_VISIBLE_DEVICES": "",
                "PYTHONWARNINGS": "error::FutureWarning",
                **self.environment,
            },
        )


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files and folders that were brought to the disk, in order, by the paths that they had then."""
    paths: list[Path] = []
    fsync = os.fsync

    def recorded(descriptor: int) -> None:
        paths.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", recorded)
    return paths


@pytest.fixture
def workplace(tmp_path: Path) -> Workplace:
    """An empty workplace with the golden tokens as its dataset `data`."""
    place = Workplace(tmp_path)
    place.write_tokens()
    return place


@pytest.fixture(scope="session")
def shared_workplace(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """The same, kept for the whole session: for runs that several tests look at."""
    place = Workplace(tmp_path_factory.mktemp("shared"))
    place.write_tokens()
    return place


@pytest.fixture
def configs(tmp_path: Path) -> Configs:
    """An empty folder for YAML files."""
    return Configs(tmp_path)


@pytest.fixture(scope="module")
def module_hub() -> Iterator[FakeHub]:
    """A stand-in for the Hub, kept for a module's tests; they use `hub`."""
    with FakeHub() as hub:
        yield hub


@pytest.fixture
def hub(module_hub: FakeHub) -> FakeHub:
    """The module's Hub, empty."""
    module_hub.reset()
    return module_hub


@pytest.fixture(scope="module")
def client(module_hub: FakeHub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A process that uploads to the module's Hub."""
    with Client(module_hub, tmp_path_factory.mktemp("client") / "home") as client:
        yield client


@pytest.fixture(scope="session")
def prepared_python_library(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of the built-in dataset, and what was printed while it was made (which takes some ten seconds)."""
    folder = tmp_path_factory.mktemp("datasets") / "python-library"
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed):
        prepare_python_library(folder)
    return folder, printed.getvalue()


@pytest.fixture(scope="session")
def python_library(prepared_python_library: tuple[Path, str]) -> Path:
    """The folder of the built-in dataset, made once for the whole session; not to be changed."""
    return prepared_python_library[0]
