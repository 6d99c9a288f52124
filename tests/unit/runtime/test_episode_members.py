"""What an environment may have besides the five members, and what becomes of it."""

# mypy: disable-error-code="override, exhaustive-match"

from __future__ import annotations

import asyncio
import json
import sys
from types import ModuleType

import pytest

from libra_cli.config.environment import EnvironmentSpec
from libra_cli.config.errors import EnvironmentBroken
from libra_cli.core.types import ToolOutcome, TrajectoryId
from libra_cli.envs.protocol import Finished, Reply, StepResult, ToolCall, ToolFailed, function
from libra_cli.node.model.tokenizer import build_tokenizer, save_tokenizer
from libra_cli.runtime.episodes.player import Episodes
from libra_cli.runtime.episodes.renderer import Renderer

ONE = TrajectoryId(group=0, member=0)
DEADLINE_S = 10.0
SCRIPTS = "environments_with_members"


class Five:
    """The five members; a test's class adds what it is about."""

    tools = ()

    def task(self, index, seed):
        return {}

    def reset(self, task, seed):
        return [{"role": "user", "content": "start"}]

    def step(self, call):
        return "seen"

    def score(self, answer):
        return 1.0


@pytest.fixture(scope="module")
def renderer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    save_tokenizer(build_tokenizer(), directory, max_len=256)
    return Renderer(directory)


@pytest.fixture
def play(renderer, monkeypatch):
    """Play turns, given as texts and tool calls, with an environment; returns every result."""

    def run(environment, *turns, timeout_s=5.0):
        module = ModuleType(SCRIPTS)
        module.make = lambda: environment  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, SCRIPTS, module)
        spec = EnvironmentSpec(name=f"{SCRIPTS}:make", tool_timeout_s=timeout_s)

        async def main():
            episodes = Episodes([spec], ["members"], renderer)
            try:
                await episodes.start(ONE, 0, task_seed=0, seed=0)
                return [
                    await episodes.advance(ONE, tokens(renderer, turn), "stop") for turn in turns
                ]
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


def call(name, **arguments):
    return {"name": name, "arguments": arguments}


class Talkative(Five):
    """The user speaks again until it hears the word."""

    def __init__(self):
        self.heard = []

    def reply(self, text):
        self.heard.append(text)
        if "done" in text:
            return None
        return [{"role": "user", "content": f"and then {len(self.heard)}?"}]


