"""A cache that is given back and taken again, under tensors that stay what they are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from libra_cli.node.rollout.sleeping_cache import SleepingCache  # noqa: E402

MIB = 2**20


def resident_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    found = re.search(r"^RssAnon:\s+(\d+) kB", status, re.M)
    assert found
    return 1024 * int(found[1])


def test_memory_is_given_back_that_was_among_what_others_had_freed() -> None:
    torch.ones(24 * MIB, dtype=torch.int8)  # from now on malloc takes such from its heap
    pieces = [torch.ones(16 * MIB, dtype=torch.int8) for _ in range(8)]
    last = pieces.pop()
    pieces.clear()
    whole = torch.ones(64 * MIB, dtype=torch.int8)
    full = resident_bytes()
    SleepingCache([whole])
    assert resident_bytes() < full - 60 * MIB
    assert last.all()


def test_memory_is_given_back_and_all_tensors_over_it_are_zero_when_it_is_taken_again() -> None:
    whole = torch.ones(64 * MIB, dtype=torch.int8)
    views = [whole.view(torch.bfloat16).view(2, -1), whole]
    full = resident_bytes()
    cache = SleepingCache(views)
    assert resident_bytes() < full - 60 * MIB
    cache.wake()
    assert [view.shape for view in views] == [(2, 16 * MIB), (64 * MIB,)]
    assert not any(view.count_nonzero() for view in views)
    whole[0] = 1
    assert views[0].count_nonzero() == 1
