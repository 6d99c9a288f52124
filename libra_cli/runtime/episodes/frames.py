"""Finds the text that a chat template puts between one turn and the next.

A *frame* is what follows a turn: its closing token, the messages of tools, users and the system,
and the opening of the next turn. It is found by rendering a dummy conversation whose last turn
holds a mark, with messages that hold marks, and taking what follows the turn from the first token
that ends a generation. The marks are then places for texts, names of tools and ids of calls, so
that a frame is rendered once for every order of roles.

That is right only if the frame does not depend on what came before. It is therefore rendered after
conversations that differ in their system message, tools, thinking and length, and a template whose
frames differ is refused, with the texts that differ. Some templates place a tool's message only
after a turn that calls a tool, so turns with calls are tried first, and plain ones after them; a
conversation that a template cannot render is left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from libra_cli.config.errors import LibraError
from libra_cli.envs.protocol import Message, ToolCall, ToolSchema, function
from libra_cli.runtime.episodes.templates import ID_FORM, ChatTemplate, FormedMessage


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


_MARK = "LIBRA0MARK"
_TEXT, _NAME, _ID = "LIB0T", "LIB0N", "LIB0I"
_PLACE = re.compile(r"(LIB0[TNI])(\d{4})")
"""A place for a text, a name or an id; nine letters and digits, as Mistral's ids must have."""
_AWKWARD = ("  spaces\n", '"quotes" \\ {braces} <b>&amp;</b>', "</tool_response>")
"""Texts that a template which trims, quotes or parses what it inserts would change."""
_CHANGES: tuple[Callable[[str], str], ...] = (str, str.strip, _quoted)
"""What templates do to a text: nothing (Qwen3), trim it (Qwen3.5), write it as JSON (Llama 3)."""
_USER: FormedMessage = {"role": "user", "content": "question"}
_SYSTEM: FormedMessage = {"role": "system", "content": "rules"}
_FIRST: FormedMessage = {"role": "assistant", "content": "first"}
_TOOLS = (function("lookup", "Look a key up.", {"key": {"type": "string"}}),)

Roles = tuple[str, ...]
"""The roles of the messages between one turn and the next."""
Places = Mapping[str, Sequence[str]]
"""What stands in the places of a frame: by kind, in the order of the messages."""


@dataclass(frozen=True, slots=True)
class Frame:
    """The text between a turn and the next one, with places for what varies."""

    parts: tuple[str, ...]
    """Text, kind of place, number of the message, text, and so on; it ends with text."""
    change: Callable[[str], str] | None
    """What the template does to a text that it inserts. None: each conversation is rendered."""
    around: tuple[str, ...] | None = field(init=False)
    """The text around the messages' texts, if there are no other places."""

    def __post_init__(self) -> None:
        """Find whether there are no places but those of texts."""
        kinds = set(self.parts[1::3])
        object.__setattr__(self, "around", self.parts[::3] if kinds <= {_TEXT} else None)

    @property
    def has_ids(self) -> bool:
        """Whether it has places for ids of calls."""
        return _ID in self.parts

    def filled(self, places: Places) -> str:
        """Return the frame with its texts, names of tools and ids of calls filled in."""
        filled = [self.parts[0]]
        for index in range(1, len(self.parts), 3):
            kind, number, text = self.parts[index : index + 3]
            filled += (places[kind][int(number)], text)
        return "".join(filled)


@dataclass(frozen=True, slots=True)
class _Before:
    """A conversation that ends with a turn that holds MARK."""

    messages: list[FormedMessage]
    tools: tuple[ToolSchema, ...] = ()


