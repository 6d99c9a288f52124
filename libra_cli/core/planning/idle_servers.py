"""The worth of servers on the trainer's GPUs that take requests while it waits (``nodes[].share``).

Of a step of s seconds training takes T, and in what is left of it such a server plays. The turns
that a step finds there are broken off, and their contexts computed again elsewhere, which takes r
seconds of a server. So n servers with m of these beside them are worth::

    n + m q max(0, 1 - (T + r) / s)

``q`` is what one of them, of its degree and with the part of a KV cache that it has, is worth of
the others (``RolloutTable.worth``). The larger the share the shorter the step, and the shorter the
step the smaller the share: there is one solution, and halving finds it. Where the halves take turns
training waits as long as rollout plays, and the share is 1; so they do where n is 0.

Limit: means. A server that begins to take requests fills as turns come to it, not at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from libra_cli.config.recipe import ShareSpec
from libra_cli.core.costs.law import ServerLaw
from libra_cli.core.costs.observed import UNCHECKED_GIB
from libra_cli.core.costs.profile import Profile
from libra_cli.core.planning.rollout_table import PlannedBucket, RolloutTable
from libra_cli.core.scheduling.least_cost import PLAY_SHARE
from libra_cli.core.types import Plan, Seconds, SlotId, Tokens
from libra_cli.core.workload import Workload

SHARE_STEP = 0.01
"""What shares of a GPU's memory are rounded to."""
CONTEXTS = 20
"""Longest trajectories that the KV cache of such a server holds. In a smaller one contexts drive
each other out between turns, and each turn computes its own again: simulated beside 16 ranks
(tau2bench, bound 1, 24 A800, 6 steps) throughput changed by -12 and -8 % (two seeds) where it held
1.7 of them, by +6 and -3 % at 8.5, and by +13 and +6 % at 17, 34 and 68 alike. Chosen of these."""
HALVINGS = 8
"""Halvings of the share of a step: it is known to a 256th."""


@dataclass(frozen=True, slots=True)
class IdleServers:
    """``number`` servers with ``tensor_parallel`` of the trainer's GPUs each, which take requests
    while it waits; of each GPU's memory one has the share ``memory``, and the rank ``ranks``."""

    tensor_parallel: int
    number: int
    max_num_seqs: int
    memory: float
    ranks: float

    @classmethod
    def on(cls, share: ShareSpec, degree: int, number: int, seats: int) -> IdleServers:
        """Return so many servers with these shares of ``degree`` GPUs each."""
        return cls(degree, number, seats, share.rollout, share.train)


def idle_servers(plan: Plan, shares: Mapping[SlotId, ShareSpec]) -> tuple[IdleServers, ...]:
    """Return the servers of the plan on the slots that have ``shares``, those that are alike as
    one."""
    found = Counter(
        IdleServers.on(shares[slot], one.tensor_parallel, 1, one.max_num_seqs)
        for slot, one in plan.servers
        if slot in shares
    )
    return tuple(replace(one, number=number) for one, number in found.items())


def shares_that_fit(profile: Profile, degree: int, ranks: int, longest: Tokens) -> ShareSpec | None:
    """Return the shares of ``degree`` GPUs, all of the trainer's ``ranks``, in steps of
    ``SHARE_STEP``: a server gets what ``CONTEXTS`` of the longest trajectory need, and the ranks
    the rest; None where they do not fit there, or how much memory there is nobody knows."""
    facts = profile.facts
    if facts.gpu_gib >= UNCHECKED_GIB:
        return None
    most = int(facts.usable_share / SHARE_STEP + 1e-9)
    for steps in range(1, most):
        law = profile.sharing(degree, steps * SHARE_STEP)
        if law is None or law.kv_tokens < CONTEXTS * longest:
            continue
        train = (most - steps) * SHARE_STEP
        if profile.training.within(train).memory_gib(ranks, longest) > train * facts.gpu_gib:
            return None
        rollout, train = round(steps * SHARE_STEP, 2), round(train, 2)
        return ShareSpec(rollout=rollout, train=train, serve="when-idle")
    return None


@dataclass(frozen=True, slots=True)
class _Worth:
    """What all such servers are worth while they play, in servers of a bucket, and the seconds of
    one of them that go into contexts computed again after each step."""

    servers: float = 0.0
    again_s: Seconds = 0.0


def with_idle_servers(
    buckets: Sequence[PlannedBucket],
    idle: Sequence[IdleServers],
    profile: Profile,
    table: RolloutTable,
    step_s: Callable[[tuple[PlannedBucket, ...]], Seconds],
    train_s: Seconds,
) -> tuple[PlannedBucket, ...]:
    """Return the buckets, the last of which has beside it what the idle servers are worth;
    ``step_s`` gives the seconds of a step with some buckets, of which training takes ``train_s``.
    """
    first = idle[0]
    alone = PlannedBucket(first.tensor_parallel, 0, 0, first.max_num_seqs)
    *others, last = buckets or (alone,)
    worth = _worth(idle, profile, table, last)

    def having(share: float) -> tuple[PlannedBucket, ...]:
        return (*others, replace(last, beside=worth.servers * share))

    if table.workload.takes_turns or not buckets:
        return having(1.0)
    low, high = 0.0, 1.0
    for _ in range(HALVINGS):
        share = (low + high) / 2
        idle_share = 1 - (train_s + worth.again_s) / max(step_s(having(share)), train_s, 1e-9)
        low, high = (share, high) if idle_share > share else (low, share)
    return having(low)


def _worth(
    idle: Sequence[IdleServers], profile: Profile, table: RolloutTable, bucket: PlannedBucket
) -> _Worth:
    number, servers, again_s = bucket.servers + sum(one.number for one in idle), 0.0, 0.0
    for one in idle:
        law = profile.sharing(one.tensor_parallel, one.memory)
        if law is not None:
            worth = one.number * table.worth(law, one.max_num_seqs, bucket)
            servers += worth
            again_s += worth * _again_s(law, table.workload, number)
    return _Worth(servers, again_s / servers) if servers else _Worth()


def _again_s(law: ServerLaw, work: Workload, servers: int) -> Seconds:
    """Seconds to compute again what is in play on one of so many servers, as far as its KV cache
    holds that."""
    context = work.mean_context / 2
    in_play = work.trajectories * work.overlap * context / servers
    return float(law.recompute_s(min(PLAY_SHARE * law.kv_tokens, in_play), context))
