"""No policy sees what has not happened: other futures, the same decisions."""

from collections.abc import Iterator
from dataclasses import replace
from random import Random

import pytest

from libra_cli.bench.contenders import ABLATIONS, ORACLES, POLICIES, Future, contender
from libra_cli.core.records import TurnRecord
from libra_cli.sim.traces import RecordedEpisode, Trace
from libra_cli.sim.world import World
from tests import sim_scene

TRACE = sim_scene.made_up(1)


def play(policy: str, groups: list[tuple[RecordedEpisode, ...]]) -> World:
    future = Future()
    world = sim_scene.world(contender(policy, future, TRACE, 0), iter(groups))
    future.episode = world.episode
    world.run()
    return world


def decisions(world: World, until: float) -> list[tuple[float, int, int, int, str]]:
    """Every placement of a turn up to a time, of turns that had ended by then."""
    return sorted(
        (turn.queued_at, turn.group_id, turn.member, turn.turn, turn.slot)
        for turn in world.recording.turns
        if turn.ended_at <= until
    )


def other_future(episode: RecordedEpisode, done: int, random: Random) -> RecordedEpisode:
    """The same up to turn ``done``; that one lasts longer, and what follows is something else."""
    if done >= len(episode.turns):
        return episode
    current = episode.turns[done]
    turns = [*episode.turns[:done], replace(current, generated=current.generated * 2 + 50)]
    turns += [random.choice(TRACE.episodes).turns[0] for _ in range(random.randint(0, 5))]
    return replace(episode, turns=tuple(turns))


def ended_by(turns: list[TurnRecord], until: float) -> dict[tuple[int, int], int]:
    done: dict[tuple[int, int], int] = {}
    for turn in turns:
        if turn.ended_at <= until:
            done[turn.group_id, turn.member] = done.get((turn.group_id, turn.member), 0) + 1
    return done


def groups_of(trace: Trace, number: int = 40) -> list[tuple[RecordedEpisode, ...]]:
    drawn: Iterator[tuple[RecordedEpisode, ...]] = trace.groups(Random(3), 4)
    return [next(drawn) for _ in range(number)]


def two_worlds(policy: str) -> tuple[list[object], list[object]]:
    groups = groups_of(TRACE)
    first = play(policy, groups)
    until = first.recording.ended_at * 0.4
    done = ended_by(first.recording.turns, until)
    random = Random(5)
    changed = [
        tuple(
            other_future(episode, done.get((number, member), 0), random)
            for member, episode in enumerate(group)
        )
        for number, group in enumerate(groups)
    ]
    before, after = decisions(first, until), decisions(play(policy, changed), until)
    assert len(before) > 50
    return list(before), list(after)


@pytest.mark.parametrize(
    "policy",
    [name for name in (*POLICIES, *ABLATIONS) if name.removesuffix("+admission") not in ORACLES],
)
def test_another_future_changes_no_decision_of_the_past(policy: str) -> None:
    before, after = two_worlds(policy)
    assert before == after


@pytest.mark.parametrize("policy", ORACLES)
def test_an_oracle_is_caught_by_the_same_test(policy: str) -> None:
    before, after = two_worlds(policy)
    assert before != after
