"""How fast servers can play a step: equal ones in any number, or unlike ones with buckets.

Equal servers share a step's trajectories evenly, and take what ``costs.rollout`` says, worked out
for every number of them at once. Unlike servers, which a recipe may ask for, have a range of
lengths each. The trajectories of a step are sorted by generated tokens and cut into at most
``groups`` parts of equal number, and the boundaries are those with which the slowest bucket is
fastest; ``best[b][i]`` is the least time of the ``i`` shortest parts on the first ``b`` buckets::

    best[b][i] = min over j of max(best[b - 1][j], cost(bucket b, parts j to i))

The time of a bucket is per step and in steady state: what the staleness rule admits and training
does not hold (``train_s``, its seconds of a step) is being played. A server whose KV cache is
smaller than the longest context costs infinity.

Limit: a trajectory is taken to reach the bucket of its length without a detour, so unlike servers
look better than they are (``search`` prices that).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf
from typing import Any, TypeAlias

import numpy as np

from libra_cli.core.costs.law import ServerLaw
from libra_cli.core.costs.profile import NothingFits
from libra_cli.core.costs.ranges import SortedParts
from libra_cli.core.costs.rollout import EqualServers, RolloutLoad, RolloutTime
from libra_cli.core.explanation import Binding, Constraint
from libra_cli.core.scheduling.least_cost import PLAY_SHARE
from libra_cli.core.types import Plan, Seconds, Tokens
from libra_cli.core.workload import Workload

DEFAULT_SEATS = 128
_Loads: TypeAlias = tuple[EqualServers, RolloutLoad]
"""The servers of a bucket, and what its trajectories are for them."""
_WAITS = {
    Constraint.SEATS: "seats (max_num_seqs)",
    Constraint.KV_CACHE: "room in the KV cache",
    Constraint.PROMPTS: "prompts, a chunk a step",
    Constraint.LONGEST_TRAJECTORY: "the longest trajectory",
    Constraint.TOKENS: "tokens and KV reads",
    Constraint.STALENESS: "the trajectories that may be in flight (max_staleness)",
}


@dataclass(frozen=True, slots=True)
class PlannedBucket:
    """Equal servers, and the trajectories meant for them.

    ``up_to_tokens`` is the generated tokens of the longest of these. ``beside`` is what servers on
    the trainer's GPUs are worth beside them, in servers of the bucket (``idle_servers``).
    """

    tensor_parallel: int
    servers: int
    up_to_tokens: Tokens
    max_num_seqs: int
    beside: float = 0.0

    @property
    def gpus(self) -> int:
        """GPUs of all servers of the bucket."""
        return self.tensor_parallel * self.servers

    @property
    def number(self) -> float:
        """The number of servers, those included that others are worth."""
        return self.servers + self.beside

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


class RolloutTable:
    """The table of one workload, for equal servers on up to ``gpus``.

    ``play_share`` is the share of the KV caches that the scheduler lets trajectories in play fill.
    ``left_s`` says how long a step's training takes on the GPUs that do not serve, by their number
    from 0 on; empty: no time. Raises NothingFits if the longest trajectory fits no server, or no
    server the budget.
    """

    def __init__(
        self,
        servers: Mapping[int, ServerLaw],
        workload: Workload,
        gpus: int,
        *,
        max_num_seqs: int = DEFAULT_SEATS,
        groups: int = 64,
        play_share: float = PLAY_SHARE,
        left_s: Sequence[Seconds] = (),
    ) -> None:
        _check_room(servers, workload, gpus)
        self.workload = workload
        self.gpus = gpus
        self._servers = dict(sorted(servers.items()))
        self._seats = max_num_seqs
        self._play_share = play_share
        self._parts = SortedParts(workload, groups)
        self._loads = {degree: self._parts.load(cost) for degree, cost in self._servers.items()}
        self._refused = {
            degree: self._parts.too_long(cost) for degree, cost in self._servers.items()
        }
        self._matrix = lru_cache(maxsize=256)(self._cost)
        self._left_s: Any = np.array(left_s or [0.0] * (gpus + 1))
        self._equal = {degree: self._equal_s(degree) for degree in self._servers}

    @property
    def degrees(self) -> tuple[int, ...]:
        """The tensor-parallel degrees that have prices, ascending."""
        return tuple(self._servers)

    def buckets_s(self, buckets: tuple[PlannedBucket, ...], train_s: Seconds = 0.0) -> Seconds:
        """Seconds of a step on these servers, with the best boundaries for this workload."""
        if len(buckets) == 1 and buckets[0].tensor_parallel in self._servers:
            return self._alone_s(buckets[0], train_s)
        return float(self._prefixes(buckets, train_s)[-1][-1])

    def _alone_s(self, bucket: PlannedBucket, train_s: Seconds) -> Seconds:
        """Seconds of a bucket that gets everything: there is nothing to divide."""
        degree, every = bucket.tensor_parallel, (0, len(self._parts))
        if self._refused[degree][every]:
            return inf
        servers = self._servers_of(degree, bucket.number, bucket.max_num_seqs, train_s)
        return float(servers.time(self._loads[degree].at(every), self.workload).seconds)

    def worth(self, law: ServerLaw, seats: int, bucket: PlannedBucket) -> float:
        """How many servers of the bucket one of this law is worth: by the seconds in which as many
        of either play a step; 0 where it does not hold the longest trajectory."""
        if law.tensor_parallel not in self._loads or bucket.tensor_parallel not in self._loads:
            return 0.0
        if law.kv_tokens < self.workload.longest.context:
            return 0.0
        every, number = (0, len(self._parts)), max(1, bucket.servers)
        own = EqualServers(law, number, seats, self._play_share)
        other = self._servers_of(bucket.tensor_parallel, number, bucket.max_num_seqs, 0.0)
        seconds = [
            float(one.time(self._loads[one.cost.tensor_parallel].at(every), self.workload).seconds)
            for one in (other, own)
        ]
        return seconds[0] / seconds[1]

    def equal_s(self, degree: int, servers: int) -> Seconds:
        """Seconds of a step on so many servers of one shape, where all other GPUs train."""
        return float(self._equal[degree][servers - 1])

    def _equal_s(self, degree: int) -> Any:
        """Seconds of one server, of two, and so on, as many as there are GPUs for."""
        load = self._loads[degree].at((0, len(self._parts)))
        numbers = np.arange(1, max(1, self.gpus // degree) + 1)
        left_s = self._left_s[np.maximum(self.gpus - degree * numbers, 0)]
        equal = self._servers_of(degree, numbers, self._seats, left_s)
        refused = self._refused[degree][0, len(self._parts)]
        return np.where(refused, np.inf, equal.time(load, self.workload).seconds)

    def boundaries(
        self, buckets: tuple[PlannedBucket, ...], train_s: Seconds = 0.0
    ) -> tuple[PlannedBucket, ...]:
        """The same servers with the best ``up_to_tokens`` for this workload."""
        prefixes, end = self._prefixes(buckets, train_s), len(self._parts)
        placed: list[PlannedBucket] = []
        for index in range(len(buckets) - 1, -1, -1):
            bucket = buckets[index]
            longest = int(self._parts.generated[max(end - 1, 0)])
            placed.append(replace(bucket, up_to_tokens=longest))
            if prefixes[index + 1][end] != prefixes[index][end]:
                options = self._options(prefixes[index], bucket, train_s)[:, end]
                end = int(np.argmin(options))
        return tuple(reversed(placed))

    def binding(self, buckets: tuple[PlannedBucket, ...], train_s: Seconds = 0.0) -> Binding:
        """Return the constraint that binds the slowest of these buckets."""
        slowest, found = -1.0, Binding(Constraint.KV_CACHE, "no server holds the trajectories")
        for servers, load in self._filled(buckets, train_s):
            time = servers.time(load, self.workload)
            if time.seconds > slowest:
                slowest = float(time.seconds)
                constraint = self._constraint(servers, load, time)
                where = f"rollout: {servers.number:.3g} x TP {servers.cost.tensor_parallel}"
                found = Binding(constraint, f"{where}: {_WAITS[constraint]}")
        return found

    def saturated_step_s(
        self,
        buckets: tuple[PlannedBucket, ...],
        in_play_s: Seconds,
        beside: float,
        train_s: Seconds = 0.0,
    ) -> Seconds:
        """Seconds of a step if every place on the servers were taken, from a step's that were not.

        A step's trajectories were in play for ``in_play_s``, summed over them, with ``beside`` at a
        time. How long they are in play with so many beside each other is predicted too, and the
        factor between the two is that between measured and predicted prices; with it the same
        follows for full servers, and by Little's law the time of a step.
        """
        filled = list(self._filled(buckets, train_s))
        times = [(each, each[0].time(each[1], self.workload)) for each in filled]
        room = sum(float(time.places * servers.number) for (servers, _), time in times)
        slower = in_play_s / self._in_play_s(filled, min(beside, room))
        return slower * self._in_play_s(filled, room) / room

    def _in_play_s(self, filled: Sequence[_Loads], playing: float) -> Seconds:
        """Seconds in play of a step's trajectories, summed, with so many at a time."""
        shares = [float(load.engine_s + load.tool_s) for _, load in filled]
        return sum(
            servers.in_play_s(load, self.workload, playing * share / sum(shares))
            for (servers, load), share in zip(filled, shares, strict=True)
        )

    def _shares(
        self, buckets: tuple[PlannedBucket, ...], train_s: Seconds
    ) -> Iterator[tuple[PlannedBucket, int, int]]:
        """The buckets that get trajectories, with the first of their parts and the one after."""
        start = 0
        for bucket in self.boundaries(buckets, train_s):
            end = int(np.searchsorted(self._parts.generated, bucket.up_to_tokens, side="right"))
            if end > start:
                yield bucket, start, end
                start = end

    def _filled(self, buckets: tuple[PlannedBucket, ...], train_s: Seconds) -> Iterator[_Loads]:
        for bucket, start, end in self._shares(buckets, train_s):
            load = self._loads[bucket.tensor_parallel].at((start, end))
            degree, seats = bucket.tensor_parallel, bucket.max_num_seqs
            yield self._servers_of(degree, bucket.number, seats, train_s), load

    def _servers_of(self, degree: int, number: Any, seats: int, train_s: Any) -> EqualServers:
        return EqualServers(self._servers[degree], number, seats, self._play_share, train_s)

    def _constraint(
        self, servers: EqualServers, load: RolloutLoad, time: RolloutTime
    ) -> Constraint:
        """The resource that more of would help most."""
        if time.seconds <= 1.1 * time.work_s:
            return Constraint.TOKENS
        if time.seconds <= time.longest_s:
            return Constraint.LONGEST_TRAJECTORY
        if time.seconds > time.seats_s:
            return Constraint.PROMPTS
        training = servers.train_s / max(float(time.seconds), servers.train_s, 1e-9)
        open_steps = float(self.workload.open(self.workload.in_flight(training)))
        flying = open_steps * float(load.playing * load.count) / servers.number
        if time.places >= 0.99 * flying:
            return Constraint.STALENESS
        few = time.places >= 0.9 * servers.seats - self.workload.group_size
        return Constraint.SEATS if few else Constraint.KV_CACHE

    def costs(self, degree: int, numbers: Any, train_s: Seconds) -> Any:
        """Seconds of parts j to i - 1 on each of these numbers of servers: [number, j, i]."""
        return self._cost(degree, numbers[:, None, None], self._seats, train_s)

    def _cost(self, degree: int, servers: Any, seats: int, train_s: Seconds) -> Any:
        """Seconds of parts j to i - 1 on ``servers`` of this degree, [j, i]."""
        equal = self._servers_of(degree, servers, seats, train_s)
        time = equal.time(self._loads[degree], self.workload)
        return np.where(self._refused[degree], np.inf, time.seconds)

    def _options(self, before: Any, bucket: PlannedBucket, train_s: Seconds) -> Any:
        """[j, i]: the first j parts as before, the parts up to i on this bucket."""
        cost = self._matrix(bucket.tensor_parallel, bucket.number, bucket.max_num_seqs, train_s)
        return np.maximum(before[:, None], cost)

    def _prefixes(self, buckets: tuple[PlannedBucket, ...], train_s: Seconds) -> list[Any]:
        """Least time of the first parts on the first buckets; a bucket may stay empty."""
        prefixes = [np.full(len(self._parts) + 1, np.inf)]
        prefixes[0][0] = 0.0
        for bucket in buckets:
            if bucket.tensor_parallel not in self._servers:
                prefixes.append(prefixes[-1])
                continue
            options = self._options(prefixes[-1], bucket, train_s)
            prefixes.append(np.minimum(prefixes[-1], options.min(axis=0)))
        return prefixes


def _check_room(servers: Mapping[int, ServerLaw], workload: Workload, gpus: int) -> None:
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
