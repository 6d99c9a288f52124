"""``libra bench --calibrate``: a recipe's servers and trainer, measured where they run.

    up        hosts, servers, trainer: how long each takes to start
    serving   every load of ``pricing.loads``, on all servers of a shape at once, there and back
    training  batches of several sizes; after each, the new version on every server
    sharing   the trainer at work beside loaded servers: how much both are slowed down
    down      everything, whatever happened

All times are taken here, at the controller, through the very calls a run makes, so the way to the
servers and what the controller does for a turn are part of them. Rewards of the made-up batches are
equal, so nothing is learned from them.

Everything is measured in several rounds, and the median counts. A turn ends with a tool call that
does nothing: on its way to a thread and back it meets the same crowd for cores as in a run. The
trainer is measured beside idle servers that have just worked, since vLLM looks for work without
sleeping for a second after the last.

Guarantee: nothing is left running, Ctrl-C included. Limit: a host that is busy with other things
all the while is measured as slow; machine and environment of a run cost the controller some more.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import tempfile
import time
from array import array
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from statistics import fmean, median

from libra_cli.bench.calibration.harness import MeasurementHarness, Synced
from libra_cli.config.errors import LibraError
from libra_cli.config.recipe import Recipe
from libra_cli.core.actions import TrainSample
from libra_cli.core.costs.loads import (
    Batch,
    ServerLoad,
    server_loads,
    sharing_loads,
    training_batches,
)
from libra_cli.core.types import Seconds, SlotId, Tokens, Trajectory, TrajectoryId
from libra_cli.runtime.rollout.connection import ServerFacts

WINDOW_S: Seconds = 1.5
"""How long a load is watched at least."""
LONGEST = 20
"""Windows that a load may take until enough turns have ended."""
TURNS_A_PLAYER = 2
LEAST_TURNS = 12
ROUNDS = 3
"""How often everything is measured, in alternating order."""
CHUNK_TOKENS: Tokens = 2048
"""Of a step, where the recipe gives vLLM no --max-num-batched-tokens."""
CHUNK_FLAG = "--max-num-batched-tokens"
BESIDE_STEPS = 6
"""Training steps that must end beside a load."""

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Effort:
    """How much to measure: seconds a load, rounds over all of them, and every how many-th load."""

    window_s: Seconds = WINDOW_S
    rounds: int = ROUNDS
    every: int = 1


@dataclass(frozen=True, slots=True)
class Sharing:
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
    """All there is to make a profile of."""

    recipe: Recipe
    shapes: tuple[ShapeMeasured, ...]
    batches: tuple[tuple[Batch, Seconds], ...]
    ranks: int
    syncs: tuple[Synced, ...]
    sharing: tuple[Sharing, ...]
    trainer_start_s: Seconds
    stop_s: Seconds
    #: Facts of every host, by node; the model's config.json; the bytes of a published version.
    hosts: dict[str, dict[str, object]]
    model: dict[str, object]
    model_bytes: int
    chunk_tokens: Tokens
    at: Seconds


def calibrate(recipe: Recipe, effort: Effort, *, note: Progress) -> CalibrationMeasurement:
    """Bring everything up, measure, and take it down again.

    Raises:
        LibraError: a host, a server or the trainer failed; nothing of it is left.
    """
    return asyncio.run(_calibrate(recipe, effort, note))


async def _calibrate(recipe: Recipe, effort: Effort, note: Progress) -> CalibrationMeasurement:
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    with tempfile.TemporaryDirectory(prefix="libra-calibrate-") as work:
        rig = MeasurementHarness(recipe, Path(work), note=note)
        try:
            await rig.open()
            measured = await _Survey(rig, effort, note).all()
        except asyncio.CancelledError:
            raise LibraError("stopped; nothing was written") from None
        finally:
            note("stopping everything")
            began = time.monotonic()
            await rig.close()
        return replace(measured, stop_s=time.monotonic() - began)


class _Survey:
    """The measurements, in order."""

    def __init__(self, rig: MeasurementHarness, effort: Effort, note: Progress) -> None:
        self._rig = rig
        self._effort = effort
        self._note = note
        self._random = Random(0)
        model = json.loads((rig.model_files / "config.json").read_text())
        self._model: dict[str, object] = model
        self._vocabulary = int(model.get("vocab_size") or model["text_config"]["vocab_size"])

    async def all(self) -> CalibrationMeasurement:
        """Everything but the stopping."""
        rig, recipe = self._rig, self._rig.recipe
        assert rig.published is not None
        shapes = tuple([await self._shape(degree) for degree in self._degrees()])
        batches, syncs = await self._training()
        sharing = [s for degree in self._degrees() for s in await self._sharing(degree, batches)]
        return CalibrationMeasurement(
            recipe=recipe,
            shapes=shapes,
            batches=tuple(batches),
            ranks=len(rig.train_slots),
            syncs=tuple(syncs),
            sharing=tuple(sharing),
            trainer_start_s=rig.trainer_start_s,
            stop_s=0.0,
            hosts={node: json.loads(text) for node, text in rig.hosts.items()},
            model=self._model,
            model_bytes=rig.published.bytes,
            chunk_tokens=chunk_tokens(recipe.rollout.vllm_args),
            at=time.time(),
        )

    def _degrees(self) -> list[int]:
        return sorted({bucket.tensor_parallel for bucket in self._rig.buckets.values()})

    def _seats(self, degree: int) -> dict[SlotId, int]:
        """Of the servers of a shape."""
        buckets = self._rig.buckets.items()
        return {s: b.max_num_seqs for s, b in buckets if b.tensor_parallel == degree}

    # -- serving --------------------------------------------------------------------------------

    async def _shape(self, degree: int) -> ShapeMeasured:
        rig, seats = self._rig, self._seats(degree)
        facts = await rig.facts(next(iter(seats)))
        most, max_len = max(seats.values()), rig.recipe.model.max_len
        loads = list(server_loads(most, max_len, facts.kv_tokens))[:: self._effort.every]
        rounds: dict[ServerLoad, list[tuple[ServerLoad, Seconds]]] = {load: [] for load in loads}
        for number in range(self._effort.rounds):
            for at, load in enumerate(loads if number % 2 == 0 else loads[::-1], 1):
                where = f"round {number + 1} of {self._effort.rounds}, {at} of {len(loads)}"
                self._note(f"serving ({where}): {load}")
                rounds[load].append(await self._steady(degree, load))
        turns = [_median(found) for found in rounds.values()]
        return ShapeMeasured(
            tensor_parallel=degree,
            facts=facts,
            servers=len(seats),
            start_s=fmean(rig.server_start_s[slot] for slot in seats),
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
        crowds = {
            slot: _Crowd(
                self._rig,
                slot,
                replace(load, players=min(load.players, room)),
                Random(self._random.random()),
                self._vocabulary,
            )
            for slot, room in seats.items()
        }
        window_s = max(window_s, self._effort.window_s)
        async with _playing(crowds.values()):
            await asyncio.gather(*(crowd.warm() for crowd in crowds.values()))
            full = [crowd for crowd in crowds.values() if crowd.load.players == load.players]
            await asyncio.gather(*(crowd.watch(window_s, enough) for crowd in full))
        generate = fmean(crowd.generated for crowd in full)
        return replace(load, generate=generate), fmean(crowd.turn_s for crowd in full)

    # -- training -------------------------------------------------------------------------------

    async def _training(self) -> tuple[list[tuple[Batch, Seconds]], list[Synced]]:
        rig, recipe = self._rig, self._rig.recipe
        batches = list(training_batches(recipe.trajectories_per_step, recipe.model.max_len))
        await rig.train(self._samples(batches[-1]))  # the first one is always slow
        found: dict[Batch, list[Seconds]] = {batch: [] for batch in batches}
        syncs: list[Synced] = []
        for number in range(self._effort.rounds):
            for batch in batches if number % 2 == 0 else batches[::-1]:
                self._note(f"training: {batch}")
                found[batch].append(await rig.train(self._samples(batch)))
                syncs += await rig.sync()
        return [(batch, median(times)) for batch, times in found.items()], syncs

    def _samples(self, batch: Batch) -> list[TrainSample]:
        size = self._rig.recipe.rollout.group_size
        return [
            TrainSample(self._trajectory(*divmod(number, size), batch.length), 0, fresh=False)
            for number in range(batch.trajectories)
        ]

    def _trajectory(self, group: int, member: int, length: Tokens) -> Trajectory:
        prompt = length // 2
        made = Trajectory(TrajectoryId(group, member), reward=0.0)
        made.token_ids.extend(_tokens(self._random, self._vocabulary, length))
        made.logprobs.extend([0.0] * prompt + [-1.0] * (length - prompt))
        made.loss_mask.extend([0] * prompt + [1] * (length - prompt))
        return made

    # -- both -----------------------------------------------------------------------------------

    async def _sharing(
        self, degree: int, batches: Sequence[tuple[Batch, Seconds]]
    ) -> list[Sharing]:
        """Each load with the trainer idle, and with it at work on a usual batch all the while."""
        most = max(self._seats(degree).values())
        batch = sorted({b for b, _ in batches}, key=lambda b: (b.trajectories, -b.length))[-1]
        alone_s = median(seconds for b, seconds in batches if b == batch)
        loads = list(sharing_loads(most, self._rig.recipe.model.max_len))
        rounds: dict[ServerLoad, list[tuple[Seconds, Seconds, Seconds]]] = {
            load: [] for load in loads
        }
        for load in loads * self._effort.rounds:
            self._note(f"serving and training: {load}, {batch}")
            rounds[load].append(await self._beside(degree, load, batch))
        shared = []
        for load, found in rounds.items():
            turn_alone_s, turn_beside_s, step_s = map(median, zip(*found, strict=True))
            shared.append(Sharing(load, turn_alone_s, turn_beside_s, alone_s, step_s))
        return shared

    async def _beside(
        self, degree: int, load: ServerLoad, batch: Batch
    ) -> tuple[Seconds, Seconds, Seconds]:
        """Seconds of a turn alone and beside training, and of a training step beside the load."""
        window_s = 2 * self._effort.window_s
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
        """Step after step; the one under way when it is cancelled is waited for."""
        samples = self._samples(batch)
        while True:
            step = asyncio.ensure_future(self._rig.train(samples))
            try:
                steps.append(await asyncio.shield(step))
            except asyncio.CancelledError:
                await step
                raise


def _median(rounds: Sequence[tuple[ServerLoad, Seconds]]) -> tuple[ServerLoad, Seconds]:
    """The middle one by its seconds a token; of an even number the faster of two."""
    ordered = sorted(rounds, key=lambda turn: turn[1] / turn[0].generate)
    return ordered[(len(ordered) - 1) // 2]


class _Crowd:
    """The players of one load at one server."""

    def __init__(
        self,
        rig: MeasurementHarness,
        slot: SlotId,
        load: ServerLoad,
        random: Random,
        vocabulary: int,
    ) -> None:
        self.load = load
        self._rig = rig
        self._slot = slot
        self._random = random
        self._vocabulary = vocabulary
        self._stopping = False
        self._turns = 0
        self._tokens = 0
        self._ended_at: Seconds = 0.0
        self._all_begun = asyncio.Event()
        self._begun = 0
        #: Seconds and generated tokens of a turn, known after ``watch``.
        self.turn_s: Seconds = 0.0
        self.generated = 0.0

    def stop(self) -> None:
        """No more turns."""
        self._stopping = True

    async def play(self) -> None:
        """One player: turns at the end of the same cached context, until told to stop."""
        prefix = _tokens(self._random, self._vocabulary, self.load.cached)
        await self._turn(prefix)
        self._begun += 1
        if self._begun == self.load.players:
            self._all_begun.set()
        while not self._stopping:
            tokens = await self._turn(prefix)
            await self._rig.tool()
            self._turns += 1
            self._tokens += tokens
            self._ended_at = time.monotonic()

    async def _turn(self, prefix: array[int]) -> Tokens:
        prompt = prefix + _tokens(self._random, self._vocabulary, self.load.fresh)
        tokens = self._random.randint(1, max(1, int(2 * self.load.generate) - 1))
        await self._rig.turn(self._slot, prompt, tokens)
        return tokens

    async def warm(self) -> None:
        """Until every player has had a turn, and has its context in the cache."""
        await self._all_begun.wait()

    async def watch(self, window_s: Seconds, enough: Callable[[], bool]) -> None:
        """For this long, and until enough turns have ended to speak of a mean."""
        least = max(LEAST_TURNS, TURNS_A_PLAYER * self.load.players)
        began, turns, tokens = time.monotonic(), self._turns, self._tokens
        give_up = began + LONGEST * window_s
        while time.monotonic() < give_up:
            await asyncio.sleep(window_s / 8)
            ended = self._turns - turns >= least and time.monotonic() - began >= window_s
            if ended and enough():
                break
        number = self._turns - turns
        if not number:
            raise LibraError(f"{self._slot}: no turn ended in {LONGEST * window_s:.0f} s")
        self.turn_s = self.load.players * (self._ended_at - began) / number
        self.generated = (self._tokens - tokens) / number


@asynccontextmanager
async def _playing(crowds: Iterable[_Crowd]) -> AsyncIterator[None]:
    """Players at work; a failure of one ends the measurement, and none is left behind."""
    chosen = list(crowds)
    try:
        async with asyncio.TaskGroup() as group:
            for crowd in chosen:
                for _ in range(crowd.load.players):
                    group.create_task(crowd.play())
            try:
                yield
            finally:
                for crowd in chosen:
                    crowd.stop()
    except BaseExceptionGroup as several:
        raise several.exceptions[0] from None


def _tokens(random: Random, vocabulary: int, number: int) -> array[int]:
    return array("i", random.choices(range(vocabulary), k=number))


def chunk_tokens(vllm_args: Sequence[str]) -> Tokens:
    """The most tokens of a step: as the recipe's arguments say, else vLLM's usual number."""
    for at, argument in enumerate(vllm_args):
        name, _, value = argument.partition("=")
        if name == CHUNK_FLAG:
            value = value or (vllm_args[at + 1] if at + 1 < len(vllm_args) else "")
            if value.isdigit():
                return int(value)
    return CHUNK_TOKENS
