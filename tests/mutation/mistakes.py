"""Small mistakes that can be made in a file: each is a text that differs in one place."""

from __future__ import annotations

import ast
import difflib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
OTHER: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Div,
    ast.Mod: ast.Mult,
}
CALLED = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass(frozen=True)
class Mutant:
    """A file below the root, its text before and after the mistake, the line of that, and the
    outermost function; empty if that is none."""

    path: Path
    before: str
    after: str
    line: int
    function: str

    @property
    def folder(self) -> str:
        """What it is counted with."""
        return str(self.path.parent.relative_to("libra_cli"))

    @property
    def diff(self) -> str:
        """Without context."""
        lines = self.before.splitlines(), self.after.splitlines()
        name = str(self.path)
        return "\n".join(difflib.unified_diff(*lines, name, name, n=0, lineterm=""))


def mutants_of(path: Path) -> list[Mutant]:
    """All of a file, whose path is below the root."""
    before = (ROOT / path).read_text()
    starts = [0, *itertools.accumulate(len(line.encode()) for line in before.splitlines(True))]
    raw, found, tree = before.encode(), [], ast.parse(before)
    for node, text in mistakes(tree):
        where: Any = node
        first = starts[where.lineno - 1] + where.col_offset
        last = starts[where.end_lineno - 1] + where.end_col_offset
        after = raw[:first] + text.encode() + raw[last:]
        function = function_at(tree, where.lineno)
        found.append(Mutant(path, before, after.decode(), where.lineno, function))
    return found


def functions_of(tree: ast.AST, within: str = "") -> Iterator[tuple[str, range]]:
    """The outermost functions with their names, and their lines."""
    for node in ast.iter_child_nodes(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                first = min(one.lineno for one in (node, *node.decorator_list))
                yield within + node.name, range(first, (node.end_lineno or first) + 1)
            case ast.ClassDef():
                yield from functions_of(node, f"{within}{node.name}.")
            case _:
                yield from functions_of(node, within)


def function_at(tree: ast.AST, line: int) -> str:
    """The name of the function that a line is in; empty if it is in none."""
    return next((name for name, lines in functions_of(tree) if line in lines), "")


def mistakes(tree: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """Every place where one can be made, and what would stand there."""
    for node in ast.iter_child_nodes(tree):
        if _is_beside_the_point(node, tree):
            continue
        if (text := _mistaken(node)) is not None:
            yield node, text
        yield from mistakes(node)


def _is_beside_the_point(node: ast.AST, within: ast.AST) -> bool:
    """Whether no test should notice: what is said, declared, or chosen as a constant."""
    match node:
        case ast.Assert() | ast.Raise() | ast.JoinedStr() | ast.keyword("strict"):
            return True
        case ast.Assign() | ast.AnnAssign() if isinstance(within, ast.Module | ast.ClassDef):
            return True
        case ast.Expr(ast.Call(ast.Name("log") | ast.Attribute(ast.Name("log")))):
            return True
        case _:
            return node in getattr(within, "decorator_list", ())


def _mistaken(node: ast.AST) -> str | None:
    match node:
        case ast.UnaryOp(ast.Not(), operand):
            return f"({ast.unparse(operand)})"
        case ast.Call(ast.Name(name), arguments, keywords) if name in CALLED:
            return ast.unparse(ast.Call(ast.Name(CALLED[name]), arguments, keywords))
        case ast.Constant(bool() as value):
            return str(not value)
        case ast.Constant(int() | float() as value):
            return str(value + 1)
        case ast.Expr(ast.Call()) | ast.Assign([ast.Attribute()]):
            return "pass"
        case _:
            return _by_another_operator(node)


def _by_another_operator(node: ast.AST) -> str | None:
    match node:
        case ast.Compare(left, [operator], right):
            return f"({ast.unparse(ast.Compare(left, [_other(operator)], right))})"
        case ast.BoolOp(operator, values):
            return f"({ast.unparse(ast.BoolOp(_other(operator), values))})"
        case ast.BinOp(left, operator, right) if _counts(left, operator, right):
            return f"({ast.unparse(ast.BinOp(left, _other(operator), right))})"
        case ast.AugAssign(target, operator, value) if _counts(target, operator, value):
            return ast.unparse(ast.AugAssign(target, _other(operator), value))
        case _:
            return None


def _other(operator: ast.AST) -> Any:
    return OTHER[type(operator)]()


def _counts(left: ast.AST, operator: ast.operator, right: ast.AST) -> bool:
    """Whether it is arithmetic, and joins no texts or lists."""
    joins = any(isinstance(side, ast.JoinedStr | ast.List | ast.Tuple) for side in (left, right))
    texts = any(isinstance(getattr(side, "value", None), str) for side in (left, right))
    return type(operator) in OTHER and not joins and not texts
