"""A campaign of faults in virtual time: every event that a real world may send, in any order.

    python -m tests.campaign --events 1000000 --seeds 1 --rate 1

plays one long run a seed. Faults of all kinds come by chance, from a seed; after every event the
machine's own invariants are checked, and those of ``Campaign``: no process is started where another
one is, or on a node that does not answer; nothing is trained twice in the timeline that is kept;
nothing that failed is scored; no prompt is lost. A run that has given up, or whose controller is
killed, goes on from its last checkpoint. In the end faults cease: the run must take steps again,
and end with no process left.

``--rate 8`` makes all that comes by itself eight times as likely (``chances_of``); a run then makes
two thirds of the steps that it makes of as many events at 1.
"""

from __future__ import annotations

import argparse
import sys
import time
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from random import Random
from statistics import median
from typing import Any

from libra_cli.config.recipe import Recipe
from libra_cli.core import actions as a
from libra_cli.core import events as e
from libra_cli.core.launch.process import process_of, worker_of
from libra_cli.core.records import GroupRecord, Record, TrajectoryRecord
from libra_cli.core.run.state import Resume
from libra_cli.core.types import TrajectoryId, node_of
from tests.world import Faults, World, recipe

ENDLESS = 10**9
RECENT = 4096
"""Rows that are kept for a resume, which asks them for what was dropped lately."""
CEASED_S = 4 * 3600.0
"""Faults have ceased: so long may it take, of virtual time, until steps are taken again. A node may
be gone for an hour, and what was given up is tried again after half an hour."""
CHANCES = Faults(
    server_dies=0.0008,
    start_fails=0.02,
    sync_fails=0.004,
    turn_fails=0.004,
    refused=0.1,
    environment_breaks=0.002,
    trainer_dies=0.0001,
    node_lost=0.0004,
    node_gone=0.3,
    repeated=0.02,
    replanned=0.0004,
    joined=0.2,
    ordered=0.0004,
    worker_dies=0.0004,
    share_lost=0.01,
    abort_fails=0.05,
    forked=0.05,
    written_later=0.2,
    checkpoint_fails=0.05,
    kills_servers=397,
    breaks_off=311,
    kills_trainer=431,
    slow=0.002,
)
"""Such that a process dies every few minutes, and a run mostly goes on."""
_GIVEN = ("refused", "node_gone", "joined", "forked", "written_later")
"""Chances of what becomes of something, which are no rates."""
NO_FAULTS = ("joined", "refused", "node_lost", "node_gone", "forked", "written_later", "ordered")
"""What a healthy run meets too, and what is counted elsewhere."""
MISSING, STRAY, LATE, KILLED = 0.0005, 0.002, 0.2, 0.00002
"""Of answers that never come; of events that answer nothing; of repeated ones that come minutes
late; of the controller."""

_LOST_ANSWER: dict[type[e.Event], type[e.Event]] = {
    e.ServerStarted: e.ServerFailed,
    e.ServerSynced: e.ServerFailed,
    e.ServerChecked: e.ServerFailed,
    e.TurnGenerated: e.ServerFailed,
    e.WorkerStarted: e.WorkerFailed,
    e.WorkerSynced: e.WorkerFailed,
    e.TrainerStarted: e.TrainerFailed,
    e.StepDone: e.TrainerFailed,
    e.Accumulated: e.TrainerFailed,
    e.EpisodeStarted: e.EpisodeFailed,
    e.EpisodeAdvanced: e.EpisodeFailed,
}
"""What is found out after a minute of silence in place of an answer."""
SILENT = "no progress for 60 s"


def chances_of(rate: float) -> Faults:
    """``CHANCES``, each that is one of an event or an answer ``rate`` times as high."""
    higher: dict[str, float] = {}
    for name, chance in asdict(CHANCES).items():
        if isinstance(chance, int):
            higher[name] = max(2, round(chance / rate)) if chance else 0
        else:
            higher[name] = chance if name in _GIVEN else min(0.5, chance * rate)
    return Faults(**higher)  # type: ignore[arg-type]


def crowded(rollout: dict[str, Any] | None = None, **training: Any) -> Recipe:
    """Two hosts whose slots change their roles, and one that trains."""
    hosts = [{"host": host, "slots": 2, "pool": "hybrid", "gpus": 2} for host in "ab"]
    return recipe(
        run={"name": "campaign", "steps": ENDLESS},
        nodes=[{"host": "c", "pool": "train", "gpus": 1}, *hosts],
        training={"checkpoint_every": 3, "max_staleness": 1, "groups_per_step": 3, **training},
        planner={"kind": "fixed"},
        rollout=rollout or {},
    )


