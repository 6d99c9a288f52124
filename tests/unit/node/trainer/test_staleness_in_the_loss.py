"""How old tokens are reaches the loss, and what is left out is left out of the divisor too."""

from __future__ import annotations

import math
from array import array
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="needs torch")

from libra_cli.config.training import TrainingSpec  # noqa: E402
from libra_cli.core.actions import TrainSample  # noqa: E402
from libra_cli.core.types import Trajectory, TrajectoryId, VersionSpan  # noqa: E402
from libra_cli.node.batch.samples import TokenSample, counted, read_sample  # noqa: E402
from libra_cli.node.losses.policy_gradient import dapo  # noqa: E402
from libra_cli.node.losses.protocol import LossInputs  # noqa: E402
from libra_cli.node.model.batching import collate, deal  # noqa: E402
from libra_cli.runtime.trainer.client import pack_sample  # noqa: E402

CPU = torch.device("cpu")
MASK = TrainingSpec.model_validate({"max_staleness": 1, "staleness": "token"})
WEIGHT = TrainingSpec.model_validate(
    {"max_staleness": 1, "staleness": {"rule": "token", "over": "weight"}}
)

EVEN = ((0, 1.0),)


def played(*versions: int, reward: float = 1.0, group: int = 0, member: int = 0) -> Trajectory:
    """A prompt token, then two generated tokens and a tool token of each version."""
    trajectory = Trajectory(TrajectoryId(group, member), token_ids=array("i", [1]), reward=reward)
    trajectory.loss_mask, trajectory.logprobs = array("b", [0]), array("f", [0.0])
    for version in versions:
        start = len(trajectory.token_ids)
        trajectory.add_span(VersionSpan(version, start, start + 2))
        trajectory.token_ids.extend([start, start + 1, 9])
        trajectory.loss_mask.extend([1, 1, 0])
        trajectory.logprobs.extend([-0.5, -1.0, 0.0])
    return trajectory


def sent(sample: TrainSample) -> TokenSample:
    """As it comes out on the trainer's side."""
    return read_sample(msgpack.unpackb(msgpack.packb(pack_sample(sample))), max_len=100)


@given(versions=st.lists(st.integers(0, 9), min_size=1, max_size=8), held=st.integers(0, 9))
def test_every_token_arrives_with_its_age(versions: list[int], held: int):
    sample = sent(TrainSample(played(*versions), held, False, EVEN))
    batch = collate([sample], CPU)
    wanted = [max(0, held - version) for version in versions for _ in range(2)]
    assert batch.ages.tolist() == wanted
    assert len(sample.behind) <= len(versions)


def test_advantages_arrive_with_their_tokens():
    runs = ((1, -0.5), (4, 2.0))
    turns = sent(TrainSample(played(3, 3), 5, False, runs))
    assert collate([turns], CPU).advantages.tolist() == [-0.5, -0.5, 2.0, 2.0]
    by_token = array("f", [0, 1, 2, 0, 4, 5, 0])
    own = sent(TrainSample(played(3, 3), 5, False, runs, token_advantages=by_token))
    assert collate([own], CPU).advantages.tolist() == [1.0, 2.0, 4.0, 5.0]
    assert collate([turns, own], CPU).advantages.tolist() == [-0.5, -0.5, 2, 2, 1, 2, 4, 5]


def test_only_the_rule_that_masks_leaves_tokens_out():
    samples = [sent(TrainSample(played(0, 4, 3, 2), 5, False, EVEN))]
    for rule in ("hold", "late", "soft", "cut"):
        spec = TrainingSpec.model_validate({"max_staleness": 1, "staleness": rule})
        assert counted(samples, spec)[0].generated == 8
    assert counted(samples, WEIGHT)[0].generated == 8
    (masked,) = counted(samples, MASK)
    assert masked.loss_mask.tolist() == [0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0]


def loss_of(samples: list[TokenSample], spec: TrainingSpec, shares: int) -> tuple[float, int]:
    """The mean over what counts, computed by so many, each with its own cut."""
    kept = counted(samples, spec)
    total, tokens = 0.0, sum(sample.generated for sample in kept)
    for share in deal([len(one.token_ids) for one in kept], shares=shares, budget=20):
        for indices in share:
            batch = collate([kept[i] for i in indices], CPU)
            current = -0.01 * batch.request.targets.double()
            inputs = LossInputs(
                logprobs=current,
                proximal=current,
                rollout=batch.rollout,
                advantages=batch.advantages,
                trajectories=batch.rows,
                groups=batch.groups,
                staleness=batch.ages,
                over=batch.ages > spec.max_staleness,
                max_len=64,
            )
            total += float(dapo(inputs, spec).loss)
    return total / max(1, tokens), tokens


def by_hand(trajectories: list[Trajectory], held: int, spec: TrainingSpec) -> tuple[float, int]:
    mean = sum(one.reward or 0.0 for one in trajectories) / len(trajectories)
    total, tokens = 0.0, 0
    for one in trajectories:
        gain = (one.reward or 0.0) - mean
        for span in one.spans:
            over = max(0, held - span.version) > spec.max_staleness
            for at in range(span.start, span.end):
                if over and spec.staleness.masks:
                    continue
                weight = math.exp(-0.01 * one.token_ids[at] - one.logprobs[at])
                moved = (gain > 0 and weight > 1.28) or (gain < 0 and weight < 0.8)
                weight = 0.0 if moved else min(weight, 5.0)
                weight = min(weight, 1.0) if over and spec.staleness.weighs else weight
                total -= weight * gain
                tokens += 1
    return total / max(1, tokens), tokens


@pytest.mark.parametrize("spec", [MASK, WEIGHT, TrainingSpec()], ids=["mask", "weight", "hold"])
@given(data=st.data())
def test_the_loss_is_what_it_is_by_hand_whoever_computes_it(spec: TrainingSpec, data: Any):
    some = st.lists(st.integers(0, 6), min_size=1, max_size=5)
    trajectories = [
        played(*data.draw(some), reward=float(member % 3), member=member) for member in range(4)
    ]
    held = data.draw(st.integers(0, 7))
    mean = sum(one.reward or 0.0 for one in trajectories) / len(trajectories)
    samples = [
        sent(TrainSample(one, held, False, ((0, (one.reward or 0.0) - mean),)))
        for one in trajectories
    ]
    expected, tokens = by_hand(trajectories, held, spec)
    for shares in (1, 2, 3):
        loss, count = loss_of(samples, spec, shares)
        assert count == tokens
        assert loss == pytest.approx(expected, abs=1e-6)


def test_masks_of_the_wire_keep_numpy_types():
    (masked,) = counted([sent(TrainSample(played(0, 5), 5, False, EVEN))], MASK)
    assert masked.loss_mask.dtype == np.int8
