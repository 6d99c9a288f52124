"""Reading a turn never fails, and what it finds is what was written, in every format."""

from __future__ import annotations

import json
import time
import typing
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra_cli.config.recipe import ToolFormatName
from libra_cli.envs.protocol import ToolCall, function
from libra_cli.envs.tools import Malformed
from libra_cli.runtime.episodes.tool_formats.formats import FORMATS

HERMES = FORMATS["hermes"]
TOOLS = [function("get", "", {"key": {"type": "string"}, "n": {"type": "integer"}})]
WRITTEN = [
    ("hermes", '<tool_call>\n{"name": "get", "arguments": {"key": "12", "n": 3}}\n</tool_call>'),
    (
        "qwen_xml",
        (
            "<tool_call>\n<function=get>\n<parameter=key>\n12\n</parameter>\n"
            "<parameter=n>\n3\n</parameter>\n</function>\n</tool_call>"
        ),
    ),
    (
        "glm",
        (
            "<tool_call>get\n<arg_key>key</arg_key>\n<arg_value>12</arg_value>\n"
            "<arg_key>n</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"
        ),
    ),
    ("mistral", '[TOOL_CALLS] [{"name": "get", "arguments": {"key": "12", "n": 3}}]'),
    ("mistral", '[TOOL_CALLS]get[CALL_ID]abcdefgh1[ARGS]{"key": "12", "n": 3}'),
    ("mistral", '[TOOL_CALLS]get{"key": "12", "n": 3}'),
    (
        "kimi",
        (
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.get:0"
            '<|tool_call_argument_begin|>{"key": "12", "n": 3}<|tool_call_end|>'
            "<|tool_calls_section_end|>"
        ),
    ),
    (
        "deepseek",
        (
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get\n```json\n"
            '{"key": "12", "n": 3}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
        ),
    ),
    (
        "deepseek",
        (
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get<｜tool▁sep｜>"
            '{"key": "12", "n": 3}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
        ),
    ),
    (
        "invoke",
        (
            '<minimax:tool_call>\n<invoke name="get">\n<parameter name="key">12</parameter>\n'
            '<parameter name="n">3</parameter>\n</invoke>\n</minimax:tool_call>'
        ),
    ),
    (
        "invoke",
        (
            '<｜DSML｜function_calls><｜DSML｜invoke name="get">'
            '<｜DSML｜parameter name="key" string="true">12</｜DSML｜parameter>'
            '<｜DSML｜parameter name="n" string="false">3</｜DSML｜parameter>'
            "</｜DSML｜invoke></｜DSML｜function_calls>"
        ),
    ),
    (
        "gpt_oss",
        (
            "<|start|>assistant<|channel|>commentary to=functions.get <|constrain|>json<|message|>"
            '{"key": "12", "n": 3}<|call|>'
        ),
    ),
    ("gpt_oss", ' to=functions.get<|channel|>commentary json<|message|>{"key": "12", "n": 3}'),
    ("gemma", '<|tool_call>call:get{key:<|"|>12<|"|>,n:3}<tool_call|>'),
    ("python_list", "<|tool_call_start|>[get(key='12', n=3)]<|tool_call_end|>"),
    ("python_list", "<function_calls>\nget(key='12', n=3)\n</function_calls>"),
    ("python", '[get(key="12", n=3)]'),
    ("llama_json", '{"name": "get", "parameters": {"key": "12", "n": 3}}'),
    (
        "llama_json",
        '<|python_tag|>{"type": "function", "name": "get", "parameters": {"key": "12", "n": 3}}',
    ),
]


def calls_of(text, form=HERMES):
    return form.turn(text, TOOLS).calls


def text_of(text):
    return HERMES.turn(text).text


@pytest.mark.parametrize(("name", "text"), WRITTEN)
def test_a_call_in_each_format_is_read_with_the_types_of_its_schema(name, text):
    turn = FORMATS[name].turn(text, TOOLS)
    assert turn.calls == [ToolCall("get", {"key": "12", "n": 3})]
    assert turn.text == ""


@pytest.mark.parametrize(("name", "text"), WRITTEN)
def test_what_is_written_in_one_format_is_read_in_no_other(name, text):
    whole = [ToolCall("get", {"key": "12", "n": 3})]
    assert [one for one, form in FORMATS.items() if calls_of(text, form) == whole] == [name]


@pytest.mark.parametrize(("name", "text"), WRITTEN)
def test_a_cut_call_is_never_run_with_fewer_arguments(name, text):
    for length in range(len(text)):
        for call in calls_of(text[:length], FORMATS[name]):
            if isinstance(call, ToolCall):
                assert call == ToolCall("get", {"key": "12", "n": 3})
            else:
                assert call.cut


@pytest.mark.parametrize("name", ["hermes", "qwen_xml", "glm", "kimi", "deepseek", "gemma"])
def test_two_calls_of_a_turn_are_read_in_order(name):
    text = dict(WRITTEN)[name]
    turn = FORMATS[name].turn(f"<think>hm</think>so {text}\n{text.replace('12', '13')}", TOOLS)
    assert turn.calls == [ToolCall("get", {"key": key, "n": 3}) for key in ("12", "13")]
    assert (turn.reasoning, turn.text) == ("hm", "so")


def test_a_value_without_a_type_is_json_where_it_can_be():
    text = WRITTEN[1][1]
    assert FORMATS["qwen_xml"].turn(text).calls == [ToolCall("get", {"key": 12, "n": 3})]
    text = text.replace("12", "ab")
    assert FORMATS["qwen_xml"].turn(text).calls == [ToolCall("get", {"key": "ab", "n": 3})]


def test_an_answer_in_json_is_no_call():
    for name in ("llama_json", "python"):
        turn = FORMATS[name].turn('{"name": "Ada", "born": 1815}')
        assert (turn.calls, turn.text) == ([], '{"name": "Ada", "born": 1815}')


def test_channels_are_thinking_calls_and_text():
    form = FORMATS["gpt_oss"]
    thinking = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    turn = form.turn(f"{thinking}<|channel|>final<|message|>It is 12.")
    assert (turn.reasoning, turn.text, turn.calls) == ("hm", "It is 12.", [])
    assert form.turn(f"{thinking}{dict(WRITTEN)['gpt_oss']}").reasoning == "hm"


@pytest.mark.parametrize("name", FORMATS)
@given(text=st.text(alphabet="<>|{}[](),=:/\"'\n abtool_callfunctionparameter▁｜", max_size=80))
def test_reading_never_raises_in_any_format(name, text):
    for start in ("", *(text for one, text in WRITTEN if one == name)):
        FORMATS[name].turn(start[: len(text)] + text)


@pytest.mark.parametrize("depth", [200, 800, 5000])
def test_a_python_call_whose_name_has_many_dots_is_read_or_told(depth):
    (call,) = FORMATS["python"].turn(f"[a{'.a' * depth}(x=1)]").calls
    assert isinstance(call, ToolCall | Malformed)


@pytest.mark.parametrize(
    "text",
    [text for name, text in WRITTEN if name in ("mistral", "kimi", "deepseek", "gpt_oss")],
)
def test_arguments_full_of_white_space_are_read_in_time_that_grows_with_their_length(text):
    form = next(FORMATS[name] for name, written in WRITTEN if written == text)
    started = time.process_time()
    assert form.turn(text.replace('"n": ', '"n": ' + " \n" * 50_000), TOOLS).calls == [
        ToolCall("get", {"key": "12", "n": 3})
    ]
    assert time.process_time() - started < 5.0  # it was a minute


REPEATED = [
    "<function=a>",
    "<function=a><parameter=b>",
    "<a1function=a><a2function=b></a0function>",
    "<invoke name=a>",
    "<parameter=b>",
    "<parameter name=",
    "<arg_key>",
    "<arg_key>a</arg_key>",
    "<arg_key>a</arg_key><arg_value>",
    "<tool_call>",
    "<function" + " " * 50,
    "{} ",
    "{},",
    " ",
    "\n",
    "<",
    "</",
    "a ",
    '<|python_tag|>{"name":',
    "<|channel|>analysis",
    "<|start|>assistant ",
    "<think>",
    "[TOOL_CALLS]a",
    "call:a{",
    "}",
]
"""What a model in a loop writes: marks that never end."""


@pytest.mark.parametrize("name", FORMATS)
def test_marks_without_an_end_are_read_in_time_that_grows_with_their_number(name):
    text = next(text for one, text in WRITTEN if one == name)
    starts = {
        "",
        text[: len(text) // 2],
        *(text[: text.index(mark) + 1] for mark in text if mark in ">]{"),
    }
    slow = {}
    for repeated in REPEATED:
        for start in starts:
            written = start + repeated * (30_000 // len(repeated))
            if least_seconds(partial(FORMATS[name].turn, written), enough=0.25) > 0.25:
                slow[start] = repeated
    assert not slow


def least_seconds(work: Callable[[], object], *, enough: float) -> float:
    """CPU seconds of the quickest of three, or of the first that took no more than ``enough``:
    collections of garbage and a busy machine only ever add."""
    least = float("inf")
    for _ in range(3):
        before = time.process_time()
        work()
        least = min(least, time.process_time() - before)
        if least <= enough:
            break
    return least


def test_the_recipe_knows_every_format():
    assert set(typing.get_args(ToolFormatName)) == {"auto", *FORMATS}


GET = '<tool_call>\n{"name": "get", "arguments": {"key": "ab"}}\n</tool_call>'
FRAGMENTS = [
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    '{"name": "get", "arguments": {"key": "ab"}}',
    '{"name": ',
    "\n",
    "[" * 5000,
    "1" * 5000,
    '"\\ud800"',
    "NaN",
    "null",
]
ANYTHING = st.one_of(st.text(), st.lists(st.sampled_from(FRAGMENTS) | st.text()).map("".join))


@given(ANYTHING)
def test_parsing_never_raises(text):
    for call in calls_of(text):
        assert isinstance(call, ToolCall | Malformed)


@given(
    name=st.text(min_size=1),
    arguments=st.dictionaries(st.text(), st.integers() | st.text() | st.booleans() | st.none()),
)
def test_a_call_that_is_written_is_read_back(name, arguments):
    written = json.dumps({"name": name, "arguments": arguments})
    if "tool_call>" in written or "think>" in written:
        return
    call = f"<tool_call>\n{written}\n</tool_call>"
    assert calls_of(call) == [ToolCall(name, arguments)]
    assert text_of(call) == ""


def test_several_calls_are_read_in_order():
    other = GET.replace("ab", "cd")
    assert calls_of(f"first {GET}\nthen {other} end") == [
        ToolCall("get", {"key": "ab"}),
        ToolCall("get", {"key": "cd"}),
    ]


def test_thinking_is_not_acting():
    assert calls_of(f"<think>maybe {GET}</think>no") == []
    assert calls_of(f"<think>maybe {GET}") == []
    assert calls_of(f"<think>hm</think>{GET}") == [ToolCall("get", {"key": "ab"})]


@pytest.mark.parametrize("inner", ["<think>", "</think>"])
def test_a_turn_that_opens_its_thinking_is_read_by_that_mark_alone(inner):
    assert calls_of(f"[THINK]a {inner} b {GET}") == []
    assert calls_of(f"[THINK]a {inner} b[/THINK]{GET}") == [ToolCall("get", {"key": "ab"})]


def test_an_answer_is_what_is_neither_thinking_nor_a_call():
    assert text_of(f"<think>13?</think> 12 {GET}") == "12"


def test_a_complete_object_counts_without_its_closing_tag():
    assert calls_of(GET.removesuffix("</tool_call>")) == [ToolCall("get", {"key": "ab"})]


def test_a_call_cut_in_its_middle_says_so():
    (call,) = calls_of('<tool_call>\n{"name": "get", "argu')
    assert isinstance(call, Malformed)
    assert call.cut


def test_a_closed_call_that_cannot_be_read_is_not_cut():
    (call,) = calls_of("<tool_call>get(ab)</tool_call>")
    assert isinstance(call, Malformed)
    assert not call.cut
    assert call.reason.startswith("not JSON")


def test_arguments_may_be_json_in_a_string_or_absent():
    quoted = '<tool_call>{"name": "get", "arguments": "{\\"key\\": \\"ab\\"}"}</tool_call>'
    assert calls_of(quoted) == [ToolCall("get", {"key": "ab"})]
    assert calls_of('<tool_call>{"name": "now"}</tool_call>') == [ToolCall("now", {})]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("[1]", "object"),
        ('{"arguments": {}}', '"name"'),
        ('{"name": 3}', '"name"'),
        ('{"name": "get", "arguments": [1]}', '"arguments"'),
        ('{"name": "get", "arguments": {"n": 1e999}}', "value that JSON has"),
        ('{"name": "get", "arguments": {"n": %s}}' % ("[" * 600 + "]" * 600), "levels deep"),
    ],
)
def test_a_call_of_the_wrong_form_says_what_is_wrong(body, reason):
    (call,) = calls_of(f"<tool_call>{body}</tool_call>")
    assert isinstance(call, Malformed)
    assert reason in call.reason
