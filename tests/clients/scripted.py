"""A server of the three dialects whose answers are scripted: it knows what to say, not tokens.

It tells how each request was matched, and keeps what clients sent, in the form of the fixtures.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from aiohttp import web

from libra_cli.runtime.agents.dialects.conversation import (
    AgentReply,
    AgentRequest,
    BadRequest,
    ReplyCall,
)
from libra_cli.runtime.agents.dialects.paths import dialect_of, models
from libra_cli.runtime.agents.matching import Conversations, Match, Rule

KEPT_HEADERS = (
    "authorization",
    "x-api-key",
    "x-stainless-retry-count",
    "x-session-id",
    "idempotency-key",
    "user-agent",
)
LONGEST = 60
"""Characters of a text that are kept; the rest is cut, everywhere alike."""
_TURNS: dict[str, tuple[dict[str, Any], ...]] = {
    "get": ({"key": "ab"}, {"key": "cd"}),
    "lookup": ({"key": "ab"}, {"key": "cd"}),
    "bash": (
        {"command": "echo hi"},
        {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"},
    ),
    "Bash": ({"command": "echo hi", "description": "say hi"},),
    "exec_command": ({"cmd": "echo hi"},),
}
"""The calls that are made of a tool, one after the other, before the answer."""
_CODE = (
    "Thought: look.\n<code>\nx = lookup('ab')\nprint(x)\n</code>",
    "<code>\nfinal_answer(x)\n</code>",
)


@dataclass
class Trajectory:
    """What one key's requests were."""

    conversations: Conversations
    requests: list[AgentRequest] = field(default_factory=list)
    matches: list[Match] = field(default_factory=list)
    recorded: list[dict[str, Any]] = field(default_factory=list)
    """Requests and replies as a fixture keeps them."""
    repetitions: int = 0
    """Requests that were answered from the record."""

    @property
    def kept(self) -> list[bool]:
        """Whether each request after the first continued a node."""
        return [match.node is not None for match in self.matches[1:]]


class ScriptedServer:
    """Answers whatever key it is asked with, each as a trajectory of its own."""

    def __init__(self, rule: Rule, *, loses_first: bool) -> None:
        self.rule: Rule = rule
        self.loses_first = loses_first
        """Whether the first answer of each trajectory is lost on its way."""
        self.trajectories: dict[str, Trajectory] = {}
        self.url = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer one request."""
        if request.method != "POST":
            return web.json_response(models("policy", 1_000_000))
        key = request.path.split("/")[2]
        body = await request.json()
        dialect = dialect_of(request.path)
        try:
            asked = dialect.read(request.path_qs, request.headers, body)
            if asked.counts:
                return web.json_response({"input_tokens": 1})
            reply = self.reply(key, request, body, asked)
        except BadRequest as error:
            answer = dialect.error(error.status, error.message)
            return web.json_response(answer, status=error.status)
        if self.loses_first and not asked.retry and reply.id.endswith("-0"):
            return web.json_response(dialect.error(500, "the answer is lost"), status=500)
        if not asked.stream:
            return web.json_response(dialect.answer(asked, [reply]))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(dialect.keep_alive)
        for event in dialect.events(asked, [reply]):
            await response.write(event)
        return response

    def reply(
        self, key: str, request: web.Request, body: dict[str, Any], asked: AgentRequest
    ) -> AgentReply:
        """Match a request, answer it and keep both."""
        trajectory = self.trajectories.setdefault(key, Trajectory(Conversations(self.rule)))
        repeated = trajectory.conversations.recorded(asked)
        if repeated:
            trajectory.repetitions += 1
            return repeated[0]
        match = trajectory.conversations.find(asked)
        number = len(trajectory.matches)
        reply = answer(asked, number, key)
        trajectory.conversations.add(match, asked, reply)
        trajectory.requests.append(asked)
        trajectory.matches.append(match)
        headers = {name.lower(): value for name, value in request.headers.items()}
        path = "/" + request.path_qs.split("/", 3)[3]
        calls = [[call.name, dict(call.arguments)] for call in reply.calls]
        trajectory.recorded += [
            {
                "path": path,
                "headers": {name: headers[name] for name in KEPT_HEADERS if name in headers},
                "body": shortened(body),
            },
            {"id": reply.id, "text": reply.text, "calls": calls},
        ]
        return reply


def answer(asked: AgentRequest, number: int, key: str) -> AgentReply:
    """Return turn ``number`` of the script for the tools that were shown."""
    names = [tool["function"]["name"] for tool in asked.tools]
    tool = next((name for name in names if name in _TURNS), None)
    made = AgentReply(
        id=f"{key}-{number}",
        model="policy",
        text="The answer is cd.",
        prompt_tokens=10 + number,
        prompt_ids=range(10 + number),
    )
    called: tuple[str, dict[str, Any]] | None = None
    if tool is not None and number < len(_TURNS[tool]):
        called = tool, _TURNS[tool][number]
    elif "final_answer" in names:
        called = "final_answer", {"answer": "cd"}
    if called is not None:
        calls = (ReplyCall(f"call_{key}_{number}", *called),)
        return replace(made, text="", calls=calls, finish_reason="tool_calls")
    if not names and "</code>" in asked.stop and number < len(_CODE):
        return replace(made, text=_CODE[number])
    return made


def shortened(value: Any) -> Any:
    """Return JSON with its long texts cut alike, so that prefixes still compare."""
    if isinstance(value, str) and len(value) > LONGEST:
        return f"{value[:LONGEST]}...<{len(value)} characters>"
    if isinstance(value, Mapping):
        return {key: shortened(one) for key, one in value.items()}
    return [shortened(one) for one in value] if isinstance(value, list) else value


@contextmanager
def serving(rule: Rule = "strict", *, loses_first: bool = False) -> Iterator[ScriptedServer]:
    """Run a server in a thread of its own; clients are other processes."""
    server = ScriptedServer(rule, loses_first=loses_first)
    loop = asyncio.new_event_loop()
    started = threading.Event()

    async def serve() -> None:
        app = web.Application(client_max_size=64 * 1024**2)
        app.router.add_route("*", "/{path:.*}", server.handle)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        server.url = f"http://{host}:{port}"
        started.set()
        await stopping.wait()
        await runner.cleanup()

    stopping = asyncio.Event()
    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        assert started.wait(10)
        yield server
    finally:
        loop.call_soon_threadsafe(stopping.set)
        thread.join(10)
        loop.close()
