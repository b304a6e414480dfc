"""A model on its way to the Hub: its export, its page, charts, config, metrics and TensorBoard's events in a folder.

checkpoints/<run>/hub/     what was uploaded last, or what could not be
"""

import contextlib
import re
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from training import lock
from training.charts import draw_charts
from training.checkpoint_files import FOR_THE_MODEL, checkpoint_name, find_checkpoint
from training.config import LICENCE_PATTERN, REPOSITORY, RunConfig, config_mapping, repository_problem
from training.config_file import INTERVENTIONS
from training.data import tokenizer_file
from training.errors import RunError, UserError, one_line
from training.exchange.export import Dtype, export_model
from training.hub.card_text import PAGE, with_files
from training.hub.hub_retry import Say
from training.hub.hub_upload import Destination, files_of, upload_files
from training.hub.model_card import Described, model_card
from training.hub.repository_content import STALE, foreign_content, refuse_what_was_added
from training.hub.tensorboard import FILE, event_file
from training.json_file import read_json_object
from training.metrics import RunLog
from training.metrics_file import Metrics, read_metrics
from training.restore import read_state
from training.run_folder import CONFIG, METRICS
from training.tokenizer import TOKENIZER
from training.yaml_reader import read_yaml, yaml_text

HUB = "hub"
SHOWN = {"licence": (str,), "fingerprint": (str,), "kind": (str,), "splits": (dict,), "source": (str, list, dict)}
"""Keys of dataset.json that a page shows, and of what kinds their values are."""
REPLACE = "give --replace to go on, or choose another repository"
REPLACE_STATE = "remove the branch on the Hub, choose another repository, or train without hub.every"
REPLACE_AFTER_TRAINING = "choose another repository, or train without it and then: isobatch push RUN REPO --replace"


@dataclass(frozen=True)
class Push:
    """What is pushed, and where to."""

    checkpoint: Path
    config: RunConfig
    repository: str
    datasets: Path
    """The folder of the datasets."""
    private: bool = True
    """Of a repository that is made."""
    licence: str | None = None
    """As the Hub calls it."""
    tokenizer: Path | None = None
    dtype: Dtype = "float32"
    branch: str = "main"
    replace: bool = False
    """Whether files that were not uploaded from here, and a page that was edited, may be replaced."""

    @property
    def run(self) -> Path | None:
        """The run's folder; None for a checkpoint that lies in none."""
        folder = self.checkpoint.parent
        return folder if (folder / CONFIG).is_file() else None

    @property
    def name(self) -> str:
        """The run's name, or that of a checkpoint without a run, as a path on the Hub may have it."""
        return re.sub(r"[^A-Za-z0-9._-]+", "_", (self.run or self.checkpoint).resolve().name)

    @property
    def to(self) -> Destination:
        """Where to."""
        return Destination(self.repository, private=self.private, branch=self.branch)

    @property
    def folder(self) -> Path:
        """What is uploaded; of a checkpoint without a run, beside it."""
        checkpoint = self.checkpoint.resolve()
        return self.run / HUB if self.run is not None else checkpoint.with_name(f"{checkpoint.name}-{HUB}")

    @property
    def description(self) -> Path:
        """The dataset's dataset.json, which need not exist."""
        return self.datasets / self.config.data.dataset / "dataset.json"

    def again(self) -> str:
        """The command that repeats this push, from any folder."""
        place = self.run or self.checkpoint
        name = place.name if place.parent == REPOSITORY / "checkpoints" else str(place.resolve())
        if self.run is not None and (self.run / "latest").resolve() != self.checkpoint.resolve():
            name = f"{name}/{self.checkpoint.name}"
        words = ["isobatch", "push", name, self.repository, *([] if self.private else ["--public"])]
        own = tokenizer_file(self.config.data, self.datasets)
        options = {
            "--licence": (self.licence, None),
            "--branch": (self.branch, "main"),
            "--dtype": (self.dtype, "float32"),
            "--datasets": (self.datasets.resolve(), (REPOSITORY / "datasets").resolve()),
            "--tokenizer": (self.tokenizer and self.tokenizer.resolve(), own and own.resolve()),
        }
        for option, (value, default) in options.items():
            words += [] if value in (None, default) else [option, str(value)]
        words += ["--replace"] if self.replace else []
        return shlex.join(words)


