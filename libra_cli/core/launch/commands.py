"""A plan and what is known of the hosts -> the argv, environment and files of every process.

Contract: pure. Nothing secret is in an argv or in an environment: a process finds the run's token
in the file that LIBRA_TOKEN_FILE names, which the host's agent sets, as it sets the run's markers.
``dry_run`` gives the same commands without any host; what only a host can tell stands there in
angle brackets.

Why the flags are what they are:

- Servers bind to loopback and VLLM_HOST_IP is loopback: nothing of a server is reachable from
  outside, and a host without a default route works. ``--middleware`` asks for the run's token on
  every route.
- ``--generation-config vllm``: a model's own sampling defaults (top_k, temperature) would change
  the distribution the loss believes in.
- Every server has its own ``--seed``: two servers with one seed may give two members of a group the
  same tokens.
- ``--logprobs-mode processed_logprobs``: log-probabilities after temperature, as the trainer's.
- Without GPUs a process gets the cores of its slot as a number of threads, not as a fixed set:
  which cores a container may use is not known here, and the API server needs some too.
- ``accelerate launch --cpu`` with several machines silently makes several worlds of one; the path
  that forms one world is ``--multi_gpu`` with ACCELERATE_USE_CPU. A world of one needs ``--cpu``.
- No FSDP flags: the trainer shards with torch itself, since accelerate ignores them without GPUs.
- ``--config_file`` is ours, so that a configuration in somebody's home directory changes nothing.
- Collectives of one host go over ``lo``, of several over the interface that routes to the peers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from libra_cli.config.recipe import NodeSpec, Recipe
from libra_cli.config.rules import SECRET_NAME
from libra_cli.core.cluster.placement import initial_plan, processes_per_node, slots_of
from libra_cli.core.types import Bucket, Plan, Pool, Slot, SlotId, node_of

Dtype: TypeAlias = Literal["float32", "bfloat16"]

SERVED_MODEL = "policy"
"""What servers call the model in requests and answers."""

PROBE_TOKENS = 64
"""Length of the sequence every weight version is verified with."""

SOCKET_DIRECTORY = 107 - 37
"""Most bytes of the path that Linux leaves where a socket is called by a UUID."""


@dataclass(frozen=True, slots=True)
class HostFacts:
    """What a command must know of its host. Paths are absolute there."""

    node: str
    python: str
    workdir: str
    run_dir: str
    weights_dir: str
    """Versions are in ``<weights_dir>/<run id>/<version name>``."""
    address: str
    """How the other hosts reach it."""
    interface: str = ""
    """The network interface that routes to the other hosts."""
    cpus: int | None = None
    """Cores the processes of libra may use together; None when nobody has looked."""


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One process, ready for the agent of its node."""

    node: str
    process: str
    """``server-<slot index>``, ``trainer-<machine rank>`` or ``model``."""
    argv: tuple[str, ...]
    env: Mapping[str, str]
    files: Mapping[str, str] = field(default_factory=dict)
    """Path below the run directory -> text."""
    ports: Mapping[str, int] = field(default_factory=dict)
    """What it listens on -> port."""


@dataclass(frozen=True, slots=True)
class HostPlan:
    """One host's part of a dry run. Every environment is masked."""

    node: NodeSpec
    slots: tuple[tuple[Slot, str], ...]
    """Each slot with what it will do, for example ``rollout: short``."""
    processes: tuple[ProcessSpec, ...]


def dtype_of(recipe: Recipe, slots: Iterable[Slot]) -> Dtype:
    """The number format on those slots: as the recipe says, else bfloat16 on GPUs."""
    if recipe.model.dtype != "auto":
        return recipe.model.dtype
    return "bfloat16" if all(slot.gpus for slot in slots) else "float32"


def process_of(slot: SlotId) -> str:
    """The name of the server process of a slot."""
    return f"server-{slot.rpartition('/')[2]}"


def worker_of(slot: SlotId) -> str:
    """The name of the gradient worker's process of a slot."""
    return f"gradient-{slot.rpartition('/')[2]}"


