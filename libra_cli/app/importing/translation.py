"""Follows the rules of a table: settings of a recipe, and every key that is left out, with why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from libra_cli.config.errors import NONSENSE
from libra_cli.config.other_names.rule import Given, KeyRule, LeftOut, Refused, Setting, Table, Why
from libra_cli.config.secrets import masker


@dataclass(frozen=True, slots=True)
class Translation:
    """What became of a configuration."""

    settings: tuple[Setting, ...]
    """Keys of a recipe, each once."""
    left_out: tuple[LeftOut, ...]
    translated: tuple[str, ...]
    """Keys of the files that the recipe follows."""


def translate(table: Table, given: Given) -> Translation:
    """Return a configuration in libra's keys, by the rules of a table."""
    settings: dict[str, Setting] = {}
    left: dict[str, LeftOut] = {}
    followed: list[KeyRule] = []
    for rule in table.rules:
        if rule.why is not None or not (rule.always or any(key in given for key in rule.theirs)):
            continue
        made, refused = _made(rule, given)
        if not refused:
            followed.append(rule)
        for one in made:
            if isinstance(one, Setting):
                settings.setdefault(one.key, one)
            else:
                left.setdefault(one.key, one)
    read = {key for rule in followed for key in rule.theirs if key in given} - set(left)
    for one in _rest(table, given, read | set(left)):
        left[one.key] = one
    return Translation(tuple(settings.values()), tuple(left.values()), tuple(sorted(read)))


def _made(rule: KeyRule, given: Given) -> tuple[list[Setting | LeftOut], bool]:
    """What a rule makes, and whether it refused."""
    made: list[Setting | LeftOut] = []
    try:
        made.extend(rule.make(given))
    except Refused as error:
        return [*made, LeftOut(_first(rule, given), Why.MISSING, str(error))], True
    except NONSENSE:
        return [
            *made,
            LeftOut(_first(rule, given), Why.MISSING, "has a value of no such kind"),
        ], True
    return made, False


def _first(rule: KeyRule, given: Given) -> str:
    return next((key for key in rule.theirs if key in given), rule.theirs[0])


def _rest(table: Table, given: Given, done: set[str]) -> Iterator[LeftOut]:
    """The keys that no rule made anything of, but for those that change nothing."""
    for key, value in given.values.items():
        rule = table.rule_of(key)
        if key in done or value in (None, {}) or (rule is not None and rule.why is None):
            continue
        if rule is None or rule.why is None:
            yield LeftOut(key, Why.MISSING, "libra knows no such key", value)
        elif not _is_off(value, rule):
            yield LeftOut(key, rule.why, rule.how, value)


def _is_off(value: object, rule: KeyRule) -> bool:
    return any(value is off or (type(value) is type(off) and value == off) for off in rule.idle)


def grouped(left_out: Sequence[LeftOut]) -> Iterator[tuple[Why, list[tuple[str, str]]]]:
    """Yield what was left out by its kind: keys with their values, and the reason they share."""
    masked = masker()
    for why in Why:
        reasons: dict[str, list[str]] = {}
        for one in left_out:
            if one.why is why:
                whole = f"{one.key}: {one.value}"
                hidden = one.value is None or masked(whole) != whole
                told = one.key if hidden else f"{one.key}: {_short(one.value)}"
                reasons.setdefault(one.reason, []).append(told)
        if reasons:
            yield why, [(", ".join(keys), reason) for reason, keys in reasons.items()]


def _short(value: Any) -> str:
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= 24 else f"{text[:21]}..."
