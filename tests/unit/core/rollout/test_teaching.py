"""A run with a teacher: what is trained has its log-probabilities, and it may be away."""

from __future__ import annotations

from array import array
from json import loads
from random import Random
from typing import Any

import numpy as np
import pytest

from libra_cli.core import actions as a
from libra_cli.core import events as e
from libra_cli.core.records import CreditRecord, NoteRecord, StepRecord
from libra_cli.core.rollout.active import Stage
from libra_cli.core.rollout.teaching import LONGEST_S, STRIKES, TeacherQueue
from libra_cli.core.types import Trajectory, TrajectoryId, VersionSpan
from tests.world import Faults, World, recipe, taught

URL = "http://teacher:8000/v1"
TEACHER = {"url": URL, "kl_coef": 0.5, "advantage_coef": 0.25, "patience_s": 300.0}
BROKEN = Faults(
    server_dies=0.003,
    turn_fails=0.02,
    environment_breaks=0.03,
    trainer_dies=0.01,
    forked=0.2,
    repeated=0.05,
    teacher_fails=0.2,
    teacher_refuses=0.02,
)


def world_of(seed: int, faults: Faults | None = None, **changes: Any) -> World:
    training = {"loss": "distill", "groups_per_step": 3, "checkpoint_every": 2}
    given = {"teacher": TEACHER, "training": training | changes.pop("training", {})} | changes
    return World(Random(seed), faults or Faults(), recipe(**given))


@pytest.mark.parametrize("training", [{}, {"stream": True}, {"advantage": "turn"}])
@pytest.mark.parametrize("seed", range(3))
def test_every_token_that_is_trained_was_judged_by_the_teacher(seed: int, training: dict[str, Any]):
    world = world_of(seed, BROKEN, training=training).run()
    assert len(world.samples) > 10
    for sample in world.samples:
        tokens, given = sample.tokens, sample.token_advantages
        assert given is not None
        of_reward = np.zeros(len(tokens.token_ids))
        for start, value in sample.advantages:
            of_reward[start:] = value
        mask = np.asarray(tokens.loss_mask) == 1
        said = np.asarray(taught(tokens.token_ids))
        # Students of this world give every token the log-probability -1.
        expected = 0.5 * (said + 1.0) + 0.25 * of_reward
        assert np.asarray(given)[mask] == pytest.approx(expected[mask], abs=1e-6)
        assert not np.asarray(given)[~mask].any()
        assert not np.asarray(tokens.teacher)[~mask].any()


def test_a_step_tells_the_reverse_kl_and_what_each_token_was_weighed_by():
    world = world_of(0, teacher=TEACHER | {"advantage_coef": 0.0}).run()
    assert world.end == a.End("finished", "")
    step = world.rows(StepRecord)[0]
    batch = loads(step.batch_json)
    of_step = [s for s in world.samples if (s.trajectory.id.group, 1) in world.trained]
    tokens = [
        token
        for s in of_step
        for token, mask in zip(s.tokens.token_ids, s.tokens.loss_mask, strict=True)
        if mask
    ]
    assert batch["reverse_kl"] == pytest.approx(np.mean([0.01 * t - 1.0 for t in tokens]))
    assert batch["advantage_std"] == pytest.approx(np.std([0.5 * (1 - 0.01 * t) for t in tokens]))
    assert batch["share_without_signal"] is None  # rewards have no part in it
    first = of_step[0]
    row = next(
        one
        for one in world.rows(CreditRecord)
        if (one.group_id, one.member) == first.trajectory.id[:2]
    )
    (runs,) = loads(row.advantages_json)
    told = np.zeros(len(first.tokens.token_ids))
    for start, value in runs:
        told[start:] = value
    assert told == pytest.approx(np.asarray(first.token_advantages), abs=1e-4)


def test_a_teacher_that_is_away_is_waited_for_and_told_and_then_everything_goes_on():
    world = world_of(1, Faults(teacher_fails=1.0))
    while not world.rows(NoteRecord):
        world.play(world.events + 1)
    (note,) = world.rows(NoteRecord)
    assert note.kind == "teacher"
    assert f"{URL} does not answer" in note.text
    assert "connection refused" in note.text
    world.play(world.events + 20)
    assert world.machine.training.step == 0  # nothing is trained without it
    assert "the teacher, which does not answer" in world.machine.waiting
    world.faults.teacher_fails = 0.0
    world.run()
    assert world.end == a.End("finished", "")
    assert world.rows(NoteRecord)[-1].resolved_at is not None
    assert {row.step for row in world.rows(StepRecord)} == {1, 2, 3, 4, 5}


