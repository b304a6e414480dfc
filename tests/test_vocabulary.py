"""The tokenizer of a new dataset: GPT-2's own, bytes, or one trained on a sample."""

import json
import random
import shutil
from pathlib import Path

import pytest
from small_corpora import GPT2, small_texts
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from training.errors import UserError
from training.preparation.vocabulary import (
    Sample,
    Vocabulary,
    byte_vocabulary,
    read_vocabulary,
    refuse_what_loses_text,
    trained_vocabulary,
)
from training.tokenizer import load_tokenizer, token_byte_lengths, train_tokenizer


def ids(vocabulary: Vocabulary, text: str) -> list[int]:
    found: list[int] = vocabulary.tokenizer.encode(text, add_special_tokens=False).ids
    return found


def test_gpt2_s_vocabulary_as_openai_published_it(tmp_path: Path) -> None:
    """And under the names that others give the two files; what is written is read by tokenizers itself."""
    (tmp_path / "vocab.json").write_bytes((GPT2 / "encoder.json").read_bytes())
    (tmp_path / "merges.txt").write_bytes((GPT2 / "vocab.bpe").read_bytes())
    for folder in (GPT2, tmp_path):
        vocabulary = read_vocabulary(folder)
        assert ids(vocabulary, "Every effort moves you") == [6109, 3626, 6100, 345]
        assert (vocabulary.end_of_text, vocabulary.size) == (50256, 50257)
        (tmp_path / "copy.json").write_bytes(vocabulary.content)
        copy = Tokenizer.from_file(str(tmp_path / "copy.json"))
        assert copy.encode("naïve 日本 <|endoftext|>").ids == ids(vocabulary, "naïve 日本 <|endoftext|>")
        lengths = token_byte_lengths(copy, 50257)
        assert lengths is not None
        assert lengths[ids(vocabulary, "naïve 日本")].sum() == 13


def test_a_tokenizer_json_comes_before_other_files_and_is_copied_as_it_is(tmp_path: Path) -> None:
    train_tokenizer(["a"], 257).save(str(tmp_path / "tokenizer.json"))
    shutil.copy(GPT2 / "encoder.json", tmp_path)
    shutil.copy(GPT2 / "vocab.bpe", tmp_path)
    content = (tmp_path / "tokenizer.json").read_bytes()
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        vocabulary = read_vocabulary(path)
        assert (vocabulary.size, vocabulary.end_of_text, vocabulary.content) == (257, 256, content)
    (tmp_path / "dataset.json").write_text(json.dumps({"end_of_text": 7}))
    assert (read_vocabulary(tmp_path).end_of_text, read_vocabulary(tmp_path).size) == (7, 257)


@pytest.mark.parametrize("end_of_text", [257, 99_999, 2**32 - 1])
def test_an_end_of_text_that_the_tokenizer_lacks_is_refused(tmp_path: Path, end_of_text: int) -> None:
    (tmp_path / "dataset.json").write_text(json.dumps({"end_of_text": end_of_text}))
    for tokenizer in (byte_vocabulary().tokenizer, Tokenizer(models.BPE())):
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        with pytest.raises(UserError, match=rf"tokenizer.json: has no token {end_of_text:,}, which the dataset.json"):
            read_vocabulary(tmp_path)


def test_a_published_vocabulary_keeps_all_its_merges_and_gets_an_end_of_text(tmp_path: Path) -> None:
    """Whether its merges begin with a version or not."""
    (tmp_path / "vocab.json").write_text('{"a": 0, "b": 1, "ab": 2}')
    for first_line in ("", "#version: 0.2\n"):
        (tmp_path / "merges.txt").write_text(f"{first_line}a b\n")
        vocabulary = read_vocabulary(tmp_path)
        assert ids(vocabulary, "ab") == [2]
        assert (vocabulary.end_of_text, vocabulary.size) == (3, 4)


def test_files_that_are_no_vocabulary_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"tokenizer.json: no such file"):
        read_vocabulary(tmp_path)
    for vocabulary, merges in (("{", "#\na b\n"), ("{}", "#\na b\n"), ('{"a": 0}', "#\na\n"), ("[]", "")):
        (tmp_path / "encoder.json").write_text(vocabulary)
        (tmp_path / "vocab.bpe").write_text(merges)
        with pytest.raises(UserError, match=r"encoder.json and vocab.bpe are not those of a byte-level BPE"):
            read_vocabulary(tmp_path)
    without = train_tokenizer(["a"], 257).to_str().replace("<|endoftext|>", "<|end|>")
    (tmp_path / "tokenizer.json").write_text(without)
    with pytest.raises(UserError, match=r"has no <\|endoftext\|>, and no dataset.json beside it names another"):
        read_vocabulary(tmp_path)


