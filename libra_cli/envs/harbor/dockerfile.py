"""Splits a Dockerfile into its instructions, each with its line, flags and here-documents.

It knows the grammar (comments, directives, lines that go on, here-documents, JSON forms) and the
substitution of variables; what the instructions do is in ``envs.harbor.image``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from libra_cli.config.errors import EnvironmentBroken

_HEREDOC = re.compile(r"<<(-?)(['\"]?)([A-Za-z_]\w*)\2(?=\s|$)")
_FLAG = re.compile(r"--([a-z-]+)(?:=(\S+))?(?:\s+|$)")
_VARIABLE = re.compile(
    r"\\(?P<escaped>[$\\])"
    r"|\$(?:(?P<plain>[A-Za-z_]\w*)|\{(?P<name>[A-Za-z_]\w*)(?:(?P<how>:?[-+])(?P<word>[^}]*))?\})"
)
_WORD = re.compile(r"""(?:[^\s"'\\]|\\.|"(?:[^"\\]|\\.)*"|'[^']*')+""")
_QUOTED = re.compile(r"""\\(.)|"((?:[^"\\]|\\.)*)"|'([^']*)'""", re.DOTALL)


@dataclass(frozen=True, slots=True)
class HereDocument:
    """A file within a Dockerfile: ``<<NAME`` up to the line ``NAME``."""

    name: str
    text: str
    verbatim: bool
    """Whether its name is quoted, so that no variable is replaced in it."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction of a Dockerfile, with lines that go on joined."""

    where: str
    """The file and the line at which it begins."""
    keyword: str
    """In capitals, such as RUN."""
    flags: Mapping[str, str]
    text: str
    """What follows the keyword and its flags."""
    heredocs: tuple[HereDocument, ...] = ()

    def refused(self, reason: str, hint: str = "") -> EnvironmentBroken:
        """Return the error that shows this line and says why it cannot be played."""
        shown = f"{self.keyword} {self.text.splitlines()[0] if self.text else ''}".strip()
        return EnvironmentBroken(
            f"{self.where}: {shown[:120]}: {reason}",
            hint=hint or "libra help harbor says what a Dockerfile may have",
        )

    @property
    def json_form(self) -> list[str] | None:
        """The list of ``RUN ["program", "argument"]``; None of the other form."""
        try:
            found = json.loads(self.text) if self.text.startswith("[") else None
        except ValueError:
            return None
        return found if isinstance(found, list) and all(isinstance(w, str) for w in found) else None


def instructions(path: Path) -> Iterator[Instruction]:
    """Yield the instructions of a Dockerfile in order.

    Raises:
        EnvironmentBroken: it cannot be read, or a here-document has no end.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise EnvironmentBroken(
            f"{path} cannot be read: {error}", hint="libra help harbor says what a task has"
        ) from error
    escape, at = _escape(lines), 0
    while at < len(lines):
        begin, text, at = _joined(lines, at, escape)
        if not text:
            continue
        keyword, _, rest = text.partition(" ")
        flags, rest = _flags(rest.strip())
        heredocs: list[HereDocument] = []
        if keyword.upper() in ("RUN", "COPY", "ADD"):
            for mark in _HEREDOC.finditer(rest):
                document, at = _heredoc(path, lines, at, mark)
                heredocs.append(document)
        yield Instruction(f"{path}:{begin}", keyword.upper(), flags, rest, tuple(heredocs))


def _escape(lines: list[str]) -> str:
    for line in lines:
        directive = re.match(r"#\s*(\w+)\s*=\s*(\S+)", line)
        if directive is None:
            break
        if directive[1].lower() == "escape":
            return directive[2]
    return "\\"


def _joined(lines: list[str], at: int, escape: str) -> tuple[int, str, int]:
    """Return the number of the first line, the whole text, and where the next one begins."""
    begin, text = 0, ""
    while at < len(lines):
        line = lines[at].rstrip()
        at += 1
        if line.lstrip().startswith("#") or not line.strip():
            continue  # comments and empty lines may stand between lines that go on
        begin = begin or at
        if not line.endswith(escape):
            return begin, (text + line).strip(), at
        text += line.removesuffix(escape)
    return begin, text.strip(), at


def _flags(text: str) -> tuple[dict[str, str], str]:
    found = {}
    while flag := _FLAG.match(text):
        found[flag[1]] = flag[2] or ""
        text = text[flag.end() :]
    return found, text


def _heredoc(
    path: Path, lines: list[str], at: int, mark: re.Match[str]
) -> tuple[HereDocument, int]:
    dash, quote, name = mark.groups()
    kept: list[str] = []
    for number in range(at, len(lines)):
        line = lines[number].lstrip("\t") if dash else lines[number]
        if line == name:
            text = "".join(f"{one}\n" for one in kept)
            return HereDocument(name, text, bool(quote)), number + 1
        kept.append(line)
    raise EnvironmentBroken(
        f"{path}:{at}: the here-document {name} has no end", hint=f"edit {path}"
    )


def substituted(text: str, variables: Mapping[str, str]) -> str:
    """Replace ``$NAME``, ``${NAME}``, ``${NAME:-word}`` and ``${NAME:+word}`` as Docker does."""

    def value(found: re.Match[str]) -> str:
        if found["escaped"]:
            return found["escaped"] if found["escaped"] == "$" else found[0]
        given = variables.get(found["plain"] or found["name"])
        how, word = found["how"] or "", found["word"] or ""
        is_set = bool(given) if how.startswith(":") else given is not None
        if how.endswith("-") and not is_set:
            return substituted(word, variables)
        if how.endswith("+"):
            return substituted(word, variables) if is_set else ""
        return given or ""

    return _VARIABLE.sub(value, text)


def unset_in(text: str, variables: Mapping[str, str]) -> str:
    """Return the first name of a text that has neither a value nor a default; empty if all have."""
    for found in _VARIABLE.finditer(text):
        name = found["plain"] or found["name"]
        if name and name not in variables and not found["how"]:
            return name
    return ""


def words(text: str) -> list[str]:
    """Split at spaces outside quotes, and take the quotes off."""
    return [_QUOTED.sub(_unquoted, word) for word in _WORD.findall(text)]


def _unquoted(found: re.Match[str]) -> str:
    if found[1] is not None:
        return found[1]
    return re.sub(r"\\(.)", r"\1", found[2]) if found[2] is not None else found[3]
