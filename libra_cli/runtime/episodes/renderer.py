"""Renders conversations to tokens with the model's chat template, only ever appending.

The trainer computes the probability of the tokens that the server sampled, so those tokens may not
change afterwards: not by decoding and encoding (``"ab"`` may come back as ``"a", "b"``), not by
rendering again (Qwen3's template drops old thinking and adds an empty block of it). The prompt of a
turn must be the exact tokens of the prompt before, plus the generated tokens, plus the tools'
returns: the *exact-prefix property*. It keeps log-probabilities comparable and the servers' prefix
caches warm; for its sake this module has ``extend`` and never renders a conversation again.

``extend`` finds the tokens between one turn and the next by rendering a dummy conversation,
``user, assistant MARK, tool...``, with the generation prompt, and taking what follows MARK: the end
of the turn, the tool messages, and the opening of the next turn. That is right if it does not
depend on what came before MARK and if its tokens do not merge with those before it. Both are
checked at start-up, on conversations that differ in their system message, tools, thinking and
length; a template that fails is refused, with the texts that differ.

A tool's text is data. A control token in it (``<|im_end|>``) is broken up by a space, or a web page
could end the turn and speak as the user. ``prompt`` renders messages as transformers'
``apply_chat_template`` does, whose output it reproduces without transformers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
from tokenizers import Tokenizer

from libra_cli.config.errors import LibraError
from libra_cli.envs.protocol import Message, ToolSchema, function

_MARK = "LIBRA0MARK"
_TOOL_MARK = "LIBRA0TOOL"
_USER: Message = {"role": "user", "content": "question"}
_TOOL = function("lookup", "Look a key up.", {"key": {"type": "string"}})
_SPECIAL_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


class Renderer:
    """The tokenizer and chat template of one model directory."""

    def __init__(self, model_dir: Path, *, template_args: Mapping[str, Any] | None = None) -> None:
        """Load and check them; ``template_args`` are the template's, as ``enable_thinking``.

        Raises:
            LibraError: the tokenizer or the template is missing, damaged or not prefix-stable.
        """
        self._model_dir = model_dir
        self._tokenizer = _load_tokenizer(model_dir)
        config = _read_json(model_dir / "tokenizer_config.json")
        self._arguments: dict[str, Any] = {**_special_tokens(config), **(template_args or {})}
        self._templates = _compile(model_dir, config)
        self._controls = self._control_pattern()
        self._frames: dict[int, list[str]] = {}
        """The texts around so many observations, by their number: rendering is most of the work."""
        self._literal = self._is_literal()
        """Whether the template inserts a tool's text unchanged, so that frames can be used."""
        self.end_of_turn: int = self.encode(self._between([""]))[0]
        """The token with which the template, and so the model, closes a turn."""
        self.stop_token_ids: frozenset[int] = self._stop_tokens(config)
        """The tokens that end a generation."""
        self.opens_thinking: bool = self._between([""]).rstrip().endswith("<think>")
        """Whether the generation prompt opens a thinking block, in which generated text begins."""
        self._check()

    def prompt(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> list[int]:
        """Return a trajectory's first token ids, up to and including the generation prompt.

        Raises:
            LibraError: the template cannot render the conversation.
        """
        return self.encode(self._render(messages, tools))

    def extend(self, observations: Sequence[str], *, closed: bool = True) -> list[int]:
        """Return the token ids after a generated turn, up to and including the generation prompt.

        ``closed`` says that the turn's last token is ``end_of_turn``. A turn that was cut by its
        length after a complete tool call is not closed: then the result begins with that token.
        """
        tokens = self.encode(self._between([self.harmless(text) for text in observations]))
        return tokens[1:] if closed else tokens

    def decode(self, token_ids: Iterable[int]) -> str:
        """Return the text of token ids, control tokens included."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=False)

    def decode_turn(self, token_ids: Sequence[int]) -> str:
        """Return a generated turn's text, without the token that ended it.

        Thinking begins with ``<think>`` also where the generation prompt holds that tag.
        """
        body = token_ids
        if body and body[-1] in self.stop_token_ids:
            body = body[:-1]
        text = self.decode(body)
        return f"<think>{text}" if self.opens_thinking and "<think>" not in text else text

    def harmless(self, text: str) -> str:
        """Return a text that can be encoded as UTF-8, with every control token broken up."""
        text = text.encode("utf-8", "replace").decode("utf-8")
        return self._controls.sub(lambda found: f"{found[0][0]} {found[0][1:]}", text)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text; control tokens that it spells out become tokens."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def _render(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> str:
        template = self._templates.get("tool_use") if tools else None
        try:
            return (template or self._templates["default"]).render(
                messages=messages,
                tools=list(tools) or None,
                documents=None,
                add_generation_prompt=True,
                **self._arguments,
            )
        except Exception as error:  # a template can raise whatever the filters in it raise
            raise LibraError(
                f"{self._model_dir}: the chat template cannot render this conversation: {error}",
                hint="its roles must include system, user, assistant and tool",
            ) from error

    def _between(self, observations: Sequence[str]) -> str:
        """Return the template's text between a turn and the next one."""
        if not self._literal:
            return self._render_between(observations)
        count = len(observations)
        frame = self._frames.get(count)
        if frame is None:
            marked = self._render_between([_TOOL_MARK] * count)
            frame = self._frames[count] = marked.split(_TOOL_MARK)
        texts = [*observations, ""]
        return "".join(part for pair in zip(frame, texts, strict=True) for part in pair)

    def _render_between(self, observations: Sequence[str]) -> str:
        return self._after_mark([_USER, {"role": "assistant", "content": _MARK}], observations)

    def _after_mark(
        self,
        messages: list[Message],
        observations: Sequence[str],
        tools: Sequence[ToolSchema] = (),
    ) -> str:
        answers: list[Message] = [{"role": "tool", "content": text} for text in observations]
        rendered = self._render([*messages, *answers], tools)
        # The first mark: a later one could only be in a tool's text.
        _, found, rest = rendered.partition(_MARK)
        if not found or not rest:
            raise LibraError(
                f"{self._model_dir}: the chat template drops what the assistant said",
                hint="use a template of ChatML form, such as Qwen3's",
            )
        return rest

    def _is_literal(self) -> bool:
        awkward = ["  spaces\n", '"quotes" \\ {braces} <b>&amp;</b>', "</tool_response>"]
        marked = self._render_between([_TOOL_MARK] * len(awkward))
        for text in awkward:
            marked = marked.replace(_TOOL_MARK, text, 1)
        return marked == self._render_between(awkward)

    def _control_pattern(self) -> re.Pattern[str]:
        added = self._tokenizer.get_added_tokens_decoder().values()
        # A token of one character cannot be broken up, and controls nothing.
        contents = [t.content for t in added if t.special and len(t.content) > 1]
        contents.sort(key=len, reverse=True)
        return re.compile("|".join(map(re.escape, contents)) or r"(?!)")

    def _stop_tokens(self, config: Mapping[str, Any]) -> frozenset[int]:
        generation = _read_json(self._model_dir / "generation_config.json", default={})
        declared = generation.get("eos_token_id")
        if declared is None:
            eos = _special_tokens(config).get("eos_token", "")
            declared = self._tokenizer.token_to_id(eos)
        stops = {declared} if isinstance(declared, int) else set(declared or ())
        if self.end_of_turn not in stops:
            closing = self.decode([self.end_of_turn])
            names = sorted(self.decode([token]) for token in stops)
            raise LibraError(
                f"{self._model_dir}: the chat template ends a turn with {closing!r}, but the model "
                f"stops at {names}",
                hint="add that token's id to eos_token_id in generation_config.json",
            )
        return frozenset(stops)

    def _check(self) -> None:
        """Refuse a template for which ``extend`` would return wrong tokens."""
        first: Message = {"role": "assistant", "content": "first"}
        tool: Message = {"role": "tool", "content": "found"}
        last: Message = {"role": "assistant", "content": _MARK}
        thinking: Message = {"role": "assistant", "content": f"<think>\nhm\n</think>\n\n{_MARK}"}
        system: Message = {"role": "system", "content": "rules"}
        for observations in (["one"], ["  two\n", "{}"]):
            expected = self._render_between(observations)
            for history, tools in (
                ([_USER, first, tool, last], ()),
                ([_USER, thinking], ()),
                ([_USER, last], (_TOOL,)),
                ([system, _USER, first, tool, tool, last], (_TOOL,)),
            ):
                actual = self._after_mark(list(history), observations, tools)
                if actual != expected:
                    raise _unstable(self._model_dir, expected, actual)
            # The tokens must be the same in context: nothing merges with the end of the turn.
            whole = self.encode(f"question\n{_MARK}{expected}")
            alone = self.encode(expected)
            if whole[-len(alone) :] != alone:
                raise _unstable(self._model_dir, str(alone), str(whole[-len(alone) :]))


class _Generation(jinja2.ext.Extension):
    """Accepts ``{% generation %}``, which marks a turn for loss masks, and keeps its body."""

    tags = {"generation"}  # noqa: RUF012  the base class declares it so

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _unstable(model_dir: Path, expected: str, actual: str) -> LibraError:
    return LibraError(
        f"{model_dir}: the chat template is not prefix-stable: what it puts after a turn depends "
        f"on what came before ({expected!r} or {actual!r}), so turns cannot be appended exactly",
        hint="use a template that renders every turn on its own, such as Qwen3's",
    )


def _compile(model_dir: Path, config: Mapping[str, Any]) -> dict[str, jinja2.Template]:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        return {
            name: environment.from_string(text)
            for name, text in _template_texts(model_dir, config).items()
        }
    except jinja2.TemplateError as error:
        raise LibraError(f"{model_dir}: the chat template cannot be read: {error}") from error


def _template_texts(model_dir: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Read the templates by name, from the files that transformers reads."""
    texts: dict[str, str] = {}
    declared = config.get("chat_template")
    if isinstance(declared, str):
        texts["default"] = declared
    elif isinstance(declared, list):
        texts.update({entry["name"]: entry["template"] for entry in declared})
    single = model_dir / "chat_template.jinja"
    if single.is_file():
        texts["default"] = single.read_text(encoding="utf-8")
    for path in sorted((model_dir / "additional_chat_templates").glob("*.jinja")):
        texts[path.stem] = path.read_text(encoding="utf-8")
    if "default" not in texts:
        raise LibraError(
            f"{model_dir} has no chat template",
            hint="it needs chat_template.jinja, or chat_template in tokenizer_config.json",
        )
    return texts


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


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    found = {name: config.get(name) for name in _SPECIAL_TOKENS}
    return {
        name: token["content"] if isinstance(token, dict) else token
        for name, token in found.items()
        if token
    }


def _read_json(path: Path, *, default: dict[str, Any] | None = None) -> dict[str, Any]:
    if default is not None and not path.is_file():
        return default
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LibraError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise LibraError(f"{path} does not hold a JSON object")
    return value


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML characters, which no model was trained on.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)
