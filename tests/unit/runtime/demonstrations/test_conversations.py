"""Rows in the forms that people have them are read as conversations, or refused in words."""

from __future__ import annotations

import pytest

from libra_cli.config.errors import LibraError
from libra_cli.envs.protocol import ToolCall
from libra_cli.runtime.demonstrations.conversations import read_conversation

ASKED = {"role": "user", "content": "1 + 1?"}
SAID = {"role": "assistant", "content": "2"}


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [ASKED, SAID]},
        {"prompt": "1 + 1?", "completion": "2"},
        {"prompt": [ASKED], "completion": [SAID]},
        {"conversations": [{"from": "human", "value": "1 + 1?"}, {"from": "gpt", "value": "2"}]},
        {"messages": [{**ASKED, "content": [{"type": "text", "text": "1 + 1?"}]}, SAID]},
    ],
    ids=["messages", "texts", "prompt and completion", "sharegpt", "parts"],
)
def test_one_conversation_in_every_form(row):
    read = read_conversation(row)
    assert read.messages == (ASKED, SAID)
    assert read.imitated == (False, True)


def test_calls_tools_and_thinking_are_read():
    call = {"id": "a", "type": "function", "function": {"name": "get", "arguments": '{"key": "k"}'}}
    row = {
        "messages": [
            ASKED,
            {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
            {"role": "tool", "tool_call_id": "a", "content": "v"},
            SAID,
        ],
        "tools": [{"type": "function", "function": {"name": "get", "parameters": {}}}],
    }
    read = read_conversation(row)
    assert read.messages[1]["tool_calls"] == [ToolCall("get", {"key": "k"})]
    assert read.messages[1]["reasoning"] == "hm"
    assert read.messages[2]["name"] == "get"
    assert [tool["function"]["name"] for tool in read.tools] == ["get"]


def test_only_the_completion_and_what_has_weight_is_imitated():
    earlier = {"prompt": [ASKED, SAID, ASKED], "completion": [SAID]}
    assert read_conversation(earlier).imitated == (False, False, False, True)
    weighed = {"messages": [ASKED, {**SAID, "weight": 0}, ASKED, SAID]}
    assert read_conversation(weighed).imitated == (False, False, False, True)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"text": "1 + 1 = 2"}, "there are no messages, only text"),
        ({"messages": [ASKED]}, "no message of the assistant"),
        ({"messages": [{"role": "oracle", "content": ""}]}, "the role 'oracle' is not known"),
        ({"conversations": [{"from": "function_call", "value": ""}]}, "'function_call'"),
        ({"messages": "hello"}, "messages is no list"),
    ],
)
def test_what_is_no_conversation_is_told(row, said):
    with pytest.raises(LibraError, match=said):
        read_conversation(row)
