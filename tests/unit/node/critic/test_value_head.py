"""The value head: its loss and gradient, what an update moves, and what is kept of it."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from libra_cli.config.errors import TrainerError  # noqa: E402
from libra_cli.config.training import CriticSpec  # noqa: E402
from libra_cli.node.critic.critic import TurnTarget, explained_variance, told  # noqa: E402
from libra_cli.node.critic.value_head import ValueHead, features_of  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
WIDTH, TURNS = 6, 5


def head(**settings: Any) -> ValueHead:
    return ValueHead(WIDTH, CriticSpec.model_validate(settings))


def turns(seed: int = 0) -> tuple[Any, Any, Any]:
    """Features, targets, and values of before, some of which are further off than the clip."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(TURNS, WIDTH, generator=generator)
    targets = torch.randn(TURNS, generator=generator)
    return features_of(hidden), targets, targets + torch.linspace(-1, 1, TURNS)


def alone(vector: Any) -> tuple[Any, int]:
    return vector, TURNS


def moved(seed: int = 1) -> ValueHead:
    made = head(cliprange_value=0.3)
    generator = torch.Generator().manual_seed(seed)
    made.weights.data = torch.randn(WIDTH + 1, generator=generator)
    return made


def test_it_begins_with_0_for_every_turn():
    assert head().values(turns()[0]).tolist() == [0.0] * TURNS


def test_hidden_states_are_scaled_so_that_one_rate_suits_all_widths():
    for width in (4, 4096):
        features = features_of(torch.randn(3, width, dtype=torch.bfloat16) * 100)
        assert features.dtype == torch.float32
        assert features.abs().sum(-1).tolist() == pytest.approx([2.0] * 3, rel=1e-5)
    assert features_of(torch.zeros(1, 4)).tolist() == [[0.0] * 4 + [1.0]]


def test_the_loss_is_ppos_and_its_gradient_is_that_of_whoever_was_further_off():
    """Values that have gone further towards their target than the clip allows are not pulled."""
    made, features = moved(), turns()[0]
    values = (features @ made.weights).detach()
    targets = values + torch.tensor([0.5, 0.5, -0.5, 0.1, 0.2])
    before = values + torch.tensor([-0.5, 0.0, 0.5, 0.1, 0.4])
    loss = made.loss(features, targets, before)
    near = torch.minimum(torch.maximum(values, before - 0.3), before + 0.3)
    kept, clipped = (values - targets) ** 2, (near - targets) ** 2
    assert float(loss) == pytest.approx(0.5 * float(torch.maximum(kept, clipped).sum()), rel=1e-6)
    loss.backward()
    pulls = torch.where(kept >= clipped, values - targets, torch.zeros(()))
    assert (pulls != 0).tolist() == [False, True, False, True, True]
    torch.testing.assert_close(made.weights.grad, pulls @ features, atol=1e-6, rtol=1e-5)


def test_an_update_is_that_of_adamw_along_the_mean_over_all_turns():
    made = moved()
    reference = torch.nn.Parameter(made.weights.detach().clone())
    optimizer = torch.optim.AdamW([reference], lr=0.01, betas=(0.9, 0.999), weight_decay=0.0)
    made._optimizer.param_groups[0]["lr"] = 0.01
    for seed in range(3):
        features, targets, before = turns(seed)
        values = features @ reference
        near = before + (values - before).clamp(-0.3, 0.3)
        loss = 0.5 * torch.maximum((values - targets) ** 2, (near - targets) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert made.update(features, targets, before, alone) == pytest.approx(float(loss), rel=1e-5)
        torch.testing.assert_close(made.weights.detach(), reference.detach(), atol=1e-6, rtol=0)


def test_an_update_moves_no_value_by_much_more_than_twice_the_rate():
    made = head(learning_rate=0.01)
    features, targets, before = turns()
    made.update(features, targets, before, alone)
    assert 0 < float(made.values(features).abs().max()) <= 0.02 * 1.001


def test_it_learns_what_is_a_linear_function_of_the_state():
    made = head(cliprange_value=100.0)
    features, *_ = turns()
    targets = features @ torch.linspace(-2, 2, WIDTH + 1)
    for _ in range(500):
        made.update(features, targets, torch.zeros(TURNS), alone)
    torch.testing.assert_close(made.values(features).detach(), targets, atol=0.02, rtol=0)


def test_a_gradient_that_is_not_finite_moves_nothing():
    made = moved()
    before = made.weights.detach().clone()
    features, targets, values = turns()
    made.update(features * float("nan"), targets, values, alone)
    assert torch.equal(made.weights.detach(), before)


@pytest.mark.parametrize("updates", [0, 3])
def test_one_that_is_restored_goes_on_as_the_one_that_was_saved(updates: int):
    first, second = moved(), head(cliprange_value=0.3)
    for seed in range(updates):
        first.update(*turns(seed), alone)
    second.restore(first.saved())
    for made in (first, second):
        made.update(*turns(9), alone)
    assert torch.equal(first.weights, second.weights)


def test_one_of_another_model_is_refused():
    with pytest.raises(TrainerError, match="hidden states of 6 numbers, and the model has 8"):
        ValueHead(8, CriticSpec()).restore(head().saved())


def test_values_explain_what_they_predict_of_the_targets():
    def of(*pairs: tuple[float, float]) -> float | None:
        return explained_variance([TurnTarget(value, target) for value, target in pairs])

    assert of((1.0, 1.0), (2.0, 2.0)) == 1.0
    assert of((5.0, 1.0), (5.0, 2.0)) == 0.0
    assert of((2.0, 1.0), (1.0, 2.0)) == pytest.approx(-3.0)
    assert of((1.0, 3.0), (2.0, 3.0)) is None
    assert of((float("nan"), 1.0), (2.0, 2.0)) is None
    assert of() is None


def test_advantages_are_told_by_trajectory_and_turn():
    said = {(3, 1, 1): 0.25, (3, 1, 0): -1.0, (2, 0, 0): 1 / 3}
    assert told(said) == [[2, 0, [0.3333]], [3, 1, [-1.0, 0.25]]]
    assert told({(3, 1, 1): float("nan")}) == []
