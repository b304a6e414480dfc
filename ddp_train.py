"""Trains one run: from a YAML config to a trained, evaluated, resumable checkpoint.

    torchrun --standalone --nproc_per_node=2 ddp_train.py tiny datasets/
    torchrun --standalone --nproc_per_node=8 ddp_train.py 8xa100m40-baseline datasets/ --resume auto
    python ddp_train.py tiny datasets/ --dry-run

The functions stand in the order in which a run goes through them.
"""

import gc

import training.launcher  # first: it takes down who started this process before seconds of imports

if __name__ == "__main__":
    training.launcher.end_at_once_on_signals()
    gc.disable()  # until there is something to train: what the imports make stays, and going through it takes long
# isort: split
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from model.gpt import parameter_count
from training.command import run_command
from training.compilation import refuse_to_compile
from training.config import REPOSITORY, RunConfig, repository_problem
from training.config_check import config_from_mapping, refuse_fp16_without_gpu
from training.config_file import load_run_config, run_name
from training.data import check_described_vocabulary, open_training_data
from training.datasets_folder import known_datasets, missing_dataset, unused_tokenizer
from training.distributed import Group, Process
from training.ending import attempt, finish_run, is_finished, sample_text
from training.errors import UserError
from training.free_space import check_free_space, disk_line
from training.interruption import Interruption
from training.launch_record import begun_by_this_launch, note_launch
from training.layout import Layout, describe, plan_layout
from training.loop import best_of, train, with_comparable_best
from training.memory import memory_told
from training.metrics_file import cut_back
from training.microbatch_search import refuse_to_search, search_max_microbatch
from training.plan import plan_lines
from training.run_folder import (
    METRICS,
    Opening,
    begin,
    held,
    open_run,
    refuse_to_start_beside,
    saved_overrides,
)
from training.session import Means, Session, build, digests, first_state
from training.snapshot import TrainingState
from training.tracking.trackers import check_installed

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def main(
    run: Annotated[str, typer.Argument(help="A config: its name (configs/RUN.yaml) or the path of a YAML file.")],
    datasets: Annotated[
        Path,
        typer.Argument(help="Folder of the datasets; what is missing is fetched into it.", callback=known_datasets),
    ],
    resume: Annotated[
        str | None,
        typer.Option(help="Go on from: latest, best, a checkpoint's name, or auto (start if there is none)."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Start again although the run exists.")] = False,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a config value; repeatable.")
    ] = None,
    microbatch: Annotated[
        int | None, typer.Option(min=1, help="Most sequences at once on this machine; the run stays the same.")
    ] = None,
    activation_checkpointing: Annotated[
        bool,
        typer.Option(
            "--activation-checkpointing", help="Keep less and compute it again: less memory, more time, the same run."
        ),
    ] = False,
    compile_model: Annotated[
        bool, typer.Option("--compile", help="Compile the model with torch.compile; where that fails, go on without.")
    ] = False,
    find_max_microbatch: Annotated[
        bool,
        typer.Option("--find-max-microbatch", help="Search the largest microbatch that fits, print it and stop."),
    ] = False,
    stop_after: Annotated[
        int | None, typer.Option(min=0, help="Stop after this many steps of the run, with a checkpoint.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Write to OUTPUT/RUN instead of checkpoints/RUN.")] = None,
    push_to_hub: Annotated[
        str | None, typer.Option(metavar="OWNER/NAME", help="Upload the result at the end, as hub.repo does.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and stop; needs no dataset.")] = False,
) -> None:
    """Train one run. Start it with torchrun, or with python for a single process."""
    if resume is not None and overwrite:
        raise UserError("--resume and --overwrite exclude each other: give one of them")
    if push_to_hub is not None and (problem := repository_problem(push_to_hub)):
        raise UserError(f"--push-to-hub: {problem}")
    folder = (output or REPOSITORY / "checkpoints") / run_name(run)
    fresh = [*(overrides or []), *([f"hub.repo={push_to_hub}"] if push_to_hub else [])]
    begun = begun_by_this_launch(folder)
    if begun:
        resume, overwrite = "auto", False  # torchrun starts a failed run again: what it has done so far must stay
    overrides = saved_overrides(folder, resume, fresh) if resume else fresh
    config = load_run_config(run, overrides, resume is not None, folder)
    process = Process.from_environment()
    if compile_model:
        refuse_to_compile(config)
    if find_max_microbatch:
        beside = {f"--microbatch {microbatch}": microbatch, "--dry-run": dry_run, "--compile": compile_model}
        refuse_to_search(config, process.device, [option for option, given in beside.items() if given])
    if dry_run:
        remarks = open_run(folder, config, resume, overwrite).remarks if resume else []
        layout = plan_layout(config.batch, process.world_size, microbatch, config.bitwise)
        print_plan(config, layout, datasets, process, remarks, activation_checkpointing)
        return
    if find_max_microbatch:
        with process.group() as group:
            lines = search_max_microbatch(config, group, activation_checkpointing)
        if process.is_main:
            print("\n".join(lines))
        return
    means = Means(microbatch, activation_checkpointing, compile_model)
    another = "add --set precision.amp=bf16 (or off), which is another run than that of the config"
    refuse_fp16_without_gpu(config.precision, process.device.type != "cpu", another)
    with process.group() as group, ExitStack() as stack:
        opening = open_together(folder, config, resume, overwrite, group, stack)
        config = config_from_mapping({"name": config.name, **opening.config}, run)  # rank 0's, on every machine
        if not group.first("restarted", lambda: begun):  # rank 0's word: ranks of other nodes cannot tell
            group.first("services", partial(check_services, config))
        session = build(config, folder, datasets, means, opening, group)
        stack.callback(session.leave)
        gc.freeze()  # what is there stays, and a full collection of 300,000 objects would keep all ranks waiting
        gc.enable()
        state = first_state(session, opening)
        total = session.data.total_steps
        state = carry_out(session, opening, state, total if stop_after is None else min(stop_after, total))
        if config.hub.repo is not None and state.step == total:
            from training.hub.push import push_run

            group.first("push", lambda: push_run(folder, config, datasets, session.log, total))


