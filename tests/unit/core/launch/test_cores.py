"""Which cores the processes of a slot have, by the recipe and the cores of the host."""

from __future__ import annotations

from typing import Any

from libra_cli.config.recipe import NodeSpec, Recipe
from libra_cli.core.launch.joined_slots import slot_named
from libra_cli.core.launch.placement import slots_of
from libra_cli.core.launch.process import HostFacts
from libra_cli.core.launch.rollout_backend import server_process
from libra_cli.core.preflight.dry_run import dry_run
from libra_cli.core.types import Bucket


def recipe_of(**node: Any) -> Recipe:
    slots = {"slots": 4, "pool": ["train", "train", "rollout", "rollout"]}
    return Recipe.model_validate(
        {"nodes": [{"host": "local"} | slots | node], "model": {"build": {}}}
    )


def facts_of(cpus: int | None) -> HostFacts:
    return HostFacts("local", "/opt/py", "/w", "/w/runs/r/local", "/shm", "127.0.0.1", cpus=cpus)


def envs(cpus: int | None, **node: Any) -> dict[str, tuple[str, str | None]]:
    """Threads and places of each process, by its name; the trainer has two slots of four."""
    (host,) = dry_run(recipe_of(**node), {"local": facts_of(cpus)})
    return {
        one.process: (one.env["OMP_NUM_THREADS"], one.env.get("LIBRA_CORES"))
        for one in host.processes
        if one.process != "model"
    }


def test_a_slot_owns_its_cores_and_no_others() -> None:
    assert envs(9, cores=2) == {
        "server-2": ("2", "4,5"),
        "server-3": ("2", "6,7"),
        "trainer-0": ("2", "0,1,2,3"),
    }


def test_where_the_host_has_too_few_only_threads_are_bounded() -> None:
    assert set(envs(7, cores=2).values()) == {("2", None)}


def test_slots_that_own_none_share_them_all_as_threads() -> None:
    assert set(envs(9).values()) == {("2", None)}


def test_a_dry_run_says_for_how_many_cores_the_places_are() -> None:
    assert envs(None, cores=1)["server-3"] == ("1", "<3, if it has 4 cores>")


def test_ranks_of_a_joined_server_share_the_cores_of_its_slots() -> None:
    recipe = recipe_of(cores=3)
    slot = slot_named("local/2+3", {slot.id: slot for slot in slots_of(recipe)})
    bucket = Bucket("two", tensor_parallel=2, max_num_seqs=8, up_to_tokens=512)
    spec = server_process(recipe, slot, bucket, facts_of(12), model_dir="/m")
    assert (spec.env["OMP_NUM_THREADS"], spec.env["LIBRA_CORES"]) == ("3", "6,7,8,9,10,11")


def test_cores_are_for_hosts_without_gpus() -> None:
    node = NodeSpec(host="a", gpus=2, cores=4)
    assert [problem.keys for problem in node.problems()] == [("cores", "gpus")]
