"""Of which trajectories a policy's estimator is told that they are given up."""

from __future__ import annotations

from random import Random

import pytest

from libra_cli.core.scheduling.causal_tree import CausalTree
from libra_cli.core.scheduling.estimators import Estimator, PaperTree
from libra_cli.core.types import TrajectoryId, is_evaluation
from tests.world import Faults, World, recipe


@pytest.mark.parametrize(
    ("policy", "kind"), [("cmlfq-published", PaperTree), ("cmlfq", CausalTree)]
)
def test_an_estimator_is_told_of_the_end_of_what_it_was_asked_about_alone(
    policy: str, kind: type[Estimator], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, withdrawn = set[TrajectoryId](), list[TrajectoryId]()
    begin, withdraw = kind.begin, kind.withdrawn

    def begins(tree: Estimator, trajectory: TrajectoryId) -> float:
        begun.add(trajectory)
        return begin(tree, trajectory)

    def gives_up(tree: Estimator, trajectory: TrajectoryId) -> None:
        withdrawn.append(trajectory)
        withdraw(tree, trajectory)

    monkeypatch.setattr(kind, "begin", begins)
    monkeypatch.setattr(kind, "withdrawn", gives_up)
    breaking = Faults(environment_breaks=0.1, server_dies=0.02, stop_asked=0.001)
    settings = recipe(
        scheduler={"policy": policy},
        evaluation={"num_tasks": 3, "samples": 2, "every": 2},
    )
    World(Random(0), breaking, settings).run()
    assert withdrawn
    assert {*withdrawn} <= begun
    assert not any(is_evaluation(one.group) for one in withdrawn)
