"""Measuring the runs that have no validation loss: imported models, and runs trained without evaluation."""

import math
import sys
from collections.abc import Sequence
from pathlib import Path

from training.errors import RunError
from training.json_file import append_objects
from training.laboratory.results import RunResult, read_result
from training.run_folder import METRICS, held


def measure_missing(results: Sequence[RunResult], datasets: Path) -> bool:
    """Measures each finished or imported run without a validation loss, over its own validation range.

    The loss becomes the validation of the run's last step in its metrics.jsonl, so that it is measured once.

    Args:
        results: of the runs.
        datasets: folder of the datasets; what is missing is fetched into it.

    Returns:
        Whether anything was measured, here or by another process since `results` were read.

    Raises:
        UserError: the last step's checkpoint or the data are not whole, this machine lacks the precision, or the run
            trains just now.
        RunError: a run's folder cannot be written.
    """
    missing = [result for result in results if _is_unmeasured(result)]
    for result in missing:
        with held(result.folder):
            now = read_result(result.folder)  # another process may have measured it, or have gone on with it
            if _is_unmeasured(now):
                _measure(result.name, now, datasets)
    return bool(missing)


def _is_unmeasured(result: RunResult) -> bool:
    return result.loss is None and (result.finished or result.imported)


def _measure(name: str, result: RunResult, datasets: Path) -> None:
    from training.checkpoint_evaluation import evaluate_checkpoint
    from training.checkpoint_files import checkpoint_name
    from training.data import open_validation
    from training.digests import validation_digest
    from training.file_digest import file_digest
    from training.lookup import find_checkpoint_and_config, find_tokenizer_if_any

    # By its name: the newest good checkpoint may be an older step's, whose loss is not the run's.
    last = result.folder.resolve() / checkpoint_name(result.step)
    checkpoint, config = find_checkpoint_and_config(str(last))
    print(f"{name}: has no validation loss yet, measuring it", file=sys.stderr, flush=True)
    evaluated = evaluate_checkpoint(checkpoint, config, datasets).evaluated
    tokenizer = find_tokenizer_if_any(config, datasets)
    measured = {
        "kind": "event",
        "step": result.step,
        "event": "measured",
        "checkpoint": checkpoint.name,
        "validation_sha256": validation_digest(open_validation(config, datasets / config.data.dataset)),
        "tokenizer_sha256": None if tokenizer is None else file_digest(tokenizer),
    }
    validation = {
        "kind": "validation",
        "step": result.step,
        "loss": evaluated.loss,
        "target_tokens": evaluated.target_tokens,
        "bits_per_byte": evaluated.bits_per_byte if math.isfinite(evaluated.loss) else None,
    }
    path = result.folder / METRICS
    try:
        append_objects(path, measured, validation)
    except OSError as error:
        raise RunError(f"{path}: cannot be written ({error}); make room, or mend its folder") from error
