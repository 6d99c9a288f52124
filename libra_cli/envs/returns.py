"""Checks what an environment's members return, before anything relies on it.

Environments are code of others. Whatever they return comes out of here as a value of the protocol,
or as a TypeError or ValueError that says in words what is wrong; the trajectory is then retried.

    text       a lone surrogate, which UTF-8 cannot carry, becomes "?"; a tool's text is shortened
               to ``LONGEST_OBSERVATION``; a conversation longer than ``LONGEST_PROMPT`` is refused
    reward     a finite number, or what ``float`` makes one of
    metrics    names to numbers; one that is not finite is left out
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from libra_cli.envs.png import size_of
from libra_cli.envs.protocol import Message, NextTurn, Reply, StepResult, Task, ToolCall, ToolSchema

LONGEST_OBSERVATION = 100_000
"""Characters of one tool's text that the model is shown; encoding more would delay all episodes."""
LONGEST_PROMPT = 4_000_000
"""Characters of the messages of one ``reset`` or ``reply``: about a million tokens."""
LARGEST_IMAGE = 8 * 1024**2
"""Bytes of an image; each turn sends all of its trajectory to a server."""
MOST_METRICS = 64
"""Names that ``metrics`` may return; each is a column of every monitor."""
LONGEST_NAME = 100
"""Characters of a metric's name, at most."""
MOST_ROLES = 32
"""Names that ``roles`` may have; each is a conversation that servers keep in their caches."""
_ROLES = ("system", "user", "assistant", "tool")
_SPOKEN = ("user", "system")


def step_result(returned: object) -> StepResult:
    """What ``step`` returned, as a result with its whole text.

    Raises:
        TypeError: it is neither a text nor a result with one.
        ValueError: its reward is not finite.
    """
    if isinstance(returned, str):
        return StepResult(whole_text(returned))
    if not isinstance(returned, StepResult):
        raise TypeError(f"it returned {type(returned).__name__}, not str or StepResult")
    if not isinstance(returned.text, str):
        raise TypeError(f"StepResult.text is {type(returned.text).__name__}, not str")
    return StepResult(
        whole_text(returned.text),
        reward(returned.reward),
        bool(returned.done),
        _images(returned.images),
    )


def reply(returned: object) -> Reply | None:
    """What ``reply`` returned; None if the episode is over.

    Raises:
        TypeError: it is neither messages nor a Reply, or not of a role that may speak.
        ValueError: its reward is not finite, or it is too long.
    """
    if returned is None:
        return None
    one = returned if isinstance(returned, Reply) else Reply(cast("Sequence[Message]", returned))
    done = bool(one.done)
    if done and not one.messages:
        return Reply((), reward(one.reward), done=True)
    found = messages(one.messages)
    _check_spoken(found)
    return Reply(found, reward(one.reward), done)


def _check_spoken(found: Sequence[Message]) -> None:
    for message in found:
        if message["role"] not in _SPOKEN:
            raise TypeError(f"a reply is of role user or system, not {message['role']!r}")


def messages(returned: object) -> list[Message]:
    """A conversation, as ``reset`` returns it.

    Raises:
        TypeError: it is not a list of messages.
        ValueError: it is too long.
    """
    if not isinstance(returned, Sequence) or isinstance(returned, str | bytes) or not returned:
        raise TypeError("messages are a list of {'role': ..., 'content': str}, with at least one")
    found = [_message(one) for one in returned]
    characters = sum(len(one["content"]) for one in found)
    if characters > LONGEST_PROMPT:
        raise ValueError(f"its messages have {characters:,} characters, over {LONGEST_PROMPT:,}")
    return found


def _message(one: object) -> Message:
    if not isinstance(one, Mapping) or not isinstance(one.get("content"), str):
        raise TypeError(f"a message is {{'role': ..., 'content': str}}, not {_excerpt(one)}")
    if one.get("role") not in _ROLES:
        raise TypeError(f"a message's role is one of {', '.join(_ROLES)}, not {one.get('role')!r}")
    calls = one.get("tool_calls", ())
    if not isinstance(calls, Sequence) or not all(isinstance(call, ToolCall) for call in calls):
        raise TypeError(f"a message's tool_calls are a list of ToolCall, not {_excerpt(calls)}")
    for key in ("reasoning", "name"):
        if not isinstance(one.get(key, ""), str):
            raise TypeError(f"a message's {key} is a text, not {_excerpt(one[key])}")
    found = cast("Message", {**one, "content": whole_text(one["content"])})
    if "images" in one:
        found["images"] = _images(one["images"])
    return found


def _images(given: object) -> tuple[bytes, ...]:
    """PNG files.

    Raises:
        TypeError: they are not a list of bytes.
        ValueError: one is no PNG file, or has more than ``LARGEST_IMAGE`` bytes.
    """
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        raise TypeError(f"images are a list of the bytes of PNG files, not {_excerpt(given)}")
    for one in given:
        if not isinstance(one, bytes):
            raise TypeError(f"an image is the bytes of a PNG file, not {_excerpt(one)}")
        size_of(one)
        if len(one) > LARGEST_IMAGE:
            raise ValueError(f"an image has {len(one):,} bytes, over {LARGEST_IMAGE:,}")
    return tuple(given)


def roles(returned: object) -> tuple[str, ...]:
    """The names of ``roles``; none of an environment with one conversation.

    Raises:
        TypeError: they are not a sequence of printable words.
        ValueError: one is there twice, or there are too many.
    """
    if not isinstance(returned, Sequence) or isinstance(returned, str | bytes):
        raise TypeError(f"roles are a list of names, not {_excerpt(returned)}")
    names = tuple(_name(one) for one in returned)
    if len(names) > MOST_ROLES or len(set(names)) < len(names):
        raise ValueError(f"roles are at most {MOST_ROLES} different names, not {_excerpt(names)}")
    return names


