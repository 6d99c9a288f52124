"""The small model's tokenizer: a token for every byte, and one for each boilerplate text.

It is written as ``tokenizer.json`` and ``tokenizer_config.json``, which vLLM, transformers and the
``tokenizers`` library read alike. Any text can be encoded byte by byte. All of a tool call but its
argument is two tokens, so a turn is five generated tokens long.

The chat template is Qwen3's form of ChatML with hermes tool calls, except that it does not show the
tools' schemas: the small model knows its tool from demonstrations, and a schema spelt in bytes
would be longer than the episode.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from libra_cli.envs.pointer_chase import BUSY, CALL_HEAD, CALL_TAIL

PAD = "<|endoftext|>"
START = "<|im_start|>"
END = "<|im_end|>"
SPECIAL = (PAD, START, END)
BOILERPLATE = (
    CALL_HEAD,
    CALL_TAIL,
    f"{START}user\n",
    f"\n{START}assistant\n",
    f"\n{START}user\n<tool_response>\n",
    "\n</tool_response>",
    "start ",
    " hops ",
    BUSY,
)

CHAT_TEMPLATE = """\
{%- for message in messages %}
{%- if message.role == "tool" %}
{%- if loop.first or messages[loop.index0 - 1].role != "tool" %}
{{- "<|im_start|>user" }}
{%- endif %}
{{- "\\n<tool_response>\\n" + message.content + "\\n</tool_response>" }}
{%- if loop.last or messages[loop.index0 + 1].role != "tool" %}
{{- "<|im_end|>\\n" }}
{%- endif %}
{%- else %}
{{- "<|im_start|>" + message.role + "\\n" + message.content + "<|im_end|>\\n" }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- "<|im_start|>assistant\\n" }}
{%- endif %}"""


def build_tokenizer() -> Tokenizer:
    """Build the tokenizer: three special tokens, 256 bytes, then the boilerplate."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in BOILERPLATE])
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, directory: Path, *, max_len: int) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json``; ``max_len`` is in tokens."""
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_len,
        "pad_token": PAD,
        "eos_token": END,
        "clean_up_tokenization_spaces": False,
        "additional_special_tokens": [START, END],
        "chat_template": CHAT_TEMPLATE,
    }
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    (directory / "tokenizer_config.json").write_text(text, encoding="utf-8")


def prompt_text(user: str) -> str:
    """Return one user message and the generation prompt, as the chat template writes them."""
    return f"{START}user\n{user}{END}\n{START}assistant\n"


def observation_text(observation: str) -> str:
    """Return the text after a generated ``<|im_end|>``: a tool's return, a generation prompt."""
    return (
        f"\n{START}user\n<tool_response>\n{observation}\n</tool_response>{END}\n{START}assistant\n"
    )


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """Return the id of a token.

    Raises:
        KeyError: the vocabulary has no such token.
    """
    found: int | None = tokenizer.token_to_id(token)
    if found is None:
        raise KeyError(token)
    return found


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the token ids of a text, in which boilerplate and special tokens are recognised."""
    token_ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return token_ids
