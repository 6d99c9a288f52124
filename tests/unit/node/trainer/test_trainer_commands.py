"""The trainer's queue, and its control stream, without a trainer behind it."""

from __future__ import annotations

from typing import Any

import msgpack
import numpy as np
import pytest

from libra_cli.config.errors import ProcessError, TrainerError
from libra_cli.node import connections
from libra_cli.node.batch.samples import read_sample
from libra_cli.node.command_queue import IdleCommand, RankServer, StopCommand
from libra_cli.node.control import Answer
from libra_cli.node.trainer.commands import (
    KEPT_STEPS,
    AccumulateCommand,
    CheckpointCommand,
    CommandQueue,
    TrainCommand,
)
from tests.control import ControlConnection, ask, is_silent
from tests.sockets import socket_path

TOKEN = "of-this-run"
TAKEN: Answer = {}


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
    queue = CommandQueue(max_len=16)
    queue.state = "ready"
    return queue


def told(queue: CommandQueue, operation: str, order: dict[str, Any]) -> Answer | None:
    """What there is to say to an order now."""
    return queue.take(operation, order)()


def step(number: int) -> dict[str, Any]:
    return {"step": number, "checkpoint": None, "trajectories": [trajectory()]}


def part(number: int, of: int = 1) -> dict[str, Any]:
    return {"step": of, "part": number, "trajectories": [trajectory()]}


def test_a_step_is_taken_once_however_often_it_is_sent(queue: CommandQueue):
    assert told(queue, "train", step(1)) == told(queue, "train", step(1)) == TAKEN
    command = queue.next(0)
    assert isinstance(command, TrainCommand)
    assert command.step == 1
    assert command.ledger is None
    assert isinstance(queue.next(0), IdleCommand)


def test_parts_are_taken_in_order_each_once_and_then_the_step(queue: CommandQueue):
    for number in (1, 1, 2, 1, 2):
        assert told(queue, "accumulate", part(number)) == TAKEN
    assert told(queue, "accumulated", part(2)) is None
    assert told(queue, "train", {**step(1), "parts": 2}) == TAKEN
    assert told(queue, "accumulated", part(2)) is None
    commands = [queue.next(0) for _ in range(4)]
    assert [type(one) for one in commands] == [
        AccumulateCommand,
        AccumulateCommand,
        TrainCommand,
        IdleCommand,
    ]
    queue.accumulated(1, 1, {"tokens": 2})
    assert told(queue, "accumulated", part(1)) == {"metrics": {"tokens": 2}}
    assert told(queue, "accumulate", part(1, of=2)) == TAKEN
    assert told(queue, "train", {**step(1), "parts": 2}) == TAKEN, "it is known still"


@pytest.mark.parametrize(("number", "of"), [(2, 1), (0, 1), (1, 0), (1, 2)])
def test_any_other_part_than_the_next_is_refused(queue: CommandQueue, number: int, of: int):
    with pytest.raises(TrainerError, match="the next one is 1"):
        queue.take("accumulate", part(number, of))
    with pytest.raises(TrainerError, match="never sent"):
        told(queue, "accumulated", part(number, of))


def test_a_step_that_counts_other_parts_than_came_is_refused_with_both_numbers(queue: CommandQueue):
    queue.take("accumulate", part(1))
    with pytest.raises(TrainerError, match="3 parts should be accumulated, 1 are"):
        queue.take("train", {**step(1), "parts": 3})
    assert told(queue, "train", {**step(1), "parts": 1}) == TAKEN


@pytest.mark.parametrize("number", [0, 2, 7])
def test_any_other_step_than_the_next_is_refused(queue: CommandQueue, number: int):
    with pytest.raises(TrainerError, match=f"step {number} was sent, the next one is 1"):
        queue.take("train", step(number))


def test_a_step_is_refused_before_ready_and_while_stopping(queue: CommandQueue):
    queue.state = "starting"
    with pytest.raises(TrainerError, match="the trainer is starting"):
        queue.take("train", step(1))
    assert told(queue, "ready", {}) is None
    queue.state = "ready"
    assert told(queue, "ready", {}) == {"published": {}}
    assert told(queue, "stop", {}) == TAKEN
    with pytest.raises(TrainerError, match="the trainer is stopping"):
        queue.take("train", step(1))
    assert isinstance(queue.next(0), StopCommand)


