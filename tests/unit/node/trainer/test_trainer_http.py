"""The trainer's queue, and its HTTP, without a trainer behind it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any

import msgpack
import numpy as np
import pytest

from libra_cli.config.errors import TrainerError
from libra_cli.node.batch.samples import read_sample
from libra_cli.node.command_queue import IdleCommand, StopCommand
from libra_cli.node.http import Blob
from libra_cli.node.trainer.commands import (
    AccumulateCommand,
    CheckpointCommand,
    CommandQueue,
    TrainCommand,
    serve,
)
from tests.sockets import UnixConnection, socket_path

TOKEN = "of-this-run"


def trajectory(**changes: Any) -> dict[str, Any]:
    message: dict[str, Any] = {
        "group": 3,
        "member": 1,
        "token_ids": np.array([5, 6, 7, 8], dtype="<i4").tobytes(),
        "logprobs": np.array([0, 0, -0.5, -1], dtype="<f4").tobytes(),
        "loss_mask": np.array([0, 0, 1, 1], dtype="<i1").tobytes(),
        "reward": 1.0,
        "fresh": 1,
        "behind": [],
        "advantages": [[0, 1.0]],
    }
    return message | changes


@pytest.fixture
def queue() -> CommandQueue:
    queue = CommandQueue(world_size=1, trainer_incarnation=2, max_len=16)
    queue.state = "ready"
    return queue


def step(number: int) -> dict[str, Any]:
    return {"step": number, "checkpoint": None, "trajectories": [trajectory()]}


def test_a_step_is_taken_once_however_often_it_is_sent(queue: CommandQueue):
    assert queue.train(step(1))[0] == HTTPStatus.ACCEPTED
    assert queue.train(step(1))[0] == HTTPStatus.ACCEPTED
    command = queue.next(0)
    assert isinstance(command, TrainCommand)
    assert command.step == 1
    assert command.ledger is None
    assert isinstance(queue.next(0), IdleCommand)


def part(number: int, of: int = 1) -> dict[str, Any]:
    return {"step": of, "part": number, "trajectories": [trajectory()]}


def test_parts_are_taken_in_order_each_once_and_then_the_step(queue: CommandQueue):
    for number in (1, 1, 2, 1, 2):
        assert queue.accumulate(part(number))[0] == HTTPStatus.ACCEPTED
    assert queue.part_result(1, 2, 0) == (HTTPStatus.OK, {"state": "running"})
    assert queue.train({**step(1), "parts": 2})[0] == HTTPStatus.ACCEPTED
    commands = [queue.next(0) for _ in range(4)]
    assert [type(one) for one in commands] == [
        AccumulateCommand,
        AccumulateCommand,
        TrainCommand,
        IdleCommand,
    ]
    queue.accumulated(1, 1, {"tokens": 2})
    assert queue.part_result(1, 1, 0)[1] == {"state": "done", "metrics": {"tokens": 2}}
    assert queue.accumulate(part(1, of=2))[0] == HTTPStatus.ACCEPTED


@pytest.mark.parametrize(("number", "of"), [(2, 1), (0, 1), (1, 0), (1, 2)])
def test_any_other_part_than_the_next_is_a_conflict(queue: CommandQueue, number: int, of: int):
    assert queue.accumulate(part(number, of))[0] == HTTPStatus.CONFLICT
    assert queue.part_result(of, number, 0)[0] == HTTPStatus.NOT_FOUND


def test_a_step_that_counts_other_parts_than_came_is_refused_with_both_numbers(queue: CommandQueue):
    queue.accumulate(part(1))
    with pytest.raises(TrainerError, match="3 parts should be accumulated, 1 are"):
        queue.train({**step(1), "parts": 3})
    assert queue.train({**step(1), "parts": 1})[0] == HTTPStatus.ACCEPTED


def test_who_waits_for_a_part_hears_that_the_trainer_failed(queue: CommandQueue):
    queue.accumulate(part(1))
    queue.fail("out of memory")
    assert queue.part_result(1, 1, 5)[1] == {"state": "failed", "error": "out of memory"}


@pytest.mark.parametrize("number", [0, 2, 7])
def test_any_other_step_than_the_next_is_a_conflict(queue: CommandQueue, number: int):
    status, body = queue.train(step(number))
    assert status == HTTPStatus.CONFLICT
    assert body["error"] == f"step {number} was sent, the next one is 1"


def test_a_step_is_refused_before_ready_and_while_stopping(queue: CommandQueue):
    queue.state = "starting"
    assert queue.train(step(1))[0] == HTTPStatus.SERVICE_UNAVAILABLE
    queue.state = "ready"
    queue.stop()
    assert queue.train(step(1))[0] == HTTPStatus.SERVICE_UNAVAILABLE
    assert isinstance(queue.next(0), StopCommand)


def test_a_failure_wakes_who_waits_and_says_why(queue: CommandQueue):
    queue.train(step(1))
    answers: list[Any] = []
    waiting = threading.Thread(target=lambda: answers.append(queue.result(1, 30)), daemon=True)
    waiting.start()
    queue.fail("TrainerError: out of luck")
    waiting.join(10)
    assert answers == [(HTTPStatus.OK, {"state": "failed", "error": "TrainerError: out of luck"})]
    assert queue.health()[1]["state"] == "failed"
    assert queue.train(step(2))[1] == {"error": "TrainerError: out of luck"}


def test_a_step_that_was_never_sent_is_unknown(queue: CommandQueue):
    assert queue.result(1, 0)[0] == HTTPStatus.NOT_FOUND
    queue.train(step(1))
    assert queue.result(1, 0)[1] == {"state": "running"}


def test_asking_for_a_checkpoint_waits_for_that_one(queue: CommandQueue):
    queue.train({**step(1), "checkpoint": {"ledger": {"at": 1}}})
    answers: list[Any] = []
    asking = threading.Thread(target=lambda: answers.append(queue.save({"at": 2})), daemon=True)
    asking.start()
    train = queue.next(10)
    assert isinstance(train, TrainCommand)
    assert train.ledger == {"at": 1}
    save = queue.next(10)
    queue.saved(1, "step-000001")
    assert isinstance(save, CheckpointCommand)
    assert save.ledger == {"at": 2}
    asking.join(0.05)
    assert answers == []
    queue.saved(1, "step-000001-again")
    asking.join(10)
    assert answers == [(HTTPStatus.OK, {"path": "step-000001-again"})]


def test_log_ratios_are_those_of_the_newest_step_alone(queue: CommandQueue):
    assert queue.log_ratios(0)[0] == HTTPStatus.NOT_FOUND
    for number in (1, 2):
        queue.train(step(number))
        queue.done(number, {}, bytes([number]))
        assert queue.log_ratios(number) == (HTTPStatus.OK, Blob(bytes([number])))
    assert queue.log_ratios(1)[0] == HTTPStatus.NOT_FOUND
    assert queue.accumulate(part(1, of=3))[0] == HTTPStatus.ACCEPTED
    assert queue.log_ratios(2)[0] == HTTPStatus.OK, "a part of the next step takes nothing away"


def test_a_checkpoint_that_cannot_be_written_is_told_and_ends_nothing(queue: CommandQueue):
    queue.train({**step(1), "checkpoint": {"ledger": {}}})
    queue.next(0)
    queue.done(1, {})
    queue.not_saved(1, "no space left")
    told = queue.result(1, 0)[1]
    assert (told["state"], told["checkpoint"]) == ("done", "")
    assert told["checkpoint_error"] == "no space left"
    answers: list[Any] = []
    asking = threading.Thread(target=lambda: answers.append(queue.save({})), daemon=True)
    asking.start()
    assert isinstance(queue.next(10), CheckpointCommand)
    queue.not_saved(1, "still none")
    asking.join(10)
    assert answers == [(HTTPStatus.OK, {"path": "", "error": "still none"})]
    assert queue.health()[1]["state"] == "ready"
    queue.train(step(2))
    assert isinstance(queue.next(0), TrainCommand)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"token_ids": b"123"}, "cannot be read"),
        ({"token_ids": b""}, "has 0 tokens, 4 log-probabilities"),
        ({"loss_mask": bytes([1, 0, 0, 0])}, "1 on the first token"),
        ({"loss_mask": bytes([0, 2, 0, 0])}, "other than 0 and 1"),
        ({"reward": float("nan")}, "not finite"),
        ({"behind": [[2, 1], [1, 3]]}, "ages that are not by rising token"),
        ({"advantages": [1.0]}, "cannot be read"),
        ({"advantages": [[2, 1.0], [1, 0.0]]}, "not by rising token"),
        ({"advantages": [[0, float("nan")]]}, "an advantage that is not finite"),
        ({"token_advantages": bytes(8)}, "4 tokens, but 2 token advantages"),
        ({"turns": [[0, 2]]}, "cannot be read"),
        ({"turns": [[0, 0, 1.0]]}, "outside of its tokens"),
        ({"turns": [[0, 4, 1.0]]}, "outside of its tokens"),
        ({"turns": [[0, 2, 1.0], [1, 2, 1.0]]}, "not by rising number and token"),
        ({"turns": [[1, 1, 1.0], [0, 2, 1.0]]}, "not by rising number and token"),
        ({"turns": [[0, 1, float("inf")]]}, "a turn with a reward that is not finite"),
        ({"logprobs": np.full(4, -np.inf, dtype="<f4").tobytes()}, "not finite"),
        (
            {
                "token_ids": bytes(4 * 17),
                "logprobs": bytes(4 * 17),
                "loss_mask": bytes(17),
            },
            "allowed are 2 to 16",
        ),
    ],
)
def test_a_wrong_trajectory_is_named_with_what_is_wrong(changes: dict[str, Any], reason: str):
    with pytest.raises(TrainerError, match=reason) as caught:
        read_sample(trajectory(**changes), max_len=16)
    assert str(caught.value).startswith("trajectory 3.1 ")


@pytest.fixture
def socket(queue: CommandQueue) -> Iterator[str]:
    server = serve(queue, path=(path := socket_path()), token=TOKEN)
    yield path
    server.shutdown()
    server.server_close()


def ask(
    socket: str, method: str, path: str, body: bytes = b"", token: str = TOKEN
) -> tuple[int, dict[str, Any]]:
    connection = UnixConnection(socket)
    try:
        connection.request(method, path, body, {"Authorization": f"Bearer {token}"})
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/health"), ("GET", "/train/1"), ("POST", "/train"), ("POST", "/stop"), ("GET", "/x")],
)
def test_every_route_demands_the_token(queue: CommandQueue, socket: str, method: str, path: str):
    assert ask(socket, method, path, token="of-another-run")[0] == HTTPStatus.UNAUTHORIZED
    assert not queue.stopping


def test_a_step_goes_over_the_wire(queue: CommandQueue, socket: str):
    body = msgpack.packb(step(1))
    assert ask(socket, "POST", "/train", body) == (HTTPStatus.ACCEPTED, {"state": "running"})
    assert ask(socket, "GET", "/train/1?wait_s=0")[1] == {"state": "running"}
    command = queue.next(10)
    assert isinstance(command, TrainCommand)
    (sample,) = command.samples
    assert sample.token_ids.tolist() == [5, 6, 7, 8]
    assert sample.generated == 2


@pytest.mark.parametrize("body", [b"", b"\xc1", msgpack.packb({"step": 1}), msgpack.packb([1])])
def test_nonsense_is_a_bad_request_and_not_a_crash(socket: str, body: bytes):
    assert ask(socket, "POST", "/train", body)[0] == HTTPStatus.BAD_REQUEST
    assert ask(socket, "GET", "/health")[1]["state"] == "ready"


def test_a_step_or_a_part_that_comes_again_with_another_batch_is_a_conflict(queue: CommandQueue):
    other = {"trajectories": [trajectory(reward=0.25)]}
    assert queue.accumulate(part(1))[0] == HTTPStatus.ACCEPTED
    assert queue.accumulate(part(1) | other)[0] == HTTPStatus.CONFLICT
    assert queue.train(step(1) | {"parts": 1})[0] == HTTPStatus.ACCEPTED
    status, body = queue.train(step(1) | {"parts": 1} | other)
    assert (status, body["error"]) == (
        HTTPStatus.CONFLICT,
        "step 1 was taken with another batch",
    )
    shares = {"shares": [], "checkpoint": {"ledger": {}}}
    assert queue.train(step(1) | {"parts": 1} | shares)[0] == HTTPStatus.ACCEPTED
