"""Whether what was generated is healthy text: repetition, and whether length is what pays.

All on token ids and numbers, so that no tokenizer is needed and a step costs milliseconds.

Repetition is one of two things. In a turn, some ``NGRAM`` tokens that occur ``TIMES``. Over turns,
which may be shorter than that, an *exchange*, what was generated and what came back for it, that
occurs ``TIMES`` where most turns are exchanges seen before: who asks the same and is told the same
learns nothing. A call that is made again and answered differently, as of a next page, is none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import StatisticsError, correlation, fmean

from libra_cli.core.types import Branch, Trajectory

NGRAM = 16
"""Tokens; the length at which repetition is looked for."""
TIMES = 3
"""Occurrences from which on text counts as repeated: a tool call made twice does not."""
LOOKED_AT = 4096
"""The last so many generated tokens of a branch are looked at: loops do not end."""


def repeats(branch: Branch) -> bool:
    """Whether a turn of the branch repeats itself, or turns repeat one another."""
    turns, size = _turns(branch), branch.token_ids.itemsize
    if any(_repeats(branch.token_ids[start:end].tobytes(), size) for start, end in turns):
        return True
    starts, ends = [start for start, _ in turns], [start for start, _ in turns[1:]]
    taken = [
        branch.token_ids[start:end].tobytes() for start, end in zip(starts, ends, strict=False)
    ]
    exchanges = Counter(filter(None, taken))  # a simulator's tokens have no bytes
    often = max(exchanges.values(), default=0) >= TIMES
    return often and 2 * len(exchanges) < exchanges.total()


def _turns(branch: Branch) -> list[tuple[int, int]]:
    """Return [start, end) of each turn within the last ``LOOKED_AT`` generated tokens of the
    branch.

    A turn that several versions generated has several spans.
    """
    turns: list[tuple[int, int]] = []
    left = LOOKED_AT
    for span in reversed(branch.spans):
        start = max(span.start, span.end - left)
        end = turns.pop()[1] if turns and turns[-1][0] == span.end else span.end
        turns.append((start, end))
        left -= span.end - start
        if left <= 0:
            break
    return turns[::-1]


def _repeats(tokens: bytes, size: int) -> bool:
    seen: dict[bytes, int] = {}
    for start in range(0, len(tokens) - NGRAM * size + 1, size):
        gram = tokens[start : start + NGRAM * size]
        seen[gram] = seen.get(gram, 0) + 1
        if seen[gram] >= TIMES:
            return True
    return False


def text_metrics(members: Sequence[Trajectory]) -> dict[str, float | None]:
    """``share_repeated`` of trajectories, ``share_unreadable`` of tool calls, and
    ``reward_length_correlation``: Pearson's, within groups, mean over those in which both differ.
    """
    calls = sum(member.tools for member in members)
    groups: dict[int, list[Trajectory]] = {}
    for member in members:
        groups.setdefault(member.id.group, []).append(member)
    found = [value for group in groups.values() for value in _length_pays(group)]
    return {
        "share_repeated": fmean(any(map(repeats, member.branches)) for member in members),
        "share_unreadable": sum(m.unreadable for m in members) / calls if calls else None,
        "reward_length_correlation": fmean(found) if found else None,
    }


def _length_pays(group: Sequence[Trajectory]) -> Iterable[float]:
    if len(group) > 2:
        rewards = [member.reward or 0.0 for member in group]
        try:
            yield correlation([float(member.generated) for member in group], rewards)
        except StatisticsError:  # one of them is the same for all
            return
