"""Follow keys through a store: ``start ab hops 3`` means look up ab, then what it gives, 3 in all.

The tool ``get(key)`` returns the next key. It fails from time to time (``busy, retry``) and must
then be asked again; every well-formed key leads somewhere, so a wrong one is not noticed until the
answer is. The score is 1 if the answer is the key after the last hop, else 0. Hop counts are
heavy-tailed, so trajectories are, and failures lengthen them.

The store is a pure function of the task, and failures one of the task, the episode's seed and the
number of calls so far, so the members of a group play exactly the same game.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, TypeGuard

from libra_cli.envs.protocol import Message, Task, ToolCall, ToolFailed, ToolSchema, function

LETTERS = "abcdefghijklmnopqrstuvwxyz"
KEY_LENGTH = 2
BUSY = "busy, retry"
HOP_WEIGHTS = (0.28, 0.2, 0.15, 0.12, 0.09, 0.07, 0.05, 0.04)
"""How often 1, 2, 3, ... hops are asked for."""
FAILURE_RATE = 0.15


class PointerChase:
    """One episode. ``failure_rate`` is the share of calls that must be repeated."""

    tools: Sequence[ToolSchema] = (
        function("get", "Return the key that is stored under a key.", {"key": {"type": "string"}}),
    )

    def __init__(
        self,
        *,
        failure_rate: float = FAILURE_RATE,
        hop_weights: Sequence[float] = HOP_WEIGHTS,
    ) -> None:
        if not 0.0 <= failure_rate < 1.0:
            raise ValueError(f"failure_rate must be in [0, 1), got {failure_rate}")
        if not hop_weights or min(hop_weights) < 0 or sum(hop_weights) <= 0:
            raise ValueError(f"hop_weights must be positive numbers, got {list(hop_weights)}")
        self._failure_rate = failure_rate
        self._hop_weights = tuple(hop_weights)
        self._store = Store("")
        self._seed = 0
        self._calls = 0
        self._answer = ""

    def task(self, index: int, seed: int) -> Task:
        """Task ``index`` of the stream that ``seed`` names."""
        rng = random.Random(f"pointer-chase {seed} {index}")
        hops = rng.choices(range(1, len(self._hop_weights) + 1), self._hop_weights)[0]
        return {"start": random_key(rng), "hops": hops, "salt": f"{seed}.{index}"}

    def reset(self, task: Task, seed: int) -> list[Message]:
        """Begin; the prompt names the first key and the number of hops."""
        start, hops = str(task["start"]), int(task["hops"])
        self._store = Store(str(task["salt"]))
        self._seed, self._calls = seed, 0
        self._answer = self._store.follow(start, hops)
        return [{"role": "user", "content": prompt(start, hops)}]

    def step(self, call: ToolCall) -> str:
        """Look one key up."""
        if call.name != "get":
            raise ToolFailed(f"no tool {call.name!r}")
        self._calls += 1
        if _unit("busy", self._store.salt, self._seed, self._calls) < self._failure_rate:
            raise ToolFailed(BUSY)
        key = call.arguments.get("key")
        if not is_key(key):
            raise ToolFailed("no such key")
        return self._store.get(key)

    def score(self, answer: str) -> float:
        """1 for exactly the key after the last hop."""
        return float(answer.strip() == self._answer)


@dataclass(frozen=True, slots=True)
class Store:
    """Every key leads to a key; ``salt`` makes it another store."""

    salt: str

    def get(self, key: str) -> str:
        """The key stored under ``key``."""
        rng = random.Random(f"store {self.salt} {key}")
        return random_key(rng)

    def follow(self, key: str, hops: int) -> str:
        """The key after that many hops."""
        for _ in range(hops):
            key = self.get(key)
        return key


def prompt(start: str, hops: int) -> str:
    """What the user asks."""
    return f"start {start} hops {hops}"


def random_key(rng: random.Random) -> str:
    """Any key."""
    return "".join(rng.choice(LETTERS) for _ in range(KEY_LENGTH))


def is_key(value: object) -> TypeGuard[str]:
    """Whether a store has it."""
    return isinstance(value, str) and len(value) == KEY_LENGTH and set(value) <= set(LETTERS)


def demonstration(
    environment: PointerChase, task: Task, seed: int, *, rng: random.Random, slips: float
) -> Iterator[tuple[str, str]]:
    """Play one episode as a distracted expert: ``(what it says, what it then reads)`` per turn.

    It keeps count and asks again when the tool is busy, but with probability ``slips`` it swaps the
    letters of the key it says, and does not notice. The last pair reads nothing.
    """
    environment.reset(task, seed)
    key, left = str(task["start"]), int(task["hops"])
    while left:
        said = key[::-1] if rng.random() < slips else key
        try:
            key = environment.step(ToolCall("get", {"key": said}))
        except ToolFailed as failure:
            yield call_text(said), str(failure)
        else:
            left -= 1
            yield call_text(said), key
    yield (key[::-1] if rng.random() < slips else key), ""


def call_text(key: str) -> str:
    """A tool call as a model writes it."""
    return f"{CALL_HEAD}{key}{CALL_TAIL}"


CALL_HEAD = '<tool_call>\n{"name": "get", "arguments": {"key": "'
CALL_TAIL = '"}}\n</tool_call>'


def _unit(*parts: Any) -> float:
    """A number in [0, 1) that depends on the parts and on nothing else."""
    digest = blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64
