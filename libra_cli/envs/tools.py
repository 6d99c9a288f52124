"""Parses a generated turn into tool calls and an answer, and checks calls against schemas.

The form is the hermes one that Qwen3 and many others use, any number of times in a turn::

    <tool_call>
    {"name": "get", "arguments": {"key": "ab"}}
    </tool_call>

``parse_tool_calls`` never raises: a call that cannot be read is ``Malformed``, with a reason for
the model. Four rules:

- Calls inside thinking do not count: neither before the last ``</think>``, nor in thinking that was
  never closed since the turn was cut in it.
- A call whose JSON object is complete counts even if ``</tool_call>`` is missing, since models
  stop right after the brace. If the JSON is cut as well, the call is ``Malformed`` and ``cut``.
- ``arguments`` may be a JSON object, a string that holds one, or absent (no arguments).
- Text around the calls is allowed and ignored.

``objection`` checks a call against the schemas before an environment sees it: a policy that makes
up a tool, or leaves an argument out, must read about it and must not break the environment.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from libra_cli.envs.protocol import ToolCall, ToolSchema

_CALL = re.compile(r"<tool_call>(.*?)(</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)
_EXCERPT = 80
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
    """A tool call that cannot be read."""

    text: str
    reason: str
    cut: bool = False
    """Whether the turn ended within the call, so that it may have been right so far."""


class _Unreadable(Exception):
    pass


def parse_tool_calls(text: str) -> list[ToolCall | Malformed]:
    """Return every tool call of a turn, in order."""
    return [_parse(match) for match in _CALL.finditer(after_thinking(text))]


def answer_of(text: str) -> str:
    """Return a turn's text without its thinking and its tool calls."""
    return _CALL.sub("", after_thinking(text)).strip()


def after_thinking(text: str) -> str:
    """Return the part of a turn after its thinking; empty if the thinking never ended."""
    visible = text.rpartition("</think>")[2]
    return visible.partition("<think>")[0]


def objection(call: ToolCall, tools: Sequence[ToolSchema]) -> str | None:
    """Say what is wrong with a call, for the model to read; None if it fits or has no schema.

    It checks the name, the required arguments and the types of the arguments, one level deep.
    """
    schemas = {tool["function"]["name"]: tool["function"] for tool in tools}
    if not schemas:
        return None
    if call.name not in schemas:
        return f"no tool {call.name!r}, only {', '.join(schemas)}"
    parameters = schemas[call.name].get("parameters", {})
    missing = [name for name in parameters.get("required", ()) if name not in call.arguments]
    if missing:
        return f"{call.name} needs {', '.join(missing)}"
    for name, schema in parameters.get("properties", {}).items():
        kind = schema.get("type")
        if name in call.arguments and not _fits(call.arguments[name], kind):
            return f"{call.name} needs a {name} of type {kind}"
    return None


def _fits(value: object, kind: object) -> bool:
    # A list of types, or none, is left to the environment. True is an int in Python, not in JSON.
    types = _TYPES.get(kind) if isinstance(kind, str) else None
    if types is None:
        return True
    return isinstance(value, types) and (kind == "boolean" or not isinstance(value, bool))


def _parse(match: re.Match[str]) -> ToolCall | Malformed:
    body = match[1].strip()
    try:
        return _tool_call(_decode(body))
    except _Unreadable as error:
        cut = not match[2] and match.end() == len(match.string)
        return Malformed(body[:_EXCERPT], str(error), cut)


def _tool_call(value: Any) -> ToolCall:
    if not isinstance(value, dict):
        raise _Unreadable("a tool call is a JSON object with a name and arguments")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        raise _Unreadable('the "name" of the tool is missing')
    arguments = value.get("arguments", {})
    if isinstance(arguments, str):
        arguments = _decode(arguments)
    if not isinstance(arguments, dict):
        raise _Unreadable('"arguments" is not a JSON object')
    return ToolCall(name, arguments)


def _decode(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise _Unreadable(f"not JSON: {error.msg} at character {error.pos}") from error
    except (ValueError, RecursionError) as error:
        # Numbers too long to convert, NaN and Infinity, or brackets nested thousands deep.
        raise _Unreadable("not JSON that can be read") from error


def _no_constant(name: str) -> NoReturn:
    raise ValueError(name)
