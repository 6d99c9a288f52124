"""What a person sees of a run in a terminal: its status, and its end.

Nothing here decides or computes: numbers come from ``summary``. Every view fits 80
columns, reads the same on light and dark, and turns to ASCII where the encoding knows no more.
``cli`` makes the ``Console``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from libra_cli.core.records import PlanRecord, StepRecord
from libra_cli.report.status.metrics import mean_by_name, told
from libra_cli.report.status.plans import MovePart
from libra_cli.report.status.run_state import LIVE
from libra_cli.report.status.steps import RECENT, smooth, yardstick
from libra_cli.report.status.summary import RunSummary, judged_by
from libra_cli.report.terminal.decision import decision_facts
from libra_cli.report.terminal.evaluations import evaluation_words
from libra_cli.report.terminal.plots import Plot, Portable, bar, sparkline

_BAR_WIDTH = 34
_SLOT_WIDTH = 12
_MOVES = 5
"""Number of moves that are shown, the newest ones."""

_COLOURS = {
    "starting": "yellow",
    "connecting": "yellow",
    "joining": "yellow",
    "falling asleep": "yellow",
    "waking": "yellow",
    "stopping": "yellow",
    "draining": "yellow",
    "stopped": "yellow",
    "running": "green",
    "serving": "green",
    "training": "green",
    "finished": "green",
    "ready": "green",
    "failed": "bold red",
    "unreachable": "bold red",
}


def duration(seconds: float) -> str:
    """Write seconds for a person, as ``0.8 s``, ``42 s``, ``4:12`` or ``1:02:03``."""
    if seconds < 9.95:
        return f"{max(0.0, seconds):.1f} s"
    if seconds < 59.5:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def status_view(summary: RunSummary, *, now: float) -> RenderableType:
    """Draw one run as ``libra status`` shows it; ``now`` is in seconds since the epoch."""
    parts: list[RenderableType] = [_title(summary), Text()]
    parts.append(Padding(_facts(summary, now=now), (0, 0, 0, 2)))
    if summary.slots:
        parts += [Text(), Padding(_slot_table(summary), (0, 0, 0, 2))]
    if len(summary.buckets) > 1:
        parts += [Text(), Padding(_bucket_table(summary), (0, 0, 0, 2))]
    parts += _moves(summary)
    parts += _decision(summary)
    parts += warning_lines(warning.text for warning in summary.warnings)
    parts += _error_lines(summary.errors)
    return Portable(Group(*parts))


def final_view(
    summary: RunSummary, steps: Sequence[StepRecord], *, report: Path | None = None
) -> RenderableType:
    """The end of a run: what came out, with the reward, or the loss of demonstrations, drawn."""
    parts: list[RenderableType] = [_title(summary), Text()]
    if steps:
        judged = yardstick(steps)
        title = Text(f"  {judged.name}", style="bold")
        parts.append(title.append("   a dot a step, and smoothed", style="not bold dim"))
        parts += [Padding(Plot(judged.values, smooth(judged.values)), (0, 1, 0, 2)), Text()]
    facts = grid()
    _fact_step(facts, summary)
    _fact_quality(facts, summary, steps)
    _fact_weights(facts, summary)
    _fact_trajectories(facts, summary)
    _fact_playing(facts, summary)
    if summary.checkpoint:
        at = summary.checkpoint
        fact(facts, "checkpoint", Text(f"step {at.step}  {at.path}", overflow="fold"))
    _fact_models(facts, summary)
    _fact_regret(facts, summary)
    if report:
        fact(facts, "report", Text(str(report), overflow="fold"))
    parts.append(Padding(facts, (0, 0, 0, 2)))
    parts += warning_lines(warning.text for warning in summary.warnings)
    parts += _error_lines(summary.errors)
    return Portable(Group(*parts))


# -- pieces of the views -------------------------------------------------------------------------


def slot_label(slot: str) -> str:
    """The slot's name, cut inside the host's name: the index says which one it is."""
    node, _, index = slot.rpartition("/")
    room = _SLOT_WIDTH - len(index) - 1
    return slot if len(node) <= room else f"{node[: room - 1]}…/{index}"


def styled(state: str) -> Text:
    return Text(state, style=_COLOURS.get(state, ""))


def grid() -> Table:
    """A table of facts: names on the left, values on the right."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim", no_wrap=True, min_width=12)
    grid.add_column(overflow="fold")
    return grid


