"""``libra show``: the trajectories of a step, or one of them as a conversation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from libra_cli.config.errors import StateError
from libra_cli.report.trajectories.choice import (
    PlayedTrajectory,
    find,
    first_by,
    step_to_show,
    trained_in,
)
from libra_cli.report.trajectories.conversation import PlayedConversation, conversation_of
from libra_cli.report.trajectories.tokens import ShownBranch
from libra_cli.runtime.store.reader import Reader
from libra_cli.runtime.store.run_directory import newest_run

COLORS = ("advantage", "version", "logprob")
"""What tokens can be coloured by. A ratio would need the trainer's log-probabilities, which no run
keeps: of the same tokens the rollout policy's are there."""


@dataclass(frozen=True, slots=True)
class ShowOrder:
    """What is to be shown; without a trajectory and a ranking, all of a step's."""

    run_dir: Path | None = None
    trajectory: str = ""
    ranking: str = ""
    """A key of ``report.trajectories.choice.RANKINGS``, or empty."""
    step: int | None = None
    color: str = ""
    """One of ``COLORS``, or empty."""


@dataclass(frozen=True, slots=True)
class StepTable:
    """The trajectories of a step, or the newest ones of a run that has taken none."""

    run_dir: Path
    step: int | None
    played: list[PlayedTrajectory]


def show(order: ShowOrder) -> StepTable | PlayedConversation:
    """What the order asks for.

    Raises:
        StateError: there is no such run, step or trajectory, or not what tokens are to be coloured
            by.
    """
    run_dir = order.run_dir or newest_run()
    with Reader(run_dir) as reader:
        if order.trajectory:
            return _colored(reader, find(reader, order.trajectory), order.color)
        step = step_to_show(reader, order.step)
        played = trained_in(reader, step)
        if order.ranking:
            return _colored(reader, first_by(order.ranking, played), order.color)
    if order.color:
        raise StateError(
            f"--color {order.color} is for the tokens of one trajectory",
            hint=f"libra show {run_dir} --worst --color {order.color}",
        )
    return StepTable(run_dir, step, played)


def _colored(reader: Reader, played: PlayedTrajectory, color: str) -> PlayedConversation:
    told = conversation_of(reader, played, by_token=color == "logprob")
    _refuse_unknown(color, told.tokens)
    return told


def _refuse_unknown(color: str, branches: Sequence[ShownBranch]) -> None:
    known = {
        "advantage": any(branch.advantages for branch in branches),
        "logprob": any(branch.logprobs for branch in branches),
    }
    if branches and not known.get(color, True):
        raise StateError(
            f"nothing was kept of this trajectory to colour its tokens by {color}",
            hint="--color version is always known; an older libra kept no more, and advantages are "
            "known once a step has trained it",
        )
