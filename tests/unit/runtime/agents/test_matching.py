"""Which turn a request continues."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra_cli.envs.protocol import Message, ToolCall, ToolSchema, function
from libra_cli.runtime.agents.dialects.conversation import (
    AgentReply,
    AgentRequest,
    BadRequest,
    ReplyCall,
)
from libra_cli.runtime.agents.matching import Conversations, Match, Node, Rule

GET = function("get", "Look up.", {"key": {"type": "string"}})
PUT = function("put", "Store.", {"key": {"type": "string"}})


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def tool(text: str) -> Message:
    return {"role": "tool", "content": text}


def asked(*messages: Message, tools: tuple[ToolSchema, ...] = (GET,), **rest: Any) -> AgentRequest:
    return AgentRequest("chat", messages, tools, **rest)


def said(name: str, text: str = "", *calls: tuple[str, dict[str, Any]], **rest: Any) -> AgentReply:
    made = tuple(ReplyCall(f"c{index}", *call) for index, call in enumerate(calls))
    return AgentReply(name, "policy", text, 10, calls=made, token_ids=(1, 2), **rest)


def turn(
    conversations: Conversations, request: AgentRequest, reply: AgentReply
) -> tuple[Match, Node]:
    match = conversations.find(request)
    return match, conversations.add(match, request, reply)


def begun(rule: Rule = "strict") -> tuple[Conversations, Node]:
    """A conversation of one turn, which called ``get``."""
    conversations = Conversations(rule)
    _, node = turn(conversations, asked(user("q")), said("a", "", ("get", {"key": "ab", "n": 2})))
    return conversations, node


CALLED = said("a", "", ("get", {"key": "ab", "n": 2})).message()


def test_a_request_that_gives_the_reply_back_continues_it_with_what_is_new() -> None:
    conversations, node = begun()
    match = conversations.find(asked(user("q"), CALLED, tool("cd"), user("hurry")))
    assert match.node is node
    assert match.new == (tool("cd"), user("hurry"))
    assert (node.branch, node.tokens) == (0, 12)


@pytest.mark.parametrize("arguments", [{"n": 2, "key": "ab"}, {"key": "ab", "n": 2.0}])
def test_arguments_that_are_equal_as_json_are_equal(arguments: dict[str, Any]) -> None:
    conversations, node = begun()
    back: Message = {
        "role": "assistant",
        "content": "\n",
        "tool_calls": [ToolCall("get", arguments)],
    }
    assert conversations.find(asked(user("q"), back, tool("cd"))).node is node


@pytest.mark.parametrize(
    "arguments", [{"key": "ab"}, {"key": "ab", "n": True}, {"key": "ba", "n": 2}]
)
def test_other_arguments_begin_a_branch(arguments: dict[str, Any]) -> None:
    conversations, _ = begun()
    back: Message = {"role": "assistant", "content": "", "tool_calls": [ToolCall("get", arguments)]}
    match = conversations.find(asked(user("q"), back, tool("cd")))
    assert match.node is None
    assert len(match.new) == 3


def test_other_tools_or_another_system_message_begin_a_branch() -> None:
    conversations, _ = begun()
    assert conversations.find(asked(user("q"), CALLED, tool("cd"), tools=(PUT,))).node is None
    system: Message = {"role": "system", "content": "rules"}
    assert conversations.find(asked(system, user("q"), CALLED, tool("cd"))).node is None


def test_the_order_of_keys_in_a_schema_does_not_matter() -> None:
    conversations, node = begun()
    shuffled = json.loads(json.dumps(GET, sort_keys=True))
    assert conversations.find(asked(user("q"), CALLED, tool("cd"), tools=(shuffled,))).node is node


def test_a_second_continuation_of_one_turn_is_a_branch_that_keeps_its_tokens() -> None:
    conversations, node = begun()
    request = asked(user("q"), CALLED, tool("cd"))
    _, first = turn(conversations, request, said("b", "cd"))
    match, second = turn(conversations, request, said("c", "dc"))
    assert match.node is node
    assert [first.branch, second.branch] == [0, 1]
    assert conversations.branches == 2


def test_a_rewritten_reply_in_the_middle_is_rendered_afresh_though_its_beginning_is_known() -> None:
    conversations, _ = begun()
    turn(conversations, asked(user("q"), CALLED, tool("cd")), said("b", "hm"))
    other: Message = {"role": "assistant", "content": "something else"}
    match = conversations.find(asked(user("q"), CALLED, tool("cd"), other, user("go on")))
    assert match.node is None
    assert len(match.new) == 5


def test_by_position_a_rewritten_reply_keeps_its_tokens_but_other_messages_do_not() -> None:
    conversations, node = begun("position")
    other: Message = {"role": "assistant", "content": "Calling tools: get"}
    assert conversations.find(asked(user("q"), other, user("cd"))).node is node
    assert conversations.find(asked(user("p"), other, user("cd"))).node is None
    assert conversations.find(asked(user("q"), user("cd"))).node is None


def test_by_position_the_reply_that_is_given_back_goes_before_later_ones() -> None:
    conversations, node = begun("position")
    turn(conversations, asked(user("q")), said("b", "other"))
    assert conversations.find(asked(user("q"), CALLED, tool("cd"))).node is node


def test_thinking_counts_only_where_both_have_it() -> None:
    conversations = Conversations()
    _, node = turn(conversations, asked(user("q")), said("a", "yes", reasoning="so"))
    back: Message = {"role": "assistant", "content": "yes"}
    assert conversations.find(asked(user("q"), back, user("why"))).node is node
    same: Message = {**back, "reasoning": "so\n"}
    assert conversations.find(asked(user("q"), same, user("why"))).node is node
    other: Message = {**back, "reasoning": "not so"}
    assert conversations.find(asked(user("q"), other, user("why"))).node is None


def test_thinking_tells_apart_replies_that_say_the_same() -> None:
    conversations = Conversations()
    _, first = turn(conversations, asked(user("q")), said("a", "yes", reasoning="one"))
    _, last = turn(conversations, asked(user("q")), said("b", "yes", reasoning="two"))
    back: Message = {"role": "assistant", "content": "yes", "reasoning": "one"}
    assert conversations.find(asked(user("q"), back, user("why"))).node is first
    assert conversations.find(asked(user("q"), last.said, user("why"))).node is last


def test_a_response_is_continued_by_its_id_with_its_tools() -> None:
    conversations, node = begun()
    match = conversations.find(asked(tool("cd"), tools=(), previous="a"))
    assert (match.node, match.new, match.tools) == (node, (tool("cd"),), (GET,))
    with pytest.raises(BadRequest, match="no response 'z' is known"):
        conversations.find(asked(tool("cd"), previous="z"))


def test_a_response_by_id_with_other_instructions_is_rendered_whole() -> None:
    conversations = Conversations()
    rules: Message = {"role": "system", "content": "rules"}
    others: Message = {"role": "system", "content": "others"}
    _, node = turn(conversations, asked(rules, user("q")), said("a", "yes"))
    assert conversations.find(asked(rules, user("why"), previous="a")).node is node
    match = conversations.find(asked(others, user("why"), previous="a"))
    assert match.node is None
    assert [message["content"] for message in match.new] == ["others", "q", "yes", "why"]


def test_a_repeated_request_is_answered_from_the_record_only_if_it_says_so() -> None:
    conversations = Conversations()
    request = asked(user("q"), digest="d")
    turn(conversations, request, said("a", "yes"))
    again = dataclasses.replace(request, retry=True)
    assert [reply.id for reply in conversations.recorded(again)] == ["a"]
    assert conversations.recorded(request) == ()
    assert conversations.recorded(dataclasses.replace(again, digest="e")) == ()


def test_several_replies_to_one_request_are_branches_and_recorded_together() -> None:
    conversations = Conversations()
    request = asked(user("q"), n=2, digest="d")
    match = conversations.find(request)
    nodes = [conversations.add(match, request, said(name, name)) for name in "ab"]
    assert [node.branch for node in nodes] == [0, 1]
    recorded = conversations.recorded(dataclasses.replace(request, retry=True))
    assert [reply.id for reply in recorded] == ["a", "b"]


steps = st.lists(
    st.tuples(
        st.integers(0, 6),  # the node that the agent goes on from; beyond the last: afresh
        st.sampled_from(["x", "y"]),  # what the user says then
        st.sampled_from(["yes", "no"]),  # what the model replies
    ),
    max_size=12,
)


@given(steps)
def test_the_tokens_that_are_kept_are_those_of_the_conversation_that_is_sent(
    steps: list[tuple[int, str, str]],
) -> None:
    """Against a model of a server, in which every message has tokens of its own."""
    conversations = Conversations()
    branches: list[list[int]] = []
    nodes: list[Node] = []
    histories: list[list[Message]] = []
    for number, (place, text, answer) in enumerate(steps):
        history = histories[place] if place < len(nodes) else []
        request = asked(*history, user(text))
        match = conversations.find(request)
        known = [len(one) for one in histories if list(request.messages[: len(one)]) == one]
        assert len(request.messages) - len(match.new) == max(known, default=0)
        kept = branches[match.node.branch][: match.node.tokens] if match.node else []
        prompt = kept + [hash(str(message)) for message in match.new]
        reply = AgentReply(f"{number}", "policy", answer, len(prompt), token_ids=(number,))
        node = conversations.add(match, request, reply)
        if match.node and branches[match.node.branch] == kept:
            expected = match.node.branch
        else:
            expected = len(branches)
            branches.append([])
        branches[expected] = [*prompt, number]
        assert (node.branch, node.tokens) == (expected, len(prompt) + 1)
        nodes.append(node)
        histories.append([*request.messages, reply.message()])
        assert node.conversation() == histories[-1]
    assert conversations.branches == len(branches)
