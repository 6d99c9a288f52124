"""What is asked of a teacher's server, and what its answers mean, over real HTTP on loopback."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from libra_cli.config.environment import TeacherSpec
from libra_cli.config.errors import TeacherError
from libra_cli.core.actions import AskTeacher
from libra_cli.core.events import TeacherAnswered, TeacherFailed
from libra_cli.core.types import TrajectoryId
from libra_cli.runtime import teacher as module
from libra_cli.runtime.teacher import Teacher, read_logprobs

WHO = TrajectoryId(3, 1)
TOKENS = array("i", [5, 6, 7])


def of(tokens: list[int]) -> dict[str, Any]:
    """As vLLM answers; a token's log-probability is minus a tenth of its id."""
    entries = [{str(one): {"logprob": -one / 10, "rank": 1}} for one in tokens[1:]]
    return {"choices": [{"text": "x", "prompt_logprobs": [None, *entries]}]}


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAUSE_S", 0.0)


def asked(
    answer: Callable[[dict[str, Any], int], Any], *sequences: array[int], **keys: Any
) -> tuple[Any, list[tuple[dict[str, Any], str | None]]]:
    """What comes of asking about sequences; ``answer`` gets a request and its number from 1."""
    requests: list[tuple[dict[str, Any], str | None]] = []

    async def complete(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        requests.append((body, request.headers.get("Authorization")))
        said = answer(body, len(requests))
        if asyncio.iscoroutine(said):
            said = await said
        return said if isinstance(said, web.Response) else web.json_response(said)

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "big", "max_model_len": 64}, {"id": "other"}]})

    async def scene() -> Any:
        app = web.Application()
        app.router.add_post("/v1/completions", complete)
        app.router.add_get("/v1/models", models)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        teacher = Teacher(TeacherSpec.model_validate({"url": url, **keys}))
        try:
            return await teacher.perform(AskTeacher(WHO, sequences or (TOKENS,)))
        finally:
            await teacher.close()
            await runner.cleanup()

    return asyncio.run(scene()), requests


def test_it_is_asked_about_the_very_ids_by_the_first_model_that_it_lists():
    said, requests = asked(
        lambda body, _: of(body["prompt"]), TOKENS, array("i", [9, 8]), api_key="secret-key"
    )
    assert said == TeacherAnswered(WHO, (array("f", [0, -0.6, -0.7]), array("f", [0, -0.8])))
    assert {key for _, key in requests} == {"Bearer secret-key"}
    assert sorted(body["prompt"] for body, _ in requests) == [[5, 6, 7], [9, 8]]
    body = requests[0][0]
    assert (body["model"], body["prompt_logprobs"], body["max_tokens"]) == ("big", 0, 1)


def test_what_is_over_in_a_moment_is_tried_again():
    said, requests = asked(
        lambda body, number: of(body["prompt"]) if number == 3 else web.Response(status=503)
    )
    assert isinstance(said, TeacherAnswered)
    assert len(requests) == 3


@pytest.mark.parametrize(
    ("answer", "reason", "refused", "tries"),
    [
        (web.Response(status=500, text="out of memory"), "status 500: out of memory", False, 3),
        (web.Response(status=401, text="who?"), "status 401", False, 1),
        (web.Response(status=404, text="no model"), "status 404", False, 1),
        (web.Response(status=400, text="too long"), "status 400: too long", True, 1),
        (web.Response(text="<html>"), "answers no JSON", False, 1),
        ({"choices": [{"text": "x"}]}, "no prompt_logprobs of the tokens", False, 1),
        (of([5, 6]), "no prompt_logprobs of the tokens", False, 1),
        (of([5, 6, 8]), "no prompt_logprobs of the tokens", False, 1),
        (of([5, 6, -7]), "no prompt_logprobs of the tokens", False, 1),
    ],
)
def test_no_failure_is_a_number(answer: Any, reason: str, refused: bool, tries: int):
    def reply(body: dict[str, Any], number: int) -> Any:
        if isinstance(answer, web.Response):
            return web.Response(status=answer.status, text=answer.text)
        return answer

    said, requests = asked(reply)
    assert isinstance(said, TeacherFailed)
    assert reason in said.reason
    assert (said.refused, len(requests)) == (refused, tries)


def test_no_answer_in_time_is_a_failure():
    async def slow() -> web.Response:
        await asyncio.sleep(1)
        return web.Response()

    said, requests = asked(lambda body, _: slow(), timeout_s=0.2)
    assert isinstance(said, TeacherFailed)
    assert "has not answered within 0.2 s" in said.reason
    assert not said.refused
    assert len(requests) == 1


def test_when_one_sequence_fails_the_others_are_asked_about_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given_up: list[int] = []

    async def logprobs(self: Teacher, tokens: array[int]) -> Any:
        if len(tokens) == 2:
            raise TeacherError("no")
        try:
            await asyncio.Event().wait()
        finally:
            given_up.append(len(tokens))

    monkeypatch.setattr(Teacher, "_logprobs", logprobs)
    said, _ = asked(lambda body, _: of(body["prompt"]), TOKENS, array("i", [9, 8]))
    assert isinstance(said, TeacherFailed)
    assert given_up == [len(TOKENS)]


def test_one_sequence_without_an_answer_is_none_for_the_trajectory():
    said, _ = asked(
        lambda body, _: (
            of(body["prompt"]) if len(body["prompt"]) == 3 else web.Response(status=400)
        ),
        TOKENS,
        array("i", [9, 8]),
    )
    assert isinstance(said, TeacherFailed)


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), 0.1, "x", None, {}])
def test_what_is_no_log_probability_is_refused(value: Any):
    answer = of([5, 6, 7])
    answer["choices"][0]["prompt_logprobs"][2]["7"]["logprob"] = value
    with pytest.raises(TeacherError):
        read_logprobs(answer, TOKENS)


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(JSON)
def test_nonsense_is_refused_in_words(answer: Any):
    for one in (answer, {"choices": [{"prompt_logprobs": answer}]}, {"choices": answer}):
        with pytest.raises(TeacherError):
            read_logprobs(one, TOKENS)
    entry = {"choices": [{"prompt_logprobs": [None, answer, answer]}]}
    with pytest.raises(TeacherError):
        read_logprobs(entry, TOKENS)


def test_one_on_this_machine_is_asked_past_a_proxy(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    said, _ = asked(lambda body, _: of(body["prompt"]))
    assert isinstance(said, TeacherAnswered)