def turn(returned: object, roles: Sequence[str], *, begun: Iterable[str] = ()) -> NextTurn:
    """A NextTurn of an environment with these roles, of which ``begun`` have spoken.

    Raises:
        TypeError: it is no NextTurn, or its messages are of a role that may not speak then.
        ValueError: it names a role that there is not, or is too long, or a reward is not finite.
    """
    if not isinstance(returned, NextTurn):
        raise TypeError(
            f"it returned {type(returned).__name__}, not a NextTurn, though it has roles "
            f"{', '.join(roles)}"
        )
    unknown = {*returned.rewards, *([] if returned.done else [returned.role])} - {*roles}
    if unknown:
        known = ", ".join(roles) or "none"
        raise ValueError(f"NextTurn names the role {_excerpt(min(unknown))}; roles are {known}")
    if not isinstance(returned.text, str):
        raise TypeError(f"NextTurn.text is {type(returned.text).__name__}, not str")
    found = [] if returned.done else messages(returned.messages)
    if any("images" in one for one in found):
        raise TypeError("the messages of a NextTurn have no images")
    if returned.role in begun:
        _check_spoken(found)
    earned = {role: reward(value) for role, value in returned.rewards.items()}
    text = whole_text(returned.text)
    role = "" if returned.done else whole_text(returned.role)
    return NextTurn(role, found, earned, bool(returned.done), text)


def rewards(returned: object, roles: Sequence[str]) -> dict[str, float]:
    """What ``score`` returned: the reward of each role.

    Raises:
        TypeError: it is no mapping from all roles to numbers.
        ValueError: a reward is not finite.
    """
    if not isinstance(returned, Mapping) or {*returned} != {*roles}:
        wanted = ", ".join(f"{role!r}: ..." for role in roles)
        raise TypeError(f"score returns the rewards {{{wanted}}}, not {_excerpt(returned)}")
    return {role: reward(returned[role]) for role in roles}


def tasks(returned: object) -> list[Task]:
    """Return what ``preparations`` listed.

    Raises:
        TypeError: it is no list of tasks.
    """
    if not isinstance(returned, Sequence) or not all(isinstance(one, Mapping) for one in returned):
        raise TypeError(f"returned {_excerpt(returned)}, not a list of tasks")
    return [dict(one) for one in returned]


def tools(returned: object) -> list[ToolSchema]:
    """The schemas of ``tools``.

    Raises:
        TypeError: they are not a sequence of function schemas.
    """
    if not isinstance(returned, Sequence) or isinstance(returned, str | bytes):
        raise TypeError(f"tools is {type(returned).__name__}, not a list of schemas")
    for one in returned:
        inner = one.get("function") if isinstance(one, Mapping) else None
        if not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str):
            shape = "{'type': 'function', 'function': {'name': ...}}"
            raise TypeError(f"a tool is {shape}, not {_excerpt(one)}")
        _check_parameters(inner.get("parameters"))
    return list(returned)


def _check_parameters(parameters: object) -> None:
    """Check what calls are held against; the rest of a schema is only shown to the model."""
    given: Any = {} if parameters is None else parameters
    named = isinstance(given, Mapping) and isinstance(given.get("properties") or {}, Mapping)
    if not named or not isinstance(given.get("required") or (), list | tuple):
        shape = "{'type': 'object', 'properties': {NAME: {...}}, 'required': [NAME]}"
        raise TypeError(f"a tool's parameters are {shape}, not {_excerpt(parameters)}")


def reward(returned: Any) -> float:
    """A reward.

    Raises:
        TypeError: it is no number.
        ValueError: it is not finite, or a text that is no number.
    """
    try:
        number = float(returned)
    except OverflowError as error:
        raise ValueError("it returned an integer too large for a reward") from error
    if not math.isfinite(number):
        raise ValueError(f"it returned {number}")
    return number


def metrics(returned: object) -> dict[str, float]:
    """Named numbers, without those that are not finite.

    Raises:
        TypeError: it is no mapping from names to numbers.
        ValueError: it has too many names, or one that is too long.
    """
    if not isinstance(returned, Mapping):
        raise TypeError(f"it returned {type(returned).__name__}, not a mapping of names to numbers")
    if len(returned) > MOST_METRICS:
        raise ValueError(f"it returned {len(returned)} names, over {MOST_METRICS}")
    found = {_name(name): _number(name, value) for name, value in returned.items()}
    return {name: value for name, value in found.items() if math.isfinite(value)}


def _name(name: object) -> str:
    if not isinstance(name, str) or not 0 < len(name) <= LONGEST_NAME or not name.isprintable():
        raise TypeError(f"a metric's name is a printable word, not {_excerpt(name)}")
    return whole_text(name)


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} is {_excerpt(value)}, not a number") from error


def whole_text(text: str) -> str:
    """Return the text with "?" for each lone surrogate, which UTF-8 cannot carry."""
    if text.isascii():
        return str(text)
    return text.encode("utf-8", "replace").decode("utf-8")


def shortened(text: str) -> str:
    """The text, or its beginning and how much was left out."""
    surplus = len(text) - LONGEST_OBSERVATION
    return text if surplus <= 0 else f"{text[:-surplus]}\n[{surplus} characters left out]"


def _excerpt(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