def test_a_failure_ends_all_waits_and_says_why(queue: CommandQueue):
    queue.take("accumulate", part(1))
    queue.take("train", {**step(1), "parts": 1})
    queue.done(1, {"loss": 0.5})
    waits = [("published", step(1)), ("accumulated", part(1)), ("saved", step(1)), ("ready", {})]
    awaited = [queue.take(what, order) for what, order in waits]
    awaited.append(queue.take("checkpoint", {"ledger": {}}))
    queue.fail("TrainerError: out of luck")
    for answer in awaited:
        with pytest.raises(ProcessError, match="TrainerError: out of luck"):
            answer()
    assert told(queue, "done", step(1)) == {"metrics": {"loss": 0.5}}
    with pytest.raises(ProcessError, match="TrainerError: out of luck"):
        queue.take("train", step(2))


def test_news_of_a_step_are_kept_for_some_steps(queue: CommandQueue):
    for number in range(1, KEPT_STEPS + 2):
        with pytest.raises(TrainerError, match="never sent"):
            told(queue, "done", step(number))
        queue.take("train", step(number))
        assert told(queue, "done", step(number)) is None
        queue.done(number, {"n": number})
    assert told(queue, "done", step(2)) == {"metrics": {"n": 2}}
    with pytest.raises(TrainerError, match="long ago"):
        told(queue, "done", step(1))
    with pytest.raises(TrainerError, match="long ago"):
        told(queue, "published", step(1))
    assert told(queue, "published", step(2)) is None


def test_of_the_step_to_start_from_there_is_no_news(queue: CommandQueue):
    queue.step = queue.accepted = queue.began_at = 5
    with pytest.raises(TrainerError, match="never sent"):
        told(queue, "published", step(5))
    with pytest.raises(TrainerError, match="the next one is 6"):
        told(queue, "train", step(5))
    assert told(queue, "train", step(6)) == TAKEN


def test_asking_for_a_checkpoint_waits_for_that_one(queue: CommandQueue):
    queue.take("train", {**step(1), "checkpoint": {"ledger": {"at": 1}}})
    train = queue.next(0)
    asked = queue.take("checkpoint", {"ledger": {"at": 2}})
    assert isinstance(train, TrainCommand)
    assert train.ledger == {"at": 1}
    queue.done(1, {})
    assert told(queue, "saved", step(1)) is None
    queue.saved(1, "step-000001")
    assert told(queue, "saved", step(1)) == {"path": "step-000001"}
    assert asked() is None
    save = queue.next(0)
    assert isinstance(save, CheckpointCommand)
    assert save.ledger == {"at": 2}
    queue.saved(1, "step-000001-again")
    assert asked() == {"path": "step-000001-again"}


def test_log_ratios_are_those_of_the_newest_step_alone(queue: CommandQueue):
    for number in (1, 2):
        with pytest.raises(TrainerError, match=f"no log-ratios of step {number}"):
            queue.take("log_ratios", step(number))
        queue.take("train", step(number))
        queue.done(number, {}, bytes([number]))
        assert told(queue, "log_ratios", step(number)) == {"packed": bytes([number])}
    with pytest.raises(TrainerError, match="no log-ratios of step 1"):
        queue.take("log_ratios", step(1))
    queue.take("accumulate", part(1, of=3))
    assert told(queue, "log_ratios", step(2)), "a part of the next step takes nothing away"


def test_a_checkpoint_that_cannot_be_written_is_told_and_ends_nothing(queue: CommandQueue):
    queue.take("train", {**step(1), "checkpoint": {"ledger": {}}})
    queue.next(0)
    queue.done(1, {})
    queue.not_saved(1, "no space left")
    assert told(queue, "saved", step(1)) == {"error": "no space left"}
    asked = queue.take("checkpoint", {"ledger": {}})
    assert isinstance(queue.next(0), CheckpointCommand)
    queue.not_saved(1, "still none")
    assert asked() == {"error": "still none"}
    queue.take("train", step(2))
    assert isinstance(queue.next(0), TrainCommand)


