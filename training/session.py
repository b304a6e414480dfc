"""What one process needs to train a run: the data, the model, the optimizer, and where the run stands."""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer

from model.gpt import build_gpt
from training.background_report import BackgroundReport
from training.changes import LENGTH, Passes, compare_configs, refuse_changes
from training.checkpoint_files import FOR_THE_MODEL, list_checkpoints, problem_of
from training.checkpoint_writer import CheckpointWriter
from training.compilation import compile_blocks
from training.config import REPOSITORY, RunConfig
from training.config_check import config_of_record
from training.data import (
    TrainingData,
    check_vocabulary,
    open_training_data,
    open_validation,
    provide_dataset,
    tokenizer_file,
)
from training.datasets_folder import can_be_made, unused_tokenizer
from training.digests import data_order_digest, validation_digest
from training.distributed import Group
from training.document_rows import AnyRows
from training.errors import UserError
from training.file_digest import file_digest
from training.gradients import gradient_sums
from training.hub.background_upload import BackgroundUploads, remove_held
from training.layout import plan_layout
from training.loss import SequenceLoss
from training.memory import keep_freed_memory
from training.metrics import RunLog
from training.metrics_file import first_value
from training.optimizer import build_optimizer
from training.restore import broadcast_optimizer, load_optimizer, load_weights
from training.run_folder import METRICS, Opening
from training.snapshot import TrainingState, weights_digest
from training.step import Trainer, build_scaler
from training.tokenizer import load_tokenizer, token_byte_lengths
from training.tracking.trackers import Trackers


@dataclass(frozen=True)
class Means:
    """How this machine computes the run: the command line's, none of which makes it another run."""

    microbatch: int | None = None
    """Most sequences at once; None = the config's."""
    activation_checkpointing: bool = False
    compile: bool = False


@dataclass(frozen=True)
class Session:
    """All that one process needs to train a run."""

    folder: Path
    dataset: Path
    group: Group
    trainer: Trainer
    validation: AnyRows | None
    tokenizer: Tokenizer | None
    tokenizer_path: Path | None
    byte_lengths: NDArray[np.int64] | None
    dataset_revision: str | None
    log: RunLog
    writer: CheckpointWriter | None
    """Of the process that saves."""
    uploads: BackgroundUploads | None
    """Of the same process, where hub.every is set."""
    trackers: Trackers | None
    """Of the same process, where the config names some."""
    reports: BackgroundReport | None
    """Of the process that saves."""

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
        return self.trainer.module

    @property
    def cannot_save(self) -> bool:
        """Whether this process, the one that saves, could not write a checkpoint or a record."""
        return self.log.failed or (self.writer is not None and self.writer.failed)

    def wait_for_writer(self) -> None:
        """Waits, on the process that saves, until the last checkpoint is written; RunError if it could not be."""
        assert self.writer is not None, "the process that saves has a writer"
        self.writer.wait()

    def end(self) -> None:
        """Ends what is shown of the progress, and the process that writes the report; also a second time."""
        self.log.close()
        if self.reports is not None:
            self.reports.close()

    def leave(self) -> None:
        """The same, once a checkpoint under way is written; removes what is kept for uploads. Whatever is raised."""
        if self.writer is not None:
            self.writer.close()
        self.end()
        if self.uploads is not None:
            self.uploads.abandon()


def build(
    config: RunConfig,
    folder: Path,
    datasets: Path,
    means: Means,
    opening: Opening,
    group: Group,
) -> Session:
    """Opens the data and builds the model, with the weights and the optimizer state to go on from. Collective."""
    process = group.process
    layout = plan_layout(config.batch, process.world_size, means.microbatch, config.bitwise)
    if process.device.type == "cpu":
        keep_freed_memory()
    torch.set_float32_matmul_precision(config.precision.matmul)
    if config.bitwise:
        process.use_reproducible_kernels()
    dataset = datasets / config.data.dataset
    source = group.first("source", lambda: weights_to_start_from(config, folder, opening))
    if process.is_main and not dataset.is_dir() and can_be_made(config.data.dataset):
        print(f"{dataset}: is not there yet, preparing or downloading it", file=sys.stderr, flush=True)
    revision = group.first("dataset", lambda: provide_dataset(config.data, datasets), per_node=True)
    data, validation = open_data(config, dataset, group)
    tokenizer_path = tokenizer_file(config.data, datasets)
    tokenizer = load_tokenizer(tokenizer_path) if tokenizer_path else None

    model = build_gpt(config.model, config.seeds.weights).to(process.device)
    model.recompute_blocks = means.activation_checkpointing
    optimizer = build_optimizer(model, config.optimizer)
    if source is not None:
        group.first("weights", lambda: load_weights(Path(source), model))  # all get rank 0's below
    if opening.checkpoint is not None:
        group.first("optimizer", lambda: load_optimizer(folder / str(opening.checkpoint), model, optimizer))
        broadcast_optimizer(optimizer, group)
    compiled = compile_blocks(model, config, layout.microbatch, group) if means.compile else None
    gradients = gradient_sums(SequenceLoss(model), group, config)
    clip_norm, intervals = config.optimizer.clip_norm, (config.evaluation.every, config.checkpoint.every)
    log = RunLog(folder / METRICS, process.is_main, data.total_steps, clip_norm, *intervals)
    remarks = [*process.remarks(), *unused_tokenizer(config.data, datasets)] if process.is_main else []
    for remark in [*remarks, *([compiled] if compiled else [])]:
        log.say(remark)
    trainer = Trainer(config, process, layout, data, gradients, optimizer, build_scaler(config.precision))
    uploads = uploads_of(config, folder, log) if process.is_main else None
    return Session(
        folder=folder,
        dataset=dataset,
        group=group,
        trainer=trainer,
        validation=validation,
        tokenizer=tokenizer,
        tokenizer_path=tokenizer_path,
        byte_lengths=token_byte_lengths(tokenizer, config.model.vocab_size) if tokenizer else None,
        dataset_revision=revision,
        log=log,
        writer=CheckpointWriter(folder, config.checkpoint.keep, log, uploads) if process.is_main else None,
        uploads=uploads,
        trackers=Trackers(folder, config, log) if process.is_main and config.tracking.trackers else None,
        reports=BackgroundReport(folder, log.say) if process.is_main else None,
    )


