"""Long token files: what is looked at of them, when, and that they cost neither memory nor time."""

import resource
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from conftest import Workplace
from ranks import ALONE, on_ranks
from small_configs import small_config, write_sparse

from training import digests, rows
from training.config_check import config_from_mapping
from training.data import check_vocabulary, open_training_data
from training.digests import data_order_digest
from training.distributed import Group
from training.errors import OneRankError
from training.layout import plan_layout
from training.rows import CHECKED_AT_ONCE, CHECKED_WHOLE, TokenFile, checked_pieces


@pytest.fixture
def group() -> Iterator[Group]:
    """One process."""
    with ALONE.group() as group:
        yield group


def test_the_check_goes_through_a_large_file_in_pieces(tmp_path: Path) -> None:
    """Also where the bad id is the first or the last of a piece."""
    for offset in (CHECKED_AT_ONCE - 1, CHECKED_AT_ONCE, 2 * CHECKED_AT_ONCE - 1):
        path = write_sparse(tmp_path / "train.safetensors", 2 * CHECKED_AT_ONCE, tokens={offset: b"\x39\x30"})
        file = TokenFile(path)
        assert file.first_bad_token(0, file.length, 12_345) == offset
        assert file.first_bad_token(offset, offset + 1, 12_345) == offset
        assert file.first_bad_token(0, offset, 12_345) is None
        assert file.first_bad_token(0, file.length, 12_346) is None


def test_of_a_long_range_pieces_are_looked_at_before_training() -> None:
    """The same few whatever its length, its first and its last token among them; a shorter one is looked at whole."""
    for length in (1, CHECKED_AT_ONCE, CHECKED_AT_ONCE + 1, CHECKED_WHOLE):
        pieces = checked_pieces(7, 7 + length)
        assert [token for piece in pieces for token in (piece.start, piece.stop)][:: 2 * len(pieces) - 1] == [
            7,
            7 + length,
        ]
        assert all(one.stop == other.start for one, other in pairwise(pieces))
    for length in (CHECKED_WHOLE + 1, 10**10):
        pieces = checked_pieces(7, 7 + length)
        assert (pieces[0].start, pieces[-1].stop) == (7, 7 + length)
        assert sum(map(len, pieces)) == 2**22
        gaps = [other.start - one.start for one, other in pairwise(pieces)]
        assert max(gaps) - min(gaps) <= 1


def test_an_id_that_was_not_looked_at_before_ends_the_run_when_it_is_read(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one sentence; the checkpoints are as they were."""
    monkeypatch.setattr(rows, "CHECKED_WHOLE", 4000)
    monkeypatch.setattr(rows, "SAMPLE_TOKENS", 16)
    monkeypatch.setattr(digests, "WHOLE_TOKENS", 0)  # what the record of a start reads
    monkeypatch.setattr(digests, "SAMPLES", 2)
    write_sparse(workplace.datasets / "data" / "train.safetensors", 30_000, tokens={1330: b"\x01\x01"})
    config = workplace.write_config(checkpoint={"every": 1}, evaluation={"every": None})
    told = r"train.safetensors: the id 257 at offset 1,330 is not in .* and the last checkpoint is as it was$"
    with pytest.raises(OneRankError, match=told):
        workplace.train_here(config)
    assert (workplace.checkpoints / "run" / "latest").resolve().name == "step_00000002"


LIMIT = 50
"""What the reading of a file may take besides the file's own pages, in MiB."""


def status(key: str) -> float:
    """A line of this process's memory, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:")) / 1024


def read_everything(group: Group, mapping: dict[str, Any], dataset: Path) -> tuple[int, float, float]:
    """Steps read, seconds until the first was there, and the most memory taken, in MiB; over the limit it fails."""
    config = config_from_mapping(mapping, "here")
    allowed = int((status("VmData") + LIMIT) * 2**20)
    resource.setrlimit(resource.RLIMIT_DATA, (allowed, allowed))
    before, started, most = status("RssAnon"), time.monotonic(), 0.0
    data = open_training_data(config, dataset)
    check_vocabulary(data.rows, config.model.vocab_size, group)
    layout = plan_layout(config.batch, group.process.world_size)
    data.read(0, range(6))
    seconds = time.monotonic() - started
    for step in range(data.total_steps):
        for microbatch in layout.microbatches(group.process.rank):
            data.read(step, microbatch)
        most = max(most, status("RssAnon") - before)
    return data.total_steps, seconds, most


@pytest.mark.slow
def test_a_large_file_costs_no_memory_and_no_time(tmp_path: Path) -> None:
    """R78, R79: 1 GiB, of which 2,048 batches are read at random places by two ranks."""
    write_sparse(tmp_path / "train.safetensors", 2**29)
    mapping = {
        "name": "run",
        "model": {"context_length": 1024},
        "data": {"dataset": "data", "train_tokens": 2**24, "train_start": 2**28, "shuffle": True},
        "batch": {"world_size": 2, "microbatch": 4, "accumulation": 1},
    }
    for steps, seconds, mebibytes in on_ranks(2, read_everything, mapping, tmp_path):
        assert steps == 2048
        assert mebibytes < LIMIT
        assert seconds < 5


class Counted:
    """The tokens of a file, and how many of them were read."""

    def __init__(self, file: TokenFile) -> None:
        self.tokens, self.read = file._tokens, 0
        file._tokens = self

    def __getitem__(self, part: slice) -> Any:
        self.read += part.stop - part.start
        return self.tokens[part]


def test_a_start_on_20_gb_of_tokens_reads_a_few_megabytes(tmp_path: Path, group: Group) -> None:
    """All that is done with the data before the first step, and the first step's; nothing of it stays in memory."""
    path = write_sparse(tmp_path / "train.safetensors", 10**10)
    assert (path.stat().st_size > 2 * 10**10, path.stat().st_blocks < 1000) == (True, True)
    config = small_config(model={"context_length": 1024}, data={"train_tokens": -1, "shuffle": True})
    before = status("RssAnon")
    data = open_training_data(config, tmp_path)
    counted = Counted(data.rows.file)
    check_vocabulary(data.rows, config.model.vocab_size, group)
    data.rows.file.fingerprint()
    data_order_digest(data)
    data.read(0, range(8))
    assert data.total_steps == 10**10 // (8 * 1024)
    assert 2**22 < counted.read < 6 * 10**6
    assert status("RssAnon") - before < LIMIT
