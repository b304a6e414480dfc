"""Trains one run: from a YAML config to a trained, evaluated, resumable checkpoint.

    torchrun --standalone --nproc_per_node=2 ddp_train.py tiny datasets/
    torchrun --standalone --nproc_per_node=8 ddp_train.py 8xa100m40-baseline datasets/ --resume auto
    python ddp_train.py tiny datasets/ --dry-run

The functions stand in the order in which a run goes through them.
"""

import math
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from numpy.typing import NDArray
from tokenizers import Tokenizer

from model.gpt import build_gpt, parameter_count
from training.checkpoint import (
    FOR_THE_MODEL,
    TrainingState,
    checkpoint_name,
    problem_of,
    publish,
    take_snapshot,
    weights_digest,
)
from training.command import run_command
from training.config import REPOSITORY, RunConfig
from training.config_check import config_from_mapping
from training.config_file import load_run_config, run_name
from training.data import (
    Rows,
    TrainingData,
    check_vocabulary,
    open_training_data,
    open_validation,
    provide_dataset,
    tokenizer_file,
)
from training.distributed import Group, Process
from training.ending import finish_run, is_finished, sample_text
from training.errors import RunError, UserError
from training.evaluation import Evaluated, evaluate
from training.layout import Layout, describe, plan_layout
from training.loss import SequenceLoss
from training.metrics import MOST_NONFINITE_IN_A_ROW, RunLog, StepReader, StepRecord, nonfinite_in_a_row
from training.metrics_file import cut_back
from training.optimizer import build_optimizer
from training.plan import plan_lines
from training.restore import broadcast_optimizer, load_optimizer, load_weights
from training.run_folder import METRICS, Opening, begin, begun_by_this_launch, held, open_run, saved_overrides
from training.step import Trainer, build_scaler
from training.tokenizer import load_tokenizer, token_byte_lengths

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def main(
    run: Annotated[str, typer.Argument(help="A config: its name (configs/RUN.yaml) or the path of a YAML file.")],
    datasets: Annotated[Path, typer.Argument(help="Folder of the datasets; what is missing is fetched into it.")],
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
    stop_after: Annotated[
        int | None, typer.Option(min=0, help="Stop after this many steps of the run, with a checkpoint.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Write to OUTPUT/RUN instead of checkpoints/RUN.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and stop; needs no dataset.")] = False,
) -> None:
    """Train one run. Start it with torchrun, or with python for a single process."""
    if resume is not None and overwrite:
        raise UserError("--resume and --overwrite exclude each other: give one of them")
    folder = (output or REPOSITORY / "checkpoints") / run_name(run)
    fresh = overrides or []
    if begun_by_this_launch(folder):
        resume, overwrite = "auto", False  # torchrun starts a failed run again: what it has done so far must stay
    config = load_run_config(run, saved_overrides(folder, fresh) if resume else fresh)
    process = Process.from_environment()
    if dry_run:
        print_plan(config, plan_layout(config.batch, process.world_size, microbatch), datasets, process)
        return
    if config.precision.amp == "fp16" and process.device.type == "cpu":
        raise UserError(
            "precision.amp: fp16 needs a GPU, on a CPU it is hundreds of times slower than bf16; "
            "add --set precision.amp=bf16 (or off), which is another run than that of the config"
        )
    with process.group() as group, ExitStack() as stack:

        def open_folder() -> dict[str, Any]:
            stack.enter_context(held(folder))
            return asdict(open_run(folder, config, resume, overwrite))

        opening = Opening(**group.first("open", open_folder))
        config = config_from_mapping({"name": config.name, **opening.config}, run)  # rank 0's, on every machine
        session = build(config, folder, datasets, microbatch, opening, group)
        state = first_state(session, opening)
        stop = session.data.total_steps if stop_after is None else min(stop_after, session.data.total_steps)
        if opening.checkpoint is None or state.step < stop:
            group.first("begin", lambda: begin(folder, opening))
            announce(session, opening, state)
            state = train(session, state, stop)
        elif group.first("finished", lambda: state.step < session.data.total_steps or is_finished(folder)):
            total = session.data.total_steps
            session.log.say(f"{folder}: nothing left to do, {state.step:,} of {total:,} steps are done")
            return
        else:  # killed between its last checkpoint and the end
            group.first("mend", lambda: cut_back(folder / METRICS, state.step))
        group.first("finish", lambda: finish(session, state))


