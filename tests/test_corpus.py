"""A packed dataset: what is in it, what is said of it, and that nothing but its content decides its bytes."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from small_corpora import SEPARATOR, contents, json_lines, read_dataset, small_texts, write_sources

from training.errors import RunError, UserError
from training.preparation import corpus
from training.preparation.corpus import Settings, prepare_documents
from training.preparation.dataset_files import fingerprint, fraction_of
from training.preparation.sources import Source, find_sources
from training.preparation.staging import Staging
from training.preparation.vocabulary import Vocabulary, byte_vocabulary, read_vocabulary

BYTES = byte_vocabulary()
SETTINGS = Settings("text", None, 0.2, None)


def source(path: Path, texts: list[str]) -> Source:
    """The documents as a file of JSON lines."""
    path.write_bytes(json_lines(texts))
    return find_sources([str(path)], None, [])[0]


def made(
    output: Path,
    sources: list[Source],
    settings: Settings = SETTINGS,
    vocabulary: Vocabulary | int = BYTES,
    workers: int = 1,
) -> dict[str, Any]:
    """Makes the dataset; returns its description."""
    prepare_documents(sources, output, settings, vocabulary, workers)
    description: dict[str, Any] = json.loads((output / "dataset.json").read_text())
    return description


def test_a_dataset_holds_its_documents_in_order_and_is_described(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two sources, empty documents, a literal end of text; split by document, equal ones on one side."""
    texts = small_texts()
    sources = [
        source(tmp_path / "a.jsonl", [*texts[:150], "", " \n"]),
        source(tmp_path / "b.jsonl", texts[150:] + texts[:30]),
    ]
    description = made(tmp_path / "set", sources)
    found = read_dataset(tmp_path / "set")
    everything = texts + texts[:30]
    assert found["train"] == [text for text in everything if fraction_of(text) >= 0.2]
    assert found["validation"] == [text for text in everything if fraction_of(text) < 0.2]
    assert not set(found["train"]) & set(found["validation"])
    for split, entry in description.pop("splits").items():
        path = tmp_path / "set" / f"{split}.safetensors"
        content = load_file(path)["tokens"]
        assert content.dtype == np.uint16
        assert entry == {
            "documents": len(found[split]),
            "bytes": sum(len(text.encode()) for text in found[split]),
            "tokens": len(content),
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }
    assert len(description.pop("fingerprint")) == 64
    assert description == {
        "format": 1,
        "tokenizer": "tokenizer.json",
        "name": "set",
        "kind": "packed",
        "vocab_size": 257,
        "end_of_text": 256,
        "source": [
            {
                "file": f"{name}.jsonl",
                "bytes": (tmp_path / f"{name}.jsonl").stat().st_size,
                "sha256": hashlib.sha256((tmp_path / f"{name}.jsonl").read_bytes()).hexdigest(),
            }
            for name in "ab"
        ],
        "licence": None,
        "text_key": "text",
        "separator": None,
        "validation_share": 0.2,
        "empty_documents": 2,
        "decontamination": None,
    }
    told = capsys.readouterr().err
    documents = f"set: train {len(found['train'])} documents of "
    assert told.startswith(documents)
    assert ", 1.00 bytes per token, 2 empty documents left out, " not in told, "an end of text is a token, too"
    assert "0.99 bytes per token, 2 empty documents left out, " in told
    assert told.endswith(f" MB/s, in {tmp_path / 'set'}\n")


