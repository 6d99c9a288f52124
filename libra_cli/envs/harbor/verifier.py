"""Runs what a task brings in its sandbox: the tests, which write the reward, and the solution.

The tests are copied into the sandbox once the agent's part is over, and not before.
"""

from __future__ import annotations

import json
import math
import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from libra_cli.config.errors import EnvironmentBroken
from libra_cli.envs.harbor.task_file import HarborTask
from libra_cli.envs.harbor.task_sandbox import TaskSandbox, said

LOGS = "/logs/verifier"
TESTS = "/tests"
SOLUTION = "/solution"
_CLEAR = (
    f"chmod u+rwx {posixpath.dirname(LOGS)} 2>/dev/null\n"
    f"chmod -R u+rwX {TESTS} {LOGS} 2>/dev/null\n"
    f"rm -rf {TESTS} {LOGS} && mkdir -p {TESTS} {LOGS}"
)
"""No process of a sandbox has capabilities, so that one that is root needs modes as others do."""
_LARGEST = 1 << 20
"""Bytes of a file with rewards."""
_LAST_WORDS = 2000
"""Characters of what a script said, at most."""


@dataclass(frozen=True, slots=True)
class VerifierResult:
    """What the tests said: rewards by name, none where they wrote none."""

    rewards: Mapping[str, float] = field(default_factory=dict)
    said: str = ""
    """The end of what the tests printed, or why there is no reward."""
    timed_out: bool = False

    def reward(self, wanted: str) -> float:
        """Return the reward of this name, or the only one; 0.0 where the tests wrote none.

        Raises:
            EnvironmentBroken: there are several, and none of this name.
        """
        if not self.rewards:
            return 0.0
        if wanted not in self.rewards and len(self.rewards) > 1:
            raise EnvironmentBroken(
                f"the tests wrote the rewards {', '.join(self.rewards)}, and none is {wanted!r}",
                hint=f"environment.args: {{reward: {next(iter(self.rewards))}}}",
            )
        return self.rewards.get(wanted, next(iter(self.rewards.values())))

    def reaches(self, least: Mapping[str, float]) -> bool:
        """Say whether there are rewards and they are at least these, by name."""
        reached = (self.rewards.get(name, -math.inf) >= value for name, value in least.items())
        return bool(self.rewards) and all(reached)


def rolled_up(results: Sequence[VerifierResult], *, only_final: bool) -> VerifierResult:
    """Return the result of a task of the results of its steps: the last one, or the mean.

    A step that was not reached, as one before it had too little, is no part of the mean; a reward
    that a step does not name counts as 0.
    """
    if only_final or len(results) <= 1:
        return results[-1] if results else VerifierResult()
    told = [one for one in results if one.rewards]
    names = dict.fromkeys(name for one in told for name in one.rewards)
    rewards = {
        name: sum(one.rewards.get(name, 0.0) for one in told) / len(results) for name in names
    }
    said = "\n".join(filter(None, (one.said for one in results)))
    return VerifierResult(rewards, said, any(one.timed_out for one in results))


def verify(task: HarborTask, inside: TaskSandbox, variables: Mapping[str, str]) -> VerifierResult:
    """Copy the tests in, run ``test.sh`` and read what it wrote.

    Only the model can have kept the tests out of its sandbox, so that it has no reward then.
    """
    if kept_out := _copied(task, inside):
        return VerifierResult(said=kept_out)
    script = f"chmod +x {TESTS}/test.sh; {TESTS}/test.sh > {LOGS}/test-stdout.txt 2>&1"
    done = inside.run(script, env=variables, timeout_s=task.verifier_timeout_s)
    words = inside.run(f"tail -c {_LAST_WORDS} {LOGS}/test-stdout.txt").stdout.strip()
    inside.run(f"rm -rf {TESTS}")  # the next step's agent is not to see them either
    if done.timed_out:
        return VerifierResult(
            said=f"{words}\n(no end in {task.verifier_timeout_s:g} s)", timed_out=True
        )
    try:
        return VerifierResult(_rewards(inside), words)
    except ValueError as error:
        return VerifierResult(said=f"{words}\n({error})".strip())


def _copied(task: HarborTask, inside: TaskSandbox) -> str:
    """Copy the tests in, beside an empty directory of logs; return why that failed, if it did."""
    done = inside.run(_CLEAR)
    if done.code:
        return f"{TESTS} and {LOGS} cannot be emptied: {said(done) or done.code}"
    try:
        for tests in (task.shared_tests, task.tests):
            if tests is not None and tests.is_dir():
                inside.put(tests, TESTS)
    except OSError as error:
        return str(error)
    return ""


def solve(task: HarborTask, inside: TaskSandbox, variables: Mapping[str, str]) -> str:
    """Run the reference solution as an agent would have worked; return why it failed, if it did.

    Raises:
        EnvironmentBroken: the task has none.
    """
    script = task.solution / "solve.sh"
    if not script.is_file():
        raise EnvironmentBroken(f"{script} is missing", hint="write the reference solution")
    inside.run(f"rm -rf {SOLUTION} && mkdir -p {SOLUTION}")
    inside.put(task.solution, SOLUTION)
    done = inside.run(
        f"chmod +x {SOLUTION}/solve.sh; {SOLUTION}/solve.sh < /dev/null",
        env=variables,
        timeout_s=task.agent_timeout_s or task.verifier_timeout_s,
    )
    inside.run(f"rm -rf {SOLUTION}")
    if done.timed_out:
        return "solve.sh was not done in time"
    return f"solve.sh ended with {done.code}: {said(done)}" if done.code else ""


def _rewards(inside: TaskSandbox) -> Mapping[str, float]:
    """Read the rewards that the tests wrote.

    Raises:
        ValueError: there is none, or it is no number.
    """
    if (text := inside.read(f"{LOGS}/reward.json", _LARGEST)) is None:
        if not (text := inside.read(f"{LOGS}/reward.txt", _LARGEST)):
            raise ValueError(f"the tests wrote neither {LOGS}/reward.txt nor reward.json")
        return {"reward": _number("reward.txt", text.decode("utf-8", "replace").strip())}
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"reward.json is no JSON: {error}") from error
    if not isinstance(found, dict):
        return {"reward": _number("reward.json", found)}
    if not found:
        raise ValueError("reward.json has no reward")
    return {str(name): _number(f"reward.json: {name}", value) for name, value in found.items()}


def _number(where: str, value: object) -> float:
    try:
        found = float(value)  # type: ignore[arg-type]  # the tests may have written anything
    except (TypeError, ValueError, OverflowError):
        found = math.nan
    if not math.isfinite(found):
        raise ValueError(f"{where} is {str(value)[:80]!r}, not a number")
    return found
