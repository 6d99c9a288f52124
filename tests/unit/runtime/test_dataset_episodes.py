"""The environment ``dataset`` as the player plays it: rows of a file, a judge, and its metrics."""

from __future__ import annotations

import asyncio
import json

import pytest

from libra_cli.config.environment import EnvironmentSpec
from libra_cli.core.types import TrajectoryId
from libra_cli.envs.dataset import mathematics
from libra_cli.node.model.tokenizer import build_tokenizer, save_tokenizer
from libra_cli.runtime.episodes.player import Episodes
from libra_cli.runtime.episodes.renderer import Renderer
from tests.chat_server import ChatServer

DEADLINE_S = 30.0


@pytest.fixture(autouse=True, scope="module")
def _no_process_stays():
    yield
    mathematics._POOL.close()


@pytest.mark.parametrize("workers", [None, 2], ids=["in threads", "in workers"])
def test_rows_are_asked_and_answers_scored_by_rewards_of_every_kind(tmp_path, workers):
    rows = [{"prompt": f"start {word}", "answer": word} for word in ("ab", "cd")]
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "model").mkdir()
    save_tokenizer(build_tokenizer(), tmp_path / "model", max_len=256)
    renderer = Renderer(tmp_path / "model")
    server = ChatServer(lambda body: "Score: 0.5")

    def end(text: str) -> list[int]:
        return [*renderer.encode(text), renderer.end_of_turn]

    async def play(url: str):
        reward = {"match": 1.0, "judge": 0.5, "math": 0.0}
        spec = EnvironmentSpec.model_validate(
            {
                "name": "dataset",
                "args": {"reward": reward, "judge": {"url": url, "model": "m"}},
                "tasks": str(tasks),
                "tool_timeout_s": DEADLINE_S,
                "workers": workers,
            }
        )
        episodes = Episodes([spec], ["dataset"], renderer, run_directory=tmp_path)
        ended = []
        for group, answer in enumerate(["ab", "cd", "cd", "cd"]):
            trajectory = TrajectoryId(group, 0)
            prompt = await episodes.start(trajectory, group, task_seed=0, seed=group)
            turn = await episodes.advance(trajectory, end(answer), "stop")
            ended.append((renderer.decode(prompt), turn))
        await episodes.close()
        return ended

    async def main():
        async with server.serving() as url:
            return await asyncio.wait_for(play(url), DEADLINE_S)

    ended = asyncio.run(main())
    asked = ["ab" in prompt for prompt, _ in ended]
    assert asked == [True, False, True, False]
    assert [turn.reward for _, turn in ended] == [1.25, 1.25, 0.25, 1.25]
    assert len(server.requests) == 3, "the last answer is the second"
    assert all(turn.done for _, turn in ended)
    assert ended[2][1].metrics == {
        "match": 0.0,
        "math": 0.0,
        "math_too_long": 0.0,
        "judge": 0.5,
        "judge_cached": 0.0,
        "judge_spent": 0.0,
        "judge_cut": 0.0,
    }
    assert (tmp_path / "judge.sqlite").is_file()