def fact(grid: Table, name: str, *values: str | Text) -> None:
    """Add one row; empty values are left out."""
    grid.add_row(name, Text("   ").join(_text(value) for value in values if value))


def _text(value: str | Text) -> Text:
    return Text(value) if isinstance(value, str) else value


def number(value: float | None, form: str = ".3g", unit: str = "") -> str:
    """The number in that format with its unit; a dash where nobody knows it."""
    return f"{value:{form}}{unit}" if value is not None and math.isfinite(value) else "–"


def percent(share: float | None) -> str:
    """A share in whole percent; a dash where nobody knows it."""
    return "–" if share is None else f"{share:.0%}"


def _title(summary: RunSummary) -> RenderableType:
    run = summary.run
    left = Text.assemble((run.id, "bold"), "  ", styled(run.state))
    left.append(f"  {run.recipe}", style="dim")
    grid = Table.grid(expand=True)
    grid.add_column(overflow="ellipsis", no_wrap=True)
    grid.add_column(justify="right", no_wrap=True)
    grid.add_row(left, duration(run.elapsed_s))
    return grid


def _facts(summary: RunSummary, *, now: float) -> Table:
    run, facts = summary.run, grid()
    _fact_step(facts, summary)
    _fact_quality(facts, summary, ())
    _fact_weights(facts, summary)
    idle = summary.idle
    for name, whole, recent in (
        ("rollout", idle.rollout, idle.recent_rollout),
        ("training", idle.training, idle.recent_training),
    ):
        if whole is not None:
            text = Text(bar(1 - whole, 20), style="cyan")
            text.append(f"  {percent(whole)} idle", style="default")
            text.append(f"   last {RECENT} steps {percent(recent)}", style="dim")
            fact(facts, name, text)
    _fact_trajectories(facts, summary)
    _fact_playing(facts, summary)
    _fact_scheduler(facts, summary)
    for engine in sorted({server.engine for server in summary.servers if server.engine}):
        fact(facts, "engine", engine)
    if named := mean_by_name(server.metrics for server in summary.servers):
        fact(facts, "servers", told(named))
    if summary.checkpoint:
        fact(facts, "checkpoint", f"step {summary.checkpoint.step}")
    _fact_models(facts, summary)
    _fact_regret(facts, summary)
    if run.state in LIVE and run.waiting:
        fact(facts, "waiting", Text(run.waiting, style="bold"))
    elif run.ended_at is not None:
        fact(facts, "ended", f"{duration(now - run.ended_at)} ago")
    return facts


def _fact_regret(facts: Table, summary: RunSummary) -> None:
    """What the run lost to the best plan that stays, once it has ended and where that is known."""
    told = summary.regret
    if told is not None and told.regret is not None and summary.run.state not in LIVE:
        fact(facts, "hindsight", told.text)


def _fact_models(facts: Table, summary: RunSummary) -> None:
    """Where the models are that the run has made: a line each, for somebody to copy."""
    for model in summary.models:
        score = "" if model.score is None else f"  reward {model.score:.3f}"
        where = f"step {model.step}{score}  {model.node}:{model.path}"
        fact(facts, "model", Text(where, overflow="fold"))


def _fact_step(facts: Table, summary: RunSummary) -> None:
    done, target = summary.step, summary.run.target_steps
    fact(facts, "step", step_bar(done, target, _left(summary)))


def _left(summary: RunSummary) -> str:
    missing = summary.run.target_steps - summary.step
    if summary.run.state != "running" or not summary.step_s or missing <= 0:
        return ""
    return f"about {duration(summary.step_s * missing)} left"


