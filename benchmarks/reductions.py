"""How `loss.reduction` changes a run whose sequences differ in length; draws docs/reductions.png, prints a table.

    python benchmarks/reductions.py          # about five minutes on two CPU cores; see benchmarks/README.md

The questions and answers are the docstrings of Python's standard library ("What does json.dumps do?"), so that nothing
is downloaded. Another version of Python has other docstrings, and gives other numbers.
"""

import ast
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from training.charts import BLUE, GREEN, PURPLE, VERMILION
from training.metrics_file import Metrics, read_metrics
from training.preparation.dataset_files import fraction_of
from training.preparation.instructions import prepare_instructions
from training.preparation.python_library import python_library_documents
from training.preparation.sources import find_sources
from training.tokenizer import train_tokenizer

REPOSITORY = Path(__file__).resolve().parent.parent
RECORDS = 1600
VOCAB_SIZE = 1024
CONTEXT = 192
SEEDS = (42, 43)
# Reduction, the config's microbatch, colour, line: sixteen sequences a step in each.
RUNS = (
    ("token", 1, BLUE, "-"),
    ("token", 4, BLUE, ":"),
    ("microbatch_mean", 1, VERMILION, "-"),
    ("microbatch_mean", 4, PURPLE, "-"),
    ("sum", 1, GREEN, "--"),
)
CONFIG: dict[str, Any] = {
    "model": {"vocab_size": VOCAB_SIZE, "context_length": CONTEXT, "emb_dim": 64, "n_heads": 4, "n_layers": 2,
              "dropout": 0.0, "tie_weights": True, "init": "gpt2"},
    "data": {"dataset": "docstrings", "shuffle": True},
    "precision": {"amp": "off", "matmul": "highest"},
    "optimizer": {"learning_rate": 2e-3, "weight_decay": 0.1, "betas": [0.9, 0.95], "decay": "matrices"},
    "schedule": {"name": "cosine", "warmup_percent": 10},
    "evaluation": {"every": 10},
    "checkpoint": {"every": None, "keep": 1},
}  # fmt: skip


def docstrings() -> Iterator[tuple[str, str]]:
    """Yields (dotted name, docstring) of the public functions, classes and methods of the library."""
    for name, text in python_library_documents():
        if not name.startswith("library/") or "/_" in name:
            continue
        module = name.removeprefix("library/").removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        yield from _of_body(module, ast.parse(text).body)


def _of_body(parent: str, body: list[ast.stmt]) -> Iterator[tuple[str, str]]:
    for node in body:
        if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith("_"):
            continue
        docstring = ast.get_docstring(node)
        if docstring:
            yield f"{parent}.{node.name}", docstring
        if isinstance(node, ast.ClassDef):
            yield from _of_body(f"{parent}.{node.name}", node.body)


def prepare(folder: Path) -> None:
    """Makes the dataset of questions and answers, with a tokenizer of its own."""
    found = sorted(dict(docstrings()).items(), key=lambda item: fraction_of(item[0]))[:RECORDS]
    records = [{"prompt": f"What does {name} do?\n", "response": text} for name, text in found]
    source, tokenizer = folder / "docstrings.jsonl", folder / "tokenizer.json"
    source.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    train_tokenizer((text for record in records for text in record.values()), VOCAB_SIZE).save(str(tokenizer))
    prepare_instructions(find_sources([str(source)], None, []), folder / "datasets" / "docstrings", tokenizer, 0.08)


def train(folder: Path, reduction: str, microbatch: int, seed: int) -> Metrics:
    """Trains one run from scratch; the layout here is the same for all, as it changes nothing."""
    name = f"{reduction}-{microbatch}-{seed}"
    batch = {"world_size": 1, "microbatch": microbatch, "accumulation": 16 // microbatch}
    config = {**CONFIG, "batch": batch, "loss": {"reduction": reduction}, "seeds": {"weights": seed, "training": seed}}
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(config))
    command: list[str | Path] = [
        sys.executable,
        REPOSITORY / "ddp_train.py",
        folder / f"{name}.yaml",
        folder / "datasets",
    ]
    subprocess.run([*command, "--output", folder, "--microbatch", "8"], check=True)
    return read_metrics(folder / name / "metrics.jsonl")


def draw(runs: dict[tuple[str, int, int], Metrics], path: Path) -> None:
    """Validation loss over steps, a line for each run; of the second seed thinner."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 5.6), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_title("16 documents of different length a step: what loss.reduction changes", loc="left")
    axes.set_xlabel("step")
    axes.set_ylabel("validation loss (nats per token, all targets alike)")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    for reduction, microbatch, colour, style in RUNS:
        for number, seed in enumerate(SEEDS):
            validation = runs[reduction, microbatch, seed].validation
            label = "" if number else f"{reduction}, microbatch {microbatch}"
            late = validation[validation["step"] >= 20]  # before that all curves fall together, steeply
            width = 1.0 if number else 1.8
            axes.plot(late["step"], late["loss"], color=colour, ls=style, lw=width, label=label)
    axes.legend(frameon=False)
    figure.savefig(path)


def table(runs: dict[tuple[str, int, int], Metrics]) -> list[str]:
    """The rows of the table in docs/loss.md."""
    lines = [
        "| `loss.reduction` | microbatch x accumulation | final validation loss, by seed | median gradient norm |",
        "|---|---|---|---|",
    ]
    for reduction, microbatch, _, _ in RUNS:
        found = [runs[reduction, microbatch, seed] for seed in SEEDS]
        losses = ", ".join(f"{metrics.validation['loss'][-1]:.4f}" for metrics in found)
        norm = np.median(np.concatenate([metrics.train["grad_norm"] for metrics in found]))
        lines.append(f"| `{reduction}` | {microbatch} x {16 // microbatch} | {losses} | {norm:.3g} |")
    return lines


def main() -> None:
    """Prepares, trains, draws."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        runs = {
            (reduction, microbatch, seed): train(folder, reduction, microbatch, seed)
            for reduction, microbatch, _, _ in RUNS
            for seed in SEEDS
        }
    draw(runs, REPOSITORY / "docs" / "reductions.png")
    print("\n".join(table(runs)))


if __name__ == "__main__":
    main()
