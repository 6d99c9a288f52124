"""The live comparison of servers beside a waiting trainer differs in these servers alone."""

from __future__ import annotations

from pathlib import Path

from libra_cli.config.recipe import Recipe
from libra_cli.core.launch.placement import initial_plan, slots_of
from libra_cli.core.launch.shares import serving_when_idle
from tests.netns import Machine, Network, SshHost
from tests.research.idle_live import ARMS, recipe_of


def a_network(directory: Path) -> Network:
    hosts = [SshHost(f"host-{n}", f"10.77.0.{n}", 22, "ns", "link", "disk") for n in (2, 3)]
    return Network(directory, [Machine(host, directory, directory, 0) for host in hosts])


def test_both_arms_train_on_the_second_host_and_one_serves_there_while_it_waits(
    tmp_path: Path,
) -> None:
    found = {}
    for arm in ARMS:
        recipe = Recipe.model_validate(recipe_of(arm, 0, 5, a_network(tmp_path), tmp_path))
        plan = initial_plan(recipe)
        assert [slot.rpartition("/")[0] for slot in plan.train] == ["10.77.0.3"]
        found[arm] = (len(plan.servers), list(serving_when_idle(recipe.nodes, slots_of(recipe))))
    assert found == {"alone": (1, []), "beside": (2, ["10.77.0.3/0"])}
