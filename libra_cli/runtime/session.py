"""One run of ``libra run``: hosts -> parts -> machine and driver -> end -> hosts.

Whatever happens in between, the last part runs: every agent ends with all it has started, and the
journal says how the run ended. Ctrl-C asks the machine to stop (checkpoint, drain, stop); a second
one skips the checkpoint and the drain.

A controller that is killed leaves its event log. The next one replays it and goes on with what
still runs (``runtime.adopted_run``); until it has reached every host it changes nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TypeAlias

from libra_cli.config.errors import LibraError
from libra_cli.config.recipe import Recipe
from libra_cli.core import events
from libra_cli.core.actions import End
from libra_cli.core.frozen.slots import frozen_slots
from libra_cli.core.launch.placement import initial_plan, slots_of
from libra_cli.core.preflight.episode_places import most_episodes
from libra_cli.core.records import Record, RunRecord
from libra_cli.core.run.machine import Machine
from libra_cli.core.run.state import RunIdentity
from libra_cli.core.types import Seconds, Slot, SlotId, node_of
from libra_cli.runtime.adopted_run import attach, catch_up, ended_before, take_over
from libra_cli.runtime.adoption.memory import RunMemory
from libra_cli.runtime.adoption.run_log import ReplayedRun, RunLog
from libra_cli.runtime.adoption.takeover import Adoption, asked_again, slots_of_machine
from libra_cli.runtime.clock import RunClock
from libra_cli.runtime.credentials.run_secrets import RunSecrets
from libra_cli.runtime.driver import Driver
from libra_cli.runtime.frozen.models import FrozenModels, models_of
from libra_cli.runtime.host_events import HostEvents
from libra_cli.runtime.hosts.agent_messages import Exited, HostEvent
from libra_cli.runtime.hosts.cluster import PATIENCE_S, Cluster
from libra_cli.runtime.interrupts import CLEARING, Interrupts
from libra_cli.runtime.new_run import LastCheckpoint, Planning, new_machine
from libra_cli.runtime.parts import check_outside, performer_of
from libra_cli.runtime.performer import Performer
from libra_cli.runtime.run_records import RunRecords
from libra_cli.runtime.store.event_log import EventLog
from libra_cli.runtime.store.follower import ADOPTED
from libra_cli.runtime.supervision.background import Background
from libra_cli.runtime.supervision.controller_log import log_of_loop
from libra_cli.runtime.trainer.model_export import CardOf
from libra_cli.runtime.trainer.run_exports import RunExports
from libra_cli.runtime.trajectory_source import TrajectorySource, open_source

Begin: TypeAlias = Callable[[Performer], Awaitable[Sequence[events.Event]]]
"""What a run begins with, once its parts are made; returns what the machine hears first."""


class Session:
    """The hosts of a run and whatever runs on them, for as long as it goes on."""

    def __init__(
        self,
        recipe: Recipe,
        run_dir: Path,
        records: RunRecords,
        secrets: RunSecrets,
        planning: Planning,
        card_of: CardOf,
    ) -> None:
        """``card_of`` is what a model's card says of the run."""
        self._recipe = recipe
        self._run_dir = run_dir
        self._records = records
        self._planning = planning
        #: Every slot there has been; more come with other plans.
        self._slots: dict[SlotId, Slot] = {}
        self._learn(slots_of(recipe))
        self._clock = RunClock()
        # What is dated before it is taken for written by whoever goes on after this controller.
        self._clock.not_before(records.journal.last_event)
        self._cluster = Cluster(
            recipe,
            initial_plan(recipe),
            run_id=records.row.id,
            secrets=secrets,
            save=self._save,
            clock=self._clock,
            recipe_path=records.row.recipe,
            note=records.note,
        )
        self._exports = RunExports(
            recipe, self._cluster, run_dir, card_of, save=self._save, note=records.note
        )
        frozen = frozen_slots(recipe.models, recipe.nodes)
        self._models = FrozenModels(frozen, self._cluster, self._save)
        self._log = EventLog(
            run_dir,
            secrets.token,
            lambda error: records.note(f"{error}; {error.hint}"),
            settle=records.journal.flush,
        )
        self._interrupts = Interrupts(records.note)
        #: Whether nothing has been changed yet of a run that a killed controller has left.
        self._attaching = False

    async def run(self, goes_on: LastCheckpoint | ReplayedRun | None = None) -> RunRecord:
        """Run to the end; returns the run's last row.

        One that ``goes_on`` does so from a checkpoint, or where its controller was killed.

        Raises:
            LibraError: it could not be started, or failed in a way only a user can mend.
        """
        asyncio.get_running_loop().set_exception_handler(log_of_loop)
        self._interrupts.end_task()
        self._save(self._records.row)
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
        return self._records.row

    async def _whole(self, goes_on: LastCheckpoint | ReplayedRun | None) -> End:
        self._cluster.patience_s = 0.0 if goes_on is None else PATIENCE_S
        if isinstance(goes_on, ReplayedRun):
            end = await self._go_on(goes_on)
        else:
            end = await self._begin(goes_on)
        if end.state == "finished":
            await self._leave_models()
        return end

    # -- a run that begins, or does so from a checkpoint ----------------------------------------

    async def _begin(self, checkpoint: LastCheckpoint | None) -> End:
        """Open the hosts, choose the first plan for what they have, and start everything."""
        async with AsyncExitStack() as stack:
            async with self._cluster.events.all_needed():
                await self._cluster.open(self._run_dir / "model")
                begun_with = self._planning.first_plan(self._cluster.gpu_names)
                self._learn(begun_with.slots)
                source = await stack.enter_async_context(self._source())
                await check_outside(source.recipe, source.renderer)
                resume = None
                if checkpoint is not None:
                    resume = await checkpoint.resume(self._cluster.hosts, self._records.note)
            machine = new_machine(self._recipe, begun_with, self._identity, resume)
            return await self._drive(machine, RunMemory(), source, self._start_run)

    @property
    def _places_counted(self) -> events.PlacesCounted:
        return events.PlacesCounted(most_episodes(self._with_places.environment))

    async def _start_run(self, performer: Performer) -> Sequence[events.Event]:
        return [
            self._places_counted,
            events.RunStarted(),
        ]

    @property
    def _identity(self) -> RunIdentity:
        row = self._records.row
        return RunIdentity(row.id, row.recipe, row.controller_pid, row.controller_started)

    # -- a run whose controller was killed ------------------------------------------------------

    async def _go_on(self, replayed: ReplayedRun) -> End:
        """Attach to the hosts, and take over what runs there."""
        self._attaching = True
        self._clock.not_before(replayed.until)
        self._learn(slots_of_machine(replayed.machine).values())
        model_copy = self._run_dir / "model"
        adoption = await attach(replayed, self._identity, self._cluster, model_copy)
        records = self._records
        catch_up(replayed, records.journal.last_event, tell=records.tell, save=self._save)
        if (ended := ended_before(adoption, self._save)) is not None:
            self._attaching = False
            records.note("it had ended already when its controller was killed")
            return ended
        async with self._source() as source:
            begin = partial(self._take_over, adoption)
            return await self._drive(replayed.machine, replayed.memory, source, begin)

    async def _take_over(self, adoption: Adoption, performer: Performer) -> Sequence[events.Event]:
        has_agent = self._recipe.agent is not None
        first = await take_over(adoption, performer, self._cluster, has_agent=has_agent)
        training = adoption.replayed.machine.training
        if path := training.checkpoints.path:  # its model may not have been made
            step = training.checkpoints.step
            self._exports.saved(events.CheckpointSaved(training.incarnation, step, path))
        self._attaching = False
        self._records.journal.event(self._clock(), ADOPTED, {})
        self._records.note(adoption.told)
        return [self._places_counted, *first]

    # -- the machine at work --------------------------------------------------------------------

    @property
    def _with_places(self) -> Recipe:
        """The recipe, with as many episodes as the hosts have told that they hold."""
        return self._recipe.with_environments(self._cluster.that_play.counted)

    @asynccontextmanager
    async def _source(self) -> AsyncIterator[TrajectorySource]:
        """Open the frozen models, and what trajectories come from, which may ask them."""
        async with (
            self._models.opened(
                attaching=lambda: self._attaching, recorded=models_of(self._run_dir)
            ) as address,
            open_source(
                self._with_places.served_at(address),
                self._run_dir,
                open_on=self._cluster.open_stream,
                note=self._records.note,
                models=address,
                adopts=self._attaching,
            ) as source,
        ):
            yield source

    async def _drive(
        self, machine: Machine, memory: RunMemory, source: TrajectorySource, begin: Begin
    ) -> End:
        """Run the machine to its end, with whatever carries out its actions and reports to it."""
        log = RunLog(self._log, machine, memory, lambda: self._cluster.kept)
        asked_before = memory.number
        driver = Driver(
            machine,
            clock=self._clock,
            save=self._save,
            tell=self._tell,
            log=log,
            mask=self._records.mask,
        )
        performer = performer_of(
            source.recipe,
            self._run_dir,
            self._cluster,
            self._slots,
            head=node_of(machine.plan.train[0]),
            renderer=source.renderer,
            episodes=source.performer(memory.episodes),
            images=source.images,
            models=self._models,
            planner=self._planning.planner(self._cluster.gpu_names),
            post=driver.post,
        )
        reports = HostEvents(self._cluster, performer, post=driver.post)

        def happened(event: HostEvent) -> None:
            reports.happened(event)
            if isinstance(event, Exited):  # the next process there may listen elsewhere
                log.outdated()

        background = Background()
        async with AsyncExitStack() as closing:  # each, whatever comes of the others
            closing.push_async_callback(performer.close)
            closing.push_async_callback(reports.close)
            closing.callback(background.cancel)
            closing.callback(self._cluster.events.unsubscribe, happened)
            self._cluster.events.subscribe(happened)
            first = await begin(performer)
            background.keep("reading the servers' counters", performer.servers.sample)
            background.keep("reading orders", performer.orders.watch)
            background.keep("counting what frozen models are asked", performer.models.count)
            self._interrupts.stop_machine(driver)
            again = partial(asked_again, machine, memory, asked_before, now=self._clock())
            return await driver.run(performer.perform, first=first, again=again)

    def _learn(self, slots: Iterable[Slot]) -> None:
        self._slots |= {slot.id: slot for slot in slots}

    def _save(self, record: Record) -> None:
        self._exports.recorded(record)
        self._records.save(record)

    def _tell(self, now: Seconds, event: events.Event) -> None:
        if isinstance(event, events.PlanChosen):
            self._learn(event.slots)
        if isinstance(event, events.CheckpointSaved):
            self._exports.saved(event)
        self._records.tell(now, event)

    # -- the end --------------------------------------------------------------------------------

    async def _leave_models(self) -> None:
        """The models of the last and the best checkpoint; without them the run has finished too."""
        leaving = asyncio.create_task(self._exports.leave())
        self._interrupts.break_off(leaving)
        try:
            await leaving
        except (asyncio.CancelledError, Exception) as error:  # noqa: BLE001  it has finished
            why = str(error) or "stopped"
            self._records.note(f"no model was written: {why}; {self._exports.hint}")

    def _ended(self, state: str, error: str) -> None:
        if self._attaching:
            return  # everything is as the killed controller left it
        self._records.end(state, error, at=self._clock())
        self._log.remove()

    async def _release(self) -> None:
        note = self._records.note
        self._interrupts.end_nothing(CLEARING)
        await self._exports.close()
        if self._attaching:
            what_next = f"libra run {self._records.row.recipe} --resume {self._run_dir}"
            note(
                f"what runs on the hosts goes on until its lease is over: {what_next}; "
                f"libra stop {self._run_dir}"
            )
            await self._cluster.leave()
            return
        for line in await self._cluster.close():
            note(f"not proved gone: {line}")
