"""The loop of a run: train, evaluate, save; and how it ends early, by a signal or a fault, on all ranks together."""

import math
import time
from dataclasses import replace
from functools import partial
from typing import Never

from training.changes import Changed, changes_validation
from training.errors import InterruptionError, RunError
from training.evaluation import BrokenOffError, Evaluated, evaluate
from training.interruption import Interruption
from training.progress import Best
from training.session import Session
from training.snapshot import TrainingState
from training.step_records import MOST_NONFINITE_IN_A_ROW, StepReader, StepRecord, nonfinite_in_a_row


def train(session: Session, state: TrainingState, stop: int, interruption: Interruption) -> TrainingState:
    """Trains up to update `stop`, evaluating and saving when due; returns the state then. Collective.

    Raises:
        InterruptionError: on every rank, after a signal.
    """
    config = session.config
    if session.writer is not None:
        session.writer.prepare(session.module.model, state)
    if state.evaluation_due:
        state = catch_up(session, state, interruption)
    reader = StepReader(session.group, lambda: interruption.requested or session.cannot_save, session.data.spans)
    for step in range(state.step + 1, stop + 1):
        read_now = reader.add(step, session.trainer.step(step - 1))
        last = step == session.data.total_steps
        evaluate_now = session.validation is not None and (last or is_due(config.evaluation.every, step))
        save_now = step == stop or is_due(config.checkpoint.every, step) or is_due(config.hub.every, step)
        if not (read_now or evaluate_now or save_now):
            continue
        state = take_records(session, state, *reader.read())
        if evaluate_now:
            state = replace(state, evaluation_due=True) if reader.must_stop else validate(session, state, interruption)
        stop_now = reader.must_stop or state.evaluation_due
        if stop_now:
            interruption.agreed()
        if save_now or stop_now or state.best_step == step:
            session.group.first(f"save {step}", partial(save, session, state))
            if session.reports is not None and step < stop and not stop_now:
                session.reports.refresh()
        if stop_now:
            leave(session, state, interruption)
        if evaluate_now or save_now:
            reader.restart_clock()
    if stop == 0:
        session.group.first("save 0", partial(save, session, state))
    session.group.first("saved", session.wait_for_writer)  # here, where a signal does not end it yet
    return state


def catch_up(session: Session, state: TrainingState, interruption: Interruption) -> TrainingState:
    """Evaluates the step that a signal has kept from it, and saves the result. Collective."""
    state = validate(session, replace(state, evaluation_due=False), interruption)
    if state.evaluation_due:
        leave(session, state, interruption)  # as it was saved
    session.group.first(f"save {state.step}", partial(save, session, state))
    return state


def leave(session: Session, state: TrainingState, interruption: Interruption) -> Never:
    """Records and says that the run was interrupted, by which signal, and where, once that is saved. Collective."""
    signal_and_rank = interruption.first_signal()

    def tell() -> None:
        session.wait_for_writer()
        session.log.event(state.step, "interrupted", **signal_and_rank)
        session.log.say(f"interrupted after step {state.step:,}; go on with --resume latest")

    session.group.first("interrupted", tell)
    raise InterruptionError


def with_comparable_best(state: TrainingState, changed: Changed) -> TrainingState:
    """Without a best, where validation losses are measured on other tokens from here on."""
    return replace(state, best_loss=None, best_step=None) if changes_validation(changed) else state


def best_of(state: TrainingState) -> Best | None:
    """The step and the loss of the best validation so far."""
    return None if state.best_step is None or state.best_loss is None else (state.best_step, state.best_loss)


def is_due(every: int | None, step: int) -> bool:
    """Whether something that happens every so many steps (0 or None: not) happens after this one."""
    return bool(every) and step % (every or 1) == 0


def take_records(session: Session, state: TrainingState, records: list[StepRecord], seconds: float) -> TrainingState:
    """Records steps, and ends the run where too many updates in a row were not finite."""
    session.log.steps(records, seconds)
    in_a_row = nonfinite_in_a_row(records, state.nonfinite_in_a_row)
    if in_a_row >= MOST_NONFINITE_IN_A_ROW:
        fault = "out of bitwise mode's range" if records[-1].out_of_range else "not finite"
        raise RunError(
            f"{session.folder}: the gradient was {fault} {in_a_row} steps in a row (metrics.jsonl says which); "
            "the last checkpoint is as it was: lower optimizer.learning_rate, set optimizer.clip_norm, or use bf16"
        )
    return replace(
        state,
        step=records[-1].step,
        tokens=session.log.tokens,
        seconds=session.log.seconds,
        nonfinite_in_a_row=in_a_row,
    )


def validate(session: Session, state: TrainingState, interruption: Interruption) -> TrainingState:
    """Evaluates and records; returns the state with the best loss so far, over the run's steps. Collective.

    In the loop that is the loss over `evaluation.tokens`; at the end everything is evaluated, and recorded. Broken off
    by a signal, the evaluation stays due.
    """
    rows, config = session.validation, session.config
    assert rows is not None, "there is a validation range where evaluation is due"
    started = time.perf_counter()
    in_loop = rows.count if config.evaluation.tokens is None else rows.within(config.evaluation.tokens)

    def over(numbers: range) -> Evaluated:
        microbatch = session.trainer.layout.microbatch
        shared = (config.precision, session.group, session.byte_lengths, interruption.heard)
        return evaluate(session.module, rows, numbers, microbatch, *shared)

    try:
        evaluated = over(range(in_loop))
        comparable = evaluated.loss
        if state.step == session.data.total_steps and in_loop < rows.count:
            evaluated += over(range(in_loop, rows.count))
    except BrokenOffError:
        return replace(state, evaluation_due=True)
    if math.isfinite(comparable) and (state.best_loss is None or comparable < state.best_loss):
        state = replace(state, best_loss=comparable, best_step=state.step)
    session.log.validation(state.step, evaluated, time.perf_counter() - started, best_of(state))
    return state


def save(session: Session, state: TrainingState) -> None:
    """Hands a copy of the state to the thread that writes it; one process does this.

    Raises:
        RunError: the checkpoint before could not be written.
    """
    assert session.writer is not None, "the process that saves has a writer"
    trainer = session.trainer
    scaler = trainer.scaler.state_dict() if trainer.scaler is not None else None
    upload = is_due(session.config.hub.every, state.step)
    session.writer.take(session.module.model, trainer.optimizer, replace(state, scaler=scaler), upload)
