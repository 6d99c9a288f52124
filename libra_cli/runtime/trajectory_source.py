"""What the trajectories of a run come from: environments, an agent, or demonstrations."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from libra_cli.config.environment import EnvironmentSpec
from libra_cli.config.frozen_models import NOWHERE, ModelsAddress
from libra_cli.config.recipe import ModelSpec, Recipe
from libra_cli.core.algorithms.algorithm import check_roles
from libra_cli.core.types import TrajectoryId
from libra_cli.envs.registry import ENVIRONMENTS
from libra_cli.envs.sandbox.sandboxes import Sandboxes
from libra_cli.plugins.finding import check
from libra_cli.runtime.agents.episodes import AgentEpisodes
from libra_cli.runtime.agents.runners import find_function
from libra_cli.runtime.demonstrations.reader import Demonstrations, check_demonstrations
from libra_cli.runtime.episodes.history import EpisodeHistory
from libra_cli.runtime.episodes.performer import EpisodePerformer, EpisodePlayer
from libra_cli.runtime.episodes.places import EnvironmentFactory
from libra_cli.runtime.episodes.player import Episodes
from libra_cli.runtime.episodes.renderer import Renderer
from libra_cli.runtime.episodes.workers import OpenOnNode
from libra_cli.runtime.evaluation.players import EvaluatedEpisodes, evaluation_players
from libra_cli.runtime.performer import EpisodeSource
from libra_cli.runtime.store.images import ImageStore

UNGUARDED = (
    "what the model writes runs on its host as the user of this run, with nothing to stop it "
    "(environment.sandbox.backend: none)"
)


@dataclass(frozen=True, slots=True)
class TrajectorySource:
    """What a run's trajectories come from, opened, with the renderer of its model."""

    renderer: Renderer
    episodes: EpisodePlayer | Demonstrations
    recipe: Recipe
    """The recipe, which says where the models of the run answer."""
    images: ImageStore
    """What environments have shown."""

    def performer(self, histories: Mapping[TrajectoryId, EpisodeHistory]) -> EpisodeSource:
        """Carries out what the machine wants of episodes; those in ``histories`` are rebuilt."""
        if isinstance(self.episodes, Demonstrations):
            return self.episodes
        return EpisodePerformer(self.episodes, run_seed=self.recipe.run.seed, histories=histories)


def check_source(recipe: Recipe) -> None:
    """Find what the recipe names before any host is asked; each environment is made once.

    Raises:
        LibraError: one cannot be imported, or does not fit what the recipe gives it.
    """
    if recipe.demonstrations:
        check_demonstrations(recipe.demonstrations)
        return
    recipe = recipe.served_at(NOWHERE)
    for environment in recipe.environment:
        if getattr(_tried(environment), "roles", ()):
            check_roles(recipe.training)
    for evaluation in recipe.evaluation:
        if evaluation.environment is not None:
            _tried(evaluation.environment)
    if recipe.agent is not None and recipe.agent.function is not None:
        find_function(recipe.agent)


def _tried(environment: EnvironmentSpec) -> object:
    """Make an environment, and return it; None of one in workers, which is only looked up."""
    if environment.workers is None:
        return EnvironmentFactory(environment).make()
    # Not in this process, which it might hold up, fill or end.
    check(ENVIRONMENTS, environment.name)
    if environment.sandbox is not None and not environment.workers.nodes:
        Sandboxes.of(environment.sandbox.model_dump())
    return None


@asynccontextmanager
async def open_source(
    recipe: Recipe,
    run_dir: Path,
    *,
    open_on: OpenOnNode,
    note: Callable[[str], None],
    models: ModelsAddress = NOWHERE,
    adopts: bool = False,
) -> AsyncIterator[TrajectorySource]:
    """Open what the recipe names; ``open_on`` begins environments on other hosts, ``models`` is
    where the run's frozen models answer.

    One that ``adopts`` a run begins no first task to see whether it can be: the killed controller
    has, and a model that is asked there may not be up again.

    Raises:
        LibraError: it cannot be begun, or does not fit the model.
    """
    for environment in recipe.environment:
        if environment.sandbox is not None and environment.sandbox.backend == "none":
            note(f"environment {environment.name}: {UNGUARDED}")
    renderer = _renderer(recipe.model, run_dir, note)
    images = ImageStore(run_dir)
    if recipe.demonstrations:
        rows, max_len = recipe.demonstrations, recipe.model.max_len
        demonstrated = Demonstrations(rows, renderer, seed=recipe.run.seed, max_len=max_len)
        yield TrajectorySource(renderer, demonstrated, recipe, images)
        return
    player = _player(recipe, renderer, run_dir, images, open_on=open_on, models=models, note=note)
    try:
        await player.prepare(note)
        if not adopts:
            await player.check(recipe.run.seed)
        yield TrajectorySource(renderer, player, recipe, images)
    finally:
        await player.close()


def _renderer(model: ModelSpec, run_dir: Path, note: Callable[[str], None]) -> Renderer:
    renderer = Renderer(
        run_dir / "model",
        template_args=model.template_args,
        tool_format=model.tool_format,
        images=model.images,
    )
    if model.path is not None:  # what the built model's template leaves out is known
        for misfit in renderer.misfits:
            note(f"the chat template {misfit}; see libra help models")
    return renderer


def _player(
    recipe: Recipe,
    renderer: Renderer,
    run_dir: Path,
    images: ImageStore,
    *,
    open_on: OpenOnNode,
    models: ModelsAddress,
    note: Callable[[str], None],
) -> EpisodePlayer:
    """Plays what is trained, and what is evaluated if anything is."""
    trained: EpisodePlayer
    if recipe.agent is not None:
        trained = AgentEpisodes(
            recipe, renderer, run_dir, note=note, open_on=open_on, models=models
        )
    else:
        environments, labels = recipe.environment, recipe.environment_labels
        trained = Episodes(
            environments, labels, renderer, run_directory=run_dir, images=images, open_on=open_on
        )
    if not recipe.evaluation:
        return trained
    evaluated = evaluation_players(
        recipe, trained, renderer, run_directory=run_dir, images=images, open_on=open_on
    )
    return EvaluatedEpisodes(recipe, trained, evaluated)
