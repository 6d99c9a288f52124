"""The outside of a machine, in virtual time: servers, tools and a trainer that cost what they cost.

    sim.world                                     core.run.machine
    heap: the next thing to happen  --event-->    handle(event, now)
          ^                                             |
          +-- how long it takes <-- engine, trace, <--actions
                                    cost models

The machine, its scheduler, its planner and its ledger are those of production, and every action of
the machine is performed: servers, workers and the trainer change only as it says. What is
simulated: a server's steps (``sim.engine``), the time a tool, an optimizer step, a weight sync and
a start take. What is not: the network, failures, and the tokens themselves, which are only counted.

A trajectory's recorded future stays in here. The machine learns of a turn when it is generated and
of a tool's return when it comes back; only an oracle that is asked for on purpose knows more.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import assert_never, cast

from libra_cli.config.errors import LibraError
from libra_cli.config.recipe import Recipe
from libra_cli.core import actions as a
from libra_cli.core import events as e
from libra_cli.core.algorithms.algorithm import algorithm_of
from libra_cli.core.costs.law import ServerLaw
from libra_cli.core.planning.planner import DecisionMaker, answer
from libra_cli.core.records import (
    GroupRecord,
    LateRecord,
    MoveRecord,
    Record,
    SlotRecord,
    StepRecord,
    TrajectoryRecord,
    TurnRecord,
)
from libra_cli.core.rollout.turns import ABORTED
from libra_cli.core.run.machine import Machine
from libra_cli.core.run.state import RunIdentity
from libra_cli.core.scheduling.policy import SchedulingPolicy
from libra_cli.core.types import (
    Bucket,
    Plan,
    Role,
    Seconds,
    Slot,
    Tokens,
    ToolOutcome,
    ToolReturn,
    Trajectory,
    TrajectoryId,
    VersionSpan,
    is_evaluation,
)
from libra_cli.plugins.finding import find
from libra_cli.sim.engine import Engine, EngineRequest, FinishedRequest
from libra_cli.sim.traces import RecordedEpisode
from libra_cli.sim.trainer import SimTrainer

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

    def __iter__(self) -> Iterator[int]:
        return iter(())

    def extend(self, more: FakeTokens) -> None:
        self.number += more.number

    def tobytes(self) -> bytes:
        """No bytes: nobody looks at simulated tokens."""
        return b""

    def frombytes(self, data: bytes) -> None:
        self.number += len(data) // self.itemsize

    def tolist(self) -> list[int]:
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


_ids = cast("Callable[[int], array[int]]", FakeTokens)
_logprobs = cast("Callable[[int], array[float]]", FakeTokens)


@dataclass(frozen=True, slots=True)
class SimConfig:
    """What is simulated: a recipe's numbers, a plan, and what everything costs.

    ``cost_of`` is what the servers really cost, ``guess_of`` what the scheduler believes.
    ``train_s`` prices one optimizer step on so many GPUs; ``sync_s`` is the time from a version's
    publication to a server that has proved it, ``stall_s`` how long its engine stands still
    meanwhile; ``start_s`` that of starting a server of a shape after the first plan,
    ``to_training_s`` that of starting a gradient worker, ``gradient_s`` how long its gradients of a
    step travel, ``fixed_s`` what of an optimizer step only the base group has, ``resize_s`` that of
    restarting the trainer with other slots; ``turn_s`` what a turn spends outside engine and tool.
    Where servers share cores with the trainer, ``beside_of`` is what they cost while it works, and
    its step takes ``training_slowdown`` times as long while any of them does.
    """

    recipe: Recipe
    plan: Plan
    slots: tuple[Slot, ...]
    cost_of: Callable[[Bucket], ServerLaw]
    guess_of: Callable[[Bucket], ServerLaw]
    train_s: Callable[[tuple[a.TrainSample, ...], int], Seconds]
    start_s: Callable[[Bucket], Seconds]
    sync_s: Seconds = 1.0
    to_training_s: Seconds = 8.0
    resize_s: Seconds = 60.0
    stall_s: Seconds = 0.0
    turn_s: Seconds = 0.0
    gradient_s: Seconds = 0.0
    fixed_s: Seconds = 0.0
    beside_of: Callable[[Bucket], ServerLaw] | None = None
    training_slowdown: float = 1.0


@dataclass(slots=True)
class Recording:
    """What was seen of one simulated run."""

    steps: list[StepRecord] = field(default_factory=list)
    turns: list[TurnRecord] = field(default_factory=list)
    trajectories: list[TrajectoryRecord] = field(default_factory=list)
    slots: list[tuple[Seconds, SlotRecord]] = field(default_factory=list)
    trained: list[tuple[Seconds, Seconds]] = field(default_factory=list)
    #: The newest row of every move of a slot, by number.
    moves: dict[int, MoveRecord] = field(default_factory=dict)
    #: Groups that were trained; members that their group was closed without, by (group, member):
    #: the step that trained them later, or none yet; members that were given up.
    groups: set[int] = field(default_factory=set)
    late: dict[tuple[int, int], int | None] = field(default_factory=dict)
    dropped: set[tuple[int, int]] = field(default_factory=set)
    ended_at: Seconds = 0.0

    def keep(self, record: Record, now: Seconds) -> None:
        """What later questions need."""
        if isinstance(record, TurnRecord):
            self.turns.append(record)
        elif isinstance(record, StepRecord) and not record.checkpoint:
            self.steps.append(record)  # once; it is told again with its checkpoint
        elif isinstance(record, TrajectoryRecord) and record.state == "finished":
            self.trajectories.append(record)
        elif isinstance(record, TrajectoryRecord | GroupRecord | LateRecord):
            self._keep_end(record)
        elif isinstance(record, SlotRecord):
            self.slots.append((now, record))
        elif isinstance(record, MoveRecord):
            self.moves[record.move] = record

    def _keep_end(self, record: TrajectoryRecord | GroupRecord | LateRecord) -> None:
        """What became of a group and its members."""
        if isinstance(record, LateRecord):
            self.late[record.group_id, record.member] = record.step
        elif isinstance(record, GroupRecord) and record.state == "trained":
            self.groups.add(record.group_id)
        elif isinstance(record, TrajectoryRecord) and record.state == "dropped":
            self.dropped.add((record.group_id, record.member))


@dataclass(slots=True)
class _Play:
    """A recorded trajectory, and how far it has been played."""

    episode: RecordedEpisode
    turn: int = 0
    #: Tokens that a server is asked for.
    wanted: Tokens = 0
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
        planner: DecisionMaker | None = None,
    ) -> None:
        self.scene = scene
        self.now: Seconds = 0.0
        self.recording = Recording()
        self.engines: dict[str, Engine] = {}
        self.retired: list[tuple[str, Engine]] = []
        self.machine = Machine(
            # A teacher would be asked about tokens, of which only the number is known.
            algorithm_of(scene.recipe.model_copy(update={"teacher": None}), find),
            scene.plan,
            scene.slots,
            RunIdentity("simulated", "", 0, 0.0),
            policy=policy,
            cost_of=scene.guess_of,
            make=counted_trajectory,
        )
        self._groups = groups
        self._drawn: list[tuple[RecordedEpisode, ...]] = []
        #: Recordings behind the tasks of evaluations.
        self._evaluated: dict[int, tuple[RecordedEpisode, ...]] = {}
        self._plays: dict[TrajectoryId, _Play] = {}
        self._requests: dict[int, a.Generate] = {}
        self._heap: list[tuple[Seconds, int, e.Event | tuple[str, Engine]]] = []
        self._order = count()
        #: When each engine's next milestone is on the heap.
        self._woken: dict[str, Seconds] = {}
        self._dirty: dict[str, Engine] = {}
        self._ended = False
        #: Whether servers that work slow the trainer down.
        self._slows = scene.training_slowdown > 1.0
        self._planner = planner
        self._slots = {slot.id: slot for slot in scene.slots}
        self._trainer = SimTrainer(
            self._slots,
            scene.train_s,
            scene.training_slowdown,
            self._later,
            lambda: self.now,
            scene.gradient_s,
            scene.fixed_s,
            trained=self.recording.trained,
        )

    # -- time -----------------------------------------------------------------------------------

    def run(self) -> Recording:
        """Simulate until the run ends."""
        self._later(e.RunStarted(), 0.0)
        while not self._ended:
            self.now, _, what = heapq.heappop(self._heap)
            if isinstance(what, tuple):
                self._milestone(*what)
            else:
                self._give(what)
            if self._dirty:
                self._wake_engines()
            if self._slows:
                work = any(engine.running or engine.waiting for engine in self.engines.values())
                self._trainer.pace(servers_work=work)
        self.recording.ended_at = self.now
        return self.recording

    def _later(self, event: e.Event, after_s: Seconds) -> None:
        heapq.heappush(self._heap, (self.now + after_s, next(self._order), event))

    def _give(self, event: e.Event) -> None:
        if isinstance(event, e.StepDone):
            step = self._trainer.ends(event)
            if step is None:
                return  # the step has become faster or slower since
            self._step_over(step)
        for action in self.machine.handle(event, now=self.now):
            self._perform(action)

    def _perform(self, action: a.Action) -> None:  # noqa: C901, PLR0912, PLR0915 - one branch each
        match action:
            case a.Save():
                self.recording.keep(action.record, self.now)
            case a.Generate():
                self._generate(action)
            case a.AdvanceEpisode():
                self._advance_episode(action)
            case a.StartEpisode():
                self._start_episode(action)
            case a.AbortTurn():
                self._abort_turn(action)
            case a.FinishEpisode():
                self._finish_episode(action)
            case a.ForgetEpisode():
                self._plays.pop(action.trajectory, None)
            case a.StartServer():
                self._start_server(action)
            case a.CheckServer():
                self._later(e.ServerChecked(action.slot, action.incarnation), 0.0)
            case a.StopServer():
                self._stop_server(action)
            case a.SyncServer():
                self._sync_server(action)
            case a.StartTrainer():
                after_s = self.scene.resize_s if action.resume else 0.0
                self._trainer.start(action, after_s)
            case a.StopTrainer():
                self._later(e.TrainerStopped(action.incarnation), 0.0)
            case a.Train():
                self._train(action)
            case a.Accumulate():
                self._trainer.accumulate(action)
            case a.Checkpoint():
                saved = e.CheckpointSaved(action.incarnation, action.step, "simulated")
                self._later(saved, 0.0)
            case a.StartWorker():
                after_s = self.scene.to_training_s if self.now else 0.0
                self._later(e.WorkerStarted(action.slot, action.incarnation), after_s)
            case a.SyncWorker():
                self._sync_worker(action)
            case a.StopWorker():
                self._trainer.drop(action.slot, "the worker was stopped")
                self._later(e.WorkerStopped(action.slot, action.incarnation), 0.0)
            case a.Propose():
                self._propose(action)
            case a.AskTeacher():
                raise AssertionError("a simulated run has no teacher")
            case a.AnswerOrder():
                pass  # in virtual time nobody gives orders
            case a.Wake():
                self._later(e.TimerFired(action.name), action.after_s)
            case a.End():
                self._end(action)
            case _:
                assert_never(action)

    def _wake_engines(self) -> None:
        for slot, engine in self._dirty.items():
            at = engine.next_at()
            if at is not None and at != self._woken.get(slot):
                self._woken[slot] = at
                heapq.heappush(self._heap, (at, next(self._order), (slot, engine)))
        self._dirty.clear()

    def _milestone(self, slot: str, engine: Engine) -> None:
        if self._woken.get(slot) != self.now or self.engines.get(slot) is not engine:
            return  # something came in between
        del self._woken[slot]
        self._dirty[slot] = engine
        for done in engine.advance(self.now):
            self._generated(self._requests.pop(done.id), done)

    # -- what an onlooker may ask ---------------------------------------------------------------

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
        for at, row in self.recording.slots:
            # What a slot of the trainer does is told by its steps.
            now = "training" if row.role in (Role.TRAIN, Role.GRADIENT) else row.state
            state, start = since.get(row.slot, (now, at))
            if state != now:
                spans.append((row.slot, state, start, at))
                start = at
            since[row.slot] = (now, start)
        ended = self.recording.ended_at
        spans += [(slot, state, start, ended) for slot, (state, start) in since.items()]
        spans = [span for span in spans if span[1] != "training"]
        trained = [("trainer", "training", start, end) for start, end in self.recording.trained]
        return [span for span in [*spans, *trained] if span[3] > span[2]]

    # -- turns ----------------------------------------------------------------------------------

    def episode(self, trajectory: TrajectoryId) -> RecordedEpisode:
        """The recording behind a trajectory. Its future: for oracles only."""
        if is_evaluation(trajectory.group):
            if trajectory.group not in self._evaluated:
                self._evaluated[trajectory.group] = next(self._groups)
            members = self._evaluated[trajectory.group]
            return members[trajectory.member % len(members)]
        while len(self._drawn) <= trajectory.group:
            self._drawn.append(next(self._groups))
        return self._drawn[trajectory.group][trajectory.member]

    def _start_episode(self, action: a.StartEpisode) -> None:
        episode = self.episode(action.trajectory)
        self._plays[action.trajectory] = _Play(episode)
        self._later(e.EpisodeStarted(action.trajectory, _ids(episode.prompt)), 0.0)

    def _generate(self, action: a.Generate) -> None:
        who, play = action.trajectory, self._plays[action.trajectory]
        left = play.episode.turns[play.turn].generated - play.said
        play.wanted = min(left, action.max_tokens)
        self._requests[action.request] = action
        request = EngineRequest(
            id=action.request,
            session=who,
            prompt=len(action.prompt_ids),
            generate=play.wanted,
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
        generated = done.generated
        whole = generated == play.wanted
        play.said = 0 if whole else play.said + generated
        play.known = len(asked.prompt_ids) + generated
        version = asked.cache_key.step
        self._give(
            e.TurnGenerated(
                request=asked.request,
                trajectory=asked.trajectory,
                slot=asked.slot,
                incarnation=asked.incarnation,
                prompt_ids=asked.prompt_ids,
                token_ids=_ids(generated),
                logprobs=_logprobs(generated),
                spans=(VersionSpan(version, 0, generated),) if generated else (),
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

    # -- servers and the trainer ----------------------------------------------------------------

    def _start_server(self, action: a.StartServer) -> None:
        cost = self.scene.cost_of(action.bucket)
        engine = Engine(cost, max_num_seqs=action.bucket.max_num_seqs)
        self.engines[action.slot] = engine
        after_s = self.scene.start_s(action.bucket) if self.now else 0.0
        self._later(e.ServerStarted(action.slot, action.incarnation), after_s)

    def _stop_server(self, action: a.StopServer) -> None:
        engine = self.engines.pop(action.slot)
        self.retired.append((action.slot, engine))
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

    def _sync_worker(self, action: a.SyncWorker) -> None:
        took = self.scene.sync_s if action.published.version.step else 0.0
        at = self._trainer.loaded_at[action.slot] = self.now + took
        synced = e.WorkerSynced(
            action.slot, action.incarnation, action.published, 0.0, took, 0.0, at
        )
        self._later(synced, took)

    def _propose(self, action: a.Propose) -> None:
        if self._planner is None:
            self._later(e.PlanKept("this run has no planner", action.order), 0.0)
            return
        event = answer(self._planner, action)
        if isinstance(event, e.PlanChosen):
            self._slots.update({slot.id: slot for slot in event.slots})
        self._later(event, 0.0)

    def _reprice(self, cost_of: Callable[[Bucket], ServerLaw]) -> None:
        """Servers cost something else from now on."""
        for slot, bucket in self.machine.plan.servers:
            engine = self.engines.get(slot)
            if engine is not None:
                engine.reprice(cost_of(bucket), self.now)
                self._dirty[slot] = engine

    def _train(self, action: a.Train) -> None:
        self._trainer.train(action)
        if self.scene.beside_of is not None:
            self._reprice(self.scene.beside_of)

    def _step_over(self, step: a.Train) -> None:
        if step.ledger is not None:
            self._later(e.CheckpointSaved(step.incarnation, step.step, "simulated"), 0.0)
        if self.scene.beside_of is not None:
            self._reprice(self.scene.cost_of)

    def _end(self, action: a.End) -> None:
        self._ended = True
        if action.state == "failed":
            raise LibraError(f"the simulated run failed: {action.error}")
