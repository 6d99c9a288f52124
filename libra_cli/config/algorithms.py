"""The algorithms that ``training.advantage`` and ``training.loss`` can name, and what each needs.

A run learns by the pair of an advantage and a loss. This is the one table of both: where their code
is, and what they need of the rest of libra. Nothing else compares their names. It is here because
the controller and the hosts both read it, and neither imports the other: a loss needs torch.

What the controller computes for an algorithm, and the rules of its recipe, are in
``core.algorithms``; what the ranks compute is in ``node.losses``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from libra_cli.config.plugins import PluginGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """The needs of an algorithm beside trajectories, their rewards and their log-probabilities."""

    turns: bool = False
    """The advantage weighs each turn by itself, and discounts later ones by ``training.gamma``."""
    leave_one_out: bool = False
    """The advantage compares a member with the other members of
    its group, not with the mean of all.
    """
    whole_batch: bool = False
    """The advantage compares a trajectory with the whole batch, which must be there at once."""
    whole_groups: bool = False
    """The loss compares the trajectories of a group, so that one process computes all of them."""
    group_values: bool = False
    """The loss compares trajectories of a group by the model's log-probabilities, which takes a
    pass before each update.
    """
    reference: bool = False
    """The first policy is kept beside the one that is trained."""
    critic: bool = False
    """The trainer has a critic, which learns from every step."""
    teacher: bool = False
    """A teacher judges every token before a trajectory ends."""
    offline: bool = False
    """The loss learns from given conversations: nothing is played, and there are no rewards."""

    def __or__(self, other: Needs) -> Needs:
        names = [one.name for one in fields(self)]
        return Needs(**{name: getattr(self, name) or getattr(other, name) for name in names})


@dataclass(frozen=True, slots=True)
class Shipped:
    """An algorithm that ships with libra: the import path of its code, and its needs."""

    code: str
    needs: Needs = Needs()
    controller: str = ""
    """Import path of the ``core.algorithms.base.Objective`` of
    a loss; empty where it needs none.
    """


_CORE = "libra_cli.core.algorithms"
_NODE = "libra_cli.node.losses"

_ADVANTAGES: Mapping[str, Shipped] = {
    "grpo": Shipped(f"{_CORE}.grpo:grpo"),
    "rloo": Shipped(f"{_CORE}.rloo:rloo", Needs(leave_one_out=True)),
    "reinforce++": Shipped(f"{_CORE}.reinforce:reinforce_plus_plus", Needs(whole_batch=True)),
    "reinforce++-baseline": Shipped(
        f"{_CORE}.reinforce:reinforce_plus_plus_baseline", Needs(whole_batch=True)
    ),
    "turn": Shipped(f"{_CORE}.turn:turn", Needs(turns=True)),
    "gigpo": Shipped(f"{_CORE}.gigpo:gigpo", Needs(turns=True)),
    "gae": Shipped(f"{_CORE}.gae:GAE", Needs(turns=True, whole_batch=True, critic=True)),
}
_LOSSES: Mapping[str, Shipped] = {
    "dapo": Shipped(f"{_NODE}.policy_gradient:dapo"),
    "bnpo": Shipped(f"{_NODE}.policy_gradient:dapo"),
    "grpo": Shipped(f"{_NODE}.policy_gradient:grpo"),
    "dr_grpo": Shipped(f"{_NODE}.policy_gradient:dr_grpo"),
    "gspo": Shipped(f"{_NODE}.policy_gradient:gspo"),
    "cispo": Shipped(f"{_NODE}.policy_gradient:cispo"),
    "sapo": Shipped(f"{_NODE}.policy_gradient:sapo"),
    "distill": Shipped(
        f"{_NODE}.policy_gradient:dapo", Needs(teacher=True), f"{_CORE}.distill:Distillation"
    ),
    "tba": Shipped(
        f"{_NODE}.trajectory_balance:tba",
        Needs(whole_groups=True, group_values=True, reference=True),
        f"{_CORE}.tba:Balance",
    ),
    "sft": Shipped(f"{_NODE}.imitation:sft", Needs(offline=True), f"{_CORE}.sft:Imitation"),
}
LOSSES_OF_OWN_BOUNDS = ("gspo", "cispo", "sapo")
"""The losses that have no clip of tokens: what bounds their ratios is in ``training.loss_args``."""
_FOREIGN_ADVANTAGE = Shipped("")
_FOREIGN_LOSS = Shipped("", Needs(whole_groups=True))
"""The needs of a loss that does not ship with libra: it may compare the trajectories of a group.
Whether it needs the first policy only the hosts can tell (``node.losses.protocol``).
"""

ADVANTAGES = PluginGroup(
    "libra.advantages",
    "advantage estimator",
    {name: one.code for name, one in _ADVANTAGES.items()},
)
"""The advantage estimators; ``core.advantages.protocol`` says what an estimator is."""
LOSSES = PluginGroup("libra.losses", "loss", {name: one.code for name, one in _LOSSES.items()})
"""The losses; ``node.losses.protocol`` says what a loss is."""


def needs_of(advantage: str, loss: str) -> Needs:
    """Return the needs of an advantage and a loss together.

    The needs of one that does not ship with libra are known only as far as can be told without its
    code.
    """
    estimator = _ADVANTAGES.get(advantage, _FOREIGN_ADVANTAGE)
    return estimator.needs | _LOSSES.get(loss, _FOREIGN_LOSS).needs


def controller_of(loss: str) -> str:
    """The import path of what the controller does for a loss; empty if that is nothing."""
    return _LOSSES.get(loss, _FOREIGN_LOSS).controller


def controllers_beside(loss: str, given: Needs) -> list[str]:
    """The import paths of the controllers of a loss, and of those
    that need what a recipe gives for them.
    """
    return [
        one.controller
        for name, one in _LOSSES.items()
        if one.controller and (name == loss or one.needs | given == given)
    ]


def advantages_with(**needs: bool) -> list[str]:
    """The names of the shipped advantages that have these needs, in order."""
    return sorted(
        name
        for name, one in _ADVANTAGES.items()
        if all(getattr(one.needs, need) == value for need, value in needs.items())
    )
