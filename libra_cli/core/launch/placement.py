"""Which slot does what at first, while nothing is known but the recipe: the split it gives.

The planner replaces it before anything starts wherever there are prices (``planning.first_plan``).
The control law of ``initial_plan``:

- A slot of pool ``rollout`` serves, one of pool ``train`` trains. That is never changed.
- ``auto`` and ``hybrid`` slots are free. They train, in the order of the nodes, until a third of
  all slots (rounded up) trains; the rest serves. A third, because the two halves of an agentic step
  are seldom equal: decoding reads every weight once a token while training reads them once a batch,
  so rollout is the larger half at the usual lengths. It is a place to start from, not an optimum:
  with short answers it gives rollout too much, with very long ones too little.
- The trainer backend may refuse a number of ranks on each node (accelerate gives every machine the
  same). If it refuses a third, more free slots train, one at a time, and if no larger number works,
  fewer.
- Buckets are filled in the order of the recipe: a bucket takes slots with exactly
  ``tensor_parallel`` GPUs (a slot without GPUs counts as 1), first those with a ``slots`` count,
  then the one without takes what is left of its shape. No slot may be left over. Slots that are
  joined while a run is under way have the bucket of their size that takes what is left, or the
  last; the counts then bind the others no more.
- A run on demonstrations has no rollout: every slot trains.
- Open nodes have no slots yet. About a third of their GPUs trains, as many on each of its nodes,
  and the rest serves with equal servers: of a bucket's shape, or as large as there is room for,
  since whether smaller ones hold the model nobody knows before there are prices.

Guarantee: a plan has at least one train slot and, but on demonstrations, one server; every slot has
exactly one role, and the same recipe gives the same plan. Limit: it looks at no measurement and
proposes no move; that is ``libra_cli.core.planning.search``.
"""

from __future__ import annotations

from collections import Counter

from libra_cli.config.errors import RecipeError
from libra_cli.config.problems import Problem
from libra_cli.config.recipe import NodeSpec, Recipe
from libra_cli.config.rollout import BucketSpec
from libra_cli.core.launch.gpu_nodes import GpuNodes
from libra_cli.core.launch.trainer_backend import TrainerBackend, ranks_per_node, trainer_backend
from libra_cli.core.types import Bucket, Plan, Pool, Slot, SlotId


class PlanError(RecipeError):
    """No plan fits the recipe. ``problem`` names the fields; its reason has both numbers."""

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(f"{key}: {reason}")
        self.problem = Problem((key, "nodes", "rollout.buckets"), reason)


NEAR = 16
"""GPUs more or fewer than a third that may train where that leaves fewer without work."""
IMITATES = "every slot trains on demonstrations"
SEATS = 128
"""Requests that a server of open nodes runs at a time; its KV cache is what admits them."""


def slots_of(recipe: Recipe) -> tuple[Slot, ...]:
    """Every slot of the planner, in the order of the recipe. A slot of pool ``auto`` is hybrid.

    Of open nodes: those of ``initial_plan``, until there is another plan.
    """
    if recipe.has_open_nodes:
        return _cut_up(recipe)[1]
    free = Pool.TRAIN if recipe.demonstrations else Pool.HYBRID
    return tuple(slot for node in recipe.nodes for slot in _slots_of_node(node, free))


def open_nodes(recipe: Recipe) -> GpuNodes:
    """The nodes of a recipe that leaves it to the planner what slots they have."""
    return GpuNodes(tuple((node.name, node.gpus) for node in recipe.planned_nodes))


def shapes_of(recipe: Recipe) -> tuple[int, ...]:
    """Tensor-parallel degrees that servers of open nodes may have: the buckets', or any."""
    degrees = open_nodes(recipe).degrees
    if recipe.rollout.buckets is None:
        return degrees
    return tuple(d for d in degrees if d in {b.tensor_parallel for b in recipe.rollout.buckets})


def seats_of(recipe: Recipe) -> int:
    """The most requests that any server runs at the same time."""
    if recipe.rollout.buckets is None:
        return SEATS if recipe.has_open_nodes else BucketSpec().max_num_seqs
    return max(bucket.max_num_seqs for bucket in recipe.rollout.buckets)


