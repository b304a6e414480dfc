"""torchrun's agents on one machine, as many as nodes, with folders of their own or shared ones."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from conftest import REPOSITORY, Finished, Workplace


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class Agent:
    """One torchrun of a run on several nodes, and what it and its worker have said."""

    def __init__(self, place: Workplace, folder: Path, torchrun: Sequence[str], training: Sequence[str]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._said = folder / f"agent_{time.monotonic_ns()}.log"
        with self._said.open("w") as said:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "torch.distributed.run", *torchrun, str(REPOSITORY / "ddp_train.py"), *training],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env={
                    **os.environ,
                    "CUDA_VISIBLE_DEVICES": "",
                    "PYTHONWARNINGS": "error::FutureWarning",
                    **place.environment,
                },
            )

    @property
    def said(self) -> str:
        """Standard output and error so far, of the agent and its workers."""
        return self._said.read_text()

    @property
    def workers(self) -> list[int]:
        """The process ids of its workers, now."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [pid for pid in map(int, children) if b"ddp_train.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]

    def listens(self, port: int) -> bool:
        """Whether it is the one that other agents find each other with."""
        own = {os.readlink(path) for path in Path(f"/proc/{self.process.pid}/fd").iterdir() if path.is_symlink()}
        rows = [
            line.split() for table in ("tcp", "tcp6") for line in Path(f"/proc/net/{table}").read_text().splitlines()
        ]
        return any(f"socket:[{row[9]}]" in own for row in rows if row[3] == "0A" and row[1].endswith(f":{port:04X}"))

    def kill_worker(self) -> None:
        """Kills one of them."""
        os.kill(self.workers[0], signal.SIGKILL)


class Nodes:
    """A workplace whose runs are started by several agents; they are gone when it is left."""

    def __init__(self, place: Workplace) -> None:
        self.place = place
        self.port = free_port()
        self.agents: list[Agent] = []

    def start(
        self, config: Path, *options: str, torchrun: Sequence[str] = (), datasets: str = "datasets", output: str = "out"
    ) -> Agent:
        """Starts one more agent with one process; a run needs as many as --nnodes says."""
        where = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{self.port}", "--rdzv-id", "a-run"]
        folder = self.place.folder
        training = [str(config), str(folder / datasets), "--output", str(folder / output), *options]
        agent = Agent(self.place, folder / output, ["--nproc_per_node", "1", *where, *torchrun], training)
        self.agents.append(agent)
        return agent

    def wait(self, config: Path, output: str = "out", timeout: float = 240) -> Finished:
        """Waits for all agents; what came of the run in one output folder, and what all agents said."""
        deadline = time.monotonic() + timeout
        statuses = [agent.process.wait(deadline - time.monotonic()) for agent in self.agents]
        said = "".join(agent.said for agent in self.agents)
        self.agents = []
        self.port = free_port()
        return Finished(max(map(abs, statuses)), "", said, self.place.folder / output / config.stem)


@contextmanager
def nodes(place: Workplace) -> Iterator[Nodes]:
    """Several agents, ended whatever happens."""
    several = Nodes(place)
    try:
        yield several
    finally:
        for agent in several.agents:
            agent.process.terminate()
        for agent in several.agents:
            agent.process.wait(60)


def wait_until(condition: Callable[[], bool], agents: Sequence[Agent], timeout: float = 120) -> None:
    """Waits for something that running agents do."""
    deadline = time.monotonic() + timeout
    while not condition():
        said = "\n".join(agent.said for agent in agents)
        assert all(agent.process.poll() is None for agent in agents), said
        assert time.monotonic() < deadline, said
        time.sleep(0.05)
