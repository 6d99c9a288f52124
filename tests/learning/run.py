"""One run: the product's ledger and trainer, fed by ``sampling`` at an exact staleness."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Callable
from json import loads
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest import mock

import msgpack
import torch
from transformers import AutoModelForCausalLM

from libra_cli.config.recipe import Recipe
from libra_cli.core.actions import Save, Train
from libra_cli.core.events import PublishedVersion, StepDone, TrainerStarted
from libra_cli.core.launch.placement import initial_plan, slots_of
from libra_cli.core.notices import StepClaimed
from libra_cli.core.records import StepRecord
from libra_cli.core.rollout.groups import new_trajectory
from libra_cli.core.run.state import RunIdentity
from libra_cli.core.types import TrajectoryId, WeightVersion
from libra_cli.node.batch.samples import read_samples
from libra_cli.node.model.build import provide
from libra_cli.node.trainer.config import TrainerConfig
from libra_cli.node.trainer.trainer import Trainer
from libra_cli.runtime.episodes.renderer import Renderer
from libra_cli.runtime.trainer.client import batch_order
from tests.learning.sampling import BatchPlayer
from tests.learning.teacher import HeldTeacher
from tests.world import machine_of

HELD_OUT = 256
"""Tasks of the last version's examination."""
LAST = 5
"""Versions at the end whose mean reward is reported."""
FULL = 1 - 1e-6
"""A task is solved with a reward that is not less; parts of 1 may not add up to it exactly."""


