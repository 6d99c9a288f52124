"""What only Chat Completions has."""

from __future__ import annotations

import json
from typing import Any

import pytest

from libra_cli.envs.protocol import ToolCall
from libra_cli.runtime.agents.dialects.chat import ChatCompletions
from libra_cli.runtime.agents.dialects.conversation import (
    AgentReply,
    AgentRequest,
    BadRequest,
    ReplyCall,
)

USER = {"role": "user", "content": "q"}


def read(*messages: dict[str, Any], **rest: Any) -> AgentRequest:
    return ChatCompletions().read("", {}, {"messages": list(messages), **rest})


def test_calls_and_results_are_read_with_the_tools_names() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "get", "arguments": '{"a": 1}'}}
    called, result = read(
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "4"},
    ).messages
    assert called["tool_calls"] == [ToolCall("get", {"a": 1})]
    assert result == {"role": "tool", "content": "4", "name": "get"}


def test_the_developer_is_the_system() -> None:
    assert read({"role": "developer", "content": "rules"}).messages[0]["role"] == "system"


def test_the_newer_limit_goes_before_the_older() -> None:
    assert read(USER, max_tokens=9, max_completion_tokens=5).max_tokens == 5
    assert read(USER).max_tokens is None


def test_stop_is_one_text_or_several() -> None:
    assert read(USER, stop="a").stop == ("a",)
    assert read(USER, stop=["a", "", "b"]).stop == ("a", "b")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"messages": []}, "must not be empty"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "'robot' is not known"),
        ({"messages": [USER], "n": 1000}, "n is at most"),
        ({"messages": [USER], "functions": [{}]}, "send tools"),
        ({"messages": [USER], "max_tokens": 0}, "max_tokens must be a positive whole number"),
    ],
)
def test_what_cannot_be_answered_is_refused_in_words(body: dict[str, Any], words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        ChatCompletions().read("", {}, body)


def test_several_replies_are_several_choices_and_their_tokens_add_up() -> None:
    request = read(USER, n=2)
    replies = [AgentReply(name, "policy", name, 5, token_ids=(1, 2)) for name in "ab"]
    answer = ChatCompletions().answer(request, replies)
    assert [choice["message"]["content"] for choice in answer["choices"]] == ["a", "b"]
    assert answer["usage"]["total_tokens"] == 9


def test_a_call_without_text_has_no_content() -> None:
    reply = AgentReply("a", "policy", "", 5, calls=(ReplyCall("c", "get", {}),))
    (choice,) = ChatCompletions().answer(read(USER), [reply])["choices"]
    assert choice["message"]["content"] is None


def test_log_probabilities_are_told_by_token_id() -> None:
    reply = AgentReply("a", "policy", "yes", 5, token_ids=(7,), logprobs=(-0.25,))
    answer = ChatCompletions().answer(read(USER, logprobs=True), [reply])
    (token,) = answer["choices"][0]["logprobs"]["content"]
    assert (token["token"], token["logprob"]) == ("token_id:7", -0.25)


def test_the_last_chunk_has_the_usage_if_it_is_asked_for() -> None:
    request = read(USER, stream=True, stream_options={"include_usage": True})
    reply = AgentReply("a", "policy", "yes", 5, token_ids=(7,))
    *_, chunk, done = ChatCompletions().events(request, [reply])
    assert done == b"data: [DONE]\n\n"
    body = json.loads(chunk.decode().removeprefix("data: "))
    assert body["choices"] == []
    assert body["usage"]["completion_tokens"] == 1