@pytest.mark.slow
def test_neither_format_nor_workers_change_a_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text, JSON lines and Parquet, plain and compressed; one, two and three workers; other blocks."""
    files = write_sources(tmp_path / "sources", small_texts())
    settings = Settings("text", SEPARATOR, 0.2, None)
    expected, fingerprints = None, set()
    for workers, (name, path) in enumerate(files.items(), start=3):
        monkeypatch.setattr("training.preparation.tokenizing.BLOCK", 500 * workers)
        description = made(tmp_path / name, find_sources([str(path)], None, []), settings, BYTES, workers % 3 + 1)
        expected = expected or contents(tmp_path / name)
        assert contents(tmp_path / name) == expected, name
        fingerprints.add(description["fingerprint"])
    assert len(fingerprints) == 1


def test_the_fingerprint_is_over_tokenizer_end_of_text_and_tokens() -> None:
    splits: dict[str, dict[str, Any]] = {"train": {"sha256": "a", "tokens": 1}, "validation": {"sha256": "b"}}
    own = fingerprint("x", 1, splits)
    assert own == fingerprint("x", 1, dict(reversed(splits.items())))
    others = [fingerprint("y", 1, splits), fingerprint("x", 2, splits), fingerprint("x", 1, {"train": splits["train"]})]
    assert len({own, *others}) == 4


def test_a_tokenizer_is_trained_on_training_documents_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Words that only validation documents have are no tokens; the same each time, in whatever order."""
    texts = [f"{number} {'secret' if fraction_of(f'{number} secret') < 0.3 else 'open'}" for number in range(300)]
    texts = [text for text in texts if (fraction_of(text) < 0.3) == ("secret" in text)]
    settings = Settings("text", None, 0.3, None)
    description = made(tmp_path / "set", [source(tmp_path / "a.jsonl", texts)], settings, 264)
    assert (description["vocab_size"], description["end_of_text"]) == (264, 263)
    vocabulary = read_vocabulary(tmp_path / "set").tokenizer.get_vocab()
    assert "Ġopen" in vocabulary
    assert not any("se" in token for token in vocabulary)
    made(tmp_path / "again", [source(tmp_path / "b.jsonl", texts[::-1])], settings, 264)
    assert (tmp_path / "again" / "tokenizer.json").read_bytes() == (tmp_path / "set" / "tokenizer.json").read_bytes()
    found = read_dataset(tmp_path / "set")
    assert sorted(found["train"] + found["validation"]) == sorted(texts)


def test_training_documents_that_repeat_validation_are_dropped_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """13 words of a validation document in a row; 12 may be shared. Equal ones in training are never on that side."""
    texts = [" ".join(f"w{number}x{word}" for word in range(40)) for number in range(60)]
    held_out = [text for text in texts if fraction_of(text) < 0.2]
    leaks = [f"leak {number} " + " ".join(text.split()[5:18]) for number, text in enumerate(held_out)]
    fine = [f"fine {number} " + " ".join(text.split()[5:17]) for number, text in enumerate(held_out)]
    leaks, fine = ([text for text in some if fraction_of(text) >= 0.2] for some in (leaks, fine))
    assert len(held_out) > 5
    settings = Settings("text", None, 0.2, 13)
    description = made(tmp_path / "set", [source(tmp_path / "a.jsonl", texts + leaks + fine)], settings)
    found = read_dataset(tmp_path / "set")
    assert found["validation"] == held_out
    assert found["train"] == [text for text in texts + fine if text not in held_out]
    total = len(found["train"]) + len(leaks)
    assert description["decontamination"] == {
        "words": 13,
        "dropped": {"documents": len(leaks), "bytes": sum(map(len, leaks))},
        "share": len(leaks) / total,
    }
    told = f"{len(leaks)} documents dropped ({len(leaks) / total:.2%} of the training documents) that share 13 words in"
    assert told in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "set"]


def test_a_tokenizer_is_not_trained_on_what_is_dropped(tmp_path: Path) -> None:
    """Of all that leaks nothing is left but the words that other documents have."""
    held_out = next(text for text in (f"{number} zzz zzz zzz" for number in range(99)) if fraction_of(text) < 0.2)
    leaks = [text for text in (f"{held_out} {number}" for number in range(99)) if fraction_of(text) >= 0.2]
    fine = [f"abc {number} abc" for number in range(50)]
    settings = Settings("text", None, 0.2, 3)
    made(tmp_path / "set", [source(tmp_path / "a.jsonl", [held_out, *leaks, *fine])], settings, 260)
    assert not any("zz" in token for token in read_vocabulary(tmp_path / "set").tokenizer.get_vocab())


def test_a_large_vocabulary_is_stored_as_uint32(tmp_path: Path) -> None:
    """R71: a tokenizer of 70,000 tokens never meets 16 bits."""
    tokenizer = BYTES.tokenizer.from_str(BYTES.tokenizer.to_str())
    tokenizer.add_tokens([f"token {number}" for number in range(70_000)])
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_str())
    large = read_vocabulary(tmp_path / "tokenizer.json")
    description = made(
        tmp_path / "set", [source(tmp_path / "a.jsonl", ["a token 69999"])], Settings("text", None, 0, None), large
    )
    tokens = load_file(tmp_path / "set" / "train.safetensors")["tokens"]
    assert tokens.dtype == np.uint32
    assert tokens.tolist() == [97, 32, 257 + 69_999, 256]
    assert description["vocab_size"] == 70_257


