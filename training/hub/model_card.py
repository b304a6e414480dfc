"""The page of a model on the Hub (README.md): what it is, how to use it, how it was made, and metadata for the Hub."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from model.gpt import parameter_count
from training.config import RunConfig, config_mapping
from training.hub.card_text import code, escaped, linked, page
from training.hub.dataset_card import source_lines, source_repositories
from training.metrics_file import Metrics
from training.report_sections import change_section, chart_section, duration, fenced, place_section, table
from training.yaml_reader import yaml_text

if TYPE_CHECKING:
    import numpy as np
    from huggingface_hub import EvalResult

MOST_SOURCES = 20
MOST_LOSS = 30.0  # of which the perplexity is worth a number; exp() of a loss that has exploded overflows
USE = """\
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{repository}")
model = AutoModelForCausalLM.from_pretrained("{repository}")
inputs = tokenizer("{prompt}", return_tensors="pt")
output = model.generate(**inputs, max_new_tokens={new_tokens}, do_sample=True, top_k=50, temperature=0.8)
print(tokenizer.decode(output[0]))"""
USE_WITHOUT_TOKENIZER = """\
import torch
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("{repository}")
ids = torch.tensor([[1, 2, 3]])  # of the tokenizer that the training data was made with
print(model.generate(ids, max_new_tokens={new_tokens}, do_sample=True, top_k=50, temperature=0.8))"""
LIMITS = """\
A small language model that continues text. {tuned}It states falsehoods as readily as facts, repeats what is harmful \
or one-sided in its training data, and knows nothing beyond that data. Texts are limited to {context:,} tokens, prompt \
and continuation together. It has had no safety training; do not rely on it where an error would matter."""


@dataclass(frozen=True)
class Described:
    """All that a card is written from."""

    repository: str
    run: str
    step: int
    """Of the checkpoint."""
    config: RunConfig
    metrics: Metrics | None
    """None: the checkpoint lies in no run."""
    check: str
    """How the export was verified: a sentence."""
    dataset: dict[str, Any] = field(default_factory=dict)
    """The dataset's dataset.json, where there is one."""
    interventions: dict[str, str] = field(default_factory=dict)
    """What each of the run's interventions does."""
    has_tokenizer: bool = True
    licence: str | None = None
    """As the Hub calls it."""
    base_model: str | None = None
    """The repository whose weights the run started from."""

    @property
    def on_hub(self) -> bool:
        """Whether the data came from the Hub, rather than from a folder of that name."""
        return "/" in self.config.data.dataset and self.revision is not None

    @property
    def revision(self) -> str | None:
        """The commit of the dataset on the Hub."""
        begins = self.metrics.events_named("start", "resume") if self.metrics else []
        revision = begins[-1].get("dataset_revision") if begins else None
        return None if revision is None else str(revision)

    @property
    def imported(self) -> str | None:
        """Where the run's model was imported from: a repository or a folder; in words."""
        events = self.metrics.events_named("import") if self.metrics else []
        if not events:
            return None
        repository, commit = events[-1]["source"], events[-1]["revision"]
        if commit is None:
            return "a folder"  # whose name says nothing elsewhere
        return f"{linked(repository)}, revision {code(commit)}"

    def validation(self) -> "np.void | None":
        """The validation of this checkpoint."""
        if self.metrics is None:
            return None
        rows = self.metrics.validation
        rows = rows[rows["step"] == self.step]
        row: np.void | None = rows[0] if len(rows) and math.isfinite(rows[0]["loss"]) else None
        return row


def model_card(model: Described) -> str:
    """The text of README.md, metadata included."""
    trained = _tokens_seen(model)
    sections = [
        [f"# {model.repository.partition('/')[2]}", "", _summary(model)],
        _use_section(model),
        _result_section(model),
        chart_section() if trained else [],
        _architecture_section(model),
        *([_data_section(model), _training_section(model)] if trained else []),
        place_section(model.metrics) if trained and model.metrics else [],
        change_section(model.metrics) if trained and model.metrics else [],
        _intervention_section(model) if trained else [],
        ["## Limits", "", _limits(model)],
        ["## Licence", "", _licence(model)],
        _config_section(model),
    ]
    text = "\n\n".join("\n".join(section) for section in sections if section)
    return page(_metadata(model), text)


# Metadata


