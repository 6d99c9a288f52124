"""The look-up of whose an event or an action is."""

from __future__ import annotations

import pytest

from libra_cli.core import actions as a
from libra_cli.core import events as e
from libra_cli.core.parts import takers, takers_of_one


def test_an_event_goes_to_everybody_who_has_it_in_their_order():
    found = takers([(e.NodeEvent, "servers"), (e.NodeGone, "timers")], e.NodeEvent)
    assert found[e.NodeGone] == ("servers", "timers")
    assert found[e.NodeLost] == ("servers",)


def test_a_class_that_nobody_has_is_refused():
    with pytest.raises(TypeError, match="nobody has StopWorker"):
        takers_of_one([(a.StartWorker | a.SyncWorker, "workers")], a.WorkerAction)


def test_a_class_that_belongs_to_no_part_of_the_union_is_refused():
    with pytest.raises(TypeError, match="Wake is not in the union"):
        takers([(a.WorkerAction, "workers"), (a.Wake, "timers")], a.WorkerAction)


def test_an_action_has_one_owner():
    with pytest.raises(TypeError, match="StopWorker have more than one owner"):
        takers_of_one([(a.WorkerAction, "one"), (a.StopWorker, "another")], a.WorkerAction)
