"""The dataset's page: its metadata as the Hub reads them, and what a reader wants to know."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from training.config_file import load_run_config
from training.hub.card_text import SIGNED, is_ours
from training.hub.dataset_card import DescribedDataset, dataset_card
from training.preparation.check_dataset import CheckedDataset, CheckedSplit

DESCRIPTION = {
    "source": [
        {"repository": "lab/books", "revision": "c0ffee", "files": ["a.parquet"]},
        {"file": "more.txt", "bytes": 12345, "sha256": "0" * 64},
    ],
    "licence": "CC0-1.0",
    "fingerprint": "f" * 64,
    "splits": {"train": {"bytes": 4_000_000}, "validation": {}},
}


def checked(documents: int | None = None, ends: int | None = 2500, **changes: Any) -> CheckedDataset:
    splits = {
        "train": CheckedSplit(1_000_000, "a" * 64, 99, ends, documents),
        "validation": CheckedSplit(5_000, "b" * 64, 98, ends and 10, documents and 10),
    }
    return CheckedDataset("folder", **{"vocab_size": 100, "end_of_text": 99, "splits": splits, **changes})


def card(**changes: Any) -> tuple[dict[str, Any], str]:
    """The metadata, with no value that says nothing, and the text."""
    facts = {"repository": "me/tokens", "name": "books", "checked": checked(), "description": DESCRIPTION, **changes}
    match = re.fullmatch(r"---\n(.*?)\n---\n(.*)", dataset_card(DescribedDataset(**facts)), flags=re.DOTALL)
    assert match
    assert not re.search(r"null|nan|~", match[1], flags=re.IGNORECASE)
    for empty in ("TODO", "None"):
        assert empty not in match[2]
    return yaml.safe_load(match[1]), match[2]


def test_metadata_and_text() -> None:
    metadata, text = card()
    assert metadata == {
        "license": "cc0-1.0",
        "pretty_name": "books",
        "size_categories": "1K<n<10K",
        "task_categories": ["text-generation"],
        "tags": ["isobatch", "tokenized"],
        "viewer": False,
    }
    assert SIGNED.sub("", text, count=1).startswith("\n# tokens\n\n1,005,000 tokens for training language models")
    for said in (
        "Documents follow one another",
        f"| `train.safetensors` | 1,000,000 | 2,500 | 4,000,000 | `{'a' * 64}` |",
        f"| `validation.safetensors` | 5,000 | 10 | not known | `{'b' * 64}` |",
        "| Vocabulary | `100` |",
        "| End of text | `99` |",
        f"| Fingerprint | `{'f' * 64}` |",
        "- [lab/books](https://huggingface.co/datasets/lab/books), revision `c0ffee`",
        "- `more.txt` (12,345 bytes)",
        "CC0-1.0.",
    ):
        assert said in text


def test_foreign_names_are_shown_and_do_nothing() -> None:
    sources = [
        {"file": "a\n# b`c\udcff.txt", "bytes": "12"},
        {"repository": "not an id!!\n---", "revision": "`x`"},
        "<script>alert(1)</script>",
    ]
    metadata, text = card(description={"source": sources, "licence": "mine\n<b>*"}, name="n: [\n")
    assert metadata["pretty_name"] == "n: [\\n"
    assert "- `` a\\n# b`c\\udcff.txt ``\n" in text
    assert "- `not an id!!\\n---`, revision `` `x` ``\n" in text
    assert "- \\<script\\>alert(1)\\</script\\>\n" in text
    assert "mine\\\\n\\<b\\>\\*." in text


def test_an_edit_of_the_page_is_noticed() -> None:
    text = dataset_card(DescribedDataset("me/tokens", "books", checked(), DESCRIPTION))
    assert is_ours(text.encode())
    assert is_ours(text.replace("\n", "\r\n").encode()), "as some editors and git store it"
    for edited in (text.replace("# tokens", "# Tokens"), text + "more", SIGNED.sub("", text), "# Mine\n"):
        assert not is_ours(edited.encode())
    assert not is_ours(b"\xff")


def test_the_config_that_it_shows_is_one(tmp_path: Path) -> None:
    _, text = card()
    [shown] = re.findall(r"```yaml\n(.*?)```", text, flags=re.DOTALL)
    path = tmp_path / "run.yaml"
    path.write_text(shown + "batch: {world_size: 1, microbatch: 1, accumulation: 1}\n")
    config = load_run_config(str(path), [])
    assert (config.data.dataset, config.data.revision) == ("me/tokens", "main")
    assert config.model.vocab_size == 100


@pytest.mark.parametrize(
    ("licence", "stated", "expected"),
    [
        (None, None, {}),
        ("mit", "CC0-1.0", {"license": "mit"}),
        (None, "Apache-2.0", {"license": "apache-2.0"}),
        (None, "PSF-2.0", {"license": "other", "license_name": "psf-2.0"}),
        (None, "My own (see page)", {"license": "other", "license_name": "my-own-see-page"}),
    ],
)
def test_licences_as_the_hub_takes_them(licence: str | None, stated: str | None, expected: dict[str, str]) -> None:
    metadata, text = card(licence=licence, description={"licence": stated})
    assert {key: value for key, value in metadata.items() if key.startswith("license")} == expected
    assert (licence or stated or "Whoever uploaded it has stated none") in text


def test_a_dataset_without_a_description_and_one_of_documents() -> None:
    metadata, text = card(checked=checked(ends=None, vocab_size=None, end_of_text=None), description={})
    assert "size_categories" not in metadata
    assert "| not known | not known |" in text
    assert "## Source" not in text
    assert "vocab_size" not in text
    _, text = card(checked=checked(documents=1_500_000))
    assert "Each document is a sequence of its own; with prompts" in text


@pytest.mark.parametrize(
    ("documents", "expected"), [(900, "n<1K"), (2_000, "1K<n<10K"), (3_000_000, "1M<n<10M"), (10**10, "100M<n<1B")]
)
def test_the_hubs_classes_of_size(documents: int, expected: str) -> None:
    assert card(checked=checked(documents=documents))[0]["size_categories"] == expected
