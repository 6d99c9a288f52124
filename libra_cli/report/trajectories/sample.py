"""The trajectories that a report shows: of some steps the best, worst and longest, and any one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TypedDict

from libra_cli.config.errors import StateError
from libra_cli.config.text import printable
from libra_cli.core.records import GroupRecord, StepRecord
from libra_cli.report.trajectories.choice import (
    RANKINGS,
    PlayedTrajectory,
    first_by,
    have_one_reward,
    trained_in,
)
from libra_cli.report.trajectories.conversation import PlayedConversation, conversation_of
from libra_cli.runtime.store.reader import Reader

STEPS = 5
"""Evenly spread steps that are shown, the first and the newest among them."""
LONGEST_MESSAGE = 4000
"""Characters of a message that are shown; the middle of a longer one is left out."""
ANY = "any"
"""What a trajectory is called that was chosen for no reason."""


@dataclass(frozen=True, slots=True)
class SampleTrajectory:
    """A trajectory that a report shows, and why it was chosen among those of its step."""

    step: int
    names: Sequence[str]
    """What it is of its step: keys of ``RANKINGS``, or ``ANY``."""
    conversation: PlayedConversation

    @property
    def tags(self) -> Mapping[str, Sequence[str]]:
        """Filter -> the values of it that choose this one."""
        environment = self.played.row.environment
        return {
            "step": [str(self.step)],
            "kind": self.names,
            "environment": [environment] if environment else [],
        }

    @property
    def played(self) -> PlayedTrajectory:
        return self.conversation.played


class TurnCountPart(TypedDict):
    """Trajectories of so many turns, and their mean reward."""

    turns: int
    trajectories: int
    reward: float


def sample(reader: Reader) -> list[SampleTrajectory]:
    """Choose the trajectories that a report shows, those of the newest step first."""
    return [one for step in reversed(_steps(reader)) for one in _of_step(reader, step)]


def filters_of(sampled: Sequence[SampleTrajectory]) -> dict[str, list[str]]:
    """Filter -> the values that it has, where there is anything to choose."""
    found: dict[str, dict[str, None]] = {}
    for one in sampled:
        for name, values in one.tags.items():
            found.setdefault(name, {}).update(dict.fromkeys(values))
    return {
        name: list(values) for name, values in found.items() if name == "step" or len(values) > 1
    }


def shortened(text: str) -> str:
    """A message as a page shows it: nothing in it changes the order of writing."""
    surplus = len(text) - LONGEST_MESSAGE
    if surplus > 0:
        half = LONGEST_MESSAGE // 2
        text = f"{text[:half]}\n[{surplus:,} characters left out]\n{text[-half:]}"
    return printable(text)


def by_turn_count(reader: Reader, steps: Sequence[StepRecord]) -> list[TurnCountPart]:
    """The trajectories that these steps trained, by how many turns they took."""
    rewards: dict[int, list[float]] = {}
    for step in steps:
        for one in trained_in(reader, step.step):
            rewards.setdefault(one.row.turns, []).append(one.reward)
    return [
        {"turns": turns, "trajectories": len(found), "reward": fmean(found)}
        for turns, found in sorted(rewards.items())
    ]


def _steps(reader: Reader) -> list[int]:
    groups = reader.rows(GroupRecord, "step IS NOT NULL")
    known = sorted({group.step for group in groups if group.step is not None})
    if len(known) <= STEPS:
        return known
    return [known[round(at * (len(known) - 1) / (STEPS - 1))] for at in range(STEPS)]


def _of_step(reader: Reader, step: int) -> Iterator[SampleTrajectory]:
    played = trained_in(reader, step)
    if not played:
        return
    told_apart = ("longest",) if have_one_reward(played) else RANKINGS
    chosen = {name: first_by(name, played) for name in told_apart}
    chosen[ANY] = played[step * 7919 % len(played)]  # the same each time that it is drawn
    for names, one in _merged(chosen):
        try:
            told = conversation_of(reader, one, by_token=False)
        except StateError:
            continue  # its tokens are damaged; libra show says so
        if told.branches:
            yield SampleTrajectory(step, names, told)


def _merged(
    chosen: Mapping[str, PlayedTrajectory],
) -> Iterator[tuple[list[str], PlayedTrajectory]]:
    names: dict[PlayedTrajectory, list[str]] = {}
    for name, one in chosen.items():
        names.setdefault(one, []).append(name)
    return ((called, one) for one, called in names.items())
