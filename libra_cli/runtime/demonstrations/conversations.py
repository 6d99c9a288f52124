"""Reads a row of demonstrations as a conversation.

    {"messages": [...], "tools": [...]}         OpenAI's fine-tuning and TRL's conversations
    {"prompt": [...], "completion": [...]}      TRL's: only the completion is imitated
    {"prompt": "...", "completion": "..."}      a question and its answer
    {"conversations": [{"from": "human", "value": "..."}]}    ShareGPT

Messages are read as those of a request to the OpenAI API: content as text or parts of text, tool
calls with arguments as JSON or its text, thinking as ``reasoning_content`` or in tags. A message of
the assistant with ``weight: 0``, as in OpenAI's files, is not imitated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from libra_cli.config.errors import LibraError
from libra_cli.envs.protocol import Message, ToolSchema
from libra_cli.runtime.agents.dialects.chat import read_messages, read_tools
from libra_cli.runtime.agents.dialects.conversation import BadRequest

_SPEAKERS = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
}
"""The roles of ShareGPT's speakers; what its variants say of tools differs from file to file."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages, and for each of them whether it is imitated: some of the assistant's are."""

    messages: tuple[Message, ...]
    imitated: tuple[bool, ...]
    tools: tuple[ToolSchema, ...] = ()


def read_conversation(row: Mapping[str, Any]) -> Conversation:
    """Read one row.

    Raises:
        LibraError: it is no conversation, or has nothing to imitate; without the place of the row.
    """
    given, first = _given(row)
    try:
        messages = read_messages({"messages": given})
        tools, _ = read_tools({"tools": row.get("tools")})
    except BadRequest as error:
        raise LibraError(str(error)) from error
    imitated = tuple(
        index >= first and one["role"] == "assistant" and given[index].get("weight", 1) != 0
        for index, one in enumerate(messages)
    )
    if not any(imitated):
        raise LibraError("no message of the assistant is there to imitate")
    return Conversation(messages, imitated, tools)


def _given(row: Mapping[str, Any]) -> tuple[list[Any], int]:
    """The messages as they stand there, and the number of the first that may be imitated."""
    if "messages" in row:
        return _listed(row["messages"], "messages"), 0
    if "prompt" in row and "completion" in row:
        prompt = _said(row["prompt"], "user", "prompt")
        return prompt + _said(row["completion"], "assistant", "completion"), len(prompt)
    if "conversations" in row:
        return [_spoken(one) for one in _listed(row["conversations"], "conversations")], 0
    raise LibraError(
        f"there are no messages, only {', '.join(sorted(row)) or 'nothing'}",
        hint='a row is {"messages": [{"role": "user", "content": "..."}, ...]}',
    )


def _said(value: object, role: str, key: str) -> list[Any]:
    return [{"role": role, "content": value}] if isinstance(value, str) else _listed(value, key)


def _listed(value: object, key: str) -> list[Any]:
    if not isinstance(value, list):
        raise LibraError(f"{key} is no list of messages")
    return value


def _spoken(message: object) -> object:
    """A message of ShareGPT as one of OpenAI's."""
    if not isinstance(message, dict):
        return message
    speaker = message.get("from")
    role = _SPEAKERS.get(speaker) if isinstance(speaker, str) else None
    if role is None:
        raise LibraError(
            f"conversations: the speaker {speaker!r} is not known",
            hint=f"libra knows {', '.join(_SPEAKERS)}; write messages as OpenAI does",
        )
    return {"role": role, "content": message.get("value")}
