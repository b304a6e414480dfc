"""A study of two interventions on 20 steps, and folders of its runs as training leaves them."""

from pathlib import Path
from typing import Any

from recorded_runs import begin, event, train_row, validation_row, write_run

from training.config import config_mapping
from training.laboratory.study_file import Study, StudyRun, load_study

BASE = """
model: {vocab_size: 257, context_length: 32, emb_dim: 48, n_heads: 4, n_layers: 3}
data: {dataset: data, train_tokens: 10_240, validation_start: 25_000, validation_tokens: 640}
batch: {world_size: 2, microbatch: 4, accumulation: 2}
precision: {amp: off}
checkpoint: {every: 5, keep: 1}
evaluation: {every: 0}
"""
STUDY = """
base: base
interventions: [no-dropout, weight-tying]
seeds: [{weights: 1, training: 1}, {weights: 2, training: 2}]
"""
SIZES = """
base: base
batch_sizes: [4, 8, 16, 32]
seeds: [{weights: 1, training: 1}, {weights: 2, training: 2}]
"""


def write_study(folder: Path, text: str = STUDY, base: str = BASE) -> Study:
    """Writes a study and its base, and reads it."""
    (folder / "base.yaml").write_text(base)
    (folder / "mine.yaml").write_text(text)
    return load_study(str(folder / "mine.yaml"))


def record_run(folder: Path, run: StudyRun, loss: float | None, steps: int = 20, **config: Any) -> Path:
    """Writes a run's folder: 20 steps recorded, or fewer, then it is not finished; with other values in its config."""
    rows = [begin(0, "start", 1), *(train_row(step) for step in range(1, steps + 1))]
    if steps == 20:
        rows += [validation_row(20, loss), event(20, "finished", seconds=10.0, tokens=20480)]
    values = config_mapping(run.config)
    for section, changes in config.items():
        values[section] = {**values[section], **changes}
    folder.mkdir(parents=True, exist_ok=True)
    written = write_run(folder / run.name, rows, values)
    if steps % 5 == 0 and steps:
        (written / f"step_{steps:08}").mkdir()
    return written
