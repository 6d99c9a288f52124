"""Orders in files: whatever is in one, it is read or answered with why not, and once."""

from __future__ import annotations

import asyncio
import errno
import json
import shutil
from pathlib import Path
from random import Random

import pytest
from hypothesis import given

from libra_cli.core import events as e
from libra_cli.core.actions import AnswerOrder
from libra_cli.runtime import order_files
from libra_cli.runtime.order_files import Orders
from tests.unit.fuzz import nonsense
from tests.world import World

ORDER = {"to": {"rollout": 3}, "pins": {"a/0": "gradient", "a/1": None}, "shapes": {"a/0+1": True}}


@pytest.fixture(scope="module")
def world() -> World:
    world = World(Random(1))
    world.machine.handle(e.RunStarted(), now=0.0)
    return world


@given(data=nonsense.json_like(ORDER))
def test_an_order_is_given_to_the_machine_or_refused(data, world, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("run")
    events: list[e.PlanOrdered] = []
    orders = Orders(run_dir, post=events.append)
    (run_dir / "orders").mkdir()
    path = run_dir / "orders" / "1.json"
    path.write_bytes(data)
    with nonsense.thrown_at("orders"):
        orders._take(path)
        orders._write_answers()
        assert not path.exists()
        for event in events:
            world.machine.handle(event, now=1.0)
    answered = (run_dir / "orders" / "1.answer.json").exists()
    assert answered == (not events)


@pytest.fixture
def orders(tmp_path: Path) -> Orders:
    orders = Orders(tmp_path, post=print)
    (tmp_path / "orders").mkdir()
    return orders


def test_an_answer_that_cannot_be_written_is_written_later(orders, tmp_path, monkeypatch, caplog):
    put = order_files._put

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(order_files, "_put", full)
    asyncio.run(orders.perform(AnswerOrder("1", accepted=True, text="done")))
    assert "No space left" in caplog.text
    monkeypatch.setattr(order_files, "_put", put)
    orders._write_answers()
    answer = json.loads((tmp_path / "orders" / "1.answer.json").read_text())
    assert answer == {"accepted": True, "text": "done"}
    assert not orders._answers


def test_an_order_whose_file_cannot_be_removed_is_taken_once(orders, tmp_path, monkeypatch):
    def stays(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    taken: list[str] = []
    monkeypatch.setattr(Path, "unlink", stays)
    monkeypatch.setattr(orders, "_post", lambda event: taken.append(event.order))
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)
    (tmp_path / "orders" / "1.json").write_text(json.dumps(ORDER))
    monkeypatch.setattr(order_files, "POLL_S", 0.001)

    async def main() -> None:
        watching = asyncio.create_task(orders.watch())
        await asyncio.sleep(0.03)
        watching.cancel()

    asyncio.run(main())
    assert taken == ["1"]
