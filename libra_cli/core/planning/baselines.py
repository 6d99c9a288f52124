"""The planners that ours is measured against: published rules, by name.

All but ``colocated`` and ``static-best`` have equal servers, as their authors do: ``uniform`` gives
half the GPUs to each side in servers of four GPUs; the others begin with the best equal servers for
the initial workload. Published are ``streamrl`` (StreamRL, arXiv 2504.15930) and ``dynarl``
(DynaRL, OSDI 2026, with the thresholds of Libra's artifact, NetX-lab/Libra). Limit: what a rule
leaves open is filled in here in its favour; none of them counts what a move costs, and that is how
they are published.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from libra_cli.core.costs.profile import Profile, TrainingShape
from libra_cli.core.costs.workload import Workload
from libra_cli.core.planning.observation import Decision, Observation, moves_cost_s
from libra_cli.core.planning.rollout_dp import PlannedBucket
from libra_cli.core.planning.search import Layout, PlannerSettings, Search
from libra_cli.core.types import Seconds

GREEDY_PERIOD = 5
"""Steps between two moves of the greedy planner; chosen."""
QUEUE_PRESSURE, ACTIVE_PRESSURE, ROLLOUT_STARVES = 0.75, 0.85, 1.25
BORROW, NEVER_BORROW = 1.15, 0.80
"""Thresholds of Libra's artifact (NetX-lab/Libra), see ``Rule``."""


@dataclass(slots=True)
class Static:
    """One layout for the whole run: ``colocated``, ``uniform`` or ``static-best``."""

    name: str
    profile: Profile
    gpus: int
    settings: PlannerSettings

    def begin(self, workload: Workload) -> Layout:
        """For the initial workload; never changed after."""
        if self.name == "colocated":
            return _colocated(self.profile, workload, self.gpus, self.settings)
        search = Search(self.profile, workload, self.gpus, self.settings)
        if self.name == "static-best":
            return search.best().layout
        half = self.gpus // 2 // self.settings.unit * self.settings.unit or self.settings.unit
        degree = 4 if 4 in search.table.degrees and half >= 4 else max(search.table.degrees)
        return _equal(search, degree, half, self.settings)

    def consider(self, now: Observation) -> Decision:
        """To stay."""
        return Decision(None, (), why_not="this planner never moves anything")


class Rule:
    """Equal servers and a rule that moves GPUs between the halves.

    ``greedy``: a server's worth to the slower half, every ``period`` steps. ``streamrl``: one more
    server when the gap of the halves reaches what it would save (its elastic rule, either way).
    ``dynarl``: on the triggers of its kind (queue or utilisation for rollout, ``T_train /
    T_rollout`` at 1.15 for training, back at 0.9) to the split that would balance what was
    measured, at once and whatever it costs.
    """

    def __init__(self, name: str, profile: Profile, gpus: int, settings: PlannerSettings) -> None:
        self._name = name
        self._profile = profile
        self._gpus = gpus
        self._settings = settings
        self._moved_at = 0
        self._degree = 1

    @property
    def name(self) -> str:
        """As ``--planners`` takes it."""
        return self._name

    def begin(self, workload: Workload) -> Layout:
        """The best equal servers for the initial workload."""
        search = Search(self._profile, workload, self._gpus, self._settings)
        found: list[tuple[Seconds, Layout]] = []
        for split in search.splits:
            bucket = search.uniform(split)[0]
            layout = _equal(search, bucket.tensor_parallel, bucket.gpus, self._settings)
            found.append((search.times(layout).step_s, layout))
        layout = min(found, key=lambda pair: pair[0])[1]
        self._degree = layout.buckets[0].tensor_parallel
        return layout

    def consider(self, now: Observation) -> Decision:
        """The rule's next split, if it is another."""
        search = Search(self._profile, now.recent, now.gpus, self._settings)
        target, reason = self._target(now, search)
        share = max(self._degree, self._settings.unit)
        target = min(max(share, target), now.gpus - self._settings.unit)
        layout = _equal(search, self._degree, target, self._settings)
        before, after = search.times(now.layout), search.times(layout)
        cost_s = moves_cost_s(self._profile, now.recent, now.layout, layout)
        if layout.servers == now.layout.servers or after.step_s == float("inf"):
            return Decision(None, (), before, None, why_not=reason or "balanced")
        self._moved_at = now.step
        return Decision(layout, (reason,), before, after, cost_s)

    def _target(self, now: Observation, search: Search) -> tuple[int, str]:
        if self._name == "greedy":
            return self._greedy(now)
        return self._streamrl(now, search) if self._name == "streamrl" else self._dynarl(now)

    def _greedy(self, now: Observation) -> tuple[int, str]:
        serving, ratio = now.layout.rollout_gpus, now.rollout_s / max(now.train_s, 1e-9)
        if now.step - self._moved_at < GREEDY_PERIOD or 0.95 < ratio < 1.05:
            return serving, ""
        share = max(self._degree, self._settings.unit)
        return serving + (share if ratio > 1 else -share), f"the slower half, at {ratio:.2f}"

    def _streamrl(self, now: Observation, search: Search) -> tuple[int, str]:
        serving, gap = now.layout.rollout_gpus, now.rollout_s - now.train_s
        share = max(self._degree, self._settings.unit)
        step = share if gap > 0 else -share
        other = _equal(search, self._degree, max(share, serving + step), self._settings)
        today, then = search.times(now.layout), search.times(other)
        rollout = gap > 0
        saved = today.rollout_s - then.rollout_s if rollout else today.train_s - then.train_s
        if saved <= 0 or abs(gap) < saved:
            return serving, ""
        return serving + step, f"a gap of {abs(gap):.1f} s is worth the {saved:.1f} s of one more"

    def _dynarl(self, now: Observation) -> tuple[int, str]:
        serving, ratio = now.layout.rollout_gpus, now.rollout_s / max(now.train_s, 1e-9)
        busy = 1 - now.rollout_idle
        pressed = now.queue >= QUEUE_PRESSURE or busy >= ACTIVE_PRESSURE
        grow = ratio >= ROLLOUT_STARVES and pressed
        lend = 1 / max(ratio, 1e-9) >= BORROW and now.queue < NEVER_BORROW
        if not (grow or lend):
            return serving, ""
        share = max(self._degree, self._settings.unit)
        weight = now.rollout_s * serving
        other = now.train_s * max(1, now.layout.training_gpus)
        balanced = now.gpus * weight / max(weight + other, 1e-9)
        return round(balanced / share) * share, f"triggered at {ratio:.2f}, queue {now.queue:.2f}"


def _equal(search: Search, degree: int, gpus: int, settings: PlannerSettings) -> Layout:
    """As many servers of this degree as ``gpus`` hold, the other GPUs training."""
    longest = max(sample.generated for sample in search.workload.samples)
    servers = max(1, gpus // degree)
    bucket = PlannedBucket(degree, servers, longest, settings.max_num_seqs)
    spare = (search.gpus - servers * degree) // settings.unit * settings.unit
    training = search.tree.best(spare)
    shape = training.shape if training is not None else TrainingShape(data_parallel=max(1, spare))
    return Layout((bucket,), shape)


def _colocated(
    profile: Profile, workload: Workload, gpus: int, settings: PlannerSettings
) -> Layout:
    search = Search(profile, replace(workload, overlap=1.0), gpus, settings)
    training = search.tree.best(gpus)
    if training is None:
        raise search.tree.refusal(gpus)
    return Layout(search.uniform(gpus), training.shape, colocated=True)
