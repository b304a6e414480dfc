"""The page of a dataset on the Hub (README.md), and how a dataset's source and licence are written down."""

import math
import re
from dataclasses import dataclass, field
from typing import Any

from training.errors import one_line
from training.hub.card_text import REPOSITORY_ID, code, escaped, linked, page
from training.preparation.check_dataset import CheckedDataset
from training.report_sections import table

LICENCES = (
    *("apache-2.0", "mit", "bsd-2-clause", "bsd-3-clause", "gpl-2.0", "gpl-3.0", "lgpl-3.0", "gfdl", "unlicense"),
    *("cc0-1.0", "cc-by-3.0", "cc-by-4.0", "cc-by-sa-3.0", "cc-by-sa-4.0", "cc-by-nc-4.0", "cc-by-nc-sa-4.0"),
    *("odc-by", "odbl", "pddl"),
)
"""Of the Hub's names of licences those that are common for texts; each is also the licence's SPDX name."""


@dataclass(frozen=True)
class DescribedDataset:
    """All that a dataset's card is written from."""

    repository: str
    name: str
    checked: CheckedDataset
    """What its files hold."""
    description: dict[str, Any] = field(default_factory=dict)
    """Its dataset.json, where there is one."""
    licence: str | None = None
    """As the Hub calls it; None = that of the description."""


def dataset_card(dataset: DescribedDataset) -> str:
    """The text of README.md, metadata included."""
    sections = [
        [f"# {dataset.repository.partition('/')[2]}", "", _summary(dataset)],
        _use_section(dataset),
        _split_section(dataset),
        _source_section(dataset),
        ["## Licence", "", _licence_text(dataset)],
    ]
    text = "\n\n".join("\n".join(section) for section in sections if section)
    return page(_metadata(dataset), text)


def source_lines(source: Any) -> list[str]:
    """Where a dataset is from, as its dataset.json says: a text, files, or repositories on the Hub; in Markdown."""
    entries = source if isinstance(source, list) else [source]
    lines = []
    for entry in entries:
        if isinstance(entry, dict) and entry.get("repository"):
            link, revision = linked(entry["repository"], "datasets/"), entry.get("revision")
            lines.append(f"{link}, revision {code(revision)}" if revision else link)
        elif isinstance(entry, dict) and entry.get("file"):
            size = entry.get("bytes")
            lines.append(code(entry["file"]) + (f" ({size:,} bytes)" if isinstance(size, int) else ""))
        elif entry:
            lines.append(escaped(entry))
    return lines


def source_repositories(source: Any) -> list[str]:
    """The datasets on the Hub among the sources; what is no name of one is left out."""
    entries = source if isinstance(source, list) else [source]
    names = [str(entry["repository"]) for entry in entries if isinstance(entry, dict) and entry.get("repository")]
    return list(filter(REPOSITORY_ID.fullmatch, names))


def _metadata(dataset: DescribedDataset) -> str:
    from huggingface_hub import DatasetCardData

    licence: dict[str, Any] = _licence(dataset)
    data = DatasetCardData(
        pretty_name=one_line(dataset.name),
        task_categories=["text-generation"],
        size_categories=_size(dataset),
        tags=["isobatch", "tokenized"],
        viewer=False,  # there is nothing to see in numbers
        **licence,
    )
    return data.to_yaml().strip()


def _licence(dataset: DescribedDataset) -> dict[str, str]:
    """The metadata of the licence: the Hub's name of it, or `other` with a name of its own."""
    stated = dataset.licence or dataset.description.get("licence")
    if not stated:
        return {}
    if dataset.licence or stated.lower() in LICENCES:
        return {"license": stated.lower()}
    return {"license": "other", "license_name": re.sub(r"[^a-z0-9.]+", "-", stated.lower()).strip("-.")[:60]}


def _size(dataset: DescribedDataset) -> str | None:
    """The Hub's class of so many documents."""
    documents = sum(found.documents or found.ends_of_text or 0 for found in dataset.checked.splits.values())
    if not documents:
        return None
    names = ["n<1K", "1K<n<10K", "10K<n<100K", "100K<n<1M", "1M<n<10M", "10M<n<100M", "100M<n<1B"]
    return names[min(max(int(math.log10(documents)) - 2, 0), len(names) - 1)]


def _summary(dataset: DescribedDataset) -> str:
    total = sum(found.tokens for found in dataset.checked.splits.values())
    form = (
        "Each document is a sequence of its own; with prompts and responses, only the responses are targets."
        if any(found.documents is not None for found in dataset.checked.splits.values())
        else "Documents follow one another in a long row, each with the end of text behind it."
    )
    return f"{total:,} tokens for training language models with Isobatch, ready to be read. {form}"


def _use_section(dataset: DescribedDataset) -> list[str]:
    config = (
        f"base: tiny                    # or another config: how to train\ndata:\n  dataset: {dataset.repository}\n"
        "  revision: main              # a commit's sha instead: these tokens and no later ones\n"
        "  train_tokens: -1            # all there are\n  validation_tokens: -1"
    )
    size = f"\nmodel:\n  vocab_size: {dataset.checked.vocab_size}" if dataset.checked.vocab_size else ""
    return ["## Train on it", "", "In a run's config:", "", f"```yaml\n{config}{size}\n```"]


def _split_section(dataset: DescribedDataset) -> list[str]:
    rows = []
    for split, found in dataset.checked.splits.items():
        documents = found.documents if found.documents is not None else found.ends_of_text
        stated = (dataset.description.get("splits") or {}).get(split) or {}
        size = f"{stated['bytes']:,}" if isinstance(stated.get("bytes"), int) else "not known"
        counted = "not known" if documents is None else f"{documents:,}"
        rows.append((f"`{split}.safetensors`", f"{found.tokens:,}", counted, size, f"`{found.sha256}`"))
    titles = ("File", "Tokens", "Documents", "Bytes of text", "sha256")
    facts = [("Vocabulary", dataset.checked.vocab_size), ("End of text", dataset.checked.end_of_text)]
    facts.append(("Fingerprint", dataset.description.get("fingerprint")))
    known = [(name, code(value)) for name, value in facts if value is not None]
    return ["## Contents", "", *table(titles, rows), "", *(table(("", ""), known) if known else [])]


def _source_section(dataset: DescribedDataset) -> list[str]:
    lines = source_lines(dataset.description.get("source"))
    return ["## Source", "", *(f"- {line}" for line in lines)] if lines else []


def _licence_text(dataset: DescribedDataset) -> str:
    stated = dataset.licence or dataset.description.get("licence")
    return f"{escaped(stated)}." if stated else "Whoever uploaded it has stated none; that of the source holds."
