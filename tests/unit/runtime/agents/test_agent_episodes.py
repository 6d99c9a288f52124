"""What becomes of an agent's requests: exact prefixes, branches, limits, retries and ends."""

from __future__ import annotations

import asyncio
import threading
from array import array

import pytest

from libra_cli.config.errors import AgentFailed, LibraError, PluginError, RecipeError
from libra_cli.core.evaluation.groups import EvaluatedTask
from libra_cli.core.types import TrajectoryId
from libra_cli.envs.pointer_chase import PointerChase, Store, call_text
from libra_cli.runtime.agents.play import AgentEnd, SaidTurn
from libra_cli.runtime.agents.tasks import AgentTasks
from libra_cli.runtime.episodes.renderer import Renderer
from libra_cli.runtime.evaluation.players import EvaluatedEpisodes, evaluation_players
from tests.agents import DEADLINE_S, Chat, Refused, post, recipe

TOOLS = list(PointerChase.tools)


def chat(task, base_url, api_key, **extra):
    return Chat(base_url, api_key, [dict(message) for message in task["messages"]], extra)


async def chase(task, base_url, api_key, model):
    """A whole agent: it calls the tool that it was told until there is no call, and ends."""
    talk, store = chat(task, base_url, api_key, tools=TOOLS), Store(task["data"]["salt"])
    while calls := (await talk.ask()).get("tool_calls"):
        for call in calls:
            key = eval(call["function"]["arguments"])["key"]
            told = {"role": "tool", "tool_call_id": call["id"], "content": store.get(key)}
            talk.messages.append(told)


def turns_of(task):
    store, key = Store(task["salt"]), task["start"]
    turns = []
    for _ in range(task["hops"]):
        turns.append(call_text(key))
        key = store.get(key)
    return [*turns, key]


def test_an_agent_plays_one_branch_with_exact_tokens_and_the_environment_scores_it(play):
    task = PointerChase().task(0, 0)
    made, result = play(chase, *turns_of(task))
    assert (result.done, result.reward) == (True, 1.0)
    assert made.trajectory.others == {}
    assert made.trajectory.turns == task["hops"] + 1
    assert [returned.tool for returned in made.returns] == ["get"] * task["hops"]
    assert all(0 < returned.latency_s < DEADLINE_S for returned in made.returns)
    turns = made.texts[0].split("<|im_start|>assistant\n")
    assert len(turns) == task["hops"] + 2


def test_the_reward_that_a_function_returns_counts(play):
    async def agent(task, base_url, api_key, model):
        await chat(task, base_url, api_key).ask()
        return 0.25

    _, result = play(agent, "said")
    assert result.reward == 0.25


def test_a_function_that_is_not_async_runs_in_a_thread(play):
    def agent(task, base_url, api_key, model):
        asyncio.run(chat(task, base_url, api_key).ask())
        return 1

    _, result = play(agent, "said")
    assert result.reward == 1.0


def test_another_conversation_is_a_branch_and_both_go_on(play):
    async def agent(task, base_url, api_key, model):
        talk = chat(task, base_url, api_key)
        await talk.ask()
        title = Chat(base_url, api_key, [{"role": "user", "content": "a title?"}])
        await title.ask()
        talk.messages.append({"role": "user", "content": "more"})
        await talk.ask()
        title.messages.append({"role": "user", "content": "a shorter one"})
        await title.ask()

    made, _ = play(agent, "one", "title", "two", "short")
    first, second = made.texts
    assert [len(branch.spans) for branch in made.trajectory.branches] == [2, 2]
    assert first.count("<|im_start|>assistant") == second.count("<|im_start|>assistant") == 2
    assert first.endswith("two<|im_end|>")
    assert second.endswith("short<|im_end|>")


