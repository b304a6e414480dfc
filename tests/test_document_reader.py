"""Documents out of files: the same from every format, and every way in which a file can be wrong."""

import gzip
import random
import time
import tracemalloc
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from small_corpora import SEPARATOR, json_lines, small_texts, write_sources

from training.errors import RunError, UserError
from training.preparation import document_reader
from training.preparation.document_reader import read_documents
from training.preparation.sources import SourceFile


def read(path: Path, key: str = "text", separator: str | None = SEPARATOR) -> list[str]:
    return list(read_documents(SourceFile(path, path.name), key, separator, lambda size: None))


def written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def refusal(path: Path, **options: str | None) -> str:
    with pytest.raises(UserError) as caught:
        read(path, **options)  # type: ignore[arg-type]
    assert str(caught.value).startswith(str(path))
    return str(caught.value).removeprefix(str(path))


def test_every_format_gives_the_same_documents(tmp_path: Path) -> None:
    """Compressed in several parts, too; and the progress adds up to the file's bytes."""
    texts = [*small_texts(150), "", " last"]
    for path in write_sources(tmp_path, texts).values():
        told: list[int] = []
        found = list(read_documents(SourceFile(path, path.name), "text", SEPARATOR, told.append))
        assert found == texts, path.name
        assert sum(told) == path.stat().st_size, path.name


def test_a_text_file_is_one_document_as_it_is(tmp_path: Path) -> None:
    """But for a byte order mark; line ends stay those of the file."""
    text = "a\r\n\r\nb\u2028c \x00\n"
    for mark in ("", "\ufeff"):
        assert read(written(tmp_path / "a.txt", (mark + text).encode()), separator=None) == [text]
    assert read(written(tmp_path / "a.txt", b""), separator=None) == [""]
    assert read(written(tmp_path / "a.txt", b"\n\na\n\n\nb\n\n"), separator="\n\n") == ["", "a", "\nb", ""]


def test_separators_are_found_wherever_the_file_is_cut_for_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = small_texts(5)
    path = written(tmp_path / "a.txt", SEPARATOR.join(texts).encode())
    for size in (1, 2, 3, 7, 64):
        monkeypatch.setattr(document_reader, "READ_AT_ONCE", size)
        assert read(path) == texts


def test_lines_of_nothing_are_passed_over_and_null_is_an_empty_text(tmp_path: Path) -> None:
    lines = b'\xef\xbb\xbf{"text": "a"}\r\n\n  \n{"text": null}\n{"text": "b", "other": 1}'
    assert read(written(tmp_path / "a.jsonl", lines)) == ["a", "", "b"]
    pyarrow.parquet.write_table(pyarrow.table({"body": ["a", None]}), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet", key="body") == ["a", ""]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"no json", "is not JSON (Expecting value: line 1 column 1 (char 0))"),
        (b"[1]", "is not a JSON object"),
        (b"[" * 100_000, "is not JSON ("),
        (b"{}", "has no text, only nothing"),
        (b'{"content": "a", "id": 1}', "has no text, only content, id"),
        (
            b'{"a\\nb\\u001b": 1, "' + b"c" * 1000 + b'": 1}',
            r"has no text, only a\nb\x1b, " + "c" * 40 + "; a document",
        ),
        (b'{"text": ["a"]}', 'text is not text but ["a"]'),
        (b'{"text": "\\ud800"}', "text is not Unicode text (half a surrogate pair)"),
        (b'{"text": "\xff"}', "is not UTF-8"),
        (b'{"prompt": "a", "response": "b"}', "has no text, only prompt, response"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: bytes, problem: str) -> None:
    content = b'{"text": "a"}\n\n' + line + b"\n"
    for name, packed in {"a.jsonl": content, "a.jsonl.gz": gzip.compress(content)}.items():
        path = written(tmp_path / name, packed)
        sentence = refusal(path)
        assert sentence.startswith(f", line 3: {problem}")
        assert sentence.endswith("under text (--text-key); correct or remove the line")


def test_a_byte_that_is_not_utf8_is_named_by_its_offset(tmp_path: Path) -> None:
    for start in (b"", b"\xef\xbb\xbf", b"abc\n-----\n"):
        content = start + b"d\xc3\xa9f\xff"
        assert f": byte {len(content) - 1} is not UTF-8" in refusal(written(tmp_path / "a.txt", content))
        assert f": byte {len(content) - 1} is not UTF-8" in refusal(
            written(tmp_path / "a.txt.gz", gzip.compress(content))
        )


@pytest.mark.parametrize("share", [0.5, 0.99])
def test_a_compressed_file_that_ends_in_the_middle_is_refused(tmp_path: Path, share: float) -> None:
    """Also of zstd, whose reader takes the end for that of the content."""
    content = json_lines(small_texts(2000))
    for name, packed in {"a.jsonl.gz": gzip.compress(content), "a.jsonl.zst": zstandard.compress(content)}.items():
        path = written(tmp_path / name, packed[: int(len(packed) * share)])
        assert refusal(path) == ": cannot be decompressed (it ends in the middle); fetch or compress it again"
    assert "it ends in the middle" in refusal(written(tmp_path / "a.txt.gz", b""))


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.txt.zst"])
def test_a_file_that_is_not_compressed_is_refused(tmp_path: Path, name: str) -> None:
    assert refusal(written(tmp_path / name, b"plain text")).startswith(": cannot be decompressed (")
    packed = gzip.compress(b"{}\n") if name.endswith("gz") else zstandard.compress(b"a")
    assert refusal(written(tmp_path / name, packed + b"trailing")).startswith(
        (": cannot be decompressed (", ", line 1")
    )


def test_parquet_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"id": [1, 2], "content": ["a", "b"]}), path)
    assert refusal(path) == ": has no column text, only id, content; name that of the text with --text-key"
    assert refusal(path, key="id") == (
        ", row 1: id is not text but 1; a document is a row with its text under id (--text-key); name another "
        "column, or correct the row"
    )
    pyarrow.parquet.write_table(pyarrow.table({"a\nb\x1b": ["a"], "c" * 1000: ["b"]}), path)
    assert refusal(path) == rf": has no column text, only a\nb\x1b, {'c' * 40}; name that of the text with --text-key"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a", "b"] * 100}), path)
    written(path, path.read_bytes()[:-30])
    assert refusal(path).startswith(": cannot be read after row 0 (")