@dataclass(frozen=True)
class Session:
    """All that one process needs to train a run."""

    folder: Path
    dataset: Path
    group: Group
    trainer: Trainer
    validation: Rows | None
    tokenizer: Tokenizer | None
    byte_lengths: NDArray[np.int64] | None
    dataset_revision: str | None
    log: RunLog

    @property
    def config(self) -> RunConfig:
        """The run's config."""
        return self.trainer.config

    @property
    def data(self) -> TrainingData:
        """What is trained on."""
        return self.trainer.data

    @property
    def module(self) -> SequenceLoss:
        """The model with its loss, without DDP."""
        module = self.trainer.parallel.module
        assert isinstance(module, SequenceLoss), "DDP wraps a SequenceLoss"
        return module


def print_plan(config: RunConfig, layout: Layout, datasets: Path, process: Process) -> None:
    """Prints what the run would do; the data are looked at only where the config leaves their length open."""
    total_steps = config.total_steps
    if total_steps is None and (datasets / config.data.dataset).is_dir():
        total_steps = open_training_data(config, datasets / config.data.dataset).total_steps
    if process.is_main:
        print("\n".join(plan_lines(config, layout, total_steps, process.device.type)))


def build(
    config: RunConfig, folder: Path, datasets: Path, microbatch: int | None, opening: Opening, group: Group
) -> Session:
    """Opens the data and builds the model, with the weights and the optimizer state to go on from. Collective."""
    process = group.process
    torch.set_float32_matmul_precision(config.precision.matmul)
    dataset = datasets / config.data.dataset
    source = group.first("source", lambda: weights_to_start_from(config, folder, opening))
    if process.is_main and not dataset.is_dir():
        print(f"{dataset}: is not there yet, preparing or downloading it", file=sys.stderr, flush=True)
    revision = group.first("dataset", lambda: provide_dataset(config.data, datasets), per_node=True)
    data, validation = open_data(config, dataset, group)
    tokenizer_path = tokenizer_file(config.data, datasets)
    tokenizer = load_tokenizer(tokenizer_path) if tokenizer_path else None

    model = build_gpt(config.model, config.seeds.weights).to(process.device)
    optimizer = build_optimizer(model, config.optimizer)
    if source is not None:
        group.first("weights", lambda: load_weights(Path(source), model))  # DDP hands them to the others
    if opening.checkpoint is not None:
        group.first("optimizer", lambda: load_optimizer(folder / str(opening.checkpoint), model, optimizer))
        broadcast_optimizer(optimizer, group)
    layout = plan_layout(config.batch, process.world_size, microbatch)
    parallel = group.parallel(SequenceLoss(model))
    trainer = Trainer(config, process, layout, data, parallel, optimizer, build_scaler(config.precision))
    return Session(
        folder=folder,
        dataset=dataset,
        group=group,
        trainer=trainer,
        validation=validation,
        tokenizer=tokenizer,
        byte_lengths=token_byte_lengths(tokenizer, config.model.vocab_size) if tokenizer else None,
        dataset_revision=revision,
        log=RunLog(
            folder / METRICS, process.is_main, data.total_steps, config.tokens_per_step, config.optimizer.clip_norm
        ),
    )


