"""Reads and trains tokenizers; knows the end of text, and how many bytes each token stands for."""

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from tqdm import tqdm

from training.errors import UserError, one_line
from training.foreign_file import instead
from training.json_file import read_json_object

END_OF_TEXT = "<|endoftext|>"
TOKENIZER = "tokenizer.json"
PUBLISHED = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))
"""Names under which a byte-level BPE is published without a tokenizer.json; the second are OpenAI's of GPT-2."""
DOCUMENTS_PER_BATCH = 32


def load_tokenizer(path: Path) -> Tokenizer:
    """Reads a tokenizer.json.

    Padding, truncation and dropout that somebody saved in the file are switched off: a text is never cut silently, and
    has the same tokens each time.

    Raises:
        UserError: there is no such file, or it is not a tokenizer.json.
    """
    if not os.path.isfile(path):  # also where the name is too long for one
        raise UserError(
            f"{one_line(path)}: no such file; a tokenizer.json belongs there; copy it there or set data.tokenizer"
        )
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise UserError(
            f"{one_line(path)}: not a tokenizer.json that tokenizers can read ({one_line(error)}{instead(path)}); "
            "replace the file, or remove it where it was downloaded, to have it downloaded again"
        ) from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    if isinstance(tokenizer.model, models.BPE):
        tokenizer.model.dropout = None
    return tokenizer


def read_published(folder: Path) -> Tokenizer | None:
    """Reads a byte-level BPE from its vocabulary and its merges; None, where a folder lacks them.

    The file of the merges may begin with a line `#version: ...`.

    Raises:
        UserError: they are not those of a BPE.
    """
    for vocabulary, merges in PUBLISHED:
        if os.path.isfile(folder / vocabulary) and os.path.isfile(folder / merges):
            try:
                return byte_level(models.BPE.from_file(str(folder / vocabulary), str(folder / merges)))
            except Exception as error:  # the library raises bare Exception
                raise UserError(
                    f"{folder}: {vocabulary} and {merges} are not those of a byte-level BPE ({error}); fetch them again"
                ) from error
    return None


def byte_level(model: models.BPE) -> Tokenizer:
    """GPT-2's tokenizer around a model; `<|endoftext|>` is its end of text, if the model knows that token."""
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    if tokenizer.token_to_id(END_OF_TEXT) is not None:
        tokenizer.add_special_tokens([END_OF_TEXT])
    return tokenizer


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Trains GPT-2's kind of byte-level BPE; `<|endoftext|>` gets the last id, as it has in GPT-2."""
    tokenizer = byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([END_OF_TEXT])
    return tokenizer


def encode_documents(tokenizer: Tokenizer, texts: Sequence[str], bar: "tqdm[Any] | None" = None) -> NDArray[np.int64]:
    """Token ids of all documents in a row, 1-D, with one end-of-text token after each.

    A literal `<|endoftext|>` within a document is encoded as the ordinary text it is there.
    """
    end_of_text = tokenizer.token_to_id(END_OF_TEXT)
    tokenizer.encode_special_tokens = True
    rows = []
    for start in range(0, len(texts), DOCUMENTS_PER_BATCH):
        batch = texts[start : start + DOCUMENTS_PER_BATCH]
        for encoding in tokenizer.encode_batch_fast(list(batch), add_special_tokens=False):
            rows.append(np.array([*encoding.ids, end_of_text], dtype=np.int64))
        if bar is not None:
            bar.update(sum(len(text.encode()) for text in batch))
    return np.concatenate(rows) if rows else np.zeros(0, dtype=np.int64)


def end_of_text_id(tokenizer: Tokenizer, description: Path) -> int | None:
    """The id that ends a text: the one in the dataset's description, or else that of GPT-2's token, if there is one.

    Args:
        tokenizer: the dataset's.
        description: the dataset's dataset.json; it need not exist.

    Raises:
        UserError: the description is damaged, or names what is no id.
    """
    if description.is_file():
        recorded = read_json_object(description, "restore the file").get("end_of_text")
        if recorded is not None:
            if type(recorded) is not int or not 0 <= recorded < 2**32:
                raise UserError(
                    f"{description}: end_of_text is {recorded!r}; it is the id of the token that ends a text, or null; "
                    "correct it"
                )
            return recorded
    token: int | None = tokenizer.token_to_id(END_OF_TEXT)
    return token


def decode_known(tokenizer: Tokenizer, ids: Iterable[int]) -> str:
    """The text of some ids; those that the tokenizer lacks are left out, as the model's vocabulary may be larger."""
    text: str = tokenizer.decode([token for token in ids if tokenizer.id_to_token(token) is not None])
    return text


def ids_without_token(tokenizer: Tokenizer, vocab_size: int, end_of_text: int | None) -> list[int]:
    """The rows of a model that stand for no token, in order; the end of text ends one, whether it has a name or not."""
    return sorted(set(range(vocab_size)) - set(tokenizer.get_vocab().values()) - {end_of_text})


def token_byte_lengths(tokenizer: Tokenizer, vocab_size: int) -> NDArray[np.int64] | None:
    """Number of UTF-8 bytes that each token id stands for, the denominator of bits per byte.

    GPT-2's byte-level vocabulary spells every byte as one character (`bytes_to_unicode` in OpenAI's
    gpt-2/src/encoder.py), so a token has as many bytes as its vocabulary string has characters. Added tokens
    are stored as plain text instead; special ones among them stand for no text at all.

    Args:
        tokenizer: Any tokenizer.
        vocab_size: The model's vocabulary size; ids from there on are left out.

    Returns:
        Shape (vocab_size,), bytes per id, 0 for special tokens and for ids without a token; None if the
        tokenizer is not a byte-level BPE, because the bytes of its tokens are then unknown.
    """
    description = json.loads(tokenizer.to_str())
    decoder = description.get("decoder") or {}
    if description["model"].get("type") != "BPE" or decoder.get("type") != "ByteLevel":
        return None
    lengths = np.zeros(vocab_size, dtype=np.int64)
    for text, token in tokenizer.get_vocab(with_added_tokens=False).items():
        if token < vocab_size:
            lengths[token] = len(text)
    for token, added in tokenizer.get_added_tokens_decoder().items():
        if token < vocab_size:
            lengths[token] = 0 if added.special else len(added.content.encode())
    return lengths
