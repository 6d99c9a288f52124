"""What comes to the processes on a host: a request is answered or refused, a manifest damaged."""

from __future__ import annotations

import io
from http import HTTPStatus
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra_cli.node.gradient.commands import WorkerCommandQueue, _WorkerHandler
from libra_cli.node.gradient.server import GradientStore
from libra_cli.node.trainer.commands import CommandQueue, _TrainerHandler
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
LOAD = {"directory": "/v", "name": "e1v0", "version": 0, "trainer_incarnation": 1}
PACKED = {"/train": TRAIN, "/accumulate": PART, "/share": SHARE}
PLAIN: dict[str, Any] = {
    "/checkpoint": {"ledger": {}},
    "/load": LOAD,
    "/drop": {"step": 1},
    "/stop": {},
    "/nowhere": {},
}
posts = st.one_of(
    st.sampled_from(sorted(PACKED)).flatmap(
        lambda path: st.tuples(
            st.just(path),
            nonsense.broken(nonsense.changed(PACKED[path]).map(nonsense.as_msgpack)),
        )
    ),
    st.sampled_from(sorted(PLAIN)).flatmap(
        lambda path: st.tuples(st.just(path), nonsense.json_like(PLAIN[path]))
    ),
)
paths = st.sampled_from(
    [
        "/health",
        "/train/1",
        "/train/x",
        "/train/-1",
        "/versions/1",
        "/log-ratios/1",
        "/accumulate/1/1",
        "/",
        "//",
    ]
)
queries = st.sampled_from(["", "?wait_s=0", "?wait_s=nan", "?wait_s=x", "?wait_s=-1e999", "?%ff"])


def handled(kind: Any, queue: Any, path: str, body: bytes | None) -> int:
    """The status that a handler answers a request with."""
    handler = kind.__new__(kind)
    handler.queue, handler.path, handler.token = queue, path, "token"
    handler.headers = {"Authorization": "Bearer token", "Content-Length": str(len(body or b""))}
    handler.rfile = io.BytesIO(body or b"")
    statuses: list[int] = []
    handler._send = lambda status, *rest: statuses.append(status)
    handler.do_GET() if body is None else handler.do_POST()
    return statuses[0]


def trainer() -> CommandQueue:
    queue = CommandQueue(world_size=1, trainer_incarnation=1, max_len=8, checkpoint_timeout_s=0.0)
    queue.state = "ready"
    return queue


def worker() -> WorkerCommandQueue:
    queue = WorkerCommandQueue(world_size=1, max_len=8, store=GradientStore(1), load_timeout_s=0.0)
    queue.ready()
    return queue


@given(post=posts, is_trainer=st.booleans())
def test_a_post_is_answered_or_refused(post, is_trainer):
    kind, queue = (_TrainerHandler, trainer()) if is_trainer else (_WorkerHandler, worker())
    with nonsense.thrown_at("requests to nodes"):
        assert HTTPStatus(handled(kind, queue, *post))


@given(path=paths, query=queries, is_trainer=st.booleans())
def test_a_get_is_answered_or_refused(path, query, is_trainer):
    kind, queue = (_TrainerHandler, trainer()) if is_trainer else (_WorkerHandler, worker())
    with nonsense.thrown_at("requests to nodes"):
        assert HTTPStatus(handled(kind, queue, f"{path}{query}", None))


@pytest.mark.parametrize("length", ["-1", "x", "1e3", str(10**12)])
def test_a_length_that_cannot_be_is_refused(length):
    handler = _TrainerHandler.__new__(_TrainerHandler)
    handler.headers = {"Content-Length": length}  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"body|invalid literal"):
        handler._body()


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
