"""Reads the arguments that a shell script gives to a trainer, without running it.

Variables, defaults as in ``${NAME:-8}``, arrays and sums in ``$((...))`` are followed; the first
branch of a ``case`` is read unless another is named by what is known, and no branch of an ``if``. A
value that only running could tell (``$(date)``, ``$1``, a variable of the environment) is
``COMPUTED``.
"""

from __future__ import annotations

import ast
import fnmatch
import itertools
import operator
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

COMPUTED = "\x00"
"""Stands in a text for what only running the script could tell."""
_BETWEEN = re.compile(
    r"""'[^']*'|"(?:\\.|[^"\\])*"|\\.|`[^`]*`|\$\((?:[^()]|\([^()]*\))*\)|(?<!\S)\#[^\n]*
    |(?P<between>&&|\|\||;|(?<=\s)&(?=\s|$))""",
    re.DOTALL | re.VERBOSE,
)
"""What ends a command on its line, as the group ``between``, and what may only look like it."""
_END = re.compile(r"^(\||>|2>&1|>>|2>)$")
_ASSIGNED = re.compile(r"^(?:export\s+|local\s+|readonly\s+)?([A-Za-z_]\w*)(\+?=)(.*)$", re.DOTALL)
_COMMAND = re.compile(r"\$\((?!\()[^()]*\)|`[^`]*`")
_SUM = re.compile(r"\$\(\(((?:[^()]|\([^()]*\)|\((?:[^()]|\([^()]*\))*\))*)\)\)")
_VARIABLE = re.compile(
    r"\$\{([A-Za-z_]\w*|\d|[@*#?])(?:(:?[-=+?#%/^,])([^{}]*))?\}|\$([A-Za-z_]\w*|\d|[@*])"
)
_OPERATIONS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}


@dataclass(slots=True)
class _Assigned:
    """What was assigned so far."""

    variables: dict[str, str] = field(default_factory=lambda: {"HOME": "~"})
    arrays: dict[str, list[str]] = field(default_factory=dict)

    def assign(self, name: str, how: str, value: str) -> None:
        """Assign a variable, or an array, or add to it."""
        text = value.strip()
        if text.startswith("("):
            words = self.words(text[1:].rstrip().removesuffix(")"))
            self.arrays[name] = [*(self.arrays.get(name, []) if how == "+=" else []), *words]
            return
        joined = "".join(self.words(text)[:1])
        self.variables[name] = (self.variables.get(name, "") if how == "+=" else "") + joined

    def words(self, text: str) -> list[str]:
        """Return the words of a command, with variables and arrays in their places."""
        found: list[str] = []
        for word in _split(self.expanded(text)):
            array = re.fullmatch(r"\x01(\w+)\x01", word)
            found += self.arrays.get(array[1], []) if array else [word]
        return found

    def expanded(self, text: str) -> str:
        """Return a text with the values of its variables."""
        text = re.sub(r"\$\{(\w+)\[[@*]\]\}", "\x01\\1\x01", text)
        text = re.sub(r"\"?\$[@*]\"?|\"?\$\{[@*]\}\"?", "", text)
        for pattern, replaced in ((_COMMAND, lambda _: COMPUTED), (_VARIABLE, self._value)):
            for _ in range(20):
                text, count = pattern.subn(replaced, text)
                if not count:
                    break
        return _SUM.sub(self._sum, text)

    def _sum(self, found: re.Match[str]) -> str:
        try:
            return f"{self._number(ast.parse(found[1].strip(), mode='eval').body):.15g}"
        except (SyntaxError, ValueError, ZeroDivisionError, OverflowError):
            return COMPUTED

    def _number(self, node: ast.expr) -> float:
        match node:
            case ast.Constant(value=int() | float() as value):
                return float(value)  # powers of integers may be of any length
            case ast.Name(id=name):
                return float(self.variables.get(name, "") or "nothing")
            case ast.BinOp(left, op, right) if type(op) in _OPERATIONS:
                return _OPERATIONS[type(op)](self._number(left), self._number(right))
            case ast.UnaryOp(ast.USub(), operand):
                return -self._number(operand)
            case _:
                raise ValueError("no sum of numbers")

    def _value(self, found: re.Match[str]) -> str:
        name, how, other = found[1] or found[4], found[2] or "", found[3] or ""
        value = self.variables.get(name)
        if how in ("-", ":-", "=", ":="):
            return value if value else other
        if how in ("+", ":+"):
            return other if value else ""
        if value is None or how:
            return COMPUTED
        return value


def commands(text: str) -> Iterator[list[str]]:
    """Yield the words of every command of a script that is not inside of an ``if`` or a loop."""
    script = _Assigned()
    lines = _outside_branches(_logical_lines(text), script)
    for line in itertools.chain.from_iterable(map(_parts, lines)):
        assigned = _ASSIGNED.match(line)
        if assigned and not _has_command(line):
            script.assign(assigned[1], assigned[2], assigned[3])
        elif words := list(itertools.takewhile(_is_word, script.words(line))):
            yield words