@dataclass
class Campaign(World):
    """One run under faults, until it has ended, given up or been killed."""

    faults: Faults = field(default_factory=lambda: CHANCES)
    recipe: Recipe = field(default_factory=crowded)
    rate: float = 1.0
    """How often answers stay away and strays come, of what is usual here."""
    told: Counter[str] = field(default_factory=Counter)
    """Faults by kind."""
    open_faults: list[tuple[str, float]] = field(default_factory=list)
    """Those after which no step was done yet, with their times."""
    recoveries: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Virtual seconds from a fault to the end of the next step, by kind."""
    kept: dict[int, int] = field(default_factory=dict)
    """The step of every group that is trained, in the timeline that is kept."""
    given_up: set[int] = field(default_factory=set)
    """Groups that were dropped, or filtered without having been closed."""
    half_filtered: set[int] = field(default_factory=set)
    """Groups that were filtered when they were closed, and whose rests play on."""
    ceased: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._processes: dict[tuple[str, str], str] = {}
        self._down: dict[str, str] = {}
        self._waiting: dict[str, list[e.Event]] = defaultdict(list)
        self._batches: dict[tuple[int, int], set[int]] = {}
        self._in_parts: set[int] = set()
        #: Poison that was counted.
        self._met: set[tuple[str, int]] = set()
        #: The trainer that has started last.
        self._heard_of = -1
        if self.resume is not None:
            step = int(self.resume.position["step"])
            self.kept = {group: done for group, done in self.kept.items() if done <= step}
            self._step = step

    # -- faults ---------------------------------------------------------------------------------

    def fault(self, kind: str) -> None:
        """One more of a kind."""
        self.told[kind] += 1
        self.open_faults.append((kind, self.now))

    def _chance(self, name: str) -> bool:
        hit = not self.ceased and super()._chance(name)
        if hit and name not in NO_FAULTS:
            self.fault(name.replace("_", " "))
        return hit

    def _is_poison(self, kind: str, group: int) -> bool:
        hit = super()._is_poison(kind, group)
        if hit and (kind, group) not in self._met:
            self._met.add((kind, group))
            self.fault(f"poison: {kind.replace('_', ' ')}")
        return hit

    def later(self, event: e.Event, least: float = 0.01, most: float = 1.0) -> None:
        """It happens in a while; or never, and that is found out; or twice."""
        if self.ceased or not isinstance(event, tuple(_LOST_ANSWER)):
            super().later(event, least, most)
        elif self.random.random() < MISSING * self.rate:
            self.fault(f"no answer: {type(event).__name__}")
            super().later(_failure(event), 60.0, 130.0)
        else:
            super().later(event, least, most)
            if self.random.random() < LATE * self.faults.repeated and _over_the_wire(event):
                self.fault("answered again late")
                super().later(event, 100.0, 1000.0)

    def _mishaps(self) -> None:
        if self.ceased:
            return
        servers = list(self.machine.servers.replicas.values())
        if self._chance("server_dies"):
            server = self.random.choice(servers)
            reason = self.random.choice(("killed", SILENT))
            self.later(e.ServerFailed(server.slot.id, server.incarnation, reason))
        if self._chance("trainer_dies"):
            reason = self.random.choice(("killed", SILENT))
            self.later(e.TrainerFailed(self.machine.training.incarnation, reason))
        if super()._chance("node_lost"):
            self._lose(self.random.choice("aaabbbc"))
        if self.random.random() < STRAY * self.rate:
            self.fault("stray answer")
            self.give(self._stray())
        self._orders()

    def _lose(self, node: str) -> None:
        """A cable is pulled, or a host reboots."""
        if node in self._down:
            return
        self.fault("node lost")
        self._down[node] = "lost"
        self.give(e.NodeLost(node, "cable"))
        after = self.random.uniform(1.0, 100.0)
        if not super()._chance("node_gone"):
            self.later(e.NodeBack(node, frozenset()), after, after + 1)
            return
        self.fault("node gone")
        self.later(e.NodeGone(node, "its lease has run out"), after, after + 1)
        self.later(
            e.NodeBack(node, frozenset()), after + 10, after + self.random.choice((60, 3000))
        )

    def _stray(self) -> e.Event:
        """An event that answers nothing that was asked."""
        slot = self.random.choice(self._slots).id
        old, who = self.random.randrange(-1, 2), TrajectoryId(self.random.randrange(9), 0, 7)
        done = self._publish(0, self.random.randrange(5))
        nothing = array("i")
        return self.random.choice(
            (
                e.ServerFailed(slot, old - 2, "stray"),
                e.ServerStopped("z/9", 0),
                e.ServerChecked(slot, 0),
                e.TurnFailed(0, who, slot, 0, "stray"),
                e.EpisodeStarted(who, nothing),
                e.EpisodeAdvanced(who, nothing, (), True, 1.0),
                e.EpisodeFailed(who, "stray"),
                e.StepDone(0, 3, done),
                e.CheckpointFailed(self.machine.training.incarnation, -1, "stray"),
                e.CheckpointSaved(0, 2, "/stray"),
                e.WorkerFailed(slot, -1, "stray"),
                e.TrainerFailed(0, "stray"),
                e.NodeBack("z", frozenset()),
                e.TimerFired("again rollout z/9 0"),
                e.TimerFired("trainer"),
                e.TimerFired("gone z"),
            )
        )

    # -- the network ----------------------------------------------------------------------------

    def give(self, event: e.Event) -> None:
        """Hand an event over, if the node that it comes from is there to say it."""
        if isinstance(event, e.NodeBack):
            if event.node in self._down:
                self._return(event.node)
            elif event.node == "z":
                super().give(event)
            return
        if isinstance(event, e.NodeGone):
            self._leave(event)
            return
        node = self._node_of(event)
        state = self._down.get(node, "")
        if state == "lost":
            self._waiting[node].append(event)
            return
        if state == "gone" and not isinstance(event, _STOPPED):
            return
        self._heard(event)
        super().give(event)
        self._saw(event)

    def _node_of(self, event: e.Event) -> str:
        if isinstance(event, e.ServerEvent | e.WorkerEvent | e.TurnGenerated | e.TurnFailed):
            return "" if event.slot == "z/9" else node_of(event.slot)
        return "c" if isinstance(event, e.TrainerEvent) else ""

    def _leave(self, event: e.NodeGone) -> None:
        """The lease has ended what ran there, and what it had to say is lost."""
        self._down[event.node] = "gone"
        waiting = self._waiting.pop(event.node, [])
        super().give(event)
        for one in waiting:
            if isinstance(one, _STOPPED):
                self.give(one)

    def _return(self, node: str) -> None:
        """The node answers again; of a lost one some processes may have died."""
        gone = self._down.pop(node) == "gone"
        running = {name for at, name in self._processes if at == node}
        dead = set() if gone else {one for one in sorted(running) if self.random.random() < 0.2}
        super().give(e.NodeBack(node, frozenset() if gone else frozenset(running - dead)))
        if "trainer" in dead:
            self.later(e.TrainerFailed(self.machine.training.incarnation, "died unseen"))
        for event in self._waiting.pop(node, []):
            if isinstance(event, _STOPPED) or _process(event) not in dead:
                self.give(event)

    # -- what must hold -------------------------------------------------------------------------

    def _began(self, slot: str, name: str) -> None:
        node = node_of(slot)
        assert node not in self._down, f"{name} is started on {node}, which does not answer"
        assert (node, name) not in self._processes, f"{name} is started twice"
        self._processes[node, name] = slot

    def _do_start_server(self, action: a.StartServer) -> None:
        self._began(action.slot, process_of(action.slot))
        super()._do_start_server(action)

    def _do_start_worker(self, action: a.StartWorker) -> None:
        self._began(action.slot, worker_of(action.slot))
        super()._do_start_worker(action)

    def _do_start_trainer(self, action: a.StartTrainer) -> None:
        assert ("c", "trainer") not in self._processes, "two trainers"
        gone = [slot for slot in action.train if self._down.get(node_of(slot)) == "gone"]
        assert not gone, f"a trainer is started on {gone}"
        self._processes["c", "trainer"] = "c/0"
        self._in_parts.clear()
        super()._do_start_trainer(action)

    def _do_accumulate(self, action: a.Accumulate) -> None:
        if action.part == 1:
            self._in_parts.clear()
        self._in_parts |= {sample.trajectory.id.group for sample in action.samples}
        super()._do_accumulate(action)

    def _do_train(self, action: a.Train) -> None:
        late = {group.id for group in self.machine.training.batch.groups if group.is_rest}
        groups = {sample.trajectory.id.group for sample in action.samples} - late
        if action.parts:
            groups |= self._in_parts
        self._batches[action.incarnation, action.step] = groups
        self._batches.pop((action.incarnation, action.step - 2), None)
        super()._do_train(action)
        for seen in (self.trained, self.members, self.samples):
            del seen[:]
        newest = self.machine.training.checkpoints.path
        for path in [path for path in self.ledgers if path != newest][:-100]:
            del self.ledgers[path]

    def _do_save(self, action: a.Save) -> None:
        self.records.append(action.record)
        if len(self.records) > 2 * RECENT:
            del self.records[:RECENT]
        self._check_row(action.record)

    def _check_row(self, record: Record) -> None:
        if isinstance(record, TrajectoryRecord) and record.state != "finished":
            assert record.reward is None, f"{record} failed and has a reward"
        if isinstance(record, GroupRecord):
            self._check_group(record)

    def _check_group(self, record: GroupRecord) -> None:
        closed = "closed without" in record.detail
        if record.state == "dropped" or (record.state == "filtered" and not closed):
            assert record.group_id not in self.kept, f"{record} is trained"
            self.given_up.add(record.group_id)
        elif record.state == "filtered":
            self.half_filtered.add(record.group_id)
        elif record.state == "open":
            assert record.group_id not in self.given_up, f"{record} is played again"
            self.half_filtered.discard(record.group_id)

    def _heard(self, event: e.Event) -> None:
        """What the world knows before the machine does."""
        if isinstance(event, e.ServerStopped) and event.slot != "z/9":
            self._ended(event.slot, process_of(event.slot), self.machine.servers, event.incarnation)
        elif isinstance(event, e.WorkerStopped):
            self._ended(event.slot, worker_of(event.slot), self.machine.workers, event.incarnation)
        elif _current_stop(event, self.machine.training.incarnation):
            self._processes.pop(("c", "trainer"), None)

    def _ended(self, slot: str, name: str, replicas: Any, incarnation: int) -> None:
        if replicas.current(slot, incarnation) is not None:
            self._processes.pop((node_of(slot), name), None)

    def _saw(self, event: e.Event) -> None:
        """What the machine has made of it."""
        training = self.machine.training
        if isinstance(event, e.StepDone) and event.step == training.step:
            groups = self._batches.pop((event.incarnation, event.step), set())
            for group in groups:
                assert group not in self.given_up, f"group {group} was dropped, and is trained"
                assert group not in self.kept, f"{group}: steps {self.kept[group]}, {event.step}"
                self.kept[group] = event.step
            for kind, at in self.open_faults if groups else ():
                self.recoveries[kind].append(self.now - at)
            if groups:
                self.open_faults.clear()
        elif isinstance(event, e.TrainerStarted) and event.incarnation > self._heard_of:
            self._heard_of, done = event.incarnation, event.published.version.step
            self.kept = {group: step for group, step in self.kept.items() if step <= done}
        if self.events % 1000 == 0:
            self.check_prompts()

    def check_prompts(self) -> None:
        """Every prompt is trained, dropped, or on its way."""
        ledger = self.machine.ledger
        known = {*ledger.groups, *ledger.rests, *ledger.queue, *self.kept, *self.given_up}
        known |= self.half_filtered
        missing = set(range(ledger.next_group)) - known
        assert not missing, f"lost: {sorted(missing)}"

    def cease(self) -> None:
        """No more faults: steps must be taken again, and the end leave nothing behind."""
        self.ceased, self.faults = True, Faults()
        step, since = self.machine.training.step, self.now
        incarnation = self.machine.training.incarnation
        while self.end is None and self.machine.training.step < step + 3:
            if self.machine.training.incarnation != incarnation:
                step, incarnation = self.machine.training.step, self.machine.training.incarnation
            assert self.now < since + CEASED_S, self.machine.waiting
            self.play(self.events + 1)
        if self.end is None:
            self.give(e.StopRequested(at_once=False, reason="the campaign is over"))
        self.play(ENDLESS)
        self.check_end()

    def check_end(self) -> None:
        """Nothing of ours is left."""
        assert not self._processes, f"left: {self._processes}"
        self.check_prompts()


_STOPPED = (e.ServerStopped, e.WorkerStopped, e.TrainerStopped)


def _current_stop(event: e.Event, incarnation: int) -> bool:
    return isinstance(event, e.TrainerStopped) and event.incarnation == incarnation


def _over_the_wire(event: e.Event) -> bool:
    return not isinstance(event, e.EpisodeStarted | e.EpisodeAdvanced)


def _process(event: e.Event) -> str:
    if isinstance(event, e.WorkerEvent):
        return worker_of(event.slot)
    if isinstance(event, e.ServerEvent | e.TurnGenerated | e.TurnFailed):
        return process_of(event.slot)
    return "trainer"


def _failure(event: Any) -> e.Event:
    """What is said of whoever has not answered."""
    kind: Any = _LOST_ANSWER[type(event)]
    if kind is e.EpisodeFailed:
        return e.EpisodeFailed(event.trajectory, SILENT)
    if kind is e.TrainerFailed:
        return e.TrainerFailed(event.incarnation, SILENT)
    return kind(event.slot, event.incarnation, SILENT)  # type: ignore[no-any-return]


@dataclass
class Result:
    """What a campaign has seen."""

    events: int = 0
    virtual_s: float = 0.0
    runs: int = 0
    steps: int = 0
    groups: int = 0
    dropped: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    recoveries: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def include(self, other: Result) -> None:
        """Another run of the same campaign."""
        for name in ("events", "virtual_s", "runs", "steps", "groups", "dropped"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.ends += other.ends
        self.faults += other.faults
        for kind, seconds in other.recoveries.items():
            self.recoveries[kind] += seconds

    def add(self, world: Campaign, since: float) -> None:
        """One part of it, from a start or a resume to its end."""
        self.events += world.events
        self.virtual_s += world.now - since
        self.runs += 1
        self.faults += world.told
        for kind, seconds in world.recoveries.items():
            self.recoveries[kind] += seconds


def campaign(seed: int, events: int, chances: Faults | None = None, *, rate: float = 1.0) -> Result:
    """So many events under faults, over as many resumes as it takes, and a quiet end."""
    chances = chances or chances_of(rate)
    random, result = Random(seed), Result()
    training = random.choice(({}, {"stream": True}, {"max_staleness": 3}))
    sampling = {"dynamic_sampling": True, "curriculum": {"tasks": 16}}
    rollout = random.choice(({}, sampling, {"oversample": 1}))
    world = Campaign(random, chances, recipe=crowded(rollout, **training), rate=rate)
    while True:
        since, stop = world.now, min(events - result.events, killed_after(random, rate))
        world.play(stop)
        last = result.events + world.events >= events
        if last and world.end is None:
            world.cease()
        if world.end is not None:
            world.check_end()
        result.add(world, since)
        if last:
            result.steps, result.groups = world.machine.training.step, len(world.kept)
            result.dropped = len(world.given_up)
            return result
        result.ends[world.end.error[:60] if world.end else "the controller is killed"] += 1
        world = _go_on(world, chances)


def killed_after(random: Random, rate: float) -> int:
    """How many events until the controller is killed."""
    return int(random.expovariate(KILLED * rate)) + 1


def _go_on(before: Campaign, chances: Faults) -> Campaign:
    """The same run, from its last checkpoint, after its lease has ended what was left of it; from
    the start if there is none."""
    path = before.machine.training.checkpoints.path
    if not path:
        return Campaign(before.random, chances, recipe=before.recipe, rate=before.rate)
    position = before.ledgers[path]
    resume = Resume(path, position, before.machine.training.incarnation, before.records)
    after = Campaign(
        before.random,
        chances,
        recipe=before.recipe,
        rate=before.rate,
        resume=resume,
        records=before.records,
        kept=before.kept,
        given_up=before.given_up,
        half_filtered=before.half_filtered,
    )
    after.ledgers = {path: position}
    after.now = before.now + 600.0
    return after


def lines(result: Result, wall_s: float) -> Iterator[str]:
    """The result, as a table."""
    yield (
        f"{result.events} events in {result.virtual_s / 3600:.1f} virtual hours, {wall_s:.0f} s: "
        f"{result.faults.total()} faults, {result.steps} steps, "
        f"{result.groups} groups trained once, {result.dropped} dropped"
    )
    yield f"{result.ends.total()} resumes: {dict(result.ends.most_common())}"
    yield "faults by kind; seconds to the next step: median, worst"
    for kind, number in sorted(result.faults.items()):
        times = result.recoveries.get(kind) or [0.0]
        yield f"  {kind:32} {number:7} {median(times):8.1f} {max(times):10.1f}"


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--events", type=int, default=1_000_000, help="of a seed")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--rate", type=float, default=1.0, help="how often faults come")
    given = parser.parse_args()
    whole, began = Result(), time.monotonic()
    for seed in range(given.first, given.first + given.seeds):
        since = time.monotonic()
        sys.stdout.write(f"seed {seed}\n")
        sys.stdout.flush()  # what fails after it is of this seed
        result = campaign(seed, given.events, rate=given.rate)
        whole.include(result)
        sys.stdout.write(f"{next(lines(result, time.monotonic() - since))}\n")
    sys.stdout.writelines(f"{line}\n" for line in lines(whole, time.monotonic() - began))


if __name__ == "__main__":
    main()
