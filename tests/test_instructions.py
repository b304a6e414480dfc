"""Instruction data: which tokens are targets, the split, the bytes, and every line that can be wrong."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer, models

from training.document_rows import DocumentRows
from training.errors import UserError
from training.loss import IGNORED
from training.preparation.instructions import prepare_instructions, read_records
from training.preparation.sources import Source, SourceFile, find_sources
from training.rows import TokenFile
from training.tokenizer import END_OF_TEXT, load_tokenizer, train_tokenizer

RECORDS = [{"prompt": f"What is {n}?", "response": f" It is {n * n} and {'so ' * (n % 5)}on."} for n in range(200)]
PLAIN = "Below is an instruction that describes a task. Write a response that appropriately completes the request."


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer.json, whose end of text is its last token."""
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer([record["response"] for record in RECORDS], 300).save(str(folder / "tokenizer.json"))
    return folder


def write_lines(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def prepare(sources: list[Path], output: Path, tokenizer: Path, validation_share: float) -> None:
    """Makes the dataset from files."""
    prepare_instructions(
        find_sources([str(source) for source in sources], None, []), output, tokenizer, validation_share
    )


def read(path: Path) -> list[tuple[str, str]]:
    return list(read_records(SourceFile(path, path.name), lambda size: None))


def documents(folder: Path, split: str = "train") -> list[tuple[list[int], list[int]]]:
    """Tokens and mask of each document."""
    content = load_file(folder / f"{split}.safetensors")
    ends = content["document_ends"][:-1]
    parts = (np.split(content[name], ends) for name in ("tokens", "loss_mask"))
    return [(tokens.tolist(), mask.tolist()) for tokens, mask in zip(*parts, strict=True)]


def encoded(tokenizer: Path, text: str) -> list[int]:
    vocabulary = load_tokenizer(tokenizer / "tokenizer.json")
    vocabulary.encode_special_tokens = True
    ids: list[int] = vocabulary.encode(text, add_special_tokens=False).ids
    return ids


def test_prompt_and_response_are_tokenized_apart_and_the_prompt_is_no_target(tmp_path: Path, tokenizer: Path) -> None:
    """The end of text is a target, and a literal one in a text is not an end."""
    records: list[dict[str, Any]] = [
        {"prompt": "so so s", "response": f"o {END_OF_TEXT} so", "other": 1},
        {"prompt": "on", "response": ""},
    ]
    source = write_lines(tmp_path / "a.jsonl", records)
    prepare([source], tmp_path / "set", tokenizer, 0.0)
    end = load_tokenizer(tokenizer / "tokenizer.json").token_to_id(END_OF_TEXT)
    expected = []
    for record in records:
        prompt, response = encoded(tokenizer, str(record["prompt"])), encoded(tokenizer, str(record["response"]))
        assert end not in response
        expected.append(([*prompt, *response, end], [0] * len(prompt) + [1] * (len(response) + 1)))
    assert documents(tmp_path / "set") == expected
    assert expected[0][0][:-1] != encoded(tokenizer, f"so so so {END_OF_TEXT} so"), "the border would not be one"
    assert not (tmp_path / "set" / "validation.safetensors").exists()
    rows = DocumentRows(TokenFile(tmp_path / "set" / "train.safetensors"), 64)
    targets = rows.read([0])[1][0]
    assert targets[targets != IGNORED].tolist() == [*encoded(tokenizer, str(records[0]["response"])), end]


def test_alpaca_s_records_are_rendered_with_the_published_template(tmp_path: Path) -> None:
    records: list[dict[str, Any]] = [
        {"instruction": "Add {these}.", "input": "1, 2", "output": "3"},
        {"instruction": "Say yes.", "input": "", "output": "yes"},
        {"instruction": "Say no.", "output": "no"},
        {"instruction": "Say so.", "input": None, "output": "so"},
    ]
    found = read(write_lines(tmp_path / "a.jsonl", records))
    assert found[0] == (
        "Below is an instruction that describes a task, paired with an input that provides further context. "
        "Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nAdd {these}.\n\n### Input:\n1, 2\n\n### Response:",
        "3",
    )
    assert found[1:] == [
        (f"{PLAIN}\n\n### Instruction:\nSay {word}.\n\n### Response:", word) for word in ("yes", "no", "so")
    ]


def test_the_dataset_is_described_and_always_the_same(
    tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two sources, more records than are encoded at once: every record once, in order; equal bytes each time."""
    sources = [write_lines(tmp_path / f"{n}.jsonl", RECORDS[100 * n : 100 * n + 100]) for n in range(2)]
    for name in ("one", "two"):
        prepare(sources, tmp_path / name / "set", tokenizer, 0.1)
    first, second = (tmp_path / name / "set" for name in ("one", "two"))
    assert sorted(path.name for path in first.iterdir()) == [
        "dataset.json", "tokenizer.json", "train.safetensors", "validation.safetensors",
    ]  # fmt: skip
    for path in first.iterdir():
        assert path.read_bytes() == (second / path.name).read_bytes()
    vocabulary = load_tokenizer(first / "tokenizer.json")
    texts: dict[str, list[str]] = {}
    description = json.loads((first / "dataset.json").read_text())
    for split, counts in description["splits"].items():
        found = documents(first, split)
        texts[split] = [vocabulary.decode(tokens) for tokens, _ in found]
        assert counts["documents"] == len(found)
        assert counts["tokens"] == sum(len(tokens) for tokens, _ in found)
        assert counts["targets"] == sum(sum(mask) for _, mask in found)
        assert counts["sha256"] == hashlib.sha256((first / f"{split}.safetensors").read_bytes()).hexdigest()
    whole = [record["prompt"] + record["response"] for record in RECORDS]
    assert sorted(texts["train"] + texts["validation"]) == sorted(whole)
    assert all(part == [text for text in whole if text in set(part)] for part in texts.values()), "in order"
    assert 8 <= len(texts["validation"]) <= 35  # 20 expected, standard deviation 4
    keys = ("format", "name", "kind", "tokenizer", "vocab_size", "end_of_text", "validation_share")
    assert [description[key] for key in keys] == [1, "set", "documents", "tokenizer.json", 300, 299, 0.1]
    size, digest = sources[1].stat().st_size, hashlib.sha256(sources[1].read_bytes()).hexdigest()
    assert description["source"][1] == {"file": "1.jsonl", "bytes": size, "sha256": digest}
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 2
    assert told[0].startswith(f"set: train {len(texts['train'])} documents of ")


def test_where_records_of_a_repository_come_from_is_described(tmp_path: Path, tokenizer: Path) -> None:
    """By its name and commit, as of documents."""
    files = tuple(SourceFile(write_lines(tmp_path / f"{n}.jsonl", RECORDS[:5]), f"data/{n}.jsonl") for n in range(2))
    prepare_instructions([Source(files, "owner/name", "c0ffee")], tmp_path / "set", tokenizer, 0)
    assert json.loads((tmp_path / "set" / "dataset.json").read_text())["source"] == [
        {"repository": "owner/name", "revision": "c0ffee", "files": ["data/0.jsonl", "data/1.jsonl"]}
    ]


def test_equal_records_are_on_the_same_side(tmp_path: Path, tokenizer: Path) -> None:
    """Whatever else there is: a larger share keeps what a smaller one had."""
    source = write_lines(tmp_path / "a.jsonl", RECORDS + RECORDS[::-1])
    splits = {}
    for share in (0.1, 0.3):
        prepare([source], tmp_path / str(share), tokenizer, share)
        splits[share] = [
            {str(tokens) for tokens, _ in documents(tmp_path / str(share), s)} for s in ("train", "validation")
        ]
        assert not splits[share][0] & splits[share][1]
    assert splits[0.1][1] < splits[0.3][1]


def test_nothing_to_validate_on_is_told(tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_lines(tmp_path / "a.jsonl", RECORDS[:2])
    prepare([source], tmp_path / "set", tokenizer, 1e-9)
    assert capsys.readouterr().err.endswith("; nothing to validate on, so evaluation.every must be null\n")
    with pytest.raises(UserError, match=r"a.jsonl: leaves no record to train on, and 2 to .*; give more records, or"):
        prepare([source], tmp_path / "other", tokenizer, 1 - 1e-12)
    assert not (tmp_path / "other").exists()


def test_a_large_vocabulary_is_stored_as_uint32(tmp_path: Path, tokenizer: Path) -> None:
    """And the end of text is the one that dataset.json names."""
    large = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    large.add_tokens([f"token {number}" for number in range(2**16)])
    folder = tmp_path / "large"
    folder.mkdir()
    large.save(str(folder / "tokenizer.json"))
    (folder / "dataset.json").write_text(json.dumps({"end_of_text": 65_801}))
    source = write_lines(tmp_path / "a.jsonl", [{"prompt": "a", "response": "token 65000"}])
    prepare([source], tmp_path / "set", folder, 0)
    tokens = load_file(tmp_path / "set" / "train.safetensors")["tokens"]
    assert tokens.dtype == np.uint32
    assert tokens[-2:].tolist() == [65_300, 65_801]
    assert json.loads((tmp_path / "set" / "dataset.json").read_text())["vocab_size"] == 300 + 2**16


GOOD = b'{"prompt": "a", "response": "b"}\n'


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"no json", "is not JSON (Expecting value: line 1 column 1 (char 0))"),
        (b"[" * 100_000, "is not JSON ("),
        (b"[1]", "is not a JSON object"),
        (b'"text"', "is not a JSON object"),
        (b"{}", "has no instruction and no output"),
        (b'{"text": "a"}', "has no instruction and no output"),
        (b'{"prompt": "a"}', "has no response"),
        (b'{"response": "a", "instruction": "b", "output": "c"}', "has no prompt"),
        (b'{"instruction": "a", "input": "b"}', "has no output"),
        (b'{"prompt": 7, "response": "b"}', "prompt is not text but 7"),
        (b'{"prompt": "a", "response": null}', "response is not text but null"),
        (b'{"instruction": "a", "input": ["b"], "output": "c"}', 'input is not text but ["b"]'),
        (b'{"prompt": " \\n", "response": "b"}', "prompt is empty"),
        (b'{"instruction": "", "output": "b"}', "instruction is empty"),
        (b'{"prompt": "a", "response": "\\ud800"}', "response is not Unicode text (half a surrogate pair)"),
        (b'{"prompt": "\xff", "response": "b"}', "is not UTF-8"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, tokenizer: Path, line: bytes, problem: str) -> None:
    """File, line as an editor counts it, what is wrong, the rule, the remedy; and no folder is left."""
    source = tmp_path / "a.jsonl"
    source.write_bytes(GOOD + b"\n" + line + b"\n" + GOOD)
    with pytest.raises(UserError) as caught:
        prepare([source], tmp_path / "set", tokenizer, 0)
    assert str(caught.value).startswith(f"{source}, line 3: {problem}")
    assert str(caught.value).endswith("optionally input; correct or remove the line")
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_odd_but_good_lines(tmp_path: Path) -> None:
    """A byte order mark, line ends of Windows, line separators within a text, no end of the last line."""
    source = tmp_path / "a.jsonl"
    source.write_bytes("\ufeff".encode() + GOOD.replace(b"\n", b"\r\n"))
    assert read(source) == [("a", "b")]
    source.write_bytes(GOOD + '{"prompt": "x\u2028y", "response": "é 🙂"}'.encode())
    assert read(source) == [("a", "b"), ("x\u2028y", "é 🙂")]


def test_mistakes_in_the_arguments(tmp_path: Path, tokenizer: Path) -> None:
    source = write_lines(tmp_path / "a.jsonl", RECORDS[:3])
    with pytest.raises(UserError, match=r"nowhere: no such file; a tokenizer.json belongs there"):
        prepare([source], tmp_path / "set", tmp_path / "nowhere", 0)
    with pytest.raises(UserError, match="exists already"):
        prepare([source], tmp_path, tokenizer, 0)
    other = Tokenizer.from_file(str(tokenizer / "tokenizer.json")).to_str().replace(END_OF_TEXT, "<|end|>")
    (tmp_path / "tokenizer.json").write_text(other)
    with pytest.raises(UserError, match=r"tokenizer.json: has no <\|endoftext\|>, and no dataset.json beside it"):
        prepare([source], tmp_path / "set", tmp_path / "tokenizer.json", 0)


def test_the_types_are_those_of_a_document_dataset(tmp_path: Path, tokenizer: Path) -> None:
    prepare([write_lines(tmp_path / "a.jsonl", RECORDS[:3])], tmp_path / "set", tokenizer, 0)
    content = load_file(tmp_path / "set" / "train.safetensors")
    types = {"tokens": np.uint16, "document_ends": np.int64, "loss_mask": np.uint8}
    assert {name: value.dtype for name, value in content.items()} == types


@pytest.mark.parametrize("key", ["prompt", "response"])
def test_a_text_that_gives_the_end_of_text_is_refused(tmp_path: Path, key: str) -> None:
    """By a tokenizer that makes it of the literal text; and nothing is left."""
    words = Tokenizer(models.WordLevel({"a": 0, END_OF_TEXT: 1, "[UNK]": 2}, unk_token="[UNK]"))
    words.add_special_tokens([END_OF_TEXT])
    words.save(str(tmp_path / "tokenizer.json"))
    source = write_lines(tmp_path / "a.jsonl", [{"prompt": "a", "response": "a", key: END_OF_TEXT}])
    with pytest.raises(UserError, match=r"gives the token 1, '<\|endoftext\|>', within a text that begins with"):
        prepare([source], tmp_path / "set", tmp_path / "tokenizer.json", 0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "tokenizer.json"]