def test_a_split_without_a_document_is_refused_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one document")
    [text] = find_sources([str(tmp_path / "a.txt")], None, [])
    with pytest.raises(UserError) as caught:
        made(tmp_path / "set", [text])
    assert str(caught.value).startswith(f"{tmp_path / 'a.txt'}: 1 documents to train on, 0 to validate on, 0 empty, 0")
    assert "give more documents, a --separator, as a text file is one document without it, or another" in str(
        caught.value
    )
    with pytest.raises(UserError, match=r"and so on: 0 documents to train on, .* 4 empty, .* documents, or"):
        made(tmp_path / "set", [source(tmp_path / f"{n}.jsonl", ["", " "]) for n in range(2)])
    with pytest.raises(UserError, match="0 documents to train on, 1 to validate on"):
        made(tmp_path / "set", [text], Settings("text", None, 0.9999999, None))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.jsonl", "1.jsonl", "a.txt"]


def test_no_validation_share_is_no_validation_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one document")
    description = made(tmp_path / "set", find_sources([str(tmp_path / "a.txt")], None, []), Settings("", None, 0, None))
    assert sorted(path.name for path in (tmp_path / "set").iterdir()) == [
        "dataset.json", "tokenizer.json", "train.safetensors",
    ]  # fmt: skip
    assert list(description["splits"]) == ["train"]
    assert read_dataset(tmp_path / "set") == {"train": ["one document"]}


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = source(tmp_path / "a.jsonl", small_texts())
    write = Staging.write

    def write_and_change(*arguments: Any) -> None:
        write(*arguments)
        (tmp_path / "a.jsonl").write_text("{}")

    monkeypatch.setattr(Staging, "write", write_and_change)
    with pytest.raises(UserError, match="SOURCE: a file was changed while it was read"):
        made(tmp_path / "set", [file])
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_another_end_of_text_is_another_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the tokenizer.json is the same: half of the documents must not end in one, half in the other."""

    def interrupt(*arguments: Any) -> None:
        raise KeyboardInterrupt

    files = [source(tmp_path / "a.jsonl", small_texts())]
    tokenizer = BYTES.tokenizer.from_str(BYTES.tokenizer.to_str())
    tokenizer.add_special_tokens(["<|end|>"])
    vocabulary = Vocabulary(tokenizer, 256, tokenizer.to_str().encode())
    with monkeypatch.context() as patch:
        patch.setattr(Staging, "write", interrupt)
        with pytest.raises(RunError, match="interrupted"):
            made(tmp_path / "set", files, vocabulary=vocabulary)
    assert made(tmp_path / "set", files, vocabulary=replace(vocabulary, end_of_text=257))["end_of_text"] == 257


def test_an_interrupted_first_pass_starts_again_and_a_whole_one_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokenizer and the n-grams are kept, whatever else is half written; the result is that of a whole run."""
    files = [source(tmp_path / "a.jsonl", small_texts())]
    settings = Settings("text", None, 0.2, 4)
    made(tmp_path / "whole", files, settings, 300)

    def interrupt(*arguments: Any) -> None:
        raise KeyboardInterrupt

    for name in ("trained_vocabulary", "_tokenize"):
        with monkeypatch.context() as patch:
            patch.setattr(corpus, name, interrupt)
            with pytest.raises(RunError, match="interrupted"):
                made(tmp_path / "parts", files, settings, 300)

    def write_half(path: Path, text: str, encoding: str) -> None:
        path.write_bytes(text.encode(encoding)[: len(text) // 2])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(corpus, "_survey", interrupt)
        patch.setattr(Path, "write_text", write_half)
        with pytest.raises(RunError, match="interrupted"):
            made(tmp_path / "parts", files, settings, 300)
    with monkeypatch.context() as patch:
        patch.setattr(corpus, "_survey", interrupt)
        made(tmp_path / "parts", files, settings, 300)
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")
