"""A language model behind an OpenAI-compatible URL that somebody in an episode is played by."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from libra_cli.config.errors import EnvironmentBroken
from libra_cli.config.frozen_models import is_loopback
from libra_cli.envs.arguments import key_of, spec_of
from libra_cli.envs.protocol import Message


class ChatModelSpec(BaseModel):
    """The keys of an argument that says which model plays somebody."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: str
    """The base URL, for example http://127.0.0.1:8000/v1; /chat/completions is added."""
    model: str
    """The model's name at the server."""
    api_key: str | None = None
    """The name of the environment's secret that is its key. Null: none is sent."""
    body: dict[str, JsonValue] = {}
    """Other keys of the requests, such as temperature."""
    timeout_s: float = Field(default=300.0, gt=0.0)
    """How long a request may take; environment.tool_timeout_s is how long all of a turn may."""


def chat_model_of(
    given: Mapping[str, Any], secrets: Mapping[str, str], *, environment: str, argument: str
) -> ChatModel:
    """Return the model of an argument.

    Raises:
        EnvironmentBroken: the argument is wrong.
    """
    spec = spec_of(ChatModelSpec, given, environment=environment, argument=argument)
    key = key_of(spec.api_key, secrets, environment=environment, argument=argument)
    return ChatModel(spec, key, who=f"the model of {environment}'s {argument}")


class ChatModel:
    """Says what comes next in a conversation. It waits in the thread that calls it."""

    def __init__(self, spec: ChatModelSpec, key: str | None, *, who: str) -> None:
        """``key`` is the server's, if it wants one; errors call the model ``who``."""
        base = spec.url.rstrip("/").removesuffix("/chat/completions")
        self._url = f"{base}/chat/completions"
        self._timeout_s = spec.timeout_s
        self._body: dict[str, Any] = {"model": spec.model, **spec.body}
        self._headers = {"Content-Type": "application/json"}
        proxies = (urllib.request.ProxyHandler({}),) if is_loopback(base) else ()
        self._opener = urllib.request.build_opener(*proxies)
        self._who = f"{who} at {self._url}"
        if key is not None:
            self._headers["Authorization"] = f"Bearer {key}"

    def ask(
        self, messages: Sequence[Message | Mapping[str, Any]], *, whole: bool = True, **more: Any
    ) -> dict[str, Any]:
        """Return the next message, with its tool calls if it makes some. One that reached its limit
        is an error where it must be ``whole``; ``more`` are keys of the request.

        Raises:
            EnvironmentBroken: the server refuses, cuts its answer, or cannot be reached.
        """
        body = json.dumps({**self._body, **more, "messages": [*messages]}).encode()
        request = urllib.request.Request(self._url, body, self._headers)
        try:
            with self._opener.open(request, timeout=self._timeout_s) as response:
                choice = json.load(response)["choices"][0]
                message, cut = choice["message"], choice.get("finish_reason") == "length"
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise EnvironmentBroken(
                f"{self._who} did not answer: {error!r}{_detail(error)}",
                hint=f"curl {self._url.removesuffix('/chat/completions')}/models",
            ) from error
        if cut and whole:
            raise EnvironmentBroken(
                f"what {self._who} said was cut", hint="body: {max_tokens: 4096} beside its URL"
            )
        kept = {name: message[name] for name in ("content", "tool_calls") if message.get(name)}
        return {"role": "assistant", "content": "", **kept}

    def spoken(self, content: str) -> str:
        """Return what others hear of an answer: all but its thinking.

        Raises:
            EnvironmentBroken: that is nothing.
        """
        spoken = content.rpartition("</think>")[2].strip()
        if not spoken:
            raise EnvironmentBroken(f"{self._who} said nothing")
        return spoken


def _detail(error: Exception) -> str:
    if not isinstance(error, urllib.error.HTTPError):
        return ""
    return f": {error.read(300).decode(errors='replace')}"
