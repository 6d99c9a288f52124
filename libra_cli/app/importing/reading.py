"""Reads files of other trainers into their settings, by key; nothing in them is executed.

.toml, .yaml, .json    keys of nested mappings are joined with dots; hydra's references to other
                       keys are followed
.py                    ``script``
anything else          a shell script, ``shell``
"""

from __future__ import annotations

import ast
import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from libra_cli.app.importing.script import settings_of
from libra_cli.app.importing.shell import COMPUTED, assigned_in_branches, commands
from libra_cli.config.errors import InputError

_NUMBER = re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?$")
_REFERENCE = re.compile(r"^\$\{(?:oc\.select:)?([\w.]+)(?:,\s*([^{}]*))?\}$")
_OVERRIDE = re.compile(r"^\+{0,2}([A-Za-z_]\w*(?:\.[\w@]+)+)=(.*)$", re.DOTALL)
_VERL = re.compile(r"\bverl\.|\bmain_ppo\b|\bmain_dapo\b")
WORDS = {"true": True, "false": False, "null": None, "~": None}
"""Texts that are values, in any case. None of Python is one too, and TRL's ``none`` is a word."""


@dataclass(frozen=True, slots=True)
class Source:
    """What one file says."""

    path: Path
    values: dict[str, Any]
    """Settings by key; a text with ``COMPUTED`` in it is known only to who runs the file."""
    hint: str = ""
    """The trainer that a script names: main_ppo's module, a script's file, a configuration's class.
    """
    is_toml: bool = False
    unread: tuple[str, ...] = ()
    """Variables of a shell script that are assigned where it is not read."""


def read(path: Path) -> Source:
    """Read the settings in a file.

    Raises:
        InputError: it cannot be read, or there are no settings in it.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read: {error}", hint=_HINT) from error
    kind = path.suffix.lower()
    try:
        source = _read(path, text, kind)
    except (ValueError, SyntaxError, yaml.YAMLError) as error:
        raise InputError(f"{path}: is no {kind or 'text'} file: {error}", hint=_HINT) from error
    if not source.values:
        raise InputError(f"{path}: gives no settings to TRL, verl or prime-rl", hint=_HINT)
    return source


_HINT = "libra help migration says which files libra import reads"


def _read(path: Path, text: str, kind: str) -> Source:
    if kind == ".toml":
        return Source(path, dict(_flat(tomllib.loads(text))), is_toml=True)
    if kind in (".yaml", ".yml", ".json"):
        data = json.loads(text) if kind == ".json" else yaml.safe_load(text)
        if not isinstance(data, dict):
            raise ValueError("holds no mapping of keys")
        return Source(path, _resolved(dict(_flat(data))))
    if kind == ".py":
        return _of_python(path, text)
    return _of_shell(path, text)


# -- mappings --------------------------------------------------------------------------------------


def _flat(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in data.items():
        key = f"{prefix}{name}"
        is_argument = key.endswith("kwargs") and not prefix  # TRL's are; verl's are sections
        if isinstance(value, dict) and value and not is_argument:
            yield from _flat(value, f"{key}.")
        else:
            yield key, _plain(value)


def _plain(value: Any) -> Any:
    """A value with numbers and words as such, which YAML 1.1 and TOML leave as texts."""
    if isinstance(value, list):
        return [_plain(one) for one in value]
    if not isinstance(value, str):
        return value
    word = value.strip()
    if word == "None" or word.lower() in WORDS:
        return WORDS.get(word.lower())
    if not _NUMBER.match(word):
        return value
    return float(value) if re.search(r"[.eE]", value) else int(value)


def _resolved(values: dict[str, Any]) -> dict[str, Any]:
    """Values with those that refer to another key in its place, as hydra has it."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        for _ in range(5):
            reference = _REFERENCE.match(value) if isinstance(value, str) else None
            if reference is None:
                break
            value = values.get(reference[1], _plain(reference[2] or ""))
        if value == "???" or value == "":
            continue
        is_open = isinstance(value, str) and "${" in value
        found[key] = f"{COMPUTED}{value}" if is_open else value
    return found


# -- scripts ---------------------------------------------------------------------------------------


def _of_python(path: Path, text: str) -> Source:
    tree = ast.parse(text)
    made = settings_of(tree, path.stem)
    if made is not None:
        kind, values = made
        return Source(path, {key: _plain(value) for key, value in values.items()}, hint=kind)
    shown = ast.get_docstring(tree) or ""
    return _of_shell(path, re.sub(r"^\s*```.*$", "", shown, flags=re.MULTILINE))


def _of_shell(path: Path, text: str) -> Source:
    """The settings of the command that gives the most of them."""
    found = [one for words in commands(text) if (one := _of_command(path, words)) is not None]
    most = max(found, key=lambda one: len(one.values), default=Source(path, {}))
    return replace(most, unread=tuple(assigned_in_branches(text)))


def _of_command(path: Path, words: list[str]) -> Source | None:
    line = " ".join(words)
    if _VERL.search(line):
        overrides = (_OVERRIDE.match(word) for word in words)
        return Source(path, {one[1]: _hydra(one[2]) for one in overrides if one}, hint=line)
    if re.search(r"\.py\b|\btrl\b", line) and "vllm-serve" not in words:
        return Source(path, dict(_arguments(words)), hint=_program(words))
    return None


def _hydra(text: str) -> Any:
    if COMPUTED in text:
        return text
    if text[:1] in "[{'\"" and text:
        try:
            return _plain(yaml.safe_load(text))
        except yaml.YAMLError:
            return text
    return _plain(text)


def _program(words: list[str]) -> str:
    """The script, or the command of ``trl``, that arguments are for."""
    if "trl" in words and words.index("trl") + 1 < len(words):
        return words[words.index("trl") + 1]
    return next((Path(word).stem for word in words if word.endswith(".py")), "")


def _arguments(words: list[str]) -> Iterator[tuple[str, Any]]:
    """Keys and values of ``--key value`` and ``--key=value``; of several values a list, of none
    true.
    """
    key, values = "", list[str]()
    for word in [*words, "--"]:
        if not word.startswith("--"):
            values.append(word)
            continue
        if key:
            yield key, _argument(values)
        name, _, value = word[2:].partition("=")
        key, values = name.replace("-", "_"), [value] if value else []


def _argument(values: list[str]) -> Any:
    values = [value.rstrip(",") for value in values if not value.endswith(".py")]
    if not values:
        return True
    plain = [_hydra(value) for value in values]
    return plain[0] if len(plain) == 1 else plain
