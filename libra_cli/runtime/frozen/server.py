"""One server of a frozen model, from its first start to the end of the run.

    STARTING --health--> SERVING --exit, or silence--> FAILED --pause--> STARTING

It is started again whatever it ended of, after the pauses of ``core.cluster.restarts``; on a host
that does not answer, once that is back. What was asked of it meanwhile is asked of another one, or
waits: nobody who asks is told of it.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from math import inf
from typing import Any

import aiohttp

from libra_cli.config.errors import LibraError, ProcessError
from libra_cli.config.frozen_models import POOL
from libra_cli.core.cluster.replica import ReplicaState
from libra_cli.core.cluster.restarts import LATER_S, RestartBudget
from libra_cli.core.frozen.slots import FrozenSlot
from libra_cli.core.launch.process import ProcessSpec
from libra_cli.core.model_use import ModelUse
from libra_cli.core.records import Record, SlotRecord
from libra_cli.runtime.hosts.agent_messages import Exited, HostEvent, LeaseExpired
from libra_cli.runtime.hosts.cluster import Cluster
from libra_cli.runtime.hosts.exits import how_it_ended
from libra_cli.runtime.processes.owner import STARTUP_TIMEOUT_S
from libra_cli.runtime.supervision.background import Background
from libra_cli.runtime.supervision.failures import words_of

ASK_EVERY_S = 1.0
CHECK_EVERY_S = 10.0
ANSWER_S = 30.0
"""How long a server may take to say that it is well; vLLM says so beside its engine's steps."""
SILENT_S = 120.0
"""How long a server on a host that answers may say nothing, before another is started; as long as a
lease, chosen."""
_WAITING = re.compile(r"^vllm:num_requests_waiting\{.*\} (\S+)$", re.M)


