"""A trajectory's tokens as messages."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from libra_cli.core.types import VersionSpan
from libra_cli.node.model.tokenizer import build_tokenizer, encode, observation_text, prompt_text
from libra_cli.report.trajectories.conversation import ShownMessage, messages_of
from libra_cli.report.trajectories.tokens import ShownBranch, token_texts

TOKENIZER = build_tokenizer()


def decode(token_ids: Sequence[int]) -> str:
    return str(TOKENIZER.decode(list(token_ids), skip_special_tokens=False))


def branch(*parts: tuple[str, int | None], advantages: Sequence[tuple[int, float]] = ()):
    """Texts with the version that generated each; None for those of others."""
    ids: list[int] = []
    spans: list[VersionSpan] = []
    for text, version in parts:
        start = len(ids)
        ids += encode(TOKENIZER, text)
        if version is not None:
            spans.append(VersionSpan(version, start, len(ids)))
    return ShownBranch(ids, spans, (), advantages)


def said(messages: Sequence[ShownMessage]) -> list[tuple[str, str]]:
    return [(message.role, message.text) for message in messages]


def test_a_conversation_has_the_messages_of_its_template() -> None:
    played = branch(
        (prompt_text("start ab hops 1"), None),
        ("let me see<|im_end|>", 3),
        (observation_text("cd"), None),
        ("cd<|im_end|>", 4),
    )
    messages = list(messages_of(played, decode))
    assert said(messages) == [
        ("user", "start ab hops 1"),
        ("assistant", "let me see<|im_end|>"),
        ("tool", "cd"),
        ("assistant", "cd<|im_end|>"),
    ]
    assert [message.turn for message in messages] == [None, 1, None, 2]
    assert [message.versions for message in messages] == [[], [3], [], [4]]


def test_a_turn_in_which_the_version_changed_is_one_message() -> None:
    played = branch((prompt_text("hi"), None), ("first ", 3), ("second<|im_end|>", 4))
    *_, last = messages_of(played, decode)
    assert (last.text, last.versions) == ("first second<|im_end|>", [3, 4])


def test_tokens_have_the_advantage_that_holds_from_them_on() -> None:
    played = branch((prompt_text("hi"), None), ("abcd", 0), advantages=((0, 0.5),))
    halfway = played.spans[0].start + 2
    changed = ShownBranch(played.token_ids, played.spans, (), ((0, 0.5), (halfway, -1.0)))
    *_, last = messages_of(changed, decode)
    assert [token.advantage for token in last.tokens] == [0.5, 0.5, -1.0, -1.0]
    assert last.advantages == [0.5, -1.0]


@pytest.mark.parametrize(
    ("template", "roles"),
    [
        ("<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n", ["system", "user"]),
        (
            "<|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|>\n\nU<|eot_id|>".replace(
                "\n\nU", "<|start_header_id|>user<|end_header_id|>\n\nU"
            ),
            ["system", "user"],
        ),
        ("<bos><start_of_turn>user\nU<end_of_turn>\n<start_of_turn>model\n", ["user"]),
        ("[gMASK]<sop><|system|>\nS<|user|>\nU<|assistant|>\n", ["system", "user"]),
        ("<s>[SYSTEM_PROMPT]S[/SYSTEM_PROMPT][INST]U[/INST]", ["system", "user"]),
        ("<｜begin▁of▁sentence｜>S<｜User｜>U<｜Assistant｜>", ["context", "user"]),
        ("### Question: U", ["context"]),
    ],
)
def test_templates_of_other_families_are_read(template: str, roles: list[str]) -> None:
    messages = list(messages_of(branch((template, None), ("A", 0)), decode))
    shown = [role for role, text in said(messages) if "begin_of_text" not in text]
    named = [role for role in shown if role != "context" or "context" in roles]
    assert named == [*roles, "assistant"]


def test_a_character_of_several_tokens_is_whole() -> None:
    ids = encode(TOKENIZER, "né 🙂!")
    texts = token_texts(ids, decode)
    assert len(texts) == len(ids) > len("né 🙂!")
    assert "".join(texts) == "né 🙂!"
    assert not any("\ufffd" in text for text in texts)


def test_bytes_that_are_no_text_do_not_hold_up_the_rest() -> None:
    broken = encode(TOKENIZER, "🙂")[:1] * 12
    texts = token_texts([*broken, *encode(TOKENIZER, "ok")], decode)
    assert "".join(texts).endswith("ok")
