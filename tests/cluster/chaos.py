"""A real run under a seeded schedule of every kind of fault, and what became of it.

    python -m tests.cluster.chaos --minutes 60 --seed 1 [--hosts 3] [--table FILE] [--fake]

plays the quickstart's job (real vLLM, accelerate, SSH, the small model) on hosts in network
namespaces. One fault comes at a time, sometimes two on different hosts, and the next one when the
run has recovered; ``tests.cluster.faults`` says what that means. Afterwards the run is stopped, and
``tests.cluster.invariants`` says what does not hold of it. A run that does not recover in time, or
ends, is resumed, and given up only if that does not help either. Every minute a row is added to
``--table``: memory, descriptors, bytes. With ``--fake`` servers compute nothing, and start at once.

The exit status is 0 if every fault was recovered from and nothing is violated or left. Needs root.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.cluster.cluster import Cluster, cluster
from tests.cluster.controller import Controller, ControllerEnded
from tests.cluster.faults import KINDS, Injection, Kind, is_well
from tests.cluster.growth import Growth
from tests.cluster.invariants import losses, violations
from tests.cluster.recipe import MODELS, recipe_of, share_models, with_fake_servers
from tests.netns import SshHost, marked

TWO_AT_ONCE = 0.35
"""The share of faults that come with another one."""
PAUSE_S = 1.0
"""The most from a recovery to the next fault."""
LOOK_S = 0.5
START_S = 300.0
STOP_S = 120.0
RESUME_S = 150.0

HASTY = [sys.executable, str(Path(__file__).with_name("hasty.py"))]

Say = Callable[[str], None]
Planned = tuple[Kind, int | None]
"""A kind of fault and the index of its host; None: the controller."""


def schedule(seed: int, hosts: int, kinds: Sequence[Kind]) -> Iterator[tuple[Planned, ...]]:
    """What to break next, for ever: in every round each kind once, but for those that are rarer."""
    rng = random.Random(seed)
    turn = 0
    while True:
        turn += 1
        offset = {kind.name: index for index, kind in enumerate(kinds)}
        due = [kind for kind in kinds if (turn + offset[kind.name]) % kind.every == 0]
        rng.shuffle(due)
        while due:
            first = (due.pop(), _place(rng, hosts))
            planned = [_placed(first, hosts)]
            if due and rng.random() < TWO_AT_ONCE:
                second = _placed((due[-1], _place(rng, hosts)), hosts)
                # A slot changes sides only while all else is well.
                moves = "hybrid" in (first[0].where, second[0].where)
                if second[1] != planned[0][1] and not moves:
                    planned.append(second)
                    due.pop()
            yield tuple(planned)


def _place(rng: random.Random, hosts: int) -> int:
    return rng.randrange(hosts)


def _placed(planned: tuple[Kind, int], hosts: int) -> Planned:
    kind, index = planned
    where = {"serve": index % (hosts - 1), "hybrid": hosts - 2, "train": hosts - 1, "any": index}
    return kind, where.get(kind.where)


@dataclass(slots=True)
class Result:
    """What a campaign found."""

    seconds: float = 0.0
    injections: list[Injection] = field(default_factory=list)
    skipped: int = 0
    """Faults whose process was not there."""
    runs: dict[str, list[str]] = field(default_factory=dict)
    """Run directory -> what is violated."""
    left: list[str] = field(default_factory=list)
    """What was left on hosts."""

    @property
    def failures(self) -> list[Injection]:
        """Faults that were not recovered from."""
        return [one for one in self.injections if one.seconds is None]

    @property
    def is_sound(self) -> bool:
        """Whether everything is as it should be."""
        return not (self.failures or self.left or any(self.runs.values()))


class Campaign:
    """One run after the other on one cluster, under faults."""

    def __init__(self, c: Cluster, say: Say, recipe: dict[str, Any]) -> None:
        self._c = c
        self._recipe = recipe
        self._say = say
        self._began = time.monotonic()
        self.result = Result()

    @property
    def _run(self) -> Controller:
        assert self._c.controller is not None
        return self._c.controller

    def begin(self) -> None:
        """Start a run and wait for its first checkpoint."""
        self._c.run(self._recipe, command=HASTY)
        saved = "SELECT 1 FROM steps WHERE checkpoint != ''"
        self._run.wait("checkpoint", lambda: self._run.query(saved), timeout_s=START_S)
        self._note(f"{self._run.run_dir}")

    def play(self, planned: Sequence[Planned]) -> None:
        """Break what is planned, and wait for the recovery."""
        injections = [Injection(kind, self._c, self._host(index)) for kind, index in planned]
        injections = [one for one in injections if self._possible(one)]
        if not injections:
            return
        for one in injections:
            one.alone = len(injections) == 1
        self._note("begins: " + ", ".join(_named(one) for one in injections))
        try:
            _inject(injections)
            self._await(injections)
        except Exception as error:  # noqa: BLE001 - told, and the campaign goes on
            for one in injections:
                if one.seconds is None:
                    one.outcome = type(error).__name__
            self._evidence(injections, str(error))
        for one in injections:
            one.kind.after(one)
            self.result.injections.append(one)
            took = one.outcome if one.seconds is None else f"{one.seconds:6.1f} s"
            self._note(f"{took}  {_named(one)}")
        if any(one.seconds is None for one in injections):
            self._save()

    def finish(self) -> None:
        """Ctrl-C, and see what is left and what is violated."""
        try:
            self._run.stop(STOP_S)
        except Exception as error:  # noqa: BLE001 - told, whatever it is
            self._note(f"the run does not stop: {error!r}")
            self._run.end()
        self._account(frozenset({"stopped"}))
        self.result.seconds = time.monotonic() - self._began

    def _host(self, index: int | None) -> SshHost | None:
        return None if index is None else self._c.hosts[index]

    def _possible(self, one: Injection) -> bool:
        role = one.kind.role
        there = role is None or bool(self._c.processes(role, one.host))
        self.result.skipped += not there
        return there

    def _await(self, injections: list[Injection]) -> None:
        give_up = time.time() + max((one.kind.deadline_s for one in injections), default=0.0)
        pending, seen = list(injections), dict[int, float]()
        while pending:
            if self._run.ended:
                raise ControllerEnded(self._run.told())
            if time.time() > give_up:
                raise TimeoutError(self._run.told())
            for one in list(pending):
                if not one.recovered():
                    seen.pop(id(one), None)
                elif time.time() - seen.setdefault(id(one), time.time()) >= LOOK_S:
                    one.seconds = seen[id(one)] - one.at
                    pending.remove(one)
            time.sleep(0.1)

    def _save(self) -> None:
        """Resume the run, or begin another one if that does not help."""
        try:
            if not self._run.ended:
                self._run.stop(STOP_S)
            self._run.resume()
            since = time.time()
            self._run.wait("resumed run", lambda: is_well(self._c, since), timeout_s=RESUME_S)
            self._note("resumed")
        except Exception as error:  # noqa: BLE001 - whatever it was, the campaign goes on
            self._note(f"given up, since a resume does not help: {str(error)[-1500:]}")
            self._run.end()
            stopped = self._run.libra("stop", str(self._run.run_dir), timeout_s=STOP_S)
            self._note(f"libra stop: {stopped.returncode} {stopped.stdout} {stopped.stderr}")
            self._account(frozenset({"running", "starting", "stopped", "failed"}))
            self.begin()

    def _account(self, states: frozenset[str]) -> None:
        run_dir = self._run.run_dir
        found = violations(run_dir, states=states)
        self.result.runs[str(run_dir)] = found
        self.result.left += self._c.left()
        self.result.left += [f"pid {pid}" for pid in marked(run_dir.name)]
        for line in [*found, *self.result.left]:
            self._note(line)

    def _evidence(self, injections: list[Injection], error: str) -> None:
        where = self._c.directory / f"evidence-{len(self.result.injections)}"
        where.mkdir(exist_ok=True)
        told = [f"{one.kind.name} at {one.at}, over {one.over}" for one in injections]
        (where / "fault.txt").write_text("\n".join([*told, error]))
        for table in ("slots", "nodes", "notes"):
            try:
                rows = [_in_one_line(row) for row in self._run.query(f"SELECT * FROM {table}")]
            except Exception as failure:  # noqa: BLE001 - there may be no such table
                rows = [repr(failure)]
            (where / f"{table}.txt").write_text("\n".join(rows))
        for host in self._c.hosts:
            for log in self._c.net.machine(host).path(host.disk).glob("runs/*/*/**/*.log"):
                name = f"{host.name}-{log.name}"
                (where / name).write_bytes(log.read_bytes()[-20_000:])
        self._note(f"see {where}")

    def _note(self, text: str) -> None:
        self._say(f"{time.monotonic() - self._began:7.1f}  {text}")


def _in_one_line(row: tuple[object, ...]) -> str:
    return " | ".join(map(str, row))


def _named(one: Injection) -> str:
    return f"{one.kind.name} ({one.host.name})" if one.host else one.kind.name


def _inject(injections: Sequence[Injection]) -> None:
    """Begin all at once, and end each in its time."""
    for one in injections:
        one.begin()
    began = time.monotonic()
    for one in sorted(injections, key=lambda one: one.kind.lasts_s):
        time.sleep(max(0.0, began + one.kind.lasts_s - time.monotonic()))
        one.end()


def table(result: Result) -> str:
    """Faults by kind: how many, how many recovered, seconds. The median is over those that came
    alone, if any did."""
    by_kind: dict[str, list[Injection]] = defaultdict(list)
    for one in result.injections:
        by_kind[one.kind.name].append(one)
    lines = [f"{'kind':46} {'faults':>6} {'recovered':>9} {'median s':>8} {'worst s':>8}"]
    for name, ones in sorted(by_kind.items()):
        lines.append(_line(name, ones))
    lines.append(_line("all", result.injections))
    return "\n".join(lines)


def _line(name: str, ones: Sequence[Injection]) -> str:
    took = [one.seconds for one in ones if one.seconds is not None]
    alone = [one.seconds for one in ones if one.seconds is not None and one.alone]
    times = f"{statistics.median(alone or took):8.1f} {max(took):8.1f}" if took else ""
    return f"{name:46} {len(ones):6} {len(took):9} {times}"


def summary(result: Result) -> str:
    """What a campaign found, for people."""
    lines = [f"{result.seconds / 60:.1f} minutes, {len(result.injections)} faults", table(result)]
    for run_dir, found in result.runs.items():
        lost = losses(Path(run_dir))
        size = sum(path.stat().st_size for path in Path(run_dir).glob("libra.db*"))
        lines += [f"{run_dir}: {asdict(lost)}", f"{size / max(1, lost.steps):.0f} bytes a step"]
        lines += [f"VIOLATED {line}" for line in found[:20]]
        lines += [f"invariants: {'hold' if not found else f'{len(found)} violations'}"]
    lines.append(f"left on hosts: {result.left or 'nothing'}")
    return "\n".join(lines)


def main() -> None:
    """Play a campaign."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hosts", type=int, default=3)
    parser.add_argument("--table", type=Path)
    parser.add_argument("--directory", type=Path, help="is kept; what there is in it is not")
    parser.add_argument("--fake", action="store_true", help="servers without vLLM")
    parser.add_argument("--only", nargs="+", default=[], help="words of the kinds to play")
    given = parser.parse_args()
    kinds = [
        kind
        for name, kind in KINDS.items()
        if not given.only or any(word in name for word in given.only)
    ]
    directory = given.directory or Path(tempfile.mkdtemp(prefix="libra-chaos-"))
    with cluster(given.hosts, directory) as c:
        share_models(c, MODELS.expanduser())
        recipe = recipe_of(c)
        campaign = Campaign(c, _say, with_fake_servers(recipe) if given.fake else recipe)
        with Growth(c, campaign.result, given.table):
            campaign.begin()
            end = time.monotonic() + 60 * given.minutes
            rng = random.Random(given.seed)
            for planned in schedule(given.seed, given.hosts, kinds):
                if time.monotonic() > end:
                    break
                campaign.play(planned)
                time.sleep(rng.random() * PAUSE_S)
        campaign.finish()
    _say(summary(campaign.result))
    told = {
        name: [one.seconds for one in campaign.result.injections if one.kind.name == name]
        for name in KINDS
    }
    (directory / "result.json").write_text(json.dumps(told, indent=1))
    sys.exit(0 if campaign.result.is_sound else 1)


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