def step_bar(done: int, target: int, left: str) -> Text:
    """``12 of 40`` steps, a bar, and the words that follow it."""
    share = done / target if target else 0.0
    full = round(min(1.0, share) * _BAR_WIDTH)
    text = Text(f"{done} of {target}  ")
    text.append("━" * full, style="cyan")
    text.append("━" * (_BAR_WIDTH - full), style="bright_black")
    return text.append(f"  {left}", style="dim")


def _fact_quality(facts: Table, summary: RunSummary, steps: Sequence[StepRecord]) -> None:
    (name, change), lengths = judged_by(summary), summary.lengths
    rise = Text(f"{number(change.first, '.2f')} → ")
    rise.append(number(change.last, ".2f"), style="bold")
    rise.append(f"   first and last {RECENT} steps", style="dim")
    fact(facts, name, rise)
    for part in summary.evaluations:
        fact(facts, "evaluation", evaluation_words(part))
    length = f"{number(lengths.mean)} tokens, p99 {number(lengths.p99)}"
    speed = f"{number(summary.tokens_per_s, ',.0f')} tokens/s"
    pace = f"{number(summary.step_s, '.2g')} s a step" if summary.step_s else ""
    if steps:
        lines = [sparkline(smooth([s.mean_length for s in steps])[-20:])]
        lines.append(sparkline(smooth([s.tokens_per_s for s in steps])[-20:]))
        fact(facts, "length", f"{length:<28}", Text(lines[0], style="cyan"))
        fact(facts, "speed", f"{f'{speed}, {pace}':<28}", Text(lines[1], style="cyan"))
    else:
        fact(facts, "length", length)
        fact(facts, "speed", ", ".join(filter(None, (speed, pace))))
    _fact_staleness(facts, summary)
    _fact_sampling(facts, summary)
    if summary.metrics:
        fact(facts, "metrics", told({name: m.last for name, m in summary.metrics.items()}))


def _fact_staleness(facts: Table, summary: RunSummary) -> None:
    staleness, made = summary.staleness, summary.batches
    text = f"{number(staleness.mean)} mean, {number(staleness.max)} max"
    if made.share_over_bound:
        text += f", {made.share_over_bound:.1%} of tokens over the bound"
    fact(facts, "staleness", text)
    if made.groups_closed:
        closed = f"{made.groups_closed:,} groups, {made.trajectories_left:,} members left"
        closed += f", {made.trajectories_late:,} trained later"
        share = number(made.longest_trained, ".0%")
        fact(facts, "closed", closed, Text(f"{share} of the longest trained", style="dim"))


def _fact_sampling(facts: Table, summary: RunSummary) -> None:
    made, told = summary.batches, []
    if made.groups_filtered:
        share = number(made.share_filtered, ".0%")
        told.append(f"{made.groups_filtered:,} groups without signal, {share} of tokens")
    if made.share_truncated:
        told.append(f"{made.share_truncated:.1%} of trajectories truncated")
    if told:
        fact(facts, "sampling", ", ".join(told))


def _fact_weights(facts: Table, summary: RunSummary) -> None:
    sync = summary.sync
    if not sync.versions:
        return
    text = Text(f"version {summary.weight_version}")
    if sync.last_s is not None:
        text.append(f" everywhere in {sync.last_s:.2f} s (max {sync.max_s:.2f} s)")
    failed = sync.failed
    verdict = f"{failed} not verified" if failed else f"{sync.verified:,} verified"
    fact(facts, "weights", text, Text(verdict, style="bold red" if failed else "green"))
    if sync.full_bytes:
        share = sync.sent_bytes / sync.full_bytes
        pulls = f"{sync.delta:,} of {sync.delta + sync.full:,} pulls sent only changes"
        fact(facts, "pulled", f"{pulls}, all {share:.1%} of the bytes of full copies")
    if sync.fabric or sync.fabric_missed:
        told = f"{sync.fabric:,} of {sync.fabric + sync.fabric_missed:,} pulls came by it"
        last = f"; the last one that did not: {sync.fabric_detail}" if sync.fabric_missed else ""
        fact(facts, "fabric", told + last)
    if summary.logprob_gap is not None:
        gap = f"{summary.logprob_gap:.1e} log-probability, rollout to trainer"
        gap += f" (max {number(summary.logprob_gap_max, '.1e')})"
        if summary.logprob_gap_usual is not None:
            gap += f"; {summary.served_in}: about {summary.logprob_gap_usual:.0e}"
        fact(facts, "gap", gap)


