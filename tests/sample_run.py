"""A plausible run, as the records its controller would have saved: 40 steps, 2 servers, 1 trainer.

``records()`` are pairs ``(at, record)`` in the order of time; ``write(run_dir)`` puts them into a
database. Everything is drawn from one seed. One server dies in the middle and comes back, a few
attempts fail and are retried, so that the views have something to show.

``moving()`` and ``write_moving(run_dir)`` are the same run, in which that server's slot trains as a
gradient worker for a while and comes back.
"""

from __future__ import annotations

import atexit
import json
import math
import random
import shutil
import tempfile
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import zip_longest
from pathlib import Path

from libra_cli.config.recipe import Recipe
from libra_cli.core import records as r
from libra_cli.core.explanation import (
    Binding,
    Constraint,
    Explanation,
    PlanOption,
    PredictedStep,
    RunnerUp,
)
from libra_cli.core.types import BranchTokens, VersionSpan
from libra_cli.node.model.tokenizer import build_tokenizer, save_tokenizer
from libra_cli.runtime.store.journal import Journal
from libra_cli.runtime.store.run_directory import keep_recipe

START = 1_790_000_000.0
GROUPS_PER_STEP = 16
GROUP_SIZE = 8
STEPS = 40
SERVERS = ("local/0", "local/1")
TRAINER = "local/2"
HYBRID = SERVERS[1]
LEAVES_AT, RETURNS_AT = START + 78.0, START + 118.0
"""When the plans are chosen that take the slot of ``moving()`` to training and back."""


@dataclass
class _World:
    rng: random.Random
    now: float = START
    version: int = 0
    group: int = 0
    out: list[tuple[float, r.Record]] = field(default_factory=list)

    def emit(self, *records: r.Record) -> None:
        self.out += [(self.now, record) for record in records]


def branch(ids: Iterable[int], *spans: tuple[int, int, int], number: int = 0) -> BranchTokens:
    """A branch of these tokens; a span is a version, where it begins and where it ends."""
    tokens, told = array("i", ids), tuple(VersionSpan(*span) for span in spans)
    mask, logprobs = array("b", bytes(len(tokens))), array("f", [0.0] * len(tokens))
    for place in (place for span in told for place in range(span.start, span.end)):
        mask[place], logprobs[place] = 1, -1.0 - place / 8
    return BranchTokens(number, tokens, mask, logprobs, told)


def run_record(state: str = "running", **changes: object) -> r.RunRecord:
    run = r.RunRecord(
        id="quickstart-1",
        recipe="recipes/quickstart.yaml",
        state=state,
        started_at=START,
        ended_at=None,
        target_steps=STEPS,
        step=0,
        version=0,
        waiting="",
        error="",
        controller_pid=1,
        controller_started=0.0,
    )
    return replace(run, **changes)  # type: ignore[arg-type]


def slot_record(slot: str, role: str, state: str, since: float, **changes: object) -> r.SlotRecord:
    record = r.SlotRecord(
        slot=slot,
        node=slot.split("/", maxsplit=1)[0],
        gpus_json="[]",
        pool="rollout" if role == "rollout" else "train",
        role=role,
        state=state,
        since=since,
        incarnation=1,
        bucket="short" if role == "rollout" else "",
        version=None,
        verified=False,
        running=0,
        waiting=0,
        busy_s=0.0,
        serving_s=0.0,
        restarts=0,
        detail="",
    )
    return replace(record, **changes)  # type: ignore[arg-type]


def step_record(step: int, ended_at: float, **changes: object) -> r.StepRecord:
    record = r.StepRecord(
        step=step,
        started_at=ended_at - 1.6,
        ended_at=ended_at,
        waited_s=1.9,
        reward=0.5,
        logprob_gap=2e-5,
        logprob_gap_tokens=900,
        generated_tokens=2600,
        context_tokens=9000,
        mean_length=20.3,
        p99_length=78.0,
        staleness_mean=0.4,
        staleness_max=1,
        tokens_per_s=740.0,
        trainer_s=1.5,
        checkpoint="",
        metrics_json=r.to_metrics_json({"loss": 0.01, "grad_norm": 0.8, "entropy": 0.6}),
    )
    return replace(record, **changes)  # type: ignore[arg-type]


