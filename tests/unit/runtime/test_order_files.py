"""Orders to a live run: real files, both sides at work at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from libra_cli.config.errors import StateError
from libra_cli.core.actions import AnswerOrder
from libra_cli.core.events import PlanOrdered
from libra_cli.core.types import Role
from libra_cli.runtime import order_files as files
from libra_cli.runtime.order_files import Orders, give_order

DEADLINE_S = 20.0


async def between(run_dir: Path, act: Callable[[], object]) -> list[PlanOrdered]:
    """Watch for orders while ``act`` runs in a thread; every order is answered."""
    heard: list[PlanOrdered] = []
    tasks: set[asyncio.Task[None]] = set()

    def post(event: PlanOrdered) -> None:
        heard.append(event)
        accepted = not event.to
        task = asyncio.create_task(orders.perform(AnswerOrder(event.order, accepted, "heard")))
        tasks.add(task)

    orders = Orders(run_dir, post=post)
    watching = asyncio.create_task(orders.watch())
    try:
        await asyncio.sleep(0.05)  # its first look clears what an earlier one left
        await asyncio.wait_for(asyncio.to_thread(act), DEADLINE_S)
    finally:
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching
    return heard


def test_an_order_arrives_as_it_was_given_and_its_answer_comes_back(tmp_path: Path) -> None:
    said: list[tuple[bool, str]] = []
    to, pins = {Role.ROLLOUT: 3, Role.GRADIENT: 1}, {"a/0": Role.GRADIENT, "a/1": None}
    shapes, models = {"b/0+1": True, "b/2+3": False}, {"judge": 2}
    (event,) = asyncio.run(
        between(tmp_path, lambda: said.append(give_order(tmp_path, to, pins, shapes, models)))
    )
    assert dict(event.to) == to
    assert dict(event.pins) == pins
    assert dict(event.shapes) == shapes
    assert dict(event.models) == models
    assert said == [(False, "heard")]
    assert list((tmp_path / "orders").iterdir()) == []


def test_without_a_split_or_pins_the_planner_is_asked(tmp_path: Path) -> None:
    said: list[tuple[bool, str]] = []
    (event,) = asyncio.run(
        between(tmp_path, lambda: said.append(give_order(tmp_path, {}, {}, {}, {})))
    )
    assert (event.to, event.pins) == ((), ())
    assert said == [(True, "heard")]


def test_an_order_that_comes_before_the_controller_looks_is_kept_and_an_older_one_is_not(
    tmp_path: Path,
) -> None:
    (tmp_path / "orders").mkdir()
    (tmp_path / "orders/old.json").write_text('{"to": {}, "pins": {}}')
    heard: list[PlanOrdered] = []
    orders = Orders(tmp_path, post=heard.append)
    assert not (tmp_path / "orders").exists()
    (tmp_path / "orders").mkdir()
    (tmp_path / "orders/new.json").write_text('{"to": {}, "pins": {}}')

    async def look() -> None:
        watching = asyncio.create_task(orders.watch())
        while not heard:  # noqa: ASYNC110  nothing tells of it
            await asyncio.sleep(0.01)
        watching.cancel()

    asyncio.run(asyncio.wait_for(look(), DEADLINE_S))
    assert [event.order for event in heard] == ["new"]


def test_what_is_no_order_is_refused_and_told(tmp_path: Path) -> None:
    def write() -> None:
        (tmp_path / "orders/broken.json").write_text('{"to": {"cook": 1}, "pins": {}}')
        answer = tmp_path / "orders/broken.answer.json"
        for _ in range(200):
            if answer.exists():
                assert "cannot be read" in answer.read_text()
                return
            asyncio.run(asyncio.sleep(0.05))
        raise AssertionError("no answer came")

    assert asyncio.run(between(tmp_path, write)) == []


def test_orders_left_by_an_earlier_controller_are_void(tmp_path: Path) -> None:
    (tmp_path / "orders").mkdir()
    (tmp_path / "orders/old.json").write_text('{"to": {}, "pins": {}}')
    heard = asyncio.run(between(tmp_path, lambda: None))
    assert heard == []


def test_a_run_that_is_not_listening_yet_says_so(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="takes no orders yet"):
        give_order(tmp_path, {}, {}, {}, {})


def test_a_controller_that_does_not_answer_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "orders").mkdir()
    monkeypatch.setattr(files, "ANSWER_S", 0.2)
    with pytest.raises(StateError, match="has not answered"):
        give_order(tmp_path, {}, {}, {}, {})
    assert list((tmp_path / "orders").iterdir()) == []
