"""The environment ``shell``: a task in words, a sandbox to do it in, and a check of what came.

A row of the tasks file:

    instruction    what is to be done, or a list of messages
    setup          a command, or several, run before the model begins; none may fail
    files          {PATH: TEXT} that the sandbox begins with
    check          a command that runs once the model is done; exit code 0 is a reward of 1
    check_files    {PATH: TEXT} that are written right before the check, and the model never sees;
                   what it has put in their place goes, or else it has no reward
    reward_file    a path: the check writes a number into it, which is the reward instead, unless
                   the check takes too long; what lies there before it goes

Relative paths are of the directory in which everything begins, ``/work``. What the check says is
kept from the model, and what the model has left running is ended before it. The tools are ``bash``,
``python`` and ``editor``, or those that the recipe's ``environment.args: {tools: [...]}`` names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from libra_cli.config.errors import EnvironmentBroken
from libra_cli.envs.agents.enclosed import AgentPlace
from libra_cli.envs.protocol import Message, Task, ToolCall, ToolSchema
from libra_cli.envs.sandbox.sandbox import Completed, Sandbox
from libra_cli.envs.sandbox.sandboxes import Sandboxes
from libra_cli.envs.shell.tools import SandboxTools, ToolText

TOOLS = ("bash", "python", "editor")
_REWARD_BYTES = 64


class ShellTasks:
    """The environment of one task in a sandbox.

    ``tools`` are some of bash, python and editor. ``instructions`` follow every instruction.
    ``output_chars`` is how much of a command's output the model reads. With ``keep_processes`` what
    the model has left running goes on during the check, for tasks that want a server.

    Raises:
        EnvironmentBroken: a tool is unknown.
    """

    def __init__(
        self,
        sandbox: Sandboxes | None = None,
        tools: Sequence[str] = TOOLS,
        instructions: str = "",
        output_chars: int = 8_000,
        keep_processes: bool = False,
    ) -> None:
        unknown = sorted(set(tools) - set(TOOLS))
        if unknown:
            raise EnvironmentBroken(
                f"environment 'shell': no tool {unknown[0]!r}", hint=f"tools: [{', '.join(TOOLS)}]"
            )
        self._sandboxes = sandbox or Sandboxes()
        self._names = tuple(tools)
        self._instructions = instructions
        self._text = ToolText(output_chars)
        self._keep_processes = keep_processes
        self._task: Task = {}
        self._sandbox: Sandbox | None = None
        self._tools: SandboxTools | None = None
        self._passed = False

    @property
    def tools(self) -> Sequence[ToolSchema]:
        """The schemas of the tools, from ``reset`` on."""
        return self._tools.schemas if self._tools is not None else ()

    def task(self, index: int, seed: int) -> Task:
        """Refuse: tasks are rows of a file.

        Raises:
            EnvironmentBroken: always.
        """
        raise EnvironmentBroken(
            "environment 'shell' makes no tasks of its own",
            hint="environment: {name: shell, tasks: FILE.jsonl}, see libra help sandboxes",
        )

    def reset(self, task: Task, seed: int) -> list[Message]:
        """Open a sandbox, set the task up, and begin with its instruction.

        Raises:
            EnvironmentBroken: the row lacks something, or its setup fails.
            SandboxBroken: there is no sandbox.
        """
        self._task = task
        if not _texts(task, "check"):
            raise _wrong(task, "a row needs an instruction and a check")
        sandbox = self._sandbox = self._sandboxes.open()
        self._tools = SandboxTools(sandbox, self._names, text=self._text)
        for path, data in self._files("files").items():
            try:
                sandbox.write(path, data)
            except OSError as error:
                raise _wrong(task, f"{path}: {error.strerror}") from error
        for command in _texts(task, "setup"):
            done = sandbox.run(command)
            if done.code:
                raise _wrong(task, f"setup {command!r} {_how(done)}")
        messages = _messages(task)
        if self._instructions:
            messages[-1]["content"] += f"\n\n{self._instructions}"
        return messages

    def step(self, call: ToolCall) -> str:
        """Do what the model asks for; raises ToolFailed where it has to do better."""
        assert self._tools is not None
        return self._tools.step(call)

    def agent_place(self) -> AgentPlace:
        """Where an agent works in the model's place."""
        return AgentPlace(self._playing, self._playing.work)

    def score(self, answer: str) -> float:
        """Write the check's files, run it, and return the reward: 1 if it exits with code 0."""
        sandbox = self._playing
        if not self._keep_processes:
            sandbox.end_processes()
        if not self._is_ready():
            return 0.0
        done = [sandbox.run(command) for command in _texts(self._task, "check")]
        self._passed = not any(one.code or one.timed_out for one in done)
        path = self._task.get("reward_file")
        if path and not any(one.timed_out for one in done):
            return self._reward_in(str(path))
        return float(self._passed)

    def metrics(self) -> Mapping[str, float]:
        """Return whether the check has passed."""
        return {"passed": float(self._passed)}

    def close(self) -> None:
        """End the sandbox and all that runs in it."""
        if self._sandbox is not None:
            self._sandbox.close()

    @property
    def _playing(self) -> Sandbox:
        assert self._sandbox is not None
        return self._sandbox

    def _files(self, key: str) -> dict[str, bytes]:
        files = self._task.get(key) or {}
        return {path: str(text).encode(errors="surrogateescape") for path, text in files.items()}

    def _is_ready(self) -> bool:
        """Write the check's files in place of the model's, and say whether all is as it should be.

        Only the model can be why it is not; by a link one of them could be another of them. What
        lies where the check writes its reward goes, or it would count if the check cannot write.
        """
        sandbox, files = self._playing, self._files("check_files")
        old = [*files, *_texts(self._task, "reward_file")]
        if old and sandbox.run(["rm", "-f", "--", *old]).code:
            return False
        try:
            for path, data in files.items():
                sandbox.write(path, data)
            return all(sandbox.read(path, len(data) + 1) == data for path, data in files.items())
        except OSError:
            return False

    def _reward_in(self, path: str) -> float:
        try:
            number = float(self._playing.read(path, _REWARD_BYTES).decode())
        except (OSError, ValueError):
            return 0.0  # the model may have kept the check from running
        return number if math.isfinite(number) else 0.0


def _texts(task: Task, key: str) -> list[str]:
    value = task.get(key) or []
    return [value] if isinstance(value, str) else [str(one) for one in value]


def _messages(task: Task) -> list[Message]:
    said: Any = task.get("instruction")
    if isinstance(said, str) and said:
        return [{"role": "user", "content": said}]
    if isinstance(said, list) and said and all(isinstance(one, Mapping) for one in said):
        return [{"role": one["role"], "content": str(one["content"])} for one in said]
    raise _wrong(task, "a row needs an instruction and a check")


def _how(done: Completed) -> str:
    said = (done.stderr or done.stdout).strip()[-500:]
    how = "took too long" if done.timed_out else f"ended with code {done.code}"
    return f"{how}: {said}" if said else how


def _wrong(task: Task, why: str) -> EnvironmentBroken:
    text = repr(dict(task))
    shown = text if len(text) <= 200 else f"{text[:200]}..."
    return EnvironmentBroken(f"environment 'shell': {why}: {shown}")
