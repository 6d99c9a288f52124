"""Gradient workers and streaming: a real core and a real worker, against the core alone."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the [cpu] extra")

from libra_cli.config.minibatches import first_minibatch  # noqa: E402
from libra_cli.node.batch.log_ratios import PER_NAT, BranchLogRatios  # noqa: E402
from libra_cli.node.model.tokenizer import build_tokenizer, save_tokenizer  # noqa: E402
from libra_cli.node.model.warmup import POSITIONS, new_model  # noqa: E402
from tests import credentials  # noqa: E402
from tests.credentials import url_of  # noqa: E402
from tests.trainers import (  # noqa: E402
    STEP_S,
    TOKEN,
    Trainer,
    Worker,
    batch,
    of_groups,
    processes_marked,
    relative_difference,
    trainer,
    worker,
)

pytestmark = [
    pytest.mark.integration,
    pytest.mark.vllm,
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("ignore"),
]
STEPS = 20
WAIT_S = 20.0
"""Far more than the core's patience with any share of these tiny batches (``tests.patient_core``);
far less than any timeout."""
KEEP = STEPS + 1


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    tokenizer = build_tokenizer()
    new_model(tokenizer, seed=0).save_pretrained(directory)
    save_tokenizer(tokenizer, directory, max_len=POSITIONS)
    return directory


@dataclass(frozen=True)
class Alone:
    """A core of one process without any worker: its parameters, losses and the log-ratios of its
    tokens after each step."""

    parameters: list[dict[str, Any]]
    losses: list[float]
    log_ratios: list[BranchLogRatios]

    def difference(self, core: Trainer, steps: Iterable[int]) -> float:
        """The largest relative difference of all parameters after one of these steps."""
        return max(relative_difference(core.parameters(n), self.parameters[n]) for n in steps)

    def assert_same_ratios(self, core: Trainer, step: int) -> None:
        """Every token of the step that was taken last has the same, whoever has computed it."""
        here, expected = core.log_ratios(step), self.log_ratios[step]
        assert here.keys() == expected.keys()
        for key, values in expected.items():
            assert np.abs(values).max() > 0.01
            np.testing.assert_allclose(here[key], values, atol=1 / PER_NAT, rtol=0)


@pytest.fixture(scope="module")
def alone(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Alone:
    directory = tmp_path_factory.mktemp("alone") / "run"
    with trainer(directory, model_dir, keep_versions=KEEP) as core:
        core.wait_ready()
        metrics, log_ratios = [], [BranchLogRatios()]
        for number in range(1, STEPS + 1):
            metrics.append(core.step(number)["metrics"])
            log_ratios.append(core.log_ratios(number))
        assert all(one["shares"] == [] for one in metrics)
        parameters = [core.parameters(number) for number in range(STEPS + 1)]
        assert core.stop() == 0
    return Alone(parameters, [0.0, *(one["loss"] for one in metrics)], log_ratios)


def hand_over(core: Trainer, helper: Worker, step: int, groups: Sequence[int]) -> None:
    """Load the core's version, dropping a share of the step before, and take these groups."""
    (directory,) = core.versions.glob(f"v{step - 1:06d}-e*")
    helper.load(directory)
    helper.share(step, of_groups(batch(step), *groups))


def wait_done(helper: Worker, step: int) -> None:
    """These steps take milliseconds, so on a busy machine a worker may well be later than the
    core's least patience."""
    about = f"incarnation=3&step={step}&version=v{step - 1:06d}-e0"
    asked = f"/share?{about}&have=999&wait_s=5"
    deadline = time.monotonic() + STEP_S
    url = url_of(helper.side_port)
    while json.loads(credentials.ask(url, asked, token=TOKEN)[1])["state"] != "done":
        assert time.monotonic() < deadline


def help_with(
    core: Trainer, helper: Worker, step: int, groups: Sequence[int], **changes: Any
) -> dict[str, Any]:
    """One step of which the worker computes these groups; what the core reports on the share."""
    hand_over(core, helper, step, groups)
    wait_done(helper, step)
    metrics = core.step(step, shares=[helper.offer(step, groups, **changes)])["metrics"]
    (report,) = metrics["shares"]
    assert report["worker"] == "gpu-01/0"
    assert metrics["own_tokens"] + report["tokens"] == metrics["generated_tokens"]
    assert report["waited_s"] < WAIT_S
    return dict(report)


