"""Resolves the route to an SSH host from ``~/.ssh/config``, and connects through its hops.

All calls block and belong on a thread. A host key is trusted only if a known-hosts file has it.
Every error names the hop that failed, the cause, and a command that shows or fixes it.
"""

from __future__ import annotations

import getpass
import os
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import paramiko
from paramiko.packet import Packetizer

from libra_cli.config.errors import HostError, HostKeyError

KEEPALIVE_S = 15
UNACKNOWLEDGED_MS = 30_000
"""How long sent data may stay unacknowledged before the kernel ends the connection, which frees a
thread that is blocked in sending."""
UNIX_CHANNEL = "direct-streamlocal@openssh.com"
SYSTEM_KNOWN_HOSTS = "/etc/ssh/ssh_known_hosts"


@dataclass(frozen=True, slots=True)
class Hop:
    """One SSH server of a route, as the configuration describes it."""

    address: str
    port: int
    user: str
    identities: tuple[str, ...]
    known_hosts: tuple[str, ...]
    """Files with trusted keys; the first is the user's own."""
    use_agent: bool

    def __str__(self) -> str:
        return f"{self.user}@{self.address}" + (f":{self.port}" if self.port != 22 else "")

    @property
    def command(self) -> str:
        """The ``ssh`` command with which a person reaches the server."""
        port = f"-p {self.port} " if self.port != 22 else ""
        return f"ssh {port}{self.user}@{self.address}"

    @property
    def known_as(self) -> str:
        """The name of the hop in a known-hosts file."""
        return self.address if self.port == 22 else f"[{self.address}]:{self.port}"


@dataclass(frozen=True, slots=True)
class SshTarget:
    """The recipe's settings of a host. None leaves a setting to ``~/.ssh/config``."""

    host: str
    user: str | None = None
    port: int | None = None
    identity: str | None = None
    jump: str | None = None


class TimingPacketizer(Packetizer):
    """A packetizer of paramiko that keeps the time at which the last message came."""

    def __init__(self, wire: socket.socket) -> None:
        super().__init__(wire)
        self.heard_at = time.monotonic()

    def read_message(self) -> tuple[int, paramiko.Message]:
        """Read the next message; paramiko's own thread does."""
        message = super().read_message()
        self.heard_at = time.monotonic()
        return message


class UnixForwardingTransport(paramiko.Transport):
    """A transport of paramiko that can also open channels to Unix sockets of the server.

    OpenSSH's extension (its PROTOCOL, 2.4) is a kind of channel whose opening ends in the path, a
    text and a number that are reserved. paramiko composes openings itself and sends them from the
    thread that asks, so what is missing is added there.
    """

    _opening = threading.local()

    def __init__(self, wire: socket.socket, **options: Any) -> None:
        super().__init__(wire, packetizer_class=TimingPacketizer, **options)

    def open_unix(self, path: str, window_size: int, timeout: float) -> paramiko.Channel:
        """Open a channel to a Unix socket there. Raises SSHException, as ``open_channel``."""
        self._opening.path = path
        try:
            return self.open_channel(UNIX_CHANNEL, window_size=window_size, timeout=timeout)
        finally:
            self._opening.path = None

    def _send_user_message(self, data: paramiko.Message) -> None:
        path = getattr(self._opening, "path", None)
        if path is not None:
            self._opening.path = None
            data.add_string(path)
            data.add_string("")
            data.add_int(0)
        super()._send_user_message(data)  # type: ignore[misc]  # the stubs leave it out


def silent_s(transport: paramiko.Transport) -> float:
    """For how long nothing has come on a connection of ours."""
    assert isinstance(transport.packetizer, TimingPacketizer), "so transports of ours are made"
    return time.monotonic() - transport.packetizer.heard_at


class HostBusy(HostError):
    """A hop takes no more connections just now; the same again may succeed."""


def known_aliases(config_path: str = "~/.ssh/config") -> list[str]:
    """Return the names of a configuration that stand for one host each."""
    path = Path(config_path).expanduser()
    if not path.exists():
        return []
    names = paramiko.SSHConfig.from_path(str(path)).get_hostnames()
    return sorted(name for name in names if not {*"*?!"} & {*name})


