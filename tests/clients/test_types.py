"""Answers and events are what the types of the clients' own packages say."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from libra_cli.runtime.agents.dialects.conversation import (
    AgentReply,
    AgentRequest,
    DialectName,
    ReplyCall,
)
from libra_cli.runtime.agents.dialects.paths import dialect_of
from tests.clients.catalogue import AGENTS, prepare

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

PATHS: dict[DialectName, str] = {
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
    "anthropic": "/v1/messages",
}
PLAIN = AgentReply(
    id="r",
    model="policy",
    text="The answer is cd.",
    prompt_tokens=3,
    prompt_ids=(1, 2, 3),
    token_ids=(4, 5),
    logprobs=(-0.5, -0.25),
)
CALLS = (ReplyCall("c1", "get", {"key": "ab"}), ReplyCall("c2", "get", {}))
REPLIES = (
    replace(PLAIN, logprobs=(-0.5, -0.25)),
    replace(PLAIN, text="", finish_reason="length", logprobs=(-0.5, -0.25)),
    replace(PLAIN, calls=CALLS, finish_reason="tool_calls", logprobs=(-0.5, -0.25)),
    replace(
        PLAIN, text="", calls=CALLS, reasoning="hm", finish_reason="tool_calls", logprobs=(0, 0)
    ),
    replace(PLAIN, stop="END", logprobs=(-0.5, -0.25)),
)


def cases(dialect: DialectName) -> Iterator[str]:
    asked = AgentRequest(dialect, ({"role": "user", "content": "q"},), usage_chunk=True)
    for request in (asked, replace(asked, return_token_ids=True, logprobs=True)):
        for reply in REPLIES:
            spoken = dialect_of(PATHS[dialect])
            yield json.dumps(
                {
                    "dialect": dialect,
                    "answer": spoken.answer(request, [reply]),
                    "events": list(bodies(spoken.events(request, [reply]))),
                }
            )


def bodies(events: Iterator[bytes]) -> Iterator[Any]:
    for event in events:
        data = event.decode().partition("data: ")[2].strip()
        if data != "[DONE]":
            yield json.loads(data)


@pytest.mark.parametrize("dialect", PATHS)
def test_answers_and_events_fit_the_types_of_the_clients(dialect: DialectName) -> None:
    package = "anthropic" if dialect == "anthropic" else "openai"
    python = prepare(package) / "bin/python"
    done = subprocess.run(
        [python, AGENTS / "validate.py", package],
        input="\n".join(cases(dialect)),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert not done.returncode, done.stderr
