"""Monitors and libra_cli.api have one name for every number of a step."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from pathlib import Path

import pytest

import libra_cli
from libra_cli.core.advantages.estimates import advantage_metrics
from libra_cli.core.metric_names import METRIC_NAMES, key_of, step_metrics
from libra_cli.core.records import StepRecord, to_metrics_json
from libra_cli.core.rollout.batches import batch_metrics
from libra_cli.core.rollout.groups import Group
from libra_cli.core.rollout.staleness import hold
from libra_cli.core.types import Trajectory, TrajectoryId
from tests.sample_run import step_record
from tests.world import algorithm

PAGE = Path(libra_cli.__file__).parent / "help" / "monitors.md"


def test_no_two_numbers_have_one_name() -> None:
    keys = [one.key for one in METRIC_NAMES]
    assert len(set(keys)) == len(keys)
    assert all(re.fullmatch(r"[a-z_]+/[a-z0-9_]+", key) for key in keys)


def test_every_number_of_a_steps_row_has_a_name() -> None:
    named = {one.name for one in METRIC_NAMES if one.source == "step"}
    other = {
        "step",
        "started_at",
        "checkpoint",
        "metrics_json",
        "batch_json",
        "groups_json",
        "replayed_json",
    }
    assert {field.name for field in fields(StepRecord)} == named - {""} | other


def test_every_number_of_a_batch_that_dashboards_know_has_their_name() -> None:
    batch = [group(0.0, 1.0)]
    named = batch_metrics(batch, 0, 1, []) | advantage_metrics(batch, ALGORITHM.advantages(batch))
    told = {key_of("batch", name) for name in named}
    assert {"reward/std", "reward/frac_zero_std", "num_turns/mean", "tools/calls"} <= told
    assert {key for key in told if key.startswith("batch/")} == {
        "batch/groups_closed",
        "batch/trajectories_left",
        "batch/trajectories_late",
    }


def test_a_name_that_libra_does_not_know_is_grouped_by_where_it_comes_from() -> None:
    metrics = {"loss": 0.5, "halved_mean": 2.0, "broken": float("nan")}
    batch = {"env/solved": 0.25, "mine": 1.0, "played_length": None}
    step = step_record(3, 50.0, started_at=48.0, waited_s=1.5, logprob_gap=None)
    step = replace(step, metrics_json=to_metrics_json(metrics), batch_json=to_metrics_json(batch))
    told = step_metrics(step)
    wanted = {"train/loss": 0.5, "train/halved_mean": 2.0, "env/solved": 0.25, "batch/mine": 1.0}
    assert {name: told[name] for name in wanted} == wanted
    assert told["time/step"] == 3.5
    unknown = {"train/broken", "response_length/played_mean", "train/logprob_gap"}
    assert not unknown & told.keys()
    assert key_of("server", "request_queue_time_s") == "server/request_queue_time_s"


ALGORITHM = algorithm(scale_rewards="none")


def group(*rewards: float, number: int = 0) -> Group:
    members = [Trajectory(TrajectoryId(number, n)) for n in range(len(rewards))]
    for member, reward in zip(members, rewards, strict=True):
        member.reward, member.turns, member.tools, member.generated = reward, 2, 1, 8
    return Group(number, members, started_at=0.0, started_version=0, rule=hold(1))


def test_a_batch_says_how_much_signal_its_rewards_have() -> None:
    batch = [group(0.0, 1.0), group(1.0, 1.0, number=1)]
    told = batch_metrics(batch, 0, 1, []) | advantage_metrics(batch, ALGORITHM.advantages(batch))
    assert told["reward_std"] == pytest.approx(0.5**0.5 / 2), "n - 1, as TRL's"
    assert told["share_without_signal"] == 0.5
    assert told["advantage_std"] == pytest.approx(0.125**0.5)
    assert (told["turns_mean"], told["tools_mean"]) == (2.0, 1.0)


def test_the_page_has_every_name_with_its_unit_and_its_old_name() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for one in METRIC_NAMES:
        before = f"`{one.name}`" if one.name and one.source not in ("server",) else ""
        assert f"| `{one.key}` | {before} | {one.unit} | {one.meaning} |" in page
