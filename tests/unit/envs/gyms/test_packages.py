"""What is shared by environments of other packages, none of which is installed here."""

from __future__ import annotations

import sys

import pytest

from libra_cli.config.errors import EnvironmentBroken
from libra_cli.envs import registry
from libra_cli.envs.gyms import bfcl, minigrid, openspiel, reasoning, tau2, textarena, textworld
from libra_cli.envs.gyms.packages import drawn

CASES = {
    "bfcl": ("mpmath", {}, bfcl.INSTALL),
    "minigrid": ("minigrid", {}, minigrid.INSTALL),
    "openspiel": ("pyspiel", {}, openspiel.INSTALL),
    "reasoning-gym": (
        "reasoning_gym.factory",
        {"datasets": ["leg_counting"]},
        reasoning.INSTALL,
    ),
    "tau2": ("tau2", {}, tau2.INSTALL),
    "textarena": ("textarena", {}, textarena.INSTALL),
    "textworld": ("textworld", {}, textworld.INSTALL),
}


@pytest.mark.parametrize("name", CASES)
def test_a_missing_package_is_told_with_the_line_that_installs_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, arguments, line = CASES[name]
    monkeypatch.setitem(sys.modules, module, None)
    factory = registry.find(name)
    with pytest.raises(EnvironmentBroken, match=f"needs {module.partition('.')[0]}") as caught:
        registry.make(name, factory, arguments)
    assert caught.value.hint == line
    assert line.startswith("pip install ")


def test_as_many_tasks_in_a_row_as_there_are_contain_each_once() -> None:
    first = [drawn(index, 4, 10) for index in range(10)]
    second = [drawn(index, 4, 10) for index in range(10, 20)]
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    assert first != [drawn(index, 5, 10) for index in range(10)]
    assert drawn(123, 4, 10) == drawn(123, 4, 10)