def test_a_worker_that_joins_and_leaves_changes_no_parameter(
    alone: Alone,
    model_dir: Path,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
):
    with trainer(tmp_path / "core", model_dir, keep_versions=KEEP) as core:
        core.wait_ready()
        with worker(tmp_path / "worker", model_dir) as helper:
            for number in range(1, 5):
                core.step(number)
            helper.wait_ready()
            for number in range(5, 16):
                report = help_with(core, helper, number, [1, 3])
                used(report)
                assert report["bytes"] == sum(one.nbytes for one in core.parameters(0).values())
            assert helper.stop() == 0
            assert not helper.outbox.exists()
        for number in range(16, STEPS + 1):
            core.step(number)
        apart = alone.difference(core, range(STEPS + 1))
        record_property("largest relative difference", apart)
        sys.stderr.write(f"largest relative difference of {STEPS} steps: {apart:.1e}\n")
        assert apart <= 1e-5
        assert core.stop() == 0


def test_a_share_of_the_first_of_two_updates_changes_no_parameter(model_dir: Path, tmp_path: Path):
    updates: dict[str, Any] = {"minibatches": 2, "keep_versions": KEEP}
    with trainer(tmp_path / "alone", model_dir, **updates) as core:
        core.wait_ready()
        losses = [core.step(number)["metrics"]["loss"] for number in (1, 2)]
        expected, ratios = core.parameters(2), core.log_ratios(2)
        assert any(np.abs(values).max() > 0.01 for values in ratios.values())
        assert core.stop() == 0
    with (
        trainer(tmp_path / "core", model_dir, **updates) as core,
        worker(tmp_path / "worker", model_dir, minibatches=2) as helper,
    ):
        core.wait_ready(), helper.wait_ready()
        for number, loss in enumerate(losses, 1):
            groups = [group for group in range(4) if group in first_groups(number)]
            hand_over(core, helper, number, groups[:1])
            wait_done(helper, number)
            offered = [helper.offer(number, groups[:1])]
            metrics = core.step(number, shares=offered)["metrics"]
            (report,) = metrics["shares"]
            used(report)
            assert metrics["loss"] == pytest.approx(loss, rel=1e-4)
            assert 0 < metrics["own_tokens"] < metrics["generated_tokens"] - report["tokens"]
        assert relative_difference(core.parameters(2), expected) <= 1e-5
        told = core.log_ratios(2)
        assert told.keys() == ratios.keys()
        for key, values in ratios.items():
            np.testing.assert_allclose(told[key], values, atol=1 / PER_NAT, rtol=0)


def first_groups(step: int) -> set[int]:
    groups = [one["group"] for one in batch(step)]
    return {groups[i] for i in first_minibatch(groups, parts=2, seed=(0, step))}


WORLDS = [
    pytest.param({"processes": 2, "sharding": "ddp"}, {}, marks=pytest.mark.nightly),
    pytest.param({}, {"processes": 2, "sharding": "fsdp2"}, marks=pytest.mark.nightly),
    ({"processes": 2, "sharding": "fsdp2"}, {"processes": 2, "sharding": "ddp"}),
]


@pytest.mark.parametrize(("of_core", "of_worker"), WORLDS)
def test_parts_and_shares_add_up_to_the_step_whatever_the_worlds(
    alone: Alone,
    model_dir: Path,
    tmp_path: Path,
    of_core: Mapping[str, Any],
    of_worker: Mapping[str, Any],
):
    with (
        trainer(tmp_path / "core", model_dir, **of_core) as core,
        worker(tmp_path / "worker", model_dir, **of_worker) as helper,
    ):
        core.wait_ready(), helper.wait_ready()
        in_three_parts(core, 1)
        alone.assert_same_ratios(core, 1)
        used(help_with(core, helper, 2, [0, 2]))
        alone.assert_same_ratios(core, 2)
        part_and_share(core, helper, 3)
        alone.assert_same_ratios(core, 3)
        refused = help_with(core, helper, 4, [0, 1, 2, 3], incarnation=2)
        assert not refused["used"]
        assert "incarnation 2, step 4" in refused["reason"]
        alone.assert_same_ratios(core, 4)
        used(help_with(core, helper, 5, [0, 1, 2, 3]))
        alone.assert_same_ratios(core, 5)
        losses = [core.result(number)["metrics"]["loss"] for number in range(1, 6)]
        assert losses == pytest.approx(alone.losses[1:6], rel=1e-4, abs=1e-6)
        apart = alone.difference(core, range(6))
        sys.stderr.write(f"{of_core} {of_worker} {apart:.1e}\n")
        assert apart <= 1e-5
        assert core.stop() == 0
        if of_worker:
            assert helper.stop() == 0
        else:
            end_with_sigterm(helper)
        assert not helper.outbox.exists()


