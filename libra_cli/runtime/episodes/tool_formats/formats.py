"""The tool-call formats by name, and how a generated turn of each is read.

A format says where a call begins and ends; ``runtime.episodes.tool_formats.bodies`` reads what is
between. Reading never raises: a call that cannot be read is ``Malformed``, with a reason for the
model. Four rules hold for all formats:

- Calls inside thinking do not count: neither before the last end of thinking, nor in thinking that
  was never closed since the turn was cut in it.
- A call that can be read counts even if its closing mark is missing, since models stop right after
  the brace. If it is cut as well, it is ``Malformed`` and ``cut``.
- A mark that is closed and empty, or has other text in it, is ``Malformed``.
- Text around the calls is allowed and ignored.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from libra_cli.envs.protocol import ToolCall, ToolSchema
from libra_cli.envs.tools import Malformed, parameter_types
from libra_cli.runtime.episodes.tool_formats.bodies import (
    Types,
    Unreadable,
    brace_calls,
    check,
    element_calls,
    json_calls,
    named_json_calls,
    pair_calls,
    python_calls,
)

_EXCERPT = 80
THINKING = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("◁think▷", "◁/think▷"),
    ("<|channel>thought", "<channel|>"),
)
"""The marks of thinking: Qwen, DeepSeek, GLM and others; Mistral; Kimi; Gemma 4."""
_ANALYSIS = re.compile(
    r"(?:<\|start\|>assistant)?<\|channel\|>analysis[^<]*<\|message\|>(.*?)(?:<\|end\|>|\Z)",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class GeneratedTurn:
    """What a generated turn says, read in the form in which the model writes tool calls."""

    text: str
    """What is left without thinking and tool calls."""
    reasoning: str
    """The text of the thinking; empty if there is none."""
    calls: list[ToolCall | Malformed]
    visible: str
    """What is left without thinking, tool calls as they were written."""


def split_thinking(said: str) -> tuple[str, str]:
    """Return a turn's thinking and the rest; the rest is empty if the thinking never ended."""
    begins = said.lstrip()
    opened_by = [marks for marks in THINKING if begins.startswith(marks[0])]
    for start, end in opened_by or THINKING:
        before, closed, after = said.rpartition(end)
        if closed:
            _, opened, within = before.partition(start)
            # A new block after the last end was cut, and hides what follows it.
            return (within if opened else before).strip(), after.partition(start)[0]
        visible, opened, within = said.partition(start)
        if opened:
            return within.strip(), visible
    return "", said


def split_channels(said: str) -> tuple[str, str]:
    """Divide a turn of gpt-oss, whose thinking is in messages of the channel ``analysis``."""
    thoughts = [thought.strip() for thought in _ANALYSIS.findall(said)]
    return "\n".join(thoughts), _ANALYSIS.sub("", said)


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """The way in which some model families write tool calls."""

    name: str
    """The name by which ``model.tool_format`` chooses it."""
    calls: re.Pattern[str]
    """Finds calls; group ``body`` is the call, ``end`` is empty if its closing mark is missing."""
    read: Callable[[str, Types], list[ToolCall]]
    """Reads the calls in a ``body``, given the types of the tools' parameters."""
    needs_end: bool = False
    """Whether only the closing mark tells that a call is complete."""
    around: re.Pattern[str] = re.compile(r"(?!)")
    """Marks around all calls of a turn, which belong neither to a call nor to the answer."""
    split: Callable[[str], tuple[str, str]] = split_thinking
    """Divides a turn into its thinking and the rest."""
    call_ids: re.Pattern[str] = re.compile(r"(?!)")
    """Finds the ids that the model gives its calls, if it gives any."""

    def turn(self, said: str, tools: Sequence[ToolSchema] = ()) -> GeneratedTurn:
        """Read a generated turn; ``tools`` give the types of arguments that are bare text."""
        reasoning, visible = self.split(said)
        calls: list[ToolCall | Malformed] = []
        types: Types | None = None
        for match in self.calls.finditer(visible):
            if types is None:
                types = _types(tools)
            calls += self._read(match, types)
        left = self.around.sub("", self.calls.sub("", visible) if calls else visible)
        return GeneratedTurn(left.strip(), reasoning, calls, visible.strip())

    def _read(self, match: re.Match[str], types: Types) -> Sequence[ToolCall | Malformed]:
        body = match["body"].strip()
        try:
            if self.needs_end and not match["end"]:
                raise Unreadable("it is not closed")
            calls = self.read(body, types)
            check(calls)
        except Unreadable as error:
            cut = not match["end"] and match.end() == len(match.string)
            return [Malformed(body[:_EXCERPT], str(error), cut)]
        return calls


