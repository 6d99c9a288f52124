"""For the slots there are: a plan of the recipe, by few moves, or a reason to stay."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from libra_cli.config.recipe import Recipe
from libra_cli.core.costs.profile import NothingFits, Profile
from libra_cli.core.launch.joined_slots import part_slots
from libra_cli.core.launch.placement import initial_plan, plan_with, seats_of, slots_of
from libra_cli.core.observation import MeasuredStep, Observation
from libra_cli.core.planning.planner import Candidate, Decision, Planner
from libra_cli.core.planning.recipe_placement import RecipePlacement, _choices
from libra_cli.core.planning.search import Layout, PlannerSettings, Search, Times
from libra_cli.core.types import Plan, Role, Slot
from libra_cli.core.workload import TrajectorySample, Workload
from libra_cli.sim.profiles import load_profile
from tests.research.changed_costs import with_kv_share

PROFILE = load_profile("a800-qwen3-8b")


def recipe_of(nodes: int, **node: Any) -> Recipe:
    hosts = [{"host": f"n{index}", "gpus": 8, **node} for index in range(nodes)]
    buckets = [
        {"name": "short", "tensor_parallel": 4, "max_num_seqs": 64},
    ]
    return Recipe.model_validate(
        {"nodes": hosts, "model": {"path": "/m"}, "rollout": {"buckets": buckets}}
    )


def work(tokens: int, batch: int = 512) -> Workload:
    return Workload((TrajectorySample(500, tokens), TrajectorySample(500, 2 * tokens)), batch)


def propose_plan(
    recipe: Recipe,
    slots: tuple[Slot, ...],
    today: Plan,
    workload: Workload,
    profile: Profile,
    *,
    elastic: bool = False,
    **seen: Any,
) -> Decision:
    """What the planner of this recipe decides."""
    seats = seats_of(recipe)
    settings = PlannerSettings(max_num_seqs=seats)
    space = RecipePlacement(recipe, elastic=elastic)
    planner = Planner(space, lambda plan, evidence: profile, settings)
    return planner.decide(Observation(1, today, slots, workload, **seen))


def layout_of(plan: Plan, slots: tuple[Slot, ...]) -> Layout:
    return RecipePlacement(recipe_of(1)).layout_of(plan, slots)


def test_short_trajectories_give_slots_to_training() -> None:
    recipe = recipe_of(4, slots=2)
    slots, today = slots_of(recipe), initial_plan(recipe)
    decision = propose_plan(recipe, slots, today, work(200), PROFILE)
    assert decision.plan is not None
    assert len(decision.plan.train) > len(today.train)
    assert decision.after.step_s < decision.before.step_s
    moved = {move.slot for move in decision.moves}
    assert moved == set(decision.plan.train) - set(today.train)
    assert all((move.before, move.after) == ("short", "train") for move in decision.moves)
    assert decision.cost_s > 0
    assert decision.payback_steps is not None


def test_the_best_plan_stays() -> None:
    recipe = recipe_of(4, slots=2)
    slots, today = slots_of(recipe), initial_plan(recipe)
    best = propose_plan(recipe, slots, today, work(200), PROFILE).proposed
    again = propose_plan(recipe, slots, best, work(200), PROFILE)
    assert again.plan is None
    assert again.moves == ()
    assert "within the tolerance" in again.why_not


def test_a_gain_that_cannot_pay_back_says_so() -> None:
    recipe = recipe_of(4, slots=2)
    slots, today = slots_of(recipe), initial_plan(recipe)
    decision = propose_plan(recipe, slots, today, work(200), PROFILE, steps_left=0)
    assert decision.plan is None
    assert decision.proposed != today
    assert "do not pay back" in decision.why_not


def test_pools_are_kept() -> None:
    recipe = recipe_of(4, pool=["rollout", "hybrid"], slots=2)
    slots = slots_of(recipe)
    train = frozenset(f"n{index}/1" for index in range(4))
    today = plan_with(recipe, slots, train, "as given")
    decision = propose_plan(recipe, slots, today, work(20_000), PROFILE)
    assert {slot for slot, _ in decision.proposed.servers} >= {f"n{index}/0" for index in range(4)}


@pytest.mark.parametrize("timed", [False, True])
def test_servers_of_a_host_that_is_given_up_are_not_counted_and_others_take_their_place(
    timed: bool,
) -> None:
    recipe, load = recipe_of(4, slots=2), work(6000)
    slots = slots_of(recipe)
    best = propose_plan(recipe, slots, initial_plan(recipe), load, PROFILE).proposed
    today = replace(best, train=best.train[:1], gradient=best.train[1:])
    away = {"n3/0", "n3/1"}
    left = replace(today, servers=tuple(one for one in today.servers if one[0] not in away))
    real = propose_plan(recipe, slots, left, load, PROFILE, elastic=True).before
    step = MeasuredStep(real.step_s, real.train_s, real.step_s - real.train_s, 0.0, 0.0)
    seen = {
        "pins": tuple((slot, Role.ROLLOUT) for slot in sorted(away)),
        "measured": (step,) * 6 * timed,
        "gone": frozenset({"n3"}),
    }
    decision = propose_plan(recipe, slots, today, load, PROFILE, elastic=True, **seen)
    assert decision.before.step_s == pytest.approx(real.step_s, rel=0.01)
    assert [(move.slot, move.after) for move in decision.moves] == [("n1/0", "short")]
    assert decision.plan is not None
    assert away < dict(decision.plan.servers).keys(), "they serve again once their host is back"


def test_where_no_server_works_and_none_may_come_the_hosts_that_are_given_up_are_named() -> None:
    recipe = recipe_of(1, slots=2)
    slots, today = slots_of(recipe), initial_plan(recipe)
    gone = frozenset({"n0"})
    pins = tuple((slot, Role.ROLLOUT) for slot in dict(today.servers))
    with pytest.raises(NothingFits, match="without hosts that are given up: n0") as error:
        propose_plan(recipe, slots, today, work(3000), PROFILE, elastic=True, pins=pins, gone=gone)
    assert error.value.constraint == "hosts"


def test_the_launcher_gets_the_same_number_of_ranks_on_every_node() -> None:
    recipe = recipe_of(3, slots=2)
    slots = slots_of(recipe)
    decision = propose_plan(recipe, slots, initial_plan(recipe), work(3000), PROFILE)
    nodes = [slot.split("/")[0] for slot in decision.proposed.train]
    assert len({nodes.count(node) for node in nodes}) == 1


def test_slots_without_gpus_count_as_one() -> None:
    recipe = Recipe.model_validate(
        {"nodes": [{"host": "local", "slots": 4}], "model": {"path": "/m"}}
    )
    slots = slots_of(recipe)
    decision = propose_plan(recipe, slots, initial_plan(recipe), work(300, 16), tiny(PROFILE))
    layout = layout_of(decision.proposed, slots)
    assert layout.rollout_gpus + layout.training_gpus == 4


def test_a_trajectory_too_long_for_the_buckets_is_refused() -> None:
    recipe = recipe_of(4, slots=2)
    slots = slots_of(recipe)
    profile = with_kv_share(PROFILE, 0.01)
    with pytest.raises(NothingFits) as error:
        propose_plan(recipe, slots, initial_plan(recipe), work(15_000), profile)
    assert error.value.constraint == "KV cache"


def tiny(profile: Profile) -> Profile:
    facts = replace(profile.facts, parameters=1e6, layers=2, hidden=64, vocabulary=1000)
    return replace(profile, training=replace(profile.training, facts=facts))


# -- a run that is under way -----------------------------------------------------------------------


def test_a_run_keeps_its_core_and_gets_gradient_workers() -> None:
    recipe = recipe_of(4, slots=2)
    slots, today = slots_of(recipe), initial_plan(recipe)
    decision = propose_plan(recipe, slots, today, work(200), PROFILE, elastic=True)
    assert decision.plan is not None
    assert decision.plan.train == today.train
    assert decision.plan.gradient
    moved = {move.slot for move in decision.moves}
    assert moved == set(decision.plan.gradient)
    assert {(move.before, move.after) for move in decision.moves} == {("short", "gradient")}


def test_gradient_workers_count_as_ranks() -> None:
    recipe = recipe_of(4, slots=2)
    slots, today = slots_of(recipe), initial_plan(recipe)
    plan = propose_plan(recipe, slots, today, work(200), PROFILE, elastic=True).proposed
    ranks = 4 * (len(plan.train) + len(plan.gradient))
    assert layout_of(plan, slots).training_gpus == ranks


def test_taking_slots_from_the_core_costs_a_restart_of_it() -> None:
    recipe = recipe_of(4, slots=2)
    slots = slots_of(recipe)
    train = frozenset(f"n{index}/{slot}" for index in range(3) for slot in range(2))
    today = plan_with(recipe, slots, train, "as given")
    still = propose_plan(recipe, slots, today, work(20_000), PROFILE)
    moving = propose_plan(recipe, slots, today, work(20_000), PROFILE, elastic=True)
    assert moving.proposed.train[0] == today.train[0]
    assert len(moving.proposed.train) < len(today.train)
    assert moving.cost_s >= still.cost_s


def test_slots_that_change_sides_with_others_cost_what_both_halves_lack_meanwhile() -> None:
    """Slots of four GPUs, of which 16 serve and 16 train, one of them as a gradient worker."""
    recipe = recipe_of(4, slots=2)
    slots, core = slots_of(recipe), frozenset({"n0/0", "n0/1", "n1/0"})

    def plan(*beside: str, core: frozenset[str] = core) -> Plan:
        return plan_with(recipe, slots, core, "as given", gradient=frozenset(beside))

    space, today, prices = RecipePlacement(recipe), plan("n1/1"), PROFILE.moves
    seen = (MeasuredStep(20.0, 10.0, 0.0, 0.0, 1.0),)
    now = Observation(1, today, slots, work(3000), measured=seen)
    search = Search(PROFILE, now.workload, space.gpus, PlannerSettings())

    def cost_s(then: Plan) -> float:
        layout = space.layout_of(then, slots)
        chosen = Candidate(layout, search.times(layout), (), lambda: (then, slots))
        return space.cost_s(now, chosen, then, search)

    assert cost_s(today) == 0
    layout = space.layout_of(today, slots)
    (bucket,) = layout.buckets
    three = (replace(bucket, servers=3),)

    def lost(seconds: float, ranks: int, workers: tuple[int, ...] = ()) -> float:
        """Seconds lost by having three servers and so many ranks for so long."""
        meanwhile = Layout(three, ranks, workers=workers)
        return seconds * (1 - search.times(layout).step_s / search.times(meanwhile).step_s)

    step_end_s, trained_s = 5.0, prices.to_training_s
    later_s = step_end_s + prices.arrive(4) - trained_s
    known = now.workload
    times = search.times(layout)
    steps = known.open(known.in_flight(times.train_s / times.step_s))
    tokens = steps * known.trajectories / 4 * known.mean_context / 2
    again_s = tokens * PROFILE.servers[4].linear().prefill_token_s / 4
    swap_s = lost(trained_s, 12) + lost(later_s, 16, (4,)) + again_s
    assert cost_s(plan("n3/1")) == pytest.approx(swap_s)
    # The core restarts, and the server starts beside it.
    other = plan("n1/1", core=core - {"n1/0"} | {"n3/0"})
    after_s = lost(step_end_s + prices.arrive(4) - prices.resize_s, 16, (4,))
    assert cost_s(other) == pytest.approx(prices.resize_s + after_s + again_s)
    beside = initial_plan(recipe_of(4, slots=2))
    still = Observation(0, beside, slots, work(3000))
    first = replace(space, elastic=False)
    chosen = Candidate(space.layout_of(other, slots), Times(1.0, 1.0), (), lambda: (other, slots))
    assert first.cost_s(still, chosen, other, search) < prices.resize_s


LARGE = load_profile("a800-qwen3-14b")


@pytest.mark.parametrize("slots", [2, 8])
def test_no_base_group_and_no_worker_runs_that_lacks_the_memory(slots: int) -> None:
    """Of Qwen3-14B a base group has it on 6 GPUs or more, and a worker on 3: of slots of four GPUs
    the head alone has not, whatever workers are beside it, and of one GPU no worker."""
    nodes = [{"host": f"n{index}", "gpus": 8, "slots": slots} for index in range(4)]
    buckets = {"buckets": [{"tensor_parallel": 8 // slots}]}
    told = {"nodes": nodes, "model": {"path": "/m"}, "rollout": buckets}
    recipe = Recipe.model_validate(told)
    known, load, training = slots_of(recipe), work(1000), LARGE.training
    train = frozenset(slot.id for slot in known if slot.node in ("n0", "n1"))
    space, today = RecipePlacement(recipe), plan_with(recipe, known, train, "as given")
    search = Search(LARGE, load, space.gpus, PlannerSettings())
    longest, usable = load.longest.context, LARGE.facts.usable_gib
    small = set()
    for one in space.candidates(search, Observation(1, today, known, load)):
        base_gib = training.memory_gib(one.layout.base_gpus, longest)
        workers_gib = [training.of_worker.memory_gib(n, longest) for n in one.layout.workers]
        runs = max(base_gib, *workers_gib) <= usable if workers_gib else base_gib <= usable
        assert (one.times.train_s < float("inf")) == runs
        small.add(runs)
    assert small == {True, False}


def test_a_plan_that_has_trained_is_judged_by_its_steps_whatever_memory_it_is_told_to_lack() -> (
    None
):
    recipe = recipe_of(4, slots=2)
    slots = slots_of(recipe)
    today = plan_with(recipe, slots, frozenset({"n0/0"}), "as given")
    with pytest.raises(NothingFits, match="no trainer of up to 4 GPUs"):
        propose_plan(recipe, slots, today, work(1000), LARGE, elastic=True)
    seen = (MeasuredStep(60.0, 30.0, 5.0, 0.0, 1.0),)
    decision = propose_plan(recipe, slots, today, work(1000), LARGE, elastic=True, measured=seen)
    assert decision.before.step_s < float("inf")


def test_a_pinned_slot_stays_on_its_side() -> None:
    recipe = recipe_of(4, slots=2)
    slots, today = slots_of(recipe), initial_plan(recipe)
    serving = [slot for slot, _ in today.servers]
    pins = tuple((slot, Role.ROLLOUT) for slot in serving)
    decision = propose_plan(recipe, slots, today, work(200), PROFILE, elastic=True, pins=pins)
    assert not set(serving) & {*decision.proposed.train, *decision.proposed.gradient}


def test_as_many_slots_serve_as_the_recipe_wants_at_least() -> None:
    recipe = recipe_of(4, slots=2)
    least = recipe.model_copy(
        update={"planner": recipe.planner.model_copy(update={"min_rollout": 5})}
    )
    slots, today = slots_of(least), initial_plan(least)
    decision = propose_plan(least, slots, today, work(200), PROFILE, elastic=True)
    assert len(decision.proposed.servers) >= 5


# -- larger and smaller servers --------------------------------------------------------------------


def two_sizes() -> Recipe:
    """Nodes of two slots of four GPUs each, with buckets for one slot and for both together."""
    recipe = recipe_of(3, slots=2)
    small = (recipe.rollout.buckets or ())[0]
    large = small.model_copy(update={"name": "large", "tensor_parallel": 8, "slots": 0})
    rollout = recipe.rollout.model_copy(update={"buckets": (small, large)})
    return recipe.model_copy(update={"rollout": rollout})


def few_long() -> Workload:
    """Fewer trajectories than there are servers: only how fast one is played counts."""
    return work(15_000, batch=2)


def test_servers_are_joined_where_one_trajectory_is_what_all_wait_for() -> None:
    recipe = two_sizes()
    slots, today = slots_of(recipe), initial_plan(recipe)
    decision = propose_plan(recipe, slots, today, few_long(), PROFILE, elastic=True)
    assert decision.plan is not None
    joined = [slot for slot in decision.slots if slot.is_joined]
    assert joined
    assert dict(decision.plan.servers)[joined[0].id].name == "large"
    told = {move.slot: (move.before, move.after) for move in decision.moves}
    assert told[joined[0].id] == ("idle", "large")
    parts = part_slots(joined[0].id)
    assert [told[part] for part in parts] == [("short", "idle")] * 2
    gpus = [(slot.node, gpu) for slot in decision.slots for gpu in slot.gpus]
    assert len(gpus) == len(set(gpus)) == 24


def test_joined_servers_are_split_where_many_trajectories_are_to_be_played() -> None:
    recipe = two_sizes()
    slots, today = slots_of(recipe), initial_plan(recipe)
    first = propose_plan(recipe, slots, today, few_long(), PROFILE, elastic=True)
    assert first.plan is not None
    again = propose_plan(recipe, first.slots, first.plan, work(500, 2048), PROFILE, elastic=True)
    assert again.plan is not None
    assert sum(s.is_joined for s in again.slots) < sum(s.is_joined for s in first.slots)


def test_pinned_slots_are_neither_joined_nor_split() -> None:
    recipe = two_sizes()
    slots, today = slots_of(recipe), initial_plan(recipe)
    pins = tuple((slot, Role.ROLLOUT) for slot, _ in today.servers)
    decision = propose_plan(recipe, slots, today, few_long(), PROFILE, elastic=True, pins=pins)
    assert not any(slot.is_joined for slot in decision.slots or ())


def test_before_a_run_nothing_is_joined() -> None:
    recipe = two_sizes()
    slots, today = slots_of(recipe), initial_plan(recipe)
    decision = propose_plan(recipe, slots, today, few_long(), PROFILE)
    assert not any(slot.is_joined for slot in decision.slots or ())


def test_every_number_of_free_slots_is_offered_to_training() -> None:
    recipe = recipe_of(2, slots=2, pool=["train", "auto"])
    slots = slots_of(recipe)
    offered = {len(train) for train in _choices(slots, initial_plan(recipe))}
    assert offered == {2, 3, 4}
