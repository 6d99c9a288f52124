"""How many episodes hosts hold at once, where ``environment.workers.episodes`` leaves that open."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from libra_cli.config.environment import EnvironmentSpec
from libra_cli.config.sandbox import SandboxLimitsSection
from libra_cli.core.preflight.host_report import NodeFacts

EPISODE_MIB = 10
"""MiB of an episode beside what its commands use: a worker and the processes that keep its sandbox.
``tests.research.sandbox_crowd`` measures 10.0, of 1,000 of them."""
EPISODES_A_CORE = 256
"""Episodes a core. At rest they take 6 % of it, each .22 ms a second (measured there)."""
LEFT = 0.5
"""Share of the free memory of a host with slots that is left to episodes; of others it is all."""
MIB = 1 << 20


def episodes_held(limits: SandboxLimitsSection, *, cores: int, memory: float) -> int:
    """How many episodes a host holds of which each fills its sandbox; ``memory`` is in bytes.

    It is 1 at least.
    """
    each = (limits.memory_mb + limits.disk_mb + EPISODE_MIB) * MIB
    return max(1, min(int(memory / each), EPISODES_A_CORE * cores))


@dataclass(frozen=True, slots=True)
class HostsThatPlay:
    """What is known of the hosts that play ``environments``, and whether they have slots."""

    environments: Sequence[EnvironmentSpec]
    facts: Mapping[str, NodeFacts]
    """What hosts have told, by node; one that has told nothing holds one episode."""
    with_slots: Collection[str]

    def counted(self, spec: EnvironmentSpec) -> EnvironmentSpec:
        """Return the environment with its most episodes on each node, if they are ``auto``.

        Environments that share a host share its memory.
        """
        if spec.workers is None or spec.sandbox is None or spec.workers.episodes != "auto":
            return spec
        limits = spec.sandbox.limits
        most = {name: self._held(name, limits) for name in spec.workers.nodes}
        workers = spec.workers.model_copy(update={"episodes": most})
        return spec.model_copy(update={"workers": workers})

    def _held(self, name: str, limits: SandboxLimitsSection) -> int:
        told = self.facts.get(name)
        if told is None:
            return 1
        every = [one.workers for one in self.environments if one.workers is not None]
        beside = sum(one.episodes == "auto" and name in one.nodes for one in every)
        memory = told.mem_free * (LEFT if name in self.with_slots else 1.0) / beside
        return episodes_held(limits, cores=told.cpus, memory=memory)


def most_episodes(environments: Sequence[EnvironmentSpec]) -> int | None:
    """The most episodes of all these at once; None if one of them has no limit."""
    found = [one.workers.most_episodes if one.workers else None for one in environments]
    known = [number for number in found if number is not None]
    return sum(known) if known and len(known) == len(found) else None
