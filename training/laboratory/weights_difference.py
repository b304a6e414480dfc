"""Whether two checkpoints have the same weights and, if not, how far apart they are, and in which tensors."""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

AT_ONCE = 2**21
"""Values that are compared in float64 at a time."""
SHOWN = 8


@dataclass(frozen=True)
class TensorDifference:
    """How far a tensor of B is from the one of that name in A."""

    name: str
    values: int
    differing: int
    """Values that are not equal; those that are not a number in both are."""
    largest: float
    """Largest absolute difference; infinite where only one of two values is finite."""
    relative: float
    """The norm of the difference over the norm of A's tensor."""


@dataclass(frozen=True)
class WeightsDifference:
    """Two files of weights compared: a first, b second."""

    files: tuple[Path, Path]
    same_bytes: bool
    sha256: tuple[str, str]
    """Of the files."""
    same_start: bool | None
    """Whether their runs began with the same weights; None where that is not known."""
    total: TensorDifference
    """Over all tensors that both have in one shape."""
    tensors: list[TensorDifference]
    """Of those that differ, the farthest first."""
    compared: int
    """Tensors that both have in one shape."""
    only: tuple[list[str], list[str]]
    """Tensors that only one has."""
    other_shapes: dict[str, tuple[list[int], list[int]]]
    """Tensors that both have, but in two shapes."""


def compare_weights(first: str, second: str, checkpoints: Path) -> WeightsDifference:
    """Compares the weights of two checkpoints, a tensor at a time.

    Args:
        first: A, as `weights_file` takes it.
        second: B.
        checkpoints: the folder of the runs.

    Raises:
        UserError: there is no such checkpoint, or a file is not whole.
    """
    from training.file_digest import file_digest

    files = (weights_file(first, checkpoints), weights_file(second, checkpoints))
    digests = (file_digest(files[0]), file_digest(files[1]))
    starts = [initial_weights(file) for file in files]
    shapes_a, shapes_b = (_shapes(file) for file in files)
    both = sorted(shapes_a.keys() & shapes_b.keys())
    other_shapes = {name: (shapes_a[name], shapes_b[name]) for name in both if shapes_a[name] != shapes_b[name]}
    sums = [_sums_of(name, files) for name in both if name not in other_shapes]
    differing = [_difference(item) for item in sums if item.differing]
    return WeightsDifference(
        files=files,
        same_bytes=digests[0] == digests[1],
        sha256=digests,
        same_start=None if None in starts else starts[0] == starts[1],
        total=_difference(_total(sums)),
        tensors=sorted(differing, key=lambda tensor: (-tensor.relative, tensor.name)),
        compared=len(sums),
        only=(sorted(shapes_a.keys() - shapes_b.keys()), sorted(shapes_b.keys() - shapes_a.keys())),
        other_shapes=other_shapes,
    )


def weights_file(name: str, checkpoints: Path) -> Path:
    """The file of weights that the user means.

    Args:
        name: the path of a .safetensors file, or what `find_model` takes: RUN, RUN/best, RUN/step_00000617, a folder.
        checkpoints: the folder of the runs.

    Raises:
        UserError: there is none.
    """
    from training.checkpoint_files import MODEL
    from training.lookup import find_model

    if name.endswith(".safetensors"):
        if not Path(name).is_file():
            raise UserError(f"{name!r}: there is no such file; give a checkpoint, or a .safetensors file")
        return Path(name)
    return find_model(name, checkpoints).path / MODEL


def initial_weights(file: Path) -> str | None:
    """The sha256 of the weights that the run of a checkpoint's file began with; None where that is not known."""
    from training.metrics_file import first_value

    return first_value(file.resolve().parent.parent / "metrics.jsonl", "weights_sha256")


@dataclass(frozen=True)
class _Sums:
    """What can be added up over the parts of a tensor, and over tensors."""

    name: str
    values: int
    differing: int
    largest: float
    squared_difference: float
    squared: float
    """Of A's values."""


