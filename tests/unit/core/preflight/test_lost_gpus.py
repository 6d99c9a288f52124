"""Which GPUs a host has lost since a run began, by each way in which nvidia-smi tells it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from libra_cli.core.preflight.host_report import NodeFacts
from libra_cli.core.preflight.lost_gpus import RunGpu, gpus_of_run, lost_since

HOSTS = Path(__file__).parents[3] / "fixtures/hosts"
BEGUN = NodeFacts.read(json.loads((HOSTS / "two-h100.json").read_text()))
FIRST, SECOND = gpus_of_run(BEGUN, 2)
REBOOT = "GPU is lost. Reboot the system to recover this GPU (exit status 15)"
SENTENCE = f"nvidia-smi fails: Unable to determine the device handle for GPU0000:3b:00.0: {REBOOT}"


def lost(known: tuple[RunGpu, ...] = (FIRST, SECOND), **now: object) -> list[int]:
    return [*lost_since(known, replace(BEGUN, **now))]  # type: ignore[arg-type]


def test_a_run_knows_its_gpus_by_uuid_and_those_of_others_not_at_all():
    assert (FIRST.name, FIRST.bus) == (BEGUN.gpus[0].uuid, "00000000:1B:00.0")
    assert gpus_of_run(BEGUN, 1) == (FIRST,)
    old = replace(BEGUN, gpus=(replace(BEGUN.gpus[0], uuid=""),))
    assert gpus_of_run(old, 1) == (RunGpu("0", FIRST.bus),)


def test_a_gpu_that_is_not_listed_is_lost_whatever_number_the_others_have_now():
    assert lost() == []
    assert lost(gpus_present=(SECOND.name,), gpus=BEGUN.gpus[1:]) == [0]
    assert lost(gpus_present=(FIRST.name,)) == [1]
    assert lost(gpus_present=(), gpus=()) == [0, 1]


def test_a_gpu_that_is_named_where_there_is_no_listing_is_lost_and_no_other():
    assert lost(gpus_present=(), gpus_error=SENTENCE) == [1]
    assert lost((FIRST,), gpus_present=(), gpus_error=SENTENCE) == []


def test_a_listing_counts_even_where_it_also_says_what_it_lacks():
    assert lost(gpus_present=(SECOND.name,), gpus_error=SENTENCE) == [0]


def test_the_last_gpu_is_lost_where_there_is_none_any_more():
    none = "nvidia-smi fails: No devices were found (exit status 6)"
    assert lost((FIRST,), gpus_present=(), gpus_error=none) == [0]


@pytest.mark.parametrize(
    "error", ["nvidia-smi did not answer within 60 s", "nvidia-smi fails: there is no driver"]
)
def test_where_nothing_is_listed_for_another_reason_nothing_is_known(error):
    placeless = RunGpu(SECOND.name, "")
    assert lost((FIRST, placeless), gpus_present=(), gpus_error=error) == []


def test_a_gpu_without_a_uuid_is_never_taken_for_lost():
    assert lost((RunGpu("1", ""),), gpus_present=(FIRST.name,)) == []
