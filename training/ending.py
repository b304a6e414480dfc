"""The end of a run: its last records, a sample, charts and report."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
from tokenizers import Tokenizer

from model.gpt import GPT
from training.document_rows import AnyRows
from training.errors import one_line
from training.loss import IGNORED
from training.metrics import RunLog
from training.metrics_file import Metrics, read_metrics
from training.report import summary_lines, write_report
from training.sampling import Draw, continue_text
from training.snapshot import TrainingState
from training.tokenizer import decode_known, end_of_text_id

Result = TypeVar("Result")

SAMPLE_PROMPT_TOKENS = 16
SAMPLE_TOKENS = 80


def finish_run(folder: Path, log: RunLog, state: TrainingState, total_steps: int, text: tuple[str, str] | None) -> None:
    """Records how far the run came, and writes and shows its result; one process does this.

    Args:
        folder: checkpoints/<run>.
        log: of the run.
        state: as of its last step.
        total_steps: that it was to have.
        text: a prompt and how the model goes on; None without a tokenizer.
    """
    log.close()
    if text is not None:
        log.event(state.step, "sample", prompt=text[0], text=text[1])
    record = folder / "metrics.jsonl"
    losses = attempt(log, f"{folder}: the losses at the end", lambda: _last_losses(read_metrics(record), state.step))
    loss, validation_loss = losses or (None, None)
    log.event(
        state.step,
        "finished" if state.step == total_steps else "stopped",
        seconds=state.seconds,
        tokens=state.tokens,
        tokens_per_second=state.tokens / state.seconds if state.seconds else None,
        loss=loss,
        validation_loss=validation_loss,
        all_reduces_per_step=log.all_reduces,
        best_step=state.best_step,
        best_loss=state.best_loss,
    )
    log.check()
    report = attempt(log, f"{folder}: report.md", lambda: write_report(folder))
    for line in attempt(log, f"{folder}: a summary", lambda: summary_lines(read_metrics(record))) or []:
        log.say(line)
    if text is not None:
        log.say(f"Sample: {text[0]!r} goes on with {text[1]!r}")
    if report is not None:
        log.say(f"Report: {report} (with loss.png, grad_norm.png, learning_rate.png)")
    log.say(f"Checkpoint: {(folder / 'latest').resolve()}")


def _last_losses(metrics: Metrics, step: int) -> tuple[float | None, float | None]:
    """The training loss and the validation loss of the end, as far as they are recorded: one on the way is not that."""
    loss = float(metrics.train[-1]["loss"]) if step in metrics.train["step"][-1:] else None
    final = metrics.validation[-1] if step in metrics.validation["step"][-1:] else None
    return loss, float(final["loss"]) if final is not None else None


def attempt(log: RunLog, what: str, make: Callable[[], Result]) -> Result | None:
    """What `make` makes; None, with a warning that names it, where that fails: the run itself is saved by then."""
    try:
        return make()
    except Exception as error:  # whatever a drawing library may raise, or a device that is out of memory
        log.say(f"{what}: could not be made, but the run is saved ({one_line(error) or type(error).__name__})")
        return None


def is_finished(folder: Path, step: int) -> bool:
    """Whether this step has been recorded as the run's end; a run that was made longer has had an earlier one."""
    if not (folder / "metrics.jsonl").exists():
        return False
    events = read_metrics(folder / "metrics.jsonl").events_named("finished")
    return any(event["step"] == step for event in events)


def sample_text(model: GPT, rows: AnyRows, tokenizer: Tokenizer, dataset: Path, seed: int) -> tuple[str, str]:
    """Some text of the model's, in float32, after the beginning of the first sequence that has a target.

    That is the sequence's prompt, where it has one, else its first words.

    Returns:
        The prompt, and how it goes on.
    """
    number = int(np.argmax(rows.target_counts(range(rows.count)) > 0))
    inputs, targets = rows.read([number])
    first_target = int((targets[0] != IGNORED).nonzero()[0])
    prompt = inputs[0, : first_target + 1 if first_target else SAMPLE_PROMPT_TOKENS].tolist()
    end_of_text = end_of_text_id(tokenizer, dataset / "dataset.json")
    ids = continue_text(model, prompt, tokenizer, end_of_text, Draw(SAMPLE_TOKENS, seed=seed))
    return decode_known(tokenizer, prompt), decode_known(tokenizer, ids)