@cache
def records(seed: int = 1, steps: int = STEPS) -> tuple[tuple[float, r.Record], ...]:
    """The whole life of the run, in the order of time."""
    world = _World(random.Random(seed))
    _start(world)
    for step in range(1, steps + 1):
        _step(world, step)
    _end(world, steps)
    return tuple(sorted(world.out, key=lambda item: item[0]))


@cache
def moving() -> tuple[tuple[float, r.Record], ...]:
    """The run of ``records()``, with a slot that goes from rollout to training and back."""
    there = _move(1, 2, "rollout", "gradient", LEAVES_AT, _LEAVING)
    back = _move(2, 3, "gradient", "rollout", RETURNS_AT, _RETURNING)
    away = there[1][0], back[-1][0]
    stayed = [(at, _without_hybrid(record, away)) for at, record in records()]
    whole = [*((at, record) for at, record in stayed if record), *there, *back, *_plans(away[1])]
    whole += _decisions()
    return tuple(sorted(whole, key=lambda item: item[0]))


def write(run_dir: Path, *, seed: int = 1, steps: int = STEPS) -> Path:
    """The run as a closed database under ``run_dir``."""
    shutil.copytree(_written(records(seed, steps)), run_dir, dirs_exist_ok=True)
    return run_dir


def write_whole(run_dir: Path) -> Path:
    """The run with its recipe and its model's tokenizer."""
    write(run_dir)
    recipe = {"nodes": [{"host": "local", "slots": 3}], "model": {"build": {}}}
    keep_recipe(Recipe.model_validate(recipe), run_dir)
    (run_dir / "model").mkdir()
    save_tokenizer(build_tokenizer(), run_dir / "model", max_len=512)
    return run_dir


def write_moving(run_dir: Path) -> Path:
    """The run with moves as a closed database under ``run_dir``."""
    shutil.copytree(_written(moving()), run_dir, dirs_exist_ok=True)
    return run_dir


@cache
def _written(life: tuple[tuple[float, r.Record], ...]) -> Path:
    """A directory with the run. Each process of tests writes it once, since most tests read it."""
    run_dir = Path(tempfile.mkdtemp(prefix="libra-sample-run-"))
    atexit.register(shutil.rmtree, run_dir)
    with Journal(run_dir) as journal:
        for at, record in life:
            journal.save(record)
            if isinstance(record, r.StepRecord):
                journal.event(at, "step_trained", {"step": record.step})
    return run_dir


def _start(world: _World) -> None:
    world.emit(run_record("starting", waiting="everyone waits for the hosts"))
    world.emit(r.NodeRecord("local", "local", "connecting", world.now, "{}", ""))
    world.now += 0.8
    facts = json.dumps({"cpus": 2, "python": "3.11"})
    world.emit(r.NodeRecord("local", "local", "ready", world.now, facts, "2 cores, 23 GiB"))
    _process(world, "model", 4001, "running")
    world.now += 3.1
    _process(world, "model", 4001, "exited")
    world.emit(run_record("starting", waiting="rollout waits for its servers"))
    for index, slot in enumerate(SERVERS):
        _process(world, f"server-{index}", 4100 + index, "running")
        world.emit(slot_record(slot, "rollout", "starting", world.now))
    _process(world, "trainer-0", 4200, "running")
    world.emit(slot_record(TRAINER, "train", "starting", world.now))
    world.now += 14.0
    world.emit(r.VersionRecord(0, 0, world.now, 3_400_000))
    world.emit(slot_record(TRAINER, "train", "training", world.now))
    for slot in SERVERS:
        world.now += 11.0 + world.rng.random()
        world.emit(slot_record(slot, "rollout", "joining", world.now))
        _sync(world, slot, 0, published_at=world.now - 0.6)
        world.now += 0.4
        world.emit(_serving(world, slot, 0))
    world.emit(run_record("running", waiting="the trainer waits for 16 groups"))
    plan = r.PlanRecord(
        1,
        world.now,
        json.dumps([[slot, "short", 1, 48, 1024] for slot in SERVERS]),
        json.dumps([TRAINER]),
        json.dumps(["the recipe gives 2 slots to rollout and 1 to training"]),
    )
    world.emit(plan)


