"""The HTTP server that agents ask for turns, on loopback.

    GET, HEAD /                        200
    GET  /v1/models                    the model, with ``max_model_len``
    POST /v1/chat/completions          a turn, in OpenAI's, OpenAI's newer and Anthropic's words
    POST /v1/responses
    POST /v1/messages
    POST /v1/messages/count_tokens     the tokens of a prompt
    *    /models/NAME/v1/...           a frozen model of the run (``runtime.agents.frozen_models``)
    POST /reward                       {"reward": 1.0}; the end of an agent that lives elsewhere
    POST /tasks?wait_s=20              the next task for an agent that lives elsewhere, or 204

Each trajectory has a key, a secret of 24 random bytes, in the path before all of these
(``/t/KEY/v1/models``) or where clients put an API key: ``Authorization: Bearer KEY``, ``x-api-key``
or ``X-Session-ID``. Another key is answered with 401, that of a trajectory that has ended with 409.
``/tasks`` wants the token in ``agents.json`` of the run directory, which also tells the URL.

A streaming client is sent the whole turn as events. Whoever waits longer than ``QUIET_S`` is kept
alive: by comments in a stream, by blanks before JSON; the status is 200 then, and an error is only
in the body.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from aiohttp import web

from libra_cli.config.recipe import Recipe
from libra_cli.config.text import one_line
from libra_cli.envs.returns import whole_text
from libra_cli.runtime.agents.dialects.conversation import AgentRequest, BadRequest, Dialect, Json
from libra_cli.runtime.agents.dialects.paths import dialect_of, models
from libra_cli.runtime.agents.frozen_models import PATH, AgentModels
from libra_cli.runtime.agents.play import ENDED, AgentEnd, AgentPlay
from libra_cli.runtime.agents.runners import AgentJob, AgentRunner, ExternalRunner, to_json
from libra_cli.runtime.processes.loopback import LOOPBACK, LoopbackServer
from libra_cli.runtime.supervision.answers import finite

QUIET_S = 15.0
"""How long a client waits before it is kept alive."""
KEEP_ALIVE_S = 5.0
MOST_NOTES = 100
"""Different lines that a run is told of what requests of agents ask for in vain."""
_NOTED = 300
"""Most characters of such a line."""
MAX_BODY_BYTES = 64 * 1024**2
WAIT_S = 20.0
"""How long whoever wants a task waits for one, if it does not say."""
MOST_WAIT_S = 60.0
REMEMBERED = 10_000
"""Keys of ended trajectories that are told from unknown ones."""
ADDRESS_FILE = "agents.json"
_FINAL = {"x-should-retry": "false"}
_TOO_LARGE = 413
"""OpenAI's and Anthropic's packages would send what is refused with 409 again, twice."""


class AgentServer:
    """The HTTP server that answers the agents of all trajectories in play."""

    def __init__(
        self,
        recipe: Recipe,
        runner: AgentRunner,
        models_seen: AgentModels,
        run_dir: Path,
        *,
        note: Callable[[str], None],
    ) -> None:
        self.model = Path(recipe.model.path or recipe.run.name).name
        self.port = 0
        self._max_len = recipe.model.max_len
        self._runner = runner
        self._models = models_seen
        self._file = run_dir / ADDRESS_FILE
        self._token = secrets.token_urlsafe(32)
        self._note = note
        self._noted: set[str] = set()
        self._plays: dict[str, AgentPlay] = {}
        self._ended: dict[str, None] = {}
        self._http: LoopbackServer | None = None

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.port}"

    def add(self, play: AgentPlay) -> None:
        """Answer requests with the key of this play from now on."""
        self._plays[play.key] = play

    def remove(self, play: AgentPlay) -> None:
        """Answer 409 to requests with the key of this play, whose trajectory has ended."""
        if self._plays.pop(play.key, None) is None:
            return
        self._ended[play.key] = None
        if len(self._ended) > REMEMBERED:
            del self._ended[next(iter(self._ended))]

    async def start(self) -> None:
        """Listen on a free port of loopback; for agents elsewhere, write ``agents.json``."""
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_route("*", "/{path:.*}", self._handle)
        # Who is gone wants no answer of a frozen model; a turn is played by a task of its own.
        self._http = LoopbackServer(
            app, handler_cancellation=True, keepalive_timeout=120.0, shutdown_timeout=1.0
        )
        await self._http.start()
        self.port = self._http.port
        if isinstance(self._runner, ExternalRunner):
            self._file.touch(mode=0o600)
            self._file.write_text(json.dumps({"url": self.url, "token": self._token}) + "\n")
            self._note(f"agents fetch their tasks at {self.url}/tasks; the token: {self._file}")

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()

    # -- routes -----------------------------------------------------------------------------------

    async def _handle(self, http: web.Request) -> web.StreamResponse:
        keys, path = _split(http)
        if path in ("", "/") and http.method in ("GET", "HEAD"):
            return web.json_response({"server": "libra"})
        if path == "/tasks" and http.method == "POST":
            return await self._next_task(http)
        try:
            if path.startswith(PATH):
                self._play_of(keys)
                return await self._models.handed_on(http, path)
            dialect = dialect_of(path) if path not in _OWN_PATHS else dialect_of(_CHAT)
        except BadRequest as error:
            return web.json_response({"error": {"message": error.message}}, status=error.status)
        play: AgentPlay | None = None
        try:
            play = self._play_of(keys)
            return await self._route(http, play, path, dialect)
        except BadRequest as error:
            if play is not None:
                play.refusal = error.message
            return web.json_response(
                dialect.error(error.status, error.message), status=error.status, headers=_FINAL
            )

    async def _route(
        self, http: web.Request, play: AgentPlay, path: str, dialect: Dialect
    ) -> web.StreamResponse:
        if path == "/v1/models":
            return web.json_response(models(self.model, self._max_len))
        if http.method != "POST":
            raise BadRequest(f"{path} takes POST", status=405)
        if path == "/reward":
            return self._rewarded(play, await _json_of(http))
        body = await self._body_of(http, play)
        request = dialect.read(path, http.headers, body)
        self._tell_once(request)
        return await _Waiting(http, play, request, dialect).answer()

    async def _body_of(self, http: web.Request, play: AgentPlay) -> object:
        try:
            return await _json_of(http)
        except BadRequest as error:
            if error.status == _TOO_LARGE:
                play.asked_too_much()
            raise

    def _play_of(self, keys: Sequence[str]) -> AgentPlay:
        for key in keys:
            if (play := self._plays.get(key)) is not None:
                return play
        if any(key in self._ended for key in keys):
            raise BadRequest("this trajectory has ended", status=ENDED)
        raise BadRequest("no trajectory has this key", status=401)

    def _rewarded(self, play: AgentPlay, body: object) -> web.StreamResponse:
        """Keep the reward; an agent that lives elsewhere has no other end."""
        reward = body.get("reward") if isinstance(body, dict) else None
        if not isinstance(body, dict) or "reward" not in body:
            raise BadRequest('send {"reward": 1.0}, or null to let the environment score')
        if not isinstance(reward, int | float | None):
            raise BadRequest("the reward must be a number or null")
        try:
            play.reward = None if reward is None else finite(float(reward))
        except (OverflowError, ValueError) as error:
            raise BadRequest("the reward must be a finite number or null") from error
        if isinstance(self._runner, ExternalRunner):
            play.end(AgentEnd(play.reward))
        return web.json_response({"ok": True})

    async def _next_task(self, http: web.Request) -> web.StreamResponse:
        given = http.headers.get("Authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(errors="replace"), self._token.encode()):
            return web.json_response({"error": {"message": "another token"}}, status=401)
        if not isinstance(self._runner, ExternalRunner):
            said = "agents of this run are started by libra: its recipe has no agent.external"
            return web.json_response({"error": {"message": said}}, status=409)
        asked = http.query.get("wait_s", "")
        wait_s = min(MOST_WAIT_S, float(asked)) if asked.isdecimal() else WAIT_S
        job = await self._runner.next_job(
            wait_s,
            wanted=lambda job: job.api_key in self._plays,
            is_there=lambda: http.transport is not None,
        )
        return web.Response(status=204) if job is None else _task_response(job)

    def _tell_once(self, request: AgentRequest) -> None:
        said = [f"{key} of the agent is not used: the recipe's is" for key in request.overridden]
        for words in [*said, *request.dropped]:
            if words not in self._noted and len(self._noted) < MOST_NOTES:
                self._noted.add(words)
                self._note(f"agent: {one_line(words)[:_NOTED]}")


_CHAT = "/v1/chat/completions"
_OWN_PATHS = ("/v1/models", "/reward")
_KEY_HEADERS = ("x-api-key", "X-Session-ID")


def _split(http: web.Request) -> tuple[list[str], str]:
    """The keys that a request may mean, most likely first, and its path without one."""
    path = http.path
    if path.startswith("/t/"):
        key, _, rest = path.removeprefix("/t/").partition("/")
        return [key], f"/{rest}".rstrip("/")
    bearer = http.headers.get("Authorization", "").removeprefix("Bearer ")
    # Clients send a made-up key where they have none, beside the one that counts.
    return [bearer, *(http.headers.get(name, "") for name in _KEY_HEADERS)], path.rstrip("/")


async def _json_of(http: web.Request) -> object:
    try:
        body = await http.read()
    except web.HTTPRequestEntityTooLarge as error:
        said = f"prompt is too long: the body has more than {MAX_BODY_BYTES:,} bytes"
        raise BadRequest(said, status=_TOO_LARGE) from error
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from error
    return _well_formed(value) if b"\\ud" in body.lower() else value


def _well_formed(value: Any) -> Any:
    """The value with "?" for each half of a UTF-16 pair, which no tokenizer takes.

    Clients in JavaScript leave one where they cut a text in the middle of an emoji.
    """
    if isinstance(value, str):
        return whole_text(value)
    if isinstance(value, dict):
        return {_well_formed(key): _well_formed(one) for key, one in value.items()}
    return [_well_formed(one) for one in value] if isinstance(value, list) else value


def _task_response(job: AgentJob) -> web.Response:
    told = {
        "id": job.id,
        "task": job.task,
        "base_url": job.base_url,
        "root_url": job.root_url,
        "api_key": job.api_key,
        "model": job.model,
    }
    return web.Response(text=to_json(told), content_type="application/json")


class _Waiting:
    """A request of an agent, from its arrival until it is answered."""

    def __init__(
        self, http: web.Request, play: AgentPlay, request: AgentRequest, dialect: Dialect
    ) -> None:
        self._http = http
        self._play = play
        self._request = request
        self._dialect = dialect

    async def answer(self) -> web.StreamResponse:
        """Answer it, at once with a status or in time with blanks before the answer.

        Raises:
            BadRequest: it cannot be answered, and nothing has been sent yet.
        """
        # A task of its own: a client that goes away may come back for the reply.
        replies = asyncio.create_task(self._play.answer(self._request))
        replies.add_done_callback(_looked_at)
        await asyncio.wait({replies}, timeout=QUIET_S)
        if replies.done() and not self._request.stream:
            return web.json_response(self._whole(replies.result()))
        if replies.done():
            replies.result()
        kind = "text/event-stream" if self._request.stream else "application/json"
        response = web.StreamResponse(headers={"Content-Type": kind, "Cache-Control": "no-cache"})
        await response.prepare(self._http)
        quiet = self._dialect.keep_alive if self._request.stream else b" "
        while not replies.done():
            await response.write(quiet)
            await asyncio.wait({replies}, timeout=KEEP_ALIVE_S)
        try:
            await response.write(b"".join(self._parts(replies.result())))
        except BadRequest as error:
            self._play.refusal = error.message
            await response.write(self._late_error(error))
        await response.write_eof()
        return response

    def _whole(self, replies: Any) -> Json:
        if self._request.counts:
            return {"input_tokens": replies[0].prompt_tokens}
        return self._dialect.answer(self._request, replies)

    def _parts(self, replies: Any) -> list[bytes]:
        if not self._request.stream:
            return [json.dumps(self._whole(replies)).encode()]
        return list(self._dialect.events(self._request, replies))

    def _late_error(self, error: BadRequest) -> bytes:
        if self._request.stream:
            return self._dialect.error_event(error.status, error.message)
        return json.dumps(self._dialect.error(error.status, error.message)).encode()


def _looked_at(task: asyncio.Task[Any]) -> None:
    """Retrieve a failure for which nobody waits any more, so that asyncio does not log it."""
    if not task.cancelled():
        task.exception()
