"""A short campaign: one real run, one fault of each of eleven kinds, and everything that must hold.

Its servers compute nothing: no claim here is about vLLM. ``make nightly`` plays it on vLLM too, and
``make chaos`` plays longer ones, with all kinds.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.chaos import Campaign, Result
from tests.cluster.cluster import cluster
from tests.cluster.faults import KINDS
from tests.cluster.recipe import recipe_of, share_models, with_fake_servers
from tests.live import BACKENDS, require
from tests.netns import missing

pytestmark = [
    pytest.mark.integration,
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(missing()), reason=missing()),
]
require("vllm")

PLANNED = {
    "bridge killed": 0,
    "disk full for 5 s": 2,
    "agent killed": 1,
    "cable cut for 3 s": 2,
    "server killed": 0,
    "controller killed": None,
    "sshd restarted": 1,
    "trainer killed": 2,
    "controller cannot write for 5 s": None,
    "memory full for 5 s": 1,
    "gradient worker killed between two moves": 1,
}
"""Kind -> index of its host, in order."""


@pytest.fixture(scope="module", params=BACKENDS)
def played(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, models: Path
) -> tuple[Result, list[str]]:
    """What the campaign found, and what it said."""
    base, told = tmp_path_factory.mktemp("chaos"), list[str]()
    with cluster(3, base) as c:
        share_models(c, models)
        recipe = recipe_of(c)
        if request.param == "fake":
            recipe = with_fake_servers(recipe)
        campaign = Campaign(c, told.append, recipe)
        campaign.begin()
        for name, place in PLANNED.items():
            campaign.play([(KINDS[name], place)])
        campaign.finish()
    return campaign.result, told


@pytest.mark.parametrize("kind", list(PLANNED))
def test_the_run_recovers(played, kind):
    result, told = played
    (one,) = [one for one in result.injections if one.kind.name == kind]
    assert one.seconds is not None, "\n".join(told)


def test_what_must_hold_holds_of_the_one_run_there_was(played):
    result, told = played
    ((_, violated),) = result.runs.items()
    assert violated == [], "\n".join(told)


def test_nothing_is_left_on_any_host(played):
    result, _ = played
    assert result.left == []
