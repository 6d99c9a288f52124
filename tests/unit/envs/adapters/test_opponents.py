"""Roles that models play which are not trained: what they read, what they cost, what is refused."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

import pytest
import yaml

from libra_cli.config.errors import EnvironmentBroken
from libra_cli.envs.adapters.opponents import WithOpponents
from libra_cli.envs.protocol import Finished, NextTurn, Reply, Task, ToolCall, function
from tests.chat_thread import ChatThread

MODULE = "games_with_opponents"
User = Mapping[str, Any]


def user(text: str) -> Any:
    return {"role": "user", "content": text}


class Count:
    """Roles say numbers in turn, each hears the last one, until somebody says 3; who does wins."""

    roles = ("a", "b", "c")
    tools: Any = ()

    def __init__(self, first: str = "a") -> None:
        self.turn = self.roles.index(first)
        self.closed = False

    def task(self, index: int, seed: int) -> Task:
        return {"index": index}

    def reset(self, task: Task, seed: int) -> NextTurn:
        return NextTurn(self.roles[self.turn], [user("begin")], rewards={"c": 0.5})

    def step(self, call: ToolCall) -> Any:
        if call.name == "look":
            return "nothing"
        self.turn = (self.turn + 1) % 3
        return NextTurn(self.roles[self.turn], [user("passed")], text="you passed")

    def reply(self, text: str) -> Any:
        speaker = self.roles[self.turn]
        if text == "3":
            self.winner = speaker
            raise Finished(reward=9.0)
        if text == "again":
            return Reply([user("say it")])
        if text == "nothing":
            return None
        self.turn = (self.turn + 1) % 3
        following = self.roles[self.turn]
        return NextTurn(following, [user(f"{speaker} says {text}")], rewards={"a": 0.1, "b": 0.2})

    def score(self, answer: str, conversation: Mapping[str, Any]) -> Mapping[str, float]:
        self.told = answer, conversation
        return {role: float(role == getattr(self, "winner", "")) for role in self.roles}

    def metrics(self) -> dict[str, float]:
        return {"length": 2.0}

    def close(self) -> None:
        self.closed = True


class Chat(ChatThread):
    """A server that says what ``text`` returns for a request."""

    def __init__(self) -> None:
        super().__init__(lambda body: {"content": self.text(body)})
        self.text: Callable[[dict[str, Any]], str] = lambda body: "1"


@pytest.fixture
def chat() -> Iterator[Chat]:
    made = Chat()
    with made.serving():
        yield made


@pytest.fixture
def game(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> Callable[..., WithOpponents]:
    module: Any = ModuleType(MODULE)
    module.Count = Count
    monkeypatch.setitem(sys.modules, MODULE, module)

    def make(*roles: str, **args: Any) -> WithOpponents:
        model = {"url": chat.url, "model": "m", "api_key": "KEY"}
        return WithOpponents(
            f"{MODULE}:Count", dict.fromkeys(roles, model), args, secrets={"KEY": "word"}
        )

    return make


def test_opponents_speak_between_the_policys_turns_and_read_what_is_theirs(
    chat: Chat, game: Callable[..., WithOpponents]
) -> None:
    made = game("b", "c")
    assert made.roles == ("a",)
    first = made.reset(made.task(0, 0), seed=5)
    assert (first.role, first.messages, first.rewards) == ("a", [user("begin")], {})
    assert chat.requests == [], "it is the policy's turn"
    said = made.reply("2")
    assert (said.role, said.messages) == ("a", [user("c says 1")])
    assert said.rewards == {"a": pytest.approx(0.3)}, "only what the policy's roles have earned"
    b, c = chat.requests
    assert b["messages"] == [user("a says 2")]
    assert c["messages"] == [user("b says 1")]
    made.reply("2")
    assert chat.requests[2]["messages"] == [
        user("a says 2"),
        {"role": "assistant", "content": "1"},
        user("a says 2"),
    ]
    assert len({one["seed"] for one in chat.requests[::2]}) == 2
    assert set(chat.keys) == {"Bearer word"}


def test_the_policys_role_may_be_the_last_to_speak(
    chat: Chat, game: Callable[..., WithOpponents]
) -> None:
    made = game("a", "b")
    first = made.reset(made.task(0, 0), seed=5)
    assert (first.role, first.messages) == ("c", [user("b says 1")])
    assert first.rewards == {"c": 0.5}
    with pytest.raises(Finished):
        made.reply("3")
    assert made.score("3", {"c": first.messages}) == {"c": 1.0}
    assert made.metrics() == {"length": 2.0, "reward/a": 0.0, "reward/b": 0.0}


def test_an_opponent_that_ends_the_episode_is_scored_and_its_reward_is_not_the_policys(
    chat: Chat, game: Callable[..., WithOpponents]
) -> None:
    chat.text = lambda body: "<think>I win</think> 3"
    made: Any = game("b", "c")
    made.reset(made.task(0, 0), seed=5)
    said = made.reply("1")
    assert (said.done, said.rewards) == (True, {"a": pytest.approx(0.1)})
    assert made.score("1", {"a": [user("begin")]}) == {"a": 0.0}
    assert made.metrics()["reward/b"] == 1.0
    answer, conversation = made._inner.told
    assert answer == "3", "what was said last"
    assert [one["content"] for one in conversation["b"]] == ["a says 1", "3"]
    assert conversation["a"] == [user("begin")]
    assert conversation["c"] == []
    made.close()
    assert made._inner.closed


@pytest.mark.parametrize(
    ("answers", "asked", "done"), [(["again", "1", "1"], 3, False), (["nothing"], 1, True)]
)
def test_an_opponent_may_be_asked_again_or_have_said_nothing(
    chat: Chat,
    game: Callable[..., WithOpponents],
    answers: list[str],
    asked: int,
    done: bool,
) -> None:
    left = iter(answers)
    chat.text = lambda body: next(left)
    made = game("b", "c")
    made.reset(made.task(0, 0), seed=5)
    assert made.reply("1").done == done
    assert len(chat.requests) == asked


def test_a_cut_or_empty_answer_is_a_move_like_any_other(
    chat: Chat, game: Callable[..., WithOpponents]
) -> None:
    chat.text, chat.finish_reason = lambda body: "", "length"
    made = game("b", "c")
    made.reset(made.task(0, 0), seed=5)
    assert made.reply("1").messages == [user("c says ")]


def test_a_tool_may_pass_the_turn_to_an_opponent(
    chat: Chat, game: Callable[..., WithOpponents]
) -> None:
    made = game("b", "c")
    made.reset(made.task(0, 0), seed=5)
    assert made.step(ToolCall("look", {})) == "nothing"
    said = made.step(ToolCall("pass", {}))
    assert (said.role, said.text, said.messages) == ("a", "you passed", [user("c says 1")])
    assert chat.requests[0]["messages"] == [user("passed")]


def test_a_league_is_drawn_from_by_the_task_alone(chat: Chat, monkeypatch: Any) -> None:
    module: Any = ModuleType(MODULE)
    module.Count = Count
    monkeypatch.setitem(sys.modules, MODULE, module)
    league = [{"url": chat.url, "model": f"m{number}"} for number in range(3)]
    given: dict[str, Any] = {"b": league, "c": league[0]}

    def met(number: int, seed: int) -> str:
        made = WithOpponents(f"{MODULE}:Count", given)
        made.reset(made.task(number, 0), seed=seed)
        made.reply("1")
        b, c = chat.requests[-2:]
        assert c["model"] == "m0"
        return str(b["model"])

    names = [met(number, 1) for number in range(12)]
    assert names == [met(number, 2) for number in range(12)], "as every member of the group"
    assert set(names) == {"m0", "m1", "m2"}


def test_tools_are_those_of_the_policys_roles(
    game: Callable[..., WithOpponents], monkeypatch: pytest.MonkeyPatch
) -> None:
    look = function("look", "Look.", {})
    monkeypatch.setattr(Count, "tools", {"a": [look], "b": []})
    assert game("b", "c").tools == {"a": [look]}
    with pytest.raises(EnvironmentBroken, match="a: opponents use no tools"):
        _ = game("a").tools


@pytest.mark.parametrize(
    ("environment", "opponents", "said"),
    [
        ("pointer-chase", {"b": {}}, "'pointer-chase' has no roles"),
        (f"{MODULE}:Count", {"d": {}}, "has no role 'd'"),
        (f"{MODULE}:Count", {}, "must leave a role to the policy, and name one"),
        (f"{MODULE}:Count", {key: {} for key in "abc"}, "must leave a role to the policy"),
        (f"{MODULE}:Count", {"b": {"url": "x"}}, r"opponents\.b\.model: Field required"),
        (f"{MODULE}:Awaited", {"b": {}}, "is awaited"),
    ],
)
def test_what_cannot_be_played_so_is_refused(
    environment: str, opponents: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Awaited(Count):
        async def reply(self, text: str) -> Any:
            raise AssertionError

    module: Any = ModuleType(MODULE)
    module.Count, module.Awaited = Count, Awaited
    monkeypatch.setitem(sys.modules, MODULE, module)
    with pytest.raises(EnvironmentBroken, match=said):
        WithOpponents(environment, opponents)


def test_the_key_of_an_opponent_is_asked_for_in_words_that_a_recipe_takes(
    game: Callable[..., WithOpponents], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Count, "roles", ("a", "left-hand"))
    opponents = {"left-hand": {"url": "http://x", "model": "m", "api_key": "none"}}
    with pytest.raises(EnvironmentBroken, match=r"opponents\.left-hand\.api_key is") as caught:
        WithOpponents(f"{MODULE}:Count", opponents, secrets={"KEY": "word"})
    assert yaml.safe_load(caught.value.hint) == {
        "environment": {
            "secrets": {"OPPONENTS_LEFT_HAND_KEY": "${OPPONENTS_LEFT_HAND_KEY}"},
            "args": {"opponents": {"left-hand": {"api_key": "OPPONENTS_LEFT_HAND_KEY"}}},
        }
    }


def test_real_games_are_played_to_their_end(chat: Chat) -> None:
    pytest.importorskip("pyspiel", reason="needs the [openspiel] extra")
    chat.text = lambda body: "Pass"
    model = {"url": chat.url, "model": "m"}
    made = WithOpponents("openspiel", {"player_0": model}, {"game": "kuhn_poker"})
    said = made.reset(made.task(0, 0), seed=1)
    assert said.role == "player_1"
    said = made.reply("Bet")
    assert said.done
    (mine,) = made.score("Bet", {"player_1": []}).values()
    assert mine == -made.metrics()["reward/player_0"] == 1.0


def test_one_on_this_machine_is_asked_past_a_proxy(
    chat: Chat, game: Callable[..., WithOpponents], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    made = game("b", "c")
    made.reset(made.task(0, 0), seed=5)
    assert made.reply("2").role == "a"
