"""libra's own trainer and gradient worker (``libra_cli.node``), whoever launches their ranks.

Each is a launcher process on every node of its world, with one JSON file that says what to train.
A ``NativeTrainer`` writes that file and the environment; a subclass knows a launcher's command line
and which worlds it can start.

- No sharding flags of a launcher: the trainer shards with torch itself, since accelerate ignores
  them without GPUs.
- Collectives of one host go over ``lo``, of several over the interface that routes to the peers.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from libra_cli.config.recipe import Recipe
from libra_cli.config.training import TrainingSpec
from libra_cli.core.costs.memory import NO_MOMENTS
from libra_cli.core.launch.process import (
    Dtype,
    HostFacts,
    PeerAddress,
    ProcessSpec,
    common_env,
    compiler_caches,
    dtype_of,
    interface_env,
    trainer_of,
    worker_of,
    worker_ports,
)
from libra_cli.core.launch.sharding import RankConditions, dp_shard_size, is_sharded
from libra_cli.core.launch.shares import rank_gpu_gib
from libra_cli.core.launch.trainer_backend import TrainerLaunch, WorkerLaunch, ranks_per_node
from libra_cli.core.types import Slot

ALLOCATOR = "expandable_segments:True"
"""How torch takes memory of a GPU in ranks: packed rows of ever other lengths leave gaps otherwise
(SkyRL 1768: out of memory at step 2 with 20 GiB reserved and unused). Servers go without, since
vLLM's pools of CUDA graphs and its all-reduce need memory that stays where it is."""
PROBE_TOKENS = 64
"""Length of the sequence every weight version is verified with."""


@dataclass(frozen=True, slots=True)
class MachineRanks:
    """The ranks that compute together, and one machine's place among them."""

    machine: int
    """The machine's number, from 0, in the order of the nodes; rank 0 is on machine 0."""
    machines: int
    ranks_here: int
    ranks: int
    """Ranks of all machines together."""
    head_address: str
    rendezvous_port: int
    gpus: bool
    dtype: Dtype
    even: bool = True
    """Whether all machines have equally many ranks."""


@dataclass(frozen=True, slots=True)
class Command:
    """A launcher's command line, and what it needs besides."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)


class NativeTrainer(ABC):
    """The pure half of a backend that runs libra's own ranks."""

    packages: tuple[str, ...] = ("accelerate", "torch", "transformers", "msgpack", "safetensors")
    connection = "libra_cli.runtime.trainer.client:TrainerClient"
    worker_connection = "libra_cli.runtime.trainer.worker_client:WorkerClient"

    @abstractmethod
    def refuses(self, ranks: Mapping[str, int]) -> str:
        """Why the launcher cannot start a world with so many ranks a node; empty if it can."""

    @abstractmethod
    def command(self, facts: HostFacts, world: MachineRanks, module: str, config: str) -> Command:
        """Return one machine's launcher of ``python -m <module>
        <config>`` for each of its ranks.
        """

    def trainer(self, recipe: Recipe, launch: TrainerLaunch) -> tuple[ProcessSpec, ...]:
        """Return one launcher a node, in rank order; rank 0 is on the first node."""
        ranks = ranks_per_node(launch.train)
        head = launch.facts[next(iter(ranks))]
        # On itself a name may be the loopback's.
        there = PeerAddress.of(head.address, "", head.own_address).listens_at
        worlds = [
            MachineRanks(
                machine=machine,
                machines=len(ranks),
                ranks_here=ranks[node],
                ranks=sum(ranks.values()),
                head_address=head.address if machine else there,
                rendezvous_port=launch.rendezvous_port,
                gpus=bool(launch.train[0].gpus),
                dtype=dtype_of(recipe.model, launch.train),
                even=len(set(ranks.values())) == 1,
            )
            for machine, node in enumerate(ranks)
        ]
        return tuple(
            self._machine(recipe, launch, node, world)
            for node, world in zip(ranks, worlds, strict=True)
        )

    def _machine(
        self, recipe: Recipe, launch: TrainerLaunch, node: str, world: MachineRanks
    ) -> ProcessSpec:
        slots = tuple(slot for slot in launch.train if slot.node == node)
        ports = {"rendezvous": launch.rendezvous_port}
        return self._process(
            recipe,
            slots,
            launch.facts[node],
            world,
            process=trainer_of(world.machine),
            name="trainer.json",
            module="libra_cli.node.trainer.main",
            config=_trainer_config(recipe, launch, node, world),
            ports=ports if world.machine == 0 else {},
        )

    def gradient_worker(self, recipe: Recipe, launch: WorkerLaunch) -> ProcessSpec:
        """Return the launcher of a gradient worker: a world of its
        own on one slot, one rank a GPU.
        """
        slot, process = launch.slot, worker_of(launch.slot.id)
        side, rendezvous = (launch.ports[name] for name in worker_ports(slot))
        ranks = slot.num_devices
        world = MachineRanks(
            machine=0,
            machines=1,
            ranks_here=ranks,
            ranks=ranks,
            head_address="127.0.0.1",
            rendezvous_port=rendezvous,
            gpus=bool(slot.gpus),
            dtype=dtype_of(recipe.model, [slot]),
        )
        return self._process(
            recipe,
            (slot,),
            launch.facts,
            world,
            process=process,
            name=f"{process}.json",
            module="libra_cli.node.gradient.main",
            config=_worker_config(recipe, launch, ranks),
            ports={"side": side, "rendezvous": rendezvous},
        )

    def _process(
        self,
        recipe: Recipe,
        slots: tuple[Slot, ...],
        facts: HostFacts,
        world: MachineRanks,
        *,
        process: str,
        name: str,
        module: str,
        config: Mapping[str, object],
        ports: Mapping[str, int],
    ) -> ProcessSpec:
        """Return one machine's launcher; ``name`` is the file that ``config`` is written to."""
        node = recipe.node(facts.node)
        command = self.command(facts, world, module, f"{facts.run_dir}/{name}")
        interface = facts.interface if world.machines > 1 else "lo"
        return ProcessSpec(
            node=node.name,
            process=process,
            argv=command.argv,
            env={
                **common_env(node, slots, facts, processes=world.ranks_here),
                **command.env,
                **interface_env(interface),
                **({"PYTORCH_ALLOC_CONF": ALLOCATOR} if node.gpus else {}),
                **(compiler_caches(facts) if recipe.training.compile else {}),
                **node.env,
            },
            files={name: json.dumps(config, indent=2), **command.files},
            ports=ports,
        )


