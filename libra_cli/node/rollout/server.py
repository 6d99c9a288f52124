"""vLLM's own server, behind a bearer token on every route, with one route added.

    python -m libra_cli.node.rollout.server <vLLM flags>
        --middleware libra_cli.node.rollout.server.BearerAuth

vLLM's ``--api-key`` leaves its control routes open, and those can run any method of a worker. Here
nothing answers without the run's token (read from LIBRA_TOKEN_FILE), and the development routes
stay off; the one control that libra needs is ``POST /libra/load``:

    {"directory": "<version directory>", "label": "e1v7"}  ->  {"load_s": 0.05, "paused_s": 0.06}

It pauses with requests in flight kept, loads the weights in place, labels what is generated from
now on, and resumes. If the load fails the engine stays paused: it has half a version in it, and
must not say another word.
"""

from __future__ import annotations

import hmac
import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

LOAD_ROUTE = "/libra/load"


class BearerAuth:
    """ASGI middleware: no token, no answer. Not even a health check."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        token = Path(os.environ["LIBRA_TOKEN_FILE"]).read_text().strip()
        self._expected = f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let lifespan messages pass; anything that came over the wire must carry the token."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] != "http" or not self._allowed(scope):
            await _answer(send, 401, {"error": "a bearer token is needed"})
        elif scope["path"] == LOAD_ROUTE and scope["method"] == "POST":
            await _load(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _allowed(self, scope: Scope) -> bool:
        given = next((value for key, value in scope["headers"] if key == b"authorization"), b"")
        return hmac.compare_digest(given, self._expected)


async def _load(scope: Scope, receive: Receive, send: Send) -> None:
    body = json.loads(await _read(receive))
    engine = scope["app"].state.engine_client
    started = time.monotonic()
    await engine.pause_generation(mode="keep")
    paused = time.monotonic()
    try:
        await engine.collective_rpc("reload_weights", kwargs={"weights_path": body["directory"]})
    except Exception as error:  # noqa: BLE001  whatever it was, the caller must hear it
        await _answer(send, 500, {"error": f"{type(error).__name__}: {error}"})
        return
    loaded = time.monotonic()
    await engine.update_weight_version(body["label"])
    await engine.resume_generation()
    answer = {"load_s": loaded - paused, "paused_s": time.monotonic() - started}
    await _answer(send, 200, answer)


async def _read(receive: Receive) -> bytes:
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return body


async def _answer(send: Send, status: int, content: dict[str, Any]) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(content).encode()})


def main() -> None:
    """Hand over to vLLM; its flags are ours."""
    from vllm.entrypoints.launchers.api_server.entry import main as serve

    serve()


if __name__ == "__main__":
    main()