class TurnFrames:
    """The frames of one template, made when they are first needed."""

    def __init__(self, model_dir: Path, template: ChatTemplate, stops: Sequence[str]) -> None:
        """``stops`` are the texts of the tokens that end a generation."""
        self._model_dir = model_dir
        self._template = template
        self._stop_texts = stops
        self._stops = re.compile("|".join(map(re.escape, stops)) or r"(?!)")
        self._frames: dict[Roles, Frame] = {}
        self._chosen: dict[Roles, int] = {}
        """The number of the conversation after which messages of such roles are rendered."""

    def between(self, messages: Sequence[Message], ids: Sequence[str] = ()) -> str:
        """Return the text between a turn and the next one; ``ids`` are those of the turn's calls.

        Raises:
            LibraError: the template cannot take such messages after a turn.
        """
        roles = tuple([message["role"] for message in messages])
        frame = self._frames.get(roles)
        if frame is None:
            frame = self._frames[roles] = self._make(roles)
        change = frame.change
        texts = [message["content"] for message in messages]
        if change is not None and change is not str:
            texts = [change(text) for text in texts]
        if change is not None and frame.around is not None:
            return _joined(frame.around, texts)
        places = {
            _TEXT: texts,
            _NAME: [message.get("name", "tool") for message in messages],
            _ID: [*ids, *(ID_FORM.format(index) for index in range(len(ids), len(roles)))],
        }
        if change is not None:
            return frame.filled(places)
        return self._after(self._number(roles), roles, places)

    def has_ids(self, messages: Sequence[Message]) -> bool:
        """Say whether ``between`` needs the ids of the turn's calls."""
        frame = self._frames.get(tuple([message["role"] for message in messages]))
        return frame is None or frame.has_ids

    def turn_text(self, text: str) -> str:
        """Return a text up to the first token that ends a generation."""
        return self._stops.split(text, maxsplit=1)[0]

    def end_of_turn_text(self, text: str) -> str | None:
        """Return a text up to and with the first token that ends a generation, if it has one."""
        stop = self._stops.search(text)
        return None if stop is None else text[: stop.end()]

    def refuses(self, *roles: str) -> LibraError | None:
        """Say why the template cannot take messages of such roles after a turn, if it cannot."""
        try:
            self._number(roles)
        except LibraError as error:
            return error
        return None

    def _make(self, roles: Roles) -> Frame:
        number, marks = self._number(roles), _marks(len(roles))
        parts = tuple(_PLACE.split(self._after(number, roles, marks)))
        awkward = [_AWKWARD[index % len(_AWKWARD)] for index in range(len(roles))]
        places = {**marks, _TEXT: awkward}
        expected = self._after(number, roles, places)
        for change in _CHANGES:
            changed = {**places, _TEXT: [change(text) for text in awkward]}
            if Frame(parts, change).filled(changed) == expected:
                return Frame(parts, change)
        return Frame(parts, None)

    def _number(self, roles: Roles) -> int:
        """Return the number of the conversation to render after, and check it once."""
        short = _shortened(roles)
        if short not in self._chosen:
            self._chosen[short] = self._choose(short)
        return self._chosen[short]

    def _choose(self, roles: Roles) -> int:
        """Choose among the conversations with calls, or else the plain ones, and compare them.

        Raises:
            LibraError: none fits, or their frames differ.
        """
        marks = _marks(len(roles))
        count = len(self._befores(roles, marks))
        plain = count - len(_plain())
        problem = self._drops(roles)
        for numbers in (range(plain), range(plain, count)):
            found: dict[int, str] = {}
            errors: list[LibraError] = []
            for number in numbers:
                try:
                    found[number] = self._after(number, roles, marks)
                except LibraError as error:
                    errors.append(error)
            if any(_complete(text, len(roles)) for text in found.values()):
                return self._agreed(found)
            problem = errors[0] if errors and not found else self._drops(roles)
        raise problem

    def _agreed(self, found: Mapping[int, str]) -> int:
        number, expected = next(iter(found.items()))
        for actual in found.values():
            if actual != expected:
                raise LibraError(
                    f"{self._model_dir}: the chat template is not prefix-stable: what it puts "
                    f"after a turn depends on what came before ({expected!r} or {actual!r}), so "
                    "turns cannot be appended exactly",
                    hint="use a template that renders every turn on its own, such as Qwen3's",
                )
        return number

    def _drops(self, roles: Roles) -> LibraError:
        return LibraError(
            f"{self._model_dir}: the chat template drops, moves or repeats messages of the roles "
            f"{', '.join(roles)} after a turn",
            hint="use a template that shows every message once, in its place",
        )

    def _after(self, number: int, roles: Roles, places: Places) -> str:
        """Return what follows the turn of a conversation, from its closing token on."""
        before = self._befores(roles, places)[number]
        added: list[FormedMessage] = []
        for index, role in enumerate(roles):
            message = {"role": role, "content": places[_TEXT][index]}
            if role == "tool":
                message |= {"name": places[_NAME][index], "tool_call_id": places[_ID][index]}
            added.append(message)
        rendered = self._template.render([*before.messages, *added], before.tools)
        # The first mark: a later one could only be in a tool's text.
        _, found, rest = rendered.partition(_MARK)
        if not found or not rest.strip():
            raise LibraError(
                f"{self._model_dir}: the chat template drops what the assistant said",
                hint="use a template of ChatML form, such as Qwen3's",
            )
        stop = self._stops.search(rest)
        is_call = "tool_calls" in before.messages[-1]
        if stop is None or (rest[: stop.start()].strip() and not is_call):
            raise LibraError(
                f"{self._model_dir}: the chat template ends a turn with {rest.split()[0]!r}, but "
                f"the model stops at {sorted(self._stop_texts)}",
                hint="add the id of the token that ends a turn to eos_token_id in "
                "generation_config.json",
            )
        return rest[stop.start() :]

    def _befores(self, roles: Roles, places: Places) -> list[_Before]:
        """Return the conversations to render after: those with calls first, if there are any."""
        count = next((n for n, role in enumerate(roles) if role != "tool"), len(roles))
        if not count:
            return _plain()
        calls = [
            self._template.formed_call(
                places[_ID][index],
                ToolCall(places[_NAME][index], {"key": _MARK if index == count - 1 else "ab"}),
            )
            for index in range(count)
        ]
        turn: FormedMessage = {"role": "assistant", "content": "", "tool_calls": calls}
        earlier = self._template.formed(
            [
                {"role": "assistant", "content": "so", "tool_calls": [ToolCall("lookup", {})]},
                {"role": "tool", "content": "found", "name": "lookup"},
            ]
        )
        return [
            _Before([_USER, turn], _TOOLS),
            _Before([_SYSTEM, _USER, _FIRST, _USER, *earlier, turn], _TOOLS),
            *_plain(),
        ]


