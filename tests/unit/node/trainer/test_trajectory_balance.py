"""Trajectory balance beside the squares of its definition, which autograd differentiates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from transformers import AutoModelForCausalLM  # noqa: E402

from libra_cli.config.algorithms import LOSSES  # noqa: E402
from libra_cli.config.errors import TrainerError  # noqa: E402
from libra_cli.config.minibatches import minibatches  # noqa: E402
from libra_cli.config.training import TrainingSpec  # noqa: E402
from libra_cli.node.batch.samples import TokenSample, read_samples  # noqa: E402
from libra_cli.node.losses.protocol import (  # noqa: E402
    LossInputs,
    LossOutputs,
    loss_of,
    needs_reference,
)
from libra_cli.node.losses.trajectory_balance import log_ratio, tba  # noqa: E402
from libra_cli.node.trainer.trainer import Trainer  # noqa: E402
from tests.trainers import batch, config_of  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

BETA = 0.3
SIZES = [(3, 1, 4), (2, 5), (6,)]
"""Generated tokens of the trajectories of each group."""


class Tokens:
    """Random log-probabilities of the groups of ``SIZES``; rewards are 0 to 2."""

    def __init__(self, seed: int = 0) -> None:
        random = torch.Generator().manual_seed(seed)
        sizes = [size for group in SIZES for size in group]
        members = torch.tensor([number for number, group in enumerate(SIZES) for _ in group])
        self.rows = torch.repeat_interleave(torch.tensor(sizes))
        self.groups = members[self.rows]
        self.rewards = 2 * torch.rand(len(sizes), generator=random, dtype=torch.float64)
        self.of_members = members

        def drawn() -> Any:
            return -3 * torch.rand(len(self.rows), generator=random, dtype=torch.float64)

        self.reference, self.logprobs = drawn(), drawn().requires_grad_()

    def sums(self, values: Any) -> Any:
        """Over the tokens of each trajectory."""
        return torch.zeros(len(self.rewards), dtype=values.dtype).index_add(0, self.rows, values)

    def group_means(self, values: Any) -> Any:
        """Of each trajectory, the mean over its group."""
        means = [values[self.of_members == number].mean() for number in range(len(SIZES))]
        return torch.stack(means)[self.of_members]

    def by_definition(self, beta: float) -> Any:
        """beta / 2 x (log Z + log pi - log ref - r / beta)^2, with log Z estimated."""
        ratio = self.sums(self.logprobs - self.reference)
        log_z = self.group_means(self.rewards / beta - ratio).detach()
        return (beta / 2 * (log_z + ratio - self.rewards / beta).square()).sum()

    def inputs(self, rows: Any, *, moved: float = 0.0) -> LossInputs:
        """Of some tokens, ``moved`` nats each since the step began."""
        proximal = self.logprobs.detach() - moved
        own = self.sums(self.logprobs.detach() - self.reference)
        sizes = self.sums(torch.ones_like(self.reference))
        advantages = self.rewards - self.group_means(self.rewards)
        numbers = torch.unique(self.rows[rows], return_inverse=True)[1]
        return LossInputs(
            logprobs=self.logprobs[rows],
            proximal=proximal[rows],
            rollout=proximal[rows] - 7.0,
            advantages=advantages[self.rows][rows],
            trajectories=numbers,
            groups=self.groups[rows],
            staleness=torch.full((len(numbers),), 16),
            over=torch.zeros(len(numbers), dtype=torch.bool),
            max_len=64,
            reference=self.reference[rows],
            own_value=own[self.rows][rows],
            own_tokens=sizes[self.rows][rows],
            group_mean=self.group_means(own)[self.rows][rows],
        )


def of(inputs: LossInputs, beta: float = BETA) -> LossOutputs:
    return loss_of(TrainingSpec(loss="tba", loss_args={"beta": beta}))(inputs)


@pytest.mark.parametrize("beta", [0.01, BETA, 4.0])
@pytest.mark.parametrize("cuts", [[9], [3, 1, 5], [8, 1]])
def test_value_and_gradient_are_the_definition_s_however_the_batch_is_cut(beta, cuts):
    tokens = Tokens()
    expected = tokens.by_definition(beta)
    (gradient,) = torch.autograd.grad(expected, tokens.logprobs)
    trajectories = torch.arange(9).split(cuts)
    losses = [
        of(tokens.inputs(torch.isin(tokens.rows, some).nonzero()[:, 0]), beta).loss
        for some in trajectories
    ]
    (found,) = torch.autograd.grad(sum(losses), tokens.logprobs)
    assert torch.allclose(found, gradient, rtol=0, atol=1e-10)
    assert float(sum(losses)) == pytest.approx(float(expected), rel=1e-6)


def test_the_policy_that_maximises_reward_less_kl_has_no_loss():
    tokens = Tokens()
    lengths = tokens.sums(torch.ones_like(tokens.reference))
    tilt = (tokens.rewards / BETA / lengths)[tokens.rows]
    tokens.logprobs = (tokens.reference + tilt - 0.0).detach().requires_grad_()
    outputs = of(tokens.inputs(torch.arange(len(tokens.rows))))
    (gradient,) = torch.autograd.grad(outputs.loss, tokens.logprobs)
    assert float(outputs.loss) == pytest.approx(0.0, abs=1e-12)
    assert gradient.abs().max() < 1e-12


def test_who_generated_the_tokens_does_not_matter():
    tokens = Tokens()
    inputs = tokens.inputs(torch.arange(len(tokens.rows)))
    other = replace(inputs, rollout=torch.zeros_like(inputs.rollout), over=~inputs.over)
    assert of(inputs).loss == of(other).loss


def test_how_far_the_model_came_since_the_step_began_does_not_matter():
    tokens = Tokens()
    everything = torch.arange(len(tokens.rows))
    assert of(tokens.inputs(everything)).loss == of(tokens.inputs(everything, moved=0.25)).loss


def test_branches_of_a_trajectory_are_one_square_wherever_they_are():
    tokens = Tokens()
    expected = tokens.by_definition(BETA)
    (gradient,) = torch.autograd.grad(expected, tokens.logprobs)
    halves = torch.arange(len(tokens.rows)).split([2, 9, len(tokens.rows) - 11])
    losses = [of(tokens.inputs(some)).loss for some in halves]
    (found,) = torch.autograd.grad(sum(losses), tokens.logprobs)
    assert torch.allclose(found, gradient, rtol=0, atol=1e-10)
    assert float(sum(losses)) == pytest.approx(float(expected), rel=1e-6)


def test_metrics_are_sums_over_tokens():
    tokens = Tokens()
    outputs = of(tokens.inputs(torch.arange(len(tokens.rows))))
    ratio = (tokens.logprobs - tokens.reference).detach()
    assert float(outputs.metrics["kl"]) == pytest.approx(float(ratio.sum()))
    assert outputs.divisor is None
    assert float(outputs.metrics["tb_residual"]) > 0


@pytest.mark.parametrize("beta", [0.0, -1.0])
def test_a_beta_that_is_not_above_0_is_refused(beta):
    tokens = Tokens()
    with pytest.raises(TrainerError, match="must be above 0"):
        of(tokens.inputs(torch.arange(3)), beta)


def test_a_rank_without_tokens_has_a_loss_of_0():
    outputs = of(Tokens().inputs(torch.arange(0)))
    assert float(outputs.loss) == 0.0


@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
@pytest.mark.parametrize("loss", sorted(LOSSES.shipped))
def test_the_controller_knows_which_losses_keep_the_first_policy(loss: str, kl_coef: float):
    training = TrainingSpec(loss=loss, kl_coef=kl_coef)
    assert training.needs.reference == needs_reference(training)


@pytest.fixture
def make(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Trainer]:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")

    def made(**training: Any) -> Trainer:
        spec = {"loss": "tba", "loss_args": {"beta": BETA}, "scale_rewards": "none", **training}
        trainer = Trainer(config_of(model_dir, tmp_path, spec))
        random = torch.Generator().manual_seed(3)
        for parameter in trainer.parameters().values():  # or else it is the reference
            noise = torch.randn(parameter.shape, generator=random)
            parameter.data.add_(0.02 * noise)
        return trainer

    return made


def samples() -> tuple[TokenSample, ...]:
    """Three groups, and a second branch of a member of the first."""
    trajectories = batch(1, groups=3)
    same = {key: trajectories[2][key] for key in ("group", "member", "reward", "advantages")}
    trajectories.append({**trajectories[5], **same})
    return read_samples(msgpack.unpackb(msgpack.packb(trajectories)), max_len=128)


def gradients(trainer: Trainer) -> tuple[float, dict[str, Any]]:
    trainer.clear_gradients()
    sums = trainer.gradients_of(samples()) or {}
    return sums["loss"], {name: one.grad.clone() for name, one in trainer.parameters().items()}


def by_hand(
    trainer: Trainer, model_dir: Path, given: Sequence[TokenSample]
) -> tuple[float, dict[str, Any]]:
    """With whole logits, a trajectory at a time; rewards less a baseline are advantages."""
    reference = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    ratios: dict[tuple[int, int], Any] = {}
    rewards = {}
    for sample in given:
        ids = torch.tensor(sample.token_ids.astype(np.int64))
        places = torch.tensor(sample.loss_mask.astype(bool)).nonzero()[:, 0]
        logs = []
        for model in (trainer.model, reference):
            logits = model(input_ids=ids[None]).logits[0, places - 1] / 0.9
            logs.append(logits.log_softmax(-1).gather(-1, ids[places, None]).sum())
        before = ratios.get(sample.trajectory, 0.0)
        ratios[sample.trajectory] = before + logs[0] - logs[1].detach()
        ((_, rewards[sample.trajectory]),) = sample.advantages
    loss = torch.zeros(())
    for group in {sample.group for sample in given}:
        of_group = [who for who in ratios if who[0] == group]
        mean = torch.stack([ratios[who] for who in of_group]).mean().detach()
        for who in of_group:
            loss = loss + BETA / 2 * (ratios[who] - mean - rewards[who] / BETA).square()
    trainer.clear_gradients()
    loss.backward()
    return float(loss), {name: one.grad.clone() for name, one in trainer.parameters().items()}


def weights_of(trainer: Trainer) -> dict[str, Any]:
    return {name: one.detach().clone() for name, one in trainer.parameters().items()}


def far(one: dict[str, Any], other: dict[str, Any]) -> float:
    """The greatest difference of two gradients, relative to the greatest number of a tensor."""
    return max(
        float((one[name] - other[name]).abs().max() / other[name].abs().max()) for name in other
    )


def test_the_trainer_s_gradient_is_the_definition_s_however_it_cuts(make, model_dir):
    trainer = make()
    loss, expected = by_hand(trainer, model_dir, samples())
    for budget in (8192, 128):
        trainer.micro_batch_tokens = budget
        value, found = gradients(trainer)
        assert far(found, expected) < 1e-5
        assert value == pytest.approx(loss, rel=1e-5)


def test_each_of_several_updates_is_of_whole_trajectories(make, model_dir):
    updates = {"minibatches": 2, "epochs": 2, "max_grad_norm": 1e9, "warmup_steps": 0}
    trainer, plain = make(**updates), make(**updates)
    for one in (trainer, plain):
        one.optimizer = torch.optim.SGD(one.parameters().values(), lr=0.2)
    rate = plain.learning_rate(1)
    trainer.train(1, samples())
    given = samples()
    for part in minibatches([one.group for one in given], parts=2, passes=2, seed=(0, 1)):
        rows = [given[index] for index in part]
        _, wanted = by_hand(plain, model_dir, rows)
        tokens = sum(one.generated for one in rows)
        with torch.no_grad():
            for name, parameter in plain.parameters().items():
                parameter -= rate * wanted[name] / tokens
    moved = weights_of(plain)
    assert far(weights_of(trainer), moved) < 1e-5
    assert far(weights_of(make()), moved) > 1e-3


def test_with_an_adapter_the_model_without_it_is_the_reference(make):
    trainer = make(lora={"rank": 4, "alpha": 8})
    assert trainer._reference is trainer._scoring
    sums = trainer.gradients_of(samples())
    assert sums["kl"] != 0.0


def test_what_is_compared_by_is_the_sum_of_log_ratios():
    tokens = Tokens()
    inputs = tokens.inputs(torch.arange(len(tokens.rows)))
    assert torch.equal(log_ratio(inputs), inputs.proximal - inputs.reference)
    assert tba.group_value is log_ratio  # type: ignore[attr-defined]
