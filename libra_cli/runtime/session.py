"""One run of ``libra run``, from an empty run directory to the proof that nothing is left.

    directory, journal -> hosts -> tokenizer, environment -> machine and driver -> end -> hosts

Whatever happens in between, the last part runs: every agent ends with all it has started, and the
journal says how the run ended. Ctrl-C asks the machine to stop (checkpoint, drain, stop); a second
one skips the checkpoint and the drain.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from libra_cli.config.errors import LibraError
from libra_cli.config.recipe import Recipe
from libra_cli.core import actions, events
from libra_cli.core.actions import End
from libra_cli.core.cluster.placement import initial_plan, slots_of
from libra_cli.core.machine import Machine, Resume, RunIdentity
from libra_cli.core.planning.planner import DecisionMaker, answer
from libra_cli.core.records import Record, RunRecord
from libra_cli.core.types import TrajectoryId, node_of
from libra_cli.runtime.driver import QUIET, Driver, Perform, describe
from libra_cli.runtime.episodes.player import Episodes, TurnResult
from libra_cli.runtime.episodes.renderer import Renderer
from libra_cli.runtime.hosts.agent_messages import (
    ConnectionLost,
    Exited,
    HostEvent,
    LeaseExpired,
    Reconnected,
)
from libra_cli.runtime.hosts.cluster import Cluster
from libra_cli.runtime.order_files import Orders
from libra_cli.runtime.store.journal import Journal
from libra_cli.runtime.trainer.processes import TrainerProcesses
from libra_cli.runtime.trainer.worker_processes import WorkerProcesses
from libra_cli.runtime.vllm.client import Sampling
from libra_cli.runtime.vllm.servers import Servers
from libra_cli.runtime.weights import weights_of


class Session:
    """Everything that lives exactly as long as a run."""

    def __init__(
        self,
        recipe: Recipe,
        run_dir: Path,
        journal: Journal,
        first: RunRecord,
        *,
        plan_with: Callable[[frozenset[str]], DecisionMaker],
        watch: Callable[[Record], None],
        note: Callable[[str], None],
    ) -> None:
        """``plan_with`` makes the planner of a run on GPUs of these names."""
        self._plan_with = plan_with
        self._recipe = recipe
        self._run_dir = run_dir
        self._journal = journal
        self._run = first
        self._watch = watch
        self._note = note
        self._plan = initial_plan(recipe)
        self._slots = {slot.id: slot for slot in slots_of(recipe)}
        self._cluster = Cluster(
            recipe,
            self._plan,
            run_id=first.id,
            token=secrets.token_urlsafe(32),
            save=self._save,
            clock=self._clock,
        )
        # Monotonic, so that no clock adjustment can turn a duration negative, yet readable.
        self._offset = time.time() - time.monotonic()
        self._driver: Driver | None = None
        self._interrupts = 0
        self._releasing = False

    def _clock(self) -> float:
        return self._offset + time.monotonic()

    def _save(self, record: Record) -> None:
        if isinstance(record, RunRecord):
            started = self._run.started_at
            record = self._run = replace(record, started_at=started)
        self._journal.save(record)
        self._watch(record)

    async def run(self, resume_from: str = "", trainer_incarnation: int = 0) -> RunRecord:
        """Run to the end; returns the run's last row.

        ``resume_from`` is a checkpoint, ``trainer_incarnation`` the last one of the run that goes
        on.

        Raises:
            LibraError: it could not be started, or failed in a way only a user can mend.
        """
        self._catch_signals()
        self._save(self._run)
        try:
            end = await self._whole(resume_from, trainer_incarnation)
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
        self._save(replace(self._run, state=state, error=error, waiting="", ended_at=self._clock()))

    async def _release(self) -> None:
        self._releasing = True
        for line in await self._cluster.close():
            self._note(f"not proved gone: {line}")

    def _catch_signals(self) -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
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
        elif not at_once:
            self._note("stopping")
            task.cancel()

    # -- the parts ------------------------------------------------------------------------------

    async def _whole(self, resume_from: str, trainer_incarnation: int) -> End:
        recipe, cluster = self._recipe, self._cluster
        await cluster.open(self._run_dir / "model")
        renderer = Renderer(self._run_dir / "model")
        episodes = Episodes(recipe.environment, renderer)
        try:
            await episodes.check(recipe.run.seed)
            resume = await self._find_resume(resume_from, trainer_incarnation)
            return await self._drive(renderer, episodes, resume)
        finally:
            episodes.close()

    async def _find_resume(self, checkpoint: str, trainer_incarnation: int) -> Resume | None:
        if not checkpoint:
            return None
        head = self._cluster.hosts[node_of(self._plan.train[0])]
        position = json.loads(await head.transport.get(f"{checkpoint}/ledger.json"))
        return Resume(checkpoint, position, trainer_incarnation)

    async def _drive(self, renderer: Renderer, episodes: Episodes, resume: Resume | None) -> End:
        recipe, cluster, run = self._recipe, self._cluster, self._run
        identity = RunIdentity(run.id, run.recipe, run.controller_pid, run.controller_started)
        slots = list(self._slots.values())
        machine = Machine(recipe, self._plan, slots, identity, resume=resume)
        performers: dict[type, Perform] = {}
        driver = Driver(machine, performers, clock=self._clock, save=self._save, tell=self._tell)
        head = self._slots[self._plan.train[0]].node
        planner = self._plan_with(cluster.gpu_names)
        weights = weights_of(cluster, origin=head)
        ranks = TrainerProcesses(cluster, self._slots, head=head, post=driver.post)
        workers = WorkerProcesses(cluster, weights, self._slots, post=driver.post)
        orders = Orders(self._run_dir, post=driver.post)
        servers = Servers(
            cluster,
            weights,
            self._slots,
            Sampling(
                recipe.rollout.temperature, recipe.rollout.top_p, tuple(renderer.stop_token_ids)
            ),
            post=driver.post,
        )
        performers |= _performers(servers, ranks, episodes, recipe.run.seed)
        performers |= _elastic(workers, ranks, servers, orders, planner)
        cluster.on_event = _Reporter(cluster, servers, ranks, workers, driver).happened
        background = [asyncio.create_task(work) for work in (servers.sample(), orders.watch())]
        self._driver = driver
        driver.post(events.RunStarted())
        try:
            return await driver.run()
        finally:
            cluster.on_event = lambda event: None
            for task in background:
                task.cancel()
            await servers.close()
            await workers.close()
            await ranks.close()

    def _tell(self, now: float, event: events.Event) -> None:
        if not isinstance(event, QUIET):
            self._journal.event(now, type(event).__name__, describe(event))


class _Reporter:
    """Turns what hosts report into events of the machine."""

    def __init__(
        self,
        cluster: Cluster,
        servers: Servers,
        ranks: TrainerProcesses,
        workers: WorkerProcesses,
        driver: Driver,
    ) -> None:
        self._cluster = cluster
        self._servers = servers
        self._ranks = ranks
        self._workers = workers
        self._driver = driver
        self._tasks: set[asyncio.Task[None]] = set()

    def happened(self, event: HostEvent) -> None:
        if isinstance(event, Exited):
            self._servers.exited(event)
            self._ranks.exited(event)
            self._workers.exited(event)
        elif isinstance(event, ConnectionLost):
            self._driver.post(events.NodeLost(event.node, event.reason))
        elif isinstance(event, LeaseExpired):
            self._returned(event.node, frozenset())
        elif isinstance(event, Reconnected):
            task = asyncio.create_task(self._take_stock(event.node))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _take_stock(self, node: str) -> None:
        try:
            states = await self._cluster.hosts[node].processes()
        except LibraError:
            return  # lost again; there will be another Reconnected, or a LeaseExpired
        alive = frozenset(state.process for state in states if state.state == "running")
        self._returned(node, alive)

    def _returned(self, node: str, alive: frozenset[str]) -> None:
        self._ranks.returned(node, alive)
        self._driver.post(events.NodeBack(node, alive))


def _performers(
    servers: Servers, ranks: TrainerProcesses, episodes: Episodes, run_seed: int
) -> Mapping[type, Perform]:
    """Who carries out what."""
    players = _Players(episodes, run_seed)
    return {
        actions.StartServer: servers.start,
        actions.CheckServer: servers.check,
        actions.StopServer: servers.stop,
        actions.SyncServer: servers.sync,
        actions.Generate: servers.generate,
        actions.StartTrainer: ranks.start,
        actions.StopTrainer: ranks.stop,
        actions.Accumulate: ranks.accumulate,
        actions.Checkpoint: ranks.checkpoint,
        actions.StartEpisode: players.start,
        actions.AdvanceEpisode: players.advance,
        actions.FinishEpisode: players.finish,
        actions.ForgetEpisode: players.forget,
        actions.Wake: _wake,
    }


def _elastic(
    workers: WorkerProcesses,
    ranks: TrainerProcesses,
    servers: Servers,
    orders: Orders,
    planner: DecisionMaker,
) -> Mapping[type, Perform]:
    """What the elastic pool adds to that."""

    async def train(action: actions.Train) -> events.Event | None:
        async with workers.handing_out(action) as shares:
            return await ranks.train(action, shares)

    async def look(action: actions.Propose) -> events.Event:
        return await asyncio.to_thread(answer, planner, action)

    return {
        actions.Train: train,
        actions.StartWorker: workers.start,
        actions.SyncWorker: workers.sync,
        actions.StopWorker: workers.stop,
        actions.AbortTurn: servers.abort,
        actions.Propose: look,
        actions.AnswerOrder: orders.answer,
    }


async def _wake(action: actions.Wake) -> events.Event:
    await asyncio.sleep(action.after_s)
    return events.TimerFired(action.name)


class _Players:
    """Environments, with their failures as events."""

    def __init__(self, episodes: Episodes, run_seed: int) -> None:
        self._episodes = episodes
        self._run_seed = run_seed

    async def start(self, action: actions.StartEpisode) -> events.Event:
        who = action.trajectory
        try:
            prompt_ids = await self._episodes.start(
                who, who.group, task_seed=self._run_seed, seed=episode_seed(self._run_seed, who)
            )
        except LibraError as error:
            return events.EpisodeFailed(who, str(error))
        return events.EpisodeStarted(who, prompt_ids)

    async def advance(self, action: actions.AdvanceEpisode) -> events.Event:
        who = action.trajectory
        try:
            answer = await self._episodes.advance(who, action.token_ids, action.finish_reason)
        except LibraError as error:
            return events.EpisodeFailed(who, str(error))
        return _advanced(who, answer)

    async def finish(self, action: actions.FinishEpisode) -> events.Event:
        try:
            answer = await self._episodes.finish(action.trajectory)
        except LibraError as error:
            return events.EpisodeFailed(action.trajectory, str(error))
        return _advanced(action.trajectory, answer)

    async def forget(self, action: actions.ForgetEpisode) -> None:
        self._episodes.forget(action.trajectory)


def _advanced(who: TrajectoryId, answer: TurnResult) -> events.EpisodeAdvanced:
    return events.EpisodeAdvanced(
        who, answer.observation_ids, answer.returns, answer.done, answer.reward
    )


def episode_seed(run_seed: int, who: TrajectoryId) -> int:
    """The same for the same trajectory in every run of this seed, different for its siblings."""
    digest = hashlib.blake2b(f"{run_seed} {who}".encode(), digest_size=6).digest()
    return int.from_bytes(digest, "big")
