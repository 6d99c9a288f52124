"""What a user asks for: frozen models of the YAML recipe.

Contract: this module opens no file and reads no environment. ``edge.recipes`` turns a file into a
``Recipe`` and a problem into ``file:line: key: reason``. Unknown keys are refused everywhere. Every
default is visible here, and the docstring under a field is its help text. Nodes are one host each:
ranges such as ``gpu-[01-06]`` are expanded by the loader. What fields must have in common is in
``libra_cli.config.rules``; a ``Recipe`` that exists keeps all of it.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    SecretStr,
    field_validator,
    model_validator,
)

from libra_cli.config.rules import RuleError, problems_between_fields

PoolName: TypeAlias = Literal["rollout", "train", "hybrid", "auto"]

LOCAL = "local"
"""The host name that means: this machine, over pipes instead of SSH."""

_Positive: TypeAlias = Annotated[int, Field(ge=1)]
_Count: TypeAlias = Annotated[int, Field(ge=0)]
_Beta: TypeAlias = Annotated[float, Field(ge=0.0, lt=1.0)]
_Share: TypeAlias = Annotated[float, Field(gt=0.0, le=1.0)]
_Name: TypeAlias = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=64)]
_HostName: TypeAlias = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._:%-]*$")]
_PORTS = re.compile(r"^(\d{1,5})-(\d{1,5})$")


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def _as_tuple(value: Any) -> Any:
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


class RunSpec(_Model):
    """The run itself."""

    name: _Name = "run"
    """Begins the name of the run directory."""
    seed: _Count = 0
    """Of tasks, sampling, the small model and the trainer."""
    steps: _Positive = 100
    """Optimizer steps."""
    directory: str = "runs"
    """Where run directories are made, relative to the working directory of ``libra``."""
    lease_s: Annotated[float, Field(ge=5.0)] = 120.0
    """A host that hears nothing from the controller for this long stops the run's processes."""


class NodeSpec(_Model):
    """One host: how to reach it, what it has, what it may do."""

    host: _HostName
    """``local``, an alias of ~/.ssh/config, a name or an address."""
    user: str | None = None
    port: Annotated[int, Field(ge=1, le=65535)] | None = None
    identity: str | None = None
    """A private key file on the controller."""
    jump: str | None = None
    """``host`` or ``user@host`` to go through."""
    address: str | None = None
    """How the other nodes reach it. Null: the host."""
    gpus: _Count = 0
    """GPUs libra may use on it: 0 to gpus - 1."""
    slots: _Positive = 1
    """Equal parts that change sides on their own; on a host without GPUs they share its cores."""
    pool: Annotated[tuple[PoolName, ...], BeforeValidator(_as_tuple), Field(min_length=1)] = (
        "auto",
    )
    """What its slots may do: one word for all of them, or a list with one for each."""
    python: str | None = None
    """Null: the controller's own for ``local``, ``~/.libra/venv/bin/python`` over SSH."""
    workdir: str = "~/.libra"
    """Uploaded code, logs, checkpoints and small models go here."""
    ports: str = "21000-21999"
    """Where libra looks for free ports on the host."""
    env: dict[str, str] = {}
    """Extra environment of our processes there, for example NCCL_IB_HCA. No secrets."""

    @field_validator("ports")
    @classmethod
    def _check_ports(cls, value: str) -> str:
        match = _PORTS.match(value)
        if match is None:
            raise ValueError(f"must be FIRST-LAST, for example 21000-21999, got {value!r}")
        first, last = int(match[1]), int(match[2])
        if not 1024 <= first <= last <= 65535:
            raise ValueError(f"must rise within 1024-65535, got {first} to {last}")
        return value

    @property
    def name(self) -> str:
        """What slots, logs and ``libra logs`` call this node."""
        return self.host

    @property
    def is_local(self) -> bool:
        """Whether it is this machine over pipes."""
        return self.host == LOCAL

    @property
    def reach(self) -> str:
        """The address other nodes use for it."""
        return self.address or ("127.0.0.1" if self.is_local else self.host)

    @property
    def slot_pools(self) -> tuple[PoolName, ...]:
        """One pool a slot."""
        return self.pool * self.slots if len(self.pool) == 1 else self.pool

    @property
    def gpus_per_slot(self) -> int:
        """GPUs of each slot; 0 on a host without any."""
        return self.gpus // self.slots

    @property
    def port_range(self) -> tuple[int, int]:
        """First and last port, both included."""
        first, last = self.ports.split("-")
        return int(first), int(last)


class ModelBuild(_Model):
    """The small Qwen3 made by libra itself, warm-started on demonstrations."""

    task: Literal["pointer-chase"] = "pointer-chase"
    seed: _Count = 0
    warm_steps: _Count = 350
    """Supervised steps; fewer leave a policy that succeeds too rarely to learn from."""
    width: Annotated[int, Field(ge=64, le=1024, multiple_of=64)] = 128
    """Hidden size. A wider one costs training more than rollout, as with real models."""


class ModelSpec(_Model):
    """The policy."""

    path: str | None = None
    """A Hugging Face model directory, the same on every host. Exactly one of path and build."""
    build: ModelBuild | None = None
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: bfloat16 on GPUs, float32 without."""
    max_len: Annotated[int, Field(ge=32)] = 1024
    """Tokens a trajectory may have, prompt and tool returns included."""


class EnvironmentSpec(_Model):
    """What the policy plays in."""

    name: str = "pointer-chase"
    """A shipped environment, an entry point of group ``libra.environments``, or module:attr."""
    args: dict[str, JsonValue] = {}
    """Keyword arguments of its factory."""
    tasks: str | None = None
    """A JSONL file, one task a line, relative to the recipe. Null: the environment makes them."""
    tool_timeout_s: Annotated[float, Field(gt=0)] = 10.0
    retries: _Count = 3
    """Fresh attempts at a trajectory whose environment or server broke."""
    concurrency: _Positive = 64
    """Tool calls running at the same time on the controller."""
    secrets: dict[str, SecretStr] = {}
    """NAME: ${VARIABLE} of the controller's environment; the factory gets them as ``secrets``."""


