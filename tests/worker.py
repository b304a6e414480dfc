"""Commands of ours in a process that has imported everything already, one after another.

    with Worker(hub.environment(home)) as worker:
        done = worker.run("isobatch", "push", "tiny", "owner/name")

The Hub's client reads its environment when it is imported, so these cannot run in the process of the tests; and a new
process for each would take seconds. Its waits are 500 times shorter (impatient.py).
"""

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from conftest import REPOSITORY

PROGRAM = """
import contextlib, io, json, os, sys
from impatient import hurry
hurry()
import ddp_train
from training import cli, command

for line in sys.stdin:
    words, os.environ["HF_TOKEN"] = json.loads(line)
    app = {"isobatch": cli.app, "ddp_train.py": ddp_train.app}[words[0]]
    sys.argv = words
    out, errors, status = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        try:
            command.run_command(app)
        except SystemExit as end:
            status = end.code or 0
    print(json.dumps([status, out.getvalue(), errors.getvalue()]), flush=True)
"""


@dataclass(frozen=True)
class Done:
    """What came of a command."""

    status: int
    output: str
    errors: str


class Worker:
    """A process under an environment of its own; see the module's docstring."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        path = f"{REPOSITORY}:{REPOSITORY / 'tests'}"
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            env={**environment, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.process.communicate()

    def run(self, *words: object, token: str = "hf_write") -> Done:
        """Runs `isobatch ...` or `ddp_train.py ...` to its end."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([[str(word) for word in words], token]) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, "the process has died"
        return Done(*json.loads(line))
