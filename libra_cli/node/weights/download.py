"""Fetches the chunks of a version from every host that has some, and checks each.

Hosts that want a version at the same time are given each other's addresses and the publisher's.
Each asks the others which chunks they have, and fetches from the source of which it wants the least
just now; of what that source has, a chunk that few others have or fetch (rarest first: Cohen,
"Incentives build robustness in BitTorrent", 2003). So the publisher sends different chunks to
different hosts, which pass them on to each other, and its link is not the only one that works.

A download may take as long as it likes while bytes come: on a thin link nothing is begun anew.
A source that fails is asked again what it has, and given up after ``FAILURES`` in a row; its chunks
are fetched elsewhere. A chunk that does not have its digest is not asked of that source again.
Standard library only.
"""

from __future__ import annotations

import http.client
import json
import random
import ssl
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from itertools import islice

from libra_cli.node.agent_errors import AgentRefused
from libra_cli.node.credentials import Credentials, PeerConnection
from libra_cli.node.weights.chunks import CHUNK_BYTES, ListedFile
from libra_cli.node.weights.digests import digest_of
from libra_cli.node.weights.draft import COMING, HERE, Draft

STREAMS = 6
"""How many chunks are fetched at a time: one stream does not fill a fast network, nor do few keep
the links of several sources busy (three hosts at 1 Gb/s: 6 with chunks of 2 MiB reach 89 to 95 % of
three links, 4 with chunks of 4 MiB 84 to 89 %; one or two runs each)."""
PEERS = 8
"""How many other hosts are asked, besides the publisher: enough to spread a version, and the
questions do not grow with the square of the hosts."""
LOOK_S = 0.1
"""How often a source that has only a part of the version is asked what it has."""
LOOK_SHARE = 0.02
"""The most of a thread's time that this may take, with many chunks."""
PIECE_BYTES = 1 << 18
"""Bytes of a chunk after which it is noted that some come: two seconds of a link of 1 Mb/s."""
STALL_S = 15.0
"""A source that sends nothing for this long has failed."""
LATE_S = 3.0
"""A chunk that takes longer is asked of another source as well."""
FAILURES = 3
"""Failures in a row after which a source is given up."""
SAMPLE = 32
"""Chunks of which the rarest is taken: nearly the rarest of all, and found at once."""
STATES = ".chunks"
"""The last part of the path at which a host tells which chunks of a version it has."""


def place_of(url: str) -> str:
    """What to call a source in a message: its URL, without the name in its certificate."""
    return url.partition("#")[0]


class DownloadFailed(Exception):
    """The sources together could not give the version."""


@dataclass(slots=True)
class _Source:
    url: str
    has: set[int] = field(default_factory=set)
    """Indices of the chunks that can be fetched from it."""
    fetches: set[int] = field(default_factory=set)
    """Indices of the chunks that it is fetching itself."""
    damaged: set[int] = field(default_factory=set)
    """Indices of the chunks that came from it with another digest."""
    asked: int = 0
    """How many chunks are being fetched from it."""
    failures: int = 0
    is_publisher: bool = False
    is_settled: bool = False
    """Whether it will have no more than it has."""
    reason: str = ""

    @property
    def is_given_up(self) -> bool:
        return self.failures >= FAILURES


@dataclass(frozen=True, slots=True)
class _Chunk:
    file: str
    index: int
    offset: int
    count: int
    digest: str
    algorithm: str


class Client:
    """A connection to one host's weight server, opened when it is needed and kept."""

    def __init__(self, url: str, credentials: Credentials, tls: ssl.SSLContext) -> None:
        """Connect to nothing yet; ``tls`` is ``credentials.client()``, which clients can share."""
        self._connection = PeerConnection(url, tls, STALL_S)
        self._headers = {"Authorization": f"Bearer {credentials.token}"}

    def get(self, path: str) -> bytes:
        """Return the whole answer.

        Raises:
            OSError, http.client.HTTPException: there is none.
        """
        response = self._ask(path, {})
        data = response.read()
        if response.status != HTTPStatus.OK:
            raise http.client.HTTPException(f"HTTP {response.status} {response.reason}")
        return data

    def read(self, path: str, offset: int, buffer: memoryview, came: Callable[[], None]) -> None:
        """Fill the buffer with bytes of a file from ``offset`` on; raises as above.

        ``came`` is called whenever some have come.
        """
        last = offset + len(buffer) - 1
        response = self._ask(path, {"Range": f"bytes={offset}-{last}"})
        if response.status != HTTPStatus.PARTIAL_CONTENT:
            response.read()
            raise http.client.HTTPException(f"HTTP {response.status} {response.reason}")
        for start in range(0, len(buffer), PIECE_BYTES):
            piece = buffer[start : start + PIECE_BYTES]
            if response.readinto(piece) != len(piece):
                raise http.client.HTTPException("it ended too early")
            came()

    def _ask(self, path: str, headers: Mapping[str, str]) -> http.client.HTTPResponse:
        try:
            self._connection.request("GET", path, headers={**self._headers, **headers})
            return self._connection.getresponse()
        except (OSError, http.client.HTTPException):
            self.close()
            raise

    def close(self) -> None:
        """Close the connection; the next request opens another."""
        self._connection.close()


