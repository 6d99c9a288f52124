"""What unmodified clients send (recorded by ``tests.clients.record``) is matched turn by turn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from libra_cli.runtime.agents.dialects.conversation import AgentReply, AgentRequest, ReplyCall
from libra_cli.runtime.agents.dialects.paths import dialect_of
from libra_cli.runtime.agents.matching import Conversations, Match, Rule

FIXTURE = Path(__file__).parents[3] / "fixtures/agents/requests.jsonl"
CLIENTS = [json.loads(line) for line in FIXTURE.read_text().splitlines()]
TOKENS = 10
"""Of every prompt; nothing here is rendered."""


def named(client: dict[str, Any]) -> str:
    return str(client["client"])


def replayed(client: dict[str, Any], rule: Rule) -> list[tuple[AgentRequest, Match]]:
    conversations = Conversations(rule)
    seen = []
    exchanges = iter(client["exchanges"])
    for sent, said in zip(exchanges, exchanges, strict=True):
        request = dialect_of(sent["path"]).read(sent["path"], sent["headers"], sent["body"])
        match = conversations.find(request)
        seen.append((request, match))
        calls = tuple(
            ReplyCall(f"call_{said['id']}_{index}", name, arguments)
            for index, (name, arguments) in enumerate(said["calls"])
        )
        reply = AgentReply(said["id"], "policy", said["text"], TOKENS, calls=calls)
        conversations.add(match, request, reply)
    return seen


@pytest.mark.parametrize("client", CLIENTS, ids=named)
def test_every_request_continues_the_one_before_unless_the_client_rewrites_replies(
    client: dict[str, Any],
) -> None:
    matches = [match for _, match in replayed(client, "strict")]
    assert [match.node is not None for match in matches] == [
        bool(number) and not client["rewrites"] for number in range(len(matches))
    ]


@pytest.mark.parametrize("client", CLIENTS, ids=named)
def test_by_position_every_request_continues_the_one_before(client: dict[str, Any]) -> None:
    matches = [match for _, match in replayed(client, "position")]
    assert all(match.node is not None for match in matches[1:])


@pytest.mark.parametrize("client", CLIENTS, ids=named)
def test_what_is_new_are_the_results_of_the_tools_that_were_called(client: dict[str, Any]) -> None:
    *_, (_, match) = replayed(client, "position")
    roles = {message["role"] for message in match.new}
    assert roles == ({"user"} if client["rewrites"] else {"tool"})


def test_codex_tools_that_only_openai_runs_are_left_out_and_told() -> None:
    (codex,) = (client for client in CLIENTS if client["client"] == "Codex")
    request, _ = replayed(codex, "strict")[0]
    names = [tool["function"]["name"] for tool in request.tools]
    assert "exec_command" in names
    assert request.dropped == ("tool namespace multi_agent_v1", "tool web_search")


def test_claude_code_keeps_its_system_messages_where_they_are_but_not_its_billing() -> None:
    (claude,) = (client for client in CLIENTS if client["client"] == "Claude Code")
    request, _ = replayed(claude, "strict")[0]
    assert [message["role"] for message in request.messages] == ["system", "user", "system"]
    assert not any("billing" in message["content"] for message in request.messages)
    assert request.thinks
