"""Tokens that are only counted: arrays with a length and no elements."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from typing import cast

from libra_cli.core.types import Seconds, Trajectory, TrajectoryId


class FakeTokens:
    """Stands for an array of tokens of which only the number matters."""

    __slots__ = ("itemsize", "number")

    def __init__(self, number: int = 0, itemsize: int = 1) -> None:
        self.number = number
        self.itemsize = itemsize

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, part: slice) -> FakeTokens:
        return FakeTokens(self.number)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FakeTokens) and other.number == self.number

    def __hash__(self) -> int:
        return hash(self.number)

    def __iter__(self) -> Iterator[int]:
        return iter(())

    def extend(self, more: FakeTokens) -> None:
        self.number += more.number

    def tobytes(self) -> bytes:
        """Return no bytes: nothing reads simulated tokens."""
        return b""

    def frombytes(self, data: bytes) -> None:
        self.number += len(data) // self.itemsize

    def tolist(self) -> list[int]:
        return []


def counted_trajectory(trajectory: TrajectoryId, now: Seconds) -> Trajectory:
    """Return a trajectory whose tokens are only counted."""
    return Trajectory(
        trajectory,
        token_ids=ids(0),
        logprobs=cast("array[float]", FakeTokens(itemsize=4)),
        loss_mask=cast("array[int]", FakeTokens()),
        started_at=now,
    )


ids = cast("Callable[[int], array[int]]", FakeTokens)
logprobs = cast("Callable[[int], array[float]]", FakeTokens)