def weights_to_start_from(config: RunConfig, folder: Path, opening: Opening) -> str | None:
    """The checkpoint to go on from, or that of another run that `init_from` names, verified; None = fresh weights."""
    if opening.checkpoint is not None:
        return str(folder / opening.checkpoint)
    if config.init_from is None:
        return None
    other = REPOSITORY / config.init_from
    problem = problem_of(other, FOR_THE_MODEL)
    if problem is not None:
        raise UserError(f"init_from: {other}: {problem}; give the folder of a complete checkpoint")
    return str(other)


def open_data(config: RunConfig, dataset: Path, group: Group) -> tuple[TrainingData, Rows | None]:
    """Opens what is trained on and validated on, and checks every id in it. Collective."""
    data = open_training_data(config, dataset)
    check_vocabulary(data.rows, config.model.vocab_size, group)
    if config.evaluation.every is None:
        return data, None
    validation = open_validation(config, dataset, data.rows)
    check_vocabulary(validation, config.model.vocab_size, group)
    return data, validation


def first_state(session: Session, opening: Opening) -> TrainingState:
    """The counters at the run's beginning, or those of the checkpoint, and the loss scale with them.

    Raises:
        UserError: the data are not those that the run was started on.
    """
    fingerprint = session.data.rows.fingerprint()
    if opening.state is None:
        return TrainingState(0, 0, 0.0, 0, None, None, None, fingerprint, opening.config)
    state = TrainingState(**opening.state)
    if state.data != fingerprint:
        raise UserError(
            f"{session.dataset}: the training tokens are not those that {opening.checkpoint} was trained on (another "
            "revision, or prepared elsewhere); copy the dataset from where the run was started"
        )
    if session.trainer.scaler is not None and state.scaler is not None:
        session.trainer.scaler.load_state_dict(state.scaler)
    if state.best_step is not None and not (session.folder / checkpoint_name(state.best_step)).is_dir():
        state = replace(state, best_step=None, best_loss=None)  # it went with a past that was given up
    return replace(state, config=opening.config)


def announce(session: Session, opening: Opening, state: TrainingState) -> None:
    """Says what is about to happen, and records where it happens."""
    log, config, layout, process = session.log, session.config, session.trainer.layout, session.group.process
    for line in plan_lines(config, layout, session.data.total_steps, process.device.type):
        log.say(line)
    for remark in opening.remarks:
        log.say(remark)
    log.say(f"{session.folder}: " + (f"going on from {opening.checkpoint}" if opening.checkpoint else "starting"))
    log.start(state.step, state.seconds)
    where = {"checkpoint": opening.checkpoint} if opening.checkpoint else {}
    log.event(
        state.step,
        "resume" if opening.checkpoint else "start",
        **where,
        total_steps=session.data.total_steps,
        parameters=parameter_count(config.model),
        tokens_per_step=config.tokens_per_step,
        layout={
            "world_size": layout.world_size,
            "microbatch": layout.microbatch,
            "accumulation": layout.accumulation,
            "sentence": describe(layout, config.batch, config.model.dropout),
        },
        device=process.device.type,
        machine=process.machine(),
        torch=torch.__version__,
        dataset_revision=session.dataset_revision,
        weights_sha256=weights_digest(session.module.model) if process.is_main else None,
    )


def train(session: Session, state: TrainingState, stop: int) -> TrainingState:
    """Trains up to update `stop`, evaluating and saving when due; returns the state then. Collective."""
    config = session.config
    reader = StepReader(session.group)
    for step in range(state.step + 1, stop + 1):
        read_now = reader.add(step, session.trainer.step(step - 1))
        last = step == session.data.total_steps
        evaluate_now = session.validation is not None and (last or is_due(config.evaluation.every, step))
        save_now = step == stop or is_due(config.checkpoint.every, step)
        if not (read_now or evaluate_now or save_now):
            continue
        state = take_records(session, state, *reader.read())
        if evaluate_now:
            loss = validate(session, step, last)
            if math.isfinite(loss) and (state.best_loss is None or loss < state.best_loss):
                state, save_now = replace(state, best_loss=loss, best_step=step), True
        if save_now:
            session.group.first(f"save {step}", partial(save, session, state))
        if evaluate_now or save_now:
            reader.restart_clock()
    if stop == 0:
        session.group.first("save 0", partial(save, session, state))
    return state


