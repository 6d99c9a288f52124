"""What ranks tell each other is no pickle, and what torch unpickles names no more than plans."""

from __future__ import annotations

import os
import pickle
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

import msgpack  # noqa: E402
import numpy as np  # noqa: E402
from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from numpy.typing import NDArray  # noqa: E402
from torch.distributed import distributed_c10d  # noqa: E402
from torch.distributed.checkpoint.planner import LoadPlan  # noqa: E402

from libra_cli.config.errors import TrainerError  # noqa: E402
from libra_cli.node.batch.samples import SampleImage, TokenSample  # noqa: E402
from libra_cli.node.batch.shares import WorkerShare  # noqa: E402
from libra_cli.node.command_queue import IdleCommand, StopCommand  # noqa: E402
from libra_cli.node.model import messages, torch_objects  # noqa: E402
from libra_cli.node.trainer.commands import CheckpointCommand, TrainCommand  # noqa: E402


def again(value: object) -> Any:
    data, sent = messages.encode(value)
    found, empty = messages.decode(data)
    for tensor, numbers in zip(empty, sent, strict=True):
        tensor.copy_(numbers)
    return found


SAMPLE = TokenSample(
    group=3,
    member=1,
    token_ids=np.array([5, 6], dtype="<i4"),
    logprobs=np.array([0, -1.5], dtype="<f4"),
    loss_mask=np.array([0, 1], dtype="<i1"),
    reward=1.0,
    advantages=((0, 0.5),),
    token_advantages=np.array([0, 2.5], dtype="<f4"),
    fresh=True,
    behind=((1, 2),),
    turns=((0, 1, 0.5),),
)
SHARE = WorkerShare("n/0", 3, "https://h:1#x", "v000001-e0", frozenset({(1, 0), (2, 3)}))


@pytest.mark.parametrize("command", [IdleCommand(), StopCommand(), CheckpointCommand({"a": [1]})])
def test_a_command_arrives_as_it_was_given(command: object) -> None:
    assert again(command) == command


def test_a_batch_arrives_with_its_arrays_and_shares() -> None:
    found = again(TrainCommand(7, (SAMPLE,), {"step": 7}, (SHARE,)))
    assert (found.step, found.ledger, found.shares) == (7, {"step": 7}, (SHARE,))
    (sample,) = found.samples
    assert (sample.trajectory, sample.advantages, sample.behind) == ((3, 1), ((0, 0.5),), ((1, 2),))
    assert sample.turns == SAMPLE.turns
    for name in ("token_ids", "logprobs", "loss_mask", "token_advantages"):
        ours, theirs = getattr(SAMPLE, name), getattr(sample, name)
        assert (theirs.dtype, theirs.tolist()) == (ours.dtype, ours.tolist())
        theirs[0] = 0  # an array of one's own, not a view of what came


def test_images_of_a_batch_arrive_with_their_names() -> None:
    images = (SampleImage(0, 2, b"png"),)
    (sample,) = again(TrainCommand(7, (replace(SAMPLE, images=images),))).samples
    assert sample.images == images
    assert [(one.start, one.tokens, one.png) for one in sample.images] == [(0, 2, b"png")]


def test_large_arrays_of_a_batch_go_beside_it_since_an_extension_holds_4_gib() -> None:
    routes: NDArray[np.uint16] = np.arange(2**20, dtype="<u2").reshape(-1, 4, 8)
    routes.flags.writeable = False
    turned = np.asfortranarray(routes[:, :, 0].astype(np.float32).repeat(8, axis=1))
    samples = tuple(replace(SAMPLE, member=number, routes=routes) for number in range(3))
    data, sent = messages.encode(TrainCommand(7, samples, {"turned": turned}))
    assert len(data) < 10_000
    assert sum(one.nbytes for one in sent) == 3 * routes.nbytes + turned.nbytes
    found = again(TrainCommand(7, samples, {"turned": turned}))
    for sample in found.samples:
        assert sample.routes.dtype == routes.dtype
        assert np.array_equal(sample.routes, routes)
        assert sample.token_ids.tolist() == [5, 6]
    assert np.array_equal(found.ledger["turned"], turned)
    found.samples[0].routes[0] = 1
    assert np.array_equal(found.samples[1].routes, routes), "each has its own"


def test_tensors_of_any_format_and_place_arrive() -> None:
    state = OrderedDict(a=torch.arange(6.0).view(2, 3).T, b=[torch.ones(3, dtype=torch.bfloat16)])
    found = again({"model": state, "step": torch.tensor(4), 3: torch.empty(0), "x": np.float64(2)})
    assert torch.equal(found["model"]["a"], state["a"])
    assert torch.equal(found["model"]["b"][0], state["b"][0])
    assert (int(found["step"]), found[3].shape, found["x"]) == (4, (0,), 2.0)


json_like = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda parts: st.lists(parts) | st.dictionaries(st.text(), parts) | st.tuples(parts, parts),
    max_leaves=20,
)


@given(json_like)
def test_any_plain_value_arrives(value: object) -> None:
    assert again(value) == value


@dataclass
class Foreign:
    """Of tests, and so not of the package."""


def test_what_has_no_form_is_refused_by_who_sends_it() -> None:
    for value in (object(), Foreign(), os.system):
        with pytest.raises(TypeError, match="has no form"):
            messages.encode(value)


@pytest.mark.parametrize(
    ("kind", "parts"),
    [
        (messages.DATACLASS, ["os", "system", "true"]),
        (messages.DATACLASS, ["libra_cli.node.http", "BearerHandler"]),
        (messages.DATACLASS, ["libra_cli.not_imported", "X"]),
        (messages.TENSOR, ["load", [1]]),
        (99, []),
    ],
)
def test_what_names_anything_else_is_refused_by_who_hears_it(kind: int, parts: list[Any]) -> None:
    data = msgpack.packb(msgpack.ExtType(kind, msgpack.packb(parts)))
    with pytest.raises(TrainerError, match="another rank"):
        messages.decode(data)


class Harmful:
    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/harm",)


def test_torch_runs_nothing_that_a_pickle_of_another_rank_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(distributed_c10d, "_unpickler", pickle.Unpickler)
    torch_objects.restrict()
    for value in (Harmful(), eval, print, SAMPLE):
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        with pytest.raises(TrainerError, match="another rank sent a pickle that names"):
            distributed_c10d._tensor_to_object(data, data.numel(), None)
    for fine in (
        LoadPlan([]),
        torch.Size([3]),
        torch.float32,
        OSError(28, "full"),
        [1, {"a": b"x"}],
    ):
        data = torch.frombuffer(bytearray(pickle.dumps(fine)), dtype=torch.uint8)
        found = distributed_c10d._tensor_to_object(data, data.numel(), None)
        assert str(found) == str(fine)
