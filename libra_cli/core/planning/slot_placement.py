"""The plan for the slots that there are: which hybrid slots serve, and which train.

A recipe fixes more than the planner of GPUs knows: a slot has its GPUs and serves with exactly as
many, buckets have their shapes, pools are kept, every node has as many trainer processes as the
others. So the choice here is how many hybrid slots of each size train, on which nodes. For every
number of training slots the candidates are: those that train today with the fewest changes, and
whole nodes in either order of the recipe; each must be a plan of the recipe (``split``), is priced
as the layout it is, and the nearest of the best is proposed, if ``admission`` lets it.

A run that is under way (``elastic``) keeps its core: further training slots become gradient
workers. Only a plan that takes slots of the core away resizes it, at the price of a restart.

Guarantee: a proposed plan keeps pools, shapes and the memory of every server and rank. Limit: it
does not try every subset of slots (2 to the power of their number), only those above.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from libra_cli.config.recipe import Recipe
from libra_cli.core.cluster.placement import PlanError, plan_with
from libra_cli.core.costs.profile import NothingFits, Profile, TrainingShape
from libra_cli.core.costs.workload import Workload
from libra_cli.core.planning.admission import Admission
from libra_cli.core.planning.observation import moves_cost_s
from libra_cli.core.planning.recalibration import MeasuredStep, RecalibratedSearch, corrected
from libra_cli.core.planning.rollout_dp import PlannedBucket
from libra_cli.core.planning.search import Layout, PlannerSettings, Search, Times
from libra_cli.core.types import Bucket, Plan, Pool, Role, Seconds, Slot, SlotId

TRAIN, GRADIENT = "train", "gradient"
_TRAINS = (TRAIN, GRADIENT)
NEAR = "today's plan is within the tolerance of the best"


@dataclass(frozen=True, slots=True)
class SlotMove:
    """One slot changes its role: the name of a bucket, ``train`` or ``gradient``; meanwhile it
    does nothing for ``seconds``."""

    slot: SlotId
    before: str
    after: str
    seconds: Seconds


@dataclass(frozen=True, slots=True)
class SlotDecision:
    """The plan proposed, and whether to have it: ``plan`` is None to stay, and then ``why_not``.

    ``before`` and ``after`` are predicted at ``prices``; ``cost_s`` is seconds of the whole job.
    """

    plan: Plan | None
    proposed: Plan
    moves: tuple[SlotMove, ...]
    before: Times
    after: Times
    cost_s: Seconds
    payback_steps: float | None
    reasons: tuple[str, ...]
    why_not: str
    prices: RecalibratedSearch


def propose_plan(
    recipe: Recipe,
    slots: tuple[Slot, ...],
    current: Plan,
    workload: Workload,
    profile: Profile,
    *,
    admission: Admission | None = None,
    elastic: bool = False,
    measured: Sequence[MeasuredStep] = (),
) -> SlotDecision:
    """The best plan of these slots, and whether its gain pays its moves.

    ``elastic``: the run is under way. ``measured`` corrects the prices.

    Raises NothingFits if no plan of the recipe can run.
    """
    admission = admission or Admission()
    gpus = sum(slot.num_devices for slot in slots)
    seats = max(bucket.max_num_seqs for bucket in recipe.rollout.buckets)
    settings = PlannerSettings(max_num_seqs=seats, training_shapes=(1,))
    today = layout_of(current, slots)
    prices = corrected(profile, workload, gpus, settings, today=today, measured=measured)
    plans = list(_plans(recipe, slots, current, elastic=elastic))
    found = [(plan, prices.search.times(layout_of(plan, slots))) for plan in plans]
    runnable = [(plan, times) for plan, times in found if times.step_s < float("inf")]
    if not runnable:
        raise _nothing(prices.search, slots, plans)
    proposed, after = _nearest(runnable, current, admission.tolerance)
    before = prices.search.times(today)
    moves = _moves(current, proposed, slots, profile)
    cost_s = moves_cost_s(prices.profile, workload, today, layout_of(proposed, slots))
    if elastic and proposed.train != current.train:
        cost_s += profile.moves.resize_s
    gain_s = before.step_s - after.step_s
    why_not = admission.why_not(before, after, cost_s) if moves else NEAR
    return SlotDecision(
        plan=None if why_not else proposed,
        proposed=proposed,
        moves=moves,
        before=before,
        after=after,
        cost_s=cost_s,
        payback_steps=cost_s / gain_s if gain_s > 0 else None,
        reasons=(f"today: {before}", f"then: {after}", *proposed.reasons),
        why_not=why_not,
        prices=prices,
    )


def layout_of(plan: Plan, slots: Iterable[Slot]) -> Layout:
    """A plan as numbers of servers and of ranks; slots without GPUs count as one."""
    sizes = {slot.id: slot.num_devices for slot in slots}
    counts: dict[Bucket, int] = {}
    for _, bucket in plan.servers:
        counts[bucket] = counts.get(bucket, 0) + 1
    ordered = sorted(counts.items(), key=lambda item: (item[0].up_to_tokens, item[0].name))
    buckets = tuple(
        PlannedBucket(bucket.tensor_parallel, number, bucket.up_to_tokens, bucket.max_num_seqs)
        for bucket, number in ordered
    )
    ranks = sum(sizes.get(slot, 1) for slot in (*plan.train, *plan.gradient))
    return Layout(buckets, TrainingShape(data_parallel=max(1, ranks)))


def held(slots: tuple[Slot, ...], pins: Mapping[SlotId, Role], head: SlotId) -> tuple[Slot, ...]:
    """The slots with what may not move fixed: those pinned, and the core's first."""
    serving = {slot for slot, role in pins.items() if role is Role.ROLLOUT}
    sides = {slot: Pool.ROLLOUT if slot in serving else Pool.TRAIN for slot in (*pins, head)}
    return tuple(replace(slot, pool=sides.get(slot.id, slot.pool)) for slot in slots)