def _metadata(model: Described) -> str:
    from huggingface_hub import ModelCardData

    results = _eval_results(model)
    data = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        license=model.licence,
        base_model=model.base_model,
        datasets=_datasets(model) or None,
        metrics=["perplexity"] if results else None,
        tags=["gpt2", "isobatch"],
        model_name=model.repository.partition("/")[2] if results else None,
        eval_results=results or None,
    )
    return data.to_yaml().strip()


def _datasets(model: Described) -> list[str]:
    """Those on the Hub: what was trained on, and what that was prepared from."""
    if not _tokens_seen(model):
        return []
    own = [model.config.data.dataset] if model.on_hub else []
    return [*own, *source_repositories(model.dataset.get("source"))]


def _eval_results(model: Described) -> list["EvalResult"]:
    from huggingface_hub import EvalResult

    dataset = model.config.data.dataset
    return [
        EvalResult(
            task_type="text-generation",
            task_name="Text generation",
            dataset_type=dataset,
            dataset_name=dataset,
            dataset_split="validation",
            dataset_revision=model.revision if model.on_hub else None,
            metric_type=kind,
            metric_name=name,
            metric_value=round(value, 6),
        )
        for kind, name, value in _measures(model)
    ]


def _measures(model: Described) -> list[tuple[str, str, float]]:
    """(the Hub's name, ours, value) of what was measured of this checkpoint, where it is finite."""
    row = model.validation()
    if row is None:
        return []
    loss, bits = float(row["loss"]), float(row["bits_per_byte"])
    measures = [("loss", "Validation loss (nats per token)", loss)]
    if loss < MOST_LOSS:
        measures.append(("perplexity", "Validation perplexity", math.exp(loss)))
    return [*measures, *([("bits_per_byte", "Validation bits per byte", bits)] if math.isfinite(bits) else [])]


# Sections


def _summary(model: Described) -> str:
    parameters, tokens = parameter_count(model.config.model), _tokens_seen(model)
    begun_with = model.config.init_from
    begun_run = Path(begun_with).parent.name if begun_with else None  # no path of a machine
    origin = f"the weights of the run {code(begun_run)}" if begun_run else None
    if model.base_model:
        origin = f"the weights of {linked(model.base_model)}"
    if tokens:
        begun = f"from {origin or 'scratch'}"
        made = f"trained {begun} on {tokens:,} tokens of {escaped(model.config.data.dataset)} with Isobatch, in the run"
        made += f" {code(model.run)}; this is its state after step {model.step:,}{_of_total(model)}"
    elif model.imported:
        made = f"imported from {model.imported}; how it was trained is said there"
    else:
        made = f"with {origin or 'its initial weights'}"
    return (
        f"A GPT-2-style language model with {parameters:,} parameters, {made}. It loads without remote code."
        f"\n\nHow the export was checked: {escaped(model.check)}."
    )


def _tokens_seen(model: Described) -> int | None:
    if model.metrics is None:
        return None
    rows = model.metrics.train[model.metrics.train["step"] <= model.step]
    return int(rows[-1]["tokens"]) if len(rows) else None


def _of_total(model: Described) -> str:
    begins = model.metrics.events_named("start", "resume") if model.metrics else []
    total = begins[-1].get("total_steps") if begins else None
    return f" of {total:,}" if total else ""


