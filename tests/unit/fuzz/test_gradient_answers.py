"""A gradient worker says anything to the trainer: the share is used whole, or not at all."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from math import isfinite
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from libra_cli.node.batch.log_ratios import pack_log_ratios
from libra_cli.node.batch.shares import WorkerShare
from libra_cli.node.gradient.client import GradientClient, Rows
from tests.credentials import credentials_of
from tests.unit.fuzz import nonsense

DEADLINE_S = 10.0
TOKENS = 20
DONE: dict[str, Any] = {
    "state": "done",
    "error": "",
    "tensors": {"weight": [5, 3]},
    "sums": {"loss": 1.0},
    "tokens": TOKENS,
    "seconds": 0.5,
}
RATIOS = pack_log_ratios({(1, 0, 0): np.zeros(TOKENS, dtype=np.float16)})
ROWS = np.arange(15, dtype="<f4").tobytes()
shares = nonsense.json_like(DONE)
ratios_told = st.one_of(st.just(RATIOS), st.binary(max_size=80), st.just(RATIOS[:-1]))
blocks = st.one_of(st.just(ROWS), st.binary(max_size=80), st.just(ROWS[:-1]), st.just(b""))


class Anything:
    """A connection over which these bytes come, and after them nothing."""

    def __init__(self, told: bytes, rows: bytes, ratios: bytes) -> None:
        self._told = {"/share": [told, told], "/gradient": [rows] * 4, "/log-ratios": [ratios]}

    def ask(self, path: str, query: Mapping[str, Any], timeout_s: float) -> bytes:
        if not self._told[path]:
            raise ConnectionRefusedError
        return self._told[path].pop()

    def close(self) -> None: ...


def settled(told: bytes, rows: bytes, ratios: bytes = RATIOS) -> tuple[Any, GradientClient]:
    share = WorkerShare("gpu-01/0", 3, "https://10.0.0.1:1#n", "v000006-e1", frozenset({(1, 0)}))
    wanted = {"weight": Rows((5, 3), 0, 5)}
    given = {"tokens": TOKENS, "wanted": wanted, "credentials": credentials_of()}
    client = GradientClient(share, 7, **given, log_ratios=True)  # type: ignore[arg-type]
    client._connection = Anything(told, rows, ratios)  # type: ignore[assignment]
    client.start()
    arrival = client.settle(time.monotonic(), DEADLINE_S)
    client.abandon()
    return arrival, client


def test_a_share_as_it_should_be_is_used():
    arrival, client = settled(json.dumps(DONE).encode(), ROWS)
    assert (arrival.problem, arrival.sums, arrival.seconds) == ("", {"loss": 1.0}, 0.5)
    assert client.rows["weight"].tolist() == list(range(15))
    assert client.log_ratios.keys() == {(1, 0, 0)}


@given(told=shares, rows=blocks, ratios=ratios_told)
def test_whatever_a_worker_says_its_share_is_whole_or_has_a_problem(
    told: bytes, rows: bytes, ratios: bytes
):
    with nonsense.thrown_at("gradients"):
        arrival, client = settled(told, rows, ratios)
        if arrival.problem:
            assert (arrival.sums, arrival.seconds) == ({}, None)
            return
        assert client.rows["weight"].shape == (15,)
        assert isfinite(arrival.seconds)
        assert all(isinstance(name, str) and isfinite(one) for name, one in arrival.sums.items())
