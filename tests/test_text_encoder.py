"""Texts cut into words are encoded as the tokenizer encodes them whole."""

import random
from pathlib import Path

import numpy as np
import pytest
from small_corpora import GPT2
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from training.errors import UserError
from training.preparation import text_encoder
from training.preparation.text_encoder import TextEncoder, cuts_at_blanks, pieces
from training.preparation.vocabulary import byte_vocabulary, read_vocabulary
from training.tokenizer import train_tokenizer

# Every blank of Unicode, what Python alone or nobody takes for one, letters, marks, digits, and all that is special.
ALPHABET = [chr(code) for code in (*range(0x21), *range(0x7F, 0xA1), *range(0x2000, 0x2010), 0x1680, 0x180E, 0xFEFF)]
ALPHABET += ["\u2028", "\u2029", "\u202f", "\u205f", "\u3000", " ", "  ", "\n", "\n\n", "a", "The", "def", "self"]
ALPHABET += ["é", "e\u0301", "ß", "日本", "🙂", "1", "b2", "(", ")", "x_y", "a'", "²", "Ⅷ", "_", ".", "!?"]
ALPHABET += ["'", "'s", "'ll", "<|endoftext|>", "#", "\r\n", "\t\t"]
NONE = -1
"""An end of text that no text has."""


def random_texts(count: int, length: int) -> list[str]:
    draw = random.Random(3)
    return ["".join(draw.choices(ALPHABET, k=draw.randint(0, length))) for _ in range(count)]


def whole(tokenizer: Tokenizer, text: str) -> list[int]:
    tokenizer.encode_special_tokens = True
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def encoded(encoder: TextEncoder, text: str) -> list[int]:
    ids: list[int] = np.frombuffer(encoder.encode(text), np.uint16 if encoder.item_bytes == 2 else np.uint32).tolist()
    return ids


@pytest.fixture(scope="module")
def gpt2() -> Tokenizer:
    return read_vocabulary(GPT2).tokenizer


def test_ids_are_those_of_the_whole_text(gpt2: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it is cut, and whatever is known from before: words are forgotten now and then."""
    texts = random_texts(1500, 60)
    expected = [whole(gpt2, text) for text in texts]
    monkeypatch.setattr(text_encoder, "PIECE", 12)
    monkeypatch.setattr(text_encoder, "KEPT", 500)
    encoder = TextEncoder(gpt2, 50257, 50256)
    assert encoder.cuts_at_blanks
    assert [encoded(encoder, text) for text in texts] == expected
    assert any(len(list(pieces(text))) > 3 for text in texts)
    assert all("".join(pieces(text)) == text for text in texts)


def test_a_large_vocabulary_is_encoded_as_uint32(gpt2: Tokenizer) -> None:
    for size, item_bytes in ((50257, 2), (65536, 2), (65537, 4)):
        encoder = TextEncoder(gpt2, size, 50256)
        assert encoder.item_bytes == item_bytes
        assert encoded(encoder, "Every effort moves you") == [6109, 3626, 6100, 345]


def test_r71_an_id_outside_the_vocabulary_is_refused(gpt2: Tokenizer) -> None:
    with pytest.raises(UserError, match=r"tokenizer\.json: token id 6109 at position 0; the vocabulary of 6109 ends"):
        TextEncoder(gpt2, 6109, 6108).encode("Every")


def test_a_long_text_without_blanks_is_one_piece() -> None:
    assert list(pieces("a" * 200_000)) == ["a" * 200_000]
    assert [len(piece) for piece in pieces("a" * 70_000 + " b" * 70_000)] == [70_000, 65_536, 65_536, 8928]


def others() -> dict[str, Tokenizer]:
    """Tokenizers that do not cut where GPT-2's does."""
    added = train_tokenizer(["a b"], 258)
    added.add_tokens([AddedToken("a b", normalized=False)])
    prefixed = Tokenizer.from_str(train_tokenizer(["a b"], 258).to_str())
    prefixed.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    lower = Tokenizer.from_str(train_tokenizer(["a b"], 258).to_str())
    lower.normalizer = normalizers.Lowercase()
    split = Tokenizer.from_str(train_tokenizer(["a b"], 258).to_str())
    split.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\w+\s\w+"), "isolated"), pre_tokenizers.ByteLevel(use_regex=False)]
    )
    metaspace = Tokenizer(models.BPE())
    metaspace.pre_tokenizer = pre_tokenizers.Metaspace()
    metaspace.decoder = decoders.Metaspace()
    metaspace.train_from_iterator(random_texts(50, 50), trainers.BpeTrainer(vocab_size=300, show_progress=False))
    bare = Tokenizer.from_str(train_tokenizer(["a b"], 258).to_str())
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return {"added": added, "prefixed": prefixed, "lower": lower, "split": split, "metaspace": metaspace, "bare": bare}


