"""TRL's classes play as TRL plays them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from libra_cli.config.environment import EnvironmentSpec
from libra_cli.config.errors import EnvironmentBroken
from libra_cli.envs.adapters.trl import TrlEnvironment
from libra_cli.envs.protocol import Environment, Message, ToolCall, ToolFailed
from libra_cli.envs.tools import objection
from libra_cli.runtime.episodes.calls import CallLine
from libra_cli.runtime.episodes.places import EnvironmentSource

CLASSES = "tests.unit.envs.adapters.trl_classes"


def made(name: str, *rewards: str, **arguments: Any) -> TrlEnvironment:
    return TrlEnvironment(f"{CLASSES}:{name}", [f"{CLASSES}:{one}" for one in rewards], **arguments)


def test_it_is_an_environment() -> None:
    assert isinstance(made("Counter"), Environment)


def test_an_oracle_gets_full_marks_and_doing_nothing_none() -> None:
    oracle, idle = made("Counter"), made("Counter")
    row = {"prompt": "Count.", "target": 7}
    assert oracle.reset(row, 0) == [{"role": "user", "content": "Count. The target is 7."}]
    assert oracle.step(ToolCall("increment", {"amount": 3})) == "3"
    assert oracle.step(ToolCall("increment", {"amount": 4})) == "7"
    assert oracle.score("done") == 1.0
    idle.reset(row, 0)
    assert idle.score("") == 0.0


def test_only_its_public_methods_are_tools() -> None:
    (tool,) = made("Counter").tools
    assert tool["function"]["name"] == "increment"
    assert tool["function"]["parameters"] == {
        "type": "object",
        "properties": {"amount": {"type": "integer", "description": "By how much."}},
        "required": ["amount"],
    }


def test_what_reset_returns_is_added_to_the_last_message_and_the_row_is_left_alone() -> None:
    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Count."}]
    row = {"prompt": prompt, "target": 1}
    assert made("Counter").reset(row, 0) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Count. The target is 1."},
    ]
    assert prompt[-1]["content"] == "Count."


def test_content_blocks_of_a_prompt_are_its_text() -> None:
    row = {"prompt": [{"role": "user", "content": [{"type": "text", "text": "Hi."}]}], "target": 1}
    assert made("Counter").reset(row, 0)[0]["content"] == "Hi. The target is 1."


def test_a_tool_that_raises_is_read_by_the_model_as_trl_writes_it() -> None:
    environment = made("Counter")
    environment.reset({"target": 1}, 0)
    with pytest.raises(ToolFailed, match=r"\{'error': 'Only upwards.'\}"):
        environment.step(ToolCall("increment", {"amount": 0}))


def test_asynchronous_members_are_awaited() -> None:
    environment = made("Guess", "right")
    task = environment.task(0, 5)
    secret = task["seed"] % 10
    environment.reset(task, 0)
    assert environment.step(ToolCall("guess", {"digit": secret, "loud": True})) == "RIGHT"
    assert environment.score("done") == 1.0


def test_a_seed_makes_the_problem_where_there_is_no_tasks_file() -> None:
    environment = made("Guess", "right")
    tasks = [environment.task(index, 3) for index in range(20)]
    assert tasks == [environment.task(index, 3) for index in range(20)]
    assert len({task["seed"] for task in tasks}) == 20


def test_a_class_that_takes_no_seed_needs_a_tasks_file() -> None:
    with pytest.raises(EnvironmentBroken, match=r"Silent\.reset takes no seed") as error:
        made("Silent", "brevity").task(0, 0)
    assert "environment.tasks" in error.value.hint


CONVERSATION: list[Message] = [
    {"role": "user", "content": "Count. The target is 7."},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [ToolCall("increment", {"amount": 7})],
    },
    {"role": "tool", "content": "7"},
    {"role": "assistant", "content": "It is 7."},
]


def test_reward_functions_see_the_completion_the_columns_and_the_environment() -> None:
    environment = made("Counter", "brevity", "said_so", "not_applicable", "tools_used")
    environment.reset({"prompt": "Count.", "target": 7}, 0)
    environment.step(ToolCall("increment", {"amount": 7}))
    assert environment.score("It is 7.", CONVERSATION) == pytest.approx(1.0 + 1 / 3 + 1.0 + 1.0)


def test_reward_functions_are_weighted_and_the_class_is_not() -> None:
    environment = made("Counter", "brevity", "said_so", reward_weights=[0.0, 0.5])
    environment.reset({"prompt": "Count.", "target": 7}, 0)
    assert environment.score("7") == 0.5


@pytest.mark.parametrize(
    ("name", "rewards", "arguments", "words"),
    [
        ("Silent", [], {}, "has no get_reward, and environment.args has no rewards"),
        ("Counter", ["brevity"], {"reward_weights": [1.0, 2.0]}, "1 rewards have 2 reward_weights"),
        ("Counters", [], {}, "has no 'Counters'; did you mean 'Counter'"),
        ("Undescribed", [], {}, "jump cannot be a tool.*for far, high"),
        ("brevity", [], {}, r"trl_classes:brevity\(\) failed: TypeError"),
    ],
)
def test_what_does_not_fit_is_told(
    name: str, rewards: list[str], arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(EnvironmentBroken, match=words):
        made(name, *rewards, **arguments)


def test_a_reward_function_returns_one_number_for_each_completion() -> None:
    environment = made("Counter", "wrong_length")
    environment.reset({"target": 1}, 0)
    with pytest.raises(EnvironmentBroken, match=r"wrong_length returned \[1.0, 2.0\]"):
        environment.score("")


def test_an_image_is_refused_in_words() -> None:
    environment = made("Pictures")
    environment.reset({"target": 1}, 0)
    with pytest.raises(EnvironmentBroken, match="holds image"):
        environment.step(ToolCall("look"))


def test_a_prompt_is_a_text_or_messages() -> None:
    with pytest.raises(EnvironmentBroken, match="a row's prompt is a text or a list"):
        made("Counter").reset({"prompt": 3}, 0)


def test_the_schema_checks_calls() -> None:
    tools = made("Guess", "right").tools
    assert objection(ToolCall("guess", {"digit": "7"}), tools) is not None
    assert objection(ToolCall("guess", {"digit": 7}), tools) is None


def test_it_is_played_by_its_name_in_a_recipe() -> None:
    async def play() -> None:
        args = {"factory": f"{CLASSES}:Counter", "rewards": [f"{CLASSES}:tools_used"]}
        spec = EnvironmentSpec.model_validate({"name": "trl", "args": args})
        source = EnvironmentSource(spec, "trl")
        episode = await source.begin(CallLine())
        opening = await episode.reset({"prompt": "Count.", "target": 7}, 0, 0, 0)
        assert opening.messages == CONVERSATION[:1]
        assert (await episode.step(ToolCall("increment", {"amount": 7}))).text == "7"
        assert (await episode.step(ToolCall("increment", {"amount": 0}))).failed
        assert (await episode.score("It is 7.", CONVERSATION)).reward == 2.0
        episode.close(CallLine())
        await source.close()

    asyncio.run(play())
