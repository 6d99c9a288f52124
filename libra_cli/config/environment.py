"""The sections of a recipe that say what is played and who helps: environments with their tasks,
evaluations, agents, and a teacher."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, JsonValue, SecretStr, field_validator

from libra_cli.config.fields import Count, Positive, Section, one_or_several
from libra_cli.config.frozen_models import FrozenModelSpec, ModelsAddress, variable_of
from libra_cli.config.on_resume import ALL_MAY_CHANGE, MAY_CHANGE, fixed
from libra_cli.config.only_with import not_with, only_with
from libra_cli.config.problems import Problem
from libra_cli.config.sandbox import ROOM_S, SandboxSection
from libra_cli.config.secrets import environment_problems


def _as_workers(value: Any) -> Any:
    return {"processes": value} if isinstance(value, int) else value


class WorkersSpec(Section):
    """Processes that an environment runs in, one an episode, so that it cannot hold up the
    controller, and dies with all that it has leaked; in short, ``workers: 4``."""

    on_resume = MAY_CHANGE

    processes: Positive = 4
    """The number of processes that work at the same time, on each node."""
    nodes: Annotated[tuple[str, ...], one_or_several] = ()
    """The nodes whose Python runs the environment, by name. None: on the controller."""
    episodes: Positive | Literal["auto"] | dict[str, Positive] | None = None
    """The most episodes at once on each node, with their processes and sandboxes; a mapping has
    them by node. auto: as many as fit its free memory, if each fills its sandbox. Null: no limit.
    """

    def most_on(self, node: str) -> int | None:
        """The most episodes at once on a node, or with "" on the controller; None: no limit."""
        if isinstance(self.episodes, dict):
            return self.episodes.get(node)
        return self.episodes if isinstance(self.episodes, int) else None

    @property
    def most_episodes(self) -> int | None:
        """The most episodes at once everywhere; None: no limit, or one that hosts will tell."""
        found = [self.most_on(node) for node in self.nodes or ("",)]
        known = [number for number in found if number is not None]
        return sum(known) if len(known) == len(found) else None

    def problems(self) -> Iterator[Problem]:
        """Yield hosts without a limit, where others have one of their own."""
        if isinstance(self.episodes, dict) and set(self.episodes) != set(self.nodes):
            told = ", ".join(sorted(set(self.episodes) ^ set(self.nodes)))
            yield Problem(
                ("episodes", "nodes"), f"name different hosts ({told}): give a number for each"
            )
        if self.episodes == "auto" and not self.nodes:
            yield Problem(
                ("episodes", "nodes"),
                "is auto, which goes by what hosts tell: name nodes, or give a number",
            )


class TaskSourceSpec(Section):
    """Where tasks are read from: rows of one file, or of the files of one split in a directory."""

    on_resume = fixed("which group has which task follows from it")

    path: Annotated[str, MAY_CHANGE]
    """A file .jsonl, .jsonl.gz, .json or .parquet, or a directory of such, relative to the recipe;
    one row is one task. Of a run that goes on it may lie elsewhere, with the same rows."""
    split: str | None = None
    """The files of this name in a directory, with or without a number; or the rows of a file whose
    split or extra_info.split it is, or the key of a .json. Null: train in a directory, else all.
    """
    shuffle: bool = False
    """Take the rows in an order drawn by run.seed, another one each time they begin again."""
    limit: Positive | None = None
    """At most so many rows: the first, or with shuffle a sample drawn by run.seed. Null: all."""
    weight: Annotated[float, Field(gt=0.0)] = 1.0
    """The source's share of the groups is this over the sum of the weights of all sources."""


class McpServerSpec(Section):
    """A server of tools that speaks MCP, the Model Context Protocol: over streamable HTTP, or over
    the stdin and stdout of a command."""

    on_resume = fixed("the policy was trained with these tools")

    url: Annotated[str | None, MAY_CHANGE] = None
    """The URL of the server, for example http://127.0.0.1:8000/mcp."""
    command: Annotated[Annotated[tuple[str, ...], one_or_several] | None, MAY_CHANGE] = None
    """Instead of a URL: the program, with its arguments, that is started for each episode, where
    the environment runs, and ends with it."""
    env: Annotated[dict[str, str], MAY_CHANGE, only_with("command")] = {}
    """Variables of the command, beside PATH, HOME and the locale; {NAME} in a value is that one of
    ``environment.secrets``."""
    name: str = ""
    """If it is given, the model knows the server's tools as NAME_TOOL."""
    headers: Annotated[dict[str, str], MAY_CHANGE, only_with("url")] = {}
    """Sent with every request; {NAME} in a value is that one of ``environment.secrets``."""

    def problems(self) -> Iterator[Problem]:
        """Yield that it names no server, or two."""
        if (self.url is None) == (not self.command):
            yield Problem(
                ("url", "command"),
                "a server is reached by its URL or started by a command: give one of the two",
            )


