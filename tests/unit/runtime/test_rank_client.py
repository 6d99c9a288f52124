"""The controller's end of the control stream to a first rank, over links that are thin or dead."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar

import msgpack
import pytest

from libra_cli.config.errors import TrainerError
from libra_cli.core.actions import Train
from libra_cli.core.events import PublishedVersion, StepDone
from libra_cli.core.types import LogRatios, WeightVersion
from libra_cli.node.command_queue import IdleCommand, RankServer
from libra_cli.node.trainer.commands import CheckpointCommand, CommandQueue, TrainCommand
from libra_cli.runtime.hosts.transport import Endpoint
from libra_cli.runtime.processes import stream
from libra_cli.runtime.processes.control import RETRY_S
from libra_cli.runtime.trainer.client import TrainerClient
from libra_cli.runtime.trainer.connection import Unreachable
from libra_cli.runtime.trainer.rank_client import RankClient
from tests.sockets import socket_path

DEADLINE_S = 20.0
PATIENCE_S = 10.0
TOKEN = "of-this-run"
BODY = {"bytes": bytes(32 << 20)}
"""More than sockets keep of what nobody reads."""
TRAIN = Train(0, 3, (), None, WeightVersion(0, 2))

C = TypeVar("C", bound=RankClient)
Peer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "BEAT_S", 0.05)


def play(peer: Peer, scene: Callable[[RankClient], Awaitable[None]], silence_s: float) -> None:
    """A scene with a process that does so with every connection."""

    async def whole() -> None:
        async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            peers.append(asyncio.current_task())
            with suppress(ConnectionError, asyncio.CancelledError):
                await peer(reader, writer)
            writer.transport.abort()

        peers: list[asyncio.Task[None] | None] = []

        server = await asyncio.start_unix_server(accepted, path := socket_path())
        client = RankClient(0, Endpoint(path), TOKEN)
        client._silence_s = silence_s
        try:
            await asyncio.wait_for(scene(client), DEADLINE_S)
        finally:
            await client.close()
            server.close()
            for one in filter(None, peers):
                one.cancel()
                await one
            await asyncio.sleep(0)

    asyncio.run(whole())


async def answering(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, **how: Any) -> None:
    """Read the token, and answer every order but ``never``."""
    unpacker, trusted = msgpack.Unpacker(max_buffer_size=0), False
    while data := await reader.read(how.get("piece", 1 << 20)):
        unpacker.feed(data)
        for message in unpacker:
            if trusted and message[1] != "never":
                writer.write(msgpack.packb([message[0], "done", {"said": message[1]}]))
            trusted = True
        await asyncio.sleep(how.get("pause_s", 0.0))


def test_a_batch_may_take_longer_than_the_silence_as_long_as_it_moves() -> None:
    async def slowly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await answering(reader, writer, pause_s=0.01)

    async def scene(client: RankClient) -> None:
        began = asyncio.get_running_loop().time()
        assert await client._call("train", BODY) == {"said": "train"}
        assert asyncio.get_running_loop().time() - began > 1.0

    play(slowly, scene, silence_s=1.0)


def test_a_batch_that_does_not_move_any_more_is_given_up() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(DEADLINE_S)

    async def scene(client: RankClient) -> None:
        with pytest.raises(Unreachable, match="rank: silent for 0 s"):
            await client._call("train", BODY)
        with pytest.raises(Unreachable, match="rank: no answer to ready in 0 s"):
            await client._call("ready", {}, timeout_s=0.05)

    play(silent, scene, silence_s=0.2)


def test_an_answer_may_take_for_ever_as_long_as_checks_are_answered() -> None:
    async def scene(client: RankClient) -> None:
        waiting = asyncio.ensure_future(client._call("never", {}))
        done, _ = await asyncio.wait({waiting}, timeout=1.5)
        assert not done
        assert await client._call("ready", {}) == {"said": "ready"}
        waiting.cancel()

    play(answering, scene, silence_s=0.5)


def test_a_connection_on_which_nothing_is_awaited_is_kept() -> None:
    async def scene(client: RankClient) -> None:
        await client._call("ready", {})
        before = client._stream
        await asyncio.sleep(0.5)
        await client._call("ready", {})
        assert client._stream is before

    play(answering, scene, silence_s=0.1)


def test_an_answer_that_cannot_be_read_is_an_error_of_the_trainer() -> None:
    async def nonsense(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"\xc1")
        await writer.drain()

    async def scene(client: RankClient) -> None:
        with pytest.raises(TrainerError, match="rank says what cannot be read"):
            await client._persist("ready", {}, patience_s=0.0)

    play(nonsense, scene, silence_s=1.0)


@pytest.fixture
def queue() -> CommandQueue:
    """Of a trainer after step 2."""
    queue = CommandQueue(max_len=16)
    queue.state, queue.began_at, queue.step, queue.accepted = "ready", 2, 2, 2
    return queue


def with_trainer(
    queue: CommandQueue, scene: Callable[[TrainerClient, str], Awaitable[None]]
) -> None:
    """A scene with the trainer of this queue, which is at a place that a client may go to."""

    async def whole() -> None:
        RankServer(queue, path=(path := socket_path()), token=TOKEN)
        client = TrainerClient(0, Endpoint(path), TOKEN)
        try:
            await asyncio.wait_for(scene(client, path), DEADLINE_S)
        finally:
            await client.close()
            await asyncio.sleep(0)

    asyncio.run(whole())


async def taken(queue: CommandQueue) -> TrainCommand:
    """The step that comes next."""
    command = await asyncio.to_thread(queue.next, PATIENCE_S)
    assert isinstance(command, TrainCommand)
    return command


def test_a_step_goes_on_over_connections_that_are_lost_and_is_taken_once(
    queue: CommandQueue,
) -> None:
    async def scene(client: TrainerClient, path: str) -> None:
        training = asyncio.ensure_future(client.train(TRAIN, (), patience_s=PATIENCE_S))
        assert (await taken(queue)).step == 3
        for _ in range(3):
            assert client._stream is not None
            client._stream.close()
            await asyncio.sleep(2 * RETRY_S)
            await client._call("check", {})
        queue.done(3, {"loss": 0.5})
        assert await training == StepDone(0, 3, None, {"loss": 0.5}, log_ratios=None)
        assert isinstance(queue.next(0), IdleCommand)

    with_trainer(queue, scene)


def test_a_checkpoint_goes_on_over_connections_that_are_lost_and_is_written_once(
    queue: CommandQueue,
) -> None:
    """A cut of a second ended the trainer, and with it the steps since the checkpoint before."""

    async def scene(client: TrainerClient, path: str) -> None:
        waiting = asyncio.ensure_future(client.checkpoint({"at": 2}, patience_s=PATIENCE_S))
        command = await asyncio.to_thread(queue.next, PATIENCE_S)
        assert command == CheckpointCommand({"at": 2})
        assert client._stream is not None
        client._stream.close()
        await asyncio.sleep(2 * RETRY_S)
        await client._call("check", {})
        queue.saved(2, "/checkpoints/2")
        assert await waiting == "/checkpoints/2"
        assert isinstance(queue.next(0), IdleCommand)
        again = asyncio.ensure_future(client.checkpoint({"at": 2}, patience_s=PATIENCE_S))
        assert await asyncio.to_thread(queue.next, PATIENCE_S) == command, "another order"
        again.cancel()

    with_trainer(queue, scene)


def test_another_controller_hears_what_was_told_to_nobody(queue: CommandQueue) -> None:
    async def scene(first: TrainerClient, path: str) -> None:
        training = asyncio.ensure_future(first.train(TRAIN, (), patience_s=PATIENCE_S))
        await taken(queue)
        training.cancel()
        await first.close()
        queue.done(3, {"loss": 0.5})
        queue._tell_news("published", 3, {"version": 3, "bytes": 10, "published_at": 1.0})
        queue.saved(3, "/checkpoints/3")
        second = TrainerClient(0, Endpoint(path), TOKEN)
        done = await second.train(TRAIN, (), patience_s=PATIENCE_S)
        assert (done.step, done.metrics) == (3, {"loss": 0.5})
        published = await second.wait_published(3, patience_s=PATIENCE_S)
        assert published == PublishedVersion(WeightVersion(0, 3), 10, 1.0)
        assert await second.wait_checkpoint(3, patience_s=PATIENCE_S) == "/checkpoints/3"
        assert isinstance(queue.next(0), IdleCommand)
        await second.close()

    with_trainer(queue, scene)


def test_a_trainer_that_fails_ends_every_wait_with_its_reason(queue: CommandQueue) -> None:
    async def scene(client: TrainerClient, path: str) -> None:
        training = asyncio.ensure_future(client.train(TRAIN, (), patience_s=PATIENCE_S))
        await taken(queue)
        waiting = asyncio.ensure_future(client.wait_published(3, patience_s=PATIENCE_S))
        await client._call("check", {})
        queue.fail("out of memory")
        for one in (training, waiting):
            with pytest.raises(TrainerError, match="trainer failed: out of memory"):
                await one

    with_trainer(queue, scene)


def test_a_refusal_is_told_at_once_and_not_repeated(queue: CommandQueue) -> None:
    async def scene(client: TrainerClient, path: str) -> None:
        wrong = Train(0, 9, (), None, WeightVersion(0, 8))
        with pytest.raises(TrainerError, match="refused: step 9 was sent, the next one is 3"):
            await client.train(wrong, (), patience_s=PATIENCE_S)

    with_trainer(queue, scene)


def test_a_trainer_that_begins_to_listen_later_is_waited_for() -> None:
    queue, path = CommandQueue(max_len=16), socket_path()

    async def scene() -> None:
        client = TrainerClient(4, Endpoint(path), TOKEN)
        with pytest.raises(TrainerError, match="not ready after 0 s"):
            await client.wait_ready(timeout_s=0.1)
        waiting = asyncio.ensure_future(client.wait_ready(timeout_s=PATIENCE_S))
        await asyncio.sleep(0.1)
        RankServer(queue, path=path, token=TOKEN)
        with queue._changed:
            queue.state, queue.published = "ready", {"version": 2, "bytes": 1, "published_at": 0.5}
            queue._tell()
        assert await waiting == PublishedVersion(WeightVersion(4, 2), 1, 0.5)
        await client.close()
        await asyncio.sleep(0)

    asyncio.run(scene())


@pytest.mark.parametrize("closed", [True, False])
def test_one_that_is_out_of_reach_is_given_up_after_patience_or_when_it_is_stopped(
    closed: bool,
) -> None:
    async def scene() -> None:
        client = TrainerClient(0, Endpoint(socket_path()), TOKEN)
        if closed:
            await client.close()
        began = asyncio.get_running_loop().time()
        with pytest.raises(Unreachable, match="is being stopped" if closed else "No such file"):
            await client.wait_published(3, patience_s=DEADLINE_S if closed else 0.6)
        assert (asyncio.get_running_loop().time() - began > 0.5) != closed

    asyncio.run(asyncio.wait_for(scene(), DEADLINE_S))


def packed(branches: list[int], *values: float) -> bytes:
    told = {
        "branches": struct.pack(f"<{len(branches)}q", *branches),
        "values": struct.pack(f"<{len(values)}e", *values),
    }
    return bytes(msgpack.packb(told))


def log_ratios_after(queue: CommandQueue, told: bytes) -> LogRatios | None:
    """What a step brings whose trainer tells these."""
    found: list[LogRatios | None] = []

    async def scene(client: TrainerClient, path: str) -> None:
        training = asyncio.ensure_future(client.train(TRAIN, (), patience_s=PATIENCE_S))
        await taken(queue)
        queue.done(3, {"loss": 0.5}, told)
        done = await training
        assert (done.step, done.metrics) == (3, {"loss": 0.5})
        found.append(done.log_ratios)

    with_trainer(queue, scene)
    return found[0]


def test_log_ratios_come_with_the_step(queue: CommandQueue) -> None:
    told = packed([7, 1, 0, 2, 7, 1, 1, 1], 0.5, -1.0, 2.0)
    found = log_ratios_after(queue, told)
    assert found is not None
    assert found.by_branch() == {
        (7, 1, 0): struct.pack("<2e", 0.5, -1.0),
        (7, 1, 1): struct.pack("<e", 2.0),
    }


@pytest.mark.parametrize(
    "told",
    [
        b"",
        b"\xc1",
        msgpack.packb([1, 2]),
        msgpack.packb({"branches": "x", "values": b""}),
        packed([7, 1, 0, 3], 0.5),
        packed([7, 1, 0, -1, 7, 1, 1, 2], 0.5),
        packed([7, 1, 0], 0.5),
    ],
    ids=range(7),
)
def test_a_step_is_done_whatever_is_wrong_with_its_log_ratios(
    queue: CommandQueue, told: bytes
) -> None:
    assert log_ratios_after(queue, told) is None
