"""What only Responses has."""

from __future__ import annotations

from typing import Any

import pytest

from libra_cli.envs.protocol import ToolCall
from libra_cli.runtime.agents.dialects.conversation import AgentReply, AgentRequest, BadRequest
from libra_cli.runtime.agents.dialects.responses import Responses


def read(given: Any, **rest: Any) -> AgentRequest:
    return Responses().read("", {}, {"input": given, **rest})


def test_instructions_come_first_and_a_text_is_the_users() -> None:
    system, user = read("q", instructions="rules").messages
    assert system == {"role": "system", "content": "rules"}
    assert user == {"role": "user", "content": "q"}


def test_the_items_of_one_turn_are_one_message() -> None:
    _, turn, *results = read(
        [
            {"role": "user", "content": "q"},
            {
                "type": "reasoning",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "hm"}],
            },
            {"role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
            {"type": "function_call", "call_id": "a", "name": "get", "arguments": "{}"},
            {"type": "function_call", "call_id": "b", "name": "put", "arguments": '{"k": 1}'},
            {"type": "function_call_output", "call_id": "b", "output": "done"},
            {"type": "function_call_output", "call_id": "a", "output": "found"},
        ]
    ).messages
    assert turn["content"] == "I look."
    assert turn["reasoning"] == "hm"
    assert turn["tool_calls"] == [ToolCall("get", {}), ToolCall("put", {"k": 1})]
    assert [result["name"] for result in results] == ["put", "get"]


def test_the_response_before_is_named_without_its_prefix() -> None:
    assert read("q", previous_response_id="resp_7").previous == "7"


@pytest.mark.parametrize("key", ["conversation", "prompt", "background"])
def test_what_would_have_to_be_kept_elsewhere_is_refused(key: str) -> None:
    with pytest.raises(BadRequest, match=f"{key}: nothing is kept here"):
        read("q", **{key: "x"})


def test_an_unknown_item_is_refused_in_words() -> None:
    with pytest.raises(BadRequest, match="'item_reference' cannot be shown"):
        read([{"type": "item_reference", "id": "x"}])


def test_a_turn_that_was_cut_is_incomplete() -> None:
    answer = Responses().answer(read("q"), [AgentReply("a", "m", "y", 1, finish_reason="length")])
    assert answer["status"] == "incomplete"
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}


def test_thinking_is_shown_to_who_asks_for_it() -> None:
    reply = AgentReply("a", "m", "yes", 1, reasoning="hm")
    kinds = [
        [item["type"] for item in Responses().answer(read("q", **asked), [reply])["output"]]
        for asked in ({}, {"reasoning": {"summary": "auto"}})
    ]
    assert kinds == [["message"], ["reasoning", "message"]]
