"""What is started on some cores stays on them, and whoever starts it does not."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from libra_cli.node.processes.cores import bound_to

OWN = sorted(os.sched_getaffinity(0))
ASK = "import os; print(*sorted(os.sched_getaffinity(0)))"


def cores_of_a_child(places: str) -> list[int]:
    with bound_to(places):
        told = subprocess.check_output([sys.executable, "-c", ASK], text=True, timeout=30)
    return [int(core) for core in told.split()]


@pytest.mark.parametrize("place", [0, len(OWN) - 1])
def test_a_child_has_the_cores_at_its_places_alone(place: int) -> None:
    assert cores_of_a_child(f"{place},{len(OWN)}") == [OWN[place]]


@pytest.mark.parametrize("places", ["", str(len(OWN))])
def test_without_places_that_exist_it_has_them_all(places: str) -> None:
    assert cores_of_a_child(places) == OWN


def test_who_starts_it_has_all_cores_again() -> None:
    with pytest.raises(OSError, match="not there"), bound_to("0"):
        raise OSError("not there")
    assert sorted(os.sched_getaffinity(0)) == OWN
