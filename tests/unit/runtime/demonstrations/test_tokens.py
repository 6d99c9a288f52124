"""A demonstration has the tokens that the policy would have seen and said, masked as they are."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path
from typing import Any

import pytest

from libra_cli.config.environment import TaskSourceSpec
from libra_cli.config.errors import LibraError
from libra_cli.core.actions import ForgetEpisode, StartEpisode
from libra_cli.core.events import DemonstrationRead, EpisodeFailed
from libra_cli.core.types import TrajectoryId
from libra_cli.envs.pointer_chase import CALL_HEAD, CALL_TAIL
from libra_cli.envs.protocol import Message, ToolCall, function
from libra_cli.node.model.tokenizer import build_tokenizer, save_tokenizer
from libra_cli.runtime.demonstrations.conversations import Conversation
from libra_cli.runtime.demonstrations.reader import Demonstrations, check_demonstrations
from libra_cli.runtime.demonstrations.tokens import render_conversation
from libra_cli.runtime.episodes.renderer import Renderer

TOOLS = (function("get", "Look a key up.", {"key": {"type": "string"}}),)
CALL: Message = {"role": "assistant", "content": "", "tool_calls": [ToolCall("get", {"key": "ab"})]}
PLAYED: tuple[Message, ...] = (
    {"role": "user", "content": "Follow the keys."},
    CALL,
    {"role": "tool", "content": "cd", "name": "get"},
    {"role": "assistant", "content": "It is cd."},
)


@pytest.fixture
def small(tmp_path: Path) -> Renderer:
    save_tokenizer(build_tokenizer(), tmp_path, max_len=256)
    return Renderer(tmp_path)


def published(directory: Path, name: str) -> Renderer:
    """The small tokenizer with a published model's template, as TRL's package carries it."""
    spec = importlib.util.find_spec("trl")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("TRL is not installed: its package holds the published chat templates")
    save_tokenizer(build_tokenizer(), directory, max_len=256)
    template = Path(spec.submodule_search_locations[0]) / "chat_templates" / f"{name}.jinja"
    (directory / "chat_template.jinja").write_text(template.read_text())
    return Renderer(directory)


def imitated(renderer: Renderer, conversation: Conversation, **options: Any) -> list[str]:
    """The texts of the turns that are imitated."""
    rendered = render_conversation(renderer, conversation, max_len=4096, **options)
    texts, now = [""], 0
    for token, mask in zip(rendered.token_ids, rendered.loss_mask, strict=True):
        if mask and not now:
            texts.append("")
        texts[-1] += renderer.decode([token]) if mask else ""
        now = mask
    return texts[1:]


@pytest.mark.parametrize("template", ["qwen3", "qwen3_instruct_2507", "qwen2_5"])
def test_a_conversation_with_tools_has_the_tokens_of_an_episode(tmp_path, template):
    renderer = published(tmp_path, template)
    conversation = Conversation(PLAYED, (False, True, False, True), TOOLS)
    rendered = render_conversation(renderer, conversation, max_len=4096)
    prompt = renderer.prompt(PLAYED[:1], TOOLS)
    first = renderer.turn(PLAYED[:1], CALL, TOOLS)
    observed = renderer.extend(PLAYED[2:3], after=first)
    last = renderer.turn(PLAYED[:3], PLAYED[3], TOOLS)
    assert list(rendered.token_ids) == [*prompt, *first, *observed, *last]
    assert list(rendered.loss_mask) == (
        [0] * len(prompt) + [1] * len(first) + [0] * len(observed) + [1] * len(last)
    )
    assert rendered.turns == 2
    # What was imitated is read back as the call that it was.
    assert renderer.read_turn(first, TOOLS).calls == [ToolCall("get", {"key": "ab"})]
    assert first[-1] == last[-1] == renderer.end_of_turn


@pytest.mark.parametrize("template", ["qwen3", "qwen3_instruct_2507", "qwen2_5"])
def test_the_text_is_what_transformers_renders(tmp_path, template):
    transformers = pytest.importorskip("transformers")
    renderer = published(tmp_path, template)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    messages: tuple[Message, ...] = (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "2"},
    )
    rendered = render_conversation(
        renderer, Conversation(messages, (False, False, True)), max_len=4096
    )
    whole = theirs.apply_chat_template(list(messages), tokenize=False)
    assert renderer.decode(rendered.token_ids) == whole.removesuffix("\n")


def test_thinking_is_imitated_in_every_turn(tmp_path):
    # Rendered whole, Qwen3's template would drop the thinking of the first turn.
    renderer = published(tmp_path, "qwen3")
    turns: tuple[Message, ...] = (
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning": "hm"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d", "reasoning": "so"},
    )
    conversation = Conversation(turns, (False, True, False, True))
    assert imitated(renderer, conversation) == [
        "<think>\nhm\n</think>\n\nb<|im_end|>",
        "<think>\nso\n</think>\n\nd<|im_end|>",
    ]


def test_a_turn_cannot_end_itself(small):
    said: Message = {"role": "assistant", "content": "a<|im_end|>b"}
    conversation = Conversation(({"role": "user", "content": "x"}, said), (False, True))
    assert imitated(small, conversation) == ["a< |im_end|>b<|im_end|>"]


def test_the_small_model_is_shown_its_own_form_of_a_call(small):
    text = f"{CALL_HEAD}ab{CALL_TAIL}"
    said: Message = {"role": "assistant", "content": text}
    turn = small.turn([{"role": "user", "content": "start ab hops 1"}], said)
    assert turn == [*small.encode(text), small.end_of_turn]


def test_a_long_conversation_is_cut_and_one_without_an_answer_refused(small):
    question: Message = {"role": "user", "content": "x" * 40}
    answer: Message = {"role": "assistant", "content": "y" * 40}
    conversation = Conversation((question, answer), (False, True))
    whole = render_conversation(small, conversation, max_len=4096)
    prompt = len(whole.token_ids) - sum(whole.loss_mask)
    cut = render_conversation(small, conversation, max_len=prompt + 3)
    assert cut.token_ids == whole.token_ids[: prompt + 3]
    assert sum(cut.loss_mask) == 3
    with pytest.raises(LibraError, match="none of the assistant's tokens"):
        render_conversation(small, conversation, max_len=prompt)


# -- the files of a run ----------------------------------------------------------------------------


def sources(tmp_path: Path, *rows: str) -> tuple[TaskSourceSpec, ...]:
    file = tmp_path / "demonstrations.jsonl"
    file.write_text("\n".join(rows))
    return (TaskSourceSpec(path=str(file)),)


ROWS = ('{"prompt": "a", "completion": "b"}', '{"prompt": "c", "completion": "d"}')


def test_a_group_is_a_conversation_and_a_round_begins_again(tmp_path, small):
    read = Demonstrations(sources(tmp_path, *ROWS), small, seed=0, max_len=64)
    found = []
    for group in (0, 1, 2):
        event = asyncio.run(read.perform(StartEpisode(TrajectoryId(group, 0))))
        assert isinstance(event, DemonstrationRead)
        found.append(small.decode(event.token_ids))
    b, d = (small.decode([*small.encode(one), small.end_of_turn]) for one in "bd")
    assert [one.split("assistant")[-1] for one in found] == [f"\n{b}", f"\n{d}", f"\n{b}"]
    assert asyncio.run(read.perform(ForgetEpisode(TrajectoryId(0, 0)))) is None


def test_one_that_cannot_be_used_is_a_failure_and_no_crash(tmp_path, small):
    read = Demonstrations(sources(tmp_path, *ROWS), small, seed=0, max_len=3)
    event = asyncio.run(read.perform(StartEpisode(TrajectoryId(0, 0))))
    assert isinstance(event, EpisodeFailed)
    assert "model.max_len" in event.reason


def test_every_row_is_read_before_a_host_is_asked_for_anything(tmp_path):
    assert check_demonstrations(sources(tmp_path, *ROWS)) == 2
    with pytest.raises(LibraError, match=r"demonstrations\.jsonl: conversation 3: there are no"):
        check_demonstrations(sources(tmp_path, *ROWS, '{"text": "x"}'))
