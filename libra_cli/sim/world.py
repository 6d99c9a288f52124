"""The outside of a machine, in virtual time: servers, tools and a trainer that cost what they cost.

    sim.world                                     core.run.machine
    virtual time: what is next    --event-->      handle(event, now)
          ^                                               |
          +-- how long it takes <-- servers,      <--actions
                                    episodes, trainer

The machine, its scheduler, its planner and its ledger are those of production, and every action of
the machine is performed: servers, workers and the trainer change only as it says. What is
simulated: a server's steps (``sim.engine``), the time a tool, an optimizer step, a weight sync and
a start take. What is not: the network, failures, and the tokens themselves, which are only counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Protocol

from libra_cli.config.errors import LibraError
from libra_cli.core import actions as a
from libra_cli.core import events as e
from libra_cli.core.algorithms.algorithm import algorithm_of
from libra_cli.core.costs.law import ServerLaw
from libra_cli.core.parts import takers_of_one
from libra_cli.core.planning.planner import DecisionMaker, answer
from libra_cli.core.run.machine import Machine
from libra_cli.core.run.state import RunIdentity
from libra_cli.core.scheduling.policy import SchedulingPolicy
from libra_cli.core.types import Bucket, Role, Seconds, Slot, SlotId, TrajectoryId
from libra_cli.plugins.finding import find
from libra_cli.sim.config import SimConfig
from libra_cli.sim.counted import counted_trajectory
from libra_cli.sim.episodes import SimEpisodes
from libra_cli.sim.models import SimModels
from libra_cli.sim.recording import Recording
from libra_cli.sim.servers import SimServers
from libra_cli.sim.traces import RecordedEpisode
from libra_cli.sim.trainer import SimTrainer, SimWorkers
from libra_cli.sim.virtual_time import VirtualTime


class Performs(Protocol):
    """A part of the world that performs the actions of one union."""

    def perform(self, action: Any) -> None:
        """Put the events that the action ends in on the heap."""


PlannerAnswer = Callable[[a.Propose], e.PlanChosen | e.PlanKept]
"""Answers whoever asks for a plan."""


def no_planner(asked: a.Propose) -> e.PlanKept:
    """Return the answer of a run that nobody plans for: today's plan stays."""
    return e.PlanKept("this run has no planner", asked.order)


class SimPlanner:
    """Asks for plans, which takes no virtual time, and learns their slots."""

    def __init__(self, time: VirtualTime, answer: PlannerAnswer, slots: dict[SlotId, Slot]) -> None:
        self._time = time
        self._answer = answer
        self._slots = slots

    def perform(self, action: a.Propose | a.AnswerOrder) -> None:
        """Ask it; in virtual time nobody gives orders, so none is answered."""
        if isinstance(action, a.AnswerOrder):
            return
        event = self._answer(action)
        if isinstance(event, e.PlanChosen):
            self._slots.update({slot.id: slot for slot in event.slots})
        self._time.later(event, 0.0)


class NoTeacher:
    """Stands for the teacher that a simulated run cannot have: its tokens are only counted."""

    def perform(self, action: a.AskTeacher) -> None:
        """Raise AssertionError: no simulated run asks a teacher."""
        raise AssertionError(f"a simulated run has no teacher to ask about {action.trajectory}")


