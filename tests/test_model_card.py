"""The model's page: its metadata as the Hub reads them, and what a reader wants to know."""

import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from recorded_runs import begin, event, full_run, train_row, validation_row, write_run
from small_configs import small_config

from model.gpt import parameter_count
from training.hub.model_card import Described, model_card
from training.metrics_file import read_metrics

DATASET = {"source": "A book", "licence": "CC0-1.0", "kind": "packed", "fingerprint": "f" * 64}


def described(folder: Path, **changes: Any) -> Described:
    """The run of 20 steps as `recorded_runs` has it, on data from the Hub."""
    config = changes.pop("config", None) or small_config(
        data={"dataset": "owner/tokens"}, interventions=["gradient-clipping", "no-dropout"]
    )
    folder.mkdir(exist_ok=True)
    facts = {"repository": "me/model", "run": "my-run", "step": 20, "check": "by hand", "dataset": DATASET}
    metrics = changes.pop("metrics", None) or read_metrics(full_run(folder / "run") / "metrics.jsonl")
    descriptions = {"no-dropout": "Trains without dropout."}
    return Described(**{**facts, "config": config, "metrics": metrics, "interventions": descriptions, **changes})


def parts(card: str) -> tuple[dict[str, Any], str]:
    """The metadata, with no value that says nothing, and the text."""
    match = re.fullmatch(r"---\n(.*?)\n---\n(.*)", card, flags=re.DOTALL)
    assert match
    assert not re.search(r"null|nan|~|inf\b", match[1], flags=re.IGNORECASE)
    assert "TODO" not in card
    assert "None" not in card
    metadata = yaml.safe_load(match[1])
    assert isinstance(metadata, dict)
    return metadata, match[2]


def test_the_metadata_of_a_finished_run(tmp_path: Path) -> None:
    metadata, _ = parts(model_card(described(tmp_path, licence="apache-2.0")))
    results = metadata.pop("model-index")
    assert metadata == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "license": "apache-2.0",
        "datasets": ["owner/tokens"],
        "metrics": ["perplexity"],
        "tags": ["gpt2", "isobatch"],
    }
    [model] = results
    [result] = model["results"]
    assert model["name"] == "model"
    assert result["task"]["type"] == "text-generation"
    assert result["dataset"] == {
        "name": "owner/tokens",
        "type": "owner/tokens",
        "split": "validation",
        "revision": "abc123",
    }
    values = {metric["type"]: metric["value"] for metric in result["metrics"]}
    assert values == {"loss": 4.2, "perplexity": pytest.approx(math.exp(4.2)), "bits_per_byte": 1.27}


def test_the_text_says_what_a_reader_wants(tmp_path: Path) -> None:
    config = small_config(data={"dataset": "owner/tokens"}, interventions=["gradient-clipping", "no-dropout"])
    _, text = parts(model_card(described(tmp_path, config=config)))
    for said in (
        "# model",
        f"{parameter_count(config.model):,} parameters, trained from scratch on 20,480 tokens of owner/tokens with Iso",
        "in the run `my-run`; this is its state after step 20 of 20",
        "How the export was checked: by hand.",
        'AutoModelForCausalLM.from_pretrained("me/model")',
        "isobatch import me/model --name NAME",
        "| Validation perplexity | 66.6863 |",
        "![Training and validation loss](loss.png)",
        "[owner/tokens](https://huggingface.co/datasets/owner/tokens)",
        "| Revision | `abc123` |",
        "| Source | A book |",
        "| Licence of the data | CC0-1.0 |",
        "| box 2 | cpu | 2.13.0 | 4,096 tokens/s |",
        "| Training time | 7.5 s |",
        "| `no-dropout` | Trains without dropout. |",
        "| `gradient-clipping` |  |",
        "`optimizer.betas`",
        "It was not trained to follow instructions.",
        "Its author has stated no licence for the weights.",
        "vocab_size: 2048",
    ):
        assert said in text
    titles = re.findall(r"^## (.+)$", text, flags=re.MULTILINE)
    assert titles == [
        "Use",
        "Results",
        "Charts",
        "Architecture",
        "Training data",
        "Training",
        "Layouts and machines",
        "Changed on the way",
        "Interventions",
        "Limits",
        "Licence",
        "Training config",
    ]


