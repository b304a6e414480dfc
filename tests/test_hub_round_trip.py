"""To the Hub and back: train, push, download elsewhere, load with transformers, the same text."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPOSITORY, Finished, Workplace
from fake_hub import TOKEN, FakeHub
from small_push import PUSHED, prepare_push

from model.generation import generate
from training.config_file import load_run_config
from training.metrics_file import read_metrics
from training.restore import load_model
from training.run_folder import open_run
from training.tokenizer import load_tokenizer

NAME = "tester/model"
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


@pytest.mark.slow
def test_train_push_download_and_the_same_text(tmp_path: Path) -> None:
    """Two processes train and push with git-lfs; then the best is pushed again by Xet."""
    place = Workplace(tmp_path / "here")
    place.folder.mkdir()
    config, _ = prepare_push(place)
    with FakeHub() as hub:
        place.environment = hub.environment(tmp_path / "home", HF_TOKEN=TOKEN)
        run = place.train(config, "--push-to-hub", NAME, "--set", "hub.every=4", processes=2)
        assert run.status == 0, run.errors
        check_what_was_pushed(hub, run)
        check_elsewhere(hub, run, config, tmp_path)
    push_by_xet(hub, run, place.datasets, tmp_path)


def check_what_was_pushed(hub: FakeHub, run: Finished) -> None:
    """R87: two ranks make one repository and one commit.

    R84: the token is nowhere but in the requests; R88: optimizer state is not in the model's branch.
    """
    assert hub.count("GET", "/api/whoami-v2") == 1
    assert hub.count("POST", "/api/repos/create") == 1
    assert hub.count("POST", "/commit/main") == 1
    assert hub.repositories["model", NAME].private
    assert hub.titles("model", NAME) == ["added", "run, step 10"]
    assert hub.files("model", NAME) == PUSHED
    [pushed] = [event for event in run.of_kind("event") if event["event"] == "pushed"]
    assert pushed["repository"] == NAME
    assert pushed["commit"] == hub.repositories["model", NAME].refs["main"]
    for path in run.folder.rglob("*"):
        assert not path.is_file() or TOKEN.encode() not in path.read_bytes(), path
    assert TOKEN not in run.output + run.errors
    last = hub.requests.index(next(r for r in hub.requests if r.path == "/api/whoami-v2"))
    assert last == 0, "before anything else"


def check_elsewhere(hub: FakeHub, run: Finished, config: Path, tmp_path: Path) -> None:
    """The card's own code runs as it stands; and the branch with the state is a run that can go on."""
    state = tmp_path / "state" / "run"
    words = [sys.executable, "-c", ELSEWHERE, str(tmp_path / "model"), "Every effort", str(state)]
    environment = {**hub.environment(tmp_path / "other"), "HF_TOKEN": TOKEN, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(words, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Every effort moves you")
    ours = load_model(run.folder / "latest")
    tokenizer = load_tokenizer(config.parent / "datasets" / "data" / "tokenizer.json")
    ids = tokenizer.encode("Every effort").ids
    greedy = generate(ours, ids, 20, 0.0, None, 0, 269)
    assert json.loads(done.stdout.split("greedy: ")[1])[: len(greedy)] == greedy

    assert sorted(path.name for path in state.glob("[!.]*")) == ["config.yaml", "metrics.jsonl", "step_00000008"]
    opening = open_run(
        state, load_run_config(str(config), [f"hub.repo={NAME}", "hub.every=4"]), "latest", overwrite=False
    )
    assert (opening.checkpoint, opening.changed) == ("step_00000008", {})
    assert read_metrics(state / "metrics.jsonl").train[-1]["step"] == 8


def push_by_xet(first: FakeHub, run: Finished, datasets: Path, tmp_path: Path) -> None:
    """The command in a process of its own, with what may be chosen: and all but the page and records is the same."""
    with FakeHub(tmp_path / "xet") as hub:
        words = ["isobatch", "push", str(run.folder), "tester/best", "--checkpoint", "best", "--public"]
        words += ["--licence", "mit", "--datasets", str(datasets)]
        environment = {**hub.environment(tmp_path / "third", HF_TOKEN=TOKEN), "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, "tests/impatient.py", *words]
        done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout == ""
        assert not hub.repositories["model", "tester/best"].private
        assert hub.files("model", "tester/best") == PUSHED
        assert hub.head("model", "tester/best").files["model.safetensors"].xet_hash
        best = json.loads((run.folder / "best" / "state.json").read_text())["step"]
        assert hub.titles("model", "tester/best")[-1] == f"run, step {best}"
        for file in PUSHED:
            content = hub.read("model", "tester/best", file)
            assert content == (run.folder / "hub" / file).read_bytes()
            if file not in ("README.md", "metrics.jsonl", "config.yaml") and best == 10:
                assert content == first.read("model", NAME, file)
        assert "license: mit" in hub.read("model", "tester/best", "README.md").decode()
