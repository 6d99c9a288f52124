"""A run that serves its own teacher and judge by vLLM, which is killed in the middle of it."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

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
run: {{name: served, steps: 8}}
nodes:
  - host: local
    slots: 3
    pool: [rollout, train, models]
    env: {{OMP_NUM_THREADS: "1"}}
model: {{path: {model}, max_len: 256}}
models: [{{name: helper, path: {model}, max_len: 257, vllm_args: [--max-num-seqs, "16"]}}]
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


def test_a_teacher_and_a_judge_of_the_run_itself_are_waited_for_when_they_die(
    tmp_path: Path,
) -> None:
    rows = tmp_path / "rows.jsonl"
    asked = ({"prompt": [{"role": "user", "content": f"a={n}. a?"}]} for n in range(64))
    rows.write_text("".join(json.dumps(one) + "\n" for one in asked))
    text = RECIPE.format(model=MODEL, rows=rows)
    with live(text, tmp_path / "run", tmp_path) as run:
        run.wait_step(2, timeout_s=2 * START_S + 2 * STEP_S)
        assert slot(run) == ("model", "serving", 0)
        ((pid,),) = run.query("SELECT pid FROM processes WHERE process = 'model-2'")
        os.kill(pid, signal.SIGKILL)
        run.process.wait(START_S + 6 * STEP_S)
        assert run.query("SELECT state, error FROM runs") == [("finished", "")]
        steps = [json.loads(text) for (text,) in run.query("SELECT batch_json FROM steps")]
        # The first version is the teacher's own, so that it has nothing to teach it.
        assert steps[0]["reverse_kl"] == pytest.approx(0.0, abs=1e-3)
        rewards = {reward for (reward,) in run.query("SELECT reward FROM trajectories")}
        assert rewards - {None} <= {number / 9 for number in range(10)}
        assert len(rewards) > 2, "the judge gives one score"
        assert slot(run) == ("idle", "idle", 1)
        assert "ended by signal 9" in run.told() or "was ended by signal 9" in run.told()


def slot(run: Live) -> tuple[str, str, int]:
    ((role, state, restarts),) = run.query(
        "SELECT role, state, restarts FROM slots WHERE pool = 'models'"
    )
    return role, state, restarts
