"""Our steps beside those of transformers' Trainer: the same GPT-2, weights, tokens, batch, type and threads.

    PYTHONPATH=. OMP_NUM_THREADS=2 python benchmarks/trainer.py --workload W1 --amp bf16 --rounds 5

Needs `pip install -e '.[export,benchmarks]'`. Both train in fresh processes, in turn, so that whatever else the machine
does falls on both; the one that begins changes with the round. Prints a line a round, then medians and the ratios with
their spread.

The workloads are run configs in benchmarks/workloads/; `try` is so small that the script itself can be tried in half a
minute.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

PROGRAM = Path(__file__).with_name("transformers_trainer.py")
REPOSITORY = Path(__file__).resolve().parent.parent
WORKLOADS = Path(__file__).with_name("workloads")
WARM_UP = 2
"""Steps that are not timed."""


def question_for(workload: str, amp: str, folder: Path, steps: int, use_cpu: bool) -> dict[str, Any]:
    """What both programs are asked; writes the tokens and the initial weights, as transformers reads them."""
    from safetensors.torch import save_file

    from model.gpt import build_gpt
    from training.benchmark.bench_command import write_random_tokens
    from training.config import config_mapping
    from training.config_file import load_run_config
    from training.exchange.gpt2_format import config_to_gpt2, to_gpt2

    config = load_run_config(str(WORKLOADS / f"{workload}.yaml"), [f"precision.amp={amp}"])
    model, optimizer = build_gpt(config.model, config.seeds.weights), config.optimizer
    write_random_tokens(folder, config.model.vocab_size, (WARM_UP + steps) * config.tokens_per_step + 1)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    save_file(to_gpt2(weights, config.model), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config_to_gpt2(config.model, "float32", None)))
    return {
        "name": config.name,
        "config": config_mapping(config),
        "folder": str(folder),
        "steps": steps,
        "warm_up": WARM_UP,
        "use_cpu": use_cpu,
        "context": config.model.context_length,
        "tokens_per_step": config.tokens_per_step,
        "microbatch": config.batch.microbatch,
        "accumulation": config.batch.accumulation,
        "bf16": amp == "bf16",
        "learning_rate": optimizer.learning_rate,
        "weight_decay": optimizer.weight_decay,
        "betas": optimizer.betas,
        "clip_norm": optimizer.clip_norm,
    }


def train_ours(question: dict[str, Any]) -> dict[str, Any]:
    """The same steps with ours, as a run takes them: their results are read about once a second."""
    import torch

    from training.benchmark.bench_process import Plan, build_bench, synchronize
    from training.benchmark.peak_memory import peak_memory
    from training.config_check import config_from_mapping
    from training.distributed import Process
    from training.step_records import StepReader

    config = config_from_mapping({"name": question["name"], **question["config"]}, "benchmark")
    process = Process.from_environment()
    plan = Plan(config.name, {}, [config.batch.accumulation], 1, torch.get_num_threads(), question["folder"])
    with process.group() as group:
        bench, reader = build_bench(plan, config, group), StepReader(group)
        begun, losses = 0.0, []
        for step in range(question["warm_up"] + question["steps"]):
            if step == question["warm_up"]:
                synchronize(process.device)
                begun = time.perf_counter()
            if reader.add(step + 1, bench.trainers[0].step(step)):
                records, seconds = reader.read()
                bench.log.steps(records, seconds)
                losses += [record.loss for record in records]
        synchronize(process.device)
        seconds = (time.perf_counter() - begun) / question["steps"]
    return {"seconds": seconds, "loss": losses[0], "memory": peak_memory(process.device), "by": "isobatch"}


def run(command: list[str], question: dict[str, Any], python_path: str) -> dict[str, Any]:
    """Asks a program in a fresh process; its answer."""
    file, answer = Path(question["folder"]) / "question.json", Path(question["folder"]) / "answer.json"
    file.write_text(json.dumps(question))
    environment = {**os.environ, "PYTHONPATH": python_path, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, *command, str(file), str(answer)],
        cwd=question["folder"],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{command}: ended with status {done.returncode}\n{done.stderr}")
    values: dict[str, Any] = json.loads(answer.read_text())
    return values


def measure(question: dict[str, Any], number: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """One round: our answer and theirs, ours first in even rounds."""

    def ours() -> dict[str, Any]:
        return run([str(Path(__file__).resolve()), "--ours"], question, str(REPOSITORY))

    def theirs() -> dict[str, Any]:
        return run(["-P", str(PROGRAM)], question, "")

    if number % 2 == 0:
        mine = ours()
        return mine, theirs()
    other = theirs()
    return ours(), other


def summary(answers: list[tuple[dict[str, Any], dict[str, Any]]], tokens_per_step: int) -> list[str]:
    """The table of some rounds."""
    lines = ["| | tokens/s | peak memory, MiB | first loss |", "|---|---|---|---|"]
    for side in zip(*answers, strict=True):
        rates = [tokens_per_step / answer["seconds"] for answer in side]
        memory = median(answer["memory"] for answer in side) / 2**20
        lines.append(
            f"| {side[0]['by']} | {median(rates):,.0f} ({min(rates):,.0f}-{max(rates):,.0f}) | {memory:,.0f} "
            f"| {side[0]['loss']:.5f} |"
        )
    speed = [other["seconds"] / mine["seconds"] for mine, other in answers]
    memory = median(mine["memory"] / other["memory"] for mine, other in answers)
    lines.append(
        f"| ratio | {median(speed):.2f} ({min(speed):.2f}-{max(speed):.2f}) | {memory:.2f} "
        f"| {answers[0][0]['loss'] / answers[0][1]['loss']:.6f} |"
    )
    return lines


def main() -> None:
    """Measures what the command line says."""
    if sys.argv[1:2] == ["--ours"]:
        Path(sys.argv[3]).write_text(json.dumps(train_ours(json.loads(Path(sys.argv[2]).read_text()))))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=sorted(path.stem for path in WORKLOADS.glob("*.yaml")), default="W1")
    parser.add_argument("--amp", choices=["off", "bf16"], default="off")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="timed in each round, after two that are not")
    parser.add_argument("--json", type=Path, help="write all that was measured into this file")
    arguments = parser.parse_args()
    import torch

    use_cpu, answers = not torch.cuda.is_available(), []
    with tempfile.TemporaryDirectory(prefix="isobatch-trainer-") as folder:
        question = question_for(arguments.workload, arguments.amp, Path(folder), arguments.steps, use_cpu)
        for number in range(arguments.rounds):
            mine, other = measure(question, number)
            answers.append((mine, other))
            ratio = other["seconds"] / mine["seconds"]
            print(f"round {number + 1} of {arguments.rounds}: ratio {ratio:.3f}", file=sys.stderr, flush=True)
    print(f"{arguments.workload}, {arguments.amp}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    print("\n".join(summary(answers, question["tokens_per_step"])))
    if arguments.json:
        arguments.json.write_text(json.dumps({"question": question, "answers": answers}, indent=1))


if __name__ == "__main__":
    main()
