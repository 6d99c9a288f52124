"""Profiles whose servers cost something else: what experiments on the costs themselves change."""

from __future__ import annotations

from dataclasses import replace

from libra_cli.core.costs.profile import Profile
from libra_cli.core.types import Seconds


def with_overhead(profile: Profile, seconds: Seconds) -> Profile:
    """``seconds`` beyond the kernels on every engine step, in place of what the profile has."""
    more = seconds - profile.overhead_s
    servers = {
        degree: replace(cost.linear(), step_s=cost.linear().step_s + more)
        for degree, cost in profile.servers.items()
    }
    return replace(profile, servers=servers, overhead_s=seconds)


def with_kv_share(profile: Profile, share: float) -> Profile:
    """The same with ``share`` of every server's KV cache."""
    servers = {
        degree: cost.with_kv_tokens(max(1, int(cost.kv_tokens * share)))
        for degree, cost in profile.servers.items()
    }
    return replace(profile, servers=servers)
