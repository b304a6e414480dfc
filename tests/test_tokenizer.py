import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from training.errors import UserError
from training.preparation.python_library import python_library_documents
from training.tokenizer import (
    END_OF_TEXT,
    decode_known,
    encode_documents,
    end_of_text_id,
    ids_without_token,
    load_tokenizer,
    read_published,
    token_byte_lengths,
    train_tokenizer,
)

TEXTS = [
    "Every effort moves you",
    "def f(x):\n\treturn x  # naïve café, 100 €\r\n",
    "日本語のテキスト, Ελληνικά, русский",
    "emoji 🙂‍↔️ and \x00 \x7f control",
    "",
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(["Every naïve café moves 日本語 🙂 " * 20, "def f(x):\n    return x\n" * 20], 320)


@pytest.mark.parametrize("text", TEXTS)
def test_byte_lengths_add_up_to_the_utf8_bytes_of_the_text(tokenizer: Tokenizer, text: str) -> None:
    lengths = token_byte_lengths(tokenizer, tokenizer.get_vocab_size())
    assert lengths is not None
    assert lengths[tokenizer.encode(text).ids].sum() == len(text.encode())


def test_every_single_byte_token_counts_one(tokenizer: Tokenizer) -> None:
    lengths = token_byte_lengths(tokenizer, 320)
    assert lengths is not None
    assert [lengths[tokenizer.token_to_id(letter)] for letter in pre_tokenizers.ByteLevel.alphabet()] == [1] * 256


def test_special_tokens_and_ids_without_a_token_count_nothing(tokenizer: Tokenizer) -> None:
    padded_to = tokenizer.get_vocab_size() + 64
    lengths = token_byte_lengths(tokenizer, padded_to)
    assert lengths is not None
    assert lengths.shape == (padded_to,)
    assert lengths[tokenizer.token_to_id(END_OF_TEXT) :].tolist() == [0] * 65
    assert lengths[: tokenizer.token_to_id(END_OF_TEXT)].min() == 1


def test_ids_beyond_the_vocabulary_of_the_model_are_left_out(tokenizer: Tokenizer) -> None:
    lengths = token_byte_lengths(tokenizer, 10)
    assert lengths is not None
    assert lengths.tolist() == [1] * 10


def test_added_plain_tokens_count_their_bytes_not_their_characters(tokenizer: Tokenizer) -> None:
    extended = Tokenizer.from_str(tokenizer.to_str())
    extended.add_tokens([AddedToken("€ 日", normalized=False)])
    lengths = token_byte_lengths(extended, extended.get_vocab_size())
    assert lengths is not None
    assert lengths[extended.token_to_id("€ 日")] == 7
    text = "100 € 日本"
    assert lengths[extended.encode(text).ids].sum() == len(text.encode())


def test_bytes_are_unknown_for_a_tokenizer_that_is_not_byte_level() -> None:
    words = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    assert token_byte_lengths(words, 2) is None

    metaspace = Tokenizer(models.BPE())
    metaspace.pre_tokenizer = pre_tokenizers.Metaspace()
    metaspace.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    metaspace.train_from_iterator(["é a b"], trainers.BpeTrainer(show_progress=False))
    assert token_byte_lengths(metaspace, metaspace.get_vocab_size()) is None


def test_end_of_text_is_the_recorded_one_or_gpt2s(tokenizer: Tokenizer, tmp_path: Path) -> None:
    description = tmp_path / "dataset.json"
    own = tokenizer.token_to_id(END_OF_TEXT)
    assert end_of_text_id(tokenizer, description) == own
    for recorded, expected in ({"end_of_text": 7}, 7), ({"end_of_text": 0}, 0), ({"end_of_text": None}, own), ({}, own):
        description.write_text(json.dumps(recorded))
        assert end_of_text_id(tokenizer, description) == expected
    words = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    assert end_of_text_id(words, tmp_path / "missing.json") is None
    for damaged in (b"[1]", b"{", b"\xff", b"[" * 200_000):
        description.write_bytes(damaged)
        with pytest.raises(UserError, match=r"dataset\.json: (cannot be read as JSON|must be a JSON object)"):
            end_of_text_id(tokenizer, description)


def test_ids_without_a_token_have_no_text(tokenizer: Tokenizer) -> None:
    first, *rest = tokenizer.encode(TEXTS[0]).ids
    size = tokenizer.get_vocab_size()
    assert decode_known(tokenizer, [size, first, size + 63, *rest, 50256]) == TEXTS[0]
    assert decode_known(tokenizer, []) == ""


def test_loaded_tokenizer_neither_cuts_nor_pads(tokenizer: Tokenizer, tmp_path: Path) -> None:
    saved = Tokenizer.from_str(tokenizer.to_str())
    saved.enable_truncation(4)
    saved.enable_padding(length=4)
    saved.save(str(tmp_path / "tokenizer.json"))

    loaded = load_tokenizer(tmp_path / "tokenizer.json")

    assert loaded.encode("x").ids == tokenizer.encode("x").ids
    assert loaded.encode(TEXTS[1]).ids == tokenizer.encode(TEXTS[1]).ids


def test_loaded_tokenizer_gives_the_same_tokens_each_time(tmp_path: Path) -> None:
    """Whatever its file says of dropout, which leaves merges out by chance."""
    saved = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")], dropout=0.5))
    saved.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path / "tokenizer.json").encode("ab" * 50).ids == [2] * 50


