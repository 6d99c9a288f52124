"""The environment ``openenv``: an episode on an OpenEnv server, over a WebSocket.

The server runs where you like, with its own packages; libra needs none of them::

    environment:
      name: openenv
      args: {url: http://127.0.0.1:8000, instructions: Buy what is on the list.}

Each episode has a connection, and with it an environment of its own, so a server needs as many
sessions as trajectories are played at a time: ``SUPPORTS_CONCURRENT_SESSIONS = True`` in its
environment's class, and ``create_app(..., max_concurrent_envs=512)``.

**Tools.** What an environment made with ``MCPEnvironment`` lists. Any other has one tool, ``step``,
whose parameters are the fields of its action. With ``text_field: message`` there is no tool: the
text of each turn is that field of an action, for games that are played in words.

**Tasks.** A row goes to the server's ``reset``, which picks what it knows. Its ``prompt``, a text
or messages, is shown first, and then what the server shows. If a row has no ``seed``, a number made
from the row is sent, so that the members of a group play the same problem.

**The reward** is the sum of the rewards of all steps, each given at its turn, or with ``rewards:
last`` the last of them. The episode ends when the server says ``done``, or with an answer without a
tool call.

An action that the server finds malformed, and a tool of its that fails, are errors that the model
reads. Anything else that goes wrong breaks the environment, and the trajectory is tried again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import zlib
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any, Literal

import aiohttp

from libra_cli.config.errors import EnvironmentBroken
from libra_cli.envs.adapters.content import json_of, messages_of, told
from libra_cli.envs.protocol import (
    Message,
    Reply,
    StepResult,
    Task,
    ToolCall,
    ToolFailed,
    ToolSchema,
    function,
)

LARGEST_MESSAGE = 16 * 1024 * 1024
"""Bytes of one message of a server; a longer one breaks the episode."""
_MODEL_ERRORS = ("VALIDATION_ERROR", "invalid_args", "tool_not_found", "execution_error", "timeout")


class OpenEnvEpisode:
    """The environment of one episode, played on the server at ``url``.

    ``instructions`` are a system message; ``text_field`` and ``rewards`` are explained above.

    Raises:
        EnvironmentBroken: an argument is not understood.
    """

    def __init__(
        self,
        url: str,
        rewards: Literal["sum", "last"] = "sum",
        instructions: str = "",
        text_field: str | None = None,
    ) -> None:
        if rewards not in ("sum", "last"):
            raise EnvironmentBroken(f"rewards is 'sum' or 'last', not {rewards!r}")
        self.tools: Sequence[ToolSchema] = ()
        self._server = _OpenEnvServer(url.rstrip("/").removesuffix("/ws"))
        self._rewards = rewards
        self._instructions = instructions
        self._text_field = text_field
        self._lists_tools = False

    def task(self, index: int, seed: int) -> Task:
        """Make a row that holds nothing but a seed."""
        return {"seed": Random(f"{seed}/{index}").getrandbits(31)}

    async def reset(self, task: Task, seed: int) -> list[Message]:
        """Connect, begin the row's episode and list its tools."""
        schema = await self._server.open()
        row = {key: value for key, value in task.items() if key != "prompt"}
        row.setdefault("seed", zlib.crc32(json.dumps(task, sort_keys=True).encode()))
        seen = await self._server.ask("reset", row)
        if self._text_field is None:
            self.tools = await self._tools(schema["action"])
        return self._messages(task, _shown(seen["observation"]))

    async def step(self, call: ToolCall) -> StepResult:
        """Call a tool of the server, or act.

        Raises:
            ToolFailed: the tool failed, and the server gave no reward and no end with that.
            EnvironmentBroken: the server cannot answer.
        """
        if self._lists_tools:
            arguments = dict(call.arguments)
            action = {"type": "call_tool", "tool_name": call.name, "arguments": arguments}
        else:
            action = dict(call.arguments)
        seen = await self._server.ask("step", action)
        earned, done = self._earned(seen), bool(seen["done"])
        try:
            return StepResult(_result(seen["observation"]), earned, done)
        except ToolFailed as error:
            if not (earned or done):
                raise
            return StepResult(str(error), earned, done)

    async def reply(self, text: str) -> Reply | None:
        """Act with the text of a turn, if turns are actions; else the turn is the answer."""
        if self._text_field is None:
            return None
        try:
            seen = await self._server.ask("step", {self._text_field: text})
        except ToolFailed as error:
            return Reply([{"role": "user", "content": str(error)}])
        shown: Message = {"role": "user", "content": _shown(seen["observation"])}
        return Reply([shown], self._earned(seen), done=bool(seen["done"]))

    def _earned(self, seen: Mapping[str, Any]) -> float:
        """Return the reward of a step where rewards are added up; 0 with ``rewards: last``."""
        return float(seen.get("reward") or 0.0) if self._rewards == "sum" else 0.0

    async def score(self, answer: str) -> float:
        """Return the last of the steps' rewards; of a sum nothing is left to give."""
        return (self._server.rewards or [0.0])[-1] if self._rewards == "last" else 0.0

    async def close(self) -> None:
        """End the connection, and with it the server's environment."""
        await self._server.close()

    def _messages(self, task: Task, text: str) -> list[Message]:
        messages = messages_of(task.get("prompt", ""))
        if text:
            last = messages.pop()
            shown = "\n\n".join(one for one in (last["content"], text) if one)
            messages.append({"role": last["role"], "content": shown})
        if self._instructions:
            messages.insert(0, {"role": "system", "content": self._instructions})
        return messages

    async def _tools(self, action: Mapping[str, Any]) -> list[ToolSchema]:
        properties = {k: v for k, v in action.get("properties", {}).items() if k != "metadata"}
        # The server takes MCP's actions if its own are these, or none in particular.
        self._lists_tools = not properties or {"tool_name", "arguments"} <= properties.keys()
        if not self._lists_tools:
            description = action.get("description", "Act.")
            tool = function("step", description, properties)
            parameters = tool["function"]["parameters"]
            parameters["required"] = list(action.get("required", ()))
            parameters |= {key: action[key] for key in ("$defs",) if key in action}
            return [tool]
        listed = await self._server.ask("step", {"type": "list_tools"})
        return [
            {
                "type": "function",
                "function": {
                    "name": tool["name"],
                    "description": tool["description"],
                    "parameters": tool["input_schema"],
                },
            }
            for tool in listed["observation"]["tools"]
        ]


