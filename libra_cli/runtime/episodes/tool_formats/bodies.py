"""Reads the text of one tool call, as it stands between the marks of a format.

Each function takes that text and the types that the tools' schemas give to their parameters, and
returns the calls in it. The forms are those that published chat templates write:

    json        {"name": "get", "arguments": {"key": "ab"}}      (or "parameters"; also a list)
    named_json  get{"key": "ab"}, with the marks of Mistral, Kimi K2, DeepSeek or gpt-oss between
    elements    <function=get><parameter=key>ab</parameter></function>
    pairs       get<arg_key>key</arg_key><arg_value>ab</arg_value>
    python      [get(key="ab"), get(key="cd")]
    braces      call:get{key:<|"|>ab<|"|>,n:3}

In ``elements`` and ``pairs`` a value is bare text. It is kept as text if the schema says string,
and else read as JSON where it is JSON.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from libra_cli.envs.protocol import ToolCall

Types = Mapping[str, Mapping[str, object]]
"""The type of each parameter by tool and name, as its schema gives it."""

_NAMED = re.compile(
    r"""\s*(?:function<｜tool▁sep｜>)?(?:functions\.)?
    (?P<name>[^\s:{<\[]+)(?::\d+)?
    (?:\[CALL_ID\]\w+)?\s*
    (?:\[ARGS\]|<\|tool_call_argument_begin\|>|<｜tool▁sep｜>
       |(?:<\|channel\|>|<\|constrain\|>|\s|\w)*<\|message\|>)?\s*
    (?:```(?:json)?\s*)?
    (?P<arguments>.*)""",
    re.DOTALL | re.VERBOSE,
)
"""A call's name and arguments. The pattern ends with all that is left: a mark after a lazy part
would be looked for at every space."""
_ELEMENT = re.compile(
    r"""<(?P<prefix>[^<>=\s]*?)(?:function=|invoke\s{1,4}name=)"?(?P<name>[^<>"]+?)"?\s{0,4}>""",
    re.VERBOSE,
)
_ELEMENT_END = re.compile(r"</([^<>\s]*?)(?:function|invoke)>")
_PARAMETER = re.compile(
    r"""<[^<>=\s]*?parameter(?:=|\s{1,4}name=)"?(?P<key>[^<>"]+?)"?
    (?:\s{1,4}string="(?P<string>true|false)")?\s{0,4}>\n?""",
    re.VERBOSE,
)
_PARAMETER_END = re.compile(r"</[^<>\s]*?parameter>")
_PAIR_KEY = re.compile(r"\s*<arg_key>")
_PAIR_VALUE = re.compile(r"\s*<arg_value>")
_BRACES = re.compile(r"\s*call:(?P<name>[\w.-]+)(?P<arguments>\{.*\})\s*\Z", re.DOTALL)
_BARE_KEY = re.compile(r"([{,]\s*)([A-Za-z_][\w.-]*)\s*:")
_JOINT = re.compile(r"[ \n;]*")
_CONSTANTS = {"true": True, "false": False, "null": None}


DEEPEST = 100
"""Levels of lists and objects in a call's arguments. Python's own limit is near 1,000, of which the
frames that handle a call take some. Chosen."""


class Unreadable(Exception):
    """A call that is not of its form; the message says why, for the model."""


def check(calls: Sequence[ToolCall]) -> None:
    """Raise Unreadable for arguments that JSON has no words for, or that nest ``DEEPEST`` deep.

    Clients are sent them as JSON, which has neither infinity (``1e999``) nor Python's sets.
    """
    level: list[object] = [call.arguments for call in calls]
    for _ in range(DEEPEST):
        inner: list[object] = []
        for value in level:
            if isinstance(value, Mapping):
                inner += value.values()
            elif isinstance(value, list | tuple):
                inner += value
            elif not _is_plain(value):
                raise Unreadable("an argument is not a value that JSON has")
        if not (level := inner):
            return
    raise Unreadable(f"its arguments are nested more than {DEEPEST} levels deep")


def _is_plain(value: object) -> bool:
    finite = not isinstance(value, float) or math.isfinite(value)
    return finite and (value is None or isinstance(value, str | int | float))


def json_calls(text: str, types: Types) -> list[ToolCall]:
    """Read JSON objects with a name and arguments, alone, in a list, or joined by ``;``."""
    decoder = json.JSONDecoder(parse_constant=_no_constant)
    calls: list[ToolCall] = []
    text, at = text.strip(), 0
    if not text:
        raise Unreadable("it is empty")
    while at < len(text):
        value, end = _decoded(decoder, text, at)
        calls += [_call_of(one) for one in (value if isinstance(value, list) else [value])]
        joint = _JOINT.match(text, end)
        at = joint.end() if joint else end
    return calls


def named_json_calls(text: str, types: Types) -> list[ToolCall]:
    """Read a name followed by a JSON object of arguments."""
    if text.lstrip().startswith(("[", "{")):
        return json_calls(text, types)
    match = _NAMED.fullmatch(text)
    if match is None:
        raise Unreadable("the name of the tool is missing")
    arguments = match["arguments"].rstrip().removesuffix("```")
    return [ToolCall(match["name"], _arguments(arguments))]


def element_calls(text: str, types: Types) -> list[ToolCall]:
    """Read calls as elements with one element for each argument."""
    calls = []
    ends: dict[str, list[re.Match[str]]] = {}  # by prefix, the last first
    for end in reversed(list(_ELEMENT_END.finditer(text))):
        ends.setdefault(end[1], []).append(end)
    at = 0
    while element := _ELEMENT.search(text, at):
        at = element.end()
        own = ends.get(element["prefix"], [])
        while own and own[-1].start() < at:
            own.pop()
        if own:
            name = element["name"].strip()
            body = text[at : own[-1].start()]
            calls.append(ToolCall(name, _parameters(name, body, types.get(name, {}))))
            at = own[-1].end()
    if not calls:
        raise Unreadable("there is no closed element with the name of the tool")
    return calls


def _parameters(name: str, body: str, types: Mapping[str, object]) -> dict[str, Any]:
    """Read the body of an element, which is closed elements and nothing else."""
    arguments: dict[str, Any] = {}
    ends = _PARAMETER_END.finditer(body)
    at = 0
    while start := _PARAMETER.search(body, at):
        end = next((end for end in ends if end.start() >= start.end()), None)
        if end is None or body[at : start.start()].strip():
            break
        key, value = start["key"].strip(), body[start.end() : end.start()].removesuffix("\n")
        arguments[key] = value if start["string"] == "true" else _value(value, types.get(key))
        at = end.end()
    if body[at:].strip():
        raise Unreadable(f"the arguments of {name} are not closed elements")
    return arguments


def pair_calls(text: str, types: Types) -> list[ToolCall]:
    """Read a name followed by pairs of keys and values."""
    before, _, _ = text.partition("<arg_key>")
    name = before.strip()
    if not name or len(name.split()) > 1 or name.startswith("{"):
        raise Unreadable("the name of the tool is missing")
    known, arguments, at = types.get(name, {}), {}, len(before)
    while start := _PAIR_KEY.match(text, at):
        key_end = text.find("</arg_key>", start.end())
        value = _PAIR_VALUE.match(text, key_end + len("</arg_key>")) if key_end >= 0 else None
        value_end = text.find("</arg_value>", value.end()) if value else -1
        if value is None or value_end < 0:
            break
        key = text[start.end() : key_end].strip()
        arguments[key] = _value(text[value.end() : value_end], known.get(key))
        at = value_end + len("</arg_value>")
    if text[at:].strip():
        raise Unreadable(f"the arguments of {name} are not pairs of arg_key and arg_value")
    return [ToolCall(name, arguments)]


def python_calls(text: str, types: Types) -> list[ToolCall]:
    """Read calls with keyword arguments that are literals, in a list or one a line."""
    text = text.strip()
    try:
        parsed = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise Unreadable("not a list of Python calls") from error
    nodes: list[ast.expr] = []
    for statement in parsed:
        if not isinstance(statement, ast.Expr):
            raise Unreadable("not a list of Python calls")
        value = statement.value
        nodes += value.elts if isinstance(value, ast.List) else [value]
    if not nodes:
        raise Unreadable("it is empty")
    return [_python_call(node) for node in nodes]


def brace_calls(text: str, types: Types) -> list[ToolCall]:
    """Read a name and braces with bare keys and strings between ``<|"|>``."""
    match = _BRACES.match(text)
    if match is None:
        raise Unreadable("not of the form call:name{key:value}")
    parts = match["arguments"].split('<|"|>')
    quoted = [
        json.dumps(part) if index % 2 else _BARE_KEY.sub(r'\1"\2":', part)
        for index, part in enumerate(parts)
    ]
    return [ToolCall(match["name"], _arguments("".join(quoted)))]


def _python_call(node: ast.expr) -> ToolCall:
    if not isinstance(node, ast.Call) or node.args:
        raise Unreadable("a call has the form name(argument=value)")
    try:
        name = ast.unparse(node.func)
    except RecursionError as error:  # hundreds of dots
        raise Unreadable("the name of the tool cannot be read") from error
    return ToolCall(name, {word.arg or "": _literal(word.value) for word in node.keywords})


def _literal(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return _CONSTANTS[node.id]
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError) as error:
        raise Unreadable("an argument is not a literal") from error


def _value(text: str, kind: object) -> Any:
    if kind == "string":
        return text
    try:
        return json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return text


def _call_of(value: Any) -> ToolCall:
    if not isinstance(value, dict):
        raise Unreadable("a tool call is a JSON object with a name and arguments")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        raise Unreadable('the "name" of the tool is missing')
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = _arguments(arguments)
    if not isinstance(arguments, dict):
        raise Unreadable('"arguments" is not a JSON object')
    return ToolCall(name, arguments)


def _arguments(text: str) -> dict[str, Any]:
    value, end = _decoded(json.JSONDecoder(parse_constant=_no_constant), text.strip())
    if text.strip()[end:]:
        raise Unreadable(f"not JSON: Extra data at character {end}")
    if not isinstance(value, dict):
        raise Unreadable('"arguments" is not a JSON object')
    return value


def _decoded(decoder: json.JSONDecoder, text: str, at: int = 0) -> tuple[Any, int]:
    try:
        return decoder.raw_decode(text, at)
    except json.JSONDecodeError as error:
        raise Unreadable(f"not JSON: {error.msg} at character {error.pos}") from error
    except (ValueError, RecursionError) as error:
        # Numbers too long to convert, NaN and Infinity, or brackets nested thousands deep.
        raise Unreadable("not JSON that can be read") from error


def _no_constant(name: str) -> NoReturn:
    raise ValueError(name)
