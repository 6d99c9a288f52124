"""Reads a model directory's chat template and compiles it as transformers does.

The files are those that transformers reads: ``chat_template.jinja``, or ``chat_template`` in
``tokenizer_config.json``, and ``additional_chat_templates``. The sandbox, the filters and the
functions are those of its ``apply_chat_template``, whose output ``runtime.episodes.renderer``
reproduces without transformers.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from libra_cli.config.errors import LibraError
from libra_cli.envs.protocol import Message, ToolCall, ToolSchema

_SPECIAL_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
ID_FORM = "call{:05d}"
"""The id of a call: nine letters and digits."""


FormedMessage = Mapping[str, Any]
"""A message in the form that chat templates read."""


class ChatTemplate:
    """The compiled chat template of one model directory, with its arguments."""

    def __init__(
        self, model_dir: Path, config: Mapping[str, Any], arguments: Mapping[str, Any]
    ) -> None:
        """Compile it; ``config`` is ``tokenizer_config.json``.

        Raises:
            LibraError: there is none, or it cannot be read.
        """
        self._model_dir = model_dir
        self._arguments = {**special_tokens(config), **arguments}
        self._templates = _compile(model_dir, config)
        self._text_arguments = False
        self._left_out: tuple[str, ...] = ()
        """What a turn with calls cannot have beside them, for the template to take it."""
        call: Message = {"role": "assistant", "content": "", "tool_calls": [ToolCall("get", {})]}
        user: Message = {"role": "user", "content": "question"}
        # DeepSeek V3's template appends the arguments to a string, and cannot take a mapping.
        if not self.takes(self.formed([user, call])):
            self._text_arguments = True
            self._text_arguments = self.takes(self.formed([user, call]))
        # gpt-oss's takes no thinking beside text and calls, Mistral v3's no text.
        both: Message = {**call, "content": "so", "reasoning": "hm"}
        for left_out in ((), ("reasoning",), ("reasoning", "content")):
            self._left_out = left_out
            if self.takes(self.formed([user, both])):
                break

    def render(self, messages: Sequence[FormedMessage], tools: Sequence[ToolSchema] = ()) -> str:
        """Return the text of a conversation and the generation prompt.

        Raises:
            LibraError: the template cannot render it.
        """
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
            roles = ", ".join(message["role"] for message in messages)
            raise LibraError(
                f"{self._model_dir}: the chat template cannot render a conversation of the roles "
                f"{roles}: {error}",
                hint="use roles that this template takes, or a template that takes these",
            ) from error

    def takes(self, messages: Sequence[FormedMessage], tools: Sequence[ToolSchema] = ()) -> bool:
        """Say whether the template renders this conversation without an error."""
        try:
            self.render(messages, tools)
        except LibraError:
            return False
        return True

    def formed(self, messages: Sequence[Message]) -> list[FormedMessage]:
        """Return messages in the form that templates read.

        Calls become ``{"id", "type": "function", "function": {"name", "arguments"}}``, as
        transformers documents them, with ids of nine letters and digits, which Mistral's templates
        ask for; the tools' messages after them carry the same ids, in order. Thinking stands under
        the names that templates read it by: ``reasoning_content`` (Qwen, GLM, Nemotron),
        ``reasoning`` (Gemma) and ``thinking`` (gpt-oss, LFM).
        """
        formed: list[FormedMessage] = []
        ids: Iterator[str] = iter(())
        made = itertools.count()
        for message in messages:
            if message["role"] == "tool":
                formed.append({"tool_call_id": next(ids, ID_FORM.format(0)), **message})
                continue
            form: dict[str, Any] = {**message}
            if calls := message.get("tool_calls"):
                named = [(ID_FORM.format(next(made)), call) for call in calls]
                ids = iter([call_id for call_id, _ in named])
                form["tool_calls"] = [self.formed_call(*one) for one in named]
                if message["content"]:
                    form.update(dict.fromkeys(self._left_out, ""))
            if form.get("reasoning"):
                form["reasoning_content"] = form["thinking"] = form["reasoning"]
            formed.append(form)
        return formed

    def formed_call(self, call_id: str, call: ToolCall) -> FormedMessage:
        """Return a call in the form that templates read."""
        arguments: Any = dict(call.arguments)
        if self._text_arguments:
            arguments = json.dumps(arguments, ensure_ascii=False)
        function = {"name": call.name, "arguments": arguments}
        return {"id": call_id, "type": "function", "function": function}


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


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of the special tokens that a tokenizer's configuration names."""
    found = {name: config.get(name) for name in _SPECIAL_TOKENS}
    return {
        name: token["content"] if isinstance(token, dict) else token
        for name, token in found.items()
        if token
    }


def read_json(path: Path, *, default: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the JSON object in a file, or ``default`` if there is no file.

    Raises:
        LibraError: it cannot be read.
    """
    if default is not None and not path.is_file():
        return default
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LibraError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise LibraError(f"{path} does not hold a JSON object")
    return value


class _Generation(jinja2.ext.Extension):
    """Accepts ``{% generation %}``, which marks a turn for loss masks, and keeps its body."""

    tags = {"generation"}  # noqa: RUF012  the base class declares it so

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


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
