"""A share's way from the gradient server of a worker to a rank of the trainer, over real HTTP."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from libra_cli.config.errors import TrainerError
from libra_cli.node.batch.log_ratios import pack_log_ratios
from libra_cli.node.batch.samples import read_samples
from libra_cli.node.batch.shares import WorkerShare, read_shares, rows_of
from libra_cli.node.credentials import Credentials
from libra_cli.node.gradient.client import GradientClient, Rows
from libra_cli.node.gradient.server import FinishedGradient, GradientStore, Piece, serve
from tests import credentials
from tests.credentials import TOKEN, credentials_of, url_of

DEADLINE_S = 10.0
ABOUT = {"incarnation": "3", "step": "7", "version": "v000006-e1"}
VALUES: NDArray[np.float32] = np.arange(15, dtype="<f4").reshape(5, 3)
LOG_RATIOS = {(1, 0, 0): np.linspace(-1, 1, 20, dtype=np.float16)}
BIAS: NDArray[np.float32] = np.array(0.5, dtype="<f4")


@pytest.fixture
def store(tmp_path: Path) -> GradientStore:
    """A share of step 7 that is under way; of its two tensors the scalar is not finished."""
    store = GradientStore(incarnation=3)
    store.begin(7, "v000006-e1")
    store.finish("weight", in_pieces(tmp_path, world=2))
    return store


def in_pieces(directory: Path, *, world: int) -> FinishedGradient:
    pieces = []
    for rank in range(world):
        start, stop = rows_of(5, rank=rank, world=world)
        path = directory / f"weight.{rank}"
        VALUES[start:stop].tofile(path)
        pieces.append(Piece(path, start, stop))
    return FinishedGradient((5, 3), pieces)


def complete(store: GradientStore, directory: Path, step: int = 7) -> None:
    BIAS.tofile(directory / "bias")
    store.finish("bias", FinishedGradient((), [Piece(directory / "bias", 0, 1)]))
    store.done(step, {"loss": 1.0}, 20, 0.5, pack_log_ratios(LOG_RATIOS))


@pytest.fixture
def port(store: GradientStore) -> Iterator[int]:
    server = serve(store, bind="127.0.0.1", port=0, credentials=credentials_of())
    yield server.server_address[1]
    server.shutdown()
    server.server_close()


def ask(port: int, path: str, query: Mapping[str, Any], token: str = TOKEN) -> tuple[int, bytes]:
    return credentials.ask(url_of(port), f"{path}?{urlencode(query)}", token=token)


def fetch(
    port: int, *, shows: Credentials | None = None, rank: int = 0, world: int = 1, **changes: Any
) -> GradientClient:
    version = changes.pop("version", "v000006-e1")
    share = WorkerShare("gpu-01/0", 3, url_of(port), version, frozenset({(1, 0)}))
    wanted = {
        "weight": Rows((5, 3), *rows_of(5, rank=rank, world=world)),
        "bias": Rows((), *rows_of(1, rank=rank, world=world)),
    }
    given = {"tokens": 20, "wanted": wanted, "credentials": shows or credentials_of(), **changes}
    found = GradientClient(share, given.pop("step", 7), **given)
    found.start()
    return found


GRADIENT: dict[str, Any] = {**ABOUT, "tensor": "weight", "start": 0, "stop": 5}


@pytest.mark.parametrize("path", ["/share", "/gradient", "/log-ratios", "/health", "/x"])
def test_every_route_demands_the_token(port: int, path: str):
    assert ask(port, path, GRADIENT, token="of-another-run")[0] == HTTPStatus.UNAUTHORIZED


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"incarnation": "2"}, HTTPStatus.CONFLICT),
        ({"step": "6"}, HTTPStatus.CONFLICT),
        ({"version": "v000006-e0"}, HTTPStatus.CONFLICT),
        ({"tensor": "bias"}, HTTPStatus.NOT_FOUND),
        ({"stop": 6}, HTTPStatus.BAD_REQUEST),
        ({"start": 3, "stop": 2}, HTTPStatus.BAD_REQUEST),
        ({"start": "first"}, HTTPStatus.BAD_REQUEST),
    ],
)
def test_a_gradient_is_refused_that_is_old_or_not_there(
    port: int, changes: dict[str, Any], status: HTTPStatus
):
    assert ask(port, "/gradient", GRADIENT | changes)[0] == status


def test_nothing_of_a_share_is_served_once_the_next_is_taken(store: GradientStore, port: int):
    assert ask(port, "/gradient", GRADIENT)[0] == HTTPStatus.OK
    store.begin(8, "v000007-e1")
    assert ask(port, "/gradient", GRADIENT)[0] == HTTPStatus.CONFLICT
    assert ask(port, "/share", {**ABOUT, "wait_s": 5})[0] == HTTPStatus.CONFLICT


def test_a_share_that_is_done_late_does_not_end_the_next_one(store: GradientStore):
    store.begin(8, "v000007-e1")
    store.done(7, {"loss": 1.0}, 20, 0.5, b"")
    assert store.wanted()


@given(
    rows=st.integers(1, 20),
    world=st.integers(1, 6),
    cut=st.tuples(st.integers(0, 20), st.integers(0, 20)),
)
def test_any_rows_are_read_whatever_the_worker_s_world(
    tmp_path_factory: pytest.TempPathFactory, rows: int, world: int, cut: tuple[int, int]
):
    directory = tmp_path_factory.mktemp("pieces")
    values = np.random.default_rng(rows).random((rows, 2), dtype=np.float32)
    pieces = []
    for rank in range(world):
        start, stop = rows_of(rows, rank=rank, world=world)
        values[start:stop].tofile(directory / str(rank))
        pieces.append(Piece(directory / str(rank), start, stop))
    first, last = sorted(min(one, rows) for one in cut)
    assert FinishedGradient((rows, 2), pieces).read(first, last) == values[first:last].tobytes()


@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_ranks_of_the_trainer_get_their_rows_and_together_everything(
    store: GradientStore, port: int, tmp_path: Path, world: int
):
    complete(store, tmp_path)
    parts, bias = [], []
    for rank in range(world):
        one = fetch(port, rank=rank, world=world)
        arrival = one.settle(time.monotonic(), DEADLINE_S)
        assert arrival.problem == ""
        assert (arrival.sums, arrival.seconds) == ({"loss": 1.0}, 0.5)
        parts.append(one.rows["weight"])
        bias.append(one.rows["bias"])
        assert arrival.bytes == parts[-1].nbytes + bias[-1].nbytes
    assert np.concatenate(parts).tolist() == VALUES.reshape(-1).tolist()
    assert np.concatenate(bias).tolist() == [0.5]


def test_a_tensor_is_fetched_while_the_share_is_still_running(
    store: GradientStore, port: int, tmp_path: Path
):
    one = fetch(port)
    wait_for(lambda: "weight" in one.rows)
    assert store.state == "running"
    complete(store, tmp_path)
    assert one.settle(time.monotonic(), DEADLINE_S).problem == ""


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_what_is_changed_on_its_way_is_asked_for_again_and_never_used(
    store: GradientStore, port: int, tmp_path: Path
) -> None:
    complete(store, tmp_path)
    with credentials.relay(port) as hop:
        assert fetch(hop.port).settle(time.monotonic(), DEADLINE_S).problem == ""
        hop.flip_at = 2 * hop.came_back - 400  # in an answer of the next one
        one = fetch(hop.port)
        arrival = one.settle(time.monotonic(), DEADLINE_S)
    assert "SSLError" in one._trouble
    assert arrival.problem == ""
    assert one.rows["weight"].tolist() == VALUES.reshape(-1).tolist()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"step": 6}, "/share answered 409"),
        ({"shows": credentials_of(token="of-another-run")}, "/share answered 401"),
        ({"shows": credentials_of(run="another")}, "another host answers there"),
        ({"tokens": 19}, "of 20 tokens instead of 19"),
        ({"wanted": {"weight": Rows((5, 4), 0, 5)}}, r"weight is \(5, 3\) there"),
        ({"wanted": {}}, "the trainer has no such tensor"),
        (
            {
                "wanted": {
                    "weight": Rows((5, 3), 0, 5),
                    "bias": Rows((), 0, 1),
                    "other": Rows((2,), 0, 2),
                }
            },
            "done without other",
        ),
    ],
)
def test_a_share_that_is_not_the_one_asked_for_is_not_used(
    store: GradientStore, port: int, tmp_path: Path, changes: dict[str, Any], reason: str
):
    complete(store, tmp_path)
    problem = fetch(port, **changes).settle(time.monotonic(), DEADLINE_S).problem
    assert re.search(reason, problem), problem


def test_one_rank_gets_the_log_ratios_with_its_rows(
    store: GradientStore, port: int, tmp_path: Path
):
    assert ask(port, "/log-ratios", ABOUT)[0] == HTTPStatus.NOT_FOUND, "it is not done"
    complete(store, tmp_path)
    first, second = fetch(port, log_ratios=True), fetch(port)
    for one in (first, second):
        assert one.settle(time.monotonic(), DEADLINE_S).problem == ""
    assert first.log_ratios.keys() == LOG_RATIOS.keys()
    np.testing.assert_array_equal(first.log_ratios[1, 0, 0], LOG_RATIOS[1, 0, 0])
    assert second.log_ratios == {}
    store.begin(8, "v000007-e1")
    assert ask(port, "/log-ratios", ABOUT)[0] == HTTPStatus.CONFLICT


def test_a_share_that_the_worker_has_yet_to_take_is_awaited(
    store: GradientStore, port: int, tmp_path: Path
):
    early = fetch(port, step=8)
    assert "not done within 0.5 s" in early.settle(time.monotonic(), 0.5).problem
    patient = fetch(port, step=8)
    store.begin(8, "v000006-e1")
    store.finish("weight", in_pieces(tmp_path, world=2))
    complete(store, tmp_path, step=8)
    assert patient.settle(time.monotonic(), DEADLINE_S).problem == ""


def test_a_share_of_a_trainer_that_went_back_is_awaited(
    store: GradientStore, port: int, tmp_path: Path
):
    store.drop(7, "v000003-e2 is to be loaded")
    patient = fetch(port, step=4, version="v000003-e2")
    assert "not done within 0.5 s" in patient.settle(time.monotonic(), 0.5).problem
    patient = fetch(port, step=4, version="v000003-e2")
    store.begin(4, "v000003-e2")
    store.finish("weight", in_pieces(tmp_path, world=2))
    complete(store, tmp_path, step=4)
    assert patient.settle(time.monotonic(), DEADLINE_S).problem == ""
    late = fetch(port, step=8, version="v000007-e1").settle(time.monotonic(), DEADLINE_S)
    assert "answered 409" in late.problem, "the trainer before that one is gone"


@pytest.mark.parametrize("version", ["v1", "7", "v000006-e", "v000006-ex"])
def test_a_version_whose_name_tells_no_trainer_is_answered(port: int, version: str):
    later = ask(port, "/share", {**ABOUT, "step": "8", "version": version})
    assert later[0] == HTTPStatus.CONFLICT


def test_versions_whose_names_tell_no_trainer_are_awaited_by_step(store: GradientStore):
    store.begin(7, "v1")
    for step, state in ((7, "running"), (8, "awaited")):
        status, answer = store.share({**ABOUT, "step": str(step), "version": "v1"}, 0, 0.0)
        assert (status, answer["state"]) == (HTTPStatus.OK, state)


def test_a_worker_that_failed_says_why(store: GradientStore, port: int):
    store.drop(7, "the worker was stopped")
    arrival = fetch(port).settle(time.monotonic(), DEADLINE_S)
    assert arrival.problem == "the worker failed: the worker was stopped"


def test_a_worker_that_is_gone_is_known_to_be_at_once():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    arrival = fetch(port).settle(time.monotonic(), DEADLINE_S)
    assert arrival.problem == "nothing listens there any more"
    assert arrival.waited_s < DEADLINE_S / 2


def test_a_silent_worker_is_waited_for_no_longer_than_the_trainer_is_patient():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        since = time.monotonic()
        one = fetch(listener.getsockname()[1])
        arrival = one.settle(since, 0.2)
        assert time.monotonic() - since < DEADLINE_S / 2
    assert arrival.problem.startswith(
        "not done within 0.2 s of the trainer's own part: no answer yet"
    )
    assert arrival.waited_s >= 0.2


def test_a_slow_worker_is_told_from_a_silent_one(store: GradientStore, port: int):
    one = fetch(port)
    wait_for(lambda: "weight" in one.rows)
    problem = one.settle(time.monotonic(), 0.0).problem
    assert "running, 1 of 2 tensors" in problem


def test_a_wait_over_since_the_trainer_was_busy_counts_for_nothing(
    store: GradientStore, port: int, tmp_path: Path
):
    complete(store, tmp_path)
    one = fetch(port)
    assert one.settle(time.monotonic(), DEADLINE_S).problem == ""
    assert one.settle(time.monotonic(), 0.0).waited_s == 0.0


def share(members: list[int], url: str = "https://10.0.0.3:21007#name") -> dict[str, Any]:
    return {
        "worker": "b/0",
        "incarnation": 1,
        "url": url,
        "version": "v000000-e0",
        "trajectories": [[3, member] for member in members],
    }


@pytest.mark.parametrize(
    ("shares", "reason"),
    [
        ([share([4])], r"b/0 names trajectory \(3, 4\)"),
        ([share([0]), share([0])], r"b/0 names trajectory \(3, 0\)"),
        ([share([0], url="10.0.0.3:21007")], "no https://address:port#name"),
    ],
)
def test_a_share_must_be_of_trajectories_that_came_and_of_nobody_else(
    shares: list[dict[str, Any]], reason: str
):
    message = {
        "group": 3,
        "member": 0,
        "token_ids": bytes(8),
        "logprobs": bytes(8),
        "loss_mask": bytes([0, 1]),
        "reward": 1.0,
        "fresh": 1,
        "behind": [],
        "advantages": [[0, 1.0]],
    }
    samples = read_samples([message], max_len=16)
    with pytest.raises(TrainerError, match=reason):
        read_shares(shares, samples)
