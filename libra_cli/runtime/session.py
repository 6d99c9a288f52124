"""One run of ``libra run``, from an empty run directory to the proof that nothing is left.

    directory, journal -> hosts -> tokenizer, environment -> machine and driver -> end -> hosts

Whatever happens in between, the last part runs: every agent ends with all it has started, and the
journal says how the run ended. Ctrl-C asks the machine to stop (checkpoint, drain, stop); a second
one skips the checkpoint and the drain.

A controller that is killed leaves its event log. The next one replays it and goes on with what
still runs (``runtime.adoption``); until it has reached every host it changes nothing.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from libra_cli.config.errors import LibraError
from libra_cli.config.recipe import Recipe
from libra_cli.config.secrets import known_secrets, masker
from libra_cli.core import events
from libra_cli.core.actions import End
from libra_cli.core.explanation import Explanation
from libra_cli.core.launch.placement import initial_plan, slots_of
from libra_cli.core.planning.planner import DecisionMaker, FirstPlan
from libra_cli.core.records import EvaluationRecord, Record, RunRecord
from libra_cli.core.run.machine import Machine
from libra_cli.core.run.state import Resume, RunIdentity
from libra_cli.core.types import Slot, SlotId, node_of
from libra_cli.runtime.adoption.memory import RunMemory
from libra_cli.runtime.adoption.run_log import ReplayedRun, RunLog
from libra_cli.runtime.adoption.takeover import (
    Adoption,
    asked_again,
    connect,
    findings,
    replayed_from_prompt,
    slots_of_machine,
)
from libra_cli.runtime.agents.episodes import AgentEpisodes
from libra_cli.runtime.credentials.run_secrets import RunSecrets
from libra_cli.runtime.demonstrations.reader import Demonstrations
from libra_cli.runtime.driver import QUIET, Driver, describe
from libra_cli.runtime.episodes.performer import EpisodePerformer, EpisodePlayer
from libra_cli.runtime.episodes.player import Episodes
from libra_cli.runtime.episodes.renderer import Renderer
from libra_cli.runtime.evaluation.players import (
    EvaluatedEpisodes,
    SamplingOf,
    evaluation_players,
)
from libra_cli.runtime.host_events import HostEvents
from libra_cli.runtime.hosts.agent_messages import Exited, HostEvent
from libra_cli.runtime.hosts.cluster import PATIENCE_S, Cluster
from libra_cli.runtime.order_files import Orders
from libra_cli.runtime.performer import EpisodeSource, Performer
from libra_cli.runtime.rollout.servers import Servers
from libra_cli.runtime.store.event_log import EventLog
from libra_cli.runtime.store.follower import ADOPTED
from libra_cli.runtime.store.journal import Journal
from libra_cli.runtime.supervision.background import Background
from libra_cli.runtime.supervision.controller_log import log_of_loop
from libra_cli.runtime.supervision.quotations import quoted
from libra_cli.runtime.tasks.mixture import tasks_of
from libra_cli.runtime.teacher import Teacher
from libra_cli.runtime.trainer.model_export import CardOf
from libra_cli.runtime.trainer.processes import TrainerProcesses
from libra_cli.runtime.trainer.run_exports import RunExports
from libra_cli.runtime.trainer.whole_checkpoints import newest_whole
from libra_cli.runtime.trainer.worker_processes import WorkerProcesses
from libra_cli.runtime.weights.versions import weights_of


@dataclass(frozen=True, slots=True)
class LastCheckpoint:
    """Where a run may go on, the last trainer it had, and what it has written, in order."""

    names: tuple[str, ...]
    """Of the checkpoints that it has told of."""
    trainer_incarnation: int
    records: Sequence[Record]


class Session:
    """Everything that lives exactly as long as a run."""

    def __init__(
        self,
        recipe: Recipe,
        run_dir: Path,
        journal: Journal,
        first: RunRecord,
        *,
        secrets: RunSecrets,
        first_plan: Callable[[frozenset[str]], FirstPlan],
        plan_with: Callable[[frozenset[str]], DecisionMaker],
        card_of: CardOf,
        watch: Callable[[Record], None],
        note: Callable[[str], None],
    ) -> None:
        """On GPUs of these names, ``first_plan`` is what the run begins with, with its slots, and
        ``plan_with`` makes its planner; ``card_of`` is what a model's card says of the run."""
        self._first_plan = first_plan
        self._plan_with = plan_with
        self._recipe = recipe
        self._mask = masker(known_secrets(recipe))
        self._run_dir = run_dir
        self._journal = journal
        self._run = first
        self._watch = watch
        self._note = note
        self._plan = initial_plan(recipe)
        self._begun_with = slots_of(recipe)
        self._explanation: Explanation | None = None
        #: Every slot there has been; more come with other plans.
        self._slots: dict[SlotId, Slot] = {}
        self._learn(self._begun_with)
        self._cluster = Cluster(
            recipe,
            self._plan,
            run_id=first.id,
            secrets=secrets,
            save=self._save,
            clock=self._clock,
            recipe_path=first.recipe,
            note=note,
        )
        # Monotonic, so that no clock adjustment can turn a duration negative, yet readable.
        self._offset = time.time() - time.monotonic()
        self._driver: Driver | None = None
        self._exports = RunExports(
            recipe, self._cluster, run_dir, card_of, save=self._save, note=note
        )
        self._log = EventLog(
            run_dir,
            secrets.token,
            lambda error: note(f"{error}; {error.hint}"),
            settle=journal.flush,
        )
        self._what_next = f"libra run {first.recipe} --resume {run_dir}; libra stop {run_dir}"
        #: Whether nothing has been changed yet of a run that a killed controller has left.
        self._attaching = False
        self._leaving: asyncio.Task[None] | None = None
        self._interrupts = 0
        self._releasing = False

    def _learn(self, slots: Iterable[Slot]) -> None:
        self._slots |= {slot.id: slot for slot in slots}

    def _clock(self) -> float:
        return self._offset + time.monotonic()

    def _save(self, record: Record) -> None:
        if isinstance(record, RunRecord):
            started = self._run.started_at
            record = self._run = replace(record, started_at=started)
        if isinstance(record, EvaluationRecord):
            self._exports.evaluated(record)
        self._journal.save(record)
        self._watch(record)

    async def run(self, goes_on: LastCheckpoint | ReplayedRun | None = None) -> RunRecord:
        """Run to the end; returns the run's last row.

        One that ``goes_on`` does so from a checkpoint, or where its controller was killed.

        Raises:
            LibraError: it could not be started, or failed in a way only a user can mend.
        """
        self._catch_signals()
        self._save(self._run)
        try:
            end = await self._whole(goes_on)
            self._ended(end.state, end.error)
        except asyncio.CancelledError:
            self._ended("stopped", "stopped while starting")
        except BaseException as error:
            expected = isinstance(error, LibraError)
            self._ended("failed", str(error) if expected else f"{type(error).__name__}: {error}")
            raise
        finally:
            await self._release()
        return self._run

    def _ended(self, state: str, error: str) -> None:
        if self._attaching:
            return  # everything is as the killed controller left it
        error = quoted(error, self._mask)
        self._save(replace(self._run, state=state, error=error, waiting="", ended_at=self._clock()))
        self._log.remove()

    async def _release(self) -> None:
        self._releasing = True
        await self._exports.close()
        if self._attaching:
            self._note(f"what runs on the hosts goes on until its lease is over: {self._what_next}")
            await self._cluster.leave()
            return
        for line in await self._cluster.close():
            self._note(f"not proved gone: {line}")

    def _catch_signals(self) -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        loop.set_exception_handler(log_of_loop)
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._interrupted, task)

    def _interrupted(self, task: asyncio.Task[object]) -> None:
        self._interrupts += 1
        at_once = self._interrupts > 1
        if self._releasing:
            self._note("already stopping: the hosts are being cleared")
        elif self._driver is not None:
            gently = "stopping: checkpoint, drain, stop (once more: at once)"
            self._note("stopping at once" if at_once else gently)
            self._driver.post(events.StopRequested(at_once, "asked for"))
        elif self._leaving is not None:
            self._leaving.cancel()
        elif not at_once:
            self._note("stopping")
            task.cancel()

    # -- the parts ------------------------------------------------------------------------------

    async def _whole(self, goes_on: LastCheckpoint | ReplayedRun | None) -> End:
        self._cluster.patience_s = 0.0 if goes_on is None else PATIENCE_S
        if isinstance(goes_on, ReplayedRun):
            return await self._play(await self._attach(goes_on))
        await self._prepare()
        return await self._play(goes_on)

    async def _prepare(self) -> None:
        """Open the hosts, and choose the first plan for what they have."""
        await self._cluster.open(self._run_dir / "model")
        begun_with = self._first_plan(self._cluster.gpu_names)
        self._plan, self._begun_with = begun_with.plan, begun_with.slots
        self._explanation = begun_with.explanation
        self._learn(self._begun_with)

    async def _attach(self, replayed: ReplayedRun) -> Adoption:
        """Reach the hosts of a run whose controller was killed."""
        self._attaching = True
        machine, run = replayed.machine, self._run
        self._offset = max(self._offset, replayed.until - time.monotonic())
        self._plan = machine.plan
        self._learn(slots_of_machine(machine).values())
        running = await self._cluster.adopt(replayed.cluster, self._run_dir / "model")
        machine.run.controlled_by(
            RunIdentity(run.id, run.recipe, run.controller_pid, run.controller_started)
        )
        self._catch_up(replayed)
        return Adoption(replayed, running)

    def _catch_up(self, replayed: ReplayedRun) -> None:
        """Write what the killed controller had no time to write."""
        written = self._journal.last_event
        for at, event, saved in replayed.happened:
            if at > written and not isinstance(event, QUIET):
                self._journal.event(at, type(event).__name__, describe(event))
            for record in saved if at >= written else ():
                if not isinstance(record, RunRecord):  # it names the controller
                    self._save(record)

    async def _play(self, goes_on: LastCheckpoint | Adoption | None) -> End:
        renderer = self._renderer()
        if self._recipe.demonstrations:
            return await self._play_with(renderer, self._demonstrations(renderer), goes_on)
        episodes = self._player(renderer)
        try:
            await episodes.check(self._recipe.run.seed)
            if not isinstance(goes_on, Adoption):  # which waits for one that is away
                await self._check_teacher(renderer)
            return await self._play_with(renderer, episodes, goes_on)
        finally:
            await episodes.close()

    async def _check_teacher(self, renderer: Renderer) -> None:
        if self._recipe.teacher is None:
            return
        teacher = Teacher(self._recipe.teacher)
        try:
            await teacher.check(renderer, max_len=self._recipe.model.max_len)
        finally:
            await teacher.close()

    async def _play_with(
        self,
        renderer: Renderer,
        episodes: EpisodePlayer | Demonstrations,
        goes_on: LastCheckpoint | Adoption | None,
    ) -> End:
        if isinstance(goes_on, Adoption):
            end = await self._drive_on(renderer, episodes, goes_on)
        else:
            machine = self._machine(await self._find_resume(goes_on))
            end = await self._drive(machine, RunMemory(), renderer, episodes)
        if end.state == "finished":
            await self._leave_models()
        return end

    def _demonstrations(self, renderer: Renderer) -> Demonstrations:
        recipe = self._recipe
        return Demonstrations(
            recipe.demonstrations, renderer, seed=recipe.run.seed, max_len=recipe.model.max_len
        )

    def _source(self, episodes: EpisodePlayer | Demonstrations, memory: RunMemory) -> EpisodeSource:
        if isinstance(episodes, Demonstrations):
            return episodes
        seed = self._recipe.run.seed
        return EpisodePerformer(episodes, run_seed=seed, histories=memory.episodes)

    def _player(self, renderer: Renderer) -> EpisodePlayer:
        """Plays what is trained, and what is evaluated if anything is."""
        trained = self._trained_player(renderer)
        if not self._recipe.evaluation:
            return trained
        evaluated = evaluation_players(
            self._recipe,
            trained,
            renderer,
            run_directory=self._run_dir,
            open_on=self._cluster.open_stream,
        )
        return EvaluatedEpisodes(self._recipe, trained, evaluated)

    def _trained_player(self, renderer: Renderer) -> EpisodePlayer:
        """The recipe's agent, or libra's own loop."""
        if self._recipe.agent is not None:
            return AgentEpisodes(
                self._recipe,
                renderer,
                self._run_dir,
                note=self._note,
                open_on=self._cluster.open_stream,
            )
        return Episodes(
            self._recipe.environment,
            self._recipe.environment_labels,
            renderer,
            run_directory=self._run_dir,
            open_on=self._cluster.open_stream,
        )

    def _renderer(self) -> Renderer:
        model = self._recipe.model
        renderer = Renderer(
            self._run_dir / "model",
            template_args=model.template_args,
            tool_format=model.tool_format,
        )
        if model.path is not None:  # what the built model's template leaves out is known
            for misfit in renderer.misfits:
                self._note(f"the chat template {misfit}; see libra help models")
        return renderer

    async def _leave_models(self) -> None:
        """The models of the last and the best checkpoint; without them the run has finished too."""
        self._driver = None
        self._leaving = asyncio.create_task(self._exports.leave())
        try:
            await self._leaving
        except (asyncio.CancelledError, Exception) as error:  # noqa: BLE001  it has finished
            why = str(error) or "stopped"
            self._note(f"no model was written: {why}; {self._exports.hint}")

    async def _find_resume(self, goes_on: LastCheckpoint | None) -> Resume | None:
        if goes_on is None:
            return None
        found = await newest_whole(
            self._cluster.hosts, goes_on.names, goes_on.trainer_incarnation, note=self._note
        )
        return Resume(found.path, found.position, found.trainer_incarnation, goes_on.records)

    async def _drive_on(
        self, renderer: Renderer, episodes: EpisodePlayer | Demonstrations, adoption: Adoption
    ) -> End:
        """Go on where another controller was killed."""
        machine, memory = adoption.replayed.machine, adoption.replayed.memory
        running = adoption.running
        if (ended := adoption.end) is not None:  # the machine will say nothing more
            self._attaching = False
            training = machine.training
            if row := machine.run.changed_row(training.step, training.published, ""):
                self._save(row)
            self._note("it had ended already when its controller was killed")
            return ended

        async def take_over(performer: Performer) -> list[events.Event]:
            failed = await connect(
                machine,
                memory,
                servers=performer.servers,
                workers=performer.workers,
                trainer=performer.trainer,
            )
            checkpoint = machine.training.checkpoints
            if checkpoint.path:  # its model may not have been made
                saved = machine.training.incarnation, checkpoint.step, checkpoint.path
                self._exports.saved(events.CheckpointSaved(*saved))
            alive = {
                node: None if names is None else await self._cluster.hosts[node].running()
                for node, names in running.items()
            }
            anew = replayed_from_prompt(machine) if self._recipe.agent is not None else []
            self._attaching = False
            self._journal.event(self._clock(), ADOPTED, {})
            self._note(adoption.told)
            return [*findings(machine, memory, alive), *failed, *anew]

        return await self._drive(machine, memory, renderer, episodes, take_over)

    async def _drive(
        self,
        machine: Machine,
        memory: RunMemory,
        renderer: Renderer,
        episodes: EpisodePlayer | Demonstrations,
        begin: Callable[[Performer], Awaitable[Sequence[events.Event]]] | None = None,
    ) -> End:
        """Run the machine to its end; what happens first is RunStarted, or what ``begin`` says."""
        log = RunLog(self._log, machine, memory, lambda: self._cluster.kept)
        asked_before = memory.number
        driver = Driver(
            machine,
            clock=self._clock,
            save=self._save,
            tell=self._tell,
            log=log,
            mask=self._mask,
        )
        performer = self._performer(renderer, episodes, driver.post, memory)
        servers, orders = performer.servers, performer.orders
        reports = HostEvents(
            self._cluster,
            performer.weights,
            servers,
            performer.trainer,
            performer.workers,
            post=driver.post,
        )

        def happened(event: HostEvent) -> None:
            reports.happened(event)
            if isinstance(event, Exited):  # the next process there may listen elsewhere
                log.outdated()

        self._cluster.on_event = happened
        background = Background()
        try:
            first = await begin(performer) if begin is not None else [events.RunStarted()]
            background.keep("reading the servers' counters", servers.sample)
            background.keep("reading orders", orders.watch)
            self._driver = driver
            again = partial(asked_again, machine, memory, asked_before, now=self._clock())
            return await driver.run(performer.perform, first=first, again=again)
        finally:
            self._cluster.on_event = lambda event: None
            background.cancel()
            await reports.close()
            await performer.close()

    def _machine(self, resume: Resume | None) -> Machine:
        run = self._run
        identity = RunIdentity(run.id, run.recipe, run.controller_pid, run.controller_started)
        return Machine(
            self._recipe,
            self._plan,
            self._begun_with,
            identity,
            resume=resume,
            explanation=self._explanation,
            tasks=self._tasks,
        )

    @property
    def _tasks(self) -> int:
        """How many tasks the recipe's files have, where that matters."""
        curriculum = self._recipe.rollout.curriculum
        counts = curriculum is not None and curriculum.tasks is None
        return tasks_of(self._recipe.environment) if counts else 0

    def _performer(
        self,
        renderer: Renderer,
        episodes: EpisodePlayer | Demonstrations,
        post: Callable[[events.Event], None],
        memory: RunMemory,
    ) -> Performer:
        recipe, cluster, slots = self._recipe, self._cluster, self._slots
        head = node_of(self._plan.train[0])
        weights = weights_of(cluster, recipe.weight_sync, origin=head)
        sampling = SamplingOf(
            self._recipe, tuple(renderer.stop_token_ids), vocabulary=renderer.vocabulary
        )
        workers = WorkerProcesses(recipe, cluster, weights, slots, post=post)
        return Performer(
            servers=Servers(recipe, cluster, weights, slots, sampling, post=post),
            trainer=TrainerProcesses(
                recipe, cluster, slots, head=head, shares=workers.handing_out, post=post
            ),
            workers=workers,
            episodes=self._source(episodes, memory),
            orders=Orders(self._run_dir, post=post),
            weights=weights,
            planner=self._plan_with(cluster.gpu_names),
            teacher=None if self._recipe.teacher is None else Teacher(self._recipe.teacher),
        )

    def _tell(self, now: float, event: events.Event) -> None:
        if isinstance(event, events.PlanChosen):
            self._learn(event.slots)
        if isinstance(event, events.CheckpointSaved):
            self._exports.saved(event)
        if not isinstance(event, QUIET):
            self._journal.event(now, type(event).__name__, describe(event))