@pytest.mark.parametrize("content", [b"", b"not json", b"{}", b'{"version": "1.0", "model": {"type": "X"}}', b"\xff"])
def test_file_that_is_no_tokenizer_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"tokenizer\.json: not a tokenizer\.json"):
        load_tokenizer(path)


def test_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"tokenizer\.json: no such file.*data\.tokenizer"):
        load_tokenizer(tmp_path / "tokenizer.json")


def test_tokenizer_and_tokens_are_the_same_each_time() -> None:
    texts = [text for _, text in sorted(python_library_documents())[:8]]
    first, second = train_tokenizer(texts, 512), train_tokenizer(iter(texts), 512)
    assert first.to_str() == second.to_str()
    np.testing.assert_array_equal(encode_documents(first, texts), encode_documents(second, texts))


@pytest.mark.parametrize("recorded", [-1, 10**12, True, "7", 7.0])
def test_an_end_of_text_that_is_no_id_is_refused(tokenizer: Tokenizer, tmp_path: Path, recorded: object) -> None:
    description = tmp_path / "dataset.json"
    description.write_text(json.dumps({"end_of_text": recorded}))
    with pytest.raises(UserError, match=r"dataset\.json: end_of_text is .*; it is the id of the token .*; correct it"):
        end_of_text_id(tokenizer, description)


def test_literal_end_of_text_in_a_document_does_not_end_it() -> None:
    texts = ["before <|endoftext|> after", "<|endoftext|>", ""]
    tokenizer = train_tokenizer(texts, 300)

    ids = encode_documents(tokenizer, texts)

    (ends,) = np.nonzero(ids == tokenizer.token_to_id(END_OF_TEXT))
    assert len(ends) == 3
    assert tokenizer.decode(ids[: ends[0]].tolist()) == texts[0]
    assert tokenizer.decode(ids[ends[0] + 1 : ends[1]].tolist()) == texts[1]
    assert ends[2] == ends[1] + 1


@pytest.mark.parametrize(("vocabulary", "merges"), [("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe")])
@pytest.mark.parametrize("first_line", ["", "#version: 0.2\n"])
def test_no_merge_of_a_published_vocabulary_is_lost(
    tmp_path: Path, vocabulary: str, merges: str, first_line: str
) -> None:
    """Also without the line that names a version."""
    (tmp_path / vocabulary).write_text('{"a": 0, "b": 1, "ab": 2, "abb": 3}')
    assert read_published(tmp_path) is None
    (tmp_path / merges).write_text(f"{first_line}a b\nab b\n")
    tokenizer = read_published(tmp_path)
    assert tokenizer is not None
    assert tokenizer.encode("abbab").ids == [3, 2]
    assert tokenizer.token_to_id("<|endoftext|>") is None


def test_an_end_of_text_without_a_name_can_still_be_drawn(tokenizer: Tokenizer) -> None:
    """R95: data may be separated by an id that the tokenizer does not know."""
    size = tokenizer.get_vocab_size()
    assert ids_without_token(tokenizer, size + 3, size - 1) == [size, size + 1, size + 2]
    assert ids_without_token(tokenizer, size + 3, size + 1) == [size, size + 2]
