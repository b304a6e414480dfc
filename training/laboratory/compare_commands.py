"""The command of `isobatch` that compares runs."""

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from training.datasets_folder import known_datasets
from training.errors import UserError
from training.json_file import strict_json

if TYPE_CHECKING:
    from training.laboratory.comparison import Comparison
    from training.laboratory.comparison_table import Form
    from training.laboratory.results import RunResult

PRINTED = ("terminal", "markdown", "csv", "json")


def compare(
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUN...", help="Names of runs, paths, or folders of runs such as a study's."),
    ],
    baseline: Annotated[
        str | None,
        typer.Option(metavar="RUN", help="What to compare with.  [default: the first]"),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Folder to write to, instead of the repository's checkpoints/comparison.")
    ] = None,
    form: Annotated[str, typer.Option("--format", help=f"What to print: {', '.join(PRINTED)}.")] = "terminal",
    datasets: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the datasets: first measures the runs that have no validation loss, for good.",
            callback=known_datasets,
        ),
    ] = None,
    weights: Annotated[
        bool,
        typer.Option("--weights", help="Instead: are the weights of two checkpoints the same bytes, or how far apart?"),
    ] = False,
) -> None:
    """Compare runs: what each changes in the loss, and whether that is more than the noise of the seeds."""
    if weights:
        print_weights_difference(runs, form)
        return
    if form not in PRINTED:
        raise UserError(f"--format: must be one of {', '.join(PRINTED)}, got {form!r}")
    from training.config import REPOSITORY
    from training.laboratory.comparison_page import write_comparison
    from training.laboratory.comparison_table import write_tables

    checkpoints = REPOSITORY / "checkpoints"
    comparison, results = compare_runs(runs, baseline, datasets, checkpoints)
    print(write_tables(comparison)[cast("Form", form)], end="")
    folder = output or checkpoints / "comparison"
    one_folder = len(runs) == 1 and len(results) > 1
    written = write_comparison(folder, comparison, results, title=Path(runs[0]).resolve().name if one_folder else None)
    print(f"{folder}: {', '.join(path.name for path in written)}", file=sys.stderr)


def compare_runs(
    runs: list[str], baseline: str | None, datasets: Path | None, checkpoints: Path
) -> "tuple[Comparison, list[RunResult]]":
    """Finds, reads and compares runs.

    Args:
        runs: names of runs in `checkpoints`, paths, or folders of runs.
        baseline: what to compare with: one of the runs, or another one; None = the first of the runs.
        datasets: measures first what has no validation loss; None = does not.
        checkpoints: the folder of the runs.

    Raises:
        UserError: there is no such run, one cannot be read, or the baseline has no result.
    """
    from training.laboratory.comparison import compare_results
    from training.laboratory.measure import measure_missing
    from training.laboratory.results import read_results
    from training.lookup import find_runs

    folders = find_runs(runs, checkpoints)
    if baseline is not None:  # the first of all runs; repetitions of it are found by their configs
        chosen = find_baseline(baseline, folders, checkpoints)
        folders = [*chosen, *(folder for folder in folders if folder.resolve() not in map(Path.resolve, chosen))]
    results = read_results(folders)
    if datasets is not None and measure_missing(results, datasets):
        results = read_results(folders)
    return compare_results(results, results[0].name), results


def find_baseline(baseline: str, folders: Sequence[Path], checkpoints: Path) -> list[Path]:
    """Finds what to compare with: among the runs to be compared, and only then elsewhere.

    Args:
        baseline: the end of the path of one of the runs, such as its name; or a row of a study, whose runs are named
            ROW-w<seed>-t<seed>; else as `find_runs` takes it.
        folders: of the runs to be compared.
        checkpoints: the folder of the runs.

    Raises:
        UserError: there is no such run, or several of the runs have this name.
    """
    from training.config_check import nearest
    from training.lookup import find_runs

    if not baseline.startswith((".", os.sep)):
        parts = Path(baseline).parts
        called = [folder for folder in folders if parts and folder.resolve().parts[-len(parts) :] == parts]
        if len(called) > 1:
            which = ", ".join(map(str, called))
            raise UserError(f"--baseline {baseline}: several of the runs have this name ({which}); give a path")
        row = re.compile(rf"{re.escape(baseline)}-w\d+-t\d+")
        called = called or [folder for folder in folders if row.fullmatch(folder.resolve().name)]
        if called:
            return called
    try:
        return find_runs([baseline], checkpoints)
    except UserError:
        names = [folder.resolve().name for folder in folders]
        remedy = nearest(baseline, names) or f" these are {', '.join(names)}"
        raise UserError(
            f"--baseline {baseline}: is none of the runs to be compared, nor another run;{remedy}"
        ) from None


def print_weights_difference(checkpoints: list[str], form: str) -> None:
    """Says whether two checkpoints, or .safetensors files, have the same weights and, if not, how far they are apart.

    Either way the command has done what was asked: its status is 0, and --format json is for scripts.
    """
    if len(checkpoints) != 2:
        raise UserError(f"--weights: compares two checkpoints or .safetensors files, got {len(checkpoints)}; give two")
    if form not in ("terminal", "json"):
        raise UserError(f"--format: must be one of terminal, json with --weights, got {form!r}")
    from training.config import REPOSITORY
    from training.laboratory.weights_difference import as_mapping, compare_weights, describe

    difference = compare_weights(checkpoints[0], checkpoints[1], REPOSITORY / "checkpoints")
    print(strict_json(as_mapping(difference)) if form == "json" else "\n".join(describe(difference)))
