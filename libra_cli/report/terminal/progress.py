"""Live progress of one run, fed with the records its machine saves.

On a terminal it keeps one live area, drawn twice a second: while the run starts, one line for
every node and slot with what it does and for how long; then a bar over the steps with reward,
length, speed, staleness, evaluations, weights, who waits on whom, the planner's last decisions, and
the slots. Elsewhere (a file, CI), and once its terminal has gone, it writes one plain line for
every step, every evaluation that is over and every change of state, without control codes.

``on`` only remembers; all drawing happens in the thread of ``rich.live``.
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import datetime

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from libra_cli.core.records import (
    DecisionRecord,
    EvaluationRecord,
    MoveRecord,
    NodeRecord,
    NoteRecord,
    PlanRecord,
    ProcessRecord,
    Record,
    RunRecord,
    SlotRecord,
    StepRecord,
    SyncRecord,
)
from libra_cli.core.warnings.watch import KIND
from libra_cli.report.status.evaluations import evaluation_parts
from libra_cli.report.status.metrics import told
from libra_cli.report.status.slots import existing
from libra_cli.report.status.steps import RECENT, smooth, yardstick
from libra_cli.report.terminal.console import (
    duration,
    fact,
    grid,
    number,
    slot_label,
    step_bar,
    styled,
    version,
    warning_lines,
)
from libra_cli.report.terminal.decision import decision_line
from libra_cli.report.terminal.evaluations import evaluation_words
from libra_cli.report.terminal.plots import Portable, sparkline

_REFRESH_PER_S = 2.0
_MANY = 12
"""Parts up to which all are named; of more, those that are ready are only counted."""

_DECISIONS = 2
"""The newest so many are shown: of the newest it is seldom known yet what came."""

_READY = ("ready", "serving", "training", "exited")
_LOGGED = re.compile(r"\d\d:\d\d:\d\d  ")
_BAD = ("failed", "unreachable")
_SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_SPARK_WIDTH = 24


class Progress:
    """Use as a context manager; ``on`` and ``note`` may be called from any thread."""

    def __init__(
        self,
        console: Console,
        *,
        name: str,
        clock: Callable[[], float] = time.time,
        began: float | None = None,
    ) -> None:
        """A run that is called ``name`` and ``began`` then, in seconds since the epoch, or now."""
        self._console = console
        self._name = name
        self._clock = clock
        self._began = clock() if began is None else began
        self._mutex = threading.Lock()
        self._run: RunRecord | None = None
        self._parts: dict[str, NodeRecord | ProcessRecord | SlotRecord] = {}
        self._seen: dict[str, float] = {}
        self._steps: deque[StepRecord] = deque(maxlen=200)
        self._first: list[float] = []
        self._sync: SyncRecord | None = None
        self._plan: PlanRecord | None = None
        self._moves: dict[int, MoveRecord] = {}
        self._evaluations: dict[int, EvaluationRecord] = {}
        self._decisions: deque[DecisionRecord] = deque(maxlen=_DECISIONS)
        self._warnings: dict[str, str] = {}
        self._live = Live(
            console=console,
            get_renderable=self.__rich__,
            refresh_per_second=_REFRESH_PER_S,
            transient=True,
        )

    def __enter__(self) -> Progress:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def note(self, text: str) -> None:
        """One line that stays: above the live area, or in the log."""
        if self._on_terminal():
            self._console.print(Portable(Text(text)))
        else:
            self._log(text)

    def on(self, record: Record) -> None:
        """Take in a record that the machine has saved, and without a live area write its line."""
        with self._mutex:
            line = self._take(record)
        if line and not self._on_terminal():
            self._log(line)

    def _on_terminal(self) -> bool:
        """Whether the live area can be drawn; it ends if its terminal has gone."""
        if self._console.is_terminal:
            return True
        if self._live.is_started:
            self._console.quiet = True  # no control codes into what has taken its place
            self._live.stop()
            self._console.quiet = False
        return False

    def __rich__(self) -> RenderableType:
        with self._mutex:
            now = self._clock()
            starting = self._run is None or self._run.state == "starting"
            body = self._starting(now) if starting else self._running(now)
            return Portable(Group(self._title(now), Text(), Padding(body, (0, 0, 0, 2))))

    def _log(self, text: str) -> None:
        at = datetime.fromtimestamp(self._clock()).astimezone().strftime("%H:%M:%S")
        line = f"{at}  {text}".encode(self._console.encoding, "replace")
        self._console.print(
            line.decode(self._console.encoding), soft_wrap=True, markup=False, highlight=False
        )

    # -- taking records in: each returns the line to log for it, or nothing ----------------------

    def _take(self, record: Record) -> str:
        match record:
            case RunRecord():
                before, self._run = self._run, record
                # Why a run failed is told at its end, with what to type next.
                changed = before is None or before.state != record.state
                return f"run {record.id}: {record.state}" if changed else ""
            case NodeRecord() | ProcessRecord() | SlotRecord():
                return self._take_part(record)
            case StepRecord():
                return self._take_step(record)
            case SyncRecord():
                return self._take_sync(record)
            case EvaluationRecord():
                return self._take_evaluation(record)
            case NoteRecord():
                return self._take_note(record)
            case DecisionRecord() | PlanRecord() | MoveRecord():
                return self._take_planned(record)
            case _:
                return ""

    def _take_planned(self, record: DecisionRecord | PlanRecord | MoveRecord) -> str:
        match record:
            case DecisionRecord():
                return self._take_decision(record)
            case PlanRecord():
                return self._take_plan(record)
            case MoveRecord():
                return self._take_move(record)

    def _take_part(self, part: NodeRecord | ProcessRecord | SlotRecord) -> str:
        name = _name(part)
        before = self._parts.get(name)
        self._parts[name] = part
        self._seen.setdefault(name, part.since)
        if before is not None and before.state == part.state:
            return ""
        return f"{name}: {_says(part)}"

    def _take_step(self, step: StepRecord) -> str:
        if self._steps and self._steps[-1].step == step.step:
            self._steps[-1] = step  # the same again, now with its checkpoint
            return ""
        self._steps.append(step)
        judged = yardstick([step])
        if len(self._first) < RECENT:
            self._first += judged.values
        target = f"/{self._run.target_steps}" if self._run else ""
        gap = f"  gap {number(step.logprob_gap, '.1e')}" if step.logprob_gap is not None else ""
        over = step.batch.get("share_over_bound") or 0.0
        old = f", {over:.1%} over the bound" if over else ""
        return (
            f"step {step.step}{target}  {judged.name} {judged.values[0]:.3f}"
            f"  length {step.mean_length:.1f} (p99 {step.p99_length:.0f})"
            f"  {step.tokens_per_s:,.0f} tokens/s"
            f"  staleness {step.staleness_mean:.2f} (max {step.staleness_max}{old})"
            f"  waited {step.waited_s:.1f} s  trained {step.trainer_s:.1f} s{gap}"
        )

    def _take_evaluation(self, row: EvaluationRecord) -> str:
        self._evaluations[row.evaluation] = row
        if row.state != "finished":
            return ""
        same = [one for one in self._evaluations.values() if one.name == row.name]
        return "".join(f"evaluation {evaluation_words(part)}" for part in evaluation_parts(same))

    def _take_note(self, note: NoteRecord) -> str:
        if note.kind != KIND:
            return f"{note.kind} {note.subject}".rstrip() + f": {note.text}"
        if note.resolved_at is None:
            self._warnings[note.subject] = note.text
            return f"warning: {note.text}"
        known = self._warnings.pop(note.subject, None)
        # Who attaches later was never told of it.
        return "" if known is None else f"no longer: the warning {note.subject!r}"

    def _take_sync(self, sync: SyncRecord) -> str:
        self._sync = sync
        return sync.problem

    def _take_plan(self, plan: PlanRecord) -> str:
        before, self._plan = self._plan, plan
        return _plan_says(plan) if before is None or before.plan != plan.plan else ""

    def _take_move(self, move: MoveRecord) -> str:
        before = self._moves.get(move.move)
        self._moves[move.move] = move
        if before is not None and before.state == move.state:
            return ""
        told = f"move {move.move}: slot {move.slot} from {move.from_role} to {move.to_role}"
        return f"{told}: {move.state}  {move.detail}".rstrip()

    def _take_decision(self, decision: DecisionRecord) -> str:
        if self._decisions and self._decisions[-1].at == decision.at:
            self._decisions.pop()  # the same again, now with what came
        self._decisions.append(decision)
        return f"decision after {decision_line(decision)}"

    # -- drawing ---------------------------------------------------------------------------------

    def _title(self, now: float) -> Table:
        state = self._run.state if self._run else "starting"
        spinner = _SPINNER[int(now * _REFRESH_PER_S) % len(_SPINNER)]
        title = Table.grid(expand=True)
        title.add_column(overflow="ellipsis", no_wrap=True)
        title.add_column(justify="right", no_wrap=True)
        left = Text.assemble((spinner, "cyan"), " ", (self._name, "bold"), "  ", styled(state))
        title.add_row(left, duration(now - self._began))
        return title

    def _starting(self, now: float) -> Table:
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(no_wrap=True)
        table.add_column(no_wrap=True, overflow="ellipsis", max_width=24)
        table.add_column(overflow="ellipsis", no_wrap=True, ratio=1)
        table.add_column(justify="right", no_wrap=True)
        shown = [part for part in self._parts.values() if _worth_a_line(part)]
        unready = [part for part in shown if part.state not in _READY]
        if len(shown) > _MANY:
            ready = f"{len(shown) - len(unready)} of {len(shown)} ready"
            table.add_row("", "", Text(ready, style="green"), "")
            shown = unready[:_MANY]
        for part in shown:
            done = part.state in _READY
            took = (part.since if done else now) - self._seen[_name(part)]
            style = "bold red" if part.state in _BAD else "dim" if done else ""
            table.add_row(_mark(part.state), _name(part), Text(_says(part), style), duration(took))
        if self._run and self._run.waiting:
            table.add_row()
            table.add_row("", "waiting", Text(self._run.waiting, style="bold"), "")
        return table

    def _running(self, now: float) -> RenderableType:
        facts = grid()
        run = self._run
        if run is not None:
            fact(facts, "step", step_bar(run.step, run.target_steps, self._left(run)))
        if self._steps:
            self._quality(facts, self._steps[-1])
        if self._sync is not None:
            seconds = self._sync.served_at - self._sync.published_at
            fact(facts, "weights", f"version {self._sync.version} served after {seconds:.2f} s")
        for name, decision in zip(("decision", ""), reversed(self._decisions), strict=False):
            line = Text(decision_line(decision), no_wrap=True, overflow="ellipsis")
            facts.add_row(name, line)
        for move in self._moves.values():
            if move.ended_at is None:
                fact(facts, "move", _move_says(move, now))
        if run is not None and run.waiting:
            fact(facts, "waiting", Text(run.waiting, style="bold"))
        parts = list(self._parts.values())
        trouble = [Text(f"✗ {_name(part)}: {_says(part)}", "red") for part in parts if _hurt(part)]
        blank = [Text()] if trouble else []
        rows = [part for part in parts if isinstance(part, SlotRecord)]
        warned = warning_lines(self._warnings.values())
        slots = _slots(existing(rows, self._plan))
        return Group(facts, Text(), slots, *warned, *blank, *trouble[:_MANY])

    def _left(self, run: RunRecord) -> str:
        recent = list(self._steps)[-RECENT:]
        missing = run.target_steps - run.step
        if not recent or missing <= 0:
            return ""
        period = sum(step.period_s for step in recent) / len(recent)
        return f"about {duration(period * missing)} left"

    def _quality(self, facts: Table, last: StepRecord) -> None:
        steps = list(self._steps)
        judged = yardstick(steps)
        said = Text.assemble((number(judged.change.last, ".2f"), "bold"))
        said.append(f" (first {sum(self._first) / len(self._first):.2f})", style="dim")
        _curve(facts, judged.name, said, judged.values)
        length = f"{last.mean_length:.0f} tokens, p99 {last.p99_length:.0f}"
        _curve(facts, "length", Text(length), [step.mean_length for step in steps])
        speed = f"{_recent(steps, _speed):,.0f} tokens/s"
        _curve(facts, "speed", Text(speed), [step.tokens_per_s for step in steps])
        fact(facts, "staleness", f"{last.staleness_mean:.2f} mean, {last.staleness_max} max")
        fact(facts, "metrics", told(last.metrics))
        if last.logprob_gap is not None:
            fact(facts, "gap", f"{last.logprob_gap:.1e} log-probability, rollout to trainer")
        for part in evaluation_parts(list(self._evaluations.values())):
            fact(facts, "evaluation", evaluation_words(part))


def without_progress(printed: str) -> str:
    """What a run without a terminal has printed beside the lines of its progress."""
    return "\n".join(line for line in printed.splitlines() if not _LOGGED.match(line))


def _speed(step: StepRecord) -> float:
    return step.tokens_per_s


def _recent(steps: Sequence[StepRecord], value: Callable[[StepRecord], float]) -> float:
    known = [value(step) for step in steps[-RECENT:] if math.isfinite(value(step))]
    return sum(known) / len(known) if known else math.nan


def _curve(facts: Table, name: str, value: Text, values: Sequence[float]) -> None:
    value.pad_right(max(0, 26 - value.cell_len))
    fact(facts, name, value, Text(sparkline(smooth(values), _SPARK_WIDTH), style="cyan"))


def _name(part: NodeRecord | ProcessRecord | SlotRecord) -> str:
    match part:
        case NodeRecord():
            return f"node {part.node}"
        case SlotRecord():
            return f"slot {part.slot}"
        case ProcessRecord():
            return f"{part.process} on {part.node}"


def _says(part: NodeRecord | ProcessRecord | SlotRecord) -> str:
    match part:
        case NodeRecord():
            words = part.state if part.state != "ready" else "connected"
            return f"{words}, {part.detail}" if part.detail else words
        case ProcessRecord():
            return _process_says(part)
        case SlotRecord():
            return _slot_says(part)


def _process_says(process: ProcessRecord) -> str:
    match process.state, process.exit_code:
        case "exited", 0:
            return "done"
        case "exited", int(code) if code < 0:
            return f"ended by signal {-code}"
        case "exited", code:
            return f"exited with code {code}"
        case _:
            return f"running, pid {process.pid}"


def _slot_says(slot: SlotRecord) -> str:
    roles = {"rollout": "server", "train": "trainer", "gradient": "gradient worker"}
    what = f"model {slot.bucket}" if slot.is_frozen else roles.get(slot.role)
    state = "ready" if slot.state == "training" else slot.state
    words = " ".join(filter(None, (what, state)))
    if slot.state == "serving" and slot.version is not None:
        return f"{words} version {slot.version}"
    return f"{words}: {slot.detail}" if slot.detail and slot.state != "serving" else words


def _plan_says(plan: PlanRecord) -> str:
    reasons = "; ".join(plan.reasons)
    return f"plan {plan.plan} ({plan.cause}): {reasons}"


def _move_says(move: MoveRecord, now: float) -> str:
    since = move.phases[-1].started_at if move.phases else move.started_at
    told = f"{slot_label(move.slot)} from {move.from_role} to {move.to_role}"
    return f"{told}: {move.state} for {duration(now - since)}"


def _worth_a_line(part: NodeRecord | ProcessRecord | SlotRecord) -> bool:
    """A server or trainer is told by its slot; a process has a line only if it has no slot."""
    if isinstance(part, ProcessRecord):
        return not part.process.startswith(("server-", "trainer-", "agent", "model-"))
    return not (isinstance(part, SlotRecord) and part.state == "idle")


def _hurt(part: NodeRecord | ProcessRecord | SlotRecord) -> bool:
    """Whether a running run should say more about it than the table does."""
    if isinstance(part, ProcessRecord):
        return False  # its slot tells
    return part.state in _BAD or (part.state not in (*_READY, "idle") and bool(part.detail))


def _mark(state: str) -> Text:
    if state in _READY:
        return Text("✓", style="green")
    return Text("✗", style="bold red") if state in _BAD else Text("…", style="yellow")


def _slots(slots: Sequence[SlotRecord]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    table.add_column("slot", no_wrap=True, min_width=8)
    for name in ("role", "state"):
        table.add_column(name, no_wrap=True)
    for name in ("version", "running", "waiting", "restarts"):
        table.add_column(name, justify="right", no_wrap=True)
    for slot in slots[:_MANY]:
        row: list[str | Text] = [slot_label(slot.slot), slot.role, styled(slot.state)]
        if slot.role == "rollout":
            row += [version(slot.version, verified=slot.verified), str(slot.running)]
            row += [str(slot.waiting), str(slot.restarts)]
        table.add_row(*row)
    if len(slots) > _MANY:
        table.add_row(Text(f"and {len(slots) - _MANY} more: libra status", style="dim"))
    return table