def check_options(
    repository: str, licence: str | None, which: str = "last", dtype: str = "float32", branch: str = "main"
) -> None:
    """Checks the words of the command line that would otherwise fail late.

    Raises:
        UserError: naming the option.
    """
    if problem := repository_problem(repository):
        raise UserError(f"REPO: {problem}")
    for option, value, known in (("--checkpoint", which, ("last", "best")), ("--dtype", dtype, get_args(Dtype))):
        if value not in known:
            raise UserError(f"{option}: must be one of {', '.join(known)}, got {value!r}")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._/-]*", branch):
        raise UserError(f"--branch: must be the name of a branch, such as main, got {branch!r}")
    if licence is not None and not re.fullmatch(LICENCE_PATTERN, licence):
        raise UserError(f"--licence: must be the Hub's name of a licence, such as apache-2.0, got {licence!r}")


def push_model(push: Push, say: Say) -> str:
    """Builds the folder and uploads it; returns the sha of the commit.

    Raises:
        UserError: the folder cannot be built, or the checkpoint is damaged.
        RunError: the upload has failed for good; the folder is whole, and the message says how to repeat it.
    """
    step = read_state(push.checkpoint).step
    with built_folder(push, say) as folder:
        try:
            problem = None if push.replace else foreign_content(push.to, say)  # again: the export has taken its time
            if problem:
                raise RunError(f"{push.repository}: {problem}; {REPLACE}")
            return upload_files(files_of(folder), push.to, f"{push.name}, step {step:,}", say, STALE)
        except RunError as failure:
            raise RunError(
                f"{failure}; nothing is lost, {folder} holds what was to be uploaded; to try again: {push.again()}"
            ) from failure


def push_run(folder: Path, config: RunConfig, datasets: Path, log: RunLog, step: int) -> None:
    """Pushes a finished run's last checkpoint to hub.repo, unless that has been done; one process does this.

    Args:
        folder: checkpoints/<run>.
        config: the run's.
        datasets: the folder of the datasets.
        log: of the run, which is told of the commit.
        step: the run's last.
    """
    repository = config.hub.repo
    assert repository is not None, "a run without hub.repo is not pushed"
    done = read_metrics(folder / METRICS).events_named("pushed")
    if any(event["step"] == step and event.get("repository") == repository for event in done):
        return
    push = Push(
        checkpoint=find_checkpoint(folder, checkpoint_name(step), FOR_THE_MODEL).path,
        config=config,
        repository=repository,
        datasets=datasets,
        private=config.hub.private,
        licence=config.hub.licence,
        tokenizer=tokenizer_file(config.data, datasets),
    )
    log.event(step, "pushed", repository=repository, commit=push_model(push, log.say))


@contextlib.contextmanager
def built_folder(push: Push, say: Say) -> Iterator[Path]:
    """Builds the folder that is uploaded, and keeps other pushes of the same model from changing it meanwhile.

    Raises:
        UserError: another push is under way, or the checkpoint is damaged.
        RunError: the disk refuses.
    """
    if push.tokenizer is None and not push.description.parent.is_dir():
        raise UserError(
            f"{push.description.parent}: there is no such folder, so nobody knows whether the model has a tokenizer; "
            "give the folder of the run's dataset with --datasets, or a tokenizer.json with --tokenizer"
        )
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(lock.held(push.folder.with_name(f".{push.folder.name}.lock")))
            _build(push, say)
        except lock.BusyError:
            raise UserError(f"{push.folder}: another push of this model is under way; wait for its end") from None
        except OSError as error:
            raise RunError(f"{push.folder}: cannot be written ({error}); make room, then: {push.again()}") from error
        yield push.folder


