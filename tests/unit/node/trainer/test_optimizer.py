"""AdamW with its moments elsewhere takes the steps of AdamW."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from torch import nn  # noqa: E402

from libra_cli.config.training import Optimizer, TrainingSpec  # noqa: E402
from libra_cli.node.trainer import optimizer as module  # noqa: E402
from libra_cli.node.trainer.optimizer import optimizer_of  # noqa: E402


def trained(optimizer: Optimizer, steps: int, begun: Any = None) -> tuple[list[Any], Any]:
    """Parameters and the optimizer's state after ``steps``, of which some may be ``begun``; the
    gradient is of the step's number."""
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(5, 3)), nn.Parameter(torch.randn(3))]
    training = TrainingSpec(optimizer=optimizer, learning_rate=0.1)
    made = optimizer_of(training, parameters)
    first = 0
    if begun is not None:
        weights, state = begun
        for parameter, weight in zip(parameters, weights, strict=True):
            parameter.data.copy_(weight)
        made.load_state_dict(state)
        first = int(state["state"][0]["step"])
    for number in range(first, steps):
        torch.manual_seed(number)
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        parameters[1].grad = parameters[1].grad if number % 2 else None
        made.step()
    return [one.detach().clone() for one in parameters], made.state_dict()


@pytest.fixture(autouse=True)
def _other_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let what goes to the device be another tensor, as it is where there is one."""
    monkeypatch.setattr(module, "on_device", lambda tensor, device: tensor.clone())


@pytest.mark.parametrize("first", ["adamw", "adamw_offload"])
@pytest.mark.parametrize("second", ["adamw", "adamw_offload"])
def test_either_goes_on_from_the_other_s_state_to_the_same_bits(
    first: Optimizer, second: Optimizer
):
    wanted, _ = trained("adamw", 6)
    half = trained(first, 3)
    found, _ = trained(second, 6, half)
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)


def test_moments_that_are_loaded_never_come_to_the_device_together(
    monkeypatch: pytest.MonkeyPatch,
):
    # torch casts by this what it loads, and brings it to the device of the parameter.
    brought: list[str] = []
    usual = torch.optim.Optimizer._process_value_according_to_param_policy

    def watched(*given: Any, **named: Any) -> Any:
        brought.append(named.get("key", given[-1]))
        return usual(*given, **named)

    place = "_process_value_according_to_param_policy"
    half = trained("adamw", 3)
    monkeypatch.setattr(torch.optim.Optimizer, place, staticmethod(watched))
    trained("adamw", 6, half)
    assert set(brought) == {"step", "exp_avg", "exp_avg_sq"}, "torch's own way is another now"
    brought.clear()
    trained("adamw_offload", 6, half)
    assert set(brought) == {"step"}


def test_muon_moves_matrices_as_torchs_own_and_the_rest_as_adamw():
    def parameters() -> list[Any]:
        torch.manual_seed(0)
        return [nn.Parameter(torch.randn(*shape)) for shape in ((5, 3), (3, 4), (3,))]

    def stepped(given: list[Any], *optimizers: Any) -> list[Any]:
        for number in range(3):
            torch.manual_seed(number)
            for parameter in given:
                parameter.grad = torch.randn_like(parameter)
            for one in optimizers:
                one.step()
        assert all(parameter.grad is not None for parameter in given)
        return [one.detach() for one in given]

    ours, theirs = parameters(), parameters()
    training = TrainingSpec(optimizer="muon", learning_rate=0.01)
    made = optimizer_of(training, ours, ours[:1])
    same: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.0}
    wanted = stepped(
        theirs,
        torch.optim.Muon(theirs[:1], adjust_lr_fn="match_rms_adamw", **same),
        torch.optim.AdamW(theirs[1:], betas=training.betas, **same),
    )
    for one, other in zip(stepped(ours, made), wanted, strict=True):
        torch.testing.assert_close(one, other)
    assert [len(made.state[one]) for one in ours] == [2, 3, 3]
