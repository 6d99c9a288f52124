"""The gradient worker's queue, without a model behind it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from libra_cli.config.errors import ProcessError, TrainerError
from libra_cli.node.command_queue import IdleCommand, StopCommand
from libra_cli.node.gradient.commands import ComputeCommand, LoadCommand, WorkerCommandQueue
from libra_cli.node.gradient.server import GradientStore


@pytest.fixture
def queue() -> WorkerCommandQueue:
    """Ready, with version v000006-e1 loaded."""
    queue = WorkerCommandQueue(max_len=16, store=GradientStore(incarnation=3))
    queue.ready()
    queue.version, queue.trainer_incarnation = "v000006-e1", 1
    return queue


def share(**changes: Any) -> dict[str, Any]:
    trajectory = {
        "group": 3,
        "member": 1,
        "token_ids": np.array([5, 6], dtype="<i4").tobytes(),
        "logprobs": np.array([0, -1], dtype="<f4").tobytes(),
        "loss_mask": bytes([0, 1]),
        "reward": 1.0,
        "fresh": 1,
        "behind": [],
        "advantages": [[0, 1.0]],
    }
    message = {"step": 7, "trainer_incarnation": 1, "incarnation": 3, "version": "v000006-e1"}
    return message | {"trajectories": [trajectory]} | changes


LOAD = {"directory": "/versions", "name": "v000007-e1", "trainer_incarnation": 1}


def take_share(queue: WorkerCommandQueue, **changes: Any) -> None:
    assert queue.take("share", share(**changes))() == {}


def test_a_share_is_taken_once_however_often_it_is_sent(queue: WorkerCommandQueue):
    take_share(queue)
    take_share(queue)
    assert isinstance(queue.next(0), ComputeCommand)
    assert isinstance(queue.next(0), IdleCommand)
    queue.computed()
    queue.store.done(7, {"loss": 1.0}, 1, 0.1, b"")
    take_share(queue)
    assert isinstance(queue.next(0), IdleCommand)
    assert queue.store.step == 7


@pytest.mark.parametrize(
    "changes", [{"incarnation": 2}, {"trainer_incarnation": 0}, {"version": "v000005-e1"}]
)
def test_a_share_for_other_weights_or_an_earlier_worker_is_refused(
    queue: WorkerCommandQueue, changes: dict[str, Any]
):
    here = "here is incarnation 3, trainer incarnation 1, version 'v000006-e1'"
    with pytest.raises(TrainerError, match=here):
        queue.take("share", share(**changes))
    assert not queue.store.wanted()


def test_while_a_share_is_computed_no_other_is_taken(queue: WorkerCommandQueue):
    take_share(queue)
    with pytest.raises(TrainerError, match="busy computing a share of step 7"):
        queue.take("share", share(step=8))
    queue.computed()
    take_share(queue, step=8)


def test_a_load_drops_the_share_under_way_and_comes_after_it(queue: WorkerCommandQueue):
    take_share(queue)
    assert queue.store.wanted()
    loaded = queue.take("load", LOAD)
    assert not queue.store.wanted()
    assert isinstance(queue.next(0), ComputeCommand)
    assert isinstance(queue.next(0), LoadCommand)
    assert loaded() is None


def test_a_load_is_answered_when_the_version_is_in_place(queue: WorkerCommandQueue):
    loaded = queue.take("load", LOAD)
    command = queue.next(0)
    assert isinstance(command, LoadCommand)
    assert (loaded(), queue.version) == (None, "")
    with pytest.raises(TrainerError, match="version ''"):
        queue.take("share", share())
    queue.loaded(command, 1e-7, 0.5)
    assert loaded() == {"gap": 1e-7, "load_s": 0.5}
    assert queue.version == "v000007-e1"


def test_a_load_that_is_asked_for_again_is_one_while_it_is_under_way(queue: WorkerCommandQueue):
    first, again = queue.take("load", LOAD), queue.take("load", LOAD)
    command = queue.next(0)
    assert isinstance(command, LoadCommand)
    assert isinstance(queue.next(0), IdleCommand)
    queue.loaded(command, 1e-7, 0.5)
    assert first() == again() == {"gap": 1e-7, "load_s": 0.5}
    assert queue.take("load", LOAD)() is None
    assert isinstance(queue.next(0), LoadCommand)


def test_a_load_that_another_has_followed_tells_nothing_more(queue: WorkerCommandQueue):
    first = queue.take("load", LOAD)
    second = queue.take("load", LOAD | {"name": "v000008-e1"})
    one, two = queue.next(0), queue.next(0)
    assert isinstance(one, LoadCommand)
    assert isinstance(two, LoadCommand)
    queue.loaded(one, 1.0, 0.5)
    assert (second(), queue.version) == (None, "")
    with pytest.raises(TrainerError, match="another version than v000007-e1"):
        first()
    queue.loaded(two, 2.0, 0.5)
    assert second() == {"gap": 2.0, "load_s": 0.5}
    assert queue.version == "v000008-e1"


def test_after_a_version_that_does_not_fit_none_is_loaded(queue: WorkerCommandQueue):
    loaded = queue.take("load", LOAD)
    command = queue.next(0)
    assert isinstance(command, LoadCommand)
    queue.not_loaded(command, "lm_head.weight is in the model, not in the version")
    with pytest.raises(TrainerError, match="is in the model, not in the version"):
        loaded()
    assert queue.version == ""
    assert queue.take("load", LOAD)() is None, "it is tried anew"
    assert isinstance(queue.next(0), LoadCommand)


def test_stopping_drops_the_share_under_way(queue: WorkerCommandQueue):
    take_share(queue)
    assert queue.take("stop", {})() == {}
    assert not queue.store.wanted()
    assert isinstance(queue.next(0), ComputeCommand)
    assert isinstance(queue.next(0), StopCommand)
    queue.computed()
    with pytest.raises(TrainerError, match="the worker is stopping"):
        queue.take("share", share(step=8))


def test_a_failure_is_told_to_whoever_waits_for_a_load_and_to_the_core(queue: WorkerCommandQueue):
    loaded = queue.take("load", LOAD)
    queue.fail("out of memory")
    with pytest.raises(ProcessError, match="out of memory"):
        loaded()
    assert queue.store.error == "out of memory"