def ports_needed(recipe: Recipe, plan: Plan) -> dict[str, tuple[str, ...]]:
    """What listens on each node: one name a port, in the order the ports should be handed out.

    ``server-<slot index>`` for a slot that serves or may; ``gradient-<slot index>`` (HTTP),
    ``side-`` (its side channel) and ``rendezvous-`` for one that may be a gradient worker; on the
    first train node ``trainer`` (HTTP) and ``rendezvous`` (where the ranks meet); ``weights`` where
    the agent serves versions to peers.
    """
    names: dict[str, list[str]] = {node.name: [] for node in recipe.nodes}
    serving = dict(plan.servers)
    for slot in slots_of(recipe):
        hybrid = slot.pool is Pool.HYBRID
        if slot.id in serving or hybrid:
            names[slot.node].append(process_of(slot.id))
        if hybrid:
            worker = worker_of(slot.id)
            names[slot.node] += [worker, f"side-{worker}", f"rendezvous-{worker}"]
    names[node_of(plan.train[0])] += ["trainer", "rendezvous"]
    if len(recipe.nodes) > 1:
        for entries in names.values():
            entries.append("weights")
    return {node: tuple(entries) for node, entries in names.items() if entries}


def server_process(
    recipe: Recipe, slot: Slot, bucket: Bucket, facts: HostFacts, *, port: int, model_dir: str
) -> ProcessSpec:
    """The vLLM server of a slot."""
    position = [other.id for other in slots_of(recipe)].index(slot.id)
    rollout = recipe.rollout
    flags: dict[str, str | int | float | None] = {
        "--model": model_dir,
        "--host": "127.0.0.1",
        "--port": port,
        "--served-model-name": SERVED_MODEL,
        "--dtype": dtype_of(recipe, [slot]),
        "--max-model-len": recipe.model.max_len,
        "--max-num-seqs": bucket.max_num_seqs,
        "--tensor-parallel-size": bucket.tensor_parallel,
        "--scheduling-policy": "priority",
        "--generation-config": "vllm",
        "--logprobs-mode": "processed_logprobs",
        "--seed": recipe.run.seed * 10_000 + position,
        "--middleware": "libra_cli.node.rollout.server.BearerAuth",
        "--enable-scale-out": None,
        "--disable-uvicorn-access-log": None,
    }
    if slot.gpus:
        flags["--gpu-memory-utilization"] = rollout.gpu_memory
    else:
        flags["--enforce-eager"] = None
    env = {
        **_common_env(recipe, slot.node, [slot], facts),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        **_interface_env("lo"),
        **_sockets_env(facts),
    }
    if not slot.gpus:
        env["VLLM_CPU_KVCACHE_SPACE"] = str(rollout.kv_gib)
        env["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    return ProcessSpec(
        node=slot.node,
        process=process_of(slot.id),
        argv=(
            facts.python,
            "-m",
            "libra_cli.node.rollout.server",
            *_argv(flags),
            *rollout.vllm_args,
        ),
        env=env | recipe.node(slot.node).env,
        ports={"server": port},
    )


def trainer_processes(
    recipe: Recipe,
    train: Sequence[Slot],
    facts: Mapping[str, HostFacts],
    *,
    run_id: str,
    http_port: int,
    rendezvous_port: int,
    model_dirs: Mapping[str, str],
    trainer_incarnation: int,
    resume: Mapping[str, str] | None = None,
) -> tuple[ProcessSpec, ...]:
    """One launcher a node, in rank order; the first node's rank 0 answers on ``http_port``.

    ``model_dirs`` and ``resume`` (a checkpoint) have a path for every train node.
    """
    processes = processes_per_node(tuple(train), frozenset(slot.id for slot in train))
    world_size = sum(processes.values())
    nodes = list(processes)
    head, dtype = facts[nodes[0]], dtype_of(recipe, train)
    specs: list[ProcessSpec] = []
    for rank, node in enumerate(nodes):
        here = facts[node]
        mine = [slot for slot in train if slot.node == node]
        config = _policy_config(recipe, run_id, model_dirs[node], world_size) | {
            "weights_dir": here.weights_dir,
            # One path for all: shards of one checkpoint must come together.
            "checkpoint_dir": f"{head.run_dir}/checkpoints",
            "port": http_port,
            "trainer_incarnation": trainer_incarnation,
            "dtype": dtype,
            "keep_versions": recipe.weight_sync.keep_versions,
            "resume": resume[node] if resume else None,
            "probe_tokens": PROBE_TOKENS,
        }
        launch = _Launch(
            machine_rank=rank,
            machines=len(nodes),
            world_size=world_size,
            head_address=head.address,
            rendezvous_port=rendezvous_port,
            gpus=bool(train[0].gpus),
            mixed_precision=_mixed_precision(dtype),
        )
        specs.append(
            ProcessSpec(
                node=node,
                process=f"trainer-{rank}",
                argv=_launch_argv(here, launch),
                env=_trainer_env(recipe, mine, here, launch) | recipe.node(node).env,
                files={
                    "trainer.json": json.dumps(config, indent=2),
                    "accelerate.yaml": _ACCELERATE_CONFIG,
                },
                ports={"trainer": http_port, "rendezvous": rendezvous_port} if rank == 0 else {},
            )
        )
    return tuple(specs)


