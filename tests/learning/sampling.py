"""Plays trajectories of a real environment with a Hugging Face model, all of them at once.

All rows advance in lockstep, a token at a time: where the text is given (the rest of a prompt, what
a tool returns) the token is forced, elsewhere it is sampled. So every row is at the same position,
and there is neither padding nor a scheduler. Rows that are finished are taken out of the cache.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from libra_cli.config.recipe import Recipe
from libra_cli.core.rollout.turns import (
    add_turn,
    digest_of,
    earned,
    earned_at_last,
    extend_masked,
)
from libra_cli.core.types import GroupId, Trajectory, VersionSpan, WeightVersion
from libra_cli.runtime.episodes.performer import episode_seed
from libra_cli.runtime.episodes.player import Episodes, TurnResult
from libra_cli.runtime.episodes.renderer import Renderer

ROWS = 512
"""Trajectories of one batch of the model, chosen for memory."""


@dataclass(slots=True)
class Row:
    """A trajectory in play."""

    trajectory: Trajectory
    forced: deque[int]
    """Given tokens that are still to be fed to the model."""
    shown: int
    """The digest of what the model was shown last."""
    said: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    reward: float | None = None


class GrowingLayer(DynamicLayer):  # type: ignore[misc]  # transformers is Any here
    """Keys and values in buffers with room: appending copies no more than what is appended."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> object:
        """Append, and return all so far."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.buffers = [key_states.new_empty(0)] * 2
            self.length = 0
        stop = self.length + key_states.shape[-2]
        news = (key_states, value_states)
        self.buffers = [
            _with_room(buffer, new, self.length, stop)
            for buffer, new in zip(self.buffers, news, strict=True)
        ]
        for buffer, new in zip(self.buffers, news, strict=True):
            buffer[:, :, self.length : stop] = new
        self.length = stop
        self.keys, self.values = (buffer[:, :, :stop] for buffer in self.buffers)
        return self.keys, self.values

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows only."""
        self.buffers = [buffer[rows] for buffer in self.buffers]
        self.keys, self.values = (buffer[:, :, : self.length] for buffer in self.buffers)


def _with_room(buffer: Tensor, new: Tensor, length: int, stop: int) -> Tensor:
    if buffer.ndim == 4 and stop <= buffer.shape[2]:
        return buffer
    rows, heads, _, width = new.shape
    grown = new.new_empty(rows, heads, max(64, 2 * stop), width)
    if length:
        grown[:, :, :length] = buffer[:, :, :length]
    return grown


