"""A client that takes from a TLS connection in blocks reads what was sent, whatever its sizes."""

from __future__ import annotations

import os
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from libra_cli.node.tls_stream import BLOCK_BYTES, TlsStream
from tests.credentials import certified_name, credentials_of

RECORD = 1 << 14
DEADLINE_S = 30.0


@contextmanager
def talking_to(
    answer: Callable[[ssl.SSLSocket], object], name: str = "here"
) -> Iterator[TlsStream]:
    """A client of a server that does this once both have verified each other."""
    server, client = credentials_of().server(), credentials_of("who asks").client()
    ours, theirs = socket.socketpair()
    for end in (ours, theirs):
        end.settimeout(DEADLINE_S)

    def serve() -> None:
        with suppress(OSError), server.wrap_socket(theirs, server_side=True) as there:
            answer(there)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield TlsStream(ours, client, certified_name(name))
    finally:
        ours.close()
        thread.join(DEADLINE_S)
        theirs.close()


@pytest.mark.parametrize("size", [1, RECORD, RECORD + 1, BLOCK_BYTES, 3 * BLOCK_BYTES + 7])
@pytest.mark.parametrize("wanted", [100, RECORD - 1, 1 << 20])
def test_what_was_sent_is_read_in_whatever_pieces_it_is_asked_for(size: int, wanted: int) -> None:
    data = os.urandom(size)
    with talking_to(lambda there: there.sendall(data)) as stream:
        got, buffer = bytearray(), memoryview(bytearray(wanted))
        while len(got) < size:
            count = stream.readinto(buffer)
            assert count
            got += buffer[:count]
    assert got == data


def test_what_is_sent_arrives_and_a_file_of_it_reads_lines_and_the_rest() -> None:
    body = os.urandom(2 * BLOCK_BYTES)

    def echo(there: ssl.SSLSocket) -> None:
        there.sendall(there.recv(100) + b"\n")
        there.sendall(body)

    with talking_to(echo) as stream:
        stream.sendall(b"hello")
        file, rest = stream.makefile("rb"), bytearray(len(body))
        assert file.readline() == b"hello\n"
        assert file.readinto(rest) == len(body)
        assert rest == body


@pytest.mark.parametrize("politely", [True, False])
def test_who_hangs_up_gives_what_he_sent_and_then_nothing(politely: bool) -> None:
    def short(there: ssl.SSLSocket) -> None:
        there.sendall(b"abc")
        if politely:
            there.unwrap()
        else:
            there.shutdown(socket.SHUT_RDWR)

    with talking_to(short) as stream:
        file = stream.makefile("rb")
        assert file.read(3) == b"abc"
        assert file.read(1) == b""


def test_who_sends_nothing_is_not_waited_for_longer_than_was_said() -> None:
    done = threading.Event()
    with talking_to(lambda there: done.wait(DEADLINE_S)) as stream:
        stream.settimeout(0.05)
        with pytest.raises(TimeoutError):
            stream.readinto(memoryview(bytearray(1)))
        done.set()


def test_another_host_than_the_one_that_is_meant_is_refused() -> None:
    with (
        pytest.raises(ssl.SSLCertVerificationError),
        talking_to(lambda there: there.sendall(b"x"), name="another"),
    ):
        pass


def test_the_last_answer_can_be_read_after_its_connection_was_closed() -> None:
    with talking_to(lambda there: there.sendall(b"last")) as stream:
        file = stream.makefile("rb")
        stream.close()
        assert file.read(4) == b"last"
        file.close()
        with pytest.raises(OSError, match="Bad file descriptor"):
            stream.settimeout(1.0)
