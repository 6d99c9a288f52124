"""Several updates a batch: which groups are in each, and what ratios and metrics then are."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import pytest

np = pytest.importorskip("numpy", reason="needs the [cpu] extra")
torch = pytest.importorskip("torch", reason="needs the [cpu] extra")

from libra_cli.config.minibatches import minibatches  # noqa: E402
from libra_cli.core.actions import TrainSample  # noqa: E402
from libra_cli.core.cluster.partition import of_first_update  # noqa: E402
from libra_cli.core.types import Branch, Trajectory, TrajectoryId, VersionSpan  # noqa: E402
from libra_cli.node.batch.samples import Scores, TokenSample, read_samples  # noqa: E402
from libra_cli.node.batch.shares import WorkerShare  # noqa: E402
from libra_cli.node.losses.policy_gradient import dapo  # noqa: E402
from libra_cli.node.losses.protocol import LossInputs, LossOutputs  # noqa: E402
from libra_cli.node.losses.ratios import effective_sample_size, rollout_sums  # noqa: E402
from libra_cli.node.model.batching import collate  # noqa: E402
from libra_cli.node.model.policy import PolicyModel  # noqa: E402
from libra_cli.node.model.scores import BranchScores, mean_of, with_scores  # noqa: E402
from libra_cli.node.trainer import checkpoint  # noqa: E402
from libra_cli.node.trainer.optimizer import Movement  # noqa: E402
from libra_cli.node.trainer.trainer import Trainer  # noqa: E402
from libra_cli.runtime.trainer.client import pack_sample  # noqa: E402
from tests.trainers import batch, config_of  # noqa: E402

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(300),  # Muon's products are in bfloat16, which busy cores take a minute for
]
RATE = 0.5
CPU = torch.device("cpu")


@pytest.fixture
def make(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Trainer]:
    """With plain gradient descent, mostly: Adam would hide the size of gradients."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")

    def made(*, plain: bool = True, **training: Any) -> Trainer:
        settings = {"learning_rate": RATE, "warmup_steps": 0, "max_grad_norm": 1e9, **training}
        trainer = Trainer(config_of(model_dir, tmp_path, settings))
        if plain:
            trainer.optimizer = torch.optim.SGD(trainer.parameters().values(), lr=RATE)
        return trainer

    return made


def samples(step: int) -> tuple[TokenSample, ...]:
    return read_samples(msgpack.unpackb(msgpack.packb(batch(step))), max_len=128)


def weights(trainer: Trainer) -> dict[str, Any]:
    return {name: one.detach().clone() for name, one in trainer.parameters().items()}


def logprobs(trainer: Trainer, given: Sequence[TokenSample]) -> Any:
    request = collate(given, CPU).request
    return trainer._scoring.logprobs(request, temperature=0.9)[:2]


def assert_same(some: dict[str, Any], others: dict[str, Any], *, off: float = 2e-6) -> None:
    for name, one in others.items():
        torch.testing.assert_close(some[name], one, atol=off, rtol=0)


# -- which groups are in which update --------------------------------------------------------------

GROUPS = [3, 3, 7, 7, 7, 9, 11, 11, 12]


def test_every_pass_has_each_sample_once_and_no_group_is_cut():
    parts = list(minibatches(GROUPS, parts=2, passes=3, seed=(0, 5)))
    assert len(parts) == 6
    for first, second in zip(parts[::2], parts[1::2], strict=True):
        assert sorted(first + second) == list(range(len(GROUPS)))
        names = [{GROUPS[index] for index in part} for part in (first, second)]
        assert not names[0] & names[1]
        assert abs(len(names[0]) - len(names[1])) <= 1


def test_the_order_depends_on_the_seed_the_step_and_the_pass_only():
    def order(step: int) -> list[list[int]]:
        return list(minibatches(GROUPS, parts=5, passes=2, seed=(0, step)))

    assert order(5) == order(5)
    assert order(5) != order(6)
    assert order(5)[:5] != order(5)[5:]


def test_fewer_groups_than_minibatches_are_fewer_updates():
    assert len(list(minibatches([4, 4], parts=3, passes=1, seed=(0,)))) == 1


# -- what an update is -----------------------------------------------------------------------------


def test_one_update_computes_nothing_before_it(
    make: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
):
    trainer = make()
    monkeypatch.delattr(PolicyModel, "scored")
    assert "ppo_kl" not in trainer.train(1, samples(1))


