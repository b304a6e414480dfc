"""Token files: every type by value, and everything that a file can have wrong."""

import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import REPOSITORY
from safetensors.numpy import save
from safetensors.torch import save_file as save_torch_file
from small_configs import write_positions, write_tokens

from training.errors import UserError
from training.rows import Rows, TokenFile


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32, np.int32, np.int64])
def test_every_integer_type_is_read_by_value(tmp_path: Path, dtype: Any) -> None:
    """R71: never reinterpreted."""
    largest = min(np.iinfo(dtype).max, 2**40)
    file = TokenFile(write_tokens(tmp_path / "train.safetensors", [0, 1, 50256, largest], dtype))
    assert file.length == 4
    assert file.read(0, 4).tolist() == [0, 1, 50256, largest]
    assert file.read(1, 3).dtype == np.int64


def test_batches_are_int64_inputs_and_targets_of_the_rows_asked_for(tmp_path: Path) -> None:
    """R81: torch can neither index an embedding with uint16 nor compare it, so no batch has that type."""
    rows = Rows(TokenFile(write_positions(tmp_path / "train.safetensors", 100)), start=10, count=11, context=8)
    inputs, targets = rows.read([3, 0])
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.tolist() == [list(range(34, 42)), list(range(10, 18))]
    assert targets.tolist() == [list(range(35, 43)), list(range(11, 19))]
    assert rows.stop == 99


def test_r81_the_least_torch_has_the_unsigned_types() -> None:
    """It is what the package asks for, so pip sees to it: 2.3 brought uint16 and uint32."""
    stated = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["dependencies"]
    [least] = [entry.removeprefix("torch>=") for entry in stated if entry.startswith("torch>=")]
    versions = [tuple(map(int, version.split("+")[0].split(".")[:2])) for version in (least, torch.__version__)]
    assert (2, 3) <= versions[0] <= versions[1]


def test_the_fingerprint_is_that_of_the_file_not_of_the_range(tmp_path: Path) -> None:
    """A run may go on with more of a file, but not with another: a token, the length or the type differs."""
    path = tmp_path / "train.safetensors"
    tokens = np.arange(20_000)
    file = TokenFile(write_tokens(path, tokens))
    found = file.fingerprint()
    assert TokenFile(write_tokens(tmp_path / "copy.safetensors", tokens)).fingerprint() == found
    others: list[tuple[Any, Any]] = [(tokens[:-1], np.uint16), (tokens[1:], np.uint16), (tokens, np.int32)]
    others += [(np.where(tokens == place, 7, tokens), np.uint16) for place in (0, 9_999, 19_999)]
    fingerprints = {TokenFile(write_tokens(path, *other)).fingerprint() for other in others}
    assert len(fingerprints | {found}) == 1 + len(others)


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 6520504474\n"
WHOLE = save({"tokens": np.arange(1025, dtype=np.uint16)})


@pytest.mark.parametrize(
    "content",
    [b"", WHOLE[:-1], WHOLE[:40], WHOLE + b"x", LFS, b"<!doctype html><html>Not found</html>", b"\xff" * 64, b"{}"],
    ids=["empty", "truncated", "header only", "too long", "LFS pointer", "HTML", "noise", "JSON"],
)
def test_a_file_that_is_no_whole_token_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "train.safetensors"
    path.write_bytes(content)
    with pytest.raises(UserError, match=f"^{path}: not a whole safetensors file .*; download or prepare it again$"):
        TokenFile(path)


@pytest.mark.parametrize(
    ("tensors", "problem"),
    [
        ({"ids": torch.zeros(9, dtype=torch.int32)}, "has no `tokens`, only ids; is it a token file"),
        ({}, "has no `tokens`, only nothing"),
        (
            {"tokens": torch.zeros(3, 3, dtype=torch.int32)},
            r"has type I32 and shape \[3, 3\]; it must be one row of uint16",
        ),
        ({"tokens": torch.zeros((), dtype=torch.int32)}, r"has type I32 and shape \[\]"),
        ({"tokens": torch.zeros(9)}, r"has type F32 and shape \[9\]"),
        ({"tokens": torch.zeros(9, dtype=torch.bfloat16)}, "has type BF16"),
        ({"tokens": torch.zeros(9, dtype=torch.uint8)}, "has type U8"),
        ({"tokens": torch.zeros(9, dtype=torch.int16)}, "has type I16"),
        ({"tokens": torch.zeros(9, dtype=torch.uint64)}, "has type U64"),
        ({"tokens": torch.zeros(9, dtype=torch.bool)}, "has type BOOL"),
        (
            {"tokens": torch.zeros(9, dtype=torch.int32), "loss_mask": torch.ones(9, dtype=torch.uint8)},
            "has a `loss_mask` without `document_ends`; only documents can be masked; add the ends",
        ),
    ],
)
def test_tensors_that_are_no_tokens(tmp_path: Path, tensors: dict[str, torch.Tensor], problem: str) -> None:
    """R71: another type is refused by name."""
    path = tmp_path / "train.safetensors"
    save_torch_file(tensors, path)
    with pytest.raises(UserError, match=f"^{path}: .*{problem}"):
        TokenFile(path)