def initial_plan(recipe: Recipe) -> Plan:
    """The first plan of a run.

    Raises:
        PlanError: there is none.
        PluginError: there is no trainer backend of the recipe's name.
    """
    if recipe.has_open_nodes:
        return _cut_up(recipe)[0]
    slots = slots_of(recipe)
    if recipe.demonstrations:
        return plan_with(recipe, slots, _trained(slots), IMITATES)
    train, reason = _choose_train(slots, trainer_backend(recipe.training.backend))
    return plan_with(recipe, slots, train, reason)


def plan_with(
    recipe: Recipe,
    slots: tuple[Slot, ...],
    train: frozenset[SlotId],
    why: str,
    *,
    gradient: frozenset[SlotId] = frozenset(),
) -> Plan:
    """The plan in which exactly ``train`` is the core and ``gradient`` are workers beside it.

    ``PlanError`` if the recipe has none.
    """
    serving = tuple(slot for slot in slots if slot.id not in train | gradient)
    if recipe.demonstrations:
        _check_no_rollout(serving)
    else:
        _check_halves(len(slots), train, serving)
    training = [slot for slot in slots if slot.id in train]
    _check_trainer(training, trainer_backend(recipe.training.backend))
    if recipe.demonstrations:
        return Plan((), tuple(slot.id for slot in slots if slot.id in train), (why,))
    if recipe.has_open_nodes:
        servers = _of_any_shape(recipe, serving)
    else:
        buckets = recipe.rollout.buckets or (BucketSpec(),)
        servers = _fill_buckets(buckets, serving, max_len=recipe.model.max_len)
    return Plan(
        servers=servers,
        train=tuple(slot.id for slot in slots if slot.id in train),
        reasons=(why, _describe(servers)),
        gradient=tuple(slot.id for slot in slots if slot.id in gradient),
    )