def _trainer_config(
    recipe: Recipe, launch: TrainerLaunch, node: str, world: MachineRanks
) -> dict[str, object]:
    """The fields of ``libra_cli.node.trainer.config.TrainerConfig``."""
    gpu_gib = min(
        rank_gpu_gib(recipe.node(node), launch.facts[node].gpu_gib)
        for node in ranks_per_node(launch.train)
    )
    conditions = RankConditions.of(recipe, on_gpu=world.gpus, dtype=world.dtype, ranks=world.ranks)
    share = recipe.node(node).share
    shards = _shards(recipe.training, conditions, launch, world, gpu_gib)
    sharing = conditions.sharing(
        launch.shape, shards, world.ranks if shards == 1 else shards, gpu_gib
    )
    conditions = conditions.settled(launch.shape, shards, sharing, gpu_gib)
    common = _policy_config(recipe, launch.run_id, launch.model_dirs[node], world.ranks, conditions)
    return common | {
        "weights_dir": launch.facts[node].weights_dir,
        "checkpoint_dir": f"{launch.facts[node].run_dir}/checkpoints",
        "socket": launch.facts[node].socket_of(trainer_of(world.machine)),
        "trainer_incarnation": launch.trainer_incarnation,
        "steps": recipe.run.steps,
        "dtype": world.dtype,
        "keep_versions": recipe.weight_sync.keep_versions,
        "resume": launch.resume[node] if launch.resume else None,
        "checkpoint_urls": list(launch.checkpoint_urls),
        "probe_tokens": PROBE_TOKENS,
        "dp_shard_size": shards if 1 < shards < world.ranks else None,
        "cp_size": sharing,
        "ep_size": conditions.parted(launch.shape, shards),
        "memory_share": share.train if share is not None and world.gpus else None,
    }


def _shards(
    training: TrainingSpec,
    conditions: RankConditions,
    launch: TrainerLaunch,
    world: MachineRanks,
    gpu_gib: float,
) -> int:
    """Return how many ranks share a replica."""
    if not is_sharded(training, on_gpu=world.gpus):
        return 1
    fits = launch.shape is not None and conditions.fit(launch.shape, world.ranks_here, gpu_gib)
    return dp_shard_size(training, ranks_per_node(launch.train), host_fits=fits)


def _worker_config(recipe: Recipe, launch: WorkerLaunch, ranks: int) -> dict[str, object]:
    """The fields of ``libra_cli.node.gradient.config.WorkerConfig``."""
    side, _ = worker_ports(launch.slot)
    on_gpu = bool(launch.slot.gpus)
    dtype = dtype_of(recipe.model, [launch.slot])
    conditions = replace(
        RankConditions.of(recipe, on_gpu=on_gpu, dtype=dtype, ranks=ranks), optimizer=NO_MOMENTS
    )
    shards = ranks if is_sharded(recipe.training, on_gpu=on_gpu) else 1
    gpu_gib = launch.facts.gpu_gib
    sharing = conditions.sharing(launch.shape, shards, ranks, gpu_gib)
    conditions = conditions.settled(launch.shape, shards, sharing, gpu_gib)
    return _policy_config(recipe, launch.run_id, launch.model_dir, ranks, conditions) | {
        "slot": launch.slot.id,
        "incarnation": launch.incarnation,
        "socket": launch.facts.socket_of(worker_of(launch.slot.id)),
        "side_bind": launch.facts.peer_address.listens_at,
        "side_port": launch.ports[side],
        "shm_dir": f"{launch.facts.weights_dir}/{launch.run_id}",
        "cp_size": sharing,
        "ep_size": conditions.parted(launch.shape, shards),
    }


def _policy_config(
    recipe: Recipe, run_id: str, model_dir: str, ranks: int, conditions: RankConditions
) -> dict[str, object]:
    """Return the fields that the configurations of the trainer and of a gradient worker share."""
    training = recipe.training.model_dump(mode="json")
    if conditions.may_keep_more and conditions.choice == "selective":  # ranks take auto for full
        training["activation_checkpointing"] = conditions.choice
    head = {"fp32_lm_head": True} if recipe.model.fp32_lm_head else {}
    return head | {
        "run_id": run_id,
        "model_dir": model_dir,
        "world_size": ranks,
        "seed": recipe.run.seed,
        "temperature": recipe.rollout.temperature,
        "training": training,
        "max_len": recipe.model.max_len,
    }
