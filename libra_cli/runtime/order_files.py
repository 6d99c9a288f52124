"""Carries orders to a live run in files, which anybody who may write the run directory can give.

    <run dir>/orders/<id>.json           {"to": {"rollout": 3}, "pins": {"a/0": "gradient"},
                                          "shapes": {"a/0+1": true}, "models": {"judge": 2}}
    <run dir>/orders/<id>.answer.json    {"accepted": true, "text": "..."}

Both appear by a rename, so nobody reads half of one. A Unix socket would not do, since its path may
have 107 characters and run directories are often longer; a port would need a token of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import shutil
import time
from collections.abc import Callable, Mapping
from operator import index
from pathlib import Path
from typing import Any

from libra_cli.config.errors import StateError
from libra_cli.config.text import printable
from libra_cli.core.actions import AnswerOrder
from libra_cli.core.events import PlanOrdered
from libra_cli.core.types import Role, SlotId
from libra_cli.runtime.supervision.answers import understood

_log = logging.getLogger(__name__)

POLL_S = 0.5
MOST_CHARACTERS = 1_000_000
"""Characters that are read of an order's file."""
MOST_SLOTS = 1_000_000
"""Most slots of one role in an order: more than any cluster has."""
ANSWER_S = 90.0
"""How long to wait for an answer; planning for a long run takes seconds."""
_ANSWER = ".answer.json"


class Orders:
    """The controller's side, which reads orders and writes answers."""

    def __init__(self, run_dir: Path, *, post: Callable[[PlanOrdered], None]) -> None:
        """Those to an earlier controller of the run are removed."""
        self._directory = run_dir / "orders"
        shutil.rmtree(self._directory, ignore_errors=True)
        self._post = post
        self._taken: set[str] = set()
        self._answers: dict[str, dict[str, object]] = {}
        """Answers that could not be written yet, by the name of the order."""

    async def watch(self) -> None:
        """Post every order that comes, for ever."""
        self._directory.mkdir(mode=0o700, exist_ok=True)
        while True:
            for path in sorted(self._directory.glob("*.json")):
                if not path.name.endswith(_ANSWER) and path.stem not in self._taken:
                    self._take(path)
            self._write_answers()
            await asyncio.sleep(POLL_S)

    def _take(self, path: Path) -> None:
        """Take an order once, also where its file cannot be removed."""
        order = path.stem
        self._taken.add(order)
        try:
            with path.open(encoding="utf-8") as file, understood(StateError, "the order"):
                event = _event(order, json.loads(file.read(MOST_CHARACTERS)))
        except (OSError, StateError) as error:
            self._answers[order] = {"accepted": False, "text": f"it cannot be read: {error}"}
        else:
            self._post(event)
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)

    async def perform(self, action: AnswerOrder) -> None:
        """Write the answer for whoever gave the order, or as soon as it can be written."""
        self._answers[action.order] = {"accepted": action.accepted, "text": action.text}
        self._write_answers()

    def _write_answers(self) -> None:
        for order, answer in list(self._answers.items()):
            try:
                _put(self._directory / f"{order}{_ANSWER}", answer)
            except OSError as error:
                _log.error("the answer to an order cannot be written yet: %s", error)
                return
            del self._answers[order]


def _event(order: str, message: Mapping[str, Any]) -> PlanOrdered:
    to = tuple((Role(role), _count(number)) for role, number in message["to"].items())
    pins = tuple((slot, Role(role) if role else None) for slot, role in message["pins"].items())
    shapes = tuple((slot, bool(joined)) for slot, joined in message.get("shapes", {}).items())
    models = tuple((name, _count(number)) for name, number in message.get("models", {}).items())
    return PlanOrdered(order, to, pins, shapes, models)


def _count(number: object) -> int:
    count = index(number)  # type: ignore[arg-type]
    if not 0 <= count <= MOST_SLOTS:
        raise ValueError(f"{count} slots")
    return count


def give_order(
    run_dir: Path,
    to: Mapping[Role, int],
    pins: Mapping[SlotId, Role | None],
    shapes: Mapping[SlotId, bool],
    models: Mapping[str, int],
) -> tuple[bool, str]:
    """Give an order to a live run, from another process, and wait for the answer.

    Returns:
        Whether the controller accepted it, and its explanation.

    Raises:
        StateError: the controller takes no orders yet, or does not answer within ``ANSWER_S``.
    """
    directory, order = run_dir / "orders", f"{time.time_ns()}-{secrets.token_hex(2)}"
    if not directory.is_dir():
        raise StateError(
            f"{run_dir} takes no orders yet: its hosts are being prepared",
            hint=f"libra status {run_dir}",
        )
    message = {
        "to": {str(role): n for role, n in to.items()},
        "pins": dict(pins),
        "shapes": dict(shapes),
        "models": dict(models),
    }
    try:
        _put(directory / f"{order}.json", message)
    except FileNotFoundError:  # a controller has taken over in this moment
        raise StateError(
            f"{run_dir} takes no orders yet: another controller takes over",
            hint=f"libra status {run_dir}",
        ) from None
    answer = directory / f"{order}{_ANSWER}"
    give_up = time.monotonic() + ANSWER_S
    while not answer.exists():
        if time.monotonic() > give_up:
            (directory / f"{order}.json").unlink(missing_ok=True)
            raise StateError(
                f"the controller of {run_dir} has not answered in {ANSWER_S:.0f} s",
                hint=f"libra status {run_dir}",
            )
        time.sleep(POLL_S / 5)
    with understood(StateError, f"{answer}"):
        said = json.loads(answer.read_text(encoding="utf-8"))
        answer.unlink(missing_ok=True)
        return bool(said["accepted"]), printable(str(said["text"]))


def _put(path: Path, message: Mapping[str, object]) -> None:
    draft = path.with_name(f".{path.name}")
    draft.write_text(json.dumps(message), encoding="utf-8")
    draft.rename(path)
