"""Requests of a client are carried out once and in their order, and their answers are kept."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path

import pytest

from libra_cli.config.errors import LibraError, StateError
from libra_cli.runtime.tinker.adapters import AdapterShape, SavedAdapters
from libra_cli.runtime.tinker.futures import Futures, Outcome
from libra_cli.runtime.tinker.loaded import LoadedAdapters
from libra_cli.runtime.tinker.sampling import SampleOrder
from libra_cli.runtime.tinker.turns import Turns
from libra_cli.runtime.tinker.wire import NotServed


def test_requests_that_come_in_any_order_take_their_turns() -> None:
    done: list[int] = []

    async def scene() -> None:
        turns = Turns()

        async def one(number: int) -> None:
            async with turns.turn(number):
                await asyncio.sleep(0)
                done.append(number)

        await asyncio.gather(*(one(number) for number in (3, 1, 2)))

    asyncio.run(asyncio.wait_for(scene(), 10))
    assert done == [1, 2, 3]


def test_a_request_that_fails_lets_the_next_one_go_on_and_a_missing_one_is_told() -> None:
    async def scene() -> None:
        turns = Turns(missing_s=0.01)
        with pytest.raises(ZeroDivisionError):
            async with turns.turn(1):
                raise ZeroDivisionError
        async with turns.turn(2):
            pass
        with pytest.raises(LibraError, match="request 4 waited"):
            async with turns.turn(4):
                pass

    asyncio.run(asyncio.wait_for(scene(), 10))


def test_a_request_waits_as_long_as_those_before_it_are_carried_out() -> None:
    async def scene() -> None:
        turns = Turns(missing_s=0.05)

        async def one(number: int) -> None:
            async with turns.turn(number):
                await asyncio.sleep(0.1)

        await asyncio.gather(*(one(number) for number in (1, 2, 3)))

    asyncio.run(asyncio.wait_for(scene(), 10))


def test_answers_are_kept_until_newer_ones_push_them_out() -> None:
    async def answer(number: int) -> Outcome:
        return {"number": number}

    async def wrong() -> Outcome:
        raise StateError("the disk is full")

    async def scene() -> None:
        futures = Futures(most=2)
        first = futures.begin(answer(1))
        assert await futures.outcome(first) == await futures.outcome(first) == {"number": 1}
        slow = futures.begin(asyncio.sleep(3600, {}))
        assert await futures.outcome(slow, 0.01) is None
        failed = futures.begin(wrong())
        told = await futures.outcome(failed)
        assert told == {"error": "the disk is full", "category": "user"}
        for number in range(3):
            await futures.outcome(futures.begin(answer(number)))
        with pytest.raises(KeyError):
            await futures.outcome(first)
        futures.cancel(slow)
        assert "cancelled" in str(await futures.outcome(slow))
        await futures.close()

    asyncio.run(asyncio.wait_for(scene(), 10))


def test_large_answers_push_out_older_ones_of_which_there_are_few() -> None:
    async def answer(size: int) -> Outcome:
        return b"x" * size

    async def scene() -> None:
        futures = Futures(most_bytes=100)
        names = []
        for size in (60, 30, 60, 10):
            names.append(futures.begin(answer(size)))
            await futures.outcome(names[-1])
        futures.begin(asyncio.sleep(0, {}))
        assert [len(await futures.outcome(one) or b"") for one in names[1:]] == [30, 60, 10]
        with pytest.raises(KeyError):
            await futures.outcome(names[0])
        await futures.close()

    asyncio.run(asyncio.wait_for(scene(), 10))


def test_saved_adapters_are_found_by_their_paths_and_no_others(tmp_path: Path) -> None:
    saved = SavedAdapters(tmp_path)
    shape = AdapterShape.of({"rank": 8, "train_mlp": False})
    saved.save("s:train:0", "weights", "a", config=shape.config("m"), tensors=b"one")
    path = saved.save("s:train:0", "weights", "a", config=shape.config("m"), tensors=b"two")
    assert path == "tinker://s:train:0/weights/a"
    assert SavedAdapters(tmp_path).load(path)[1] == b"two"
    assert saved.shape(path) == shape
    assert [one.name for one in (tmp_path / "s:train:0/weights").iterdir()] == ["a"]
    with pytest.raises(StateError, match="nothing is saved"):
        saved.load("tinker://s:train:0/weights/b")
    for wrong in ("tinker://../weights/a", "tinker://s/..//a", "/etc/passwd", "tinker://s/weights"):
        with pytest.raises(LibraError, match="no path"):
            saved.load(wrong)


def test_an_adapter_that_does_not_fit_on_the_disk_leaves_no_part_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, data: bytes) -> int:
        with path.open("wb") as file:
            file.write(data[:1])
        raise OSError(errno.ENOSPC, "No space left on device")

    saved = SavedAdapters(tmp_path)
    saved.save("s:train:0", "weights", "a", config="{}", tensors=b"one")
    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(StateError, match="No space left"):
        saved.save("s:train:0", "weights", "a", config="{}", tensors=b"two")
    assert [one.name for one in (tmp_path / "s:train:0/weights").iterdir()] == ["a"]
    assert saved.load("tinker://s:train:0/weights/a")[1] == b"one"


class SlowServers:
    """Adapters by name, each of which is there once ``ready`` is set."""

    def __init__(self) -> None:
        self.ready = asyncio.Event()
        self.held: dict[str, bytes] = {}

    async def add_adapter(self, name: str, config: str, tensors: bytes) -> None:
        await self.ready.wait()
        self.held[name] = tensors

    async def remove_adapter(self, name: str) -> None:
        del self.held[name]


def test_an_adapter_saved_anew_while_servers_load_it_is_loaded_again(tmp_path: Path) -> None:
    saved, servers = SavedAdapters(tmp_path), SlowServers()
    loaded = LoadedAdapters(servers, saved)

    def save(tensors: bytes) -> str:
        return saved.save("s:train:0", "sampler_weights", "a", config="{}", tensors=tensors)

    async def sampled(path: str) -> bytes:
        async with loaded.used(path) as name:
            assert name is not None
            return servers.held[name]

    async def scene() -> None:
        path = save(b"old")
        first = asyncio.create_task(sampled(path))
        await asyncio.sleep(0)
        save(b"new")
        await loaded.drop(path)  # waits for nobody
        servers.ready.set()
        assert await first == b"new"
        assert await sampled(path) == b"new"
        assert list(servers.held.values()) == [b"new"]

    asyncio.run(asyncio.wait_for(scene(), 10))


@pytest.mark.parametrize(
    ("stop", "strings", "tokens"),
    [
        (None, [], [2]),
        ([], [], []),
        ([5, 6], [], [5, 6]),
        ("User:", ["User:"], [2]),
        (["User:", "}"], ["User:", "}"], [2]),
    ],
)
def test_a_sample_stops_at_what_its_client_says(
    stop: object, strings: list[str], tokens: list[int]
) -> None:
    order = sample_order(stop).order
    assert (order["stop"], order["stop_token_ids"]) == (strings, tokens)


@pytest.mark.parametrize("stop", ["", ["a", ""], ["a", 5]])
def test_a_stop_that_is_none_is_refused(stop: object) -> None:
    with pytest.raises(NotServed, match="stop takes strings"):
        sample_order(stop)


def test_a_sample_of_no_tokens_is_refused_and_not_one_of_all_that_there_is_room_for() -> None:
    assert [sample_order(None, most).order["max_tokens"] for most in (None, 3, 99)] == [8, 3, 8]
    for most in (0, -1):
        with pytest.raises(NotServed, match=f"max_tokens is {most}"):
            sample_order(None, most)


def sample_order(stop: object, max_tokens: int | None = None) -> SampleOrder:
    asked = {"stop": stop, "max_tokens": max_tokens}
    told = {"prompt": {"chunks": [{"tokens": [1]}]}, "sampling_params": asked}
    return SampleOrder.of(told, max_len=9, stop_token_ids=[2])
