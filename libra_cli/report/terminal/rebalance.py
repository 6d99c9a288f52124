"""Draws what ``libra rebalance --dry-run`` tells in 80 columns; it computes nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from libra_cli.report.status.rebalance import PlanResult, RebalanceResult, SlotMoveTold
from libra_cli.report.terminal.console import duration, fact, grid, number, slot_label, styled
from libra_cli.report.terminal.decision import explanation_facts, seconds, worth
from libra_cli.report.terminal.plots import Portable

MOST_MOVES = 12


def rebalance_view(told: RebalanceResult) -> RenderableType:
    """The plan now, the plan proposed, and whether to move."""
    parts: list[RenderableType] = [_title(told), Text(), Padding(_basis(told), (0, 0, 0, 2))]
    parts += [Text(), Padding(_plans(told), (0, 0, 0, 2))]
    parts += [Text(), Padding(_times(told), (0, 0, 0, 2))]
    if told.moves:
        running = told.of == "run"
        parts += [Text(), Padding(_moves(told.moves, running=running), (0, 0, 0, 2))]
    parts += [Text(), Padding(_verdict(told), (0, 0, 0, 2))]
    if told.notes:
        parts.append(Text())
        parts += [Padding(Text(f"· {note}", style="dim"), (0, 0, 0, 2)) for note in told.notes]
    return Portable(Group(*parts))


def _title(told: RebalanceResult) -> RenderableType:
    left = Text.assemble((told.name, "bold"), "  ", styled(told.state))
    right = f"step {told.step} of {told.target_steps}"
    line = Table.grid(expand=True)
    line.add_column(overflow="ellipsis", no_wrap=True)
    line.add_column(justify="right", no_wrap=True)
    line.add_row(left, right if told.step is not None else f"{told.target_steps} steps")
    return line


def _basis(told: RebalanceResult) -> Table:
    work, profile, facts = told.workload, told.profile, grid()
    fact(
        facts,
        "workload",
        f"{work.trajectories:,} trajectories a step, "
        f"{number(work.mean_generated, ',.0f')} tokens generated on average, "
        f"{work.longest_context:,} in the longest context; from {work.source}",
    )
    fact(facts, "prices", f"{profile.name} ({profile.model} on {profile.gpu})")
    for degree in profile.servers:
        step = degree["step_s"] * 1e3
        fact(
            facts,
            f"  TP {degree['tensor_parallel']:.0f}",
            f"decode step {step:.3g} ms{_experts(degree)} "
            f"+ {degree['sequence_s'] * 1e6:.3g} µs a request "
            f"+ {degree['kv_token_s'] * 1e9:.3g} ns a KV token",
        )
    training = profile.training
    fact(
        facts,
        "  training",
        f"{training['step_s']:.2g} s a step + {training['token_s'] * 1e6:.3g} µs a token and rank",
    )
    return facts


def _experts(degree: Mapping[str, float]) -> str:
    """Write what a mixture's experts add to the seconds of a step; empty for dense models."""
    if "expert_s" not in degree:
        return ""
    return f" + {degree['expert_s'] * 1e6:.3g} µs an expert of {degree['experts']:.0f}"


def _plans(told: RebalanceResult) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    table.add_column("", style="dim", no_wrap=True, min_width=12)
    table.add_column("plan now", overflow="fold", max_width=31)
    table.add_column("plan proposed", overflow="fold", max_width=31)
    plans = (told.plan, told.proposed)
    table.add_row("rollout", *map(_servers, plans))
    table.add_row("training", *map(_trainers, plans))
    return table


def _servers(plan: PlanResult) -> str:
    shapes = Counter(
        (server.bucket, server.tensor_parallel, server.max_num_seqs) for server in plan.servers
    )
    lines = [
        f"{count} x {name}, TP {degree}, {seats} seats"
        for (name, degree, seats), count in shapes.items()
    ]
    return "\n".join(lines) or "–"


def _trainers(plan: PlanResult) -> str:
    slots, gpus = len(plan.train) + len(plan.gradient), plan.training_gpus
    return f"{slots} slot{'s' * (slots != 1)}, {gpus} rank{'s' * (gpus != 1)}"


def _times(told: RebalanceResult) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    table.add_column("seconds a step", style="dim", no_wrap=True, min_width=14)
    times = told.times
    columns = [("measured", times.measured), ("priced", times.priced)]
    columns += [("corrected", times.now), ("proposed", times.proposed)]
    if times.measured.step_s is None:
        columns = [("now", times.now), ("proposed", times.proposed)]
    for name, _ in columns:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_row("rollout", *(number(column.rollout_s, ",.3g") for _, column in columns))
    table.add_row("training", *(number(column.train_s, ",.3g") for _, column in columns))
    table.add_row(
        "step", *(Text(number(column.step_s, ",.3g"), style="bold") for _, column in columns)
    )
    return table


def _moves(moves: Sequence[SlotMoveTold], *, running: bool) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for name in ("move", "slot", "from", "to"):
        table.add_column(name, overflow="ellipsis", no_wrap=True, max_width=20)
    table.add_column("idle for" if running else "", justify="right", no_wrap=True)
    for index, move in enumerate(moves[:MOST_MOVES], start=1):
        words = (str(index), slot_label(move.slot), move.from_role, move.to_role)
        table.add_row(*words, duration(move.seconds) if running else "")
    if len(moves) <= MOST_MOVES:
        return table
    return Group(table, Text(f"and {len(moves) - MOST_MOVES} more", style="dim"))


def _verdict(told: RebalanceResult) -> Table:
    verdict, facts = told.verdict, grid()
    for name, text in explanation_facts(told.explanation) if told.explanation else ():
        fact(facts, name, text)
    for one in told.bounds:
        text = f"{seconds(one.step_s)} a step, a token is worth {worth(one)}: {one.layout}"
        fact(facts, f"bound {one.bound}", text)
    gain, payback, horizon = verdict.gain_s, verdict.payback_steps, verdict.horizon_steps
    running = told.of == "run"
    if gain is not None and told.moves:
        fact(facts, "gain", f"saves {gain:,.3g} s a step" if gain > 0 else "saves nothing")
        if running:
            fact(facts, "cost", f"{number(verdict.cost_s, ',.3g')} s of the whole job")
        if payback is not None and horizon is not None:
            fact(facts, "pays back in", f"{payback:,.1f} steps, of {horizon:,.0f} to count on")
    stay, go = ("stay", "move") if running else ("the recipe's plan", "begin with the one proposed")
    if verdict.move:
        fact(facts, "verdict", Text(go, style="bold green"))
    else:
        fact(facts, "verdict", Text(f"{stay}: ", style="bold").append(verdict.why_not))
    return facts