def _plain() -> list[_Before]:
    last: FormedMessage = {"role": "assistant", "content": _MARK}
    thinking = {"role": "assistant", "content": f"<think>\nhm\n</think>\n\n{_MARK}"}
    tool: FormedMessage = {"role": "tool", "content": "found", "name": "lookup"}
    return [
        _Before([_USER, last]),
        _Before([_USER, thinking]),
        _Before([_USER, last], _TOOLS),
        _Before([_USER, _FIRST, _USER, last]),
        _Before([_USER, _FIRST, tool, last]),
        _Before([_SYSTEM, _USER, _FIRST, tool, tool, last], _TOOLS),
    ]


def _joined(around: tuple[str, ...], texts: Sequence[str]) -> str:
    parts = [around[0]]
    for text, part in zip(texts, around[1:], strict=True):
        parts += (text, part)
    return "".join(parts)


def _marks(count: int) -> dict[str, list[str]]:
    return {kind: [f"{kind}{index:04d}" for index in range(count)] for kind in (_TEXT, _NAME, _ID)}


def _complete(text: str, count: int) -> bool:
    """Say whether every message's text stands once in a frame, in order."""
    found = [number for kind, number in _PLACE.findall(text) if kind == _TEXT]
    return found == [f"{index:04d}" for index in range(count)]


def _shortened(roles: Roles) -> Roles:
    """Return roles with at most two of a kind in a row."""
    kept: list[str] = []
    for role in roles:
        if kept[-2:] != [role, role]:
            kept.append(role)
    return tuple(kept)