def _sockets_env(facts: HostFacts) -> dict[str, str]:
    """vLLM never removes its sockets: beside the run's weights they go when the run ends."""
    run_id = facts.run_dir.split("/")[-2]
    directory = f"{facts.weights_dir}/{run_id}"
    fits = len(directory.encode()) <= SOCKET_DIRECTORY
    return {"VLLM_RPC_BASE_PATH": directory} if fits else {}


def _policy_config(
    recipe: Recipe, run_id: str, model_dir: str, world_size: int
) -> dict[str, object]:
    """What the trainer and a gradient worker have in common."""
    return {
        "run_id": run_id,
        "model_dir": model_dir,
        "world_size": world_size,
        "seed": recipe.run.seed,
        "temperature": recipe.rollout.temperature,
        "training": recipe.training.model_dump(mode="json"),
        "max_len": recipe.model.max_len,
    }


def _mixed_precision(dtype: str) -> str:
    return "bf16" if dtype == "bfloat16" else "no"


def worker_process(
    recipe: Recipe,
    slot: Slot,
    facts: HostFacts,
    *,
    run_id: str,
    incarnation: int,
    ports: Mapping[str, int],
    model_dir: str,
) -> ProcessSpec:
    """The gradient worker of a slot: a world of its own, one rank a GPU."""
    process = worker_of(slot.id)
    world_size = slot.num_devices
    config = _policy_config(recipe, run_id, model_dir, world_size) | {
        "slot": slot.id,
        "incarnation": incarnation,
        "port": ports[process],
        "side_bind": "0.0.0.0" if len(recipe.nodes) > 1 else "127.0.0.1",
        "side_port": ports[f"side-{process}"],
        "shm_dir": f"{facts.weights_dir}/{run_id}",
    }
    launch = _Launch(
        machine_rank=0,
        machines=1,
        world_size=world_size,
        head_address="127.0.0.1",
        rendezvous_port=ports[f"rendezvous-{process}"],
        gpus=bool(slot.gpus),
        mixed_precision=_mixed_precision(dtype_of(recipe, [slot])),
        module="libra_cli.node.gradient.main",
        config=f"{process}.json",
    )
    return ProcessSpec(
        node=slot.node,
        process=process,
        argv=_launch_argv(facts, launch),
        env=_trainer_env(recipe, [slot], facts, launch) | recipe.node(slot.node).env,
        files={
            f"{process}.json": json.dumps(config, indent=2),
            "accelerate.yaml": _ACCELERATE_CONFIG,
        },
        ports={"worker": ports[process], "side": ports[f"side-{process}"]},
    )


def model_process(recipe: Recipe, facts: HostFacts) -> ProcessSpec:
    """Builds or locates the model on one host; the answer is ``<run_dir>/model.json``."""
    model = recipe.model
    spec: dict[str, object] = (
        {"path": model.path}
        if model.build is None
        else {"build": model.build.model_dump(mode="json"), "cache": f"{facts.workdir}/models"}
    )
    slots = [slot for slot in slots_of(recipe) if slot.node == facts.node]
    env = _common_env(recipe, facts.node, slots, facts)
    # What libra builds is so small that a second thread makes it slower, and needs no GPU.
    env |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return ProcessSpec(
        node=facts.node,
        process="model",
        argv=(
            facts.python,
            "-m",
            "libra_cli.node.model.build",
            f"{facts.run_dir}/model-spec.json",
            f"{facts.run_dir}/model.json",
        ),
        env=env | recipe.node(facts.node).env,
        files={"model-spec.json": json.dumps(spec, indent=2)},
    )


def masked(env: Mapping[str, str]) -> dict[str, str]:
    """The environment with the values of names that sound secret replaced, sorted by name."""
    return {
        name: "******" if SECRET_NAME.search(name) and not name.endswith("_FILE") else value
        for name, value in sorted(env.items())
    }


def guessed_facts(node: NodeSpec, recipe: Recipe) -> HostFacts:
    """What a host would probably say, without asking it."""
    workdir = node.workdir
    python = node.python or ("<this python>" if node.is_local else "~/.libra/venv/bin/python")
    return HostFacts(
        node=node.name,
        python=python,
        workdir=workdir,
        run_dir=f"{workdir}/runs/<run>/{node.name}",
        weights_dir=recipe.weight_sync.directory or f"/dev/shm/libra-{node.user or '<user>'}",
        address=node.reach,
        interface="<interface to the peers>",
        cpus=None,
    )


