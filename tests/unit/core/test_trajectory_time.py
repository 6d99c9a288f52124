"""When environments are what training waits for, and what is said of it then."""

from __future__ import annotations

from dataclasses import replace

import pytest

from libra_cli.config.environment import AgentSpec, EnvironmentSpec
from libra_cli.core.trajectory_time import (
    Places,
    TrajectoryTime,
    environment_bottleneck,
    places_of,
)

PLACES = Places(8, "workers", "environment.workers.processes", "environment.workers.nodes")
SLOW = TrajectoryTime(64, waiting_s=5.0, environment_s=2.0, queue_s=1.0, decode_s=2.0)


def told(time: TrajectoryTime = SLOW, training_idle: float | None = 0.6) -> str:
    return environment_bottleneck(time, training_idle=training_idle, places=PLACES)


def test_it_is_one_sentence_with_the_numbers_and_the_keys_to_raise() -> None:
    words = told()
    assert "of a trajectory's 10.0 s 20% go to its environment and 50% to waiting" in words
    assert "one of 8 workers, and training waits for 60% of the time" in words
    assert words.endswith(
        "raise environment.workers.processes, or add a host with pool: environments to "
        "environment.workers.nodes"
    )


def test_calls_that_are_slow_themselves_are_not_helped_by_more_workers() -> None:
    words = told(replace(SLOW, waiting_s=0.0, environment_s=7.0))
    assert "raise environment.workers.processes" not in words
    assert "more rollout slots do not help: make their calls faster" in words


@pytest.mark.parametrize("training_idle", [None, 0.0, 0.05])
def test_environments_hold_up_nothing_while_training_does_not_wait(
    training_idle: float | None,
) -> None:
    assert told(training_idle=training_idle) == ""


def test_they_are_the_bottleneck_from_half_of_the_time_on() -> None:
    assert told(replace(SLOW, decode_s=6.1)) == ""
    assert told(replace(SLOW, decode_s=5.9)) != ""
    assert told(replace(SLOW, queue_s=6.0)) == ""  # for want of seats, which slots have
    assert told(TrajectoryTime(0, 0.0, 0.0, 0.0, 0.0)) == ""


def test_places_are_of_each_node_and_of_the_environment_with_the_fewest() -> None:
    threads = EnvironmentSpec.model_validate({"concurrency": 32})
    workers = EnvironmentSpec.model_validate(
        {"workers": {"processes": 4, "nodes": ["cpu-1", "cpu-2"]}}
    )
    assert places_of([threads], None).key == "environment.concurrency"
    assert places_of([threads, workers], None) == replace(PLACES, number=8)
    agent = AgentSpec.model_validate({"command": ["x"], "nodes": ["a", "b"], "concurrency": 3})
    assert places_of([threads], agent) == Places(6, "agents", "agent.concurrency", "agent.nodes")
