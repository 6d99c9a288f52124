"""Token-level GRPO on tensors small enough to reason about."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="needs torch")

from libra_cli.config.age_metrics import OLDEST  # noqa: E402
from libra_cli.config.errors import TrainerError  # noqa: E402
from libra_cli.config.training import SamplerCorrection, TrainingSpec  # noqa: E402
from libra_cli.node.losses.policy_gradient import dapo, kl_estimate  # noqa: E402
from libra_cli.node.losses.protocol import LossInputs, LossOutputs, loss_of  # noqa: E402
from libra_cli.node.losses.ratios import (  # noqa: E402
    age_sums,
    effective_sample_size,
    rollout_sums,
    rollout_weights,
    worth_by_age,
)
from libra_cli.node.model.logprobs import token_logprobs  # noqa: E402


def vector(*values: float, grad: bool = False) -> Any:
    return torch.tensor(values, dtype=torch.float64, requires_grad=grad)


def gradient(
    current: float,
    *,
    old: float,
    rollout: float,
    advantage: float,
    sampler_correction: SamplerCorrection = "token_truncate",
) -> float:
    x = vector(current, grad=True)
    inputs = LossInputs(
        logprobs=x,
        proximal=vector(old),
        rollout=vector(rollout),
        advantages=vector(advantage),
        trajectories=torch.tensor([0]),
        groups=torch.tensor([0]),
        staleness=torch.tensor([0]),
        over=torch.tensor([False]),
        max_len=64,
    )
    dapo(
        inputs, TrainingSpec(clip_low=0.2, clip_high=0.28, sampler_correction=sampler_correction)
    ).loss.backward()
    return float(x.grad)


def two_trajectories(**changes: Any) -> LossInputs:
    """Of three tokens and of one."""
    given = {"logprobs": [-1.0] * 4, "proximal": [-1.0] * 4, "rollout": [-1.0] * 4, **changes}
    return LossInputs(
        **{name: vector(*values) for name, values in given.items()},
        advantages=vector(1.0, 1.0, 1.0, -1.0),
        trajectories=torch.tensor([0, 0, 0, 1]),
        groups=torch.tensor([0, 0, 0, 1]),
        staleness=torch.zeros(4, dtype=torch.int64),
        over=torch.tensor([False, True, False, False]),
        max_len=50,
    )


def shipped(name: str, **training: Any) -> Any:
    return loss_of(TrainingSpec(loss=name, **training))


def test_with_one_update_the_gradient_is_minus_weight_times_advantage():
    assert gradient(-1.0, old=-1.0, rollout=-1.0, advantage=0.7) == pytest.approx(-0.7)
    assert gradient(-1.0, old=-1.0, rollout=-1.2, advantage=0.7) == pytest.approx(
        -0.7 * math.exp(0.2)
    )


def test_the_importance_weight_is_truncated_above_only():
    inputs = two_trajectories(proximal=[0.0, -3.0, 0.0, 0.0], rollout=[-5.0, -1.0, 0.0, 0.0])
    weights, bound = rollout_weights(inputs, TrainingSpec(sampler_correction="token_truncate"))
    assert weights.tolist() == pytest.approx([2.0, math.exp(-2), 1.0, 1.0])
    assert bound.tolist() == [True, False, False, False]
    assert gradient(-1.0, old=-1.0, rollout=-9.0, advantage=1.0) == pytest.approx(-2.0)


def test_a_token_outside_of_the_band_is_left_out():
    inputs = two_trajectories(proximal=[0.0, -3.0, 0.0, 0.0], rollout=[-1.5, -1.0, 0.0, -1.7])
    weights, bound = rollout_weights(inputs, TrainingSpec(sampler_correction="token_mask"))
    assert weights.tolist() == pytest.approx([math.exp(1.5), 0.0, 1.0, 0.0])
    assert bound.tolist() == [False, True, False, True]


@pytest.mark.parametrize(
    ("ratio", "advantage", "moves"),
    [
        (1.27, 1.0, True),
        (1.29, 1.0, False),
        (1.29, -1.0, True),
        (0.81, -1.0, True),
        (0.79, -1.0, False),
        (0.79, 1.0, True),
    ],
)
def test_the_clip_is_asymmetric_and_only_stops_moving_away(
    ratio: float, advantage: float, moves: bool
):
    result = gradient(math.log(ratio), old=0.0, rollout=0.0, advantage=advantage)
    assert (result != 0) == moves


@given(
    logits=st.lists(st.floats(-3, 0), min_size=2, max_size=12),
    cut=st.integers(1, 11),
    shift=st.floats(-0.4, 0.4),
)
def test_the_sum_does_not_depend_on_the_cut(logits: list[float], cut: int, shift: float):
    def total(*parts: slice) -> tuple[float, list[float]]:
        x = vector(*logits, grad=True)
        advantages = torch.linspace(-1, 1, len(logits), dtype=torch.float64)
        losses = [
            dapo(
                LossInputs(
                    logprobs=x[part],
                    proximal=x.detach()[part] + shift,
                    rollout=x.detach()[part] - shift,
                    advantages=advantages[part],
                    trajectories=torch.zeros(len(x[part]), dtype=torch.int64),
                    groups=torch.zeros(len(x[part]), dtype=torch.int64),
                    staleness=torch.zeros(len(x[part]), dtype=torch.int64),
                    over=torch.zeros(len(x[part]), dtype=torch.bool),
                    max_len=64,
                    reference=x.detach()[part] + 2 * shift,
                ),
                TrainingSpec(kl_coef=0.1),
            ).loss
            for part in parts
        ]
        whole = sum(losses)
        whole.backward()
        return float(whole.detach()), x.grad.tolist()

    loss, grads = total(slice(None))
    cut_loss, cut_grads = total(slice(0, cut), slice(cut, None))
    assert cut_loss == pytest.approx(loss, abs=1e-12)
    assert cut_grads == pytest.approx(grads, abs=1e-12)


@given(difference=st.floats(-5, 5))
def test_the_kl_estimate_is_never_negative(difference: float):
    estimate = float(kl_estimate(vector(difference), vector(0.0), "k3"))
    assert estimate >= -1e-12
    assert float(kl_estimate(vector(difference), vector(difference), "k3")) == 0


def test_logprobs_are_of_the_distribution_that_was_sampled_from():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5000, 7, generator=generator)
    targets = torch.randint(0, 7, (5000,), generator=generator)
    logprobs, entropy, greedy = token_logprobs(logits, targets, temperature=0.7)
    expected = torch.distributions.Categorical(logits=logits / 0.7)
    torch.testing.assert_close(logprobs, expected.log_prob(targets))
    torch.testing.assert_close(entropy, expected.entropy())
    assert greedy.tolist() == (logits.argmax(-1) == targets).float().tolist()


# -- what the others weigh, cut and divide by ------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "loss", "divisor"),
    [
        ("dapo", -2.0, None),  # three tokens of advantage 1 and one of -1
        ("bnpo", -2.0, None),
        ("grpo", 0.0, 2.0),  # two trajectories, each of the weight of its mean
        ("gspo", 0.0, 2.0),
        ("dr_grpo", -2.0, 100.0),
        ("sapo", -2.0 + 2.0 / 1.05, 2.0),
    ],
)
def test_a_loss_is_summed_and_divided_as_its_paper_says(
    name: str, loss: float, divisor: float | None
):
    outputs: LossOutputs = shipped(name)(two_trajectories())
    assert float(outputs.loss) == pytest.approx(loss, rel=1e-5)
    assert (outputs.divisor is None) == (divisor is None)
    if outputs.divisor is not None:
        assert float(outputs.divisor) == divisor


@pytest.mark.parametrize("last", [6.0, 0.5])
@pytest.mark.parametrize("name", ["dapo", "grpo", "dr_grpo", "gspo", "cispo", "sapo"])
def test_a_surrogate_is_that_of_its_paper(name: str, last: float):
    advantages, ratios = [0.5, 0.5, 0.5, -0.5], [1.5, 0.5, 1.0, last]
    logs = [math.log(ratio) - 1.0 for ratio in ratios]
    low, high = 0.8, 1.28
    if name == "gspo":
        ratios, low, high = [0.75 ** (1 / 3)] * 3 + [last], 1 - 3e-4, 1 + 4e-4

    def surrogate(ratio: float, advantage: float, log: float) -> float:
        tau = 1.0 if advantage > 0 else 1.05
        return {
            "cispo": min(ratio, 5.0) * advantage * log,
            "sapo": 4 / tau / (1 + math.exp(-tau * (ratio - 1))) * advantage,
        }.get(name, min(ratio * advantage, min(max(ratio, low), high) * advantage))

    gains = [surrogate(*one) for one in zip(ratios, advantages, logs, strict=True)]
    parts = [-gain for gain in gains]
    if name in ("grpo", "gspo", "sapo"):
        parts = [part / size for part, size in zip(parts, (3, 3, 3, 1), strict=True)]
    inputs = replace(two_trajectories(logprobs=logs), advantages=vector(*advantages))
    outputs = shipped(name, clip_low=0.2, clip_high=0.28, sampler_correction="none")(inputs)
    assert float(outputs.loss.detach()) == pytest.approx(sum(parts), rel=1e-5)


@pytest.mark.parametrize(
    ("name", "last", "told"),
    [
        ("dapo", 6.0, (1, 0, 1)),
        ("dapo", 0.5, (2, 1, 1)),
        ("cispo", 6.0, (1, 1, 0)),
        ("cispo", 4.9, (0, 0, 0)),
        ("sapo", 6.0, (0, 0, 0)),
    ],
)
def test_tokens_that_a_bound_stops_are_counted_by_the_sign_of_their_advantage(
    name: str, last: float, told: tuple[int, int, int]
):
    logs = [math.log(ratio) - 1.0 for ratio in (1.5, 0.5, 1.0, last)]
    inputs = replace(two_trajectories(logprobs=logs), advantages=vector(0.5, 0.5, 0.5, -0.5))
    sums = shipped(name, clip_low=0.2, clip_high=0.28)(inputs).metrics
    names = ("clip_fraction", "clip_ratio/low_mean", "clip_ratio/high_mean")
    assert tuple(int(sums[one]) for one in names) == told


def test_kl_and_entropy_are_weighed_by_their_coefficients():
    given = two_trajectories(logprobs=[-1.0, -1.0, -1.0, math.log(1.2) - 1])
    inputs = replace(given, reference=vector(*[-1.5] * 4), entropy=vector(1.0, 2.0, 3.0, 4.0))
    spec = {"kl_coef": 0.1, "kl_estimator": "k1", "entropy_coef": 0.01}
    outputs = shipped("dapo", **spec)(inputs)
    kls, bare = [0.5, 0.5, 0.5, 0.5 + math.log(1.2)], -3 + 1.2 - 0.1
    kl = sum(kls[:3]) + 1.2 * kls[3]
    assert float(outputs.loss) == pytest.approx(bare + 0.1 * kl)
    assert float(outputs.metrics["kl"]) == pytest.approx(sum(kls))
    of_reward = shipped("dapo", kl_in_reward=True, **spec)(inputs)
    assert float(of_reward.loss) == pytest.approx(bare)
    assert float(of_reward.metrics["kl"]) == pytest.approx(sum(kls))


def test_weights_are_summed_and_those_of_none_counted():
    inputs = two_trajectories(rollout=[-1.0, -1.0, -1.5, 1.0])
    sums = shipped("dapo", sampler_correction="token_mask")(inputs).metrics
    assert float(sums["tis_mean"]) == pytest.approx(2.0 + math.exp(0.5))
    assert (int(sums["mask_fraction"]), int(sums["clip_fraction"])) == (1, 1)


def test_tokens_are_told_by_age_with_what_they_are_worth():
    log = math.log(1.5)
    inputs = two_trajectories(rollout=[-1.0, -1.0 - log, -1.0, 2.0])
    inputs = replace(inputs, staleness=torch.tensor([0, 1, 1, OLDEST + 4]))
    sums = {name: 2 * float(one) for name, one in age_sums(inputs).items()}
    told = worth_by_age(sums, passes=2)
    assert sums == {}
    assert told == pytest.approx(
        {
            "staleness/age_0_tokens": 1,
            "staleness/age_0_worth": 1,
            "staleness/age_0_kl": 0,
            "staleness/age_1_tokens": 2,
            "staleness/age_1_worth": 2.5**2 / (2 * (1 + 1.5**2)),
            "staleness/age_1_kl": (1.5 - log - 1) / 2,
            f"staleness/age_{OLDEST}_tokens": 1,
            f"staleness/age_{OLDEST}_worth": 1,
            f"staleness/age_{OLDEST}_kl": math.exp(-3) + 3 - 1,
        }
    )


@pytest.mark.parametrize(
    ("ratio", "below", "above"), [(0.49, 1, 0), (0.51, 0, 0), (1.99, 0, 0), (2.01, 0, 1)]
)
def test_how_far_the_rollout_policy_was_is_told_whatever_the_loss(
    ratio: float, below: int, above: int
):
    log = math.log(ratio)
    sums = rollout_sums(two_trajectories(rollout=[-1.0 - log, -1.0, -1.0, -1.0]))
    told = {name: float(value) for name, value in sums.items()}
    total, squares = 3 + ratio, 3 + ratio**2
    assert told == pytest.approx(
        {
            "rollout_kl": ratio - log - 1,
            "rollout_ratio/below_half": below,
            "rollout_ratio/above_2": above,
            "rollout_ratio_sum": total,
            "rollout_ratio_square_sum": squares,
        }
    )
    size = {"effective_sample_size": pytest.approx(total**2 / (4 * squares))}
    assert effective_sample_size(total, squares, 4) == size


def test_a_correction_of_a_sequence_is_the_product_of_its_tokens():
    inputs = two_trajectories(rollout=[-1.2, -0.9, -1.1, -1.0])
    wide = TrainingSpec(sampler_correction="sequence_truncate", tis_cap=9.0)
    assert rollout_weights(inputs, wide)[0].tolist() == pytest.approx([math.exp(0.2)] * 3 + [1.0])
    narrow = TrainingSpec(sampler_correction="sequence_mask", tis_cap=1.1)
    assert rollout_weights(inputs, narrow)[0].tolist() == pytest.approx([0.0, 0.0, 0.0, 1.0])


@pytest.mark.parametrize("band", [(1.0, 2.0), (0.5, 1.0)])
def test_a_band_has_its_ends(band: tuple[float, float]):
    floor, cap = band
    spec = TrainingSpec(sampler_correction="token_mask", tis_floor=floor, tis_cap=cap)
    assert rollout_weights(two_trajectories(), spec)[0].tolist() == [1.0] * 4


def test_demonstrations_are_imitated_by_their_cross_entropy():
    inputs = two_trajectories(logprobs=[-1.0, -2.0, -3.0, -0.5])
    told = shipped("sft")(inputs)
    assert (float(told.loss), told.metrics) == (6.5, {})
    greedy = shipped("sft")(replace(inputs, greedy=vector(1.0, 0.0, 1.0, 1.0))).metrics
    assert float(greedy["token_accuracy"]) == 3.0


def test_a_weight_at_the_cap_is_bound_by_it():
    spec = TrainingSpec(sampler_correction="token_truncate", tis_cap=1.0)
    inputs = two_trajectories(rollout=[-1.0, -0.9, -1.1, -1.0])
    assert rollout_weights(inputs, spec)[1].tolist() == [True, False, True, True]


def test_arguments_that_a_loss_does_not_take_are_refused_with_those_that_it_takes():
    with pytest.raises(TrainerError, match=r"'dapo' was given training\.loss_args \['beta'\]"):
        shipped("dapo", loss_args={"beta": 1.0})


def test_a_mask_leaves_out_both_sides_of_its_band():
    inputs = two_trajectories(rollout=[-1.0, -2.0, -0.1, -1.1])
    band = TrainingSpec(sampler_correction="token_mask", tis_floor=0.5, tis_cap=2.0)
    weights, bound = rollout_weights(inputs, band)
    assert weights.tolist() == pytest.approx([1.0, 0.0, 0.0, math.exp(0.1)])
    assert bound.tolist() == [False, True, True, False]


@pytest.mark.parametrize(
    ("ratio", "advantage", "weight", "bound"),
    [
        (1.27, 1.0, 1.27, False),
        (1.29, 1.0, 0.0, True),
        (1.29, -1.0, 1.29, False),
        (0.81, -1.0, 0.81, False),
        (0.79, -1.0, 0.0, True),
        (0.79, 1.0, 0.79, False),
        (6.0, -1.0, 5.0, True),
        (6.0, 0.0, 5.0, True),
    ],
)
def test_a_clip_leaves_out_what_has_moved_far_enough(
    ratio: float, advantage: float, weight: float, bound: bool
):
    now = [math.log(ratio), 0.0, 0.0, 0.0]
    inputs = replace(
        two_trajectories(logprobs=now, proximal=now, rollout=[0.0] * 4),
        advantages=vector(advantage, 1.0, -1.0, 0.0),
    )
    spec = TrainingSpec(sampler_correction="token_clip", clip_low=0.2, clip_high=0.28)
    weights, bounds = rollout_weights(inputs, spec)
    assert weights.tolist() == pytest.approx([weight, 1.0, 1.0, 1.0])
    assert bounds.tolist() == [bound, False, False, False]


@pytest.mark.parametrize(
    ("given", "correction"),
    [
        ({}, "token_clip"),
        ({"loss": "dr_grpo"}, "token_clip"),
        ({"loss": "cispo"}, "token_mask"),
        ({"loss": "gspo"}, "token_mask"),
        ({"loss": "sapo"}, "token_mask"),
        ({"loss_args": {"importance_sampling_level": "sequence"}}, "token_mask"),
        ({"tis_floor": 0.4}, "token_mask"),
        ({"loss": "cispo", "sampler_correction": "token_clip"}, "token_clip"),
        ({"tis_floor": 0.4, "sampler_correction": "none"}, "none"),
    ],
)
def test_tokens_are_clipped_by_default_where_the_loss_clips_tokens(
    given: dict[str, Any], correction: str
):
    assert TrainingSpec(**given).correction == correction


def test_a_clip_looks_at_how_far_the_updates_of_a_batch_have_come():
    """The ratio was 1.2 before the first update; 1.2 x 1.1 is past 1.28, and so is no gradient."""
    before, now = math.log(1.2), math.log(1.2 * 1.1)
    clip = partial(gradient, old=before, rollout=0.0, sampler_correction="token_clip")
    assert clip(now, advantage=1.0) == 0.0
    assert clip(now, advantage=-1.0) == pytest.approx(1.2 * 1.1)
    assert clip(before, advantage=1.0) == pytest.approx(-1.2)


@pytest.mark.parametrize("ratio", [0.5, 0.79, 0.81, 1.27, 1.29, 4.0])
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_the_gradient_of_a_clip_is_that_of_ppo_whose_old_policy_generated(
    ratio: float, advantage: float
):
    at = math.log(ratio)
    ours = gradient(at, old=at, rollout=0.0, advantage=advantage, sampler_correction="token_clip")
    ppo = gradient(at, old=0.0, rollout=0.0, advantage=advantage, sampler_correction="none")
    assert ours == pytest.approx(ppo)


def test_without_a_correction_every_weight_is_one():
    inputs = two_trajectories(rollout=[-9.0, -9.0, -0.1, -1.1])
    weights, bound = rollout_weights(inputs, TrainingSpec(sampler_correction="none"))
    assert weights.tolist() == [1.0] * 4
    assert not bound.any()


def test_a_second_bound_ends_what_a_negative_advantage_can_do():
    far = two_trajectories(logprobs=[-1.0, -1.0, -1.0, 1.0])  # the last token is e^2 as likely
    free = shipped("dapo")(far).loss
    bounded = shipped("dapo", loss_args={"delta": 3.0})(far).loss
    assert float(free) == pytest.approx(-3 + math.exp(2))
    assert float(bounded) == pytest.approx(-3 + 3.0)


@pytest.mark.parametrize("name", ["dapo", "bnpo", "grpo", "dr_grpo", "gspo", "cispo", "sapo"])
def test_a_rank_without_a_trajectory_adds_nothing(name: str):
    nothing = torch.zeros(0, dtype=torch.float64)
    whole = torch.zeros(0, dtype=torch.int64)
    outputs = shipped(name)(
        LossInputs(
            nothing, nothing, nothing, nothing, whole, whole, whole, whole.bool(), max_len=50
        )
    )
    assert float(outputs.loss) == 0.0
    assert outputs.divisor is None or float(outputs.divisor) == 0.0


@pytest.mark.parametrize(
    ("estimator", "wanted"), [("k1", 0.5), ("k2", 0.125), ("k3", math.exp(-0.5) - 0.5)]
)
def test_kl_is_estimated_as_asked(estimator: Any, wanted: float):
    assert float(kl_estimate(vector(-1.5), vector(-1.0), estimator)) == pytest.approx(wanted)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_gradient_of_the_kl_term_is_that_of_the_reverse_kl(estimator: Any):
    """Exactly, by the sum over all of five tokens, each as often as the policy says."""
    logits = torch.tensor([0.3, -1.0, 0.7, 0.0, 1.2], requires_grad=True)
    logprobs = torch.log_softmax(logits, 0)
    reference = torch.log_softmax(torch.tensor([1.0, 0.2, -0.5, 0.4, 0.1]), 0)
    often = logprobs.detach().exp()
    (wanted,) = torch.autograd.grad(
        (logprobs.exp() * (logprobs - reference)).sum(), logits, retain_graph=True
    )
    found = torch.zeros(5)
    for token in range(5):
        mine = logprobs[token : token + 1]
        inputs = LossInputs(
            logprobs=mine,
            proximal=mine.detach(),
            rollout=mine.detach(),
            advantages=torch.zeros(1),
            trajectories=torch.zeros(1, dtype=torch.int64),
            groups=torch.zeros(1, dtype=torch.int64),
            staleness=torch.zeros(1, dtype=torch.int64),
            over=torch.zeros(1, dtype=torch.bool),
            max_len=8,
            reference=reference[token : token + 1],
        )
        loss = dapo(inputs, TrainingSpec(kl_coef=1.0, kl_estimator=estimator)).loss
        (one,) = torch.autograd.grad(loss, logits, retain_graph=True)
        found += often[token] * one
    assert found.tolist() == pytest.approx(wanted.tolist(), abs=1e-6)