def dry_run(recipe: Recipe, facts: Mapping[str, HostFacts] | None = None) -> tuple[HostPlan, ...]:
    """Per host: slots, argv, environment and ports of everything the initial plan would start.

    Ports are the first of each node's range; a run takes the first that are free. ``facts`` replace
    the guesses for the nodes that are known.
    """
    plan = initial_plan(recipe)
    known = {node.name: guessed_facts(node, recipe) for node in recipe.nodes} | dict(facts or {})
    slots = {slot.id: slot for slot in slots_of(recipe)}
    ports = {
        node: dict(zip(names, range(recipe.node(node).port_range[0], 65536), strict=False))
        for node, names in ports_needed(recipe, plan).items()
    }
    head = ports[node_of(plan.train[0])]
    model_dirs = {
        node: recipe.model.path or f"{there.workdir}/models/<built>"
        for node, there in known.items()
    }
    builder = known[node_of(plan.train[0])]
    specs = [model_process(recipe, builder)] if recipe.model.build is not None else []
    specs += [
        server_process(
            recipe,
            slots[slot],
            bucket,
            known[node_of(slot)],
            port=ports[node_of(slot)][process_of(slot)],
            model_dir=model_dirs[node_of(slot)],
        )
        for slot, bucket in plan.servers
    ]
    specs += trainer_processes(
        recipe,
        [slots[slot] for slot in plan.train],
        known,
        run_id="<run>",
        http_port=head["trainer"],
        rendezvous_port=head["rendezvous"],
        model_dirs=model_dirs,
        trainer_incarnation=1,
    )
    roles = {slot: f"rollout: {bucket.name}" for slot, bucket in plan.servers}
    roles |= dict.fromkeys(plan.train, "train")
    return tuple(
        HostPlan(
            node=node,
            slots=tuple(
                (slot, roles[slot.id]) for slot in slots.values() if slot.node == node.name
            ),
            processes=tuple(
                replace(spec, env=masked(spec.env)) for spec in specs if spec.node == node.name
            ),
        )
        for node in recipe.nodes
    )


@dataclass(frozen=True, slots=True)
class _Launch:
    """One machine's place in the trainer's world."""

    machine_rank: int
    machines: int
    world_size: int
    head_address: str
    rendezvous_port: int
    gpus: bool
    mixed_precision: str
    module: str = "libra_cli.node.trainer.main"
    config: str = "trainer.json"


_ACCELERATE_CONFIG = """\
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: 'NO'
mixed_precision: 'no'
use_cpu: false
"""


def _launch_argv(facts: HostFacts, launch: _Launch) -> tuple[str, ...]:
    flags: dict[str, str | int | float | None] = {
        "--config_file": f"{facts.run_dir}/accelerate.yaml"
    }
    if launch.world_size > 1:
        flags["--multi_gpu"] = None
    elif not launch.gpus:
        flags["--cpu"] = None
    flags |= {
        "--num_processes": launch.world_size,
        "--num_machines": launch.machines,
        "--machine_rank": launch.machine_rank,
        "--main_process_port": launch.rendezvous_port,
        "--mixed_precision": launch.mixed_precision,
        "--dynamo_backend": "no",
    }
    if launch.machines > 1:
        flags["--main_process_ip"] = launch.head_address
    return (
        facts.python,
        "-m",
        "accelerate.commands.launch",
        *_argv(flags),
        "-m",
        launch.module,
        f"{facts.run_dir}/{launch.config}",
    )


def _trainer_env(
    recipe: Recipe, mine: Sequence[Slot], facts: HostFacts, launch: _Launch
) -> dict[str, str]:
    local = launch.world_size // launch.machines
    env = _common_env(recipe, facts.node, mine, facts, processes=local)
    if not mine[0].gpus:
        env["ACCELERATE_USE_CPU"] = "true"
    return env | _interface_env(facts.interface if launch.machines > 1 else "lo")


def _interface_env(interface: str) -> dict[str, str]:
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}


def _common_env(
    recipe: Recipe, node: str, slots: Sequence[Slot], facts: HostFacts, *, processes: int = 1
) -> dict[str, str]:
    parts = recipe.node(node).slots * processes
    share = f"<cores * {len(slots)} / {parts}>"
    if len(slots) == parts:
        share = "<cores>"
    if facts.cpus is not None:
        share = str(max(1, facts.cpus * len(slots) // parts))
    return {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": ",".join(str(gpu) for slot in slots for gpu in slot.gpus),
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": share,
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_OFFLINE": "1",
    }


def _argv(flags: Mapping[str, str | int | float | None]) -> Iterator[str]:
    """A flag of value None stands alone."""
    for flag, value in flags.items():
        yield flag
        if value is not None:
            yield str(value)
