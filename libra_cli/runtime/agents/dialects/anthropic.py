"""Anthropic's Messages, as its SDK and Claude Code speak it.

Results of tools are blocks of a user's message there and messages of their own here. Claude Code
puts messages of the role ``system`` in the middle of a conversation, which stay where they are, and
a first block of ``system`` that is only for Anthropic's accounts, which is left out. Tools that
Anthropic runs itself are left out of the prompt and named in ``AgentRequest.dropped``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

from libra_cli.envs.protocol import Message, ToolCall, ToolSchema
from libra_cli.runtime.agents.dialects import reading
from libra_cli.runtime.agents.dialects.conversation import (
    AgentReply,
    AgentRequest,
    BadRequest,
    Json,
)

_BILLING = "x-anthropic-billing-header:"
_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    529: "overloaded_error",
}
_STOPS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class AnthropicMessages:
    """Reads ``POST /v1/messages`` and ``/v1/messages/count_tokens``, and writes their answers."""

    keep_alive = b'event: ping\ndata: {"type": "ping"}\n\n'

    def read(self, path: str, headers: Mapping[str, str], body: object) -> AgentRequest:
        """Read a request as ``Dialect.read`` says; ``/count_tokens`` sets ``counts``."""
        body = reading.object_of(body, "the request")
        tools, dropped = _tools(body)
        thinking = body.get("thinking")
        kind = thinking.get("type") if isinstance(thinking, dict) else None
        return AgentRequest(
            dialect="anthropic",
            messages=_messages(body),
            tools=tools,
            counts=path.partition("?")[0].endswith("/count_tokens"),
            thinks=kind in ("enabled", "adaptive"),
            max_tokens=reading.limit_of(body, "max_tokens"),
            stop=reading.stops_of(body.get("stop_sequences"), "stop_sequences"),
            dropped=tuple(dropped + reading.dropped_choices(body)),
            **reading.common_fields(headers, body),
        )

    def answer(self, request: AgentRequest, replies: Sequence[AgentReply]) -> Json:
        """Return a ``message`` with the one reply, as ``Dialect.answer`` says."""
        reply = replies[0]
        answer = _frame(reply) | {"content": _blocks(request, reply)} | _ending(reply)
        answer["usage"] = _usage(reply, len(reply.token_ids))
        if request.return_token_ids:
            answer["prompt_token_ids"] = list(reply.prompt_ids)
            answer["token_ids"] = list(reply.token_ids)
        return answer

    def events(self, request: AgentRequest, replies: Sequence[AgentReply]) -> Iterator[bytes]:
        for body in _events(request, replies[0]):
            yield reading.event(body, body["type"])

    def error(self, status: int, message: str) -> Json:
        kind = _KINDS.get(status, "api_error" if status >= 500 else "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": message}}

    def error_event(self, status: int, message: str) -> bytes:
        return reading.event(self.error(status, message), "error")


def _messages(body: Json) -> tuple[Message, ...]:
    given = reading.objects_of(body.get("messages"), "messages")
    if not given:
        raise BadRequest("messages must not be empty")
    system = body.get("system")
    blocks = [system] if isinstance(system, str) else reading.objects_of(system, "system")
    texts = [reading.text_of([one] if isinstance(one, dict) else one, "system") for one in blocks]
    text = "\n".join(one for one in texts if not one.startswith(_BILLING))
    messages: list[Message] = [{"role": "system", "content": text}] if text else []
    names: dict[object, str] = {}
    for index, message in enumerate(given):
        messages += _read(message, names, f"messages[{index}]")
    return reading.joined_assistants(messages)


def _read(message: Json, names: dict[object, str], where: str) -> list[Message]:
    content = message.get("content")
    blocks = reading.objects_of(
        content if isinstance(content, list) else [{"type": "text", "text": content}], where
    )
    match message.get("role"):
        case "system":
            return [{"role": "system", "content": reading.text_of(blocks, where)}]
        case "user":
            return _user(blocks, names, where)
        case "assistant":
            return [_assistant(blocks, names, where)]
        case role:
            raise BadRequest(f"{where}: the role {role!r} is not known")


def _user(blocks: list[Json], names: dict[object, str], where: str) -> list[Message]:
    messages: list[Message] = []
    texts: list[str] = []

    def say() -> None:
        if texts:
            messages.append({"role": "user", "content": "\n".join(texts)})
            texts.clear()

    for block in blocks:
        if block.get("type") != "tool_result":
            texts.append(reading.text_of_part(block, where))
            continue
        say()
        text = reading.text_of(block.get("content"), where)
        messages.append(reading.tool_message(text, names.get(str(block.get("tool_use_id")))))
    say()
    return messages


def _assistant(blocks: list[Json], names: dict[object, str], where: str) -> Message:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for block in blocks:
        match block.get("type"):
            case "thinking":
                thoughts.append(reading.string_of(block.get("thinking"), where))
            case "redacted_thinking":
                pass
            case "tool_use":
                calls.append(reading.call_of(block.get("name"), block.get("input"), where))
                names[str(block.get("id"))] = calls[-1].name
            case _:
                texts.append(reading.text_of_part(block, where))
    return reading.assistant_message("\n".join(texts), calls, "\n".join(thoughts))


def _tools(body: Json) -> tuple[tuple[ToolSchema, ...], list[str]]:
    tools, dropped = [], []
    for index, tool in enumerate(reading.objects_of(body.get("tools"), "tools")):
        if tool.get("type") not in (None, "custom"):
            dropped.append(reading.dropped_tool(tool))
            continue
        name, description = tool.get("name"), tool.get("description")
        where = f"tools[{index}]"
        tools.append(reading.schema_of(name, description, tool.get("input_schema"), where))
    return tuple(tools), dropped


def _frame(reply: AgentReply) -> Json:
    """Return the ``message`` with which a stream begins, without content."""
    return {
        "id": f"msg_{reply.id}",
        "type": "message",
        "role": "assistant",
        "model": reply.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _usage(reply, 0),
    }


def _ending(reply: AgentReply) -> Json:
    reason = "stop_sequence" if reply.stop else _STOPS[reply.finish_reason]
    return {"stop_reason": reason, "stop_sequence": reply.stop or None}


def _blocks(request: AgentRequest, reply: AgentReply) -> list[Json]:
    blocks: list[Json] = []
    if reply.reasoning and request.thinks:
        blocks.append({"type": "thinking", "thinking": reply.reasoning, "signature": ""})
    if reply.text or not reply.calls:
        blocks.append({"type": "text", "text": reply.text, "citations": None})
    blocks += [
        {"type": "tool_use", "id": one.call_id, "name": one.name, "input": dict(one.arguments)}
        for one in reply.calls
    ]
    return blocks


def _events(request: AgentRequest, reply: AgentReply) -> Iterator[Json]:
    yield {"type": "message_start", "message": _frame(reply)}
    for index, block in enumerate(_blocks(request, reply)):
        begun, delta = _increment(block)
        yield {"type": "content_block_start", "index": index, "content_block": begun}
        yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    usage = _usage(reply, len(reply.token_ids))
    yield {"type": "message_delta", "delta": _ending(reply), "usage": usage}
    yield {"type": "message_stop"}


def _increment(block: Json) -> tuple[Json, Json]:
    """Return a block as it begins and the one change that completes it."""
    match block["type"]:
        case "thinking":
            begun, delta = {"thinking": ""}, {"type": "thinking_delta"}
            return block | begun, delta | {"thinking": block["thinking"]}
        case "tool_use":
            arguments = json.dumps(block["input"])
            return block | {"input": {}}, {"type": "input_json_delta", "partial_json": arguments}
        case _:
            return block | {"text": ""}, {"type": "text_delta", "text": block["text"]}


def _usage(reply: AgentReply, generated: int) -> Json:
    return {
        "input_tokens": reply.prompt_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": generated,
    }
