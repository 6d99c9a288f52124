"""One real vLLM server, started by the agent on this machine, and a loop to speak to it."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from libra_cli.config.errors import ServerError
from libra_cli.config.recipe import Recipe
from libra_cli.core.events import PublishedVersion
from libra_cli.core.launch.placement import initial_plan, slots_of
from libra_cli.core.launch.process import HostFacts
from libra_cli.core.launch.rollout_backend import server_process
from libra_cli.core.types import WeightVersion
from libra_cli.runtime.hosts.agent_messages import Exited
from libra_cli.runtime.hosts.exits import how_it_ended
from libra_cli.runtime.hosts.host import Host
from libra_cli.runtime.hosts.local import LocalTransport
from libra_cli.runtime.hosts.transport import Endpoint
from libra_cli.runtime.vllm.client import ServerClient

START_S = 240.0


def published(version: int, incarnation: int = 1) -> PublishedVersion:
    return PublishedVersion(WeightVersion(incarnation, version), 0, 0.0)


class Bench:
    """A loop of its own for the whole file, so that one server serves every test."""

    def __init__(
        self,
        host: Host,
        server: ServerClient,
        token: str,
        endpoint: Endpoint,
        loop: asyncio.Runner,
    ) -> None:
        self.host, self.server, self.token, self.endpoint = host, server, token, endpoint
        self._loop = loop

    def play(
        self, scene: Callable[[], Coroutine[Any, Any, Any]], *, timeout_s: float = 120.0
    ) -> Any:
        return self._loop.run(asyncio.wait_for(scene(), timeout_s))


@contextmanager
def bench_of(
    model_dir: Path,
    base: Path,
    *,
    dtype: str = "float32",
    ranks: int = 1,
    gpus: int = 0,
    rollout: Mapping[str, Any] | None = None,
    training: Mapping[str, Any] | None = None,
    worker: str | None = None,
    start_s: float = START_S,
    model: Mapping[str, Any] | None = None,
) -> Iterator[Bench]:
    """A server of a model, with that many tensor-parallel ranks, on as many GPUs or on none.

    ``rollout``, ``training`` and ``model`` are more keys of the recipe's sections; ``worker`` is a
    class of these tests in place of libra's worker.
    """
    token = secrets.token_urlsafe(16)
    with asyncio.Runner() as loop:
        opened = _opened(
            {"path": str(model_dir), "max_len": 512, "dtype": dtype, **(model or {})},
            base,
            token,
            ranks,
            gpus,
            rollout or {},
            training or {},
            worker,
            start_s,
        )
        host, server, endpoint = loop.run(opened.__aenter__())
        try:
            yield Bench(host, server, token, endpoint, loop)
        finally:
            left = loop.run(opened.__aexit__(None, None, None))
            assert not left


async def _ready(server: ServerClient, exits: asyncio.Queue[Exited], start_s: float) -> None:
    """Wait until the server answers.

    Raises:
        ServerError: its process has ended, or it does not answer in time.
    """
    ready, ended = (
        asyncio.create_task(server.wait_ready(timeout_s=start_s)),
        asyncio.create_task(exits.get()),
    )
    await asyncio.wait({ready, ended}, return_when=asyncio.FIRST_COMPLETED)
    if ended.done():
        ready.cancel()
        raise ServerError(f"{ended.result().process} {how_it_ended(ended.result())}")
    ended.cancel()
    await ready


@asynccontextmanager
async def _opened(
    model: Mapping[str, Any],
    base: Path,
    token: str,
    ranks: int,
    gpus: int,
    rollout: Mapping[str, Any],
    training: Mapping[str, Any],
    worker: str | None,
    start_s: float,
) -> AsyncIterator[tuple[Host, ServerClient, Endpoint]]:
    recipe = Recipe.model_validate(
        {
            "nodes": [
                {"host": "local", "slots": 2, "pool": ["rollout", "train"], "gpus": 2 * gpus}
            ],
            "model": model,
            "environment": {"name": "pointer-chase"},
            "rollout": {
                "max_turn_tokens": 480,
                "buckets": [{"name": "all", "max_num_seqs": 8}],
                **rollout,
            },
            "training": training,
        }
    )
    slot = slots_of(recipe)[0]
    bucket = replace(initial_plan(recipe).servers[0][1], tensor_parallel=ranks)
    host = Host("local", LocalTransport(), workdir=str(base))
    # By this mark everything of the run is stopped: two test runs must not have the same.
    run_id = f"test-server-{os.getpid()}"
    exits: asyncio.Queue[Exited] = asyncio.Queue()
    await host.open(
        run_id,
        token=token,
        lease_s=60,
        weights_dir=str(base / "weights"),
        on_event=lambda event: exits.put_nowait(event) if isinstance(event, Exited) else None,
    )
    try:
        facts = HostFacts(
            node="local",
            python=host.python,
            workdir=host.workdir,
            run_dir=host.run_dir,
            weights_dir=str(base / "weights"),
            tmp_dir=host.tmp_dir,
            address="127.0.0.1",
            cpus=os.cpu_count(),
        )
        spec = server_process(recipe, slot, bucket, facts, model_dir=model["path"])
        argv, env = spec.argv, dict(spec.env)
        if worker is not None:
            place = argv.index("--worker-extension-cls") + 1
            argv = (*argv[:place], worker, *argv[place + 1 :])
            env["PYTHONPATH"] = str(Path(__file__).parents[1])
        await host.start(spec.process, argv, env=env, files=dict(spec.files))
        endpoint = await host.dial(facts.socket_of(spec.process))
        server = ServerClient("local/0", 0, endpoint, token)
        await _ready(server, exits, start_s)
        yield host, server, endpoint
        await server.close()
    finally:
        left = await host.shutdown()
        assert not left, left
    assert not (base / "weights" / run_id).exists()
    assert Path(host.tmp_dir).name not in os.listdir(Path(host.tmp_dir).parent)