def test_a_history_that_was_cut_keeps_the_tokens_before_the_cut(play):
    async def agent(task, base_url, api_key, model):
        talk = chat(task, base_url, api_key)
        await talk.ask()
        kept = [dict(message) for message in talk.messages]
        talk.messages.append({"role": "user", "content": "left"})
        await talk.ask()
        kept.append({"role": "user", "content": "right"})
        await Chat(base_url, api_key, kept).ask()

    made, _ = play(agent, "one", "two", "three")
    left, right = made.trajectory.branches
    first = made.trajectory.others[0].spans[0].end
    assert left.token_ids[:first] == right.token_ids[:first]
    assert sum(right.loss_mask[:first]) == 0
    assert made.trajectory.generated == sum(sum(b.loss_mask) for b in (left, right))


def test_several_replies_to_one_request_are_branches_of_one_prompt(play):
    replies: list[str] = []

    async def agent(task, base_url, api_key, model):
        talk = chat(task, base_url, api_key)
        body = {"model": "m", "messages": talk.messages, "n": 3}
        answer = await post(f"{base_url}/chat/completions", body, key=api_key)
        replies.extend(choice["message"]["content"] for choice in answer["choices"])

    made, _ = play(agent, "a", "b", "c")
    assert replies == ["a", "b", "c"]
    assert made.returns == []
    assert len(made.trajectory.branches) == 3


def test_requests_at_the_same_time_wait_in_line(play):
    async def agent(task, base_url, api_key, model):
        talks = [Chat(base_url, api_key, [{"role": "user", "content": f"{n}"}]) for n in range(4)]
        await asyncio.gather(*(talk.ask() for talk in talks))

    made, result = play(agent, "a", "b", "c", "d")
    assert result.done
    assert len(made.trajectory.branches) == 4


def test_a_request_that_is_sent_again_is_answered_from_the_record(play):
    said = []

    async def agent(task, base_url, api_key, model):
        url, body = f"{base_url}/chat/completions", {"model": "m", "messages": task["messages"]}
        said.append(await post(url, body, key=api_key))
        said.append(await post(url, body, key=api_key, **{"x-stainless-retry-count": "1"}))

    made, _ = play(agent, "once")
    assert said[0] == said[1]
    assert made.trajectory.turns == 1


def test_token_ids_of_the_prompt_and_the_reply_are_told_on_request(play):
    seen = []

    async def agent(task, base_url, api_key, model):
        talk = chat(task, base_url, api_key, tools=TOOLS)
        for _ in range(2):
            body = {"model": "m", "messages": talk.messages, "tools": TOOLS}
            body |= {"return_token_ids": True, "logprobs": True}
            answer = await post(f"{base_url}/chat/completions", body, key=api_key)
            seen.append((answer["prompt_token_ids"], answer["choices"][0]["token_ids"]))
            talk.messages.append(answer["choices"][0]["message"])
            talk.messages.append({"role": "user", "content": "go on"})

    made, _ = play(agent, "one", "two")
    whole = made.trajectory.token_ids.tolist()
    assert seen[1][0] + seen[1][1] == whole
    assert whole[: len(seen[0][0]) + len(seen[0][1])] == seen[0][0] + seen[0][1]


def test_the_turn_limit_is_answered_with_400_and_the_rest_is_scored(play):
    refused = []

    async def agent(task, base_url, api_key, model):
        talk = chat(task, base_url, api_key)
        while True:
            try:
                await talk.ask()
            except Refused as error:
                refused.append(error)
                raise
            talk.messages.append({"role": "user", "content": "more"})

    made, result = play(agent, "a", "b", changes={"rollout": {"max_turns": 2}})
    assert (result.done, result.reward) == (True, 0.0)
    assert refused[0].status == 400
    assert "rollout.max_turns" in str(refused[0])
    assert made.trajectory.turns == 2


