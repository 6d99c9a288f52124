"""Something that moves is never taken for stalled, and something that does not always is."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from libra_cli.core.progress.watch import (
    FOUND_S,
    LEAST_S,
    LONGEST_LOOK_S,
    SLOWEST_FACTOR,
    ProgressWatch,
)

PAUSES = st.lists(st.floats(0.0, LONGEST_LOOK_S), max_size=25)


@given(PAUSES)
def test_what_shows_a_sign_at_every_look_is_never_stalled(pauses: list[float]) -> None:
    watch, now = ProgressWatch(), 0.0
    for number, pause in enumerate(pauses):
        now += pause
        assert not watch.look(number, now=now)


@given(st.floats(0.1, 7.0))
def test_what_freezes_is_found_within_a_minute_but_not_before_the_least_silence(
    every_s: float,
) -> None:
    watch, now = ProgressWatch(), 0.0
    watch.look(1, now=now)
    while not watch.look(None, now=now):
        now += every_s
    assert LEAST_S <= now + 1e-6 <= FOUND_S


@given(st.floats(0.1, 7.0))
def test_what_answers_but_does_nothing_is_found_like_what_does_not_answer(every_s: float) -> None:
    watch, now = ProgressWatch(), 0.0
    while not watch.look("the same", now=now):
        now += every_s
    assert now <= FOUND_S


@given(PAUSES)
def test_what_has_nothing_to_do_is_not_stalled_as_long_as_it_answers(pauses: list[float]) -> None:
    watch, now = ProgressWatch(), 0.0
    for pause in pauses:
        now += pause
        assert not watch.look("the same", now=now, idle=True)


@given(PAUSES)
def test_silence_of_what_cannot_be_reached_says_nothing(pauses: list[float]) -> None:
    watch, now = ProgressWatch(), 0.0
    for pause in pauses:
        now += pause
        assert not watch.look(None, now=now, reachable=False)


@given(st.floats(LONGEST_LOOK_S, 1e6))
def test_a_controller_that_slept_takes_nobody_for_stalled(slept_s: float) -> None:
    watch = ProgressWatch()
    watch.look(1, now=0.0)
    assert not watch.look(None, now=slept_s)
    assert not watch.look(1, now=slept_s + 1.0)
    assert not watch.look(2, now=slept_s + 2.0)
    assert watch.silent_s == 0.0


@given(st.integers(1, 9))
def test_what_was_slow_before_may_be_twice_as_slow(looks: int) -> None:
    watch = ProgressWatch(least_s=1000.0)
    watch.look(1, now=0.0)
    for look in range(1, looks + 1):
        watch.look(1, now=10.0 * look)
    watch.look(2, now=10.0 * looks + 1.0)
    assert watch.slowest_s == 10.0 * looks
    watch.least_s = 0.0
    assert watch.limit_s == SLOWEST_FACTOR * 10.0 * looks


def test_what_is_known_to_take_long_is_given_that_time_and_no_more_afterwards() -> None:
    watch = ProgressWatch(allowed_s=100.0)
    watch.look(1, now=0.0)
    stalled = [watch.look(None, now=10.0 * look) for look in range(1, 11)]
    assert stalled == [False] * 9 + [True]
    watch.allowed_s = 0.0
    assert watch.is_stalled
    watch.look(2, now=101.0)
    assert not watch.is_stalled


def test_time_that_goes_backwards_is_no_silence() -> None:
    watch = ProgressWatch()
    watch.look(1, now=100.0)
    watch.look(1, now=50.0)
    assert watch.silent_s == 0.0
