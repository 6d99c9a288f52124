"""What serves Tinker's clients on the hosts of a recipe: a process that trains, and vLLM servers.

They are started as in a run, and live under the lease of their host's agents: a controller that is
killed leaves nothing.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from libra_cli.config.errors import LibraError, ProcessError, RecipeError
from libra_cli.config.recipe import Recipe
from libra_cli.config.rollout import RolloutSpec
from libra_cli.core.actions import StartServer
from libra_cli.core.events import Event, ServerFailed, ServerStarted, WorkerFailed
from libra_cli.core.launch.placement import initial_plan, slots_of
from libra_cli.core.launch.process import ProcessSpec, common_env, dtype_of, trainer_of
from libra_cli.core.records import Record
from libra_cli.core.types import Bucket, Slot, SlotId
from libra_cli.runtime.credentials.run_secrets import RunSecrets
from libra_cli.runtime.episodes.renderer import Renderer
from libra_cli.runtime.hosts.agent_messages import Exited, HostEvent, LeaseExpired
from libra_cli.runtime.hosts.cluster import Cluster
from libra_cli.runtime.processes.owner import STARTUP_TIMEOUT_S, ProcessOwner
from libra_cli.runtime.processes.stream import Answer
from libra_cli.runtime.rollout.connection import Sampling
from libra_cli.runtime.rollout.servers import Servers
from libra_cli.runtime.tinker.loaded import ADAPTERS_IN_MEMORY
from libra_cli.runtime.tinker.tenant_client import TenantClient
from libra_cli.runtime.vllm.client import ServerClient
from libra_cli.runtime.weights.versions import weights_of

INCARNATION = 1
TRAINER = "trainer"
ADAPTERS_ON_GPU = 4
"""Adapters whose requests a server computes together; chosen."""

RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The largest ranks that vLLM can be started with."""


def with_adapters(rollout: RolloutSpec, max_rank: int) -> RolloutSpec:
    """Return a copy of the section whose servers take adapters of up to ``max_rank``."""
    flags = (
        *("--enable-lora", "--max-lora-rank", str(min(one for one in RANKS if one >= max_rank))),
        *("--max-loras", str(ADAPTERS_ON_GPU), "--max-cpu-loras", str(ADAPTERS_IN_MEMORY)),
    )
    return rollout.model_copy(update={"vllm_args": (*rollout.vllm_args, *flags)})