def test_a_prompt_that_is_too_long_is_refused_by_itself(play):
    refused = []

    async def agent(task, base_url, api_key, model):
        talk = chat(task, base_url, api_key)
        await talk.ask()
        long = Chat(base_url, api_key, [{"role": "user", "content": "x" * 600}])
        with pytest.raises(Refused) as caught:
            await long.ask()
        refused.append(caught.value)
        talk.messages.append({"role": "user", "content": "more"})
        await talk.ask()

    made, _ = play(agent, "a", "b")
    assert refused[0].status == 400
    assert "prompt is too long" in str(refused[0])
    assert made.trajectory.turns == 2


@pytest.fixture
def encoded(monkeypatch):
    """The lengths, in characters, of all texts that are encoded."""
    encode, lengths = Renderer.encode, []

    def measured(renderer, text):
        lengths.append(len(text))
        return encode(renderer, text)

    monkeypatch.setattr(Renderer, "encode", measured)
    return lengths


def test_a_prompt_that_cannot_fit_is_refused_before_all_of_it_is_encoded(play, encoded):
    """One of 60 MB would hold up the controller for a minute."""

    async def agent(task, base_url, api_key, model):
        await chat(task, base_url, api_key).ask()
        long = Chat(base_url, api_key, [{"role": "user", "content": "x" * 300_000}])
        with pytest.raises(Refused, match=r"400.*prompt is too long: at least"):
            await long.ask()
        raise KeyError("gone")

    _, result = play(agent, "a")
    assert (result.done, result.reward) == (True, 0.0)
    assert max(encoded) < 100_000


def test_of_a_prompt_that_may_fit_by_its_length_alone_the_beginning_is_encoded(
    play, encoded, monkeypatch
):
    monkeypatch.setattr(Renderer, "_longest_token", 1000)

    async def agent(task, base_url, api_key, model):
        await chat(task, base_url, api_key).ask()
        long = Chat(base_url, api_key, [{"role": "user", "content": "x y " * 50_000}])
        with pytest.raises(Refused, match=r"400.*prompt is too long: at least"):
            await long.ask()
        return 1.0

    _, result = play(agent, "a")
    assert (result.done, result.reward) == (True, 1.0)
    assert max(encoded) < 100_000


def test_a_branch_too_many_is_refused_by_itself(play):
    async def agent(task, base_url, api_key, model):
        await chat(task, base_url, api_key).ask()
        with pytest.raises(Refused, match="max_branches"):
            await Chat(base_url, api_key, [{"role": "user", "content": "else"}]).ask()

    made, _ = play(agent, "a", max_branches=1)
    assert made.trajectory.others == {}


async def _fails(task, base_url, api_key, model):
    raise KeyError("gone")


async def _fails_later(task, base_url, api_key, model):
    await chat(task, base_url, api_key).ask()
    raise SystemExit(3)


def test_an_agent_that_fails_on_a_turn_that_was_cut_has_ended_and_is_scored(play):
    """As Claude Code and Codex do. Played again it would be cut again, and its group be lost."""

    def cut(made):
        made.finish_reason = "length"
        return made.play(["a"])

    _, result = play(_fails_later, scene=cut)
    assert (result.done, result.reward) == (True, 0.0)


@pytest.mark.parametrize(("stop", "reason"), [("STOP", "stop"), ("never", "length")])
def test_a_turn_that_was_cut_after_the_text_to_stop_at_has_stopped(play, stop, reason):
    """The model goes on after that text, perhaps to its limit, and the agent does not see it."""
    choices = []

    async def agent(task, base_url, api_key, model):
        body = {"model": "m", "messages": task["messages"], "stop": [stop]}
        answer = await post(f"{base_url}/chat/completions", body, key=api_key)
        choices.extend(answer["choices"])

    def cut(made):
        made.finish_reason = "length"
        return made.play(["so STOP and on"])

    play(agent, scene=cut)
    assert choices[0]["finish_reason"] == reason


async def _says_nothing(task, base_url, api_key, model):
    await asyncio.sleep(3600)


async def _asks_nothing(task, base_url, api_key, model):
    return 1.0


