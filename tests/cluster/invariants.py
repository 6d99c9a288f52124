"""What must hold of a run whatever happened to it, by its journal and by what is on the hosts.

``violations`` reads the database of a run and says what does not hold; nothing if all does:

    steps        are 1, 2, 3 ... without a gap, and the last one is what the run says it is
    once         every step has exactly its groups, and the tokens of the trajectories that name it
                 are those that the step was told to have: who was trained in two steps is missing
                 from the first one, and who was lost after it was trained is missing altogether
    failed       no failed attempt has a reward, no group was trained without one, and no member of
                 a group finished twice
    versions     version v comes from step v, of an incarnation of the trainer that began at a step
                 that was taken before
    proved       what was trained came from servers that had proved the versions it carries
    prompts      groups are numbered without a gap: no prompt was skipped or asked for twice
    end          the run ended as it should

What was lost on the way is no violation, and ``losses`` counts it.
"""

from __future__ import annotations

import json
import re
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CLOSED = re.compile(r"closed without (\d+) unfinished")
"""What a group says that was trained without some of its members."""


@dataclass(frozen=True, slots=True)
class Losses:
    """What faults have cost."""

    steps: int
    steps_again: int
    """Steps that were taken, lost and taken again."""
    trained: int
    """Trajectories."""
    failed: int
    """Attempts at trajectories that failed, and were made again."""
    dropped: int
    """Trajectories that nobody trains: of groups given up, or unfinished when the run ended."""
    groups_dropped: int
    groups_filtered: int
    """Those that dynamic sampling left out: no loss."""
    turns: int
    turns_failed: int
    """Generations that did not come back and were asked for elsewhere."""


class _Journal:
    """The rows that are looked at."""

    def __init__(self, run_dir: Path) -> None:
        uri = f"file:{run_dir}/libra.db?mode=ro"
        with closing(sqlite3.connect(uri, uri=True, timeout=10)) as database:
            database.row_factory = sqlite3.Row
            tables = ("runs", "steps", "groups", "late", "trajectories", "versions")
            every = {name: f"SELECT * FROM {name}" for name in tables}
            self.rows = {name: database.execute(sql).fetchall() for name, sql in every.items()}
            self.events = [
                (row["kind"], json.loads(row["payload_json"]))
                for row in database.execute("SELECT kind, payload_json FROM events ORDER BY seq")
            ]
        recipe = json.loads((run_dir / "recipe.json").read_text())
        self.groups_per_step = int(recipe["training"]["groups_per_step"])
        self.run = self.rows["runs"][0]
        self.steps = sorted(row["step"] for row in self.rows["steps"])

    def of(self, kind: str) -> list[dict[str, Any]]:
        """Every event of a kind, in order."""
        return [payload for name, payload in self.events if name == kind]

    def late(self) -> dict[tuple[int, int], int | None]:
        """The members that a group was trained without, and the step of each, None if not yet.

        Rows that were written before a rollback stay, where the group was trained whole afterwards
        or without others: a group has as many as it says, the step of each comes after its own, and
        the newest count.
        """
        rows: dict[int, list[sqlite3.Row]] = defaultdict(list)
        for row in self.rows["late"]:
            rows[row["group_id"]].append(row)
        found: dict[tuple[int, int], int | None] = {}
        for group in self.rows["groups"]:
            left = CLOSED.search(group["detail"])
            number, own = int(left[1]) if left else 0, group["step"] or 0
            known = rows[group["group_id"]]
            after = [row for row in known if row["step"] is not None and row["step"] > own]
            waiting = [row for row in known if row["step"] is None]
            for row in [*reversed(after), *waiting][:number]:
                found[row["group_id"], row["member"]] = row["step"]
        return found

    def trained(self) -> Iterator[tuple[int, sqlite3.Row]]:
        """Every trajectory that was trained, with its step."""
        late = self.late()
        steps = {row["group_id"]: row["step"] for row in self.rows["groups"]}
        for row in self.rows["trajectories"]:
            who = (row["group_id"], row["member"])
            step = late.get(who, steps.get(who[0]))
            if row["state"] == "finished" and step is not None:
                yield step, row


def violations(run_dir: Path, *, states: frozenset[str] = frozenset({"stopped"})) -> list[str]:
    """What does not hold of a run that has ended in one of these states."""
    journal = _Journal(run_dir)
    checks = (_steps, _once, _failed, _versions, _proved, _prompts)
    found = [line for check in checks for line in check(journal)]
    if journal.run["state"] not in states:
        found.append(f"end: the run is {journal.run['state']}: {journal.run['error']}")
    return found


