"""How fast each half is, from what a run has shown, also where one held the other back."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra_cli.core.evidence import Recalibration
from libra_cli.core.observation import InPlay, MeasuredStep, mean_step
from libra_cli.core.planning.recalibration import MOST, recalibrated
from libra_cli.core.planning.rollout_table import PlannedBucket
from libra_cli.core.planning.search import Layout, PlannerSettings, Search
from libra_cli.core.planning.triggers import IDLE
from libra_cli.core.workload import TrajectorySample, Workload
from libra_cli.sim.profiles import load_profile

PROFILE = load_profile("a800-qwen3-14b")
LOAD = Workload(tuple(TrajectorySample(500, 300 * n, 200, 4, 4.0) for n in range(1, 17)), 256, 4.0)
TODAY = Layout((PlannedBucket(2, 8, 9000, 128),), 16)
SPANS = st.lists(st.tuples(st.integers(-20, 40), st.integers(0, 40)), max_size=12)


def prices_after(*measured: MeasuredStep) -> tuple[float, Recalibration]:
    """Seconds of a rollout step today after correction, and the correction as so many steps show
    it, without the weight of the prices before."""
    found = recalibrated(PROFILE, LOAD, 32, PlannerSettings(), today=TODAY, measured=measured)
    seconds, shown = found.search.times(TODAY).rollout_s, found.recalibration
    if number := len(measured):
        rollout, training = 1 + LOAD.overlap / number, 1 + 1 / number
        shown = Recalibration(shown.rollout**rollout, shown.training**training)
    return seconds, shown


def test_prices_nobody_has_checked_stay() -> None:
    priced, correction = prices_after()
    assert correction == Recalibration()
    assert (
        priced
        == recalibrated(
            PROFILE, LOAD, 32, PlannerSettings(), today=TODAY, measured=()
        ).priced.rollout_s
    )


def test_where_no_step_was_measured_a_correction_stays() -> None:
    before = Recalibration(rollout=1.5, training=0.8)
    settings = PlannerSettings()
    found = recalibrated(PROFILE, LOAD, 32, settings, today=TODAY, measured=(), before=before)
    raw = Search(PROFILE, LOAD, 32, settings).times(TODAY)
    assert found.recalibration == before
    assert found.priced == raw
    corrected = found.search.times(TODAY)
    assert corrected.rollout_s > 1.1 * raw.rollout_s
    assert corrected.train_s < 0.9 * raw.train_s


def test_where_training_waited_a_step_is_as_long_as_rollout() -> None:
    priced, _ = prices_after()
    seconds, correction = prices_after(MeasuredStep(1.5 * priced, priced, 0.5 * priced, 0.0, 0.0))
    assert correction.rollout == pytest.approx(1.5)
    assert seconds == pytest.approx(1.5**0.2 * priced, rel=0.01), "one step of five weighs"


def test_the_same_trajectories_times_tell_the_same_speed_however_long_the_steps() -> None:
    """Held back twice as long: fewer at a time on average, but no other speed."""
    held = MeasuredStep(500.0, 500.0, 0.0, in_play_s=256 * 60.0, concurrency=200.0)
    once, twice = prices_after(held), prices_after(replace(held, step_s=1000.0, train_s=1000.0))
    assert once[0] == pytest.approx(twice[0])
    slower = prices_after(replace(held, in_play_s=2 * held.in_play_s))
    assert slower[1].rollout == pytest.approx(2 * once[1].rollout)


@pytest.mark.parametrize("batches", [0.5, 2.0])
@pytest.mark.parametrize("waited", [0.0, 0.5])
def test_steps_that_train_what_was_played_before_tell_the_same_speed(
    batches: float, waited: float
) -> None:
    """While the pipeline drains a step is shorter than rollout needs for a batch, or longer."""
    batch, (step_s, _) = LOAD.mean_generated * LOAD.played, prices_after()
    held = MeasuredStep(step_s, 0.5 * step_s, waited * step_s, 256 * 20.0, 200.0, 0.0, batch)
    other = replace(
        held,
        step_s=batches * held.step_s,
        waited_s=batches * held.waited_s,
        in_play_s=batches * held.in_play_s,
        played_tokens=batches * batch,
    )
    assert prices_after(other)[1].rollout == pytest.approx(prices_after(held)[1].rollout)
    unknown = replace(other, played_tokens=0.0)
    assert prices_after(unknown)[1].rollout != pytest.approx(prices_after(held)[1].rollout)


def test_those_that_took_as_long_beside_fewer_others_are_slower_in_a_full_one() -> None:
    alone, beside_many = (
        prices_after(MeasuredStep(500.0, 500.0, 0.0, 256 * 60.0, concurrency))[1].rollout
        for concurrency in (50.0, 400.0)
    )
    assert alone > beside_many


def test_rollout_takes_no_longer_than_the_step_it_was_seen_in() -> None:
    priced, _ = prices_after()
    _, correction = prices_after(
        MeasuredStep(priced, priced, 0.0, in_play_s=1e9, concurrency=100.0)
    )
    assert correction.rollout == pytest.approx(1.0)


def test_what_was_found_before_counts_as_many_steps_as_may_be_in_flight() -> None:
    priced, _ = prices_after()
    slow = MeasuredStep(2 * priced, priced, priced, 0.0, 0.0)
    found = recalibrated(
        PROFILE,
        LOAD,
        32,
        PlannerSettings(),
        today=TODAY,
        measured=[slow] * round(LOAD.overlap),
        before=Recalibration(rollout=0.5, training=1.0),
    )
    assert found.recalibration.rollout == pytest.approx(1.0)


def test_servers_the_prices_do_not_know_are_not_corrected() -> None:
    """They run, and by the profile cannot."""
    unknown = Layout((PlannedBucket(3, 8, 9000, 128),), 8)
    held = MeasuredStep(500.0, 500.0, 0.0, in_play_s=256 * 60.0, concurrency=200.0)
    found = recalibrated(PROFILE, LOAD, 32, PlannerSettings(), today=unknown, measured=[held])
    assert found.recalibration.rollout == 1.0
    assert found.shown is not None
    assert found.shown.rollout_s == 500.0


@pytest.mark.parametrize(("seconds", "factor"), [(1e9, MOST), (1e-9, 1 / MOST)])
def test_no_correction_is_beyond_belief(seconds: float, factor: float) -> None:
    _, correction = prices_after(MeasuredStep(1e9, seconds, 1e9, 0.0, 0.0))
    assert correction.training == pytest.approx(factor)


@given(SPANS)
def test_concurrency_is_what_counting_every_second_says(starts: list[tuple[int, int]]) -> None:
    spans = [(float(begin), float(begin + length)) for begin, length in starts]
    playing = [sum(b <= second < e for b, e in spans) for second in range(30)]
    in_play = InPlay()
    for at, by in sorted([(b, 1) for b, _ in spans] + [(e, -1) for _, e in spans]):
        if at < 0:
            in_play.change(by, now=0.0)
        elif at < 30:
            in_play.change(by, now=at)
    in_play_s, concurrency = in_play.take(now=30.0)
    assert in_play_s == pytest.approx(sum(playing))
    if in_play_s:
        assert concurrency == pytest.approx(sum(n * n for n in playing) / sum(playing))


def test_the_mean_of_steps_counts_concurrency_for_as_long_as_it_lasted() -> None:
    steps = [MeasuredStep(10, 4, 6, 90, 9, 0, 70), MeasuredStep(30, 8, 2, 10, 1, 0, 30)]
    found = mean_step(steps)
    assert (found.step_s, found.train_s, found.waited_s, found.in_play_s) == (20, 6, 4, 50)
    assert found.concurrency == pytest.approx(8.2)
    assert found.played_tokens == 50


def test_the_less_training_waited_the_less_of_a_step_is_rollouts() -> None:
    priced, _ = prices_after()
    held = MeasuredStep(2 * priced, 2 * priced, 0.0, in_play_s=256 * 60.0, concurrency=200.0)
    found = [
        prices_after(replace(held, waited_s=share * held.step_s))[1].rollout
        for share in (0.0, IDLE / 2, IDLE, 2 * IDLE)
    ]
    assert found[0] < found[1] < found[2] == found[3]
    assert found[1] == pytest.approx((found[0] + found[2]) / 2)


def test_steps_are_compared_with_the_work_that_was_done_in_them() -> None:
    """Trajectories have doubled since: that the steps were short then is no fast rollout."""
    then_s = Search(PROFILE, LOAD, 32, PlannerSettings()).times(TODAY)
    step = MeasuredStep(then_s.rollout_s, then_s.train_s, then_s.rollout_s, 0.0, 0.0)
    factors = [
        recalibrated(
            PROFILE,
            LOAD.stretched(2.0),
            32,
            PlannerSettings(),
            today=TODAY,
            measured=[step],
            played=played,
        ).recalibration.rollout
        for played in (LOAD, None)
    ]
    assert factors[0] == pytest.approx(1.0)
    assert factors[1] < 0.95
