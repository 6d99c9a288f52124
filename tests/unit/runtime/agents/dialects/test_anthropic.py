"""What only Anthropic's Messages has."""

from __future__ import annotations

from typing import Any

import pytest

from libra_cli.envs.protocol import ToolCall
from libra_cli.runtime.agents.dialects.anthropic import AnthropicMessages
from libra_cli.runtime.agents.dialects.conversation import AgentReply, AgentRequest, BadRequest

PATH = "/v1/messages"
USER = {"role": "user", "content": "q"}


def read(*messages: dict[str, Any], path: str = PATH, **rest: Any) -> AgentRequest:
    return AnthropicMessages().read(path, {}, {"messages": list(messages), **rest})


def test_the_blocks_of_system_are_one_message_without_anthropics_billing() -> None:
    blocks = [
        {"type": "text", "text": "x-anthropic-billing-header: cch=1;"},
        {"type": "text", "text": "You help.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "Be short."},
    ]
    assert read(USER, system=blocks).messages[0]["content"] == "You help.\nBe short."


def test_results_of_tools_are_messages_of_their_own_in_their_order() -> None:
    use = {"type": "tool_use", "id": "t", "name": "get", "input": {"a": 1}}
    thought = {"type": "thinking", "thinking": "hm", "signature": "s"}
    said = {"type": "text", "text": "I look."}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "4"}]}
    turn, found, user = read(
        {"role": "assistant", "content": [thought, said, use]},
        {"role": "user", "content": [result, {"type": "text", "text": "go on"}]},
    ).messages
    assert turn == {
        "role": "assistant",
        "content": "I look.",
        "reasoning": "hm",
        "tool_calls": [ToolCall("get", {"a": 1})],
    }
    assert found == {"role": "tool", "content": "4", "name": "get"}
    assert user == {"role": "user", "content": "go on"}


def test_neighbouring_messages_of_the_assistant_are_one_as_the_api_reads_them() -> None:
    said = {"role": "assistant", "content": "one"}
    used = {"type": "tool_use", "id": "t", "name": "get", "input": {}}
    _, turn = read(USER, said, {"role": "assistant", "content": [used]}).messages
    assert turn["content"] == "one"
    assert turn["tool_calls"] == [ToolCall("get", {})]


def test_the_system_may_speak_in_the_middle() -> None:
    roles = [m["role"] for m in read(USER, {"role": "system", "content": "now"}, USER).messages]
    assert roles == ["user", "system", "user"]


def test_an_image_in_a_tools_result_is_refused_in_words() -> None:
    result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image"}]}
    with pytest.raises(BadRequest, match="type 'image' cannot be shown"):
        read({"role": "user", "content": [result]})


def test_tools_that_anthropic_runs_are_left_out_and_told() -> None:
    request = read(USER, tools=[{"type": "web_search_20250305", "name": "web_search"}])
    assert request.tools == ()
    assert request.dropped == ("tool web_search_20250305 web_search",)


def test_counting_is_asked_for_by_the_path() -> None:
    assert read(USER, path=f"{PATH}/count_tokens?beta=true").counts
    assert not read(USER).counts


def test_a_text_that_stopped_the_turn_is_told() -> None:
    reply = AgentReply("a", "policy", "yes", 5, stop="END")
    answer = AnthropicMessages().answer(read(USER, stop_sequences=["END"]), [reply])
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "END")


def test_thinking_is_shown_to_who_asks_for_it() -> None:
    reply = AgentReply("a", "policy", "yes", 5, reasoning="hm")
    asked = read(USER, thinking={"type": "enabled", "budget_tokens": 1024})
    blocks = [
        AnthropicMessages().answer(request, [reply])["content"] for request in (read(USER), asked)
    ]
    assert [[block["type"] for block in one] for one in blocks] == [["text"], ["thinking", "text"]]
