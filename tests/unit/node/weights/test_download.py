"""Hosts fetch a version from whoever has a part of it, over real sockets on this machine."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest

from libra_cli.node.agent_errors import AgentRefused
from libra_cli.node.http import serve_hosts
from libra_cli.node.weights import chunks, download, draft
from libra_cli.node.weights.chunks import Manifest, ManifestError, listed, read_manifest
from libra_cli.node.weights.weight_handler import WeightHandler
from libra_cli.node.weights.weight_server import PullResult, WeightServer
from tests.credentials import ask, credentials_of, url_of

NAME = "v000001-e0"
CHUNK = 64 * 1024
COUNT = 40
PULL_S = 20.0
FAULTY = "model.bin"


@pytest.fixture(autouse=True)
def _small_and_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many chunks of little, and no long waits for the dead."""
    monkeypatch.setattr(chunks, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(download, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(draft, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(download, "STALL_S", 1.0)
    monkeypatch.setattr(download, "LATE_S", 0.3)
    monkeypatch.setattr(download, "LOOK_S", 0.02)


class Place:
    """A host: its versions, and where it serves them."""

    def __init__(self, root: Path) -> None:
        self.server = WeightServer(root / "run", credentials_of())
        self.url = url_of(self.server.serve("127.0.0.1", 0))

    def pull(self, *sources: str, within_s: float = PULL_S) -> PullResult:
        return self.server.pull(NAME, sources, within_s)

    def holds(self, data: bytes) -> bool:
        return (self.server.root / NAME / FAULTY).read_bytes() == data


class Faulty(WeightHandler):
    """Answers rightly until a fault says otherwise; ``fault`` gets the handler of every chunk."""

    fault: Callable[[Faulty], bool]

    def _send_file(self, version: str, file: str) -> None:
        if file != FAULTY or not type(self).fault(self):
            super()._send_file(version, file)


DATA = os.urandom(COUNT * CHUNK - 1000)


def publish(root: Path) -> None:
    version = root / NAME
    version.mkdir(parents=True)
    (version / FAULTY).write_bytes(DATA)
    entry = listed(version / FAULTY, "sha256")
    files = {FAULTY: {"bytes": entry.bytes, "sha256": entry.digests}}
    (version / "manifest.json").write_text(json.dumps({"name": NAME, "files": files}))


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path / "publisher")
    publish(place.server.root)
    yield place
    place.server.close()


@pytest.fixture
def places(tmp_path: Path) -> Iterator[list[Place]]:
    made = [Place(tmp_path / f"host-{number}") for number in range(3)]
    yield made
    for place in made:
        place.server.close()


def faulty(root: Path, fault: Callable[[Faulty], bool]) -> tuple[str, ThreadingHTTPServer]:
    """A source with the whole version that does something else with some requests."""
    publish(root)
    server = serve_hosts(
        Faulty,
        bind="127.0.0.1",
        port=0,
        credentials=credentials_of(),
        root=root,
        drafts={},
        fault=staticmethod(fault),
    )
    return url_of(server.server_address[1]), server


def after(count: int) -> Callable[[Faulty], bool]:
    """Refuse every chunk but the first ones."""
    served: list[str] = []

    def refuses(handler: Faulty) -> bool:
        served.append(handler.path)
        if len(served) > count:
            handler._send_status(HTTPStatus.NOT_FOUND)
        return len(served) > count

    return refuses


def together(jobs: list[Callable[[], object]]) -> None:
    threads = [threading.Thread(target=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PULL_S)


def test_hosts_that_pull_together_give_each_other_most_of_a_version(
    tmp_path: Path, places: list[Place]
) -> None:
    def slow(handler: Faulty) -> bool:
        time.sleep(0.06)  # far longer than a chunk from a neighbour takes on a busy machine
        return False

    source, server = faulty(tmp_path / "slow", slow)
    results: list[PullResult] = []
    jobs = [
        lambda one=one: results.append(
            one.pull(*[other.url for other in places if other is not one], source)
        )
        for one in places
    ]
    together(jobs)  # type: ignore[arg-type]
    server.shutdown()
    server.server_close()
    assert len(results) == len(places)
    assert all(place.holds(DATA) for place in places)
    from_publisher = sum(one.sent_by[source] for one in results)
    assert from_publisher < 2 * len(DATA), "alone it would have sent three copies"
    assert sum(sum(one.sent_by.values()) for one in results) < 1.2 * len(places) * len(DATA)


def test_a_source_that_dies_in_the_middle_costs_a_retry_elsewhere(
    tmp_path: Path, publisher: Place, places: list[Place]
) -> None:
    served = []

    def dies(handler: Faulty) -> bool:
        served.append(handler.path)
        if len(served) <= 3:
            return False
        handler.connection.close()
        server.shutdown()
        server.server_close()
        return True

    source, server = faulty(tmp_path / "dying", dies)
    result = places[0].pull(source, publisher.url)
    assert places[0].holds(DATA)
    assert result.sent_by[source] <= 3 * CHUNK
    assert sum(result.sent_by.values()) == len(DATA)


def test_a_source_that_falls_silent_holds_nobody_up(
    tmp_path: Path, publisher: Place, places: list[Place]
) -> None:
    awake = threading.Event()

    def silent(handler: Faulty) -> bool:
        awake.wait(PULL_S)
        return True

    source, server = faulty(tmp_path / "silent", silent)
    places[0].pull(source, publisher.url)
    awake.set()
    server.shutdown()
    server.server_close()
    assert places[0].holds(DATA)


def test_a_damaged_chunk_is_refused_and_fetched_elsewhere(
    tmp_path: Path, publisher: Place, places: list[Place]
) -> None:
    source, server = faulty(tmp_path / "wrong", lambda handler: False)
    with (tmp_path / "wrong" / NAME / FAULTY).open("r+b") as file:
        for index in range(0, COUNT, 2):
            file.seek(index * CHUNK)
            file.write(b"XX")
    result = places[0].pull(source, publisher.url)
    server.shutdown()
    server.server_close()
    assert places[0].holds(DATA)
    assert result.sent_by[source] > 0, "its other chunks are right"
    damaged = len(range(0, COUNT, 2)) * CHUNK
    assert len(DATA) < sum(result.sent_by.values()) <= len(DATA) + damaged


def test_a_pull_goes_on_where_it_broke_off(
    tmp_path: Path, publisher: Place, places: list[Place]
) -> None:
    source, server = faulty(tmp_path / "half", after(COUNT // 2))
    with pytest.raises(AgentRefused, match=r"2\d of 40 chunks are here; .*HTTP 404"):
        places[0].pull(source)
    server.shutdown()
    server.server_close()
    assert not (places[0].server.root / NAME).exists()
    result = places[0].pull(publisher.url)
    assert places[0].holds(DATA)
    assert sum(result.sent_by.values()) <= len(DATA) - (COUNT // 2 - 1) * CHUNK


def test_a_pull_over_a_thin_link_may_take_as_long_as_bytes_come(
    tmp_path: Path, places: list[Place]
) -> None:
    def thin(handler: Faulty) -> bool:
        time.sleep(0.1)
        return False

    source, server = faulty(tmp_path / "thin", thin)
    began = time.monotonic()
    places[0].pull(source, within_s=0.4)
    assert time.monotonic() - began > 0.4
    assert places[0].holds(DATA)
    server.shutdown()
    server.server_close()


def test_what_is_left_of_a_pull_that_failed_goes_when_it_is_not_wanted_any_more(
    tmp_path: Path, places: list[Place]
) -> None:
    source, server = faulty(tmp_path / "half", after(5))
    root = places[0].server.root
    left: list[Path] = []
    for within_s in (0.5, 2.0, 8.0):  # a busy machine may not get to the first chunk sooner
        with pytest.raises(AgentRefused):
            places[0].pull(source, within_s=within_s)
        if left := list(root.iterdir()):
            break
    server.shutdown()
    server.server_close()
    assert len(left) == 1
    places[0].server.forget([])
    assert list(root.iterdir()) == []


def test_a_host_passes_on_what_it_has_before_it_has_the_rest(
    tmp_path: Path, places: list[Place], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "STALL_S", PULL_S)
    first, second, _ = places
    enough, rest = threading.Event(), threading.Event()
    served = []

    def half(handler: Faulty) -> bool:
        served.append(handler.path)
        if len(served) > COUNT // 2:
            enough.set()
            rest.wait(PULL_S)
        return False

    source, server = faulty(tmp_path / "half", half)
    puller = threading.Thread(target=lambda: first.pull(source))
    puller.start()
    assert enough.wait(PULL_S)
    with pytest.raises(AgentRefused, match="chunks are here"):
        second.pull(first.url, within_s=1.5)
    got = second.server._drafts[NAME].states()[FAULTY].count("2")
    assert COUNT // 2 - download.STREAMS <= got <= COUNT // 2
    rest.set()
    puller.join(PULL_S)
    server.shutdown()
    server.server_close()
    assert first.holds(DATA)


def test_the_manifest_of_another_version_of_the_same_name_starts_anew(
    tmp_path: Path, publisher: Place, places: list[Place]
) -> None:
    source, server = faulty(tmp_path / "half", after(5))
    manifest = tmp_path / "half" / NAME / "manifest.json"
    manifest.write_text(manifest.read_text() + " ")
    with pytest.raises(AgentRefused):
        places[0].pull(source, within_s=1.0)
    server.shutdown()
    server.server_close()
    assert sum(places[0].pull(publisher.url).sent_by.values()) == len(DATA)
    assert places[0].holds(DATA)


def test_a_copy_that_is_damaged_is_found_and_removed_and_then_pulled_again(
    publisher: Place, places: list[Place]
) -> None:
    here = places[0]
    here.pull(publisher.url)
    assert here.server.damaged(NAME) == ""
    path = here.server.root / NAME / FAULTY
    with path.open("r+b") as file:
        file.seek(len(DATA) // 2)
        file.write(bytes([DATA[len(DATA) // 2] ^ 1]))
    assert here.server.damaged(NAME) == FAULTY
    here.pull(publisher.url)
    assert here.holds(DATA)
    (path.parent / chunks.MANIFEST).write_text("{")
    assert here.server.damaged(NAME) == chunks.MANIFEST
    assert here.server.damaged(NAME) == "", "a version that is gone is not damaged"


def test_a_pull_that_nobody_waits_for_ends_with_its_host(
    tmp_path: Path, places: list[Place], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "STALL_S", PULL_S)
    here, stuck, rest = places[0], threading.Event(), threading.Event()

    def never(handler: Faulty) -> bool:
        stuck.set()
        rest.wait(PULL_S)
        return False

    source, server = faulty(tmp_path / "stuck", never)
    with ThreadPoolExecutor(1) as pool:
        pull = pool.submit(here.pull, source, within_s=PULL_S)
        assert stuck.wait(PULL_S)
        here.server.close()
        with pytest.raises(AgentRefused, match="nobody wants it any more"):
            pull.result(PULL_S / 2)
    rest.set()
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    "entry",
    [
        {"bytes": 5, "sha256": []},
        {"bytes": CHUNK + 1, "sha256": ["x"]},
        {"bytes": -1, "sha256": []},
        {"bytes": 5},
        [],
    ],
)
def test_a_manifest_whose_chunks_do_not_make_its_files_is_refused(entry: object) -> None:
    with pytest.raises(ManifestError, match="damaged"):
        read_manifest(json.dumps({"files": {"a": entry}}).encode())


def test_a_link_and_what_is_no_file_are_not_served(publisher: Place) -> None:
    version = publisher.server.root / NAME
    (version / "link.bin").symlink_to(version / FAULTY)
    (version / "directory").mkdir()
    os.mkfifo(version / "pipe")
    (version.parent / "v000002-e0").symlink_to(version)
    for path in ("link.bin", "directory", "pipe"):
        assert ask(publisher.url, f"/{NAME}/{path}")[0] == HTTPStatus.NOT_FOUND, path
    assert ask(publisher.url, f"/v000002-e0/{FAULTY}")[0] == HTTPStatus.NOT_FOUND
    assert ask(publisher.url, f"/{NAME}/{FAULTY}") == (HTTPStatus.OK, DATA)


def test_hosts_take_the_chunks_of_a_publisher_each_in_an_order_of_its_own(
    tmp_path: Path, places: list[Place]
) -> None:
    asked: list[str] = []

    def note(handler: Faulty) -> bool:
        asked.append(handler.headers["Range"])
        return False

    source, server = faulty(tmp_path / "noting", note)
    orders = []
    for place in places:
        asked.clear()
        place.pull(source)
        assert len(set(asked)) == COUNT
        orders.append(tuple(asked))
    server.shutdown()
    server.server_close()
    assert len(set(orders)) == len(orders)


def test_a_chunk_counts_as_here_when_all_of_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is nearly full takes a part of what it is given, and no more of the next."""
    room, pwrite = [CHUNK + 4000], os.pwrite

    def nearly_full(descriptor: int, data: memoryview, offset: int) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = pwrite(descriptor, data[: min(5000, room[0])], offset)
        room[0] -= written
        return written

    (tmp_path / "source").write_bytes(DATA)
    files = {FAULTY: listed(tmp_path / "source", "sha256")}
    one = draft.Draft(tmp_path / "draft", b"{}", Manifest(files, "", {}))
    one.expect(files)
    monkeypatch.setattr(os, "pwrite", nearly_full)
    assert one.write(FAULTY, 0, memoryview(DATA)[:CHUNK])
    with pytest.raises(AgentRefused, match="is full"):
        one.write(FAULTY, 1, memoryview(DATA)[CHUNK : 2 * CHUNK])
    assert one.missing(FAULTY) == list(range(1, COUNT))
    assert (tmp_path / "draft" / FAULTY).read_bytes()[:CHUNK] == DATA[:CHUNK]