class FrozenServer:
    """The server of one slot; ``live`` keeps it for as long as the run goes on."""

    def __init__(
        self,
        frozen: FrozenSlot,
        process: Callable[[], ProcessSpec],
        compare: Callable[[], Coroutine[Any, Any, str]],
        cluster: Cluster,
        save: Callable[[Record], None],
    ) -> None:
        """``process`` says what is started, once the host has told of itself; ``compare`` returns
        the digest of what it loads, or raises LibraError if that is not what others load."""
        self.model = frozen.model.name
        self.running = 0
        """Requests that it answers now, or that wait here for a seat on it."""
        self._seats = frozen.model.seats
        self._seated = 0
        self.answered = 0
        """Requests (POST) that it has answered."""
        self.leaving = False
        """Whether it takes no further request, since its slot is to do something else."""
        self.session: aiohttp.ClientSession | None = None
        """The connection to it while it serves; None while it does not."""
        self.first: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when it has served, or has failed before it ever did."""
        self._slot = frozen.slot
        self._process = process
        self._compare = compare
        self._cluster = cluster
        self._save = save
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._budget = RestartBudget()
        self._state, self._since = ReplicaState.IDLE, cluster.clock()
        self._lives = 0
        self._digest = ""
        self._waiting = 0
        self._seconds = _Seconds(cluster.clock)

    @property
    def takes_requests(self) -> bool:
        """Whether a request may be handed to it now."""
        return self.session is not None and not self.leaving

    @property
    def process(self) -> ProcessSpec:
        """What is started on its host."""
        return self._process()

    async def live(self, changed: Callable[[], None]) -> None:
        """Start it, and again whenever it has ended; ``changed`` hears when it serves or not."""
        node = self._slot.node
        while True:
            await self._cluster.until_reached(node)
            hint = f"libra logs {node} {self.process.process}"
            try:
                reason = await self.one_life(changed)
            except LibraError as error:
                reason, hint = f"did not serve: {error}", error.hint or hint
            self._tell_if_first(reason, hint)
            await self._cluster.stop(node, self.process.process)  # what it has left
            pause_s = self._budget.wait_s()
            pause_s = LATER_S if pause_s is None else pause_s
            self._become(ReplicaState.FAILED, f"{reason}; started again in {pause_s:.0f} s")
            await asyncio.sleep(pause_s)

    def happened(self, event: HostEvent) -> None:
        """Take in that its process, or its host, is gone."""
        if self._ended.done():
            return
        if isinstance(event, Exited):
            gone = event.node, event.process
            # One that was asked for is of the life before, and may be told of late.
            if not event.requested and gone == (self._slot.node, self.process.process):
                self._ended.set_result(how_it_ended(event))
        elif isinstance(event, LeaseExpired) and event.node == self._slot.node:
            self._budget.refill()  # the host's fault
            self._ended.set_result(f"went with its host: {event.reason}")

    @property
    def used(self) -> ModelUse:
        """What has been asked of it."""
        busy_s, _ = self._seconds.told()
        return ModelUse(
            self.model,
            int(self.takes_requests),
            busy_s,
            self._seconds.request_s,
            open=self.running,
            answered=self.answered,
        )

    @property
    def is_full(self) -> bool:
        """Whether it answers as many requests as it can at once."""
        return self._seated >= self._seats

    @property
    def has_limit(self) -> bool:
        """Whether requests may wait for a seat on it."""
        return self._seats < inf

    @contextmanager
    def seated(self) -> Iterator[None]:
        """Take a seat, while there is one, for a request that is handed to it."""
        self._seated += 1
        try:
            yield
        finally:
            self._seated -= 1

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Count a request while it is answered, or waits for a seat."""
        self.running += 1
        self._seconds.count(self.running)
        try:
            yield
        finally:
            self.running -= 1
            self._seconds.count(self.running)

    async def is_well(self) -> bool:
        """Whether it serves, and says so itself."""
        return self.session is not None and await _is_well(self.session)

    def leave(self) -> None:
        """Tell that the slot has no server any more, at the end of the run."""
        self._become(ReplicaState.IDLE)

    async def one_life(self, changed: Callable[[], None]) -> str:
        """Start the process, serve, and return why that is over; ``changed`` hears when it serves.

        Raises:
            LibraError: its host refuses to start it, or cannot be reached.
        """
        self._ended = asyncio.get_running_loop().create_future()
        self._lives += 1
        self._digest = ""
        self._become(ReplicaState.STARTING)
        process = self.process
        await self._cluster.start(process)
        endpoint = await self._cluster.dial(process)
        connector = aiohttp.UnixConnector(path=endpoint.path, limit=0)
        async with (
            self._comparing() as compared,
            aiohttp.ClientSession(connector=connector) as session,
        ):
            await self._until_well(session)
            # A server that is well is not asked before it is known what it has loaded.
            either: set[asyncio.Future[Any]] = {self._ended, compared}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if self._ended.done():
                return self._ended.result()
            if not self._digest:
                return "its files were not compared"
            try:
                self.session = session
                self._serves()
                changed()
                return await self._until_ended(session)
            finally:
                self.session = None
                self._seconds.stop()
                self._budget.worked(now=self._cluster.clock())

    @asynccontextmanager
    async def _comparing(self) -> AsyncIterator[asyncio.Task[None]]:
        """Have the model's files read and compared meanwhile; others than they must be end it."""
        background = Background()
        try:
            what = f"reading the files of {self.model}"
            yield background.start(what, self._compared(), failed=self._not_compared)
        finally:
            await background.close()

    async def _compared(self) -> None:
        try:
            self._digest = await self._compare()
        except LibraError as error:
            if not self._ended.done():
                self._ended.set_exception(error)
                self._ended.exception()  # its life may be over before anyone asks

    def _not_compared(self, error: Exception) -> None:
        if not self._ended.done():
            why = f"did not serve: its files were not compared: {words_of(error)}"
            self._ended.set_result(why)

    def _serves(self) -> None:
        self._budget.works(now=self._cluster.clock())
        self._seconds.start()
        self._become(ReplicaState.SERVING, self._what)
        if not self.first.done():
            self.first.set_result(None)

    @property
    def _what(self) -> str:
        """The model's files in a few words: those of its other servers are the same."""
        return f"files {self._digest[:12]}"

    def _tell_if_first(self, reason: str, hint: str) -> None:
        if not self.first.done():
            what = f"model {self.model}: its server on {self._slot.id} {reason}"
            self.first.set_exception(ProcessError(what, hint=hint))
            self.first.exception()  # nobody may wait for it

    async def _until_well(self, session: aiohttp.ClientSession) -> None:
        """Wait until it serves or has ended."""
        with suppress(TimeoutError):
            async with asyncio.timeout(STARTUP_TIMEOUT_S):
                while not self._ended.done() and not await _is_well(session):
                    await asyncio.wait({self._ended}, timeout=ASK_EVERY_S)
                return
        if not self._ended.done():
            self._ended.set_result(f"did not serve within {STARTUP_TIMEOUT_S:.0f} s")

    async def _until_ended(self, session: aiohttp.ClientSession) -> str:
        """Return why it serves no more; time counts only while its host can be reached."""
        loop = asyncio.get_running_loop()
        heard_at = loop.time()
        while not self._ended.done():
            left_s = heard_at + SILENT_S - loop.time()
            answer_s = max(ASK_EVERY_S, min(ANSWER_S, left_s))
            if self._slot.node in self._cluster.lost:
                heard_at = loop.time()
            elif await _is_well(session, answer_s):
                heard_at = loop.time()
                self._waiting = await _waiting(session)
            elif loop.time() - heard_at >= SILENT_S:
                return f"has not answered for {loop.time() - heard_at:.0f} s"
            self._save(self._row(self._what))
            left_s = max(0.0, heard_at + SILENT_S - loop.time())
            await asyncio.wait({self._ended}, timeout=min(CHECK_EVERY_S, left_s))
        return self._ended.result()

    def _become(self, state: ReplicaState, detail: str = "") -> None:
        self._state, self._since = state, self._cluster.clock()
        self._save(self._row(detail))

    def _row(self, detail: str) -> SlotRecord:
        busy_s, serving_s = self._seconds.told()
        serves = self._state is ReplicaState.SERVING
        return SlotRecord(
            slot=self._slot.id,
            node=self._slot.node,
            gpus_json=json.dumps(self._slot.gpus),
            pool=POOL,
            role="idle" if self._state is ReplicaState.IDLE else "model",
            state=self._state,
            since=self._since,
            incarnation=self._lives,
            bucket=self.model,
            version=None,
            verified=False,
            running=self.running,
            waiting=self._waiting + self.running - self._seated if serves else 0,
            busy_s=busy_s,
            serving_s=serving_s,
            restarts=max(0, self._lives - 1),
            detail=detail,
        )