def _fact_trajectories(facts: Table, summary: RunSummary) -> None:
    counts = summary.trajectories
    words = [f"{counts.trained:,} trained"]
    words += [
        f"{count:,} {word}"
        for word, count in (
            ("in flight", counts.in_flight),
            ("retried", counts.retried),
            ("failed", counts.failed),
            ("dropped", counts.dropped),
        )
        if count
    ]
    fact(facts, "trajectories", ", ".join(words))


def _fact_playing(facts: Table, summary: RunSummary) -> None:
    """Add where the seconds of a trajectory go, and that environments hold up the run."""
    told = summary.playing
    if total := told.total_s:
        parts = (
            ("waits for a place", told.waiting_s),
            ("in the environment", told.environment_s),
            ("waits for a seat", told.queue_s),
            ("generates", told.decode_s),
        )
        shares = [f"{percent((seconds or 0.0) / total)} {what}" for what, seconds in parts]
        fact(facts, "a trajectory", f"{total:,.3g} s: {', '.join(shares)}")
    if told.full:
        fact(facts, "places", f"taken for {percent(told.full)} of the time, and others waited")
    if told.bottleneck:
        fact(facts, "bottleneck", Text(told.bottleneck, style="bold"))


def _fact_scheduler(facts: Table, summary: RunSummary) -> None:
    """Add how many turns wait, and how many went on at another server than the one before."""
    buckets, placed = summary.buckets, summary.placement
    if summary.run.state in LIVE and buckets:
        waiting = sum(bucket.waiting for bucket in buckets)
        seats = sum(bucket.seats for bucket in buckets)
        running = sum(bucket.running for bucket in buckets)
        fact(facts, "queue", f"{waiting:,} wait, {running:,} of {seats:,} seats taken")
    if placed.turns and sum(bucket.servers for bucket in buckets) > 1:
        text = f"{placed.moved:,} of {placed.turns:,} turns went on at another server"
        fact(facts, "placement", f"{text} ({percent(placed.moved_share)})")


def _bucket_table(summary: RunSummary) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim", pad_edge=False)
    table.add_column("bucket", overflow="ellipsis", no_wrap=True, max_width=10)
    for name in ("up to", "waiting", "taken", "turns", "came in", "left"):
        table.add_column(name, justify="right", no_wrap=True)
    for bucket in summary.buckets:
        ways = (bucket.turns, bucket.moved_in, bucket.moved_out)
        table.add_row(
            bucket.bucket,
            f"{bucket.up_to_tokens:,}",
            f"{bucket.waiting:,}",
            percent(bucket.occupancy),
            *(f"{count:,}" for count in ways),
        )
    return table


