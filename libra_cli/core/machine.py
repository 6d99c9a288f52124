"""The one place where a run changes: ``handle(event, now) -> actions``.

The machine owns its parts and routes each event to one of them; after every event it *settles*:
expired groups go back to the queue, new groups are opened, waiting requests get seats, a full batch
goes to the trainer, and a run that has reached its end is wound down. No part calls another behind
its back, and nothing here reads a clock, a file or a random number, so production, the simulator
and the property tests all drive this very object.

    what        consumes                      waits for                     unblocked by
    pool        plans                         turns, shares, processes      ServerStopped, StepDone
    servers       servers, versions             a version to prove            TrainerStarted,
    StepDone
    workers     gradient workers, versions    a version to prove            TrainerStarted, StepDone
    rollout     prompts, seats                a free seat; the staleness    TurnGenerated; StepDone
                                              bound
    training    ready groups                  a full batch                  the last EpisodeAdvanced
    the end     everything stopped            processes verified gone       ServerStopped,
                                                                            TrainerStopped

Phases: STARTING -> RUNNING -> DRAINING -> STOPPING -> ENDED. In DRAINING nothing new begins, turns
and syncs under way may finish (for ``DRAIN_S`` at most), a step or a checkpoint under way may take
as long as it needs, and one last checkpoint is written; in STOPPING every process is stopped and
verified gone. Whoever asks to stop at once skips DRAINING.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeAlias

from libra_cli.config.recipe import Recipe
from libra_cli.core import events as e
from libra_cli.core.actions import Action, AnswerOrder, End, Save, Wake
from libra_cli.core.cluster.gradient_workers import GradientWorkers
from libra_cli.core.cluster.rollout_servers import RolloutServers
from libra_cli.core.cluster.trainer import TIMER, TrainerGroup, TrainerState
from libra_cli.core.costs.server import ServerCost, guessed_cost
from libra_cli.core.observation import Observation
from libra_cli.core.planning.controller import PlanController
from libra_cli.core.planning.observer import RunObserver
from libra_cli.core.reconcile import migration as move
from libra_cli.core.reconcile import reconciler as pool
from libra_cli.core.reconcile.reconciler import Reconciler
from libra_cli.core.records import RunRecord
from libra_cli.core.rollout.groups import GroupLedger, GroupState, new_trajectory
from libra_cli.core.rollout.trajectories import Limits, Stage, Trajectories, group_record
from libra_cli.core.scheduling.policy import SchedulingPolicy, make_policy
from libra_cli.core.scheduling.request_scheduler import RequestScheduler
from libra_cli.core.types import Bucket, Plan, Seconds, Slot, Trajectory, TrajectoryId

DRAIN_S: Seconds = 30.0
DRAIN_TIMER = "drain"
MAX_DROPPED = 32
"""Groups given up one after the other, with no trajectory finished in between."""


class Phase(StrEnum):
    """Where the run is."""

    STARTING = "starting"
    RUNNING = "running"
    DRAINING = "draining"
    STOPPING = "stopping"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class RunIdentity:
    """What the run's row says that never changes."""

    run_id: str
    recipe: str
    controller_pid: int
    controller_started: float


@dataclass(frozen=True, slots=True)
class Resume:
    """Where a run continues: a checkpoint, the ledger position in it, and the last trainer
    incarnation, so that no version of the continued run bears a name that was given before."""

    checkpoint: str
    position: dict[str, Any]
    trainer_incarnation: int = 0


Handler: TypeAlias = Callable[[Any, Seconds], list[Action]]


