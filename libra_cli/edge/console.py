"""What a person sees of a run in a terminal: its status, and its end.

Nothing here decides or computes: numbers come from ``monitors.summary``. Every view fits 80
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

from libra_cli.core.records import StepRecord
from libra_cli.edge.monitors import LIVE, RECENT, Summary, smooth
from libra_cli.edge.plots import Plot, Portable, bar, sparkline

_BAR_WIDTH = 34
_SLOT_WIDTH = 12

_COLOURS = {
    "starting": "yellow",
    "connecting": "yellow",
    "joining": "yellow",
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
    """``0.8 s``, ``42 s``, ``4:12``, ``1:02:03``."""
    if seconds < 9.95:
        return f"{max(0.0, seconds):.1f} s"
    if seconds < 59.5:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def status_view(summary: Summary, *, now: float) -> RenderableType:
    """One run, as ``libra status`` shows it."""
    parts: list[RenderableType] = [_title(summary), Text()]
    parts.append(Padding(_facts(summary, now=now), (0, 0, 0, 2)))
    if summary["slots"]:
        parts += [Text(), Padding(_slot_table(summary), (0, 0, 0, 2))]
    if summary["moves"]:
        parts += [Text(), Padding(_move_table(summary), (0, 0, 0, 2))]
    parts += _error_lines(summary["errors"])
    return Portable(Group(*parts))


def final_view(
    summary: Summary, steps: Sequence[StepRecord], *, report: Path | None = None
) -> RenderableType:
    """The end of a run: what came out, with the reward drawn."""
    parts: list[RenderableType] = [_title(summary), Text()]
    if steps:
        rewards = [step.reward for step in steps]
        parts.append(Text.assemble(("  reward", "bold"), ("   a dot a step, and smoothed", "dim")))
        parts += [Padding(Plot(rewards, smooth(rewards)), (0, 1, 0, 2)), Text()]
    facts = grid()
    _fact_step(facts, summary)
    _fact_quality(facts, summary, steps)
    _fact_weights(facts, summary)
    _fact_trajectories(facts, summary)
    if summary["checkpoint"]:
        at = summary["checkpoint"]
        fact(facts, "checkpoint", Text(f"step {at['step']}  {at['path']}", overflow="fold"))
    if report:
        fact(facts, "report", Text(str(report), overflow="fold"))
    parts.append(Padding(facts, (0, 0, 0, 2)))
    parts += _error_lines(summary["errors"])
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
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim", no_wrap=True, min_width=12)
    grid.add_column(overflow="fold")
    return grid


def fact(grid: Table, name: str, *values: str | Text) -> None:
    grid.add_row(name, Text("   ").join(_text(value) for value in values if value))


def _text(value: str | Text) -> Text:
    return Text(value) if isinstance(value, str) else value


def number(value: float | None, form: str = ".3g", unit: str = "") -> str:
    return f"{value:{form}}{unit}" if value is not None and math.isfinite(value) else "–"


def percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.0%}"


def _title(summary: Summary) -> RenderableType:
    run = summary["run"]
    left = Text.assemble((run["id"], "bold"), "  ", styled(run["state"]))
    left.append(f"  {run['recipe']}", style="dim")
    grid = Table.grid(expand=True)
    grid.add_column(overflow="ellipsis", no_wrap=True)
    grid.add_column(justify="right", no_wrap=True)
    grid.add_row(left, duration(run["elapsed_s"]))
    return grid


def _facts(summary: Summary, *, now: float) -> Table:
    run, facts = summary["run"], grid()
    _fact_step(facts, summary)
    _fact_quality(facts, summary, ())
    _fact_weights(facts, summary)
    idle = summary["idle"]
    for name, whole, recent in (
        ("rollout", idle["rollout"], idle["recent_rollout"]),
        ("training", idle["training"], idle["recent_training"]),
    ):
        if whole is not None:
            text = Text(bar(1 - whole, 20), style="cyan")
            text.append(f"  {percent(whole)} idle", style="default")
            text.append(f"   last {RECENT} steps {percent(recent)}", style="dim")
            fact(facts, name, text)
    _fact_trajectories(facts, summary)
    if summary["checkpoint"]:
        fact(facts, "checkpoint", f"step {summary['checkpoint']['step']}")
    if run["state"] in LIVE and run["waiting"]:
        fact(facts, "waiting", Text(run["waiting"], style="bold"))
    elif run["ended_at"] is not None:
        fact(facts, "ended", f"{duration(now - run['ended_at'])} ago")
    return facts


def _fact_step(facts: Table, summary: Summary) -> None:
    done, target = summary["step"], summary["run"]["target_steps"]
    fact(facts, "step", step_bar(done, target, _left(summary)))


def _left(summary: Summary) -> str:
    missing = summary["run"]["target_steps"] - summary["step"]
    if summary["run"]["state"] != "running" or not summary["step_s"] or missing <= 0:
        return ""
    return f"about {duration(summary['step_s'] * missing)} left"


def step_bar(done: int, target: int, left: str) -> Text:
    share = done / target if target else 0.0
    full = round(min(1.0, share) * _BAR_WIDTH)
    text = Text(f"{done} of {target}  ")
    text.append("━" * full, style="cyan")
    text.append("━" * (_BAR_WIDTH - full), style="bright_black")
    return text.append(f"  {left}", style="dim")


def _fact_quality(facts: Table, summary: Summary, steps: Sequence[StepRecord]) -> None:
    reward, lengths = summary["reward"], summary["lengths"]
    rise = Text(f"{number(reward['first'], '.2f')} → ")
    rise.append(number(reward["last"], ".2f"), style="bold")
    rise.append(f"   first and last {RECENT} steps", style="dim")
    fact(facts, "reward", rise)
    length = f"{number(lengths['mean'])} tokens, p99 {number(lengths['p99'])}"
    speed = f"{number(summary['tokens_per_s'], ',.0f')} tokens/s"
    pace = f"{number(summary['step_s'], '.2g')} s a step" if summary["step_s"] else ""
    if steps:
        lines = [sparkline(smooth([s.mean_length for s in steps])[-20:])]
        lines.append(sparkline(smooth([s.tokens_per_s for s in steps])[-20:]))
        fact(facts, "length", f"{length:<28}", Text(lines[0], style="cyan"))
        fact(facts, "speed", f"{f'{speed}, {pace}':<28}", Text(lines[1], style="cyan"))
    else:
        fact(facts, "length", length)
        fact(facts, "speed", ", ".join(filter(None, (speed, pace))))
    staleness = summary["staleness"]
    fact(facts, "staleness", f"{number(staleness['mean'])} mean, {number(staleness['max'])} max")


def _fact_weights(facts: Table, summary: Summary) -> None:
    sync = summary["sync"]
    if not sync["versions"]:
        return
    text = Text(f"version {summary['weight_version']}")
    if sync["last_s"] is not None:
        text.append(f" everywhere in {sync['last_s']:.2f} s (max {sync['max_s']:.2f} s)")
    failed = sync["failed"]
    verdict = f"{failed} not verified" if failed else f"{sync['verified']:,} verified"
    fact(facts, "weights", text, Text(verdict, style="bold red" if failed else "green"))
    if summary["logprob_gap"] is not None:
        gap = f"{summary['logprob_gap']:.1e} log-probability, rollout to trainer"
        fact(facts, "gap", gap + f" (max {number(summary['logprob_gap_max'], '.1e')})")


def _fact_trajectories(facts: Table, summary: Summary) -> None:
    counts = summary["trajectories"]
    words = [f"{counts['trained']:,} trained"]
    words += [
        f"{count:,} {word}"
        for word, count in (
            ("in flight", counts["in_flight"]),
            ("retried", counts["retried"]),
            ("failed", counts["failed"]),
            ("dropped", counts["dropped"]),
        )
        if count
    ]
    fact(facts, "trajectories", ", ".join(words))


def _slot_table(summary: Summary) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim", pad_edge=False)
    table.add_column("slot", no_wrap=True, min_width=8)
    table.add_column("role", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("server", overflow="ellipsis", no_wrap=True, max_width=8)
    for name in ("version", "running", "waiting", "KV", "tok/s", "idle"):
        table.add_column(name, justify="right", no_wrap=True)
    servers = {server["slot"]: server for server in summary["servers"]}
    for slot in summary["slots"]:
        server = servers.get(slot["slot"])
        row: list[str | Text] = [slot_label(slot["slot"]), slot["role"], styled(slot["state"])]
        if server is None:
            table.add_row(*row)
            continue
        row += [slot["bucket"], version(server["version"], verified=server["verified"])]
        row += [str(server["running"]), str(server["waiting"]), percent(server["kv_use"])]
        row += [number(server["tokens_per_s"], ",.0f"), percent(slot["idle"])]
        table.add_row(*row)
    return table


def version(version: int | None, *, verified: bool) -> Text:
    if version is None:
        return Text("–")
    mark = ("✓", "green") if verified else ("✗", "bold red")
    return Text.assemble(f"{version} ", mark)


def _move_table(summary: Summary) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for name in ("move", "slot", "from", "to", "state", "took"):
        table.add_column(name, no_wrap=True)
    for move in summary["moves"][-5:]:
        ended = move["ended_at"]
        took = "–" if ended is None else duration(ended - move["started_at"])
        words = (str(move["move"]), move["slot"], move["from"], move["to"])
        table.add_row(*words, styled(move["state"]), took)
    return table


def _error_lines(errors: Iterable[str]) -> list[RenderableType]:
    lines = [Padding(Text(f"✗ {error}", style="red"), (0, 0, 0, 2)) for error in errors]
    return [Text(), *lines] if lines else []
