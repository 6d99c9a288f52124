"""The environment ``harbor``: tasks in the format of Harbor and Terminal-Bench 2, in a sandbox.

A task is ``{"task": NAME}``, the name of a directory in ``tasks``. An episode begins with the
files of the task's image; the model works with ``bash`` and an editor; once it has said that it is
done, the task's tests are copied in, and what they write is the reward (``libra help harbor``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from libra_cli.config.errors import EnvironmentBroken
from libra_cli.envs.agents.enclosed import AgentPlace
from libra_cli.envs.gyms.packages import drawn
from libra_cli.envs.harbor.builder import Builder
from libra_cli.envs.harbor.dataset import TaskFilter, TaskSet, Unplayable, read_tasks
from libra_cli.envs.harbor.episode import TOOLS, TaskEpisode, resolved
from libra_cli.envs.harbor.image import Image, read_image
from libra_cli.envs.harbor.podman import PodmanImage
from libra_cli.envs.harbor.task_file import TASK_FILE, HarborTask
from libra_cli.envs.harbor.task_sandbox import TaskSandbox
from libra_cli.envs.paths import HOST, PODMAN
from libra_cli.envs.protocol import Message, Task, ToolCall, ToolSchema
from libra_cli.envs.sandbox.sandboxes import Sandboxes
from libra_cli.envs.sandbox.spec import SandboxSpec
from libra_cli.envs.shell.tools import SCHEMAS

CACHE = "~/.cache/libra/harbor"
INSTRUCTIONS = (
    "You work in a shell, in the directory {workdir}. When the task is done, say so without "
    "calling a tool."
)


class Harbor:
    """The environment of one task.

    ``tasks`` is a directory of task directories. ``base`` is what every image is made upon: host,
    a directory with the root of an unpacked image, or podman, which fetches what FROM names;
    ``bases`` names one for each FROM instead.
    ``names``, ``difficulty`` and ``category`` choose tasks; ``unplayable: skip`` leaves out those
    that cannot be played. ``reward`` is the name of the reward, where tests write several.
    ``variables`` are what a task's ``${NAME}`` stand for. With
    ``keep_processes`` what the model has left running goes on while the tests run, for tasks that
    want a server. ``cache`` is where images are kept.

    A command may take the sandbox's ``limits.time_s``, and all of them together the agent's time of
    the task, in which the model's own time does not count.

    Raises:
        EnvironmentBroken: there is no task, or one that cannot be played.
    """

    def __init__(
        self,
        tasks: str,
        *,
        sandbox: Sandboxes | None = None,
        base: str | None = None,
        bases: Mapping[str, str] | None = None,
        names: Sequence[str] | str | None = None,
        difficulty: Sequence[str] | str | None = None,
        category: Sequence[str] | str | None = None,
        unplayable: Unplayable = "error",
        reward: str = "reward",
        variables: Mapping[str, str] | None = None,
        keep_processes: bool = False,
        cache: str = CACHE,
    ) -> None:
        self._spec = (sandbox or Sandboxes.of({})).spec
        self._base, self._bases = base, dict(bases or {})
        self._cache = Path(cache).expanduser()
        self._reward = reward
        self._keep_processes = keep_processes
        self._variables = dict(variables or {})
        chosen = TaskFilter(_several(names), _several(difficulty), _several(category))
        self._tasks: TaskSet = read_tasks(
            Path(tasks).expanduser(), chosen, network=self._spec.network, unplayable=unplayable
        )
        self._episode: TaskEpisode | None = None

    tools: Sequence[ToolSchema] = tuple(SCHEMAS[name] for name in TOOLS)

    @property
    def tasks_played(self) -> TaskSet:
        """The tasks of the directory that are meant, and why others cannot be played."""
        return self._tasks

    def task(self, index: int, seed: int) -> Task:
        """Return which task is number ``index``; as many as there are go by before one returns."""
        names = list(self._tasks.playable)
        return {"task": names[drawn(index, seed, len(names))]}

    def preparations(self) -> list[Task]:
        """Return the tasks whose images were not made on this host yet."""
        found: list[Task] = []
        for name, task in self._tasks.playable.items():
            image = _image_of(task)
            if not self._builder_of(task, image).is_made(image):
                found.append({"task": name})
        return found

    def prepare(self, task: Task) -> None:
        """Make the image of a task, unless it was made before.

        Raises:
            EnvironmentBroken: there is no such task, or its image cannot be made.
        """
        found = self._tasks.named(task.get("task"))
        image = _image_of(found)
        self._fetch(image)
        self._builder_of(found, image).make(image, found.build_timeout_s)

    def reset(self, task: Task, seed: int) -> list[Message]:
        """Open a sandbox with the task's files, and begin with its instruction.

        Raises:
            EnvironmentBroken: there is no such task, or its image cannot be made.
        """
        found = self._tasks.named(task.get("task"))
        image = _image_of(found)
        base = self._fetch(image)
        env = base.env if base else {}
        env |= {**image.env, **resolved(found, found.env, self._variables)}
        self._workdir = found.workdir or image.workdir
        opened = self._builder_of(found, image).opened(image, found.build_timeout_s)
        inside = TaskSandbox(opened, self._workdir, env)
        self._episode = TaskEpisode(
            found, inside, self._variables, keep_processes=self._keep_processes
        )
        return [self._told()]

    def step(self, call: ToolCall) -> str:
        """Do what the model asks for; the episode ends when the agent's time is over."""
        return self._playing.call(call)

    def reply(self, answer: str) -> list[Message] | None:
        """Test the step of a task that is in steps, and say what the next one is."""
        return [self._told()] if self._playing.next_step() else None

    def agent_place(self) -> AgentPlace:
        """Where an agent works in the model's place: in the task's directory, as its user."""
        return self._playing.agent_place()

    def score(self, answer: str) -> float:
        """Copy the tests in, run them, and return what they wrote."""
        return self._playing.finish().reward(self._reward)

    def metrics(self) -> Mapping[str, float]:
        """Return whether the tests wrote a reward, rewards by name where there are several, and of
        a task in steps whether all that were begun could be set up."""
        playing, rewards = self._playing, self._playing.result.rewards
        told = {} if playing.set_up is None else {"set_up": float(playing.set_up)}
        told["verified"] = float(bool(rewards))
        return {**told, **(rewards if len(rewards) > 1 else {})}

    def solve(self) -> str:
        """Do what the reference solution does in the model's place; return why it failed, if so.

        Raises:
            EnvironmentBroken: the task has no solution.
        """
        return self._playing.solve()

    @property
    def said(self) -> str:
        """The end of what the tests printed."""
        return self._playing.result.said

    def close(self) -> None:
        """End the sandbox and all that runs in it."""
        if self._episode is not None:
            self._episode.close()

    def _told(self) -> Message:
        where = INSTRUCTIONS.format(workdir=self._workdir)
        return {"role": "user", "content": f"{self._playing.instruction}\n\n{where}"}

    @property
    def _playing(self) -> TaskEpisode:
        if self._episode is None:
            raise EnvironmentBroken("environment 'harbor': nothing is played before reset")
        return self._episode

    def _builder_of(self, task: HarborTask, image: Image) -> Builder:
        base = self._fetched(image)
        env = base.env if base and base.is_unpacked else {}
        return Builder(self._cache, self._spec_of(task, image), env)

    def _fetched(self, image: Image) -> PodmanImage | None:
        """What podman is to unpack for an image, or has unpacked; None where it does not."""
        is_podmans = self._bases.get(image.base, self._base) == PODMAN
        return PodmanImage(image.base, self._cache) if is_podmans else None

    def _fetch(self, image: Image) -> PodmanImage | None:
        if (base := self._fetched(image)) is not None:
            base.unpack()
        return base

    def _spec_of(self, task: HarborTask, image: Image) -> SandboxSpec:
        """What the recipe allows, on the task's base, and no more than the task asks for."""
        limits = self._spec.limits
        limits = replace(
            limits,
            memory_mb=min(limits.memory_mb, task.memory_mb),
            disk_mb=min(limits.disk_mb, task.storage_mb),
            cpu_s=max(limits.cpu_s, math.ceil(task.verifier_timeout_s)),
        )
        root = self._root(image)
        return replace(self._spec, root=root, user=0, limits=limits)

    def _root(self, image: Image) -> str | None:
        base = self._bases.get(image.base, self._base)
        if base is None:
            raise EnvironmentBroken(
                f"{image.where}: FROM {image.base}: no base has this name",
                hint=f"environment.args: {{bases: {{'{image.base}': DIR}}}}, {{base: podman}} or "
                "{base: host}; libra tasks check takes that as --base",
            )
        if base == HOST:
            return None
        if (fetched := self._fetched(image)) is not None:
            return str(fetched.root.resolve())
        if not (root := Path(base).expanduser()).is_dir():
            raise EnvironmentBroken(f"the base {base} of {image.base} is no directory")
        return str(root.resolve())


def _image_of(task: HarborTask) -> Image:
    """The image of the Dockerfile, or the one that the task names where it has no Dockerfile."""
    dockerfile = task.environment / "Dockerfile"
    if task.docker_image and not dockerfile.exists():
        return Image(str(task.directory / TASK_FILE), task.docker_image)
    return read_image(task.environment)


def _several(given: Sequence[str] | str | None) -> tuple[str, ...] | None:
    return None if given is None else (given,) if isinstance(given, str) else tuple(given)
