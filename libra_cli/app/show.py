"""``libra show``: the trajectories of a step, or one of them as a conversation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from libra_cli.config.errors import LibraError, WrongRun
from libra_cli.config.recipe import Recipe
from libra_cli.report.trajectories.choice import (
    PlayedTrajectory,
    find,
    first_by,
    have_one_reward,
    step_to_show,
    trained_in,
)
from libra_cli.report.trajectories.conversation import PlayedConversation, conversation_of
from libra_cli.runtime.store.reader import Reader
from libra_cli.runtime.store.run_directory import newest_run, recipe_of

COLORS = ("advantage", "ratio", "version", "logprob")
"""Values of ``--color``: what the colour of a token can stand for."""
_KNOWN = "--color version is always known"


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
        WrongRun: there is no such run, step or trajectory, or not what tokens are to be coloured
            by.
    """
    run_dir = order.run_dir or newest_run()
    with Reader(run_dir) as reader:
        if order.trajectory:
            return _colored(reader, find(reader, order.trajectory), order.color)
        step = step_to_show(reader, order.step)
        played = trained_in(reader, step)
        if order.ranking:
            _refuse_equals(order.ranking, run_dir, step, played)
            return _colored(reader, first_by(order.ranking, played), order.color)
    if order.color:
        raise WrongRun(
            f"--color {order.color} is for the tokens of one trajectory",
            hint=f"libra show {run_dir} --worst --color {order.color}",
        )
    return StepTable(run_dir, step, played)


def _refuse_equals(
    ranking: str, run_dir: Path, step: int | None, played: Sequence[PlayedTrajectory]
) -> None:
    if ranking == "longest" or not have_one_reward(played):
        return
    which = "that have ended" if step is None else f"of step {step}"
    reward = played[0].row.reward
    value = "no reward" if reward is None else f"the same reward, {reward:g}"
    at = "" if step is None else f" --step {step}"
    raise WrongRun(
        f"all {len(played)} trajectories {which} have {value}: none is the {ranking}",
        hint=f"libra show {run_dir}{at} lists them; with --longest it shows the longest of them",
    )


def _colored(reader: Reader, played: PlayedTrajectory, color: str) -> PlayedConversation:
    told = conversation_of(reader, played, by_token=color in ("logprob", "ratio"))
    _refuse_unknown(color, told)
    return told


def _refuse_unknown(color: str, told: PlayedConversation) -> None:
    branches = told.tokens
    if color == "ratio" and branches and not any(branch.log_ratios for branch in branches):
        raise WrongRun(_why_no_ratio(told), hint=_KNOWN)
    known = {
        "advantage": any(branch.advantages for branch in branches),
        "logprob": any(branch.logprobs for branch in branches),
    }
    if branches and not known.get(color, True):
        raise WrongRun(
            f"nothing was kept of this trajectory to colour its tokens by {color}",
            hint=f"{_KNOWN}; an older libra kept no more, and advantages are known once a step has "
            "trained it",
        )


def _why_no_ratio(told: PlayedConversation) -> str:
    """Why no token of a trajectory has a ratio, as far as it is known."""
    who, recipe = told.played.id, _recipe_of(told.run_dir)
    if told.played.step is None:
        return f"no step has trained trajectory {who}, and ratios are of tokens that a step trained"
    if recipe is not None and recipe.training.needs.offline:
        return f"{told.run_dir.name} imitates demonstrations: their tokens have no rollout policy"
    if recipe is not None and recipe.rollout.overlong.mask and told.played.row.truncated:
        return f"trajectory {who} was left out of the loss: a limit cut it (rollout.overlong.mask)"
    return (
        f"{told.run_dir.name} kept no ratio of trajectory {who}: an older libra trained it, or its "
        "trainer does not tell the log-probabilities of tokens"
    )


def _recipe_of(run_dir: Path) -> Recipe | None:
    try:
        return recipe_of(run_dir)
    except LibraError:
        return None
