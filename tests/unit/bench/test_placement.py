"""The placement experiment: nobody sees the future, and the counts mean what they say."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libra_cli.bench import placement as module
from libra_cli.bench.placement import (
    CONTENDERS,
    TOKEN_S,
    Contender,
    RequestStream,
    bounds_of,
    folds,
    measure,
    returns_of,
)
from libra_cli.core.scheduling.causal_estimator import CausalEstimator
from libra_cli.core.scheduling.estimates import Estimate
from libra_cli.core.types import ToolOutcome, TrajectoryId
from libra_cli.sim.traces import RecordedEpisode, Trace, Turn


def turn(random: Random) -> Turn:
    fails = random.random() < 0.3
    return Turn(
        generated=random.randint(1, 300),
        observation=random.randint(0, 500),
        tool=random.choice(("search", "edit", "")),
        outcome=ToolOutcome.ERROR if fails else ToolOutcome.OK,
        tool_s=random.random(),
    )


def episode(random: Random, task: str) -> RecordedEpisode:
    turns = tuple(turn(random) for _ in range(random.choice((2, 3, 5, 12))))
    return RecordedEpisode(task=task, prompt=random.randint(50, 500), turns=turns, reward=0.0)


def trace(tasks: int = 15, members: int = 3, seed: int = 0) -> Trace:
    random = Random(seed)
    return Trace("made", tuple(episode(random, str(i // members)) for i in range(tasks * members)))


class Times:
    """Hears everything, and notes when."""

    def __init__(self) -> None:
        self.stream: RequestStream | None = None
        self.answers: list[tuple[float, TrajectoryId, Estimate]] = []

    def heard(self, trajectory: TrajectoryId, turn: Turn, remaining: int, answer: Estimate) -> None:
        assert self.stream is not None
        self.answers.append((self.stream.now, trajectory, answer))


def answers(
    name: str, groups: list[list[RecordedEpisode]]
) -> list[tuple[float, TrajectoryId, Estimate]]:
    times = Times()
    times.stream = RequestStream(enumerate(groups), CONTENDERS[name].make(), times)
    times.stream.play()
    return times.answers


def other_future(episode: RecordedEpisode, cut: float, random: Random) -> RecordedEpisode:
    """The same up to ``cut`` seconds; a turn that would end later, and all after it, are others."""
    now, kept = 0.0, []
    for number, each in enumerate(episode.turns, start=1):
        now += each.generated * TOKEN_S
        # The end of the last generation is the end of the trajectory, whatever its tool took.
        now += each.tool_s if number < len(episode.turns) else 0.0
        if now > cut:
            break
        kept.append(each)
    if len(kept) == len(episode.turns):
        return episode
    tail = [turn(random) for _ in range(random.randint(1, 6))]
    # Whatever follows, it must not have ended by the cut.
    longer = replace(tail[0], generated=tail[0].generated + int(cut / TOKEN_S) + 1)
    return replace(episode, turns=(*kept, longer, *tail[1:]))


@pytest.mark.parametrize("name", CONTENDERS)
@given(seed=st.integers(0, 10**6), cut=st.floats(0.5, 30))
@settings(max_examples=6)
def test_shuffling_the_futures_changes_no_answer_so_far(name, seed, cut):
    """All groups start at 0, so what has happened by ``cut`` is the same in both worlds."""
    random = Random(seed)
    groups = [[episode(random, str(i)) for _ in range(3)] for i in range(5)]
    others = [[other_future(each, cut, random) for each in group] for group in groups]
    one, two = (
        [answer for answer in answers(name, world) if answer[0] <= cut]
        for world in (groups, others)
    )
    assert one == two


def test_no_task_is_both_learned_from_and_tested_on():
    seen_tasks = []
    for seen, held_out in folds(trace(), 0):
        learned = {each.task for group in seen for each in group}
        tested = {each.task for group in held_out for each in group}
        assert not learned & tested
        seen_tasks += sorted(tested)
    assert sorted(seen_tasks) == sorted({each.task for each in trace().episodes})


def test_a_constant_rule_never_moves_and_recalls_one_bucket():
    row = measure(trace(), 0, "always-shortest")
    assert row.mean_recall == pytest.approx(1 / 3)
    assert row.moves_per_100 == 0
    assert row.wrong_share is None


class Seer(CausalEstimator):
    """Knows the truth, for a test of the counts."""

    def __init__(self, episodes: tuple[RecordedEpisode, ...]) -> None:
        super().__init__()
        self._total = {each.prompt: each.generated for each in episodes}
        self._prompts: dict[TrajectoryId, int] = {}

    def begin(self, trajectory, *, prompt):
        self._prompts[trajectory] = prompt
        return Estimate.point(self._total[prompt])

    def returned(self, trajectory, *, generated, context, returns):
        return Estimate.point(self._total[self._prompts[trajectory]] - generated)

    def finished(self, trajectory, *, generated):
        pass


def test_one_who_knows_is_always_right(monkeypatch):
    made = trace()
    episodes = tuple(replace(each, prompt=i + 1) for i, each in enumerate(made.episodes))
    rule = CONTENDERS["attained"].rule
    monkeypatch.setitem(module.CONTENDERS, "seer", Contender(lambda: Seer(episodes), rule))
    row = measure(Trace("made", episodes), 0, "seer")
    assert row.right_share == row.mean_recall == 1
    assert row.wrong_per_100 == 0
    assert row.wrong_share == 0
    assert row.calibration_error == 0


@pytest.mark.parametrize("together", [True, False])
def test_every_return_is_placed_once(together):
    made = trace()
    expected = sum(len(each.turns) - 1 for each in made.episodes)
    for seed, name in product(range(2), CONTENDERS):
        row = measure(made, seed, name, together=together)
        assert row.placements == expected
        assert sum(count for _, _, count in row.calibration) == 2 * expected


def test_siblings_that_start_at_once_end_before_only_where_they_are_shorter():
    """Together, a finished sibling is a shorter one; one after the other, all before have ended."""
    group = [
        RecordedEpisode("t", 10, (Turn(100, 0, "x", ToolOutcome.OK, 0.0),) * count, 0.0)
        for count in (2, 9)
    ]

    def means(together: bool) -> list[float]:
        times = Times()
        estimator = CONTENDERS["siblings"].make()
        times.stream = RequestStream([(0, group)], estimator, times, together=together)
        times.stream.play()
        return [answer.mean for _, who, answer in times.answers if who.member == 1]

    assert means(together=True)[0] == 1000
    assert means(together=False)[0] == 100


def test_bounds_are_in_order_and_long_is_rare():
    short, middle = bounds_of(trace().episodes)
    assert 0 < short < middle
    share = sum(each.generated > middle for each in trace().episodes) / len(trace().episodes)
    assert share <= 0.25


def test_a_turn_without_a_tool_returns_nothing():
    plain = Turn(5, 10, "", None, 1.0)
    assert returns_of(plain) == ()
    assert returns_of(replace(plain, tool="x"))[0].outcome is ToolOutcome.OK