def test_only_what_is_on_the_hub_is_linked_to_it(tmp_path: Path) -> None:
    """`datasets` holds Hub ids alone, and `base_model` is there only where the weights came from the Hub."""
    config = small_config(data={"dataset": "python-library"}, init_from="checkpoints/other/latest")
    metadata, text = parts(model_card(described(tmp_path, config=config)))
    assert "datasets" not in metadata
    assert "base_model" not in metadata
    assert "license" not in metadata
    assert "| Dataset | `python-library` |" in text
    assert "trained from the weights of the run `other` on 20,480 tokens" in text
    source = [{"repository": "lab/books", "revision": "c0ffee", "files": ["a.parquet"]}]
    more = described(tmp_path / "2", config=config, dataset={"source": source}, base_model="openai-community/gpt2")
    metadata, text = parts(model_card(more))
    assert metadata["datasets"] == ["lab/books"]
    assert metadata["base_model"] == "openai-community/gpt2"
    assert "| Source | [lab/books](https://huggingface.co/datasets/lab/books), revision `c0ffee` |" in text
    assert "from the weights of [openai-community/gpt2](https://huggingface.co/openai-community/gpt2)" in text


def test_an_earlier_checkpoint_is_described_by_its_own_results(tmp_path: Path) -> None:
    metadata, text = parts(model_card(described(tmp_path, step=15)))
    values = [metric["value"] for metric in metadata["model-index"][0]["results"][0]["metrics"]]
    assert values == [pytest.approx(math.log(64), abs=1e-6), 64, 1.25]
    assert "15,360 tokens" in text
    assert "after step 15 of 20" in text


@pytest.mark.parametrize("commit", [None, "c0ffee"])
def test_an_imported_model_was_trained_elsewhere(tmp_path: Path, commit: str | None) -> None:
    source = "owner/other" if commit else "/home/me/exported"
    rows = [event(0, "import", source=source, revision=commit, format="transformers")]
    metrics = read_metrics(write_run(tmp_path / "run", rows) / "metrics.jsonl")
    _, text = parts(model_card(described(tmp_path, metrics=metrics, step=0)))
    linked = "[owner/other](https://huggingface.co/owner/other), revision `c0ffee`"
    assert f"imported from {linked if commit else 'a folder'}; how it was trained is said there" in text
    assert "/home/me" not in text
    for untrue in ("initial weights", "## Charts", "## Training", "## Interventions", "optimizer:"):
        assert untrue not in text
    assert "vocab_size: 2048" in text


def test_data_of_many_files_and_of_documents(tmp_path: Path) -> None:
    files = [{"file": f"{number}.txt", "bytes": 7} for number in range(168)]
    dataset = {**DATASET, "source": files, "kind": "documents"}
    _, text = parts(model_card(described(tmp_path, dataset=dataset)))
    assert text.count("| Source | `") == 20
    assert "| Source | and 148 more, which dataset.json of the data names |" in text
    assert "only the responses are targets" in text
    assert "documents |" in text
    assert "give it a prompt in the same form" in text
    assert "It was not trained to follow instructions" not in text


@pytest.mark.parametrize("loss", [None, 800.0])
def test_results_that_are_no_numbers_are_left_out(tmp_path: Path, loss: float | None) -> None:
    rows = [begin(0, "start", 1), train_row(20), validation_row(20, loss), event(20, "finished", seconds=1.0)]
    metrics = read_metrics(write_run(tmp_path / "run", rows) / "metrics.jsonl")
    metadata, _ = parts(model_card(described(tmp_path, metrics=metrics)))
    if loss is None:
        assert "model-index" not in metadata
        assert "metrics" not in metadata
    else:
        assert [one["type"] for one in metadata["model-index"][0]["results"][0]["metrics"]] == ["loss"]


def test_a_checkpoint_without_a_run_or_a_tokenizer(tmp_path: Path) -> None:
    facts = described(tmp_path)
    bare = Described("me/model", "step_00000000", 0, facts.config, None, "by hand", has_tokenizer=False)
    metadata, text = parts(model_card(bare))
    assert "datasets" not in metadata
    assert "parameters, with its initial weights. It loads" in text
    assert "## Training data" not in text
    assert "AutoTokenizer" not in text
    assert "loss.png" not in text
    metadata, text = parts(model_card(dataclasses.replace(bare, base_model="openai-community/gpt2")))
    assert metadata["base_model"] == "openai-community/gpt2"
    assert "with the weights of [openai-community/gpt2](" in text
    assert "there is none here either" in text