class World:
    """A simulated run: a machine and everything outside it."""

    def __init__(
        self,
        scene: SimConfig,
        policy: SchedulingPolicy,
        groups: Iterator[tuple[RecordedEpisode, ...]],
        *,
        planner: DecisionMaker | None = None,
        plans: PlannerAnswer = no_planner,
    ) -> None:
        """A run of this scene; ``plans`` stands for a ``planner`` where there is none."""
        self.scene = scene
        self.recording = Recording()
        self.time = time = VirtualTime()
        models = scene.recipe.models
        self.models = SimModels(time, models, scene.asks, scene.model_start_s)
        self.episodes = SimEpisodes(time, groups, scene.turn_s, self.models)
        self.servers = SimServers(time, scene, self.episodes)
        self.machine = Machine(
            algorithm_of(scene.recipe.model_copy(update={"teacher": None}), find),
            scene.plan,
            scene.slots,
            RunIdentity("simulated", "", 0, 0.0),
            policy=policy,
            cost_of=scene.guess_of,
            make=counted_trajectory,
        )
        self._ended = False
        self._slots = {slot.id: slot for slot in scene.slots}
        self._trainer = SimTrainer(
            slots=self._slots,
            step_s=scene.train_s,
            slowdown=scene.training_slowdown,
            later=time.later,
            clock=lambda: time.now,
            gradient_s=scene.gradient_s,
            fixed_s=scene.fixed_s,
            shared=scene.shared,
            minibatches=scene.recipe.training.minibatches,
            seed=scene.recipe.run.seed,
            resize_s=scene.resize_s,
            decay=scene.decay,
            rank_slowdown=scene.rank_slowdown,
            trained=self.recording.trained,
            parts=self.recording.parts,
        )
        self._owners = self._owned(plans if planner is None else partial(answer, planner))

    def _owned(self, plans: PlannerAnswer) -> dict[type, Performs]:
        scene = self.scene
        owners: list[tuple[Any, Performs]] = [
            (a.ServerAction | a.TurnAction, self.servers),
            (a.EpisodeAction, self.episodes),
            (a.TrainerAction, self._trainer),
            (a.WorkerAction, SimWorkers(self._trainer, scene.to_training_s, scene.sync_s)),
            (a.ModelAction, self.models),
            (a.Propose | a.AnswerOrder, SimPlanner(self.time, plans, self._slots)),
            (a.AskTeacher, NoTeacher()),
            (a.Wake, self.time),
        ]
        return takers_of_one(owners, a.RuntimeAction)

    @property
    def now(self) -> Seconds:
        return self.time.now

    def run(self) -> Recording:
        """Play the run to its end, and return what was recorded."""
        self.time.later(e.RunStarted(), 0.0)
        slows = self.scene.training_slowdown > 1.0
        while not self._ended:
            what = self.time.next()
            if isinstance(what, tuple):
                for event in self.servers.milestone(*what):
                    self._give(event)
            elif callable(what):
                what()
            else:
                self._give(what)
            self.servers.wake()
            if slows:
                self._trainer.pace(servers_work=self.servers.work)
        self.recording.ended_at = self.now
        return self.recording

    def _give(self, event: e.Event) -> None:
        if isinstance(event, e.StepDone):
            step = self._trainer.ends(event)
            if step is None:
                return  # the step has become faster or slower since
            self._step_over(step)
        for action in self.machine.handle(event, now=self.now):
            self.perform(action)

    def perform(self, action: a.Action) -> None:
        """Perform an action of the machine; its events follow in virtual time."""
        if isinstance(action, a.Save):
            self.recording.keep(action.record, self.now)
        elif isinstance(action, a.End):
            self._end(action)
        else:
            self._owners[type(action)].perform(action)
            if isinstance(action, a.Train):
                self._reprice(self.scene.beside_of)

    def _step_over(self, step: a.Train) -> None:
        if step.ledger is not None:
            self._trainer.saved(step)
        if self.scene.beside_of is not None:
            self._reprice(self.scene.cost_of)

    def _reprice(self, cost_of: Callable[[Bucket], ServerLaw] | None) -> None:
        """Let servers that share cores with the trainer cost something else from now on."""
        if cost_of is not None:
            self.servers.reprice(self.machine.plan, cost_of)

    def _end(self, action: a.End) -> None:
        self._ended = True
        if action.state == "failed":
            raise LibraError(f"the simulated run failed: {action.error}")

    def episode(self, trajectory: TrajectoryId) -> RecordedEpisode:
        """The recording behind a trajectory. Its future: for oracles only."""
        return self.episodes.episode(trajectory)

    # -- what an onlooker may ask ---------------------------------------------------------------

    def busy_gpu_s(self) -> Seconds:
        """GPU seconds in which a server, past or present, had something to do."""
        every = [*self.servers.engines.items(), *self.servers.retired]
        return sum(engine.busy_s * self._slots[slot].num_devices for slot, engine in every)

    def served_gpu_s(self) -> Seconds:
        """GPU seconds in which a server was loading its first version, serving or draining."""
        return sum(
            (span[3] - span[2]) * self._slots[span[0]].num_devices
            for span in self.spans()
            if span[0] in self._slots and span[1] in ("serving", "draining", "joining")
        )

    def spans(self) -> list[tuple[str, str, Seconds, Seconds]]:
        """Return what each slot did, as (slot, state, start, end) in virtual seconds."""
        spans: list[tuple[str, str, Seconds, Seconds]] = []
        since: dict[str, tuple[str, Seconds]] = {}
        for at, row in self.recording.slots:
            # What a slot of the trainer does is told by its steps.
            now = "training" if row.role in (Role.TRAIN, Role.GRADIENT) else row.state
            now = "a frozen model" if row.is_frozen else now
            state, start = since.get(row.slot, (now, at))
            if state != now:
                spans.append((row.slot, state, start, at))
                start = at
            since[row.slot] = (now, start)
        ended = self.recording.ended_at
        spans += [(slot, state, start, ended) for slot, (state, start) in since.items()]
        spans = [span for span in spans if span[1] != "training"]
        worked = [*self.recording.trained, *self.recording.parts]
        trained = [("trainer", "training", start, end) for start, end in worked]
        return [span for span in [*spans, *trained] if span[3] > span[2]]