def test_updates_are_those_of_the_loss_with_what_the_policy_was_before_the_first(
    make: Callable[..., Trainer],
):
    given = samples(1)
    training: dict[str, Any] = {"minibatches": 2, "epochs": 2, "entropy_coef": 0.02}
    training |= {"sampler_correction": "token_mask"}
    trainer, by_hand = make(**training, kl_coef=0.1), make(**training, kl_coef=0.1)
    metrics = trainer.train(1, given)

    with torch.no_grad():
        before = [logprobs(by_hand, [one])[0] for one in given]
    settings, norms, ratios = by_hand.config.training, [], torch.ones(1)
    for part in minibatches([one.group for one in given], parts=2, passes=2, seed=(0, 1)):
        rows = [given[index] for index in part]
        one = collate(rows, CPU)
        current, entropy, _ = by_hand._scoring.logprobs(
            one.request, temperature=0.9, entropy_gradient=True
        )
        old = torch.cat([before[index] for index in part])
        inputs = LossInputs(
            logprobs=current,
            proximal=old,
            rollout=one.rollout,
            advantages=one.advantages,
            trajectories=one.rows,
            groups=one.groups,
            staleness=one.ages,
            over=one.ages > 1,
            max_len=128,
            reference=old,  # the first step: the first policy is that of before
            entropy=entropy,
        )
        by_hand.clear_gradients()
        (dapo(inputs, settings).loss / len(current)).backward()
        norms.append(float(by_hand._clip(1e9)))
        by_hand.optimizer.step()
        ratios = torch.exp(current.detach() - old)
    assert float((ratios - 1).abs().max()) > 0.01
    assert_same(weights(trainer), weights(by_hand))
    assert metrics["grad_norm"] == pytest.approx(np.mean(norms), rel=1e-4)
    assert metrics["ppo_kl"] > 0
    assert metrics["generated_tokens"] == sum(one.generated for one in given)
    assert trainer.step == 1