@pytest.mark.parametrize("name", ["added", "prefixed", "lower", "split", "metaspace", "bare"])
def test_other_tokenizers_see_each_text_whole(name: str) -> None:
    tokenizer = others()[name]
    assert not cuts_at_blanks(tokenizer)
    encoder = TextEncoder(tokenizer, max(tokenizer.get_vocab().values()) + 1, NONE)
    for text in ["a b a b", *random_texts(20, 60)]:
        assert encoded(encoder, text) == whole(tokenizer, text)


def test_bytes_and_trained_ones_are_cut(tmp_path: Path) -> None:
    for tokenizer, size in ((byte_vocabulary().tokenizer, 257), (train_tokenizer(["so so"], 260), 260)):
        encoder = TextEncoder(tokenizer, size, size - 1)
        assert encoder.cuts_at_blanks
        assert encoder.is_bytes == (size == 257)
        for text in random_texts(100, 40):
            assert encoded(encoder, text) == whole(tokenizer, text)


def knowing(kind: str) -> Tokenizer:
    """A tokenizer that makes its end of text, 1, of the literal text."""
    words = {"a": 0, "<|endoftext|>": 1, "[UNK]": 2, "<pad>": 3}
    if kind == "words":
        tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    elif kind == "pieces":
        tokenizer = Tokenizer(models.Unigram([(word, -1.0) for word in words], unk_id=2))
    else:
        tokenizer = Tokenizer(models.BPE(words, [], ignore_merges=True, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if kind == "not special":
        tokenizer.add_tokens(["<|endoftext|>"])
    else:
        tokenizer.add_special_tokens(["<|endoftext|>", "[UNK]", "<pad>"])
    return tokenizer


@pytest.mark.parametrize("kind", ["words", "pieces", "merges", "not special"])
def test_no_text_gives_the_end_of_text_whatever_the_tokenizer(kind: str) -> None:
    """Nor another special token; but what is unknown is."""
    encoder = TextEncoder(knowing(kind), 4, 1)
    assert encoded(encoder, "a xy a")[0] == 0
    assert 2 in encoded(encoder, "a xy a")
    sentence = (
        r"tokenizer.json: gives the token 1, '<\|endoftext\|>', within a text that begins with 'a <\|endoftext\|> a';"
    )
    with pytest.raises(UserError, match=sentence):
        encoder.encode("a <|endoftext|> a")
    if kind != "not special":
        with pytest.raises(UserError, match="gives the token 3, '<pad>'"):
            encoder.encode("a <pad>")


def test_an_ordinary_token_is_no_end_of_text_of_documents_that_have_it() -> None:
    for tokenizer, size in ((byte_vocabulary().tokenizer, 257), (train_tokenizer(["so so"], 260), 260)):
        encoder = TextEncoder(tokenizer, size, tokenizer.get_vocab()["h"])
        assert len(encoded(encoder, "no letter")) > 4
        with pytest.raises(
            UserError, match=r"gives the token \d+, 'h', within a text that begins with '.*the'; no text"
        ):
            encoder.encode("is the")


def test_a_text_without_tokens_is_refused() -> None:
    for tokenizer in (
        Tokenizer(models.WordLevel({"a": 0}, unk_token="[UNK]")),
        Tokenizer(models.WordPiece({"a": 0}, unk_token="[UNK]")),
        Tokenizer(models.Unigram([("a", -1.0)])),
    ):
        assert encoded(TextEncoder(tokenizer, 1, NONE), "a") == [0]
        with pytest.raises(
            UserError, match=r"tokenizer.json: cannot encode a text \(.*\); each text must have tokens;"
        ):
            TextEncoder(tokenizer, 1, NONE).encode("b")
