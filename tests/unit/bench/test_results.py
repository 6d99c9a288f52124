"""What may be concluded from rows, and what may not."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra_cli.bench.results import (
    METRICS,
    ComparisonSummary,
    ExperimentResult,
    ResultRow,
    compare,
    interval,
    to_json,
)
from tests.sample_bench import MAKESPANS, PLANNERS, row, rows

KEYS = {"policy", "planner", "trace", "seed", "variant", "bound_s", *METRICS}
TEN_SECONDS = st.floats(10.0, 20.0)


def of(
    summaries: list[ComparisonSummary], policy: str, planner: str = "fixed"
) -> ComparisonSummary:
    return next(s for s in summaries if (s.policy, s.planner) == (policy, planner))


def summarise(rows: list[ResultRow]) -> list[ComparisonSummary]:
    return [summary for comparison in compare(rows) for summary in comparison.summaries]


def test_an_interval_is_the_textbook_one() -> None:
    # mean 3, standard deviation sqrt(2.5), n 5, t 2.7764 (any statistics table)
    half = 2.7764 * math.sqrt(2.5 / 5)
    assert interval([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx((3 - half, 3 + half), abs=1e-4)


def test_one_seed_gives_means_and_no_interval() -> None:
    summary = of(summarise(rows(MAKESPANS, seeds=1)), "libra")
    assert summary.seeds == 1
    assert set(summary.ci95.values()) == {None}
    assert summary.baseline is not None
    assert summary.baseline.ci95 is None
    assert not summary.significant


def test_differences_are_paired_so_hard_seeds_do_not_hide_them() -> None:
    """Workloads differ by 13 %, the policies by 10 %, and by nearly the same in every seed."""
    summary = of(summarise(rows({"least-loaded": 1.0, "libra": 0.9}, noise=0.002)), "libra")
    assert summary.baseline is not None
    assert summary.baseline.mean == pytest.approx(-0.1, abs=0.01)
    assert summary.baseline.significant
    low, high = summary.ci95["makespan_s"] or (0.0, 0.0)
    assert (high - low) / summary.mean["makespan_s"] > 0.1


def test_a_difference_smaller_than_its_noise_is_not_significant() -> None:
    summaries = summarise(rows({"least-loaded": 1.0, "heddle": 0.901, "libra": 0.9}, noise=0.02))
    assert not of(summaries, "libra").significant


def test_who_knows_the_future_is_nobodys_rival_and_never_the_best() -> None:
    summaries = summarise(rows(MAKESPANS, noise=0.0))
    assert of(summaries, "libra").best
    assert [s.policy for s in summaries if s.best] == ["libra"]
    assert all(s.rival is not None and s.rival.to[2] != "known-lengths" for s in summaries)
    rival = of(summaries, "libra").rival
    assert rival is not None
    assert rival.to == ("", "fixed", "heddle")


def test_the_share_of_the_bound_is_the_mean_over_the_seeds() -> None:
    some = [replace(row("libra", seed, 100.0 + 100 * seed), bound_s=80.0) for seed in range(2)]
    (libra,) = summarise(some)
    assert libra.share_of_bound == pytest.approx((0.8 + 0.4) / 2)
    assert libra.share_ci95 is not None


def test_nothing_is_said_of_a_bound_that_is_not_there() -> None:
    for summary in summarise(rows({"least-loaded": 1.0, "libra": 0.9})):
        assert (summary.share_of_bound, summary.share_ci95) == (None, None)


@given(
    st.lists(st.tuples(TEN_SECONDS, TEN_SECONDS, TEN_SECONDS), min_size=2, max_size=6),
    st.floats(0.1, 10.0),
)
def test_what_is_concluded_does_not_depend_on_the_unit(
    triples: list[tuple[float, float, float]], factor: float
) -> None:
    def conclude(scale: float) -> list[ComparisonSummary]:
        names = ("least-loaded", "libra", "known-lengths")
        return summarise(
            [
                row(name, seed, makespan * scale)
                for seed, triple in enumerate(triples)
                for name, makespan in zip(names, triple, strict=True)
            ]
        )

    for one, other in zip(conclude(1.0), conclude(factor), strict=True):
        if one.baseline is not None and other.baseline is not None:
            assert other.baseline.mean == pytest.approx(one.baseline.mean, abs=1e-9)


def test_only_seeds_that_both_have_are_compared() -> None:
    some = [row("least-loaded", seed, 100.0 + seed) for seed in range(4)]
    some += [row("libra", seed, 90.0 + seed) for seed in range(1, 3)]
    libra = of(summarise(some), "libra")
    assert libra.baseline is not None
    assert libra.baseline.mean == pytest.approx(-10 / fmean([101.0, 102.0]))
    assert summarise([row("least-loaded", 0), row("libra", 1)])[1].baseline is None


def test_planners_are_judged_by_throughput_against_the_best_static_split() -> None:
    summaries = summarise(rows(PLANNERS, planners=True, noise=0.0))
    libra = of(summaries, "libra", "libra")
    assert libra.judged_by == "throughput_tok_s"
    assert libra.best
    assert libra.baseline is not None
    assert libra.baseline.to[1] == "static-best"
    assert libra.baseline.mean == pytest.approx(1 / 0.81 - 1)


def test_a_planners_baseline_is_the_usual_way_where_it_was_run() -> None:
    usual = [row("sticky-least-loaded", seed, 350.0, planner="static-best") for seed in range(4)]
    (comparison,) = compare([*rows(PLANNERS, planners=True), *usual])
    assert comparison.names == (*PLANNERS, "static-best, sticky-least-loaded")
    libra = of(list(comparison.summaries), "libra", "libra")
    assert libra.baseline is not None
    assert libra.baseline.to == ("", "static-best", "sticky-least-loaded")


def test_every_variant_and_trace_is_compared_by_itself() -> None:
    several = [
        *rows(MAKESPANS, variant="costs x0.5"),
        *rows(MAKESPANS, variant="costs x2"),
        *rows(MAKESPANS, trace="mint"),
    ]
    comparisons = compare(several)
    assert [(c.variant, c.trace) for c in comparisons] == [
        ("costs x0.5", "tau2bench_closed_models"),
        ("costs x2", "tau2bench_closed_models"),
        ("", "mint"),
    ]
    assert all(c.names == tuple(MAKESPANS) for c in comparisons)


def test_variants_of_one_thing_are_compared_with_one_another() -> None:
    parts = [*rows({"libra": 1.0}), *rows({"libra": 1.1}, variant="without the tree")]
    (comparison,) = compare(parts)
    assert comparison.names == ("as it is", "without the tree")
    second = comparison.summaries[1]
    assert second.baseline is not None
    assert second.baseline.to == ("", "fixed", "libra")


def test_a_thing_built_up_part_by_part_is_compared_with_its_first_step() -> None:
    built = [
        *rows({"uniform": 1.2}, planners=True, variant="static uniform"),
        *rows({"static-best": 1.0}, planners=True, variant="+ planner"),
        *rows({"libra": 0.9}, planners=True, variant="+ elastic pool"),
        *rows({"libra": 0.9, "libra without the tree": 1.0}),
    ]
    parts, scheduler = compare(built)
    assert parts.names == ("static uniform", "+ planner", "+ elastic pool")
    assert parts.summaries[0].baseline is None
    assert {s.baseline.to[0] for s in parts.summaries[1:] if s.baseline} == {"static uniform"}
    assert parts.variant == scheduler.variant == ""
    assert scheduler.names == ("libra", "libra without the tree")


def test_one_contender_alone_keeps_the_name_of_its_variant() -> None:
    (comparison,) = compare(rows({"libra": 1.0}, variant="drift x1 x4"))
    assert (comparison.variant, comparison.names) == ("drift x1 x4", ("libra",))
    assert comparison.summaries[0].rival is None
    assert not comparison.summaries[0].best


def test_a_row_given_twice_is_a_mistake_and_not_two_measurements() -> None:
    with pytest.raises(ValueError, match="two rows"):
        summarise([row(), row()])


def test_no_rows_say_nothing() -> None:
    assert summarise([]) == []
    assert to_json([])["rows"] == []


def test_the_json_has_the_documented_keys() -> None:
    some = rows(MAKESPANS)
    told = json.loads(json.dumps(to_json([ExperimentResult("policies", some, [], [])])))
    assert set(told["rows"][0]) == KEYS
    assert len(told["rows"]) == len(some)
    for summary in told["summary"]:
        assert {"policy", "planner", "mean", "ci95", "share_of_bound"} <= set(summary)
        assert set(summary["mean"]) == set(summary["ci95"]) == set(METRICS)


def test_a_contender_that_did_nothing_breaks_nothing() -> None:
    nothing = replace(row("least-loaded"), makespan_s=0.0, throughput_tok_s=0.0)
    rows: list[ResultRow] = [nothing, row("libra")]
    assert [s.baseline for s in summarise(rows)] == [None, None]
