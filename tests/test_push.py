"""A model on its way to the Hub and back: train, push, download elsewhere, load with transformers, the same text."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import REPOSITORY, Finished, Workplace
from fake_hub import READ_TOKEN, TOKEN, FakeHub
from recorded_runs import begin, event, write_run
from tokenizers import Tokenizer
from worker import Worker

from model.generation import generate
from training.config_file import load_run_config
from training.metrics_file import read_metrics
from training.push import base_model_of
from training.restore import load_model
from training.run_folder import open_run
from training.tokenizer import train_tokenizer

NAME = "tester/model"
TEXT = "Every effort moves you a little further than the last one did. "
FILES = [
    *("README.md", "config.json", "config.yaml", "generation_config.json", "grad_norm.png", "learning_rate.png"),
    *("loss.png", "metrics.jsonl", "model.safetensors", "runs/run/events.out.tfevents.0.isobatch", "tokenizer.json"),
    "tokenizer_config.json",
]
ELSEWHERE = """
import re, sys
from pathlib import Path
from huggingface_hub import snapshot_download
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = Path(snapshot_download("tester/model", local_dir=sys.argv[1]))
exec(re.search(r"```python\\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)[1])
tokenizer, model = (kind.from_pretrained(folder) for kind in (AutoTokenizer, AutoModelForCausalLM))
ids = tokenizer(sys.argv[2], return_tensors="pt").input_ids
print("greedy:", model.generate(ids, max_new_tokens=20, do_sample=False)[0, ids.shape[1] :].tolist())
snapshot_download("tester/model", revision="training-state", local_dir=sys.argv[3])
"""


@dataclass(frozen=True)
class Trained:
    """A run that was trained by two processes and pushed at its end."""

    place: Workplace
    config: Path
    run: Finished
    hub: FakeHub
    tokenizer: Tokenizer


def prepared(place: Workplace) -> tuple[Path, Tokenizer]:
    """A small dataset with a tokenizer, and a config of 10 steps on it."""
    tokenizer = train_tokenizer([TEXT], 270)
    ids = [*tokenizer.encode(TEXT).ids, 269] * 400
    place.write_tokens(tokens=ids)
    place.write_tokens(file="validation", tokens=ids[:2000])
    tokenizer.save(str(place.datasets / "data" / "tokenizer.json"))
    (place.datasets / "data" / "dataset.json").write_text(json.dumps({"end_of_text": 269, "licence": "CC0-1.0"}))
    config = place.write_config(
        model={"vocab_size": 270}, data={"validation_start": 0}, optimizer={"learning_rate": 0.01}, hub={"every": 4}
    )
    config.write_text(config.read_text().replace("hub:\n", "hub:\n  repo: tester/other\n"))
    return config, tokenizer


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    place = Workplace(tmp_path_factory.mktemp("trained"))
    config, tokenizer = prepared(place)
    with FakeHub() as hub:
        place.environment = hub.environment(place.folder / "home", HF_TOKEN=TOKEN)
        run = place.train(config, "--push-to-hub", NAME, processes=2)
        assert run.status == 0, run.errors
        yield Trained(place, config, run, hub, tokenizer)


@pytest.fixture(scope="module")
def worker(trained: Trained) -> Iterator[Worker]:
    with Worker(trained.hub.environment(trained.place.folder / "worker")) as worker:
        yield worker


@pytest.mark.slow
def test_r87_two_ranks_make_one_repository_and_one_commit(trained: Trained) -> None:
    """R84: and the token is nowhere but in the requests; R88: optimizer state is not in the model's branch."""
    hub, run = trained.hub, trained.run
    assert hub.count("GET", "/api/whoami-v2") == 1
    assert hub.count("POST", "/api/repos/create") == 1
    assert hub.count("POST", "/commit/main") == 1
    assert hub.repositories["model", NAME].private
    assert hub.titles("model", NAME) == ["added", "run, step 10"]
    assert hub.files("model", NAME) == FILES
    [pushed] = [event for event in run.of_kind("event") if event["event"] == "pushed"]
    assert pushed["repository"] == NAME
    assert pushed["commit"] == hub.repositories["model", NAME].refs["main"]
    for path in run.folder.rglob("*"):
        assert not path.is_file() or TOKEN.encode() not in path.read_bytes(), path
    assert TOKEN not in run.output + run.errors
    last = hub.requests.index(next(r for r in hub.requests if r.path == "/api/whoami-v2"))
    assert last == 0, "before anything else"


@pytest.mark.slow
def test_downloaded_elsewhere_transformers_writes_the_same_text(trained: Trained, tmp_path: Path) -> None:
    """The card's own code runs as it stands; and the branch with the state is a run that can go on."""
    state = tmp_path / "state" / "run"
    words = [sys.executable, "-c", ELSEWHERE, str(tmp_path / "model"), "Every effort", str(state)]
    environment = {**trained.hub.environment(tmp_path / "home"), "HF_TOKEN": TOKEN, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(words, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Every effort moves you")
    ours = load_model(trained.run.folder / "latest")
    ids = trained.tokenizer.encode("Every effort").ids
    greedy = generate(ours, ids, 20, 0.0, None, 0, 269)
    assert json.loads(done.stdout.split("greedy: ")[1])[: len(greedy)] == greedy

    assert sorted(path.name for path in state.glob("[!.]*")) == ["config.yaml", "metrics.jsonl", "step_00000008"]
    opening = open_run(state, load_run_config(str(trained.config), [f"hub.repo={NAME}"]), "latest", overwrite=False)
    assert (opening.checkpoint, opening.changed) == ("step_00000008", {})
    assert read_metrics(state / "metrics.jsonl").train[-1]["step"] == 8


@pytest.mark.slow
def test_push_of_the_best_by_xet_is_the_same_folder(trained: Trained, tmp_path: Path) -> None:
    """The command in a process of its own, with what may be chosen: and all but the page and records is the same."""
    with FakeHub(tmp_path / "xet") as hub:
        words = ["isobatch", "push", str(trained.run.folder), "tester/best", "--checkpoint", "best", "--public"]
        words += ["--licence", "mit", "--datasets", str(trained.place.datasets), "--output", str(tmp_path / "built")]
        environment = {**hub.environment(tmp_path / "home", HF_TOKEN=TOKEN), "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, "tests/impatient.py", *words]
        done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout == ""
        assert not hub.repositories["model", "tester/best"].private
        assert hub.files("model", "tester/best") == FILES
        assert hub.head("model", "tester/best").files["model.safetensors"].xet_hash
        best = json.loads((trained.run.folder / "best" / "state.json").read_text())["step"]
        assert hub.titles("model", "tester/best")[-1] == f"run, step {best}"
        for file in FILES:
            content = hub.read("model", "tester/best", file)
            assert content == (tmp_path / "built" / file).read_bytes()
            if file not in ("README.md", "metrics.jsonl", "config.yaml") and best == 10:
                assert content == trained.hub.read("model", NAME, file)
        assert "license: mit" in hub.read("model", "tester/best", "README.md").decode()


@pytest.mark.slow
def test_a_failed_upload_ends_with_1_and_loses_nothing(trained: Trained, worker: Worker, tmp_path: Path) -> None:
    """R86: told with the command to repeat it; and resuming the finished run uploads what is missing, once."""
    hub = trained.hub
    train = ["ddp_train.py", trained.config, trained.place.datasets, "--output", tmp_path]
    train += ["--set", "hub.repo=tester/second", "--set", "hub.every=null"]
    hub.fail("/commit/", 403)
    done = worker.run(*train)
    run = tmp_path / "run"
    assert done.status == 1
    last = done.errors.splitlines()[-1]
    assert last == (
        "error: tester/second: the token may not write there (HTTP 403: injected); use one that may, or another "
        f"repository; nothing is lost, {run / 'hub'} holds what was to be uploaded; to try again: "
        f"isobatch push {run} tester/second"
    )
    assert read_metrics(run / "metrics.jsonl").events[-1]["event"] == "finished"
    assert (run / "report.md").is_file()
    assert (run / "latest" / "model.safetensors").is_file()
    built = sorted(str(path.relative_to(run / "hub")) for path in (run / "hub").rglob("*") if path.is_file())
    assert built == FILES
    assert hub.files("model", "tester/second") == []

    hub.faults.clear()
    hub.requests.clear()
    done = worker.run(*train, "--resume", "latest")
    assert done.status == 0, done.errors
    assert "nothing left to do, 10 of 10 steps are done\n" in done.errors
    assert hub.files("model", "tester/second") == FILES
    assert hub.count("PUT", "/_lfs/") == 0, "what had arrived was not sent again"
    done = worker.run(*train, "--resume", "latest")
    assert done.status == 0
    assert hub.count("POST", "/commit/") == 1


@pytest.mark.slow
def test_what_cannot_be_uploaded_is_refused_before_training(trained: Trained, worker: Worker, tmp_path: Path) -> None:
    """R84, R90: status 2, one sentence, no folder, no download."""
    hub = trained.hub
    train = ["ddp_train.py", trained.config, trained.place.datasets, "--output", tmp_path / "out"]
    missing = ["--set", "data.dataset=owner/not-there", "--push-to-hub"]
    hub.requests.clear()
    cases = {
        ("", "tester/x"): "hub.repo: there is no token to upload to tester/x with; set HF_TOKEN to one that may write",
        (READ_TOKEN, "tester/x"): "hub.repo: tester/x: the token in HF_TOKEN may only read; make one that may",
        (TOKEN, "else/x"): "hub.repo: else/x: the token in HF_TOKEN is tester's, who may not write to else",
        (TOKEN, "./out"): "--push-to-hub: must be owner/name, as a repository on the Hub is called",
        (TOKEN, ""): "--push-to-hub: must be owner/name, as a repository on the Hub is called",
    }
    for (token, repository), expected in cases.items():
        done = worker.run(*train, *missing, repository, token=token)
        assert done.status == 2
        assert done.errors.startswith(f"error: {expected}")
        assert done.errors.count("\n") == 1
    assert {request.path for request in hub.requests} == {"/api/whoami-v2"}
    assert list((tmp_path / "out").iterdir()) == []
    done = worker.run(*train, *missing, "tester/x", "--dry-run", token="")
    assert done.status == 0, "a plan needs no Hub"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["RUN", "./out"], "REPO: must be owner/name"),
        (["RUN", "me/x", "--checkpoint", "first"], "--checkpoint: must be one of last, best, got 'first'"),
        (["RUN", "me/x", "--dtype", "int8"], "--dtype: must be one of float32, bfloat16, float16, got 'int8'"),
        (["RUN", "me/x", "--licence", "My own"], "--licence: must be the Hub's name of a licence"),
        (["RUN", NAME, "--licence", "apache"], "REPO: tester/model: the Hub knows no licence 'apache'"),
        (["RUN", "me/x"], "REPO: me/x: the token in HF_TOKEN is tester's, who may not write to me"),
        (["nothing", NAME], "'nothing': there is no such run or checkpoint"),
        (["RUN", NAME, "--dry-run", "--output", "."], ".: exists already; nothing is overwritten"),
        (["BARE", NAME, "--dry-run"], "lies in no run's folder; give a folder for the upload with --output"),
    ],
)
def test_mistakes_on_the_command_line(
    trained: Trained, worker: Worker, tmp_path: Path, words: list[str], expected: str
) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for file in (trained.run.folder / "latest").iterdir():
        (bare / file.name).write_bytes(file.read_bytes())
    places = {"RUN": str(trained.run.folder), "BARE": str(bare)}
    done = worker.run("isobatch", "push", *(places.get(word, word) for word in words))
    assert done.status == 2
    assert done.errors.startswith("error: ")
    assert expected in done.errors
    assert done.errors.count("\n") == 1


def test_the_base_model_is_found_over_the_runs_in_between(tmp_path: Path) -> None:
    """An import from the Hub counts, one from a folder does not; a run that starts from itself is no loop."""
    imported = event(0, "import", source="openai-community/gpt2", revision="abc")
    first = write_run(tmp_path / "first", [imported], {})
    second = write_run(tmp_path / "second", [], {"init_from": str(first / "step_00000000")})
    third = write_run(tmp_path / "third", [begin(0, "start", 1)], {"init_from": str(second / "latest")})
    local = write_run(tmp_path / "local", [event(0, "import", source="/here", revision=None)], {})
    loop = write_run(tmp_path / "loop", [], {"init_from": str(tmp_path / "loop" / "latest")})
    gone = write_run(tmp_path / "gone", [], {"init_from": str(tmp_path / "nowhere" / "latest")})
    for run in (first, second, third):
        assert base_model_of(run) == "openai-community/gpt2"
    for other in (local, loop, gone, None):
        assert base_model_of(other) is None


@pytest.mark.slow
def test_dry_run_builds_the_folder_alone(trained: Trained, worker: Worker) -> None:
    """Without a token; a checkpoint in a run's folder; in bfloat16; without a tokenizer that is said."""
    (trained.place.datasets / "data" / "tokenizer.json").rename(trained.place.datasets / "data" / "aside.json")
    trained.hub.requests.clear()
    done = worker.run(
        *(
            "isobatch",
            "push",
            trained.run.folder / "step_00000008",
            "someone/model",
            "--dry-run",
            "--dtype",
            "bfloat16",
        ),
        *("--datasets", trained.place.datasets),
        token="",
    )
    (trained.place.datasets / "data" / "aside.json").rename(trained.place.datasets / "data" / "tokenizer.json")
    folder = trained.run.folder / "hub"
    assert done.status == 0, done.errors
    assert done.output == f"{folder}\n"
    assert "without a tokenizer: the run has none" in done.errors
    assert trained.hub.requests == []
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    assert not (folder / "tokenizer.json").exists()
    assert "after step 8 of 10" in (folder / "README.md").read_text()
    assert not re.search("AutoTokenizer", (folder / "README.md").read_text())
