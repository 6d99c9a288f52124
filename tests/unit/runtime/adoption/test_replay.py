"""A machine that is written down and read back goes on as if nothing had been."""

from __future__ import annotations

import heapq
import os
import pickle
import subprocess
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from libra_cli.config.errors import StateError
from libra_cli.core import actions as a
from libra_cli.core import events as e
from libra_cli.runtime.adoption import run_log
from libra_cli.runtime.adoption.memory import RunMemory
from libra_cli.runtime.adoption.run_log import RunLog, replay
from libra_cli.runtime.adoption.snapshot import load_machine, save_machine
from libra_cli.runtime.hosts.cluster import KeptCluster
from libra_cli.runtime.store import event_log
from libra_cli.runtime.store.event_log import EVENTS, EventLog, read_events
from tests.world import Faults, World, recipe

TOKEN = "of-this-run"
KEPT = KeptCluster({"a": {"server-0": 1}}, {"a": "/model"}, {"a": "life"})
FAULTS = Faults(
    server_dies=0.01,
    start_fails=0.02,
    sync_fails=0.05,
    turn_fails=0.03,
    environment_breaks=0.01,
    trainer_dies=0.003,
    node_lost=0.005,
    repeated=0.05,
    replanned=0.01,
    joined=0.3,
    ordered=0.01,
    worker_dies=0.01,
    abort_fails=0.1,
    forked=0.1,
    written_later=0.3,
)
HYBRID = {
    "nodes": [
        {"host": "a", "slots": 2},
        {"host": "b", "slots": 2, "pool": "rollout"},
        {"host": "c", "pool": "train"},
    ]
}

SAMPLED = {"rollout": {"dynamic_sampling": True, "oversample": 1, "curriculum": {"tasks": 5}}}


class Recorder(World):
    """A world whose events are told a ``RunLog``; it knows which action an event answers."""

    log: RunLog | None = None
    handled: int = 0

    def give(self, event: e.Event) -> None:
        self.events += 1
        if self.log is not None:
            self.log.happened(event, 0, now=self.now)
        for action in self.machine.handle(event, now=self.now):
            if self.log is not None and not isinstance(action, (a.Save, a.End)):
                self.log.asked(action, now=self.now)
            self._perform(action)
        if self.log is not None:
            self.log.settled()
        self.machine.check()

    def step(self) -> None:
        self.now, _, event = heapq.heappop(self._heap)
        self.give(event)
        self._mishaps()


def world(seed: int, events: int, **changes: Any) -> Recorder:
    """One that has had so many events, or all if it has ended before."""
    made = Recorder(Random(seed), FAULTS, recipe(**changes))
    made.later(e.RunStarted())
    while made.end is None and made.events < events:
        made.step()
    return made


def logged(made: Recorder, run_dir: Path) -> RunLog:
    log = EventLog(run_dir, TOKEN, on_error=lambda error: pytest.fail(str(error)))
    return RunLog(log, made.machine, RunMemory(), lambda: KEPT)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path


def give_both(made: World, other: Any) -> None:
    """To the end: whatever the one machine is told the other is told too, and wants the same."""
    handle = made.machine.handle

    def both(event: e.Event, *, now: float) -> list[a.Action]:
        wanted = handle(event, now=now)
        assert other.handle(event, now=now) == wanted
        return wanted

    made.machine.handle = both  # type: ignore[method-assign]
    while made.end is None:
        made.now, _, event = heapq.heappop(made._heap)
        made.give(event)
        made._mishaps()


@pytest.mark.parametrize("changes", [SAMPLED, HYBRID], ids=["sampled", "hybrid"])
@pytest.mark.parametrize("seed", range(4))
def test_a_machine_read_back_at_any_moment_wants_the_same_to_the_end(seed, changes):
    events = Random(seed).randint(1, 400)
    made = world(seed, events, **changes)
    saved = save_machine(made.machine, RunMemory())
    other, _ = load_machine(saved, made.recipe)
    other.check()
    give_both(made, other)


@pytest.mark.parametrize("seed", range(4))
def test_a_run_replayed_from_its_log_is_where_it_was(run_dir, seed):
    made = world(seed, Random(seed).randint(0, 200))
    made.log = logged(made, run_dir)
    for _ in range(Random(seed).randint(1, 300)):
        if made.end is None:
            made.step()
    made.log.close()
    made.log = None
    found = replay(run_dir, made.recipe, TOKEN)
    assert not found.happened or found.until <= made.now
    if made.end is None:
        give_both(made, found.machine)


@pytest.fixture
def killed(run_dir: Path) -> Recorder:
    """A run with a hundred events in its log, whose controller is gone."""
    made = world(1, 50)
    made.log = logged(made, run_dir)
    for _ in range(100):
        made.step()
    made.log.close()
    return made


