"""The sampler of ``tests.learning``: what it says of its own tokens is what the model says."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs the [cpu] extra")

from transformers import AutoModelForCausalLM  # noqa: E402

from libra_cli.core.rollout.groups import new_trajectory  # noqa: E402
from libra_cli.core.types import TrajectoryId  # noqa: E402
from libra_cli.node.model.tokenizer import build_tokenizer, save_tokenizer  # noqa: E402
from libra_cli.node.model.warmup import POSITIONS, new_model  # noqa: E402
from libra_cli.runtime.episodes.renderer import Renderer  # noqa: E402
from tests.learning.sampling import BatchPlayer  # noqa: E402
from tests.world import recipe  # noqa: E402

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]


def test_log_probabilities_are_those_of_the_whole_trajectory(tmp_path: Path):
    tokenizer = build_tokenizer()
    new_model(tokenizer, seed=0, width=64).save_pretrained(tmp_path)
    save_tokenizer(tokenizer, tmp_path, max_len=POSITIONS)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    rollout = {"max_turns": 3, "max_turn_tokens": 6, "temperature": 0.8}
    made = recipe(rollout=rollout, model={"max_len": 90})

    async def play() -> list[float]:
        player = BatchPlayer(made, Renderer(tmp_path), model)
        try:
            return await player.play(played, 4, seed=1, stream=2)
        finally:
            await player.close()

    played = [new_trajectory(TrajectoryId(n // 2, n % 2), 0.0) for n in range(6)]
    rewards = asyncio.run(play())
    assert len(rewards) == 6
    for one in played:
        ids, mask = torch.tensor(one.token_ids), torch.tensor(one.loss_mask).bool()
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0, :-1] / 0.8
        expected = logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        found = torch.tensor(one.logprobs)
        assert torch.allclose(found[1:][mask[1:]], expected[mask[1:]], atol=1e-4)
        assert not found[~mask].any()
        assert {span.version for span in one.spans} == {4}
        assert one.generated == int(mask.sum()) > 0
        turns = one.turn_rewards
        assert len(turns) == one.turns
        assert sum(turn.end - turn.start for turn in turns) == one.generated
        assert all(mask[turn.start : turn.end].all() for turn in turns)
    for one, reward in zip(played, rewards, strict=True):
        assert sum(turn.reward for turn in one.turn_rewards) == pytest.approx(reward)
    first = [one.turn_rewards[0].anchor for one in played]
    assert first[0] == first[1] != first[2]  # the members of a group are shown the same prompt
