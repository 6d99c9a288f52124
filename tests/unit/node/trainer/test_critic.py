"""Steps with a critic: what turns are weighed by, what it learns, and what is kept of it."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import pytest

np = pytest.importorskip("numpy", reason="needs torch")
torch = pytest.importorskip("torch", reason="needs torch")

from libra_cli.node.batch.samples import TokenSample, read_samples  # noqa: E402
from libra_cli.node.critic.advantages import (  # noqa: E402
    credited,
    generalized_advantages,
    scaled,
    turn_advantages,
)
from libra_cli.node.critic.value_head import ValueHead, features_of  # noqa: E402
from libra_cli.node.trainer import checkpoint  # noqa: E402
from libra_cli.node.trainer.trainer import Trainer  # noqa: E402
from tests.trainers import batch, config_of, with_turns  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(300),
]
RATE = 0.5
GAE = {"advantage": "gae", "gamma": 0.9, "lam": 0.8}


@pytest.fixture
def make(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Trainer]:
    """With plain gradient descent: Adam would hide the size of gradients."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")

    def made(**training: Any) -> Trainer:
        settings = {"learning_rate": RATE, "warmup_steps": 0, "max_grad_norm": 1e9, **training}
        trainer = Trainer(config_of(model_dir, tmp_path, settings))
        trainer.optimizer = torch.optim.SGD(trainer.parameters().values(), lr=RATE)
        return trainer

    return made


def samples(step: int) -> tuple[TokenSample, ...]:
    return read_samples(msgpack.unpackb(msgpack.packb(with_turns(batch(step)))), max_len=128)


def weights(trainer: Trainer) -> dict[str, Any]:
    return {name: one.detach().clone() for name, one in trainer.parameters().items()}


def head(trainer: Trainer) -> Any:
    assert trainer.critic is not None
    return trainer.critic.head.weights.detach()


def assert_same(some: dict[str, Any], others: dict[str, Any], *, off: float = 2e-6) -> None:
    for name, one in others.items():
        torch.testing.assert_close(some[name], one, atol=off, rtol=0)


def hidden_states(trainer: Trainer, given: Sequence[TokenSample]) -> Any:
    """Before every turn, of each sequence by itself."""
    found = []
    for one in given:
        token_ids = torch.from_numpy(one.token_ids.astype(np.int64))[None]
        with torch.no_grad():
            told = trainer.model(input_ids=token_ids, use_cache=False, output_hidden_states=True)
        found += [told.hidden_states[-1][0, token - 1] for _, token, _ in one.turns]
    return torch.stack(found)


def keys(given: Sequence[TokenSample]) -> list[tuple[int, int, int]]:
    return [(*one.trajectory, number) for one in given for number, *_ in one.turns]


def test_without_gae_there_is_no_critic_and_turns_are_nothing(make: Callable[..., Trainer]):
    plain = [replace(one, advantages=((0, 1.0),)) for one in samples(1)]
    told = []
    for given in (plain, [replace(one, turns=()) for one in plain]):
        trainer = make()
        assert trainer.critic is None
        metrics = trainer.train(1, given)
        told.append({k: v for k, v in metrics.items() if not k.endswith("_s")})
    assert told[0] == told[1]
    assert not {"value_loss", "explained_variance", "advantages"} & told[0].keys()


def test_the_first_step_is_that_of_normalised_lambda_returns(make: Callable[..., Trainer]):
    given = samples(1)
    trainer, plain = make(**GAE), make()
    metrics = trainer.train(1, given)
    raw = turn_advantages(given, dict.fromkeys(keys(given), 0.0), trainer.config.training)
    first = given[0]
    by_hand = generalized_advantages(
        [reward for *_, reward in first.turns], [0.0] * 3, gamma=0.9, lam=0.8
    )
    assert [raw[*first.trajectory, turn] for turn in range(3)] == by_hand
    plain.train(1, credited(given, scaled(raw, given, trainer.config.training)))
    assert_same(weights(trainer), weights(plain))
    assert metrics["explained_variance"] == pytest.approx(0.0)
    targets = np.array(list(raw.values()))
    with_no_update = 0.5 * np.mean(targets**2)
    assert 0 < metrics["value_loss"] < with_no_update