def _process(world: _World, name: str, pid: int, state: str, exit_code: int | None = None) -> None:
    code = 0 if state == "exited" and exit_code is None else exit_code
    log = f"~/.libra/runs/quickstart-1/logs/{name}.log"
    world.emit(r.ProcessRecord("local", name, pid, state, world.now, code, log))


def _serving(world: _World, slot: str, version: int, **changes: object) -> r.SlotRecord:
    serving_s = max(1.0, world.now - START - 30)
    values: dict[str, object] = {
        "version": version,
        "verified": True,
        "running": world.rng.randint(14, 30),
        "waiting": world.rng.randint(0, 9),
        "busy_s": serving_s * 0.86,
        "serving_s": serving_s,
    }
    values["engine"] = "runner V2, async scheduling, CUDA graphs full_and_piecewise"
    return slot_record(slot, "rollout", "serving", world.now, **(values | changes))


def _sync(world: _World, slot: str, version: int, published_at: float) -> None:
    world.emit(
        r.SyncRecord(
            slot=slot,
            incarnation=1,
            version=version,
            trainer_incarnation=0,
            published_at=published_at,
            served_at=world.now,
            verified_at=world.now + 0.1,
            pull_s=0.05 + world.rng.random() * 0.02,
            load_s=0.06 + world.rng.random() * 0.03,
            bytes=3_400_000,
            sent_bytes=240_000,
            kind="delta",
            gap=world.rng.uniform(4e-6, 2e-5),
            verified=True,
            detail="",
        )
    )


def _step(world: _World, step: int) -> None:
    skill = 0.9 - 0.44 * math.exp(-step / 12)
    rollout_s = world.rng.uniform(2.6, 3.6) + (9.0 if step == 23 else 0.0)
    _samples(world, rollout_s)
    if step == 23:
        _server_dies(world)
    reward, lengths = _groups(world, step, skill, rollout_s)
    world.now += rollout_s
    trainer_s = world.rng.uniform(1.2, 1.9)
    tokens = sum(lengths)
    world.emit(run_record(step=step - 1, version=step - 1, waiting="nobody waits"))
    began = world.now
    world.now += trainer_s
    ordered = sorted(lengths)
    world.emit(
        step_record(
            step,
            world.now,
            started_at=began,
            waited_s=rollout_s * 0.7,
            reward=reward,
            metrics_json=r.to_metrics_json(
                {
                    "loss": world.rng.gauss(0.004, 0.006),
                    "grad_norm": world.rng.uniform(0.5, 1.4),
                    "entropy": 0.75 - 0.3 * skill,
                    "clip_fraction": world.rng.uniform(0.0, 0.03),
                    "tis_mean": world.rng.uniform(0.98, 1.0),
                }
            ),
            logprob_gap=None if step == 24 else 10 ** world.rng.uniform(-5.1, -4.4),
            logprob_gap_tokens=0 if step == 24 else tokens // 3,
            generated_tokens=tokens,
            context_tokens=tokens * 3,
            mean_length=tokens / len(lengths),
            p99_length=float(ordered[int(len(ordered) * 0.99)]),
            staleness_mean=world.rng.uniform(0.25, 0.6),
            staleness_max=1,
            tokens_per_s=tokens / (rollout_s + trainer_s),
            trainer_s=trainer_s,
            checkpoint=f"checkpoints/step-{step:06d}" if step % 10 == 0 else "",
        ),
        r.VersionRecord(step, 0, world.now, 3_400_000),
    )
    published_at = world.now
    for slot in SERVERS:
        world.now += world.rng.uniform(0.15, 0.3)
        _sync(world, slot, step, published_at)
        world.emit(_serving(world, slot, step, restarts=int(slot == SERVERS[1] and step >= 23)))
    waiting = f"the trainer waits for {world.rng.randint(3, 14)} of 16 groups"
    world.emit(run_record(step=step, version=step, waiting=waiting))


