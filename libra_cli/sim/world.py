"""The outside of a machine, in virtual time: servers, tools and a trainer that cost what they cost.

    sim.world                                     core.machine
    heap: the next thing to happen  --event-->    handle(event, now)
          ^                                             |
          +-- how long it takes <-- engine, trace, <--actions
                                    cost models

The machine, its gate, its policy and its ledger are the ones of production. What is simulated: a
server's steps (``sim.engine``), the time a tool, an optimizer step, a weight sync and a start take.
What is not: the network, failures, and the tokens themselves, which are only counted.

A trajectory's recorded future stays in here. The machine learns of a turn when it is generated and
of a tool's return when it comes back; only an oracle that is asked for on purpose knows more.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any, cast

from libra_cli.config.errors import LibraError
from libra_cli.config.recipe import Recipe
from libra_cli.core import actions as a
from libra_cli.core import events as e
from libra_cli.core.costs.server import ServerCost
from libra_cli.core.machine import Machine, RunIdentity
from libra_cli.core.records import Record, SlotRecord, StepRecord, TrajectoryRecord, TurnRecord
from libra_cli.core.rollout.trajectories import ABORTED
from libra_cli.core.scheduling.baselines import SchedulingPolicy
from libra_cli.core.types import (
    Bucket,
    Plan,
    Seconds,
    Slot,
    Tokens,
    ToolOutcome,
    ToolReturn,
    Trajectory,
    TrajectoryId,
    VersionSpan,
    WeightVersion,
)
from libra_cli.sim.engine import Engine, EngineRequest, FinishedRequest
from libra_cli.sim.traces import RecordedEpisode

CHARACTERS = 4
"""Of text a token: tools are told by the characters they return, traces count tokens."""


class FakeTokens:
    """Stands for an array of tokens of which only the number matters."""

    __slots__ = ("itemsize", "number")

    def __init__(self, number: int = 0, itemsize: int = 1) -> None:
        self.number = number
        self.itemsize = itemsize

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, part: slice) -> FakeTokens:
        return FakeTokens(self.number)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FakeTokens) and other.number == self.number

    def __hash__(self) -> int:
        return hash(self.number)

    def extend(self, more: FakeTokens) -> None:
        """So many more."""
        self.number += len(more)

    def frombytes(self, data: bytes) -> None:
        """So many more."""
        self.number += len(data) // self.itemsize

    def tolist(self) -> list[int]:
        """No token is known."""
        return []


def counted_trajectory(trajectory: TrajectoryId, now: Seconds) -> Trajectory:
    """A trajectory whose tokens are only counted."""
    return Trajectory(
        trajectory,
        token_ids=_ids(0),
        logprobs=cast("array[float]", FakeTokens(itemsize=4)),
        loss_mask=cast("array[int]", FakeTokens()),
        started_at=now,
    )


def _ids(number: int) -> array[int]:
    return cast("array[int]", FakeTokens(number))


@dataclass(frozen=True, slots=True)
class SimConfig:
    """What is simulated: a recipe's numbers, a plan, and what everything costs.

    ``cost_of`` is what the servers really cost, ``guess_of`` what the scheduler believes.
    ``train_s`` prices one optimizer step on so many GPUs; ``sync_s`` is the time from a version's
    publication to a server that has proved it, ``stall_s`` how long its engine stands still
    meanwhile; ``start_s`` that of starting a server of a shape after the first plan,
    ``to_training_s`` that of a GPU from a stopped server to its first share of a batch; ``turn_s``
    what a turn spends outside engine and tool. Where servers share cores with the trainer,
    ``beside_of`` is what they cost while it works, and its step takes ``training_slowdown`` times
    as long while any of them does.
    """

    recipe: Recipe
    plan: Plan
    slots: tuple[Slot, ...]
    cost_of: Callable[[Bucket], ServerCost]
    guess_of: Callable[[Bucket], ServerCost]
    train_s: Callable[[tuple[a.TrainSample, ...], int], Seconds]
    start_s: Callable[[Bucket], Seconds]
    sync_s: Seconds = 1.0
    to_training_s: Seconds = 8.0
    stall_s: Seconds = 0.0
    turn_s: Seconds = 0.0
    beside_of: Callable[[Bucket], ServerCost] | None = None
    training_slowdown: float = 1.0


@dataclass(slots=True)
class Recording:
    """What was seen of one simulated run."""

    steps: list[StepRecord] = field(default_factory=list)
    turns: list[TurnRecord] = field(default_factory=list)
    trajectories: list[TrajectoryRecord] = field(default_factory=list)
    slots: list[tuple[Seconds, SlotRecord]] = field(default_factory=list)
    trained: list[tuple[Seconds, Seconds]] = field(default_factory=list)
    ended_at: Seconds = 0.0

    def keep(self, record: Record, now: Seconds) -> None:
        """What later questions need."""
        if isinstance(record, TurnRecord):
            self.turns.append(record)
        elif isinstance(record, StepRecord) and not record.checkpoint:
            self.steps.append(record)  # once; it is told again with its checkpoint
        elif isinstance(record, TrajectoryRecord) and record.state == "finished":
            self.trajectories.append(record)
        elif isinstance(record, SlotRecord):
            self.slots.append((now, record))


@dataclass(slots=True)
class _Step:
    """An optimizer step under way: ``left`` seconds of it at ``at``, passing at ``rate``."""

    action: a.Train
    began: Seconds
    at: Seconds
    left: Seconds
    rate: float = 1.0


@dataclass(slots=True)
class _Play:
    """A recorded trajectory, and how far it has been played."""

    episode: RecordedEpisode
    turn: int = 0
    #: Tokens of this turn that were generated before a server aborted it.
    said: Tokens = 0
    #: Tokens some server has computed at some time.
    known: Tokens = 0


class World:
    """Runs one machine from a heap of events to its end."""

    def __init__(
        self,
        scene: SimConfig,
        policy: SchedulingPolicy,
        groups: Iterator[tuple[RecordedEpisode, ...]],
        *,
        replan: Callable[[World, StepRecord], e.PlanChosen | None] | None = None,
    ) -> None:
        self.scene = scene
        self.now: Seconds = 0.0
        self.tape = Recording()
        self.engines: dict[str, Engine] = {}
        self.retired: list[tuple[str, Engine]] = []
        self.machine = Machine(
            scene.recipe,
            scene.plan,
            scene.slots,
            RunIdentity("simulated", "", 0, 0.0),
            policy=policy,
            cost_of=scene.guess_of,
            make=counted_trajectory,
        )
        self._groups = groups
        self._drawn: list[tuple[RecordedEpisode, ...]] = []
        self._plays: dict[TrajectoryId, _Play] = {}
        self._requests: dict[int, a.Generate] = {}
        self._heap: list[tuple[Seconds, int, e.Event | tuple[str, Engine]]] = []
        self._order = count()
        #: When each engine's next milestone is on the heap.
        self._woken: dict[str, Seconds] = {}
        self._dirty: dict[str, Engine] = {}
        self._ended = False
        self._replan = replan
        self._slots = {slot.id: slot for slot in scene.slots}
        #: When each GPU of the trainer can take a share of a batch.
        self._trains_from = dict.fromkeys(self._trainer_gpus(), 0.0)
        self._sharing: set[int] = set()
        self._training_until: Seconds = 0.0
        self._step: _Step | None = None
        self._due: e.StepDone | None = None

    # -- time -----------------------------------------------------------------------------------

    def run(self) -> Recording:
        """To the end of the run."""
        self._later(e.RunStarted(), 0.0)
        while not self._ended:
            self.now, _, what = heapq.heappop(self._heap)
            if isinstance(what, tuple):
                self._milestone(*what)
            else:
                self._give(what)
            self._wake_engines()
        self.tape.ended_at = self.now
        return self.tape

    def _later(self, event: e.Event, after_s: Seconds) -> None:
        heapq.heappush(self._heap, (self.now + after_s, next(self._order), event))

    def _give(self, event: e.Event) -> None:
        if isinstance(event, e.StepDone):
            if event is not self._due:
                return  # the step has become faster or slower since
            self._step_over()
        for action in self.machine.handle(event, now=self.now):
            _PERFORM[type(action)](self, action)

    def _wake_engines(self) -> None:
        for slot, engine in self._dirty.items():
            at = engine.next_at()
            if at is not None and at != self._woken.get(slot):
                self._woken[slot] = at
                heapq.heappush(self._heap, (at, next(self._order), (slot, engine)))
        self._dirty.clear()
        self._pace_step()

    def _milestone(self, slot: str, engine: Engine) -> None:
        if self.engines.get(slot) is not engine or self._woken.get(slot) != self.now:
            return  # something came in between
        self._woken.pop(slot)
        self._dirty[slot] = engine
        for done in engine.advance(self.now):
            self._generated(self._requests.pop(done.id), done)

    # -- what an onlooker may ask ---------------------------------------------------------------

    def plan_slots(self) -> list[Slot]:
        """The slots of the plan the machine has now."""
        plan = self.machine.plan
        return [self._slots[slot] for slot in (*dict(plan.servers), *plan.train)]

    def busy_gpu_s(self) -> Seconds:
        """GPU seconds in which a server, past or present, had something to do."""
        every = [*self.engines.items(), *self.retired]
        return sum(engine.busy_s * len(self._slots[slot].gpus) for slot, engine in every)

    def served_gpu_s(self) -> Seconds:
        """GPU seconds that servers were there for."""
        return sum(
            (span[3] - span[2]) * len(self._slots[span[0]].gpus)
            for span in self.spans()
            if span[0] in self._slots and span[1] in ("serving", "draining", "joining")
        )

    def spans(self) -> list[tuple[str, str, Seconds, Seconds]]:
        """What each slot did, from when to when."""
        spans: list[tuple[str, str, Seconds, Seconds]] = []
        since: dict[str, tuple[str, Seconds]] = {}
        for at, row in self.tape.slots:
            state, start = since.get(row.slot, (row.state, at))
            if state != row.state:
                spans.append((row.slot, state, start, at))
                start = at
            since[row.slot] = (row.state, start)
        ended = self.tape.ended_at
        spans += [(slot, state, start, ended) for slot, (state, start) in since.items()]
        spans = [span for span in spans if span[1] != "training"]
        trained = [("trainer", "training", start, end) for start, end in self.tape.trained]
        return [span for span in [*spans, *trained] if span[3] > span[2]]

    # -- turns ----------------------------------------------------------------------------------

    def episode(self, trajectory: TrajectoryId) -> RecordedEpisode:
        """The recording behind a trajectory. Its future: for oracles only."""
        while len(self._drawn) <= trajectory.group:
            self._drawn.append(next(self._groups))
        return self._drawn[trajectory.group][trajectory.member]

    def _start_episode(self, action: a.StartEpisode) -> None:
        episode = self.episode(action.trajectory)
        self._plays[action.trajectory] = _Play(episode)
        self._later(e.EpisodeStarted(action.trajectory, _ids(episode.prompt)), 0.0)

    def _generate(self, action: a.Generate) -> None:
        who, play = action.trajectory, self._plays[action.trajectory]
        self._requests[action.request] = action
        request = EngineRequest(
            id=action.request,
            session=who,
            prompt=len(action.prompt_ids),
            generate=_left(play, action),
            cache_key=action.cache_key,
            shared=((who.group, play.episode.task), play.episode.prompt),
            known=play.known,
        )
        engine = self.engines[action.slot]
        engine.submit(request, self.now)
        self._dirty[action.slot] = engine

    def _abort_turn(self, action: a.AbortTurn) -> None:
        engine = self.engines[action.slot]
        engine.abort(action.request, self.now)
        # It may be out at once, and then nothing else wakes an engine that is empty.
        self._woken[action.slot] = self.now
        heapq.heappush(self._heap, (self.now, next(self._order), (action.slot, engine)))

    def _generated(self, asked: a.Generate, done: FinishedRequest) -> None:
        play = self._plays.get(asked.trajectory)
        if play is None:
            return
        whole = done.generated == _left(play, asked)
        play.said = 0 if whole else play.said + done.generated
        play.known = len(asked.prompt_ids) + done.generated
        version = asked.cache_key.step
        self._give(
            e.TurnGenerated(
                request=asked.request,
                trajectory=asked.trajectory,
                slot=asked.slot,
                incarnation=asked.incarnation,
                prompt_ids=asked.prompt_ids,
                token_ids=_ids(done.generated),
                logprobs=cast("array[float]", FakeTokens(done.generated)),
                spans=(VersionSpan(version, 0, done.generated),) if done.generated else (),
                newest=asked.cache_key,
                cache_key=asked.cache_key,
                finish_reason="stop" if whole else ABORTED,
                started_at=done.admitted_at if done.admitted_at >= 0 else self.now,
            )
        )

    def _advance_episode(self, action: a.AdvanceEpisode) -> None:
        play = self._plays[action.trajectory]
        turn = play.episode.turns[play.turn]
        play.turn += 1
        done = play.turn == len(play.episode.turns)
        returns: tuple[ToolReturn, ...] = ()
        if turn.tool:
            outcome = turn.outcome or ToolOutcome.OK
            size = turn.observation * CHARACTERS
            returns = (ToolReturn(turn.tool, outcome, turn.tool_s, size),)
        event = e.EpisodeAdvanced(
            action.trajectory,
            _ids(0 if done else turn.observation),
            returns,
            done,
            play.episode.reward if done else None,
        )
        self._later(event, turn.tool_s + self.scene.turn_s)

    def _finish_episode(self, action: a.FinishEpisode) -> None:
        reward = self._plays[action.trajectory].episode.reward
        self._later(e.EpisodeAdvanced(action.trajectory, _ids(0), (), True, reward), 0.0)

    def _forget_episode(self, action: a.ForgetEpisode) -> None:
        self._plays.pop(action.trajectory, None)

    # -- servers and the trainer ----------------------------------------------------------------

    def _start_server(self, action: a.StartServer) -> None:
        """A GPU that trains finishes its share first, so the server starts after the step."""
        cost = self.scene.cost_of(action.bucket)
        engine = Engine(cost, max_num_seqs=action.bucket.max_num_seqs)
        self.engines[action.slot] = engine
        gpus = self._slots[action.slot].gpus
        busy = not self._sharing.isdisjoint(gpus)
        wait = max(0.0, self._training_until - self.now) if busy else 0.0
        start_s = self.scene.start_s(action.bucket) if self.now else 0.0
        self._later(e.ServerStarted(action.slot, action.incarnation), wait + start_s)

    def _stop_server(self, action: a.StopServer) -> None:
        engine = self.engines.pop(action.slot)
        self.retired.append((action.slot, engine))
        for gpu in set(self._slots[action.slot].gpus) & set(self._trainer_gpus()):
            self._trains_from.setdefault(gpu, self.now + self.scene.to_training_s)
        self._later(e.ServerStopped(action.slot, action.incarnation), 0.0)

    def _sync_server(self, action: a.SyncServer) -> None:
        took = self.scene.sync_s if action.published.version.step else 0.0
        at = self.now + took
        engine = self.engines[action.slot]
        if took and self.scene.stall_s:
            engine.stall(self.scene.stall_s, self.now)
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
        self._later(event, took)

    def _check_server(self, action: a.CheckServer) -> None:
        self._later(e.ServerChecked(action.slot, action.incarnation), 0.0)

    def _reprice(self, cost_of: Callable[[Bucket], ServerCost]) -> None:
        """Servers cost something else from now on."""
        for slot, bucket in self.machine.plan.servers:
            engine = self.engines.get(slot)
            if engine is not None:
                engine.reprice(cost_of(bucket), self.now)
                self._dirty[slot] = engine

    def _trainer_gpus(self) -> tuple[int, ...]:
        return tuple(gpu for slot in self.scene.plan.train for gpu in self._slots[slot].gpus)

    def _start_trainer(self, action: a.StartTrainer) -> None:
        self._later(
            e.TrainerStarted(action.incarnation, self._published(action.incarnation, 0)), 0.0
        )

    def _stop_trainer(self, action: a.StopTrainer) -> None:
        self._later(e.TrainerStopped(action.incarnation), 0.0)

    def _train(self, action: a.Train) -> None:
        ready = [at for at in self._trains_from.values() if at <= self.now]
        late = 0.0 if ready else min(self._trains_from.values()) - self.now
        self._sharing = {gpu for gpu, at in self._trains_from.items() if at <= self.now}
        left = late + self.scene.train_s(action.samples, len(ready) or 1)
        self._step = _Step(action, self.now, self.now, left)
        self._schedule_step(self._step)
        if self.scene.beside_of is not None:
            self._reprice(self.scene.beside_of)

    def _schedule_step(self, step: _Step) -> None:
        took = step.left / step.rate
        self._training_until = self.now + took
        incarnation, number = step.action.incarnation, step.action.step
        published = self._published(incarnation, number, self._training_until)
        self._due = e.StepDone(incarnation, number, published)
        self._later(self._due, took)

    def _pace_step(self) -> None:
        """A step is slower while a server is at work, where they share cores."""
        step = self._step
        if step is None or self.scene.training_slowdown <= 1.0:
            return
        busy = any(engine.running or engine.waiting for engine in self.engines.values())
        rate = 1.0 / self.scene.training_slowdown if busy else 1.0
        if rate != step.rate:
            step.left -= (self.now - step.at) * step.rate
            step.at, step.rate = self.now, rate
            self._schedule_step(step)

    def _step_over(self) -> None:
        step, self._step = self._step, None
        assert step is not None
        self.tape.trained.append((step.began, self.now))
        if step.action.ledger is not None:
            saved = e.CheckpointSaved(step.action.incarnation, step.action.step, "simulated")
            self._later(saved, 0.0)
        if self.scene.beside_of is not None:
            self._reprice(self.scene.cost_of)

    def _published(self, incarnation: int, step: int, at: Seconds = 0.0) -> e.PublishedVersion:
        return e.PublishedVersion(WeightVersion(incarnation, step), 0, at)

    def _checkpoint(self, action: a.Checkpoint) -> None:
        self._later(e.CheckpointSaved(action.incarnation, action.step, "simulated"), 0.0)

    def _wake(self, action: a.Wake) -> None:
        self._later(e.TimerFired(action.name), action.after_s)

    def _save(self, action: a.Save) -> None:
        record = action.record
        self.tape.keep(record, self.now)
        if isinstance(record, StepRecord) and self._replan is not None and not record.checkpoint:
            chosen = self._replan(self, record)
            if chosen is not None:
                self._adopt(chosen)

    def _adopt(self, chosen: e.PlanChosen) -> None:
        """GPUs that the new plan trains on and no server holds join at once."""
        self._slots.update({slot.id: slot for slot in chosen.slots})
        wanted = set(self._trainer_gpus())
        held = {gpu for slot in self.engines for gpu in self._slots[slot].gpus}
        joining = dict.fromkeys(wanted - held, self.now + self.scene.to_training_s)
        kept = {gpu: at for gpu, at in self._trains_from.items() if gpu in wanted}
        self._trains_from = {**joining, **kept}
        self._later(chosen, 0.0)

    def _end(self, action: a.End) -> None:
        self._ended = True
        if action.state == "failed":
            raise LibraError(f"the simulated run failed: {action.error}")


def _left(play: _Play, asked: a.Generate) -> Tokens:
    """Tokens that the recorded turn still has, as far as they are asked for."""
    return min(play.episode.turns[play.turn].generated - play.said, asked.max_tokens)


_PERFORM: dict[type, Callable[[World, Any], None]] = {
    a.StartServer: World._start_server,
    a.CheckServer: World._check_server,
    a.StopServer: World._stop_server,
    a.SyncServer: World._sync_server,
    a.StartTrainer: World._start_trainer,
    a.StopTrainer: World._stop_trainer,
    a.Train: World._train,
    a.Checkpoint: World._checkpoint,
    a.StartEpisode: World._start_episode,
    a.Generate: World._generate,
    a.AbortTurn: World._abort_turn,
    a.AdvanceEpisode: World._advance_episode,
    a.FinishEpisode: World._finish_episode,
    a.ForgetEpisode: World._forget_episode,
    a.Wake: World._wake,
    a.Save: World._save,
    a.End: World._end,
}
