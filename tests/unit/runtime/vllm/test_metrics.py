"""What is made of a server's counters."""

from __future__ import annotations

from libra_cli.runtime.vllm.metrics import named

BEFORE = {"steps": 10, "draft_steps": 4, "draft_tokens": 30, "accepted_tokens": 12}


def test_a_server_without_speculative_decoding_has_no_metric_of_it():
    assert named({}, {"steps": 10}) == {"request_queue_time_s": None}


def test_drafts_are_judged_by_what_came_between_two_readings():
    now = {"steps": 14, "draft_steps": 7, "draft_tokens": 40, "accepted_tokens": 17}
    assert named(BEFORE, now) == {
        "request_queue_time_s": None,
        "draft_acceptance": 0.5,
        "draft_steps": 0.75,
    }


def test_where_nothing_was_drafted_acceptance_is_not_known():
    now = BEFORE | {"steps": 20}
    assert named(BEFORE, now) == {
        "request_queue_time_s": None,
        "draft_acceptance": None,
        "draft_steps": 0.0,
    }


def test_a_head_is_told_by_how_far_the_policy_has_gone_since():
    now = BEFORE | {"steps": 20, "draft_lag": 7}
    assert named(BEFORE, now)["draft_lag"] == 7
