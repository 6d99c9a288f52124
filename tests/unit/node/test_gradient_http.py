"""The gradient worker's queue, without a model behind it."""

from __future__ import annotations

import threading
from http import HTTPStatus
from typing import Any

import numpy as np
import pytest

from libra_cli.node.command_queue import IdleCommand, StopCommand
from libra_cli.node.gradient.commands import ComputeCommand, LoadCommand, WorkerCommandQueue
from libra_cli.node.gradient.server import GradientStore

DEADLINE_S = 10.0


@pytest.fixture
def queue() -> WorkerCommandQueue:
    """Ready, with version v000006-e1 loaded."""
    queue = WorkerCommandQueue(world_size=1, max_len=16, store=GradientStore(incarnation=3))
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


def load(queue: WorkerCommandQueue) -> tuple[threading.Thread, list[Any]]:
    message = {
        "directory": "/versions",
        "name": "v000007-e1",
        "version": 7,
        "trainer_incarnation": 1,
    }
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(queue.load(message)), daemon=True)
    thread.start()
    return thread, answers


def test_a_share_is_taken_once_however_often_it_is_sent(queue: WorkerCommandQueue):
    assert queue.share(share())[0] == HTTPStatus.ACCEPTED
    assert queue.share(share())[0] == HTTPStatus.ACCEPTED
    assert isinstance(queue.next(0), ComputeCommand)
    assert isinstance(queue.next(0), IdleCommand)
    queue.computed()
    queue.store.done(7, {"loss": 1.0}, 1, 0.1, b"")
    assert queue.share(share())[0] == HTTPStatus.ACCEPTED
    assert isinstance(queue.next(0), IdleCommand)
    assert queue.health()[1]["step"] == 7


@pytest.mark.parametrize(
    "changes", [{"incarnation": 2}, {"trainer_incarnation": 0}, {"version": "v000005-e1"}]
)
def test_a_share_for_other_weights_or_an_earlier_worker_is_a_conflict(
    queue: WorkerCommandQueue, changes: dict[str, Any]
):
    status, body = queue.share(share(**changes))
    assert status == HTTPStatus.CONFLICT
    assert "here is incarnation 3, trainer incarnation 1, version 'v000006-e1'" in body["error"]
    assert not queue.store.wanted()


def test_while_a_share_is_computed_nothing_else_is_taken(queue: WorkerCommandQueue):
    queue.share(share())
    assert queue.share(share(step=8))[0] == HTTPStatus.CONFLICT
    thread, answers = load(queue)
    thread.join(DEADLINE_S)
    assert answers == [(HTTPStatus.CONFLICT, {"error": "busy computing a share of step 7"})]
    assert queue.version == "v000006-e1"


def test_a_dropped_share_stops_and_may_be_taken_again(queue: WorkerCommandQueue):
    queue.share(share())
    assert queue.store.wanted()
    queue.drop(6)
    assert queue.store.wanted()
    queue.drop(7)
    assert not queue.store.wanted()
    assert queue.share(share())[0] == HTTPStatus.CONFLICT
    queue.computed()
    assert queue.share(share())[0] == HTTPStatus.ACCEPTED
    assert queue.store.wanted()


def test_a_load_answers_when_the_version_is_in_place(queue: WorkerCommandQueue):
    thread, answers = load(queue)
    command = queue.next(DEADLINE_S)
    assert isinstance(command, LoadCommand)
    assert queue.health()[1]["version"] == ""
    assert queue.share(share())[0] == HTTPStatus.CONFLICT
    queue.loaded(command, 1e-7, 0.5)
    thread.join(DEADLINE_S)
    assert answers == [(HTTPStatus.OK, {"gap": 1e-7, "load_s": 0.5})]
    assert queue.health()[1]["version"] == "v000007-e1"


def test_after_a_version_that_does_not_fit_none_is_loaded(queue: WorkerCommandQueue):
    thread, answers = load(queue)
    queue.next(DEADLINE_S)
    queue.not_loaded("lm_head.weight is in the model, not in the version")
    thread.join(DEADLINE_S)
    assert answers[0][0] == HTTPStatus.BAD_REQUEST
    assert "lm_head.weight" in answers[0][1]["error"]
    assert queue.health()[1]["version"] == ""


def test_stopping_drops_the_share_under_way(queue: WorkerCommandQueue):
    queue.share(share())
    queue.stop()
    assert not queue.store.wanted()
    assert isinstance(queue.next(0), ComputeCommand)
    assert isinstance(queue.next(0), StopCommand)
    queue.computed()
    assert queue.share(share(step=8))[0] == HTTPStatus.SERVICE_UNAVAILABLE


def test_a_failure_is_told_to_whoever_waits_for_a_load_and_to_the_core(queue: WorkerCommandQueue):
    thread, answers = load(queue)
    queue.next(DEADLINE_S)
    queue.fail("out of memory")
    thread.join(DEADLINE_S)
    assert answers == [(HTTPStatus.INTERNAL_SERVER_ERROR, {"error": "out of memory"})]
    assert queue.store.error == "out of memory"