def digests(session: Session, opening: Opening) -> dict[str, str | None]:
    """What a run begins with and reads, for the record: two runs share what they have the same digest of.

    After a resumption the weights' is still that of the initial ones, carried over from the run's first record; None
    where that is lost.
    """
    initial = opening.checkpoint is None
    weights = (
        weights_digest(session.module.model) if initial else first_value(session.folder / METRICS, "weights_sha256")
    )
    return {
        "weights_sha256": weights,
        "data_order_sha256": data_order_digest(session.data),
        "validation_sha256": validation_digest(session.validation) if session.validation is not None else None,
        "tokenizer_sha256": file_digest(session.tokenizer_path) if session.tokenizer_path is not None else None,
    }


def uploads_of(config: RunConfig, folder: Path, log: RunLog) -> BackgroundUploads | None:
    """What uploads the state during the run, where that is wanted."""
    remove_held(folder)
    if config.hub.repo is None or not config.hub.every:
        return None
    return BackgroundUploads(folder, config.hub.repo, config.hub.private, log)


def weights_to_start_from(config: RunConfig, folder: Path, opening: Opening) -> str | None:
    """The checkpoint to go on from, or that of another run that `init_from` names, verified; None = fresh weights."""
    if opening.checkpoint is not None:
        return str(folder / opening.checkpoint)
    if config.init_from is None:
        return None
    other = REPOSITORY / config.init_from
    if not other.is_dir():
        raise UserError(
            f"init_from: {other}: there is no such folder; give that of a checkpoint, absolute or as seen from "
            f"{REPOSITORY}, such as checkpoints/tiny/latest"
        )
    problem = problem_of(other, FOR_THE_MODEL)
    if problem is not None and list_checkpoints(other):
        raise UserError(f"init_from: {other}: is a run; give one of its checkpoints, such as {config.init_from}/latest")
    if problem is not None:
        raise UserError(f"init_from: {other}: {problem}; give the folder of a complete checkpoint")
    return str(other)


def open_data(config: RunConfig, dataset: Path, group: Group) -> tuple[TrainingData, AnyRows | None]:
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
        UserError: the data, or the order in which they would be read, are not those that the run was started on.
    """
    fingerprint = session.data.rows.file.fingerprint()
    if opening.state is None:
        return TrainingState(0, 0, 0.0, 0, None, None, None, fingerprint, opening.config)
    state = TrainingState(**opening.state)
    if state.data != fingerprint:
        raise UserError(
            f"{session.dataset}: the training tokens are not those that {opening.checkpoint} was trained on (another "
            "revision, or prepared elsewhere); copy the dataset from where the run was started"
        )
    if any(key in opening.changed for key in LENGTH):
        refuse_another_order(session, state)
    if session.trainer.scaler is not None and state.scaler is not None:
        session.trainer.scaler.load_state_dict(state.scaler)
    due = state.evaluation_due and session.validation is not None
    return replace(state, config=opening.config, evaluation_due=due)


def refuse_another_order(session: Session, state: TrainingState) -> None:
    """Looks at a changed length again, now that the data are open: a train_tokens of -1 has become a number.

    Raises:
        UserError: the steps so far would have been others.
    """
    now, folder = session.config, session.folder
    saved = config_of_record({"name": now.name, **state.config}, str(folder))
    before, after = (
        Passes(data.steps_per_epoch, data.epochs) for data in (open_training_data(saved, session.dataset), session.data)
    )
    refuse_changes(compare_configs(saved, now, state.step, (before, after)), folder, state.step)