def _slot_table(summary: RunSummary) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim", pad_edge=False)
    table.add_column("slot", no_wrap=True, min_width=8)
    table.add_column("role", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("server", overflow="ellipsis", no_wrap=True, max_width=8)
    for name in ("version", "running", "waiting", "KV", "tok/s", "idle"):
        table.add_column(name, justify="right", no_wrap=True)
    servers = {server.slot: server for server in summary.servers}
    for slot in summary.slots:
        server = servers.get(slot.slot)
        row: list[str | Text] = [slot_label(slot.slot), slot.role, styled(slot.state)]
        if slot.is_frozen:
            row += [slot.bucket, "", str(slot.running), str(slot.waiting), "", ""]
            row += [percent(slot.idle)]
        if server is None:
            table.add_row(*row)
            continue
        row += [slot.bucket, version(server.version, verified=server.verified)]
        row += [str(server.running), str(server.waiting), percent(server.kv_use)]
        row += [number(server.tokens_per_s, ",.0f"), percent(slot.idle)]
        table.add_row(*row)
    return table


def version(version: int | None, *, verified: bool) -> Text:
    """A weight version and whether the server that holds it was verified."""
    if version is None:
        return Text("–")
    mark = ("✓", "green") if verified else ("✗", "bold red")
    return Text.assemble(f"{version} ", mark)


def _moves(summary: RunSummary) -> list[RenderableType]:
    """The newest moves, why those among them failed, and what the newest plan gains."""
    parts: list[RenderableType] = []
    newest = summary.moves[-_MOVES:]
    if newest:
        parts += [Text(), Padding(_move_table(newest), (0, 0, 0, 2))]
    parts += _error_lines(
        f"move {move.move} of {move.slot}: {move.detail or 'no reason given'}"
        for move in newest
        if move.state == "failed"
    )
    plan = summary.plan
    if plan and (gains := gains_told(plan)):
        line = Text.assemble((f"plan {plan.plan} ({plan.cause}): ", "dim"), gains)
        parts += [Text(), Padding(line, (0, 0, 0, 2))]
    return parts


def _decision(summary: RunSummary) -> list[RenderableType]:
    """Draw the planner's newest decision; nothing if it was never asked."""
    if summary.decision is None:
        return []
    facts = grid()
    for name, text in decision_facts(summary.decision):
        fact(facts, name, text)
    return [Text(), Padding(facts, (0, 0, 0, 2))]


def _move_table(moves: Sequence[MovePart]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for name in ("move", "slot", "from", "to", "state"):
        table.add_column(name, no_wrap=True)
    table.add_column("in all", justify="right", no_wrap=True)
    for move in moves:
        words = (str(move.move), slot_label(move.slot), move.from_role, move.to_role)
        table.add_row(*words, _move_state(move), duration(took(move)))
    return table


def _move_state(move: MovePart) -> Text:
    """How it ended, or the phase under way and for how long."""
    style = {"done": "green", "failed": "bold red"}.get(move.state, "yellow")
    text = Text(move.state, style)
    if move.ended_at is None and move.phases:
        text.append(f" for {duration(move.phases[-1].seconds)}", style="default")
    return text


def took(move: MovePart) -> float:
    """Seconds from its start to its end, or until now."""
    if move.ended_at is not None:
        return move.ended_at - move.started_at
    return sum(phase.seconds for phase in move.phases)


def gains_told(plan: PlanRecord) -> str:
    """``steps predicted 18% shorter, observed 14%``; nothing for a plan with no plan before it."""
    predicted, observed = plan.predicted_gain, plan.observed_gain
    if predicted is None:
        return "" if observed is None else f"steps observed {shorter(observed)}"
    told = f"steps predicted {shorter(predicted)}"
    return (
        f"{told}, not observed yet" if observed is None else f"{told}, observed {shorter(observed)}"
    )


def shorter(gain: float) -> str:
    """A gain in words: ``18% shorter``, ``3% longer``."""
    share = f"{abs(gain):.0%}"
    return "unchanged" if share == "0%" else f"{share} {'shorter' if gain > 0 else 'longer'}"


def warning_lines(texts: Iterable[str]) -> list[RenderableType]:
    """What rules say of the learning, below an empty line; nothing if they say nothing."""
    lines = [Padding(Text(f"! {text}", style="yellow"), (0, 0, 0, 2)) for text in texts]
    return [Text(), *lines] if lines else []


def _error_lines(errors: Iterable[str]) -> list[RenderableType]:
    lines = [Padding(Text(f"✗ {error}", style="red"), (0, 0, 0, 2)) for error in errors]
    return [Text(), *lines] if lines else []
