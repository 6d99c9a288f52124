"""Which keys of a recipe may have other values when a run goes on, and why the others may not.

Every key says so itself: by a mark on its field, ``Annotated[Count, fixed("...")]``, or by that of
its section, the class variable ``on_resume``. No I/O.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import BaseModel


@dataclass(frozen=True, slots=True)
class OnResume:
    """Whether a key may be another when a run goes on."""

    why_not: str = ""
    """Why it may not; empty if it may."""
    whole: bool = False
    """Whether that is so of all that is in it, whatever the marks there say."""
    where: str = ""
    """The only value that must stay; empty if every value must."""

    @property
    def words(self) -> str:
        """The words that are shown beside the key."""
        if self.where:
            return f"may change, but {self.where} must stay: {self.why_not}"
        return f"must stay: {self.why_not}" if self.why_not else "may change"

    def why_not_from(self, before: object) -> str:
        """Return why a key that was ``before`` may not be another; empty if it may."""
        return self.why_not if self.where in ("", before) else ""


MAY_CHANGE = OnResume()
ALL_MAY_CHANGE = OnResume(whole=True)
"""The mark of a key with sections whose own keys must stay elsewhere in a recipe."""
UNSAID = OnResume("nobody has said that it may change")
"""The mark of a key that has none; no key is left so."""


def fixed(why_not: str, *, where: str = "") -> OnResume:
    """Mark a key that must stay as it was, or must only if it was ``where``."""
    return OnResume(why_not, where=where)


@dataclass(frozen=True, slots=True)
class RecipeChange:
    """A key that is another than it was."""

    key: str
    before: object
    now: object
    why_not: str
    """Why it must not be; empty if it may be."""

    def __str__(self) -> str:
        values = f" is {self.now!r} and was {self.before!r}"
        short = values if len(values) < 160 else " is another than it was"
        return f"{self.key}{short}: {self.why_not}" if self.why_not else f"{self.key}{short}"


def mark_of(section: type[BaseModel], name: str) -> OnResume:
    """The mark of a key of a section: its own, or else the section's."""
    metadata = section.model_fields[name].metadata
    marks = [one for one in metadata if isinstance(one, OnResume)]
    marks.append(getattr(section, "on_resume", UNSAID))
    return marks[0]


def sections_of(section: type[BaseModel]) -> dict[str, type[BaseModel]]:
    """All sections in this one and itself, by their names in the JSON Schema."""
    found = {section.__name__: section}
    for field in section.model_fields.values():
        for inner in _sections_in(field.annotation):
            found |= sections_of(inner)
    return found


def _sections_in(hint: Any) -> Iterator[type[BaseModel]]:
    if isinstance(hint, type) and issubclass(hint, BaseModel):
        yield hint
    for inner in get_args(hint):
        yield from _sections_in(inner)


def changes(before: BaseModel, now: BaseModel, path: str = "") -> Iterator[RecipeChange]:
    """Yield the differences of two recipes, or of two sections of the same kind."""
    for name in type(before).model_fields:
        key = f"{path}.{name}".strip(".")
        mark = mark_of(type(before), name)
        yield from _between(key, getattr(before, name), getattr(now, name), mark)


def _between(key: str, before: Any, now: Any, mark: OnResume) -> Iterator[RecipeChange]:
    if before == now:
        return
    if mark.whole:
        yield RecipeChange(key, _plain(before), _plain(now), mark.why_not)
    elif isinstance(before, BaseModel) and type(before) is type(now):
        yield from changes(before, now, key)
    elif _are_sections(before) and _are_sections(now) and len(before) == len(now):
        for number, pair in enumerate(zip(before, now, strict=True)):
            yield from changes(*pair, f"{key}[{number}]")
    else:
        yield RecipeChange(key, _plain(before), _plain(now), mark.why_not_from(before))


def _are_sections(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(one, BaseModel) for one in value)


def _plain(value: Any) -> object:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", exclude_defaults=True)
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    return value
