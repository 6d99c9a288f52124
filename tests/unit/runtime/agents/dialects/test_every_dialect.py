"""What holds for each of the three dialects."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra_cli.runtime.agents.dialects.conversation import (
    AgentReply,
    AgentRequest,
    BadRequest,
    Json,
    ReplyCall,
)
from libra_cli.runtime.agents.dialects.paths import dialect_of, models
from libra_cli.runtime.agents.matching import Conversations

PATHS = ["/v1/chat/completions", "/v1/responses", "/v1/messages"]
GET_PARAMETERS = {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]}
GET = {
    PATHS[0]: {"type": "function", "function": {"name": "get", "parameters": GET_PARAMETERS}},
    PATHS[1]: {"type": "function", "name": "get", "parameters": GET_PARAMETERS},
    PATHS[2]: {"name": "get", "input_schema": GET_PARAMETERS},
}
IMAGES = {
    PATHS[0]: {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}},
    PATHS[1]: {"type": "input_image", "image_url": "data:image/png;base64,AA"},
    PATHS[2]: {"type": "image", "source": {"type": "base64", "data": "AA"}},
}
HISTORY = {PATHS[0]: "messages", PATHS[1]: "input", PATHS[2]: "messages"}

every_dialect = pytest.mark.parametrize("path", PATHS, ids=["chat", "responses", "anthropic"])


def read(path: str, body: object, headers: dict[str, str] | None = None) -> AgentRequest:
    return dialect_of(path).read(path, headers or {}, body)


def body_of(path: str, *messages: Json, **rest: Any) -> Json:
    return {"model": "policy", HISTORY[path]: list(messages), "max_tokens": 100, **rest}


def asked(path: str, **rest: Any) -> AgentRequest:
    return read(path, body_of(path, {"role": "user", "content": "q"}, **rest))


# JSON in the words of the dialects, so that deep places are reached.
KEYS = st.sampled_from(
    """type role content text messages input tools tool_calls function name arguments id call_id
    output system instructions tool_use_id thinking stop n stream max_tokens parameters
    input_schema response_format stream_options reasoning_content tool_choice""".split()  # noqa: SIM905
)
WORDS = st.sampled_from(
    """text message user assistant tool system developer function function_call tool_use
    function_call_output tool_result reasoning thinking image_url {} get""".split()  # noqa: SIM905
)
leaves = st.none() | st.booleans() | st.integers(-1, 3) | st.floats(allow_nan=False) | WORDS
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=6),
    max_leaves=30,
)


@every_dialect
@given(body=st.dictionaries(KEYS, values, max_size=6) | values)
def test_whatever_is_sent_is_read_or_refused_in_words(path: str, body: Any) -> None:
    with contextlib.suppress(BadRequest):
        request = read(path, body)
        assert all(isinstance(message["content"], str) for message in request.messages)
        assert all(tool["function"]["name"] for tool in request.tools)
        Conversations().find(request)


def chat_history(answer: Json) -> list[Json]:
    return [answer["choices"][0]["message"]]


def responses_history(answer: Json) -> list[Json]:
    return list(answer["output"])


def anthropic_history(answer: Json) -> list[Json]:
    return [{"role": "assistant", "content": answer["content"]}]


GIVEN_BACK: dict[str, Callable[[Json], list[Json]]] = {
    PATHS[0]: chat_history,
    PATHS[1]: responses_history,
    PATHS[2]: anthropic_history,
}

arguments = st.dictionaries(st.text(max_size=4), st.integers() | st.text(max_size=4), max_size=3)
calls = st.lists(st.tuples(st.sampled_from(["get", "put"]), arguments), max_size=3)
# A reply's text does not begin with a tag of thinking: reading a turn takes it off.
texts = st.text(max_size=30).filter(lambda text: "think>" not in text)


@st.composite
def replies(draw: st.DrawFn, *, number: int = 0) -> AgentReply:
    made = tuple(
        ReplyCall(f"call_{number}_{index}", name, arguments)
        for index, (name, arguments) in enumerate(draw(calls))
    )
    finish = "tool_calls" if made else draw(st.sampled_from(["stop", "length"]))
    tokens = draw(st.lists(st.integers(0, 9), max_size=4))
    return AgentReply(
        id=f"r{number}",
        model="policy",
        text=draw(texts),
        prompt_tokens=3,
        reasoning=draw(texts),
        calls=made,
        finish_reason=finish,  # type: ignore[arg-type]
        prompt_ids=(1, 2, 3),
        token_ids=tokens,
        logprobs=[-0.5] * len(tokens),
        created_s=1_800_000_000,
    )


@every_dialect
@given(reply=replies())
def test_a_reply_that_is_given_back_is_recognised(path: str, reply: AgentReply) -> None:
    conversations = Conversations()
    question = {"role": "user", "content": "q"}
    request = read(path, body_of(path, question, reasoning={}, thinking={"type": "adaptive"}))
    node = conversations.add(conversations.find(request), request, reply)
    answer = json.loads(json.dumps(dialect_of(path).answer(request, [reply])))
    back = body_of(path, question, *GIVEN_BACK[path](answer), {"role": "user", "content": "on"})
    match = conversations.find(read(path, back))
    assert match.node is node
    assert match.new == ({"role": "user", "content": "on"},)


def told(events: Iterable[bytes]) -> list[Any]:
    """The data of every event."""
    blocks = b"".join(events).decode().removesuffix("\n\n").split("\n\n")
    data = [block.rpartition("data: ")[2] for block in blocks]
    return [line if line == "[DONE]" else json.loads(line) for line in data]


def told_by_chat(bodies: list[Any]) -> tuple[str, str, list[tuple[str, Any]]]:
    assert bodies[-1] == "[DONE]"
    deltas = [choice["delta"] for body in bodies[:-1] for choice in body["choices"]]
    made = [call["function"] for delta in deltas for call in delta.get("tool_calls", ())]
    return (
        "".join(delta.get("content") or "" for delta in deltas),
        "".join(delta.get("reasoning_content", "") for delta in deltas),
        [(call["name"], json.loads(call["arguments"])) for call in made],
    )


def told_by_responses(bodies: list[Any]) -> tuple[str, str, list[tuple[str, Any]]]:
    assert [body["sequence_number"] for body in bodies] == list(range(len(bodies)))
    deltas = [(body["type"], body["delta"]) for body in bodies if body["type"].endswith(".delta")]
    done = [body["item"] for body in bodies if body["type"] == "response.output_item.done"]
    assert done == bodies[-1]["response"]["output"]
    made = [item for item in done if item["type"] == "function_call"]
    assert [text for kind, text in deltas if "arguments" in kind] == [
        item["arguments"] for item in made
    ]
    return (
        "".join(text for kind, text in deltas if "output_text" in kind),
        "".join(text for kind, text in deltas if "reasoning_text" in kind),
        [(item["name"], json.loads(item["arguments"])) for item in made],
    )


def told_by_anthropic(bodies: list[Any]) -> tuple[str, str, list[tuple[str, Any]]]:
    assert [bodies[0]["type"], bodies[-1]["type"]] == ["message_start", "message_stop"]
    deltas = [body["delta"] for body in bodies if body["type"] == "content_block_delta"]
    begun = [body["content_block"] for body in bodies if body["type"] == "content_block_start"]
    names = [block["name"] for block in begun if block["type"] == "tool_use"]
    made = [json.loads(delta["partial_json"]) for delta in deltas if "partial_json" in delta]
    return (
        "".join(delta.get("text", "") for delta in deltas),
        "".join(delta.get("thinking", "") for delta in deltas),
        list(zip(names, made, strict=True)),
    )


TOLD = {PATHS[0]: told_by_chat, PATHS[1]: told_by_responses, PATHS[2]: told_by_anthropic}


@every_dialect
@given(reply=replies())
def test_a_stream_says_what_the_reply_says(path: str, reply: AgentReply) -> None:
    request = asked(path, stream=True, reasoning={}, thinking={"type": "adaptive"})
    assert request.stream
    text, reasoning, made = TOLD[path](told(dialect_of(path).events(request, [reply])))
    assert (text, reasoning) == (reply.text, reply.reasoning)
    assert made == [(call.name, dict(call.arguments)) for call in reply.calls]


@every_dialect
def test_a_tool_has_the_schema_of_environments(path: str) -> None:
    (tool,) = asked(path, tools=[GET[path]]).tools
    function = {"name": "get", "description": "", "parameters": GET_PARAMETERS}
    assert tool == {"type": "function", "function": function}


@every_dialect
def test_an_image_is_refused_in_words(path: str) -> None:
    message = {"role": "user", "content": [IMAGES[path]]}
    with pytest.raises(BadRequest, match=r"\[0\].*reads text only"):
        read(path, body_of(path, message))


@every_dialect
def test_the_parts_of_a_message_are_joined_by_line_breaks(path: str) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    (message,) = read(path, body_of(path, {"role": "user", "content": parts})).messages
    assert message["content"] == "one\ntwo"


@every_dialect
def test_sampling_that_the_agent_sets_and_choices_that_cannot_be_kept_are_told(path: str) -> None:
    request = asked(path, temperature=0.0, top_p=None, tool_choice={"type": "any"})
    assert request.overridden == ("temperature",)
    assert request.dropped == ('tool_choice {"type": "any"}',)
    assert asked(path, tool_choice="auto").dropped == ()


@every_dialect
def test_a_repetition_is_known_by_its_header_and_its_body(path: str) -> None:
    body = body_of(path, {"role": "user", "content": "q"})
    first = read(path, body, {"X-Stainless-Retry-Count": "0", "X-Session-ID": "s"})
    again = read(path, dict(reversed(body.items())), {"x-stainless-retry-count": "1"})
    assert (first.retry, again.retry) == (False, True)
    assert first.digest == again.digest
    assert first.session == "s"
    assert asked(path, metadata={}).digest != first.digest
    assert read(path, body, {"Idempotency-Key": "k"}).digest == "k"


@every_dialect
def test_thinking_in_tags_is_told_apart_from_what_is_said(path: str) -> None:
    back = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nyes"}
    message = read(path, body_of(path, {"role": "user", "content": "q"}, back)).messages[1]
    assert message == {"role": "assistant", "content": "yes", "reasoning": "hm"}


@every_dialect
@pytest.mark.parametrize("status", [400, 401, 404, 409, 429, 500, 529])
def test_an_error_is_said_in_the_words_of_the_dialect(path: str, status: int) -> None:
    dialect = dialect_of(path)
    body = dialect.error(status, "no")
    assert body["error"]["message"] == "no"
    assert body["error"]["type"]
    (event,) = told([dialect.error_event(status, "no")])
    assert event["error"]["message"] == "no"


@every_dialect
def test_token_ids_come_with_the_answer_if_they_are_asked_for(path: str) -> None:
    reply = AgentReply("r", "policy", "yes", 3, prompt_ids=(1, 2, 3), token_ids=(4, 5))
    plain = dialect_of(path).answer(asked(path), [reply])
    assert "token_ids" not in json.dumps(plain)
    answer = dialect_of(path).answer(asked(path, return_token_ids=True), [reply])
    assert answer["prompt_token_ids"] == [1, 2, 3]
    assert (answer.get("choices") or [answer])[0]["token_ids"] == [4, 5]


def test_a_path_is_known_by_its_end() -> None:
    assert type(dialect_of("/t/key/v1/messages?beta=true")) is type(dialect_of("/v1/messages/"))
    with pytest.raises(BadRequest, match="not served here") as refused:
        dialect_of("/v1/completions")
    assert refused.value.status == 404


def test_the_list_of_models_tells_the_longest_context() -> None:
    (model,) = models("policy", 512)["data"]
    assert (model["id"], model["max_model_len"]) == ("policy", 512)