def _build(push: Push, say: Say) -> None:
    """Writes the folder, in place of an earlier one; it appears when it is whole. A kill may leave hidden ones."""
    folder = push.folder
    partial, replaced = (folder.with_name(f".{folder.name}.{kind}") for kind in ("partial", "old"))
    for left in (partial, replaced):
        shutil.rmtree(left, ignore_errors=True)
    if folder.exists() and not (folder / CONFIG).is_file():
        raise UserError(f"{folder}: exists, and is no earlier upload; nothing of yours is overwritten: rename it")
    if not push.replace and folder.is_dir():
        refuse_what_was_added(folder, f"{push.again()} --replace")
    description = push.description if push.description.is_file() else None  # else the one beside the tokenizer
    exported = export_model(push.checkpoint, push.config, partial, push.dtype, push.tokenizer, description)
    say(exported.check)
    if push.tokenizer is None:
        say(f"without a tokenizer: there is no {push.description.with_name(TOKENIZER)}; --tokenizer gives one")
    for name, content in _more_files(push, exported.check, say).items():
        (partial / name).parent.mkdir(parents=True, exist_ok=True)
        (partial / name).write_bytes(content)
    card = partial / PAGE
    others = {name: path for name, path in files_of(partial).items() if path != card}
    card.write_bytes(with_files(card.read_text(encoding="utf-8"), others).encode("utf-8"))
    if folder.is_dir():
        folder.rename(replaced)
    partial.rename(folder)
    shutil.rmtree(replaced, ignore_errors=True)


def _more_files(push: Push, check: str, say: Say) -> dict[str, bytes]:
    """What lies in the folder besides the export; from the run's records, where there are any."""
    metrics, files = None, {}
    if push.run is not None and (push.run / METRICS).is_file():
        metrics = read_metrics(push.run / METRICS)
        files = {METRICS: (push.run / METRICS).read_bytes(), f"runs/{push.name}/{FILE}": event_file(metrics)}
        files |= draw_charts(metrics, push.name, push.config.optimizer.clip_norm)
    files[CONFIG] = yaml_text(config_mapping(push.config)).encode()
    files[PAGE] = model_card(_described(push, metrics, check, say)).encode("utf-8")
    return files


def _described(push: Push, metrics: Metrics | None, check: str, say: Say) -> Described:
    known = read_yaml(INTERVENTIONS)
    dataset = {}
    try:
        dataset = read_description(push.description)
    except UserError as mistake:  # the model is none the worse for it
        say(f"{one_line(mistake)}; the page is written without it")
    return Described(
        repository=push.repository,
        run=push.name,
        step=read_state(push.checkpoint).step,
        config=push.config,
        metrics=metrics,
        check=check,
        dataset=dataset,
        interventions={name: known[name]["description"] for name in push.config.interventions if name in known},
        has_tokenizer=push.tokenizer is not None,
        licence=push.licence,
        base_model=base_model_of(push.run),
    )


def base_model_of(run: Path | None) -> str | None:
    """The repository on the Hub whose weights a run began with, perhaps by way of other runs' `init_from`.

    None where there is none, or where the folders of those runs are gone.
    """
    passed: set[Path] = set()
    while run is not None and run not in passed:
        passed.add(run)
        if (run / METRICS).is_file():
            for event in read_metrics(run / METRICS).events_named("import"):
                return str(event["source"]) if event.get("revision") else None
        init_from = read_yaml(run / CONFIG).get("init_from") if (run / CONFIG).is_file() else None
        run = (REPOSITORY / init_from).resolve().parent if init_from else None
    return None


def read_description(path: Path) -> dict[str, Any]:
    """A dataset's dataset.json; nothing where there is none.

    Raises:
        UserError: it is damaged, or a value that a page shows is of a wrong kind.
    """
    if not path.is_file():
        return {}
    description = read_json_object(path, "restore the file")
    for key, kinds in SHOWN.items():
        value = description.get(key)
        if value is not None and not isinstance(value, kinds):
            wanted = " or ".join(kind.__name__ for kind in kinds)
            raise UserError(f"{path}: {key} is a {type(value).__name__}, but must be a {wanted}; correct it")
    return description
