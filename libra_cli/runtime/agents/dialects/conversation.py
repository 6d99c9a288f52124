"""What an agent asks for and what it is answered, whatever dialect it speaks.

A dialect reads a request's JSON into an ``AgentRequest`` and writes an ``AgentReply`` as JSON, or
as the server-sent events that a streaming client expects. Events are made from the whole reply: a
client that streams sees the same text as one that does not, only later than it could. Nothing here
knows tokens, servers or time: ids and times are given by the caller.

The messages of a request are in one form for all dialects, that of environments: ``developer`` is
``system``; the texts of a message's parts are joined by a line break; neighbouring items of one
assistant's turn are one message; the ids of calls are dropped, and a tool's message has the name of
its tool where the conversation tells it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

from libra_cli.envs.protocol import Message, ToolCall, ToolSchema

DialectName: TypeAlias = Literal["chat", "responses", "anthropic"]
"""Chat Completions and Responses are OpenAI's, Messages is Anthropic's."""
FinishReason: TypeAlias = Literal["stop", "length", "tool_calls"]
Json: TypeAlias = dict[str, Any]


class BadRequest(Exception):
    """A request that cannot be answered; the agent reads ``message``, as its dialect words it."""

    def __init__(self, message: str, *, status: int = 400) -> None:
        """Say why in words, with the HTTP ``status`` that a client understands."""
        super().__init__(message)
        self.message = message
        self.status = status


@dataclass(frozen=True, slots=True)
class AgentRequest:
    """A request of an agent for a turn, read from any dialect."""

    dialect: DialectName
    messages: tuple[Message, ...]
    """All of the conversation, or what follows ``previous``."""
    tools: tuple[ToolSchema, ...] = ()
    previous: str = ""
    """The ``AgentReply.id`` that this request continues (Responses only)."""
    stream: bool = False
    usage_chunk: bool = False
    """Whether the stream ends with a chunk of token counts (Chat Completions only)."""
    counts: bool = False
    """Whether only the prompt's tokens are to be counted (Anthropic only)."""
    thinks: bool = True
    """Whether the agent is shown the model's thinking."""
    max_tokens: int | None = None
    """Most tokens to generate; None: the recipe's limit alone."""
    stop: tuple[str, ...] = ()
    """Texts at which to stop; they are not part of the reply's text."""
    n: int = 1
    """How many replies are wanted (Chat Completions only)."""
    overridden: tuple[str, ...] = ()
    """The sampling keys that the agent set. The recipe's sampling wins over them."""
    dropped: tuple[str, ...] = ()
    """What else was left out of the request, in words for the log, such as a hosted tool."""
    return_token_ids: bool = False
    logprobs: bool = False
    session: str = ""
    """The value of the header ``X-Session-ID``; empty without one."""
    retry: bool = False
    """Whether the client says that it sends this request again."""
    digest: str = ""
    """Equal for two sendings of one request: its ``Idempotency-Key`` or a digest of its body."""


@dataclass(frozen=True, slots=True)
class ReplyCall:
    """A tool call of a reply, with the id by which the tool's answer refers to it."""

    call_id: str
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class AgentReply:
    """A generated turn, to be written in any dialect."""

    id: str
    """The id without a dialect's prefix (``chatcmpl-``, ``resp_``, ``msg_``)."""
    model: str
    """The name of the model that the agent asked for or is told."""
    text: str
    """What the turn says without thinking and tool calls; a call that cannot be read is text."""
    prompt_tokens: int
    reasoning: str = ""
    calls: tuple[ReplyCall, ...] = ()
    finish_reason: FinishReason = "stop"
    stop: str = ""
    """The text of ``AgentRequest.stop`` that ended the turn, if one did."""
    prompt_ids: Sequence[int] = ()
    """Needed only if the request has ``return_token_ids``: records keep replies."""
    token_ids: Sequence[int] = ()
    logprobs: Sequence[float] = field(default=(), repr=False)
    """The natural logarithm of each generated token's probability; as long as ``token_ids``."""
    created_s: int = 0
    """When it was made, in seconds since the epoch."""

    def message(self) -> Message:
        """Return the reply as the assistant's message of the conversation."""
        message: Message = {"role": "assistant", "content": self.text}
        if self.calls:
            message["tool_calls"] = [ToolCall(call.name, call.arguments) for call in self.calls]
        if self.reasoning:
            message["reasoning"] = self.reasoning
        return message


class Dialect(Protocol):
    """How one API words requests, replies and errors. ``dialects.paths.dialect_of`` finds it."""

    keep_alive: bytes
    """What may be sent at any time before the first event, so that nobody gives up waiting."""

    def read(self, path: str, headers: Mapping[str, str], body: object) -> AgentRequest:
        """Read a request, given its decoded JSON.

        Raises:
            BadRequest: it is not a request of this dialect, or asks for what cannot be trained.
        """

    def answer(self, request: AgentRequest, replies: Sequence[AgentReply]) -> Json:
        """Return the whole answer; there are ``request.n`` ``replies``."""

    def events(self, request: AgentRequest, replies: Sequence[AgentReply]) -> Iterator[bytes]:
        """Return the same answer as server-sent events."""

    def error(self, status: int, message: str) -> Json:
        """Return the body of an error with this HTTP status."""

    def error_event(self, status: int, message: str) -> bytes:
        """Return an error as the event that ends a stream that has begun."""
