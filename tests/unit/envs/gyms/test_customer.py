"""A customer played by a model: what it is asked, which tools it uses, and what breaks it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from libra_cli.config.errors import EnvironmentBroken
from libra_cli.envs.gyms.customer import MOST_CALLS, customer_of
from libra_cli.envs.protocol import ToolCall, function
from tests.chat_thread import ChatThread

LOOK = function("look", "Look at the phone.", {})


class Server(ChatThread):
    """Answers requests with what the test says, in order."""

    def __init__(self) -> None:
        super().__init__(lambda body: self.answers.pop(0) if self.answers else None)
        self.answers: list[Any] = []


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    with made.serving():
        yield made


def calls(name: str, arguments: str = "{}") -> dict[str, Any]:
    asked = {"id": "7", "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [asked]}


def test_a_customer_remembers_uses_its_tools_and_then_speaks(server: Server) -> None:
    customer = customer_of(
        {"url": server.url, "model": "m", "api_key": "KEY", "body": {"temperature": 0.5}},
        {"KEY": "secret"},
    )
    customer.begin("You are Ada.", [LOOK], seed=3)
    server.answers = [
        {"role": "assistant", "content": "My phone is dead."},
        calls("look"),
        {"role": "assistant", "content": "It is on now."},
    ]
    used: list[ToolCall] = []

    def use(call: ToolCall) -> str:
        used.append(call)
        return "on"

    assert customer.answer("Hello?", lambda call: "no signal") == "My phone is dead."
    assert customer.answer("Is it on?", use) == "It is on now."
    assert used == [ToolCall("look", {})]
    last = server.requests[-1]
    assert [message["role"] for message in last["messages"]] == [
        *("system", "user", "assistant", "user", "assistant", "tool"),
    ]
    assert last["messages"][-1] == {"role": "tool", "tool_call_id": "7", "content": "on"}
    assert (last["model"], last["temperature"], last["seed"]) == ("m", 0.5, 3)
    assert last["tools"] == [LOOK]
    assert "url" not in last
    assert set(server.keys) == {"Bearer secret"}


def test_arguments_that_cannot_be_read_are_told_to_the_customer(server: Server) -> None:
    customer = customer_of({"url": server.url, "model": "m"}, {})
    customer.begin("You are Ada.", [LOOK], seed=0)
    server.answers = [calls("look", "{oops"), {"content": "Never mind."}]
    assert customer.answer("Hello?", lambda call: "unused") == "Never mind."
    assert server.requests[-1]["messages"][-1]["content"].startswith("Error: ")
    assert server.keys == [None, None]


def test_a_customer_that_never_speaks_breaks_the_episode(server: Server) -> None:
    customer = customer_of({"url": server.url, "model": "m"}, {})
    customer.begin("You are Ada.", [LOOK], seed=0)
    server.answers = [calls("look") for _ in range(MOST_CALLS)]
    with pytest.raises(EnvironmentBroken, match="said nothing"):
        customer.answer("Hello?", lambda call: "on")


def test_a_server_that_refuses_is_named_with_the_next_thing_to_type(server: Server) -> None:
    customer = customer_of({"url": server.url + "/", "model": "m"}, {})
    customer.begin("You are Ada.", [], seed=0)
    with pytest.raises(EnvironmentBroken, match="503") as caught:
        customer.answer("Hello?", lambda call: "")
    assert caught.value.hint == f"curl {server.url}/models"


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        ({}, "user.url: Field required; user.model: Field required"),
        ({"url": "http://h/v1", "model": "m", "temperature": 1}, "user.temperature"),
        ({"url": "http://h/v1", "model": "m", "api_key": "KEY"}, "none of its secrets"),
    ],
)
def test_a_server_that_is_told_wrongly_is_refused(told: dict[str, Any], reason: str) -> None:
    with pytest.raises(EnvironmentBroken, match=reason):
        customer_of(told, {})


def test_a_key_in_place_of_its_name_is_not_told() -> None:
    with pytest.raises(EnvironmentBroken) as caught:
        customer_of({"url": "http://h/v1", "model": "m", "api_key": "sk-proj-1"}, {"KEY": "s"})
    assert "sk-proj-1" not in f"{caught.value} {caught.value.hint}"


def test_what_a_customer_thinks_is_not_said(server: Server) -> None:
    customer = customer_of({"url": server.url, "model": "m"}, {})
    customer.begin("You are Ada.", [], seed=0)
    server.answers = [{"content": "<think>Is it ###STOP### yet? No.</think>\n\nHello."}]
    assert customer.answer("Hi!", lambda call: "") == "Hello."


@pytest.mark.parametrize("said", [None, "", " \n", "<think>Hm.</think>"])
def test_a_customer_that_says_nothing_breaks_the_episode(server: Server, said: str | None) -> None:
    customer = customer_of({"url": server.url, "model": "m"}, {})
    customer.begin("You are Ada.", [], seed=0)
    server.answers = [{"role": "assistant", "content": said}]
    with pytest.raises(EnvironmentBroken, match="said nothing"):
        customer.answer("Hi!", lambda call: "")


def test_a_customer_whose_words_are_cut_breaks_the_episode(server: Server) -> None:
    customer = customer_of({"url": server.url, "model": "m"}, {})
    customer.begin("You are Ada.", [], seed=0)
    server.answers = [{"content": "<think>Say ###STOP### when"}]
    server.finish_reason = "length"
    with pytest.raises(EnvironmentBroken, match="was cut"):
        customer.answer("Hi!", lambda call: "")