def end_with_sigterm(helper: Worker) -> None:
    """As an agent ends it whose controller is gone; its memory-backed files must go with it."""
    assert helper.outbox.exists()
    helper.signal(signal.SIGTERM)
    deadline = time.monotonic() + STEP_S
    while processes_marked(helper.marker) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not processes_marked(helper.marker)


def in_three_parts(core: Trainer, step: int) -> None:
    for part, group in enumerate((2, 0), 1):
        given = of_groups(batch(step), group)
        assert core.accumulate(step, part, given)["tokens"] > 0
    order = {"step": step, "parts": 3, "trajectories": []}
    outcome, reason = core.ask("train", order)
    assert (outcome, "3 parts should be accumulated, 2 are" in reason) == ("refused", True)
    metrics = core.step(step, trajectories=of_groups(batch(step), 1, 3), parts=2)["metrics"]
    assert metrics["generated_tokens"] > metrics["own_tokens"] > 0


def part_and_share(core: Trainer, helper: Worker, step: int) -> None:
    """Nothing is left for the core itself when the step is taken."""
    core.accumulate(step, 1, of_groups(batch(step), 0, 3))
    hand_over(core, helper, step, [1, 2])
    wait_done(helper, step)
    given = of_groups(batch(step), 1, 2)
    shares = [helper.offer(step, [1, 2])]
    metrics = core.step(step, trajectories=given, parts=1, shares=shares)["metrics"]
    (report,) = metrics["shares"]
    used(report)
    assert metrics["own_tokens"] == 0


def test_a_checkpoint_amid_the_parts_of_the_first_step_holds_the_step_before(
    alone: Alone, model_dir: Path, tmp_path: Path
):
    with trainer(tmp_path / "core", model_dir) as core:
        core.wait_ready()
        core.accumulate(1, 1, of_groups(batch(1), 0))
        path = Path(core.told("checkpoint", {"ledger": {}})["path"])
        core.step(1, trajectories=of_groups(batch(1), 1, 2, 3), parts=1)
        assert alone.difference(core, [1]) <= 1e-5
        assert core.stop() == 0
    with trainer(tmp_path / "again", model_dir, resume=path, incarnation=1) as again:
        assert again.wait_ready()["published"]["version"] == 0
        again.step(1)
        assert alone.difference(again, [1]) <= 1e-5
        assert again.stop() == 0


def test_a_worker_that_fails_costs_time_and_never_a_result(
    alone: Alone, model_dir: Path, tmp_path: Path
):
    with (
        trainer(tmp_path / "core", model_dir) as core,
        worker(tmp_path / "worker", model_dir) as helper,
    ):
        core.wait_ready(), helper.wait_ready()
        used(help_with(core, helper, 1, [1, 3]))
        other = url_of(helper.side_port, "another-node")
        assert "another host answers" in unused(help_with(core, helper, 2, [1, 3], url=other))
        with credentials.relay(helper.side_port, flip_at=20_000) as hop:
            through = url_of(hop.port)
            used(help_with(core, helper, 3, [1, 3], url=through))  # it asks again
            assert hop.came_back > 20_000
        old = {"version": "v000000-e0"}
        assert "of version v000000-e0" in unused(help_with(core, helper, 4, [1, 3], **old))
        assert "not done within" in unused(silenced(core, helper, 5, signal.SIGCONT))
        used(help_with(core, helper, 6, [0, 2]))
        assert "nothing listens" in unused(silenced(core, helper, 7, signal.SIGKILL))
        apart = alone.difference(core, range(8))
        assert apart <= 1e-5
        assert core.stop() == 0


def used(report: Mapping[str, Any]) -> None:
    assert (report["used"], report["reason"]) == (True, "")


def unused(report: Mapping[str, Any]) -> str:
    assert not report["used"]
    sys.stderr.write(f"waited {report['waited_s']:.2f} s: {report['reason']}\n")
    return str(report["reason"])


def silenced(core: Trainer, helper: Worker, step: int, then: signal.Signals) -> Mapping[str, Any]:
    """The worker falls silent with its share taken. While the core waits for it, it is killed; or
    else it comes back after the step."""
    hand_over(core, helper, step, [1, 3])
    helper.signal(signal.SIGSTOP)
    began = time.monotonic()
    core.send(step, batch(step), shares=[helper.offer(step, [1, 3])])
    if then is signal.SIGKILL:
        helper.signal(then)
    (report,) = core.result(step)["metrics"]["shares"]
    assert time.monotonic() - began < WAIT_S
    helper.signal(then)
    return dict(report)