class BatchPlayer:
    """Plays trajectories to their rewards."""

    def __init__(self, recipe: Recipe, renderer: Renderer, model: nn.Module) -> None:
        self._recipe = recipe
        self._model = model.eval()
        self._stops = renderer.stop_token_ids
        self._pad = renderer.end_of_turn
        self._tasks: Mapping[GroupId, int | None] = {}
        self._episodes = Episodes(recipe.environment, recipe.environment_labels, renderer)

    async def play(
        self,
        trajectories: Sequence[Trajectory],
        version: int,
        *,
        seed: int,
        stream: int,
        tasks: Mapping[GroupId, int | None] | None = None,
    ) -> list[float]:
        """The rewards, in order. ``stream`` seeds the tasks, ``seed`` what is sampled.

        ``tasks``: of groups, where a curriculum chose; else a group's task is its number.
        """
        self._tasks = tasks or {}
        rewards: list[float] = []
        for first in range(0, len(trajectories), ROWS):
            part = trajectories[first : first + ROWS]
            random = torch.Generator().manual_seed(hash((seed, version, first)) % 2**62)
            rewards += await self._play(part, WeightVersion(1, version), stream, random)
        return rewards

    async def close(self) -> None:
        """End the environments."""
        await self._episodes.close()

    async def _play(
        self,
        trajectories: Sequence[Trajectory],
        version: WeightVersion,
        stream: int,
        random: torch.Generator,
    ) -> list[float]:
        everyone = [await self._begun(one, stream) for one in trajectories]
        rows = list(everyone)
        cache = DynamicCache(config=self._model.config)
        cache.layers = [GrowingLayer() for _ in cache.layers]
        shared = min(len(row.forced) for row in rows)
        fed = [[row.forced.popleft() for _ in range(shared)] for row in rows]
        while rows:
            tokens, logprobs = self._sampled(fed, cache, random)
            pairs = zip(rows, tokens, logprobs, strict=True)
            fed = [[self._next(row, token, logprob)] for row, token, logprob in pairs]
            ended = [row for row in rows if self._has_ended(row)]
            await asyncio.gather(*(self._end_turn(row, version) for row in ended))
            left = [number for number, row in enumerate(rows) if row.reward is None]
            if len(left) < 0.8 * len(rows):
                for layer in cache.layers:
                    layer.keep(torch.tensor(left, dtype=torch.long))
                rows, fed = [rows[number] for number in left], [fed[number] for number in left]
        return [row.reward or 0.0 for row in everyone]

    def _next(self, row: Row, sampled: int, logprob: float) -> int:
        """What to feed a row with: a given token, or else the one that was sampled."""
        if row.reward is not None:
            return self._pad
        if row.forced:
            return row.forced.popleft()
        row.said.append(sampled)
        row.logprobs.append(logprob)
        return sampled

    def _has_ended(self, row: Row) -> bool:
        """Whether its turn has."""
        return bool(row.said) and (row.said[-1] in self._stops or self._is_full(row))

    def _sampled(
        self, fed: list[list[int]], cache: DynamicCache, random: torch.Generator
    ) -> tuple[list[int], list[float]]:
        """A token after each row, with its log-probability at the sampling temperature."""
        with torch.inference_mode():
            logits = self._model(
                input_ids=torch.tensor(fed), past_key_values=cache, use_cache=True, logits_to_keep=1
            ).logits[:, -1]
            logprobs = torch.log_softmax(logits.float() / self._recipe.rollout.temperature, dim=-1)
            tokens = torch.multinomial(logprobs.exp(), 1, generator=random)
            return tokens[:, 0].tolist(), logprobs.gather(1, tokens)[:, 0].tolist()

    async def _begun(self, trajectory: Trajectory, stream: int) -> Row:
        who, task = trajectory.id, self._tasks.get(trajectory.id.group)
        place = who.group if task is None else task
        prompt = await self._episodes.start(
            who, place, task_seed=stream, seed=episode_seed(stream, who)
        )
        trajectory.token_ids.extend(prompt)
        extend_masked(trajectory, len(prompt))
        return Row(trajectory, deque(prompt), digest_of(prompt))

    def _is_full(self, row: Row) -> bool:
        most = self._recipe.model.max_len - len(row.trajectory.token_ids)
        return len(row.said) >= min(self._recipe.rollout.max_turn_tokens, most)

    async def _end_turn(self, row: Row, version: WeightVersion) -> None:
        """The environment looks at a turn, as ``core.rollout.trajectories`` has it do."""
        trajectory, said = row.trajectory, array("i", row.said)
        start = len(trajectory.token_ids)
        trajectory.token_ids.extend(said)
        trajectory.logprobs.extend(row.logprobs)
        trajectory.loss_mask.frombytes(b"\x01" * len(said))
        trajectory.add_span(VersionSpan(version.step, start, start + len(said)))
        trajectory.single_version = version
        trajectory.generated += len(said)
        add_turn(trajectory, len(said), row.shown)
        row.said, row.logprobs = [], []
        reason = "stop" if said[-1] in self._stops else "length"
        trajectory.truncated = reason == "length"
        result = await self._episodes.advance(trajectory.id, said, reason)
        context = len(trajectory.token_ids) + len(result.observation_ids)
        full = context >= self._recipe.model.max_len
        if not result.done and (full or trajectory.turns >= self._recipe.rollout.max_turns):
            trajectory.truncated = True
            result = await self._episodes.finish(trajectory.id)
        self._take(row, result)

    def _take(self, row: Row, result: TurnResult) -> None:
        trajectory = row.trajectory
        trajectory.tools += len(result.returns)
        if result.done:
            assert result.reward is not None, f"{trajectory.id} is done without a reward"
            trajectory.metrics = result.metrics
            earned_at_last(trajectory, result.reward)
            row.reward = result.reward
            self._episodes.forget(trajectory.id)
            return
        earned(trajectory, result.turn_reward)
        row.shown = digest_of(result.observation_ids)
        trajectory.token_ids.extend(result.observation_ids)
        extend_masked(trajectory, len(result.observation_ids))
        row.forced.extend(result.observation_ids)