class LearningRun:
    """A recipe that is learned in this process."""

    def __init__(
        self,
        recipe: Recipe,
        staleness: int,
        directory: Path,
        *,
        trajectories: int = 0,
        teacher: Path | None = None,
    ) -> None:
        """``trajectories``: the step at which so many were played is the last; 0: no such bound."""
        self._teacher = None if teacher is None else HeldTeacher(teacher)
        self._recipe, self._staleness = recipe, staleness
        self._trajectories = trajectories
        build = recipe.model.build
        spec = {
            "path": recipe.model.path,
            "build": build.model_dump(mode="json") if build else None,
            "cache": "~/.libra/models",
        }
        model_dir = Path(provide(spec)["model_dir"])
        self._trainer = _trainer(recipe, model_dir, directory)
        self._model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        renderer = Renderer(
            model_dir,
            template_args=recipe.model.template_args,
            tool_format=recipe.model.tool_format,
        )
        self._player = BatchPlayer(recipe, renderer, self._model)
        identity = RunIdentity("learning", "", 0, 0.0)
        self._machine = machine_of(recipe, initial_plan(recipe), slots_of(recipe), identity)
        self._rows: list[dict[str, Any]] = []

    async def learn(self, told: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        """All steps, and the examination of the last version."""
        training = self._machine.training
        training.start(now=0.0)
        first = PublishedVersion(WeightVersion(1, 0), 0, 0.0)
        training.started(TrainerStarted(1, first), now=0.0)
        for step in range(1, self._recipe.run.steps + 1):
            began = time.process_time()
            rewards = await self._play(step - 1)
            played = time.process_time()
            row = self._step(step)
            row |= {
                "step": step,
                "reward": fmean(rewards) if rewards else None,
                "solved": _solved(rewards) if rewards else None,
                "played": len(rewards),
                "play_s": played - began,
                "train_s": time.process_time() - played,
            }
            self._rows.append(row)
            told(row)
            if 0 < self._trajectories <= self._played:
                break
        final = await self._examined()
        await self._player.close()
        return self._summary(final)

    @property
    def _played(self) -> int:
        return sum(row["played"] for row in self._rows)

    async def _play(self, version: int) -> list[float]:
        """Play groups until as many are ready as the staleness wants, of which a step takes some.

        A group that the ledger does not take as READY is followed by another.
        """
        ledger = self._machine.ledger
        wanted = (self._staleness + 1) * self._recipe.training.groups_per_step
        rewards: list[float] = []
        while (lacking := wanted - ledger._ready) > 0:
            groups = [ledger.open(version=version, now=0.0) for _ in range(lacking)]
            members = [member for group in groups for member in group.members]
            seed = self._recipe.run.seed
            tasks = {group.id: group.task for group in groups}
            scores = await self._player.play(members, version, seed=seed, stream=seed, tasks=tasks)
            if self._teacher is not None:
                self._teacher.judge(members)
            for member, score in zip(members, scores, strict=True):
                ledger.finish(member.id, score)
            rewards += scores
        return rewards

    def _step(self, step: int) -> dict[str, Any]:
        """One optimizer step on the batch that the trainer group claims."""
        training = self._machine.training
        results = training.claim(now=0.0, target=self._recipe.run.steps)
        (train,) = [one.train for one in results if isinstance(one, StepClaimed)]
        metrics = self._trained(train)
        training.version_published(PublishedVersion(WeightVersion(1, step), 0, 0.0))
        results = training.done(StepDone(1, step, None, metrics), now=0.0)
        training.version_published(PublishedVersion(WeightVersion(1, step), 0, 0.0))
        training.remember("", step)
        (record,) = [
            one.record
            for one in results
            if isinstance(one, Save) and isinstance(one.record, StepRecord)
        ]
        return {
            "staleness": record.staleness_mean,
            "trained_reward": record.reward,
            **loads(record.metrics_json),
            **loads(record.batch_json),
        }

    def _trained(self, train: Train) -> dict[str, float | None]:
        message = msgpack.unpackb(msgpack.packb(batch_order(train)))
        samples = read_samples(message["trajectories"], self._recipe.model.max_len)
        metrics = self._trainer.train(train.step, samples)
        self._model.load_state_dict(dict(self._trainer.whole_weights()))
        return {name: value for name, value in metrics.items() if not isinstance(value, list)}

    async def _examined(self) -> list[float]:
        """Rewards of the last version on tasks of another stream."""
        stream = -1 - self._recipe.run.seed
        tasks = [new_trajectory(TrajectoryId(n, 0, 0), 0.0) for n in range(HELD_OUT)]
        return await self._player.play(tasks, -1, seed=self._recipe.run.seed, stream=stream)

    def _summary(self, examined: list[float]) -> dict[str, Any]:
        rewards = [row["reward"] for row in self._rows if row["reward"] is not None]
        solved = [row["solved"] for row in self._rows if row["solved"] is not None]
        names = [name for name, value in self._rows[-1].items() if isinstance(value, int | float)]
        return {
            "final": fmean(examined),
            "solved": _solved(examined),
            "solved_area": fmean(solved),
            "area": fmean(rewards),
            "last": fmean(rewards[-LAST:]),
            "rewards": [round(reward, 4) for reward in rewards],
            "trained": len(self._rows),
            "played": self._played,
            "cpu_s": round(sum(row["play_s"] + row["train_s"] for row in self._rows), 1),
            "curves": {name: [_short(row.get(name)) for row in self._rows] for name in names},
        }


def _solved(rewards: list[float]) -> float:
    return fmean(reward >= FULL for reward in rewards)


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def _trainer(recipe: Recipe, model_dir: Path, directory: Path) -> Trainer:
    with mock.patch.dict(os.environ, {"ACCELERATE_USE_CPU": "true"}):
        return Trainer(
            TrainerConfig(
                run_id="learning",
                model_dir=str(model_dir),
                weights_dir=str(directory / "versions"),
                checkpoint_dir=str(directory / "checkpoints" / "here"),
                socket="",
                world_size=1,
                trainer_incarnation=1,
                seed=recipe.run.seed,
                dtype="float32",
                temperature=recipe.rollout.temperature,
                training=recipe.training,
                max_len=recipe.model.max_len,
                steps=recipe.run.steps,
            )
        )


def learned(
    recipe: Recipe,
    staleness: int,
    told: Callable[[dict[str, Any]], None],
    *,
    trajectories: int = 0,
    teacher: Path | None = None,
) -> dict[str, Any]:
    """What came of a run of this recipe; ``teacher`` is a model's directory."""
    with tempfile.TemporaryDirectory() as directory:
        run = LearningRun(
            recipe, staleness, Path(directory), trajectories=trajectories, teacher=teacher
        )
        return asyncio.run(run.learn(told))
