"""A run with trajectories whose tokens are known, and in which a tool wrote what is hostile."""

from __future__ import annotations

import json
import struct
from array import array
from math import log, nan
from pathlib import Path

from libra_cli.core import records as r
from libra_cli.core.types import BranchTokens, VersionSpan
from libra_cli.node.model.tokenizer import build_tokenizer, encode, observation_text, prompt_text
from libra_cli.runtime.store.journal import Journal
from tests.sample_run import START, step_record, write_whole

HOSTILE = "\x1b]0;owned\x07\u202e<script>alert(1)</script>"


def trajectory(group: int, member: int, **changes: object) -> r.TrajectoryRecord:
    """One of two turns, with hostile text of a tool between."""
    tokenizer = build_tokenizer()
    parts = [prompt_text("start ab"), "look<|im_end|>", observation_text(HOSTILE), "cd<|im_end|>"]
    ids, logprobs, spans = array("i"), array("f"), list[VersionSpan]()
    for number, part in enumerate(parts):
        start = len(ids)
        ids.extend(encode(tokenizer, part))
        logprobs.extend([-0.1 - number if number % 2 else 0.0] * (len(ids) - start))
        if number % 2:
            spans.append(VersionSpan(number, start, len(ids)))
    mask = array("b", [logprob < 0 for logprob in logprobs])
    values: dict[str, object] = {
        "group_id": group,
        "member": member,
        "attempt": 0,
        "state": "finished",
        "started_at": START,
        "ended_at": START + 1,
        "reward": float(member),
        "turns": 2,
        "generated_tokens": 10 + member,
        "context_tokens": len(ids),
        "min_version": 1,
        "max_version": 3,
        "spans_json": json.dumps([[span.version, span.start, span.end] for span in spans]),
        "detail": "",
        "tokens": (BranchTokens(0, ids, mask, logprobs, tuple(spans)),),
    }
    return r.TrajectoryRecord(**(values | changes))  # type: ignore[arg-type]


RATIOS = (0.25, 1.0, 1.5, 3.0, None)
"""Of the first generated tokens of a trajectory; the others have 1, but where there is None."""


def credit(group: int, member: int) -> r.CreditRecord:
    """What it was weighed by, and the ratios of its tokens."""
    (branch,) = trajectory(group, member).tokens
    generated = sum(branch.loss_mask)
    nats = [nan if ratio is None else log(ratio) for ratio in RATIOS]
    values = struct.pack(f"<{generated}e", *nats, *[0.0] * (generated - len(nats)))
    advantages = json.dumps([[[0, -0.5]]])
    return r.CreditRecord(group, member, 0, 41, advantages, "[]", log_ratios=(values,))


def write_played(run_dir: Path) -> Path:
    """A run of 40 steps, and a step 41 of one group, whose tokens are known."""
    made = write_whole(run_dir)
    group = r.GroupRecord(9000, "trained", START, START + 1, 40, 41, 0.5, "")
    late = r.GroupRecord(9001, "trained", START, START + 1, 40, 40, 0.5, "")
    with Journal(made) as journal:
        kept: tuple[r.Record, ...] = (
            step_record(41, START + 900),
            group,
            late,
            r.LateRecord(9001, 1, 41),
            credit(9000, 0),
            *(trajectory(9000, member) for member in range(2)),
            *(trajectory(9001, member) for member in range(2)),
            trajectory(9000, 2, state="running", ended_at=None, tokens=()),
        )
        for record in kept:
            journal.save(record)
    return made