def test_a_user_who_speaks_again_is_shown_to_the_model_until_it_says_nothing(play, renderer):
    environment = Talkative()
    first, second, last = play(environment, "hm", call("look"), "done")
    assert renderer.decode(first.observation_ids) == (
        "\n<|im_start|>user\nand then 1?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert (first.done, first.reward, first.returns) == (False, None, ())
    assert [one.tool for one in second.returns] == ["look"]
    assert (last.done, last.reward) == (True, 1.0)
    assert environment.heard == ["hm", "done"]


class Listening(Talkative):
    def score(self, answer, conversation):
        self.conversation = conversation
        return 0.0


def test_a_score_that_asks_for_it_sees_the_whole_conversation(play):
    environment = Listening()
    play(environment, ["<think>so</think>yes", call("look", at="ab")], "hm", "done")
    assert environment.conversation == [
        {"role": "user", "content": "start"},
        {
            "role": "assistant",
            "content": "yes",
            "reasoning": "so",
            "tool_calls": [ToolCall("look", {"at": "ab"})],
        },
        {"role": "tool", "content": "seen", "name": "look"},
        {"role": "assistant", "content": "hm"},
        {"role": "user", "content": "and then 1?"},
        {"role": "assistant", "content": "done"},
    ]


@pytest.mark.parametrize(
    ("score", "seen"),
    [
        (lambda answer: 1.0, 1),
        (lambda answer, strict=False: float(strict is False), 1),
        (lambda answer, conversation=None: float(len(conversation)), 2),
        (lambda answer, messages: float(len(messages)), 2),
        (lambda *anything: float(len(anything)), 1),
    ],
)
def test_only_a_score_that_can_mean_it_is_given_the_conversation(play, score, seen):
    environment = Five()
    environment.score = score  # type: ignore[method-assign]
    (result,) = play(environment, "answer")
    assert result.reward == seen


class Paying(Five):
    def step(self, call):
        match call.name:
            case "pay":
                return StepResult("paid", reward=call.arguments["sum"])
            case "win":
                return StepResult("won", reward=0.5, done=True)
            case "stop":
                raise Finished("stopped", reward=0.25)
            case _:
                raise ToolFailed("no")

    def reply(self, text):
        if text == "stop":
            raise Finished("bye", reward=-1.0)
        return Reply([{"role": "user", "content": "more"}], reward=2.0, done=text == "end")

    def score(self, answer, conversation):
        self.last = conversation[-1]
        return 10.0


def test_rewards_on_the_way_are_added_to_the_score(play):
    results = play(Paying(), [call("pay", sum=1.0), call("pay", sum=0.5), call("no")], "on", "end")
    assert [one.reward for one in results] == [None, None, 10.0 + 1.5 + 2.0 + 2.0]


@pytest.mark.parametrize(
    ("turn", "reward", "last"),
    [
        (call("win"), 10.5, {"role": "tool", "content": "won", "name": "win"}),
        (call("stop"), 10.25, {"role": "tool", "content": "stopped", "name": "stop"}),
        ("stop", 9.0, {"role": "user", "content": "bye"}),
        ("end", 12.0, {"role": "user", "content": "more"}),
    ],
)
def test_an_environment_that_ends_the_episode_is_scored_and_nothing_is_generated(
    play, turn, reward, last
):
    environment = Paying()
    (result,) = play(environment, turn)
    assert (result.done, result.reward, list(result.observation_ids)) == (True, reward, [])
    assert environment.last == last


def test_calls_after_the_end_of_an_episode_are_not_run(play):
    (result,) = play(Paying(), [call("pay", sum=1.0), call("win"), call("pay", sum=1.0)])
    assert [one.tool for one in result.returns] == ["pay", "win"]
    assert result.reward == 11.5


class Measured(Five):
    def metrics(self):
        return {"right": 1, "ratio": 0.5, "undefined": float("nan")}


def test_the_numbers_that_an_environment_names_come_with_the_end(play):
    (result,) = play(Measured(), "answer")
    assert result.metrics == {"right": 1.0, "ratio": 0.5}


class Growing(Five):
    """A tool that opens another one."""

    def __init__(self):
        self.names = ["open"]

    @property
    def tools(self):
        return [function(name, "A tool.", {}) for name in self.names]

    def step(self, call):
        self.names.append("secret")
        return "opened"


def test_tools_that_appear_on_the_way_can_be_called_and_not_before(play):
    early, _, late = play(Growing(), call("secret"), call("open"), call("secret"))
    assert [one.outcome for one in early.returns] == [ToolOutcome.ERROR]
    assert [(one.tool, one.outcome) for one in late.returns] == [("secret", ToolOutcome.OK)]


class Awaited(Five):
    """Every member but ``tools`` is awaited, all on one loop."""

    def __init__(self):
        self.loops = set()
        self.closed = False

    async def _here(self):
        await asyncio.sleep(0)
        self.loops.add(asyncio.get_running_loop())

    async def task(self, index, seed):
        await self._here()
        return {"text": "start"}

    async def reset(self, task, seed):
        await self._here()
        return [{"role": "user", "content": task["text"]}]

    async def step(self, call):
        await self._here()
        match call.name:
            case "hang":
                await asyncio.sleep(DEADLINE_S)
            case "exit":
                raise SystemExit(3)
            case "refuse":
                raise ToolFailed("no")
        return "seen"

    async def reply(self, text):
        await self._here()
        return None if text == "done" else [{"role": "user", "content": "go on"}]

    async def score(self, answer, conversation):
        await self._here()
        return len(conversation)

    async def metrics(self):
        await self._here()
        return {"right": 1.0}

    async def close(self):
        await self._here()
        self.closed = True


def test_every_member_may_be_awaited(play):
    environment = Awaited()
    *_, last = play(environment, [call("look"), call("refuse")], "hm", "done")
    assert (last.reward, last.metrics) == (7.0, {"right": 1.0})
    assert len(environment.loops) == 1


def test_an_awaited_tool_that_hangs_times_out_and_is_cancelled_with_its_episode(play):
    environment = Awaited()
    (result,) = play(environment, call("hang"), timeout_s=0.05)
    assert [one.outcome for one in result.returns] == [ToolOutcome.TIMEOUT]


def test_an_awaited_member_that_exits_breaks_its_episode_and_not_the_loop(play):
    with pytest.raises(EnvironmentBroken, match=r"broke in step\(exit\): SystemExit: 3"):
        play(Awaited(), call("exit"))


class Lazy(Five):
    """A member that is no coroutine function, but returns something to await."""

    def score(self, answer):
        async def later():
            await asyncio.sleep(0)
            return 0.5

        return later()


def test_what_a_member_returns_is_awaited_if_it_can_be(play):
    (result,) = play(Lazy(), "answer")
    assert result.reward == 0.5


@pytest.mark.parametrize(
    ("member", "returned", "words"),
    [
        ("reset", "text", "reset: messages are a list"),
        ("reset", [], "reset: messages are a list"),
        ("reset", [{"role": "user", "content": 3}], "a message is"),
        ("reset", [{"role": "judge", "content": ""}], "role is one of system, user"),
        ("reset", [{"role": "user", "content": "x" * 5_000_000}], "5,000,000 characters"),
        ("step", StepResult("", reward=float("nan")), r"step\(look\): it returned nan"),
        ("step", StepResult(None), r"StepResult.text is NoneType"),  # type: ignore[arg-type]
        ("step", None, "it returned NoneType, not str or StepResult"),
        ("reply", "go on", "reply: messages are a list"),
        ("reply", [{"role": "assistant", "content": "I"}], "role user or system"),
        ("reply", Reply([], reward=0.0), "with at least one"),
        ("score", float("inf"), "score: it returned inf"),
        ("score", 10**400, "integer too large"),
        ("metrics", [1.0], "metrics: it returned list, not a mapping"),
        ("metrics", {"right": "yes"}, "right is 'yes', not a number"),
        ("metrics", {"a\nb": 1.0}, "printable word"),
        ("metrics", {str(n): 1.0 for n in range(100)}, "100 names, over 64"),
        ("tools", [{"name": "look"}], "tools: a tool is"),
        ("tools", [{"function": {"name": "look", "parameters": []}}], "a tool's parameters are"),
        (
            "reset",
            [{"role": "assistant", "content": "", "tool_calls": [{"id": "1", "function": {}}]}],
            "tool_calls are a list of ToolCall",
        ),
        ("reset", [{"role": "tool", "content": "", "name": None}], "a message's name is a text"),
    ],
)
def test_what_is_not_of_the_protocol_breaks_the_episode_in_words(play, member, returned, words):
    environment = Five()
    value = returned if member == "tools" else lambda *_: returned
    setattr(environment, member, value)
    with pytest.raises(EnvironmentBroken, match=f"broke in .*{words}"):
        play(environment, call("look"), "answer")


def test_an_error_that_cannot_be_told_is_still_told(play):
    class Unspeakable(Exception):
        def __str__(self):
            raise RuntimeError

    class Broken(Five):
        def step(self, call):
            raise Unspeakable

    with pytest.raises(EnvironmentBroken, match="Unspeakable: its text cannot be read"):
        play(Broken(), call("look"))


def test_groups_are_dealt_to_several_environments(renderer, monkeypatch):
    module = ModuleType(SCRIPTS)
    for name in ("first", "second"):
        setattr(module, name, lambda name=name: Named(name))
    monkeypatch.setitem(sys.modules, SCRIPTS, module)
    specs = [EnvironmentSpec(name=f"{SCRIPTS}:{name}", weight=w) for name, w in WEIGHTS]

    async def main():
        episodes = Episodes(specs, ["one", "two"], renderer)
        longest = await episodes.check(seed=0)
        begun = []
        for group in range(4):
            who = TrajectoryId(group, 0)
            prompt = await episodes.start(who, group, task_seed=0, seed=0)
            begun.append((episodes.environment_of(who), renderer.decode(prompt).split()[1:3]))
        await episodes.close()
        return longest, begun

    longest, begun = asyncio.run(asyncio.wait_for(main(), DEADLINE_S))
    assert begun == [
        ("one", ["first", "0<|im_end|>"]),
        ("one", ["first", "1<|im_end|>"]),
        ("two", ["second", "0<|im_end|>"]),
        ("one", ["first", "2<|im_end|>"]),
    ]
    assert longest > 0


WEIGHTS = (("first", 3.0), ("second", 1.0))


class Named(Five):
    def __init__(self, name):
        self.name = name

    def task(self, index, seed):
        return {"text": f"{self.name} {index}"}

    def reset(self, task, seed):
        return [{"role": "user", "content": task["text"]}]


def test_an_episode_that_is_forgotten_while_it_is_scored_is_told_so(renderer, monkeypatch):
    class Slow(Five):
        async def score(self, answer):
            scored.set()
            await asyncio.sleep(DEADLINE_S)

    scored = asyncio.Event()
    module = ModuleType(SCRIPTS)
    module.make = Slow  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, SCRIPTS, module)

    async def main():
        spec = EnvironmentSpec(name=f"{SCRIPTS}:make", tool_timeout_s=5.0)
        episodes = Episodes([spec], ["members"], renderer)
        try:
            await episodes.start(ONE, 0, task_seed=0, seed=0)
            turn = asyncio.create_task(episodes.advance(ONE, tokens(renderer, "4"), "stop"))
            await scored.wait()
            episodes.forget(ONE)
            with pytest.raises(EnvironmentBroken, match="the episode was forgotten meanwhile"):
                await turn
        finally:
            await episodes.close()

    asyncio.run(asyncio.wait_for(main(), DEADLINE_S))
