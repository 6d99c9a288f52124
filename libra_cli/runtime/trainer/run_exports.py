"""The models that a run makes of its checkpoints by itself, as ``training.export`` says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from pathlib import Path

from libra_cli.config.errors import LibraError
from libra_cli.config.recipe import Recipe
from libra_cli.config.training import ExportChoice
from libra_cli.core.events import CheckpointSaved
from libra_cli.core.records import EvaluationRecord, Record
from libra_cli.runtime.hosts.cluster import Cluster
from libra_cli.runtime.store.reader import Reader
from libra_cli.runtime.supervision.background import Background
from libra_cli.runtime.trainer.checkpoints import (
    FoundCheckpoint,
    best_of,
    checkpoint_name,
    find_checkpoints,
    scored_by,
)
from libra_cli.runtime.trainer.model_export import CardOf, ModelExports


class RunExports:
    """Exports checkpoints one at a time; a failed export is told, and the run goes on."""

    def __init__(
        self,
        recipe: Recipe,
        cluster: Cluster,
        run_dir: Path,
        card_of: CardOf,
        *,
        save: Callable[[Record], None],
        note: Callable[[str], None],
    ) -> None:
        self._recipe = recipe
        self._cluster = cluster
        self._run_dir = run_dir
        self._card_of = card_of
        self._save = save
        self._note = note
        self._one = asyncio.Lock()
        #: The newest row of each evaluation, by number.
        self._evaluations: dict[int, EvaluationRecord] = {}
        self._making = Background()
        #: The names of the checkpoints whose models are made.
        self._made: set[str] = set()
        self.hint = f"try again with: libra export {run_dir}"

    def saved(self, event: CheckpointSaved) -> None:
        """A checkpoint is written: begin with its model, if it is that one's turn.

        With the last one those begin that stay after the end, as servers take as long to end.
        """
        number, rest = divmod(event.step, self._recipe.training.checkpoint_every)
        every = self._recipe.training.export.every
        if every and not rest and number % every == 0:
            name = checkpoint_name(event.path)
            self._making.start(f"writing the model of {name}", self._make_named(name))
        if event.step == self._recipe.run.steps:
            self._making.start("writing the models that stay", self._make_known())

    def recorded(self, record: Record) -> None:
        """A record is written: by the scores of evaluations the best checkpoint is known."""
        if isinstance(record, EvaluationRecord):
            self._evaluations[record.evaluation] = record

    async def leave(self) -> None:
        """Make the models that stay after the end.

        Raises:
            LibraError: one cannot be made.
        """
        await self._making.wait()
        for checkpoint in await self._chosen(self._recipe.training.export.at_end):
            await self._make(checkpoint)

    async def close(self) -> None:
        await self._making.close()

    async def _found(self) -> list[FoundCheckpoint]:
        hosts = {node: host for node, (host, _) in self._cluster.reached.items()}
        with Reader(self._run_dir) as reader:  # what was evaluated before the run went on, too
            told = {row.evaluation: row for row in reader.evaluations()} | self._evaluations
        rows = [told[number] for number in sorted(told)]
        names = self._recipe.evaluation_names
        return scored_by(await find_checkpoints(hosts), rows, names)

    async def _chosen(self, kinds: Collection[ExportChoice]) -> list[FoundCheckpoint]:
        found = await self._found()
        rewarded = () if self._recipe.training.needs.offline else found
        best = best_of(rewarded) if "best" in kinds else None
        last = found[-1] if found and "last" in kinds else None
        return list({one.name: one for one in (last, best) if one}.values())

    async def _make_known(self) -> None:
        """Make the models that stay; the best one only where no evaluation may still tell it."""
        kinds = self._recipe.training.export.at_end
        known = [kind for kind in kinds if kind == "last" or not self._recipe.evaluation_names]
        try:
            for checkpoint in await self._chosen(known):
                await self._make(checkpoint)
        except LibraError as error:
            self._note(f"no model was written while servers end: {error}")

    async def _make_named(self, name: str) -> None:
        try:
            for checkpoint in await self._found():
                if checkpoint.name == name:
                    await self._make(checkpoint)
        except LibraError as error:
            self._note(f"no model of {name} was written: {error}; {self.hint}")

    async def _make(self, checkpoint: FoundCheckpoint) -> None:
        """Make a checkpoint's model, unless this controller has."""
        cluster = self._cluster
        addresses = {node: fact.peer_address for node, fact in cluster.facts.items()}
        exports = ModelExports(cluster.reached, addresses, self._card_of, cluster.secrets)
        async with self._one:
            if checkpoint.name in self._made:
                return
            self._note(f"writing the model of step {checkpoint.step} on {checkpoint.nodes[0]}")
            self._save(await exports.make(checkpoint, merge=self._recipe.training.export.merge))
            self._made.add(checkpoint.name)