async def _asks_wrongly(task, base_url, api_key, model):
    await post(f"{base_url}/chat/completions", {"messages": []}, key=api_key)


async def _returns_a_word(task, base_url, api_key, model):
    await chat(task, base_url, api_key).ask()
    return "good"


async def _returns_nan(task, base_url, api_key, model):
    await chat(task, base_url, api_key).ask()
    return float("nan")


@pytest.mark.parametrize(
    ("agent", "words"),
    [
        (_fails, "KeyError: 'gone'"),
        (_fails_later, "SystemExit: 3"),
        (_says_nothing, "neither asked nor ended"),
        (_asks_nothing, "without a turn"),
        (_asks_wrongly, "messages must not be empty"),
        (_returns_a_word, "returned str"),
        (_returns_nan, "reward is nan"),
    ],
)
def test_a_failure_of_the_agent_is_never_a_reward(play, agent, words):
    with pytest.raises(AgentFailed, match=words):
        play(agent, "a", timeout_s=0.5)


@pytest.mark.parametrize("name", ["agents_of_tests:nobody", "no_such_module_here:agent"])
def test_a_function_that_is_not_there_is_an_error_in_words(play, name):
    with pytest.raises(LibraError, match="agent"):
        play(_fails, function=name)


def test_a_function_that_takes_other_arguments_is_an_error_in_words(play):
    async def agent(prompt):
        return 0.0

    with pytest.raises(PluginError, match="cannot be called with task"):
        play(agent)


def test_what_agents_leave_on_their_loop_is_cancelled_at_the_end(play):
    left: list[str] = []
    kept: list[asyncio.Task[None]] = []

    async def serve():
        try:
            await asyncio.sleep(3600)
        finally:
            left.append("closed")

    async def agent(task, base_url, api_key, model):
        kept.append(asyncio.create_task(serve()))
        await chat(task, base_url, api_key).ask()

    play(agent, "a")
    assert left == ["closed"]


async def _begin(made, member=0):
    who = TrajectoryId(0, member)
    return who, asyncio.create_task(made.episodes.start(who, 0, task_seed=0, seed=0))


async def _given_up(waiting):
    """Nobody waits any longer for what was forgotten; far sooner than the agent's own limit."""
    with pytest.raises(AgentFailed, match="given up"):
        await asyncio.wait_for(waiting, 2.0)


def test_an_agent_whose_task_is_forgotten_while_it_begins_is_not_started(play, monkeypatch):
    started = []
    reached, go_on, reset = asyncio.Event(), asyncio.Event(), AgentTasks.reset

    async def slow(self, *arguments, **named):
        reached.set()
        await go_on.wait()
        return await reset(self, *arguments, **named)

    async def agent(task, base_url, api_key, model):
        started.append(api_key)
        await asyncio.sleep(60)

    async def scene(made):
        monkeypatch.setattr(AgentTasks, "reset", slow)
        who, starting = await _begin(made)
        await reached.wait()
        made.episodes.forget(who)
        go_on.set()
        await _given_up(starting)

    play(agent, scene=scene, timeout_s=30.0)
    assert not started


@pytest.mark.parametrize("asks", [False, True])
def test_nobody_waits_for_an_agent_that_is_forgotten(play, asks):
    thinking = threading.Event()

    async def agent(task, base_url, api_key, model):
        if asks:
            await chat(task, base_url, api_key).ask()
        thinking.set()
        await asyncio.sleep(60)

    async def scene(made):
        who, waiting = await _begin(made)
        if asks:
            await waiting
            waiting = asyncio.create_task(made.episodes.advance(who, array("i", [5]), "stop"))
        assert await asyncio.to_thread(thinking.wait, DEADLINE_S)
        made.episodes.forget(who)
        await _given_up(waiting)

    play(agent, scene=scene, timeout_s=30.0)


