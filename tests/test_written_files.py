"""Who may read and change what the commands write, and what is never in it."""

import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Workplace
from small_corpora import small_texts
from small_exports import SHAPE, run_config, save_noisy, without_transformers, write_tokenizer
from small_study import record_run, write_study

import ddp_train
from training.command import run_command
from training.exchange.export import export_model
from training.exchange.gguf_file import export_gguf
from training.exchange.import_model import import_model
from training.laboratory.study_plan import read_run_state
from training.laboratory.study_result import write_result
from training.laboratory.study_runner import held
from training.preparation.prepare import Options, prepare
from training.step import Trainer
from training.tokenizer import train_tokenizer


@pytest.fixture(params=[0o027, 0o002], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    """What the user's shell has set."""
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def assert_modes(folder: Path, umask: int) -> None:
    """Files and folders are as the umask has them, and nothing but the lock is executable."""
    paths = [folder, *folder.rglob("*")]
    assert len(paths) > 1
    for path in paths:
        if not path.is_symlink():
            mode = 0o777 if path.is_dir() else 0o666
            assert oct(stat.S_IMODE(path.stat().st_mode)) == oct(mode & ~umask), path


def test_a_run_follows_the_umask(workplace: Workplace, umask: int) -> None:
    """All of it: checkpoints, records, report, charts, what a tracker has written."""
    train_tokenizer(["abc"], 257).save(str(workplace.datasets / "data" / "tokenizer.json"))
    config = workplace.write_config(
        data={"train_tokens": 1024}, checkpoint={"every": 1}, tracking={"trackers": ["tensorboard"]}
    )
    run = workplace.train_here(config)
    assert {"report.md", "loss.png", "latest", "metrics.jsonl"} < {path.name for path in run.folder.iterdir()}
    assert list(run.folder.glob("events.*"))
    assert_modes(run.folder, umask)


@pytest.mark.slow
def test_what_is_made_of_files_follows_the_umask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, umask: int) -> None:
    """Datasets, exports, imports and studies."""
    without_transformers(tmp_path, monkeypatch)
    (tmp_path / "a.txt").write_text("\f".join(small_texts(20)))
    options = Options(train_bpe=260, separator="\f", validation_share=0.2)
    prepare([str(tmp_path / "a.txt")], tmp_path / "deep" / "set", options)
    checkpoint, tokenizer = save_noisy(tmp_path / "run", SHAPE), write_tokenizer(tmp_path / "data")
    export_model(checkpoint, run_config(SHAPE), tmp_path / "out" / "model", "float32", tokenizer)
    export_gguf(checkpoint, run_config(SHAPE), tmp_path / "gguf" / "model.gguf", "float32", tokenizer)
    import_model(str(tmp_path / "out" / "model"), "back", None, None, None, tmp_path / "runs", tmp_path / "datasets")
    study = write_study(tmp_path)
    results = tmp_path / "studies" / "mine"
    with held(results):
        for number, run in enumerate(study.runs):
            record_run(results, run, 4.0 + number / 100)
        states = {run.name: read_run_state(results / run.name, run.config) for run in study.runs}
        write_result(study, results, states)
        assert_modes(results, umask)
    for folder in ("deep", "run", "out", "gguf", "runs"):
        assert_modes(tmp_path / folder, umask)


TOKEN = "hf_SecretThatNobodyMayRead"


def test_the_token_is_in_nothing_that_a_crash_leaves(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither in the traceback of something nobody foresaw, with a tracker beside it, nor in a file of the run."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("WANDB_API_KEY", TOKEN)
    config = workplace.write_config(
        checkpoint={"every": 1}, evaluation={"every": 2}, tracking={"trackers": ["tensorboard"]}
    )
    take = Trainer.step

    def fail(self: Trainer, number: int) -> object:
        if number == 2:
            raise ZeroDivisionError(f"step {number}")
        return take(self, number)

    monkeypatch.setattr(Trainer, "step", fail)
    command = ["ddp_train.py", str(config), str(workplace.datasets), "--output", str(workplace.checkpoints)]
    monkeypatch.setattr(sys, "argv", command)
    monkeypatch.setattr("training.command._be_ended_like_ctrl_c", lambda: None)  # in the process of the tests
    with pytest.raises(ZeroDivisionError) as crash:
        run_command(ddp_train.app)
    sys.excepthook(ZeroDivisionError, crash.value, crash.tb)
    said = "".join(capsys.readouterr())
    assert "ZeroDivisionError: step 2" in said
    assert TOKEN not in said
    written = [path for path in workplace.folder.rglob("*") if path.is_file()]
    assert any(path.parent.name == "step_00000002" for path in written)
    assert not [path for path in written if TOKEN.encode() in path.read_bytes()]
