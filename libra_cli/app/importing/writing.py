"""Writes settings as a recipe: sections in their order, and beside each key where it is from."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

from libra_cli.app.importing.translation import grouped
from libra_cli.config.other_names.rule import LeftOut, Setting, Why
from libra_cli.config.recipe import Recipe

_EXPONENT = re.compile(r"^(-?\d+(?:\.\d*[1-9])?)(?:\.0)?e([-+]?)0*(\d+)$")
_WIDTH = 100
_COMMENT = 36
"""The column that comments begin in, where the key leaves room."""


def recipe_text(title: str, settings: Sequence[Setting], left_out: Sequence[LeftOut]) -> str:
    """Return a recipe of these settings; what its user has to bring is said at its head."""
    lines = _wrapped(title)
    for keys, reason in dict(grouped(left_out)).get(Why.BRING, ()):
        lines += _wrapped(f"To do: {keys}: {reason}")
    tree: dict[str, Any] = {}
    for setting in settings:
        *sections, key = setting.key.split(".")
        inside = tree
        for section in sections:
            inside = inside.setdefault(section, {})
        inside[key] = setting
    for name in Recipe.model_fields:
        if name in tree:
            lines += ["", *_section(name, tree[name], 0)]
    return "\n".join(lines) + "\n"


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, initial_indent="# ", subsequent_indent="#   ", break_long_words=False
    )


def _section(name: str, made: Setting | Mapping[str, Any], depth: int) -> Iterator[str]:
    indent = "  " * depth
    if isinstance(made, Setting):
        yield from _key(f"{indent}{name}:", made, depth)
        return
    yield f"{indent}{name}:"
    for key, inner in made.items():
        yield from _section(key, inner, depth + 1)


def _key(begin: str, made: Setting, depth: int) -> Iterator[str]:
    if isinstance(made.value, list) and made.value and isinstance(made.value[0], dict):
        yield from _commented(begin, made.told)
        yield from (f"{'  ' * (depth + 1)}- {_flow(one)}" for one in made.value)
    else:
        yield from _commented(f"{begin} {_flow(made.value)}", made.told)
    yield from (f"{'  ' * depth}# {line}" for line in made.instead)


def _commented(line: str, told: str) -> Iterator[str]:
    if not told:
        yield line
        return
    whole = f"{line:<{_COMMENT}}  # {told}"
    if len(whole) <= _WIDTH:
        yield whole
        return
    indent = line[: len(line) - len(line.lstrip())]
    yield from (f"{indent}{one}" for one in _wrapped(told))
    yield line


class _Dumper(yaml.SafeDumper):
    """Writes 1e-6 as recipes have it, where PyYAML writes 1.0e-06."""


def _number(dumper: yaml.SafeDumper, value: float) -> yaml.ScalarNode:
    node = dumper.represent_float(value)
    node.value = _EXPONENT.sub(r"\1e\2\3", node.value)
    return node


_Dumper.add_representer(float, _number)
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-0123456789"))


def _flow(value: Any) -> str:
    text = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, width=10_000, sort_keys=False)
    return text.removesuffix("\n...\n").strip()
