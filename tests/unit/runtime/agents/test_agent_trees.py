"""Whatever an agent does with its conversations, each prompt is the exact tokens of one branch."""

from __future__ import annotations

import asyncio
import itertools
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.agents import DEADLINE_S, fake_machine, post

KINDS = ("go on", "go on", "go on", "from a reply", "afresh", "other tools", "again")
ROLES = ("user", "tool", "system")
STEPS = st.lists(
    st.tuples(
        st.sampled_from(KINDS),
        st.integers(0, 99),
        st.sampled_from(ROLES),
        st.sampled_from([1, 1, 1, 2]),
    ),
    min_size=1,
    max_size=12,
)


class Wanderer:
    """An agent that goes on, back and elsewhere as it is told, and keeps what it was answered."""

    def __init__(self, steps):
        self.steps = steps
        self.seen: list[list[int]] = []
        """The prompt's tokens and the reply's, of every turn."""

    async def __call__(self, task, base_url, api_key, model):
        ends: list[Any] = [([*task["messages"]], None)]
        body: dict[str, Any] = {
            "model": "m",
            "messages": ends[0][0],
            "return_token_ids": True,
        }
        for what, number, role, n in [("first", 0, "user", 1), *self.steps]:
            headers = {}
            if what == "again":
                headers["x-stainless-retry-count"] = "1"
            elif what != "first":
                body = self.body(ends, what, number, role) | {"n": n, "return_token_ids": True}
            answer = await post(f"{base_url}/chat/completions", body, key=api_key, **headers)
            if what == "again":
                continue
            prompt = answer["prompt_token_ids"]
            for choice in answer["choices"]:
                self.seen.append([*prompt, *choice["token_ids"]])
                ends.append(([*body["messages"], choice["message"]], body.get("tools")))

    def body(self, ends, what, number, role):
        messages, tools = ends[-1] if what == "go on" else ends[1 + number % (len(ends) - 1)]
        said = {"role": role, "content": f"{what} {number}"}
        if what == "afresh":
            return {"model": "m", "messages": [{"role": "user", "content": f"{number}"}]}
        if what == "other tools":
            name = {"name": f"tool_{number}", "parameters": {}}
            tools = [{"type": "function", "function": name}]
        body = {"model": "m", "messages": [*messages, said]}
        return body | ({"tools": tools} if tools else {})


@given(steps=STEPS)
@pytest.mark.parametrize("rule", ["strict", "position"])
def test_every_prompt_is_the_exact_tokens_of_a_branch_and_each_reply_is_trained_on_once(
    renderer, rule, steps
):
    module, agent = ModuleType("wanderers"), Wanderer(steps)

    async def wander(**told):
        await agent(**told)

    module.agent = wander  # type: ignore[attr-defined]
    sys.modules["wanderers"] = module
    said = (f"reply {number}" for number in itertools.count())

    async def main(directory):
        spec = {"function": "wanderers:agent", "match": rule, "max_branches": 99}
        limits = {"max_turns": 99}
        made = fake_machine(spec, renderer, directory, model={"max_len": 4096}, rollout=limits)
        try:
            await made.episodes.prepare(print)
            await made.episodes.check(0)
            await asyncio.wait_for(made.play(said), DEADLINE_S)
        finally:
            await made.episodes.close()
        return made

    with tempfile.TemporaryDirectory() as directory:
        made = asyncio.run(main(Path(directory)))
    whole = [branch.token_ids.tolist() for branch in made.trajectory.branches]
    assert len(agent.seen) == made.trajectory.turns
    for tokens in agent.seen:
        assert any(branch[: len(tokens)] == tokens for branch in whole)
    trained = sum(sum(branch.loss_mask) for branch in made.trajectory.branches)
    assert trained == made.trajectory.generated
