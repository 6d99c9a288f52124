"""How fast any number of GPUs can play a step: one dynamic program for every budget.

The trajectories of a step are sorted by generated tokens and cut into at most ``groups`` parts of
equal number. With ``dp[g][i]`` the least time in which ``g`` GPUs play the ``i`` shortest parts::

    dp[g][i] = min over t, k, j of max(dp[g - t k][j], cost(t, k, parts j to i))

a transition adds a bucket of ``k`` equal servers with ``t`` GPUs each for the parts ``j`` to ``i``
(``k = 1`` alone is the published recurrence; with 1,000 GPUs it would need 1,000 parts). ``k`` is
1 to 8, and from there four sizes an octave. Many layouts are as good as equal, and no scheduler
knows on which side of a boundary every trajectory belongs, so of those within ``tolerance`` of the
least time ``buckets`` gives a simple one: neighbours are merged as long as that holds.

The time of a bucket is per step and in steady state: ``in_flight`` steps' trajectories are being
played, so a server is kept full, and the longest of them may take as many steps (beyond that it
would be too stale to train). With the sums over its trajectories of generated tokens G, of KV
tokens read R (generated x mean context) and of prompt and tool tokens computed U, and the largest
share of them on one server s::

    work = b G + c R + p1 U + p2 pairs                 the same in whatever batches it is done
    path = a x own steps + own tool time               of one trajectory: all of it but its work
    held = max(sum of paths / max_num_seqs, sum of path x mean context / KV capacity, a U / chunk)
    live = min(in_flight, servers x min(max_num_seqs, KV capacity / mean context) / trajectories)
    cost = max(s (work + live x p1 E), own work / in_flight) + max(s held, longest path / in_flight)

``held`` is Little's law: as many paths go side by side as there are seats and room in the KV cache,
and a trajectory holds both from its first token to its last, tools included, for so it is admitted.
``live`` is how many steps' trajectories that makes; new weights empty the cache once a step, and
the context each has by then, E in all, is computed again (not where each batch waits for the one
before). So there is (i) a cap on concurrency, (ii) a fixed cost of a step, (iii) weights read once
a server and step (both in ``a``), (iv) communication that grows with the degree (in ``a``, ``b``
and ``p1`` as measured). A server whose KV cache is smaller than the longest context costs infinity.

Guarantee: the least ``dp`` value over all ways to cut the parts into buckets (equal to exhaustive
search), and ``seconds`` never grows with the budget. Limit: ``held`` is a lower bound reached when
the seats stay full, list scheduling needs at most twice as long; where tools outlast the work the
sum of both is at most twice the truth. A trajectory is taken to reach the bucket of its length
without a detour, so mixes of shapes look better than they are (``planner`` asks more of them).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np

from libra_cli.core.costs.profile import NothingFits
from libra_cli.core.costs.server import ServerCost
from libra_cli.core.costs.workload import TrajectorySample, Workload
from libra_cli.core.explanation import Binding, Constraint
from libra_cli.core.types import Plan, Seconds, Tokens

DEFAULT_SEATS = 128
_Filled: TypeAlias = tuple[int, int, Mapping[str, float]]
"""Servers of a bucket, seats of each, and what its trajectories hold."""
_WAITS = {
    Constraint.SEATS: "seats (max_num_seqs)",
    Constraint.KV_CACHE: "room in the KV cache",
    Constraint.PROMPTS: "prompts, a chunk a step",
    Constraint.LONGEST_TRAJECTORY: "the longest trajectory",
    Constraint.TOKENS: "tokens and KV reads",
}


@dataclass(frozen=True, slots=True)
class PlannedBucket:
    """Equal servers, and the trajectories meant for them.

    ``up_to_tokens`` is the generated tokens of the longest of these.
    """

    tensor_parallel: int
    servers: int
    up_to_tokens: Tokens
    max_num_seqs: int

    @property
    def gpus(self) -> int:
        """Of all its servers."""
        return self.tensor_parallel * self.servers

    def __str__(self) -> str:
        return f"{self.servers} x TP {self.tensor_parallel} up to {self.up_to_tokens:,} tokens"


def planned_buckets(plan: Plan) -> tuple[PlannedBucket, ...]:
    """The servers of a plan by bucket, from short trajectories to long ones."""
    counts = Counter(bucket for _, bucket in plan.servers)
    ordered = sorted(counts.items(), key=lambda item: (item[0].up_to_tokens, item[0].name))
    return tuple(
        PlannedBucket(bucket.tensor_parallel, number, bucket.up_to_tokens, bucket.max_num_seqs)
        for bucket, number in ordered
    )


@dataclass(frozen=True, slots=True)
class _Parts:
    """Per part of the sorted trajectories; float arrays of length n."""

    count: Any
    generated: Any
    read: Any
    prefill: Any
    pairs: Any
    longest: Any
    context: Any
    own_work: Mapping[int, Any]
    own_path: Mapping[int, Any]
    paths: Mapping[int, Any]
    room: Mapping[int, Any]
    again: Any
    held: Any


class RolloutTable:
    """The table of one workload, for every budget up to ``gpus``.

    Raises NothingFits if the longest trajectory fits no server, or no server the budget.
    """

    def __init__(
        self,
        servers: Mapping[int, ServerCost],
        workload: Workload,
        gpus: int,
        *,
        max_num_seqs: int = DEFAULT_SEATS,
        groups: int = 64,
    ) -> None:
        _check_room(servers, workload, gpus)
        self.workload = workload
        self.gpus = gpus
        self._servers = dict(sorted(servers.items()))
        self._seats = max_num_seqs
        self._parts = _cut(self._servers, workload, groups)
        self._terms = {degree: self._matrices(cost) for degree, cost in self._servers.items()}
        self._moves = _transitions(self._servers, gpus)
        self._matrix = lru_cache(maxsize=256)(self._cost)
        self._table = self._solve()

    @property
    def degrees(self) -> tuple[int, ...]:
        """Shapes there are."""
        return tuple(self._servers)

    def seconds(self, gpus: int) -> Seconds:
        """Of a step on at most this many GPUs; infinity where nothing fits on them."""
        return float(self._table[min(gpus, self.gpus), -1])

    def buckets(self, gpus: int, tolerance: float = 0.0) -> tuple[PlannedBucket, ...]:
        """Short to long, the layout that takes ``seconds(gpus)``; empty where nothing fits.

        With a tolerance a simpler one that takes at most ``(1 + tolerance)`` times as long.
        """
        buckets = self._trace(min(gpus, self.gpus))
        limit = self.seconds(gpus) * (1 + tolerance)
        while tolerance and len(buckets) > 1:
            simpler = min(self._merged(buckets), key=self.buckets_s)
            if self.buckets_s(simpler) > limit:
                break
            buckets = self.boundaries(simpler)
        return buckets

    def _trace(self, left: int) -> tuple[PlannedBucket, ...]:
        found: list[PlannedBucket] = []
        end = len(self._parts.count)
        while end > 0 and np.isfinite(self._table[left, end]):
            while left and self._table[left - 1, end] == self._table[left, end]:
                left -= 1
            degree, servers, start = self._last_bucket(left, end)
            longest = int(self._parts.longest[end - 1])
            found.append(PlannedBucket(degree, servers, longest, self._seats))
            left, end = left - degree * servers, start
        return tuple(reversed(found))

    def _merged(self, buckets: tuple[PlannedBucket, ...]) -> Iterator[tuple[PlannedBucket, ...]]:
        """Every layout with two neighbours made one, of any shape."""
        for index, (left, right) in enumerate(pairwise(buckets)):
            for degree in self._servers:
                servers = (left.gpus + right.gpus) // degree
                if servers:
                    one = replace(right, tensor_parallel=degree, servers=servers)
                    yield (*buckets[:index], one, *buckets[index + 2 :])

    def buckets_s(self, buckets: tuple[PlannedBucket, ...]) -> Seconds:
        """Seconds of a step on these servers, with the best boundaries for this workload."""
        return float(self._prefixes(buckets)[-1][-1])

    def equal_s(self, degree: int, servers: int) -> Seconds:
        """Seconds of a step on so many servers of one shape."""
        return float(self._cost(degree, servers, len(self._parts.count))[0])

    def boundaries(self, buckets: tuple[PlannedBucket, ...]) -> tuple[PlannedBucket, ...]:
        """The same servers with the best ``up_to_tokens`` for this workload."""
        prefixes, end = self._prefixes(buckets), len(self._parts.count)
        placed: list[PlannedBucket] = []
        for index in range(len(buckets) - 1, -1, -1):
            bucket = buckets[index]
            longest = int(self._parts.longest[max(end - 1, 0)])
            placed.append(replace(bucket, up_to_tokens=longest))
            if prefixes[index + 1][end] != prefixes[index][end]:
                options = self._options(prefixes[index], bucket)[:, end]
                end = int(np.argmin(options))
        return tuple(reversed(placed))

    def binding(self, buckets: tuple[PlannedBucket, ...]) -> Binding:
        """What the slowest of these buckets waits for."""
        slowest, found = -1.0, Binding(Constraint.KV_CACHE, "no server holds the trajectories")
        for bucket, start, end in self._shares(buckets):
            degree, servers, seats = bucket.tensor_parallel, bucket.servers, bucket.max_num_seqs
            cost = float(self._cost(degree, servers, end, seats)[start])
            if cost > slowest:
                slowest, found = cost, self._binding(bucket, start, end)
        return found

    def saturated_step_s(
        self, buckets: tuple[PlannedBucket, ...], in_play_s: Seconds, beside: float
    ) -> Seconds:
        """Seconds of a step if every place on the servers were taken, from a step's that were not.

        A step's trajectories were in play for ``in_play_s``, summed over them, with ``beside`` at a
        time. Each takes its path and the work of all on its server, which tells the factor between
        measured and predicted time; with it the same follows for full servers, and by Little's law
        the time of a step.
        """
        filled = list(self._filled(buckets))
        places = min(
            sum(servers * min(seats, terms["fitting"]) for servers, seats, terms in filled),
            self.workload.in_flight * self.workload.trajectories,
        )
        slower = in_play_s / _in_play_s(filled, min(beside, places))
        return slower * _in_play_s(filled, places) / places

    def _shares(
        self, buckets: tuple[PlannedBucket, ...]
    ) -> Iterator[tuple[PlannedBucket, int, int]]:
        """Those that get any trajectories, with the first of their parts and the one after."""
        start = 0
        for bucket in self.boundaries(buckets):
            end = int(np.searchsorted(self._parts.longest, bucket.up_to_tokens, side="right"))
            if end > start:
                yield bucket, start, end
                start = end

    def _filled(self, buckets: tuple[PlannedBucket, ...]) -> Iterator[_Filled]:
        for bucket, start, end in self._shares(buckets):
            yield bucket.servers, bucket.max_num_seqs, self._held(bucket, start, end)

    def _held(self, bucket: PlannedBucket, start: int, end: int) -> Mapping[str, float]:
        """What these parts hold, on servers of this shape."""
        return {name: float(m[start, end]) for name, m in self._terms[bucket.tensor_parallel]}

    def _binding(self, bucket: PlannedBucket, start: int, end: int) -> Binding:
        terms = self._held(bucket, start, end)
        share = float(_share(np.array(terms["count"]), bucket.servers))
        in_flight, seats = self.workload.in_flight, terms["seats"] / bucket.max_num_seqs
        parts = {
            Constraint.SEATS: share * seats,
            Constraint.KV_CACHE: share * terms["kv"],
            Constraint.PROMPTS: share * terms["chunks"],
            Constraint.LONGEST_TRAJECTORY: terms["own_path"] / in_flight,
        }
        waits = max(parts, key=lambda name: parts[name])
        work = max(share * terms["work"], terms["own_work"] / in_flight)
        if work > parts[waits]:
            waits = Constraint.TOKENS
        where = f"rollout: {bucket.servers} x TP {bucket.tensor_parallel}"
        return Binding(waits, f"{where}: {_WAITS[waits]}")

    def _matrices(self, cost: ServerCost) -> tuple[tuple[str, Any], ...]:
        """What parts j to i hold, as matrices [j, i] over 0 to n; meaningless where i <= j."""
        parts = self._parts
        generated, read = _sums(parts.generated), _sums(parts.read)
        prefill, pairs = _sums(parts.prefill), _sums(parts.pairs)
        work = cost.sequence_s * generated + cost.kv_token_s * read
        work = work + cost.prefill_token_s * prefill + cost.prefill_pair_s * pairs
        count = np.maximum(_sums(parts.count), 1e-9)
        too_long = _maxima(parts.context) > cost.kv_tokens
        return (
            ("refused", too_long | np.tri(len(work), dtype=bool)),
            ("count", count),
            ("work", work),
            ("again", cost.prefill_token_s * _sums(parts.again)),
            ("fitting", cost.kv_tokens * count / np.maximum(_sums(parts.held), 1e-9)),
            ("seats", _sums(parts.paths[cost.tensor_parallel])),
            ("kv", _sums(parts.room[cost.tensor_parallel]) / cost.kv_tokens),
            ("chunks", cost.step_s * prefill / cost.chunk_tokens),
            ("own_work", _maxima(parts.own_work[cost.tensor_parallel])),
            ("own_path", _maxima(parts.own_path[cost.tensor_parallel])),
        )

    def _cost(self, degree: int, servers: int, end: int | None = None, seats: int = 0) -> Any:
        """Seconds of parts j to i on ``servers`` of this degree, [j, i]; of one i only, [j]."""
        seats = seats or self._seats
        terms, in_flight = dict(self._terms[degree]), self.workload.in_flight
        if end is not None:
            terms = {name: matrix[:, end] for name, matrix in terms.items()}
        share = _share(terms["count"], servers)
        held = np.maximum(np.maximum(terms["seats"] / seats, terms["kv"]), terms["chunks"])
        live = servers * np.minimum(seats, terms["fitting"]) / terms["count"]
        crossing = in_flight if self.workload.overlap > 1 else 0.0
        work = terms["work"] + np.minimum(crossing, live) * terms["again"]
        busy = np.maximum(share * work, terms["own_work"] / in_flight)
        seconds = busy + np.maximum(share * held, terms["own_path"] / in_flight)
        seconds[terms["refused"]] = np.inf
        return seconds

    def _solve(self) -> Any:
        size = len(self._parts.count) + 1
        costs = np.stack([self._cost(degree, servers) for degree, servers in self._moves])
        sizes = np.array([degree * servers for degree, servers in self._moves])
        table = np.full((self.gpus + 1, size), np.inf)
        table[:, 0] = 0.0
        room = np.empty_like(costs)
        for budget in range(1, self.gpus + 1):
            usable = int(np.searchsorted(sizes, budget, side="right"))
            table[budget] = table[budget - 1]
            if usable:
                before = table[budget - sizes[:usable]]
                worst = np.maximum(before[:, :, None], costs[:usable], out=room[:usable])
                np.minimum(table[budget], worst.min(axis=0).min(axis=0), out=table[budget])
        return table

    def _last_bucket(self, gpus: int, end: int) -> tuple[int, int, int]:
        """Degree, servers and first part of the last bucket of ``table[gpus, end]``."""
        best = (np.inf, 0, 0, 0)
        for degree, servers in self._moves:
            if degree * servers > gpus:
                break
            cost = self._cost(degree, servers, end)
            worst = np.maximum(self._table[gpus - degree * servers], cost)
            start = int(np.argmin(worst))
            if worst[start] < best[0]:
                best = (float(worst[start]), degree, servers, start)
        return best[1:]

    def _options(self, before: Any, bucket: PlannedBucket) -> Any:
        """[j, i]: the first j parts as before, the parts up to i on this bucket."""
        seats = bucket.max_num_seqs
        cost = self._matrix(bucket.tensor_parallel, bucket.servers, None, seats)
        return np.maximum(before[:, None], cost)

    def _prefixes(self, buckets: tuple[PlannedBucket, ...]) -> list[Any]:
        """Least time of the first parts on the first buckets; a bucket may stay empty."""
        prefixes = [np.full(len(self._parts.count) + 1, np.inf)]
        prefixes[0][0] = 0.0
        for bucket in buckets:
            if bucket.tensor_parallel not in self._servers:
                prefixes.append(prefixes[-1])
                continue
            options = self._options(prefixes[-1], bucket)
            prefixes.append(np.minimum(prefixes[-1], options.min(axis=0)))
        return prefixes


def _in_play_s(filled: Sequence[_Filled], playing: float) -> Seconds:
    """Seconds that a step's trajectories are in play, summed, with so many of them at a time."""
    paths = sum(terms["seats"] for _, _, terms in filled)
    total = paths
    for servers, _, terms in filled:
        here = playing * terms["seats"] / paths
        work = terms["work"] + here / terms["count"] * terms["again"]
        total += here / servers * work
    return total