def listed(key: str, kind: type[BaseModel]) -> BeforeValidator:
    """Take one or several of a kind; a string stands for one with this ``key``."""
    accepted: Any = str | kind

    def mappings(value: Any) -> Any:
        given = [] if value is None else value if isinstance(value, list | tuple) else [value]
        return tuple({key: one} if isinstance(one, str) else one for one in given)

    return BeforeValidator(mappings, json_schema_input_type=accepted | list[accepted] | None)


class EnvironmentSpec(Section):
    """What makes tasks, runs tools and scores answers: one environment, or a list of several, of
    which each group of trajectories plays one."""

    on_resume = fixed("the policy was trained in it, on tasks that the checkpoint counts")

    name: str = "pointer-chase"
    """A shipped environment, an entry point of group ``libra.environments``, or module:attr."""
    label: Annotated[str | None, MAY_CHANGE] = None
    """The environment's name in metrics, where there are several.
    Null: its name, with a number if needed.
    """
    weight: Annotated[float, Field(gt=0)] = 1.0
    """The environment's share of the groups is this over the sum of all weights."""
    args: dict[str, JsonValue] = {}
    """Keyword arguments of the environment's factory."""
    tasks: Annotated[tuple[TaskSourceSpec, ...], listed("path", TaskSourceSpec)] = ()
    """A path, a mapping with the keys below, or a list of either.
    None: the environment makes them.
    """
    tool_timeout_s: Annotated[float, Field(gt=0), MAY_CHANGE] = 10.0
    """Seconds that a tool call, a reset or a score may take."""
    retries: Annotated[Count, MAY_CHANGE] = 3
    """Fresh attempts at a trajectory whose environment or server broke. Of several, the most."""
    concurrency: Annotated[Positive, MAY_CHANGE] = 64
    """The most calls into it that run at the same time in the controller, without workers."""
    workers: Annotated[
        WorkersSpec | None,
        BeforeValidator(_as_workers, json_schema_input_type=Positive | WorkersSpec | None),
        MAY_CHANGE,
    ] = None
    """Null: in the controller's process, each call in a thread. A number: in processes."""
    sandbox: SandboxSection | None = None
    """What its commands run in, for an environment that runs some (``libra help sandboxes``)."""
    mcp: Annotated[tuple[McpServerSpec, ...], listed("url", McpServerSpec)] = ()
    """Servers of more tools: a URL, a mapping with the keys below, or a list of either."""
    secrets: Annotated[dict[str, SecretStr], MAY_CHANGE] = {}
    """NAME: ${VARIABLE} of the controller's environment; the factory gets them as ``secrets``."""

    @property
    def brings_tasks(self) -> bool:
        """Whether its tasks are the same whatever the seed, which draws their order at most."""
        return self.name in ("bfcl", "harbor", "tau2", "verifiers")

    def problems(self) -> Iterator[Problem]:
        """Yield a time of commands that the call would not wait for, and places by no limits."""
        auto = self.workers is not None and self.workers.episodes == "auto"
        if auto and (self.sandbox is None or self.sandbox.backend == "none"):
            yield Problem(
                ("workers.episodes", "sandbox"),
                "is auto, which goes by what sandbox.limits allow: give sandbox, or a number",
            )
        if self.sandbox is None:
            return
        seconds = self.sandbox.limits.time_s
        if seconds + ROOM_S > self.tool_timeout_s:
            yield Problem(
                ("tool_timeout_s", "sandbox.limits.time_s"),
                f"is {self.tool_timeout_s:g} s, and a command of the sandbox may take {seconds:g}: "
                f"at least {seconds + ROOM_S:g}, so that its end is told",
            )


