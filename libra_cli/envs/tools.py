"""Checks a tool call against schemas before an environment sees it.

A policy that makes up a tool, or leaves an argument out, must read about it and must not break the
environment. Calls are read from a turn by ``runtime.episodes.tool_formats``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from libra_cli.envs.protocol import ToolCall, ToolSchema

_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
}


@dataclass(frozen=True, slots=True)
class Malformed:
    """A tool call in a turn that cannot be read: its text, and why it cannot be read."""

    text: str
    reason: str
    cut: bool = False
    """Whether the turn ended within the call, so that it may have been right so far."""


def objection(call: ToolCall, tools: Sequence[ToolSchema]) -> str | None:
    """Say what is wrong with a call, for the model to read; None if it fits or has no schema.

    It checks the name, the required arguments and the types of the arguments, one level deep.
    """
    schemas = {tool["function"]["name"]: tool["function"] for tool in tools}
    if not schemas:
        return None
    if call.name not in schemas:
        return f"no tool {call.name!r}, only {', '.join(schemas)}"
    required = (schemas[call.name].get("parameters") or {}).get("required") or ()
    missing = [name for name in required if name not in call.arguments]
    if missing:
        return f"{call.name} needs {', '.join(missing)}"
    for name, kind in parameter_types(schemas[call.name]).items():
        if name in call.arguments and not _fits(call.arguments[name], kind):
            return f"{call.name} needs a {name} of type {kind}"
    return None


def parameter_types(function: Mapping[str, Any]) -> dict[str, object]:
    """Return the type of each parameter of a function's schema; None where it gives none."""
    properties = (function.get("parameters") or {}).get("properties") or {}
    # A schema may also be the word true, for a value of any kind.
    return {
        name: schema.get("type") if isinstance(schema, Mapping) else None
        for name, schema in properties.items()
    }


def _fits(value: object, kind: object) -> bool:
    # A list of types, or none, is left to the environment. True is an int in Python, not in JSON.
    types = _TYPES.get(kind) if isinstance(kind, str) else None
    if types is None:
        return True
    return isinstance(value, types) and (kind == "boolean" or not isinstance(value, bool))
