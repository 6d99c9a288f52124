"""Plays tasks of verifiers 0.4 in this process; it needs the package.

A harness is what plays: of it verifiers asks only that each model call goes to the endpoint that
it is given, where the turn is recorded for the rewards. ``InProcessHarness`` runs the usual loop of
turns and tools there. From the endpoint a request goes on to ``base_url`` as it is.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import verifiers.v1 as vf
from verifiers.v1.agent import Agent
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.mcp import serve_shared
from verifiers.v1.runtimes import ProgramResult
from verifiers.v1.utils.loaders import taskset_config_type

from libra_cli.envs.adapters.mcp_client import McpSession
from libra_cli.envs.adapters.mcp_http import HttpTransport
from libra_cli.envs.protocol import ToolFailed

Json = dict[str, Any]


class InProcessHarness(vf.Harness[vf.HarnessConfig]):  # type: ignore[misc]
    """Asks for turns and calls tools until a turn has no tool call, or a limit is reached."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: Mapping[str, str],
        data: Any,
    ) -> ProgramResult:
        """Play the conversation that the task's prompt begins."""
        system, prompt = self.resolve_prompt(data)
        opening = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        messages = [one if isinstance(one, dict) else message_to_wire(one) for one in opening or ()]
        if system:
            messages.insert(0, {"role": "system", "content": system})
        async with AsyncExitStack() as stack:
            headers = {"Authorization": f"Bearer {secret}"}
            timeout = aiohttp.ClientTimeout(total=None)
            http = await stack.enter_async_context(
                aiohttp.ClientSession(headers=headers, timeout=timeout)
            )
            tools = _Tools()
            await tools.open(mcp_urls, stack)
            body = {"model": ctx.model, "messages": messages}
            if tools.schemas:
                body["tools"] = tools.schemas
            await _converse(http, f"{endpoint}/chat/completions", body, tools)
        return ProgramResult(exit_code=0, stdout="", stderr="")


class _Tools:
    """The tools of a task's servers, called ``SERVER_TOOL`` as verifiers' own harnesses do."""

    def __init__(self) -> None:
        self.schemas: list[Json] = []
        self._places: dict[str, tuple[McpSession, str]] = {}

    async def open(self, urls: Mapping[str, str], stack: AsyncExitStack) -> None:
        """Begin a session with each server, and list its tools."""
        for server, url in urls.items():
            session = McpSession(HttpTransport(url, {}))
            stack.push_async_callback(session.close)
            await session.open()
            for tool in await session.tools():
                name = tool["function"]["name"]
                shown = f"{server}_{name}" if server else name
                self.schemas.append({**tool, "function": {**tool["function"], "name": shown}})
                self._places[shown] = (session, name)

    async def call(self, function: Mapping[str, Any]) -> str:
        """Run a call as the model wrote it, and return what the model reads."""
        try:
            arguments = json.loads(function["arguments"] or "{}")
        except ValueError as error:
            return f"error: the arguments are not JSON: {error}"
        if not isinstance(arguments, dict):
            return "error: the arguments are not a JSON object"
        if function["name"] not in self._places:
            return f"error: no tool {function['name']!r}, only {', '.join(self._places)}"
        session, name = self._places[function["name"]]
        try:
            return await session.call(name, arguments)
        except ToolFailed as error:
            return f"error: {error}"


async def _converse(http: aiohttp.ClientSession, url: str, body: Json, tools: _Tools) -> None:
    messages: list[Json] = body["messages"]
    for turn in itertools.count():
        async with http.post(url, json=body) as response:
            # After a turn, 400 is a limit: the recipe's or a full context, or a stop of the task's.
            if response.status == 400 and turn:
                return
            if response.status >= 400:
                raise RuntimeError(f"HTTP {response.status}: {(await response.text())[:1000]}")
            message = (await response.json())["choices"][0]["message"]
        messages.append(message)
        if not message.get("tool_calls"):
            return
        for call in message["tool_calls"]:
            text = await tools.call(call["function"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})


class _Taskset:
    """A taskset and its shared tools, which live until their event loop ends its tasks."""

    def __init__(self, name: str, config: Mapping[str, Any]) -> None:
        made = taskset_config_type(name)(id=name, **config)
        self._taskset = vf.load_taskset(made)
        self._rest: Iterator[Any] = iter(self._taskset)
        self._tasks: list[Any] = []
        self._reading = asyncio.Lock()
        self._served: asyncio.Future[Mapping[str, Any]] = asyncio.get_running_loop().create_future()
        self._holder = asyncio.create_task(self._hold())

    async def task(self, index: int) -> Any:
        """Return task ``index``, beginning again after the last."""
        async with self._reading:
            missing = index + 1 - len(self._tasks)
            if missing > 0:
                more = await asyncio.to_thread(lambda: [*itertools.islice(self._rest, missing)])
                self._tasks += more
        if not self._tasks:
            raise RuntimeError("the taskset holds no task")
        return self._tasks[index % len(self._tasks)]

    async def tools(self) -> Mapping[str, Any]:
        """Return the shared tool servers, once they are up."""
        return await asyncio.shield(self._served)

    async def _hold(self) -> None:
        servers: Sequence[Any] = self._taskset.toolsets(self._taskset.config)
        try:
            async with AsyncExitStack() as stack:
                shared = await stack.enter_async_context(serve_shared(servers)) if servers else {}
                self._served.set_result(shared)
                await asyncio.Event().wait()
        except Exception as error:
            if self._served.done():
                raise
            self._served.set_exception(error)


_OPEN: dict[tuple[int, str], _Taskset] = {}
"""The tasksets that are loaded, by the id of the event loop and the JSON of name and config."""


async def play(row: Mapping[str, Any], base_url: str, api_key: str, model: str) -> float:
    """Play a task that ``VerifiersTasks`` named, and return its reward.

    Raises:
        RuntimeError: it could not be played, or not scored.
    """
    name, config = row["taskset"], row["config"]
    key = (id(asyncio.get_running_loop()), json.dumps([name, config], sort_keys=True))
    if key not in _OPEN:
        _OPEN[key] = _Taskset(name, config)
    task = await _OPEN[key].task(row["index"])
    tools = await _OPEN[key].tools()
    # verifiers reads a key from a variable of the environment, when the rollout begins.
    variable = f"LIBRA_AGENT_KEY_{secrets.token_hex(8)}"
    os.environ[variable] = api_key
    try:
        trace = await _agent(base_url, variable, model).run(task, tools=tools)
    finally:
        del os.environ[variable]
    if not trace.ok:
        raise RuntimeError("; ".join(f"{one.type}: {one.message}" for one in trace.errors))
    return float(trace.reward)


def _agent(base_url: str, variable: str, model: str) -> Agent:
    client = vf.EvalClientConfig(base_url=base_url, api_key_var=variable)
    agent = Agent(
        vf.AgentConfig(
            model=model,
            runtime=vf.SubprocessConfig(),
            client=client,
            harness=vf.HarnessConfig(id="null"),
        )
    )
    agent.harness = InProcessHarness(vf.HarnessConfig(id="libra"))
    return agent
