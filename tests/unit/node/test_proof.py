"""Whether what the workers of a server hold is what was published."""

from __future__ import annotations

from typing import Any

import pytest

from libra_cli.node.rollout.proof import prove, prove_loaded

TENSORS: dict[str, dict[str, Any]] = {
    "q": {"shape": [4, 6], "dtype": "float32", "checksum": f"{30:016x}"},
    "norm": {"shape": [6], "dtype": "float32", "checksum": f"{2**64 - 5:016x}"},
}


def part(name: str, region: list[int], checksum: int, source: str = "m") -> dict[str, Any]:
    return {"name": name, "source": source, "region": region, "checksum": f"{checksum:016x}"}


NORM = part("norm", [0, 1, 0, 6], 2**64 - 5)
UPPER = part("q", [0, 2, 0, 6], 10)
LOWER = part("q", [2, 4, 0, 6], 20)


def test_a_version_that_every_rank_holds_its_part_of_is_proved():
    proof = prove(TENSORS, [[UPPER, NORM], [LOWER, NORM]])
    assert not proof.different
    assert not proof.untraced


def test_sums_wrap_around():
    parts = [part("norm", [0, 1, 0, 3], 2**64 - 2), part("norm", [0, 1, 3, 6], 2**64 - 3)]
    assert not prove(TENSORS, [[UPPER, LOWER, *parts]]).different


def test_a_part_that_differs_is_named():
    proof = prove(TENSORS, [[UPPER, NORM], [part("q", [2, 4, 0, 6], 21), NORM]])
    (said,) = proof.different
    assert said == "q is not the one that was published (m)"


@pytest.mark.parametrize("wrong", [7, 2**64 - 1], ids=["below", "above"])
def test_ranks_that_hold_different_copies_are_not_believed(wrong):
    other = part("norm", [0, 1, 0, 6], wrong)
    (said,) = prove(TENSORS, [[UPPER, NORM], [LOWER, other]]).different
    assert said.startswith("norm ")


def test_each_place_where_a_tensor_is_held_is_proved_by_itself():
    head = part("q", [0, 4, 0, 6], 29, "lm_head")
    (said,) = prove(TENSORS, [[UPPER, LOWER, NORM, head]]).different
    assert "lm_head" in said


def test_a_missing_part_and_a_missing_tensor_cannot_be_proved():
    proof = prove(TENSORS, [[UPPER]])
    assert not proof.different
    assert proof.untraced == (
        "q is held in part: 12 of 24 numbers (m)",
        "norm was not found in the server",
    )


def test_another_format_cannot_be_proved():
    held = {"name": "q", "source": "m", "problem": "q was published in bfloat16"}
    assert prove(TENSORS, [[NORM, held]]).untraced[0] == held["problem"]


def test_of_an_adapter_all_that_went_in_and_what_came_out_must_be_right():
    answer: dict[str, Any] = {"expected": TENSORS, "wrong": [], "held": [UPPER, NORM]}
    other = {**answer, "held": [LOWER, NORM]}
    assert not prove_loaded([answer, other]).different
    wrong = {**other, "wrong": ["q in /models/base is not the trainer's"]}
    assert prove_loaded([answer, wrong]).different == ("q in /models/base is not the trainer's",)
    changed: dict[str, Any] = {**TENSORS["q"], "checksum": f"{31:016x}"}
    apart = {**other, "expected": {**TENSORS, "q": changed}}
    assert prove_loaded([answer, apart]).different == (
        "tensor-parallel ranks have merged the adapter to different numbers",
    )
