"""The models that a run makes of its checkpoints by itself, as ``training.export`` says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from libra_cli.config.errors import LibraError
from libra_cli.config.recipe import Recipe
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
        self.hint = f"try again with: libra export {run_dir}"

    def saved(self, event: CheckpointSaved) -> None:
        """A checkpoint is written: begin with its model, if it is that one's turn."""
        number, rest = divmod(event.step, self._recipe.training.checkpoint_every)
        every = self._recipe.training.export.every
        if every and not rest and number % every == 0:
            name = checkpoint_name(event.path)
            self._making.start(f"writing the model of {name}", self._make_named(name))

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
        found = await self._found()
        rewarded = () if self._recipe.training.needs.offline else found
        wanted = {"last": found[-1] if found else None, "best": best_of(rewarded)}
        chosen = {
            one.name: one for kind in self._recipe.training.export.at_end if (one := wanted[kind])
        }
        for checkpoint in chosen.values():
            self._note(f"writing the model of step {checkpoint.step} on {checkpoint.nodes[0]}")
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

    async def _make_named(self, name: str) -> None:
        try:
            for checkpoint in await self._found():
                if checkpoint.name == name:
                    await self._make(checkpoint)
        except LibraError as error:
            self._note(f"no model of {name} was written: {error}; {self.hint}")

    async def _make(self, checkpoint: FoundCheckpoint) -> None:
        cluster = self._cluster
        addresses = {node: fact.peer_address for node, fact in cluster.facts.items()}
        exports = ModelExports(cluster.reached, addresses, self._card_of, cluster.secrets)
        async with self._one:
            made = await exports.make(checkpoint, merge=self._recipe.training.export.merge)
            self._save(made)
