"""Makes the parts that carry out what the machine of a run wants."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from libra_cli.config.recipe import Recipe
from libra_cli.core.events import Event
from libra_cli.core.planning.planner import DecisionMaker
from libra_cli.core.types import Slot, SlotId
from libra_cli.runtime.episodes.renderer import Renderer
from libra_cli.runtime.evaluation.players import SamplingOf
from libra_cli.runtime.frozen.models import FrozenModels
from libra_cli.runtime.frozen.processes import ModelProcesses
from libra_cli.runtime.hosts.cluster import Cluster
from libra_cli.runtime.order_files import Orders
from libra_cli.runtime.performer import EpisodeSource, Performer
from libra_cli.runtime.rollout.servers import Servers
from libra_cli.runtime.store.images import ImageStore
from libra_cli.runtime.teacher import Teacher
from libra_cli.runtime.trainer.processes import TrainerProcesses
from libra_cli.runtime.trainer.worker_processes import WorkerProcesses
from libra_cli.runtime.weights.versions import weights_of


def performer_of(
    recipe: Recipe,
    run_dir: Path,
    cluster: Cluster,
    slots: Mapping[SlotId, Slot],
    *,
    head: str,
    renderer: Renderer,
    episodes: EpisodeSource,
    images: ImageStore,
    models: FrozenModels,
    planner: DecisionMaker,
    post: Callable[[Event], None],
) -> Performer:
    """Make the parts on an open cluster; ``head`` is the node of the trainer's rank 0."""
    weights = weights_of(cluster, recipe.weight_sync, origin=head)
    stops, vocabulary = tuple(renderer.stop_token_ids), renderer.vocabulary
    sampling = SamplingOf(recipe, stops, vocabulary=vocabulary)
    workers = WorkerProcesses(recipe, cluster, weights, slots, post=post)
    shares = workers.handing_out
    return Performer(
        servers=Servers(recipe, cluster, weights, slots, sampling, images=images, post=post),
        trainer=TrainerProcesses(
            recipe, cluster, slots, head=head, shares=shares, images=images, post=post
        ),
        workers=workers,
        models=ModelProcesses(recipe.models, recipe.nodes, cluster, models, slots, post=post),
        episodes=episodes,
        orders=Orders(run_dir, post=post),
        weights=weights,
        planner=planner,
        teacher=None if recipe.teacher is None else Teacher(recipe.teacher),
    )


async def check_outside(recipe: Recipe, renderer: Renderer) -> None:
    """Ask the servers once that the recipe names and that are not of this run.

    Raises:
        LibraError: one does not answer, or does not fit the model.
    """
    if recipe.teacher is None:
        return
    teacher = Teacher(recipe.teacher)
    try:
        await teacher.check(renderer, max_len=recipe.model.max_len)
    finally:
        await teacher.close()
