"""Plays the evaluations of a recipe without a run: servers on its hosts, and no trainer.

Every seat of every server has one player at a time, which plays a trajectory to its end where it
began, so that its context stays cached. Servers generate with the weights they were started with.
What a trajectory is, when it is cut and what the rewards say is as in a run (``core.evaluation``).
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from libra_cli.config.errors import LibraError, ProcessError
from libra_cli.config.frozen_models import ModelsAddress
from libra_cli.config.recipe import Recipe
from libra_cli.core.actions import Generate, StartServer
from libra_cli.core.evaluation.ledger import EvaluationLedger, evaluation_plans
from libra_cli.core.events import Event, ServerFailed, ServerStarted, TurnGenerated
from libra_cli.core.frozen.slots import frozen_slots
from libra_cli.core.launch.placement import initial_plan, slots_of
from libra_cli.core.records import EvaluationRecord, Record
from libra_cli.core.rollout.groups import new_trajectory
from libra_cli.core.rollout.turns import append_turn, extend_masked, go_on_at
from libra_cli.core.types import STARTED_WITH, Bucket, SlotId, Tokens, Trajectory, node_of
from libra_cli.runtime.agents.episodes import AgentEpisodes
from libra_cli.runtime.credentials.run_secrets import RunSecrets
from libra_cli.runtime.episodes.performer import EpisodePlayer, episode_seed
from libra_cli.runtime.episodes.player import Episodes
from libra_cli.runtime.episodes.renderer import Renderer
from libra_cli.runtime.evaluation.players import EvaluatedEpisodes, SamplingOf, evaluation_players
from libra_cli.runtime.frozen.models import FrozenModels
from libra_cli.runtime.hosts.agent_messages import Exited, HostEvent
from libra_cli.runtime.hosts.cluster import Cluster
from libra_cli.runtime.rollout.servers import Servers
from libra_cli.runtime.store.images import ImageStore
from libra_cli.runtime.weights.versions import weights_of

INCARNATION = 1
AGAIN_S = 1.0
"""Seconds after which a turn is asked for again whose server did not answer; chosen."""


class StandaloneEvaluation:
    """One call of ``libra eval``. Raises LibraError for whatever fails but an environment."""

    def __init__(
        self,
        recipe: Recipe,
        work: Path,
        *,
        told: Callable[[EvaluationRecord], None],
        note: Callable[[str], None],
        ending: Callable[[], None] = lambda: None,
    ) -> None:
        """``told`` is given the row of an evaluation whenever one of its trajectories ends, and
        ``ending`` is called once nothing is left to do but to stop what runs.
        """
        self._recipe = recipe
        self._work = work
        self._told = told
        self._note = note
        self._ending = ending
        self._plan = initial_plan(recipe)
        self._cluster = Cluster(
            recipe,
            self._plan,
            run_id=f"eval-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}",
            secrets=RunSecrets.new(),
            save=_keep_nothing,
            clock=time.time,
            note=note,
        )
        self._models = FrozenModels(
            frozen_slots(recipe.models, recipe.nodes), self._cluster, _keep_nothing
        )
        plans = [replace(plan, at_start=True) for plan in evaluation_plans(recipe)]
        retries = max(one.retries for one in recipe.environment)
        self._ledger = EvaluationLedger(plans, retries, new_trajectory)
        self._rows: dict[int, EvaluationRecord] = {}
        self._requests = 0
        self._failure: LibraError | None = None
        self._images = ImageStore(work)

    async def run(self) -> list[EvaluationRecord]:
        """Start everything, play all evaluations, and stop everything.

        Raises:
            LibraError: a host or a server failed, or an environment cannot be begun.
        """
        try:
            self._note("connecting to the hosts")
            async with self._cluster.events.all_needed():
                await self._cluster.open(self._work / "model")
                async with self._models.opened() as address:
                    self._recipe = self._recipe.served_at(address)
                    await self._evaluate(address)
        finally:
            self._ending()
            self._cluster.events.unsubscribe(self._happened)
            for line in await self._cluster.close():
                self._note(f"not proved gone: {line}")
        return list(self._rows.values())

    def lacks_model(self, node: str) -> bool:
        """Whether a host was looked at, and the model's directory is not there."""
        report = self._cluster.reports.get(node)
        facts = report.facts if report is not None else None
        return facts is not None and self._recipe.model.path not in facts.paths

    async def _evaluate(self, models: ModelsAddress) -> None:
        """Start the servers of the policy, and play. Raises LibraError."""
        renderer = Renderer(
            self._work / "model",
            template_args=self._recipe.model.template_args,
            tool_format=self._recipe.model.tool_format,
            images=self._recipe.model.images,
        )
        self._player = self._players(renderer, models)
        try:
            await self._player.prepare(self._note)
            await self._player.check(self._recipe.run.seed)
            stops, vocabulary = tuple(renderer.stop_token_ids), renderer.vocabulary
            await self._serve(SamplingOf(self._recipe, stops, vocabulary=vocabulary))
            await self._play_all()
        finally:
            await self._player.close()

    def _players(self, renderer: Renderer, models: ModelsAddress) -> EpisodePlayer:
        recipe = self._recipe.with_environments(self._cluster.that_play.counted)
        open_on = self._cluster.open_stream
        trained: EpisodePlayer
        if recipe.agent is not None:
            trained = AgentEpisodes(
                recipe, renderer, self._work, note=self._note, open_on=open_on, models=models
            )
        else:
            trained = Episodes(
                recipe.environment,
                recipe.environment_labels,
                renderer,
                images=self._images,
                open_on=open_on,
            )
        evaluated = evaluation_players(
            recipe, trained, renderer, images=self._images, open_on=open_on
        )
        return EvaluatedEpisodes(recipe, trained, evaluated)

    # -- servers --------------------------------------------------------------------------------

    async def _serve(self, sampling: SamplingOf) -> None:
        self._note("starting the servers")
        self._servers = Servers(
            self._recipe,
            self._cluster,
            weights_of(
                self._cluster, self._recipe.weight_sync, origin=node_of(self._plan.train[0])
            ),
            {slot.id: slot for slot in slots_of(self._recipe)},
            sampling,
            images=self._images,
            post=self._post,
        )
        self._cluster.events.subscribe(self._happened)
        await asyncio.gather(*(self._start(*pair) for pair in self._plan.servers))

    async def _start(self, slot: SlotId, bucket: Bucket) -> None:
        event = await self._servers.start(StartServer(slot, INCARNATION, bucket))
        if not isinstance(event, ServerStarted):
            raise ProcessError(f"{slot}: {getattr(event, 'reason', 'the server did not start')}")

    def _post(self, event: Event) -> None:
        if isinstance(event, ServerFailed):
            self._failure = ProcessError(f"{event.slot}: {event.reason}")

    def _happened(self, event: HostEvent) -> None:
        if isinstance(event, Exited):
            self._servers.processes.exited(event)

    # -- trajectories ---------------------------------------------------------------------------

    async def _play_all(self) -> None:
        now = time.time()
        for row in self._ledger.begin_due(STARTED_WITH, target=0, now=now):
            self._tell(row)
        seats = [slot for slot, bucket in self._plan.servers for _ in range(bucket.max_num_seqs)]
        try:
            async with asyncio.TaskGroup() as group:
                for slot in seats:
                    group.create_task(self._play_at(slot))
        except* LibraError as errors:
            raise errors.exceptions[0] from None
        finally:
            await self._servers.processes.close()

    async def _play_at(self, slot: SlotId) -> None:
        """Play one trajectory after the other at a seat of a server."""
        while (trajectory := self._ledger.next_trajectory(time.time())) is not None:
            again: Trajectory | None = trajectory
            while again is not None:
                again = await self._play(again, slot)

    async def _play(self, trajectory: Trajectory, slot: SlotId) -> Trajectory | None:
        """Play one; the trajectory that is to be played in its place if it broke."""
        who = trajectory.id
        try:
            reward = await self._episode(trajectory, slot)
        except LibraError as error:
            if self._failure is not None:
                raise self._failure from None
            again = self._ledger.begin_again(who, now=time.time(), counts=True)
            if again is None:
                self._note(f"task {who} failed too often: {error}")
                self._tell(self._ledger.give_up(who, now=time.time()))
            return again
        finally:
            self._player.forget(who)
        self._tell(self._ledger.finish(trajectory, reward, now=time.time()))
        return None

    async def _episode(self, trajectory: Trajectory, slot: SlotId) -> float:
        """Play one episode and return its reward. Raises LibraError."""
        who, player = trajectory.id, self._player
        seed = episode_seed(self._recipe.run.seed, who)
        observed = await player.start(who, who.group, task_seed=self._recipe.run.seed, seed=seed)
        while True:
            trajectory.token_ids.extend(observed)
            extend_masked(trajectory, len(observed))
            turn = await self._turn(trajectory, slot)
            append_turn(trajectory, turn)
            trajectory.turns += 1
            answer = await player.advance(who, turn.token_ids, turn.finish_reason, turn.logprobs)
            kept = answer.branch.kept if answer.branch else len(trajectory.token_ids)
            if not answer.done and self._is_cut(trajectory, kept + len(answer.observation_ids)):
                answer = await player.finish(who)
            if answer.done:
                assert answer.reward is not None, f"{who} is done without a reward"
                return answer.reward
            if answer.branch is not None:
                go_on_at(trajectory, answer.branch)
            observed = answer.observation_ids

    def _is_cut(self, trajectory: Trajectory, context: int) -> bool:
        most = self._recipe.rollout.max_turns
        return context >= self._recipe.model.max_len or trajectory.turns >= most

    async def _turn(self, trajectory: Trajectory, slot: SlotId) -> TurnGenerated:
        """Have a turn generated, again where its server does not answer. Raises LibraError.

        One that has ended, or whose host is given up, breaks off the whole evaluation, but that is
        known only later: until then trajectories would fail one after the other.
        """
        left = self._recipe.model.max_len - len(trajectory.token_ids)
        if left <= 0:
            raise ProcessError(f"the prompt of {trajectory.id} is longer than model.max_len")
        give_up = 0.0
        while True:
            turn = await self._servers.generate(self._order(trajectory, slot, left))
            if isinstance(turn, TurnGenerated):
                return turn
            give_up = give_up or time.monotonic() + self._recipe.run.lease_s
            gone = self._failure is not None or time.monotonic() > give_up
            if gone or not turn.unreachable:
                raise ProcessError(f"{slot}: {turn.reason}")
            await asyncio.sleep(AGAIN_S)

    def _order(self, trajectory: Trajectory, slot: SlotId, left: Tokens) -> Generate:
        """Return the order of a turn, of at most ``left`` tokens."""
        self._requests += 1
        most = self._recipe.rollout.max_turn_tokens
        wished = self._player.turn_limit_of(trajectory.id)
        return Generate(
            request=self._requests,
            trajectory=trajectory.id,
            slot=slot,
            incarnation=INCARNATION,
            prompt_ids=trajectory.token_ids[:],
            max_tokens=min(wished or most, most, left),
            cache_key=STARTED_WITH,
            priority=0,
        )

    def _tell(self, row: EvaluationRecord) -> None:
        self._rows[row.evaluation] = row
        self._told(row)


def _keep_nothing(record: Record) -> None:
    pass
