"""Runs on several machines, and runs that torchrun starts again: real agents on 127.0.0.1."""

import os
import shutil
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from agents import Agent, nodes, wait_until
from conftest import Finished, Workplace, train_in_folder
from fake_hub import FakeHub
from ranks import as_workers
from torch.nn.parallel import DistributedDataParallel

import ddp_train
import training.checkpoint_writer
import training.hub.push
import training.loop
import training.session

WEIGHTS = "latest/model.safetensors"
TIMES = ("seconds", "tokens_per_second")


def values_of(run: Finished) -> list[dict[str, Any]]:
    """The train and validation lines of metrics.jsonl, without times."""
    lines = [line for line in run.lines if line["kind"] in ("train", "validation")]
    return [{key: value for key, value in line.items() if key not in TIMES} for line in lines]


def events_of(run: Finished) -> list[tuple[str, int, int]]:
    """Starts, resumptions and the end: name, step and number of processes (0 where it is not told)."""
    return [
        (line["event"], line["step"], line.get("layout", {}).get("world_size", 0))
        for line in run.of_kind("event")
        if line["event"] in ("start", "resume", "finished")
    ]


@pytest.mark.slow
def test_nodes_that_share_nothing_go_on_when_a_worker_is_killed(workplace: Workplace) -> None:
    """R46: each node gets the dataset, rank 0's alone has checkpoints, and both are restarted from them.

    Killed is the worker that is not rank 0: the other agent restarts its own too, rank 0 reads, and the run is that of
    two processes of one agent that nobody has disturbed.
    """
    content = (workplace.datasets / "data" / "train.safetensors").read_bytes()
    config = workplace.write_config(
        data={"dataset": "someone/tokens", "train_tokens": 40 * 512}, evaluation={"every": 10}, checkpoint={"every": 5}
    )
    with FakeHub() as hub, nodes(workplace) as several:
        workplace.environment = hub.environment(workplace.folder / "home")
        hub.add("dataset", "someone/tokens", {"train.safetensors": content})
        by_output = {
            name: several.start(
                config, torchrun=["--nnodes", "2", "--max-restarts", "2"], datasets=f"data_{name}", output=name
            )
            for name in "ab"
        }

        def writers() -> list[str]:
            return [name for name in by_output if (workplace.folder / name / "run" / "latest").exists()]

        wait_until(lambda: bool(writers()), several.agents)
        (writer,) = writers()
        other = "ab".replace(writer, "")
        by_output[other].kill_worker()
        run = several.wait(config, output=writer)
        assert hub.downloads("train.safetensors") == 2
    assert run.status == 0, run.errors
    assert not (workplace.folder / other / "run").exists()
    assert f"{writer}/run: going on from step_" in run.errors
    assert run.errors.count("another process of the run is gone") == 1
    assert [name for name, _, _ in events_of(run)] == ["start", "resume", "finished"]
    shutil.copytree(workplace.folder / f"data_{other}" / "someone", workplace.datasets / "someone")
    whole = workplace.train_on_ranks(config, 2, output="whole")
    assert values_of(run) == values_of(whole)
    assert (run.folder / WEIGHTS).read_bytes() == (whole.folder / WEIGHTS).read_bytes()


def train_with_own_output(config: str, datasets: Path, outputs: list[Path], options: dict[str, Any]) -> None:
    """As a worker whose node has an output folder of its own."""
    train_in_folder(config, datasets, outputs[int(os.environ["GROUP_RANK"])], options)


@pytest.mark.slow
def test_rank_0_on_another_node_does_not_begin_anew(workplace: Workplace) -> None:
    """Where nothing is shared, the machines in another order would train the run from its beginning."""
    config = workplace.write_config(evaluation={"every": None})
    outputs = [workplace.folder / "a", workplace.folder / "b"]
    workplace.train_here(config, output="b", stop_after=1)
    before = sorted(outputs[1].rglob("*"))
    with pytest.raises(
        Exception, match=r"b/run: on .* it holds step_00000001 of this run, and on the machine of rank 0"
    ):
        as_workers(
            2, train_with_own_output, str(config), workplace.datasets, outputs, {"resume": "auto"}, nodes=2, timeout=90
        )
    assert sorted(outputs[1].rglob("*")) == before
    assert not (outputs[0] / "run").exists()


@pytest.mark.slow
def test_a_run_goes_on_without_a_node_that_leaves(workplace: Workplace) -> None:
    """With `--nnodes 1:2` and one folder: the one that stays replans, says so in a line, and no step is lost or twice.

    R46: nothing is written twice while there are two. The one that stays has the rendezvous, which cannot move.
    """
    workplace.write_tokens(tokens=np.arange(200_000) % 200)
    config = workplace.write_config(
        data={"train_tokens": 150 * 512, "validation_start": 190_000},
        evaluation={"every": 100},
        checkpoint={"every": 10},
    )
    torchrun = ["--nnodes", "1:2", "--max-restarts", "3", "--rdzv-conf", "last_call_timeout=4"]
    latest = workplace.folder / "out" / "run" / "latest"
    with nodes(workplace) as several:
        for _ in range(2):
            several.start(config, torchrun=torchrun)
        wait_until(latest.exists, several.agents)
        leaving = next(agent for agent in several.agents if not agent.listens(several.port))
        several.agents.remove(leaving)
        leaving.process.send_signal(signal.SIGTERM)
        run = several.wait(config)
        leaving.process.wait(60)
    assert run.status == 0, run.errors
    events = events_of(run)
    assert [(name, processes) for name, _, processes in events] == [("start", 2), ("resume", 1), ("finished", 0)]
    assert "1 process x microbatch 4 x accumulation 4 (the config says 2 x 4 x 2: the same run)" in run.errors
    assert [line["step"] for line in run.of_kind("train")] == list(range(1, 151))
    saved = Counter(line["step"] for line in run.of_kind("event") if line["event"] == "checkpoint")
    assert set(saved.values()) == {1}
    assert run.errors.count("Report: ") == 1


