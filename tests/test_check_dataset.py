"""`isobatch prepare --check`: a whole dataset of every kind passes, and each damage is named, all at once."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from small_corpora import small_texts
from small_documents import write_documents

from training.errors import UserError
from training.preparation import check_dataset as module
from training.preparation.check_dataset import check_dataset
from training.preparation.corpus import Settings, prepare_documents
from training.preparation.instructions import prepare_instructions
from training.preparation.sources import find_sources
from training.preparation.vocabulary import byte_vocabulary
from training.tokenizer import train_tokenizer


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A packed dataset, and one of instructions; not to be changed."""
    folder = tmp_path_factory.mktemp("originals")
    (folder / "a.txt").write_text("\f".join(small_texts(60)))
    sources = find_sources([str(folder / "a.txt")], None, [])
    prepare_documents(sources, folder / "packed", Settings("text", "\f", 0.2, None), byte_vocabulary(), 1)
    records = [{"prompt": text[:9], "response": text[9:]} for text in small_texts(60)]
    (folder / "b.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    sources = find_sources([str(folder / "b.jsonl")], None, [])
    prepare_instructions(sources, folder / "documents", folder / "packed", 0.2)
    return folder


@pytest.fixture
def folder(tmp_path: Path, originals: Path, request: pytest.FixtureRequest) -> Path:
    """A copy of one of them."""
    name = getattr(request, "param", "packed")
    (tmp_path / name).mkdir()
    for path in (originals / name).iterdir():
        (tmp_path / name / path.name).write_bytes(path.read_bytes())
    return tmp_path / name


def problems(folder: Path) -> list[str]:
    found = check_dataset(folder).problems
    assert all(problem.startswith(str(folder)) and "\n" not in problem for problem in found)
    return [problem.removeprefix(str(folder)).removeprefix("/") for problem in found]


def change(path: Path, **tensors: Any) -> None:
    save_file({name: value for name, value in (load_file(path) | tensors).items() if value is not None}, path)


def describe(folder: Path, **values: Any) -> None:
    path = folder / "dataset.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.mark.parametrize("name", ["packed", "documents"])
def test_a_whole_dataset_is_found_whole_and_counted(
    originals: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However large the parts are that it is read in."""
    for size in (7, 1000, 2**23):
        monkeypatch.setattr(module, "CHECKED_AT_ONCE", size)
        checked = check_dataset(originals / name)
        assert checked.problems == []
        assert (checked.vocab_size, checked.end_of_text, checked.described) == (257, 256, True)
        description = json.loads((originals / name / "dataset.json").read_text())
        for split, entry in description["splits"].items():
            found = checked.splits[split]
            assert (found.tokens, found.sha256, found.ends_of_text) == (
                entry["tokens"], entry["sha256"], entry["documents"],
            )  # fmt: skip
            assert found.documents == (entry["documents"] if name == "documents" else None)
            assert found.targets == entry.get("targets")
    assert checked.summary.startswith(f"{originals / name}: is whole: train {checked.splits['train'].tokens:,} tokens")
    assert checked.summary.endswith(" in a vocabulary of 257")


def test_the_published_layout_of_tokens_alone_is_a_dataset(tmp_path: Path) -> None:
    """As gpjt/fineweb-gpt2-tokens: nothing but two files with `tokens`."""
    for split in ("train", "validation"):
        save_file({"tokens": np.array([1, 50256, 7], dtype=np.uint16)}, tmp_path / f"{split}.safetensors")
    checked = check_dataset(tmp_path)
    assert checked.problems == []
    assert checked.summary == (
        f"{tmp_path}: is whole: train 3 tokens, validation 3 tokens, ids up to 50,256 in a vocabulary of unknown size; "
        "there is no dataset.json to compare with"
    )
    (tmp_path / "validation.safetensors").unlink()
    assert check_dataset(tmp_path).problems == []


def test_ids_are_compared_with_a_tokenizer_that_lies_beside_them(tmp_path: Path) -> None:
    save_file({"tokens": np.array([1, 256, 257, 300], dtype=np.int32)}, tmp_path / "train.safetensors")
    train_tokenizer(["a"], 257).save(str(tmp_path / "tokenizer.json"))
    [problem] = problems(tmp_path)
    assert problem.startswith("train.safetensors: the id 257 at offset 2 is not in the vocabulary of 257; the tokens")
    save_file({"tokens": np.array([1, -1], dtype=np.int64)}, tmp_path / "train.safetensors")
    assert problems(tmp_path)[0].startswith("train.safetensors: the id -1 at offset 1 is not in the vocabulary")


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda f: (f / "train.safetensors").unlink(), "train.safetensors: there is no such file"),
        (lambda f: (f / "validation.safetensors").unlink(), "validation.safetensors: there is no such file"),
        (lambda f: (f / "train.safetensors").write_bytes(b"half"), "train.safetensors: not a whole safetensors file"),
        (lambda f: change(f / "train.safetensors", tokens=np.zeros(3)), "train.safetensors: `tokens` has type F64"),
        (lambda f: change(f / "train.safetensors", tokens=None, x=np.zeros(3)), "train.safetensors: has no `tokens`"),
        (lambda f: change(f / "train.safetensors", tokens=np.zeros(0, np.uint16)), "train.safetensors: has no tokens"),
        (lambda f: (f / "dataset.json").write_text("["), "dataset.json: cannot be read as JSON (Expecting"),
        (lambda f: (f / "dataset.json").write_text("[" * 200_000), "dataset.json: cannot be read as JSON (it is"),
        (lambda f: (f / "dataset.json").write_text("[1]"), "dataset.json: must be a JSON object"),
        (lambda f: describe(f, splits=[]), "dataset.json: its vocab_size, end_of_text or splits are not"),
        (lambda f: describe(f, vocab_size="257"), "dataset.json: its vocab_size, end_of_text or splits are not"),
        (lambda f: describe(f, splits={"train": 1}), "dataset.json: its vocab_size, end_of_text or splits are not"),
        (lambda f: describe(f, end_of_text="<eos>"), "dataset.json: its vocab_size, end_of_text or splits are not"),
        (lambda f: describe(f, vocab_size=True), "dataset.json: its vocab_size, end_of_text or splits are not"),
        (lambda f: describe(f, end_of_text=None), "dataset.json: has a fingerprint but no end_of_text"),
        (lambda f: describe(f, vocab_size=200), "tokenizer.json: has ids up to 256, but vocab_size in dataset.json is"),
        (lambda f: describe(f, end_of_text=257), ": the end of text 257 is not in the vocabulary of 257"),
        (lambda f: (f / "tokenizer.json").unlink(), "tokenizer.json: there is no such file, but dataset.json names it"),
        (lambda f: (f / "tokenizer.json").write_text("{}"), "tokenizer.json: not a tokenizer.json"),
        (lambda f: describe(f, splits={}), "train.safetensors: is not in the splits of dataset.json"),
        (
            lambda f: train_tokenizer(["a"], 257).save(str(f / "tokenizer.json")),
            ": the fingerprint in dataset.json is not that of its files, so tokenizer.json is not the one",
        ),
    ],
)  # fmt: skip
def test_each_damage_is_named(folder: Path, damage: Callable[[Path], object], expected: str) -> None:
    damage(folder)
    assert problems(folder)[0].startswith(expected)


@pytest.mark.parametrize("values", [{"end_of_text": "<eos>", "vocab_size": 9}, {"fingerprint": "ab"}])
def test_a_description_without_a_tokenizer_is_checked_too(tmp_path: Path, values: dict[str, Any]) -> None:
    save_file({"tokens": np.array([1], dtype=np.uint16)}, tmp_path / "train.safetensors")
    (tmp_path / "dataset.json").write_text(json.dumps({"splits": {"train": {"tokens": 1}}, **values}))
    assert problems(tmp_path)[0].startswith("dataset.json: ")


def test_counts_and_digests_are_compared(folder: Path) -> None:
    """All of them are told: an end of text too many, and so other bytes."""
    tokens = load_file(folder / "train.safetensors")["tokens"]
    documents = int(np.sum(tokens == 256))
    change(folder / "train.safetensors", tokens=np.append(tokens, np.uint16(256)))
    found = problems(folder)
    for problem, what, count in zip(found, ("tokens", "documents"), (len(tokens), documents), strict=False):
        assert problem.startswith(f"train.safetensors: its {what} are {count + 1}, but dataset.json says {count};")
    assert found[2].startswith("train.safetensors: its sha256 are ")
    assert len(found) == 3


@pytest.mark.parametrize("folder", ["documents"], indirect=True)
def test_documents_and_masks_are_checked(folder: Path) -> None:
    path = folder / "train.safetensors"
    content = load_file(path)
    ends, mask = content["document_ends"], content["loss_mask"]
    shifted = ends.copy()
    shifted[3] -= 1
    for damaged, expected in (
        ({"document_ends": ends[::-1].copy()}, "`document_ends` has "),
        ({"document_ends": ends[:-1].copy()}, f"the last of `document_ends` is {ends[-2]:,}, but there are"),
        (
            {"document_ends": shifted},
            f"the document that ends at offset {shifted[3] - 1:,} does not end with",
        ),
        ({"document_ends": ends.astype(np.int32)}, "`document_ends` has type I32"),
        ({"loss_mask": mask[1:].copy()}, "`loss_mask` has type U8 and shape"),
        ({"loss_mask": mask * 2}, "`loss_mask` is 2 at offset"),
        ({"loss_mask": 1 - mask}, f"its targets are {len(mask) - mask.sum()}, but dataset.json says {mask.sum()}"),
    ):
        change(path, **damaged)
        assert problems(folder)[0].startswith(f"train.safetensors: {expected}")
        save_file(content, path)


def test_documents_without_a_description_are_checked_too(tmp_path: Path) -> None:
    write_documents(tmp_path / "train.safetensors", [[1, 2], [3]], masks=[[0, 1], [0]])
    checked = check_dataset(tmp_path)
    assert checked.problems == []
    assert (checked.splits["train"].documents, checked.splits["train"].targets) == (2, 1)


def test_all_problems_are_told_at_once(folder: Path) -> None:
    (folder / "train.safetensors").write_bytes(b"half")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "validation.safetensors").unlink()
    assert [problem.split(":")[0] for problem in problems(folder)] == [
        "tokenizer.json", "train.safetensors", "validation.safetensors",
    ]  # fmt: skip


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere: there is no such folder"):
        check_dataset(tmp_path / "nowhere")
