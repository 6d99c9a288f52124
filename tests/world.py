"""A small random world for the machine: it answers actions late, wrongly, twice or never.

It keeps its own simple truth (which servers exist, what was asked) and hands the machine only
events that a real host could send in that situation, in any order time allows.
"""

from __future__ import annotations

import heapq
import re
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from random import Random
from typing import Any

from hypothesis import settings

from libra_cli.config.recipe import Recipe
from libra_cli.core import actions as a
from libra_cli.core import events as e
from libra_cli.core.algorithms.algorithm import Algorithm, algorithm_of
from libra_cli.core.bound_choice import BoundChoice, PricedBound
from libra_cli.core.explanation import (
    Binding,
    Constraint,
    Explanation,
    PlanOption,
    PredictedStep,
)
from libra_cli.core.launch.joined_slots import slot_named
from libra_cli.core.launch.placement import initial_plan, slots_of
from libra_cli.core.records import Record, StepRecord, TrajectoryRecord
from libra_cli.core.run.machine import Machine
from libra_cli.core.run.state import Phase, Resume, RunIdentity
from libra_cli.core.scheduling.policy import POLICIES
from libra_cli.core.types import (
    BranchPoint,
    LostGpu,
    Plan,
    Pool,
    Prediction,
    Role,
    Slot,
    SlotId,
    ToolOutcome,
    ToolReturn,
    TrajectoryId,
    VersionSpan,
    WeightVersion,
    node_of,
)
from libra_cli.plugins.finding import find