def _use_section(model: Described) -> list[str]:
    code = USE if model.has_tokenizer else USE_WITHOUT_TOKENIZER
    new_tokens = max(1, min(40, model.config.model.context_length // 2))
    text = code.format(repository=model.repository, prompt="Every effort moves you", new_tokens=new_tokens)
    section = ["## Use", "", fenced(text, "python")]
    if not model.has_tokenizer:
        section += ["", "The training data came without a tokenizer, so there is none here either."]
    if model.dataset.get("kind") == "documents":
        section += ["", "It continues what is written like its training data: give it a prompt in the same form."]
    back = f"isobatch import {model.repository} --name NAME"
    return [*section, "", f"To evaluate, sample or fine-tune it with Isobatch: `{back}`."]


def _result_section(model: Described) -> list[str]:
    rows = [(name, f"{value:,.4f}") for _, name, value in _measures(model)]
    if not rows:
        return []
    row = model.validation()
    assert row is not None, "what was measured was measured on something"
    whole = f"Over {row['target_tokens']:,} target tokens of the validation split, each weighing the same."
    return ["## Results", "", *table(("", f"Step {model.step:,}"), rows), "", whole]


def _architecture_section(model: Described) -> list[str]:
    shape = model.config.model
    rows = [
        ("Parameters", f"{parameter_count(shape):,}"),
        ("Layers, heads, width", f"{shape.n_layers}, {shape.n_heads}, {shape.emb_dim}"),
        ("Context", f"{shape.context_length:,} tokens, learned positions"),
        ("Vocabulary", f"{shape.vocab_size:,}"),
        ("Output head", "the token embedding" if shape.tie_weights else "a matrix of its own"),
        ("Query, key and value biases", "yes" if shape.qkv_bias else "no (written as zeros)"),
        ("Block", "LayerNorm first, tanh GELU, MLP four times as wide"),
        ("Dropout in training", f"{shape.dropout:g}"),
    ]
    return ["## Architecture", "", *table(("", ""), rows)]


def _data_section(model: Described) -> list[str]:
    data, dataset = model.config.data, model.dataset
    name = linked(data.dataset, "datasets/") if model.on_hub else code(data.dataset)
    rows = [("Dataset", name)]
    if model.revision:
        rows.append(("Revision", code(model.revision)))
    if tokens := _tokens_seen(model):
        passes = f"{data.epochs} {'pass' if data.epochs == 1 else 'passes'}"
        rows.append(
            ("Tokens trained on", f"{tokens:,}, {passes} planned, {'shuffled' if data.shuffle else 'in order'}")
        )
    sources = source_lines(dataset.get("source"))
    rows += [("Source", line) for line in sources[:MOST_SOURCES]]
    if len(sources) > MOST_SOURCES:
        rows.append(("Source", f"and {len(sources) - MOST_SOURCES:,} more, which dataset.json of the data names"))
    if dataset.get("kind") == "documents":
        rows.append(("Sequences", "one for each document; with prompts and responses, only the responses are targets"))
    for title, key in (("Licence of the data", "licence"), ("Fingerprint", "fingerprint")):
        if value := dataset.get(key):
            rows.append((title, escaped(value)))
    if data.tokenizer:
        rows.append(("Tokenizer", code(data.tokenizer)))
    return ["## Training data", "", *table(("", ""), rows)]


def _training_section(model: Described) -> list[str]:
    config = model.config
    optimizer, schedule = config.optimizer, config.schedule
    clipping = "off" if optimizer.clip_norm is None else f"at norm {optimizer.clip_norm:g}"
    documents = model.dataset.get("kind") == "documents"
    sequences = "documents" if documents else f"sequences, {config.tokens_per_step:,} tokens"
    rows = [
        ("Steps", f"{model.step:,}{_of_total(model)}"),
        ("Global batch", f"{config.global_batch:,} {sequences}"),
        (
            "Optimizer",
            f"AdamW, learning rate {optimizer.learning_rate:g}, betas {optimizer.betas[0]:g}, {optimizer.betas[1]:g}, "
            f"weight decay {optimizer.weight_decay:g} on {optimizer.decay}, clipping {clipping}",
        ),
        ("Schedule", ", ".join(f"{value} {key}" for key, value in schedule.model_dump().items()).replace(" name", "")),
        ("Precision", f"autocast {config.precision.amp}, float32 products {config.precision.matmul}"),
        ("Loss reduction, reproducibility", f"{config.loss.reduction}, {config.reproducibility}"),
        ("Seeds", f"weights {config.seeds.weights}, training {config.seeds.training}"),
    ]
    if model.metrics is not None and len(model.metrics.train):
        last = model.metrics.train[model.metrics.train["step"] <= model.step][-1:]
        rows += [("Training time", duration(float(row["seconds"]))) for row in last]
    return ["## Training", "", *table(("", ""), rows)]


def _config_section(model: Described) -> list[str]:
    config = config_mapping(model.config)
    if not _tokens_seen(model) and model.imported:  # the rest of an import's config was never trained with
        config = {"model": config["model"]}
    return ["## Config" if len(config) == 1 else "## Training config", "", fenced(yaml_text(config), "yaml")]


def _intervention_section(model: Described) -> list[str]:
    names = model.config.interventions
    rows = [(f"`{name}`", model.interventions.get(name, "")) for name in names]
    return ["## Interventions", "", *table(("Name", "What it changes"), rows)] if rows else []


def _limits(model: Described) -> str:
    tuned = "" if model.dataset.get("kind") == "documents" else "It was not trained to follow instructions. "
    return LIMITS.format(tuned=tuned, context=model.config.model.context_length)


def _licence(model: Described) -> str:
    data = model.dataset.get("licence")
    about_data = f" The training data's licence is {escaped(data)}." if data else ""
    own = f"The weights: {model.licence}." if model.licence else "Its author has stated no licence for the weights."
    return own + about_data
