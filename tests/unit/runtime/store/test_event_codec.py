"""Every event comes back from its bytes as it was."""

from __future__ import annotations

import typing
from array import array
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libra_cli.core import events as e
from libra_cli.core.types import (
    EVALUATION_GROUPS,
    LogRatios,
    TrajectoryId,
    VersionSpan,
    WeightVersion,
)
from libra_cli.runtime.driver import describe
from libra_cli.runtime.store.event_codec import decode, encode, event_classes, pack, unpack

TURN = e.TurnGenerated(
    request=7,
    trajectory=TrajectoryId(3, 1, 2),
    slot="gpu-01/0",
    incarnation=4,
    prompt_ids=array("i", range(900)),
    token_ids=array("i", [5, 6]),
    logprobs=array("f", [-0.1, -2.5]),
    spans=(VersionSpan(3, 0, 2),),
    newest=WeightVersion(1, 3),
    cache_key=WeightVersion(1, 2),
    finish_reason="stop",
    started_at=1.5,
)


def again(event: e.Event, asked: object = None) -> e.Event | None:
    return decode(unpack(pack([1.0, 2, encode(event, asked)]))[2], asked)


ARRAYS = {"array": list, "Mapping": dict}


def strategy_of(hint: Any) -> st.SearchStrategy[Any]:
    """Anything that the hint allows; arrays where lists stand for them."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in MANY:
        found: st.SearchStrategy[Any] = MANY[origin](*parts)
        return found
    if parts and origin is not typing.Literal:
        return st.one_of(*map(strategy_of, parts))
    if hint in PLAIN:
        return PLAIN[hint]
    if hasattr(hint, "__dataclass_fields__") or hasattr(hint, "_fields"):
        hints = typing.get_type_hints(hint, localns=ARRAYS)
        names = getattr(hint, "_fields", None) or hint.__dataclass_fields__
        return st.builds(hint, **{name: strategy_of(hints[name]) for name in names})
    return st.from_type(hint)


def tuples(*parts: Any) -> st.SearchStrategy[Any]:
    if parts[-1] is not Ellipsis:
        return st.tuples(*map(strategy_of, parts))
    return st.lists(strategy_of(parts[0]), max_size=2).map(tuple)


PLAIN: dict[Any, st.SearchStrategy[Any]] = {
    float: st.floats(allow_nan=False),
    int: st.integers(-(2**63), 2**63),
    str: st.text(st.characters(codec=None, exclude_categories=()), max_size=5),
}
MANY: dict[Any, Any] = {
    list: lambda _: st.sampled_from([array("i", [1, -2]), array("f"), array("f", [0.5])]),
    tuple: tuples,
    dict: lambda key, value: st.dictionaries(strategy_of(key), strategy_of(value), max_size=2),
    frozenset: lambda item: st.frozensets(strategy_of(item), max_size=2),
}


@pytest.mark.parametrize("kind", typing.get_args(e.Event), ids=lambda kind: kind.__name__)
def test_an_event_of_any_kind_with_any_values_comes_back_as_it_was(kind):
    @settings(max_examples=10, deadline=None, database=None)
    @given(strategy_of(kind))
    def check(event: Any) -> None:
        found = again(event)
        assert found == event
        # -0.0, tuples and enums too; equal sets may tell their items in another order
        assert sorted(repr(found)) == sorted(repr(event))

    check()


def test_what_the_action_brought_stays_with_the_action():
    asked = SimpleNamespace(prompt_ids=TURN.prompt_ids, token_ids=array("i", TURN.token_ids))
    assert len(pack(encode(TURN, asked))) < 250 < 3600 < len(pack(encode(TURN)))
    assert again(TURN, asked) == TURN


def test_numbers_of_numpy_come_back_as_numbers():
    done = e.StepDone(1, 2, None, {"loss": np.float64(0.5)})
    assert again(done) == e.StepDone(1, 2, None, {"loss": 0.5})


def test_no_event_has_a_list_which_would_be_taken_for_something_else():
    hints = [
        hint
        for kind in event_classes().values()
        for hint in typing.get_type_hints(kind, localns={"array": tuple}).values()
    ]
    assert not [hint for hint in hints if "list" in str(hint)]


@pytest.mark.parametrize("value", [["Popen", "true"], ["system"], "ServerChecked", 5, [1, 2]])
def test_bytes_make_nothing_but_events(value):
    with pytest.raises((ValueError, TypeError, IndexError)):
        decode(unpack(pack(value)))
    with pytest.raises((ValueError, TypeError)):
        decode(unpack(pack(["ServerChecked", value, 1, 2])))


def test_log_ratios_are_told_again_and_described_by_their_number():
    told = LogRatios(array("q", [EVALUATION_GROUPS - 1, 0, 1, 3]), array("H", [0x3C00, 0, 0x7E00]))
    done = e.StepDone(1, 2, log_ratios=told)
    assert again(done) == done
    assert describe(done)["log_ratios"] == {"branches": 4, "values": 3}


def test_an_event_of_an_older_libra_lacks_fields_that_have_defaults():
    told = encode(TURN)
    assert decode(unpack(pack(told[:-1]))) == TURN
    with pytest.raises(ValueError, match="TurnGenerated has"):
        decode(unpack(pack([*told, 1])))
    with pytest.raises(TypeError):
        decode(unpack(pack(told[:5])))
