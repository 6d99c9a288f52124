"""A customer played by a language model, which any OpenAI-compatible server answers for."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from libra_cli.config.errors import EnvironmentBroken
from libra_cli.envs.arguments import key_of, spec_of
from libra_cli.envs.protocol import ToolCall, ToolSchema

MOST_CALLS = 20
"""Rounds of tool calls before the customer must have said something."""


class CustomerSpec(BaseModel):
    """The keys of the argument ``user`` of the environment ``tau2``."""

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


def customer_of(given: Mapping[str, Any], secrets: Mapping[str, str]) -> Customer:
    """Return the customer of a recipe, for one episode.

    Raises:
        EnvironmentBroken: the argument is wrong.
    """
    spec = spec_of(CustomerSpec, given, environment="tau2", argument="user")
    return Customer(spec, key_of(spec.api_key, secrets, environment="tau2", argument="user"))


class Customer:
    """The other side of a conversation: its scenario, its memory and its tools."""

    def __init__(self, spec: CustomerSpec, key: str | None) -> None:
        """``key`` is the server's, if it wants one."""
        base = spec.url.rstrip("/").removesuffix("/chat/completions")
        self._url = f"{base}/chat/completions"
        self._timeout_s = spec.timeout_s
        self._body: dict[str, Any] = {"model": spec.model, **spec.body}
        self._headers = {"Content-Type": "application/json"}
        if key is not None:
            self._headers["Authorization"] = f"Bearer {key}"
        self._messages: list[dict[str, Any]] = []

    def begin(self, scenario: str, tools: Sequence[ToolSchema], seed: int) -> None:
        """Take on a scenario; ``seed`` goes to the server, so that it may answer alike again."""
        self._messages = [{"role": "system", "content": scenario}]
        self._body["seed"] = seed
        if tools:
            self._body["tools"] = list(tools)

    def answer(self, text: str, use: Callable[[ToolCall], str]) -> str:
        """Return what the customer says to a text, after using tools by ``use`` if it wants to.

        Raises:
            EnvironmentBroken: the server refuses, answers without a text, or cannot be reached.
        """
        self._messages.append({"role": "user", "content": text})
        for _ in range(MOST_CALLS):
            said = self._ask()
            self._messages.append(said)
            calls = said.get("tool_calls")
            if not calls:
                return self._spoken(str(said["content"]))
            self._messages += [_returned(call, use) for call in calls]
        raise EnvironmentBroken(
            f"the user's model called tools {MOST_CALLS} times and said nothing"
        )

    def _spoken(self, content: str) -> str:
        """What the policy reads: without thinking, which may name the words that end it all."""
        spoken = content.rpartition("</think>")[2].strip()
        if not spoken:
            raise EnvironmentBroken(f"the user's model at {self._url} said nothing")
        return spoken

    def _ask(self) -> dict[str, Any]:
        body = json.dumps({**self._body, "messages": self._messages}).encode()
        request = urllib.request.Request(self._url, body, self._headers)
        try:
            with urllib.request.urlopen(request, timeout=self._timeout_s) as response:
                choice = json.load(response)["choices"][0]
                message, cut = choice["message"], choice.get("finish_reason") == "length"
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise EnvironmentBroken(
                f"the user's model at {self._url} did not answer: {error!r}{_detail(error)}",
                hint=f"curl {self._url.removesuffix('/chat/completions')}/models",
            ) from error
        if cut:
            raise EnvironmentBroken(
                f"what the user's model at {self._url} said was cut",
                hint="environment.args.user.body: {max_tokens: 4096}",
            )
        kept = {name: message[name] for name in ("content", "tool_calls") if message.get(name)}
        return {"role": "assistant", "content": "", **kept}


def _returned(call: Mapping[str, Any], use: Callable[[ToolCall], str]) -> dict[str, Any]:
    asked = call["function"]
    try:
        arguments = json.loads(asked.get("arguments") or "{}")
        text = use(ToolCall(asked["name"], arguments))
    except (TypeError, ValueError) as error:
        text = f"Error: {error}"
    return {"role": "tool", "tool_call_id": call.get("id", ""), "content": text}


def _detail(error: Exception) -> str:
    if not isinstance(error, urllib.error.HTTPError):
        return ""
    return f": {error.read(300).decode(errors='replace')}"
