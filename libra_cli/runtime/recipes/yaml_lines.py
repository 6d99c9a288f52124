"""Parses YAML text to plain values and the line of every key.

Scalars follow YAML 1.2's core schema: ``2e-4`` is a number, ``on`` and ``yes`` are strings, ``010``
is ten. A key that is given twice is a problem. Anchors, aliases, tags and several documents are
refused, since every value of a recipe is written where it is used.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import yaml

Loc: TypeAlias = tuple[str | int, ...]
"""A place in a document: the keys and list indices that lead to a value."""


class NotYaml(Exception):
    """The text cannot be parsed; ``line`` counts from 1."""

    def __init__(self, line: int, reason: str) -> None:
        super().__init__(reason)
        self.line = line


@dataclass(slots=True)
class Document:
    """Plain values, the line of each, and the problems as ``(line, place, reason)``."""

    value: Any = None
    lines: dict[Loc, int] = field(default_factory=dict)
    problems: list[tuple[int, Loc, str]] = field(default_factory=list)


class _Loader(yaml.SafeLoader):
    """Composes nodes by YAML 1.2's core schema, refuses aliases, and never makes an object."""

    # Not inherited: SafeLoader's resolvers are YAML 1.1's.
    yaml_implicit_resolvers = {}  # noqa: RUF012

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise yaml.composer.ComposerError(
                None, None, "anchors and aliases are not used in recipes", event.start_mark
            )
        return super().compose_node(parent, index)


def _float(text: str) -> float | str:
    value = float(text)
    return value if math.isfinite(value) else text


_SCALARS: dict[str, Callable[[str], Any]] = {
    "str": str,
    "int": int,
    "float": _float,
    "bool": lambda text: text.lower() == "true",
    "null": lambda _: None,
}

for _tag, _pattern, _first in (
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", [*"tTfF"]),
    ("int", r"^[-+]?[0-9]{1,18}$", [*"-+0123456789"]),
    (
        "float",
        r"^[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$",
        [*"-+.0123456789"],
    ),
    ("null", r"^(?:~|null|Null|NULL|)$", [*"~nN", ""]),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), _first)


def read_yaml(text: str) -> Document:
    """Parse the one document in ``text``.

    Raises:
        NotYaml: the text is empty, no YAML, or more than one document.
    """
    document = Document()
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
        finally:
            loader.dispose()
        if node is None:
            raise NotYaml(1, "the recipe is empty")
        document.value = _plain(node, (), document)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        reason = error.problem or error.context or "unknown"
        if reason.startswith("but ") and error.context:
            reason = f"{error.context}, {reason}"
        raise NotYaml(line, f"is not YAML: {reason}") from error
    except yaml.reader.ReaderError as error:
        line = text[: error.position].count("\n") + 1
        raise NotYaml(line, f"is not YAML: {error.reason}") from error
    except RecursionError as error:
        raise NotYaml(1, "is nested too deeply") from error
    return document


def _plain(node: yaml.Node, loc: Loc, document: Document) -> Any:
    document.lines.setdefault(loc, node.start_mark.line + 1)
    if isinstance(node, yaml.SequenceNode):
        return [_plain(item, (*loc, index), document) for index, item in enumerate(node.value)]
    if isinstance(node, yaml.MappingNode):
        return _plain_mapping(node, loc, document)
    convert = _SCALARS.get(str(node.tag).removeprefix("tag:yaml.org,2002:"))
    if convert is None:
        place = document.lines[loc]
        document.problems.append((place, loc, f"has the tag {node.tag}, which recipes do not use"))
        return str(node.value)
    return convert(node.value)


def _plain_mapping(node: yaml.MappingNode, loc: Loc, document: Document) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode):
            document.problems.append((line, loc, "has a key that is not a word"))
            continue
        place = (*loc, key_node.value)
        if key_node.value in values:
            first = document.lines[place]
            document.problems.append((line, place, f"is given twice, first on line {first}"))
            continue
        document.lines[place] = line
        values[key_node.value] = _plain(value_node, place, document)
    return values
