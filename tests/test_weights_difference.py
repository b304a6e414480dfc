"""Two checkpoints' weights compared: figures worked out by hand, and all in which two files can differ."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from recorded_runs import begin, write_run
from safetensors.torch import save_file
from small_checkpoints import save, set_final_norm

from training.errors import UserError
from training.json_file import strict_json
from training.laboratory import weights_difference
from training.laboratory.compare_commands import compare
from training.laboratory.weights_difference import WeightsDifference, as_mapping, compare_weights, describe

Values = dict[str, Any]


def compared(folder: Path, a: Values, b: Values, **metadata: str) -> WeightsDifference:
    for name, tensors in (("a", a), ("b", b)):
        content = {
            key: value if isinstance(value, torch.Tensor) else torch.tensor(value) for key, value in tensors.items()
        }
        save_file(content, folder / f"{name}.safetensors", metadata=(metadata or None) if name == "b" else None)
    return compare_weights(str(folder / "a.safetensors"), str(folder / "b.safetensors"), folder)


def test_the_same_bytes(tmp_path: Path) -> None:
    difference = compared(tmp_path, {"w": [1.0, 2.0]}, {"w": [1.0, 2.0]})
    assert difference.same_bytes
    assert (difference.compared, difference.tensors, difference.total.differing) == (1, [], 0)
    assert describe(difference)[2] == f"the same bytes, sha256 {difference.sha256[0]}"


def test_the_same_weights_in_another_file(tmp_path: Path) -> None:
    weights = {"w": [1.0, math.nan, math.inf]}
    difference = compared(tmp_path, weights, weights, format="other")
    assert not difference.same_bytes
    assert describe(difference)[2] == "the same weights in files that differ otherwise: all 1 tensors are equal"


@pytest.mark.parametrize("at_once", [1, 2, 3, 2**21])
def test_distances_worked_out_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    """far: (3, 4) to (0, 0) is all of its norm 5; near: 12 to 12.5 is 1/24; all: sqrt(25.25) over 13."""
    monkeypatch.setattr(weights_difference, "AT_ONCE", at_once)
    a = {"far": [[3.0, 4.0]], "near": [12.0, 0.0, 0.0], "same": [0.0]}
    difference = compared(tmp_path, a, {"far": [[0.0, 0.0]], "near": [12.5, 0.0, 0.0], "same": [-0.0]})
    far, near = difference.tensors
    assert (far.name, far.values, far.differing, far.largest, far.relative) == ("far", 2, 2, 4.0, 1.0)
    assert (near.name, near.values, near.differing, near.largest) == ("near", 3, 1, 0.5)
    assert near.relative == pytest.approx(0.5 / 12, rel=1e-15)
    total = difference.total
    assert (total.values, total.differing, total.largest) == (6, 3, 4.0)
    assert total.relative == pytest.approx(math.sqrt(25.25) / 13, rel=1e-15)
    lines = describe(difference)
    assert lines[2] == "not the same weights: 2 of 3 tensors differ"
    assert [line.split() for line in lines[-3:]] == [
        ["far", "2", "of", "2", "4", "1"],
        ["near", "1", "of", "3", "0.5", "0.0417"],
        ["all", "3", "of", "6", "4", f"{total.relative:.3g}"],
    ]


def test_what_is_not_finite_and_what_was_zero(tmp_path: Path) -> None:
    nan, inf = math.nan, math.inf
    a = {"broken": [1.0, 2.0], "both": [nan, inf, -inf], "zero": [0.0], "sign": [inf]}
    difference = compared(tmp_path, a, {"broken": [1.0, nan], "both": [nan, inf, -inf], "zero": [1.0], "sign": [-inf]})
    by_name = {tensor.name: tensor for tensor in difference.tensors}
    assert sorted(by_name) == ["broken", "sign", "zero"]
    assert (by_name["broken"].differing, by_name["broken"].largest) == (1, inf)
    assert (by_name["zero"].largest, by_name["zero"].relative) == (1.0, inf)
    assert by_name["sign"].largest == inf
    assert json.loads(strict_json(as_mapping(difference)))["total"]["largest"] is None


def test_tensors_that_one_has_or_in_another_shape_or_type(tmp_path: Path) -> None:
    a = {"w": [1.0, 2.0], "head": [1.0], "shape": [[1.0], [2.0]], "scalar": 1.0, "none": torch.zeros(0)}
    b = {"w": torch.tensor([1.0, 2.5], dtype=torch.bfloat16), "tail": [1.0], "shape": [1.0, 2.0], "scalar": 1.0}
    difference = compared(tmp_path, a, {**b, "none": torch.zeros(0)})
    assert difference.only == (["head"], ["tail"])
    assert difference.other_shapes == {"shape": ([2, 1], [2])}
    assert [(tensor.name, tensor.largest) for tensor in difference.tensors] == [("w", 0.5)]
    assert describe(difference)[4:7] == ["only in A: head", "only in B: tail", "shape: shape [2, 1] in A, [2] in B"]
    equal = compared(tmp_path, {"w": [1.0]}, {"w": [1.0], "v": [1.0]})
    assert "the 1 tensors that both have in one shape are equal" in describe(equal)[2]


def test_checkpoints_by_the_names_of_other_commands(tmp_path: Path) -> None:
    """RUN, RUN/step_N, a folder, a file; and whether the runs began with the same weights, as far as they say."""
    runs = {name: write_run(tmp_path / name, []) for name in ("one", "two", "three")}
    for name, sha256 in (("one", "ab"), ("two", "ab")):
        (runs[name] / "metrics.jsonl").write_text(json.dumps(begin(0, "start", 1, weights_sha256=sha256)) + "\n")
    folders = {name: save(run, 5) for name, run in runs.items()}
    set_final_norm(folders["two"], 1.5)
    difference = compare_weights("one", "two/step_00000005", tmp_path)
    assert difference.files == tuple(folders[name] / "model.safetensors" for name in ("one", "two"))
    [tensor] = difference.tensors
    assert (tensor.name, tensor.largest, tensor.relative) == ("final_norm.weight", 0.5, 0.5)
    assert difference.same_start is True
    assert describe(difference)[3] == "their runs began with the same weights"
    unknown = compare_weights(str(folders["one"]), str(folders["three"] / "model.safetensors"), tmp_path)
    assert (unknown.same_bytes, unknown.same_start) == (True, None)
    (runs["three"] / "metrics.jsonl").write_text(json.dumps(begin(0, "start", 1, weights_sha256="cd")) + "\n")
    assert compare_weights("one", "three", tmp_path).same_start is False


def test_what_cannot_be_compared(tmp_path: Path) -> None:
    (tmp_path / "half.safetensors").write_bytes(b"\x00" * 20)
    save_file({"w": torch.zeros(1)}, tmp_path / "whole.safetensors")
    header = b'{"w":{"dtype":"F4","shape":[2],"data_offsets":[0,1]}}'
    (tmp_path / "packed.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\x01")
    with pytest.raises(UserError, match=r"w is .*, which cannot be compared; give others"):
        compare_weights(str(tmp_path / "packed.safetensors"), str(tmp_path / "packed.safetensors"), tmp_path)
    whole = str(tmp_path / "whole.safetensors")
    for name, problem in (
        (str(tmp_path / "half.safetensors"), "half.safetensors: is not a whole safetensors file"),
        (str(tmp_path / "no.safetensors"), "there is no such file; give a checkpoint, or a .safetensors file"),
        ("nowhere", "'nowhere': there is no such run or checkpoint"),
    ):
        with pytest.raises(UserError, match=problem):
            compare_weights(whole, name, tmp_path)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """isobatch compare --weights A B, in words and as JSON; two of them, no more and no less."""
    compared(tmp_path, {"w": [1.0]}, {"w": [1.5]})
    a, b = str(tmp_path / "a.safetensors"), str(tmp_path / "b.safetensors")
    compare([a, b], weights=True)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == [f"A  {a}", f"B  {b}", "not the same weights: 1 of 1 tensors differ"]
    compare([a, a], weights=True, form="json")
    values = json.loads(capsys.readouterr().out)
    assert (values["same_bytes"], values["files"], values["same_start"]) == (True, [a, a], None)
    for wrong in ([a], [a, b, a]):
        with pytest.raises(UserError, match=f"compares two checkpoints or .safetensors files, got {len(wrong)}"):
            compare(wrong, weights=True)
    with pytest.raises(UserError, match=r"^--format: must be one of terminal, json with --weights, got 'csv'"):
        compare([a, b], weights=True, form="csv")
