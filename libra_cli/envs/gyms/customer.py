"""A customer played by a language model, which any OpenAI-compatible server answers for."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from libra_cli.config.errors import EnvironmentBroken
from libra_cli.envs.chat_model import ChatModel, chat_model_of
from libra_cli.envs.protocol import ToolCall, ToolSchema

MOST_CALLS = 20
"""Rounds of tool calls before the customer must have said something."""


def customer_of(given: Mapping[str, Any], secrets: Mapping[str, str]) -> Customer:
    """Return the customer of a recipe, for one episode.

    Raises:
        EnvironmentBroken: the argument is wrong.
    """
    return Customer(chat_model_of(given, secrets, environment="tau2", argument="user"))


class Customer:
    """The other side of a conversation: its scenario, its memory and its tools."""

    def __init__(self, model: ChatModel) -> None:
        self._model = model
        self._keys: dict[str, Any] = {}
        self._messages: list[dict[str, Any]] = []

    def begin(self, scenario: str, tools: Sequence[ToolSchema], seed: int) -> None:
        """Take on a scenario; ``seed`` goes to the server, so that it may answer alike again."""
        self._messages = [{"role": "system", "content": scenario}]
        self._keys = {"seed": seed, **({"tools": list(tools)} if tools else {})}

    def answer(self, text: str, use: Callable[[ToolCall], str]) -> str:
        """Return what the customer says to a text, after using tools by ``use`` if it wants to.

        Raises:
            EnvironmentBroken: the server refuses, answers without a text, or cannot be reached.
        """
        self._messages.append({"role": "user", "content": text})
        for _ in range(MOST_CALLS):
            said = self._model.ask(self._messages, **self._keys)
            self._messages.append(said)
            calls = said.get("tool_calls")
            if not calls:
                return self._model.spoken(str(said["content"]))
            self._messages += [_returned(call, use) for call in calls]
        raise EnvironmentBroken(
            f"the user's model called tools {MOST_CALLS} times and said nothing"
        )


def _returned(call: Mapping[str, Any], use: Callable[[ToolCall], str]) -> dict[str, Any]:
    asked = call["function"]
    try:
        arguments = json.loads(asked.get("arguments") or "{}")
        text = use(ToolCall(asked["name"], arguments))
    except (TypeError, ValueError) as error:
        text = f"Error: {error}"
    return {"role": "tool", "tool_call_id": call.get("id", ""), "content": text}
