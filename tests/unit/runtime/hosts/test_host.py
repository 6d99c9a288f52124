"""The controller's side of a host: what it does about an agent that is silent, gone or another."""
# ruff: noqa: ASYNC110 - waiting for what a host reports means looking again

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import pytest

from libra_cli.config.errors import HostError, HostLost
from libra_cli.runtime.hosts import host as hosts
from libra_cli.runtime.hosts.agent_messages import (
    ConnectionLost,
    Exited,
    HostEvent,
    LeaseExpired,
    Reconnected,
    Rejoined,
)
from libra_cli.runtime.hosts.host import Host
from libra_cli.runtime.hosts.transport import CommandResult

DEADLINE_S = 5.0


class FakeAgent:
    """One life of an agent: what it runs, and what it says to a line that is no request."""

    def __init__(self, life: str = "a") -> None:
        self.life = life
        self.processes: list[dict[str, object]] = []
        self.started = 1

    def answer(self, request: Mapping[str, Any]) -> dict[str, object]:
        result: object = None
        if request["op"] == "hello":
            result = {"pid": 1, "life": self.life, "processes": self.processes}
        elif request["op"] == "start":
            pid = len(self.processes) + 100
            row = {"process": request["process"], "pid": pid, "started": self.started}
            self.processes.append({**row, "log": "/l", "state": "running"})
            result = self.processes[-1]
        elif request["op"] == "list":
            result = []
        return {"id": request.get("id"), "ok": True, "result": result}


class FakeStream:
    """A stream to the agent of a fake host."""

    errors = ""
    link_silent_s = math.inf

    def __init__(self, agent: FakeAgent) -> None:
        self.agent = agent
        self.lines: asyncio.Queue[bytes] = asyncio.Queue()

    async def readline(self) -> bytes:
        return await self.lines.get()

    async def write(self, data: bytes) -> None:
        request = json.loads(data)
        if request["op"] != "ping":
            self.say(self.agent.answer(request))

    def say(self, message: object) -> None:
        self.lines.put_nowait(json.dumps(message).encode() + b"\n")

    async def close(self) -> None:
        self.lines.put_nowait(b"")


class FakeTransport:
    """A host that can be cut off, and whose agent can be another one."""

    target, home, default_python = "n1", "/home/u", "python3"

    def __init__(self) -> None:
        self.agent = FakeAgent()
        self.streams: list[FakeStream] = []
        self.fault: Exception | None = None
        self.leftovers: Sequence[str] = ()
        self.stops = 0
        self.attempts = 0
        self.deaf = 0

    async def connect(self, *, timeout_s: float = 15.0) -> None:
        self.attempts += 1
        if self.fault is not None:
            raise self.fault

    async def close(self) -> None:
        pass

    async def run(
        self, argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float
    ) -> CommandResult:
        if self.fault is not None:
            raise self.fault
        out = "[3, 11]"
        if argv[-2:-1] == ["stop"]:
            self.stops += 1
            out = json.dumps({"killed": [], "leftovers": self.leftovers})
        elif argv[0] == "sh":
            out = "/tmp/libra-x"
        return CommandResult(0, out.encode(), b"")

    async def put_tree(self, files: Mapping[str, bytes], directory: str) -> None:
        pass

    async def open_stream(self, argv: Sequence[str]) -> FakeStream:
        if self.fault is not None:
            raise self.fault
        self.streams.append(FakeStream(self.agent))
        return self.streams[-1]

    async def reach(self, path: str) -> None:
        if self.deaf:
            self.deaf -= 1
            self.agent = FakeAgent(f"after-{self.deaf}")
            raise HostLost("n1: connect failed")

    async def cut(self, fault: Exception | None = None) -> None:
        self.fault = fault or HostLost("n1: cut")
        await self.streams[-1].close()