class TinkerHosts:
    """The processes of one ``libra tinker``, from the connection to the hosts to their end."""

    def __init__(
        self, recipe: Recipe, work: Path, *, max_rank: int, note: Callable[[str], None]
    ) -> None:
        """Plan what runs where; nothing is started yet.

        Raises:
            RecipeError: the recipe trains on more than one slot.
        """
        self._recipe = recipe.model_copy(
            update={"rollout": with_adapters(recipe.rollout, max_rank)}
        )
        self._work = work
        self._note = note
        self._plan = initial_plan(recipe)
        self._slots = {slot.id: slot for slot in slots_of(recipe)}
        self._train = self._train_slot()
        self._cluster = Cluster(
            recipe,
            self._plan,
            run_id=f"tinker-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}",
            secrets=RunSecrets.new(),
            save=_keep_nothing,
            clock=time.time,
            note=note,
        )
        self._trainer: ProcessOwner[TenantClient] = ProcessOwner(
            self._cluster,
            connect=lambda name, *reached: TenantClient(*reached),
            failed=WorkerFailed,
            post=self._post,
        )
        self._failed: asyncio.Event = asyncio.Event()
        self._failure: LibraError | None = None
        self._turns = itertools.count()

    def _train_slot(self) -> Slot:
        train = [self._slots[name] for name in self._plan.train]
        if len(train) != 1 or train[0].num_devices > 1:
            raise RecipeError(
                f"this recipe trains on {len(train)} slots: libra tinker trains on one GPU or one "
                "slot of cores",
                hint="leave one slot with pool: train, and give the others to rollout",
            )
        return train[0]

    @property
    def model_dir(self) -> Path:
        """The controller's copy of the model's configuration and tokenizer."""
        return self._work / "model"

    async def open(self) -> None:
        """Connect, start all processes, and wait until they serve. Raises LibraError."""
        self._note("connecting to the hosts")
        await self._cluster.open(self.model_dir)
        model = self._recipe.model
        renderer = Renderer(
            self.model_dir, template_args=model.template_args, tool_format=model.tool_format
        )
        self.stop_token_ids = tuple(renderer.stop_token_ids)
        self._servers = Servers(
            self._recipe,
            self._cluster,
            weights_of(self._cluster, self._recipe.weight_sync, origin=self._train.node),
            self._slots,
            lambda group: Sampling(temperature=1.0, top_p=1.0, stop_token_ids=()),
            post=self._post,
        )
        self._cluster.events.subscribe(self._happened)
        self._note("starting the trainer and the servers")
        starts = (self._start_server(*pair) for pair in self._plan.servers)
        try:
            async with asyncio.TaskGroup() as group:
                for start in (self._start_trainer(), *starts):
                    group.create_task(start)
        except* LibraError as errors:
            raise errors.exceptions[0] from None

    async def _start_trainer(self) -> None:
        trainer = await self._trainer.start(TRAINER, INCARNATION, [self._process()])
        await trainer.wait_ready(timeout_s=STARTUP_TIMEOUT_S)

    def _process(self) -> ProcessSpec:
        slot, facts = self._train, self._cluster.facts[self._train.node]
        node, process = self._recipe.node(slot.node), trainer_of(0)
        config = {
            "socket": facts.socket_of(process),
            "model_dir": self._cluster.model_dirs[slot.node],
            "dtype": dtype_of(self._recipe.model, [slot]),
            "pass_tokens": self._recipe.training.micro_batch_tokens,
        }
        path = f"{facts.run_dir}/trainer.json"
        return ProcessSpec(
            node=slot.node,
            process=process,
            argv=(facts.python, "-m", "libra_cli.node.tenants.main", path),
            env={**common_env(node, (slot,), facts), **node.env},
            files={"trainer.json": json.dumps(config, indent=2)},
        )

    async def _start_server(self, slot: SlotId, bucket: Bucket) -> None:
        event = await self._servers.start(StartServer(slot, INCARNATION, bucket))
        if not isinstance(event, ServerStarted):
            raise ProcessError(f"{slot}: {getattr(event, 'reason', 'the server did not start')}")

    async def train(self, operation: str, order: Mapping[str, Any]) -> Answer:
        """Have the trainer carry out an order. Raises LibraError."""
        return await self._trainer.connection(TRAINER).order(operation, dict(order))

    async def add_adapter(self, name: str, config: str, tensors: bytes) -> None:
        """Give every server an adapter to sample from. Raises LibraError."""
        adding = (one.add_adapter(name, config, tensors) for one in self._reached())
        await asyncio.gather(*adding)

    async def remove_adapter(self, name: str) -> None:
        """Have every server let go of an adapter. Raises LibraError."""
        await asyncio.gather(*(one.remove_adapter(name) for one in self._reached()))

    async def sample(self, order: Mapping[str, Any]) -> Answer:
        """Have one of the servers, each in its turn, sample a sequence. Raises LibraError."""
        servers = self._reached()
        return await servers[next(self._turns) % len(servers)].sample_tokens(dict(order))

    def _reached(self) -> list[ServerClient]:
        found = [self._servers.processes.connection(slot) for slot, _ in self._plan.servers]
        return [one for one in found if isinstance(one, ServerClient)]

    async def until_failed(self) -> LibraError:
        """Wait until a process or a host has failed, and return why."""
        await self._failed.wait()
        assert self._failure is not None
        return self._failure

    async def close(self) -> None:
        """End everything, and note what is not proved gone."""
        self._cluster.events.unsubscribe(self._happened)
        for line in await self._cluster.close():
            self._note(f"not proved gone: {line}")

    def _fail(self, error: LibraError) -> None:
        self._failure = self._failure or error
        self._failed.set()

    def _post(self, event: Event) -> None:
        if isinstance(event, ServerFailed | WorkerFailed):
            self._fail(ProcessError(f"{event.slot}: {event.reason}"))

    def _happened(self, event: HostEvent) -> None:
        if isinstance(event, Exited):
            self._trainer.exited(event)
            self._servers.processes.exited(event)
        elif isinstance(event, LeaseExpired):
            self._fail(ProcessError(f"{event.node}: {event.reason}"))


def _keep_nothing(record: Record) -> None:
    pass
