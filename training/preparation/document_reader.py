"""Reads the documents of a source, one after the other, from text, JSON lines or Parquet, also compressed.

Nothing is held but the document at hand and what has been read ahead: a quarter of a mebibyte, and of a compressed file
what some hundred bytes of it expand to; of Parquet, some rows and the column of one row group.
"""

import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from training.errors import RunError, UserError, one_line
from training.preparation.sources import SourceFile

LARGEST_DOCUMENT = 64 * 2**20
READ_AT_ONCE = 2**18
DECOMPRESSED_AT_ONCE = 512
"""Bytes of a compressed file: zstd makes at most 16 MiB of them (of 4 bytes a block of 128 KiB), gzip half a MiB."""
ROWS_AT_ONCE = 256
BYTE_ORDER_MARK = b"\xef\xbb\xbf"

Progress = Callable[[int], object]
"""Is told how many bytes of a source's file have been read since the last time."""


class Decompressor(Protocol):
    """What zlib and zstandard have in common."""

    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, /) -> bytes: ...


def read_documents(file: SourceFile, text_key: str, separator: str | None, progress: Progress) -> Iterator[str]:
    """Yields the texts of a file's documents in order, empty ones included.

    A text file is one document, or as many as the separator cuts it into. A line of JSON, and a row of Parquet, is
    one; its text lies under `text_key`, and null is an empty text.

    Raises:
        UserError: naming the file, and the line, row or byte, that is wrong.
        RunError: the disk or the network behind it fails.
    """
    if file.format == "Parquet":
        yield from _parquet_texts(file, text_key, progress)
    elif file.format == "text":
        yield from _texts(file, separator, progress)
    else:
        for number, line in read_lines(file, progress):
            try:
                yield _text_of(parse_object(line), text_key)
            except ValueError as error:
                raise UserError(
                    f"{file.label}, line {number}: {error}; a document is a JSON object with its text under "
                    f"{text_key} (--text-key); correct or remove the line"
                ) from None


def read_lines(file: SourceFile, progress: Progress) -> Iterator[tuple[int, bytes]]:
    """Yields number, from 1, and content of each line that has one; lines of nothing but white space are passed over.

    Raises:
        UserError: the file cannot be decompressed, or a line is too long.
    """
    for number, (_, line) in enumerate(_cut(file, b"\n", progress), start=1):
        if len(line) > LARGEST_DOCUMENT:
            raise UserError(
                f"{file.label}, line {number}: has more than {LARGEST_DOCUMENT // 2**20} MiB; a document may not; "
                "cut it into several"
            )
        if line.strip():
            yield number, line


def parse_object(line: bytes) -> dict[str, Any]:
    """Reads a line of JSON.

    Raises:
        ValueError: saying what is wrong.
    """
    try:
        record = json.loads(line.decode())
    except UnicodeDecodeError:
        raise ValueError("is not UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not JSON ({error})") from None
    if not isinstance(record, dict):
        raise ValueError("is not a JSON object")
    return record


def check_text(key: str, text: object) -> str:
    """A text that UTF-8 can hold.

    Raises:
        ValueError: saying what is wrong with it.
    """
    if not isinstance(text, str):
        raise ValueError(f"{key} is not text but {json.dumps(text, default=str)[:40]}")
    if not text.isascii() and text != text.encode("utf-8", "replace").decode():
        raise ValueError(f"{key} is not Unicode text (half a surrogate pair)")
    return text


def some_of(names: Iterable[str]) -> str:
    """The first of some names from a file, each as far as a sentence has room for it."""
    return ", ".join(one_line(name[:40]) for name in islice(names, 9))


def _text_of(record: dict[str, Any], key: str) -> str:
    if key not in record:
        raise ValueError(f"has no {key}, only {some_of(record) or 'nothing'}")
    return "" if record[key] is None else check_text(key, record[key])


def _texts(file: SourceFile, separator: str | None, progress: Progress) -> Iterator[str]:
    for offset, piece in _cut(file, separator.encode() if separator is not None else None, progress):
        if len(piece) > LARGEST_DOCUMENT:
            raise UserError(
                f"{file.label}: a document of more than {LARGEST_DOCUMENT // 2**20} MiB, from byte {offset:,}; a text "
                "file is one document, unless --separator names the text between two; give another --separator"
            )
        try:
            yield piece.decode()
        except UnicodeDecodeError as error:
            raise UserError(
                f"{file.label}: byte {offset + error.start:,} is not UTF-8; texts are read in UTF-8; convert the file"
            ) from None