def test_a_document_that_is_too_long_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the byte; as soon as it is read, not at its end."""
    monkeypatch.setattr(document_reader, "LARGEST_DOCUMENT", 2**20)
    assert len(read(written(tmp_path / "a.txt", b"a" * 2**20))[0]) == 2**20
    path = written(tmp_path / "a.txt", b"a\n-----\n" + b"b" * (2**20 + 1))
    assert ": a document of more than 1 MiB, from byte 8; a text file is one document, unless --separator" in refusal(
        path
    )
    path = written(tmp_path / "a.jsonl", b'{"text": "a"}\n{"text": "' + b"b" * 2**20 + b'"}\n')
    assert refusal(path).startswith(", line 2: has more than 1 MiB; a document may not; cut it into several")
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["é" * 2**19, "é" * 2**19 + "e"]}), path)
    assert refusal(path).startswith(", row 2: has more than 1 MiB; a document may not; cut it into several")


@pytest.mark.parametrize("name", ["a.txt.gz", "a.jsonl.zst"])
def test_four_times_the_document_takes_four_times_as_long(tmp_path: Path, name: str) -> None:
    """Processor time, of content that does not get smaller, so that it comes in many chunks; the better of two."""

    def seconds(size: int) -> float:
        content = b'{"text": "' + random.Random(1).randbytes(size // 2).hex().encode() + b'"}\n'
        packed = gzip.compress(content, 1) if name.endswith("gz") else zstandard.compress(content)
        path = written(tmp_path / name, packed)
        taken = []
        for _ in range(2):
            begin = time.process_time()
            assert len(read(path)) == 1
            taken.append(time.process_time() - begin)
        return min(taken)

    assert seconds(16 * 2**20) < 8 * seconds(4 * 2**20)


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst"])
def test_what_expands_a_thousandfold_is_expanded_a_part_at_a_time(tmp_path: Path, name: str) -> None:
    """Repeated lines: some kilobytes that make 64 MiB."""
    content = json_lines(["a" * 2000]) * 2**15
    path = written(tmp_path / name, gzip.compress(content, 6) if name.endswith("gz") else zstandard.compress(content))
    assert path.stat().st_size < len(content) / 250
    tracemalloc.start()
    try:
        texts = read_documents(SourceFile(path, path.name), "text", None, lambda size: None)
        assert sum(1 for _ in texts) == 2**15
        assert tracemalloc.get_traced_memory()[1] < 24 * 2**20
    finally:
        tracemalloc.stop()


def test_zeros_behind_a_gzip_file_are_passed_over(tmp_path: Path) -> None:
    """As gzip itself does; also between two parts."""
    packed = gzip.compress(b"one ") + bytes(600) + gzip.compress(b"two") + bytes(1000)
    assert read(written(tmp_path / "a.txt.gz", packed)) == ["one two"]
    assert refusal(written(tmp_path / "a.txt.gz", bytes(600) + packed)).startswith(": cannot be decompressed (")


def test_a_zstd_window_that_is_too_large_is_named(tmp_path: Path) -> None:
    """As of `zstd --long=28`; a frame with an uncompressed block, by RFC 8878."""
    frame = b"\x28\xb5\x2f\xfd" + b"\x00" + bytes([(28 - 10) << 3]) + ((3 << 3) | 1).to_bytes(3, "little") + b"abc"
    assert refusal(written(tmp_path / "a.txt.zst", frame)).startswith(": was made with a window above 128 MiB, which")
    allowed = frame[:5] + bytes([(27 - 10) << 3]) + frame[6:]
    assert read(written(tmp_path / "a.txt.zst", allowed)) == ["abc"]


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.parquet"])
def test_a_disk_that_fails_is_no_mistake_of_the_user_s(tmp_path: Path, name: str) -> None:
    """So what has been done is kept."""
    with pytest.raises(RunError, match=rf"{name}: cannot be read \(No such file or directory\); then the same command"):
        read(tmp_path / name)