def _samples(world: _World, seconds: float) -> None:
    for offset in range(int(seconds) + 1):
        for slot in SERVERS:
            running = world.rng.choice([0, 12, 20, 26, 30])
            world.out.append(
                (
                    world.now + offset,
                    r.SampleRecord(
                        slot=slot,
                        at=world.now + offset,
                        running=running,
                        waiting=world.rng.randint(0, 3),
                        kv_use=running / 48,
                        prefix_hit_rate=0.71,
                        preemptions=0,
                        occupancy=running / 48,
                        generated_tokens=int((world.now - START) * 400),
                        tokens_per_s=running * 22.0,
                        metrics_json=r.to_metrics_json({"request_queue_time_s": running / 100}),
                    ),
                )
            )


def _server_dies(world: _World) -> None:
    slot, now = SERVERS[1], world.now
    _process(world, "server-1", 4101, "exited", exit_code=-9)
    for after, state in ((1.0, "failed"), (1.5, "starting"), (8.0, "joining")):
        world.now = now + after
        detail = "the server died (exit code -9); its trajectories continue on local/0"
        world.emit(slot_record(slot, "rollout", state, world.now, restarts=1, detail=detail))
    world.now = now + 8.5
    world.emit(_serving(world, slot, 22, restarts=1))
    world.now = now


def _groups(world: _World, step: int, skill: float, seconds: float) -> tuple[float, list[int]]:
    rewards: list[float] = []
    lengths: list[int] = []
    for _ in range(GROUPS_PER_STEP):
        group, world.group = world.group, world.group + 1
        mine = [_trajectory(world, group, member, step, skill, seconds) for member in range(8)]
        rewards += [reward for reward, _ in mine]
        lengths += [length for _, length in mine]
        mean = sum(reward for reward, _ in mine) / len(mine)
        world.emit(
            r.GroupRecord(
                group, "trained", world.now, world.now + seconds, step - 1, step, mean, ""
            )
        )
    return sum(rewards) / len(rewards), lengths


def _trajectory(
    world: _World, group: int, member: int, step: int, skill: float, seconds: float
) -> tuple[float, int]:
    rng = world.rng
    hops = min(8, 1 + int(rng.paretovariate(1.6)))
    reward = float(rng.random() < skill ** (hops / 3))
    length = hops * 5 + rng.randint(4, 9)
    attempt = int(rng.random() < 0.01)
    oldest = max(0, step - 1 - int(rng.random() < 0.4))
    began, ended = world.now, world.now + seconds * rng.uniform(0.3, 1.0)
    trajectory = r.TrajectoryRecord(
        group_id=group,
        member=member,
        attempt=attempt,
        state="finished",
        started_at=began,
        ended_at=ended,
        reward=reward,
        turns=hops,
        generated_tokens=length,
        context_tokens=length * 3,
        min_version=oldest,
        max_version=step - 1,
        spans_json=json.dumps([[oldest, 30, 30 + length]]),
        detail="",
        tokens=(branch([70] * (30 + length), (oldest, 30, 30 + length)),),
    )
    if attempt:
        detail = "the server died"
        world.emit(replace(trajectory, attempt=0, state="failed", reward=None, detail=detail))
    world.emit(trajectory)
    slot, failed = rng.choice(SERVERS), rng.random() < 0.1
    _turns(world, trajectory, slot, failed=failed)
    return reward, length


