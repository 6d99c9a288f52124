"""The environment ``pointer-chase``, where the policy follows keys through a store.

``start ab hops 3`` asks to look up ab, then the key that it returns, and so on, 3 times. The tool
``get(key)`` returns the next key. It fails from time to time (``busy, retry``) and must then be
called again. Every well-formed key leads somewhere, so a wrong one shows in the answer only. The
score is 1 if the answer is the key after the last hop, else 0. Hop counts are heavy-tailed, so
trajectories are too, and failures lengthen them.

The store is a pure function of the task, and a failure one of the task, the episode's seed and the
number of calls so far, so equal tasks and seeds play exactly the same game.

A workload that drifts: ``drift`` scales the hop counts by a factor that changes with the tasks'
numbers. The factors are spread evenly over the first ``drift_tasks`` tasks, with straight lines
between them; the last one holds from there on. ``drift: [1, 4, 1]`` over 1,000 tasks begins as
usual, has four times the hops at task 500, and is as usual again from task 1,000 on; in a run,
group n plays task n. A scaled count is rounded up or down at random, so that the mean follows the
factor, and is kept between 1 and ``MOST_HOPS`` (more, if ``hop_weights`` is longer), so a big
factor raises the mean by less.

Rewards by turn: with ``turn_rewards: true`` each hop that is found, and the answer, earn an equal
part of 1, at the turn that they are made; a key that is not the next one earns nothing.

Tools that take time: each call waits ``latency_s`` seconds, one number or several, which then
change along the tasks as the factors do. Waiting for a tool needs no cores, so this makes rollout
slower on a small machine without making training slower.

Tools with a heavy tail: ``latency_s: {median: 0.05, most: 2.0}`` draws the seconds of each call
from a log-normal distribution with that median. One call in a hundred would take ``most`` or
longer, and takes ``most``. A draw is a function of the task, the episode's seed and the number of
the call.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from statistics import NormalDist
from typing import Any, TypeGuard

from libra_cli.envs.protocol import (
    Message,
    StepResult,
    Task,
    ToolCall,
    ToolFailed,
    ToolSchema,
    function,
)

LETTERS = "abcdefghijklmnopqrstuvwxyz"
KEY_LENGTH = 2
BUSY = "busy, retry"
HOP_WEIGHTS = (0.28, 0.2, 0.15, 0.12, 0.09, 0.07, 0.05, 0.04)
"""The relative frequencies of 1, 2, 3, ... hops."""
FAILURE_RATE = 0.15
MOST_HOPS = 8
"""The most hops of a drifted task: the built model has been trained on no more."""


class PointerChase:
    """One episode. ``failure_rate`` is the share of calls that must be repeated.

    Raises:
        ValueError: an argument is out of its range; the message names it.
    """

    tools: Sequence[ToolSchema] = (
        function("get", "Return the key that is stored under a key.", {"key": {"type": "string"}}),
    )

    def __init__(
        self,
        *,
        failure_rate: float = FAILURE_RATE,
        hop_weights: Sequence[float] = HOP_WEIGHTS,
        drift: Sequence[float] = (),
        drift_tasks: int = 0,
        latency_s: float | Sequence[float] | Mapping[str, float] = 0.0,
        turn_rewards: bool = False,
    ) -> None:
        if not 0.0 <= failure_rate < 1.0:
            raise ValueError(f"failure_rate must be in [0, 1), got {failure_rate}")
        if not hop_weights or min(hop_weights) < 0 or sum(hop_weights) <= 0:
            raise ValueError(f"hop_weights must be positive numbers, got {list(hop_weights)}")
        self._tail: LatencyTail | None = None
        waits: tuple[float, ...] = (0.0,)
        if isinstance(latency_s, Mapping):
            self._tail = _log_normal(latency_s)
        else:
            waits = _seconds(latency_s)
        _check_drift(drift, drift_tasks, moving=len(drift) > 0 or len(waits) > 1)
        self._latency_s = waits
        self._failure_rate = failure_rate
        self._hop_weights = tuple(hop_weights)
        self._drift = tuple(drift)
        self._drift_tasks = drift_tasks
        self._store = Store("")
        self._seed = 0
        self._calls = 0
        self._wait_s = 0.0
        self._answer = ""
        self._turn_rewards = turn_rewards
        #: The keys that are to be looked up yet, in order; and what each is worth.
        self._path: list[str] = []
        self._part = 0.0

    def task(self, index: int, seed: int) -> Task:
        """Make task ``index`` of the stream that ``seed`` names."""
        rng = random.Random(f"pointer-chase {seed} {index}")
        hops = rng.choices(range(1, len(self._hop_weights) + 1), self._hop_weights)[0]
        start = random_key(rng)
        if self._drift:
            hops = self._drifted(hops, index, rng)
        task = {"start": start, "hops": hops, "salt": f"{seed}.{index}"}
        latency_s = factor_at(self._latency_s, index / max(1, self._drift_tasks))
        return {**task, "latency_s": latency_s} if latency_s else task

    def _drifted(self, hops: int, index: int, rng: random.Random) -> int:
        scaled = hops * factor_at(self._drift, index / self._drift_tasks)
        most = max(MOST_HOPS, len(self._hop_weights))
        return min(most, max(1, math.floor(scaled + rng.random())))

    def reset(self, task: Task, seed: int) -> list[Message]:
        """Begin with a prompt that names the first key and the number of hops."""
        start, hops = str(task["start"]), int(task["hops"])
        self._store = Store(str(task["salt"]))
        self._seed, self._calls = seed, 0
        self._wait_s = float(task.get("latency_s", 0.0))
        self._answer = self._store.follow(start, hops)
        self._path = [self._store.follow(start, hop) for hop in range(hops)]
        self._part = 1.0 / (hops + 1)
        return [{"role": "user", "content": prompt(start, hops)}]

    def step(self, call: ToolCall) -> str | StepResult:
        """Look a key up; ToolFailed if the store is busy or there is no such key."""
        found = self.look_up(call)
        if not self._turn_rewards:
            return found
        is_next = self._path[:1] == [call.arguments["key"]]
        del self._path[:is_next]
        return StepResult(found, self._part if is_next else 0.0)

    def look_up(self, call: ToolCall) -> str:
        """Return what is stored under a key; ToolFailed as with ``step``."""
        if call.name != "get":
            raise ToolFailed(f"no tool {call.name!r}")
        self._calls += 1
        time.sleep(self.wait_s(self._calls))
        if _unit("busy", self._store.salt, self._seed, self._calls) < self._failure_rate:
            raise ToolFailed(BUSY)
        key = call.arguments.get("key")
        if not is_key(key):
            raise ToolFailed("no such key")
        return self._store.get(key)

    def wait_s(self, call: int) -> float:
        """Seconds that call number ``call`` of the episode takes, counted from 1."""
        if self._tail is None:
            return self._wait_s
        share = _unit("latency", self._store.salt, self._seed, call)
        return self._tail.seconds(share)

    def score(self, answer: str) -> float:
        """Return 1 for exactly the key after the last hop, or its part of 1; else 0."""
        right = float(answer.strip() == self._answer)
        return right * self._part if self._turn_rewards else right


@dataclass(frozen=True, slots=True)
class LatencyTail:
    """Log-normal seconds, cut off at their 99th percentile."""

    median: float
    most: float

    def seconds(self, share: float) -> float:
        """Return the seconds below which ``share`` of all calls are, for a share in [0, 1)."""
        normal = NormalDist()
        spread = math.log(self.most / self.median) / normal.inv_cdf(0.99)
        low = max(share, 2**-64)
        return min(self.most, self.median * math.exp(spread * normal.inv_cdf(low)))


def _seconds(latency_s: float | Sequence[float]) -> tuple[float, ...]:
    waits = (latency_s,) if isinstance(latency_s, (int, float)) else tuple(latency_s)
    if not waits or min(waits) < 0:
        raise ValueError(f"latency_s must be 0 or more seconds, got {latency_s}")
    return waits


def _log_normal(latency_s: Mapping[str, float]) -> LatencyTail:
    if set(latency_s) != {"median", "most"} or not 0 < latency_s["median"] < latency_s["most"]:
        raise ValueError(
            f"latency_s must be seconds, or {{median: 0.05, most: 2.0}} with 0 < median < most, got"
            f" {dict(latency_s)}"
        )
    return LatencyTail(latency_s["median"], latency_s["most"])


@dataclass(frozen=True, slots=True)
class Store:
    """A map from every key to a key; another ``salt`` gives another store."""

    salt: str

    def get(self, key: str) -> str:
        """Return the key that is stored under ``key``."""
        rng = random.Random(f"store {self.salt} {key}")
        return random_key(rng)

    def follow(self, key: str, hops: int) -> str:
        for _ in range(hops):
            key = self.get(key)
        return key


def factor_at(factors: Sequence[float], share: float) -> float:
    """Interpolate linearly between factors spread evenly over [0, 1]; the last holds beyond 1."""
    place = min(1.0, share) * (len(factors) - 1)
    left = min(int(place), len(factors) - 1)
    right = min(left + 1, len(factors) - 1)
    return factors[left] + (factors[right] - factors[left]) * (place - left)


def _check_drift(factors: Sequence[float], tasks: int, *, moving: bool) -> None:
    if any(not math.isfinite(factor) or factor <= 0 for factor in factors):
        raise ValueError(f"drift must be positive numbers, got {list(factors)}")
    if moving != (tasks > 0):
        raise ValueError(
            f"drift and drift_tasks must be given together, as in drift: [1, 4, 1] and"
            f" drift_tasks: 1000; got {list(factors)} and {tasks}"
        )


def prompt(start: str, hops: int) -> str:
    return f"start {start} hops {hops}"


def random_key(rng: random.Random) -> str:
    return "".join(rng.choice(LETTERS) for _ in range(KEY_LENGTH))


def is_key(value: object) -> TypeGuard[str]:
    """Tell whether a value is a well-formed key, which every store has."""
    return isinstance(value, str) and len(value) == KEY_LENGTH and set(value) <= set(LETTERS)


def demonstration(
    environment: PointerChase, task: Task, seed: int, *, rng: random.Random, slips: float
) -> Iterator[tuple[str, str]]:
    """Play one episode as an expert that makes mistakes, and yield each turn's text and reply.

    It keeps count and repeats a call when the tool is busy, but with probability ``slips`` it swaps
    the letters of the key that it says. The last turn is the answer, with an empty reply.
    """
    environment.reset(task, seed)
    key, left = str(task["start"]), int(task["hops"])
    while left:
        said = key[::-1] if rng.random() < slips else key
        try:
            key = environment.look_up(ToolCall("get", {"key": said}))
        except ToolFailed as failure:
            yield call_text(said), str(failure)
        else:
            left -= 1
            yield call_text(said), key
    yield (key[::-1] if rng.random() < slips else key), ""


def call_text(key: str) -> str:
    """Return the text of a tool call as a model writes it."""
    return f"{CALL_HEAD}{key}{CALL_TAIL}"


CALL_HEAD = '<tool_call>\n{"name": "get", "arguments": {"key": "'
CALL_TAIL = '"}}\n</tool_call>'


def _unit(*parts: Any) -> float:
    """Hash the parts to a number in [0, 1)."""
    digest = blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64