def resolve_route(target: SshTarget, config_path: str, known_hosts: str | None) -> list[Hop]:
    """Return the hops of the route to a host, the host last.

    Raises:
        HostError: the configuration has a ProxyCommand for it.
    """
    path = Path(config_path).expanduser()
    config = paramiko.SSHConfig.from_path(str(path)) if path.exists() else paramiko.SSHConfig()
    entry = config.lookup(target.host)
    if entry.get("proxycommand", "none") != "none" and target.jump is None:
        raise HostError(
            f"{target.host}: {path} has a ProxyCommand for it, which libra does not run",
            hint="use ProxyJump in the configuration, or `jump` in the recipe",
        )
    hops = []
    for jump in _jumps(target.jump or entry.get("proxyjump", "none")):
        # The identity is offered to jump hosts too: a recipe has no other place to name one.
        hops += resolve_route(_parse_jump(jump, target.identity), config_path, known_hosts)
    identities = [target.identity] if target.identity else entry.get("identityfile", [])
    trusted = [known_hosts] if known_hosts else _known_hosts(entry)
    hop = Hop(
        address=entry["hostname"],
        port=target.port or int(entry.get("port", 22)),
        user=target.user or entry.get("user") or getpass.getuser(),
        identities=tuple(os.path.expanduser(one) for one in identities),
        known_hosts=tuple(os.path.expanduser(one) for one in trusted),
        use_agent=entry.get("identitiesonly", "no") != "yes",
    )
    return [*hops, hop]


def connect(hops: Sequence[Hop], timeout_s: float) -> list[paramiko.SSHClient]:
    """Connect through every hop and return all connections; the last one is to the host.

    Raises:
        HostKeyError: a hop's key is unknown or has changed.
        HostError: a hop cannot be reached or refuses the login; all connections are closed.
    """
    clients: list[paramiko.SSHClient] = []
    try:
        for hop in hops:
            wire = _wire(hop, clients, timeout_s)
            clients.append(_login(hop, wire, is_reached_by_jump=bool(clients), timeout_s=timeout_s))
    except BaseException:
        close(clients)
        raise
    return clients


def close(clients: Sequence[paramiko.SSHClient]) -> None:
    for client in reversed(clients):
        client.close()


def transport_of(client: paramiko.SSHClient) -> UnixForwardingTransport:
    """Return the transport of a client that has been connected."""
    transport = client.get_transport()
    assert isinstance(transport, UnixForwardingTransport), "so clients of ours are connected"
    return transport


def _wire(
    hop: Hop, clients: Sequence[paramiko.SSHClient], timeout_s: float
) -> socket.socket | paramiko.Channel:
    place = (hop.address, hop.port)
    try:
        if clients:
            before = transport_of(clients[-1])
            return before.open_channel("direct-tcpip", place, ("127.0.0.1", 0), timeout=timeout_s)
        wire = socket.create_connection(place, timeout=timeout_s)
    except socket.gaierror as error:
        raise HostError(
            f"{hop}: no host of this name is known", hint=f"getent hosts {hop.address}"
        ) from error
    except TimeoutError as error:
        raise _unreachable(hop, f"no answer within {timeout_s:g} s") from error
    except (OSError, paramiko.SSHException) as error:
        raise _unreachable(hop, getattr(error, "strerror", None) or str(error)) from error
    wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNACKNOWLEDGED_MS)
    return wire