def _turns(world: _World, trajectory: r.TrajectoryRecord, slot: str, *, failed: bool) -> None:
    """Five tokens a turn and the rest in the last; one in six moves to the other server."""
    rng = random.Random(trajectory.group_id * GROUP_SIZE + trajectory.member)
    count, before, prompt = trajectory.turns, "", 30
    assert trajectory.ended_at is not None
    seconds = (trajectory.ended_at - trajectory.started_at) / count
    left = trajectory.generated_tokens
    for turn in range(count):
        generated = left if turn == count - 1 else 5
        began = trajectory.started_at + turn * seconds
        outcome = "error" if failed and turn == 0 else "ok"
        world.emit(
            r.TurnRecord(
                group_id=trajectory.group_id,
                member=trajectory.member,
                attempt=trajectory.attempt,
                turn=turn,
                slot=slot,
                incarnation=1,
                queued_at=began,
                started_at=began + seconds * 0.05,
                ended_at=began + seconds * 0.9,
                prompt_tokens=prompt,
                generated_tokens=generated,
                finish_reason="stop",
                moved_from=before if before != slot else "",
                tools_json=json.dumps([["get", outcome, 0.01, 12]]),
            )
        )
        left, prompt, before = left - generated, prompt + generated + 6, slot
        slot = rng.choice(SERVERS) if rng.random() < 1 / 3 else slot


def _end(world: _World, steps: int) -> None:
    world.now += 1.0
    for slot in SERVERS:
        restarts = int(slot == SERVERS[1] and steps >= 23)
        last = _serving(world, slot, steps, restarts=restarts)
        stopped = {"state": "idle", "role": "idle", "version": None, "verified": False}
        quiet = replace(last, running=0, waiting=0, **stopped)  # type: ignore[arg-type]
        world.emit(quiet)
    world.emit(slot_record(TRAINER, "idle", "idle", world.now))
    for index in range(2):
        _process(world, f"server-{index}", 4100 + index, "exited", exit_code=-15)
    _process(world, "trainer-0", 4200, "exited")
    world.emit(r.NodeRecord("local", "local", "released", world.now, "{}", ""))
    world.emit(run_record("finished", step=steps, version=steps, ended_at=world.now))


# -- the run in which a slot moves -----------------------------------------------------------------

_Phase = tuple[str, float, str, str]
"""Phase, seconds, and the role and the state of the slot in it."""
_LEAVING: Sequence[_Phase] = (
    ("drain", 3.4, "rollout", "draining"),
    ("stop", 2.2, "rollout", "stopping"),
    ("start", 8.6, "gradient", "starting"),
    ("sync", 1.1, "gradient", "joining"),
    ("join", 0.9, "gradient", "joining"),
)
_RETURNING: Sequence[_Phase] = (
    ("stop", 1.3, "gradient", "stopping"),
    ("start", 9.8, "rollout", "starting"),
    ("sync", 1.4, "rollout", "joining"),
    ("verify", 0.6, "rollout", "joining"),
    ("join", 0.2, "rollout", "joining"),
)


def _move(
    move: int, plan: int, source: str, target: str, began: float, phases: Sequence[_Phase]
) -> list[tuple[float, r.Record]]:
    """A record at the start of each phase and at the end, with the states of the slot."""
    record = r.MoveRecord(move, plan, HYBRID, source, target, "", began, None, "[]", "")
    out: list[tuple[float, r.Record]] = []
    told: list[list[object]] = []
    at = began
    for phase, seconds, role, state in phases:
        under_way = json.dumps([*told, [phase, at, None]])
        out.append((at, replace(record, state=phase, phases_json=under_way)))
        out.append((at, slot_record(HYBRID, role, state, at, pool="hybrid", incarnation=move)))
        told.append([phase, at, at + seconds])
        at += seconds
    out.append((at, replace(record, state="done", ended_at=at, phases_json=json.dumps(told))))
    state = "training" if target == "gradient" else "serving"
    arrived = slot_record(HYBRID, target, state, at, pool="hybrid", incarnation=move + 1)
    return [*out, (at, arrived)]


def _plans(back_at: float) -> list[tuple[float, r.Record]]:
    """One of the planner, one of a user; what they gain is known once steps have followed."""
    away = r.PlanRecord(
        2,
        LEAVES_AT,
        json.dumps([[SERVERS[0], "short", 1, 48, 1024]]),
        json.dumps([TRAINER]),
        json.dumps(["training takes 1.6 times as long as rollout"]),
        json.dumps([HYBRID]),
        "planner",
        5.1,
        4.2,
        9.0,
        5.3,
    )
    home = replace(
        away,
        plan=3,
        at=RETURNS_AT,
        servers_json=json.dumps([[slot, "short", 1, 48, 1024] for slot in SERVERS]),
        reasons_json=json.dumps(["libra rebalance gave it back to rollout"]),
        gradient_json="[]",
        cause="order",
        predicted_before_s=4.4,
        predicted_after_s=4.6,
        cost_s=7.5,
        observed_before_s=4.5,
    )
    return [
        (LEAVES_AT, away),
        (LEAVES_AT + 35.0, replace(away, observed_after_s=4.55)),
        (RETURNS_AT, home),
        (back_at + 20.0, replace(home, observed_after_s=4.5)),
    ]


