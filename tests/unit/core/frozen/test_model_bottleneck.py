"""When a frozen model is what training waits for, and what is said of it then."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from libra_cli.config.frozen_models import FrozenModelSpec
from libra_cli.core.frozen.bottleneck import ModelLoad, model_bottleneck, model_loads
from libra_cli.core.records import SlotRecord
from libra_cli.core.trajectory_time import TrajectoryTime

JUDGED = TrajectoryTime(64, waiting_s=0.0, environment_s=8.0, queue_s=0.0, decode_s=2.0)
FULL = ModelLoad("judge", 1, 3, busy=0.97, waiting=0)


def told(*loads: ModelLoad, time: TrajectoryTime = JUDGED, idle: float | None = 0.4) -> str:
    return model_bottleneck(loads, time, training_idle=idle)


def test_it_is_one_sentence_with_the_numbers_and_what_to_type() -> None:
    assert told(FULL) == (
        "model judge is the bottleneck: its one server has requests for 97% of the time, and "
        "training waits for 40%; libra rebalance RUN_DIR --to judge=2"
    )
    words = told(replace(FULL, servers=3, waiting=7))
    assert "its 3 servers have requests for 97% of the time, and 7 wait for room" in words
    assert words.endswith("give it more slots (models[].slots or max_slots), or a smaller model")


def test_of_two_it_is_the_one_whose_requests_wait() -> None:
    waits = ModelLoad("customer", 2, 2, busy=0.95, waiting=3)
    assert told(FULL, waits).startswith("model customer is the bottleneck")


@pytest.mark.parametrize(
    "changed",
    [
        {"idle": 0.05},
        {"idle": None},
        {"time": replace(JUDGED, decode_s=9.0)},
        {"loads": [replace(FULL, busy=0.9)]},
        {"loads": [replace(FULL, servers=0)]},
        {"loads": []},
    ],
)
def test_it_is_not_where_training_or_trajectories_wait_for_something_else(
    changed: dict[str, Any],
) -> None:
    loads = changed.pop("loads", [FULL])
    assert told(*loads, **changed) == ""


def test_a_load_is_that_of_the_slots_that_serve_the_model_now() -> None:
    def row(slot: str, model: str, state: str = "serving", **more: Any) -> SlotRecord:
        numbers: dict[str, Any] = {"running": 0, "waiting": 0, "busy_s": 0.0, "serving_s": 0.0}
        return SlotRecord(
            slot, "a", "[]", "models", "model", state, 0.0, 1, model, None, False,
            restarts=0, detail="", **{**numbers, **more},
        )  # fmt: skip

    rows = [
        row("a/1", "judge", busy_s=30.0, serving_s=40.0, waiting=2),
        row("a/2", "judge", busy_s=30.0, serving_s=40.0, waiting=1),
        row("a/3", "judge", "starting", waiting=9),
        row("a/4", "customer"),
    ]
    models = [
        FrozenModelSpec(name="judge", path="/judge", slots=2, max_slots=4),
        FrozenModelSpec(name="customer", path="/customer"),
    ]
    assert model_loads(models, rows) == [
        ModelLoad("judge", 2, 4, busy=0.75, waiting=3),
        ModelLoad("customer", 1, 1, busy=0.0, waiting=0),
    ]
