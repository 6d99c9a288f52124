"""Whether a run trained everything once, as its journal and its last checkpoint prove it.

A trainer that dies does some steps again, and a run that is resumed begins before its last ones:
the journal's row of a step is the newest, and steps past the run's own are of a timeline that was
left. Every step names what it trained, and a checkpoint names it for every step up to its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from json import loads
from typing import Any

from libra_cli.core.records import (
    GroupRecord,
    LateRecord,
    Record,
    RunRecord,
    StepRecord,
    TrajectoryRecord,
)
from libra_cli.core.types import GroupId

WHOLE = -1
"""In place of a member's number: all members of a group."""


def check_once(records: Iterable[Record], position: Mapping[str, Any] | None = None) -> list[str]:
    """Return sentences on what a run trained twice, or lost; empty if nothing.

    ``records`` are all rows of the run in the order written, ``position`` the ledger's of one of
    its checkpoints. Rows of steps by a libra that did not name groups yet are passed over.
    """
    rows = list(records)
    steps = _kept(rows)
    wrong = [
        *_twice(steps),
        *_replayed_first(steps, rows),
        *_dropped_and_trained(rows, steps),
        *_scored(rows),
    ]
    return [*wrong, *_unlike(position, steps)] if position else wrong


def dropped_in(records: Iterable[Record]) -> set[GroupId]:
    """The groups whose newest row says that they were given up, or filtered: they are not played
    again. Not so those that were closed first: what they left behind is yet to be trained."""
    return set(_never_trained(records))


def _never_trained(records: Iterable[Record]) -> dict[GroupId, str]:
    """The state of each group that was never trained."""
    states: dict[GroupId, str] = {}
    closed: set[GroupId] = set()
    for row in records:
        if isinstance(row, GroupRecord):
            states[row.group_id] = row.state
            if row.state == "open":
                closed.discard(row.group_id)
        elif isinstance(row, LateRecord):
            closed.add(row.group_id)
    return {
        group: state
        for group, state in states.items()
        if state == "dropped" or (state == "filtered" and group not in closed)
    }


def _kept(rows: Iterable[Record]) -> dict[int, list[Any]]:
    """Return the groups that each step trained, for the steps that the run has not taken back."""
    steps: dict[int, list[Any]] = {}
    last: float = float("inf")
    for row in rows:
        if isinstance(row, StepRecord):
            steps[row.step] = loads(row.groups_json)
        elif isinstance(row, RunRecord):
            last = row.step
    return {step: names for step, names in sorted(steps.items()) if step <= last}


def _parts(names: Iterable[Any]) -> Iterator[tuple[GroupId, int]]:
    for name in names:
        if isinstance(name, int):
            yield name, WHOLE
        else:
            yield from ((name[0], member) for member in name[1])


def _twice(steps: Mapping[int, list[Any]]) -> Iterator[str]:
    seen: dict[GroupId, dict[int, int]] = {}
    for step, names in steps.items():
        for group, member in _parts(names):
            before = seen.setdefault(group, {})
            twice = before if member == WHOLE else {WHOLE, member} & before.keys()
            if twice:
                first = next(iter(before.values()))
                yield f"group {group} is trained in step {first} and in step {step}"
            before[member] = step


def _replayed_first(steps: Mapping[int, list[Any]], rows: Iterable[Record]) -> Iterator[str]:
    """Yield a sentence for each group that was replayed before it was trained."""
    replayed = {row.step: loads(row.replayed_json) for row in rows if isinstance(row, StepRecord)}
    before: set[GroupId] = set()
    for step, names in steps.items():
        for group in sorted(set(replayed[step]) - before):
            yield f"group {group} is replayed in step {step}, and not trained before"
        before |= {group for group, _ in _parts(names)}


def _dropped_and_trained(rows: Iterable[Record], steps: Mapping[int, list[Any]]) -> Iterator[str]:
    states = _never_trained(rows)
    for step, names in steps.items():
        for group in sorted({group for group, _ in _parts(names)} & states.keys()):
            yield f"group {group} is {states[group]}, and trained in step {step}"


def _scored(rows: Iterable[Record]) -> Iterator[str]:
    for row in rows:
        if isinstance(row, TrajectoryRecord) and row.state != "finished" and row.reward is not None:
            who = f"{row.group_id}.{row.member}.{row.attempt}"
            yield f"trajectory {who} is {row.state}, and has the reward {row.reward}"


def _unlike(position: Mapping[str, Any], steps: Mapping[int, list[Any]]) -> Iterator[str]:
    """Yield each difference of a checkpoint from the journal of the same timeline."""
    for step, names in position.get("trained", ()):
        if steps.get(int(step)) not in (None, [], names):
            yield f"step {step}: the checkpoint has trained {names}, the journal {steps[int(step)]}"
    last = int(position["step"])
    trained = {group for step, names in steps.items() if step <= last for group, _ in _parts(names)}
    played = {int(rest["group"]) for rest in position.get("rests", ())}
    for group in sorted(trained & {int(one) for one in position["queue"]} - played):
        yield f"group {group} is trained, and the checkpoint of step {last} plays it again"
