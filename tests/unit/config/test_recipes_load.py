"""Every recipe in ``recipes/`` loads, plans and dry-runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from libra_cli.app.dry_run import plan_of
from libra_cli.core.launch.placement import initial_plan, slots_of
from libra_cli.core.preflight.dry_run import dry_run
from libra_cli.runtime.recipes.loader import load_recipe

CHECKOUT = Path(__file__).parents[3]
RECIPES = sorted((CHECKOUT / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_shipped_recipe_loads_plans_and_dry_runs(path: Path) -> None:
    recipe = load_recipe(path, {})
    plan = initial_plan(recipe)
    hosts = dry_run(recipe)
    assert [host.node for host in hosts] == list(recipe.nodes)
    started = [spec.process for host in hosts for spec in host.processes]
    assert sum(name.startswith("server") for name in started) == len(plan.servers)
    assert sum(name.startswith("trainer") for name in started) == len(
        {slot.rpartition("/")[0] for slot in plan.train}
    )
    for host in hosts:
        ports = [port for spec in host.processes for port in spec.ports.values()]
        assert len(set(ports)) == len(ports)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_shipped_recipe_begins_with_what_it_needs_and_shows(path: Path) -> None:
    comment = path.read_text(encoding="utf-8").split("\n\n")[0].splitlines()
    assert all(line.startswith("# ") for line in comment)
    words = [line[2:].split(":")[0] for line in comment]
    assert [word for word in words if word in ("Hardware", "Duration", "Shows", "Type")] == [
        "Hardware",
        "Duration",
        "Shows",
        "Type",
    ]


NAMED = re.compile(r"# Hardware:.*?GPUs? of (\d+) GB")
PROCESS = re.compile(r"(trainer|gradient worker|server)\b")
SMALLEST = re.compile(r"GPUs of (\d+) GB")
"""A line on a process tells the smallest GPUs first on which it fits, and these not if on none."""


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_shipped_recipe_fits_the_gpus_that_its_first_lines_name(path: Path) -> None:
    recipe, told = plan_of(path)
    named = NAMED.match(path.read_text(encoding="utf-8"))
    assert bool(named) == any(node.gpus for node in recipe.nodes)
    if named is None or recipe.model.path is None:  # the small model that ships fits any GPU
        return
    lines = [line for line in told.memory if PROCESS.match(line)]
    assert {line.split()[0].strip(",") for line in lines} >= {"trainer", "server"}
    sizes = {line: SMALLEST.search(line) for line in lines}
    too_large = [line for line, size in sizes.items() if not size or int(size[1]) > int(named[1])]
    assert not too_large, f"{named[0]}, and: {too_large}"


def test_the_three_sizes_are_there() -> None:
    assert {path.stem for path in RECIPES} >= {"quickstart", "two-gpus", "six-hosts"}


def test_six_hosts_are_six_hosts_of_eight_gpus() -> None:
    recipe = load_recipe(RECIPES[0].parent / "six-hosts.yaml", {})
    assert len(recipe.nodes) == 6
    assert sum(len(slot.gpus) for slot in slots_of(recipe)) == 48


def test_just_nodes_says_nothing_of_split_and_shapes() -> None:
    recipe = load_recipe(RECIPES[0].parent / "just-nodes.yaml", {})
    assert recipe.has_open_nodes
    assert recipe.rollout.buckets is None
    assert len(recipe.nodes) == 6


def test_a_trace_that_lies_beside_the_recipe_is_found_from_anywhere(tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_text("")
    path = tmp_path / "mine.yaml"
    path.write_text(
        "nodes: [{host: a, gpus: 2}]\nmodel: {path: /m}\n"
        "planner: {trace: mine.jsonl, profile: a800-qwen3-8b}\n"
    )
    recipe = load_recipe(path, {})
    assert recipe.planner.trace == str(tmp_path / "mine.jsonl")
    assert recipe.planner.profile == "a800-qwen3-8b"


def test_paths_among_arguments_are_the_recipes_or_else_the_working_directorys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for directory in (here / "tasks", here / "bases", there / "tasks", there / "host"):
        directory.mkdir(parents=True)
    played = (
        "{name: harbor, args: {tasks: TASKS, base: host, bases: {a: bases, b: none}, cache: ~/c}}"
    )
    path = there / "mine.yaml"
    path.write_text(
        "nodes: [{host: a, gpus: 2}]\nmodel: {path: /m}\n"
        f"environment: {played.replace('TASKS', 'tasks')}\n"
        f"evaluation: {{environment: {played.replace('TASKS', '/elsewhere')}}}\n"
    )
    monkeypatch.chdir(here)
    recipe = load_recipe(path, {})
    bases = {"a": str(here / "bases"), "b": str(there / "none")}
    known = {"base": "host", "bases": bases, "cache": "~/c"}
    assert recipe.environment[0].args == {"tasks": str(there / "tasks"), **known}
    evaluated = recipe.evaluation[0].environment
    assert evaluated is not None
    assert evaluated.args == {"tasks": "/elsewhere", **known}
    (there / "tasks").rmdir()
    assert load_recipe(path, {}).environment[0].args["tasks"] == str(here / "tasks")


@pytest.mark.parametrize(
    ("max_len", "training", "held"),
    [(4096, "", 8192), (32768, "", 32768), (32768, "training: {micro_batch_tokens: 65536}", 65536)],
)
def test_a_pass_holds_the_longest_trajectory(tmp_path, max_len, training, held):
    path = tmp_path / "mine.yaml"
    model = f"model: {{path: /m, max_len: {max_len}}}"
    path.write_text(f"nodes: [{{host: a, gpus: 2}}]\n{model}\n{training}\n")
    assert load_recipe(path, {}).training.micro_batch_tokens == held


def test_the_quickstart_needs_nothing_but_this_machine() -> None:
    recipe = load_recipe(RECIPES[0].parent / "quickstart.yaml", {})
    assert [node.host for node in recipe.nodes] == ["local"]
    assert recipe.model.path is None
    assert recipe.nodes[0].gpus == 0
