"""A run on demonstrations: no server, every conversation trained on once, in order."""

from __future__ import annotations

from array import array
from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra_cli.config.recipe import Recipe
from libra_cli.core import actions as a
from libra_cli.core import events as e
from libra_cli.core.launch.placement import initial_plan, slots_of
from libra_cli.core.records import StepRecord, TrajectoryRecord
from libra_cli.core.types import Pool
from tests.world import FEW_RUNS, Faults, World
from tests.world import recipe as played

TOKENS, MASK = array("i", [1, 2, 3, 4]), array("b", [0, 0, 1, 1])


def recipe(**training: object) -> Recipe:
    return Recipe.model_validate(
        {
            "run": {"name": "world", "steps": 5},
            "nodes": [{"host": "a", "slots": 2}, {"host": "b", "slots": 2, "pool": "hybrid"}],
            "model": {"path": "/model", "max_len": 60},
            "demonstrations": "demonstrations.jsonl",
            "training": {"loss": "sft", "groups_per_step": 3, "checkpoint_every": 2, **training},
        }
    )


class Reader(World):
    """A world whose episodes are demonstrations; those of ``bad`` groups cannot be read.

    ``asked`` counts how often each was asked for.
    """

    bad: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        self.asked: Counter[int] = Counter()
        super().__post_init__()

    def _do_start_episode(self, action: a.StartEpisode) -> None:
        self.asked[action.trajectory.group] += 1
        if action.trajectory.group in self.bad:
            self.later(e.EpisodeFailed(action.trajectory, "no conversation"), 0.01, 0.01)
            return
        self.later(e.DemonstrationRead(action.trajectory, TOKENS[:], MASK[:], 1), 0.01, 0.01)


def read(seed: int = 0, faults: Faults | None = None, **training: object) -> Reader:
    return Reader(Random(seed), faults or Faults(), recipe(**training))


def test_every_slot_trains_and_nothing_serves():
    plan = initial_plan(recipe())
    assert plan.servers == ()
    assert plan.train == ("a/0", "a/1", "b/0", "b/1")
    assert {slot.pool for slot in slots_of(recipe())} == {Pool.TRAIN}


def test_open_nodes_train_on_all_their_gpus():
    base = recipe().model_dump(mode="json")
    base["nodes"] = [{"host": "a", "gpus": 4}, {"host": "b", "gpus": 4}]
    plan = initial_plan(Recipe.model_validate(base))
    assert plan.servers == ()
    assert sum(len(slot.gpus) for slot in slots_of(Recipe.model_validate(base))) == 8


@pytest.mark.parametrize("bound", [0, 1])
@FEW_RUNS
@given(seed=st.integers(0, 2**32))
def test_every_conversation_is_trained_once_and_in_order(bound, seed):
    world = read(seed, max_staleness=bound).run()
    assert world.end == a.End("finished", "")
    assert world.trained == [(group, group // 3 + 1) for group in range(15)]
    rows = [row for row in world.records if isinstance(row, StepRecord)]
    assert all(row.generated_tokens == 6 and row.staleness_max == 0 for row in rows)


def test_its_tokens_are_of_no_version():
    world = read().run()
    ended = [r for r in world.records if isinstance(r, TrajectoryRecord) and r.state == "finished"]
    assert {row.min_version for row in ended} == {None}
    assert all(sample.trajectory.loss_mask == MASK for sample in world.samples)
    assert not any(sample.fresh for sample in world.samples)


@FEW_RUNS
@given(seed=st.integers(0, 2**32))
def test_a_trainer_that_dies_goes_on_with_what_its_checkpoint_missed(seed):
    world = read(seed, Faults(trainer_dies=0.02)).run()
    if world.end == a.End("finished", ""):
        assert {group for group, _ in world.trained} >= set(range(15))


def test_one_that_cannot_be_read_is_left_out_and_the_next_taken():
    world = read()
    world.bad = frozenset({1, 7})
    world.run()
    assert world.end == a.End("finished", "")
    assert [group for group, _ in world.trained] == [n for n in range(17) if n not in world.bad]
    assert {world.asked[group] for group in range(17)} == {1}


def test_a_file_of_which_nothing_can_be_read_ends_the_run():
    world = read()
    world.bad = frozenset(range(1000))
    world.run()
    assert world.end is not None
    assert world.end.state == "failed"
    assert "the demonstration breaks every time: no conversation" in world.end.error


def test_of_several_environments_the_most_patient_says_how_often_a_member_is_played_again():
    retries = {"calculator": 1, "pointer-chase": 4, "retail": 2}
    environments = [{"name": name, "retries": most} for name, most in retries.items()]
    world = World(Random(0), recipe=played(environment=environments))
    assert world.machine.ledger.retries == 4
    assert read().machine.ledger.retries == 0