def test_a_step_or_a_part_that_comes_again_with_another_batch_is_refused(queue: CommandQueue):
    other = {"trajectories": [trajectory(reward=0.25)]}
    queue.take("accumulate", part(1))
    with pytest.raises(TrainerError, match="part 1 of step 1 was taken with another batch"):
        queue.take("accumulate", part(1) | other)
    queue.take("train", step(1) | {"parts": 1})
    with pytest.raises(TrainerError, match=r"^step 1 was taken with another batch"):
        queue.take("train", step(1) | {"parts": 1} | other)
    shares = {"shares": [], "checkpoint": {"ledger": {}}}
    assert told(queue, "train", step(1) | {"parts": 1} | shares) == TAKEN


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
def socket(queue: CommandQueue) -> str:
    RankServer(queue, path=(path := socket_path()), token=TOKEN)
    return path


@pytest.mark.parametrize("token", ["of-another-run", ""])
@pytest.mark.parametrize("operation", ["check", "ready", "train", "stop", "x"])
def test_every_order_demands_the_token(
    queue: CommandQueue, socket: str, operation: str, token: str
):
    with pytest.raises(ConnectionError):
        ask(socket, token, operation)
    assert not queue.stopping


def test_a_process_without_a_token_trusts_nobody(queue: CommandQueue):
    RankServer(queue, path=(path := socket_path()), token="")
    with pytest.raises(ConnectionError):
        ask(path, "", "stop")
    assert not queue.stopping


def test_a_step_goes_over_the_wire(queue: CommandQueue, socket: str):
    assert ask(socket, TOKEN, "train", step(1)) == ("done", TAKEN)
    assert is_silent(socket, TOKEN, "done", step(1))
    command = queue.next(10)
    assert isinstance(command, TrainCommand)
    (sample,) = command.samples
    assert sample.token_ids.tolist() == [5, 6, 7, 8]
    assert sample.generated == 2


def test_each_answer_comes_when_there_is_something_to_say(queue: CommandQueue, socket: str):
    client = ControlConnection(socket, msgpack.packb(TOKEN))
    with client.sock:
        client.send([1, "published", step(1)], [2, "train", step(1)], [3, "done", step(1)])
        assert {call: outcome for call, outcome, _ in client.answers(2)} == {
            1: "refused",
            2: "done",
        }
        client.send([4, "published", step(1)])
        queue.done(1, {"loss": 0.5})
        assert client.answers(1) == [[3, "done", {"metrics": {"loss": 0.5}}]]
        queue.fail("no space left")
        assert client.answers(1) == [[4, "failed", "no space left"]]


def test_what_cannot_be_sent_is_a_failure_of_its_call_alone(queue: CommandQueue, socket: str):
    queue.take("train", step(1))
    queue.done(1, {"loss": object()})
    assert ask(socket, TOKEN, "done", step(1))[0] == "refused"
    assert ask(socket, TOKEN, "check") == ("done", {})


def test_a_batch_may_be_larger_than_any_value_in_it(
    queue: CommandQueue, socket: str, monkeypatch: pytest.MonkeyPatch
):
    longest = 2 * connections.RECEIVE_BYTES
    monkeypatch.setattr(connections, "LONGEST_VALUE", longest)
    order = {"step": 1, "trajectories": [trajectory(padding=bytes(longest // 3))] * 8}
    assert ask(socket, TOKEN, "train", order) == ("done", TAKEN)
    order = {"step": 2, "trajectories": [trajectory(padding=bytes(longest + 1))]}
    with pytest.raises(ConnectionError):
        ask(socket, TOKEN, "train", order)
    assert queue.accepted == 1


@pytest.mark.parametrize("order", [{}, {"step": 1}, [1], None, {"step": "x"}, {"step": 1e400}])
def test_nonsense_is_told_and_ends_nothing(socket: str, order: Any):
    client = ControlConnection(socket, msgpack.packb(TOKEN))
    with client.sock:
        client.send([1, "train", order], [2, "done", order], [3, order, {}], [4, "ready", {}])
        assert [one[1] == "done" for one in sorted(client.answers(4))] == [False] * 3 + [True]
