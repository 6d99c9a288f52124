"""The placements that a recipe allows: which of its hybrid slots serve, and which train.

A recipe fixes more than the planner of GPUs knows: a slot has its GPUs and serves with exactly as
many, buckets have their shapes, pools are kept, and the trainer's launcher may want equal nodes. So
the choice here is how many hybrid slots train, and on which nodes. For every number of training
slots the candidates are those that train today with the fewest changes, and whole nodes in several
orders; each must be a plan of the recipe (``cluster.placement``).

A run that is under way (``elastic``) keeps its base group: further training slots become gradient
workers. Only a plan that takes slots of the base group away resizes it, at the price of a restart.

There, each frozen model may have more servers than today, or one fewer, on slots of the policy's
servers (``core.frozen.placement``), and servers side by side may also be joined into one of a size
that a bucket has, and split: one more, one fewer, all of them or none (``cluster.joined_slots``).

Guarantee: a candidate keeps pools, pins, shapes and the memory of every server and rank. Limit: it
does not try every subset of slots (2 to the power of their number), only those above.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial

from libra_cli.config.recipe import Recipe
from libra_cli.core.costs.profile import NothingFits, Profile, ProfileError
from libra_cli.core.frozen.placement import counted, neighbours
from libra_cli.core.launch.joined_slots import reshaped
from libra_cli.core.launch.placement import PlanError, plan_with, slots_of
from libra_cli.core.launch.shares import serving_when_idle
from libra_cli.core.observation import Observation
from libra_cli.core.planning.idle_servers import idle_servers
from libra_cli.core.planning.planner import Candidate, SlotMove, lacks_hosts, roles_of
from libra_cli.core.planning.rollout_table import planned_buckets
from libra_cli.core.planning.search import Layout, Search
from libra_cli.core.planning.transition import change_cost_s
from libra_cli.core.types import Plan, Pool, Role, Seconds, Slot, SlotId

TRAIN, GRADIENT, IDLE = "train", "gradient", "idle"
_TRAINS = (TRAIN, GRADIENT)


@dataclass(frozen=True, slots=True)
class RecipePlacement:
    """The slots of a recipe. ``elastic``: the run is under way."""

    recipe: Recipe
    elastic: bool = True

    @property
    def gpus(self) -> int:
        """GPUs of all slots; one without GPUs counts as one."""
        return sum(slot.num_devices for slot in slots_of(self.recipe))

    def check(self, plan: Plan, profile: Profile) -> None:
        """Raise ProfileError if the plan has servers of a shape without costs."""
        known = set(profile.servers)
        for bucket in dict(plan.servers).values():
            if bucket.tensor_parallel not in known:
                degrees = ", ".join(map(str, sorted(known)))
                raise ProfileError(
                    f"bucket {bucket.name!r} has servers of {bucket.tensor_parallel} GPUs, for "
                    f"which profile {profile.name} has no prices (it has {degrees})",
                    hint="another --profile, or libra bench --calibrate recipe.yaml",
                )

    def layout_of(self, plan: Plan, slots: Sequence[Slot]) -> Layout:
        """The plan as numbers of servers and of ranks."""
        sizes = {slot.id: slot.num_devices for slot in slots}
        workers = tuple(sizes.get(slot, 1) for slot in plan.gradient)
        ranks = sum(sizes.get(slot, 1) for slot in plan.train) + sum(workers)
        shares = serving_when_idle(self.recipe.nodes, slots)
        always = tuple(server for server in plan.servers if server[0] not in shares)
        return Layout(
            planned_buckets(replace(plan, servers=always)),
            max(1, ranks),
            workers=workers if plan.train else (),
            idle=idle_servers(plan, shares),
            models=counted(self.recipe.models, dict(plan.models)),
        )

    def candidates(self, search: Search, now: Observation) -> Iterator[Candidate]:
        """Every choice of training slots, with its predicted times.

        Raises:
            NothingFits: none of them can run; says which constraint fails first.
        """
        plans = [
            (plan, slots)
            for slots in self._shapes(now, frozenset(search.table.degrees))
            for models in self._models(slots, now)
            for plan in self._plans(self._free(slots, now, models), now.plan, models)
        ]
        found = [(plan, slots, self.layout_of(now.working(plan), slots)) for plan, slots in plans]
        served = {layout.models for *_, layout in found}
        searches = {models: search.served_by(models) for models in served}
        timed = [
            (plan, slots, layout, searches[layout.models].times(layout))
            for plan, slots, layout in found
        ]
        if not any(times.step_s < float("inf") for *_, times in timed):
            raise self._nothing(search, now, [plan for plan, _ in plans])
        roles = roles_of(now.plan)
        for plan, slots, layout, times in timed:
            changed = sum(role != roles.get(slot) for slot, role in roles_of(plan).items())
            yield Candidate(layout, times, (changed,), partial(_placed, plan, slots))

    def moves(
        self, now: Observation, then: Plan, slots: Sequence[Slot], profile: Profile
    ) -> tuple[SlotMove, ...]:
        """The slots whose role changes: those that are no more, and the others in their order."""
        roles, after, prices = roles_of(now.plan), roles_of(then), profile.moves
        moves, there = [], {slot.id for slot in slots}
        for slot in (*(slot for slot in now.slots if slot.id not in there), *slots):
            old, new = roles.get(slot.id, IDLE), after.get(slot.id, IDLE)
            if old == new:
                continue
            seconds = prices.start(slot.num_devices)
            if new in _TRAINS:
                seconds = prices.to_training_s
            elif old in _TRAINS:
                seconds = prices.arrive(slot.num_devices)
            moves.append(SlotMove(slot.id, old, new, seconds))
        return tuple(moves)

    def cost_s(self, now: Observation, chosen: Candidate, then: Plan, search: Search) -> Seconds:
        """Return the cost of the moves in seconds, with a restart where the base group changes."""
        _, slots = chosen.place()
        return change_cost_s(self.layout_of, search, now, then, slots, restarts=self.elastic)

    def _shapes(self, now: Observation, degrees: Set[int]) -> Iterator[tuple[Slot, ...]]:
        """The slots there are; in a run under way also with servers joined and split."""
        yield now.slots
        if self.elastic and self.recipe.rollout.buckets:
            sizes = {bucket.tensor_parallel for bucket in self.recipe.rollout.buckets} & degrees
            serving = dict(now.plan.servers).keys() - dict(now.pins).keys()
            yield from reshaped(now.slots, slots_of(self.recipe), sizes, serving)

    def _models(self, slots: tuple[Slot, ...], now: Observation) -> Iterable[Mapping[SlotId, str]]:
        """Which slots may serve frozen models; others than today's once a run has told what is
        asked of these."""
        if not self.elastic or not now.workload.models:
            return [dict(now.plan.models)]
        return neighbours(self.recipe.models, now.plan, slots, dict(now.pins))

    def _free(
        self, slots: tuple[Slot, ...], now: Observation, models: Mapping[SlotId, str]
    ) -> tuple[Slot, ...]:
        """The slots without those of frozen models; in a run under way, what may not move is
        fixed."""
        left = tuple(slot for slot in slots if slot.id not in models)
        return fixed_slots(left, dict(now.pins), now.plan.train[0]) if self.elastic else left

    def _plans(
        self, slots: tuple[Slot, ...], current: Plan, models: Mapping[SlotId, str]
    ) -> Iterator[Plan]:
        seen: set[frozenset[SlotId]] = set()
        for train in _choices(slots, current):
            if train in seen or len(slots) - len(train) < self.recipe.planner.min_rollout:
                continue
            seen.add(train)
            base = tuple(slot for slot in current.train if slot in train) if self.elastic else ()
            beside = train - set(base) if base else frozenset()
            why = f"{len(train)} of {len(slots)} slots train{'s' * (len(train) == 1)}"
            try:
                plan = plan_with(self.recipe, slots, train - beside, why, gradient=beside)
            except PlanError:
                continue
            yield replace(plan, train=base or plan.train, models=tuple(models.items()))

    def _nothing(self, search: Search, now: Observation, plans: list[Plan]) -> NothingFits:
        if not plans:
            return NothingFits(
                "recipe",
                "no choice of training slots fits the nodes and buckets of the recipe",
                hint="libra run --dry-run recipe.yaml",
            )
        most = max(plans, key=lambda plan: (len(plan.train), -len(plan.gradient)))
        layout = self.layout_of(now.working(most), now.slots)
        if not search.training.fits(layout.base_gpus):
            return search.training.refusal(layout.base_gpus)
        if lacking := search.training.lacking(layout.base_gpus, layout.workers):
            return NothingFits(
                "trainer memory",
                f"{lacking}, and may use {search.profile.facts.usable_gib:.0f}",
                hint="larger slots, or lower model.max_len or training.micro_batch_tokens",
            )
        if now.gone:
            return lacks_hosts(now)
        longest = search.workload.longest.context
        return NothingFits(
            "KV cache",
            f"no bucket of the recipe has servers that hold a trajectory of {longest:,} tokens",
            hint="raise tensor_parallel of the last bucket, or lower model.max_len",
        )


def fixed_slots(
    slots: Iterable[Slot], pins: Mapping[SlotId, Role], head: SlotId
) -> tuple[Slot, ...]:
    """The slots, with those that are pinned and the trainer's first bound to their side."""
    serving = {slot for slot, role in pins.items() if role is Role.ROLLOUT}
    sides = {slot: Pool.ROLLOUT if slot in serving else Pool.TRAIN for slot in (*pins, head)}
    return tuple(replace(slot, pool=sides.get(slot.id, slot.pool)) for slot in slots)


def _choices(slots: tuple[Slot, ...], current: Plan) -> Iterator[frozenset[SlotId]]:
    """Sets of training slots: today's first, then every number in several orders."""
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
    """Sort slots by their place on their node: the first of every
    node, then the second, and so on.
    """
    rank: dict[SlotId, int] = {}
    seen: dict[str, int] = {}
    for slot in slots:
        rank[slot.id] = seen[slot.node] = seen.get(slot.node, 0) + 1
    return sorted(free, key=lambda slot: rank[slot])


def _placed(plan: Plan, slots: tuple[Slot, ...]) -> tuple[Plan, tuple[Slot, ...]]:
    return plan, slots