def _plans(
    recipe: Recipe, slots: tuple[Slot, ...], current: Plan, *, elastic: bool
) -> Iterator[Plan]:
    seen: set[frozenset[SlotId]] = set()
    for train in _choices(slots, current):
        if train in seen or len(slots) - len(train) < recipe.planner.min_rollout:
            continue
        seen.add(train)
        core = tuple(slot for slot in current.train if slot in train) if elastic else ()
        beside = train - set(core) if core else frozenset()
        why = f"{len(train)} of {len(slots)} slots train"
        try:
            plan = plan_with(recipe, slots, train - beside, why, gradient=beside)
        except PlanError:
            continue
        yield replace(plan, train=core or plan.train)


def _choices(slots: tuple[Slot, ...], current: Plan) -> Iterator[frozenset[SlotId]]:
    """Sets of training slots: today's first, then every number in three orders."""
    fixed = [slot.id for slot in slots if slot.pool is Pool.TRAIN]
    free = [slot.id for slot in slots if slot.pool is Pool.HYBRID]
    today = (*current.train, *current.gradient)
    yield frozenset(today)
    stay = [slot for slot in today if slot in free]
    stay += [slot for slot in free if slot not in stay]
    for order in (stay, free, free[::-1], _by_size(slots, free), _across(slots, free)):
        for number in range(len(order) + 1):
            yield frozenset(fixed + order[:number])


def _by_size(slots: tuple[Slot, ...], free: list[SlotId]) -> list[SlotId]:
    sizes = {slot.id: slot.num_devices for slot in slots}
    return sorted(free, key=lambda slot: -sizes[slot])


def _across(slots: tuple[Slot, ...], free: list[SlotId]) -> list[SlotId]:
    """One slot of every node, then a second of every node, and so on."""
    rank: dict[SlotId, int] = {}
    seen: dict[str, int] = {}
    for slot in slots:
        rank[slot.id] = seen[slot.node] = seen.get(slot.node, 0) + 1
    return sorted(free, key=lambda slot: rank[slot])


def _nearest(
    runnable: list[tuple[Plan, Times]], current: Plan, tolerance: float
) -> tuple[Plan, Times]:
    limit = min(times.step_s for _, times in runnable) * (1 + tolerance)
    good = [pair for pair in runnable if pair[1].step_s <= limit]
    roles = _roles(current)

    def changes(pair: tuple[Plan, Times]) -> tuple[int, Seconds]:
        moved = sum(role != roles.get(slot) for slot, role in _roles(pair[0]).items())
        return moved, pair[1].step_s

    return min(good, key=changes)


def _roles(plan: Plan) -> dict[SlotId, str]:
    servers = {slot: bucket.name for slot, bucket in plan.servers}
    return servers | dict.fromkeys(plan.train, TRAIN) | dict.fromkeys(plan.gradient, GRADIENT)


def _moves(
    current: Plan, then: Plan, slots: tuple[Slot, ...], profile: Profile
) -> tuple[SlotMove, ...]:
    roles, after, prices = _roles(current), _roles(then), profile.moves
    moves = []
    for slot in slots:
        old, new = roles.get(slot.id, "idle"), after.get(slot.id, "idle")
        if old == new:
            continue
        seconds = prices.start(slot.num_devices)
        if new in _TRAINS:
            seconds = prices.to_training_s
        elif old in _TRAINS:
            seconds = prices.to_rollout_s
        moves.append(SlotMove(slot.id, old, new, seconds))
    return tuple(moves)


def _nothing(search: Search, slots: tuple[Slot, ...], plans: list[Plan]) -> NothingFits:
    if not plans:
        return NothingFits(
            "recipe",
            "no choice of training slots fits the nodes and buckets of the recipe",
            hint="libra run --dry-run recipe.yaml",
        )
    most = max(plans, key=lambda plan: len(plan.train))
    shape = layout_of(most, slots).training
    if not search.tree.fits(shape):
        return search.tree.refusal(shape.gpus)
    longest = search.workload.longest.context
    return NothingFits(
        "KV cache",
        f"no bucket of the recipe has servers that hold a trajectory of {longest:,} tokens",
        hint="raise tensor_parallel of the last bucket, or lower model.max_len",
    )
