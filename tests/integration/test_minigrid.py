"""Worlds of minigrid: what is seen, what a word does, and who is rewarded."""

from __future__ import annotations

import io
from typing import Any

import pytest

from libra_cli.config.errors import EnvironmentBroken
from libra_cli.envs.gyms.minigrid import MiniGrid
from libra_cli.envs.protocol import Reply
from libra_cli.envs.returns import messages

pytest.importorskip("minigrid", reason="needs libra-rl[minigrid]")
from PIL import Image

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore")]
WAY = ("forward", "forward", "right", "forward", "forward")
"""To the goal of MiniGrid-Empty-5x5-v0, which is in the corner across."""


def begun(**options: Any) -> tuple[MiniGrid, Any]:
    world = MiniGrid(**options)
    return world, messages(world.reset(world.task(0, 0), 0))


def said(world: MiniGrid, text: str) -> Any:
    reply = world.reply(text)
    assert isinstance(reply, Reply)
    return messages(reply.messages)[0]


def test_the_goal_is_rewarded_as_minigrid_does_and_ends_the_episode() -> None:
    world, _ = begun()
    for word in WAY[:-1]:
        assert said(world, f"I go {word}.")["content"] == word
        assert world.score("") == 0.0
    assert world.reply(WAY[-1]) is None
    assert world.score("") == pytest.approx(1 - 0.9 * 5 / 100)
    assert world.metrics() == {"reached": 1.0}
    world.close()


def test_an_answer_without_an_action_moves_nothing_and_is_told() -> None:
    world, (first,) = begun()
    again = said(world, "Onwards, forwards!")
    assert again["content"] == "No action. Answer with one word of: left, right, forward."
    assert again["images"] == first["images"]
    assert said(world, "Not left but FORWARD")["images"] != first["images"]


def test_what_is_shown_is_what_minigrid_draws() -> None:
    _, (seen,) = begun(tile=16)
    (png,) = seen["images"]
    picture = Image.open(io.BytesIO(png)).convert("RGB")
    assert picture.size == (7 * 16, 7 * 16), "seven cells before the agent"
    assert picture.getpixel((5 * 16 + 8, 4 * 16 + 8)) == (76, 255, 76), (
        "the goal, ahead on the right"
    )
    _, (whole,) = begun(tile=8, whole=True)
    assert Image.open(io.BytesIO(whole["images"][0])).size == (5 * 8, 5 * 8)


def test_a_task_is_one_layout_and_others_are_others() -> None:
    world = MiniGrid(world="MiniGrid-Empty-Random-6x6-v0", whole=True)
    layouts = [world.reset(world.task(index, 7), 0)[0]["images"] for index in range(12)]
    again = [world.reset(world.task(index, 7), 1)[0]["images"] for index in range(12)]
    assert layouts == again
    assert len({one for (one,) in layouts}) > 6


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ({"world": "MiniGrid-Nowhere-v0"}, "MiniGrid-Empty-5x5-v0"),
        ({"actions": ["jump"]}, "left, right, forward"),
        ({"actions": []}, "left, right, forward"),
    ],
)
def test_what_minigrid_has_not_is_told(options: dict[str, Any], hint: str) -> None:
    with pytest.raises(EnvironmentBroken) as caught:
        MiniGrid(**options)
    assert hint in str(caught.value.hint)
