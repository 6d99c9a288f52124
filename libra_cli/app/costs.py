"""Which costs a run or a recipe is planned with, and the planner of its slots.

The profile that is named, if it is of the GPUs there; else the one that the recipe names; else the
shipped one of the run's model and GPU; else what the run itself has shown (``costs.observed``). A
recipe need not say which GPUs its hosts have, so before anything has run one of the two names must
be given.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from libra_cli.config.errors import InputError
from libra_cli.config.recipe import ModelSpec, Recipe
from libra_cli.core.costs.observed import UNCHECKED_GIB, ObservedCosts
from libra_cli.core.costs.profile import Profile, ProfileError, passes_of, shared_part
from libra_cli.core.evidence import CostEvidence
from libra_cli.core.launch.placement import open_nodes, seats_of, shapes_of
from libra_cli.core.launch.process import NUMBER_BYTES
from libra_cli.core.planning.gpu_placement import GpuPlacement
from libra_cli.core.planning.planner import CostSource, Planner
from libra_cli.core.planning.recipe_placement import RecipePlacement
from libra_cli.core.planning.search import PlannerSettings
from libra_cli.core.types import Plan
from libra_cli.sim.profiles import load_profile, proposed_profiles, require_gpu, require_law

OWN_PRICES = "this run"
"""The origin of prices that a run itself has shown."""


class PricesError(InputError):
    """No profile has prices for the model on these hosts, so nothing can be planned."""


def profile_of_recipe(recipe: Recipe, path: Path, profile: str | None) -> Profile:
    """Return the profile that is named, since nobody knows yet which GPUs a recipe's hosts have.

    Raises:
        ProfileError: it is not known, or for hosts of another kind.
        MixtureRefused: it has no prices for a mixture of experts.
        PricesError: none is named.
    """
    gpus = any(node.gpus for node in recipe.nodes)
    profile = profile or recipe.planner.profile
    if profile is not None:
        found = load_profile(profile)
        require_law(found, _path_or_name(recipe.model))
        if gpus == _is_for_cpus(found):
            what = "GPUs" if gpus else "no GPUs"
            raise ProfileError(
                f"profile {found.name} is for {found.gpu}, but the recipe's hosts have {what}",
                hint=f"libra run {path}, then libra rebalance RUN_DIR --dry-run: prices of its own",
            )
        return found
    if not gpus:
        raise PricesError(
            f"{path}: there are no prices for hosts without GPUs before something has run there",
            hint=f"libra run {path}, then libra rebalance RUN_DIR --dry-run",
        )
    raise PricesError(
        f"{path}: which GPUs its hosts have, a recipe does not say; name their prices",
        hint=f"--profile NAME, one of: {', '.join(shipped_of(recipe) or proposed_profiles())}; "
        "or a file",
    )


def shipped_of(recipe: Recipe) -> tuple[str, ...]:
    """Names of the shipped profiles of the recipe's model, on whatever GPU."""
    return tuple(name for name in proposed_profiles() if _is_of(load_profile(name), recipe.model))


def shipped_for(recipe: Recipe, gpus: frozenset[str]) -> Profile | None:
    """The shipped profile of the recipe's model on these GPUs, if there is one."""
    found = map(load_profile, shipped_of(recipe) if gpus else ())
    return next((profile for profile in found if _fits(profile, gpus)), None)


@dataclass(frozen=True, slots=True)
class CostChoice:
    """Where a planner's costs come from: ``given``, ``shipped`` or ``OWN_PRICES``."""

    source: CostSource
    origin: str
    notes: tuple[str, ...] = ()


def costs_of_run(recipe: Recipe, gpus: frozenset[str], name: str | None = None) -> CostChoice:
    """The costs of a run on GPUs of these names; ``name`` is a profile that is asked for, instead
    of the one in the recipe.

    Raises:
        ProfileError: the profile is not known, or for other GPUs.
    """
    name = name or recipe.planner.profile
    if name is not None:
        profile = load_profile(name)
        require_hosts(profile, gpus, recipe)
        notes = () if _is_of(profile, recipe.model) else (_other_model(profile, recipe.model),)
        return CostChoice(_always(profile), "given", notes)
    shipped = shipped_for(recipe, gpus)
    if shipped is not None:
        return CostChoice(_always(shipped), "shipped")
    has_gpus = any(node.gpus for node in recipe.nodes)
    observed = ObservedCosts(
        gpu=", ".join(sorted(gpus)) or "CPU",
        model=_model(recipe.model),
        micro_tokens=recipe.training.micro_batch_tokens,
        parameter_bytes=2 if has_gpus else 4,  # versions are bf16 on GPUs, fp32 elsewhere
    )
    note = "prices are taken from this run: memory is not known to them and not checked"
    return CostChoice(observed, OWN_PRICES, (note,))


