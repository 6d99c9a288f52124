"""No simulated run is faster than the bound, and a run that is all path or all work nears it."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra_cli.bench.bounds import ServerShape, Work, capacity_s, path_s, work_of
from libra_cli.bench.conditions import MAX_LEN
from libra_cli.bench.jobs import Job, run_job
from libra_cli.core.planning.rollout_table import PlannedBucket
from libra_cli.core.planning.search import Layout
from libra_cli.sim.profiles import load_profile
from libra_cli.sim.traces import RecordedEpisode, Trace, Turn
from tests.sim_scene import COSTS

PROFILE = load_profile("a800-qwen3-14b")
EQUAL = (PlannedBucket(4, 2, MAX_LEN, 64),)
UNLIKE = (PlannedBucket(1, 2, 8_000, 64), PlannedBucket(4, 1, MAX_LEN, 64))


def episode(
    turns: int, generated: int, *, prompt: int = 500, tool_s: float = 1.0, task: str = "t"
) -> RecordedEpisode:
    turn = Turn(generated, 100, "search", None, tool_s)
    return RecordedEpisode(task, prompt, (turn,) * turns, 0.0)


def played(
    trace: Trace, policy: str, buckets: tuple[PlannedBucket, ...] = EQUAL
) -> tuple[float | None, float]:
    """The bound and the makespan of a short run."""
    layout = Layout(buckets, 16 - sum(bucket.gpus for bucket in buckets))
    job = Job(
        trace,
        PROFILE,
        PROFILE,
        16,
        policy,
        "fixed",
        0,
        layout=layout,
        steps=3,
        groups_per_step=2,
        group_size=2,
        bound=4,
        staleness="hold",
    )
    row, _ = run_job(job)
    return row.bound_s, row.makespan_s


@pytest.mark.parametrize("policy", ["libra", "least-loaded", "known-lengths", "heddle+admission"])
def test_nobody_is_faster_than_the_bound(policy: str) -> None:
    random = Random(2)
    kinds = [
        episode(
            random.randint(1, 12),
            random.randint(1, 900),
            prompt=random.choice((100, 3_000, 40_000)),
            tool_s=random.choice((0.0, 0.1, 5.0)),
            task=f"t{number // 4}",
        )
        for number in range(80)
    ]
    bound, makespan = played(Trace("made up", tuple(kinds)), policy)
    assert bound is not None
    assert 0.1 * makespan < bound <= makespan


def test_a_run_of_few_long_trajectories_nears_the_bound() -> None:
    trace = Trace("long", (episode(40, 500),))
    bound, makespan = played(trace, "libra")
    assert bound is not None
    assert bound > 0.5 * makespan


def test_unlike_servers_have_no_bound() -> None:
    bound, _ = played(Trace("long", (episode(4, 50),)), "libra", UNLIKE)
    assert bound is None


def test_a_trajectory_alone_takes_its_tokens_and_its_tools() -> None:
    one = episode(1, 101, prompt=1_000, tool_s=7.0)
    alone = COSTS[4].step_s + 100 * COSTS[4].decode_step_s(1, 1_050.5)
    assert path_s(COSTS[4], one, max_len=10_000) == pytest.approx(7.0 + alone)


def test_what_is_over_the_longest_context_is_not_counted() -> None:
    whole, cut = episode(10, 100), episode(10, 100)
    most = work_of([[whole]], max_len=10**6)
    some = work_of([[cut]], max_len=900)
    assert (most.tokens, most.prompt) == (990, 500 + 9 * 100)
    assert (some.tokens, some.prompt) == (99 + 99, 500 + 100)


def test_a_groups_prompt_is_computed_once() -> None:
    group = [episode(1, 10), episode(1, 10)]
    assert work_of([group], max_len=10**6).prompt == 500


def test_alike_servers_share_the_work_evenly() -> None:
    work = work_of([[episode(20, 300)]], max_len=10**6)
    one = capacity_s(ServerShape(COSTS[1], 1, 64), work)
    assert capacity_s(ServerShape(COSTS[1], 4, 64), work) == pytest.approx(one / 4)


def test_less_cache_never_makes_it_faster() -> None:
    work = work_of([[episode(20, 300, prompt=20_000)]], max_len=10**6)
    costs = [replace(COSTS[1], kv_tokens=kv_tokens) for kv_tokens in (10**6, 30_000)]
    wide, tight = (capacity_s(ServerShape(cost, 1, 64), work) for cost in costs)
    assert wide < tight


@given(
    step_s=st.floats(1e-3, 1e-1),
    prompt_token_s=st.floats(1e-6, 1e-3),
    free_tokens=st.sampled_from((0, 128, 512)),
    tokens=st.floats(1e2, 1e7),
    kv=st.floats(1e4, 1e10),
    prompt=st.floats(1e3, 1e7),
)
def test_no_number_of_steps_is_faster(
    step_s: float, prompt_token_s: float, free_tokens: int, tokens: float, kv: float, prompt: float
) -> None:
    cost = replace(COSTS[1], step_s=step_s, prefill_token_s=prompt_token_s, free_tokens=free_tokens)
    found = capacity_s(ServerShape(cost, 1, 64), Work(tokens, kv, prompt))
    fewest = max(tokens / 64, kv / cost.kv_tokens)

    def seconds(steps: float) -> float:
        paid = max(0.0, prompt - free_tokens * steps)
        return (
            step_s * steps + cost.sequence_s * tokens + cost.kv_token_s * kv + prompt_token_s * paid
        )

    tried = [seconds(fewest * factor / 16) for factor in range(16, 400)]
    assert found <= min(tried) * (1 + 1e-9)
    assert any(
        found == pytest.approx(seconds(steps))
        for steps in (fewest, max(fewest, prompt / max(free_tokens, 1)))
    )
