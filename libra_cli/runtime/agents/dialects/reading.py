"""What the three dialects read alike: parts of a message, arguments, headers, limits.

A request is data from outside: whatever is wrong with it is said in words by ``BadRequest``, with
the place in the request, since an agent's author reads it in a log.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict

from libra_cli.envs.protocol import Message, ToolCall, ToolSchema
from libra_cli.runtime.agents.dialects.conversation import BadRequest, Json

SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "logit_bias",
)
"""The keys with which an agent would choose the distribution that turns are drawn from."""
_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""The types of parts that are text, and the key that holds it."""
_FREE = (None, "auto", {"type": "auto"})
"""The values of ``tool_choice`` that leave the choice to the model."""


class CommonFields(TypedDict):
    """The fields of an ``AgentRequest`` that every dialect words alike."""

    stream: bool
    overridden: tuple[str, ...]
    return_token_ids: bool
    session: str
    retry: bool
    digest: str


def object_of(value: object, where: str) -> Json:
    """Return a value that must be a JSON object.

    Raises:
        BadRequest: it is something else.
    """
    if not isinstance(value, dict):
        raise BadRequest(f"{where} must be a JSON object")
    return value


def objects_of(value: object, where: str) -> list[Json]:
    """Return a value that must be a list of JSON objects; null is an empty one.

    Raises:
        BadRequest: it is something else.
    """
    if value is None:
        return []
    if not isinstance(value, list):
        raise BadRequest(f"{where} must be a list")
    return [object_of(one, f"{where}[{index}]") for index, one in enumerate(value)]


def string_of(value: object, where: str) -> str:
    """Return a value that must be a string; null is an empty one.

    Raises:
        BadRequest: it is something else.
    """
    if value is None:
        return ""
    if not isinstance(value, str):
        raise BadRequest(f"{where} must be a string")
    return value


def text_of(content: object, where: str) -> str:
    """Return the text of a message's content, its parts joined by line breaks.

    Raises:
        BadRequest: a part is not text.
    """
    if not isinstance(content, list):
        return string_of(content, where)
    return "\n".join(text_of_part(part, where) for part in objects_of(content, where))


def text_of_part(part: Json, where: str) -> str:
    """Return the text of one part of a message.

    Raises:
        BadRequest: it is not text.
    """
    kind = part.get("type", "text")
    key = _TEXTS.get(kind) if isinstance(kind, str) else None
    if key is None:
        raise BadRequest(
            f"{where}: a part of type {kind!r} cannot be shown to the model, which reads text "
            "only; leave it out or describe it in words"
        )
    return string_of(part.get(key), where)


def call_of(name: object, arguments: object, where: str) -> ToolCall:
    """Return a tool call whose arguments are a JSON object, or the text of one.

    Raises:
        BadRequest: they are something else, or the name is missing.
    """
    if not isinstance(name, str) or not name:
        raise BadRequest(f"{where}: the tool call has no name")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        raise BadRequest(f"{where}: the arguments of {name} are not a JSON object")
    return ToolCall(name, arguments)


def assistant_message(text: str, calls: Sequence[ToolCall], reasoning: str = "") -> Message:
    """Return an assistant's message; thinking in tags at its beginning is told apart."""
    if text.startswith("<think>") and "</think>" in text:
        thought, _, text = text.removeprefix("<think>").partition("</think>")
        reasoning = reasoning or thought.strip()
        text = text.lstrip("\n")
    message: Message = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = list(calls)
    if reasoning:
        message["reasoning"] = reasoning
    return message


def tool_message(text: str, name: str | None) -> Message:
    """Return the message of a tool, with its name if the conversation told it."""
    message: Message = {"role": "tool", "content": text}
    if name:
        message["name"] = name
    return message


def joined_assistants(messages: Iterable[Message]) -> tuple[Message, ...]:
    """Return the messages with neighbouring ones of the assistant made into one."""
    joined: list[Message] = []
    for message in messages:
        if joined and joined[-1]["role"] == message["role"] == "assistant":
            joined[-1] = _joined(joined[-1], message)
        else:
            joined.append(message)
    return tuple(joined)


def schema_of(name: object, description: object, parameters: object, where: str) -> ToolSchema:
    """Return a tool's schema in the form of environments.

    Raises:
        BadRequest: it has no name, or its parameters are not a JSON object.
    """
    if not isinstance(name, str) or not name:
        raise BadRequest(f"{where}: the tool has no name")
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": string_of(description, f"{where}.description"),
            "parameters": object_of(parameters or {}, f"{where}: the parameters of {name}"),
        },
    }


def common_fields(headers: Mapping[str, str], body: Json) -> CommonFields:
    """Return what every dialect words alike; header names may be in any case."""
    known = {name.lower(): value for name, value in headers.items()}
    return {
        "stream": body.get("stream") is True,
        "overridden": tuple(key for key in SAMPLING if body.get(key) is not None),
        "return_token_ids": body.get("return_token_ids") is True,
        "session": known.get("x-session-id", ""),
        "retry": known.get("x-stainless-retry-count", "0") not in ("", "0"),
        "digest": known.get("idempotency-key") or _digest(body),
    }


def limit_of(body: Json, *keys: str) -> int | None:
    """Return the first of these keys that is set, a positive whole number.

    Raises:
        BadRequest: it is something else.
    """
    for key in keys:
        value = body.get(key)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise BadRequest(f"{key} must be a positive whole number")
        return value
    return None


def stops_of(value: object, where: str) -> tuple[str, ...]:
    """Return the texts at which to stop: one, a list of them, or none; empty ones are left out.

    Raises:
        BadRequest: it is something else.
    """
    texts = value if isinstance(value, list) else [value]
    return tuple(text for text in (string_of(one, where) for one in texts) if text)


def dropped_choices(body: Json) -> list[str]:
    """Return the keys that would constrain what the model writes, in words for the log."""
    choice = body.get("tool_choice")
    dropped = [] if choice in _FREE else [f"tool_choice {json.dumps(choice)}"]
    form = body.get("response_format")
    if isinstance(form, dict) and form.get("type") != "text":
        dropped.append(f"response_format {form.get('type')}")
    return dropped


def dropped_tool(tool: Json) -> str:
    """Return a tool that only its maker can run, in words for the log."""
    return " ".join(f"{word}" for word in ("tool", tool.get("type"), tool.get("name")) if word)


def event(data: Any, name: str = "") -> bytes:
    """Write a server-sent event; ``data`` is a text, or becomes JSON."""
    text = data if isinstance(data, str) else json.dumps(data)
    return (f"event: {name}\n" if name else "").encode() + f"data: {text}\n\n".encode()


def _joined(first: Message, second: Message) -> Message:
    texts = [text for text in (first["content"], second["content"]) if text]
    thoughts = [text for text in (first.get("reasoning"), second.get("reasoning")) if text]
    calls = [*first.get("tool_calls", ()), *second.get("tool_calls", ())]
    return assistant_message("\n".join(texts), calls, "\n".join(thoughts))


def _digest(body: Json) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
