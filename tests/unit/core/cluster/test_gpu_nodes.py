"""On nodes without slots: no GPU has two tenants, and everything that fits is found a place."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra_cli.core.launch.gpu_nodes import GpuNodes, gpus_of
from libra_cli.core.types import Slot

SIZES = st.lists(st.integers(1, 10), min_size=1, max_size=5)


def nodes_of(*sizes: int) -> GpuNodes:
    return GpuNodes(tuple((f"n{index}", size) for index, size in enumerate(sizes)))


def counted(slots: list[Slot]) -> int:
    return sum(len(slot.gpus) for slot in slots)


@given(SIZES, st.integers(1, 30), st.integers(0, 30))
def test_a_base_group_is_even_and_has_the_head(sizes: list[int], least: int, more: int) -> None:
    nodes = nodes_of(*sizes)
    base = nodes.base(least, least + more)
    assert len({len(slot.gpus) for slot in base}) <= 1
    assert len({slot.node for slot in base}) == len(base)
    if base:
        assert base[0].node == nodes.head
        assert least <= counted(list(base)) <= least + more


@given(SIZES, st.integers(1, 30))
def test_a_base_group_is_found_if_there_is_one(sizes: list[int], ranks: int) -> None:
    nodes = nodes_of(*sizes)
    worlds = {
        number * each
        for each in range(1, max(sizes) + 1)
        for number in range(1, sum(size >= each for size in sizes) + 1)
    }
    assert bool(nodes.base(ranks, ranks)) == (ranks in worlds)


def test_the_smallest_world_on_the_fewest_nodes_is_taken() -> None:
    nodes = nodes_of(8, 4, 2)
    assert [slot.id for slot in nodes.base(6, 14)] == ["n0/base-2.3.4.5.6.7"]
    assert [(slot.node, len(slot.gpus)) for slot in nodes.base(9, 14)] == []
    assert [(s.node, s.gpus) for s in nodes_of(4, 8, 8).base(10, 20)] == [
        ("n2", (3, 4, 5, 6, 7)),
        ("n1", (3, 4, 5, 6, 7)),
    ]


@given(SIZES, st.lists(st.lists(st.integers(0, 3), min_size=4, max_size=4), min_size=1, max_size=5))
def test_servers_that_fit_stand_aligned_and_apart(
    sizes: list[int], wanted: list[list[int]]
) -> None:
    nodes = nodes_of(*sizes)
    base = nodes.base(1, nodes.gpus)
    before: list[Slot] = []
    for counts in wanted:
        servers = {d: n for d, n in zip((1, 2, 4, 8), counts, strict=True) if n}
        if not nodes.has_room(servers, base):
            wanted_runs = {
                d: sum(n * (o // d) for o, n in servers.items() if o >= d) for d in servers
            }
            assert any(nodes.room(d, base) < number for d, number in wanted_runs.items())
            continue
        placed = nodes.servers(servers, base, before)
        assert sorted(len(slot.gpus) for slot in placed) == sorted(
            d for d, n in servers.items() for _ in range(n)
        )
        assert len(gpus_of([*placed, *base])) == counted([*placed, *base])
        for slot in placed:
            assert slot.gpus[0] % len(slot.gpus) == 0
            assert slot.gpus[-1] < dict(nodes.nodes)[slot.node]
            assert all(one + 1 == other for one, other in pairwise(slot.gpus))
        assert len({slot.id for slot in placed}) == len(placed)
        before = placed


def test_a_server_that_is_pinned_makes_no_way_while_another_can() -> None:
    nodes = nodes_of(4, 4)
    ones = nodes.servers({1: 2}, (), [])
    assert [slot.id for slot in ones] == ["n0/0x1", "n0/1x1"]
    joined = nodes.servers({1: 1, 4: 1}, (), ones, pinned={"n0/1x1"})
    assert {slot.id for slot in joined} == {"n0/1x1", "n1/0x4"}


@pytest.mark.parametrize(("least", "sizes"), [(1, [2, 1]), (2, [2]), (3, [])])
def test_what_is_left_of_a_node_is_a_worker_if_it_is_large_enough(
    least: int, sizes: list[int]
) -> None:
    nodes = nodes_of(4, 4)
    base = nodes.base(3, 3)
    servers = nodes.servers({2: 1}, base)
    workers = nodes.workers((*base, *servers), [], least=least)
    assert [len(worker.gpus) for worker in workers] == sizes


def test_servers_that_are_stopped_leave_whole_nodes_to_gradient_workers() -> None:
    nodes = nodes_of(8, 8, 8, 8)
    base = list(nodes.base(8, 8))
    five = nodes.servers({4: 5}, base)
    worker = nodes.workers([*five, *base], [])
    three = nodes.servers({4: 3}, base, five)
    assert {slot.id for slot in three} <= {slot.id for slot in five}
    workers = nodes.workers([*three, *base], worker, least=8)
    assert sorted(len(slot.gpus) for slot in workers) == [4, 8]
    alone = next(slot for slot in five if sum(slot.node == one.node for one in five) == 1)
    assert alone in nodes.servers({4: 1}, base, five, [alone.id])