def test_an_agent_that_ends_as_it_is_forgotten_is_not_scored(play):
    async def agent(task, base_url, api_key, model):
        await chat(task, base_url, api_key).ask()
        await asyncio.sleep(60)

    async def scene(made):
        who, starting = await _begin(made)
        await starting
        advancing = asyncio.create_task(made.episodes.advance(who, array("i", [5]), "stop"))
        await asyncio.sleep(0)
        made.episodes._episodes[who].play.end(AgentEnd())
        made.episodes.forget(who)
        await _given_up(advancing)

    play(agent, scene=scene, timeout_s=30.0)


def test_several_replies_to_one_request_stop_when_it_is_forgotten(play):
    async def agent(task, base_url, api_key, model):
        await chat(task, base_url, api_key).ask(n=2)

    async def scene(made):
        who, starting = await _begin(made)
        await starting
        playing = made.episodes._episodes[who].play
        playing.said(SaidTurn(array("i", [5]), [-0.5], "stop"))
        made.episodes.forget(who)
        for _ in range(5):
            await asyncio.sleep(0)
        assert isinstance(playing.inbox.get_nowait(), AgentEnd)
        assert playing.inbox.empty(), "a second reply was asked for, and nobody would give it"

    play(agent, scene=scene, timeout_s=30.0)


def test_after_a_turn_that_cannot_be_read_no_other_tokens_follow(play, monkeypatch):
    def broken(self, token_ids, tools=()):
        raise ValueError("a bug")

    async def agent(task, base_url, api_key, model):
        talk = chat(task, base_url, api_key)
        with pytest.raises(Refused, match="500"):
            await talk.ask()
        await talk.ask()

    monkeypatch.setattr(Renderer, "read_turn", broken)
    with pytest.raises(AgentFailed, match="cannot go on"):
        play(agent, "a", "b")


def test_an_evaluation_plays_its_own_tasks_by_the_same_agent(play, tmp_path):
    rows = {name: tmp_path / f"{name}.jsonl" for name in ("trained", "held_out")}
    for number, path in enumerate(rows.values(), 1):
        path.write_text(f'{{"question": "{number} + {number}?", "answer": {2 * number}}}\n')
    changes = {
        "environment": {"name": "calculator", "args": {}, "tasks": str(rows["trained"])},
        "evaluation": [
            {"tasks": str(rows["held_out"]), "num_tasks": 1},
            {"environment": {"name": "calculator"}, "num_tasks": 3},
        ],
    }
    seen = []

    async def agent(task, base_url, api_key, model):
        seen.append(task["data"]["question"])
        await chat(task, base_url, api_key).ask()

    async def scene(made):
        found = recipe({"function": "agents_of_tests:agent"}, **changes)
        players = evaluation_players(found, made.episodes, made.renderer)
        all_of_them = EvaluatedEpisodes(found, made.episodes, players)
        groups = [0, EvaluatedTask(0, 0, 0).group, EvaluatedTask(0, 1, 2).group]
        rewards = []
        for group in groups:
            who = TrajectoryId(group, 0)
            await all_of_them.start(who, group, task_seed=0, seed=0)
            said = array("i", [*made.renderer.encode("4"), made.renderer.end_of_turn])
            rewards.append(
                (await all_of_them.advance(who, said, "stop", [-0.5] * len(said))).reward
            )
            all_of_them.forget(who)
        short = recipe(
            {"function": "agents_of_tests:agent"},
            **{**changes, "evaluation": [{"tasks": str(rows["held_out"]), "num_tasks": 2}]},
        )
        with pytest.raises(RecipeError, match="its files have 1 tasks, and num_tasks is 2"):
            evaluation_players(short, made.episodes, made.renderer)
        return rewards

    _, rewards = play(agent, changes=changes, scene=scene)
    assert rewards[:2] == [0.0, 1.0]
    assert seen[:2] == ["1 + 1?", "2 + 2?"]
    assert seen[2] not in seen[:2]