class EvaluationSpec(Section):
    """What is played beside training to measure the policy, and never trained on: one mapping, or a
    list of several. The same servers play it, with what training leaves of their seats."""

    on_resume = ALL_MAY_CHANGE

    name: Annotated[str | None, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=64)] = (
        None
    )
    """The name in status, reports and metrics. Null: the environment's label or name, or held-out,
    with a number if needed.
    """
    environment: EnvironmentSpec | None = None
    """The environment to play. Null: the run's own; bfcl, harbor, tau2 and verifiers, which bring
    their tasks, need one with others here."""
    tasks: Annotated[tuple[TaskSourceSpec, ...], listed("path", TaskSourceSpec)] = ()
    """Files of tasks for the run's own environment, which are not those that it trains on. None:
    its environment makes them, by the seed below."""
    num_tasks: Annotated[int, Field(ge=1, le=1_000_000)] = 64
    """The number of tasks that are played, the first ones.
    Intervals narrow with its square root.
    """
    samples: Annotated[int, Field(ge=1, le=1024)] = 4
    """Trajectories of each task: pass@k is known up to this k."""
    seed: Count = 1_000_000
    """Draws its tasks: the same ones in runs of any run.seed, and not those of training."""
    every: Count | None = None
    """Steps from one evaluation to the next; 0: none but those below. Null:
    training.checkpoint_every, so that each checkpoint has its evaluation."""
    at_start: bool = True
    """Evaluate the policy that the run begins with."""
    at_end: bool = True
    """Evaluate the last one; the run ends when that is done."""
    temperature: Annotated[float, Field(ge=0.0, le=5.0)] = 1.0
    """Sampling temperature; 0 takes the likeliest token."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Nucleus sampling: the share of probability that is sampled from. It may be below 1 here."""
    success: float = 1.0
    """A trajectory whose reward is at least this passes."""


def evaluation_names(specs: Sequence[EvaluationSpec]) -> tuple[str, ...]:
    """Return the names of the evaluations, with numbers where two would be equal."""
    names: list[str] = []
    for one in specs:
        played = one.environment
        first = (
            one.name or (played and (played.label or played.name.replace(":", "."))) or "held-out"
        )
        name, number = first, 2
        while name in names:
            name, number = f"{first}-{number}", number + 1
        names.append(name)
    return tuple(names)


_FOR_COMMANDS = only_with("command", why="it is for a command")


class AgentSpec(Section):
    """Somebody's agent, which plays the tasks in place of libra's own loop: it asks for turns over
    HTTP, as it would ask OpenAI or Anthropic. Exactly one of function, command and external."""

    on_resume = MAY_CHANGE

    function: str | None = None
    """module:name of a function that is called with task, base_url, api_key and model, and returns
    a reward or nothing."""
    command: Annotated[tuple[str, ...], one_or_several, Field(min_length=1)] | None = None
    """A program and its arguments, started for every trajectory; OPENAI_BASE_URL, OPENAI_API_KEY,
    ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY and LIBRA_TASK (a JSON file) tell it what to do."""
    external: bool = False
    """Agents that live elsewhere fetch their tasks from the run's endpoint."""
    directory: Annotated[
        str | None, not_with("external", True, why="agents elsewhere do not use it")
    ] = None
    """A directory, relative to the recipe: a copy is the command's working directory, or the
    function's module is looked for there. Null: an empty one, or what is installed."""
    env: Annotated[dict[str, str], _FOR_COMMANDS] = {}
    """Environment variables of the command. No secrets."""
    secrets: Annotated[dict[str, SecretStr], _FOR_COMMANDS] = {}
    """NAME: ${VARIABLE} of the controller's environment; the command has them in its own."""
    match: Literal["strict", "position"] = "strict"
    """When a request goes on with a turn that it gives back: strict wants its words, position only
    its place, for agents that rewrite what the model said."""
    max_branches: Positive = 16
    """The most sequences that a trajectory may become where an agent leaves its conversation."""
    timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """Seconds that an agent may take until its next request or its end."""
    nodes: Annotated[tuple[str, ...], one_or_several, _FOR_COMMANDS] = ()
    """The nodes that run commands, by name. None: the controller runs them."""
    served: Annotated[tuple[str, ...], one_or_several] = ()
    """Names of models that the run serves itself (``models``) and agents may ask: a command has
    LIBRA_MODEL_<NAME>_URL, and its own key opens it."""
    in_sandbox: Annotated[bool, _FOR_COMMANDS] = False
    """Whether commands run in the sandbox of the environment's task, beside the files that are
    scored; environment.sandbox says what that is. HOME is then the copy of ``directory``."""
    concurrency: Positive = 64
    """The most agents that libra runs at the same time, on each node."""

    def problems(self) -> Iterator[Problem]:
        """Yield that it is not one kind of agent, and what that kind cannot have."""
        kinds = {"function": self.function, "command": self.command, "external": self.external}
        given = [name for name, value in kinds.items() if value]
        if len(given) != 1:
            yield Problem(
                ("", *kinds),
                "needs exactly one of function, command and external, "
                + (f"{' and '.join(given)} are given" if given else "none is given"),
            )
        if self.function is not None and ":" not in self.function:
            yield Problem(
                ("function",),
                f"is {self.function!r}, not an import path such as my_agents.search:agent",
            )
        if self.in_sandbox and self.nodes:
            yield Problem(
                ("nodes", "in_sandbox"),
                "is given, but an agent in a sandbox runs where the environment has that: leave "
                "it out",
            )
        variables = [variable_of(name) for name in self.served]
        for index, variable in enumerate(variables):
            if variable in variables[:index]:
                yield Problem((f"served[{index}]",), f"and an earlier one would both be {variable}")
        yield from environment_problems(self.env, "agent.secrets")


