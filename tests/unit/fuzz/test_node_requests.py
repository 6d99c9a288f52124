"""What comes to the processes on a host: an order is answered or refused, a manifest damaged."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from libra_cli.node.command_queue import RankServer
from libra_cli.node.gradient.commands import WorkerCommandQueue
from libra_cli.node.gradient.server import GradientStore
from libra_cli.node.trainer.commands import CommandQueue
from libra_cli.node.weights.chunks import NAME, ManifestError, read_manifest
from tests.unit.fuzz import nonsense

SAMPLE = {
    "group": 0,
    "member": 0,
    "token_ids": b"\1\0\0\0\2\0\0\0",
    "logprobs": b"\0\0\0\0\0\0\0\0",
    "loss_mask": b"\0\1",
    "reward": 1.0,
    "fresh": 1,
    "behind": [],
    "advantages": [[0, 1.0]],
    "token_advantages": None,
}
TRAIN = {"step": 1, "checkpoint": None, "trajectories": [SAMPLE], "parts": 0, "shares": []}
PART = {"step": 1, "part": 1, "trajectories": [SAMPLE]}
SHARE = {
    "step": 1,
    "trainer_incarnation": 1,
    "incarnation": 1,
    "version": "e1v0",
    "trajectories": [SAMPLE],
}
LOAD = {"directory": "/v", "name": "e1v0", "trainer_incarnation": 1}
ABOUT = {"step": 1, "part": 1}
ORDERS: dict[str, Any] = {
    "train": TRAIN,
    "accumulate": PART,
    "share": SHARE,
    "checkpoint": {"ledger": {}},
    "load": LOAD,
    "done": ABOUT,
    "published": ABOUT,
    "accumulated": ABOUT,
    "saved": ABOUT,
    "log_ratios": ABOUT,
    "ready": {},
    "stop": {},
    "nothing": {},
}
messages = st.sampled_from(sorted(ORDERS)).flatmap(
    lambda operation: nonsense.changed([1, operation, ORDERS[operation]])
)


class Said:
    """A connection that remembers what it should send."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, message: Any) -> None:
        self.sent.append(msgpack.packb(message))


def obeyed(queue: Any, message: Any) -> Said:
    """What a rank 0 says to a message at once."""
    server, said = RankServer.__new__(RankServer), Said()
    server._queue, server._awaited = queue, []
    server._obey(said, message)  # type: ignore[arg-type]
    return said


def received(message: Any) -> Any:
    """The message as it is read from a connection, which is closed where its texts are no UTF-8."""
    try:
        return msgpack.unpackb(nonsense.as_msgpack(message), strict_map_key=False)
    except UnicodeDecodeError:
        reject()


def trainer() -> CommandQueue:
    queue = CommandQueue(max_len=8)
    queue.state = "ready"
    return queue


def worker() -> WorkerCommandQueue:
    queue = WorkerCommandQueue(max_len=8, store=GradientStore(1))
    queue.ready()
    return queue


@given(message=messages, is_trainer=st.booleans())
def test_an_order_is_answered_once_or_later(message, is_trainer):
    queue = trainer() if is_trainer else worker()
    with nonsense.thrown_at("requests to nodes"):
        said = obeyed(queue, received(message))
        assert len(said.sent) <= 1
    assert queue.state == "ready"


MANIFEST = {
    "files": {"model.safetensors": {"bytes": 3, "sha256": ["ab"]}},
    "delta": {"base": "e1v0", "files": {"model.safetensors.delta": {"bytes": 1, "sha256": ["a"]}}},
}


@given(raw=nonsense.json_like(MANIFEST))
def test_a_manifest_names_plain_files_or_is_damaged(raw):
    with nonsense.thrown_at("manifests"):
        try:
            manifest = read_manifest(raw)
        except ManifestError:
            return
        assert all(NAME.fullmatch(name) for name in (*manifest.files, *manifest.deltas))


def test_a_manifest_of_infinite_or_endless_numbers_is_damaged():
    for wrong in (b'{"files": {"a": {"bytes": 1e999, "sha256": []}}}', b"[" * 100_000):
        with pytest.raises(ManifestError):
            read_manifest(wrong)
