"""The package as a graph: which folder imports which, and the figures by which its shape is judged.

``python -m tests.package_graph [ROOT]`` prints the figures of the repository at ROOT, this one
without it. `tests/unit/core/test_house.py` keeps them from growing.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = "libra_cli"

FEATURES = {
    "critic": "critic|gae",
    "distillation": "distill|distillation|distilled|teacher|teachers",
    "demonstrations": "demonstration|demonstrations|sft",
    "replay": "replay|replayed|replays",
    "evaluation": "evaluation|evaluations",
}
"""The words by which the code names each feature, as a regular expression."""
VOCABULARIES = ("config/other_names/", "app/importing/")
"""Folders of tables that name every feature in the words of other trainers."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    """A Python file of the package; ``path`` is relative to the package."""

    path: Path
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """Every node of the tree."""
        return tuple(ast.walk(self.tree))

    @property
    def folder(self) -> str:
        """Where the module is, relative to the package; empty for the package's own folder."""
        return "/".join(self.path.parent.parts)

    @property
    def lines(self) -> int:
        return self.text.count("\n")

    @cached_property
    def functions(self) -> list[Function]:
        return [node for node in self.nodes if isinstance(node, Function)]

    def __str__(self) -> str:
        return str(self.path)


def modules(root: Path = ROOT) -> tuple[Module, ...]:
    """Every module of the package of the repository at ``root``, read once, parsed when asked."""
    return _read(root / PACKAGE)


@cache
def _read(package: Path) -> tuple[Module, ...]:
    return tuple(
        Module(path.relative_to(package), path.read_text(encoding="utf-8"))
        for path in sorted(package.rglob("*.py"))
    )


def modules_with(*words: str) -> list[Module]:
    """The modules in whose text one of ``words`` stands. Parsing all of them takes seconds."""
    return [module for module in modules() if any(word in module.text for word in words)]


def folder_imports(root: Path = ROOT) -> dict[str, set[str]]:
    """Each folder of the package, and the other folders whose modules it imports at run time.

    Imports inside functions count; those under ``if TYPE_CHECKING:`` do not.
    """
    folders = {one.folder for one in modules(root)}
    graph: dict[str, set[str]] = {folder: set() for folder in folders}
    for module in modules(root):
        imported = {_folder_of(name, folders) for name in _imported_names(module.tree)}
        graph[module.folder] |= imported - {module.folder}
    return graph


def knots(root: Path = ROOT) -> list[list[str]]:
    """The groups of folders that all import one another, directly or by way of others."""
    graph = folder_imports(root)
    reached = {folder: _reachable(graph, folder) for folder in graph}
    groups = {
        tuple(sorted(other for other in reached[folder] if folder in reached[other]))
        for folder in graph
        if folder in reached[folder]
    }
    return [list(group) for group in sorted(groups)]


def match_arms(root: Path = ROOT) -> int:
    return sum(isinstance(node, ast.match_case) for one in modules(root) for node in one.nodes)


def functions_that_take(name: str, root: Path = ROOT) -> Counter[str]:
    """How many functions of each top folder have a parameter annotated with the class ``name``."""
    return Counter(
        module.folder.partition("/")[0]
        for module in modules(root)
        for function in module.functions
        if any(_mentions(parameter.annotation, name) for parameter in _parameters(function))
    )


def files_that_name(words: str, root: Path = ROOT) -> list[Module]:
    """The modules in which one of ``words`` stands as a word, or as a part of a snake_case name."""
    word = re.compile(rf"(?<![a-z])({words})(?![a-z])", re.IGNORECASE)
    return [
        module
        for module in modules(root)
        if word.search(module.text) and not str(module.path).startswith(VOCABULARIES)
    ]


def length(function: Function) -> int:
    return (function.end_lineno or 0) - function.lineno + 1


def functions_longer_than(lines: int, root: Path = ROOT) -> list[str]:
    return [
        f"{module}:{function.lineno}: {function.name} has {length(function)} lines"
        for module in modules(root)
        for function in module.functions
        if length(function) > lines
    ]


def figures(root: Path = ROOT) -> dict[str, int]:
    """Every figure by its name."""
    whole_recipe = functions_that_take("Recipe", root)
    tied = knots(root)
    return {
        "files": len(modules(root)),
        "lines": sum(one.lines for one in modules(root)),
        "files over 500 lines": sum(one.lines > 500 for one in modules(root)),
        "functions": sum(len(one.functions) for one in modules(root)),
        "functions over 50 lines": len(functions_longer_than(50, root)),
        "folders": len(folder_imports(root)),
        "knots of folders": len(tied),
        "folders in knots": sum(map(len, tied)),
        "match arms": match_arms(root),
        "functions that take the whole Recipe": whole_recipe.total(),
        "  of them in core": whole_recipe["core"],
        **{
            f"files naming {name}": len(files_that_name(words, root))
            for name, words in FEATURES.items()
        },
    }


def _imported_names(node: ast.AST) -> Iterator[str]:
    """What is imported from this package at run time, as dotted names."""
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.If(test=ast.Name(id="TYPE_CHECKING"), orelse=orelse):
                for one in orelse:
                    yield from _imported_names(one)
            case ast.Import(names=names):
                yield from (name.name for name in names if _is_ours(name.name))
            case ast.ImportFrom(module=str(source), names=names) if _is_ours(source):
                yield from (f"{source}.{name.name}" for name in names)
            case _:
                yield from _imported_names(child)


def _is_ours(name: str) -> bool:
    return name.partition(".")[0] == PACKAGE


def _folder_of(name: str, folders: set[str]) -> str:
    """The folder that holds what is imported by the dotted ``name``."""
    _, *parts = name.split(".")
    while "/".join(parts) not in folders:
        parts.pop()
    return "/".join(parts)


def _reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    """The folders that ``start`` imports by any way; itself too if a way leads back."""
    found: set[str] = set()
    ahead = [*graph[start]]
    while ahead:
        if (folder := ahead.pop()) not in found:
            found.add(folder)
            ahead += graph[folder]
    return found


def _parameters(function: Function) -> list[ast.arg]:
    arguments = function.args
    return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]


def _mentions(annotation: ast.expr | None, name: str) -> bool:
    return annotation is not None and any(
        isinstance(node, ast.Name) and node.id == name for node in ast.walk(annotation)
    )


if __name__ == "__main__":
    rows = figures(*map(Path, sys.argv[1:])).items()
    sys.stdout.writelines(f"{name:40} {value:>7}\n" for name, value in rows)
