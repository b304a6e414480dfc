"""YAML as people mean it, and files that are no config at all."""

import time
from pathlib import Path
from typing import Any

import pytest

from training.errors import UserError
from training.yaml_reader import BareWord, parse_yaml, read_yaml, yaml_text


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("6E-4", 0.0006),
        ("1e3", 1000),
        ("1.5e3", 1500),
        ("1.0e+3", 1000),
        ("1.e-3", 0.001),
        ("+1e-3", 0.001),
        ("-2.5", -2.5),
        (".5", 0.5),
        ("1_000_000", 1_000_000),
        ("1_0.2_5", 10.25),
        ("3.0", 3),
        ("010", 10),
        ("-0", 0),
        ("3260190720", 3_260_190_720),
        ("1e400", float("inf")),
        ("-1e400", float("-inf")),
        (".inf", float("inf")),
        ("9" * 309, float("inf")),
        ("9" * 5000, float("inf")),
        ("[9e-1, 0.95]", [0.9, 0.95]),
        ("{lr: 1e-3, steps: 1e3}", {"lr": 0.001, "steps": 1000}),
    ],
)
def test_numbers_are_what_a_person_means(text: str, value: Any) -> None:
    """R64: also in lists and sections; a whole number is an integer however it is written."""
    read = parse_yaml(text, "here")
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    "text", ["abc", "0x10", "0o10", "1:30", "1,000", "_1", "1e", "e3", "2020-01-01", "-x", ".", "y"]
)
def test_what_looks_like_a_number_or_a_date_to_others_is_text(text: str) -> None:
    """R64, R67: YAML 1.1 has base 60, dates and octals; a config has not."""
    assert parse_yaml(text, "here") == text


@pytest.mark.parametrize("text", ["'1e-3'", '"1e-3"', "'off'", '"true"', "'null'"])
def test_what_is_quoted_is_text(text: str) -> None:
    read = parse_yaml(text, "here")
    assert type(read) is str
    assert read == text[1:-1]


@pytest.mark.parametrize("text", ["yes", "No", "on", "OFF"])
def test_bare_words_are_text_that_may_become_a_boolean(text: str) -> None:
    """R67: which of the two is known only to the key."""
    read = parse_yaml(text, "here")
    assert type(read) is BareWord
    assert read == text
    assert parse_yaml(f"[{text}, true]", "here") == [text, True]


def test_booleans_and_nothing() -> None:
    assert parse_yaml("[true, False, TRUE]", "here") == [True, False, True]
    assert parse_yaml("[null, ~, Null]", "here") == [None, None, None]
    assert parse_yaml("", "here") is None
    assert parse_yaml("key:", "here") == {"key": None}


def test_a_key_is_text_whatever_it_looks_like() -> None:
    """R67: `on` is True to YAML 1.1, and True == 1 to Python; so would 1 and 1.0 be one key."""
    assert parse_yaml("{on: 1, true: 2, 1: 3, 1.0: 4, ~: 5}", "here") == {"on": 1, "true": 2, "1": 3, "1.0": 4, "~": 5}


@pytest.mark.parametrize(
    ("text", "key", "line", "first"),
    [
        ("lr: 1\nsteps: 2\nlr: 3\n", "lr", 3, 1),
        ("optimizer:\n  lr: 1\n  eps: 2\n  lr: 3\n", "lr", 4, 2),
        ("a: 1\noptimizer: {lr: 1, lr: 1}\n", "lr", 2, 2),
        ("list:\n- {lr: 1,\n   'lr': 2}\n", "lr", 3, 2),
        ("on: 1\n'on': 2\n", "on", 2, 1),
        ("a: &a {x: 1}\nb: {<<: *a, x: 2, x: 3}\n", "x", 2, 2),
    ],
)
def test_a_key_that_stands_twice(text: str, key: str, line: int, first: int) -> None:
    """R65: at the top, nested, in flow style, quoted once: an error naming the key and both lines."""
    with pytest.raises(UserError, match=rf"^here, line {line}: the key {key} stands twice \(line {first}\); keep one$"):
        parse_yaml(text, "here")


def test_a_merged_key_that_is_overridden_is_no_duplicate() -> None:
    """R65: nor is one of a merged section that itself merges, in whatever order the two are built."""
    assert parse_yaml("a: &a {x: 1, y: 2}\nb: {<<: *a, x: 3}\n", "here")["b"] == {"x": 3, "y": 2}
    assert parse_yaml("a: &a {x: 1}\nc: &c {x: 2, z: 0}\nb: {<<: [*a, *c]}\n", "here")["b"] == {"x": 1, "z": 0}
    chain = "a: &a {x: 1}\nb: &b {<<: *a, x: 2}\nc: {<<: *b, y: 4}\n"  # PyYAML 6.0.4: x is 1
    assert parse_yaml(chain, "here")["c"] == {"x": 2, "y": 4}
    nested = "a: &a {x: 1}\ninner: {b: &b {<<: *a, x: 2}}\nlast: {<<: *b, y: 4}\n"
    assert parse_yaml(nested, "here") == {"a": {"x": 1}, "inner": {"b": {"x": 2}}, "last": {"x": 2, "y": 4}}


