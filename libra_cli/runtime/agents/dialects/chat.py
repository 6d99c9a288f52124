"""OpenAI's Chat Completions, as vLLM and most other servers answer it too.

``return_token_ids`` is vLLM's: the answer then has ``prompt_token_ids`` and each choice
``token_ids``. Thinking is in ``reasoning_content``. A token of ``logprobs`` is named
``token_id:N``, as vLLM does on request.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from libra_cli.envs.protocol import Message, ToolSchema
from libra_cli.runtime.agents.dialects import reading
from libra_cli.runtime.agents.dialects.conversation import (
    AgentReply,
    AgentRequest,
    BadRequest,
    Json,
)

_MOST_REPLIES = 64
_KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ChatCompletions:
    """Reads ``POST /v1/chat/completions``, and writes its answers."""

    keep_alive = b": keep-alive\n\n"

    def read(self, path: str, headers: Mapping[str, str], body: object) -> AgentRequest:
        """Read a request as ``Dialect.read`` says; ``n`` may ask for several replies."""
        body = reading.object_of(body, "the request")
        tools, dropped = read_tools(body)
        options = body.get("stream_options")
        return AgentRequest(
            dialect="chat",
            messages=read_messages(body),
            tools=tools,
            usage_chunk=isinstance(options, dict) and options.get("include_usage") is True,
            max_tokens=reading.limit_of(body, "max_completion_tokens", "max_tokens"),
            stop=reading.stops_of(body.get("stop"), "stop"),
            n=_count(body),
            dropped=tuple(dropped + reading.dropped_choices(body)),
            logprobs=body.get("logprobs") is True,
            **reading.common_fields(headers, body),
        )

    def answer(self, request: AgentRequest, replies: Sequence[AgentReply]) -> Json:
        """Return a ``chat.completion`` with a choice for each reply, as ``Dialect.answer`` says."""
        choices = []
        for index, reply in enumerate(replies):
            choice = _ending(request, reply, index)
            choice["message"] = {
                "role": "assistant",
                "content": reply.text if reply.text or not reply.calls else None,
                "refusal": None,
                **_extras(request, reply),
            }
            choice["logprobs"] = _logprobs(request, reply)
            choices.append(choice)
        answer = _frame(replies[0], "chat.completion", choices)
        answer["usage"] = _usage(replies)
        if request.return_token_ids:
            answer["prompt_token_ids"] = list(replies[0].prompt_ids)
        return answer

    def events(self, request: AgentRequest, replies: Sequence[AgentReply]) -> Iterator[bytes]:
        for chunk in self._chunks(request, replies):
            yield reading.event(chunk)
        yield reading.event("[DONE]")

    def error(self, status: int, message: str) -> Json:
        kind = "server_error" if status >= 500 else _KINDS.get(status, "invalid_request_error")
        return {"error": {"message": message, "type": kind, "param": None, "code": status}}

    def error_event(self, status: int, message: str) -> bytes:
        return reading.event(self.error(status, message))

    def _chunks(self, request: AgentRequest, replies: Sequence[AgentReply]) -> Iterator[Json]:
        first = replies[0]
        for index, reply in enumerate(replies):
            chunk = _chunk(first, _delta(index, {"role": "assistant", "content": ""}))
            if request.return_token_ids and not index:
                chunk["prompt_token_ids"] = list(first.prompt_ids)
            yield chunk
            said = _delta(index, {"content": reply.text} | _extras(request, reply, numbered=True))
            yield _chunk(first, said | {"logprobs": _logprobs(request, reply)})
            yield _chunk(first, _delta(index, {}) | _ending(request, reply, index))
        if request.usage_chunk:
            yield _frame(first, "chat.completion.chunk", []) | {"usage": _usage(replies)}


def _count(body: Json) -> int:
    count = reading.limit_of(body, "n") or 1
    if count > _MOST_REPLIES:
        raise BadRequest(f"n is at most {_MOST_REPLIES}")
    return count


def read_messages(body: Json) -> tuple[Message, ...]:
    """Return the messages of a request, or of a conversation in a file.

    Raises:
        BadRequest: one cannot be read, or there is none.
    """
    messages = reading.objects_of(body.get("messages"), "messages")
    if not messages:
        raise BadRequest("messages must not be empty")
    names: dict[object, str] = {}
    """The tool that each call's id asked for."""
    return tuple(
        _message(message, names, f"messages[{index}]") for index, message in enumerate(messages)
    )


