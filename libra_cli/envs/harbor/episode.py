"""One episode of a task: its steps in a sandbox, one after the other, and what the tests said."""

from __future__ import annotations

import math
import posixpath
import time
from collections.abc import Mapping

from libra_cli.config.errors import EnvironmentBroken
from libra_cli.envs.agents.enclosed import AgentPlace
from libra_cli.envs.harbor.dockerfile import substituted, unset_in
from libra_cli.envs.harbor.task_file import TASK_FILE, HarborTask
from libra_cli.envs.harbor.task_sandbox import TaskSandbox, said
from libra_cli.envs.harbor.verifier import VerifierResult, rolled_up, solve, verify
from libra_cli.envs.protocol import Finished, ToolCall
from libra_cli.envs.shell.tools import SandboxTools

TOOLS = ("bash", "editor")
"""The tools of ``envs.shell.tools`` that a model has."""


class TaskEpisode:
    """A task that is being played; a task that is not in steps is one step."""

    def __init__(
        self,
        task: HarborTask,
        inside: TaskSandbox,
        variables: Mapping[str, str],
        *,
        keep_processes: bool,
    ) -> None:
        """Play a task in a sandbox that has its image's files.

        Raises:
            EnvironmentBroken: the first step cannot be set up.
        """
        self._steps = task.steps or (task,)
        self._only_final = task.only_final
        self._inside = inside
        self._variables = variables
        self._keep_processes = keep_processes
        self._results: list[VerifierResult] = []
        self._at = 0
        self._set_up = True
        #: Before the model has done anything: later its absence is the model's doing.
        self._has_tar = not inside.run("command -v tar").code
        if failed := self._begin():
            self.close()
            raise EnvironmentBroken(failed)

    @property
    def instruction(self) -> str:
        """What the model is told at the beginning of the present step."""
        return self._step.instruction

    @property
    def result(self) -> VerifierResult:
        """What the tests have said until now."""
        return rolled_up(self._results, only_final=self._only_final)

    @property
    def set_up(self) -> bool | None:
        """Whether the ``setup.sh`` of every step that was begun succeeded; None of a single one."""
        return self._set_up if len(self._steps) > 1 else None

    def call(self, call: ToolCall) -> str:
        """Do what the model asks for, and return what it reads.

        Raises:
            Finished: the calls have taken as long as the step allows.
            ToolFailed: the model should read the message instead.
        """
        left = (self._step.agent_timeout_s or math.inf) - self._worked_s
        if left <= 0:
            raise Finished("The time for this task is over.")
        sandbox = self._inside.sandbox
        seconds = min(left, sandbox.spec.limits.time_s)
        tools = SandboxTools(sandbox, TOOLS, timeout_s=seconds, shell=self._shell)
        if "path" in call.arguments:
            path = posixpath.join(self._inside.workdir, str(call.arguments["path"]))
            call = ToolCall(call.name, {**call.arguments, "path": path})
        began = time.monotonic()
        try:
            return tools.step(call)
        finally:
            self._worked_s += time.monotonic() - began

    def agent_place(self) -> AgentPlace:
        """Where an agent works on the task.

        Raises:
            EnvironmentBroken: the task is in steps, and an agent is asked once.
        """
        if len(self._steps) > 1:
            raise EnvironmentBroken(
                f"{self._step.directory / TASK_FILE}: an agent cannot play a task in steps",
                hint="environment.args: {names: [...]} chooses others",
            )
        inside, seconds = self._inside, self._step.agent_timeout_s or math.inf
        return AgentPlace(inside.sandbox, inside.directory(), inside.env, seconds)

    def next_step(self) -> bool:
        """Test the present step, and begin the next one; False if that was the last, or too bad.

        It is False, too, if the model keeps the next one's files out; that one is tested as it is.
        Where the next one's setup.sh fails, by what the model has left, that one counts as 0.
        """
        if self._at + 1 >= len(self._steps):
            return False
        if not self._test().reaches(self._step.min_reward):
            return False
        self._at += 1
        self._shell.close()
        try:
            failed = self._begin()
        except OSError:
            return False
        self._set_up = not failed
        if failed:
            self._results.append(VerifierResult(said=failed))
        return self._set_up

    def finish(self) -> VerifierResult:
        """Test the present step unless that was done, and return the result of the whole task."""
        if len(self._results) <= self._at:
            self._test()
        return self.result

    def solve(self) -> str:
        """Do what the reference solution of the present step does; return why it failed, if so.

        Raises:
            EnvironmentBroken: there is no solution.
        """
        return solve(self._step, self._inside, self._resolved(self._step.solution_env))

    def close(self) -> None:
        """End the sandbox and all that runs in it."""
        self._shell.close()
        self._inside.sandbox.close()

    @property
    def _step(self) -> HarborTask:
        return self._steps[self._at]

    def _begin(self) -> str:
        """Copy in what a step begins with, run its setup.sh, and return why that failed, if so."""
        self._worked_s = 0.0
        self._shell = self._inside.shell()
        begins_with = self._step.directory / "workdir"
        if len(self._steps) == 1 or not begins_with.is_dir():
            return ""
        self._inside.put(begins_with, self._inside.workdir)
        done = self._inside.run("! [ -f setup.sh ] || { bash setup.sh && rm setup.sh; }")
        return f"{begins_with / 'setup.sh'}: {said(done) or done.code}" if done.code else ""

    def _test(self) -> VerifierResult:
        if not self._has_tar:
            raise EnvironmentBroken(
                f"{self._step.directory}: its image has no tar, by which tests are copied in",
                hint="environment.args: {names: [...]} chooses other tasks",
            )
        if not self._keep_processes:
            self._inside.sandbox.end_processes()
        env = self._resolved(self._step.verifier_env)
        self._results.append(verify(self._step, self._inside, env))
        return self._results[-1]

    def _resolved(self, env: Mapping[str, str]) -> dict[str, str]:
        return resolved(self._step, env, self._variables)


def resolved(
    task: HarborTask, env: Mapping[str, str], variables: Mapping[str, str]
) -> dict[str, str]:
    """Return a task's variables, with ``${NAME}`` replaced by a value that is given, or a default.

    Raises:
        EnvironmentBroken: a name has neither.
    """
    for name, value in env.items():
        if missing := unset_in(value, variables):
            raise EnvironmentBroken(
                f"{task.directory / TASK_FILE}: env: {name} wants ${{{missing}}}, which nothing "
                "gives",
                hint=f"environment.args: {{variables: {{{missing}: VALUE}}}}",
            )
    return {name: substituted(value, variables) for name, value in env.items()}
