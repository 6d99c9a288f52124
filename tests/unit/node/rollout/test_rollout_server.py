"""What a rollout server says to its clients, with an engine that generates nothing by itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest

from libra_cli.node.connections import LONGEST_TOKEN
from libra_cli.node.rollout.turn import reason_of
from tests.control import DEADLINE_S, ControlConnection
from tests.fake_engine import TOKEN, FakeEngine, serve


@dataclass
class Served:
    """A server and its clients."""

    engine: FakeEngine
    path: str
    clients: list[ControlConnection] = field(default_factory=list)

    def client(self, first: bytes = msgpack.packb(TOKEN)) -> ControlConnection:
        self.clients.append(ControlConnection(self.path, first))
        return self.clients[-1]


@pytest.fixture
def served() -> Iterator[Served]:
    engine = FakeEngine()
    it = Served(engine, serve(engine))
    yield it
    for client in it.clients:
        client.sock.close()


def generate(most: int) -> dict[str, Any]:
    return {"prompt_ids": b"\1\0\0\0", "max_tokens": most, "score_prompt": False}


def test_many_turns_are_answered_on_one_connection_each_when_it_ends(served):
    client = served.client()
    client.send(*([call, "generate", generate(5 - call)] for call in range(1, 5)))
    answers = client.answers(4)
    assert [call for call, _, _ in answers] == [4, 3, 2, 1]
    assert all(outcome == "done" for _, outcome, _ in answers)
    for call, _, answer in answers:
        assert len(answer["token_ids"]) == 4 * (5 - call)
        assert answer["spans"] == [["e1v1", 0, 5 - call]]


def test_messages_may_come_in_pieces_and_with_the_token(served):
    whole = b"".join(map(msgpack.packb, [TOKEN, [1, "check", {}], [2, "check", {}]]))
    together = served.client(whole)
    assert together.answers(2) == [[1, "done", {}], [2, "done", {}]]
    pieces = served.client(b"")
    for index in range(len(whole)):
        pieces.sock.sendall(whole[index : index + 1])
    assert pieces.answers(2) == [[1, "done", {}], [2, "done", {}]]


@pytest.mark.parametrize(
    "first",
    [
        msgpack.packb("another token"),
        msgpack.packb(["check"]),
        b"\xc1" * 8,
        msgpack.packb("x" * (2 * LONGEST_TOKEN)),
    ],
)
def test_who_does_not_know_the_token_is_hung_up_on(served, first):
    stranger = served.client(first + msgpack.packb([1, "check", {}]))
    with suppress(ConnectionResetError):  # what it had sent was not even read
        assert stranger.sock.recv(1 << 16) == b""
    friend = served.client()
    friend.send([1, "check", {}])
    assert friend.answers(1) == [[1, "done", {}]]


def test_an_aborted_turn_answers_with_what_there_is(served):
    client = served.client()
    client.send([1, "generate", generate(0)], [2, "abort", {"call": 1}], [3, "abort", {"call": 1}])
    turn, done, again = client.answers(3)
    assert (turn[0], turn[2]["finish_reason"]) == (1, "abort")
    assert (done, again) == ([2, "done", {}], [3, "done", {}])


def test_turns_of_a_client_that_is_gone_are_aborted(served):
    engine, client = served.engine, served.client()
    client.send([1, "generate", generate(0)], [2, "check", {}])
    client.answers(1)
    client.sock.close()
    assert engine.changed.wait(DEADLINE_S)
    assert not engine.turns


def test_refusals_and_failures_name_their_reason_and_end_nothing(served):
    client = served.client()
    wrong = {"prompt_ids": b"", "max_tokens": 1}
    client.send([1, "generate", wrong], [2, "exec", {}], [3, "counters", {}], "?", [4, "check", {}])
    answers = client.answers(5)
    assert [answer[:2] for answer in answers] == [
        [1, "refused"],
        [2, "refused"],
        [3, "failed"],
        [0, "refused"],
        [4, "done"],
    ]
    assert "no prompt" in answers[0][2]
    assert "a bug" in answers[2][2]


def test_a_client_that_does_not_read_keeps_nobody_waiting(served):
    slow, quick = served.client(), served.client()
    orders = [[call, "generate", generate(20_000)] for call in range(64)]
    slow.send(*orders)  # 10 MB of answers, which no socket holds
    quick.send([1, "generate", generate(3)], [2, "check", {}])
    assert {answer[0] for answer in quick.answers(2)} == {1, 2}
    assert sorted(answer[0] for answer in slow.answers(64)) == list(range(64))


def load(label: str, loads: int) -> dict[str, Any]:
    return {
        "directory": f"/{label}",
        "label": label,
        "partly": False,
        "clear_cache": True,
        "loads": loads,
    }


def test_a_load_that_comes_late_after_anothers_is_refused_and_changes_nothing(served):
    late, quick = served.client(), served.client()
    for client in (late, quick):
        client.send([1, "prepare", {"directory": "/v"}])
        assert client.answers(1) == [[1, "done", {"done": True, "loads": 0}]]
    quick.send([2, "load", load("e0v6", 0)])
    assert quick.answers(1)[0][1] == "done"
    late.send([2, "load", load("e0v5", 0)])
    ((_, outcome, reason),) = late.answers(1)
    assert outcome == "refused"
    assert "1 have begun already" in reason
    assert served.engine.loaded == ["e0v6"]


def test_a_load_that_failed_counts_too(served):
    client = served.client()
    served.engine.load = None  # a bug in the engine
    client.send([1, "load", load("e0v1", 0)], [2, "prepare", {"directory": "/v"}])
    failed, prepared = client.answers(2)
    assert failed[1] in ("refused", "failed")
    assert prepared[2]["loads"] == 1


def test_turns_that_end_before_a_load_are_answered_if_it_fails(served):
    client = served.client()
    client.send([1, "generate", generate(0)], [2, "check", {}])
    client.answers(1)
    served.engine.last_steps_of, served.engine.damaged = list(served.engine.turns), True
    client.send([3, "load", load("e0v1", 0)])
    turn, failed = client.answers(2)
    assert (turn[0], turn[1], turn[2]["finish_reason"]) == (1, "done", "stop")
    assert failed == [3, "failed", "RuntimeError: /e0v1 is damaged"]


def test_a_turn_that_vllm_rejects_says_why_where_vllm_does():
    error = SimpleNamespace(code="validation_error", message="no such token", retryable=False)
    new = SimpleNamespace(finish_reason="error", error=error)
    assert reason_of(new) == "validation_error: no such token"
    assert reason_of(SimpleNamespace(finish_reason="error")) == "error"  # vLLM 0.32
    assert reason_of(SimpleNamespace(finish_reason="stop", error=None)) == "stop"