def is_due(every: int | None, step: int) -> bool:
    """Whether something that happens every so many steps (0 or None: not) happens after this one."""
    return bool(every) and step % (every or 1) == 0


def take_records(session: Session, state: TrainingState, records: list[StepRecord], seconds: float) -> TrainingState:
    """Records steps, and ends the run where too many updates in a row were not finite."""
    session.log.steps(records, seconds)
    in_a_row = nonfinite_in_a_row(records, state.nonfinite_in_a_row)
    if in_a_row >= MOST_NONFINITE_IN_A_ROW:
        raise RunError(
            f"{session.folder}: the gradient was not finite {in_a_row} steps in a row (metrics.jsonl says which); "
            "the last checkpoint is as it was: lower optimizer.learning_rate, set optimizer.clip_norm, or use bf16"
        )
    step = records[-1].step
    return replace(
        state,
        step=step,
        tokens=step * session.config.tokens_per_step,
        seconds=session.log.seconds,
        nonfinite_in_a_row=in_a_row,
    )


def validate(session: Session, step: int, last: bool) -> float:
    """Evaluates and records; returns the loss that compares over the run's steps. Collective.

    In the loop that is the loss over `evaluation.tokens`; at the end everything is evaluated, and recorded.
    """
    rows, config = session.validation, session.config
    assert rows is not None, "there is a validation range where evaluation is due"
    in_loop = rows.count if config.evaluation.tokens is None else config.evaluation.tokens // rows.context
    in_loop = min(rows.count, in_loop)

    def over(numbers: range) -> Evaluated:
        microbatch = session.trainer.layout.microbatch
        return evaluate(
            session.module, rows, numbers, microbatch, config.precision, session.group, session.byte_lengths
        )

    evaluated = over(range(in_loop))
    comparable = evaluated.loss
    if last and in_loop < rows.count:
        evaluated += over(range(in_loop, rows.count))
    session.log.validation(step, evaluated)
    return comparable


def save(session: Session, state: TrainingState) -> None:
    """Writes a checkpoint, if the weights are worth it; one process does this.

    Raises:
        RunError: the weights are not finite, or the disk refuses; the last checkpoint is as it was.
    """
    started = time.perf_counter()
    trainer, folder = session.trainer, session.folder
    scaler = trainer.scaler.state_dict() if trainer.scaler is not None else None
    snapshot = take_snapshot(session.module.model, trainer.optimizer, replace(state, scaler=scaler))
    if not all(torch.isfinite(weight).all() for weight in snapshot.weights.values()):
        raise RunError(
            f"{folder}: weights are not finite after step {state.step}, so they are not saved; the last checkpoint is "
            "as it was: lower optimizer.learning_rate or set optimizer.clip_norm"
        )
    try:
        session.log.sync()  # a checkpoint is never newer than its metrics
        written = publish(folder, snapshot, session.config.checkpoint.keep)
    except OSError as error:
        raise RunError(
            f"{folder}: step {state.step} could not be saved ({error}); the last checkpoint is as it was: make room or "
            "mend the disk, then --resume latest"
        ) from error
    session.log.event(
        state.step,
        "checkpoint",
        checkpoint=written.name,
        best=state.best_step == state.step,
        seconds=time.perf_counter() - started,
    )


def finish(session: Session, state: TrainingState) -> None:
    """Writes and shows the result; one process does this."""
    text = None
    if session.tokenizer is not None:
        rows, seed = session.validation or session.data.rows, session.config.seeds.training
        text = sample_text(session.module.model, rows, session.tokenizer, session.dataset, seed)
    finish_run(session.folder, session.log, state, session.data.total_steps, text)


if __name__ == "__main__":
    run_command(app)
