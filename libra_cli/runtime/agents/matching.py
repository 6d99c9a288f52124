"""Finds the turn that a request continues, among all turns of its trajectory.

An agent sends its whole conversation with every request. If it begins with a conversation that was
answered here, the exact tokens of that conversation are kept and only what is new is rendered;
otherwise the request begins a branch of its own. The turns form a tree: a *node* is one reply with
the messages that led to it from the node before.

Messages are compared by meaning: role, text, tool calls by name and JSON-equal arguments, thinking
only where both sides have it, an assistant's text without the white space around it. Clients change
the rest (key order, ids, cache marks, fields of their own). Tools must be the same, since a prompt
holds them. What a client sent is compared with what it sends now, in either rule; the rule says
what is asked of the assistant's messages that stand where our replies stood:

    strict      they say what our reply said
    position    they are the assistant's: clients that rewrite tool calls as text, or drop text, go
                on with the tokens that the model wrote

Only messages that a renderer can append to a turn may be new: after the node that is continued
there is no other assistant's message. A conversation that was rewritten is rendered afresh.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from libra_cli.envs.protocol import Message, ToolCall, ToolSchema
from libra_cli.runtime.agents.dialects.conversation import AgentReply, AgentRequest, BadRequest

Rule: TypeAlias = Literal["strict", "position"]


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """One reply, and how its conversation goes on from the node before."""

    parent: Node | None
    new: tuple[Message, ...]
    """The messages between the parent's reply, or the beginning, and this reply."""
    tools: tuple[ToolSchema, ...]
    reply: AgentReply
    branch: int
    """The number of the sequence of tokens that the reply is in; its first turn begins it."""
    tokens: int
    """The number of tokens of that sequence up to and including the reply's last one."""
    said: Message = field(repr=False)
    """The reply, as a message of the conversation."""

    def conversation(self) -> list[Message]:
        """Return all messages, up to and including the reply."""
        parts = [[*node.new, node.said] for node in _ancestry(self)]
        return [message for part in parts for message in part]


@dataclass(frozen=True, slots=True)
class Match:
    """Which tokens a request keeps, and which of its messages are rendered after them."""

    node: Node | None
    """The node whose tokens are kept; None: the prompt is rendered afresh."""
    new: tuple[Message, ...]
    """The messages after it, none of them the assistant's; all of them if there is no node."""
    tools: tuple[ToolSchema, ...]


class Conversations:
    """The tree of all turns of one trajectory, in which a request is looked up."""

    def __init__(self, rule: Rule = "strict") -> None:
        self._rule = rule
        self._children: dict[Node | str, list[Node]] = {}
        """The nodes after a node, and the first ones by their tools in canonical form."""
        self._by_id: dict[str, Node] = {}
        self._by_digest: dict[str, list[Node]] = {}
        self._tips: list[Node] = []
        """The last node of each branch, by its number."""

    @property
    def branches(self) -> int:
        return len(self._tips)

    @property
    def turns(self) -> int:
        return len(self._by_id)

    def recorded(self, request: AgentRequest) -> tuple[AgentReply, ...]:
        """Return the replies to an earlier sending of this request; empty if it is no repetition.

        The client says that it repeats a request; the same words asked again are a new request.
        """
        nodes = self._by_digest.get(request.digest, []) if request.retry else []
        return tuple(node.reply for node in nodes[-request.n :])

    def find(self, request: AgentRequest) -> Match:
        """Return the deepest node that the request continues, and what is new after it.

        Of equally deep ones it is the one with the most replies given back word for word, and of
        these the last.

        Raises:
            BadRequest: it continues a response that is not known.
        """
        messages, tools = self._whole(request)
        best: Node | None = None
        rank = (0, 0)
        for node, kept, exact in self._continued(messages, _canonical(tools)):
            if (kept, exact) > rank:
                best, rank = node, (kept, exact)
        new = tuple(messages[rank[0] :])
        if any(message["role"] == "assistant" for message in new):
            return Match(None, tuple(messages), tools)
        return Match(best, new, tools)

    def add(self, match: Match, request: AgentRequest, reply: AgentReply) -> Node:
        """Record a reply to a request, as it was matched.

        A reply that follows the last node of a branch belongs to that branch; any other begins one.
        """
        parent = match.node
        branch = len(self._tips)
        if parent is not None and self._tips[parent.branch] is parent:
            branch = parent.branch
        tokens = reply.prompt_tokens + len(reply.token_ids)
        said = reply.message()
        node = Node(parent, match.new, match.tools, reply, branch, tokens, said)
        self._tips[branch : branch + 1] = [node]
        self._children.setdefault(parent or _canonical(match.tools), []).append(node)
        self._children[node] = []
        self._by_id[reply.id] = node
        self._by_digest.setdefault(request.digest, []).append(node)
        return node

    def _continued(
        self, messages: Sequence[Message], tools: str
    ) -> Iterator[tuple[Node, int, int]]:
        """Yield the nodes that the messages begin with, later siblings first.

        With each go the number of messages that it covers, and of replies given back as they were.
        """
        paths = [(node, 0, 0) for node in self._children.get(tools, ())]
        while paths:
            node, start, exact = paths.pop()
            end = start + len(node.new)
            if len(messages) <= end or not _all_same(node.new, messages[start:end]):
                continue
            same = _same(node.said, messages[end])
            if same or (self._rule == "position" and messages[end]["role"] == "assistant"):
                yield node, end + 1, exact + same
                paths += [(child, end + 1, exact + same) for child in self._children[node]]

    def _whole(self, request: AgentRequest) -> tuple[list[Message], tuple[ToolSchema, ...]]:
        """Return the request's whole conversation and its tools."""
        messages = list(request.messages)
        if not request.previous:
            return messages, request.tools
        node = self._by_id.get(request.previous)
        if node is None:
            raise BadRequest(f"previous_response_id: no response {request.previous!r} is known")
        before = node.conversation()
        # Instructions are not carried over: they are said again, or dropped, with every response.
        if before[0]["role"] == "system" and messages and messages[0]["role"] == "system":
            before[0] = messages.pop(0)
        return before + messages, request.tools or node.tools


def _ancestry(node: Node) -> list[Node]:
    """Return the nodes from the first one to this one."""
    nodes = [node]
    while (parent := nodes[-1].parent) is not None:
        nodes.append(parent)
    return nodes[::-1]


def _all_same(first: Sequence[Message], second: Sequence[Message]) -> bool:
    return all(_same(one, other) for one, other in zip(first, second, strict=True))


def _same(first: Message, second: Message) -> bool:
    if first["role"] != second["role"]:
        return False
    if first["role"] != "assistant":
        return first["content"] == second["content"]
    thoughts = [text.strip() for text in (first.get("reasoning"), second.get("reasoning")) if text]
    return (
        first["content"].strip() == second["content"].strip()
        and (len(thoughts) < 2 or thoughts[0] == thoughts[1])
        and _calls(first) == _calls(second)
    )


def _calls(message: Message) -> list[tuple[str, str]]:
    calls: list[ToolCall] = message.get("tool_calls", [])
    return [(call.name, _canonical(call.arguments)) for call in calls]


def _canonical(value: object) -> str:
    """Return a text that is the same for JSON values that are equal, whatever their keys' order."""
    return json.dumps(_plain(value), sort_keys=True)


def _plain(value: Any) -> Any:
    """Return the value with 2.0 as 2: a client in JavaScript cannot tell them apart."""
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
