"""Advantages of trajectories with several roles: each role is compared with the same role only.

A role has a reward and a branch of its own. For the estimator that a recipe names, the turns of one
role in the members of a group are a group by themselves, and each role is estimated apart::

    grpo                    A_ip = (R_ip - mean of R_jp over the members j) / s_p
    reinforce++(-baseline)  means and deviations over the generated tokens of role p
    turn, gigpo             returns of the turns of role p only

with R_ip the reward of role p in member i: the sum of those of its turns. That is the normalisation
by agent of MARSHAL (arXiv 2510.15414), of which the means over a group are those of GRPO. In a
game in which one side is better off, or where one's gain is the other's loss, the mean over both
roles says nothing of what either could expect.

SPIRAL's role-conditioned advantage (arXiv 2506.24119) is R_p - b_p, with b_p an exponential moving
average over the rewards of role p in that game: b_p <- 0.95 b_p + 0.05 R_p. Both are estimates of
E[R_p | game, role], and neither has a bias. The mean over the group is of the newest policy and of
this very task, with the same cards dealt; it keeps no state, as ``protocol`` asks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from libra_cli.config.training import TrainingSpec
from libra_cli.core.advantages.protocol import ComparedGroup, Estimate, Estimator
from libra_cli.core.types import Outcome

_Values = dict[int, float]
"""Advantages of the turns of a trajectory, by index of the turn."""


def roles_of(group: ComparedGroup) -> list[str]:
    """The roles that have spoken in a group, in order of name; none without roles."""
    return sorted({turn.role for one in group.everyone for turn in one.turns} - {""})


def of_role(group: ComparedGroup, role: str) -> ComparedGroup:
    """The group as one role has played it, with the members in which it has spoken."""
    return ComparedGroup(_parts(group.members, role), _parts(group.before, role))


def by_role(group: ComparedGroup) -> list[ComparedGroup]:
    """The group once for each of its roles; a group without roles as it is."""
    return [of_role(group, role) for role in roles_of(group)] or [group]


def estimated_by_role(
    estimator: Estimator, groups: Sequence[ComparedGroup], training: TrainingSpec
) -> Estimate:
    """Return the advantages of all members, as the estimator gives them for each role apart.

    Groups without roles are estimated together, as if there were no others.
    """
    found: list[list[tuple[float, ...] | _Values]] = [[{} for _ in g.members] for g in groups]
    plain = [place for place, group in enumerate(groups) if not roles_of(group)]
    roles = sorted({role for group in groups for role in roles_of(group)})
    if not roles:
        return estimator(groups, training)
    for place, rows in zip(plain, estimator([groups[at] for at in plain], training), strict=True):
        found[place] = [*rows]
    for role in roles:
        parts = {place: of_role(group, role) for place, group in enumerate(groups)}
        played = {place: part for place, part in parts.items() if part.members}
        estimate = estimator([*played.values()], training)
        for place, rows in zip(played, estimate, strict=True):
            _put(found[place], groups[place].members, role, rows)
    return [[_in_order(values) for values in rows] for rows in found]


def _put(
    found: list[tuple[float, ...] | _Values],
    members: Sequence[Outcome],
    role: str,
    rows: Iterable[tuple[float, ...]],
) -> None:
    """Put the advantages of a role at the turns that it has taken."""
    spoken = [place for place, one in enumerate(members) if _turns_of(one, role)]
    for place, values in zip(spoken, rows, strict=True):
        turns = _turns_of(members[place], role)
        each = values * len(turns) if len(values) == 1 else values
        entry = found[place]
        assert isinstance(entry, dict), members[place]
        entry.update(zip(turns, each, strict=True))


def _in_order(values: tuple[float, ...] | _Values) -> tuple[float, ...]:
    if isinstance(values, tuple):
        return values
    return tuple(values[turn] for turn in sorted(values))


def _turns_of(outcome: Outcome, role: str) -> list[int]:
    return [place for place, turn in enumerate(outcome.turns) if turn.role == role]


def _parts(outcomes: Iterable[Outcome], role: str) -> tuple[Outcome, ...]:
    return tuple(_played(outcomes, role))


def _played(outcomes: Iterable[Outcome], role: str) -> Iterator[Outcome]:
    """Yield the part that a role has in each outcome in which it has spoken."""
    for one in outcomes:
        turns = tuple(turn for turn in one.turns if turn.role == role)
        if turns:
            reward = sum(turn.reward for turn in turns)
            yield Outcome(reward, sum(turn.end - turn.start for turn in turns), turns)