FEW_RUNS = settings(max_examples=settings().max_examples // 5)
"""For properties whose every example is a whole run: 5 of them in ``make check``."""


def recipe(**changes: Any) -> Recipe:
    """Two hosts with two servers each, and one that trains; small numbers throughout."""
    base: dict[str, Any] = {
        "run": {"name": "world", "steps": 5},
        "nodes": [
            {"host": "a", "slots": 2, "pool": "rollout"},
            {"host": "b", "slots": 2, "pool": "rollout"},
            {"host": "c", "pool": "train"},
        ],
        "model": {"path": "/model", "max_len": 60},
        "environment": {"name": "pointer-chase", "retries": 2},
        "rollout": {
            "group_size": 2,
            "max_turns": 4,
            "max_turn_tokens": 8,
            "buckets": [{"name": "all", "max_num_seqs": 3}],
        },
        "training": {"groups_per_step": 3, "max_staleness": 1, "checkpoint_every": 2},
    }
    for section, values in changes.items():
        merge = isinstance(values, dict)
        base[section] = {**base.get(section, {}), **values} if merge else values
    return Recipe.model_validate(base)


def machine_of(
    recipe: Recipe, plan: Plan, slots: Sequence[Slot], identity: RunIdentity, **more: Any
) -> Machine:
    """A machine with what the recipe names."""
    policy = find(POLICIES, recipe.scheduler.policy)()
    return Machine(algorithm_of(recipe, find), plan, slots, identity, policy=policy, **more)


def algorithm(**training: Any) -> Algorithm:
    """The algorithm of that recipe with this of ``training``."""
    return algorithm_of(recipe(training=training), find)


def critic_says(samples: Sequence[a.TrainSample]) -> tuple[e.TurnAdvantages, ...]:
    """Of this world, that a turn is worth a quarter more than the one before."""
    turns: dict[tuple[int, int], dict[int, float]] = {}
    for sample in samples:
        known = turns.setdefault(sample.trajectory.id[:2], {})
        known |= {number: reward - number / 4 for number, _, reward in sample.turns}
    return tuple(
        e.TurnAdvantages(group, member, tuple(known[number] for number in sorted(known)))
        for (group, member), known in turns.items()
        if known
    )


OVER_THE_WIRE = (
    e.ServerStarted,
    e.ServerFailed,
    e.ServerChecked,
    e.ServerAsleep,
    e.ServerStopped,
    e.ServerSynced,
    e.SyncFailed,
    e.TurnGenerated,
    e.TurnFailed,
    e.TeacherAnswered,
    e.TeacherFailed,
    e.TrainerStarted,
    e.TrainerFailed,
    e.TrainerStopped,
    e.StepDone,
    e.Accumulated,
    e.WorkerStarted,
    e.WorkerSynced,
    e.WorkerSyncFailed,
    e.WorkerFailed,
    e.WorkerStopped,
    e.ModelStarted,
    e.ModelFailed,
    e.ModelStopped,
)
"""What may come twice. Environments answer in this process, once."""
MAY_BE_SLOW = (
    e.ServerStarted,
    e.ServerAsleep,
    e.ServerStopped,
    e.ServerSynced,
    e.TrainerStarted,
    e.TrainerStopped,
    e.WorkerStarted,
    e.WorkerSynced,
    e.WorkerStopped,
    e.ModelStarted,
    e.ModelStopped,
    e.CheckpointSaved,
)


_MAY = {
    Pool.ROLLOUT: (Role.ROLLOUT,),
    Pool.TRAIN: (Role.TRAIN,),
    Pool.HYBRID: (Role.ROLLOUT, Role.ROLLOUT, Role.GRADIENT, Role.TRAIN, Role.IDLE),
}


@dataclass
class Faults:
    """Chances, each for one answer."""

    server_dies: float = 0.0
    start_fails: float = 0.0
    sync_fails: float = 0.0
    turn_fails: float = 0.0
    refused: float = 0.0
    environment_breaks: float = 0.0
    trainer_dies: float = 0.0
    node_lost: float = 0.0
    node_gone: float = 0.0
    """A lost node is given up; half of those that are come back, and nothing of ours runs there."""
    checkpoint_fails: float = 0.0
    stop_asked: float = 0.0
    repeated: float = 0.0
    replanned: float = 0.0
    bounded: float = 0.0
    """The planner chooses any staleness bound that the recipe allows."""
    joined: float = 0.0
    """Two slots side by side are one in another plan."""
    ordered: float = 0.0
    worker_dies: float = 0.0
    models: float = 0.0
    """A slot that would serve, or do nothing, serves a frozen model in another plan."""
    model_dies: float = 0.0
    share_lost: float = 0.0
    abort_fails: float = 0.0
    forked: float = 0.0
    """An agent goes on from somewhere else than the end of what it was told last."""
    written_later: float = 0.0
    """A version is complete some time after its step, or before the step's own news."""
    kills_servers: int = 0
    """One group in so many has a prompt that ends the server it is sent to; 0 for none."""
    breaks_off: int = 0
    """So many have one that every server answers with an error."""
    kills_trainer: int = 0
    """So many have tokens that end the trainer."""
    teacher_fails: float = 0.0
    teacher_refuses: float = 0.0
    gpu_lost: float = 0.0
    """When a process that failed is gone, its host lacks a GPU of it."""
    slow: float = 0.0
    """A start, a stop or a sync takes longer than anybody waits for it."""


def explained_bound(bound: int) -> Explanation:
    """A decision to stay that chooses this staleness bound."""
    option = PlanOption("today's", 8.0, 8.0, 10.0)
    binding = Binding(Constraint.STALENESS, "the bound")
    today, chosen = (PricedBound(one, "today's", 10.0, 1.0, 1.0, 1.0) for one in (-1, bound))
    return Explanation(
        move=False,
        why_not="near",
        today=option,
        chosen=option,
        runner_up=None,
        binds_today=binding,
        binds=binding,
        predicted=PredictedStep(10.0, 9.0, 11.0, "made up"),
        cost_s=0.0,
        payback_steps=None,
        horizon_steps=10.0,
        bound=BoundChoice(today, chosen, today, "at random"),
    )


def is_one_of(group: int, every: int) -> bool:
    """Whether a fault that concerns one group in so many concerns this one."""
    return every > 0 and group % every == every // 2


def taught(tokens: array[int]) -> array[float]:
    """What the teacher of this world says of tokens: a number that tells which one it is of."""
    return array("f", [0.0, *(-0.01 * token for token in tokens[1:])])


@dataclass
class World:
    """Drives one machine to its end and remembers what it saw."""

    random: Random
    faults: Faults = field(default_factory=Faults)
    recipe: Recipe = field(default_factory=recipe)
    resume: Resume | None = None
    records: list[Record] = field(default_factory=list)
    trained: list[tuple[int, int]] = field(default_factory=list)
    """(group, step) of every group in every finished step, without what closed groups left."""
    members: list[tuple[int, int, int]] = field(default_factory=list)
    """(group, member, step) of every trajectory in every finished step."""
    samples: list[a.TrainSample] = field(default_factory=list)
    """All that were ever trained on."""
    ledgers: dict[str, dict[str, Any]] = field(default_factory=dict)
    end: a.End | None = None
    events: int = 0

    def __post_init__(self) -> None:
        self.plan = initial_plan(self.recipe)
        identity = RunIdentity("run", "recipe.yaml", 1, 1.0)
        self._slots = slots_of(self.recipe)
        self.machine = machine_of(self.recipe, self.plan, self._slots, identity, resume=self.resume)
        self._heap: list[tuple[float, int, e.Event]] = []
        self._order = 0
        self.now = 1000.0
        self._label: dict[str, WeightVersion] = {}
        self._unproved: dict[str, WeightVersion] = {}
        self._trainer_incarnation = 0
        self._step = 0
        self._lost: set[str] = set()
        self._generating: dict[int, e.TurnGenerated] = {}
        self.answers: list[a.AnswerOrder] = []
        self._parts: list[a.TrainSample] = []

    # -- time -----------------------------------------------------------------------------------

    def later(self, event: e.Event, least: float = 0.01, most: float = 1.0) -> None:
        """The event will happen in a while."""
        self._order += 1
        if self.faults.slow and isinstance(event, MAY_BE_SLOW) and self._chance("slow"):
            least, most = 100.0, 1500.0
        when = self.now + self.random.uniform(least, most)
        heapq.heappush(self._heap, (when, self._order, event))
        if isinstance(event, OVER_THE_WIRE) and self._chance("repeated"):
            self._order += 1
            heapq.heappush(self._heap, (when + 0.5, self._order, event))

    def run(self, *, most_events: int = 20_000) -> World:
        """To the end; every event is followed by the machine's own invariants."""
        self.play(most_events)
        assert self.end is not None, "the machine does not come to an end"
        assert self.machine.phase is Phase.ENDED
        return self

    def play(self, events: int) -> None:
        """So many events, or to the end."""
        if not self.events:
            self.later(e.RunStarted())
        while self.end is None and self.events < events:
            assert self._heap, f"nothing will ever happen again in {self.machine.phase}"
            self.now, _, event = heapq.heappop(self._heap)
            self.give(event)
            self._mishaps()

    def give(self, event: e.Event) -> None:
        """Hand one event over and start what the machine wants."""
        self.events += 1
        for action in self.machine.handle(event, now=self.now):
            self._perform(action)
        self.machine.check()

    def _chance(self, name: str) -> bool:
        return bool(self.random.random() < getattr(self.faults, name))

    def _is_poison(self, kind: str, group: int) -> bool:
        return is_one_of(group, getattr(self.faults, kind))

    def _mishaps(self) -> None:
        servers = self.machine.servers
        if self._chance("server_dies"):
            status = self.random.choice(list(servers.replicas.values()))
            self.later(e.ServerFailed(status.slot.id, status.incarnation, "died"))
        if self._chance("trainer_dies"):
            self.later(e.TrainerFailed(self.machine.training.incarnation, "died"))
        if self._chance("node_lost") and not self._lost:
            self._lost.add("a")
            self.give(e.NodeLost("a", "cable"))
            if self._chance("node_gone"):
                self.later(e.NodeGone("a", "its lease has run out"), 0.5, 3.0)
                if self.random.random() < 0.5:
                    self.later(e.NodeBack("a", frozenset()), 4.0, 400.0)
                return
            alive = {"server-0", "server-1", "server-0-1", "gradient-0", "gradient-1"}
            alive |= {"model-0", "model-1"} if self.faults.models else set()
            dead = self.random.sample(sorted(alive), self.random.choice((0, 0, 2, 3)))
            self.later(e.NodeBack("a", frozenset(alive - set(dead))), 0.5, 3.0)
        self._orders()
        if self._chance("stop_asked"):
            self.later(e.StopRequested(self.random.random() < 0.5, "asked"))

    def _orders(self) -> None:
        if self._chance("worker_dies"):
            for status in self.machine.workers.replicas.values():
                self.later(e.WorkerFailed(status.slot.id, status.incarnation, "died"))
        if self.faults.models and self._chance("model_dies"):
            for status in self.machine.models.replicas.values():
                self.later(e.ModelFailed(status.slot.id, status.incarnation, "died"))
        if self._chance("replanned"):
            self.later(e.PlanChosen(*self._some_plan()))
        if self._chance("ordered"):
            self.later(self._some_order())
        if self.faults.bounded and self._chance("bounded"):  # else other seeds draw other faults
            bound = self.random.choice(self.recipe.training.bounds)
            self.later(e.PlanKept("near", explanation=explained_bound(bound)))

    def _some_plan(self) -> tuple[Plan, tuple[Slot, ...]]:
        """Any the pools allow, the core's first slot kept, on slots joined in any way."""
        head = self.plan.train[0]
        slots = self._some_slots(head)
        roles = {slot.id: self.random.choice(_MAY[slot.pool]) for slot in slots}
        roles[head] = Role.TRAIN
        if self.faults.models:
            for slot, role in roles.items():
                if role in (Role.ROLLOUT, Role.IDLE) and self._chance("models"):
                    roles[slot] = Role.MODEL
        bucket = self.plan.servers[0][1]
        buckets = [bucket, replace(bucket, up_to_tokens=30), replace(bucket, max_num_seqs=2)]
        serving = [slot for slot, role in roles.items() if role is Role.ROLLOUT]
        if not serving:
            return self.machine.plan, self.machine.reconciler.slots
        train = [slot for slot, role in roles.items() if role is Role.TRAIN and slot != head]
        plan = Plan(
            servers=tuple((slot, self.random.choice(buckets)) for slot in serving),
            train=(head, *train),
            gradient=tuple(slot for slot, role in roles.items() if role is Role.GRADIENT),
            models=tuple(
                (slot, self.random.choice(("judge", "customer")))
                for slot, role in roles.items()
                if role is Role.MODEL
            ),
        )
        return plan, slots

    def _some_slots(self, head: SlotId) -> tuple[Slot, ...]:
        known = {slot.id: slot for slot in self._slots}
        slots: list[Slot] = []
        for slot in self._slots:
            before = slots[-1] if slots else None
            mates = before is not None and before.node == slot.node and head != before.id
            if mates and self._chance("joined"):
                slots[-1] = slot_named(f"{slots[-1].id}+{slot.parts[0]}", known)
            else:
                slots.append(slot)
        return tuple(slots)

    def _some_order(self) -> e.PlanOrdered:
        number = f"order-{self.events}"
        roles = (Role.ROLLOUT, Role.GRADIENT, Role.TRAIN)
        to = tuple(
            (role, self.random.randint(0, 3)) for role in roles if self.random.random() < 0.6
        )
        slot = self.random.choice(self._slots).id
        joined = ((f"{node_of(slot)}/0+1", self.random.random() < 0.5),)
        if self._chance("joined"):
            return e.PlanOrdered(number, shapes=joined)
        pins = ((slot, self.random.choice((*roles, None))),) if self.random.random() < 0.3 else ()
        return e.PlanOrdered(number, to, pins)

    # -- what the outside does -------------------------------------------------------------------

    def _perform(self, action: a.Action) -> None:
        handler: Callable[[Any], None] = getattr(self, "_do_" + _snake(type(action).__name__))
        handler(action)

    def _do_save(self, action: a.Save) -> None:
        self.records.append(action.record)

    def _do_end(self, action: a.End) -> None:
        self.end = action

    def _do_wake(self, action: a.Wake) -> None:
        self.later(e.TimerFired(action.name), action.after_s, action.after_s + 0.01)

    def _do_start_server(self, action: a.StartServer) -> None:
        self._label.pop(action.slot, None)
        if self._chance("start_fails"):
            self.later(e.ServerFailed(action.slot, action.incarnation, "no memory"))
        else:
            self.later(e.ServerStarted(action.slot, action.incarnation), 0.5, 5.0)

    def _do_check_server(self, action: a.CheckServer) -> None:
        if self._chance("server_dies"):
            self.later(e.ServerFailed(action.slot, action.incarnation, "no answer"))
        else:
            self.later(e.ServerChecked(action.slot, action.incarnation))

    def _do_stop_server(self, action: a.StopServer) -> None:
        lost = self._lost_gpus(action.slot)
        self.later(e.ServerStopped(action.slot, action.incarnation, lost))

    def _do_sleep_server(self, action: a.SleepServer) -> None:
        if self._chance("start_fails"):
            self.later(e.ServerFailed(action.slot, action.incarnation, "it cannot sleep"))
        else:
            self.later(e.ServerAsleep(action.slot, action.incarnation))

    def _do_wake_server(self, action: a.WakeServer) -> None:
        if self._chance("start_fails"):
            self.later(e.ServerFailed(action.slot, action.incarnation, "no memory"))
        else:
            self.later(e.ServerStarted(action.slot, action.incarnation))

    def _do_sync_server(self, action: a.SyncServer) -> None:
        if self._chance("sync_fails"):
            answered, probed = self.random.random() < 0.5, self.random.random() < 0.5
            gap = 3.0 if probed else None
            failed = e.SyncFailed(
                action.slot, action.incarnation, action.published, "gap", answered, gap
            )
            self.later(failed)
            if probed or not answered:  # or else it stays paused
                self._unproved[action.slot] = action.published.version
            return
        # Half of the time the new version already speaks before it is proved.
        if self.random.random() < 0.5:
            self._label[action.slot] = action.published.version
        else:
            self._unproved[action.slot] = action.published.version
        new = action.published
        self.later(
            e.ServerSynced(
                action.slot, action.incarnation, new, 1e-6, 0, 0.04, self.now, 100, "delta"
            )
        )

    def _do_generate(self, action: a.Generate) -> None:
        assert len(action.prompt_ids) + action.max_tokens <= self.recipe.model.max_len
        group = action.trajectory.group
        if self._is_poison("kills_servers", group):
            if self.random.random() < 0.5:
                self._break_off(action, "connection reset", refused=False)
            died = e.ServerFailed(action.slot, action.incarnation, "the engine died")
            self.later(died, 0.3, 2.0)
            return
        if self._is_poison("breaks_off", group):
            self._break_off(action, "HTTP 500", refused=False)
            return
        if self._chance("turn_fails"):
            self._break_off(action, "reset", refused=self._chance("refused"))
            return
        count = self.random.randint(1, action.max_tokens)
        key = max(self._label.get(action.slot, action.cache_key), action.cache_key)
        cut = self.random.randint(1, count) if key != action.cache_key else count
        spans = [VersionSpan(action.cache_key.step, 0, cut)]
        if cut < count:
            spans.append(VersionSpan(key.step, cut, count))
        turn = e.TurnGenerated(
            request=action.request,
            trajectory=action.trajectory,
            slot=action.slot,
            incarnation=action.incarnation,
            prompt_ids=action.prompt_ids,
            token_ids=array("i", [self.random.randint(3, 99) for _ in range(count)]),
            logprobs=array("f", [-1.0] * count),
            spans=tuple(spans),
            newest=key if cut < count else action.cache_key,
            cache_key=action.cache_key,
            finish_reason="stop",
            started_at=self.now,
        )
        self._generating[action.request] = turn
        self.later(turn, 0.05, self.random.choice((2.0, 2.0, 2.0, 200.0)))

    def _break_off(self, action: a.Generate, reason: str, *, refused: bool) -> None:
        who, slot, number = action.trajectory, action.slot, action.incarnation
        self.later(e.TurnFailed(action.request, who, slot, number, reason, refused))

    def _do_abort_turn(self, action: a.AbortTurn) -> None:
        """What has been generated comes back at once; the whole reply, if it comes, is late."""
        turn = self._generating.pop(action.request, None)
        if turn is None or self._chance("abort_fails"):
            return
        kept = self.random.randint(0, len(turn.token_ids))
        spans = tuple(
            replace(span, end=min(span.end, kept)) for span in turn.spans if span.start < kept
        )
        newest = turn.newest if len(spans) == len(turn.spans) else turn.cache_key
        self.later(
            replace(
                turn,
                token_ids=turn.token_ids[:kept],
                logprobs=turn.logprobs[:kept],
                spans=spans,
                newest=newest,
                finish_reason="abort",
            )
        )

    def _do_start_episode(self, action: a.StartEpisode) -> None:
        if self._chance("environment_breaks"):
            self.later(e.EpisodeFailed(action.trajectory, "reset broke"))
        else:
            self.later(e.EpisodeStarted(action.trajectory, array("i", [1, 2, 3])))

    def _do_advance_episode(self, action: a.AdvanceEpisode) -> None:
        who = action.trajectory
        if self._chance("environment_breaks"):
            self.later(e.EpisodeFailed(who, "tool broke"))
        elif self.random.random() < 0.4:
            reward = float(self.random.random() < 0.5)
            self.later(e.EpisodeAdvanced(who, array("i"), (), True, reward))
        else:
            returned = (ToolReturn("get", ToolOutcome.OK, 0.01, 2),)
            observation = array("i", [7] * self.random.randint(1, 9))
            forks = self.faults.forked and self._chance("forked")
            point = self._some_point(who) if forks else None
            event = e.EpisodeAdvanced(who, observation, returned, False, None, branch=point)
            self.later(event)

    def _some_point(self, who: TrajectoryId) -> BranchPoint | None:
        """Anywhere in a branch, or often its end."""
        active = self.machine.rollout.active.get(who)
        if active is None:
            return None
        number = self.random.randrange(len(active.trajectory.branches))
        tokens = len(active.trajectory.branches[number].token_ids)
        kept = tokens if self.random.random() < 0.4 else self.random.randint(0, tokens)
        return BranchPoint(number, kept)

    def _do_finish_episode(self, action: a.FinishEpisode) -> None:
        self.later(e.EpisodeAdvanced(action.trajectory, array("i"), (), True, 0.0))

    def _do_ask_teacher(self, action: a.AskTeacher) -> None:
        who = action.trajectory
        if self._chance("teacher_fails"):
            self.later(e.TeacherFailed(who, "connection refused"), 0.01, 40.0)
        elif self._chance("teacher_refuses"):
            self.later(e.TeacherFailed(who, "status 400", refused=True))
        else:
            said = tuple(taught(tokens) for tokens in action.sequences)
            self.later(e.TeacherAnswered(who, said), 0.01, 5.0)

    def _do_forget_episode(self, action: a.ForgetEpisode) -> None:
        return

    def _publish(self, incarnation: int, step: int) -> e.PublishedVersion:
        return e.PublishedVersion(WeightVersion(incarnation, step), 100, self.now)

    def _do_start_trainer(self, action: a.StartTrainer) -> None:
        self._step = self.ledgers[action.resume]["step"] if action.resume else 0
        started = e.TrainerStarted(
            action.incarnation, self._publish(action.incarnation, self._step)
        )
        self.later(started, 0.5, 5.0)

    def _do_stop_trainer(self, action: a.StopTrainer) -> None:
        self.later(e.TrainerStopped(action.incarnation, self._lost_gpus(*action.train)))

    def _do_start_worker(self, action: a.StartWorker) -> None:
        if self._chance("start_fails"):
            self.later(e.WorkerFailed(action.slot, action.incarnation, "no memory"))
        else:
            self.later(e.WorkerStarted(action.slot, action.incarnation), 0.5, 5.0)

    def _do_sync_worker(self, action: a.SyncWorker) -> None:
        if self._chance("sync_fails"):
            of_worker = self.random.random() < 0.5
            self.later(
                e.WorkerFailed(action.slot, action.incarnation, "the probe differs")
                if of_worker
                else e.WorkerSyncFailed(
                    action.slot, action.incarnation, action.published, "no answer"
                )
            )
            return
        now = self.now
        self.later(
            e.WorkerSynced(action.slot, action.incarnation, action.published, 0.0, 0.1, 0.1, now)
        )

    def _do_stop_worker(self, action: a.StopWorker) -> None:
        lost = self._lost_gpus(action.slot)
        self.later(e.WorkerStopped(action.slot, action.incarnation, lost))

    def _do_start_model(self, action: a.StartModel) -> None:
        if self._chance("start_fails"):
            self.later(e.ModelFailed(action.slot, action.incarnation, "no such directory"))
        else:
            self.later(e.ModelStarted(action.slot, action.incarnation), 0.5, 5.0)

    def _do_stop_model(self, action: a.StopModel) -> None:
        lost = self._lost_gpus(action.slot)
        self.later(e.ModelStopped(action.slot, action.incarnation, lost))

    def _lost_gpus(self, *slots: SlotId) -> tuple[LostGpu, ...]:
        """One of the GPUs of these slots, or none."""
        known = {slot.id: slot for slot in self._slots}
        gpus = [(node_of(one), gpu) for one in slots for gpu in slot_named(one, known).gpus]
        if not (gpus and self.faults.gpu_lost and self._chance("gpu_lost")):
            return ()
        node, gpu = self.random.choice(gpus)
        return (LostGpu(node, gpu, f"GPU-{node}-{gpu}"),)

    def _do_propose(self, action: a.Propose) -> None:
        if self.random.random() < 0.5:
            self.later(e.PlanKept("no plan is predicted to be faster", action.order))
            return
        promise = Prediction(10.0, 8.0, 5.0)
        self.later(e.PlanChosen(*self._some_plan(), promise, action.order))

    def _do_answer_order(self, action: a.AnswerOrder) -> None:
        self.answers.append(action)

    def _do_accumulate(self, action: a.Accumulate) -> None:
        if action.part == 1:
            self._parts = []
        self._parts += action.samples
        if self._kills_trainer(action):
            return
        self.later(e.Accumulated(action.incarnation, action.step, action.part), 0.01, 1.0)

    def _kills_trainer(self, action: a.Accumulate | a.Train) -> bool:
        groups = {sample.trajectory.id.group for sample in action.samples}
        if not any(self._is_poison("kills_trainer", group) for group in groups):
            return False
        self.later(e.TrainerFailed(action.incarnation, "log-probabilities are not finite"))
        return True

    def _share_done(self, share: a.BatchPartition) -> e.ShareDone:
        lost = self._chance("share_lost")
        why = "silent" if lost else ""
        return e.ShareDone(share.slot, share.incarnation, not lost, why, 10, 0.5, 0.1, 100, 0.1)

    def _do_train(self, action: a.Train) -> None:
        replayed = {group.id for group in self.machine.training.batch.replayed}
        assert replayed <= {group for group, _ in self.trained}, "replayed before it was trained"
        samples = [
            sample
            for sample in (*(self._parts if action.parts else ()), *action.samples)
            if sample.trajectory.id.group not in replayed
        ]
        self._check_batch(samples)
        given = {sample.trajectory.id for sample in action.samples}
        shared = [one for share in action.shares for one in share.trajectories]
        assert len(shared) == len(set(shared)), "a trajectory is in two shares"
        assert set(shared) <= given, "a share of what is not in the message"
        for share in action.shares:
            status = self.machine.workers.replicas[share.slot]
            near = [known.version for known in (status.verified, status.syncing) if known]
            assert action.held in near, "a share for a worker of another version"
        if self._kills_trainer(action):
            return
        path = ""
        if action.ledger is not None:
            path = f"/checkpoint/{action.incarnation}-{action.step}"
            self.ledgers[path] = action.ledger
        late = {group.id for group in self.machine.training.batch.groups if group.is_rest}
        groups = {sample.trajectory.id.group for sample in samples} - late
        self.trained += [(group, action.step) for group in sorted(groups)]
        ids = [sample.trajectory.id for sample in samples if sample.branch is None]
        self.samples += samples
        self.members += [(who.group, who.member, action.step) for who in ids]
        published = self._publish(action.incarnation, action.step)
        shares = tuple(self._share_done(share) for share in action.shares)
        metrics: dict[str, float | None] = {"loss": 0.1, "own_tokens": 100.0, "own_s": 1.0}
        later = self.faults.written_later and self._chance("written_later")
        now = None if later else published
        said = critic_says(samples)
        done = e.StepDone(action.incarnation, action.step, now, metrics, shares, advantages=said)
        self.later(done, 0.01, 1.0)
        if now is None:  # it is written behind the next step, and told after this one
            self.later(e.VersionPublished(action.incarnation, published), 1.0, 3.0)
        if path:
            self.later(self._saved(action.incarnation, action.step, path), 1.0, 2.0)

    def _saved(
        self, incarnation: int, step: int, path: str
    ) -> e.CheckpointSaved | e.CheckpointFailed:
        if self.faults.checkpoint_fails and self._chance("checkpoint_fails"):
            return e.CheckpointFailed(incarnation, step, "No space left on device")
        return e.CheckpointSaved(incarnation, step, path)

    def _check_batch(self, samples: Sequence[a.TrainSample]) -> None:
        """Whole groups, as many as the recipe says and no older than their rule allows."""
        size, batch = self.recipe.group_size, self.machine.training.batch.groups
        rules = {group.id: group.rule for group in batch}
        parts = [(one.trajectory.id.group, one.trajectory.id.member, one.branch) for one in samples]
        assert len(parts) == len(set(parts)), "a branch of a member twice"
        own = [sample.trajectory.id for sample in samples if sample.branch is None]
        assert {part[:2] for part in parts} == {one[:2] for one in own}
        late = {group.id for group in batch if group.is_rest}
        whole = Counter(who.group for who in own if who.group not in late)
        assert len(whole) == self.recipe.training.groups_per_step
        for group, count in whole.items():
            assert min(size, rules[group].least_of(size) or size) <= count <= size
        for sample in samples:
            oldest, rule = sample.staleness, rules[sample.trajectory.id.group]
            assert rule.trains is None or oldest <= rule.trains, f"staleness {oldest}"
            assert sample.trajectory.reward is not None

    def _do_checkpoint(self, action: a.Checkpoint) -> None:
        path = f"/checkpoint/{action.incarnation}-{action.step}-stop"
        self.ledgers[path] = action.ledger
        self.later(self._saved(action.incarnation, action.step, path))

    # -- what was seen ----------------------------------------------------------------------------

    def rows(self, kind: type[Any]) -> list[Any]:
        """Every record of one table, in the order written."""
        return [record for record in self.records if isinstance(record, kind)]

    @property
    def steps(self) -> list[StepRecord]:
        """The step log; after a trainer restart a step may stand there twice."""
        return self.rows(StepRecord)

    @property
    def trajectories(self) -> list[TrajectoryRecord]:
        """Every state of every trajectory."""
        return self.rows(TrajectoryRecord)


@cache
def _snake(name: str) -> str:
    return re.sub(r"(?<!^)([A-Z])", r"_\1", name).lower()