def open_together(
    folder: Path, config: RunConfig, resume: str | None, overwrite: bool, group: Group, stack: ExitStack
) -> Opening:
    """Decides on rank 0 how the run begins, and holds its folder until the stack ends. Collective."""

    def open_folder() -> tuple[dict[str, Any], bool]:
        stack.enter_context(held(folder))
        return asdict(open_run(folder, config, resume, overwrite)), overwrite

    # Also whether it overwrites: after a restart only the nodes that see the folder know that it no longer does.
    opened, overwrite = group.first("open", open_folder)
    opening = Opening(**opened)
    if opening.checkpoint is None and not overwrite:
        group.first("beside", lambda: refuse_to_start_beside(folder), per_node=True)
    return opening


def check_services(config: RunConfig) -> None:
    """Checks, before training: may the result be uploaded, without replacing others' files, and are trackers there?"""
    check_installed(config.tracking)
    if config.hub.repo is None:
        return
    from training.hub.background_upload import BRANCH
    from training.hub.hub_access import check_destination
    from training.hub.hub_retry import to_stderr
    from training.hub.hub_upload import Destination
    from training.hub.push import REPLACE_AFTER_TRAINING, REPLACE_STATE
    from training.hub.repository_content import foreign_state

    check_destination(Destination(config.hub.repo), "hub.repo", config.hub.licence, REPLACE_AFTER_TRAINING)
    state = Destination(config.hub.repo, branch=BRANCH)
    if config.hub.every and (problem := foreign_state(state, to_stderr)):
        raise UserError(f"hub.every: {config.hub.repo}: {problem}; {REPLACE_STATE}")


def print_plan(
    config: RunConfig, layout: Layout, datasets: Path, process: Process, remarks: list[str], recomputing: bool
) -> None:
    """Prints what the run would do; the data are looked at only where the config leaves their length open.

    Raises:
        UserError: the dataset is there and has ids that the model does not have.
    """
    total_steps, documents = config.total_steps, None
    check_described_vocabulary(config, datasets / config.data.dataset)
    if total_steps is None and (datasets / config.data.dataset).is_dir():
        data = open_training_data(config, datasets / config.data.dataset)
        total_steps, documents = data.total_steps, data.rows.summary
    if process.is_main:
        lines = plan_lines(config, layout, total_steps, process.device.type, documents, recomputing)
        lines += [disk_line(config, total_steps), *process.remarks()]
        lines += [*missing_dataset(config.data.dataset, datasets), *unused_tokenizer(config.data, datasets)]
        print("\n".join([*lines, *remarks]))