def _message(message: Json, names: dict[object, str], where: str) -> Message:
    text = reading.text_of(message.get("content"), where)
    match message.get("role"):
        case "system" | "developer":
            return {"role": "system", "content": text}
        case "user":
            return {"role": "user", "content": text}
        case "assistant":
            return _assistant(message, text, names, where)
        case "tool":
            return reading.tool_message(text, names.get(_id(message.get("tool_call_id"))))
        case role:
            raise BadRequest(f"{where}: the role {role!r} is not known")


def _assistant(message: Json, text: str, names: dict[object, str], where: str) -> Message:
    calls = []
    for call in reading.objects_of(message.get("tool_calls"), f"{where}.tool_calls"):
        function = reading.object_of(call.get("function"), f"{where}: the function of a tool call")
        calls.append(reading.call_of(function.get("name"), function.get("arguments"), where))
        names[_id(call.get("id"))] = calls[-1].name
    thought = message.get("reasoning_content") or message.get("reasoning")
    return reading.assistant_message(text, calls, thought if isinstance(thought, str) else "")


def _id(value: object) -> str:
    return value if isinstance(value, str) else ""


def read_tools(body: Json) -> tuple[tuple[ToolSchema, ...], list[str]]:
    """Return the tools of a request, and in words those that libra cannot offer.

    Raises:
        BadRequest: one cannot be read.
    """
    if body.get("functions"):
        raise BadRequest("functions is the old form of tools; send tools")
    tools, dropped = [], []
    for index, tool in enumerate(reading.objects_of(body.get("tools"), "tools")):
        where = f"tools[{index}]"
        if tool.get("type") != "function":
            dropped.append(reading.dropped_tool(tool))
            continue
        function = reading.object_of(tool.get("function"), f"{where}.function")
        name, description = function.get("name"), function.get("description")
        tools.append(reading.schema_of(name, description, function.get("parameters"), where))
    return tuple(tools), dropped


def _frame(reply: AgentReply, kind: str, choices: list[Json]) -> Json:
    return {
        "id": f"chatcmpl-{reply.id}",
        "object": kind,
        "created": reply.created_s,
        "model": reply.model,
        "choices": choices,
    }


def _chunk(reply: AgentReply, choice: Json) -> Json:
    return _frame(reply, "chat.completion.chunk", [choice])


def _delta(index: int, delta: Json) -> Json:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _ending(request: AgentRequest, reply: AgentReply, index: int) -> Json:
    ending: Json = {"index": index, "finish_reason": reply.finish_reason}
    return ending | ({"token_ids": list(reply.token_ids)} if request.return_token_ids else {})


def _extras(request: AgentRequest, reply: AgentReply, *, numbered: bool = False) -> Json:
    """Return the tool calls and the thinking of a message; a chunk's calls are ``numbered``."""
    extras: Json = {}
    if reply.reasoning and request.thinks:
        extras["reasoning_content"] = reply.reasoning
    if reply.calls:
        extras["tool_calls"] = [
            ({"index": index} if numbered else {})
            | {
                "id": call.call_id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments))},
            }
            for index, call in enumerate(reply.calls)
        ]
    return extras


def _logprobs(request: AgentRequest, reply: AgentReply) -> dict[str, Any] | None:
    if not request.logprobs:
        return None
    tokens = zip(reply.token_ids, reply.logprobs, strict=True)
    content: list[Json] = [
        {"token": f"token_id:{token}", "logprob": value, "bytes": None, "top_logprobs": []}
        for token, value in tokens
    ]
    return {"content": content, "refusal": None}


def _usage(replies: Sequence[AgentReply]) -> Json:
    prompt = replies[0].prompt_tokens
    generated = sum(len(reply.token_ids) for reply in replies)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
    }
