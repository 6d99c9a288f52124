"""Turns what others return, a value or blocks of content, into the text that a model reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from libra_cli.config.errors import EnvironmentBroken
from libra_cli.envs.protocol import Message


def text_of(value: Any) -> str:
    """Return a text as it is, the text of content blocks, and ``str`` of anything else.

    Content blocks are ``[{"type": "text", "text": ...}, ...]``, as MCP, OpenAI and TRL have them.

    Raises:
        EnvironmentBroken: a block holds something else, such as an image.
    """
    if not isinstance(value, list) or not value or not all(map(_is_block, value)):
        return str(value)
    other = sorted({str(one["type"]) for one in value if one["type"] != "text"})
    if other:
        raise EnvironmentBroken(
            f"an observation holds {', '.join(other)}, and libra trains models that read text",
            hint="let the tool describe it in words",
        )
    return "\n".join(str(one["text"]) for one in value)


def told(content: Any) -> str:
    """Return the content of a tool's result as text: that of blocks with a line or more each.

    Texts and embedded text resources are given as they are. In place of what a model that reads
    text cannot read stands what it is, so that a call which shows an image ends no episode.
    Blocks: https://modelcontextprotocol.io/specification/2025-11-25/server/tools#tool-result
    """
    if not isinstance(content, list) or not all(map(_is_block, content)):
        return str(content)
    return "\n".join(map(_told, content))


def _told(block: Mapping[str, Any]) -> str:
    resource = block.get("resource")
    inner = resource if isinstance(resource, Mapping) else block
    if isinstance(inner.get("text"), str):
        return str(inner["text"])
    if block.get("type") == "resource_link":
        about = [block.get(key) for key in ("name", "uri", "description")]
        return f"[{' '.join(str(one) for one in about if one)}]"
    encoded = inner.get("data") or inner.get("blob") or ""
    kind = inner.get("mimeType") or block.get("type")
    return f"[{kind}, {len(str(encoded)) * 3 // 4:,} bytes, which cannot be shown as text]"


def json_of(value: Any) -> str:
    """Return a text as it is, and any other value as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def messages_of(prompt: object) -> list[Message]:
    """Return a row's prompt, a text or messages, as messages of text.

    Raises:
        EnvironmentBroken: it is neither.
    """
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    try:
        messages: list[Message] = [
            {"role": one["role"], "content": text_of(one["content"])}
            for one in prompt  # type: ignore[attr-defined]
        ]
    except (KeyError, TypeError):
        messages = []
    if not messages:
        raise EnvironmentBroken(
            f"a row's prompt is a text or a list of {{'role', 'content'}}, not {prompt!r:.200}"
        )
    return messages


def _is_block(value: Any) -> bool:
    return isinstance(value, Mapping) and "type" in value
