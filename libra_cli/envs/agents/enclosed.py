"""A command that plays as an agent within the sandbox of the environment whose task it has.

It begins in the directory that a model would work in, with its own files elsewhere:

    $HOME               a copy of the recipe's ``agent.directory``
    $LIBRA_TASK         the task, beside it

Its only way out is one port of the sandbox's loopback, behind which the controller's endpoint is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from libra_cli.envs.agents.bridge import Bridge
from libra_cli.envs.agents.command import LAST_WORDS, CommandEnd
from libra_cli.envs.agents.workplace import CommandJob, told_variables
from libra_cli.envs.sandbox.helper.commands import FLOODED
from libra_cli.envs.sandbox.helper.place import ALL_ENDED
from libra_cli.envs.sandbox.sandbox import Completed, Sandbox

HOME = "/var/tmp/agent"
TASK = "/var/tmp/agent-task.json"
_KILLED = 128 + 9


@dataclass(frozen=True, slots=True)
class AgentPlace:
    """Where an agent works on the task of an environment."""

    sandbox: Sandbox
    directory: str
    """What it begins in."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables of the task."""
    time_s: float = math.inf
    """Seconds that the task gives to whoever works on it, who is then ended."""


@dataclass(frozen=True, slots=True)
class EnclosedJob:
    """What an agent in a sandbox is started with."""

    command: Sequence[str]
    env: Mapping[str, str]
    """The recipe's variables, secrets included."""
    files: Sequence[tuple[str, int, bytes]]
    """Path below ``HOME``, mode and content of each of its files."""
    task: str
    """The task as JSON."""
    port: int
    """Where the controller's endpoint listens on the loopback of this machine."""
    api_key: str
    model: str
    timeout_s: float
    models: Sequence[str] = ()
    """Names of the run's frozen models that it may ask at the endpoint."""

    def as_dict(self) -> dict[str, Any]:
        """Return its fields, which another process makes it of."""
        return {one.name: getattr(self, one.name) for one in fields(self)}

    def play(self, place: AgentPlace) -> CommandEnd:
        """Run the command in a sandbox to its end; what it leaves there goes on.

        An agent that was killed with everything in the sandbox has ended well: the model it asked
        has done that, or has used too much memory. So has one when the time of the task is over.

        Raises:
            OSError: its files cannot be written.
            SandboxBroken: the sandbox is closed, or its host can do no more.
        """
        sandbox = place.sandbox
        for path, mode, data in self.files:
            sandbox.write(f"{HOME}/{path}", data, mode=mode)
        sandbox.write(TASK, self.task.encode())
        listener = sandbox.listen()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/t/{self.api_key}"
        told = CommandJob("", self.task, url, self.api_key, self.model, self.models)
        env = {**place.env, **told_variables(told, HOME, TASK), **self.env}
        with Bridge(listener, self.port):
            seconds = min(self.timeout_s, place.time_s)
            done = sandbox.run(list(self.command), timeout_s=seconds, cwd=place.directory, env=env)
        end = _end_of(done, sandbox)
        return replace(end, code=0) if done.timed_out and seconds == place.time_s else end


def _end_of(done: Completed, sandbox: Sandbox) -> CommandEnd:
    note = done.note
    if done.code == _KILLED and not note:  # by the sandbox's watch, which says so afterwards
        note = sandbox.run(":").note
    said = f"{done.stdout}\n{done.stderr}".strip()[-LAST_WORDS:]
    words = "; ".join(filter(None, (said, note, "its time was over" if done.timed_out else "")))
    code = 0 if ALL_ENDED in note else done.code
    return CommandEnd(code, words, flooded=FLOODED in note)
