"""A dataclass is one object in JSON: its fields, what its JSON columns say, and its other names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf, nan
from typing import ClassVar

from libra_cli.core.explanation import Explanation
from libra_cli.core.json_form import HIDDEN, from_json_form, hints, json_form, shown
from libra_cli.core.records import MoveRecord, NodeRecord, PhaseRow, PlanRecord
from tests import sample_run


@dataclass(frozen=True)
class Measured:
    SHOWN: ClassVar[Mapping[str, str]] = {"old": "value", "doubled": "twice"}
    value: float
    names_json: str
    secret: str = field(default="", metadata=HIDDEN)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(json.loads(self.names_json))

    @property
    def twice(self) -> float:
        return 2 * self.value


def test_fields_other_names_and_what_columns_of_json_say_are_keys() -> None:
    told = json_form({"all": [Measured(0.5, '["a"]', "hidden")]})
    assert told == {"all": [{"value": 0.5, "names": ["a"], "old": 0.5, "doubled": 1.0}]}
    assert list(shown(Measured)) == list(told["all"][0])


def test_every_key_has_a_type() -> None:
    assert hints(Measured) == {
        "value": float,
        "names": tuple[str, ...],
        "old": float,
        "doubled": float,
    }


def test_what_is_not_finite_is_null() -> None:
    assert json_form((inf, -inf, nan, 1.0, None)) == [None, None, None, 1.0, None]


def test_a_move_is_told_with_its_phases_by_their_older_names_too() -> None:
    phases = json.dumps([["drain", 1.0, 2.0], ["stop", 2.0, None]])
    move = MoveRecord(1, 1, "a/0", "rollout", "gradient", "stop", 1.0, None, phases, "")
    assert move.phases == (PhaseRow("drain", 1.0, 2.0), PhaseRow("stop", 2.0, None))
    assert json_form(move)["phases"][1] == {
        "phase": "stop",
        "started_at": 2.0,
        "ended_at": None,
        "began": 2.0,
        "ended": None,
    }


def test_what_was_found_on_a_host_is_not_shown() -> None:
    node = NodeRecord("a", "10.0.0.1", "ready", 0.0, '{"address": "10.0.0.1"}', "")
    assert node.facts == {"address": "10.0.0.1"}
    assert list(json_form(node)) == ["node", "host", "state", "since", "detail"]


def test_a_plan_of_an_older_libra_has_what_it_wrote() -> None:
    plan = PlanRecord(0, 0.0, '[["a/0", "short", 1, 4, 100]]', '["b/0"]', "")
    told = json_form(plan)
    assert (told["train"], told["gradient"], told["reasons"]) == (["b/0"], [], [])
    assert told["servers"][0]["max_num_seqs"] == 4
    assert told["predicted_gain"] is None


def test_an_explanation_comes_back_from_its_json() -> None:
    for one in (sample_run.KEPT, sample_run.MOVED):
        assert from_json_form(Explanation, json.loads(one.to_json())) == one
    kept = json.loads(sample_run.KEPT.of_first_plan().to_json()) | {"added_later": 1}
    assert kept["horizon_steps"] is None
    assert from_json_form(Explanation, kept) == sample_run.KEPT.of_first_plan()
