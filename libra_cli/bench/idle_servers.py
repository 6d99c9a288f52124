"""Static plans whose trainer's GPUs serve while it waits, as by ``nodes[].share`` of a recipe."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from libra_cli.core.costs.law import ServerLaw
from libra_cli.core.costs.profile import Profile
from libra_cli.core.launch.gpu_nodes import GpuNodes
from libra_cli.core.planning.idle_servers import IdleServers, shares_that_fit
from libra_cli.core.planning.rollout_table import DEFAULT_SEATS
from libra_cli.core.planning.search import Layout
from libra_cli.core.types import Bucket, Plan, Pool, Slot, Tokens
from libra_cli.sim.priced_scene import server_law

BESIDE = "beside the trainer"
_PART = 99
"""The part of its node that such a server has in its slot's name: no GPU's number."""


def with_idle_servers(
    layout: Layout, profile: Profile, gpus: int, longest: Tokens
) -> Layout | None:
    """The static plan with a server on each node of eight that trains as a whole; None where there
    is none, or the memory law says that both do not fit."""
    nodes = GpuNodes.of_eight(gpus)
    whole = dict(nodes.nodes)
    trains = nodes.last(layout.training_gpus)
    sizes = Counter(len(slot.gpus) for slot in trains if len(slot.gpus) == whole[slot.node])
    idle = []
    for degree, number in sizes.items():
        shares = shares_that_fit(profile, degree, layout.training_gpus, longest)
        if shares is not None:
            idle.append(IdleServers.on(shares, degree, number, DEFAULT_SEATS))
    return replace(layout, idle=tuple(idle)) if idle else None


def placed_beside(
    layout: Layout, plan: Plan, slots: Sequence[Slot]
) -> tuple[Plan, tuple[Slot, ...], list[dict[str, object]]]:
    """The plan and its slots with the layout's idle servers, and the nodes of a recipe that shares
    the GPUs of these."""
    shares = {one.tensor_parallel: one for one in layout.idle}
    longest = max(bucket.up_to_tokens for _, bucket in plan.servers)
    taken = [slot for slot in slots if slot.pool is Pool.TRAIN and len(slot.gpus) in shares]
    beside, servers, nodes = [], [], []
    for slot in taken:
        one = shares[len(slot.gpus)]
        share = {"rollout": one.memory, "train": one.ranks, "serve": "when-idle"}
        name = f"{slot.node}/{_PART}"
        beside.append(Slot(name, slot.node, slot.gpus, Pool.ROLLOUT))
        servers.append((name, Bucket(BESIDE, one.tensor_parallel, one.max_num_seqs, longest)))
        nodes.append({"host": slot.node, "gpus": len(slot.gpus), "share": share})
    return replace(plan, servers=(*plan.servers, *servers)), (*slots, *beside), nodes


def believed_law(profile: Profile, layout: Layout, bucket: Bucket) -> ServerLaw:
    """What the scheduler believes of a bucket's servers. KeyError where there are no prices."""
    shares = {one.tensor_parallel: one.memory for one in layout.idle}
    sharing = None
    if bucket.name == BESIDE:
        sharing = profile.sharing(bucket.tensor_parallel, shares[bucket.tensor_parallel])
    return sharing or server_law(profile, bucket)


def shared_profile(profile: Profile, layout: Layout) -> Profile:
    """The prices where ranks have what the layout's idle servers leave of their GPUs."""
    if not layout.idle:
        return profile
    least = min(one.ranks for one in layout.idle)
    return replace(profile, training=profile.training.within(least))
