"""Which checkpoints stay."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="needs torch")

from libra_cli.node.trainer.checkpoint import kept_checkpoints


@pytest.mark.parametrize(
    ("scores", "keep", "kept"),
    [
        pytest.param(["10-e1 .1", "20-e1 .3", "30-e1 .2"], 1, ["20-e1", "30-e1"], id="the best"),
        pytest.param(["10-e1 .3", "20-e1 .3", "30-e1 .2"], 1, ["10-e1", "30-e1"], id="the older"),
        pytest.param(["10-e1 .1", "20-e1 .2", "30-e1 .3"], 2, ["20-e1", "30-e1"], id="the last"),
        pytest.param(["10-e1", "20-e1", "30-e1"], 2, ["20-e1", "30-e1"], id="no score"),
        pytest.param(
            ["10 .9", "20-e9 .1", "30-e10 .2"], 1, ["10", "30-e10"], id="an older libra's"
        ),
        pytest.param(
            ["20-e1 .1", "30-e1 .9", "40-e1 .9", "30-e2 .1"], 2, ["20-e1", "30-e2"], id="unheard of"
        ),
    ],
)
def test_the_last_and_the_best_of_the_trainer_s_past_stay(scores, keep, kept):
    named = {}
    for entry in scores:
        at, _, score = entry.partition(" ")
        step, dash, incarnation = at.partition("-")
        named[f"step-{int(step):06d}{dash}{incarnation}"] = float(score) if score else None
    wanted = {f"step-{int(at.split('-')[0]):06d}" + at[2:] for at in kept}
    assert kept_checkpoints(named, keep, newest=list(named)[-1]) == wanted


def test_one_whose_evaluation_goes_on_stays_until_its_score_is_known():
    scores = {"step-000010-e1": None, "step-000020-e1": 0.3, "step-000030-e1": None}
    newest = "step-000040-e1"
    found = {**scores, newest: None}
    assert kept_checkpoints(found, 1, newest, pending=[10]) == set(found) - {"step-000030-e1"}
    assert kept_checkpoints(found, 1, newest) == {"step-000020-e1", newest}
