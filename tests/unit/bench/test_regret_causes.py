"""What libra loses to the best static plan has causes that add up to it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra_cli.bench.jobs import Job, planned_run, playable, world_of
from libra_cli.bench.regret import StaticPlans
from libra_cli.bench.regret_causes import CAUSES, PlannedStep, planned_steps, shares_lost
from libra_cli.bench.results import CLAIRVOYANT
from libra_cli.core.cluster.replica import ReplicaState
from libra_cli.core.types import Role
from libra_cli.sim.profiles import load_profile
from libra_cli.sim.traces import load_trace
from tests.sample_bench import row

BEST = {4: 2}
OTHER = {1: 8}


def step(ended_at: float, *, servers=OTHER, looked=True, moving_s=0.0) -> PlannedStep:
    return PlannedStep(ended_at, moving_s, servers, looked)


def lost(
    steps: list[PlannedStep], best_ended: list[float], *, filling: int = 0
) -> dict[str, float]:
    """Seconds that each step lost, where both runs trained the same tokens."""
    mine, best = (row(makespan_s=ended) for ended in (steps[-1].ended_at, best_ended[-1]))
    mine, best = (replace(one, throughput_tok_s=1000.0 / one.makespan_s) for one in (mine, best))
    shares = shares_lost(steps, mine, best, best_ended, servers=BEST, filling=filling)
    assert sum(shares.values()) == pytest.approx(1 - mine.throughput_tok_s / best.throughput_tok_s)
    return {cause: share * mine.makespan_s for cause, share in shares.items()}


def test_each_step_is_lost_for_the_reason_it_was_slow() -> None:
    steps = [
        step(15.0),
        step(32.0, looked=False),
        step(45.0, moving_s=2.0),
        step(58.0, looked=True),
        step(69.0, servers=BEST),
    ]
    assert lost(steps, [10.0, 20.0, 30.0, 40.0, 50.0], filling=1) == pytest.approx(
        {"filling": 5.0, "wrong plan": 7.0, "moving": 2.0, "wrong price": 4.0, "same plan": 1.0}
    )


def test_what_is_gained_in_a_step_counts_against_what_was_lost() -> None:
    found = lost([step(5.0), step(25.0)], [10.0, 20.0])
    assert found["wrong price"] == pytest.approx(5.0)


@given(
    st.lists(
        st.tuples(
            st.floats(1, 100),
            st.floats(1, 100),
            st.floats(0, 50),
            st.booleans(),
            st.booleans(),
        ),
        min_size=1,
        max_size=30,
    ),
    st.integers(0, 5),
    st.floats(0.5, 2.0),
)
def test_causes_add_up_to_the_regret(steps, filling, tokens) -> None:
    made, ended, mine, theirs = [], [], 0.0, 0.0
    for own, other, moving_s, same, looked in steps:
        mine, theirs = mine + own, theirs + other
        made.append(step(mine, servers=BEST if same else OTHER, looked=looked, moving_s=moving_s))
        ended.append(theirs)
    run = replace(row(makespan_s=mine + 1), throughput_tok_s=1000.0 * tokens / (mine + 1))
    best = replace(row(makespan_s=theirs), throughput_tok_s=1000.0 / theirs)
    shares = shares_lost(made, run, best, ended, servers=BEST, filling=filling)
    assert set(shares) == set(CAUSES)
    assert sum(shares.values()) == pytest.approx(
        1 - run.throughput_tok_s / best.throughput_tok_s, abs=1e-9
    )


PROFILE = load_profile("a800-qwen3-14b")
TRACE, _ = playable(load_trace("mint"), 59_177)
JOB = Job(TRACE, PROFILE, PROFILE, 16, "libra", "libra", 0, steps=6, groups_per_step=2)


def test_the_steps_of_a_simulated_run_tell_its_plans_and_moves() -> None:
    plans = StaticPlans(JOB)
    script = tuple(one for shape in ((2, 2), (2, 4)) if (one := plans.layout(shape)))
    result, _, steps = planned_run(
        replace(JOB, planner=CLAIRVOYANT, start=script[0], script=script)
    )
    assert [one.servers for one in steps[:2]] == [{2: 2}] * 2
    assert steps[-1].servers == {2: 4}
    assert steps[-1].ended_at == result.makespan_s, "what ends after the last step does not count"
    moving = [one.moving_s for one in steps]
    assert moving[:2] == [0.0, 0.0]
    assert 0 < sum(moving) < result.makespan_s


def test_a_trainer_that_restarts_on_its_slots_does_nothing_meanwhile() -> None:
    (layout,) = [one for one in StaticPlans(JOB).first() if one.servers == {2: 4}]
    world = world_of(replace(JOB, planner="fixed", layout=layout, steps=3))
    world.run()
    tape = world.recording
    began, ended = (step.ended_at for step in tape.steps[:2])
    row = next(row for _, row in tape.slots if row.role == Role.TRAIN)
    for at, state in ((began + 1.0, ReplicaState.STOPPING), (began + 4.0, ReplicaState.TRAINING)):
        tape.slots.append((at, replace(row, state=state)))
    moving = [step.moving_s for step in planned_steps(tape, 16)]
    assert ended > began + 4.0
    assert moving == pytest.approx([0.0, 3.0 * layout.training_gpus / 16, 0.0])


def test_the_steps_of_a_simulated_run_tell_whether_the_planner_has_looked() -> None:
    *_, steps = planned_run(JOB)
    assert not steps[0].looked
    assert steps[-1].looked
