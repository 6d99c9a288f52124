"""The rollout server: a vLLM engine that the controller gives orders over a control stream.

    python -m libra_cli.node.rollout.server --socket PATH <flags of vLLM's engine>

See ``node.control`` for the form of the stream; the run's token is read from LIBRA_TOKEN_FILE.

    operation   order                                   answer
    facts       {}                                      version (of vLLM), kv_tokens,
                                                        engine: what of it runs, in words
    check       {}                                      {}: it is between two steps
    counters    {}                                      see ``VllmEngine.counters``
    generate    prompt_ids, max_tokens, temperature,    token_ids, logprobs, spans [label, start,
                top_p, stop_token_ids, to_the_end,      end], finish_reason, prompt_logprobs; when
                score_prompt, cache_salt, priority;     the turn has ended
                or also adapter, seed, top_k,
                stop: strings in its text
    adapter     name, config, tensors: PEFT's files     {}: turns may name this adapter
    remove adapter  name                                {}: none may name it any more, and none
                                                        that is under way does
    abort       call: that of a generate                {}; the turn's own answer comes with it
    prepare     directory                               done: workers have the version in memory;
                                                        nothing waits for it, so ask again. loads:
                                                        how many have begun here
    load        directory, label, partly,               load_s, proof_s, paused_s, different,
                clear_cache, loads                      untraced; see ``VllmEngine.load``. Refused
                                                        if others have begun since ``loads``
    sleep       {}                                      {}: weights and KV cache are given back
    wake        {}                                      {}: it can load a version again, and must
                                                        before it generates

Token ids are bytes of little-endian int32, log-probabilities of float32. The turns of a connection
that closes are aborted.
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from libra_cli.node.connections import Connection, Connections
from libra_cli.node.control import ControlServer
from libra_cli.node.http import read_token
from libra_cli.node.rollout.torchvision_names import provide
from libra_cli.node.rollout.turn import Answer
from libra_cli.node.unix_socket import bind_unix

if TYPE_CHECKING:
    from libra_cli.node.rollout.engine import VllmEngine


class Server(ControlServer):
    """Steps an engine and answers its clients between the steps."""

    def __init__(self, engine: VllmEngine, connections: Connections) -> None:
        super().__init__(connections)
        self._engine = engine
        self._asked: dict[str, tuple[Connection, int]] = {}
        """Who asked for a turn, and by which call, by the turn's name."""
        self._loads = 0
        """How many have begun. One whose client has given up may come late, after another's."""

    def run(self) -> None:
        """Serve for ever. What the engine raises in a step ends the process."""
        while True:
            for connection, message in self._connections.receive(wait=not self._engine.busy):
                if message is None:
                    self._gone(connection)
                else:
                    self._obey(connection, message)
            if self._engine.busy:
                self._reply(self._engine.step())
            self._connections.flush()

    def _gone(self, connection: Connection) -> None:
        for name, (asked, _) in list(self._asked.items()):
            if asked is connection:
                del self._asked[name]
                self._engine.abort(name)

    def _reply(self, ended: Iterable[tuple[str, Answer]]) -> None:
        for name, answer in ended:
            connection, call = self._asked.pop(name)
            connection.send([call, "done", answer])

    def _perform(
        self, connection: Connection, call: int, operation: str, order: dict[str, Any]
    ) -> Answer | None:
        match operation:
            case "generate":
                name = _name(connection, call)
                self._engine.add(name, order)
                self._asked[name] = (connection, call)
                return None
            case "adapter" | "remove adapter":
                return self._take_or_remove(operation, order)
            case "abort":
                name = _name(connection, order["call"])
                answer = self._engine.abort(name)
                if answer is not None:
                    self._reply([(name, answer)])
                return {}
            case "prepare":
                return {"done": self._engine.prepare(order["directory"]), "loads": self._loads}
            case "load":
                return self._load(order)
            case "sleep" | "wake":
                return self._sleep_or_wake(operation)
            case _:
                return self._tell(operation)

    def _take_or_remove(self, operation: str, order: dict[str, Any]) -> Answer:
        if operation == "adapter":
            self._engine.add_adapter(order["name"], order["config"], order["tensors"])
        else:
            self._engine.remove_adapter(order["name"])
        return {}

    def _sleep_or_wake(self, operation: str) -> Answer:
        if operation == "sleep":
            self._reply(self._engine.sleep())
        else:
            self._engine.wake()
        return {}

    def _load(self, order: dict[str, Any]) -> Answer:
        if order["loads"] != self._loads:
            raise ValueError(
                f"{order['label']} was to be load {order['loads'] + 1}, and {self._loads} have "
                "begun already: another client loads versions, or an order came late"
            )
        self._loads += 1
        return self._engine.load(
            order["directory"],
            order["label"],
            partly=order["partly"],
            clear_cache=order["clear_cache"],
            tell=self._reply,
        )

    def _tell(self, operation: str) -> Answer:
        match operation:
            case "counters":
                return self._engine.counters()
            case "facts":
                return {
                    "version": _release(),
                    "kv_tokens": self._engine.kv_tokens,
                    "engine": self._engine.about,
                }
            case "check":
                return {}
            case _:
                raise KeyError(f"no operation {operation!r}")


def _name(connection: Connection, call: int) -> str:
    return f"{connection.number}-{call}"


def _release() -> str:
    import vllm

    return str(vllm.__version__)


def _stop(number: int, frame: object) -> None:
    sys.exit(128 + number)


def main() -> None:
    """Serve the model that this process's arguments describe."""
    # The engine core, and its only worker, belong into this process.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    flag, path, *arguments = sys.argv[1:]
    if flag != "--socket":
        raise SystemExit("usage: server --socket PATH <flags of vLLM's engine>")
    if "--kv-cache-memory-bytes" in arguments:  # else vLLM prefers what the login's shell says
        os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
    token = read_token(os.environ["LIBRA_TOKEN_FILE"])
    sock = bind_unix(path)  # taken now, answered when there is something to say
    signal.signal(signal.SIGTERM, _stop)
    # A fifth of the time to import vLLM would go into looking for garbage; there is none yet.
    gc.disable()
    # Ranks without GPUs are forked from this process, and must not answer in its place.
    os.register_at_fork(after_in_child=sock.close)
    os.register_at_fork(after_in_child=gc.enable)
    model = Path(arguments[arguments.index("--model") + 1])
    provide(model)
    # vLLM reads its environment when it is imported.
    from libra_cli.node.rollout.engine import VllmEngine
    from libra_cli.node.rollout.model_class import register_classes

    register_classes(model)
    # Nor is any in what was imported, all of which vLLM looks through five times while it starts.
    gc.freeze()
    atexit.register(gc.unfreeze)  # else nanobind tells of what is left, after an error's own words
    engine = VllmEngine(arguments)
    gc.enable()
    try:
        Server(engine, Connections(sock, token)).run()
    finally:
        engine.close()


if __name__ == "__main__":
    main()