def bucket_sizes(most: int) -> tuple[int, ...]:
    """Numbers of servers a bucket is tried with: 1 to 8, then four sizes an octave."""
    sizes = list(range(1, min(most, 8) + 1))
    step = 2
    while sizes and sizes[-1] + step <= most:
        sizes.append(sizes[-1] + step)
        if sizes[-1] == 8 * step:
            step *= 2
    return tuple(sizes)


def _transitions(servers: Mapping[int, ServerCost], gpus: int) -> list[tuple[int, int]]:
    """(degree, servers), the fewest GPUs first and then the fewest servers."""
    moves = [(degree, k) for degree in servers for k in bucket_sizes(gpus // degree)]
    return sorted(moves, key=lambda move: (move[0] * move[1], move[1]))


def _share(count: Any, servers: int) -> Any:
    """Largest share of ``count`` trajectories that one of ``servers`` gets."""
    return np.minimum(1.0, np.ceil(count / servers - 1e-9) / count)


def _sums(values: Any) -> Any:
    ends = np.concatenate(([0.0], np.cumsum(values)))
    return np.maximum(ends[None, :] - ends[:, None], 0.0)


def _maxima(values: Any) -> Any:
    """[j, i]: the largest of parts j to i, 0 where there is none."""
    size = len(values) + 1
    spread = np.zeros((size, size))
    spread[:-1, 1:] = np.where(np.tri(size - 1, dtype=bool).T, values[None, :], 0.0)
    return np.maximum.accumulate(spread, axis=1)


def _cut(servers: Mapping[int, ServerCost], workload: Workload, groups: int) -> _Parts:
    samples = sorted(workload.samples, key=lambda sample: (sample.generated, sample.context))
    number = min(groups, len(samples))
    starts: Any = np.arange(number) * len(samples) // number
    weight = workload.trajectories / len(samples)
    table = np.array([_row(sample, workload.prompt_hits) for sample in samples], dtype=float).T
    generated, read, prefill, pairs, context, tool_s, again = table

    works = {
        degree: cost.sequence_s * generated
        + cost.kv_token_s * read
        + cost.prefill_token_s * prefill
        + cost.prefill_pair_s * pairs
        for degree, cost in servers.items()
    }
    paths = {
        degree: cost.step_s * (generated + prefill / cost.chunk_tokens) + tool_s
        for degree, cost in servers.items()
    }

    def total(values: Any) -> Any:
        return np.add.reduceat(values, starts) * weight

    def most(values: Any) -> Any:
        return np.maximum.reduceat(values, starts)

    return _Parts(
        count=total(np.ones(len(samples))),
        generated=total(generated),
        read=total(read),
        prefill=total(prefill),
        pairs=total(pairs),
        longest=most(generated),
        context=most(context),
        own_work={degree: most(work) for degree, work in works.items()},
        own_path={degree: most(path) for degree, path in paths.items()},
        paths={degree: total(path) for degree, path in paths.items()},
        room={degree: total(path * read / generated) for degree, path in paths.items()},
        again=total(again),
        held=total(read / generated),
    )


def _row(sample: TrajectorySample, hits: float) -> tuple[float, ...]:
    """Generated, KV read, computed, pairs, context, tool seconds, computed again a step."""
    prompt = sample.prompt * (1 - hits)
    pairs = prompt * sample.prompt / 2 + sample.observed * sample.mean_context
    return (
        sample.generated,
        sample.generated * sample.mean_context,
        prompt + sample.observed,
        pairs,
        sample.context,
        sample.tool_s,
        prompt + (sample.generated + sample.observed) / 2,
    )


def _check_room(servers: Mapping[int, ServerCost], workload: Workload, gpus: int) -> None:
    if not servers:
        raise NothingFits("server memory", "no server of any shape holds the model's weights")
    longest = max(range(len(workload.samples)), key=lambda i: workload.samples[i].context)
    tokens = workload.samples[longest].context
    roomy = [degree for degree, cost in servers.items() if cost.kv_tokens >= tokens]
    if not roomy:
        most = max(servers.values(), key=lambda cost: cost.kv_tokens)
        raise NothingFits(
            "KV cache",
            f"trajectory {longest + 1} of {len(workload.samples)} has {tokens:,} tokens at its end "
            f"and fits no server: the largest holds {most.kv_tokens:,} (TP {most.tensor_parallel})",
            hint="lower model.max_len, or profile a larger tensor_parallel",
        )
    if min(roomy) > gpus:
        raise NothingFits(
            "GPUs",
            f"{gpus} GPUs are too few to serve: the smallest server that holds a trajectory of "
            f"{tokens:,} tokens has {min(roomy)} GPUs",
            hint=f"give at least {min(roomy)} GPUs to rollout",
        )
