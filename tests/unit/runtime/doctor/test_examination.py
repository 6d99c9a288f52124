"""Which hosts are measured with which, and what is not left on them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra_cli.config.errors import HostLost
from libra_cli.config.recipe import NodeSpec, Recipe
from libra_cli.core.types import Plan
from libra_cli.runtime.doctor import examination as module
from libra_cli.runtime.doctor.examination import Examination, rounds

NAMES = st.integers(0, 20).map(lambda count: [f"h{index}" for index in range(count)])


@given(names=NAMES, ring=st.booleans())
def test_every_neighbour_is_measured_once_and_nobody_twice_at_a_time(names, ring):
    found = rounds(names, ring=ring)
    for pairs in found:
        busy = [name for pair in pairs for name in pair]
        assert len(busy) == len(set(busy))
    measured = [pair for one in found for pair in one]
    wanted = max(0, len(names) - (not ring or len(names) == 1))
    assert len(measured) == len(set(measured)) == wanted
    assert len(found) <= 3, "however many hosts there are"


def test_a_ring_of_two_is_measured_in_both_directions():
    assert rounds(["a", "b"], ring=True) == [(("a", "b"),), (("b", "a"),)]
    assert rounds(["a", "b"], ring=False) == [(("a", "b"),)]


class Remains:
    """Three hosts with remains of a dead run; ``b`` drops while they are removed."""

    def __init__(self, *given: object, **more: object) -> None:
        self.reports: dict[str, object] = {}
        self.hosts = {
            name: SimpleNamespace(clear=self._drop if name == "b" else self._clear)
            for name in "abc"
        }

    async def connect(self, node: NodeSpec) -> None:
        """Reach every host."""

    async def look(self, node: NodeSpec, *, imports: object) -> None:
        """Find the remains of one run."""
        facts = SimpleNamespace(remains=[SimpleNamespace(name="run-1")])
        self.reports[node.name] = SimpleNamespace(facts=facts)

    async def close(self, *, remove_logs: bool) -> None:
        """Leave nothing."""

    async def _clear(self, names: list[str]) -> list[str]:
        return names

    async def _drop(self, names: list[str]) -> list[str]:
        raise HostLost("b: the connection dropped")


def test_a_host_that_drops_leaves_told_what_was_removed_from_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "Cluster", Remains)
    recipe = Recipe.model_validate(
        {"nodes": [{"host": name, "gpus": 1} for name in "abc"], "model": {"build": {}}}
    )
    job = Examination(recipe, Plan((), ()), "r.yaml", on_stage=lambda stage: None)
    assert asyncio.run(job.clear_remains(["a", "b", "c"])) == {
        "a": "removed what is left of run-1",
        "b": "the connection dropped",
        "c": "removed what is left of run-1",
    }
