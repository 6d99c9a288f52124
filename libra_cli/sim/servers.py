"""The rollout servers of a simulated run: an engine a server, which takes as long as it takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import assert_never

from libra_cli.core import actions as a
from libra_cli.core import events as e
from libra_cli.core.costs.law import ServerLaw
from libra_cli.core.launch.shares import serving_when_idle
from libra_cli.core.rollout.turns import ABORTED
from libra_cli.core.types import Bucket, Plan, Seconds, SlotId, VersionSpan, WeightVersion
from libra_cli.sim.config import SimConfig
from libra_cli.sim.counted import ids, logprobs
from libra_cli.sim.engine import Engine, EngineRequest, FinishedRequest
from libra_cli.sim.episodes import SimEpisodes
from libra_cli.sim.virtual_time import VirtualTime


class SimServers:
    """The servers of a simulated run, past and present, and the requests inside."""

    def __init__(self, time: VirtualTime, scene: SimConfig, episodes: SimEpisodes) -> None:
        self._time = time
        self._scene = scene
        self._episodes = episodes
        self.engines: dict[SlotId, Engine] = {}
        self.retired: list[tuple[SlotId, Engine]] = []
        self._shares = serving_when_idle(scene.recipe.nodes, scene.slots)
        self._requests: dict[int, a.Generate] = {}
        #: When each engine's next milestone is due; engines that may have another one.
        self._woken: dict[SlotId, Seconds] = {}
        self._dirty: dict[SlotId, Engine] = {}

    def perform(self, action: a.ServerAction | a.TurnAction) -> None:
        """Start, stop, check or sync a server, or begin or abort a turn, in virtual time."""
        match action:
            case a.Generate():
                self._generate(action)
            case a.AbortTurn():
                self._abort_turn(action)
            case a.StartServer():
                self._start_server(action)
            case a.CheckServer():
                self._time.later(e.ServerChecked(action.slot, action.incarnation), 0.0)
            case a.StopServer():
                self._stop_server(action)
            case a.SyncServer():
                self._sync_server(action)
            case a.SleepServer() | a.WakeServer():
                self._sleep_or_wake(action)
            case _:
                assert_never(action)

    @property
    def work(self) -> bool:
        """Whether any server has a request."""
        return any(engine.running or engine.waiting for engine in self.engines.values())

    def wake(self) -> None:
        """Await the next milestone of every engine that has changed."""
        for slot, engine in self._dirty.items():
            at = engine.next_at()
            if at is not None and at != self._woken.get(slot):
                self._woken[slot] = at
                self._time.at(at, (slot, engine))
        self._dirty.clear()

    def milestone(self, slot: SlotId, engine: Engine) -> Iterator[e.TurnGenerated]:
        """Yield the turns that end on the engine now."""
        if self._woken.get(slot) != self._time.now or self.engines.get(slot) is not engine:
            return  # something came in between
        del self._woken[slot]
        self._dirty[slot] = engine
        for done in engine.advance(self._time.now):
            yield from self._generated(self._requests.pop(done.id), done)

    def _generate(self, action: a.Generate) -> None:
        who, play = action.trajectory, self._episodes.plays[action.trajectory]
        left = play.episode.turns[play.turn].generated - play.said
        play.wanted = min(left, action.max_tokens)
        self._requests[action.request] = action
        request = EngineRequest(
            id=action.request,
            session=who,
            prompt=len(action.prompt_ids),
            generate=play.wanted,
            cache_key=action.kv_key,
            shared=(who.group, play.episode.prompt),
            known=play.known,
            priority=action.priority,
        )
        engine = self.engines[action.slot]
        engine.submit(request, self._time.now)
        self._dirty[action.slot] = engine

    def _abort_turn(self, action: a.AbortTurn) -> None:
        engine = self.engines[action.slot]
        engine.abort(action.request, self._time.now)
        # It may be out at once, and then nothing else wakes an engine that is empty.
        self._woken[action.slot] = self._time.now
        self._time.at(self._time.now, (action.slot, engine))

    def _generated(self, asked: a.Generate, done: FinishedRequest) -> Iterator[e.TurnGenerated]:
        play = self._episodes.plays.get(asked.trajectory)
        if play is None:
            return
        generated = done.generated
        whole = generated == play.wanted
        play.said = 0 if whole else play.said + generated
        play.known = len(asked.prompt_ids) + generated
        version, newest = asked.cache_key.step, asked.cache_key
        if isinstance(done.cache_key, WeightVersion):  # of a load in between
            newest = max(newest, done.cache_key)
        yield e.TurnGenerated(
            request=asked.request,
            trajectory=asked.trajectory,
            slot=asked.slot,
            incarnation=asked.incarnation,
            prompt_ids=asked.prompt_ids,
            token_ids=ids(generated),
            logprobs=logprobs(generated),
            spans=(VersionSpan(version, 0, generated),) if generated else (),
            newest=newest,
            cache_key=asked.cache_key,
            finish_reason="stop" if whole else ABORTED,
            started_at=done.admitted_at if done.admitted_at >= 0 else self._time.now,
        )

    def _start_server(self, action: a.StartServer) -> None:
        cost = self._cost(action.slot, action.bucket, self._scene.cost_of)
        engine = Engine(cost, max_num_seqs=action.bucket.max_num_seqs)
        self.engines[action.slot] = engine
        after_s = self._scene.start_s(action.bucket) if self._time.now else 0.0
        self._time.later(e.ServerStarted(action.slot, action.incarnation), after_s)

    def _stop_server(self, action: a.StopServer) -> None:
        engine = self.engines.pop(action.slot)
        self.retired.append((action.slot, engine))
        self._time.later(e.ServerStopped(action.slot, action.incarnation), 0.0)

    def _sleep_or_wake(self, action: a.SleepServer | a.WakeServer) -> None:
        if isinstance(action, a.SleepServer):
            self._time.later(e.ServerAsleep(action.slot, action.incarnation), 0.0)
        else:
            after_s = self._scene.wake_s
            self._time.later(e.ServerStarted(action.slot, action.incarnation), after_s)

    def _sync_server(self, action: a.SyncServer) -> None:
        took = self._scene.sync_s if action.published.version.step else 0.0
        at = self._time.now + took
        engine = self.engines[action.slot]
        if took:
            engine.load(
                self._scene.stall_s,
                self._time.now,
                clear_cache=self._scene.recipe.weight_sync.clear_cache,
                cache_key=action.published.version,
            )
            self._dirty[action.slot] = engine
        new = action.published
        event = e.ServerSynced(
            action.slot,
            action.incarnation,
            new,
            0.0,
            took,
            0.0,
            at,
            sent_bytes=new.bytes,
            kind="full",
        )
        self._time.later(event, took)

    def reprice(self, plan: Plan, cost_of: Callable[[Bucket], ServerLaw]) -> None:
        """Let the servers of the plan cost what ``cost_of`` says from now on."""
        for slot, bucket in plan.servers:
            engine = self.engines.get(slot)
            if engine is not None:
                engine.reprice(self._cost(slot, bucket, cost_of), self._time.now)
                self._dirty[slot] = engine

    def _cost(
        self, slot: SlotId, bucket: Bucket, cost_of: Callable[[Bucket], ServerLaw]
    ) -> ServerLaw:
        """What a server on the slot costs, with the KV cache that its share of memory leaves."""
        cost, cache_of = cost_of(bucket), self._scene.cache_of
        if cache_of is None or slot not in self._shares:
            return cost
        return cost.with_kv_tokens(cache_of(bucket, self._shares[slot].rollout))