def _shapes(path: Path) -> dict[str, list[int]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            return {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: is not a whole safetensors file ({error}); give another") from None


def _tensor(path: Path, name: str) -> "Tensor":
    """One tensor, mapped; opened for it alone, so that what has been read of the others does not stay in memory."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        tensor: Tensor = file.get_tensor(name)
    return tensor


def _sums_of(name: str, files: tuple[Path, Path]) -> _Sums:
    a, b = (_tensor(file, name) for file in files)
    try:
        return _sums(name, a, b)
    except NotImplementedError:  # of packed and other rare dtypes, with which PyTorch computes nothing
        kinds = " and ".join(sorted({str(a.dtype), str(b.dtype)}))
        raise UserError(f"{files[0]}, {files[1]}: {name} is {kinds}, which cannot be compared; give others") from None


def _sums(name: str, a: "Tensor", b: "Tensor") -> _Sums:
    parts = [_part_sums(name, *part) for part in _parts(a, b)]
    return _total(parts, name)


def _parts(a: "Tensor", b: "Tensor") -> Iterator[tuple["Tensor", "Tensor"]]:
    for start in range(0, a.numel(), AT_ONCE):
        stop = start + AT_ONCE
        yield a.view(-1)[start:stop].double(), b.view(-1)[start:stop].double()


def _part_sums(name: str, a: "Tensor", b: "Tensor") -> _Sums:
    difference = a - b
    squared_difference, squared = float(difference.dot(difference)), float(a.dot(a))
    if not math.isfinite(squared_difference + squared):
        same = (a == b) | (a.isnan() & b.isnan())
        difference = difference.masked_fill(same, 0.0).nan_to_num(math.inf, math.inf, math.inf)
        squared_difference = float(difference.square().sum())
        squared = float(a.nan_to_num(0.0, 0.0, 0.0).square().sum())
    largest = float(difference.abs().max())
    return _Sums(name, a.numel(), int(difference.count_nonzero()), largest, squared_difference, squared)


def _total(parts: list[_Sums], name: str = "") -> _Sums:
    return _Sums(
        name,
        sum(part.values for part in parts),
        sum(part.differing for part in parts),
        max((part.largest for part in parts), default=0.0),
        math.fsum(part.squared_difference for part in parts),
        math.fsum(part.squared for part in parts),
    )


def _difference(sums: _Sums) -> TensorDifference:
    norm = math.sqrt(sums.squared)
    distance = math.sqrt(sums.squared_difference)
    relative = distance / norm if norm else (math.inf if distance else 0.0)
    return TensorDifference(sums.name, sums.values, sums.differing, sums.largest, relative)


# What is shown


def as_mapping(difference: WeightsDifference) -> dict[str, Any]:
    """All of it as plain values."""
    return asdict(difference) | {"files": [str(file) for file in difference.files]}


def describe(difference: WeightsDifference) -> list[str]:
    """What the user reads, a line each: the verdict first, then the tensors that are farthest apart."""
    lines = [f"{name}  {file}" for name, file in zip("AB", difference.files, strict=True)]
    lines += [_verdict(difference), _start(difference)]
    for name, only in zip("AB", difference.only, strict=True):
        if only:
            lines.append(f"only in {name}: {', '.join(only[:SHOWN])}{', ...' * (len(only) > SHOWN)}")
    lines += [f"{name}: shape {list(a)} in A, {list(b)} in B" for name, (a, b) in difference.other_shapes.items()]
    if not difference.tensors:
        return lines
    total = difference.total
    rows = [("tensor", "values that differ", "largest difference", "norm of difference / norm of A")]
    rows += [_row(tensor) for tensor in difference.tensors[:SHOWN]]
    if len(difference.tensors) > SHOWN:
        rows.append((f"... {len(difference.tensors) - SHOWN} more tensors that differ, each by less", "", "", ""))
    rows.append(("all", *_row(total)[1:]))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cells = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows]
    return [*lines, "", *("  ".join(row).rstrip() for row in cells)]


def _row(tensor: TensorDifference) -> tuple[str, str, str, str]:
    differing = f"{tensor.differing:,} of {tensor.values:,}"
    return tensor.name, differing, f"{tensor.largest:.3g}", f"{tensor.relative:.3g}"


def _verdict(difference: WeightsDifference) -> str:
    if difference.same_bytes:
        return f"the same bytes, sha256 {difference.sha256[0]}"
    if difference.tensors:
        return f"not the same weights: {len(difference.tensors):,} of {difference.compared:,} tensors differ"
    if difference.other_shapes or any(difference.only):
        return f"not the same weights: the {difference.compared:,} tensors that both have in one shape are equal"
    return f"the same weights in files that differ otherwise: all {difference.compared:,} tensors are equal"


def _start(difference: WeightsDifference) -> str:
    if difference.same_start is None:
        return "whether their runs began with the same weights is not known"
    return f"their runs began with {'the same' if difference.same_start else 'other'} weights"