def _always(profile: Profile) -> CostSource:
    """Return a cost source that gives this profile for every plan and whatever is measured."""
    return lambda plan, evidence: profile


def live_planner(recipe: Recipe, gpus: frozenset[str]) -> Planner:
    """The planner of a live run on GPUs of these names."""
    return recipe_planner(recipe, costs_of_run(recipe, gpus).source, elastic=True)


def recipe_planner(recipe: Recipe, costs: CostSource, *, elastic: bool) -> Planner:
    """A planner of the recipe's slots, or its open nodes; ``elastic``: the run is under way."""
    costs = _as_the_recipe_trains(recipe, costs)
    settings = PlannerSettings(max_num_seqs=seats_of(recipe), shapes=recipe.rollout.shapes)
    if not recipe.has_open_nodes:
        return Planner(RecipePlacement(recipe, elastic=elastic), costs, settings)
    space = GpuPlacement.on(
        open_nodes(recipe),
        max_len=recipe.model.max_len,
        min_rollout=recipe.planner.min_rollout,
        elastic=elastic,
    )
    return Planner(space, costs, replace(settings, degrees=shapes_of(recipe)))


def _as_the_recipe_trains(recipe: Recipe, costs: CostSource) -> CostSource:
    """Return a source of the same costs with what the recipe and the run say of training and of
    servers' weights, instead of what is assumed; it refuses a mixture of experts without a law of
    its own.
    """

    def asked(plan: Plan, evidence: CostEvidence) -> Profile:
        profile = costs(plan, evidence)
        require_law(profile, _path_or_name(recipe.model))
        given, training = recipe.training, profile.training
        facts = replace(
            profile.facts,
            optimizer=given.optimizer,
            reference=given.needs.reference,
        )
        if facts.gpu_gib < UNCHECKED_GIB:
            # Elsewhere its parameters are those of the versions, and its steps are the run's own,
            # with all their passes.
            facts = replace(
                facts.with_adapter(given.lora),
                activation_offload=given.activation_offload,
                tiled_mlp=given.tiled_mlp,
            )
            training = replace(
                training,
                passes=passes_of(given),
                updates=given.updates,
                cp_size=given.cp_size,
                ep_size=given.ep_size or 1,
            )
        training = replace(
            training,
            facts=facts,
            gradient_bytes=NUMBER_BYTES[given.worker_gradients],
            shared=shared_part(given),
            link_bandwidth=evidence.link_bandwidth or training.link_bandwidth,
        )
        priced = replace(profile, training=training)
        priced = priced.with_moves_seen(evidence.starts, sleep=recipe.rollout.sleep)
        known = facts.gpu_gib < UNCHECKED_GIB  # else what there is room for is not computed
        return priced.quantized(recipe.rollout.quantization) if known else priced

    return asked


def require_hosts(profile: Profile, gpus: Iterable[str], recipe: Recipe) -> None:
    """Refuse a profile of other GPUs than the recipe's hosts have. Raises ProfileError."""
    for gpu in sorted(gpus):
        require_gpu(profile, gpu)
    if not any(node.gpus for node in recipe.nodes) and not _is_for_cpus(profile):
        raise ProfileError(
            f"profile {profile.name} is for {profile.gpu}, but the hosts of this run have no GPUs",
            hint="leave --profile out: prices are then taken from the run itself",
        )


def _is_for_cpus(profile: Profile) -> bool:
    return profile.gpu.upper().startswith("CPU")


def _fits(profile: Profile, gpus: Iterable[str]) -> bool:
    try:
        for gpu in gpus:
            require_gpu(profile, gpu)
    except ProfileError:
        return False
    return True


def _is_of(profile: Profile, model: ModelSpec) -> bool:
    """Say whether the model's name contains that of the profile's model."""
    return profile.model.lower() in _model(model).lower()


def _model(model: ModelSpec) -> str:
    """Return the name of the model's directory, or of the model that libra builds."""
    if model.build is not None:
        return model.build.name
    return (model.path or "").rstrip("/").rpartition("/")[2]


def _path_or_name(model: ModelSpec) -> str:
    return model.path or _model(model)


def _other_model(profile: Profile, model: ModelSpec) -> str:
    name = _path_or_name(model)
    return f"profile {profile.name} is for {profile.model}; whether {name} is one, you must know"
