"""What a process of a run shows to those on other hosts, and demands of them: mutual TLS.

Every host has a certificate of the run's own authority, which the controller makes. Both sides of a
connection show theirs; a server's must be of the node that was meant. The run's token is sent
inside. Standard library only.
"""

from __future__ import annotations

import http.client
import json
import os
import ssl
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from libra_cli.node.tls_stream import TlsStream

CREDENTIALS = "credentials.json"
"""The file in the run directory that LIBRA_CREDENTIALS_FILE names."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """A host's certificate and its key, and the authority whose certificates it trusts, in PEM."""

    token: str
    """The run's, which every request must carry as well."""
    certificate: str
    key: str
    authority: str

    @classmethod
    def of(cls, token: str, told: Mapping[str, str]) -> Self:
        """The credentials that a controller hands to a host."""
        return cls(token, told["certificate"], told["key"], told["authority"])

    @classmethod
    def here(cls) -> Self:
        """The credentials of this process's host, from the file that its agent has written."""
        return cls(**json.loads(Path(os.environ["LIBRA_CREDENTIALS_FILE"]).read_bytes()))

    def as_json(self) -> str:
        return json.dumps(asdict(self))

    def server(self) -> ssl.SSLContext:
        """Return the TLS settings of a server, which demands a certificate of the run."""
        context = self._context(ssl.PROTOCOL_TLS_SERVER)
        context.verify_mode = ssl.CERT_REQUIRED
        context.num_tickets = 0  # connections are kept, so nobody comes back with one
        return context

    def client(self) -> ssl.SSLContext:
        """Return the TLS settings of a client, which demands that of the host that is meant."""
        return self._context(ssl.PROTOCOL_TLS_CLIENT)

    def _context(self, protocol: int) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_verify_locations(cadata=self.authority)
        # The library reads keys from files only: one without a name, in memory.
        descriptor = os.memfd_create("credentials", os.MFD_CLOEXEC)
        with os.fdopen(descriptor, "wb") as file:
            file.write((self.key + self.certificate).encode())
            file.flush()
            context.load_cert_chain(f"/proc/self/fd/{descriptor}")
        return context


class PeerConnection(http.client.HTTPConnection):
    """HTTP with a server of another host, which proves that it is the node that is meant."""

    def __init__(self, url: str, context: ssl.SSLContext, timeout_s: float) -> None:
        """``url`` is ``https://address:port#name``, with the name in the server's certificate."""
        # http.client, since a cluster's http_proxy is not meant for the host next door.
        place = urlsplit(url)
        super().__init__(place.hostname or "", place.port, timeout=timeout_s)
        self._context = context
        self._name = place.fragment

    def connect(self) -> None:
        """Connect, and exchange certificates; raises OSError if the server is another node."""
        super().connect()
        self.sock = TlsStream(self.sock, self._context, self._name)
