"""JSON: strict text; files that others may have written give an object, or one sentence."""

from pathlib import Path

import pytest

from training import json_file
from training.errors import UserError
from training.json_file import append_objects, read_json_object, strict_json


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"{", "cannot be read as JSON (Expecting"),
        (b"\xff", "cannot be read as JSON ('utf-8' codec"),
        (b"[" * 200_000, "cannot be read as JSON (it is nested too deeply)"),
        (b"[1]", "must be a JSON object"),
        (b" " * 2000 + b"{}", "is larger than 1,000 bytes"),
    ],
)
def test_what_is_no_object_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, said: str
) -> None:
    if said.startswith("is larger"):
        monkeypatch.setattr(json_file, "MOST_BYTES", 1000)
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        read_json_object(path, "fetch it again")
    assert str(caught.value).startswith(f"{path}: {said}")
    assert str(caught.value).endswith("; fetch it again")


def test_an_object_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"a": [1]}')
    assert read_json_object(tmp_path / "a.json", "") == {"a": [1]}
    with pytest.raises(UserError, match="cannot be read as JSON"):
        read_json_object(tmp_path, "")


def test_json_of_ours_is_strict() -> None:
    """At any depth; True stays true."""
    values = {"a": float("nan"), "b": [1.5, (float("inf"), {"c": -float("inf")})], "d": True, "e": "NaN"}
    assert strict_json(values) == '{"a": null, "b": [1.5, [null, {"c": null}]], "d": true, "e": "NaN"}'


@pytest.mark.parametrize(
    ("before", "kept"),
    [
        (None, ""),
        ("", ""),
        ('{"a": 1}\n', '{"a": 1}\n'),
        ('{"a": 1}\n{"b": "cu', '{"a": 1}\n'),
        ('{"b": "cu', ""),
        ('{"a": 1}\n{"b": 2}', '{"a": 1}\n{"b": 2}\n'),
        ("[" * 100_000, ""),
    ],
)
def test_objects_are_added_on_lines_of_their_own(tmp_path: Path, before: str | None, kept: str) -> None:
    """Whatever a crash has cut off; a last line that only lacks its newline stays."""
    path = tmp_path / "a.jsonl"
    if before is not None:
        path.write_text(before)
    append_objects(path, {"c": float("nan")}, {"d": "é"})
    assert path.read_text() == kept + '{"c": null}\n{"d": "\\u00e9"}\n'
