"""A run begins with the planner's plan, and says where its prices and its work come from."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from libra_cli.app.costs import live_planner
from libra_cli.app.first_plan import Placed, explained_first_plan, first_plan
from libra_cli.cli.main import app
from libra_cli.config.recipe import Recipe
from libra_cli.core.costs.expected import guessed_lengths, samples_around
from libra_cli.core.costs.mixtures import MixtureRefused
from libra_cli.core.costs.profile import WAKE_S, NothingFits, ProfileError
from libra_cli.core.evidence import CostEvidence, Starts
from libra_cli.core.launch.gpu_nodes import gpus_of
from libra_cli.core.launch.placement import initial_plan
from libra_cli.core.launch.ports import ports_needed
from libra_cli.core.launch.process import worker_ports
from libra_cli.core.launch.trainer_backend import ranks_per_node, trainer_backend
from libra_cli.core.observation import Observation
from libra_cli.core.observed.step_work import limits_of, workload_of
from libra_cli.core.preflight.dry_run import dry_run
from libra_cli.core.reconcile.manual_plan import ordered_plan
from libra_cli.core.types import Role, Slot, node_of

A800 = frozenset({"NVIDIA A800-SXM4-80GB"})
SIX = (8, 8, 8, 8, 8, 8)
SHORT, LONG = {"generated": 300, "turns": 2}, {"generated": 9000, "turns": 6, "tool_s": 2.0}


def recipe_of(*sizes: int, name: str = "Qwen3-14B", **more: Any) -> Recipe:
    """Nodes with so many GPUs, and nothing said of what they do."""
    return Recipe.model_validate(
        {
            "nodes": [{"host": f"gpu-{n}", "gpus": size} for n, size in enumerate(sizes, 1)],
            "model": {"path": f"/models/{name}", "max_len": 32_768},
            "training": {"groups_per_step": 32, "micro_batch_tokens": 32_768},
            **more,
        }
    )


def planned(*sizes: int, lengths: dict[str, Any] | None = None, **more: Any) -> Placed:
    planner = {"profile": "a800-qwen3-14b", "lengths": lengths}
    return first_plan(recipe_of(*sizes, planner=planner, **more))


def serving(placed: Placed) -> int:
    return sum(bucket.tensor_parallel for _, bucket in placed[0].servers)


def check(recipe: Recipe, placed: Placed) -> None:
    """What a trainer, its workers and the servers need to start there."""
    plan, slots = placed
    by_id = {slot.id: slot for slot in slots}
    used = [by_id[slot] for slot in (*dict(plan.servers), *plan.train, *plan.gradient)]
    assert len(gpus_of(used)) == sum(len(slot.gpus) for slot in used), "one tenant a GPU"
    sizes = {node.name: node.gpus for node in recipe.nodes}
    assert all(gpu < sizes[node] for node, gpu in gpus_of(used))
    ranks = ranks_per_node(by_id[slot] for slot in plan.train)
    assert not trainer_backend(recipe.training.backend).refuses(ranks)
    assert node_of(plan.train[0]) == node_of(initial_plan(recipe).train[0])
    for slot, bucket in plan.servers:
        assert len(by_id[slot].gpus) == bucket.tensor_parallel


def test_short_and_long_trajectories_begin_with_other_splits() -> None:
    short, long = (planned(*SIX, lengths=lengths) for lengths in (SHORT, LONG))
    for placed in (short, long):
        check(recipe_of(*SIX), placed)
    assert serving(long) > serving(short)


@pytest.mark.parametrize("lengths", [SHORT, LONG])
def test_a_mixture_of_experts_is_planned_by_the_law_of_its_profile(lengths: dict[str, Any]) -> None:
    planner = {"profile": "a800-qwen3-30b-a3b", "lengths": lengths}
    recipe = recipe_of(*SIX, name="Qwen3-30B-A3B", planner=planner)
    check(recipe, first_plan(recipe))


def test_prices_of_a_dense_model_are_refused_for_a_mixture_of_experts() -> None:
    planner = {"profile": "a800-qwen3-14b", "lengths": SHORT}
    with pytest.raises(MixtureRefused, match="Qwen3-30B-A3B"):
        first_plan(recipe_of(*SIX, name="Qwen3-30B-A3B", planner=planner))


@pytest.mark.parametrize("sizes", [(8,), (4, 8), (6, 8, 4), (2, 2, 8, 8), (6, 6, 6), (12, 3)])
@pytest.mark.parametrize("lengths", [SHORT, LONG])
def test_nodes_of_any_sizes_get_a_plan_that_can_start(
    sizes: tuple[int, ...], lengths: dict[str, Any]
) -> None:
    more: dict[str, Any] = {"model": {"path": "/m/Qwen3-8B", "max_len": 16_384}}
    planner = {"profile": "a800-qwen3-8b", "lengths": lengths}
    recipe = recipe_of(*sizes, planner=planner, **more)
    check(recipe, first_plan(recipe))
    check(recipe, (initial_plan(recipe), first_plan(recipe_of(*sizes))[1]))


def test_a_large_trainer_stands_where_it_leaves_the_fewest_gpus_without_work() -> None:
    """By memory 15 ranks suffice for Qwen3-32B; five on each of three nodes would strand nine."""
    more: dict[str, Any] = {"model": {"path": "/m/Qwen3-32B", "max_len": 16_384}}
    training = {"groups_per_step": 32, "micro_batch_tokens": 16_384}
    recipe = recipe_of(*SIX, planner={"profile": "h100-qwen3-32b"}, training=training, **more)
    placed = first_plan(recipe)
    check(recipe, placed)
    assert [len(slot.gpus) for slot in placed[1] if slot.id in placed[0].train] == [8, 8]


def test_a_plan_says_where_its_prices_and_its_work_come_from() -> None:
    named = planned(*SIX, lengths=SHORT)[0]
    assert named.reasons[0] == "prices: a800-qwen3-14b, as planner.profile says"
    assert "about 300 generated tokens in 2 turns (planner.lengths)" in named.reasons[1]
    guessed = first_plan(recipe_of(*SIX), A800)[0]
    assert "shipped for this model and these GPUs" in guessed.reasons[0]
    assert "a guess from the limits of rollout" in guessed.reasons[1]
    traced = first_plan(recipe_of(*SIX, planner={"trace": "tau2"}), A800)[0]
    assert "trajectories of tau2" in traced.reasons[1]
    assert "planner.trace" in traced.reasons[1]


def test_without_prices_a_third_trains_and_the_plan_says_why() -> None:
    before = first_plan(recipe_of(*SIX))[0]
    assert "before the hosts are asked" in before.reasons[0]
    assert "a800-qwen3-14b" in before.reasons[0]
    unknown = first_plan(recipe_of(*SIX, name="Other-7B"), A800)[0]
    assert "no prices of this model on NVIDIA A800-SXM4-80GB" in unknown.reasons[0]
    slots = [{"host": "local", "slots": 3}]
    assert "on CPUs" in first_plan(recipe_of(nodes=slots))[0].reasons[0]
    assert unknown.servers == before.servers == initial_plan(recipe_of(*SIX)).servers
    assert "16 GPUs of 48 train" in before.reasons[1]


def test_prices_for_other_gpus_are_refused_and_those_that_ship_are_not_asked_for() -> None:
    recipe = recipe_of(*SIX, planner={"profile": "h100-qwen3-14b"})
    first_plan(recipe)
    with pytest.raises(ProfileError, match="A800"):
        first_plan(recipe, A800)


def test_named_prices_by_which_nothing_runs_are_an_error_and_shipped_ones_a_reason() -> None:
    small = recipe_of(2, planner={"profile": "a800-qwen3-14b"})
    with pytest.raises(NothingFits):
        first_plan(small)
    plan, _ = first_plan(recipe_of(2), A800)
    assert "by them no plan runs" in plan.reasons[0]
    assert plan.servers == initial_plan(recipe_of(2)).servers


def test_hybrid_slots_begin_with_the_planners_split_and_the_same_head() -> None:
    hosts = [{"host": f"n{index}", "gpus": 8, "slots": 2} for index in range(6)]
    buckets = {"buckets": [{"tensor_parallel": 4, "max_num_seqs": 64}]}
    found = {}
    for name, lengths in (("short", SHORT), ("long", LONG)):
        planner = {"profile": "a800-qwen3-14b", "lengths": lengths}
        recipe = recipe_of(nodes=hosts, planner=planner, rollout=buckets)
        plan, slots = found[name] = first_plan(recipe)
        assert plan.train[0] == initial_plan(recipe).train[0]
        assert {slot.id for slot in slots} == {*dict(plan.servers), *plan.train}
        assert {slot.pool for slot in slots} == {"hybrid"}
    assert serving(found["long"]) > serving(found["short"])


def test_a_recipe_that_leaves_no_choice_or_wants_none_keeps_its_own_split() -> None:
    hosts = [{"host": "a", "gpus": 8, "pool": "train"}, {"host": "b", "gpus": 8, "slots": 8}]
    hosts[1]["pool"] = "rollout"
    chosen = recipe_of(nodes=hosts, planner={"profile": "a800-qwen3-14b"})
    assert first_plan(chosen)[0] == initial_plan(chosen)
    hybrid = [{"host": f"n{index}", "gpus": 8, "slots": 8} for index in range(3)]
    fixed = recipe_of(nodes=hybrid, planner={"profile": "a800-qwen3-14b", "kind": "fixed"})
    assert first_plan(fixed)[0] == initial_plan(fixed)


def test_buckets_say_which_shapes_open_nodes_may_have() -> None:
    buckets = {"buckets": [{"name": "a", "tensor_parallel": 4, "max_num_seqs": 48}]}
    plan, _ = planned(*SIX, lengths=SHORT, rollout=buckets)
    assert {(b.tensor_parallel, b.max_num_seqs) for _, b in plan.servers} == {(4, 48)}


def test_mixed_servers_begin_with_several_shapes_and_say_what_alike_ones_would_take() -> None:
    placed = planned(*SIX, lengths=SHORT, rollout={"shapes": "mixed"})
    check(recipe_of(*SIX), placed)
    assert len({bucket.tensor_parallel for _, bucket in placed[0].servers}) > 1
    assert placed[0].reasons[3].startswith("mixed ")
    two = [{"name": f"b{n}", "tensor_parallel": n} for n in (2, 4)]
    both = planned(*SIX, lengths=SHORT, rollout={"shapes": "mixed", "buckets": two})
    assert {bucket.tensor_parallel for _, bucket in both[0].servers} == {2, 4}
    auto = planned(*SIX, lengths=SHORT, rollout={"shapes": "auto"})
    told = auto[0].reasons[3]
    several = len({bucket.tensor_parallel for _, bucket in auto[0].servers}) > 1
    assert told.startswith("mixed " if several else "alike: mixtures would ")


def test_as_many_servers_stay_as_the_recipe_wants_at_least() -> None:
    planner = {"profile": "a800-qwen3-14b", "lengths": SHORT, "min_rollout": 9}
    plan, _ = first_plan(recipe_of(*SIX, planner=planner))
    assert len(plan.servers) >= 9


def test_every_process_of_any_plan_has_its_ports_before_there_is_one() -> None:
    recipe = recipe_of(*SIX)
    ports = ports_needed(recipe, initial_plan(recipe))
    for lengths in (SHORT, LONG):
        plan, slots = planned(*SIX, lengths=lengths)
        by_id = {slot.id: slot for slot in slots}
        names = [
            (slot.node, name)
            for slot in (by_id[slot] for slot in plan.gradient)
            for name in worker_ports(slot)
        ]
        assert len(set(names)) == len(names)
        assert all(name in ports[node] for node, name in names)
        assert "rendezvous" in ports[node_of(plan.train[0])]


def test_a_dry_run_starts_each_process_on_its_own_gpus() -> None:
    recipe = recipe_of(*SIX, planner={"profile": "a800-qwen3-14b", "lengths": SHORT})
    placed = first_plan(recipe)
    seen: dict[str, list[str]] = {}
    for host in dry_run(recipe, placed=placed):
        for spec in host.processes:
            seen.setdefault(host.node.name, []).append(spec.env["CUDA_VISIBLE_DEVICES"])
    for gpus in seen.values():
        used = list(chain.from_iterable(held.split(",") for held in gpus))
        assert len(set(used)) == len(used)
    seeds = [
        spec.argv[spec.argv.index("--seed") + 1]
        for host in dry_run(recipe, placed=placed)
        for spec in host.processes
        if spec.process.startswith("server")
    ]
    assert len(set(seeds)) == len(placed[0].servers)


@pytest.mark.parametrize(("sleep", "to_rollout_s"), [(True, WAKE_S), (False, 90.0)])
def test_a_live_planner_learns_what_moves_take_from_its_run(
    sleep: bool, to_rollout_s: float
) -> None:
    recipe = recipe_of(*SIX, planner={"profile": "a800-qwen3-14b"}, rollout={"sleep": sleep})
    plan, _ = planned(*SIX, lengths=SHORT)
    evidence = CostEvidence(starts=Starts(to_training_s=41.0))
    priced = live_planner(recipe, A800).costs(plan, evidence)
    assert (priced.moves.to_training_s, priced.moves.to_rollout_s) == (41.0, to_rollout_s)


def test_a_slot_that_a_plan_leaves_idle_is_shown_as_that() -> None:
    """A run that goes on may have one: the trainer has left it, since its GPU is lost."""
    recipe = recipe_of(*SIX)
    plan, slots = planned(*SIX, lengths=SHORT)
    left, _ = plan.servers[-1]
    shown = dry_run(recipe, placed=(replace(plan, servers=plan.servers[:-1]), slots))
    roles = {slot.id: role for host in shown for slot, role in host.slots}
    assert roles[left] == "idle"
    assert roles.keys() == {slot.id for slot in slots}


def test_the_command_shows_the_plan_and_its_reasons(tmp_path: Path) -> None:
    path = tmp_path / "nodes.yaml"
    path.write_text(
        "nodes: [{host: 'gpu-[01-06]', gpus: 8}]\n"
        "model: {path: /models/Qwen3-14B, max_len: 16384}\n"
        "training: {micro_batch_tokens: 16384}\n"
        "planner: {profile: a800-qwen3-14b, lengths: {generated: 2000, turns: 4}}\n"
    )
    told = CliRunner().invoke(app, ["run", "--dry-run", str(path)])
    assert told.exit_code == 0
    assert "plan: prices: a800-qwen3-14b, as planner.profile says" in told.output
    assert "gpu-06/base-0.1.2.3.4.5.6.7 train" in told.output


# -- once it runs ----------------------------------------------------------------------------------


def decided(recipe: Recipe, placed: Placed, lengths: dict[str, Any], **seen: Any) -> Placed:
    spec = recipe.planner.model_copy(update={"lengths": None}).model_dump() | {"lengths": lengths}
    other = Recipe.model_validate(recipe.model_dump() | {"planner": spec})
    assert other.planner.lengths is not None
    samples = samples_around(other.planner.lengths)
    now = Observation(5, placed[0], placed[1], workload_of(recipe, samples), **seen)
    decision = live_planner(recipe, A800).decide(now)
    return decision.proposed, decision.slots


def test_gpus_that_train_with_a_critic_are_all_in_the_base_group() -> None:
    training = {"groups_per_step": 32, "micro_batch_tokens": 32_768, "advantage": "gae"}
    plan, _ = planned(*SIX, lengths=SHORT, training=training)
    assert plan.gradient == ()
    several = planned(*SIX, lengths=SHORT, training={**training, "advantage": "grpo"})
    assert several[0].gradient != ()


def test_a_run_whose_work_was_guessed_wrong_changes_split_and_shapes_and_keeps_its_base() -> None:
    recipe = recipe_of(*SIX)
    first = planned(*SIX, lengths=SHORT)
    then = decided(recipe, first, LONG)
    check(recipe, then)
    assert serving(then) > serving(first)
    assert then[0].train == first[0].train
    back = decided(recipe, then, SHORT)
    check(recipe, back)
    assert serving(back) < serving(then)


def test_a_base_group_that_is_too_large_is_made_anew_on_the_same_head() -> None:
    recipe = recipe_of(8, name="Qwen3-8B")
    planner = {"profile": "a800-qwen3-8b", "lengths": SHORT}
    first = first_plan(recipe_of(8, name="Qwen3-8B", planner=planner))
    then = decided(recipe, first, {"generated": 20_000, "turns": 9, "tool_s": 5.0})
    check(recipe, then)
    assert serving(then) > serving(first)
    assert then[0].train != first[0].train
    assert node_of(then[0].train[0]) == node_of(first[0].train[0])


def test_pinned_slots_keep_their_roles() -> None:
    recipe = recipe_of(*SIX)
    first = planned(*SIX, lengths=LONG)
    held = [slot for slot, _ in first[0].servers]
    pins = tuple((slot, Role.ROLLOUT) for slot in held)
    then = decided(recipe, first, SHORT, pins=pins)
    assert set(held) <= set(dict(then[0].servers))
    short = planned(*SIX, lengths=SHORT)
    workers = tuple((slot, Role.GRADIENT) for slot in short[0].gradient)
    assert workers
    then = decided(recipe, short, LONG, pins=workers)
    assert set(short[0].gradient) <= set(then[0].gradient)


def test_an_order_by_hand_counts_the_slots_that_the_plan_has() -> None:
    recipe = recipe_of(*SIX)
    plan, slots = planned(*SIX, lengths=LONG)
    roles = dict.fromkeys(dict(plan.servers), Role.ROLLOUT)
    roles |= dict.fromkeys(plan.train, Role.TRAIN) | dict.fromkeys(plan.gradient, Role.GRADIENT)
    to = {Role.GRADIENT: len(plan.gradient) + 1}
    ordered = ordered_plan(recipe, slots, roles, plan.train, to, {})
    assert len(ordered.servers) == len(plan.servers) - 1
    check(recipe, (ordered, slots))
    again = decided(recipe, (ordered, slots), LONG)
    check(recipe, again)


def test_a_guess_stays_within_the_limits_of_the_recipe() -> None:
    recipe = recipe_of(8)
    samples = workload_of(recipe, samples_around(guessed_lengths(limits_of(recipe)))).samples
    assert max(sample.context for sample in samples) <= recipe.model.max_len
    mean = sum(sample.generated for sample in samples) / len(samples)
    assert mean == pytest.approx(guessed_lengths(limits_of(recipe)).generated, rel=0.15)
    assert all(isinstance(slot, Slot) for slot in first_plan(recipe)[1])


def test_the_first_plan_is_explained_as_one_that_nothing_was_before() -> None:
    planner = {"profile": "a800-qwen3-14b", "trace": "tau2"}
    found = explained_first_plan(recipe_of(*SIX, planner=planner))
    explained = found.explanation
    assert explained is not None
    assert not explained.move
    assert explained.today == explained.chosen
    assert explained.predicted.source == "errors of costs alone"
    assert f"training {explained.chosen.train_s:.1f} s" in found.plan.reasons[2]
    assert explained.cost_s == 0


def test_a_plan_that_no_planner_made_has_no_explanation() -> None:
    assert explained_first_plan(recipe_of(*SIX, name="Other-7B"), A800).explanation is None