def assigned_in_branches(text: str) -> list[str]:
    """Return the variables that a script assigns in an ``if``, a loop or a function, unread."""
    inside = (line for line, is_inside in _with_depth(_logical_lines(text)) if is_inside)
    found = (_ASSIGNED.match(line) for line in inside)
    return sorted({one[1] for one in found if one})


def _has_command(line: str) -> bool:
    """Whether a line begins with an assignment and goes on with a command: ``X=1 python``."""
    value = line.split("=", 1)[1]
    return (
        not value.strip().startswith("(")
        and len(_split(_COMMAND.sub("x", value))) > 1
        and ("$(" not in value)
    )


def _parts(line: str) -> Iterator[str]:
    """Yield the commands and assignments of a line: those before count for those behind."""
    begin = 0
    for found in _BETWEEN.finditer(line):
        if found["between"]:
            yield line[begin : found.start()].strip()
            begin = found.end()
    yield line[begin:].strip()


def _is_word(word: str) -> bool:
    """Whether a word is part of a command, and does not say where its output goes."""
    return _END.match(word) is None


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text, comments=True)
    except ValueError:  # a quote that never ends
        return text.split()


def _logical_lines(text: str) -> Iterator[str]:
    """Lines with those that belong to them: after a backslash, in quotes, in an array."""
    waiting = ""
    for line in text.splitlines():
        if waiting.endswith("\\"):
            waiting = waiting[:-1] + " " + line.strip()
        else:
            waiting = f"{waiting}\n{line}" if waiting else line
        if _is_whole(waiting):
            if waiting.strip() and not waiting.lstrip().startswith("#"):
                yield waiting.strip()
            waiting = ""
    if waiting.strip():
        yield waiting.strip().rstrip("\\")


def _is_whole(text: str) -> bool:
    if text.rstrip().endswith("\\"):
        return False
    if text.lstrip().startswith("#"):
        return True
    try:
        shlex.split(text, comments=True)
    except ValueError:
        return False
    opened = re.match(r"^\s*\w+\+?=\(", text)
    return opened is None or _depth(text) <= 0


def _depth(text: str) -> int:
    bare = re.sub(r"'[^']*'|\"[^\"]*\"|(?m:(?:^|\s)#.*$)", "", text)
    return bare.count("(") - bare.count(")")


# -- branches --------------------------------------------------------------------------------------

_OPENS = re.compile(r"^(if|for|while|until)\b|^(function\s+)?\w+\s*\(\)\s*\{?$")
_CLOSES = re.compile(r"^(fi\b|done\b|\})")
_PATTERN = re.compile(r"^\(?([\w*?|.\- \"]+)\)\s*(.*)$")


@dataclass(slots=True)
class _Branches:
    """A ``case`` that is being read."""

    word: str
    is_read: bool = False
    was_read: bool = False


def _outside_branches(lines: Iterator[str], script: _Assigned) -> Iterator[str]:
    """The lines that count: outside of ``if`` and loops, and in one branch of each ``case``."""
    cases = list[_Branches]()
    for line, is_inside in _with_depth(lines):
        if is_inside:
            continue
        if (word := re.match(r"^case\s+(.+?)\s+in\b", line)) is not None:
            cases.append(_Branches("".join(script.words(word[1])[:1])))
        elif cases and line.startswith("esac"):
            cases.pop()
        elif cases:
            yield from _of_case(line, cases)
        else:
            yield line


def _with_depth(lines: Iterator[str]) -> Iterator[tuple[str, bool]]:
    """Each line, and whether it is part of an ``if``, a loop or a function."""
    depth = 0
    for line in lines:
        opens = bool(_OPENS.match(line))
        yield line, opens or depth > 0
        is_whole = re.search(r";\s*(fi|done)\b", line) is not None
        depth += (opens and not is_whole) - bool(_CLOSES.match(line))


def _of_case(line: str, cases: list[_Branches]) -> Iterator[str]:
    case = cases[-1]
    pattern = _PATTERN.match(line)
    if pattern is not None and not case.is_read:
        names = [name.strip(' "') for name in pattern[1].split("|")]
        known = COMPUTED not in case.word
        fits = any(fnmatch.fnmatchcase(case.word, name) for name in names)
        case.is_read = not case.was_read and (fits if known else True)
        case.was_read = case.was_read or case.is_read
        line = pattern[2]
    ends = line.endswith(";;")
    line = line.removesuffix(";;").strip()
    if line and all(one.is_read for one in cases):
        yield line
    if ends:
        case.is_read = False