class BucketSpec(_Model):
    """Servers of one shape, short trajectories first."""

    name: _Name = "all"
    tensor_parallel: _Positive = 1
    """GPUs of one server; the slots that serve it have exactly as many (without GPUs: 1)."""
    max_num_seqs: _Positive = 32
    """Requests a server runs at the same time; the gate of admission."""
    slots: _Positive | None = None
    """How many slots serve it. Null, in one bucket at most a shape: those that are left."""
    up_to_tokens: _Positive | None = None
    """Meant for trajectories with at most this much left. Null: model.max_len."""


class RolloutSpec(_Model):
    """How trajectories are played."""

    group_size: Annotated[int, Field(ge=2)] = 8
    """Trajectories of one prompt, compared with one another."""
    temperature: Annotated[float, Field(gt=0.0, le=5.0)] = 1.0
    top_p: _Share = 1.0
    max_turns: _Positive = 16
    max_turn_tokens: _Positive = 512
    """Generated tokens one turn may have."""
    buckets: Annotated[tuple[BucketSpec, ...], Field(min_length=1)] = (BucketSpec(),)
    gpu_memory: _Share = 0.9
    """Share of a GPU's memory vLLM takes."""
    kv_gib: _Positive = 1
    """KV cache of a server on a host without GPUs."""
    vllm_args: tuple[str, ...] = ()
    """Extra arguments of every server."""


class TrainingSpec(_Model):
    """Asynchronous GRPO."""

    groups_per_step: _Positive = 16
    learning_rate: Annotated[float, Field(gt=0.0, lt=1.0)] = 1e-6
    betas: tuple[_Beta, _Beta] = (0.9, 0.95)
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.0
    warmup_steps: _Count = 0
    clip_low: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.2
    clip_high: Annotated[float, Field(gt=0.0)] = 0.28
    tis_cap: Annotated[float, Field(ge=1.0)] = 2.0
    """Truncation of the importance weight trainer / rollout."""
    kl_coef: Annotated[float, Field(ge=0.0)] = 0.0
    """0 keeps no reference model."""
    max_grad_norm: Annotated[float, Field(gt=0.0)] = 1.0
    normalize_std: bool = True
    """Divide a group's advantages by its standard deviation; false is Dr. GRPO's choice."""
    micro_batch_tokens: _Positive = 8192
    """Padded tokens of one forward pass."""
    max_staleness: _Count = 1
    """Versions a trained token may be behind the step that trains it; 0 is on-policy."""
    checkpoint_every: _Positive = 10
    """Steps between checkpoints; the last step always has one."""
    keep_checkpoints: _Positive = 2
    sharding: Literal["auto", "fsdp2", "ddp"] = "auto"
    """auto: FSDP2 on GPUs, data parallel without."""
    stream: bool = False
    """Begin a step on the groups that are finished while others are still played."""


class WeightSyncSpec(_Model):
    """How a new version reaches the servers."""

    directory: str | None = None
    """Where hosts keep versions. Null: /dev/shm/libra-<user>."""
    keep_versions: Annotated[int, Field(ge=2)] = 2
    tolerance: Annotated[float, Field(gt=0.0)] = 0.001
    """Mean |difference| of the probe's log-probabilities above which a server is taken out."""
    timeout_s: Annotated[float, Field(gt=0.0)] = 120.0


class PlannerSpec(_Model):
    """Who decides which slot does what."""

    kind: Literal["libra", "fixed"] = "libra"
    """libra: hybrid slots change sides when that is predicted to pay. fixed: only when ordered."""
    plan_interval: _Positive = 10
    """Steps after which the planner looks again, if nothing made it look before."""
    min_rollout: _Positive = 1
    """Slots that always serve."""


class SchedulerSpec(_Model):
    """Who decides which server plays a turn."""

    policy: Literal[
        "libra",
        "round-robin",
        "least-loaded",
        "sticky-least-loaded",
        "attained-service",
        "sibling-history",
        "dynarl",
        "heddle",
        "cmlfq-published",
    ] = "libra"
    """libra: least expected cost, decided anew at every tool return. The others are rivals it is
    measured against (``libra bench``)."""


class Recipe(_Model):
    """One run, complete."""

    run: RunSpec = RunSpec()
    nodes: Annotated[tuple[NodeSpec, ...], Field(min_length=1)]
    model: ModelSpec
    environment: EnvironmentSpec = EnvironmentSpec()
    rollout: RolloutSpec = RolloutSpec()
    training: TrainingSpec = TrainingSpec()
    weight_sync: WeightSyncSpec = WeightSyncSpec()
    planner: PlannerSpec = PlannerSpec()
    scheduler: SchedulerSpec = SchedulerSpec()

    @model_validator(mode="after")
    def _check_rules(self) -> Recipe:
        problems = tuple(problems_between_fields(self))
        if problems:
            raise RuleError(problems)
        return self

    def node(self, name: str) -> NodeSpec:
        """The node of that name; ``KeyError`` if there is none."""
        for node in self.nodes:
            if node.name == name:
                return node
        raise KeyError(name)

    @property
    def trajectories_per_step(self) -> int:
        """Size of the global batch."""
        return self.training.groups_per_step * self.rollout.group_size