class Download:
    """One attempt to complete files of a draft, from all sources at once."""

    def __init__(
        self,
        draft: Draft,
        name: str,
        files: Mapping[str, ListedFile],
        sources: Sequence[str],
        *,
        credentials: Credentials,
        deadline: float,
    ) -> None:
        """``sources`` are URLs of ``PeerConnection``, the publisher's last; ``deadline`` is on
        ``time.monotonic``."""
        self._draft = draft
        self._name = name
        self._credentials = credentials
        self._tls = credentials.client()
        self._deadline = deadline
        self._patience_s = max(0.0, deadline - time.monotonic())
        self.received = dict.fromkeys(sources, 0)
        """Bytes of chunks that each source sent, used or not."""
        *others, publisher = sources
        peers = random.sample(others, min(PEERS, len(others)))
        self._sources = [*map(_Source, peers), _Source(publisher, is_publisher=True)]
        self._chunks = [
            _Chunk(file, index, *one.span(index), digest, one.algorithm)
            for file, one in files.items()
            for index, digest in enumerate(one.digests)
        ]
        # In an order of this host's own, so that the first ones that are missing are any.
        random.shuffle(self._chunks)
        self._number = {(one.file, one.index): n for n, one in enumerate(self._chunks)}
        self._missing = {self._number[file, i] for file in files for i in draft.missing(file)}
        self._fetching: dict[int, dict[str, float]] = {}
        """The sources of each chunk on its way, with the time at which it was asked for."""
        self._left = len(self._missing)
        self._came_at = time.monotonic()
        self._problem: Exception | None = None
        self._is_over = False
        self._changed = threading.Condition()

    def run(self) -> None:
        """Return when all chunks are there.

        Raises:
            DownloadFailed: the sources cannot give them, or nothing comes any more.
            AgentRefused: the disk is full.
        """
        # A thread that waits for a dead source ends when that has been silent for long enough.
        for _ in range(min(STREAMS, self._left)):
            threading.Thread(target=self._fetch, name="fetch", daemon=True).start()
        for one in self._sources if self._left else []:
            threading.Thread(target=self._look, args=[one], name="look", daemon=True).start()
        with self._changed:
            while self._left and self._problem is None:
                self._problem = self._hopeless()
                self._changed.wait(LOOK_S)
            self._is_over = True
            self._changed.notify_all()
        if self._left and self._problem is not None:
            raise self._problem

    def _hopeless(self) -> DownloadFailed | None:
        now = time.monotonic()
        if not self._draft.is_wanted:
            return self._failed("nobody wants it any more")
        if now > self._deadline:
            return self._failed(f"nothing came for {self._patience_s:.0f} s")
        if self._fetching or any(self._missing & source.has for source in self._sources):
            return None
        if all(source.is_settled or source.is_given_up for source in self._sources):
            return self._failed("no source has the rest")
        if now - self._came_at > STALL_S:
            return self._failed(f"nothing came for {STALL_S:.0f} s")
        return None

    def _failed(self, what: str) -> DownloadFailed:
        reasons = [
            f"{place_of(source.url)}: {source.reason}" for source in self._sources if source.reason
        ]
        done = len(self._chunks) - self._left
        told = f"{what}, {done} of {len(self._chunks)} chunks are here"
        return DownloadFailed("; ".join([told, *reasons]))

    # -- what the sources have -----------------------------------------------------------------

    def _look(self, source: _Source) -> None:
        client = Client(source.url, self._credentials, self._tls)
        while not self._is_over:
            used = time.thread_time()
            if not source.is_settled and not source.is_given_up:
                self._look_once(source, client)
            time.sleep(max(LOOK_S, (time.thread_time() - used) / LOOK_SHARE))
        client.close()

    def _look_once(self, source: _Source, client: Client) -> None:
        try:
            told: dict[str, str] = json.loads(client.get(f"/{self._name}/{STATES}"))
            has, fetches = self._numbers(told, HERE), self._numbers(told, COMING)
        except (OSError, http.client.HTTPException, ValueError, AttributeError) as error:
            self._lost(source, f"{type(error).__name__}: {error}")
            return
        with self._changed:
            source.has, source.fetches = has - source.damaged, fetches
            source.is_settled = source.is_publisher or len(has) == len(self._chunks)
            source.failures = 0
            self._changed.notify_all()

    def _numbers(self, told: Mapping[str, str], state: int) -> set[int]:
        digit = chr(state)
        return {
            self._number[file, index]
            for file, digits in told.items()
            for index, one in enumerate(digits)
            if one == digit and (file, index) in self._number
        }

    def _lost(self, source: _Source, reason: str) -> None:
        with self._changed:
            source.has, source.fetches, source.is_settled = set(), set(), False
            source.failures += 1
            source.reason = reason
            self._changed.notify_all()

    # -- fetching ------------------------------------------------------------------------------

    def _fetch(self) -> None:
        clients = {one.url: Client(one.url, self._credentials, self._tls) for one in self._sources}
        buffer = memoryview(bytearray(CHUNK_BYTES))
        while (chosen := self._next()) is not None:
            source, number = chosen
            chunk, is_new = self._chunks[number], False
            try:
                is_new = self._fetch_one(clients[source.url], source, chunk, buffer[: chunk.count])
            except (AgentRefused, OSError) as error:  # of the disk here
                self._problem = error
            self._put_back(source, number, is_new=is_new)
        for client in clients.values():
            client.close()

    def _fetch_one(
        self, client: Client, source: _Source, chunk: _Chunk, buffer: memoryview
    ) -> bool:
        """Fetch a chunk from a source, and say whether it has come, is right, and was not here."""
        try:
            client.read(f"/{self._name}/{chunk.file}", chunk.offset, buffer, self._came)
        except (OSError, http.client.HTTPException) as error:
            client.close()
            self._lost(source, f"{chunk.file}: {type(error).__name__}: {error}")
            return False
        is_right = digest_of(chunk.algorithm, buffer) == chunk.digest
        with self._changed:
            self.received[source.url] += chunk.count
            source.failures = 0
            if not is_right:
                number = self._number[chunk.file, chunk.index]
                source.damaged.add(number)
                source.has.discard(number)
                source.reason = f"{chunk.file} is damaged in chunk {chunk.index}"
            if self._is_over or not is_right:
                return False
        return self._draft.write(chunk.file, chunk.index, buffer)

    def _came(self) -> None:
        self._deadline = time.monotonic() + self._patience_s

    def _next(self) -> tuple[_Source, int] | None:
        """Wait for something to fetch; None when there is nothing any more."""
        with self._changed:
            while self._left and not self._is_over:
                chosen = self._choose()
                if chosen is not None:
                    source, number = chosen
                    source.asked += 1
                    self._missing.discard(number)
                    self._fetching.setdefault(number, {})[source.url] = time.monotonic()
                    self._mark(number, is_coming=True)
                    return chosen
                self._changed.wait(LOOK_S)
            return None

    def _choose(self) -> tuple[_Source, int] | None:
        sources = sorted(self._sources, key=lambda one: one.asked)
        for source in sources:
            if few := [*islice((n for n in self._missing if n in source.has), SAMPLE)]:
                return source, min(few, key=self._spread)
        before = time.monotonic() - LATE_S
        late = {n for n, since in self._fetching.items() if min(since.values()) < before}
        for source in sources:
            if found := {n for n in late & source.has if source.url not in self._fetching[n]}:
                return source, min(found)
        return None

    def _spread(self, number: int) -> int:
        """How many sources have a chunk, or will have it soon."""
        return sum(number in one.has or number in one.fetches for one in self._sources)

    def _put_back(self, source: _Source, number: int, *, is_new: bool) -> None:
        """A fetch has ended; without success the chunk is missing again, unless it still comes."""
        with self._changed:
            source.asked -= 1
            since = self._fetching.get(number, {})
            since.pop(source.url, None)
            if is_new:
                self._left -= 1
                self._came_at = time.monotonic()
            if is_new or not since:
                self._fetching.pop(number, None)
            if not since and not self._draft.holds(*self._bytes_of(number)):
                self._missing.add(number)
                self._mark(number, is_coming=False)
            self._changed.notify_all()

    def _bytes_of(self, number: int) -> tuple[str, int, int]:
        chunk = self._chunks[number]
        return chunk.file, chunk.offset, chunk.count

    def _mark(self, number: int, *, is_coming: bool) -> None:
        chunk = self._chunks[number]
        self._draft.coming(chunk.file, chunk.index, is_coming=is_coming)