def test_bytes_are_their_own_ids(tmp_path: Path) -> None:
    vocabulary = byte_vocabulary()
    assert (vocabulary.size, vocabulary.end_of_text) == (257, 256)
    text = "".join(map(chr, range(0x250))) + "日本語 🙂\r\n <|x|>"
    assert ids(vocabulary, text) == list(text.encode())
    (tmp_path / "tokenizer.json").write_bytes(vocabulary.content)
    read = load_tokenizer(tmp_path / "tokenizer.json")
    assert read.decode(list(text.encode())) == text
    lengths = token_byte_lengths(read, 257)
    assert lengths is not None
    assert lengths.tolist() == [1] * 256 + [0]


def test_a_trained_vocabulary_has_the_size_asked_for_or_is_refused() -> None:
    vocabulary = trained_vocabulary(small_texts(), 400)
    assert (vocabulary.size, vocabulary.end_of_text) == (400, 399)
    assert vocabulary.digest == trained_vocabulary(small_texts(), 400).digest
    with pytest.raises(UserError, match=r"--train-bpe: is 400, but .* more than 2\d\d tokens; lower it to 2\d\d, or"):
        trained_vocabulary(["so so"], 400)


def test_a_sample_is_the_documents_with_the_lowest_numbers_in_whatever_order_they_come() -> None:
    """As many as fit; what is left over never shows."""
    draw = random.Random(1)
    documents = [(draw.random(), "ä" * draw.randint(1, 20)) for _ in range(300)]
    ordered, size, expected = sorted(documents), 0, []
    for _, text in ordered:
        size += len(text.encode())
        if size <= 1000:
            expected.append(text)
    for _ in range(3):
        draw.shuffle(documents)
        sample = Sample(1000)
        for number, text in documents:
            sample.add(number, text)
        assert list(sample.texts()) == expected
    sample = Sample(10)
    sample.add(0.5, "a" * 100)
    assert list(sample.texts()) == ["a" * 100], "one document is better than none"


BYTES = {f"<0x{byte:02X}>": byte for byte in range(256)}


def losing(kind: str) -> Tokenizer:
    """A tokenizer of which some text gives no token, and nothing says so."""
    if kind == "trained":  # what a trainer makes without an initial alphabet
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.train_from_iterator(["so so"], trainers.BpeTrainer(vocab_size=260, show_progress=False))
    elif kind == "characters":
        tokenizer = Tokenizer(models.BPE({"a": 0}, []))
    elif kind == "fallback":
        tokenizer = Tokenizer(
            models.BPE({token: byte for token, byte in BYTES.items() if byte}, [], byte_fallback=True)
        )
    else:
        tokenizer = Tokenizer(models.BPE(BYTES, [], byte_fallback=True))
        tokenizer.normalizer = normalizers.Replace(Regex("[0-9]" if kind == "digits" else "."), "")
    return tokenizer


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("trained", r"is a BPE that lacks 25\d of the 256 bytes and has no token for the unknown"),
        ("characters", "is a BPE that does not know all characters and has no token for the unknown"),
        ("fallback", "is a BPE that lacks 1 of the 256 bytes and has no token for the unknown"),
        ("digits", "leaves 0 9 out of a text, by its normalizer"),
        ("all", "leaves A z 0 9"),
    ],
)
def test_a_tokenizer_that_loses_text_is_refused(kind: str, said: str) -> None:
    with pytest.raises(UserError, match=rf"the\.json: {said}"):
        refuse_what_loses_text(losing(kind), Path("the.json"))


def test_a_tokenizer_that_keeps_all_text_passes() -> None:
    """Also one that changes it, and one that fails where it knows no token: that is told of the text itself."""
    fallback = Tokenizer(models.BPE(BYTES, [], byte_fallback=True))
    fallback.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    unknown = Tokenizer(models.BPE({"?": 0}, [], unk_token="?"))
    unknown.pre_tokenizer = pre_tokenizers.Whitespace()
    words = Tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]"))
    words.normalizer, words.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    failing = Tokenizer(models.Unigram([("a", -1.0)]))
    for tokenizer in (byte_vocabulary().tokenizer, read_vocabulary(GPT2).tokenizer, fallback, unknown, words, failing):
        refuse_what_loses_text(tokenizer, Path("the.json"))


def test_ids_far_above_the_number_of_tokens_are_refused() -> None:
    """To write them down would take the library minutes."""
    with pytest.raises(UserError, match=r"has 2 tokens, but ids up to 2,147,483,647; number them without large gaps"):
        refuse_what_loses_text(Tokenizer(models.WordLevel({"a": 0, "z": 2**31 - 1})), Path("the.json"))


def test_dropout_is_not_in_the_copy_that_the_dataset_gets(tmp_path: Path) -> None:
    description = json.loads(byte_vocabulary().content)
    description["model"]["dropout"] = 0.5
    (tmp_path / "tokenizer.json").write_text(json.dumps(description))
    copy = json.loads(read_vocabulary(tmp_path).content)
    assert not copy["model"]["dropout"]
    assert copy["model"]["vocab"] == description["model"]["vocab"]