def _login(
    hop: Hop,
    wire: socket.socket | paramiko.Channel,
    *,
    is_reached_by_jump: bool,
    timeout_s: float,
) -> paramiko.SSHClient:
    client = paramiko.SSHClient()
    try:
        for file in filter(os.path.exists, hop.known_hosts):
            client.load_system_host_keys(file)
        client.set_missing_host_key_policy(_Refuse(hop, is_reached_by_jump))
        client.connect(
            hop.address,
            hop.port,
            hop.user,
            key_filename=list(filter(os.path.exists, hop.identities)),  # type: ignore[arg-type] # one or many
            look_for_keys=not hop.identities,
            allow_agent=hop.use_agent,
            sock=wire,
            timeout=timeout_s,
            banner_timeout=timeout_s,
            auth_timeout=timeout_s,
            transport_factory=UnixForwardingTransport,  # type: ignore[arg-type] # no gss here
        )
    except BaseException as error:
        client.close()
        wire.close()
        if is_turned_away(error):
            raise HostBusy(
                f"{hop} hangs up before it says who it is: it takes no more connections just now",
                hint="larger MaxStartups and PerSourceMaxStartups, in its sshd_config",
            ) from error
        if isinstance(error, (paramiko.SSHException, OSError, EOFError)):
            raise _explain(hop, error) from error
        raise
    transport_of(client).set_keepalive(KEEPALIVE_S)
    return client


class _Refuse(paramiko.MissingHostKeyPolicy):
    """Refuses an unknown key, with the command that makes it known."""

    def __init__(self, hop: Hop, is_reached_by_jump: bool) -> None:
        self._hop = hop
        self._is_reached_by_jump = is_reached_by_jump

    def missing_host_key(
        self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey
    ) -> None:
        hop = self._hop
        scan = f"ssh-keyscan -p {hop.port} {hop.address} >> {hop.known_hosts[0]}"
        if self._is_reached_by_jump:  # a scan cannot take the jump
            scan = f"{hop.command}   # through the jump host, and answer yes"
        raise HostKeyError(
            f"{hop}: its host key is unknown ({key.get_name()} {key.fingerprint})",
            hint=f"compare the fingerprint with the host's own, then: {scan}",
        )


def is_turned_away(error: BaseException) -> bool:
    """Whether a server hung up before its banner, as sshd does above ``MaxStartups``.

    One that says nothing at all is not busy: paramiko raises the same of it, after a timeout.
    """
    is_silent = isinstance(error.__context__, TimeoutError)
    banner = isinstance(error, paramiko.SSHException) and "protocol banner" in str(error)
    return banner and not is_silent


def readable_keys(hops: Sequence[Hop]) -> list[str]:
    """The private keys that others than their owner may read; ``ssh`` would not use them."""
    keys = dict.fromkeys(key for hop in hops for key in hop.identities if os.path.exists(key))
    return [key for key in keys if os.stat(key).st_mode & 0o077]


def _explain(hop: Hop, error: Exception) -> HostError:
    if isinstance(error, paramiko.BadHostKeyException):
        return HostKeyError(
            f"{hop}: its host key has changed (now {error.key.get_name()} {error.key.fingerprint});"
            " it was set up anew, or somebody pretends to be it",
            hint=f"if you know why: ssh-keygen -R '{hop.known_as}' -f {hop.known_hosts[0]}",
        )
    if isinstance(error, paramiko.PasswordRequiredException):
        keys = " ".join(hop.identities)
        return HostError(f"{hop}: the key needs a passphrase", hint=f"ssh-add {keys}".strip())
    if isinstance(error, paramiko.AuthenticationException):
        tried = ", ".join(hop.identities) or "the agent's and ~/.ssh/id_*"
        return HostError(
            f"{hop}: it accepts none of the keys tried ({tried})",
            hint=f"{hop.command.replace('ssh', 'ssh-copy-id', 1)}, or set `identity` or `user`",
        )
    return _unreachable(hop, str(error) or type(error).__name__)


def _unreachable(hop: Hop, reason: str) -> HostError:
    return HostError(f"{hop} cannot be reached: {reason}", hint=f"{hop.command} true")


def _jumps(text: str) -> list[str]:
    return [] if text == "none" else text.split(",")


def _parse_jump(text: str, identity: str | None) -> SshTarget:
    user, _, place = text.strip().rpartition("@")
    host, _, port = place.rpartition(":") if ":" in place else (place, "", "")
    return SshTarget(host, user or None, int(port) if port else None, identity)


def _known_hosts(entry: paramiko.SSHConfigDict) -> list[str]:
    own = entry.get("userknownhostsfile", "~/.ssh/known_hosts").split()
    return [*own, SYSTEM_KNOWN_HOSTS]
