"""The environment ``dataset``: the prompt is in the row, and the model's answer is scored.

There are no tools, and the first turn is the answer. ``envs.dataset.rows`` says what a row must
have, ``envs.dataset.rewards`` which rewards there are and what they are given.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

from libra_cli.config.errors import EnvironmentBroken
from libra_cli.envs.dataset import rows
from libra_cli.envs.dataset.judge import judge_of
from libra_cli.envs.dataset.rewards import Graded, ModelAnswer, RewardFunction, reward_function
from libra_cli.envs.protocol import Message, Task, ToolCall, ToolFailed, ToolSchema

JUDGE = "judge"
"""The name of the reward that the argument ``judge`` describes."""
_Weighted: TypeAlias = tuple[tuple[str, float, RewardFunction], ...]


class Dataset:
    """The environment of one row, whose prompt is answered once and without tools.

    ``reward`` names a reward, or maps names to weights; the reward of an answer is their weighted
    sum, without those that say nothing about the row. ``judge`` describes the reward of that name
    (see ``JudgeSpec``). ``prompt`` and ``truth`` name the columns of the question and of what a
    right answer is, where they are not found by themselves. ``instructions`` follow every question.

    Raises:
        EnvironmentBroken: a reward cannot be found or its arguments are wrong.
    """

    tools: Sequence[ToolSchema] = ()

    def __init__(
        self,
        reward: str | Mapping[str, float] = "match",
        *,
        judge: Mapping[str, Any] | None = None,
        prompt: str | None = None,
        truth: str | None = None,
        instructions: str = "",
        secrets: Mapping[str, str] | None = None,
        run_directory: str | None = None,
    ) -> None:
        given = {reward: 1.0} if isinstance(reward, str) else dict(reward)
        if (JUDGE in given) != (judge is not None):
            raise EnvironmentBroken(
                "environment 'dataset': the argument judge goes with the reward of that name",
                hint="args: {reward: judge, judge: {url: http://127.0.0.1:8000/v1, model: NAME}}",
            )
        self._rewards = _weighted(json.dumps(given))
        if judge is not None:
            asked = judge_of(judge, secrets or {}, run_directory, alone=len(given) == 1)
            self._rewards += ((JUDGE, _weight(JUDGE, given[JUDGE]), asked.grade),)
        self._prompt_column, self._truth_column = prompt, truth
        self._instructions = instructions
        self._task: Task = {}
        self._metrics: dict[str, float] = {}

    def task(self, index: int, seed: int) -> Task:
        """Refuse, since every task is a row of a file.

        Raises:
            EnvironmentBroken: always.
        """
        raise EnvironmentBroken(
            "environment 'dataset' has no tasks of its own",
            hint="environment: {name: dataset, tasks: FILE.jsonl}; libra help data",
        )

    def reset(self, task: Task, seed: int) -> list[Message]:
        """Begin with the row's prompt.

        Raises:
            EnvironmentBroken: the row has no prompt, or no column that ``truth`` names.
        """
        self._task = task
        if self._truth_column is not None:
            rows.truth_of(task, self._truth_column)
        return rows.messages_of(task, self._prompt_column, self._instructions)

    def step(self, call: ToolCall) -> str:
        raise ToolFailed(f"there is no tool {call.name!r}: answer in words")

    def score(self, answer: str, conversation: Sequence[Message]) -> Any:
        """Return the weighted sum of the rewards; to be awaited if one of them must be.

        Raises:
            EnvironmentBroken: a reward failed, or none said anything about this row.
        """
        answered = ModelAnswer(
            self._task,
            rows.prompt_of(self._task, self._prompt_column),
            answer,
            conversation[-1].get("reasoning", "") if conversation else "",
            self._truth_column,
        )
        said = {name: grade(answered) for name, _, grade in self._rewards}
        graded = {name: one for name, one in said.items() if isinstance(one, Graded)}
        return self._sum(graded) if len(graded) == len(said) else self._awaited(said)

    def metrics(self) -> Mapping[str, float]:
        """Return every reward by its name, and the metrics that rewards add."""
        return self._metrics

    async def _awaited(self, said: Mapping[str, Graded | Awaitable[Graded]]) -> float:
        graded = await asyncio.gather(*map(_result, said.values()))
        return self._sum(dict(zip(said, graded, strict=True)))

    def _sum(self, graded: Mapping[str, Graded]) -> float:
        values = {name: one.value for name, one in graded.items() if one.value is not None}
        if not values:
            raise EnvironmentBroken(
                "environment 'dataset': no reward says anything about the row "
                f"{rows.shown(self._task)}"
            )
        for name, one in graded.items():
            self._metrics |= {f"{name}_{more}": value for more, value in one.metrics.items()}
        self._metrics |= values
        return sum(weight * values.get(name, 0.0) for name, weight, _ in self._rewards)


async def _result(said: Graded | Awaitable[Graded]) -> Graded:
    return said if isinstance(said, Graded) else await said


@lru_cache(maxsize=16)
def _weighted(given: str) -> _Weighted:
    """The rewards of a recipe but the judge, found once; every trajectory asks for them."""
    found = [
        (name.rpartition(":")[2], _weight(name, weight), reward_function(name))
        for name, weight in json.loads(given).items()
        if name != JUDGE
    ]
    names = [name for name, _, _ in found]
    if len(set(names)) < len(names):
        raise EnvironmentBroken(f"environment 'dataset': two rewards share a name in {names}")
    return tuple(found)


def _weight(name: str, weight: object) -> float:
    if isinstance(weight, bool) or not isinstance(weight, int | float):
        raise EnvironmentBroken(
            f"environment 'dataset': the weight of reward {name!r} is {weight!r}, not a number",
            hint="args: {reward: {math: 1.0, my_rewards:brevity: 0.2}}",
        )
    return float(weight)
