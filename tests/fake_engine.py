"""A rollout server whose engine is fake: it generates the token 7, one a step."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from libra_cli.node.connections import Connections
from libra_cli.node.rollout.server import Server
from libra_cli.node.rollout.turn import TurnRefused, TurnTokens
from libra_cli.node.unix_socket import bind_unix
from tests.sockets import socket_path

TOKEN = "the token of this run"


class FakeEngine:
    """Turns of ``max_tokens`` tokens, one a step; those of 0 never end."""

    kv_tokens = 1000
    about = "one token a step"

    def __init__(self) -> None:
        self.turns: dict[str, tuple[int, TurnTokens]] = {}
        self.aborted: list[str] = []
        self.changed = threading.Event()
        self.loaded: list[str] = []
        self.adapters: dict[str, bytes] = {}
        #: What the next load cannot prove, and why.
        self.unproved: dict[str, list[str]] = {"different": [], "untraced": []}
        #: Turns that end with the steps that were begun before the next load.
        self.last_steps_of: list[str] = []
        #: Whether what it is to load cannot be read.
        self.damaged = False
        #: What it says of the prompts that it scores.
        self.scores: list[float] = []

    @property
    def busy(self) -> bool:
        return any(most for most, _ in self.turns.values())

    def add(self, name: str, order: dict[str, Any]) -> None:
        if not order["prompt_ids"]:
            raise ValueError("no prompt")
        turn = TurnTokens()
        if order["score_prompt"]:
            turn.prompt_logprobs.extend(self.scores)
        self.turns[name] = (order["max_tokens"], turn)

    def step(self) -> list[tuple[str, dict[str, Any]]]:
        ended = []
        for name, (most, turn) in list(self.turns.items()):
            turn.grow([7], "e1v1")
            turn.logprobs.append(-0.5)
            if len(turn.token_ids) == most:
                del self.turns[name]
                ended.append((name, turn.answer("length")))
        return ended

    def add_adapter(self, name: str, config: str, tensors: bytes) -> None:
        self.adapters[name] = tensors

    def remove_adapter(self, name: str) -> None:
        if self.adapters.pop(name, None) is None:
            raise TurnRefused(f"this server has no adapter {name}")

    def abort(self, name: str) -> dict[str, Any] | None:
        self.aborted.append(name)
        self.changed.set()
        gone = self.turns.pop(name, None)
        return None if gone is None else gone[1].answer("abort")

    def prepare(self, directory: str) -> bool:
        return True

    def load(
        self,
        directory: str,
        label: str,
        *,
        partly: bool,
        clear_cache: bool,
        tell: Callable[[list[Any]], None],
    ) -> dict[str, Any]:
        tell([(name, self.turns.pop(name)[1].answer("stop")) for name in self.last_steps_of])
        if self.damaged:
            raise RuntimeError(f"{directory} is damaged")
        self.loaded.append(label)
        return {"paused_s": 0.1, **self.unproved}

    def sleep(self) -> list[tuple[str, dict[str, Any]]]:
        return []

    def wake(self) -> None:
        pass

    def counters(self) -> dict[str, float]:
        raise RuntimeError("a bug")


def serve(engine: FakeEngine) -> str:
    """Return the path of its socket; in a daemon thread, since a server serves for ever."""
    path = socket_path()
    sock = bind_unix(path)
    server = Server(engine, Connections(sock, TOKEN))  # type: ignore[arg-type]
    threading.Thread(target=server.run, daemon=True).start()
    return path