def _cut(file: SourceFile, separator: bytes | None, progress: Progress) -> Iterator[tuple[int, bytes]]:
    """The pieces of a file between separators, with their offsets; one too long comes as soon as it is.

    A piece may come in a hundred thousand chunks, so each is looked at once.
    """
    rest, offset = bytearray(), 0
    for chunk in _chunks(file, progress):
        new = len(rest)
        rest += chunk
        if offset == 0 and new < len(BYTE_ORDER_MARK) and rest.startswith(BYTE_ORDER_MARK):
            del rest[: len(BYTE_ORDER_MARK)]
            new, offset = 0, len(BYTE_ORDER_MARK)
        if separator is not None:
            start, end = 0, rest.find(separator, max(new - len(separator) + 1, 0))
            while end >= 0:
                yield offset + start, bytes(rest[start:end])
                start = end + len(separator)
                end = rest.find(separator, start)
            del rest[:start]
            offset += start
        if len(rest) > LARGEST_DOCUMENT:
            yield offset, bytes(rest)
    yield offset, bytes(rest)


def _chunks(file: SourceFile, progress: Progress) -> Iterator[bytes]:
    raw = _raw_chunks(file.path, progress)
    if not file.compression:
        yield from raw
        return
    try:
        # gzip files may be padded with zeros, as tapes are.
        yield from _decompressed(raw, _decompressor(file), b"\0" if file.compression == ".gz" else b"")
    except (UserError, RunError):
        raise
    except Exception as error:  # zstandard's own derives from Exception alone
        if "too much memory" in str(error):
            raise UserError(
                f"{file.label}: was made with a window above 128 MiB, which no reader allows unasked; compress it "
                "again without zstd's --long, or with --long=27"
            ) from error
        raise UserError(f"{file.label}: cannot be decompressed ({error}); fetch or compress it again") from error


def _raw_chunks(path: Path, progress: Progress) -> Iterator[bytes]:
    try:
        with path.open("rb") as raw:
            while chunk := raw.read(READ_AT_ONCE):
                progress(len(chunk))
                yield chunk
    except OSError as error:
        raise _disk_fails(path, error) from error


def _disk_fails(path: Path, error: OSError) -> RunError:
    return RunError(f"{one_line(path)}: cannot be read ({error.strerror}); then the same command goes on")


def _decompressed(raw: Iterator[bytes], new: Callable[[], Decompressor], padding: bytes) -> Iterator[bytes]:
    """Of a file of several compressed parts, all; `padding` may lie behind each of them."""
    decompressor = new()
    for chunk in raw:
        for start in range(0, len(chunk), DECOMPRESSED_AT_ONCE):
            rest = chunk[start : start + DECOMPRESSED_AT_ONCE]
            while rest := rest.lstrip(padding) if decompressor.eof else rest:
                if decompressor.eof:
                    decompressor = new()
                yield decompressor.decompress(rest)
                rest = decompressor.unused_data
    if not decompressor.eof:
        raise ValueError("it ends in the middle")


def _decompressor(file: SourceFile) -> Callable[[], Decompressor]:
    if file.compression == ".gz":
        return lambda: zlib.decompressobj(wbits=31)
    import zstandard

    return lambda: zstandard.ZstdDecompressor().decompressobj()


def _parquet_texts(file: SourceFile, key: str, progress: Progress) -> Iterator[str]:
    import pyarrow
    import pyarrow.parquet

    row, told = 0, 0
    try:
        size = file.path.stat().st_size
        with pyarrow.parquet.ParquetFile(file.path) as table:
            names = table.schema_arrow.names
            if key not in names:
                raise UserError(
                    f"{file.label}: has no column {key}, only {some_of(names)}; name that of the text with --text-key"
                )
            for batch in table.iter_batches(ROWS_AT_ONCE, columns=[key]):
                for text in batch.column(0).to_pylist():
                    row += 1
                    yield "" if text is None else _checked_row(file, row, key, text)
                reached = size * row // max(table.metadata.num_rows, 1)
                progress(reached - told)
                told = reached
    except (pyarrow.ArrowException, ValueError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # pyarrow's own, of a damaged file, has none
            raise _disk_fails(file.path, error) from error
        raise UserError(
            f"{file.label}: cannot be read after row {row:,} ({one_line(error)}); fetch or make it again"
        ) from error
    progress(size - told)


def _checked_row(file: SourceFile, row: int, key: str, value: object) -> str:
    try:
        text = check_text(key, value)
    except ValueError as error:
        raise UserError(
            f"{file.label}, row {row:,}: {error}; a document is a row with its text under {key} (--text-key); name "
            "another column, or correct the row"
        ) from None
    # A character has at most four bytes, so that short texts need not be encoded.
    if len(text) * 4 > LARGEST_DOCUMENT and len(text.encode()) > LARGEST_DOCUMENT:
        raise UserError(
            f"{file.label}, row {row:,}: has more than {LARGEST_DOCUMENT // 2**20} MiB; a document may not; cut it "
            "into several"
        )
    return text
