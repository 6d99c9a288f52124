"""Whether a server's next step checks drafts follows from what steps gave at its load."""

from __future__ import annotations

import pytest

from libra_cli.node.rollout.draft_switch import EXPLORE, TRIAL, DraftSwitch


def played(switch: DraftSwitch, running: int, steps: int, *, worth: float) -> list[bool]:
    """What it chose, where a step with drafts gives ``worth`` times the tokens a second."""
    chosen = []
    for _ in range(steps):
        drafts = switch.choose(running)
        seconds = 1.0 / worth if drafts else 1.0
        switch.observe(running, drafts=drafts, tokens=running, seconds=seconds)
        chosen.append(drafts)
    return chosen


def test_both_are_tried_first():
    first = played(DraftSwitch(), 4, 2 * TRIAL, worth=1.0)
    assert first == [True] * TRIAL + [False] * TRIAL


@pytest.mark.parametrize(("worth", "drafts"), [(1.05, True), (1.0, True), (0.95, False)])
def test_what_gives_more_tokens_a_second_is_used(worth, drafts):
    switch = DraftSwitch()
    played(switch, 4, 2 * TRIAL, worth=worth)
    assert played(switch, 4, EXPLORE - 2 * TRIAL, worth=worth) == [drafts] * (EXPLORE - 2 * TRIAL)


def test_the_other_is_tried_again_once_in_a_while_and_used_when_it_has_become_better():
    switch = DraftSwitch()
    played(switch, 4, EXPLORE, worth=0.8)
    assert played(switch, 4, TRIAL, worth=2.0) == [True] * TRIAL
    assert played(switch, 4, EXPLORE - TRIAL, worth=2.0) == [True] * (EXPLORE - TRIAL)


def test_every_load_is_judged_by_its_own_steps():
    switch = DraftSwitch()
    played(switch, 1, 2 * TRIAL, worth=2.0)
    played(switch, 32, 2 * TRIAL, worth=0.5)
    assert switch.choose(1)
    assert not switch.choose(32)
    assert not switch.choose(63)
    assert switch.choose(64)  # a load not seen yet
