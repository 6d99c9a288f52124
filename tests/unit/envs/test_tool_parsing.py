"""Reading a turn never fails, and what it finds is what was written."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra_cli.envs.protocol import ToolCall, function
from libra_cli.envs.tools import Malformed, answer_of, objection, parse_tool_calls

GET = '<tool_call>\n{"name": "get", "arguments": {"key": "ab"}}\n</tool_call>'
FRAGMENTS = [
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    '{"name": "get", "arguments": {"key": "ab"}}',
    '{"name": ',
    "\n",
    "[" * 5000,
    "1" * 5000,
    '"\\ud800"',
    "NaN",
    "null",
]
ANYTHING = st.one_of(st.text(), st.lists(st.sampled_from(FRAGMENTS) | st.text()).map("".join))


@given(ANYTHING)
def test_parsing_never_raises(text):
    for call in parse_tool_calls(text):
        assert isinstance(call, ToolCall | Malformed)
    answer_of(text)


@given(
    name=st.text(min_size=1),
    arguments=st.dictionaries(st.text(), st.integers() | st.text() | st.booleans() | st.none()),
)
def test_a_call_that_is_written_is_read_back(name, arguments):
    written = json.dumps({"name": name, "arguments": arguments})
    if "tool_call>" in written or "think>" in written:
        return
    call = f"<tool_call>\n{written}\n</tool_call>"
    assert parse_tool_calls(call) == [ToolCall(name, arguments)]
    assert answer_of(call) == ""


def test_several_calls_are_read_in_order():
    other = GET.replace("ab", "cd")
    assert parse_tool_calls(f"first {GET}\nthen {other} end") == [
        ToolCall("get", {"key": "ab"}),
        ToolCall("get", {"key": "cd"}),
    ]


def test_thinking_is_not_acting():
    assert parse_tool_calls(f"<think>maybe {GET}</think>no") == []
    assert parse_tool_calls(f"<think>maybe {GET}") == []
    assert parse_tool_calls(f"<think>hm</think>{GET}") == [ToolCall("get", {"key": "ab"})]


def test_an_answer_is_what_is_neither_thinking_nor_a_call():
    assert answer_of(f"<think>13?</think> 12 {GET}") == "12"


def test_a_complete_object_counts_without_its_closing_tag():
    assert parse_tool_calls(GET.removesuffix("</tool_call>")) == [ToolCall("get", {"key": "ab"})]


def test_a_call_cut_in_its_middle_says_so():
    (call,) = parse_tool_calls('<tool_call>\n{"name": "get", "argu')
    assert isinstance(call, Malformed)
    assert call.cut


def test_a_closed_call_that_cannot_be_read_is_not_cut():
    (call,) = parse_tool_calls("<tool_call>get(ab)</tool_call>")
    assert isinstance(call, Malformed)
    assert not call.cut
    assert call.reason.startswith("not JSON")


def test_arguments_may_be_json_in_a_string_or_absent():
    quoted = '<tool_call>{"name": "get", "arguments": "{\\"key\\": \\"ab\\"}"}</tool_call>'
    assert parse_tool_calls(quoted) == [ToolCall("get", {"key": "ab"})]
    assert parse_tool_calls('<tool_call>{"name": "now"}</tool_call>') == [ToolCall("now", {})]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("[1]", "object"),
        ('{"arguments": {}}', '"name"'),
        ('{"name": 3}', '"name"'),
        ('{"name": "get", "arguments": [1]}', '"arguments"'),
    ],
)
def test_a_call_of_the_wrong_form_says_what_is_wrong(body, reason):
    (call,) = parse_tool_calls(f"<tool_call>{body}</tool_call>")
    assert isinstance(call, Malformed)
    assert reason in call.reason


TOOLS = [
    function("get", "", {"key": {"type": "string"}}),
    function("wait", "", {"n": {"type": "integer"}, "why": {"type": "string"}}, required=["n"]),
]


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (ToolCall("get", {"key": "ab"}), None),
        (ToolCall("wait", {"n": 1}), None),
        (ToolCall("wait", {"n": 1, "more": []}), None),
        (ToolCall("put", {}), "no tool 'put', only get, wait"),
        (ToolCall("get", {}), "get needs key"),
        (ToolCall("get", {"key": 3}), "get needs a key of type string"),
        (ToolCall("wait", {"n": True}), "wait needs a n of type integer"),
    ],
)
def test_a_call_is_held_against_the_schemas(call, expected):
    assert objection(call, TOOLS) == expected


def test_without_schemas_every_call_is_the_environments_business():
    assert objection(ToolCall("anything", {}), ()) is None
