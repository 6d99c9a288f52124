"""Gradients leave a worker while its last backward pass is still going on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from libra_cli.node.batch.shares import WorkerShare  # noqa: E402
from libra_cli.node.gradient.client import GradientClient, Rows  # noqa: E402
from libra_cli.node.gradient.server import GradientStore, serve  # noqa: E402
from libra_cli.node.gradient.writer import GradientWriter  # noqa: E402
from libra_cli.node.http import Blob  # noqa: E402
from libra_cli.node.model.policy import PolicyModel  # noqa: E402
from tests.credentials import credentials_of, url_of  # noqa: E402

DEADLINE_S = 10.0
VERSION = "v000006-e1"


class OneRank:
    """As much of ``PolicyModel`` as a writer asks for."""

    world, rank, sharded = 1, 0, False
    device = torch.device("cpu")

    def __init__(self, model: Any) -> None:
        self._model = model

    def parameters(self) -> dict[str, Any]:
        return dict(self._model.named_parameters())

    def clear_gradients(self) -> None:
        self._model.zero_grad()

    def gather(self, value: Any) -> list[Any]:
        return [value]


class OneOfFour(OneRank):
    """A rank that writes two rows of eight: not those of its number, as where experts are parted.

    The ranks finish one after the other, rank 0 as the last.
    """

    world = 4

    def __init__(self, model: Any, rank: int, told: dict[int, Any]) -> None:
        super().__init__(model)
        self.rank = rank
        self._told = told

    def own_rows(self, tensor: Any) -> tuple[int, int]:
        start = (0, 4, 2, 6)[self.rank]
        return start, start + 2

    def gather(self, value: Any) -> list[Any]:
        self._told[self.rank] = value
        return [self._told[rank] for rank in sorted(self._told)]


class Gate(torch.autograd.Function):  # type: ignore[misc,name-defined]
    """Lets the backward pass go below it only when a condition holds."""

    @staticmethod
    def forward(context: Any, values: Any, wait: Callable[[], None]) -> Any:
        context.wait = wait
        return values.clone()

    @staticmethod
    def backward(context: Any, gradient: Any) -> Any:
        context.wait()
        return gradient, None


def writer_of(
    model: Any, store: GradientStore, tmp_path: Path, dtype: str = "float32"
) -> GradientWriter:
    return GradientWriter(cast(PolicyModel, OneRank(model)), store, tmp_path / "outbox", dtype)


@pytest.fixture
def store() -> GradientStore:
    return GradientStore(incarnation=3)


@pytest.fixture
def port(store: GradientStore) -> Iterator[int]:
    server = serve(store, bind="127.0.0.1", port=0, credentials=credentials_of())
    yield server.server_address[1]
    server.shutdown()
    server.server_close()


def test_upper_layers_are_fetched_before_the_gradients_of_lower_ones_exist(
    store: GradientStore, port: int, tmp_path: Path
):
    lower, upper, unused = torch.nn.Linear(4, 3), torch.nn.Linear(3, 2), torch.nn.Linear(2, 2)
    model = torch.nn.ModuleDict({"lower": lower, "upper": upper, "unused": unused})
    writer = writer_of(model, store, tmp_path)
    store.begin(7, VERSION)
    writer.begin(7)
    wanted = {
        name: Rows(tuple(one.shape), 0, one.shape[0]) for name, one in model.named_parameters()
    }
    share = WorkerShare("gpu-01/0", 3, url_of(port), VERSION, frozenset({(1, 0)}))
    fetch = GradientClient(share, 7, tokens=8, wanted=wanted, credentials=credentials_of())
    fetch.start()
    seen: list[set[str]] = []

    def upper_is_fetched() -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not {"upper.weight", "upper.bias"} <= fetch.rows.keys():
            assert time.monotonic() < deadline
            time.sleep(0.005)
        seen.append(set(fetch.rows))
        assert lower.weight.grad is not None  # of the first pass
        assert store.wanted()

    inputs = torch.randn(8, 4)
    writer.before(last=False)
    upper(lower(inputs[:4])).sum().backward()
    assert not fetch.rows
    writer.before(last=True)
    upper(Gate.apply(lower(inputs[4:]), upper_is_fetched)).sum().backward()
    writer.finish()
    store.done(7, {"loss": 1.0}, 8, 0.1, b"")
    assert fetch.settle(time.monotonic(), DEADLINE_S).problem == ""
    assert seen == [{"upper.weight", "upper.bias"}]
    expected = torch.autograd.grad(upper(lower(inputs)).sum(), [lower.weight, upper.weight])
    for name, gradient in zip(["lower.weight", "upper.weight"], expected, strict=True):
        assert fetch.rows[name].tolist() == pytest.approx(gradient.flatten().tolist(), rel=1e-5)
    assert not fetch.rows["unused.weight"].any()


def test_files_of_a_share_go_when_the_next_comes_and_all_of_them_at_the_end(
    store: GradientStore, tmp_path: Path
):
    model = torch.nn.ModuleDict({"layer": torch.nn.Linear(2, 2)})
    writer = writer_of(model, store, tmp_path)
    for step in (7, 8):
        writer.begin(step)
        writer.finish()
        assert [path.name for path in (tmp_path / "outbox").iterdir()] == [f"step-{step:06d}"]
    writer.clear()
    assert not (tmp_path / "outbox").exists()


def test_what_is_sent_in_bfloat16_is_the_nearest_number_in_half_the_bytes(
    store: GradientStore, port: int, tmp_path: Path
):
    model = torch.nn.Linear(300, 7)
    writer = writer_of(model, store, tmp_path, "bfloat16")
    store.begin(7, VERSION)
    writer.begin(7)
    writer.before(last=True)
    model(torch.randn(4, 300)).square().sum().backward()
    writer.finish()
    store.done(7, {}, 8, 0.1, b"")
    wanted = {"weight": Rows((7, 300), 2, 5), "bias": Rows((7,), 2, 5)}
    share = WorkerShare("gpu-01/0", 3, url_of(port), VERSION, frozenset({(1, 0)}))
    fetch = GradientClient(
        share, 7, tokens=8, wanted=wanted, credentials=credentials_of(), dtype="bfloat16"
    )
    fetch.start()
    arrival = fetch.settle(time.monotonic(), DEADLINE_S)
    assert (arrival.problem, arrival.bytes) == ("", 2 * 3 * 301)
    for name, parameter in model.named_parameters():
        sent = parameter.grad[2:5].to(torch.bfloat16).float().flatten()
        assert fetch.rows[name].dtype == "float32"
        assert fetch.rows[name].tolist() == sent.tolist()


def test_rows_of_ranks_are_served_where_they_stand_in_the_tensor(
    store: GradientStore, tmp_path: Path
):
    model, told = torch.nn.Linear(3, 8), dict[int, Any]()
    model(torch.randn(4, 3)).square().sum().backward()
    wanted = {name: one.grad.clone() for name, one in model.named_parameters()}
    writers = [
        GradientWriter(
            cast(PolicyModel, OneOfFour(model, rank, told)),
            None if rank else store,
            tmp_path / "outbox",
            "float32",
        )
        for rank in range(4)
    ]
    for writer in writers:
        writer.begin(7)
    store.begin(7, VERSION)
    for name, parameter in model.named_parameters():
        parameter.grad = wanted[name]
    for writer in reversed(writers):
        writer.finish()
    about = {"incarnation": "3", "step": "7", "version": VERSION}
    for name, gradient in wanted.items():
        for first, last in ((0, 8), (1, 5)):
            _, found = store.gradient(about, name, first, last)
            assert isinstance(found, Blob)
            assert found.data == gradient[first:last].numpy().tobytes(), name
