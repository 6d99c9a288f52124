"""OpenAI's Responses: items instead of messages, and ``previous_response_id``.

The items of one assistant's turn (thinking, a message, calls) are one message here. Tools that
OpenAI runs itself (``web_search``, ``namespace``, ``custom`` and others) are left out of the prompt
and named in ``AgentRequest.dropped``. Nothing is stored beyond the trajectory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

from libra_cli.envs.protocol import Message, ToolSchema
from libra_cli.runtime.agents.dialects import reading
from libra_cli.runtime.agents.dialects.chat import ChatCompletions
from libra_cli.runtime.agents.dialects.conversation import (
    AgentReply,
    AgentRequest,
    BadRequest,
    Json,
)

_REFUSED = ("background", "conversation", "prompt")


class Responses:
    """Reads ``POST /v1/responses``, and writes its answers."""

    keep_alive = b": keep-alive\n\n"

    def read(self, path: str, headers: Mapping[str, str], body: object) -> AgentRequest:
        """Read a request as ``Dialect.read`` says; what would have to be kept here is refused."""
        body = reading.object_of(body, "the request")
        refused = [key for key in _REFUSED if body.get(key)]
        if refused:
            raise BadRequest(f"{', '.join(refused)}: nothing is kept here; send the whole input")
        tools, dropped = _tools(body)
        previous = reading.string_of(body.get("previous_response_id"), "previous_response_id")
        return AgentRequest(
            dialect="responses",
            messages=_messages(body),
            tools=tools,
            previous=previous.removeprefix("resp_"),
            thinks=body.get("reasoning") is not None,
            max_tokens=reading.limit_of(body, "max_output_tokens"),
            dropped=tuple(dropped + reading.dropped_choices(body) + _dropped_format(body)),
            **reading.common_fields(headers, body),
        )

    def answer(self, request: AgentRequest, replies: Sequence[AgentReply]) -> Json:
        """Return a ``response`` with the one reply, as ``Dialect.answer`` says."""
        reply = replies[0]
        answer = _frame(reply)
        cut = reply.finish_reason == "length"
        answer["status"] = "incomplete" if cut else "completed"
        answer["incomplete_details"] = {"reason": "max_output_tokens"} if cut else None
        answer["output"] = _items(request, reply)
        answer["usage"] = _usage(reply)
        if request.return_token_ids:
            answer["prompt_token_ids"] = list(reply.prompt_ids)
            answer["token_ids"] = list(reply.token_ids)
        return answer

    def events(self, request: AgentRequest, replies: Sequence[AgentReply]) -> Iterator[bytes]:
        """Return the answer as the events of Responses, numbered from 0."""
        begun = _frame(replies[0])
        answer = self.answer(request, replies)
        bodies: list[Json] = [
            {"type": "response.created", "response": begun},
            {"type": "response.in_progress", "response": begun},
        ]
        for index, item in enumerate(answer["output"]):
            bodies += [body | {"output_index": index} for body in _item_events(item)]
        bodies.append({"type": f"response.{answer['status']}", "response": answer})
        for number, body in enumerate(bodies):
            yield reading.event(body | {"sequence_number": number}, body["type"])

    def error(self, status: int, message: str) -> Json:
        return ChatCompletions().error(status, message)

    def error_event(self, status: int, message: str) -> bytes:
        """Return ``response.failed``, which ends a stream, in the forms of Codex and OpenAI's
        client.
        """
        # Codex reads `response.error`, OpenAI's client `error`.
        failed = _frame(AgentReply("failed", "", "", 0)) | {
            "status": "failed",
            "error": {"code": "server_error", "message": message},
        }
        name = "response.failed"
        body = {"type": name, "response": failed, "sequence_number": 0}
        return reading.event(body | self.error(status, message), name)


def _messages(body: Json) -> tuple[Message, ...]:
    instructions = reading.string_of(body.get("instructions"), "instructions")
    messages: list[Message] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    given = body.get("input")
    items: object = [{"role": "user", "content": given}] if isinstance(given, str) else given
    names: dict[object, str] = {}
    for index, item in enumerate(reading.objects_of(items, "input")):
        messages.append(_message(item, names, f"input[{index}]"))
    if not messages:
        raise BadRequest("input must not be empty")
    return reading.joined_assistants(messages)


def _message(item: Json, names: dict[object, str], where: str) -> Message:
    match item.get("type", "message"):
        case "message":
            return _said(item, where)
        case "reasoning":
            thought = reading.objects_of(item.get("content"), where)
            texts = [reading.string_of(part.get("text"), where) for part in thought]
            return reading.assistant_message("", (), "\n".join(texts))
        case "function_call":
            call = reading.call_of(item.get("name"), item.get("arguments"), where)
            names[str(item.get("call_id"))] = call.name
            return reading.assistant_message("", [call])
        case "function_call_output":
            text = reading.text_of(item.get("output"), where)
            return reading.tool_message(text, names.get(str(item.get("call_id"))))
        case kind:
            raise BadRequest(f"{where}: an item of type {kind!r} cannot be shown to the model")


def _said(item: Json, where: str) -> Message:
    text = reading.text_of(item.get("content"), where)
    match item.get("role"):
        case "system" | "developer":
            return {"role": "system", "content": text}
        case "user":
            return {"role": "user", "content": text}
        case "assistant":
            return reading.assistant_message(text, ())
        case role:
            raise BadRequest(f"{where}: the role {role!r} is not known")


def _tools(body: Json) -> tuple[tuple[ToolSchema, ...], list[str]]:
    tools, dropped = [], []
    for index, tool in enumerate(reading.objects_of(body.get("tools"), "tools")):
        if tool.get("type") != "function":
            dropped.append(reading.dropped_tool(tool))
            continue
        name, description = tool.get("name"), tool.get("description")
        where = f"tools[{index}]"
        tools.append(reading.schema_of(name, description, tool.get("parameters"), where))
    return tuple(tools), dropped


def _dropped_format(body: Json) -> list[str]:
    text = body.get("text")
    form = text.get("format") if isinstance(text, dict) else None
    kind = form.get("type") if isinstance(form, dict) else None
    return [] if kind in (None, "text") else [f"text.format {kind}"]


def _frame(reply: AgentReply) -> Json:
    """Return the ``response`` with which a stream begins, without output."""
    return {
        "id": f"resp_{reply.id}",
        "object": "response",
        "created_at": reply.created_s,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "model": reply.model,
        "output": [],
        "parallel_tool_calls": True,
        "temperature": None,
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
        "usage": None,
    }


def _items(request: AgentRequest, reply: AgentReply) -> list[Json]:
    items: list[Json] = []
    if reply.reasoning and request.thinks:
        thought = {"type": "reasoning_text", "text": reply.reasoning}
        items.append(
            {"type": "reasoning", "id": f"rs_{reply.id}", "summary": [], "content": [thought]}
        )
    if reply.text or not reply.calls:
        said = {"type": "output_text", "text": reply.text, "annotations": [], "logprobs": []}
        items.append(
            {
                "type": "message",
                "id": f"msg_{reply.id}",
                "status": "completed",
                "role": "assistant",
                "content": [said],
            }
        )
    items += [
        {
            "type": "function_call",
            "id": f"fc_{call.call_id}",
            "status": "completed",
            "call_id": call.call_id,
            "name": call.name,
            "arguments": json.dumps(dict(call.arguments)),
        }
        for call in reply.calls
    ]
    return items


def _item_events(item: Json) -> Iterator[Json]:
    """Return the events of one item, without the numbers that place them in the stream."""
    empty: Json = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
    begun = item | empty
    if "status" in item:
        begun["status"] = "in_progress"
    yield {"type": "response.output_item.added", "item": begun}
    if item["type"] == "function_call":
        name, key, text = "function_call_arguments", "arguments", item["arguments"]
        place: Json = {"item_id": item["id"]}
        yield {"type": f"response.{name}.delta", "delta": text} | place
        yield {"type": f"response.{name}.done", key: text, "name": item["name"]} | place
    else:
        yield from _part_events(item)
    yield {"type": "response.output_item.done", "item": item}


def _part_events(item: Json) -> Iterator[Json]:
    (part,) = item["content"]
    place: Json = {"item_id": item["id"], "content_index": 0}
    kind, text = part["type"], part["text"]
    added = {"type": "response.content_part.added", "part": part | {"text": ""}}
    extra: Json = {"logprobs": []} if kind == "output_text" else {}
    yield added | place
    yield {"type": f"response.{kind}.delta", "delta": text} | extra | place
    yield {"type": f"response.{kind}.done", "text": text} | extra | place
    yield {"type": "response.content_part.done", "part": part} | place


def _usage(reply: AgentReply) -> Json:
    generated = len(reply.token_ids)
    return {
        "input_tokens": reply.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": generated,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": reply.prompt_tokens + generated,
    }