def test_a_run_whose_teacher_stays_away_fails_and_says_so():
    world = world_of(2, Faults(teacher_fails=1.0)).run()
    assert world.end is not None
    assert world.end.state == "failed"
    assert f"the teacher at {URL} has not answered for" in world.end.error
    assert "libra run RECIPE --resume RUN_DIR" in world.end.error
    assert world.trained == []


def test_trajectories_that_it_refuses_are_played_again_and_then_given_up():
    world = world_of(3, Faults(teacher_refuses=1.0)).run()
    assert world.end is not None
    assert world.end.state == "failed"
    assert "the teacher: status 400" in world.end.error
    assert world.trained == []


def test_those_that_wait_for_a_teacher_hold_no_seat():
    teacher, training = TEACHER | {"patience_s": 1e6}, {"max_staleness": 3}
    world = world_of(4, Faults(teacher_fails=1.0), teacher=teacher, training=training)
    world.play(400)
    rollout = world.machine.rollout
    waiting = [one for one in rollout.active.values() if one.stage is Stage.TAUGHT]
    assert rollout.teacher is not None
    # All groups of four steps, which is the staleness bound, on the twelve seats of the servers.
    assert world.machine.scheduler.queues.seats == 12
    assert len(waiting) == len(rollout.teacher) == len(rollout.active) == 4 * 3 * 2


# -- the queue alone ------------------------------------------------------------------------------


def over(number: int) -> Trajectory:
    tokens = array("i", [1, 2, 3])
    return Trajectory(
        id=TrajectoryId(number, 0),
        token_ids=tokens,
        loss_mask=array("b", [0, 1, 1]),
        logprobs=array("f", [0.0, -1.0, -1.0]),
        spans=[VersionSpan(0, 1, 3)],
    )


def away(number: int) -> e.TeacherFailed:
    return e.TeacherFailed(TrajectoryId(number, 0), "refused")


def asked(actions: list[a.Action]) -> list[int]:
    return [one.trajectory.group for one in actions if isinstance(one, a.AskTeacher)]


def pauses(actions: list[a.Action]) -> list[float]:
    return [one.after_s for one in actions if isinstance(one, a.Wake)]


def test_while_it_is_away_one_trajectory_is_asked_about_and_pauses_double():
    queue = TeacherQueue(URL, 1e9)
    assert [asked(queue.ask(over(n))) for n in range(3)] == [[0], [1], [2]]
    assert pauses(queue.failed(away(0), now=0.0)) == [2.0]
    assert queue.failed(away(1), now=0.1) == queue.failed(away(2), now=0.2) == []
    assert queue.ask(over(3)) == []
    slept = []
    for at in range(8):
        (again,) = asked(queue.again())
        slept += pauses(queue.failed(away(again), now=10.0 + at))
    assert slept == [4.0, 8.0, 16.0, 32.0, LONGEST_S, LONGEST_S, LONGEST_S, LONGEST_S]
    (again,) = asked(queue.again())
    rest = asked(queue.answered(TrajectoryId(again, 0), now=100.0))
    assert sorted([again, *rest]) == [0, 1, 2, 3]
    assert len(queue) == 3
    assert not queue.is_silent


def test_one_without_an_answer_while_others_have_some_is_not_waited_for_for_ever():
    queue = TeacherQueue(URL, 1e9)
    struck = []
    for round_ in range(STRIKES + 1):
        queue.ask(over(0))
        queue.ask(over(1 + round_))
        queue.failed(away(0), now=0.0)
        struck.append(queue.strike(TrajectoryId(0, 0)))
        queue.answered(TrajectoryId(1 + round_, 0), now=1.0)
        queue.again()
    assert struck == [False] * STRIKES + [True]


def test_it_is_given_up_when_it_was_silent_for_too_long_and_not_before():
    queue = TeacherQueue(URL, 60.0)
    queue.ask(over(0))
    queue.failed(away(0), now=100.0)
    queue.again()
    queue.failed(away(0), now=159.0)
    assert queue.given_up == ""
    queue.again()
    queue.failed(away(0), now=160.0)
    assert queue.given_up.startswith(f"the teacher at {URL} has not answered for 60 s: refused")