def _types(tools: Sequence[ToolSchema]) -> Types:
    return {tool["function"]["name"]: parameter_types(tool["function"]) for tool in tools}


def _between(start: str, end: str) -> re.Pattern[str]:
    """Return a pattern of calls between two marks; the end may be missing before another start."""
    return re.compile(rf"{start}(?P<body>.*?)(?P<end>{end}|(?={start})|\Z)", re.DOTALL)


def _alone(start: str) -> re.Pattern[str]:
    """Return a pattern of calls that are all of a turn and begin in some way."""
    return re.compile(rf"\A\s*(?P<body>{start}.*)(?P<end>)\Z", re.DOTALL)


_CALL = _between("<tool_call>", "</tool_call>")
_KIMI = r"<\|tool_call{}\|>"

FORMATS = {
    one.name: one
    for one in (
        ToolFormat("hermes", _CALL, json_calls),
        ToolFormat("qwen_xml", _CALL, element_calls),
        ToolFormat("glm", _CALL, pair_calls, needs_end=True),
        ToolFormat(
            "mistral",
            _between(r"\[TOOL_CALLS\]", r"(?=\[TOOL_CALLS\])"),
            named_json_calls,
            call_ids=re.compile(r'(?:\[CALL_ID\]|"id":\s*")(\w{9})'),
        ),
        ToolFormat(
            "kimi",
            _between(_KIMI.format("_begin"), _KIMI.format("_end")),
            named_json_calls,
            around=re.compile(_KIMI.format("s_section_(?:begin|end)")),
            call_ids=re.compile(rf"{_KIMI.format('_begin')}\s*([^\s<]+)"),
        ),
        ToolFormat(
            "deepseek",
            _between("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
            named_json_calls,
            around=re.compile("<｜tool▁calls▁(?:begin|end)｜>"),
        ),
        ToolFormat(
            "invoke",
            re.compile(
                r"(?P<body><(?P<prefix>[^<>=\s]*?)invoke\s+name=.*?"
                r"(?P<end></(?P=prefix)invoke>|(?=<(?P=prefix)invoke\s)|\Z))",
                re.DOTALL,
            ),
            element_calls,
            around=re.compile(r"</?[^<>\s]*(?:tool_call|function_call)s?>"),
        ),
        ToolFormat(
            "gpt_oss",
            re.compile(
                r"(?:<\|start\|>assistant\s*+)?(?:<\|channel\|>\w++\s*+)?to=functions\."
                r"(?P<body>.*?)(?P<end><\|call\|>|<\|end\|>|\Z)",
                re.DOTALL,
            ),
            named_json_calls,
            around=re.compile(r"<\|start\|>assistant|<\|channel\|>\w+|<\|[a-z]+\|>"),
            split=split_channels,
        ),
        ToolFormat("gemma", _between(r"<\|tool_call>", r"<tool_call\|>"), brace_calls),
        ToolFormat(
            "python_list",
            _between(
                r"(?:<\|tool_call_start\|>|<function_calls>|<\|python_start\|>)",
                r"(?:<\|tool_call_end\|>|</function_calls>|<\|python_end\|>)",
            ),
            python_calls,
        ),
        ToolFormat("python", _alone(r"\[\s*[A-Za-z_][\w.]*\("), python_calls),
        ToolFormat(
            "llama_json",
            re.compile(
                r"(?:\A\s*|<\|python_tag\|>\s*)"
                r'(?P<body>\{\s*"(?:name|type)"\s*:(?=.{0,4096}"(?:parameters|arguments)"\s*:).*)'
                r"(?P<end>)\Z",
                re.DOTALL,
            ),
            json_calls,
        ),
    )
}
"""The formats by name, in the order in which they are tried on what a template writes."""
