"""Which hosts are measured with which, and what is not left on them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from libra_cli.runtime.doctor.examination import rounds

NAMES = st.integers(0, 20).map(lambda count: [f"h{index}" for index in range(count)])


@given(names=NAMES, ring=st.booleans())
def test_every_neighbour_is_measured_once_and_nobody_twice_at_a_time(names, ring):
    found = rounds(names, ring=ring)
    for pairs in found:
        busy = [name for pair in pairs for name in pair]
        assert len(busy) == len(set(busy))
    measured = [pair for one in found for pair in one]
    wanted = max(0, len(names) - (not ring or len(names) == 1))
    assert len(measured) == len(set(measured)) == wanted
    assert len(found) <= 3, "however many hosts there are"


def test_a_ring_of_two_is_measured_in_both_directions():
    assert rounds(["a", "b"], ring=True) == [(("a", "b"),), (("b", "a"),)]
    assert rounds(["a", "b"], ring=False) == [(("a", "b"),)]