class Machine:
    """The state of a run. ``handle`` is the only way in."""

    def __init__(
        self,
        recipe: Recipe,
        plan: Plan,
        slots: Sequence[Slot],
        identity: RunIdentity,
        *,
        resume: Resume | None = None,
        policy: SchedulingPolicy | None = None,
        cost_of: Callable[[Bucket], ServerCost] | None = None,
        make: Callable[[TrajectoryId, Seconds], Trajectory] = new_trajectory,
    ) -> None:
        self.recipe = recipe
        self.identity = identity
        self.phase = Phase.STARTING
        self._outcome = "finished"
        self._error = ""
        self._started_at: Seconds = 0.0
        self._ended_at: Seconds | None = None
        self._told: tuple[object, ...] = ()
        training, rollout = recipe.training, recipe.rollout
        self.ledger = GroupLedger(
            group_size=rollout.group_size,
            groups_per_step=training.groups_per_step,
            max_staleness=training.max_staleness,
            retries=recipe.environment.retries,
            make=make,
        )
        self.scheduler = RequestScheduler(policy or make_policy(recipe.scheduler.policy))
        self.servers = RolloutServers(plan, slots, self.scheduler, cost_of or guessed_cost)
        self.rollout = Trajectories(
            self.ledger,
            self.servers,
            self.scheduler,
            Limits(rollout.max_turns, rollout.max_turn_tokens, recipe.model.max_len),
        )
        by_id = {slot.id: slot for slot in slots}
        core = [by_id[slot_id] for slot_id in plan.train]
        self.workers = GradientWorkers(sum(slot.num_devices for slot in core))
        self.training = TrainerGroup(
            self.ledger,
            self.workers,
            core,
            checkpoint_every=training.checkpoint_every,
            stream=training.stream,
        )
        self.reconciler = Reconciler(self.servers, self.workers, self.training, plan)
        self.reconciler.learn(slots)
        self.controller = PlanController(recipe, self.reconciler, plan, tuple(slots))
        self._observer = RunObserver(
            trajectories_per_step=recipe.trajectories_per_step,
            overlap=1.0 + training.max_staleness,
        )
        if resume is not None:
            self.ledger.restore(resume.position)
            self.training.remember(resume.checkpoint, int(resume.position["step"]))
            self.training.incarnation = resume.trainer_incarnation
            self.training.step = self.training.checkpoint_step
        self._handlers = self._routes()

    def _routes(self) -> dict[type, Handler]:
        """Which event goes where."""
        return {
            e.RunStarted: self._run_started,
            e.NodeLost: self._node_lost,
            e.NodeBack: self._node_back,
            e.ServerStarted: lambda event, now: self.servers.started(event, now=now),
            e.ServerFailed: lambda event, now: self.servers.failed(event, now=now),
            e.ServerChecked: lambda event, now: self.servers.checked(event, now=now),
            e.ServerStopped: self._server_stopped,
            e.ServerSynced: self._server_synced,
            e.SyncFailed: lambda event, now: self.servers.sync_failed(event, now=now),
            e.ServerSampled: lambda event, now: self.servers.sampled(event, now=now),
            e.TurnGenerated: lambda event, now: self.rollout.generated(event, now=now),
            e.TurnFailed: lambda event, now: self.rollout.turn_failed(event, now=now),
            e.EpisodeStarted: lambda event, now: self.rollout.episode_started(event, now=now),
            e.EpisodeAdvanced: lambda event, now: self.rollout.advanced(event, now=now),
            e.EpisodeFailed: lambda event, now: self.rollout.episode_failed(event, now=now),
            e.TrainerStarted: self._trainer_started,
            e.TrainerFailed: self._trainer_failed,
            e.TrainerStopped: self._trainer_stopped,
            e.StepDone: self._step_done,
            e.Accumulated: self._accumulated,
            e.WorkerStarted: lambda event, now: self.workers.started(event, now=now),
            e.WorkerSynced: lambda event, now: self.workers.synced(event, now=now),
            e.WorkerSyncFailed: lambda event, now: self.workers.sync_failed(event, now=now),
            e.WorkerFailed: lambda event, now: self.workers.failed(event, now=now),
            e.WorkerStopped: self._worker_stopped,
            e.CheckpointSaved: self._checkpoint_saved,
            e.PlanChosen: self._plan_chosen,
            e.PlanKept: lambda event, now: self.controller.kept(event, now=now),
            e.PlanOrdered: self._plan_ordered,
            e.TimerFired: self._timer_fired,
            e.StopRequested: self._stop_requested,
        }

    def handle(self, event: e.Event, *, now: Seconds) -> list[Action]:
        """Take in one event; return what is to be done, in order.

        Raises:
            IllegalMove: the event cannot happen in this state; that is a bug in libra.
        """
        if self.phase is Phase.ENDED:
            return []
        actions = self._handlers[type(event)](event, now)
        actions += self._settle(now)
        actions = self.reconciler.told(actions, now=now)
        for action in actions:
            if isinstance(action, Save):
                self._observer.saw(action.record)
        actions += self.controller.look(self._observe)
        waiting = self._waiting()
        told = (self.phase, self._outcome, self._error, self.training.published, waiting)
        if told != self._told:
            self._told = told
            # Before End, which closes the journal.
            actions.insert(0, Save(self._run_record(waiting)))
        return actions

    @property
    def _going(self) -> bool:
        return self.phase in (Phase.STARTING, Phase.RUNNING)

    # -- events that concern more than one part ---------------------------------------------------

    def _run_started(self, event: e.RunStarted, now: Seconds) -> list[Action]:
        self._started_at = now
        return [*self.controller.begin(now=now), *self.training.start(now=now)]

    def _node_lost(self, event: e.NodeLost, now: Seconds) -> list[Action]:
        servers = self.servers.lost(event.node, now=now)
        return [*servers, *self.workers.lost(event.node, now=now)]

    def _node_back(self, event: e.NodeBack, now: Seconds) -> list[Action]:
        servers = self.servers.back(event.node, event.alive, now=now)
        return [*servers, *self.workers.back(event.node, event.alive, now=now)]

    def _server_stopped(self, event: e.ServerStopped, now: Seconds) -> list[Action]:
        status = self.servers.current(event.slot, event.incarnation)
        again = self._going and status is not None and self.reconciler.wants_back(status)
        return self.servers.gone(event, now=now, again=again)

    def _worker_stopped(self, event: e.WorkerStopped, now: Seconds) -> list[Action]:
        status = self.workers.current(event.slot, event.incarnation)
        again = self._going and status is not None and self.reconciler.wants_back(status)
        return self.workers.gone(event, now=now, again=again)

    def _server_synced(self, event: e.ServerSynced, now: Seconds) -> list[Action]:
        actions = self.servers.synced(event, now=now)
        return actions + self.rollout.proved(event.slot, now=now)

    def _trainer_started(self, event: e.TrainerStarted, now: Seconds) -> list[Action]:
        starting = self.training.state is TrainerState.STARTING
        if event.incarnation != self.training.incarnation or not starting:
            return []
        actions = self.training.started(event, now=now)
        return actions + self._publish(event.published)

    def _publish(self, published: e.PublishedVersion) -> list[Action]:
        return [*self.servers.publish(published), *self.workers.publish(published)]

    def _accumulated(self, event: e.Accumulated, now: Seconds) -> list[Action]:
        if event.incarnation != self.training.incarnation or event.step != self.training.step + 1:
            return []
        return self.training.accumulated(event)

    def _trainer_failed(self, event: e.TrainerFailed, now: Seconds) -> list[Action]:
        if event.incarnation != self.training.incarnation:
            return []
        return self.training.failed(event.reason, now=now)

    def _trainer_stopped(self, event: e.TrainerStopped, now: Seconds) -> list[Action]:
        stopping = self.training.state is TrainerState.STOPPING
        if event.incarnation != self.training.incarnation or not stopping:
            return []
        return self.training.gone(now=now, again=self._going)

    def _step_done(self, event: e.StepDone, now: Seconds) -> list[Action]:
        busy = self.training.state is TrainerState.BUSY
        if (
            event.incarnation != self.training.incarnation
            or not busy
            or event.step <= self.training.step
        ):
            return []
        actions = self.training.done(event, now=now)
        actions += [Save(group_record(group, now)) for group in self.training.trained]
        actions += self._publish(event.published)
        return actions + (self._stepped(now) if self._going else [])

    def _plan_chosen(self, event: e.PlanChosen, now: Seconds) -> list[Action]:
        return (
            self.controller.chosen(event, now=now) if self._going else self._too_late(event.order)
        )

    def _plan_ordered(self, event: e.PlanOrdered, now: Seconds) -> list[Action]:
        return (
            self.controller.ordered(event, now=now) if self._going else self._too_late(event.order)
        )

    def _too_late(self, order: str) -> list[Action]:
        """No slot moves any more."""
        return [AnswerOrder(order, accepted=False, text="the run is ending")] if order else []

    def _stepped(self, now: Seconds) -> list[Action]:
        return self.controller.stepped(self.training.last, self._ready_share, now=now)

    @property
    def _ready_share(self) -> float:
        """The share of the groups begun and not trained that wait for training."""
        ready, played = self.ledger.count(GroupState.READY), self.ledger.count(GroupState.OPEN)
        return ready / max(1, ready + played)

    def _observe(self) -> Observation | None:
        """What a planner may know now; None before a trajectory has finished."""
        workload, measured = self._observer.workload, self._observer.measured
        if workload is None:
            return None
        starved = bool(measured) and measured[-1].starved
        return Observation(
            step=self.training.step,
            plan=self.plan,
            slots=(),
            workload=workload,
            measured=measured,
            lengths=self._observer.lengths,
            evidence=self._observer.evidence,
            rollout_idle=0.0 if starved else self._ready_share,
            queue=len(self.scheduler) / max(1, self.scheduler.queues.seats),
            steps_left=self.recipe.run.steps - self.training.step,
        )

    @property
    def plan(self) -> Plan:
        """The newest."""
        return self.controller.plan

    def _checkpoint_saved(self, event: e.CheckpointSaved, now: Seconds) -> list[Action]:
        if event.incarnation != self.training.incarnation or event.step > self.training.step:
            return []
        return self.training.saved(event)

    def _timer_fired(self, event: e.TimerFired, now: Seconds) -> list[Action]:
        if event.name == TIMER and self._going:
            return self.training.restart(now=now)
        if event.name.startswith(move.TIMER):
            return self.reconciler.deadline(event.name, now=now) if self._going else []
        if event.name.startswith(pool.TIMER):
            return self._drain_overdue(event.name, now)
        if event.name == DRAIN_TIMER and self.phase is Phase.DRAINING:
            return self._drain_over(now)
        return []

    def _drain_overdue(self, timer: str, now: Seconds) -> list[Action]:
        slot, actions = self.reconciler.overdue(timer, now=now)
        return actions + (self.rollout.abort(slot) if slot is not None else [])

    def _drain_over(self, now: Seconds) -> list[Action]:
        """Turns get no more time. A step or a checkpoint does; a dead trainer says so itself."""
        if not self.training.at_work:
            return self._stop_all(now)
        return [*self.rollout.abandon(now=now), Wake(DRAIN_TIMER, DRAIN_S)]

    def _stop_requested(self, event: e.StopRequested, now: Seconds) -> list[Action]:
        actions: list[Action] = []
        if self._going:
            actions = self._wind_down("stopped", event.reason, now)
        if event.at_once and self.phase is Phase.DRAINING:
            actions += self._stop_all(now)
        return actions

    # -- settling ---------------------------------------------------------------------------------

    def _settle(self, now: Seconds) -> list[Action]:
        """Whatever can go on now, goes on."""
        actions = (
            [*self.reconciler.settle(now=now), *self.controller.mended()] if self._going else []
        )
        self.rollout.requeue_lost(now=now)
        self.servers.refresh(now=now)
        actions += self._go_on(now) if self._going else []
        if self.phase is Phase.DRAINING:
            actions += self.training.save()
            if self._drained:
                actions += self._stop_all(now)
        if self.phase is Phase.STOPPING and self._all_gone:
            self.phase, self._ended_at = Phase.ENDED, now
            actions.append(End(self._outcome, self._error))
        return actions

    def _go_on(self, now: Seconds) -> list[Action]:
        broken = self._broken
        if broken:
            return self._wind_down("failed", broken, now)
        target = self.recipe.run.steps
        if self.training.state is TrainerState.READY and self.training.step >= target:
            return self._wind_down("finished", "", now)
        if self.phase is Phase.STARTING and self.scheduler.queues.seats:
            self.phase = Phase.RUNNING
        actions: list[Action] = []
        if self.phase is Phase.RUNNING:
            version = self.training.step
            if self.training.state is TrainerState.READY:  # only then does age matter
                actions += [
                    Save(group_record(group, now, detail="too old to train on"))
                    for group in self.ledger.expire(version)
                ]
            actions += self.rollout.fill(version=version, now=now)
            actions += self.rollout.dispatch(now=now)
            actions += self.training.claim(now=now, target=target)
        return actions

    @property
    def _broken(self) -> str:
        """Why the run cannot go on; empty while it can."""
        if self.training.state is TrainerState.FAILED:
            return f"the trainer failed: {self.training.detail}"
        if self.rollout.dropped_in_a_row > MAX_DROPPED:
            return f"the environment breaks every time: {self.rollout.last_failure}"
        all_failed = self.servers.all_failed
        return f"no server is left: {all_failed}" if all_failed else ""

    def _wind_down(self, outcome: str, error: str, now: Seconds) -> list[Action]:
        self.phase, self._outcome, self._error = Phase.DRAINING, outcome, error
        return [Wake(DRAIN_TIMER, DRAIN_S)]

    @property
    def _drained(self) -> bool:
        generating = any(f.stage is Stage.GENERATING for f in self.rollout.flights.values())
        return not (generating or self.training.at_work or self.servers.syncing)

    def _stop_all(self, now: Seconds) -> list[Action]:
        self.phase = Phase.STOPPING
        why = f"the run {self._outcome}"
        actions = self.rollout.abandon(now=now)
        actions += self.reconciler.end(why, now=now)
        actions += [*self.servers.stop(why, now=now), *self.workers.stop(why, now=now)]
        return [*actions, *self.training.stop(why, now=now)]

    @property
    def _all_gone(self) -> bool:
        down = self.training.state in (TrainerState.DOWN, TrainerState.FAILED)
        return down and self.servers.stopped and self.workers.stopped

    # -- telling ----------------------------------------------------------------------------------

    def _run_record(self, waiting: str) -> RunRecord:
        state = self._outcome if self.phase is Phase.ENDED else str(self.phase)
        if self.phase in (Phase.DRAINING, Phase.STOPPING):
            state = "running"
        return RunRecord(
            id=self.identity.run_id,
            recipe=self.identity.recipe,
            state=state,
            started_at=self._started_at,
            ended_at=self._ended_at,
            target_steps=self.recipe.run.steps,
            step=self.training.step,
            version=self.training.published.version.step if self.training.published else 0,
            waiting=waiting,
            error=self._error,
            controller_pid=self.identity.controller_pid,
            controller_started=self.identity.controller_started,
        )

    def _waiting(self) -> str:
        """Who waits on whom, for people."""
        if self.phase is Phase.STARTING:
            return "everyone waits for the first server and the trainer to start"
        if self.phase in (Phase.DRAINING, Phase.STOPPING):
            return f"the run is ending ({self._outcome})"
        trainer = self.training.state
        if trainer in (TrainerState.DOWN, TrainerState.STARTING, TrainerState.STOPPING):
            return "rollout goes on up to the staleness bound; the trainer is starting again"
        if not self.scheduler.queues.seats:
            return "training waits for rollout: no server is serving"
        if trainer is TrainerState.BUSY and not self.ledger.may_open and not self.ledger.playing:
            return "rollout waits for training: the staleness bound is reached"
        if trainer is TrainerState.READY and self.ledger.batch_is_full:
            return "training waits for rollout: groups that this step is the last one for"
        if trainer is TrainerState.READY:
            return "training waits for rollout: the next batch is not full"
        return "nobody waits"

    def check(self) -> None:
        """Invariants that hold between any two events."""
        self.ledger.check()
        self.servers.check()
        self.rollout.check()
        self.training.check()
        self.scheduler.check()
        self.workers.check()
        self.reconciler.check()
        claimed = self.ledger.count(GroupState.CLAIMED)
        ready = self.training.state is TrainerState.READY
        assert claimed == 0 or not ready or self.training.streaming
