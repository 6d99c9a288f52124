"""A run that serves its own teacher and judge by vLLM, which is killed in the middle of it, and
which gets a slot more and gives it back."""

from __future__ import annotations

import json
import os
import signal
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.live import CHECKOUT, START_S, STEP_S, Live, live, require

require("torch")
require("vllm")

pytestmark = [
    pytest.mark.integration,
    pytest.mark.vllm,
    pytest.mark.timeout(900),
]
MODEL = CHECKOUT / "libra_cli/models/pointer-chase"
RECIPE = """
run: {{name: served, steps: 1000}}
nodes:
  - host: local
    slots: 4
    pool: [rollout, auto, train, models]
    env: {{OMP_NUM_THREADS: "1"}}
model: {{path: {model}, max_len: 256}}
models:
  - {{name: helper, path: {model}, max_slots: 2, max_len: 257, vllm_args: [--max-num-seqs, "16"]}}
planner: {{kind: fixed}}
teacher: {{served: helper}}
environment:
  name: dataset
  tasks: {rows}
  tool_timeout_s: 300
  args:
    reward: judge
    judge:
      served: helper
      prompt: "{{question}} {{answer}}"
      scale: [0, 9]
      body: {{max_tokens: 16, temperature: 1.0, structured_outputs: {{regex: "score: [0-9]"}}}}
rollout: {{group_size: 4, max_turns: 1, max_turn_tokens: 8, buckets: [{{max_num_seqs: 16}}]}}
training:
  loss: distill
  groups_per_step: 4
  learning_rate: 1e-3
  max_staleness: 1
  micro_batch_tokens: 2048
  export: {{at_end: []}}
"""


def test_a_teacher_and_a_judge_of_the_run_itself_are_waited_for_and_get_another_slot(
    tmp_path: Path,
) -> None:
    text = RECIPE.format(model=MODEL, rows=tasks(tmp_path))
    with live(text, tmp_path / "run", tmp_path) as run:
        run.wait_step(2, timeout_s=2 * START_S + 2 * STEP_S)
        served = ("model", "serving", "helper")
        assert slot(run, 3) == (*served, 0)
        ((pid,),) = run.query("SELECT pid FROM processes WHERE process = 'model-3'")
        os.kill(pid, signal.SIGKILL)
        assert run.order("helper=2").returncode == 0
        run.wait("a slot more", lambda: slot(run, 1)[:3] == served, timeout_s=START_S)
        run.wait("another life", lambda: slot(run, 3) == (*served, 1), timeout_s=START_S)
        assert "ended by signal 9" in run.log.read_text()
        assert run.order("helper=1").returncode == 0
        run.wait("it back", lambda: slot(run, 1)[:2] == ("rollout", "serving"), timeout_s=START_S)
        run.wait("its first request", lambda: ended(run) == 2, timeout_s=START_S)
        run.process.send_signal(signal.SIGINT)
        run.process.wait(START_S)
        assert run.query("SELECT state, error FROM runs") == [("stopped", "asked for")]
        moves = run.query("SELECT slot, from_role, to_role, state FROM moves ORDER BY move")
        assert moves == [
            ("local/1", "rollout", "model", "done"),
            ("local/1", "model", "rollout", "done"),
        ]
        check_what_they_said(run)


JUDGED = """
run: {{name: judged, steps: 1000}}
nodes:
  - host: local
    slots: 4
    pool: [rollout, auto, train, models]
    env: {{OMP_NUM_THREADS: "1"}}
model: {{path: {model}, max_len: 256}}
models:
  - {{name: judge, path: {model}, max_slots: 2, max_len: 512, vllm_args: [--max-num-seqs, "1"]}}
planner: {{plan_interval: 2}}
environment:
  name: dataset
  tasks: {rows}
  tool_timeout_s: 300
  args:
    reward: judge
    judge:
      served: judge
      prompt: "{{question}} {{answer}}"
      scale: [0, 9]
      body: {{max_tokens: 160, structured_outputs: {{regex: "x{{100}}score: [0-9]"}}}}
rollout: {{group_size: 4, max_turns: 1, max_turn_tokens: 8, buckets: [{{max_num_seqs: 16}}]}}
training:
  groups_per_step: 4
  learning_rate: 1e-6
  max_staleness: 1
  micro_batch_tokens: 2048
  export: {{at_end: []}}
"""
"""A judge that answers one request at a time, at length."""


@pytest.mark.nightly  # by an order, above
def test_the_planner_gives_another_slot_to_a_judge_that_everybody_waits_for(tmp_path: Path) -> None:
    rows = tasks(tmp_path, 4096)  # an answer is not asked for twice
    with live(JUDGED.format(model=MODEL, rows=rows), tmp_path / "run", tmp_path) as run:
        served = ("model", "serving", "judge")
        run.wait("a slot more", lambda: slot(run, 1)[:3] == served, timeout_s=4 * START_S)
        assert run.query("SELECT cause FROM plans WHERE plan = 1") == [("planner",)]
        run.wait("both to answer at once", lambda: both_answer(run), timeout_s=4 * STEP_S)
        failed = run.query("SELECT count(*) FROM trajectories WHERE state = 'failed'")
        assert failed == [(0,)], "somebody was given no answer"


def check_what_they_said(run: Live) -> None:
    steps = [json.loads(text) for (text,) in run.query("SELECT batch_json FROM steps")]
    # The first version is the teacher's own, so that it has nothing to teach it.
    assert steps[0]["reverse_kl"] == pytest.approx(0.0, abs=1e-3)
    rewards = {reward for (reward,) in run.query("SELECT reward FROM trajectories")}
    assert rewards - {None} <= {number / 9 for number in range(10)}
    assert len(rewards) > 2, "the judge gives one score"
    failed = run.query("SELECT count(*) FROM trajectories WHERE state = 'failed'")
    assert failed == [(0,)], "somebody was given no answer"


def tasks(directory: Path, number: int = 64) -> Path:
    """A file of so many questions for the dataset's environment."""
    rows = directory / "rows.jsonl"
    asked = ({"prompt": [{"role": "user", "content": f"a={n}. a?"}]} for n in range(number))
    rows.write_text("".join(json.dumps(one) + "\n" for one in asked))
    return rows


def both_answer(run: Live) -> bool:
    """Whether servers of the judge were busy for longer than a step took, and the second by which
    counts are late: more than one was."""
    rows = run.query("SELECT step, ended_at, batch_json FROM steps ORDER BY step")
    return any(
        (told := json.loads(text))["models/judge/servers"] == 2
        and told["models/judge/busy_s"] > 1.2 * (ended_at - before) + 1
        for (_, before, _), (_, ended_at, text) in pairwise(rows)
    )


def ended(run: Live) -> int:
    """Moves that are over."""
    ((number,),) = run.query("SELECT count(*) FROM moves WHERE ended_at IS NOT NULL")
    return int(number)


def slot(run: Live, index: int) -> tuple[Any, ...]:
    """Role, state, what it serves and restarts of a slot."""
    (row,) = run.query(
        f"SELECT role, state, bucket, restarts FROM slots WHERE slot = 'local/{index}'"
    )
    return row