def carry_out(session: Session, opening: Opening, state: TrainingState, stop: int) -> TrainingState:
    """Trains up to update `stop` and writes the result, or does what is missing of that; the state then. Collective."""
    group, folder = session.group, session.folder
    if opening.checkpoint is None or state.step < stop or (state.step == stop and state.evaluation_due):
        group.first("space", partial(check_free_space, folder, session.config, opening, state, stop))
        # Until a step is trained, a signal ends the process: there is nothing to save.
        group.first("begin", lambda: begin(folder, opening))
        group.first("launch", lambda: note_launch(folder), per_node=True)
        session.log.start(state.step, state.seconds, state.tokens, best_of(state))
        group.first("announce", partial(announce, session, opening, state))
        recomputing = session.module.model.recompute_blocks
        told = memory_told(group.process, session.trainer.layout, session.config, recomputing)
        with Interruption(group) as interruption, told:
            state = train(session, with_comparable_best(state, opening.changed), stop, interruption)
    else:
        for line in nothing_left(session, opening, state):
            session.log.say(line)
        if group.first("finished", lambda: state.step < session.data.total_steps or is_finished(folder, state.step)):
            return state
        # It was killed between its last checkpoint and the end.
        group.first("mend", partial(mend, session, state))
    group.first("finish", lambda: finish(session, state))
    return state


def mend(session: Session, state: TrainingState) -> None:
    """Takes away what was recorded behind the last checkpoint; trackers learn of the end; one process does this."""
    cut_back(session.folder / METRICS, state.step)
    session.log.seconds = state.seconds
    if session.trackers is not None:
        session.trackers.start(state.step)


def nothing_left(session: Session, opening: Opening, state: TrainingState) -> list[str]:
    """The lines that are said where a resumption has no step to train; nothing is changed then, the config neither."""
    text = f"{session.folder}: nothing left to do, {state.step:,} of {session.data.total_steps:,} steps are done"
    not_taken = [key for key in opening.changed if not key.startswith("hub.")]
    text = f"{text}; not taken: {', '.join(not_taken)}" if not_taken else text
    return [text, *([opening.lacking] if opening.lacking else [])]


def announce(session: Session, opening: Opening, state: TrainingState) -> None:
    """Says what is about to happen, and records where it happens, with digests of the data; one process does this."""
    log, config, layout, process = session.log, session.config, session.trainer.layout, session.group.process
    documents = session.data.rows.summary
    validation_documents = session.validation.summary if session.validation is not None else None
    recomputing = session.module.model.recompute_blocks
    for line in plan_lines(config, layout, session.data.total_steps, process.device.type, documents, recomputing):
        log.say(line)
    if validation_documents is not None:
        log.say(f"validation: {validation_documents.sentence(config.model.context_length)}")
    for remark in opening.remarks:
        log.say(remark)
    log.say(f"{session.folder}: " + (f"going on from {opening.checkpoint}" if opening.checkpoint else "starting"))
    # `changed`, [old, new] by key, is empty where the config is as it was, so that who reads it need not ask.
    # The rows before may have been lost, so it says what they did.
    so_far = {key: getattr(state, key) for key in ("tokens", "seconds", "best_step", "best_loss")}
    where = {"checkpoint": opening.checkpoint, "changed": opening.changed, **so_far} if opening.checkpoint else {}
    where |= {"starts": opening.starts} if opening.starts > 1 else {}
    where |= {"had_reached": opening.had_reached} if opening.had_reached else {}
    where |= {"ended": opening.ended} if opening.ended else {}
    log.event(
        state.step,
        "resume" if opening.checkpoint else "start",
        **where,
        total_steps=session.data.total_steps,
        parameters=parameter_count(config.model),
        **({"documents": asdict(documents)} if documents else {"tokens_per_step": config.tokens_per_step}),
        **({"validation_documents": asdict(validation_documents)} if validation_documents else {}),
        layout={
            "world_size": layout.world_size,
            "microbatch": layout.microbatch,
            "accumulation": layout.accumulation,
            "sentence": describe(layout, config.batch),
        },
        device=process.device.type,
        machine=process.machine(),
        torch=torch.__version__,
        dataset_revision=session.dataset_revision,
        **digests(session, opening),
    )
    if session.trackers is not None:
        session.trackers.start(state.step)


def finish(session: Session, state: TrainingState) -> None:
    """Writes and shows the result; one process does this."""
    session.end()
    text, tokenizer = None, session.tokenizer
    if tokenizer is not None:
        rows, seed = session.validation or session.data.rows, session.config.seeds.training
        place = (rows, tokenizer, session.dataset, seed)
        text = attempt(session.log, f"{session.folder}: a sample", lambda: sample_text(session.module.model, *place))
    finish_run(session.folder, session.log, state, session.data.total_steps, text)
    if session.trackers is not None:
        session.trackers.close()
    if session.uploads is not None:
        session.uploads.close()


if __name__ == "__main__":
    run_command(app)