class Scene:
    """An open host, and what it has reported."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, lease_s: float = 0.2) -> None:
        monkeypatch.setattr(hosts, "FIRST_PAUSE_S", 0.01)
        self.transport = FakeTransport()
        self.host = Host("n1", cast("Any", self.transport), workdir="/w", first_rejoin_s=0.01)
        self.events: list[HostEvent] = []
        self.lease_s = lease_s

    async def open(self) -> None:
        await self.host.open(
            "r", token="t", lease_s=self.lease_s, weights_dir="/w", on_event=self.events.append
        )

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                await asyncio.sleep(0.002)

    async def seen(self, kind: type[HostEvent]) -> None:
        await self.until(lambda: any(isinstance(event, kind) for event in self.events))

    @property
    def kinds(self) -> list[type[HostEvent]]:
        return [type(event) for event in self.events]


def test_a_host_that_was_given_up_rejoins_with_a_new_agent(monkeypatch) -> None:
    async def scene() -> None:
        one = Scene(monkeypatch)
        await one.open()
        await one.host.start("server-0", ["x"])
        await one.transport.cut()
        await one.seen(LeaseExpired)
        with pytest.raises(HostLost, match="given up"):
            await one.host.processes()
        attempts = one.transport.attempts
        await one.until(lambda: one.transport.attempts > attempts + 2)  # it is asked for ever
        one.transport.agent, one.transport.fault = FakeAgent("b"), None
        await one.seen(Rejoined)
        assert one.transport.stops == 1, "nothing of before may run"
        assert await one.host.processes() == []
        assert one.kinds == [ConnectionLost, LeaseExpired, Rejoined]
        assert await one.host.shutdown() == ()

    asyncio.run(scene())


def test_a_host_with_something_that_cannot_be_stopped_does_not_rejoin(monkeypatch) -> None:
    async def scene() -> None:
        one = Scene(monkeypatch)
        await one.open()
        await one.transport.cut()
        await one.seen(LeaseExpired)
        one.transport.leftovers = ("7 (vllm)",)
        one.transport.agent, one.transport.fault = FakeAgent("b"), None
        await one.until(lambda: one.transport.stops >= 2)
        assert Rejoined not in one.kinds
        one.transport.leftovers = ()
        await one.seen(Rejoined)
        await one.host.close()

    asyncio.run(scene())


def test_an_agent_that_began_anew_is_noticed_within_the_lease(monkeypatch) -> None:
    """The controller did not run for longer than the lease, or the host was rebooted."""

    async def scene() -> None:
        one = Scene(monkeypatch, lease_s=60.0)
        await one.open()
        await one.host.start("server-0", ["x"])
        one.transport.agent = FakeAgent("b")
        await one.transport.streams[-1].close()
        await one.seen(Rejoined)
        assert one.kinds == [ConnectionLost, LeaseExpired, Rejoined]
        assert "its lease was over" in str(one.events[1])
        await one.host.close()

    asyncio.run(scene())


def test_requests_that_waited_are_not_sent_to_an_agent_that_began_anew(monkeypatch) -> None:
    async def scene() -> None:
        one = Scene(monkeypatch, lease_s=60.0)
        await one.open()
        await one.transport.cut()
        await one.seen(ConnectionLost)
        start = asyncio.create_task(one.host.start("server-0", ["x"]))
        await asyncio.sleep(0)
        one.transport.agent, one.transport.fault = FakeAgent("b"), None
        with pytest.raises(HostLost, match="given up"):
            await start
        assert one.transport.agent.processes == []
        await one.host.close()

    asyncio.run(scene())


def test_the_successor_in_the_same_life_keeps_the_processes(monkeypatch) -> None:
    async def scene() -> None:
        one = Scene(monkeypatch, lease_s=60.0)
        await one.open()
        await one.host.start("server-0", ["x"])
        await one.transport.streams[-1].close()
        await one.seen(Reconnected)
        assert Exited not in one.kinds
        await one.host.close()

    asyncio.run(scene())


def test_the_exit_of_a_process_with_the_pid_of_an_earlier_one_is_told(monkeypatch) -> None:
    async def scene() -> None:
        one = Scene(monkeypatch, lease_s=60.0)
        await one.open()
        for started in (1, 2):
            agent = one.transport.agent
            agent.processes = []
            agent.started = started
            row = await one.host.start("server-0", ["x"])
            gone = {"process": "server-0", "pid": row.pid, "started": row.started}
            for _ in range(2):  # and each is told once
                one.transport.streams[-1].say({"event": "exited", **gone})
            async with asyncio.timeout(DEADLINE_S):
                while one.kinds.count(Exited) < started:
                    await asyncio.sleep(0.002)
        await asyncio.sleep(0.02)
        assert one.kinds.count(Exited) == 2
        await one.host.close()

    asyncio.run(scene())


@pytest.mark.parametrize(
    "fault", [RuntimeError("a bug"), OSError(24, "too many files"), KeyError()]
)
def test_no_error_ends_the_keeper_of_a_connection(monkeypatch, fault) -> None:
    """On any error that is not a HostError today's keeper dies, and nobody hears of it."""

    async def scene() -> None:
        one = Scene(monkeypatch)
        await one.open()
        await one.transport.cut(fault)
        await one.seen(LeaseExpired)
        one.transport.agent, one.transport.fault = FakeAgent("b"), None
        await one.seen(Rejoined)
        await one.host.close()

    asyncio.run(scene())