def _steps(journal: _Journal) -> Iterator[str]:
    if journal.steps != list(range(1, len(journal.steps) + 1)):
        yield f"steps: {_gaps(journal.steps)}"
    # One that fails before it goes on keeps the rows of the controller before.
    over = journal.run["state"] != "failed"
    if over and journal.steps and journal.run["step"] != journal.steps[-1]:
        yield f"steps: the run is at {journal.run['step']}, its last is {journal.steps[-1]}"


def _gaps(numbers: list[int]) -> str:
    absent = sorted(set(range(numbers[0], numbers[-1])) - set(numbers))
    return f"{numbers[0]} to {numbers[-1]} without {absent[:10]}"


def _once(journal: _Journal) -> Iterator[str]:
    groups = Counter(row["step"] for row in journal.rows["groups"] if row["state"] == "trained")
    late = Counter(journal.late().values())
    tokens: Counter[int] = Counter()
    for step, row in journal.trained():
        tokens[step] += row["generated_tokens"]
    for row in journal.rows["steps"]:
        step, batch = row["step"], json.loads(row["batch_json"])
        if groups[step] != journal.groups_per_step:
            yield f"once: step {step} has {groups[step]} groups, not {journal.groups_per_step}"
        if batch["trajectories_late"] != late[step]:
            yield f"once: step {step} was told {batch['trajectories_late']} late, has {late[step]}"
        if tokens[step] != row["generated_tokens"]:
            yield f"once: step {step} was told {row['generated_tokens']} tokens, has {tokens[step]}"


def _failed(journal: _Journal) -> Iterator[str]:
    finished: Counter[tuple[int, int]] = Counter()
    for row in journal.rows["trajectories"]:
        finished[row["group_id"], row["member"]] += row["state"] == "finished"
        if row["state"] != "finished" and row["reward"] is not None:
            who = f"{row['group_id']}.{row['member']}.{row['attempt']}"
            yield f"failed: {who} is {row['state']} and has the reward {row['reward']}"
    for (group, member), number in finished.items():
        if number > 1:
            yield f"failed: {group}.{member} finished {number} times"
    for row in journal.rows["groups"]:
        if row["state"] == "trained" and row["reward"] is None:
            yield f"failed: group {row['group_id']} was trained without a reward"


def _versions(journal: _Journal) -> Iterator[str]:
    by_incarnation: dict[int, list[int]] = defaultdict(list)
    for row in journal.rows["versions"]:
        by_incarnation[row["trainer_incarnation"]].append(row["version"])
    newest = 0
    for incarnation, versions in sorted(by_incarnation.items()):
        ordered = sorted(versions)
        if ordered != list(range(ordered[0], ordered[-1] + 1)):
            yield f"versions: of incarnation {incarnation}: {_gaps(ordered)}"
        if ordered[0] > newest:
            yield f"versions: incarnation {incarnation} begins at {ordered[0]}, after {newest}"
        newest = ordered[-1]
    if journal.steps and newest != journal.steps[-1]:
        yield f"versions: the last is {newest}, of {journal.steps[-1]} steps"


def _proved(journal: _Journal) -> Iterator[str]:
    proved: dict[tuple[str, int], set[int]] = defaultdict(set)
    for event in journal.of("ServerSynced"):
        proved[event["slot"], event["incarnation"]].add(event["published"]["version"][1])
    sound: set[tuple[str, int, int]] = set()
    for event in journal.of("TurnGenerated"):
        versions = proved[event["slot"], event["incarnation"]]
        for span in event["spans"]:
            if span["version"] in versions:
                start = event["prompt_ids"] + span["start"]
                sound.add((event["trajectory"], start, span["version"]))
    # Of a server that has not proved a version tokens may come, but none may be kept.
    for step, row in journal.trained():
        who = f"{row['group_id']}.{row['member']}.{row['attempt']}"
        for version, start, _ in json.loads(row["spans_json"]):
            if (who, start, version) not in sound:
                yield f"proved: {who}, of step {step}, from token {start} on: version {version}"


def _prompts(journal: _Journal) -> Iterator[str]:
    numbers = sorted(row["group_id"] for row in journal.rows["groups"])
    if numbers and numbers != list(range(numbers[-1] + 1)):
        yield f"prompts: {_gaps([-1, *numbers])}"


def losses(run_dir: Path) -> Losses:
    """What faults have cost a run."""
    journal = _Journal(run_dir)
    states = Counter(row["state"] for row in journal.rows["trajectories"])
    groups = Counter(row["state"] for row in journal.rows["groups"])
    kinds = Counter(kind for kind, _ in journal.events)
    return Losses(
        steps=len(journal.steps),
        steps_again=kinds["StepDone"] - len(journal.steps),
        trained=sum(1 for _ in journal.trained()),
        failed=states["failed"],
        dropped=states["dropped"],
        groups_dropped=groups["dropped"] + groups["stale"],
        groups_filtered=groups["filtered"],
        turns=kinds["TurnGenerated"],
        turns_failed=kinds["TurnFailed"],
    )
