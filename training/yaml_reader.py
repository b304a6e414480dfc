"""YAML as people mean it: no booleans in disguise, `1e-3` is a number, a key stands once.

PyYAML follows YAML 1.1, where `1e-3` is text, `010` is eight, `1:30` is ninety, `off` and `no` are False and a
repeated key silently wins. None of that belongs in a config.
"""

import re
from pathlib import Path
from typing import Any

import yaml

from training.errors import UserError

_MERGE_TAG = "tag:yaml.org,2002:merge"


class BareWord(str):
    """An unquoted yes, no, on or off: text, unless the key wants a boolean."""


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = {}  # noqa: RUF012  (typed by the base class; only what is added below)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[str, int] = {}
        for key_node, _ in node.value:
            if key_node.tag == _MERGE_TAG:
                continue
            if not isinstance(key_node, yaml.ScalarNode):
                raise _problem("a key must be a word", key_node)
            line = key_node.start_mark.line + 1
            if key_node.value in lines:
                raise _problem(
                    f"the key {key_node.value} stands twice (line {lines[key_node.value]}); keep one", key_node
                )
            lines[key_node.value] = line
        return super().construct_mapping(node, deep)


def _problem(text: str, node: yaml.Node) -> yaml.constructor.ConstructorError:
    return yaml.constructor.ConstructorError(None, None, text, node.start_mark)


def _number(loader: _Loader, node: yaml.ScalarNode) -> int | float:
    """Decimal integers and floats, `_` between digits allowed; a whole number such as 1e3 is an integer."""
    text = node.value.replace("_", "").lower()
    if re.fullmatch(r"[-+]?\d+", text):
        return int(text)
    value = float(text.replace(".inf", "inf").replace(".nan", "nan"))
    return int(value) if value.is_integer() else value


def _bare_word(loader: _Loader, node: yaml.ScalarNode) -> BareWord:
    return BareWord(node.value)


def _add(tag: str, pattern: str, first: str) -> None:
    _Loader.add_implicit_resolver(tag, re.compile(rf"^(?:{pattern})$"), list(first))


_add("tag:yaml.org,2002:bool", "true|True|TRUE|false|False|FALSE", "tTfF")
_add("tag:yaml.org,2002:null", "~|null|Null|NULL", "~nN")
_Loader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"^$"), [""])
_add(_MERGE_TAG, "<<", "<")
_add("!bare", "yes|Yes|YES|no|No|NO|on|On|ON|off|Off|OFF", "yYnNoO")
_add(
    "!number",
    r"[-+]?(?:\d[\d_]*(?:\.[\d_]*)?|\.\d[\d_]*)(?:[eE][-+]?\d+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
    "-+.0123456789",
)
_Loader.add_constructor("!bare", _bare_word)
_Loader.add_constructor("!number", _number)


def read_yaml(path: Path) -> dict[str, Any]:
    """Reads a YAML file that holds a mapping.

    Raises:
        UserError: naming the file, and the line where there is one.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as text: {error}") from None
    values = parse_yaml(text, str(path))
    if not isinstance(values, dict):
        raise UserError(f"{path}: must hold sections and keys, such as `batch:`, not {type(values).__name__}")
    return values


def parse_yaml(text: str, where: str) -> Any:
    """The value of a YAML text, such as `1e-3`, `[0.9, 0.95]` or `null`; UserError names `where`."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if mark else ""
        raise UserError(f"{where}{line}: {error.problem or error.context}") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise UserError(f"{where}: not YAML: {str(error).splitlines()[0]}") from None
