"""The environment ``verifiers`` and the agent that plays its tasks: tasksets of verifiers 0.4.

A taskset of verifiers brings its own loop, its tools and its rewards, and asks a model for turns
over HTTP. So it is an agent for libra, and the environment only counts its tasks::

    environment:
      name: verifiers
      args: {taskset: my-taskset, config: {difficulty: hard}}
    agent:
      function: libra_cli.envs.adapters.verifiers:agent

``taskset`` is the id of an installed package, as in ``vf-eval``; ``config`` are the keys of its
config. Group n plays task n, and a taskset that ends begins again.

All episodes are played in one process, without one for each as verifiers' own harnesses have. Tools
of ``Taskset.toolsets`` are started once; those of ``Task.toolsets`` once an episode, which takes
seconds. The reward is the sum of the task's weighted rewards. A limit of the recipe ends an episode
as a full context does, and what was done is scored; anything else that fails is tried again.

Tasks that need a container, and environments with several agents or a user of their own, are not
played. verifiers up to 0.3 is another API.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from libra_cli.config.errors import EnvironmentBroken
from libra_cli.envs.protocol import Message, Task, ToolCall, ToolFailed, ToolSchema

AGENT = "libra_cli.envs.adapters.verifiers:agent"
_INSTALL = 'uv pip install "verifiers>=0.4,<0.5"'


class VerifiersTasks:
    """Names the tasks of a taskset; ``agent`` plays and scores them.

    Raises:
        EnvironmentBroken: verifiers is not installed, or its version is another.
    """

    def __init__(self, taskset: str, config: Mapping[str, Any] | None = None) -> None:
        _check_installed()
        self._taskset = taskset
        self._config = dict(config or {})
        self.tools: tuple[ToolSchema, ...] = ()

    def task(self, index: int, seed: int) -> Task:
        """Return the taskset, its config and ``index`` as a task; the seed changes nothing."""
        return {"taskset": self._taskset, "config": self._config, "index": index}

    def reset(self, task: Task, seed: int) -> list[Message]:
        """Return a prompt that nobody reads: the taskset's own is sent by the agent."""
        return [{"role": "user", "content": f"Task {task['index']} of {task['taskset']}."}]

    def step(self, call: ToolCall) -> str:
        raise ToolFailed("the tools are the agent's")

    def score(self, answer: str) -> float:
        """Refuse: the agent knows the reward.

        Raises:
            EnvironmentBroken: always.
        """
        raise EnvironmentBroken(
            "environment 'verifiers' has no score of its own: the taskset has",
            hint=f"agent: {{function: {AGENT}}}",
        )


async def agent(task: Mapping[str, Any], base_url: str, api_key: str, model: str) -> float:
    """Play the task that ``VerifiersTasks`` has named and return its reward.

    Raises:
        RuntimeError: verifiers could not play it, or not score it.
    """
    # The import takes seconds, and other agents share the event loop.
    play = await asyncio.to_thread(
        lambda: importlib.import_module("libra_cli.envs.adapters.verifiers_play").play
    )
    return float(await play(task["data"], base_url, api_key, model))


def _check_installed() -> None:
    try:
        version = metadata.version("verifiers")
    except metadata.PackageNotFoundError:
        raise EnvironmentBroken("verifiers is not installed here", hint=_INSTALL) from None
    if not version.startswith("0.4."):
        raise EnvironmentBroken(f"verifiers {version} is installed, not 0.4", hint=_INSTALL)