@pytest.mark.parametrize(
    "nonsense",
    [{"event": "exited"}, {"event": 7}, {"id": 1}, {"id": 1, "ok": False}, {"event": None}, [], 3],
)
def test_nonsense_of_an_agent_costs_at_most_a_connection(monkeypatch, nonsense) -> None:
    async def scene() -> None:
        one = Scene(monkeypatch, lease_s=60.0)
        await one.open()
        waiting = asyncio.create_task(one.host.tail("x"))
        await asyncio.sleep(0)
        one.transport.streams[-1].say(nonsense)
        await waiting
        assert await one.host.processes() == []
        await one.host.close()

    asyncio.run(scene())


def test_a_host_that_does_not_answer_at_the_end_is_asked_once_more(monkeypatch) -> None:
    async def scene() -> None:
        one = Scene(monkeypatch)
        await one.open()
        await one.transport.cut()
        await one.seen(LeaseExpired)
        with pytest.raises(HostError, match=r"its lease ends what runs there at \d\d:\d\d"):
            await one.host.shutdown()

    asyncio.run(scene())


def test_what_a_lost_host_runs_at_the_end_is_stopped_if_it_answers_again(monkeypatch) -> None:
    async def scene() -> None:
        one = Scene(monkeypatch)
        monkeypatch.setattr(hosts, "FIRST_REJOIN_S", 60.0)
        one.host = Host("n1", cast("Any", one.transport), workdir="/w", first_rejoin_s=60.0)
        await one.open()
        await one.transport.cut()
        await one.seen(LeaseExpired)
        one.transport.fault = None
        assert await one.host.shutdown() == ()
        assert one.transport.stops == 1

    asyncio.run(scene())


@pytest.mark.parametrize(("link_silent_s", "limit_s"), [(math.inf, 0.03), (0.0, 0.25)])
def test_an_answer_may_wait_behind_other_data_on_the_link_for_half_a_lease(
    monkeypatch, link_silent_s, limit_s
) -> None:
    monkeypatch.setattr(FakeStream, "link_silent_s", link_silent_s)

    async def scene() -> float:
        one = Scene(monkeypatch, lease_s=0.5)  # its agent answers no ping
        one.host = Host("n1", cast("Any", one.transport), workdir="/w", ping_interval_s=0.01)
        await one.open()
        opened = asyncio.get_running_loop().time()
        await one.seen(ConnectionLost)
        await one.host.close()
        return asyncio.get_running_loop().time() - opened

    took_s = asyncio.run(scene())
    assert limit_s - 0.02 <= took_s
    assert took_s < 0.25 or link_silent_s == 0.0


def test_an_agent_that_answers_late_on_a_busy_link_is_known_to_be_behind(monkeypatch) -> None:
    monkeypatch.setattr(FakeStream, "link_silent_s", 0.0)

    async def scene() -> None:
        one = Scene(monkeypatch, lease_s=60.0)
        one.host = Host("n1", cast("Any", one.transport), workdir="/w", ping_interval_s=0.01)
        await one.open()
        await one.until(lambda: one.host.behind_s > 0.1)
        for _ in range(1000):
            one.transport.streams[-1].say({"id": None, "ok": True, "result": None})
        await one.until(lambda: one.host.behind_s < 0.05)
        await one.host.close()

    asyncio.run(scene())


def test_an_agent_that_is_about_to_end_is_followed_by_another(monkeypatch) -> None:
    """A run that has just ended leaves one that takes a moment to go."""
    monkeypatch.setattr(hosts, "AGENT_PAUSES_S", (0.01, 0.01, 0.01))

    async def scene(deaf: int) -> None:
        one = Scene(monkeypatch)
        one.transport.deaf = deaf
        await one.open()
        assert await one.host.processes() == []
        assert await one.host.shutdown() == ()

    asyncio.run(scene(3))
    with pytest.raises(HostError, match="connect failed"):
        asyncio.run(scene(4))
