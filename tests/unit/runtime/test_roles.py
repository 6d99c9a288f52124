"""Environments with roles: conversations of their own, rewards of their own, whose turn it is."""

# mypy: disable-error-code="override, method-assign, assignment, misc"

from __future__ import annotations

import asyncio
import json
import sys
from types import MappingProxyType, ModuleType

import pytest

from libra_cli.config.environment import EnvironmentSpec
from libra_cli.config.errors import EnvironmentBroken
from libra_cli.core.types import BranchPoint, ToolOutcome, TrajectoryId
from libra_cli.envs.protocol import Finished, NextTurn, ToolCall, function
from libra_cli.node.model.tokenizer import build_tokenizer, save_tokenizer
from libra_cli.runtime.episodes.player import Episodes
from libra_cli.runtime.episodes.renderer import Renderer

ONE = TrajectoryId(group=0, member=0)
DEADLINE_S = 10.0
SCRIPTS = "environments_with_roles"


def user(text):
    return {"role": "user", "content": text}


class Duel:
    """Two speak in turn; who says "x" first wins what the other loses. ``peek`` is first's tool."""

    roles = ("first", "second")
    tools = MappingProxyType(
        {
            "first": [function("peek", "Look, and let the other speak.", {})],
            "second": [function("shout", "Say it loud.", {})],
        }
    )

    def task(self, index, seed):
        return {}

    def reset(self, task, seed):
        self.speaker, self.won, self.scored = "first", "", None
        return NextTurn("first", [{"role": "system", "content": "You are first."}, user("go")])

    def _other(self):
        return "second" if self.speaker == "first" else "first"

    def step(self, call: ToolCall):
        self.speaker = "second"
        return NextTurn("second", [user("first peeked")], text="a card")

    def reply(self, text):
        if "x" in text:
            self.won = self.speaker
            return None
        self.speaker = self._other()
        rewards = {self._other(): 0.25} if "good" in text else {}
        return NextTurn(self.speaker, [user(f"the other said {text}")], rewards)

    def score(self, answer, conversation):
        self.scored = (answer, conversation)
        return {role: 1.0 if role == self.won else -1.0 for role in self.roles}

    def metrics(self):
        return {"length": 3.0}


@pytest.fixture(scope="module")
def renderer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    save_tokenizer(build_tokenizer(), directory, max_len=256)
    return Renderer(directory)


@pytest.fixture
def play(renderer, monkeypatch):
    """Play turns, given as texts and tool calls; returns the prompt, its role and every result."""

    def run(environment, *turns, workers=None):
        spec = EnvironmentSpec(name=f"{SCRIPTS}:make", tool_timeout_s=5.0, workers=workers)
        if workers is None:
            module = ModuleType(SCRIPTS)
            module.make = lambda: environment  # type: ignore[attr-defined]
            monkeypatch.setitem(sys.modules, SCRIPTS, module)
        else:
            spec = spec.model_copy(update={"name": f"{__name__}:Duel"})

        async def main():
            episodes = Episodes([spec], ["roles"], renderer)
            try:
                prompt = await episodes.start(ONE, 0, task_seed=0, seed=0)
                role = episodes.role_of(ONE)
                results = [
                    await episodes.advance(ONE, tokens(renderer, turn), "stop") for turn in turns
                ]
                return prompt, role, results
            finally:
                await episodes.close()

        return asyncio.run(asyncio.wait_for(main(), DEADLINE_S))

    return run


def tokens(renderer, turn):
    parts = turn if isinstance(turn, list) else [turn]
    texts = [
        part if isinstance(part, str) else f"<tool_call>\n{json.dumps(part)}\n</tool_call>"
        for part in parts
    ]
    return [*renderer.encode("".join(texts)), renderer.end_of_turn]


PEEK = {"name": "peek", "arguments": {}}


@pytest.mark.parametrize("workers", [None, 1])
def test_each_role_reads_its_own_conversation_in_a_branch_of_its_own(play, renderer, workers):
    prompt, role, (first, second, last) = play(Duel(), "good", "b", "x", workers=workers)
    opening = "<|im_start|>system\nYou are first."
    assert (role, renderer.decode(prompt).startswith(opening)) == ("first", True)
    assert (first.role, first.branch, first.rewards) == (
        "second",
        BranchPoint(0, 0),
        {"first": 0.25},
    )
    said = renderer.decode(first.observation_ids)
    assert said == "<|im_start|>user\nthe other said good<|im_end|>\n<|im_start|>assistant\n"
    turn = tokens(renderer, "good")
    assert (second.role, second.branch) == ("first", BranchPoint(0, len(prompt) + len(turn)))
    assert renderer.decode(second.observation_ids) == (
        "\n<|im_start|>user\nthe other said b<|im_end|>\n<|im_start|>assistant\n"
    )
    assert (last.done, last.reward, last.rewards) == (True, 0.125, {"first": 1.0, "second": -1.0})
    assert last.metrics == {"length": 3.0, "reward/first": 1.25, "reward/second": -1.0}


