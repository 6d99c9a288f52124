"""Renders conversations to tokens with the model's chat template, only ever appending.

The trainer computes the probability of the tokens that the server sampled, so those tokens may not
change afterwards: not by decoding and encoding (``"ab"`` may come back as ``"a", "b"``), not by
rendering again (Qwen3's template drops old thinking and adds an empty block of it). The prompt of a
turn must be the exact tokens of the prompt before, plus the generated tokens, plus what others said
since: the *exact-prefix property*. It keeps log-probabilities comparable and the servers' prefix
caches warm; for its sake this module has ``extend`` and never renders a conversation again.

``extend`` appends a frame, which ``runtime.episodes.frames`` finds and checks. What tools say after
a turn is checked at start-up, other orders of roles when they are first needed. How the model
writes tool calls is found at start-up as well: the format that reads back what the template writes.

What a tool or a user says is data. A control token in it (``<|im_end|>``) is broken up by a space,
or a web page could end the turn and speak as the system. ``prompt`` renders messages as
transformers' ``apply_chat_template`` does.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from libra_cli.config.errors import LibraError
from libra_cli.config.text import encodable
from libra_cli.envs.protocol import Message, ToolSchema
from libra_cli.runtime.episodes.frames import TurnFrames
from libra_cli.runtime.episodes.placeholders import ImagePlace, ImagePlaceholders
from libra_cli.runtime.episodes.template_notes import found_format, misfits, notes
from libra_cli.runtime.episodes.templates import ChatTemplate, read_json, special_tokens
from libra_cli.runtime.episodes.tool_formats.formats import FORMATS, THINKING, GeneratedTurn

CHARS_A_TOKEN = 6
"""Characters of a text for each token of a limit, from which on its beginning alone is encoded:
half as many again as of English text. Chosen."""
_USER: Message = {"role": "user", "content": ""}
_FOUND: Message = {"role": "tool", "content": ""}


class Renderer:
    """The tokenizer and chat template of one model directory."""

    def __init__(
        self,
        model_dir: Path,
        *,
        template_args: Mapping[str, Any] | None = None,
        tool_format: str = "auto",
        images: bool = False,
    ) -> None:
        """Load and check them.

        ``template_args`` are the template's, as ``enable_thinking``; ``tool_format`` is a name of
        ``runtime.episodes.tool_formats.formats``, or ``auto``; ``images`` tells whether messages
        may have some.

        Raises:
            LibraError: the tokenizer or the template is missing, damaged or not prefix-stable.
        """
        self._model_dir = model_dir
        self._tokenizer = _load_tokenizer(model_dir)
        config = read_json(model_dir / "tokenizer_config.json")
        self._template = ChatTemplate(model_dir, config, template_args or {})
        self.stop_token_ids: frozenset[int] = self._stop_tokens(config)
        """Ids of the tokens that end a generation."""
        stops = [self.decode([token]) for token in self.stop_token_ids]
        self._controls = self._control_pattern(stops)
        self._frames = TurnFrames(model_dir, self._template, stops)
        after = self._first_frame()
        self.end_of_turn: int = self.encode(after)[0]
        """The token with which the template, and so the model, closes a turn."""
        self._opening = next((one for one, _ in THINKING if after.rstrip().endswith(one)), "")
        found = found_format(self._template, self._frames)
        self.tool_format: str = (found or "hermes") if tool_format == "auto" else tool_format
        """The name of the format in which tool calls are read."""
        self._format = FORMATS[self.tool_format]
        self.misfits = tuple(misfits(self._template, self._frames, found=found, chosen=tool_format))
        """What of the template keeps the model from using tools, in words."""
        self._images = ImagePlaceholders(model_dir, self._template) if images else None

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences that say what the chat template cannot do."""
        return tuple(notes(self._template, self._frames))

    @property
    def vocabulary(self) -> int:
        """The rows of the model's embedding, by its ``config.json``; 2^31 if that does not say."""
        config = read_json(self._model_dir / "config.json", default={})
        rows = (config.get("text_config") or config).get("vocab_size")
        return rows if isinstance(rows, int) else 2**31

    @property
    def num_tokens(self) -> int:
        """The tokens that the tokenizer knows; a model may have rows for more."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    @cached_property
    def _longest_token(self) -> int:
        """The most characters of a token of the vocabulary."""
        return max(map(len, self._tokenizer.get_vocab()))

    def fewest_tokens(self, text: str, most: int) -> int:
        """Return how many tokens a text has at least, without encoding one that is much longer
        than ``most`` tokens.

        Exact but for a text of blanks, or of characters that the vocabulary lacks, megabytes of
        which some tokenizers make one token.
        """
        fewest = len(text) // self._longest_token
        beginning = most * CHARS_A_TOKEN
        if fewest >= most or len(text) <= beginning:
            return fewest
        # The word that the cut divides may have more tokens than the whole one.
        return len(self.encode(text[:beginning])) - self._longest_token

    @property
    def added_tokens(self) -> list[int]:
        """Ids of the tokens that were added to the vocabulary, mostly control tokens."""
        return sorted(self._tokenizer.get_added_tokens_decoder())

    @property
    def opens_thinking(self) -> bool:
        """Whether the generation prompt opens a thinking block, in which generated text begins."""
        return bool(self._opening)

    def prompt(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> list[int]:
        """Return a trajectory's first token ids, up to and including the generation prompt.

        Raises:
            LibraError: the template cannot render the conversation, or has tools but could not take
                what they say.
        """
        if tools:
            self.require("tool")
        safe = [self._safe(one) if one["role"] == "tool" else one for one in messages]
        formed = self._template.formed([self._written(one) for one in safe])
        return self._expanded(self.encode(self._template.render(formed, tools)), messages)

    def images_in(self, ids: Sequence[int], messages: Sequence[Message]) -> list[ImagePlace]:
        """Where the images of ``messages`` are in what ``prompt`` or ``extend`` made of them."""
        return [] if self._images is None else self._images.places(ids, messages)

    def _written(self, message: Message) -> Message:
        """The message with marks for its images."""
        if self._images is not None:
            return self._images.written(message)
        if message.get("images"):
            raise LibraError(
                "the environment shows images, and model.images is false",
                hint="model: {images: true}, with a model that sees (libra help models)",
            )
        return message

    def _expanded(self, ids: list[int], messages: Sequence[Message]) -> list[int]:
        return ids if self._images is None else self._images.expanded(ids, messages)

    def require(self, role: str) -> None:
        """Refuse a template that cannot take messages of a role after a turn.

        Raises:
            LibraError: it cannot; the message says why.
        """
        if (refused := self._frames.refuses(role)) is not None:
            raise refused

    def extend(self, messages: Sequence[Message], *, after: Sequence[int]) -> list[int]:
        """Return the token ids after a generated turn, up to and including the generation prompt.

        ``messages`` are what tools, users and the system say, in any order; ``after`` are the
        turn's tokens, which tell whether it is closed, and the ids of its calls. A turn that was
        cut by its length is not closed: then the result begins with the token that closes it.

        Raises:
            LibraError: the template cannot take such messages after a turn.
        """
        safe = [self._written(self._safe(message)) for message in messages]
        ids = self._call_ids(after) if self._frames.has_ids(safe) else ()
        tokens = self._expanded(self.encode(self._frames.between(safe, ids)), messages)
        is_closed = len(after) > 0 and after[-1] == tokens[0]
        return tokens[1:] if is_closed else tokens

    def turn(
        self, messages: Sequence[Message], said: Message, tools: Sequence[ToolSchema] = ()
    ) -> list[int]:
        """Return the tokens of a turn that somebody else has said, as the model would say it.

        They are what the template writes of the turn after the generation prompt of the
        ``messages`` before it, up to and including the first token that ends a generation.

        Raises:
            LibraError: the template does not write the turn there.
        """
        before = self._template.formed([*messages])
        after = self._template.formed([*messages, self._safe(said)])
        start = self._template.render(before, tools)
        whole = self._template.render(after, tools)
        text = whole.removeprefix(start)
        end = self._frames.end_of_turn_text(text)
        if len(text) == len(whole) or end is None:
            raise LibraError(
                f"{self._model_dir}: the template does not write a turn after its own generation "
                f"prompt, {start[-40:]!r}",
                hint="with templates that open thinking there: model.template_args, for example "
                "{enable_thinking: false}, or demonstrations with reasoning_content",
            )
        return self.encode(end)

    def read_turn(
        self, token_ids: Sequence[int], tools: Sequence[ToolSchema] = ()
    ) -> GeneratedTurn:
        """Return what a generated turn says and the tools that it calls.

        ``tools`` tell the types of arguments, in formats that write them as bare text.
        """
        return self._format.turn(self.decode_turn(token_ids), tools)

    def decode(self, token_ids: Iterable[int]) -> str:
        """Return the text of token ids, control tokens included."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=False)

    def decode_turn(self, token_ids: Sequence[int]) -> str:
        """Return a generated turn's text, without the token that ended it.

        Thinking begins with its tag also where the generation prompt holds that tag.
        """
        body = token_ids
        if body and body[-1] in self.stop_token_ids:
            body = body[:-1]
        text = self.decode(body)
        return text if text.lstrip().startswith(self._opening) else f"{self._opening}{text}"

    def harmless(self, text: str) -> str:
        """Return a text that can be encoded as UTF-8, with every control token broken up."""
        text = text.encode("utf-8", "replace").decode("utf-8")
        return self._controls.sub(lambda found: f"{found[0][0]} {found[0][1:]}", text)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text; control tokens that it spells out become tokens."""
        return self._tokenizer.encode(encodable(text), add_special_tokens=False).ids

    def _safe(self, message: Message) -> Message:
        """Return a message with its text made harmless, and its name if that is no plain word."""
        safe: Message = {**message, "content": self.harmless(message["content"])}
        if not safe.get("name", "tool").isidentifier():
            safe["name"] = self.harmless(safe["name"])
        return safe

    def _call_ids(self, token_ids: Sequence[int]) -> list[str]:
        return self._format.call_ids.findall(self.decode(token_ids))

    def _first_frame(self) -> str:
        """Return the frame of a tool's message, or of a user's if the template takes no tools."""
        refused = self._frames.refuses("tool")
        if refused is None:
            return self._frames.between([_FOUND])
        if self._frames.refuses("user") is not None:
            raise refused
        return self._frames.between([_USER])

    def _control_pattern(self, stops: Iterable[str]) -> re.Pattern[str]:
        added = self._tokenizer.get_added_tokens_decoder().values()
        # A token of one character cannot be broken up, and controls nothing.
        texts = {*stops, *(token.content for token in added if token.special)}
        contents = sorted((text for text in texts if len(text) > 1), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, contents)) or r"(?!)")

    def _stop_tokens(self, config: Mapping[str, Any]) -> frozenset[int]:
        generation = read_json(self._model_dir / "generation_config.json", default={})
        declared = generation.get("eos_token_id")
        if declared is None:
            eos = special_tokens(config).get("eos_token", "")
            declared = self._tokenizer.token_to_id(eos)
        return frozenset({declared} if isinstance(declared, int) else declared or ())


def _load_tokenizer(model_dir: Path) -> Tokenizer:
    path = model_dir / "tokenizer.json"
    if not path.is_file():
        raise LibraError(
            f"{model_dir} has no tokenizer.json",
            hint="save it with a fast tokenizer: AutoTokenizer.from_pretrained(...)"
            ".save_pretrained(...)",
        )
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises the bare Exception for a damaged file
        raise LibraError(f"{path} cannot be read: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