class TeacherSpec(Section):
    """A model on a vLLM server, which says how likely it finds every token that the policy has
    generated; ``training.loss: distill`` makes the policy's distribution that of the teacher.
    It has the policy's tokenizer, which is checked."""

    on_resume = MAY_CHANGE

    url: Annotated[
        str | None, not_with("model.images", True, why="it is asked about tokens alone")
    ] = None
    """The base URL of a server of yours, for example http://gpu-09:8000/v1; /completions is added.
    The controller must reach it.
    """
    served: Annotated[
        str | None, not_with("model.images", True, why="it is asked about tokens alone")
    ] = None
    """Instead of a URL: the name of a model that the run serves itself (``models``)."""
    model: Annotated[str | None, only_with("url")] = None
    """The model's name at the server. Null: the first that the server lists."""
    api_key: Annotated[SecretStr | None, only_with("url")] = None
    """The server's key, as ${VARIABLE} of the controller's environment. Null: none is sent."""
    kl_coef: Annotated[float, Field(gt=0.0)] = 1.0
    """A token's advantage is this times log(teacher / policy), the reverse KL divergence at the
    token with the sign turned. Tinker's kl_penalty_coef, prime-rl's teacher_tau."""
    advantage_coef: Annotated[float, Field(ge=0.0)] = 0.0
    """The weight of the advantage by ``training.advantage``, which is of rewards, beside the
    divergence. 0 leaves rewards out of the loss. prime-rl's adv_tau.
    """
    concurrency: Positive = 32
    """The most requests at the same time."""
    timeout_s: Annotated[float, Field(gt=0.0)] = 120.0
    """Seconds that a request may take before it is tried again."""
    patience_s: Annotated[float, Field(gt=0.0)] = 1800.0
    """A run in which the teacher has answered nothing for so long ends as failed, to be resumed.
    Until then trajectories wait for it, and status says so."""

    def problems(self) -> Iterator[Problem]:
        """Yield a teacher that is nowhere, or in two places."""
        if (self.url is None) == (self.served is None):
            yield Problem(
                ("", "url", "served"), "needs exactly one of url and served, where it answers"
            )

    def problems_beside(self, models: Sequence[FrozenModelSpec], max_len: int) -> Iterator[Problem]:
        """Yield that its model cannot take the policy's longest trajectories and a token more."""
        for index, one in enumerate(models):
            if one.name == self.served and one.max_len is not None and one.max_len <= max_len:
                yield Problem(
                    (f"models[{index}].max_len", "model.max_len"),
                    f"is {one.max_len}, and a teacher is asked about trajectories of model.max_len "
                    f"and one token more: at least {max_len + 1}",
                )

    def at(self, address: ModelsAddress) -> TeacherSpec:
        """Return the same with the endpoint's URL and key, if it is a model of the run."""
        if (name := self.served) is None:
            return self
        told = {"url": address.url_of(name), "model": name, "api_key": address.token}
        return self.model_copy(update={**told, "served": None})

    @property
    def place(self) -> str:
        """Where it answers, for people."""
        return self.url or f"models: {self.served}"

    @field_validator("url")
    @classmethod
    def _check_url(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith(("http://", "https://")):
            raise ValueError(f"must begin with http:// or https://, got {value!r}")
        return value
