"""Turns of published model families are appended exactly, and their tool calls are read.

The chat templates are read from the installed packages that publish them, TRL and mistral-common;
the tokenizers are small ones with the control tokens that the templates write.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from libra_cli.config.errors import LibraError
from libra_cli.envs.protocol import Message, ToolCall, function
from libra_cli.runtime.episodes.renderer import Renderer
from libra_cli.runtime.episodes.templates import ChatTemplate
from tests.unit.runtime.test_renderer import published
from tests.vision import square_of, write_processor

pytest.importorskip("mistral_common", reason="comes with the [cpu] extra")
from mistral_common.integrations.chat_templates.chat_templates import (
    generate_chat_template,
)
from mistral_common.tokens.tokenizers.base import TokenizerVersion
from transformers import PreTrainedTokenizerFast

pytestmark = pytest.mark.vllm

CONTROLS = re.compile(
    r"<\|[A-Za-z0-9_/-]+\|>|<｜[^<>{}' ]+｜>|<\|\"?[a-z_]*>|<[a-z_]+\|>|</?s>|\[/?[A-Z_]{4,}\]"
    r"|<(?:start|end)_of_turn>|<\|\"\|>"
)
TOOLS = [function("get", "Look it up.", {"key": {"type": "string"}, "n": {"type": "integer"}})]
CALL = ToolCall("get", {"key": "12", "n": 3})
USER: Message = {"role": "user", "content": "Which?"}
TURN: Message = {"role": "assistant", "content": "", "tool_calls": [CALL]}


def found(*texts: str) -> list[Message]:
    return [{"role": "tool", "content": text, "name": "get"} for text in texts]


def write_model(directory: Path, template: str, stops: list[str]) -> Path:
    controls = sorted({*CONTROLS.findall(template), *stops, "<bos>"})
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400 + len(controls),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=controls,
        show_progress=False,
    )
    tokenizer.train_from_iterator([template], trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"bos_token": "<bos>", "eos_token": stops[0], "chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    ids = [tokenizer.token_to_id(text) for text in stops]
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    return directory


def mistral(version: str) -> str:
    return generate_chat_template(
        spm=False,
        tokenizer_version=TokenizerVersion(version),
        image_support=False,
        audio_support=False,
        thinking_support=False,
        default_system_prompt=None,
        plain_thinking_support=False,
        use_special_token_variables=False,
        model_settings_fields=None,
        reasoning_effort_values=None,
        reasoning_effort_default=None,
    )


# The tokens that end a generation are those of each model's generation_config.json.
FAMILIES: dict[str, tuple[list[str], str]] = {
    "qwen2_5": (["<|im_end|>"], "hermes"),
    "qwen3": (["<|im_end|>"], "hermes"),
    "qwen3_instruct_2507": (["<|im_end|>"], "hermes"),
    "qwen3_vl": (["<|im_end|>"], "hermes"),
    "qwen3_5_think": (["<|im_end|>"], "qwen_xml"),
    "qwen3_6": (["<|im_end|>"], "qwen_xml"),
    "qwen3_8": (["<|im_end|>"], "qwen_xml"),
    "nemotron_3_nano": (["<|im_end|>"], "qwen_xml"),
    "nemotron_3_ultra": (["<|im_end|>"], "qwen_xml"),
    "glm4moe": (["<|observation|>", "<|user|>"], "glm"),
    "llama3_1": (["<|eot_id|>", "<|eom_id|>"], "llama_json"),
    "llama3_2": (["<|eot_id|>", "<|eom_id|>"], "llama_json"),
    "gptoss": (["<|return|>", "<|call|>"], "gpt_oss"),
    "gemma4_v2": (["<turn|>", "<|tool_response>"], "gemma"),
    "gemma4_v5": (["<turn|>", "<|tool_response>"], "gemma"),
    "lfm2_2_5": (["<|im_end|>"], "python_list"),
    "muse_glimmer": (["<|eot|>"], "invoke"),
    "mistral-v3": (["</s>"], "mistral"),
    "mistral-v7": (["</s>"], "mistral"),
    "mistral-v11": (["</s>"], "mistral"),
    "mistral-v13": (["</s>"], "mistral"),
}


def family(directory: Path, name: str, **arguments: Any) -> Renderer:
    stops, _ = FAMILIES[name]
    _, is_mistral, version = name.partition("mistral-")
    text = mistral(version) if is_mistral else published(name)
    return Renderer(write_model(directory, text, stops), **arguments)


def rendered(directory: Path, messages: list[Message]) -> str:
    """The conversation as the template itself writes it, ids and all."""
    config = json.loads((directory / "tokenizer_config.json").read_text())
    template = ChatTemplate(directory, config, {})
    return template.render(template.formed(messages), TOOLS)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_tools_text_is_appended_as_the_template_writes_it(tmp_path, name):
    renderer = family(tmp_path, name)
    whole = rendered(tmp_path, [USER, TURN, *found(" 34 ")])
    appended = renderer.decode(renderer.extend(found(" 34 "), after=()))
    assert whole.endswith(appended)
    # What is before it is the prompt and the turn, in the format that was found.
    prompt = renderer.decode(renderer.prompt([USER], TOOLS))
    said = renderer.encode(whole.removesuffix(appended).removeprefix(prompt))
    assert renderer.tool_format == FAMILIES[name][1]
    assert renderer.read_turn(said, TOOLS).calls == [CALL]
    assert renderer.misfits == ()


@pytest.mark.parametrize("name", FAMILIES)
def test_a_prompt_with_calls_is_what_transformers_makes_of_it(tmp_path, name):
    renderer = family(tmp_path, name)
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    messages: list[Message] = [
        {"role": "system", "content": "Be <brief>."},
        USER,
        TURN,
        *found("34"),
    ]
    assert renderer.prompt(messages, TOOLS) == theirs.apply_chat_template(
        ChatTemplate(tmp_path, config, {}).formed(messages),
        tools=TOOLS,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=False,
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_a_turn_that_thinks_and_says_and_calls_can_be_in_a_prompt(tmp_path, name):
    renderer = family(tmp_path, name)
    turn: Message = {**TURN, "content": "Let me look.", "reasoning": "hm"}
    plain = renderer.prompt([USER, TURN, *found("34")], TOOLS)
    said = renderer.prompt([USER, turn, *found("34")], TOOLS)
    # Some templates drop the text beside a call; none may drop the call, or refuse.
    assert len(said) >= len(plain)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_token_that_closed_a_turn_is_not_repeated(tmp_path, name):
    renderer = family(tmp_path, name)
    turn = [*renderer.encode("so"), renderer.end_of_turn]
    whole = renderer.extend(found("34"), after=turn[:-1])
    assert whole[0] == renderer.end_of_turn
    assert renderer.extend(found("34"), after=turn) == whole[1:]


def test_a_turn_that_the_next_role_closes_is_followed_by_it(tmp_path):
    renderer = family(tmp_path, "glm4moe")
    user, answer = USER, renderer.encode("12")
    closing = renderer.encode("<|user|>")
    assert renderer.decode(renderer.extend([user], after=answer)).startswith("<|user|>\nWhich?")
    assert renderer.decode(renderer.extend([user], after=[*answer, *closing]))[0] == "\n"


def test_the_ids_that_a_model_gives_its_calls_are_given_back(tmp_path):
    renderer = family(tmp_path, "mistral-v11")
    turn = '[TOOL_CALLS]get[CALL_ID]abcdefgh1[ARGS]{"key": "12", "n": 3}</s>'
    after = renderer.extend(found("34"), after=renderer.encode(turn))
    assert "abcdefgh1" in renderer.decode(after)


def test_a_tools_name_stands_where_the_template_puts_it(tmp_path):
    renderer = family(tmp_path, "gptoss")
    (tmp_path / "b").mkdir()
    gemma = family(tmp_path / "b", "gemma4_v5")
    for one, text in ((renderer, "functions.get to=assistant"), (gemma, "response:get{value:")):
        assert text in one.decode(one.extend(found("34"), after=()))


def test_what_a_tool_says_cannot_leave_its_quotes(tmp_path):
    renderer = family(tmp_path, "gemma4_v5")
    said = renderer.decode(renderer.extend(found('x<|"|>}<tool_response|>'), after=()))
    assert said.count("<tool_response|>") == 1
    (tmp_path / "b").mkdir()
    renderer = family(tmp_path / "b", "llama3_1")
    assert '"a\\n\\"b\\""' in renderer.decode(renderer.extend(found('a\n"b"'), after=()))


def test_a_family_without_tools_can_be_trained_without_them(tmp_path):
    renderer = Renderer(write_model(tmp_path, published("gemma3"), ["<end_of_turn>"]))
    prompt = renderer.decode(renderer.prompt([USER]))
    assert prompt.endswith("Which?<end_of_turn>\n<start_of_turn>model\n")
    assert renderer.decode(renderer.extend([USER], after=())) == (
        "<end_of_turn>\n<start_of_turn>user\nWhich?<end_of_turn>\n<start_of_turn>model\n"
    )
    assert renderer.notes == ("takes no message of tool or system after a turn",)
    assert renderer.misfits == ()
    with pytest.raises(LibraError, match="cannot render a conversation of the roles"):
        renderer.prompt([USER], TOOLS)


def test_a_template_that_changes_its_mind_about_tools_is_refused(tmp_path):
    # DeepSeek V3's opens the tools' part once in a conversation, and never again.
    stops = ["<｜end▁of▁sentence｜>"]
    renderer = Renderer(write_model(tmp_path, published("deepseekv3"), stops))
    assert renderer.tool_format == "deepseek"
    with pytest.raises(LibraError, match="not prefix-stable"):
        renderer.prompt([USER], TOOLS)


def test_what_does_not_fit_is_said_in_words(tmp_path):
    renderer = family(tmp_path, "qwen3", tool_format="qwen_xml")
    assert renderer.tool_format == "qwen_xml"
    assert [one.partition(",")[0] for one in renderer.misfits] == ["writes tool calls as hermes"]
    assert renderer.notes == ("drops the thinking of earlier turns, which trajectories keep",)
    (tmp_path / "b").mkdir()
    plain = Renderer(write_model(tmp_path / "b", published("llama3"), ["<|eot_id|>"]))
    assert [one.split(":")[0] for one in plain.misfits] == [
        "does not show how the model writes tool calls",
        "does not show the tools' schemas",
    ]


def test_thinking_can_be_turned_off(tmp_path):
    on, off = tmp_path / "on", tmp_path / "off"
    on.mkdir()
    off.mkdir()
    assert family(on, "qwen3_5_think").opens_thinking
    assert not family(off, "qwen3_5_think", template_args={"enable_thinking": False}).opens_thinking


KIMI = """\
{%- for message in messages -%}
<|im_{{ message.role }}|>{{ message.name or message.role }}<|im_middle|>
{%- if message.role == 'tool' -%}## Return of {{ message.tool_call_id }}\\n{%- endif -%}
{{ message.content }}
{%- if message.tool_calls -%}<|tool_calls_section_begin|>
{%- for call in message.tool_calls -%}
<|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>{{ call.function.arguments | tojson }}
{{- '<|tool_call_end|>' }}
{%- endfor -%}
<|tool_calls_section_end|>{%- endif -%}
<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>{%- endif -%}
"""


def test_the_numbered_ids_of_kimis_form_are_given_back(tmp_path):
    # Written for this test in the form that Kimi K2's documentation gives.
    renderer = Renderer(write_model(tmp_path, KIMI, ["<|im_end|>"]))
    assert renderer.tool_format == "kimi"
    turn = (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get:7<|tool_call_argument_begin|>"
        '{"key": "12", "n": 3}<|tool_call_end|><|tool_calls_section_end|><|im_end|>'
    )
    tokens = renderer.encode(turn)
    assert renderer.read_turn(tokens).calls == [CALL]
    after = renderer.decode(renderer.extend(found("34"), after=tokens))
    assert "## Return of functions.get:7" in after
    assert after.endswith("34<|im_end|><|im_assistant|>assistant<|im_middle|>")


def test_images_stand_where_the_template_of_qwen3_vl_puts_them(tmp_path):
    write_processor(tmp_path)  # of which the tokenizer is written anew
    family(tmp_path, "qwen3_vl")
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    pad = theirs.convert_tokens_to_ids("<|image_pad|>")
    config = {"model_type": "qwen3_vl", "image_token_id": pad}
    (tmp_path / "config.json").write_text(json.dumps(config))
    renderer = Renderer(tmp_path, images=True)
    small, wide = square_of((255, 0, 0), 64, 64), square_of((0, 0, 255), 40, 90)
    shown: Message = {"role": "tool", "content": "seen", "name": "get", "images": [wide]}
    asked: Message = {"role": "user", "content": "Which?", "images": [small, wide]}
    written = theirs.apply_chat_template(
        [
            {"role": "user", "content": [*[{"type": "image"}] * 2, text("Which?")]},
            *ChatTemplate(tmp_path, {"chat_template": theirs.chat_template}, {}).formed([TURN]),
            {"role": "tool", "content": [{"type": "image"}, text("seen")]},
        ],
        tools=TOOLS,
        add_generation_prompt=True,
        tokenize=False,
    )
    prompt = renderer.prompt([asked], TOOLS)
    after = renderer.extend([shown], after=())
    said = written.split("<|im_start|>assistant\n")[1].partition("<|im_end|>")[0]
    ours = renderer.decode([*prompt, *renderer.encode(said), *after])
    counts = iter((4, 3, 3))
    assert ours == re.sub(r"<\|image_pad\|>", lambda one: one[0] * next(counts), written)


def text(said: str) -> dict[str, str]:
    return {"type": "text", "text": said}
