"""``libra run`` with somebody else's agent: its turns are trained on, and go elsewhere unnoticed.

The servers compute nothing, and every night they are vLLM's; that trainer and vLLM agree on what
agents were said is claimed of each client in ``tests/clients``. The agent goes on whatever the
model says; that an agent's reward rises shows ``recipes/agent.yaml``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from libra_cli.runtime.store.reader import Reader
from tests.cluster.recipe import with_fake_servers
from tests.live import BACKENDS, CHECKOUT, START_S, STEP_S, Live, live, require

pytestmark = [
    pytest.mark.integration,
    pytest.mark.vllm,
    pytest.mark.timeout(1200),
]
require("vllm")

STEPS = 6
TURNS = 5
"""Four of a conversation and one of a question beside it."""
AGENT = """
import json
import urllib.request


def ask(base_url, api_key, messages):
    body = json.dumps({"model": "any", "messages": messages}).encode()
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(base_url, body, headers)) as answer:
        return json.load(answer)["choices"][0]["message"]


def agent(task, base_url, api_key, model):
    url = f"{base_url}/chat/completions"
    messages = list(task["messages"])
    for number in range(4):
        messages.append(ask(url, api_key, messages))
        messages.append({"role": "user", "content": f"start ab hops {number}"})
        if number == 1:
            ask(url, api_key, [{"role": "user", "content": "hops "}])
    return float(ord(api_key[0]) % 2)
"""


def recipe_text(base: Path, backend: str) -> str:
    """The recipe of the agent, smaller, with two servers."""
    document = yaml.safe_load((CHECKOUT / "recipes/agent.yaml").read_text())
    document["run"] = {"name": "agent", "steps": STEPS, "lease_s": 30}
    document["nodes"] = [
        {
            "host": "local",
            "slots": 3,
            "pool": ["rollout", "rollout", "train"],
            "workdir": str(base / "work"),
            "python": sys.executable,
        }
    ]
    document["agent"] = {"directory": ".", "function": "somebody:agent"}
    document["rollout"]["buckets"] = [{"name": "all", "max_num_seqs": 16}]
    document["training"] |= {"groups_per_step": 4, "checkpoint_every": 100}
    return yaml.safe_dump(with_fake_servers(document) if backend == "fake" else document)


@pytest.fixture(scope="module", params=BACKENDS)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """To its end, though one of its servers is killed."""
    base = tmp_path_factory.mktemp("run")
    (base / "somebody.py").write_text(AGENT)
    with live(recipe_text(base, request.param), base, Path.home()) as started:
        started.wait_step(1, timeout_s=2 * START_S)
        started.kill("server-0", "local")
        started.wait_step(STEPS, timeout_s=STEPS * STEP_S)
        assert started.process.wait(timeout=START_S) == 0, started.told()
        yield started


def test_every_agent_plays_to_its_end_though_a_server_dies(run):
    assert run.query("SELECT state, error FROM runs") == [("finished", "")]
    assert run.query("SELECT DISTINCT turns FROM trajectories WHERE state = 'finished'") == [
        (TURNS,)
    ]
    assert run.query("SELECT count(*) FROM trajectories WHERE state = 'failed'") == [(0,)]
    # Whether it serves again before all is played depends on what else this machine does.
    assert len(run.happened("ServerFailed")) == 1


@pytest.mark.parametrize("run", BACKENDS[1:], indirect=True)
def test_the_trainer_computes_what_the_servers_sampled_in_every_branch(run):
    gaps = run.query("SELECT logprob_gap, logprob_gap_tokens FROM steps")
    assert max(gap for gap, tokens in gaps if tokens) < 1e-4
    assert sum(tokens for _, tokens in gaps) > 0


def test_each_generated_token_is_in_one_branch(run):
    rows = run.query(
        "SELECT group_id, member, attempt, spans_json, branches_json, generated_tokens, "
        "context_tokens FROM trajectories WHERE state = 'finished'"
    )
    assert rows
    with Reader(run.run_dir) as reader:
        tokens = {tuple(row[:3]): reader.tokens(*row[:3]) for row in rows}
    for *who, spans_json, branches_json, generated, context in rows:
        ((number, spans),) = json.loads(branches_json)
        assert number == 1
        spans += json.loads(spans_json)
        assert sum(end - start for _, start, end in spans) == generated
        branches = tokens[tuple(who)]
        assert sum(len(one.token_ids) for one in branches) == context
        assert sum(sum(one.loss_mask) for one in branches) == generated
        assert sum(map(bool, (p for one in branches for p in one.logprobs))) <= generated


def test_what_an_agent_does_between_turns_is_told_as_a_tool(run):
    ((told,),) = run.query("SELECT tools_json FROM turns WHERE turn = 0 LIMIT 1")
    ((tool, outcome, latency_s, size),) = json.loads(told)
    assert (tool, outcome) == ("agent", "ok")
    assert 0 < latency_s < STEP_S
    assert size == len("start ab hops 0")
