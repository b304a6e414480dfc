"""Where a dataset is being made: held by one process, and gone on with by the same command after a kill.

datasets/.NAME.preparing/lock
datasets/.NAME.preparing/progress.json    how far it is, and for which command and sources
datasets/.NAME.preparing/dataset/         becomes datasets/NAME
"""

import json
import math
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from training import lock
from training.errors import RunError, UserError
from training.json_file import parse_json
from training.preparation.dataset_files import (
    SPLITS,
    TokenType,
    TokenWriter,
    bring_to_disk,
    publish,
    refuse_existing,
    replace_content,
)
from training.preparation.tokenizing import Block, Counts

SECONDS_BETWEEN_RECORDS = 1.0


@dataclass
class Progress:
    """How far a dataset is. What lies in its files behind that is cut off before it goes on."""

    surveyed: bool = False
    """Whether the first pass, which a tokenizer or the n-grams may need, is done."""
    documents: int = 0
    """That have been read from the sources, empty ones included."""
    empty: int = 0
    splits: dict[str, Counts] = field(default_factory=lambda: {split: Counts() for split in SPLITS})
    dropped: Counts = field(default_factory=Counts)
    files: dict[str, int] = field(default_factory=dict)
    """Bytes, at least, of the files that it needs, by their path in the folder: those of the survey and the tokens."""

    def add(self, block: Block) -> None:
        """Counts a block that has been written."""
        self.documents += block.documents
        self.empty += block.empty
        self.dropped.add(block.dropped)
        for split, part in block.splits.items():
            self.splits[split].add(part.counts)


class Staging:
    """The folder in which a dataset is made, and its progress."""

    def __init__(self, folder: Path, command: dict[str, Any]) -> None:
        """Goes on in a folder that this process holds, or starts afresh there."""
        self.folder, self.command = folder, command
        self.dataset = folder / "dataset"
        self.ngrams = folder / "ngrams"
        self.progress = self._recorded() or Progress()
        self._recorded_at = -math.inf  # the first block is recorded at once
        if not self.progress.surveyed:
            shutil.rmtree(self.dataset, ignore_errors=True)
            self.dataset.mkdir()

    def _recorded(self) -> Progress | None:
        path = self.folder / "progress.json"
        try:
            record = parse_json(path.read_text(encoding="utf-8"))
            command, counted = record["command"], record["progress"]
            counted["splits"] = {split: Counts(**counts) for split, counts in counted["splits"].items()}
            progress = Progress(**counted | {"dropped": Counts(**counted["dropped"])})
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, AttributeError):
            print(f"{path}: cannot be read; starting afresh", file=sys.stderr)
            return None
        if command != self.command:
            others = [key for key in self.command if command.get(key) != self.command[key]]
            print(f"{self.folder}: was begun with other {' and '.join(others)}; starting afresh", file=sys.stderr)
            return None
        if not self._are_there(progress):
            print(f"{self.folder}: lacks files that its progress.json counts; starting afresh", file=sys.stderr)
            return None
        if progress.documents:
            print(f"going on after {progress.documents:,} documents", file=sys.stderr)
        return progress

    def _are_there(self, progress: Progress) -> bool:
        files = [(self.folder / name, size) for name, size in progress.files.items()]
        return all(file.is_file() and file.stat().st_size >= size for file, size in files)

    def record(self) -> None:
        """Records the progress; what it counts must be on the disk."""
        content = json.dumps({"command": self.command, "progress": asdict(self.progress)})
        replace_content(self.folder / "progress.json", content)

    def finish_survey(self) -> None:
        """Records that the first pass is done, and what it has left: n-grams, tokenizer and end of text."""
        files = [file for file in (self.ngrams, *self.dataset.iterdir()) if file.exists()]
        for file in (*files, self.dataset, self.folder):
            bring_to_disk(file)
        self.progress.files = {str(file.relative_to(self.folder)): file.stat().st_size for file in files}
        self.progress.surveyed = True
        self.record()

    def write(self, blocks: Iterator[Block], dtype: TokenType) -> None:
        """Adds blocks to the token files, and records the progress now and then."""
        counts = self.progress.splits
        with ExitStack() as stack:
            writers = {
                split: TokenWriter(self.dataset / f"{split}.safetensors", dtype, counts[split].tokens)
                for split in SPLITS
            }
            for writer in writers.values():
                stack.callback(writer.close)
            for block in blocks:
                for split, part in block.splits.items():
                    writers[split].append(b"".join(part.tokens))
                self.progress.add(block)
                if time.monotonic() - self._recorded_at > SECONDS_BETWEEN_RECORDS:
                    self._flush(writers)
            self._flush(writers)
            for writer in writers.values():
                writer.finish()

    def _flush(self, writers: dict[str, TokenWriter]) -> None:
        for writer in writers.values():
            writer.flush()
            if writer.tokens:
                self.progress.files[str(writer.path.relative_to(self.folder))] = writer.size
        self.record()
        self._recorded_at = time.monotonic()


@contextmanager
def staging(output: Path, command: dict[str, Any]) -> Iterator[Staging]:
    """Holds the folder in which the dataset `output` is made, and publishes it at the end.

    After a mistake of the user's the folder is removed; after anything else the same command goes on in it.

    Args:
        output: the new dataset's folder.
        command: all that its content depends on; with another one than the folder was begun with it starts afresh.

    Raises:
        UserError: `output` holds something already, cannot be written, or another process is at it.
        RunError: a file could not be written, or the user interrupted it.
    """
    refuse_existing(output)
    folder = output.with_name(f".{output.name}.preparing")
    with ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(lock.held(folder / "lock"))
            place = Staging(folder, command)
        except (lock.BusyError, lock.RemovedError):
            raise UserError(f"{output}: another process is preparing it; wait for it or stop it first") from None
        except OSError as error:
            raise UserError(f"{output.parent}: cannot write there ({error}); choose another folder") from error
        try:
            refuse_existing(output)  # another process may just have published it
            yield place
            publish(place.dataset, output)
        except OSError as error:
            raise RunError(f"{output}: cannot be written ({error}); then the same command goes on") from error
        except KeyboardInterrupt:
            raise RunError(f"{output}: interrupted; the same command goes on where this one ended") from None
        except UserError:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        shutil.rmtree(folder, ignore_errors=True)