def _cut_up(recipe: Recipe) -> tuple[Plan, tuple[Slot, ...]]:
    """The first plan of open nodes, and its slots."""
    if recipe.demonstrations:
        return _all_training(recipe)
    nodes, shapes = open_nodes(recipe), shapes_of(recipe)
    if not shapes:
        raise PlanError(
            "rollout.buckets",
            f"have no tensor_parallel for which a node has room: nodes have up to "
            f"{max(number for _, number in nodes.nodes)} GPUs, and servers 1, 2, 4 or 8",
        )
    third, least = -(-nodes.gpus // 3), recipe.planner.min_rollout
    found = [
        (nodes.gpus - ranks - degree * servers, -degree, abs(ranks - third), ranks)
        for ranks in range(max(1, third - NEAR), min(nodes.gpus, third + NEAR + 1))
        if (base := nodes.base(ranks, ranks))
        for degree in shapes
        if (servers := nodes.room(degree, base)) >= least
    ]
    if not found:
        raise PlanError(
            "nodes",
            f"give {_count(nodes.gpus, 'GPU')}: too few for a trainer and {_count(least, 'server')}"
            f" of {shapes[0]} ({_more_room(nodes.gpus, least)})",
        )
    _, degree, _, ranks = min(found)
    base = nodes.base(ranks, ranks)
    slots = nodes.servers({-degree: nodes.room(-degree, base)}, base)
    why = (
        f"{_count(ranks, 'GPU')} of {nodes.gpus} train, about a third of them to begin with, "
        "beside servers as large as there is room for"
    )
    every = (*slots, *base)
    return plan_with(recipe, every, frozenset(slot.id for slot in base), why), every


def _more_room(gpus: int, least: int) -> str:
    """Return what makes room for a trainer and the least number of servers."""
    if gpus == 1:
        return "have both share it: nodes[].share: {rollout: 0.3, train: 0.6}"
    return "give more, or lower planner.min_rollout" if least > 1 else "give more"


def _all_training(recipe: Recipe) -> tuple[Plan, tuple[Slot, ...]]:
    """The largest world that open nodes have room for, with as many ranks on each node it has."""
    nodes = open_nodes(recipe)
    worlds = (nodes.base(ranks, ranks) for ranks in range(nodes.gpus, 0, -1))
    base = next(filter(None, worlds))
    train = frozenset(slot.id for slot in base)
    return plan_with(recipe, base, train, IMITATES), base


def _of_any_shape(recipe: Recipe, serving: tuple[Slot, ...]) -> tuple[tuple[SlotId, Bucket], ...]:
    """Servers on slots of open nodes, each with as many GPUs as its slot has."""
    shapes, seats = shapes_of(recipe), seats_of(recipe)
    for slot in serving:
        if len(slot.gpus) not in shapes:
            raise PlanError(
                "nodes",
                f"slot {slot.id} has {_count(len(slot.gpus), 'GPU')}, and a server has "
                f"{', '.join(map(str, shapes))}",
            )
    longest = recipe.model.max_len
    return tuple(
        (slot.id, Bucket(f"TP{(n := len(slot.gpus))}", n, seats, longest)) for slot in serving
    )


def _slots_of_node(node: NodeSpec, free: Pool) -> tuple[Slot, ...]:
    """Return the node's slots; ``free`` is the pool of those that the recipe binds to no side."""
    number = node.gpus_per_slot
    step = number if node.share is None else 0  # else all have the same GPU
    return tuple(
        Slot(
            id=f"{node.name}/{index}",
            node=node.name,
            gpus=tuple(range(index * step, index * step + number)),
            pool=free if pool in ("auto", "hybrid") else Pool(pool),
        )
        for index, pool in enumerate(node.slot_pools)
        if pool != "models"  # ``core.frozen``
    )


def _choose_train(
    slots: tuple[Slot, ...], backend: TrainerBackend
) -> tuple[frozenset[SlotId], str]:
    fixed = [slot.id for slot in slots if slot.pool is Pool.TRAIN]
    free = [slot.id for slot in slots if slot.pool is Pool.HYBRID]
    if not free:
        train = frozenset(fixed)
        return train, f"the pools of the recipe give {_count(len(train), 'slot')} to training"
    target = -(-len(slots) // 3)
    serves = any(slot.pool is Pool.ROLLOUT for slot in slots)
    most = len(free) if serves else len(free) - 1
    wanted = min(max(target - len(fixed), 0 if fixed else 1), most)
    order = [*range(wanted, most + 1), *range(wanted - 1, -1, -1)]
    found: list[tuple[bool, frozenset[SlotId]]] = []
    for number in order:
        train = frozenset(fixed + free[:number])
        ranks = ranks_per_node(slot for slot in slots if slot.id in train)
        if train and not backend.refuses(ranks):
            found.append((len(set(ranks.values())) > 1, train))
    if not found:
        return frozenset(fixed + free[:wanted]), ""
    _, train = min(found, key=lambda one: one[0])  # of even ones the first, else the first
    return train, _told_split(len(train), len(slots), by_pool=len(fixed))


def _told_split(train: int, slots: int, *, by_pool: int) -> str:
    """Return how many slots train to begin with, and why so many."""
    told = f"{train} of {slots} slots train{'s' * (train == 1)} to begin with, "
    if train == by_pool:
        return f"{told}as the pools of the recipe say"
    third = "a third of them, rounded up"
    if train != -(-slots // 3):
        third = "as near to a third of them as pools and nodes allow"
    return told + third + (f"; {by_pool} by the recipe's pools" if by_pool else "")


def _check_halves(number: int, train: frozenset[SlotId], serving: tuple[Slot, ...]) -> None:
    if not train or not serving:
        raise PlanError(
            "nodes",
            f"give {_count(number, 'slot')}: {len(train)} would train and {len(serving)} would "
            "serve, but at least one of each is needed (raise slots, or change pool)",
        )


def _trained(slots: tuple[Slot, ...]) -> frozenset[SlotId]:
    return frozenset(slot.id for slot in slots if slot.pool is Pool.TRAIN)


def _check_no_rollout(serving: tuple[Slot, ...]) -> None:
    if serving:
        raise PlanError(
            "demonstrations",
            f"leave nothing to do for slot {serving[0].id}, which does not train: leave its pool "
            "or share out, or leave demonstrations out",
        )


def _check_trainer(train: list[Slot], backend: TrainerBackend) -> None:
    if refusal := backend.refuses(ranks_per_node(train)):
        raise PlanError("nodes", refusal)
    if len({bool(slot.gpus) for slot in train}) > 1:
        raise PlanError("nodes", "train slots with GPUs and without cannot form one world")


def _fill_buckets(
    buckets: tuple[BucketSpec, ...], serving: tuple[Slot, ...], *, max_len: int
) -> tuple[tuple[SlotId, Bucket], ...]:
    joined = [slot for slot in serving if slot.is_joined]
    chosen = {slot.id: bucket_of_size(buckets, slot, max_len=max_len) for slot in joined}
    free = [slot for slot in serving if not slot.is_joined]
    order = sorted(enumerate(buckets), key=lambda item: item[1].slots is None)
    for index, spec in order:
        for slot in _take(index, spec, free, exactly=not joined):
            free.remove(slot)
            chosen[slot.id] = _bucket(spec, max_len)
    if free:
        shape, given = free[0].num_devices, _degrees(buckets)
        raise PlanError(
            "rollout.buckets",
            f"none is left for {_count(len(free), 'rollout slot')} such as {free[0].id}, which "
            f"needs tensor_parallel {shape}; the buckets have {given}",
        )
    return tuple((slot.id, chosen[slot.id]) for slot in serving)


def bucket_of_size(buckets: tuple[BucketSpec, ...], slot: Slot, *, max_len: int) -> Bucket:
    """The recipe's bucket that takes what is left of the slot's size, else the last of the size.

    Raises:
        PlanError: no bucket has its size.
    """
    fitting = [spec for spec in buckets if spec.tensor_parallel == slot.num_devices]
    if not fitting:
        raise PlanError(
            "rollout.buckets",
            f"none is for slot {slot.id}, which needs tensor_parallel {slot.num_devices}; the "
            f"buckets have {_degrees(buckets)}",
        )
    spec = next((spec for spec in fitting if spec.slots is None), fitting[-1])
    return _bucket(spec, max_len)


def _bucket(spec: BucketSpec, max_len: int) -> Bucket:
    return Bucket(
        name=spec.name,
        tensor_parallel=spec.tensor_parallel,
        max_num_seqs=spec.max_num_seqs,
        up_to_tokens=spec.up_to_tokens or max_len,
    )


def _degrees(buckets: tuple[BucketSpec, ...]) -> str:
    return ", ".join(f"{bucket.name} {bucket.tensor_parallel}" for bucket in buckets)


def _take(index: int, spec: BucketSpec, free: list[Slot], *, exactly: bool) -> list[Slot]:
    fitting = [slot for slot in free if slot.num_devices == spec.tensor_parallel]
    wanted = max(len(fitting), 1) if spec.slots is None else spec.slots
    if not exactly:  # slots have been joined since the recipe was written
        wanted = min(wanted, len(fitting))
    if len(fitting) < wanted:
        key = "tensor_parallel" if spec.slots is None else "slots"
        raise PlanError(
            f"rollout.buckets[{index}].{key}",
            f"bucket {spec.name!r} needs {_count(wanted, 'rollout slot')} with exactly "
            f"{_count(spec.tensor_parallel, 'GPU')}, but there {_are(len(fitting))}; left over: "
            f"{_sizes(free)}",
        )
    return fitting[:wanted]


def _sizes(free: list[Slot]) -> str:
    sizes = Counter(len(slot.gpus) for slot in free)
    return (
        "no slots"
        if not free
        else ", ".join(
            f"{_count(number, 'slot')} with {_count(size, 'GPU')}"
            for size, number in sorted(sizes.items())
        )
    )


def _describe(servers: tuple[tuple[SlotId, Bucket], ...]) -> str:
    counts = Counter((bucket.name, bucket.tensor_parallel) for _, bucket in servers)
    parts = [
        f"{number} x {name} (tensor parallel {degree})" for (name, degree), number in counts.items()
    ]
    return f"{_count(len(servers), 'server')}: {', '.join(parts)}"


def _count(number: int, word: str) -> str:
    return f"{number} {word}" + ("" if number == 1 else "s")


def _are(number: int) -> str:
    return "is 1" if number == 1 else f"are {number}"