class _OpenEnvServer:
    """A WebSocket to the server, read all the time, since its pings must be answered."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._http: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._reader: asyncio.Task[None] | None = None
        self._inbox: asyncio.Queue[Mapping[str, Any] | None] = asyncio.Queue()
        self.rewards: list[float] = []
        """The rewards of all steps so far, in order; a step without a reward has no entry."""

    async def open(self) -> Mapping[str, Any]:
        """Connect, and return the JSON of ``/schema``; raises EnvironmentBroken."""
        self._http = aiohttp.ClientSession()
        try:
            async with self._http.get(f"{self._url}/schema", raise_for_status=True) as answer:
                schema: Mapping[str, Any] = await answer.json()
            self._socket = await self._http.ws_connect(
                f"{self._url}/ws", max_msg_size=LARGEST_MESSAGE
            )
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise EnvironmentBroken(
                f"the OpenEnv server {self._url} cannot be used: {error}",
                hint=f"curl {self._url}/health",
            ) from error
        self._reader = asyncio.create_task(self._read(self._socket))
        return schema

    async def ask(self, kind: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """Send a message and return what the server answers to it.

        Raises:
            ToolFailed: the server finds the message malformed.
            EnvironmentBroken: it cannot answer.
        """
        assert self._socket is not None
        with contextlib.suppress(ConnectionError):  # then the reader has seen the end
            await self._socket.send_json({"type": kind, "data": data})
        message = await self._inbox.get()
        if message is None:
            self._inbox.put_nowait(None)
            raise EnvironmentBroken(f"the OpenEnv server {self._url} closed the connection")
        answer = message.get("data", {})
        if message.get("type") == "error":
            raise self._refusal(answer)
        if kind == "step" and answer.get("reward") is not None:
            self.rewards.append(float(answer["reward"]))
        return answer  # type: ignore[no-any-return]

    async def close(self) -> None:
        """Close the WebSocket and what it is read by; before ``open``, this does nothing."""
        if self._reader is not None:
            self._reader.cancel()
        if self._socket is not None:
            with contextlib.suppress(ConnectionError):
                await self._socket.send_json({"type": "close"})
            await self._socket.close()
        if self._http is not None:
            await self._http.close()

    async def _read(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        with contextlib.suppress(ValueError):  # not JSON: no more is understood
            async for message in socket:
                if message.type == aiohttp.WSMsgType.TEXT:
                    self._inbox.put_nowait(json.loads(message.data))
        self._inbox.put_nowait(None)

    def _refusal(self, answer: Mapping[str, Any]) -> Exception:
        code, text = answer.get("code"), str(answer.get("message", answer))
        if code in _MODEL_ERRORS:
            wrong = [
                f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in answer.get("errors", ())
            ]
            return ToolFailed("; ".join([text, *wrong]))
        hint = ""
        if code == "CAPACITY_REACHED":
            hint = (
                "set SUPPORTS_CONCURRENT_SESSIONS = True in its environment's class, and start it "
                "with create_app(..., max_concurrent_envs=N), N at least the trajectories in play"
            )
        return EnvironmentBroken(f"the OpenEnv server {self._url}: {code}: {text}", hint=hint)


def _result(observation: Mapping[str, Any]) -> str:
    """Return the text of a step's observation.

    Raises:
        ToolFailed: it is that of a tool that failed.
        EnvironmentBroken: the server could not reach the tool.
    """
    error = observation.get("error")
    if isinstance(error, Mapping) and "error_type" in error:
        if error["error_type"] in _MODEL_ERRORS:
            raise ToolFailed(str(error["message"]))
        raise EnvironmentBroken(f"a tool of the OpenEnv server: {error['message']}")
    result = observation.get("result")
    if "tool_name" not in observation:
        return _shown(observation)
    if not isinstance(result, Mapping) or "content" not in result:
        return json_of(result)
    text = told(result["content"] or [])
    if result.get("is_error"):
        raise ToolFailed(text)
    return text


def _shown(observation: Mapping[str, Any]) -> str:
    """Return an observation as text: its only field if that is one, else all as JSON."""
    fields = {k: v for k, v in observation.items() if k != "metadata" and v is not None}
    fields = fields or observation.get("metadata") or {}
    if not fields:
        return ""
    if len(fields) == 1:
        return json_of(next(iter(fields.values())))
    return json.dumps(fields, ensure_ascii=False)