_BOTH = PlanOption("rollout 2 GPUs (2 x TP 1), training 1", 3.9, 5.1, 5.1)
_ONE = PlanOption("rollout 1 GPUs (1 x TP 1), training 2", 4.2, 3.1, 4.2)
KEPT = Explanation(
    move=False,
    why_not="a gain of 4.1% is below 8%",
    today=_BOTH,
    chosen=_BOTH,
    runner_up=RunnerUp(_ONE, "a gain of 4.1% is below 8%"),
    binds_today=Binding(Constraint.TRAINING, "training: arithmetic, 4% as much communication"),
    binds=Binding(Constraint.TRAINING, "training: arithmetic, 4% as much communication"),
    predicted=PredictedStep(5.1, 4.6, 5.7, "errors of kept plans in the simulator"),
    cost_s=9.0,
    payback_steps=43.0,
    horizon_steps=28.0,
)
MOVED = replace(
    KEPT,
    move=True,
    why_not="",
    chosen=_ONE,
    runner_up=RunnerUp(_BOTH, "its steps are 21.4% longer"),
    binds=Binding(Constraint.KV_CACHE, "rollout: 1 x TP 1: room in the KV cache"),
    predicted=PredictedStep(4.2, 3.4, 5.2, "errors of moves in the simulator"),
    payback_steps=10.0,
)
DECISIONS = (
    r.DecisionRecord(
        START + 45.0, 2, "5 steps have passed", None, "the costs are not known yet", 1.0, 1.0
    ),
    r.DecisionRecord(
        at=START + 75.0,
        step=9,
        why="training waited for 40% of a step",
        plan=None,
        why_not=KEPT.why_not,
        rollout_factor=1.1,
        training_factor=1.0,
        explanation_json=KEPT.to_json(),
        observed_s=5.3,
        observed_steps=4,
    ),
    r.DecisionRecord(
        at=LEAVES_AT,
        step=14,
        why="rollout waited for 30% of a step",
        plan=2,
        why_not="",
        rollout_factor=1.2,
        training_factor=1.0,
        explanation_json=MOVED.to_json(),
        observed_s=4.55,
        observed_steps=5,
    ),
)
"""One that could not be made, one to stay, one to move."""


def _decisions() -> list[tuple[float, r.Record]]:
    """Each when it was made and, where anything came, just before the next or 35 s later."""
    out: list[tuple[float, r.Record]] = []
    for decision, after in zip_longest(DECISIONS, DECISIONS[1:]):
        out.append((decision.at, replace(decision, observed_s=None, observed_steps=0)))
        if decision.observed_s is not None:
            out.append((after.at - 0.1 if after else decision.at + 35.0, decision))
    return out


def _without_hybrid(record: r.Record, away: tuple[float, float]) -> r.Record | None:
    """What the record is if the slot is away between those times; None if it is not at all."""
    began, ended = away
    if isinstance(record, r.SlotRecord) and record.slot == HYBRID:
        kept = not began <= record.since < ended
        incarnation = 3 if record.since >= ended else 1
        return replace(record, pool="hybrid", incarnation=incarnation) if kept else None
    if isinstance(record, r.SampleRecord) and record.slot == HYBRID:
        return None if began <= record.at < ended else record
    if isinstance(record, r.SyncRecord) and record.slot == HYBRID:
        return None if began <= record.served_at < ended else record
    if isinstance(record, r.TurnRecord) and began <= record.started_at < ended:
        return replace(record, slot=SERVERS[0], moved_from="")
    return record
