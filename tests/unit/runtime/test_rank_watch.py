"""The ranks of a world, watched by what they tell in their hosts' files."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import pytest

from libra_cli.config.errors import HostLost
from libra_cli.core.launch.process import ProcessSpec
from libra_cli.core.progress.phases import PHASES
from libra_cli.core.progress.watch import FOUND_S
from libra_cli.runtime.trainer import rank_watch
from libra_cli.runtime.trainer.rank_watch import RECORD_BYTES, RankRecord, RankWatch

DEADLINE_S = 10.0
COMPUTING = "computing gradients: micro-batch 2 of 7"


class FakeHost:
    """A host whose ranks run unless they are stopped; its file can be read unless it is away."""

    run_dir = "/run"

    def __init__(self, *ranks: RankRecord) -> None:
        self.ranks = {one.rank: one for one in ranks}
        self.stopped: set[int] = set()
        self.going_on: set[int] = set()
        self.transport = self
        self.away = False
        self.read = ""

    async def get(self, path: str) -> bytes:
        self.read = path
        if self.away:
            raise HostLost("away")
        for one in self.ranks.values():
            if one.rank not in self.stopped:
                more = one.rank in self.going_on
                self.ranks[one.rank] = replace(one, beat=one.beat + 1, count=one.count + more)
        told = (json.dumps(asdict(one)).encode() for one in self.ranks.values())
        return b"".join(one.ljust(RECORD_BYTES) for one in told)

    async def tail(self, process: str, lines: int = 20) -> str:
        return f"end of {process}'s log"


def watched(**hosts: FakeHost) -> tuple[RankWatch, list[float]]:
    """A watch whose clock goes on by a look's pause whenever it is read."""
    now = [0.0]

    def clock() -> float:
        return now[0]

    cluster: Any = SimpleNamespace(hosts=hosts, clock=clock)
    specs = [
        ProcessSpec(name, f"trainer-{number}", (), {}, {"trainer.json": "", "accelerate.yaml": ""})
        for number, name in enumerate(hosts)
    ]
    return RankWatch(cluster, specs, 1), now


def until_told(watch: RankWatch, now: list[float], monkeypatch: pytest.MonkeyPatch) -> str:
    pause = asyncio.sleep

    async def skip(seconds: float) -> None:
        now[0] += seconds
        await pause(0)

    monkeypatch.setattr(asyncio, "sleep", skip)

    async def whole() -> str:
        return await asyncio.wait_for(watch.until_stalled(), DEADLINE_S)

    return asyncio.run(whole())


def rank(number: int, phase: str = COMPUTING) -> RankRecord:
    return RankRecord(number, 1, 0, 0, phase)


def test_a_rank_that_is_stopped_is_named_with_its_host_phase_log_and_the_next_command(
    monkeypatch,
) -> None:
    a, b = FakeHost(rank(0), rank(1)), FakeHost(rank(2), rank(3))
    b.stopped = {3}
    watch, now = watched(a=a, b=b)
    reason = until_told(watch, now, monkeypatch)
    assert now[0] <= FOUND_S
    assert b.read == "/run/trainer.progress"
    told = f"trainer-1 on b made no progress for 52 s (rank 3, {COMPUTING}): it is stopped"
    assert reason.startswith(told)
    assert "end of trainer-1's log" in reason
    assert reason.endswith("next: libra logs b trainer-1")


def test_ranks_that_run_but_wait_for_one_another_are_found_by_their_phases_deadline(
    monkeypatch,
) -> None:
    a = FakeHost(rank(0), rank(1))
    a.going_on = {0}
    watch, now = watched(a=a)
    reason = until_told(watch, now, monkeypatch)
    least = PHASES["computing gradients"]
    assert least <= now[0] < least + FOUND_S
    assert f"(rank 1, {COMPUTING}): it runs, and does not go on" in reason


def test_ranks_that_wait_for_rank_0_are_no_failure_while_it_writes_a_large_version(
    monkeypatch,
) -> None:
    a = FakeHost(rank(0, "copying the weights"), rank(1, "waiting for rank 0"))
    watch, now = watched(a=a)
    assert "made no progress" in until_told(watch, now, monkeypatch)
    assert now[0] >= 1800  # 140 GB at 200 MB/s take 700 s


def test_a_rank_that_goes_on_is_left_in_peace_and_so_is_one_that_nobody_can_ask(
    monkeypatch,
) -> None:
    a, b = FakeHost(rank(0)), FakeHost(rank(1))
    a.going_on, b.away = {0}, True
    watch, now = watched(a=a, b=b)

    class Enough(Exception):
        pass

    def clock() -> float:
        if now[0] > 3600:
            raise Enough
        return now[0]

    watch._cluster.clock = clock
    with pytest.raises(Enough):
        until_told(watch, now, monkeypatch)


def test_records_of_the_trainer_before_say_nothing_of_this_one(monkeypatch) -> None:
    a = FakeHost(replace(rank(0), incarnation=0), rank(1))
    a.stopped = {0, 1}
    watch, now = watched(a=a)
    assert "(rank 1," in until_told(watch, now, monkeypatch)


def test_a_host_that_was_away_is_not_charged_for_it(monkeypatch) -> None:
    a = FakeHost(rank(0))
    watch, now = watched(a=a)

    async def scene() -> str:
        await watch._look("a")
        a.away, now[0] = True, 3600.0
        await watch._look("a")
        a.away, now[0] = False, 3604.0
        return str(await watch._look("a"))

    assert asyncio.run(scene()) == "[]"


def test_a_host_whose_disk_hangs_is_asked_once_and_seen_again_afterwards(monkeypatch) -> None:
    monkeypatch.setattr(rank_watch, "READ_S", 0.01)
    a = FakeHost(rank(0))
    watch, _ = watched(a=a)

    async def scene() -> None:
        works, reads = asyncio.Event(), 0
        read = a.get

        async def hang(path: str) -> bytes:
            nonlocal reads
            reads += 1
            await works.wait()
            return await read(path)

        monkeypatch.setattr(a, "get", hang)
        for _ in range(3):
            assert await watch._read("a") == []
        assert reads == 1
        works.set()
        assert [one.rank for one in await watch._read("a")] == [0]
        assert reads == 1

    asyncio.run(scene())
