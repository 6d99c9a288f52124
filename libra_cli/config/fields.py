"""What all sections of a recipe are made of: how strict they are, and numbers with bounds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from libra_cli.config.on_resume import UNSAID, OnResume
from libra_cli.config.problems import Problem

Positive: TypeAlias = Annotated[int, Field(ge=1)]
Count: TypeAlias = Annotated[int, Field(ge=0)]
Share: TypeAlias = Annotated[float, Field(gt=0.0, le=1.0)]
Name: TypeAlias = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=64)]


STRICT = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)
"""The model configuration of a section: frozen, with no other keys
than its own, and no infinite numbers.
"""


class Section(BaseModel):
    """A mapping of a recipe, with the rules between its own keys."""

    model_config = STRICT
    on_resume: ClassVar[OnResume] = UNSAID
    """The mark of the keys without one of their own; a section
    without it marks each of its keys.
    """

    def problems(self) -> Iterator[Problem]:
        """Yield every broken rule between keys of this section, named as they stand in it."""
        yield from ()


def as_tuple(value: Any) -> Any:
    """Return a text as the one of a tuple, and a list as a tuple."""
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


one_or_several = BeforeValidator(as_tuple, json_schema_input_type=str | list[str])
"""Reads a text, or a list of texts, as a tuple of texts."""
