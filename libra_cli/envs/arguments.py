"""Reads an argument of an environment that describes a served language model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from libra_cli.config.errors import EnvironmentBroken

Spec = TypeVar("Spec", bound=BaseModel)


def spec_of(kind: type[Spec], given: Mapping[str, Any], *, environment: str, argument: str) -> Spec:
    """Return an argument of an environment as its model.

    Raises:
        EnvironmentBroken: it does not fit; every problem is named.
    """
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        wrong = "; ".join(
            f"{argument}.{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()
        )
        raise EnvironmentBroken(
            f"environment {environment!r}: {wrong}",
            hint=f"{argument} takes: {', '.join(kind.model_fields)}",
        ) from None


def key_of(
    name: str | None, secrets: Mapping[str, str], *, environment: str, argument: str
) -> str | None:
    """Return the secret of an environment that ``argument.api_key`` names; None if it names none.

    Raises:
        EnvironmentBroken: there is no such secret. What was given may be the key itself, and is
            not told.
    """
    if name is None:
        return None
    if name not in secrets:
        variable = re.sub(r"\W", "_", f"{argument.upper()}_KEY", flags=re.ASCII)
        args = f"{{api_key: {variable}}}"
        for key in reversed(argument.split(".", 1)):
            args = f"{{{key}: {args}}}"
        raise EnvironmentBroken(
            f"environment {environment!r}: {argument}.api_key is the name of none of its secrets "
            f"({', '.join(secrets) or 'it has none'})",
            hint=f'environment: {{secrets: {{{variable}: "${{{variable}}}"}}, args: {args}}}',
        )
    return secrets[name]
