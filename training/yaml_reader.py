"""YAML as people mean it: no booleans in disguise, `1e-3` is a number, a key stands once.

PyYAML follows YAML 1.1, where `1e-3` is text, `010` is eight, `1:30` is ninety, `off` and `no` are False and a
repeated key silently wins. None of that belongs in a config.
"""

import json
import re
from pathlib import Path
from typing import Any

import yaml

from training.errors import UserError
from training.foreign_file import instead

_TEXT_TAG = "tag:yaml.org,2002:str"
_MOST_ALIASES = 32
"""A file of a few lines whose aliases stand for each other in turn would fill the memory."""


class BareWord(str):
    """An unquoted yes, no, on or off: text, unless the key wants a boolean."""


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = {}  # noqa: RUF012  (typed by the base class; only what is added below)

    aliases = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if getattr(event, "tag", None):
            raise _problem(f"the tag {event.tag} cannot be used in a config; write the plain value", event)
        self.aliases += isinstance(event, yaml.AliasEvent)
        if self.aliases > _MOST_ALIASES:
            raise _problem(f"there are more than {_MOST_ALIASES} aliases; write the values out", event)
        return super().compose_node(parent, index)

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        mapping = super().compose_mapping_node(anchor)
        own: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        for key, value in mapping.value:
            if not isinstance(key, yaml.ScalarNode):
                raise _problem("a key must be a word", key)
            if key.value in own:
                first = own[key.value][0].start_mark.line + 1
                raise _problem(f"the key {key.value} stands twice (line {first}); keep one", key)
            key.tag = _TEXT_TAG  # a key is text, whatever it looks like
            own[key.value] = key, value
        mapping.value = list((_merged(own.pop("<<", None)) | own).values())
        return mapping


def _merged(pair: tuple[yaml.Node, yaml.Node] | None) -> dict[str, tuple[yaml.Node, yaml.Node]]:
    """The keys that a merge key takes over; PyYAML 6.0.4 loses overrides where a merged section merges another."""
    if pair is None:
        return {}
    sources = pair[1].value if isinstance(pair[1], yaml.SequenceNode) else [pair[1]]
    keys: dict[str, tuple[yaml.Node, yaml.Node]] = {}
    for source in reversed(sources):  # the first has precedence
        if not isinstance(source, yaml.MappingNode):
            raise _problem("<< must be followed by the alias of a section", source)
        keys |= {key.value: (key, value) for key, value in source.value}
    return keys


class _Dumper(yaml.SafeDumper):
    """Quotes what PyYAML takes for text and the loader above for a number, such as 1e3."""


def _problem(text: str, place: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(None, None, text, place.start_mark)


def _number(loader: _Loader, node: yaml.ScalarNode) -> int | float:
    """Decimal integers and floats, `_` between digits allowed; a whole number such as 1e3 is an integer."""
    text = node.value.replace("_", "").lower()
    if re.fullmatch(r"[-+]?\d{1,300}", text):  # more digits are infinity to a float, and no int of Python's
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
_add("!bare", "yes|Yes|YES|no|No|NO|on|On|ON|off|Off|OFF", "yYnNoO")
_add(
    "!number",
    r"[-+]?(?:\d[\d_]*(?:\.[\d_]*)?|\.\d[\d_]*)(?:[eE][-+]?\d+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
    "-+.0123456789",
)
_Loader.add_constructor("!bare", _bare_word)
_Loader.add_constructor("!number", _number)


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar(_TEXT_TAG, text, style="'" if text[:1] in "-+.0123456789" else None)


_Dumper.add_representer(str, _represent_text)


def read_yaml(path: Path) -> dict[str, Any]:
    """Reads a YAML file that holds a mapping.

    Raises:
        UserError: naming the file, and the line where there is one.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as text: {error}; it must be a file in UTF-8") from None
    values = parse_yaml(text, str(path))
    if not isinstance(values, dict):
        raise UserError(f"{path}: must hold sections and keys, such as `batch:`, and holds none{instead(path)}")
    return values


def parse_yaml(text: str, where: str) -> Any:
    """The value of a YAML text, such as `1e-3`, `[0.9, 0.95]` or `null`; UserError names `where`."""
    try:
        values = yaml.load(text, Loader=_Loader)
        json.dumps(values, ensure_ascii=False).encode()  # refuses what contains itself, and half characters
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if mark else ""
        problem = str(error.problem or error.context)
        if "'\\t'" in problem:
            problem = "a tab stands where blanks must; indent with blanks"
        raise UserError(f"{where}{line}: {problem}") from None
    except RecursionError:
        raise UserError(f"{where}: not YAML: it is nested too deeply") from None
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"{where}: not YAML: {str(error).splitlines()[0]}") from None
    return values


def yaml_text(values: dict[str, Any]) -> str:
    """A mapping as YAML text, which `parse_yaml` reads back as it was."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False)