def test_a_torn_tail_is_cut_at_the_last_whole_event(killed, run_dir):
    path, whole = run_dir / EVENTS, replay(run_dir, killed.recipe, TOKEN).happened
    path.write_bytes(path.read_bytes()[:-1])
    torn = replay(run_dir, killed.recipe, TOKEN).happened
    assert [one.event for one in torn] == [one.event for one in whole][:-1]


def test_a_damaged_event_ends_the_story_there(killed, run_dir):
    path, whole = run_dir / EVENTS, replay(run_dir, killed.recipe, TOKEN).happened
    data = bytearray(path.read_bytes())
    data[-200] ^= 1
    path.write_bytes(data)
    told = replay(run_dir, killed.recipe, TOKEN).happened
    assert 0 < len(told) < len(whole)
    assert [one.event for one in told] == [one.event for one in whole[: len(told)]]


def test_an_event_counts_at_its_own_place_only(run_dir):
    log = EventLog(run_dir, TOKEN, on_error=lambda error: pytest.fail(str(error)))
    log.begin(b"head", b"snapshot")
    log.append(b"one")
    path = run_dir / EVENTS
    data = path.read_bytes()
    path.write_bytes(data + data[-23:])  # 20 bytes stand before the three
    assert read_events(run_dir, TOKEN).entries == [b"one"]


@pytest.mark.parametrize("at", [30, 2000])
def test_a_damaged_head_or_snapshot_says_so(killed, run_dir, at):
    path = run_dir / EVENTS
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    with pytest.raises(StateError, match="is damaged, or was written with another token"):
        replay(run_dir, killed.recipe, TOKEN)


def test_another_token_another_recipe_and_other_code_are_told(killed, run_dir, monkeypatch):
    with pytest.raises(StateError, match="another token"):
        replay(run_dir, killed.recipe, "of another run")
    longer = recipe(run={"name": "world", "steps": 6})
    with pytest.raises(StateError, match="the recipe changed since"):
        replay(run_dir, longer, TOKEN)
    monkeypatch.setattr(run_log, "package", lambda: ({}, "other"))
    with pytest.raises(StateError, match="the code changed since"):
        replay(run_dir, killed.recipe, TOKEN)


def test_only_this_user_may_read_the_log_and_no_secret_is_in_it(run_dir):
    made = Recorder(Random(1), FAULTS, secret_recipe())
    made.later(e.RunStarted())
    made.log = logged(made, run_dir)
    made.step()
    path = run_dir / EVENTS
    assert path.stat().st_mode & 0o777 == 0o600
    assert b"very-secret" not in path.read_bytes()
    assert replay(run_dir, made.recipe, TOKEN).machine.recipe is made.recipe


def secret_recipe() -> Any:
    return recipe(environment={"name": "pointer-chase", "secrets": {"KEY": "very-secret"}})


@pytest.mark.parametrize("harm", [os.system, eval, print, Path, subprocess.Popen])
def test_a_snapshot_makes_nothing_that_is_no_part_of_a_machine(harm):
    class Harmful:
        def __reduce__(self):
            return harm, ("true",)

    with pytest.raises(StateError, match="is no part of a machine"):
        load_machine(pickle.dumps((Harmful(), RunMemory())), recipe())


def test_a_snapshot_makes_nothing_that_a_module_of_the_core_has_imported():
    stolen = b"clibra_cli.core.lifecycle\nMapping\n."
    with pytest.raises(StateError, match="is not of"):
        load_machine(stolen, recipe())


def settle(log: EventLog) -> None:
    """Wait until the thread has written what it writes."""
    if log._draft is not None:
        log._draft.thread.join(10)


def test_what_happens_while_a_snapshot_is_written_is_behind_it(run_dir):
    log = EventLog(run_dir, TOKEN, on_error=lambda error: pytest.fail(str(error)))
    log.begin(b"head", b"snapshot")
    log.append(b"one")
    log.begin(b"head", b"newer")
    assert log._draft is not None
    log._draft.entries += [b"two"]  # as if it took a while
    assert read_events(run_dir, TOKEN).entries[:1] == [b"one"]
    settle(log)
    log.append(b"three")
    logged = read_events(run_dir, TOKEN)
    assert (logged.snapshot, logged.entries) == (b"newer", [b"two", b"three"])
    assert [path.name for path in run_dir.iterdir()] == [EVENTS]


def test_a_disk_that_takes_nothing_more_leaves_no_log_with_a_hole(run_dir, monkeypatch):
    told: list[str] = []
    log = EventLog(run_dir, TOKEN, on_error=lambda error: told.append(str(error)))
    log.begin(b"head", b"snapshot")
    log.append(b"one")

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        log.append(b"two")
        log.append(b"three")
        log.begin(b"head", b"snapshot")
    assert not (run_dir / EVENTS).exists()
    assert [text for text in told if "No space left on device" in text] == told
    assert len(told) == 1
    log.begin(b"head", b"later")
    log.append(b"four")
    assert read_events(run_dir, TOKEN).entries == [b"four"]


