"""No simulated run is faster than the bound, and a run that is all path or all work nears it."""

from dataclasses import replace
from random import Random

import pytest

from libra_cli.bench import jobs
from libra_cli.bench.bounds import ServerShape, capacity_s, path_s, work_of
from libra_cli.bench.jobs import Job, run_job
from libra_cli.core.planning.rollout_table import PlannedBucket
from libra_cli.core.planning.search import Layout
from libra_cli.sim.profiles import load_profile
from libra_cli.sim.traces import RecordedEpisode, Trace, Turn
from tests.sim_scene import COSTS

PROFILE = load_profile("a800-qwen3-14b")
BUCKETS = (PlannedBucket(1, 2, 8_000, 64), PlannedBucket(4, 1, jobs.MAX_LEN, 64))
SHAPES = [ServerShape(PROFILE.servers[1], 2, 64), ServerShape(PROFILE.servers[4], 1, 64)]


def episode(
    turns: int, generated: int, *, prompt: int = 500, tool_s: float = 1.0, task: str = "t"
) -> RecordedEpisode:
    turn = Turn(generated, 100, "search", None, tool_s)
    return RecordedEpisode(task, prompt, (turn,) * turns, 0.0)


def played(trace: Trace, policy: str) -> tuple[float, float]:
    """The bound and the makespan of a short run."""
    layout = Layout(BUCKETS, 10)
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
    assert row.bound_s is not None
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
    assert 0.1 * makespan < bound <= makespan


def test_a_run_of_few_long_trajectories_nears_the_bound() -> None:
    trace = Trace("long", (episode(40, 500),))
    bound, makespan = played(trace, "libra")
    assert bound > 0.5 * makespan


def test_a_trajectory_alone_takes_its_tokens_on_the_fastest_server_and_its_tools() -> None:
    one = episode(1, 101, prompt=1_000, tool_s=7.0)
    fast = COSTS[4]
    alone = fast.step_s + 100 * fast.decode_step_s(1, 1_050.5)
    assert path_s([COSTS[1], fast], one, max_len=10_000) == pytest.approx(7.0 + alone)


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
    one = capacity_s([ServerShape(COSTS[1], 1, 64)], work)
    assert capacity_s([ServerShape(COSTS[1], 4, 64)], work) == pytest.approx(one / 4)


def test_a_second_shape_never_makes_it_slower() -> None:
    work = work_of([[episode(20, 300)]], max_len=10**6)
    alone = [capacity_s([shape], work) for shape in SHAPES]
    assert capacity_s(SHAPES, work) <= min(alone)


def test_less_cache_never_makes_it_faster() -> None:
    work = work_of([[episode(20, 300, prompt=20_000)]], max_len=10**6)
    costs = [replace(COSTS[1], kv_tokens=kv_tokens) for kv_tokens in (10**6, 30_000)]
    wide, tight = (capacity_s([ServerShape(cost, 1, 64)], work) for cost in costs)
    assert wide < tight