def test_a_branch_that_was_left_goes_on_after_all_of_its_tokens(play, renderer):
    _, _, results = play(Duel(), "a", "b", "a", "b")
    second = len(results[0].observation_ids) + len(tokens(renderer, "b"))
    assert results[2].branch == BranchPoint(1, second)
    first = results[1].branch.kept + len(results[1].observation_ids) + len(tokens(renderer, "a"))
    assert results[3].branch == BranchPoint(0, first)


def test_rewards_on_the_way_are_told_once_and_count_for_their_role(play):
    _, _, results = play(Duel(), "a", "good", "x")
    assert results[1].rewards == {"second": 0.25}
    assert results[2].metrics["reward/second"] == -0.75
    assert results[2].reward == pytest.approx((1.0 - 0.75) / 2)


def test_a_tool_may_pass_the_turn_on_and_its_text_is_read_when_the_turn_comes_back(play, renderer):
    environment = Duel()
    _, _, (first, second, _) = play(environment, [PEEK, PEEK], "b", "x")
    assert [(one.tool, one.outcome) for one in first.returns] == [
        ("peek", ToolOutcome.OK),
        ("invalid", ToolOutcome.ERROR),
    ]
    assert first.role == "second"
    said = renderer.decode(second.observation_ids)
    assert said.index("a card") < said.index("the turn has passed") < said.index("other said b")


def test_a_role_can_call_its_own_tools_only(play):
    _, _, (_, second) = play(Duel(), "a", PEEK)
    assert [(one.tool, one.outcome) for one in second.returns] == [("invalid", ToolOutcome.ERROR)]
    assert (second.role, second.branch) == ("second", None)


def test_the_score_gets_the_conversation_of_each_role(play):
    environment = Duel()
    play(environment, "a", "x")
    answer, conversation = environment.scored
    assert answer == "x"
    assert [one["content"] for one in conversation["first"]] == ["You are first.", "go", "a"]
    assert [one["content"] for one in conversation["second"]] == ["the other said a", "x"]


def test_a_role_that_never_spoke_has_a_reward_and_is_not_trained(play):
    _, _, (only,) = play(Duel(), "x")
    assert only.rewards == {"first": 1.0}
    assert only.metrics["reward/second"] == -1.0


@pytest.mark.parametrize(
    ("member", "returned", "words"),
    [
        ("reset", [user("go")], "not a NextTurn, though it has roles first, second"),
        ("reset", NextTurn("third", [user("go")]), "'third'; roles are first, second"),
        ("reset", NextTurn(done=True), "ended the episode before it began"),
        ("reply", NextTurn("second", []), "with at least one"),
        ("reply", NextTurn("second", [user("go")], {"third": 1.0}), "'third'"),
        ("reply", NextTurn("first", [{"role": "tool", "content": ""}]), "role user or system"),
        (
            "reply",
            NextTurn("second", [{"role": "user", "content": "go", "images": []}]),
            "no images",
        ),
        ("score", 1.0, r"score returns the rewards \{'first': ..., 'second': ...\}, not 1.0"),
        ("score", {"first": 1.0}, "score returns the rewards"),
        ("roles", ("first", "first"), "different names"),
    ],
)
def test_what_is_no_turn_of_a_role_breaks_the_environment_in_words(play, member, returned, words):
    environment = Duel()
    given = returned if member == "roles" else lambda *_: returned
    setattr(environment, member, given)
    turns = ["x"] if member == "score" else ["a"]
    with pytest.raises(EnvironmentBroken, match=words):
        play(environment, *turns)


def test_a_turn_of_an_environment_without_roles_is_refused(play):
    environment = Duel()
    environment.roles = ()
    environment.reset = lambda task, seed: [user("go")]
    environment.reply = lambda text: NextTurn("first", [user("go")])
    environment.tools = ()
    with pytest.raises(EnvironmentBroken, match="roles are none"):
        play(environment, "a")


def test_what_ends_the_episode_early_counts_for_the_role_that_has_spoken(play):
    environment = Duel()

    def over(text):
        raise Finished("no such move", reward=-0.5)

    environment.reply = over
    environment.score = lambda answer: {"first": 0.0, "second": 1.0}
    _, _, (only,) = play(environment, "nonsense")
    assert only.rewards == {"first": -0.5}
    assert only.metrics["reward/second"] == 1.0
