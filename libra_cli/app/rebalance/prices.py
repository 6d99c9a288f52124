"""Which prices a run or a recipe is judged by.

The profile that is named, if it is of the GPUs there; else the shipped one of the run's model and
GPU; else what the run itself has shown (``pricing.measured``). A recipe does not say which GPUs its
hosts have, so before anything has run a profile must be named.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean

from libra_cli.bench.experiments import profile_of
from libra_cli.config.errors import LibraError, StateError
from libra_cli.config.recipe import Recipe
from libra_cli.core.cluster.placement import slots_of
from libra_cli.core.costs.observed import (
    PlayedTurn,
    Starts,
    TrainedStep,
    measured_profile,
    server_cost,
    training_cost,
    unchecked_facts,
)
from libra_cli.core.costs.profile import Profile, ProfileError
from libra_cli.core.machine import guessed_cost
from libra_cli.core.planning.slot_placement import layout_of
from libra_cli.core.records import MoveRecord, PlanRecord, SlotStateRecord, StepRecord, TurnRecord
from libra_cli.core.types import Bucket, Plan
from libra_cli.runtime.store.reader import Reader
from libra_cli.sim.profiles import known_profiles, load_profile, require_gpu

RECENT_STEPS = 50
"""Newest steps that training prices are taken from."""


LEAST_STEPS = 2
"""Steps under one plan from which training can be priced."""


class PricesError(LibraError):
    """There are no prices for these hosts."""

    exit_code = 2


def profile_of_recipe(recipe: Recipe, path: Path, profile: str | None) -> Profile:
    """Only a named one: a recipe does not say which GPUs its hosts have."""
    gpus = any(node.gpus for node in recipe.nodes)
    if profile is not None:
        found = profile_of(profile)
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
    fitting = [name for name in known_profiles() if _is_of(load_profile(name), recipe)]
    raise PricesError(
        f"{path}: which GPUs its hosts have, a recipe does not say; name their prices",
        hint=f"--profile NAME, one of: {', '.join(fitting or known_profiles())}; or a file",
    )


def profile_of_run(
    reader: Reader, recipe: Recipe, plan: Plan, turns: Sequence[PlayedTurn], name: str | None
) -> tuple[Profile, str, list[str]]:
    """The prices, where they come from, and what there is to say about that."""
    gpus = _gpus(reader, recipe)
    if name is not None:
        profile = profile_of(name)
        _require(profile, gpus, recipe)
        notes = [] if _is_of(profile, recipe) else [_other_model(profile, recipe)]
        return profile, "given", notes
    for known in known_profiles() if gpus else ():
        profile = load_profile(known)
        if _is_of(profile, recipe) and _fits(profile, gpus):
            return profile, "shipped", []
    notes = ["prices are taken from this run: memory is not known to them and not checked"]
    return _own_profile(reader, recipe, plan, turns, gpus), "this run", notes


def _gpus(reader: Reader, recipe: Recipe) -> set[str]:
    """Names of the GPUs the run uses, as its hosts gave them."""
    names: set[str] = set()
    for node in reader.nodes():
        used = next((spec.gpus for spec in recipe.nodes if spec.name == node.node), 0)
        facts = json.loads(node.facts_json or "{}")
        names |= {gpu["name"] for gpu in facts.get("gpus", ()) if gpu["index"] < used}
    return names


def _require(profile: Profile, gpus: set[str], recipe: Recipe) -> None:
    for gpu in sorted(gpus):
        require_gpu(profile, gpu)
    if not any(node.gpus for node in recipe.nodes) and not _is_for_cpus(profile):
        raise ProfileError(
            f"profile {profile.name} is for {profile.gpu}, but the hosts of this run have no GPUs",
            hint="leave --profile out: prices are then taken from the run itself",
        )


def _is_for_cpus(profile: Profile) -> bool:
    return profile.gpu.upper().startswith("CPU")


def _fits(profile: Profile, gpus: set[str]) -> bool:
    try:
        for gpu in gpus:
            require_gpu(profile, gpu)
    except ProfileError:
        return False
    return True


def _is_of(profile: Profile, recipe: Recipe) -> bool:
    """Whether the recipe's model is named like the profile's."""
    return profile.model.lower() in _model(recipe).lower()


def _model(recipe: Recipe) -> str:
    """The name of its directory, or of what libra builds."""
    if recipe.model.build is not None:
        return f"built-{recipe.model.build.task}"
    return (recipe.model.path or "").rstrip("/").rpartition("/")[2]


def _other_model(profile: Profile, recipe: Recipe) -> str:
    model = recipe.model.path or _model(recipe)
    return f"profile {profile.name} is for {profile.model}; whether {model} is one, you must know"


def _own_profile(
    reader: Reader, recipe: Recipe, plan: Plan, turns: Sequence[PlayedTurn], gpus: set[str]
) -> Profile:
    """What the run itself has shown. StateError before its first step."""
    steps, plan_then = _steady(reader, recipe, plan)
    if not steps:
        raise StateError(
            f"{reader.run_dir}: no step has been trained yet, so training has no price",
            hint="try again after the first step, or name prices: --profile NAME",
        )
    servers = {}
    for bucket in dict(plan.servers).values():
        slots = {slot for slot, b in plan.servers if b.tensor_parallel == bucket.tensor_parallel}
        played = [turn for turn in turns if turn.slot in slots]
        servers[bucket.tensor_parallel] = server_cost(played, guessed_cost(bucket))
    pairs = reader.step_pairs()
    trained = [
        TrainedStep(step.ended_at - step.started_at, step.context_tokens, pairs.get(step.step, 0.0))
        for step in steps
    ]
    ranks = layout_of(plan_then, slots_of(recipe)).training_gpus
    published = reader.versions()
    size = 2 if any(node.gpus for node in recipe.nodes) else 4
    parameters = published[-1].bytes / size if published else 0.0
    training = training_cost(
        trained,
        ranks,
        unchecked_facts(parameters),
        micro_tokens=recipe.training.micro_batch_tokens,
    )
    return measured_profile(
        servers,
        training,
        _starts(reader.slot_history(), reader.moves()),
        name="this run",
        gpu=", ".join(sorted(gpus)) or "CPU",
        model=_model(recipe),
        provenance={
            "servers": f"fitted to {len(turns):,} turns of this run",
            "training": f"fitted to {len(trained):,} steps of this run; bandwidths assumed",
            "moves": "how long servers and trainer took to start in this run",
        },
    )


def _steady(reader: Reader, recipe: Recipe, plan: Plan) -> tuple[Sequence[StepRecord], Plan]:
    """The newest steps taken under one plan with all its slots in place, and that plan."""
    steps, moves = reader.steps()[-RECENT_STEPS:], reader.moves()
    until = float("inf")
    for row in reversed(reader.plans()):
        arrived = [move.ended_at or until for move in moves if move.plan == row.plan]
        since = max([row.at, *arrived])
        seen = [step for step in steps if since <= step.started_at and step.ended_at <= until]
        if len(seen) >= LEAST_STEPS:
            return seen, plan_of_row(row)
        until = row.at
    return steps, plan


def plan_of_row(row: PlanRecord) -> Plan:
    """A plan as the journal has it."""
    servers = tuple((slot, Bucket(*shape)) for slot, *shape in json.loads(row.servers_json))
    reasons = tuple(json.loads(row.reasons_json or "[]"))
    train, gradient = json.loads(row.train_json), json.loads(row.gradient_json)
    return Plan(servers, tuple(train), reasons, tuple(gradient))


def _idle_s(moves: Iterable[MoveRecord], before: str, after: str) -> float | None:
    """Seconds in which a slot that moved so in this run did nothing, on average; None for never.

    Where the next process started beside the old one it is idle in no phase but the stop.
    """
    idle = []
    for move in moves:
        if (move.from_role, move.to_role, move.state) == (before, after, "done"):
            phases = json.loads(move.phases_json)
            beside = phases[0][0] == "start"
            counted = ("stop",) if beside else ("drain", "stop", "start", "sync", "verify")
            idle.append(sum(end - began for name, began, end in phases if name in counted))
    return _mean(idle)


def played_turns(rows: Sequence[TurnRecord]) -> list[PlayedTurn]:
    """In the order they ended, each with the tokens of its prompt that no cache can have held."""
    played = []
    for before, turn in zip([None, *rows], rows, strict=False):
        cached = 0
        if before is not None and _follows(before, turn) and before.slot == turn.slot:
            cached = before.prompt_tokens + before.generated_tokens
        fresh = max(0, turn.prompt_tokens - cached)
        played.append(
            PlayedTurn(
                turn.slot,
                turn.started_at,
                turn.ended_at,
                turn.prompt_tokens,
                fresh,
                turn.generated_tokens,
            )
        )
    return sorted(played, key=lambda turn: turn.ended)


def _follows(before: TurnRecord, turn: TurnRecord) -> bool:
    who = (turn.group_id, turn.member, turn.attempt)
    return (before.group_id, before.member, before.attempt) == who


def _starts(history: Iterable[SlotStateRecord], moves: Sequence[MoveRecord]) -> Starts:
    """Of every slot, from ``starting`` until it served or trained; its states are in order."""
    began: dict[str, float] = {}
    waits: dict[str, list[float]] = {"serving": [], "training": []}
    for state in history:
        if state.state == "starting":
            began[state.slot] = state.since
        elif state.state in waits and state.slot in began:
            waits[state.state].append(state.since - began.pop(state.slot))
    return Starts(
        _mean(waits["serving"]),
        _mean(waits["training"]),
        to_training_s=_idle_s(moves, "rollout", "gradient"),
        to_rollout_s=_idle_s(moves, "gradient", "rollout"),
    )


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None
