"""The store of Xet's own client, hf_xet, in a folder: `local://FOLDER` in place of the address of a server.

A commit names a file that came by Xet by its sha256 alone, so the Xet hash has to be looked up in what was uploaded.
"""

import struct
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

HEADER, RECORD = 48, 48
HAS_VERIFICATION, HAS_METADATA = 0x80000000, 0x40000000


def find_xet(store: Path, sha256: str) -> tuple[str, int] | None:
    """The Xet hash and the size of an uploaded file; None if there is none of this sha256."""
    for shard in store.rglob("*.mdb"):
        for xet_hash, size, digest in _files_of(shard.read_bytes()):
            if digest == sha256:
                return xet_hash, size
    return None


def read_xet(store: Path, xet_hash: str, size: int) -> bytes:
    """The content of an uploaded file; no client may be at work in the store."""
    from hf_xet import XetFileInfo, XetSession

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "content")
        session = XetSession().new_file_download_group(
            endpoint=f"local://{store}", token="x", token_expiry_unix_secs=int(time.time()) + 3600
        )
        with session as group:
            group.start_download_file(XetFileInfo(xet_hash, size), str(path))
        return path.read_bytes()


def _files_of(shard: bytes) -> Iterator[tuple[str, int, str | None]]:
    """The (Xet hash, size, sha256) of each file in a shard's first section."""
    position = HEADER
    while position + RECORD <= len(shard) and shard[position : position + 32] != b"\xff" * 32:
        xet_hash = _text(shard[position : position + 32])
        flags, terms = struct.unpack_from("<II", shard, position + 32)
        position += RECORD
        size = sum(struct.unpack_from("<I", shard, position + RECORD * term + 36)[0] for term in range(terms))
        position += RECORD * terms * (2 if flags & HAS_VERIFICATION else 1)
        sha256 = None
        if flags & HAS_METADATA:
            sha256 = _text(shard[position : position + 32])
            position += RECORD
        yield xet_hash, size, sha256


def _text(hash_bytes: bytes) -> str:
    """Four little-endian numbers of 64 bits, each as 16 hexadecimal digits."""
    return "".join(hash_bytes[start : start + 8][::-1].hex() for start in range(0, 32, 8))
