from __future__ import annotations

from dataclasses import fields, replace
from random import Random

import pytest

from libra_cli.config.recipe import Recipe
from libra_cli.core.costs.profile import (
    Contention,
    MemoryModel,
    MoveCost,
    Profile,
    ProfileError,
    TrainingCost,
)
from libra_cli.core.costs.server import ServerCost
from libra_cli.core.types import ToolOutcome, TrajectoryId
from libra_cli.sim.traces import RecordedEpisode, Turn
from tests.research.fidelity.run import (
    Recorded,
    _groups,
    compared,
    episodes,
    replayed,
)
from tests.research.fidelity.server import RunError

PROFILE = Profile(
    name="cpu-tiny",
    gpu="CPU",
    model="tiny",
    servers={
        1: ServerCost(
            tensor_parallel=1,
            step_s=0.002,
            sequence_s=3e-4,
            kv_token_s=1e-7,
            prefill_token_s=1e-5,
            prefill_pair_s=0.0,
            kv_tokens=100_000,
            request_s=1e-3,
        )
    },
    training=TrainingCost(
        token_s=9e-5,
        pair_s=1e-7,
        step_s=0.05,
        facts=MemoryModel(5e5, 3, 128, 268, 1536.0, 11.0),
        node_bandwidth=1e11,
        network_bandwidth=1e10,
    ),
    moves=MoveCost(10.0, 30.0, 10.0, {1: 30.0}),
    overhead_s=0.0,
    provenance={"measured": "made up"},
    surroundings=Contention(
        sync_s=0.06, stall_s=0.04, turn_s=0.001, serving_slowdown=1.4, training_slowdown=1.1
    ),
)


def recipe(steps=6, **training):
    return Recipe.model_validate(
        {
            "run": {"steps": steps},
            "nodes": [{"host": "local", "slots": 2, "pool": ["rollout", "train"]}],
            "model": {"path": "/m", "max_len": 512},
            "rollout": {
                "group_size": 4,
                "max_turns": 24,
                "max_turn_tokens": 16,
                "buckets": [{"name": "all", "max_num_seqs": 16}],
            },
            "training": {"groups_per_step": 4, "checkpoint_every": 100, **training},
        }
    )


def a_run(profile=PROFILE, **kwargs):
    """What the journal of a run holds, made by simulating it."""
    random = Random(3)
    given = Recorded("a-run", recipe(**kwargs), (), (), frozenset())
    drawn = {
        TrajectoryId(group, member): RecordedEpisode(
            str(group),
            25,
            tuple(
                Turn(random.randint(1, 16), random.randint(1, 9), "get", ToolOutcome.OK, 1e-4)
                for _ in range(random.randint(1, 8))
            ),
            0.0,
        )
        for group in range(80)
        for member in range(4)
    }
    rows = []
    for who, episode in drawn.items():
        context = episode.prompt
        for number, turn in enumerate(episode.turns):
            rows.append(turn_row(who, number, context, turn))
            context += turn.generated + turn.observation
    whole = replace(given, turns=tuple(rows), finished=frozenset(drawn))
    tape = replayed(whole, profile)
    finished = frozenset(TrajectoryId(t.group_id, t.member, t.attempt) for t in tape.trajectories)
    played = [row for row in rows if TrajectoryId(row.group_id, row.member) in finished]
    return replace(whole, steps=tuple(tape.steps), turns=tuple(played), finished=finished)


def turn_row(who, number, prompt, turn):
    from libra_cli.core.records import TurnRecord

    values = {
        "group_id": who.group,
        "member": who.member,
        "attempt": who.attempt,
        "turn": number,
        "prompt_tokens": prompt,
        "generated_tokens": turn.generated,
        "tools_json": '[["get", "ok", 0.0001, 8]]',
    }
    blank = {field.name: 0 for field in fields(TurnRecord)}
    return TurnRecord(**{**blank, **values})


def test_a_simulated_run_is_simulated_as_it_was():
    found = compared(a_run(), PROFILE)
    assert len(found.recorded.steps_s) == 5
    assert found.step_error == pytest.approx(0, abs=0.02)
    assert found.train_error == pytest.approx(0, abs=0.03)
    assert found.each_error < 0.1


def test_a_profile_twice_as_slow_is_told_by_a_positive_error():
    run = a_run()
    assert compared(run, PROFILE.scaled(2)).step_error > 0.4
    assert compared(run, PROFILE.scaled(0.5)).step_error < -0.2


def test_weights_loading_and_the_trainer_slow_servers_down():
    calm = replace(PROFILE, surroundings=Contention(sync_s=0.06))
    assert compared(a_run(), calm).step_error < -0.05


def test_recorded_times_are_not_looked_at():
    run = a_run()
    later = tuple(replace(row, started_at=1e6, ended_at=2e6, queued_at=5e5) for row in run.turns)
    assert compared(replace(run, turns=later), PROFILE) == compared(run, PROFILE)


def test_episodes_are_those_of_the_journal():
    run = a_run()
    found = episodes(run)
    who = min(run.finished)
    rows = sorted(
        (row for row in run.turns if (row.group_id, row.member) == (who.group, who.member)),
        key=lambda row: row.turn,
    )
    episode = found[who.group, who.member]
    assert episode.prompt == rows[0].prompt_tokens
    assert [turn.generated for turn in episode.turns] == [row.generated_tokens for row in rows]
    assert episode.turns[0].tool_s == 0.0001
    assert episode.turns[0].outcome is ToolOutcome.OK


def test_what_did_not_end_is_played_with_the_length_of_another():
    run = a_run()
    groups = _groups(run)
    missing = max(who.group for who in run.finished) + 5
    for _ in range(missing):
        next(groups)
    assert all(episode.generated > 0 for episode in next(groups))


def test_two_steps_say_too_little():
    run = a_run()
    with pytest.raises(RunError, match="2 steps say too little"):
        compared(replace(run, steps=run.steps[:2]), PROFILE)


def test_a_run_without_trajectories_is_refused():
    with pytest.raises(RunError, match="no trajectory"):
        compared(replace(a_run(), finished=frozenset()), PROFILE)


def test_a_profile_without_the_shape_is_refused():
    servers = {2: replace(PROFILE.servers[1].linear(), tensor_parallel=2)}
    with pytest.raises(ProfileError, match="no server of 1 GPU"):
        compared(a_run(), replace(PROFILE, servers=servers))


def test_surroundings_survive_the_file():
    assert Profile.from_json(PROFILE.to_json()) == PROFILE
