"""Policies that know more than a scheduler can: the clairvoyant, and StreamRL's trained ranker.

Both read the recorded future on purpose, and nothing else in the simulator does. The clairvoyant is
libra's own policy with the true remaining tokens in place of an estimate, so the distance to it is
the price of not knowing. The ranker (arXiv 2504.15930) recognises a trajectory of the longest fifth
with the published recall, and calls as many others long by mistake as keeps its fifth a fifth.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from libra_cli.core.scheduling.baselines import LONG_SHARE, StreamRL
from libra_cli.core.scheduling.estimates import Estimate
from libra_cli.core.scheduling.least_cost import LeastExpectedCost
from libra_cli.core.scheduling.policy import SchedulingPolicy, make_policy
from libra_cli.core.types import Tokens, ToolReturn, TrajectoryId
from libra_cli.sim.traces import RecordedEpisode, Trace

RECALL = 0.87
"""Share of the longest trajectories that StreamRL's ranker finds."""
ORACLES = ("streamrl", "clairvoyant")


class Future:
    """The recorded future, asked of the simulated world once there is one."""

    def __init__(self) -> None:
        self.episode: Callable[[TrajectoryId], RecordedEpisode] | None = None

    def generated(self, trajectory: TrajectoryId) -> Tokens:
        """Tokens the trajectory will have generated at its end."""
        assert self.episode is not None, "no world has been connected"
        return self.episode(trajectory).generated


class Certain:
    """An estimator that is always right."""

    def __init__(self, future: Future) -> None:
        self._future = future

    def begin(self, trajectory: TrajectoryId, *, prompt: Tokens) -> Estimate:
        """All that the trajectory will generate, with certainty."""
        return Estimate.point(self._future.generated(trajectory))

    def returned(
        self,
        trajectory: TrajectoryId,
        *,
        generated: Tokens,
        context: Tokens,
        returns: Sequence[ToolReturn],
    ) -> Estimate:
        """What is left to generate, with certainty."""
        return Estimate.point(max(0, self._future.generated(trajectory) - generated))

    def finished(self, trajectory: TrajectoryId, *, generated: Tokens) -> None:
        """Learns nothing: it knows already."""

    def withdrawn(self, trajectory: TrajectoryId) -> None:
        """Learns nothing: it knows already."""


def oracle_policy(name: str, future: Future, trace: Trace, seed: int) -> SchedulingPolicy:
    """One of ``ORACLES``, or a policy that does not know the future."""
    if name == "clairvoyant":
        return LeastExpectedCost(Certain(future))
    if name != "streamrl":
        return make_policy(name)
    lengths = sorted(episode.generated for episode in trace.episodes)
    bound = lengths[int((1 - LONG_SHARE) * (len(lengths) - 1))]
    mistaken = LONG_SHARE * (1 - RECALL) / (1 - LONG_SHARE)

    def is_long(who: TrajectoryId) -> bool:
        luck = Random(f"{seed}/{who.group}/{who.member}").random()
        return luck < (RECALL if future.generated(who) > bound else mistaken)

    long, short = (lengths[int(share * (len(lengths) - 1))] for share in (0.9, 0.5))
    return StreamRL(is_long, long=long, short=short)
