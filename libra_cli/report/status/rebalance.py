"""What ``libra rebalance`` tells: the object of ``--json``, and how a person sees it.

Seconds are of one step unless a name says otherwise; a number nobody knows is null. The columns of
``times``:

    measured    what the run's steps took: each half busy, and from step to step
    priced      predicted for the plan now with the prices as they are
    now         the same with the prices corrected by measured over priced (``corrections``)
    proposed    predicted for the plan proposed, with the corrected prices; what the verdict is from

Every view fits 80 columns. Nothing here decides or computes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TypedDict

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from libra_cli.report.status.console import duration, fact, grid, number, slot_label, styled
from libra_cli.report.status.plans import PlannedServer
from libra_cli.report.status.plots import Portable

MOST_MOVES = 12
FORMAT = 1


class StageTimes(TypedDict):
    """Seconds a step of either half, and of both as they overlap."""

    rollout_s: float | None
    train_s: float | None
    step_s: float | None


class TimesPart(TypedDict):
    """The columns of ``times``, told apart above."""

    measured: StageTimes
    priced: StageTimes
    now: StageTimes
    proposed: StageTimes


class StageIdle(TypedDict):
    """Shares of a step in which either half waits."""

    rollout: float | None
    training: float | None


class PlanResult(TypedDict):
    """Which slots serve and which train, and the GPUs of each half."""

    servers: list[PlannedServer]
    train: list[str]
    gradient: list[str]
    rollout_gpus: int
    training_gpus: int


SlotMoveTold = TypedDict("SlotMoveTold", {"slot": str, "from": str, "to": str, "seconds": float})


class WorkloadResult(TypedDict):
    """The trajectories that were planned for: lengths in tokens, tool time in seconds."""

    source: str
    trajectories: int
    seen: int
    mean_generated: float
    mean_context: float
    longest_context: int
    tool_s: float
    overlap: float


class ProfileResult(TypedDict):
    """The prices that were planned with, and where they come from."""

    name: str
    gpu: str
    model: str
    source: str
    provenance: dict[str, str]
    servers: list[dict[str, float]]
    training: dict[str, float]


class Corrections(TypedDict):
    """Measured over priced seconds, by which each half's prices are multiplied."""

    rollout: float
    training: float


class Verdict(TypedDict):
    """Whether to move, why not, and what moving gains and costs."""

    move: bool
    why_not: str
    gain_s: float | None
    cost_s: float
    payback_steps: float | None
    horizon_steps: float | None


class RebalanceResult(TypedDict):
    """The object of ``libra rebalance --dry-run --json``; the README explains it key by key."""

    format: int
    of: str
    name: str
    state: str
    step: int | None
    target_steps: int
    profile: ProfileResult
    workload: WorkloadResult
    idle: StageIdle
    plan: PlanResult
    proposed: PlanResult
    times: TimesPart
    corrections: Corrections
    moves: list[SlotMoveTold]
    verdict: Verdict
    reasons: list[str]
    notes: list[str]


def rebalance_view(told: RebalanceResult) -> RenderableType:
    """The plan now, the plan proposed, and whether to move."""
    parts: list[RenderableType] = [_title(told), Text(), Padding(_basis(told), (0, 0, 0, 2))]
    parts += [Text(), Padding(_plans(told), (0, 0, 0, 2))]
    parts += [Text(), Padding(_times(told), (0, 0, 0, 2))]
    if told["moves"]:
        running = told["of"] == "run"
        parts += [Text(), Padding(_moves(told["moves"], running=running), (0, 0, 0, 2))]
    parts += [Text(), Padding(_verdict(told), (0, 0, 0, 2))]
    if told["notes"]:
        parts.append(Text())
        parts += [Padding(Text(f"· {note}", style="dim"), (0, 0, 0, 2)) for note in told["notes"]]
    return Portable(Group(*parts))


def _title(told: RebalanceResult) -> RenderableType:
    left = Text.assemble((told["name"], "bold"), "  ", styled(told["state"]))
    right = f"step {told['step']} of {told['target_steps']}"
    line = Table.grid(expand=True)
    line.add_column(overflow="ellipsis", no_wrap=True)
    line.add_column(justify="right", no_wrap=True)
    line.add_row(left, right if told["step"] is not None else f"{told['target_steps']} steps")
    return line


