"""Episodes that a killed controller had begun, under the next one."""

from __future__ import annotations

import asyncio
from array import array
from typing import Any

import pytest

from libra_cli.config.errors import EnvironmentBroken
from libra_cli.core import actions as a
from libra_cli.core import events as e
from libra_cli.core.types import TrajectoryId
from libra_cli.runtime.adoption.memory import RunMemory
from libra_cli.runtime.episodes.performer import EpisodePerformer
from libra_cli.runtime.episodes.player import TurnResult

ONE = TrajectoryId(3, 1)


class Counting:
    """An environment that answers with how many tokens it was told; and what tests break of it."""

    def __init__(self, *, opens_with: int = 1, answers_from: int = 0, breaks: bool = False) -> None:
        self.opens_with, self.answers_from, self.breaks = opens_with, answers_from, breaks
        self.told: list[int] = []
        self.seeds: list[int] = []
        self.open: set[TrajectoryId] = set()
        self.go_on: asyncio.Event | None = None

    async def prepare(self, note: object) -> None:
        return

    async def check(self, seed: int) -> int:
        return 1

    async def start(
        self, trajectory: TrajectoryId, group: int, *, task_seed: int, seed: int
    ) -> array[int]:
        if self.go_on is not None:
            await self.go_on.wait()
        self.open.add(trajectory)
        self.seeds.append(seed)
        return array("i", [self.opens_with])

    def environment_of(self, trajectory: TrajectoryId) -> str:
        return ""

    def role_of(self, trajectory: TrajectoryId) -> str:
        return ""

    def turn_limit_of(self, trajectory: TrajectoryId) -> None:
        return None

    def waited_of(self, trajectory: TrajectoryId) -> float:
        return 0.0

    async def advance(
        self, trajectory: TrajectoryId, generated_ids: Any, finish_reason: str, logprobs: Any = ()
    ) -> TurnResult:
        if self.breaks:
            raise EnvironmentBroken("it broke")
        self.told += generated_ids
        said = array("i", [self.answers_from + len(self.told)])
        return TurnResult(said, (), done=False, reward=None)

    async def finish(self, trajectory: TrajectoryId) -> TurnResult:
        return TurnResult(array("i"), (), done=True, reward=float(sum(self.told)))

    def forget(self, trajectory: TrajectoryId) -> None:
        self.open.discard(trajectory)

    async def close(self) -> None:
        return


def turn(*tokens: int) -> a.AdvanceEpisode:
    return a.AdvanceEpisode(ONE, array("i", tokens), "stop", array("f", [-1.0] * len(tokens)))


def remembered(*turns: a.AdvanceEpisode) -> tuple[RunMemory, list[int]]:
    """What a controller remembers of an episode with these turns, the last one unanswered."""

    async def go() -> tuple[RunMemory, list[int]]:
        memory, first = RunMemory(), Counting()
        performer = EpisodePerformer(first, run_seed=0)
        actions: list[a.EpisodeAction] = [a.StartEpisode(ONE), *turns]
        for action in actions:
            number = memory.ask(action, now=0.0)
            if action is not turns[-1]:
                memory.happened(await performer.perform(action), number)
        return memory, first.seeds

    return asyncio.run(go())


def answered(player: Counting, action: a.EpisodeAction, *turns: a.AdvanceEpisode) -> Any:
    memory, _ = remembered(*turns)
    performer = EpisodePerformer(player, run_seed=0, histories=memory.episodes)
    return asyncio.run(performer.perform(action))


def test_it_goes_on_from_its_last_finished_turn_with_its_own_seed():
    player, last = Counting(), turn(7, 8)
    event = answered(player, last, turn(4), turn(5, 6), last)
    assert event == e.EpisodeAdvanced(ONE, array("i", [5]), (), False, None)
    assert player.told == [4, 5, 6, 7, 8]
    assert player.seeds == remembered(last)[1]


def test_the_limits_end_scores_all_turns_that_were_played():
    memory, _ = remembered(turn(4), turn(5))
    memory.happened(e.EpisodeAdvanced(ONE, array("i", [2]), (), False, None), 3)
    performer = EpisodePerformer(Counting(), run_seed=0, histories=memory.episodes)
    event = asyncio.run(performer.perform(a.FinishEpisode(ONE)))
    assert event == e.EpisodeAdvanced(ONE, array("i"), (), True, 9.0)


@pytest.mark.parametrize("other", [{"opens_with": 2}, {"answers_from": 1}])
def test_an_environment_that_says_something_else_begins_again_at_no_cost(other):
    player, last = Counting(**other), turn(7)
    event = answered(player, last, turn(4), last)
    assert isinstance(event, e.EpisodeFailed)
    assert not event.counts
    assert player.open == set()


def test_an_environment_that_breaks_meanwhile_counts_as_broken():
    event = answered(Counting(breaks=True), turn(7), turn(4), turn(7))
    assert event == e.EpisodeFailed(ONE, "it broke")


def test_an_episode_forgotten_while_it_is_rebuilt_leaves_nothing():
    memory, _ = remembered(turn(4), turn(7))

    async def go() -> None:
        player = Counting()
        player.go_on = asyncio.Event()
        performer = EpisodePerformer(player, run_seed=0, histories=memory.episodes)
        advancing = asyncio.create_task(performer.perform(turn(7)))
        await asyncio.sleep(0)
        await performer.perform(a.ForgetEpisode(ONE))
        player.go_on.set()
        await advancing
        assert player.open == set()

    asyncio.run(go())


def test_an_episode_that_was_forgotten_is_not_remembered():
    memory, _ = remembered(turn(4), turn(5))
    memory.ask(a.ForgetEpisode(ONE), now=1.0)
    assert memory.episodes == {}


def test_a_prompt_that_comes_after_its_episode_was_forgotten_is_not_kept():
    memory = RunMemory()
    number = memory.ask(a.StartEpisode(ONE), now=0.0)
    memory.ask(a.ForgetEpisode(ONE), now=0.0)
    memory.happened(e.EpisodeStarted(ONE, array("i", [1])), number)
    assert memory.episodes == {}


def test_an_episode_that_had_not_begun_begins_under_the_next_controller():
    memory, player = RunMemory(), Counting()
    memory.ask(a.StartEpisode(ONE), now=0.0)

    async def go() -> None:
        performer = EpisodePerformer(player, run_seed=0, histories=memory.episodes)
        started = await performer.perform(a.StartEpisode(ONE))
        assert started == e.EpisodeStarted(ONE, array("i", [1]))
        memory.ask(turn(7), now=1.0)
        advanced = await performer.perform(turn(7))
        assert advanced == e.EpisodeAdvanced(ONE, array("i", [1]), (), False, None)
        assert len(player.seeds) == 1

    asyncio.run(go())
