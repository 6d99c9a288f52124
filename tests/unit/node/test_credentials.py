"""Hosts of a run talk to each other and to nobody else: mutual TLS, certificates of the run."""

from __future__ import annotations

import http.client
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import closing, suppress

import pytest

from libra_cli.node.credentials import Credentials
from libra_cli.node.http import HostServer, JsonHandler, own_address, serve_hosts
from libra_cli.runtime.credentials.authority import certified_name
from tests import credentials
from tests.credentials import LOCAL, TOKEN, ask, credentials_of, url_of

ROUTE = "/there-is-none"
"""A server that trusts whoever asks says 404, one that misses the token 401."""


@pytest.fixture(scope="module")
def server() -> Iterator[HostServer]:
    shown = credentials_of("server")
    made = serve_hosts(JsonHandler, bind=LOCAL, port=0, credentials=shown)
    yield made
    made.shutdown()
    made.server_close()


@pytest.fixture
def port(server: HostServer) -> int:
    return int(server.server_address[1])


def test_a_host_of_the_run_is_answered(port: int) -> None:
    assert ask(url_of(port, "server"), ROUTE)[0] == 404


def test_inside_tls_the_token_is_demanded_as_before(port: int) -> None:
    assert ask(url_of(port, "server"), ROUTE, token="of-another-run")[0] == 401


def test_a_host_of_another_run_is_told_nothing_even_with_the_token(port: int) -> None:
    stranger = credentials_of("server", run="another")
    with pytest.raises(ssl.SSLCertVerificationError):
        ask(url_of(port, "server"), ROUTE, shows=stranger)
    # One that trusts this run's hosts, and has no certificate of theirs.
    known = Credentials(
        TOKEN, stranger.certificate, stranger.key, credentials_of("server").authority
    )
    with pytest.raises((ssl.SSLError, ConnectionError)):
        ask(url_of(port, "server"), ROUTE, shows=known)


def test_a_host_of_the_run_cannot_pass_for_another(port: int) -> None:
    with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
        ask(url_of(port, "trainer"), ROUTE)


def plain(sock: socket.socket) -> None:
    sock.sendall(f"GET / HTTP/1.1\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode())


def without_a_certificate(sock: socket.socket) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with context.wrap_socket(sock) as verified:
        verified.sendall(f"GET / HTTP/1.1\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode())
        assert not verified.recv(1)


def of_an_older_tls(sock: socket.socket) -> None:
    context = credentials_of("client").client()
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with context.wrap_socket(sock, server_hostname=certified_name("server")):
        pass


@pytest.mark.parametrize("talk", [plain, without_a_certificate, of_an_older_tls])
def test_whoever_shows_no_certificate_hears_nothing(
    port: int, talk: Callable[[socket.socket], None], capfd: pytest.CaptureFixture[str]
) -> None:
    heard = b""
    with socket.create_connection((LOCAL, port), timeout=10) as sock:
        try:
            talk(sock)
            heard = sock.recv(1000)
        except OSError:
            pass
    assert b"HTTP" not in heard
    assert ask(url_of(port, "server"), ROUTE)[0] == 404
    assert not capfd.readouterr().err  # nobody can fill a log


def test_what_is_changed_on_its_way_is_noticed(port: int) -> None:
    with credentials.relay(port) as hop:
        assert ask(url_of(hop.port, "server"), ROUTE)[0] == 404
        whole = hop.came_back
        hop.flip_at = 2 * whole - 100  # in the answer, not in what comes before it
        with pytest.raises((OSError, http.client.HTTPException)):
            ask(url_of(hop.port, "server"), ROUTE)


def test_it_listens_at_the_address_that_was_named_and_at_no_other(port: int) -> None:
    with closing(socket.socket()) as sock:
        assert sock.connect_ex(("127.0.0.2", port))


def test_of_a_name_that_hosts_give_themselves_the_loopback_address_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def found(*addresses: str) -> None:
        told = [(socket.AF_INET, 0, 0, "", (one, 0)) for one in addresses]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_: told)

    found("127.0.1.1", "10.0.0.7")
    assert own_address("gpu-01") == "10.0.0.7"
    found("127.0.1.1")
    with pytest.raises(OSError, match=r"gpu-01 is 127.0.1.1 here, where no other host can come"):
        own_address("gpu-01")


@pytest.mark.parametrize("node", ["gpu-01", "GPU-01", "10.0.0.5", "a@b_c", "x" * 200, "a..b"])
def test_any_name_of_a_node_makes_a_certificate(node: str) -> None:
    assert certified_name(node) != certified_name(node + "x")
    meet(credentials_of(node).server(), credentials_of().client(), certified_name(node))


def meet(server: ssl.SSLContext, client: ssl.SSLContext, name: str) -> None:
    """Shake hands in memory. Raises SSLError."""
    down, up = ssl.MemoryBIO(), ssl.MemoryBIO()
    left = [
        client.wrap_bio(down, up, server_hostname=name),
        server.wrap_bio(up, down, server_side=True),
    ]
    while left:
        for side in tuple(left):
            with suppress(ssl.SSLWantReadError):
                side.do_handshake()
                left.remove(side)
