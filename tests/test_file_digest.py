"""The digest of a file, by the example of FIPS 180-2."""

from pathlib import Path

from training.file_digest import file_digest


def test_it_is_the_sha256(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    assert file_digest(tmp_path / "file") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
