"""Reads the settings that a Python script gives to TRL's trainers, by its syntax tree alone.

Literal keywords are read of the first call of a trainer's configuration, of ``LoraConfig`` and of
the trainer itself, and names that the script assigns a literal to once. Anything else is
``COMPUTED``. A script that takes its arguments from the command line often shows one in its
docstring, and that one is read.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import Any

from libra_cli.app.importing.shell import COMPUTED

CONFIGS = {
    "GRPOConfig": "grpo",
    "AsyncGRPOConfig": "async_grpo",
    "RLOOConfig": "rloo",
    "SFTConfig": "sft",
}
_LORA = {"r": "lora_r", "lora_alpha": "lora_alpha", "target_modules": "lora_target_modules"}
_FUNCTIONS = ("reward_funcs", "environment_factory")


def settings_of(tree: ast.Module, module: str) -> tuple[str, dict[str, Any]] | None:
    """Return the kind of trainer and its settings, or None where no configuration is made.

    ``module`` is the script's own name, under which its functions can be imported.
    """
    places = dict(_places(tree, module))
    known = dict(_literals(tree))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    made = next((call for call in calls if _name(call) in CONFIGS), None)
    if made is None:
        return None
    kind = CONFIGS[_name(made)]
    settings = dict(_keywords(made, known))
    for call in calls:
        if _name(call) == "LoraConfig":
            lora = dict(_keywords(call, known))
            settings |= {_LORA[key]: value for key, value in lora.items() if key in _LORA}
            settings.setdefault("use_peft", True)
        if _name(call).endswith("Trainer"):
            settings = {**dict(_of_trainer(call, known, places)), **settings}
    return kind, settings


def _of_trainer(
    call: ast.Call, known: Mapping[str, Any], places: Mapping[str, str]
) -> Iterator[tuple[str, Any]]:
    """The model by its name, and rewards and environments by where they can be imported."""
    for keyword in call.keywords:
        value = keyword.value
        if keyword.arg == "model":
            yield "model_name_or_path", _value(value, known)
        elif keyword.arg in _FUNCTIONS:
            parts = value.elts if isinstance(value, ast.List | ast.Tuple) else [value]
            named = [places.get(part.id) for part in parts if isinstance(part, ast.Name)]
            if len(named) == len(parts) and all(named):
                yield keyword.arg, named if isinstance(value, ast.List | ast.Tuple) else named[0]


def _places(tree: ast.Module, module: str) -> Iterator[tuple[str, str]]:
    """The import paths of the functions and classes that a script defines or imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (
                (name.asname or name.name, f"{node.module}:{name.name}") for name in node.names
            )
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            yield statement.name, f"{module}:{statement.name}"


def _name(call: ast.Call) -> str:
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _keywords(call: ast.Call, known: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for keyword in call.keywords:
        if keyword.arg is not None:
            yield keyword.arg, _value(keyword.value, known)


def _value(node: ast.expr, known: Mapping[str, Any]) -> Any:
    if isinstance(node, ast.Name) and node.id in known:
        return known[node.id]
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError):
        return f"{COMPUTED}{ast.unparse(node)}"


def _literals(tree: ast.Module) -> Iterator[tuple[str, Any]]:
    """The names that are assigned a literal, once."""
    seen: dict[str, list[ast.expr]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    seen.setdefault(target.id, []).append(node.value)
    for name, values in seen.items():
        if len(values) == 1:
            try:
                yield name, ast.literal_eval(values[0])
            except (ValueError, TypeError, SyntaxError):
                continue
