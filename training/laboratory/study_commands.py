"""The command of `isobatch` that runs studies."""

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from training.datasets_folder import known_datasets, missing_dataset
from training.errors import RunError, UserError


def study(
    name: Annotated[
        str, typer.Argument(metavar="STUDY", help="A study: its name (configs/studies/STUDY.yaml), or a YAML file.")
    ],
    datasets: Annotated[
        Path,
        typer.Argument(
            metavar="DATASETS",
            help="Folder of the datasets; what is missing is fetched into it.",
            callback=known_datasets,
        ),
    ],
    nproc: Annotated[
        int | None, typer.Option(min=1, help="Processes of each run.  [default: one for each GPU, without GPUs 1]")
    ] = None,
    microbatch: Annotated[
        int | None, typer.Option(min=1, help="Most sequences at once on this machine; the runs stay the same.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Write to OUTPUT/STUDY instead of checkpoints/STUDY.")] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Train those runs again whose config has changed since.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and stop; needs no dataset.")] = False,
) -> None:
    """Train what is missing of a study, a run after the other, and compare. Interrupted, the same command goes on."""
    import torch

    from training.config import REPOSITORY
    from training.data import check_described_vocabulary
    from training.laboratory import study_runner
    from training.laboratory.study_file import STUDIES, load_study
    from training.laboratory.study_plan import estimate_from, plan_lines, read_launches, read_run_state
    from training.laboratory.study_result import write_result

    if Path(name).is_dir() and not (STUDIES / f"{name}.yaml").is_file():
        raise UserError(f"{name}: is a folder; the study comes first, then the folder of the datasets")
    wanted = load_study(name)
    gpus = torch.cuda.device_count()
    processes = nproc or gpus or 1
    folder = (output or REPOSITORY / "checkpoints") / wanted.name
    if not dry_run:
        study_runner.check_machine(wanted, processes, microbatch, gpus)
    with nullcontext() if dry_run else study_runner.held(folder):
        states = {run.name: read_run_state(folder / run.name, run.config) for run in wanted.runs}
        estimate = estimate_from(wanted, read_launches(folder), processes)
        lines = [*plan_lines(wanted, states, estimate), *missing_dataset(wanted.runs[0].config.data.dataset, datasets)]
        print("\n".join(lines), file=sys.stdout if dry_run else sys.stderr, flush=True)
        if not overwrite:
            study_runner.refuse_changed(wanted, folder, states)
        if dry_run:
            for config in {run.group: run.config for run in wanted.runs}.values():
                check_described_vocabulary(config, datasets / config.data.dataset)
            return
        study_runner.open_data(wanted, datasets)
        machine = study_runner.Machine(datasets, folder, processes, microbatch)
        try:
            failed = study_runner.train_missing(wanted, states, estimate, machine)
        except KeyboardInterrupt:
            print(f"\n{folder}: the same command goes on from here", file=sys.stderr, flush=True)
            raise
        try:
            result = write_result(wanted, folder, states)
        except OSError as error:
            raise RunError(f"{folder}: the result cannot be written ({error}); what is trained is kept") from error
        print(result)
        if failed:
            raise RunError(
                f"{len(failed)} of {len(wanted.runs)} runs failed: {', '.join(failed)}; what they said is in "
                f"{folder / 'logs'}, and the same command tries them again"
            )
