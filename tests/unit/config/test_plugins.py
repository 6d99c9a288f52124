"""What a recipe names is found in one way, and an error says what there is."""

from __future__ import annotations

from collections import Counter, OrderedDict

import pytest

from libra_cli.config.errors import PluginError, RecipeError
from libra_cli.config.plugins import PluginGroup
from libra_cli.core.launch.rollout_backend import ROLLOUT_BACKENDS
from libra_cli.core.launch.trainer_backend import TRAINER_BACKENDS
from libra_cli.core.scheduling.policy import POLICIES
from libra_cli.envs.registry import ENVIRONMENTS
from libra_cli.plugins.finding import available, find
from libra_cli.runtime.recipes.loader import load_recipe

GROUPS = (ENVIRONMENTS, POLICIES, ROLLOUT_BACKENDS, TRAINER_BACKENDS)
TOYS = PluginGroup("libra.toys", "toy", {"counter": "collections:Counter", "gone": "no_module:x"})


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.name)
def test_what_ships_with_libra_is_there(group):
    for name in group.shipped:
        assert callable(find(group, name))


def test_an_installed_package_adds_names_and_takes_none_that_ships(tmp_path, monkeypatch):
    about = tmp_path / "more_toys-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: more-toys\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(
        "[libra.toys]\nordered = collections:OrderedDict\ncounter = collections:OrderedDict\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert find(TOYS, "ordered") is OrderedDict
    assert find(TOYS, "counter") is Counter
    assert list(available(TOYS)) == ["counter", "gone", "ordered"]


def test_an_import_path_needs_no_entry_point():
    assert find(TOYS, "collections:OrderedDict") is find(TOYS, "collections:OrderedDict")


@pytest.mark.parametrize(
    ("name", "message", "hint"),
    [
        (
            "counted",
            "there is no toy 'counted'; did you mean 'counter'?",
            "available: counter, gone",
        ),
        ("gone", "toy 'gone': importing no_module failed", 'python -c "import no_module"'),
        ("collections:Counted", "has no 'Counted'; did you mean 'Counter'?", "collections has: "),
    ],
)
def test_what_cannot_be_found_says_what_there_is(name, message, hint):
    with pytest.raises(PluginError) as caught:
        find(TOYS, name)
    assert message in str(caught.value)
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    "section",
    [
        "rollout: {backend: no_such_package:Thing}",
        "scheduler: {policy: no_such_package:Thing}",
        "training: {advantage: no_such_package:Thing}",
        "training: {backend: no_such_package:Thing}",
    ],
)
def test_what_decides_in_a_run_may_be_named_by_its_import_path(section, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"nodes: [{{host: a, slots: 2}}]\nmodel: {{path: /m}}\n{section}\n")
    with pytest.raises(RecipeError, match="importing no_such_package failed"):
        load_recipe(recipe)


def test_a_recipe_takes_a_scheduling_policy_of_one_s_own(tmp_path):
    own = "libra_cli.core.scheduling.baselines:RoundRobin"
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"nodes: [{{host: a, slots: 2}}]\nmodel: {{path: /m}}\nscheduler: {{policy: {own}}}\n"
    )
    assert load_recipe(recipe).scheduler.policy == own
