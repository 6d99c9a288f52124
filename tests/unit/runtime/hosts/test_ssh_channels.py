"""A channel's writes, against a channel of the test's own that sends as slowly as it likes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, cast

import paramiko
import pytest

from libra_cli.config.errors import HostLost
from libra_cli.runtime.hosts.ssh_channels import ChannelStream

PART = 4
DEADLINE_S = 0.2


class SlowChannel:
    """Sends a few bytes at a time, as paramiko does on a thin link."""

    eof_received = False

    def __init__(self, pause_s: float = 0.001) -> None:
        self.sent = bytearray()
        self.closed = False
        self.is_stuck = self.fails_next = False
        self._pause_s = pause_s

    def settimeout(self, seconds: float) -> None:
        pass

    def recv_ready(self) -> bool:
        return False

    def recv_stderr_ready(self) -> bool:
        return False

    def close(self) -> None:
        self.closed = True

    def sendall(self, data: bytes) -> None:
        if self.closed:
            raise OSError("the channel is closed")
        for start in range(0, len(data), PART):
            if self.is_stuck or (start and self.fails_next):
                self.fails_next = False
                raise TimeoutError("nothing is taken")
            self.sent += data[start : start + PART]
            time.sleep(self._pause_s)


async def call(
    function: Callable[..., Any], *arguments: object, timeout_s: float = DEADLINE_S
) -> Any:
    """Run a function on a thread with a deadline, as the transport does."""
    try:
        async with asyncio.timeout(timeout_s):
            return await asyncio.to_thread(function, *arguments)
    except OSError as error:
        raise HostLost(str(error)) from error


def stream_of(channel: SlowChannel) -> ChannelStream:
    return ChannelStream(cast(paramiko.Channel, channel), call)


def test_messages_that_are_sent_at_once_do_not_get_into_each_other() -> None:
    """A ping in the middle of a long request made a line that the agent could not read."""
    channel, messages = SlowChannel(), [bytes([65 + one]) * 10 * PART for one in range(3)]

    async def scene() -> None:
        stream = stream_of(channel)
        await asyncio.gather(*map(stream.write, messages))

    asyncio.run(scene())
    assert sorted(bytes(channel.sent[at : at + 40]) for at in (0, 40, 80)) == messages


def test_a_long_message_may_take_long_on_a_thin_link() -> None:
    channel, message = SlowChannel(DEADLINE_S / 10), b"x" * 20 * PART

    async def scene() -> None:
        await stream_of(channel).write(message)

    asyncio.run(scene())
    assert channel.sent == message


def test_whoever_reads_a_stream_hears_that_it_takes_no_more() -> None:
    """The answers to what was written later were waited for without end."""
    channel = SlowChannel()

    async def scene() -> None:
        stream = stream_of(channel)
        channel.is_stuck = True
        with pytest.raises(HostLost):
            await stream.write(b"half")
        assert await asyncio.wait_for(stream.read(), DEADLINE_S) == b""

    asyncio.run(scene())
    assert channel.closed


def test_who_waits_to_send_does_not_follow_half_a_message() -> None:
    channel = SlowChannel(DEADLINE_S / 10)

    async def scene() -> None:
        stream = stream_of(channel)
        first = asyncio.create_task(stream.write(b"12345678"))
        await asyncio.sleep(DEADLINE_S / 20)  # within its first part
        second = asyncio.create_task(stream.write(b"second"))
        channel.fails_next = True
        for sent in (first, second):
            with pytest.raises(HostLost):
                await sent

    asyncio.run(scene())
    assert channel.sent == b"1234"