def test_a_snapshot_that_cannot_be_written_leaves_the_old_log_going(run_dir, monkeypatch):
    told: list[str] = []
    log = EventLog(run_dir, TOKEN, on_error=lambda error: told.append(str(error)))
    log.begin(b"head", b"snapshot")
    with monkeypatch.context() as patched:
        patched.setattr(event_log, "_write", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
        log.begin(b"head", b"newer")
        settle(log)
    log.append(b"one")
    logged = read_events(run_dir, TOKEN)
    assert (logged.snapshot, logged.entries, len(told)) == (b"snapshot", [b"one"], 1)
    assert [path.name for path in run_dir.iterdir()] == [EVENTS]


@pytest.mark.parametrize("entries_too", [False, True])
def test_a_disk_that_is_full_is_not_tried_again_with_every_event(run_dir, monkeypatch, entries_too):
    made = world(1, 50)
    event_file = EventLog(run_dir, TOKEN, on_error=lambda error: None)
    made.log = RunLog(event_file, made.machine, RunMemory(), lambda: KEPT)
    made.step()
    begun: list[bytes] = []
    begin, write = EventLog.begin, event_log._write

    def counted(log: EventLog, head: bytes, snapshot: bytes) -> None:
        begun.append(snapshot)
        begin(log, head, snapshot)
        if log._draft is not None:
            log._draft.thread.join()

    def full(file: int, data: bytes) -> None:
        if entries_too or len(data) > 5000:
            raise OSError(28, "No space left on device")
        write(file, data)

    monkeypatch.setattr(EventLog, "begin", counted)
    monkeypatch.setattr(event_log, "_write", full)
    monkeypatch.setattr(run_log, "MOST_BYTES", 1000)
    event_file.snapshot_bytes, event_file.entries_bytes = 0, 2000
    for _ in range(30):
        made.step()
    written = event_file.entries_bytes
    assert len(begun) < 10, f"{len(begun)} snapshots in 30 events, {written} bytes since"


@pytest.mark.parametrize(
    ("entries", "snapshot", "is_due"),
    [(1000, 0, False), (1001, 0, True), (3000, 3000, False), (3001, 3000, True)],
)
def test_a_snapshot_is_due_when_the_events_since_are_more_than_it_and_not_few(
    monkeypatch, entries, snapshot, is_due
):
    monkeypatch.setattr(run_log, "MOST_BYTES", 1000)
    begun: list[bytes] = []
    log: Any = SimpleNamespace(
        entries_bytes=0,
        snapshot_bytes=0,
        is_beginning=False,
        begin=lambda head, data: begun.append(data),
    )
    made = RunLog(log, world(1, 5).machine, RunMemory(), lambda: KEPT)
    made.settled()
    assert len(begun) == 1, "the first"
    log.entries_bytes, log.snapshot_bytes = entries, snapshot
    made.settled()
    assert len(begun) == 1 + is_due


def test_a_snapshot_takes_over_only_once_what_was_before_it_is_recorded(run_dir):
    """Nobody would tell it again: a controller that is killed then would leave a hole."""
    recorded = False

    def settle_rows() -> None:
        if not recorded:
            raise StateError("cannot write libra.db")

    told: list[str] = []
    log = EventLog(run_dir, TOKEN, lambda error: told.append(str(error)), settle=settle_rows)
    recorded = True
    log.begin(b"head", b"snapshot")
    recorded = False
    log.append(b"one")
    log.begin(b"head", b"newer")
    settle(log)
    log.append(b"two")
    assert read_events(run_dir, TOKEN).snapshot == b"snapshot"
    assert read_events(run_dir, TOKEN).entries == [b"one", b"two"]
    assert "cannot write libra.db" in told[0]
    recorded = True
    log.begin(b"head", b"newest")
    settle(log)
    log.append(b"three")
    assert read_events(run_dir, TOKEN).snapshot == b"newest"


def test_a_directory_that_cannot_be_synced_leaves_no_log_without_what_came_after(
    run_dir, monkeypatch
):
    told: list[str] = []
    log = EventLog(run_dir, TOKEN, on_error=lambda error: told.append(str(error)))
    log.begin(b"head", b"snapshot")
    log.append(b"one")
    log.begin(b"head", b"newer")
    settle(log)

    def broken(_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(event_log, "_sync_directory", broken)
    log.append(b"two")
    log.append(b"three")
    log.close()
    assert len(told) == 1
    if (run_dir / EVENTS).exists():
        assert read_events(run_dir, TOKEN).entries[-2:] == [b"two", b"three"]
