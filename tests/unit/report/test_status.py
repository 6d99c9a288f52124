"""Every number of ``libra status --json`` is what its definition says."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from libra_cli.config.errors import StateError
from libra_cli.core import records as r
from libra_cli.report.status.plans import changes
from libra_cli.report.status.steps import smooth
from libra_cli.report.status.summary import summary, to_json
from libra_cli.runtime.store.controller_process import (
    controller_alive,
    controller_is_here,
    process_started,
)
from libra_cli.runtime.store.journal import Journal
from libra_cli.runtime.store.reader import Reader
from libra_cli.runtime.store.run_directory import newest_run
from tests import sample_run
from tests.sample_run import run_record, slot_record, step_record
from tests.world import recipe

_NOW = sample_run.START + 600.0


def as_json(reader: Reader) -> Any:
    """What ``libra status --json`` prints."""
    return json.loads(to_json(summary(reader, now=_NOW)))


def told(run_dir: Path, records: Iterable[r.Record] = ()) -> Any:
    """Save the records (of a run whose controller is this process) and sum the run up."""
    mine = process_started(os.getpid())
    assert mine is not None
    with Journal(run_dir) as journal:
        journal.save(run_record(controller_pid=os.getpid(), controller_started=mine))
        for record in records:
            journal.save(record)
    with Reader(run_dir) as reader:
        return as_json(reader)


def sync(
    slot: str,
    version: int,
    *,
    published: float,
    served: float,
    ok: bool = True,
    sent: tuple[int, str] = (9, "full"),
) -> r.SyncRecord:
    seconds = served + 0.1
    gap = 1e-5 if ok else 0.3
    return r.SyncRecord(
        slot,
        1,
        version,
        0,
        published,
        served,
        seconds,
        0.1,
        0.1,
        9,
        *(sent if ok else (0, "")),
        gap,
        ok,
        "" if ok else f"the probe differs by {gap}",
    )


def sample(slot: str, at: float, running: int, speed: float = 100.0) -> r.SampleRecord:
    return r.SampleRecord(slot, at, running, 1, 0.25, 0.5, 0, 0.5, 1000, speed)


def group(group_id: int, state: str, step: int | None = None) -> r.GroupRecord:
    return r.GroupRecord(group_id, state, 0.0, 1.0, 0, step, 0.5, "")


def trajectory(
    group_id: int,
    member: int,
    state: str,
    attempt: int = 0,
    oldest: int | None = 0,
    tokens: int = 20,
) -> r.TrajectoryRecord:
    return r.TrajectoryRecord(
        group_id, member, attempt, state, 0.0, 1.0, 1.0, 2, tokens, 60, oldest, 3, "[]", ""
    )


TWO_BUCKETS = [["a/0", "short", 1, 4, 100], ["a/1", "short", 1, 4, 100], ["a/2", "long", 2, 2, 900]]


def plan(servers: list[list[object]]) -> r.PlanRecord:
    return r.PlanRecord(0, 0.0, json.dumps(servers), '["b/0"]', "[]")


def turn(
    group_id: int, number: int, slot: str, generated: int, moved_from: str = ""
) -> r.TurnRecord:
    """Of member 0."""
    return r.TurnRecord(
        group_id=group_id,
        member=0,
        attempt=0,
        turn=number,
        slot=slot,
        incarnation=1,
        queued_at=0.0,
        started_at=0.0,
        ended_at=1.0,
        prompt_tokens=10,
        generated_tokens=generated,
        finish_reason="stop",
        moved_from=moved_from,
        tools_json="[]",
    )


def test_the_object_has_every_key_other_tools_were_promised(tmp_path: Path) -> None:
    sample_run.write(tmp_path / "run")
    with Reader(tmp_path / "run") as reader:
        value = as_json(reader)
    assert {"id", "state", "recipe", "started_at", "ended_at"} <= value["run"].keys()
    assert {"step", "weight_version", "logprob_gap", "tokens_per_s"} <= value.keys()
    assert {"first", "last"} <= value["reward"].keys()
    assert {"mean", "max"} <= value["staleness"].keys()
    counts = {"finished", "trained", "in_flight", "retried", "failed"}
    assert counts <= value["trajectories"].keys()
    assert [server["slot"] for server in value["servers"]] == list(sample_run.SERVERS)
    assert all(server["verified"] and server["version"] == 40 for server in value["servers"])
    assert len(value["slots"]) == 3
    assert value["moves"] == []
    assert value["plans"] == [value["plan"]]
    assert value["run"]["state"] == "finished"


@pytest.mark.parametrize(
    ("nodes", "more", "served", "usual"),
    [
        ([{"host": "local"}], {}, "float32", 1e-5),
        ([{"host": "a", "gpus": 2}], {}, "bfloat16", 1e-3),
        ([{"host": "a", "gpus": 2}, {"host": "b", "pool": "train"}], {}, None, None),
        ([{"host": "a", "gpus": 2}], {"quantization": "fp8_per_channel"}, "fp8_per_channel", 5e-3),
        (
            [{"host": "a", "gpus": 2}],
            {"quantization": "int8_per_channel"},
            "int8_per_channel",
            3e-3,
        ),
    ],
)
def test_the_usual_gap_is_that_of_the_numbers_that_servers_compute_with(
    tmp_path: Path, nodes: list[dict[str, Any]], more: dict[str, str], served: str, usual: float
) -> None:
    recipe = {"nodes": nodes, "model": {"path": "/m"}, "rollout": more}
    tmp_path.joinpath("recipe.json").write_text(json.dumps(recipe))
    value = told(tmp_path)
    assert (value["served_in"], value["logprob_gap_usual"]) == (served, usual)


def test_of_a_run_without_a_recipe_no_gap_is_called_usual(tmp_path: Path) -> None:
    value = told(tmp_path)
    assert (value["served_in"], value["logprob_gap_usual"]) == (None, None)


def test_reward_is_the_mean_of_the_first_and_the_last_ten_steps(tmp_path: Path) -> None:
    steps = [step_record(step, 10.0 * step, reward=step / 100) for step in range(1, 31)]
    reward = told(tmp_path, steps)["reward"]
    assert reward["first"] == pytest.approx(0.055)
    assert reward["last"] == pytest.approx(0.255)


def test_what_nobody_knows_yet_is_null(tmp_path: Path) -> None:
    value = told(tmp_path)
    assert value["reward"] == {"first": None, "last": None}
    assert value["lengths"] == {"mean": None, "p99": None}
    assert value["staleness"] == {"mean": None, "max": None, "histogram": {}}
    assert set(value["idle"].values()) == {None}
    assert (value["logprob_gap"], value["tokens_per_s"], value["step_s"]) == (None, None, None)
    assert (value["checkpoint"], value["plan"], value["errors"]) == (None, None, [])
    assert value["buckets"] == []
    assert value["placement"] == {"turns": 0, "moved": 0, "moved_share": None}


def test_a_reward_that_is_not_a_number_is_null_and_not_broken_json(tmp_path: Path) -> None:
    infinite = r.to_metrics_json({"loss": float("inf")})
    value = told(tmp_path, [step_record(1, 10.0, reward=float("nan"), metrics_json=infinite)])
    assert value["reward"] == {"first": None, "last": None}
    assert value["metrics"] == {"loss": {"first": None, "last": None}}


def test_the_gap_weighs_each_step_by_the_tokens_it_compared(tmp_path: Path) -> None:
    steps = [
        step_record(1, 10.0, logprob_gap=1e-5, logprob_gap_tokens=300),
        step_record(2, 20.0, logprob_gap=None, logprob_gap_tokens=0),
        step_record(3, 30.0, logprob_gap=5e-5, logprob_gap_tokens=100),
    ]
    value = told(tmp_path, steps)
    assert value["logprob_gap"] == pytest.approx(2e-5)
    assert value["logprob_gap_max"] == 5e-5


def test_speed_is_tokens_over_time_and_not_a_mean_of_speeds(tmp_path: Path) -> None:
    steps = [
        step_record(1, 10.0, generated_tokens=1000, tokens_per_s=1000.0),
        step_record(2, 20.0, generated_tokens=1000, tokens_per_s=100.0),
    ]
    assert told(tmp_path, steps)["tokens_per_s"] == pytest.approx(2000 / 11)


def test_before_the_first_step_speed_is_what_the_servers_do_now(tmp_path: Path) -> None:
    samples = [
        sample("a/0", _NOW - 20, 3, 70.0),
        sample("a/0", _NOW - 2, 3, 50.0),
        sample("a/1", _NOW - 1, 3, 30.0),
        sample("a/2", _NOW - 400, 3, 999.0),
    ]
    assert told(tmp_path, samples)["tokens_per_s"] == 80.0


def test_staleness_weighs_by_tokens_and_counts_trained_trajectories(tmp_path: Path) -> None:
    rows: list[r.Record] = [
        step_record(1, 10.0, generated_tokens=100, staleness_mean=0.0, staleness_max=0),
        step_record(2, 20.0, generated_tokens=300, staleness_mean=1.0, staleness_max=2),
        group(0, "trained", step=4),
        group(1, "ready"),
        trajectory(0, 0, "finished", oldest=3),
        trajectory(0, 1, "finished", attempt=1, oldest=1),
        trajectory(0, 1, "failed", oldest=0),
        trajectory(1, 0, "finished", oldest=0),
    ]
    staleness = told(tmp_path, rows)["staleness"]
    assert staleness == {"mean": 0.75, "max": 2, "histogram": {"0": 1, "2": 1}}


def of_batch(**changes: float | None) -> str:
    numbers: dict[str, float | None] = {
        "tokens_over_bound": 0,
        "share_over_bound": 0.0,
        "token_staleness_mean": 0.5,
        "token_staleness_max": 1,
        "groups_closed": 0,
        "trajectories_left": 0,
        "trajectories_late": 0,
        "played_length": 20.0,
    }
    return r.to_metrics_json(numbers | changes)


def test_what_dynamic_sampling_left_out_is_told_with_its_share_of_the_tokens(
    tmp_path: Path,
) -> None:
    before = of_batch()
    sampled = of_batch(groups_filtered=3, filtered_tokens=100, share_truncated=0.5)
    rows: list[r.Record] = [
        step_record(4, 10.0, generated_tokens=900, batch_json=before),
        step_record(6, 20.0, generated_tokens=300, batch_json=sampled),
    ]
    batches = told(tmp_path, rows)["batches"]
    assert batches["groups_filtered"] == 3
    assert batches["share_filtered"] == 0.25
    assert batches["share_truncated"] == 0.5


def test_members_that_come_after_their_group_count_for_the_step_that_trained_them(
    tmp_path: Path,
) -> None:
    closed = of_batch(groups_closed=1, trajectories_left=3, share_over_bound=0.5)
    late = of_batch(
        trajectories_late=1, share_over_bound=0.1, token_staleness_max=4, played_length=None
    )
    rows: list[r.Record] = [
        step_record(4, 10.0, generated_tokens=100, mean_length=10.0, batch_json=closed),
        step_record(6, 20.0, generated_tokens=300, mean_length=50.0, batch_json=late),
        group(0, "trained", step=4),
        trajectory(0, 0, "finished", oldest=3, tokens=10),
        trajectory(0, 1, "finished", oldest=3, tokens=90),
        trajectory(0, 2, "finished", oldest=3, tokens=95),
        trajectory(0, 3, "dropped", oldest=3, tokens=99),
        r.LateRecord(0, 1, 6),
        r.LateRecord(0, 2, None),
    ]
    seen = told(tmp_path, rows)
    assert seen["staleness"]["histogram"] == {"0": 1, "2": 1}
    assert seen["trajectories"]["trained"] == 2
    assert seen["batches"] == {
        "share_over_bound": pytest.approx(0.2),
        "over_bound": pytest.approx(0.2),
        "token_staleness_mean": pytest.approx(0.5),
        "token_staleness_max": 4,
        "groups_closed": 1,
        "trajectories_left": 3,
        "trajectories_late": 1,
        "played_length": 20.0,
        "trained_length": 10.0,
        "longest_trained": 0.0,
        "groups_filtered": 0,
        "share_filtered": None,
        "share_truncated": None,
    }


def test_nothing_is_known_of_the_batches_of_an_older_libra(tmp_path: Path) -> None:
    batches = told(tmp_path, [step_record(1, 10.0)])["batches"]
    assert batches["over_bound"] is None
    assert batches["groups_closed"] == 0


def test_trajectories_are_counted_by_attempt(tmp_path: Path) -> None:
    rows: list[r.Record] = [
        group(0, "trained", step=1),
        group(1, "open"),
        trajectory(0, 0, "finished"),
        trajectory(0, 1, "failed"),
        trajectory(0, 1, "finished", attempt=1),
        trajectory(1, 0, "running"),
        trajectory(1, 1, "finished"),
        trajectory(2, 0, "dropped"),
    ]
    expected = {"finished": 3, "trained": 2, "retried": 1, "failed": 1}
    assert told(tmp_path / "a", rows)["trajectories"] == {
        **expected,
        "in_flight": 1,
        "dropped": 1,
    }
    over = told(tmp_path / "b", [*rows, run_record("stopped", ended_at=_NOW)])
    assert over["trajectories"] == {**expected, "in_flight": 0, "dropped": 2}


def test_idle_shares_come_from_serving_time_and_from_waiting(tmp_path: Path) -> None:
    old = [step_record(step, 10.0 * step, waited_s=0.0) for step in range(1, 11)]
    new = [
        step_record(step, 10.0 * step, started_at=10.0 * step - 2, waited_s=6.0)
        for step in range(11, 21)
    ]
    rows: list[r.Record] = [
        *old,
        *new,
        slot_record("a/0", "rollout", "serving", 0.0, busy_s=30.0, serving_s=100.0),
        slot_record("a/1", "rollout", "serving", 0.0, busy_s=50.0, serving_s=60.0),
        slot_record("a/2", "train", "training", 0.0),
        *(sample("a/0", at, running) for at, running in ((50.0, 0), (110.0, 0), (120.0, 4))),
    ]
    idle = told(tmp_path, rows)["idle"]
    assert idle["rollout"] == 0.5
    assert idle["training"] == pytest.approx(60 / (60 + 20 + 16))
    assert idle["recent_training"] == pytest.approx(0.75)
    assert idle["recent_rollout"] == 0.5


def played(member: int, environment_s: float | None, waited_s: float | None) -> r.TrajectoryRecord:
    row = trajectory(0, member, "finished")
    return replace(row, environment_s=environment_s, waited_s=waited_s, ended_at=120.0)


def test_the_seconds_of_trajectories_are_told_by_where_they_went(tmp_path: Path) -> None:
    waits = {"started_at": 106.0, "waited_s": 6.0}
    step = step_record(1, 108.0, **waits)
    turns = [
        replace(turn(0, number, "a/0", 5), queued_at=at, started_at=at + 1.0, ended_at=at + 3.0)
        for number, at in ((0, 100.0), (1, 110.0))
    ]
    rows: list[r.Record] = [step, played(0, 20.0, 12.0), played(1, 4.0, 0.0), *turns]
    (tmp_path / "recipe.json").write_text(recipe(environment={"workers": 2}).model_dump_json())
    playing = told(tmp_path, rows)["playing"]
    seconds = {"waiting_s": 6.0, "environment_s": 6.0, "queue_s": 1.0, "decode_s": 2.0}
    assert {name: playing[name] for name in seconds} == seconds
    assert playing["trajectories"] == 2
    assert "of a trajectory's 15.0 s 40% go to its environment and 40% to" in playing["bottleneck"]
    assert "one of 2 workers, and training waits for 75% of the time" in playing["bottleneck"]


def test_of_trajectories_of_an_older_libra_nothing_is_said(tmp_path: Path) -> None:
    playing = told(tmp_path, [played(0, None, None), turn(0, 0, "a/0", 5)])["playing"]
    assert playing == {
        "trajectories": 0,
        "waiting_s": None,
        "environment_s": None,
        "queue_s": None,
        "decode_s": None,
        "full": None,
        "bottleneck": "",
    }


def test_a_sync_lasts_until_the_last_server_serves_the_version(tmp_path: Path) -> None:
    rows = [
        sync("a/0", 0, published=0.0, served=30.0),
        sync("a/1", 0, published=0.0, served=45.0),
        sync("a/0", 1, published=50.0, served=50.2),
        sync("a/1", 1, published=50.0, served=50.6),
        sync("a/0", 2, published=60.0, served=60.2),
    ]
    value = told(tmp_path, rows)["sync"]
    assert value["versions"] == 3
    assert value["max_s"] == pytest.approx(0.6)
    assert value["last_s"] == pytest.approx(0.2)
    assert value["mean_s"] == pytest.approx(0.4)


def test_what_travelled_is_told_beside_what_full_copies_would_have_been(tmp_path: Path) -> None:
    rows: list[r.Record] = [
        slot_record("a/0", "rollout", "serving", 0.0),
        sync("a/0", 1, published=0.0, served=1.0, sent=(10, "full")),
        sync("a/1", 1, published=0.0, served=1.0, sent=(0, "local")),
        sync("a/2", 1, published=0.0, served=1.0, ok=False),
        sync("a/0", 2, published=2.0, served=3.0, sent=(1, "delta")),
    ]
    value = told(tmp_path, rows)
    sync_part = value["sync"]
    assert (sync_part["full"], sync_part["delta"], sync_part["local"]) == (1, 1, 1)
    assert (sync_part["sent_bytes"], sync_part["full_bytes"]) == (11, 18)
    (server,) = value["servers"]
    assert (server["sync_kind"], server["sync_sent_bytes"]) == ("delta", 1)


def test_what_is_broken_is_named(tmp_path: Path) -> None:
    rows: list[r.Record] = [
        r.NodeRecord("gpu-01", "10.0.0.1", "unreachable", 0.0, "{}", "timed out"),
        slot_record("a/0", "failed", "failed", 0.0, detail="exit code 1"),
        sync("a/1", 3, published=0.0, served=1.0, ok=False),
    ]
    assert told(tmp_path, rows)["errors"] == [
        "node gpu-01 (10.0.0.1): unreachable: timed out",
        "slot a/0: failed: exit code 1",
        "slot a/1: version 3 does not verify: the probe differs by 0.3",
    ]


def test_a_version_that_never_came_is_not_said_to_have_failed_its_proof(tmp_path: Path) -> None:
    gone = replace(sync("a/1", 4, published=0.0, served=1.0, ok=False), gap=None, detail="HTTP 404")
    assert told(tmp_path, [gone])["errors"] == ["slot a/1: version 4 was not loaded: HTTP 404"]


def test_each_bucket_tells_its_queue_its_seats_and_who_came_and_left(tmp_path: Path) -> None:
    rows: list[r.Record] = [
        plan(TWO_BUCKETS),
        slot_record("a/0", "rollout", "serving", 0.0, bucket="short", running=2, waiting=5),
        slot_record("a/1", "rollout", "serving", 0.0, bucket="short", running=1, waiting=1),
        slot_record("a/2", "rollout", "serving", 0.0, bucket="long", running=2, waiting=0),
        step_record(1, _NOW, started_at=_NOW - 2, waited_s=3.0),
        *(sample(slot, _NOW - 1, 1) for slot in ("a/0", "a/1", "a/2")),
        turn(0, 0, "a/0", 5),
        turn(0, 1, "a/1", 5, moved_from="a/0"),
        turn(0, 2, "a/2", 5, moved_from="a/1"),
        turn(1, 0, "a/2", 5),
        turn(1, 1, "a/2", 5),
    ]
    value = told(tmp_path, rows)
    short, long = value["buckets"]
    assert (short["bucket"], short["up_to_tokens"], short["servers"]) == ("short", 100, 2)
    assert (short["running"], short["waiting"], short["seats"]) == (3, 6, 8)
    assert (long["running"], long["waiting"], long["seats"]) == (2, 0, 2)
    assert short["occupancy"] == 0.5
    assert [bucket["turns"] for bucket in (short, long)] == [2, 3]
    assert (short["moved_in"], short["moved_out"]) == (0, 1), "a move within is none"
    assert (long["moved_in"], long["moved_out"]) == (1, 0)
    assert value["placement"] == {"turns": 3, "moved": 2, "moved_share": pytest.approx(2 / 3)}


def phase(name: str, began: float, ended: float, *, seconds: float) -> dict[str, object]:
    times = {"started_at": began, "ended_at": ended, "began": began, "ended": ended}
    return {"phase": name, **times, "seconds": seconds}


def test_moves_are_told_in_the_documented_words(tmp_path: Path) -> None:
    phases = json.dumps([["drain", 5.0, 6.5], ["stop", 6.5, 9.0]])
    moved = r.MoveRecord(1, 1, "a/0", "rollout", "gradient", "done", 5.0, 9.0, phases, "asked for")
    (value,) = told(tmp_path, [moved])["moves"]
    assert value == {
        "move": 1,
        "plan": 1,
        "slot": "a/0",
        "from_role": "rollout",
        "to_role": "gradient",
        "from": "rollout",
        "to": "gradient",
        "state": "done",
        "phases": [
            phase("drain", 5.0, 6.5, seconds=1.5),
            phase("stop", 6.5, 9.0, seconds=2.5),
        ],
        "predicted_gain": None,
        "observed_gain": None,
        "started_at": 5.0,
        "ended_at": 9.0,
        "detail": "asked for",
    }


@pytest.mark.parametrize("ended_at", [None, _NOW - 5.0])
def test_a_phase_under_way_lasts_until_now_or_until_the_run_ended(
    tmp_path: Path, ended_at: float | None
) -> None:
    phases = json.dumps([["stop", _NOW - 30.0, _NOW - 20.0], ["start", _NOW - 20.0, None]])
    began = _NOW - 30.0
    moving = r.MoveRecord(1, 1, "a/0", "rollout", "gradient", "start", began, None, phases, "")
    rows: list[r.Record] = [moving]
    if ended_at is not None:
        rows.append(run_record("stopped", ended_at=ended_at))
    (value,) = told(tmp_path, rows)["moves"]
    assert [phase["seconds"] for phase in value["phases"]] == [10.0, 20.0 if not ended_at else 15.0]
    assert value["phases"][-1]["ended"] is None
    assert value["ended_at"] is None


def test_plans_tell_who_does_what_and_what_it_gains(tmp_path: Path) -> None:
    sample_run.write_moving(tmp_path / "run")
    with Reader(tmp_path / "run") as reader:
        value = as_json(reader)
    first, away, home = value["plans"]
    assert value["plan"] == home
    assert (first["cause"], first["predicted_gain"], first["observed_gain"]) == (
        "start",
        None,
        None,
    )
    assert (away["cause"], away["train"], away["gradient"]) == (
        "planner",
        [sample_run.TRAINER],
        [sample_run.HYBRID],
    )
    assert away["servers"] == [
        {
            "slot": sample_run.SERVERS[0],
            "bucket": "short",
            "tensor_parallel": 1,
            "max_num_seqs": 48,
            "up_to_tokens": 1024,
        }
    ]
    assert (away["predicted_before_s"], away["predicted_after_s"], away["cost_s"]) == (
        5.1,
        4.2,
        9.0,
    )
    assert away["predicted_gain"] == pytest.approx(1 - 4.2 / 5.1)
    assert away["observed_gain"] == pytest.approx(1 - 4.55 / 5.3)
    assert home["predicted_gain"] < 0 == home["observed_gain"]
    gains = [(move["predicted_gain"], move["observed_gain"]) for move in value["moves"]]
    assert gains == [(plan["predicted_gain"], plan["observed_gain"]) for plan in (away, home)]


def test_decisions_tell_their_explanation_and_what_came(tmp_path: Path) -> None:
    sample_run.write_moving(tmp_path / "run")
    with Reader(tmp_path / "run") as reader:
        value = as_json(reader)
    unmade, kept, moved = value["decisions"]
    assert value["decision"] == moved
    assert unmade["explanation"] is None
    assert (unmade["why_not"], unmade["observed_s"]) == ("the costs are not known yet", None)
    assert (kept["plan"], kept["explanation"]["move"], kept["observed_s"]) == (None, False, 5.3)
    assert kept["explanation"]["runner_up"]["why_not"] == kept["why_not"]
    assert (moved["plan"], moved["step"], moved["observed_steps"]) == (2, 14, 5)
    assert moved["explanation"] == json.loads(sample_run.MOVED.to_json())
    assert moved["explanation"]["binds"]["constraint"] == "KV cache"


def test_the_newest_hundred_decisions_are_told(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        journal.save(sample_run.run_record())
        for at in range(120):
            journal.save(r.DecisionRecord(float(at), at, "asked for", None, "no", 1.0, 1.0))
    with Reader(tmp_path) as reader:
        told = as_json(reader)["decisions"]
    assert [decision["step"] for decision in told] == list(range(20, 120))


def test_a_gain_is_null_until_both_of_its_times_are_known(tmp_path: Path) -> None:
    chosen = r.PlanRecord(1, 0.0, "[]", "[]", "[]", "[]", "planner", 5.0, None, 1.0, 0.0, 4.0)
    (value,) = told(tmp_path, [chosen])["plans"]
    assert (value["predicted_gain"], value["observed_gain"]) == (None, None)


def test_a_plan_is_told_by_what_it_changes(tmp_path: Path) -> None:
    sample_run.write_moving(tmp_path / "run")
    with Reader(tmp_path / "run") as reader:
        first, away, home = reader.plans()
    assert changes(None, first) == []
    assert changes(first, away) == ["local/1 rollout → gradient"]
    assert changes(away, home) == ["local/1 gradient → rollout"]
    kept, other = json.loads(home.servers_json)
    servers = json.dumps([kept, [other[0], "long", 2, 8, other[-1]]])
    assert changes(home, replace(home, servers_json=servers, train_json="[]")) == [
        "local/1 rollout (short, TP 1, 48 seats) → rollout (long, TP 2, 8 seats)",
        "local/2 train → idle",
    ]


def test_a_run_whose_controller_lives_is_running(tmp_path: Path) -> None:
    value = told(tmp_path)
    assert value["run"]["state"] == "running"
    assert value["run"]["ended_at"] is None
    assert value["run"]["elapsed_s"] == 600.0


@pytest.mark.parametrize("how", ["gone", "recycled", "rebooted"])
def test_a_run_whose_controller_died_has_failed(tmp_path: Path, how: str) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started = process_started(child.pid)
    assert started is not None
    child.communicate(b"\n", timeout=10)
    mine = process_started(os.getpid())
    assert mine is not None
    record = {
        "gone": run_record(controller_pid=child.pid, controller_started=started),
        "recycled": run_record(controller_pid=os.getpid(), controller_started=mine - 1),
        "rebooted": run_record(controller_pid=os.getpid(), controller_started=mine),
    }[how]
    with Journal(tmp_path) as journal:
        journal.save(record)
        journal.save(step_record(1, sample_run.START + 50.0))
        if how == "rebooted":
            with journal._writing:
                journal._connection.execute("UPDATE meta SET value = 'x' WHERE key = 'boot'")
    with Reader(tmp_path) as reader:
        value = as_json(reader)
    assert value["run"]["state"] == "failed"
    assert "died without ending the run" in value["run"]["error"]
    assert value["errors"] == [value["run"]["error"]]
    assert value["run"]["ended_at"] == sample_run.START + 50.0
    assert value["run"]["elapsed_s"] == 50.0


def of_another_machine(journal: Journal) -> None:
    """As another machine would have written it."""
    journal.flush()
    with journal._writing:
        journal._connection.execute(
            "UPDATE meta SET value = 'other' WHERE key IN ('host', 'boot', 'machine')"
        )


@pytest.mark.parametrize(("silent_s", "state"), [(1.0, "running"), (3600.0, "failed")])
def test_a_run_of_another_machine_is_believed_while_it_writes(
    tmp_path: Path, silent_s: float, state: str
) -> None:
    with Journal(tmp_path) as journal:
        journal.save(run_record(controller_pid=1, controller_started=-1.0))
        journal.event(time.time() - silent_s, "StepDone", {})
        of_another_machine(journal)
    with Reader(tmp_path) as reader:
        assert as_json(reader)["run"]["state"] == state


def test_a_run_is_alive_while_its_lock_is_held_whatever_its_host_was_called(
    tmp_path: Path,
) -> None:
    with Journal(tmp_path) as journal:
        journal.save(run_record(controller_pid=1, controller_started=-1.0))
        of_another_machine(journal)
        with Reader(tmp_path) as reader:
            assert controller_alive(reader)
    with Reader(tmp_path) as reader:
        assert not controller_alive(reader)


def test_a_machine_that_was_renamed_is_the_same(tmp_path: Path) -> None:
    mine = process_started(os.getpid())
    assert mine is not None
    with Journal(tmp_path) as journal:
        journal.save(run_record(controller_pid=os.getpid(), controller_started=mine))
        journal.flush()
        with journal._writing:
            journal._connection.execute("UPDATE meta SET value = 'old-name' WHERE key = 'host'")
    with Reader(tmp_path) as reader:
        assert controller_is_here(reader)
        assert controller_alive(reader)


def test_who_only_asks_for_a_lock_does_not_keep_a_controller_out(tmp_path: Path) -> None:
    Journal(tmp_path).close()
    lock = os.open(tmp_path / "libra.lock", os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_SH)
    threading.Timer(0.03, os.close, (lock,)).start()
    Journal(tmp_path).close()


def test_the_newest_run_is_the_one_that_started_last(tmp_path: Path) -> None:
    for name, started_at in (("b", 5.0), ("a", 9.0), ("c", 1.0)):
        with Journal(tmp_path / name) as journal:
            journal.save(run_record(started_at=started_at))
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "libra.db").write_text("damaged")
    assert newest_run(tmp_path) == tmp_path / "a"


def test_no_run_at_all_gives_the_next_thing_to_type(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="there is no run under") as caught:
        newest_run(tmp_path / "nowhere")
    assert "libra quickstart" in caught.value.hint


def test_smoothing_keeps_a_constant_and_leaves_gaps_out() -> None:
    assert smooth([2.0] * 30) == pytest.approx([2.0] * 30)
    assert smooth([1.0, float("nan"), 1.0]) == pytest.approx([1.0, 1.0, 1.0])
    assert len(smooth([])) == 0
