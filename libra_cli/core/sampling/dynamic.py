"""Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): groups without signal are not trained.

Where all members of a group have the same reward every advantage is 0, and so is the gradient; not
so with an estimator that weighs turns, where they have earned it at different ones. Rewards of
roles are compared role by role, as advantages are. A group without
signal is *filtered*: it leaves its place of the batch, which the next prompt of the stream takes. A
run in which no group has signal would play for ever: after so many filtered groups since the last
batch, groups are trained as they come (verl's ``max_num_gen_batches``, which ends the run instead).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from libra_cli.core.advantages.protocol import ComparedGroup
from libra_cli.core.advantages.roles import by_role
from libra_cli.core.types import Tokens


def has_signal(rewards: Sequence[float]) -> bool:
    """Whether two of these rewards of a group differ."""
    return len(set(rewards)) > 1


class WeighsTurns(Protocol):
    """An algorithm. It is held and not its method, which a snapshot of a machine could not name."""

    def has_signal(self, group: ComparedGroup) -> bool:
        """Whether an advantage of a turn is not 0 in a group whose rewards are all the same."""


@dataclass(slots=True)
class FilteredGroups:
    """The groups filtered since the numbers were last taken; all 0 in a run that filters none."""

    algorithm: WeighsTurns | None = None
    """The algorithm that weighs single turns; None where trajectories are weighed as a whole."""
    most: int = 0
    """Groups that may be filtered from one batch to the next; 0: none is."""
    in_a_row: int = 0
    """Groups filtered since the last batch."""
    groups: int = 0
    tokens: Tokens = 0
    """Generated tokens of these groups, and of what closed groups had left of them."""
    environments: Counter[str] = field(default_factory=Counter)
    """Filtered groups of each environment, by its name in the recipe; empty if there is one."""

    @property
    def is_exhausted(self) -> bool:
        """Whether the next group without signal is trained all the same."""
        return self.in_a_row >= self.most

    def filters(self, group: ComparedGroup) -> bool:
        """Whether a group with these members is not to be trained."""
        return not (self.is_exhausted or self.finds_signal(group))

    def finds_signal(self, group: ComparedGroup) -> bool:
        """Whether two rewards of the group differ, or of a role in it, or an advantage of a turn is
        not 0.
        """
        if any(has_signal([one.reward for one in part.everyone]) for part in by_role(group)):
            return True
        return self.algorithm is not None and self.algorithm.has_signal(group)

    def add(self, tokens: Tokens, environment: str) -> None:
        """Count a filtered group with ``tokens`` generated tokens."""
        self.in_a_row += 1
        self.groups += 1
        self.tokens += tokens
        self.environments[environment] += 1

    def take(self, trained: Tokens) -> dict[str, float]:
        """The numbers since the step before, of one that trained so many generated tokens."""
        numbers: dict[str, float] = {
            "groups_filtered": self.groups,
            "filtered_tokens": self.tokens,
            "share_filtered": self.tokens / max(1, self.tokens + trained),
        }
        named = {name: count for name, count in self.environments.items() if name}
        self.groups, self.tokens, self.environments = 0, 0, Counter()
        return numbers | {f"env/{name}/groups_filtered": count for name, count in named.items()}
