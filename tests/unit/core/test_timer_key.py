"""A timer that fires is given back to the part that has set it, and to no other."""

from __future__ import annotations

from itertools import permutations

import pytest

from libra_cli.core import actions as a
from libra_cli.core.timer_key import TimerKey, TimerOwner
from tests.elastic import scene


@pytest.mark.parametrize("owner", TimerOwner)
@pytest.mark.parametrize("about", [(), ("gpu-01/0",), ("gpu-01/0", "3", "abort")])
def test_a_key_comes_back_from_its_name(owner: TimerOwner, about: tuple[str, ...]) -> None:
    key = TimerKey(owner, about)
    assert TimerKey.named(key.name) == key


def test_owners_are_told_apart_by_more_than_a_blank() -> None:
    assert not [one for one in TimerOwner if one.split() != [one]]
    assert not [(one, other) for one, other in permutations(TimerOwner, 2) if one.startswith(other)]


def test_a_name_that_no_owner_has_is_refused() -> None:
    for name in ("", "drained", "drain-a/1 0 out", " drain"):
        with pytest.raises(ValueError, match="TimerOwner"):
            TimerKey.named(name)


def test_timers_of_a_move_have_owners() -> None:
    world = scene()
    world.order(gradient=1)
    world.arrive()
    owners = {TimerKey.named(wake.name).owner for wake in world.did(a.Wake)}
    assert owners >= {TimerOwner.DRAIN, TimerOwner.MOVE}