def aliases(level: int, form: str) -> str:
    """Nine of them for the level below: nine levels stand for 387 million values."""
    return ", ".join(form.format(number, level - 1) for number in range(9))


BOMB = "\n".join(["a0: &a0 {x: 1}", *(f"a{n}: &a{n} {{{aliases(n, 'k{}: *a{}')}}}" for n in range(1, 10))])
MERGE_BOMB = "\n".join(["a0: &a0 {x: 1}", *(f"a{n}: &a{n} {{<<: [{aliases(n, '*a{1}')}]}}" for n in range(1, 10))])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: b: c", "line 1: mapping values are not allowed here"),
        ("a: 1\n\tb: 2", "line 2: a tab stands where blanks must"),
        ("a: [1, 2", "expected ',' or ']'"),
        ("a: *nowhere", "line 1: found undefined alias 'nowhere'"),
        ("[a]: 1", "line 1: a key must be a word"),
        ("{a: 1}: 1", "line 1: a key must be a word"),
        ("a: 1\n---\na: 2", "line 2: but found another document"),
        ("a: \x00", "not YAML: unacceptable character"),
        ('a: "\\ud800"', "not YAML: .*surrogates not allowed"),
        ("a: !!python/object/apply:os.system [exit]", "the tag .*os.system cannot be used"),
        ("a: !!binary aGk=", "the tag .*binary cannot be used"),
        ("a: !!set {b, c}", "the tag .*set cannot be used"),
        ("a: !!timestamp 2020-01-01", "the tag .*timestamp cannot be used"),
        ("a: !!bool maybe", "the tag .*bool cannot be used"),
        ("a: !number abc", "the tag !number cannot be used"),
        ("a: " + "[" * 500, "not YAML: it is nested too deeply"),
        ("{a: " * 2000, "not YAML: it is nested too deeply"),
        ("a: &a {b: *a}", "not YAML: Circular reference"),
        ("a: &a [1, *a]", "not YAML: Circular reference"),
        (BOMB, "line 5: there are more than 32 aliases"),
        ("a: &a {<<: *a}", "not YAML: Circular reference"),
        ("a: {<<: 5}", "line 1: << must be followed by the alias of a section"),
        ("a: &a {x: 1}\nb: {<<: *a, <<: *a}", "line 2: the key << stands twice"),
        (MERGE_BOMB, "line 5: there are more than 32 aliases"),
    ],
)
def test_hostile_text_is_refused_at_once(text: str, problem: str) -> None:
    started = time.monotonic()
    with pytest.raises(UserError, match=f"^here(, |: ).*{problem}"):
        parse_yaml(text, "here")
    assert time.monotonic() - started < 5


def test_as_many_aliases_as_are_allowed_do_no_harm() -> None:
    text = "\n".join(["a0: &a0 {x: 1}", *(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}, *a{n - 1}]" for n in range(1, 11))])
    assert len(parse_yaml(text, "here")["a10"]) == 3


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "must hold sections and keys"),
        (b"# only a comment\n", "must hold sections and keys"),
        (b"- a\n- b\n", "must hold sections and keys"),
        (b"just text", "must hold sections and keys"),
        (b"42", "must hold sections and keys"),
        (b"\x80\x02}q\x00.", "cannot be read as text"),
        ("a: 1\n".encode("utf-16"), "cannot be read as text"),
        (b"\x00" * 64, "not YAML"),
    ],
)
def test_files_that_are_no_config(tmp_path: Path, content: bytes, problem: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(content)
    with pytest.raises(UserError, match=f"^{path}: {problem}"):
        read_yaml(path)


def test_paths_that_are_no_files(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing.yaml"):
        with pytest.raises(UserError, match=f"^{path}: cannot be read as text"):
            read_yaml(path)


def test_a_byte_order_mark_and_foreign_line_ends_do_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes("\ufeffa: 1\r\nb:\r\n  c: \u00fc\r\n".encode())
    assert read_yaml(path) == {"a": 1, "b": {"c": "\u00fc"}}


def test_what_is_written_is_read_back_as_it_was() -> None:
    """PyYAML leaves 1e3 unquoted, as YAML 1.1 takes it for text: read back, a revision would be a number."""
    texts = ["1e3", "12e4567", "0x10", "1:30", "010", "1_000", "+1", ".5", "-", ".inf", "off", "yes", "true", "null"]
    texts += ["~", "{d}", "*e", "&f", "!g", "'h'", "=", "\u00fc", "a=1e-3"]
    texts += ["", " ", "a: b", "# c", '"i"', "line\nbreak"]
    numbers = [0, -1, 2**63 - 1, 1e-8, 1e-38, 4e-4, 0.1, 1e300, 0.30000000000000004]
    values = {"texts": texts, "numbers": numbers, "flags": [True, False, None], "section": dict.fromkeys(texts, 1)}
    read = parse_yaml(yaml_text(values), "here")
    assert read == values
    assert [type(value) for value in read["texts"]] == [str] * len(texts)
