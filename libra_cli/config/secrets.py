"""Finds what looks like a secret in a text or a recipe, and masks it. No I/O.

    NAME=VALUE, "NAME": "VALUE", --name VALUE   where the name is that of a secret (``SECRET_NAME``)
    Bearer VALUE, Basic VALUE                   of HTTP
    scheme://user:VALUE@host                    in URLs
    tokens with the prefix of their maker       as hf_, sk-, ghp_; web tokens; private keys

and whatever is given as a known secret, wherever it stands. Numbers, words of fewer than eight
letters, ``${VARIABLE}`` and special tokens such as ``<|im_end|>`` are no secrets after a name.

Limit: a secret without name, prefix or place is not recognised.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from pydantic import BaseModel, SecretStr

from libra_cli.config.problems import Problem

SECRET_NAME = re.compile(r"(TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|(^|_)KEY)(S|$|_)", re.I)
"""Matches names of environment variables whose values are never shown."""
SECRET_IN_URL = re.compile(r"://[^/@\s]*:[^/@\s]*@|[?&][^=&\s]*(token|key|secret|password)=", re.I)
MASK = "[masked]"
LEAST_KNOWN = 6
"""Characters of a known secret: shorter values stand in any text."""

_NAMED = re.compile(
    r"(?P<name>(?<![\w.-])[\w.-]{0,64}(?:token|secret|passw|credential|key)[\w.-]{0,64})"
    r"(?P<between>[\"']?\s{0,2}[:=]\s{0,2}[\"']?| +)"
    r"(?P<value>[^\s\"',;&(){}<>\[\]]{8,})",
    re.IGNORECASE,
)
_SHORTEST = 12
"""Characters of a name and a value after it, the shortest that masks anything but a URL's."""
_NUMBER = re.compile(r"[-+]?[\d_.]+(?:[eE][-+]?\d+)?\.?")
_AUTHORIZATION = re.compile(r"\b(Bearer|Basic)( +)[\w.~+/=-]{8,}", re.IGNORECASE)
_IN_URL = re.compile(r"(?<=://)[^/@\s:]*:[^/@\s]+(?=@)")
_SHAPES = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"
    r"|\bgithub_pat_\w{20,}|\bgh[pousr]_\w{20,}|\bglpat-[\w-]{16,}|\bhf_\w{16,}|\bpypi-[\w-]{16,}"
    r"|\bnvapi-[\w-]{16,}|\bsk-[\w-]{16,}|\bxox[a-z]-[\w-]{10,}|\bAKIA[0-9A-Z]{16}\b"
    r"|\bAIza[\w-]{30,}|\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*",
    re.DOTALL,
)


def argument_problems(key: str, value: Any) -> Iterator[Problem]:
    """Yield secrets among a monitor's arguments, which are written into the run directory."""
    instead = "a monitor's package reads it from the environment, as WANDB_API_KEY"
    if isinstance(value, str) and SECRET_IN_URL.search(value):
        yield Problem((key,), f"has a secret in it, and this is no place for one: {instead}")
    elif isinstance(value, dict):
        for name, item in value.items():
            if isinstance(item, str) and SECRET_NAME.search(name.replace("-", "_")):
                reason = f"sounds like a secret, and this is no place for one: {instead}"
                yield Problem((f"{key}.{name}",), reason)
            else:
                yield from argument_problems(f"{key}.{name}", item)


def environment_problems(env: Mapping[str, str], place: str) -> Iterator[Problem]:
    """Yield variables of a section's ``env`` that sound like secrets; those go to ``place``."""
    for name in env:
        if SECRET_NAME.search(name) and not name.endswith("_FILE"):
            yield Problem(
                (f"env.{name}",),
                f"sounds like a secret, and this is no place for one; {place} is, as ${{{name}}}",
            )


def is_secret_name(name: str) -> bool:
    """Whether a variable, key or option of this name holds a secret (a file's name is none)."""
    plain = name.replace("-", "_").replace(".", "_")
    return SECRET_NAME.search(plain) is not None and not plain.upper().endswith("_FILE")


def holds_token(text: str) -> bool:
    """Whether a text holds a token with the prefix of its maker, or a private key."""
    return _SHAPES.search(text) is not None


def known_secrets(values: object) -> list[str]:
    """Every secret in the values of a recipe, however deep."""
    match values:
        case SecretStr():
            return [values.get_secret_value()]
        case BaseModel():
            return [one for _, value in values for one in known_secrets(value)]
        case Mapping():
            return [one for value in values.values() for one in known_secrets(value)]
        case list() | tuple():
            return [one for value in values for one in known_secrets(value)]
        case _:
            return []


def secrets_in(variables: Mapping[str, str]) -> list[str]:
    """The values of those variables whose names are those of secrets."""
    return [value for name, value in variables.items() if is_secret_name(name)]


def masker(known: Iterable[str] = ()) -> Callable[[str], str]:
    """Return what masks a text; ``known`` are secrets to be masked wherever they stand."""
    values = sorted({one for one in known if len(one) >= LEAST_KNOWN}, key=len, reverse=True)
    exact = re.compile("|".join(map(re.escape, values))) if values else None

    def mask(text: str) -> str:
        if exact is not None:
            text = exact.sub(MASK, text)
        if len(text) < _SHORTEST and "://" not in text:
            return text
        text = _SHAPES.sub(MASK, text)
        text = _AUTHORIZATION.sub(rf"\1\2{MASK}", text)
        text = _IN_URL.sub(MASK, text)
        return _NAMED.sub(_named, text)

    return mask


def _named(found: re.Match[str]) -> str:
    name, between, value = found["name"], found["between"], found["value"]
    words = between.isspace() and not name.startswith("--")
    harmless = _NUMBER.fullmatch(value) or value.startswith(("$", MASK[:-1]))
    if harmless or words or not is_secret_name(name):
        return f"{name}{between}{_NAMED.sub(_named, value)}"
    return f"{name}{between}{MASK}"