@pytest.mark.slow
def test_two_standalone_runs_beside_a_busy_port_and_a_killed_rank(workplace: Workplace) -> None:
    """R55: torchrun's default port is taken, and both train; --max-restarts brings back the one with a killed rank."""
    config = workplace.write_config(
        data={"train_tokens": 40 * 512}, checkpoint={"every": 5}, evaluation={"every": None}
    )
    torchrun = ["--standalone", "--nproc_per_node", "2", "--max-restarts", "2"]
    with socket.socket() as port:
        port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        port.bind(("", 29500))
        port.listen()
        with nodes(workplace) as several:
            where = {name: ["--output", str(workplace.folder / name)] for name in ("hit", "whole")}
            agents = {
                name: Agent(
                    workplace, workplace.folder / name, torchrun, [str(config), str(workplace.datasets), *there]
                )
                for name, there in where.items()
            }
            several.agents = list(agents.values())
            wait_until((workplace.folder / "hit" / "run" / "latest").exists, several.agents)
            agents["hit"].kill_worker()
            said = several.wait(config, "hit")
    assert said.status == 0, said.errors
    hit, whole = (Finished(0, "", "", workplace.folder / name / "run") for name in where)
    assert [name for name, _, _ in events_of(hit)] == ["start", "resume", "finished"]
    assert values_of(hit) == values_of(whole)
    assert (hit.folder / WEIGHTS).read_bytes() == (whole.folder / WEIGHTS).read_bytes()


@pytest.mark.slow
def test_a_mistake_is_not_tried_again_and_again(workplace: Workplace) -> None:
    """torchrun makes all of its restarts, each of which ends before it has imported PyTorch; one sentence, no trace."""
    config = workplace.write_config(data={"dataset": "nowhere"})
    torchrun = ["--standalone", "--nproc_per_node", "2", "--max-restarts", "3"]
    with nodes(workplace) as several:
        agent = Agent(workplace, workplace.folder / "out", torchrun, [str(config), str(workplace.datasets)])
        several.agents.append(agent)
        wait_until(lambda: "error: " in agent.said, [agent])
        told = time.monotonic()
        said = several.wait(config).errors
    assert time.monotonic() - told < 15
    assert said.count("there is no such dataset") == 1
    assert said.count("(exitcode: 2)") >= 4, "each start ends with the status of a mistake"
    assert said.count("Traceback") == 1, "torchrun's own, at its end"


TIMEOUT, LONGER = 4, 5
"""Seconds of the process group's clock, and of what one process does alone; of each kind, one is long enough."""


def train_where_one_is_slow(config: str, datasets: Path, output: Path) -> None:
    """As a worker whose group's clock is short, with a rank 0 that is slow in all it does alone."""
    is_main = os.environ["RANK"] == "0"

    def slow(module: Any, name: str, really: bool = True) -> None:
        does: Callable[..., Any] = getattr(module, name)

        def late(*arguments: Any, **options: Any) -> Any:
            time.sleep(LONGER if is_main else 0)
            return does(*arguments, **options) if really else None

        setattr(module, name, late)

    def only_in_training(self: DistributedDataParallel, *_inputs: Any) -> None:
        assert self.module.training, "one rank alone could be here, and the others would not answer"

    dist.init_process_group = partial(dist.init_process_group, timeout=timedelta(seconds=TIMEOUT))
    init = DistributedDataParallel.__init__

    def with_check(self: DistributedDataParallel, *arguments: Any, **options: Any) -> None:
        init(self, *arguments, **options)
        self.register_forward_pre_hook(only_in_training)

    DistributedDataParallel.__init__ = with_check  # type: ignore[method-assign]
    slow(training.session, "provide_dataset")
    slow(ddp_train, "digests")
    slow(training.loop, "save")
    slow(training.checkpoint_writer, "publish")
    slow(ddp_train, "finish_run")
    slow(ddp_train, "check_services", really=False)
    slow(training.hub.push, "push_run", really=False)
    train_in_folder(config, datasets, output, {"push_to_hub": "someone/run"})


@pytest.mark.slow
def test_nobody_waits_in_a_collective_while_one_process_works(workplace: Workplace) -> None:
    """R42, R43: download, digests, checkpoint, charts and upload, each longer than the group's timeout, end normally.

    Evaluations, in the middle and at the last step, are everybody's work, and without DDP's wrapper.
    """
    config = workplace.write_config(
        data={"train_tokens": 4 * 512}, evaluation={"every": 2}, checkpoint={"every": None, "keep": 1}
    )
    as_workers(2, train_where_one_is_slow, str(config), workplace.datasets, workplace.checkpoints)
    run = Finished(0, "", "", workplace.checkpoints / "run")
    assert [line["step"] for line in run.of_kind("validation")] == [2, 4]
    assert events_of(run)[-1] == ("finished", 4, 0)