class _Seconds:
    """How long a server has served, and how long of that with a request at least."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._at: float | None = None
        self._requests = 0
        #: Of all requests, summed.
        self.request_s = 0.0
        self._busy_s = self._serving_s = 0.0

    def start(self) -> None:
        self._at = self._clock()

    def stop(self) -> None:
        self._add()
        self._at = None

    def count(self, running: int) -> None:
        """Take in how many requests there are from now on."""
        self._add()
        self._requests = running

    def told(self) -> tuple[float, float]:
        """Seconds with a request, and in all."""
        self._add()
        return self._busy_s, self._serving_s

    def _add(self) -> None:
        if self._at is None:
            return
        now = self._clock()
        self._serving_s += now - self._at
        self._busy_s += (now - self._at) * (self._requests > 0)
        self.request_s += (now - self._at) * self._requests
        self._at = now


async def _is_well(session: aiohttp.ClientSession, answer_s: float = ANSWER_S) -> bool:
    return await _page(session, "/health", answer_s) is not None


async def _waiting(session: aiohttp.ClientSession) -> int:
    """Requests that wait inside the server, which runs as many as it has room for."""
    page = await _page(session, "/metrics") or ""
    return int(sum(float(number) for number in _WAITING.findall(page)))


async def _page(
    session: aiohttp.ClientSession, path: str, answer_s: float = ANSWER_S
) -> str | None:
    """Return what a server says there; None if it does not."""
    timeout = aiohttp.ClientTimeout(total=answer_s)
    try:
        async with session.get(f"http://server{path}", timeout=timeout) as answer:
            return await answer.text() if answer.status == 200 else None
    except (aiohttp.ClientError, OSError, TimeoutError, UnicodeDecodeError):
        return None
