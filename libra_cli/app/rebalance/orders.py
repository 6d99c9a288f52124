"""Reads the orders of a user to a live run from the command line, and gives them to the run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from libra_cli.config.errors import InputError, WrongRun
from libra_cli.core.types import Role
from libra_cli.runtime.order_files import give_order
from libra_cli.runtime.store.controller_process import controller_alive
from libra_cli.runtime.store.reader import Reader
from libra_cli.runtime.store.run_directory import newest_run, recipe_of

ORDERED = {str(role): role for role in (Role.ROLLOUT, Role.GRADIENT, Role.TRAIN)}
"""Maps what ``--to`` and ``--pin`` take to the role of a slot; ``--to`` takes models too."""
LET_GO = "auto"
"""What a slot is pinned to that is not to be held any more."""
_V = TypeVar("_V")


class RebalanceError(InputError):
    """An argument of ``libra rebalance`` that means nothing, or not yet."""


@dataclass(frozen=True, slots=True)
class Ordered:
    """What the options of ``libra rebalance`` order, as they were typed; each may be empty."""

    to: str
    pins: Sequence[str]
    join: Sequence[str]
    split: Sequence[str]


def refuse_explaining(*, as_json: bool, profile: str | None, trace: str | None) -> None:
    """Raise RebalanceError if an option is given that only ``--dry-run`` takes."""
    given = {"--json": as_json, "--profile": profile, "--trace": trace}
    flags = [flag for flag, value in given.items() if value]
    if flags:
        raise RebalanceError(
            f"{flags[0]} is for explaining, and without --dry-run slots would move",
            hint="libra rebalance RUN_DIR --dry-run " + " ".join(flags),
        )


def refuse_ordering(ordered: Ordered) -> None:
    """Raise RebalanceError if an order is given, which ``--dry-run`` would not carry out."""
    given = {
        "--to": ordered.to,
        "--pin": ordered.pins,
        "--join": ordered.join,
        "--split": ordered.split,
    }
    flags = [flag for flag, value in given.items() if value]
    if flags:
        raise RebalanceError(
            f"{flags[0]} is an order, and with --dry-run nothing is moved: it explains the "
            "planner's own choice",
            hint="libra rebalance RUN_DIR --dry-run; or leave out --dry-run, and slots move",
        )


def order(target: Path | None, ordered: Ordered) -> tuple[bool, str]:
    """Ask a live run to plan now, or order a split or larger and smaller servers.

    Whether it was accepted, and what was said.

    Raises:
        LibraError: no live run there, or an argument that cannot be read.
    """
    run_dir = target or newest_run()
    if run_dir.is_file():
        raise RebalanceError(
            f"{run_dir} is a recipe: only a live run can move slots",
            hint=f"libra rebalance {run_dir} --dry-run",
        )
    to = ordered.to.split(",") if ordered.to else []
    named = dict(_read_pair(part, _number) for part in to)
    counts = {ORDERED[name]: number for name, number in named.items() if name in ORDERED}
    models = {name: number for name, number in named.items() if name not in ORDERED}
    if models:
        _check_models(models, [one.name for one in recipe_of(run_dir).models])
    pinned = dict(_read_pair(pin, _pin) for pin in ordered.pins)
    shapes = dict.fromkeys(ordered.join, True) | dict.fromkeys(ordered.split, False)
    if shapes and (counts or pinned or models):
        raise RebalanceError(
            "--join and --split change the size of servers, and --to and --pin what slots do: "
            "order one after the other",
            hint=f"libra rebalance RUN_DIR --join {next(iter(shapes))}",
        )
    with Reader(run_dir) as reader:
        if not controller_alive(reader):
            raise WrongRun(
                f"{run_dir} is not running any more", hint=f"libra rebalance {run_dir} --dry-run"
            )
    return give_order(run_dir, counts, pinned, shapes, models)


def _read_pair(text: str, read: Callable[[str], _V]) -> tuple[str, _V]:
    name, equals, value = (part.strip() for part in text.partition("="))
    if not equals or not name:
        raise RebalanceError(
            f"{text!r} is not NAME=VALUE",
            hint='libra rebalance RUN_DIR --to "rollout=3,gradient=1" --pin gpu-01/0=rollout',
        )
    return name, read(value)


def _number(text: str) -> int:
    if not text.isdigit():
        raise RebalanceError(f"{text!r} is not a number of slots", hint='--to "rollout=3"')
    return int(text)


def _check_models(given: Iterable[str], served: Sequence[str]) -> None:
    for name in given:
        if name not in served:
            known = ", ".join((*ORDERED, *served))
            raise RebalanceError(
                f"{name!r} is no role, and no model that the run serves; there are {known}",
                hint='libra rebalance RUN_DIR --to "rollout=3"',
            )


def _role(text: str) -> Role:
    if text not in ORDERED:
        known = ", ".join(ORDERED)
        raise RebalanceError(
            f"{text!r} is no role; there are {known}",
            hint=f"--pin SLOT={LET_GO} lets a pinned slot go",
        )
    return ORDERED[text]


def _pin(text: str) -> Role | None:
    return None if text == LET_GO else _role(text)
