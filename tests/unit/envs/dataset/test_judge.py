"""The reward ``judge``, asked over HTTP: cached, within its budget, and never scored on failure."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sqlite3
from typing import Any

import pytest
from aiohttp import web

from libra_cli.config.errors import EnvironmentBroken
from libra_cli.envs.dataset import judge as judge_module
from libra_cli.envs.dataset.environment import Dataset
from tests.chat_server import ChatServer

ROW = {"prompt": "Name a colour.", "answer": "red", "extra": {"level": 3}}


@pytest.fixture(autouse=True)
def _no_long_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    judge_module._judge.cache_clear()
    monkeypatch.setattr(judge_module, "BACKOFF_S", 0.001)


class Asked:
    """What came of several answers to one row."""

    def __init__(self) -> None:
        self.rewards: list[float | EnvironmentBroken] = []
        self.metrics: list[Any] = []


def ask(
    server: ChatServer,
    answers: list[str],
    reward: Any = "judge",
    *,
    together: bool = False,
    arguments: dict[str, Any] | None = None,
    **judge: Any,
) -> Asked:
    asked = Asked()

    async def one(url: str, answer: str) -> None:
        given = {"url": url, "model": "judge-1", **judge}
        environment = Dataset(reward, judge=given, **(arguments or {}))
        environment.reset(ROW, 0)
        try:
            asked.rewards.append(await environment.score(answer, []))
        except EnvironmentBroken as error:
            asked.rewards.append(error)
        asked.metrics.append(environment.metrics())

    async def all_of_them() -> None:
        async with server.serving() as url:
            if together:
                await asyncio.gather(*(one(url, answer) for answer in answers))
            else:
                for answer in answers:
                    await one(url, answer)

    asyncio.run(all_of_them())
    return asked


def test_it_reads_question_truth_and_answer_and_its_score_is_the_reward():
    server = ChatServer(lambda body: "<think>Score: 0</think>Right.\n**Score:** 1")
    asked = ask(server, ["It is red. {truth}"])
    assert asked.rewards == [1.0]
    said = {"judge": 1.0, "judge_cached": 0.0, "judge_spent": 0.0, "judge_cut": 0.0}
    assert asked.metrics == [said]
    (request,) = server.requests
    assert (request["model"], request["temperature"]) == ("judge-1", 0.0)
    (message,) = request["messages"]
    for part in ("Question:\nName a colour.", "answer:\nred", "judged:\nIt is red. {truth}"):
        assert part in message["content"]
    assert server.keys == [None]


def test_prompt_scale_key_and_body_are_the_recipes():
    server = ChatServer(lambda body: 'Thinking. {"score": 8}')
    prompt = 'Level {extra.level}: {answer}. Reply {"score": 0-10}.'
    asked = ask(
        server,
        ["red"],
        arguments={"secrets": {"KEY": "sk-1"}},
        prompt=prompt,
        scale=[0, 10],
        api_key="KEY",
        body={"temperature": None, "max_tokens": None, "max_completion_tokens": 9},
    )
    assert asked.rewards == [0.8]
    assert server.keys == ["Bearer sk-1"]
    (request,) = server.requests
    assert set(request) == {"model", "messages", "max_completion_tokens"}
    assert request["messages"][0]["content"] == 'Level 3: red. Reply {"score": 0-10}.'


@pytest.mark.parametrize(
    ("reply", "value"),
    [("Score: 0.25", 0.25), ("1", 1.0), ("score: 0 ... final score = 1", 1.0), ("Score: -1", None)],
)
def test_the_last_score_within_the_scale_counts(reply, value):
    asked = ask(ChatServer(lambda body: reply), ["red"])
    if value is None:
        assert "its reply has no score: 'Score: -1' (5 attempts)" in str(asked.rewards[0])
    else:
        assert asked.rewards == [value]


def test_the_same_answer_is_asked_about_once_also_at_the_same_time_and_after_a_resume(tmp_path):
    server = ChatServer(lambda body: "Score: 1" if "red" in body["messages"][0]["content"] else "0")
    place = {"run_directory": str(tmp_path)}
    asked = ask(server, ["a", "a", "a", "b"], together=True, arguments=place)
    assert len(server.requests) == 2
    assert sorted(metrics["judge_cached"] for metrics in asked.metrics) == [0.0, 0.0, 1.0, 1.0]
    judge_module._judge.cache_clear()
    again = ChatServer(lambda body: "Score: 0")
    assert ask(again, ["a", "b"], arguments=place).rewards == asked.rewards[:2]
    assert again.requests == []
    assert (tmp_path / "judge.sqlite").is_file()


def test_what_fails_for_a_while_is_tried_again():
    said = iter(
        [
            web.Response(status=503, text="busy"),
            web.Response(status=429, headers={"Retry-After": "0"}),
            web.Response(text="<html>"),
            "I cannot say.",
            "Score: 1",
        ]
    )
    server = ChatServer(lambda body: next(said))
    assert ask(server, ["red"]).rewards == [1.0]
    assert len(server.requests) == 5


def test_an_answer_that_the_judge_has_no_room_for_is_told_without_its_middle():
    def reply(body: dict[str, Any]) -> Any:
        if len(body["messages"][0]["content"]) < 2_000:
            return "Score: 1"
        text = "This model's maximum context length is 512 tokens. However, you requested 2,600"
        return web.Response(status=400, text=text)

    server = ChatServer(reply)
    asked = ask(server, ["first " + 5_000 * "a" + " last"], budget={"tokens": 20_000})
    assert asked.rewards == [1.0]
    assert [one["judge_cut"] for one in asked.metrics] == [1.0]
    assert len(server.requests) == 3
    told = server.requests[-1]["messages"][0]["content"]
    for part in ("first aaa", "aaa last", "[3,759 characters left out]"):
        assert part in told


def test_a_prompt_that_the_judge_has_no_room_for_is_a_failure():
    full = web.Response(status=413, text="the request is too large")
    asked = ask(ChatServer(lambda body: full), ["red"])
    assert "status 413: the request is too large" in str(asked.rewards[0])


@pytest.mark.parametrize(
    ("reply", "requests", "message"),
    [
        (web.Response, 5, r"status 500: down \(5 attempts\)"),
        (lambda **_: web.Response(status=401, text="no key"), 1, "status 401: no key"),
        (lambda **_: "I cannot say.", 5, "its reply has no score: 'I cannot say.'"),
        (lambda **_: web.json_response({"error": "x"}), 5, "is no chat completion"),
        (
            lambda **_: web.json_response(
                {"choices": [{"message": {"content": "Score: 1 if"}, "finish_reason": "length"}]}
            ),
            5,
            r"its reply was cut at judge\.body\.max_tokens",
        ),
    ],
)
def test_a_failure_is_never_a_score(reply, requests, message):
    server = ChatServer(lambda body: reply(status=500, text="down"))
    (broken,) = ask(server, ["red"], {"match": 1.0, "judge": 1.0}).rewards
    assert isinstance(broken, EnvironmentBroken)
    with pytest.raises(EnvironmentBroken, match=message):
        raise broken
    assert len(server.requests) == requests


def test_a_server_that_is_not_there_or_too_slow_is_a_failure():
    async def unreachable() -> None:
        async with ChatServer(lambda body: "1").serving() as url:
            pass
        environment = Dataset("judge", judge={"url": url, "model": "m"})
        environment.reset(ROW, 0)
        await environment.score("red", [])

    with pytest.raises(EnvironmentBroken, match=r"ClientConnectorError: .* \(5 attempts\)"):
        asyncio.run(unreachable())
    (broken,) = ask(ChatServer(lambda body: "1"), ["red"], timeout_s=0.001).rewards
    assert "TimeoutError" in str(broken)


def test_no_more_requests_are_sent_at_once_than_the_recipe_says():
    server = ChatServer(lambda body: "1")
    ask(server, [str(number) for number in range(12)], together=True, concurrency=3)
    assert (len(server.requests), server.most_at_once) == (12, 3)


def test_when_the_budget_is_spent_the_judge_gives_the_mean_and_the_others_go_on(caplog, tmp_path):
    budget = {"requests": 3}
    said = iter(["Score: 1", web.Response(status=500), "Score: 0.5"])
    server = ChatServer(lambda body: next(said))
    reward = {"match": 1.0, "judge": 2.0}
    arguments = {"run_directory": str(tmp_path)}
    answers = ["a", "b", "red", "d", "a"]
    with caplog.at_level(logging.WARNING):
        asked = ask(server, answers, reward, arguments=arguments, budget=budget)
    assert asked.rewards == [2.0, 1.0, 1.0 + 2 * 0.75, 2 * 0.75, 2.0]
    assert [metrics["judge_spent"] for metrics in asked.metrics] == [0, 0, 1, 1, 0]
    (told,) = [record.message for record in caplog.records]
    assert told == (
        "the judge's budget is spent: 3 requests, 200 tokens; from now on its reward is the mean "
        "of those it gave"
    )
    judge_module._judge.cache_clear()
    more = ask(
        ChatServer(lambda body: "1"), ["d"], reward, arguments=arguments, budget={"requests": 3}
    )
    assert more.rewards == [1.5]


def test_a_judge_that_is_alone_ends_with_its_budget():
    asked = ask(ChatServer(lambda body: "1"), ["a", "b"], budget={"requests": 1})
    assert asked.rewards[0] == 1.0
    assert "the judge's budget is spent: 1 requests, 100 tokens" in str(asked.rewards[1])


@pytest.mark.parametrize("usage", [True, False])
def test_tokens_are_never_exceeded_whatever_is_asked_at_once(usage, tmp_path):
    server = ChatServer(lambda body: "1", usage=usage)
    arguments = {"run_directory": str(tmp_path)}
    most = len(json.dumps({})) + 3000
    ask(
        server,
        [f"{number:02}" for number in range(30)],
        {"match": 1, "judge": 1},
        together=True,
        arguments=arguments,
        body={"max_tokens": 100},
        budget={"tokens": most},
    )
    with contextlib.closing(sqlite3.connect(tmp_path / "judge.sqlite")) as file:
        ((requests, tokens),) = file.execute("SELECT requests, tokens FROM spent").fetchall()
    assert requests == len(server.requests) > 2
    assert tokens <= most
    assert tokens == 100 * requests or not usage


@pytest.mark.parametrize(
    ("judge", "message"),
    [
        ({"url": "http://x"}, "judge.model: Field required"),
        ({"url": "http://x", "model": "m", "prompts": "x"}, "judge.prompts: Extra inputs"),
        ({"url": "http://x", "model": "m", "prompt": "x"}, "judge.prompt has no {answer}"),
        ({"url": "http://x", "model": "m", "scale": [1, 1]}, "judge.scale is one number twice"),
        ({"url": "http://x", "model": "m", "budget": {"requests": -1}}, "judge.budget.requests"),
        ({"url": "http://x", "model": "m", "api_key": "KEY"}, "name of none of its secrets"),
    ],
)
def test_a_judge_that_is_wrong_is_told_in_words(judge, message):
    with pytest.raises(EnvironmentBroken, match=message):
        Dataset("judge", judge=judge)


def test_a_key_in_place_of_its_name_is_not_told():
    judge = {"url": "http://x", "model": "m", "api_key": "sk-proj-1"}
    with pytest.raises(EnvironmentBroken) as caught:
        Dataset("judge", judge=judge, secrets={"KEY": "s"})
    assert "sk-proj-1" not in f"{caught.value} {caught.value.hint}"


def test_a_column_of_the_prompt_that_a_row_lacks_is_told():
    (broken,) = ask(ChatServer(lambda body: "1"), ["red"], prompt="{answer} {extra.lvl}").rewards
    assert "judge.prompt has {extra.lvl}, and the row has not" in str(broken)


def test_one_on_this_machine_is_asked_past_a_proxy(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    assert ask(ChatServer(lambda body: "Score: 1"), ["red"]).rewards == [1.0]