def test_a_step_weighs_turns_by_what_the_critic_says_and_it_learns_from_the_same_states(
    make: Callable[..., Trainer],
):
    trainer = make(**GAE)
    trainer.train(1, samples(1))
    given, training = samples(2), trainer.config.training
    by_hand, plain = ValueHead(trainer.hidden_size, training.critic), make()
    assert trainer.critic is not None
    by_hand.restore(trainer.critic.head.saved())
    with torch.no_grad():
        for name, one in plain.parameters().items():
            one.copy_(trainer.parameters()[name])
    features = features_of(hidden_states(trainer, given))
    values = by_hand.values(features).detach()
    assert float(values.std()) > 0.01
    raw = turn_advantages(given, dict(zip(keys(given), values.tolist(), strict=True)), training)
    wanted = scaled(raw, given, training)
    metrics = trainer.train(2, given)

    told = {(group, member): row for group, member, row in metrics["advantages"]}
    for (group, member, turn), value in wanted.items():
        assert told[group, member][turn] == pytest.approx(value, abs=1e-3)
    plain.train(2, credited(given, wanted))
    assert_same(weights(trainer), weights(plain), off=2e-5)
    targets = torch.tensor([raw[key] for key in keys(given)]) + values
    losses = [
        by_hand.update(features, targets, values, lambda vector: (vector, len(values)))
        for _ in range(training.critic.epochs)
    ]
    torch.testing.assert_close(head(trainer), by_hand.weights.detach(), atol=1e-4, rtol=0)
    assert metrics["value_loss"] == pytest.approx(np.mean(losses), rel=1e-3)
    explained = 1 - (targets - values).var() / targets.var()
    assert metrics["explained_variance"] == pytest.approx(float(explained), abs=1e-3)


@pytest.mark.parametrize(
    "changes", [{}, {"minibatches": 2, "epochs": 2}, {"kl_coef": 0.1}, {"lora": {"rank": 4}}]
)
def test_steps_do_not_depend_on_how_micro_batches_are_cut(
    make: Callable[..., Trainer], changes: dict[str, Any]
):
    whole, cut = (make(**GAE, **changes, micro_batch_tokens=tokens) for tokens in (4096, 64))
    for trainer in (whole, cut):
        trainer.train(1, samples(1))
    told = [trainer.train(2, samples(2)) for trainer in (whole, cut)]
    assert_same(weights(cut), weights(whole), off=1e-5)
    torch.testing.assert_close(head(cut), head(whole), atol=1e-4, rtol=0)
    for name in ("value_loss", "explained_variance", "loss"):
        assert told[1][name] == pytest.approx(told[0][name], rel=1e-3, abs=1e-6), name


def test_parts_of_a_step_are_the_step_where_nothing_is_normalised(make: Callable[..., Trainer]):
    given = samples(1)
    first, rest = given[:8], given[8:]
    whole, parts = (make(**GAE, scale_rewards="none") for _ in range(2))
    wanted = whole.train(1, given)
    parts.accumulate(first)
    told = parts.train(1, rest)
    assert_same(weights(parts), weights(whole))
    torch.testing.assert_close(head(parts), head(whole), atol=1e-4, rtol=0)
    assert told["advantages"] == wanted["advantages"]
    assert told["value_loss"] == pytest.approx(wanted["value_loss"], rel=1e-4)


def test_a_trajectory_that_was_masked_has_no_advantage_and_teaches_the_critic_nothing(
    make: Callable[..., Trainer],
):
    trainer = make(**GAE)
    given = [replace(one, turns=(), advantages=()) for one in samples(1)]
    before = weights(trainer)
    metrics = trainer.train(1, given)
    assert_same(weights(trainer), before, off=0.0)
    assert not head(trainer).any()
    assert metrics["advantages"] == []
    assert metrics["explained_variance"] is None


def test_what_is_told_of_a_step_is_json(make: Callable[..., Trainer]):
    metrics = make(**GAE).train(1, samples(1))
    assert json.loads(json.dumps(metrics)) == metrics


def test_a_run_that_goes_on_from_a_checkpoint_goes_on_with_its_critic(
    make: Callable[..., Trainer], tmp_path: Path
):
    whole = make(**GAE)
    whole.optimizer = torch.optim.AdamW(whole.parameters().values(), lr=1e-3)
    whole.train(1, samples(1))
    path = checkpoint.save(whole, tmp_path / "checkpoints", ledger={"step": 1}, keep=1)
    assert (path / checkpoint.CRITIC).is_file()
    resumed = make(**GAE)
    resumed.optimizer = torch.optim.AdamW(resumed.parameters().values(), lr=1e-3)
    checkpoint.load(resumed, path)
    for trainer in (whole, resumed):
        trainer.train(2, samples(2))
    assert torch.equal(head(resumed), head(whole))
    assert_same(weights(resumed), weights(whole), off=0.0)


@pytest.mark.parametrize(("before", "after"), [({}, GAE), (GAE, {})])
def test_a_run_may_go_on_with_another_advantage(
    make: Callable[..., Trainer],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    before: dict[str, Any],
    after: dict[str, Any],
):
    first = make(**before)
    first.optimizer = torch.optim.AdamW(first.parameters().values(), lr=1e-3)
    first.train(1, samples(1))
    path = checkpoint.save(first, tmp_path / "checkpoints", ledger={"step": 1}, keep=1)
    resumed = make(**after)
    resumed.optimizer = torch.optim.AdamW(resumed.parameters().values(), lr=1e-3)
    with caplog.at_level(logging.WARNING):
        checkpoint.load(resumed, path)
    assert ("has no critic" in caplog.text) == (after == GAE)
    assert_same(weights(resumed), weights(first), off=0.0)
    if after:
        assert not head(resumed).any()