@pytest.mark.parametrize(
    "changes",
    [{}, {"kl_coef": 0.1, "kl_in_reward": True}, {"loss": "gspo", "kl_coef": 0.1}],
    ids=lambda given: "-".join(given) or "dapo",
)
def test_updates_do_not_depend_on_how_micro_batches_are_cut(
    make: Callable[..., Trainer], changes: dict[str, Any]
):
    training = {"minibatches": 2, "epochs": 2, "entropy_coef": 0.01, **changes}
    whole, cut = make(**training), make(**training, micro_batch_tokens=64)
    told = [trainer.train(1, samples(1)) for trainer in (whole, cut)]
    assert_same(weights(cut), weights(whole))
    for name, value in told[0].items():
        if not name.endswith("_s") and isinstance(value, float):
            assert told[1][name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


def test_an_update_that_is_not_finite_is_left_out_and_the_others_are_taken(
    make: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
):
    trainer = make(minibatches=4)
    good, seen = trainer._loss, list[int]()

    def bad_at_first(inputs: Any) -> LossOutputs:
        seen.append(1)
        outputs = good(inputs)
        return replace(outputs, loss=outputs.loss * math.nan) if len(seen) == 1 else outputs

    before = weights(trainer)
    monkeypatch.setattr(trainer, "_loss", bad_at_first)
    assert "skipped_in_a_row" not in trainer.train(1, samples(1))
    after = weights(trainer)
    assert all(bool(torch.isfinite(one).all()) for one in after.values())
    assert any(not torch.equal(before[name], one) for name, one in after.items())


def test_updates_that_are_infinite_on_both_sides_have_a_mean_that_is_no_number():
    assert math.isnan(mean_of([math.inf, -math.inf]))
    assert mean_of([1.0, 2.0]) == 1.5


def test_a_run_that_goes_on_from_a_checkpoint_takes_the_same_updates(
    make: Callable[..., Trainer], tmp_path: Path
):
    training = {"minibatches": 3, "epochs": 2, "optimizer": "muon", "sharding": "ddp"}
    whole = make(**training, plain=False)
    whole.train(1, samples(1))
    path = checkpoint.save(whole, tmp_path / "checkpoints", ledger={"step": 1}, keep=1)
    resumed = make(**training, plain=False)
    checkpoint.load(resumed, path)
    for trainer in (whole, resumed):
        trainer.train(2, samples(2))
    assert_same(weights(resumed), weights(whole), off=0.0)


# -- what trajectories of a group are compared by --------------------------------------------------


def scores_of(*values: float, leave_one_out: bool = False) -> list[Scores]:
    """Of two branches of a trajectory and of another of its group, their values being their KL."""
    given = samples(1)[:3]
    branches = [replace(given[0], member=0), replace(given[1], member=0), given[2]]
    found = {
        index: BranchScores(np.zeros(1, "f4"), np.zeros(1, "f4"), value=value, kl=value)
        for index, value in enumerate(values)
    }
    scored = with_scores(branches, found, leave_one_out=leave_one_out)
    return [one.scores for one in scored if one.scores]


def test_kl_in_the_reward_is_the_trajectorys_sum_less_the_groups_mean():
    scores, given = scores_of(1.0, 2.0, 5.0), samples(1)
    assert [one.own_value for one in scores] == [3.0, 3.0, 5.0]
    assert [one.group_mean for one in scores] == [4.0, 4.0, 4.0]
    assert [one.excess_kl for one in scores] == [-1.0, -1.0, 1.0]
    whole = given[0].generated + given[1].generated
    assert [one.own_tokens for one in scores] == [whole, whole, given[2].generated]


def test_kl_in_the_reward_is_compared_with_the_others_where_rewards_are():
    scores = scores_of(1.0, 2.0, 5.0, leave_one_out=True)
    assert [one.excess_kl for one in scores] == [-2.0, -2.0, 2.0]


def test_values_that_are_infinite_on_both_sides_have_a_mean_that_is_no_number():
    scores = scores_of(math.inf, 0.0, -math.inf)
    assert all(math.isnan(one.group_mean) and math.isnan(one.excess_kl) for one in scores)


def less_the_mean(rewards: Any) -> Any:
    """As GRPO: ``[groups, members]``."""
    return rewards - rewards.mean(1, keepdim=True)


def less_the_others(rewards: Any) -> Any:
    """As TRL's RLOO trainer: of rewards from which the KL has been taken."""
    others = rewards.sum(1, keepdim=True) - rewards
    return rewards - others / (rewards.shape[1] - 1)


@pytest.mark.parametrize(
    ("advantage", "estimate"), [("grpo", less_the_mean), ("rloo", less_the_others)]
)
def test_kl_in_the_reward_moves_advantages_and_not_the_loss(
    make: Callable[..., Trainer], advantage: str, estimate: Callable[[Any], Any]
):
    """It is REINFORCE on the reward less the KL, less what that is compared with."""
    trainer = make(
        kl_coef=0.3,
        kl_in_reward=True,
        sampler_correction="none",
        advantage=advantage,
        scale_rewards="none",
    )
    with torch.no_grad():
        for parameter in trainer.parameters().values():
            parameter.mul_(1.2)  # so that there is a KL
    rewards = torch.tensor([one.reward for one in samples(1)])
    alone = estimate(rewards.view(4, 4)).flatten().tolist()
    given = [
        replace(one, advantages=((0, value),)) for one, value in zip(samples(1), alone, strict=True)
    ]
    current, _ = logprobs(trainer, given)
    request = collate(given, CPU).request
    assert trainer._reference is not None
    first, *_ = trainer._reference.logprobs(request, temperature=0.9)
    sizes = [one.generated for one in given]
    kls = torch.stack([one.sum() for one in (current - first).detach().split(sizes)])
    advantages = estimate((rewards - 0.3 * kls).view(4, 4)).flatten()
    spread = torch.repeat_interleave(advantages, torch.tensor(sizes))
    loss = (-spread * torch.exp(current - current.detach())).mean()
    wanted = torch.autograd.grad(loss, list(trainer.parameters().values()))
    trainer.clear_gradients()
    told = trainer.gradients_of(given)
    assert told is not None
    for parameter, one in zip(trainer.parameters().values(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad / sum(sizes), one, atol=1e-6, rtol=1e-4)
    assert told["kl"] != 0


def test_a_loss_is_given_what_it_compares_a_group_by(make: Callable[..., Trainer]):
    trainer = make(micro_batch_tokens=64)
    seen: dict[int, set[float]] = {}
    good = trainer._loss

    def looking(inputs: LossInputs) -> LossOutputs:
        assert inputs.own_value is not None
        assert inputs.group_mean is not None
        for group, value in zip(inputs.groups.tolist(), inputs.group_mean.tolist(), strict=True):
            seen.setdefault(group, set()).add(round(value, 3))
        return good(inputs)

    trainer._group_value = lambda inputs: torch.ones_like(inputs.logprobs)
    trainer._loss = looking
    given = samples(1)
    trainer.gradients_of(given)
    sizes = np.array([one.generated for one in given]).reshape(4, 4)
    assert seen == {group: {float(mean)} for group, mean in enumerate(sizes.mean(1))}


# -- metrics ---------------------------------------------------------------------------------------


def test_sums_of_ratios_say_how_many_tokens_the_weighted_ones_are_worth():
    zeros, whole = torch.zeros(4), torch.zeros(4, dtype=torch.int64)
    rollout = -torch.log(torch.tensor([0.25, 1.0, 1.0, 4.0]))
    inputs = LossInputs(zeros, zeros, rollout, zeros, whole, whole, whole, whole > 0, max_len=64)
    sums = {name: float(one) for name, one in rollout_sums(inputs).items()}
    assert sums["rollout_ratio/below_half"] == sums["rollout_ratio/above_2"] == 1
    assert sums["rollout_kl"] == pytest.approx(0.25 + 4.0 - 2)
    total, squares = sums["rollout_ratio_sum"], sums["rollout_ratio_square_sum"]
    told = effective_sample_size(total, squares, 4)
    assert told == {"effective_sample_size": pytest.approx(6.25**2 / (4 * 18.0625))}
    assert effective_sample_size(0.0, 0.0, 0) == {}


@pytest.mark.parametrize("values", [10, 100_000])
def test_the_update_ratio_is_the_norm_of_the_change_over_that_of_the_parameters(values: int):
    generator = torch.Generator().manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(values, generator=generator))
    before = parameter.detach().clone()
    movement = Movement([parameter])
    with torch.no_grad():
        parameter += 0.01 * torch.randn(values, generator=generator)
    wanted = float((parameter.detach() - before).norm() / before.norm())
    assert movement.ratio(lambda own: [own]) == pytest.approx(wanted, rel=0.05)


def test_demonstrations_are_imitated_and_compared_with_no_rollout_policy(make):
    trainer = make(loss="sft", max_grad_norm=1.0)
    given = samples(1)
    metrics = [trainer.train(step, given) for step in (1, 2, 3)]
    losses = [one["loss"] for one in metrics]
    assert losses == sorted(losses, reverse=True)
    assert losses[0] > losses[-1]
    assert 0 <= metrics[0]["token_accuracy"] <= metrics[-1]["token_accuracy"] <= 1
    assert not {"rollout_kl", "effective_sample_size"} & metrics[0].keys()


def test_a_share_of_a_later_update_is_computed_here(make: Callable[..., Trainer]):
    given, trainer, alone = samples(1), make(minibatches=2), make(minibatches=2)
    (_, later) = minibatches([one.group for one in given], parts=2, passes=1, seed=(0, 1))
    late = frozenset({given[later[0]].trajectory})
    share = WorkerShare("w/0", 1, "https://127.0.0.1:1#w", "v000000-e0", late)
    (report,) = trainer.train(1, given, [share])["shares"]
    assert (report["used"], report["reason"]) == (False, "it has trajectories of a later update")
    alone.train(1, given)
    assert_same(weights(trainer), weights(alone), off=0.0)


def test_what_the_first_of_two_updates_takes_is_not_scored_before_it(
    make: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
):
    given, scored = samples(1), list[TokenSample]()
    inner = PolicyModel.scored

    def spied(self: Any, some: Sequence[TokenSample], look: Any = None) -> list[TokenSample]:
        scored.extend(some)
        return inner(self, some, look)

    monkeypatch.setattr(PolicyModel, "scored", spied)
    make(minibatches=2).train(1, given)
    (_, later) = minibatches([one.group for one in given], parts=2, passes=1, seed=(0, 1))
    assert {one.key for one in scored} == {given[index].key for index in later}
    scored.clear()
    make(minibatches=2, epochs=2).train(1, given)
    assert len(scored) == len(given)


def played(group: int, member: int) -> Trajectory:
    """A trajectory of two branches, one of which was left."""

    def tokens() -> dict[str, Any]:
        mask = array("b", [0, 1, 1])
        return {
            "token_ids": array("i", [5, 6, 7]),
            "logprobs": array("f", [0.0, -1.0, -1.0]),
            "loss_mask": mask,
            "spans": [VersionSpan(0, 1, 3)],
        }

    others = {0: Branch(**tokens())}
    return Trajectory(
        id=TrajectoryId(group, member), reward=1.0, number=1, others=others, **tokens()
    )


@pytest.mark.parametrize("step", [1, 2, 3])
def test_controller_and_trainer_have_the_same_trajectories_in_the_first_update(
    make: Callable[..., Trainer], step: int
):
    trajectories = [played(group, member) for member in (1, 0) for group in (40, 7, 3, 19, 12)]
    batch = [
        TrainSample(one, 0, True, ((1, 1.0),), branch)
        for branch in (None, 0)
        for one in trajectories
    ]
    chosen = of_first_update(batch, minibatches=2, seed=(0, step))
    given = read_samples([pack_sample(one) for one in batch], max_len=128)
    first, _ = make(minibatches=2)._minibatches(step, given)
    assert len(first) == len(chosen) == 3 * 4
    here = [given[index] for index in first]
    there = [(one.trajectory.id.group, one.trajectory.id.member) for one in chosen]
    assert [one.trajectory for one in here] == there
