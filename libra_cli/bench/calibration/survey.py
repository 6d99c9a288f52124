"""``libra bench --calibrate``: a recipe's servers and trainer, measured where they run.

    up        hosts, servers, trainer: how long each takes to start
    serving   every load of ``costs.loads``, on all servers of a shape at once, there and back
    training  batches of several sizes; after each, the new version on every server
    sharing   the trainer at work beside loaded servers: how much both are slowed down
    down      everything, whatever happened

All times are taken here, at the controller, through the very calls a run makes, so the way to the
servers and what the controller does for a turn are part of them. Rewards of the made-up batches are
equal, so nothing is learned from them.

Everything is measured in several rounds, and the median counts. A turn ends with a tool call that
does nothing: on its way to a thread and back it meets the same competition for cores as in a run.
The trainer is measured beside idle servers that have just worked, since vLLM looks for work without
sleeping for a second after the last.

Guarantee: nothing is left running, Ctrl-C included. Limit: a host that is busy with other things
all the while is measured as slow; machine and environment of a run cost the controller some more.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from statistics import fmean, median

from libra_cli.bench.calibration.harness import MeasurementHarness, SyncTiming
from libra_cli.bench.calibration.players import Players, playing, random_tokens
from libra_cli.bench.config import Progress
from libra_cli.config.errors import StoppedByUser
from libra_cli.config.recipe import Recipe
from libra_cli.core.actions import TrainSample
from libra_cli.core.costs.loads import (
    Batch,
    ServerLoad,
    server_loads,
    sharing_loads,
    training_batches,
)
from libra_cli.core.costs.mixtures import refuse_mixture
from libra_cli.core.types import Seconds, SlotId, Tokens, Trajectory, TrajectoryId
from libra_cli.runtime.interrupts import CLEARING, Interrupts
from libra_cli.runtime.rollout.connection import ServerFacts

WINDOW_S: Seconds = 1.5
"""Seconds that a load is watched at least; this and what follows chosen, not measured."""
ROUNDS = 3
"""Times that everything is measured, in alternating order."""
CHUNK_TOKENS: Tokens = 2048
"""Most tokens of a step where the recipe gives vLLM no --max-num-batched-tokens: its default."""
CHUNK_FLAG = "--max-num-batched-tokens"
BESIDE_STEPS = 6
"""Training steps that must end beside a load."""


@dataclass(frozen=True, slots=True)
class MeasurementBudget:
    """The extent of a survey: seconds a load, rounds over all of
    them, and every how many-th load.
    """

    window_s: Seconds = WINDOW_S
    rounds: int = ROUNDS
    every: int = 1


@dataclass(frozen=True, slots=True)
class ContentionMeasurement:
    """A load, and a training step, alone and while the other works."""

    load: ServerLoad
    turn_alone_s: Seconds
    turn_beside_s: Seconds
    step_alone_s: Seconds
    step_beside_s: Seconds


@dataclass(frozen=True, slots=True)
class ShapeMeasured:
    """Servers of one shape: seconds of a turn under each load, as it really was."""

    tensor_parallel: int
    facts: ServerFacts
    servers: int
    start_s: Seconds
    turns: tuple[tuple[ServerLoad, Seconds], ...]


@dataclass(frozen=True, slots=True)
class CalibrationMeasurement:
    """The measurements that a profile is made of."""

    recipe: Recipe
    shapes: tuple[ShapeMeasured, ...]
    batches: tuple[tuple[Batch, Seconds], ...]
    ranks: int
    syncs: tuple[SyncTiming, ...]
    sharing: tuple[ContentionMeasurement, ...]
    trainer_start_s: Seconds
    stop_s: Seconds
    #: Facts of every host, by node; the model's config.json; the bytes of a published version.
    hosts: dict[str, dict[str, object]]
    model: dict[str, object]
    model_bytes: int
    chunk_tokens: Tokens
    at: Seconds


def measure(recipe: Recipe, budget: MeasurementBudget, *, note: Progress) -> CalibrationMeasurement:
    """Start servers and trainer, measure them, and stop them again.

    Raises:
        LibraError: a host, a server or the trainer failed; none of them is left running.
    """
    return asyncio.run(_measure(recipe, budget, note))


async def _measure(
    recipe: Recipe, budget: MeasurementBudget, note: Progress
) -> CalibrationMeasurement:
    interrupts = Interrupts(note)
    interrupts.end_task()
    with tempfile.TemporaryDirectory(prefix="libra-calibrate-") as work:
        harness = MeasurementHarness(recipe, Path(work), note=note)
        try:
            await harness.open()
            measured = await _Survey(harness, budget, note).all()
        except asyncio.CancelledError:
            raise StoppedByUser("stopped; nothing was written") from None
        finally:
            interrupts.end_nothing(CLEARING)
            note("stopping everything")
            began = time.monotonic()
            await harness.close()
        return replace(measured, stop_s=time.monotonic() - began)


class _Survey:
    """Takes the measurements of a recipe's servers and trainer, in order."""

    def __init__(
        self, harness: MeasurementHarness, budget: MeasurementBudget, note: Progress
    ) -> None:
        self._harness = harness
        self._budget = budget
        self._note = note
        self._random = Random(0)
        model = json.loads((harness.model_files / "config.json").read_text())
        refuse_mixture(harness.recipe.model.path or harness.model_files.name, model)
        self._model: dict[str, object] = model
        self._vocabulary = int(model.get("vocab_size") or model["text_config"]["vocab_size"])

    async def all(self) -> CalibrationMeasurement:
        """Take and return all measurements but the time of stopping, which is 0 here."""
        harness, recipe = self._harness, self._harness.recipe
        assert harness.published is not None
        shapes = tuple([await self._shape(degree) for degree in self._degrees()])
        batches, syncs = await self._training()
        sharing = [s for degree in self._degrees() for s in await self._sharing(degree, batches)]
        return CalibrationMeasurement(
            recipe=recipe,
            shapes=shapes,
            batches=tuple(batches),
            ranks=len(harness.train_slots),
            syncs=tuple(syncs),
            sharing=tuple(sharing),
            trainer_start_s=harness.trainer_start_s,
            stop_s=0.0,
            hosts={node: json.loads(text) for node, text in harness.hosts.items()},
            model=self._model,
            model_bytes=harness.published.bytes,
            chunk_tokens=chunk_tokens(recipe.rollout.vllm_args),
            at=time.time(),
        )

    def _degrees(self) -> list[int]:
        return sorted({bucket.tensor_parallel for bucket in self._harness.buckets.values()})

    def _seats(self, degree: int) -> dict[SlotId, int]:
        """The seats of each server of a shape."""
        buckets = self._harness.buckets.items()
        return {s: b.max_num_seqs for s, b in buckets if b.tensor_parallel == degree}

    # -- serving --------------------------------------------------------------------------------

    async def _shape(self, degree: int) -> ShapeMeasured:
        harness, seats = self._harness, self._seats(degree)
        facts = await harness.facts(next(iter(seats)))
        most, max_len = max(seats.values()), harness.recipe.model.max_len
        loads = list(server_loads(most, max_len, facts.kv_tokens))[:: self._budget.every]
        rounds: dict[ServerLoad, list[tuple[ServerLoad, Seconds]]] = {load: [] for load in loads}
        for number in range(self._budget.rounds):
            for at, load in enumerate(loads if number % 2 == 0 else loads[::-1], 1):
                where = f"round {number + 1} of {self._budget.rounds}, {at} of {len(loads)}"
                self._note(f"serving ({where}): {load}")
                rounds[load].append(await self._steady(degree, load))
        turns = [_median(found) for found in rounds.values()]
        return ShapeMeasured(
            tensor_parallel=degree,
            facts=facts,
            servers=len(seats),
            start_s=fmean(harness.server_start_s[slot] for slot in seats),
            turns=tuple(turns),
        )

    async def _steady(
        self,
        degree: int,
        load: ServerLoad,
        *,
        window_s: Seconds = 0.0,
        enough: Callable[[], bool] = lambda: True,
    ) -> tuple[ServerLoad, Seconds]:
        """Seconds of a turn, mean over the servers with room for the load, and what it was."""
        seats = self._seats(degree)
        groups = {
            slot: Players(
                self._harness,
                slot,
                replace(load, players=min(load.players, room)),
                Random(self._random.random()),
                self._vocabulary,
            )
            for slot, room in seats.items()
        }
        window_s = max(window_s, self._budget.window_s)
        async with playing(groups.values()):
            await asyncio.gather(*(players.warm() for players in groups.values()))
            full = [players for players in groups.values() if players.load.players == load.players]
            await asyncio.gather(*(players.watch(window_s, enough) for players in full))
        generate = fmean(players.generated for players in full)
        return replace(load, generate=generate), fmean(players.turn_s for players in full)

    # -- training -------------------------------------------------------------------------------

    async def _training(self) -> tuple[list[tuple[Batch, Seconds]], list[SyncTiming]]:
        harness, recipe = self._harness, self._harness.recipe
        batches = list(training_batches(recipe.trajectories_per_step, recipe.model.max_len))
        await harness.train(self._samples(batches[-1]))  # the first one is always slow
        found: dict[Batch, list[Seconds]] = {batch: [] for batch in batches}
        syncs: list[SyncTiming] = []
        for number in range(self._budget.rounds):
            for batch in batches if number % 2 == 0 else batches[::-1]:
                self._note(f"training: {batch}")
                found[batch].append(await harness.train(self._samples(batch)))
                syncs += await harness.sync()
        return [(batch, median(times)) for batch, times in found.items()], syncs

    def _samples(self, batch: Batch) -> list[TrainSample]:
        size = self._harness.recipe.rollout.group_size
        return [
            TrainSample(self._trajectory(*divmod(number, size), batch.length), 0, False, ())
            for number in range(batch.trajectories)
        ]

    def _trajectory(self, group: int, member: int, length: Tokens) -> Trajectory:
        prompt = length // 2
        made = Trajectory(TrajectoryId(group, member), reward=0.0)
        made.token_ids.extend(random_tokens(self._random, self._vocabulary, length))
        made.logprobs.extend([0.0] * prompt + [-1.0] * (length - prompt))
        made.loss_mask.extend([0] * prompt + [1] * (length - prompt))
        return made

    # -- both -----------------------------------------------------------------------------------

    async def _sharing(
        self, degree: int, batches: Sequence[tuple[Batch, Seconds]]
    ) -> list[ContentionMeasurement]:
        """Each load with the trainer idle, and with it at work on a usual batch all the while."""
        most = max(self._seats(degree).values())
        batch = sorted({b for b, _ in batches}, key=lambda b: (b.trajectories, -b.length))[-1]
        alone_s = median(seconds for b, seconds in batches if b == batch)
        loads = list(sharing_loads(most, self._harness.recipe.model.max_len))
        rounds: dict[ServerLoad, list[tuple[Seconds, Seconds, Seconds]]] = {
            load: [] for load in loads
        }
        for load in loads * self._budget.rounds:
            self._note(f"serving and training: {load}, {batch}")
            rounds[load].append(await self._beside(degree, load, batch))
        shared = []
        for load, found in rounds.items():
            turn_alone_s, turn_beside_s, step_s = map(median, zip(*found, strict=True))
            shared.append(ContentionMeasurement(load, turn_alone_s, turn_beside_s, alone_s, step_s))
        return shared

    async def _beside(
        self, degree: int, load: ServerLoad, batch: Batch
    ) -> tuple[Seconds, Seconds, Seconds]:
        """Seconds of a turn alone and beside training, and of a training step beside the load."""
        window_s = 2 * self._budget.window_s
        _, before_s = await self._steady(degree, load, window_s=window_s)
        steps: list[Seconds] = []
        training = asyncio.create_task(self._train_on(batch, steps))
        try:
            _, beside_s = await self._steady(
                degree,
                load,
                window_s=window_s,
                enough=lambda: training.done() or len(steps) > BESIDE_STEPS,
            )
        finally:
            training.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await training
        return before_s, beside_s, fmean(steps[1:] or steps)

    async def _train_on(self, batch: Batch, steps: list[Seconds]) -> None:
        """Take step after step until cancelled; the step under way then is waited for."""
        samples = self._samples(batch)
        while True:
            step = asyncio.ensure_future(self._harness.train(samples))
            try:
                steps.append(await asyncio.shield(step))
            except asyncio.CancelledError:
                await step
                raise


def _median(rounds: Sequence[tuple[ServerLoad, Seconds]]) -> tuple[ServerLoad, Seconds]:
    """The middle one by its seconds a token; of an even number the faster of two."""
    ordered = sorted(rounds, key=lambda turn: turn[1] / turn[0].generate)
    return ordered[(len(ordered) - 1) // 2]


def chunk_tokens(vllm_args: Sequence[str]) -> Tokens:
    """The most tokens of a step: as the recipe's arguments say, else vLLM's usual number."""
    for at, argument in enumerate(vllm_args):
        name, _, value = argument.partition("=")
        if name == CHUNK_FLAG:
            value = value or (vllm_args[at + 1] if at + 1 < len(vllm_args) else "")
            if value.isdigit():
                return int(value)
    return CHUNK_TOKENS
