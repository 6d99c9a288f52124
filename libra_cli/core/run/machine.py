"""The one place where a run changes: ``handle(event, now) -> actions``.

The machine owns its parts and hands each event to the one it is about; after every event it
*settles*: slots go on towards the plan, expired groups go back to the queue, new groups are opened,
waiting requests get seats, a full batch goes to the trainer, and a run that has reached its end is
wound down. Nothing here reads a clock, a file or a random number, so production, the simulator and
the property tests all drive this very object.

    part        consumes                    waits for                     unblocked by
    reconciler  plans                       turns, shares, processes      ServerStopped, StepDone
    servers     servers, versions           a version to prove            VersionPublished
    workers     gradient workers, versions  a version to prove            VersionPublished
    models      servers of frozen models    its slot to be free           ServerStopped, StepDone
    rollout     prompts, seats              a seat; the staleness bound   TurnGenerated; the same
    training    ready groups                a full batch                  the last EpisodeAdvanced
    the end     everything stopped          processes verified gone       ServerStopped,
                                                                          TrainerStopped

Who changes whom: the controller gives the reconciler another plan, and the reconciler starts,
drains and stops what servers, workers, models and training hold; calls go this way down and no
other. Servers, workers, models, training and rollout never change one another, and nobody below
changes the reconciler: what one does that concerns another is a *notice* among its results, which
the machine hands on before it asks for the next result. Reading is free. Two books are written by
several hands: the ledger of groups (rollout opens and ends them, training claims them) and the
scheduler (rollout queues requests, the machine tells it which servers take some, and these keep the
price and the version of their queues).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from libra_cli.core import actions as a
from libra_cli.core import events as e
from libra_cli.core import notices as n
from libra_cli.core.algorithms.algorithm import Algorithm
from libra_cli.core.cluster.trainer_life import TrainerState
from libra_cli.core.costs.law import ServerLaw
from libra_cli.core.costs.server import guessed_cost
from libra_cli.core.explanation import Explanation
from libra_cli.core.observation import Observation
from libra_cli.core.parts import Part, Taker, takers, takers_of_one
from libra_cli.core.records import DecisionRecord, MoveRecord, PlanRecord, Record, VersionRecord
from libra_cli.core.rollout.groups import GroupState, new_trajectory
from libra_cli.core.rollout.once import dropped_in
from libra_cli.core.rollout.rows import group_record
from libra_cli.core.run import evaluating
from libra_cli.core.run.assembly import RunParts, assemble
from libra_cli.core.run.course import RunCourse
from libra_cli.core.run.router import NoticeRouter
from libra_cli.core.run.state import Phase, Resume, RunIdentity
from libra_cli.core.run.timers import Timers
from libra_cli.core.run.waiting import waiting
from libra_cli.core.run.watch import RunWatch
from libra_cli.core.scheduling.policy import SchedulingPolicy
from libra_cli.core.types import Bucket, Plan, Seconds, Slot, Trajectory, TrajectoryId


class Machine:
    """The state of a run. ``handle`` is the only way in."""

    def __init__(
        self,
        algorithm: Algorithm,
        plan: Plan,
        slots: Sequence[Slot],
        identity: RunIdentity,
        *,
        policy: SchedulingPolicy,
        resume: Resume | None = None,
        explanation: Explanation | None = None,
        cost_of: Callable[[Bucket], ServerLaw] | None = None,
        make: Callable[[TrajectoryId, Seconds], Trajectory] = new_trajectory,
        tasks: int = 0,
    ) -> None:
        """``tasks`` are those of the recipe's files, for a curriculum that goes through them."""
        self.parts = parts = assemble(
            algorithm,
            plan,
            slots,
            identity,
            policy=policy,
            cost_of=cost_of or guessed_cost,
            make=make,
            tasks=tasks,
        )
        self._name(parts)
        self._watch = RunWatch(parts)
        self._course = RunCourse(parts, explanation)
        self._router = NoticeRouter(parts, self._watch)
        self._agenda = self._router.agenda
        ours: tuple[Part, ...] = (
            parts.servers,
            parts.workers,
            parts.models,
            parts.training,
            parts.rollout,
            parts.controller,
            Timers(parts, self._course),
        )
        every: tuple[Taker, ...] = (self._course, *ours)
        self._takers = takers(((one.events, one) for one in every), e.Event)
        self._askers = takers_of_one(((one.actions, one) for one in ours), a.RuntimeAction)
        if resume is not None:
            self._begin_at(resume)

    def _name(self, parts: RunParts) -> None:
        """Name the parts that are read from outside, such as the driver and the simulator."""
        self.recipe, self.run = parts.recipe, parts.run
        self.ledger, self.scheduler = parts.ledger, parts.scheduler
        self.servers, self.workers, self.models = parts.servers, parts.workers, parts.models
        self.rollout, self.training = parts.rollout, parts.training
        self.reconciler, self.controller = parts.reconciler, parts.controller

    def _begin_at(self, resume: Resume) -> None:
        """The run went on until a checkpoint, and from there on."""
        training = self.training
        self.ledger.restore(resume.position, dropped=dropped_in(resume.records))
        training.remember(resume.checkpoint, int(resume.position["step"]))
        training.life.incarnation = resume.trainer_incarnation
        training.step = training.checkpoints.step
        self._remember(resume.records)

    def _remember(self, records: Sequence[Record]) -> None:
        """Go on from the rows that the run wrote before: checkpoints,
        and the numbers of plans and moves.
        """
        checkpoints = self.training.checkpoints
        for version in records:
            if isinstance(version, VersionRecord):
                checkpoints.begins(version.trainer_incarnation, version.version)
        self._watch.remember(records)
        plans = [record.plan for record in records if isinstance(record, PlanRecord)]
        moves = [record.move for record in records if isinstance(record, MoveRecord)]
        self.controller.number_on(max(plans, default=-1))
        self.reconciler.number_on(max(moves, default=0))
        evaluating.remember(self.parts, records)
        decisions = [record for record in records if isinstance(record, DecisionRecord)]
        self._router.route(self.controller.go_on(decisions), [], 0.0)

    def handle(self, event: e.Event, *, now: Seconds) -> list[a.Action]:
        """Take in one event; return what is to be done, in order.

        Raises:
            IllegalMove: the event cannot happen in this state; that is a bug in libra.
        """
        if self.run.ended_at is not None:
            return []
        actions: list[a.Action] = []
        route = self._router.route
        for part in self._takers[type(event)]:
            route(part.handle(event, now=now), actions, now)
        if self._is_quiet(event):
            route(self.rollout.dispatch(now=now), actions, now)
            self._watch.see(actions)
            route(self._watch.look(now=now), actions, now)
            return actions
        self._settle(actions, now)
        if self._agenda.rows:
            actions += self._router.slot_rows(now, self.scheduler.waiting)
        self._watch.see(actions)
        route(self._watch.look(now=now), actions, now)
        row = self.run.changed_row(self.training.step, self.training.published, self.waiting)
        if row is not None:
            actions.insert(0, a.Save(row))
        if self.run.ended_at is not None:
            actions.append(a.End(self.run.outcome, self.run.error))  # closes the journal
        return actions

    def wants(self, action: a.RuntimeAction) -> bool:
        """Whether the end of the action is still waited for."""
        return self._askers[type(action)].wants(action)

    # -- what there is --------------------------------------------------------------------------

    @property
    def phase(self) -> Phase:
        return self.run.phase

    @property
    def plan(self) -> Plan:
        """The newest plan adopted."""
        return self.controller.plan

    @property
    def waiting(self) -> str:
        """A sentence on what waits for what."""
        return waiting(self.parts)

    def observe(self) -> Observation | None:
        """Return the planner's observation of the run now; None
        before a trajectory has finished.
        """
        return self._watch.observe()

    # -- settling ---------------------------------------------------------------------------------

    def _is_quiet(self, event: e.Event) -> bool:
        """Whether all that this event can have set free is a seat, or a request that wants one.

        A turn, or its tool's return, that ends no trajectory changes no group, server, trainer or
        phase, and adds to the contexts in play: what waited for one of those waits on.
        """
        in_play = isinstance(event, e.TurnGenerated) or (
            isinstance(event, e.EpisodeAdvanced) and not event.done
        )
        return (
            in_play
            and self.run.phase is Phase.RUNNING
            and self._agenda.is_empty
            and self.reconciler.at_rest
        )

    def _settle(self, actions: list[a.Action], now: Seconds) -> None:
        """Take every step that has become possible since the last event."""
        route = self._router.route
        if self.run.going:
            route(self._settle_slots(now), actions, now)
        route(self._settle_routes(now), actions, now)
        if self.run.going:
            route(self._advance_run(now), actions, now)
            route(self._serve_meanwhile(now), actions, now)
        if not self.run.going:
            route(self._course.end(now=now), actions, now)

    def _settle_slots(self, now: Seconds) -> Iterator[n.Result]:
        """Bring slots towards the plan.

        Changes that this makes itself are looked at after the next event.
        """
        agenda = self._agenda
        changed, agenda.look = agenda.look, False
        yield from self.reconciler.settle(changed=changed, now=now)
        if agenda.plan_repaired:
            agenda.plan_repaired = False
            yield from self.controller.on_plan_repaired()

    def _settle_routes(self, now: Seconds) -> Iterator[n.Result]:
        agenda = self._agenda
        if agenda.lost:
            lost, agenda.lost = agenda.lost, {}
            yield from self.rollout.requeue(lost, now=now)
        if agenda.reroute:
            agenda.reroute = False
            latest = self.servers.latest.version if self.servers.latest else None
            self.scheduler.refresh(self.servers.routable(), latest=latest, now=now)

    def _advance_run(self, now: Seconds) -> Iterator[n.Result]:
        course, target, run = self._course, self.recipe.run.steps, self.run
        broken = course.broken
        ready = self.training.state is TrainerState.READY
        was_over = self.scheduler.training_over
        over = self.scheduler.training_over = ready and self.training.step >= target
        if broken and not over:
            yield from course.wind_down("failed", broken, now=now)
        elif over and (self.servers.all_failed or evaluating.are_done(self.parts)):
            why = f"no server is left: {self.servers.all_failed}"
            yield from evaluating.cut(self.parts, why, now=now)
            yield from course.wind_down("finished", "", now=now)
        elif over and not was_over:
            yield evaluating.wake()
        elif run.phase is Phase.STARTING and (self._has_rollout or ready):
            run.enter(Phase.RUNNING)
        if run.phase is not Phase.RUNNING:
            return
        yield from evaluating.evaluate(self.parts, now=now)
        if over:
            yield from self.rollout.dispatch(now=now)
        else:
            yield from self._train_on(now)

    def _serve_meanwhile(self, now: Seconds) -> Iterator[n.Result]:
        """Let servers on the trainer's GPUs take requests if it waits.

        Only once it is known that no step begins at once, which would break their turns off.
        """
        if self.training.state is not TrainerState.BUSY and self.servers.trainer_waits():
            self._agenda.reroute = True
            yield from self._settle_routes(now)
            yield from self.rollout.dispatch(now=now)

    def _train_on(self, now: Seconds) -> Iterator[n.Result]:
        """Open groups, send requests and begin a step, as far as any of it can be done."""
        if self.training.state is TrainerState.READY:  # only then does age matter
            for group in self.ledger.expire(self.training.step):
                yield a.Save(group_record(group, now, detail="too old to train on"))
        yield from self.rollout.fill(version=self.training.published_step, now=now)
        yield from self.rollout.dispatch(now=now)
        # Workers that share in a step need the weights it begins with.
        if not (self.training.publishing and self.workers.would_share):
            yield from self.training.claim(now=now, target=self.recipe.run.steps)

    @property
    def _has_rollout(self) -> bool:
        """Whether a server takes requests."""
        return self.scheduler.queues.seats > 0

    def check(self) -> None:
        """Raise AssertionError if an invariant of the machine, or
        of one of its parts, does not hold.
        """
        self.parts.check()
        known = list(self.scheduler.queues.by_slot)
        behind = self.servers.routable_slots != known
        assert self._agenda.reroute or not behind, "the scheduler is behind"
        claimed = self.ledger.count(GroupState.CLAIMED)
        ready = self.training.state is TrainerState.READY
        assert claimed == 0 or not ready or self.training.streaming