def _basis(told: RebalanceResult) -> Table:
    work, profile, facts = told["workload"], told["profile"], grid()
    fact(
        facts,
        "workload",
        f"{work['trajectories']:,} trajectories a step, "
        f"{number(work['mean_generated'], ',.0f')} tokens generated on average, "
        f"{work['longest_context']:,} in the longest context; from {work['source']}",
    )
    fact(facts, "prices", f"{profile['name']} ({profile['model']} on {profile['gpu']})")
    for degree in profile["servers"]:
        step = degree["step_s"] * 1e3
        fact(
            facts,
            f"  TP {degree['tensor_parallel']:.0f}",
            f"decode step {step:.3g} ms + {degree['sequence_s'] * 1e6:.3g} µs a request "
            f"+ {degree['kv_token_s'] * 1e9:.3g} ns a KV token",
        )
    training = profile["training"]
    fact(
        facts,
        "  training",
        f"{training['step_s']:.2g} s a step + {training['token_s'] * 1e6:.3g} µs a token and rank",
    )
    return facts


def _plans(told: RebalanceResult) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    table.add_column("", style="dim", no_wrap=True, min_width=12)
    table.add_column("plan now", overflow="fold", max_width=31)
    table.add_column("plan proposed", overflow="fold", max_width=31)
    plans = (told["plan"], told["proposed"])
    table.add_row("rollout", *map(_servers, plans))
    table.add_row("training", *map(_trainers, plans))
    return table


def _servers(plan: PlanResult) -> str:
    shapes = Counter(
        (server["bucket"], server["tensor_parallel"], server["max_num_seqs"])
        for server in plan["servers"]
    )
    lines = [
        f"{count} x {name}, TP {degree}, {seats} seats"
        for (name, degree, seats), count in shapes.items()
    ]
    return "\n".join(lines) or "–"


def _trainers(plan: PlanResult) -> str:
    slots, gpus = len(plan["train"]), plan["training_gpus"]
    return f"{slots} slot{'s' * (slots != 1)}, {gpus} rank{'s' * (gpus != 1)}"


def _times(told: RebalanceResult) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    table.add_column("seconds a step", style="dim", no_wrap=True, min_width=14)
    times = told["times"]
    columns = [("measured", times["measured"]), ("priced", times["priced"])]
    columns += [("corrected", times["now"]), ("proposed", times["proposed"])]
    if times["measured"]["step_s"] is None:
        columns = [("now", times["now"]), ("proposed", times["proposed"])]
    for name, _ in columns:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_row("rollout", *(number(column["rollout_s"], ",.3g") for _, column in columns))
    table.add_row("training", *(number(column["train_s"], ",.3g") for _, column in columns))
    table.add_row(
        "step", *(Text(number(column["step_s"], ",.3g"), style="bold") for _, column in columns)
    )
    return table


def _moves(moves: Sequence[SlotMoveTold], *, running: bool) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for name in ("move", "slot", "from", "to"):
        table.add_column(name, overflow="ellipsis", no_wrap=True, max_width=20)
    table.add_column("idle for" if running else "", justify="right", no_wrap=True)
    for index, move in enumerate(moves[:MOST_MOVES], start=1):
        words = (str(index), slot_label(move["slot"]), move["from"], move["to"])
        table.add_row(*words, duration(move["seconds"]) if running else "")
    if len(moves) <= MOST_MOVES:
        return table
    return Group(table, Text(f"and {len(moves) - MOST_MOVES} more", style="dim"))


def _verdict(told: RebalanceResult) -> Table:
    verdict, facts = told["verdict"], grid()
    gain, payback, horizon = verdict["gain_s"], verdict["payback_steps"], verdict["horizon_steps"]
    running = told["of"] == "run"
    if gain is not None and told["moves"]:
        fact(facts, "gain", f"saves {gain:,.3g} s a step" if gain > 0 else "saves nothing")
        if running:
            fact(facts, "cost", f"{number(verdict['cost_s'], ',.3g')} s of the whole job")
        if payback is not None and horizon is not None:
            fact(facts, "pays back in", f"{payback:,.1f} steps, of {horizon:,.0f} to count on")
    stay, go = ("stay", "move") if running else ("the recipe's plan", "begin with the one proposed")
    if verdict["move"]:
        fact(facts, "verdict", Text(go, style="bold green"))
    else:
        fact(facts, "verdict", Text(f"{stay}: ", style="bold").append(verdict["why_not"]))
    return facts
