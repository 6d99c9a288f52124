"""A worker: one environment in a process of its own, which answers calls until it is closed.

What an environment prints goes to its fork server. If the fork server ends, however it does, the
kernel ends the worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import inspect
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import fields
from typing import Any

from libra_cli.config.errors import EnvironmentBroken
from libra_cli.envs import registry
from libra_cli.envs.protocol import Environment
from libra_cli.envs.session import EnvironmentSession, Raised
from libra_cli.envs.workers import wire
from libra_cli.envs.workers.wire import Kind

SPAWNED_SOCKET = 3
"""The descriptor of the socket of a worker that was started anew."""
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)
_READ = 1 << 18


def maker(hello: Mapping[str, Any]) -> Callable[[], Environment]:
    """Import the environment of a fork server's first frame, and return what makes one.

    Raises:
        EnvironmentBroken: there is none of this name, it cannot be imported, or this host lacks
            what it needs.
    """
    return registry.maker(
        hello["name"], hello["arguments"], hello["run_directory"], hello["sandbox"]
    )


def end_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends; leave if that has happened."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def serve(channel: socket.socket, name: str, make: Callable[[], Environment]) -> None:
    """Answer calls until the other side closes the episode or the channel."""
    asyncio.run(_serve(channel, EnvironmentSession(name, make, _run), name))


def main() -> None:
    """Run a worker that could not be forked, which imports its environment first."""
    end_with(int(sys.argv[1]))
    channel = socket.socket(fileno=SPAWNED_SOCKET)
    channel.set_inheritable(False)
    hello = wire.unpack(_first(channel))
    serve(channel, hello["name"], lambda: maker(hello)())


def _first(channel: socket.socket) -> bytes:
    frames = wire.Frames()
    while data := channel.recv(1):  # the frame after it belongs to ``serve``
        for _, _, body in frames.feed(data):
            return body
    sys.exit("the fork server has ended")


async def _serve(channel: socket.socket, session: EnvironmentSession, name: str) -> None:
    channel.setblocking(False)
    loop = asyncio.get_running_loop()
    async for kind, episode, body in _frames(channel):
        if kind is Kind.CLOSE:
            break
        answer = await _answer(session, name, wire.unpack(body))
        await loop.sock_sendall(channel, wire.frame(Kind.CALL, episode, answer))
    close = session.close_member
    if close is not None:
        with contextlib.suppress(Raised):
            await _run(close)


async def _frames(channel: socket.socket) -> AsyncIterator[tuple[Kind, int, bytes]]:
    frames, loop = wire.Frames(), asyncio.get_running_loop()
    while data := await loop.sock_recv(channel, _READ):
        for one in frames.feed(data):
            yield one


async def _answer(session: EnvironmentSession, name: str, call: list[Any]) -> bytes:
    member, *arguments = call
    try:
        value = await getattr(session, member)(*arguments)
        return _told(value, name, member)
    except EnvironmentBroken as error:
        return wire.pack(["broke", str(error), error.hint])


def _told(value: Any, name: str, member: str) -> bytes:
    shown = {field.name: getattr(value, field.name) for field in fields(value)}
    try:
        body = wire.pack(["returned", shown])
    except Exception as error:  # a value of other people's can raise anything when it is read
        raise EnvironmentBroken(
            f"environment {name!r} broke in {member}: what it returned cannot leave its "
            f"process: {error}"
        ) from error
    if len(body) > wire.LARGEST_FRAME:
        raise EnvironmentBroken(
            f"environment {name!r} broke in {member}: it returned {len(body):,} bytes, over "
            f"{wire.LARGEST_FRAME:,}"
        )
    return body


async def _run(member: Callable[..., Any], *arguments: Any) -> Any:
    """Call a member here and now: nothing else runs in this process."""
    try:
        returned = member(*arguments)
        return await returned if inspect.isawaitable(returned) else returned
    except BaseException as error:
        raise Raised(error) from error
