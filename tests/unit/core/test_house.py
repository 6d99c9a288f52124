"""The package keeps the rules by which a reader finds their way in it."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
import typing
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path

import pytest
from pydantic import BaseModel

from libra_cli import config
from tests import package_graph
from tests.package_graph import modules

PACKAGE = package_graph.ROOT / package_graph.PACKAGE
FOLDERS = sorted({path.parent for path in PACKAGE.rglob("*.py")})

MOST_LINES = 60
LONG = 20
"""Lines from which on a public class or function has something to say that its name does not."""
FRAGMENT = re.compile(r"(It|Its|Itself|That|Those|These|They|Their|Them|Of|By|As|With|Whom)\b")
"""Beginnings of a docstring that only make sense to whoever knows the noun that is meant."""
SENTENCE = 4
"""The fewest words of a docstring; what can be said in fewer is in the name."""
MOST_FRAGMENTS = {"runtime": 4}
MOST_WITH_HIDDEN_ERRORS = {"app": 2, "envs": 2, "node": 4, "runtime": 18}
NO_ERRORS = {"AssertionError", "BadParameter", "Exit", "NotImplementedError", "SystemExit"}
FILLERS = re.compile(
    r"\b(a|all|an|and|are|as|at|by|for|from|has|have|in|is|it|its|of|on|one|or|that|the|these|this"
    r"|those|to|what|which|with)\b",
    re.IGNORECASE,
)
MOST_FUNCTIONS_OVER_50_LINES = 3
MOST_WITH_THE_WHOLE_RECIPE = {"core": 60, "everywhere": 156}
MOST_FILES_NAMING = {
    "critic": 19,
    "distillation": 29,
    "demonstrations": 29,
    "replay": 21,
    "evaluation": 55,
}

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def public(body: list[ast.stmt]) -> Iterator[Definition]:
    for node in body:
        if isinstance(node, Definition) and not node.name.startswith("_"):
            yield node
            if isinstance(node, ast.ClassDef):
                yield from public(node.body)


def assert_none(offenders: list[str]) -> None:
    assert not offenders, "\n".join(["", *offenders])


def assert_few(found: Mapping[str, list[str]], most: Mapping[str, int]) -> None:
    """Zones are compared one by one, and those with fewer than they may have say so."""
    assert_none(
        [
            f"{zone}: {len(some)}, not {most.get(zone, 0)}:\n  " + "\n  ".join(some)
            for zone, some in found.items()
            if len(some) > most.get(zone, 0)
        ]
    )


def test_every_module_states_its_contract() -> None:
    assert_none(
        [str(one) for one in modules() if one.tree.body and not ast.get_docstring(one.tree)]
    )


def test_every_long_public_class_and_function_has_a_docstring() -> None:
    offenders = [
        f"{module}:{node.lineno}: {node.name}"
        for module in modules()
        for node in public(module.tree.body)
        if not ast.get_docstring(node) and lines_of(node) > LONG
    ]
    assert_none(offenders)


def lines_of(node: Definition) -> int:
    return 1 + (node.end_lineno or node.lineno) - node.lineno


def test_no_further_function_hides_the_errors_it_raises() -> None:
    """The docstring names them, or that of the method of the same name which a protocol has."""
    told: dict[str, str] = defaultdict(str)
    functions = [
        (module, node)
        for module in modules()
        for node in public(module.tree.body)
        if not isinstance(node, ast.ClassDef)
    ]
    for _, node in functions:
        told[node.name] += ast.get_docstring(node) or ""
    found: dict[str, list[str]] = defaultdict(list)
    for module, node in functions:
        hidden = [error for error in raised_by(node) if error not in told[node.name]]
        if hidden:
            where = f"{module}:{node.lineno}: {node.name}: {', '.join(hidden)}"
            found[module.path.parts[0]].append(where)
    assert_few(found, MOST_WITH_HIDDEN_ERRORS)


def raised_by(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    """The classes that a function raises itself, but for bugs and ends of a generator."""
    for one in ast.walk(node):
        if isinstance(one, ast.Raise) and isinstance(one.exc, ast.Call):
            name = ast.unparse(one.exc.func).rpartition(".")[2]
            if name[0].isupper() and name not in NO_ERRORS:
                yield name


def test_no_further_docstring_is_a_fragment() -> None:
    """A docstring has a subject, or is left out; the numbers go down and never up."""
    found: dict[str, list[str]] = defaultdict(list)
    for module in modules():
        for line, text in docstrings(module.nodes):
            if FRAGMENT.match(text) or len(text.split()) < SENTENCE:
                found[module.path.parts[0]].append(f"{module}:{line}: {text.splitlines()[0]}")
    assert_few(found, MOST_FRAGMENTS)


def docstrings(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Line and text of the docstrings of classes and functions, and of those under a field."""
    for node in nodes:
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        if isinstance(node, Definition) and (text := ast.get_docstring(node)):
            yield node.lineno, text
        for field, below in pairwise(body):
            if isinstance(field, ast.Assign | ast.AnnAssign) and (text := literal(below)):
                yield below.lineno, text


def literal(node: ast.stmt) -> str:
    """The text of a string that stands by itself, else nothing."""
    value = node.value if isinstance(node, ast.Expr) else None
    return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else ""


def test_no_docstring_only_repeats_the_name() -> None:
    """``Its row.`` of ``row`` tells nobody anything: better none at all."""
    offenders = [
        f"{module}:{node.lineno}: {node.name}: {docstring}"
        for module in modules()
        for node in module.nodes
        if isinstance(node, Definition)
        and len(docstring := ast.get_docstring(node) or "") in range(1, 30)
        and stems(FILLERS.sub("", docstring)) <= stems(node.name)
    ]
    assert_none(offenders)


def stems(text: str) -> set[str]:
    """The first four letters of each word of a sentence or a name."""
    return {word.lower()[:4] for word in re.findall("[A-Z]?[a-z]+", text)}


def test_every_docstring_begins_with_a_sentence() -> None:
    offenders = []
    for module in modules():
        for node in (module.tree, *public(module.tree.body)):
            first = (ast.get_docstring(node) or ".").partition("\n\n")[0]
            if not first.rstrip().endswith((".", ":", "::", "?", "``")):
                offenders.append(f"{module}:{getattr(node, 'lineno', 1)}: {first.splitlines()[0]}")
    assert_none(offenders)


def test_every_class_name_exists_once() -> None:
    places = defaultdict(list)
    for module in modules():
        for node in module.nodes:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{module}:{node.lineno}")
    offenders = [f"{name}: {', '.join(found)}" for name, found in places.items() if found[1:]]
    assert_none(offenders)


def test_no_function_is_longer_than_a_screen() -> None:
    assert_none(package_graph.functions_longer_than(MOST_LINES))


def test_few_functions_are_nearly_as_long_as_a_screen() -> None:
    long = package_graph.functions_longer_than(50)
    assert len(long) <= MOST_FUNCTIONS_OVER_50_LINES, "\n".join(["", *long])


def test_no_folders_import_one_another_in_a_circle() -> None:
    assert_none([" <-> ".join(knot) for knot in package_graph.knots()])


def test_no_further_function_takes_the_whole_recipe() -> None:
    """A function takes the section that it reads, so that its signature says what it depends on."""
    counts = package_graph.functions_that_take("Recipe")
    assert counts["core"] <= MOST_WITH_THE_WHOLE_RECIPE["core"]
    assert counts.total() <= MOST_WITH_THE_WHOLE_RECIPE["everywhere"]


@pytest.mark.parametrize(("feature", "most"), MOST_FILES_NAMING.items())
def test_no_further_file_names_a_feature(feature: str, most: int) -> None:
    """What belongs to a feature stands together, so that few files know of it."""
    files = package_graph.files_that_name(package_graph.FEATURES[feature])
    assert len(files) <= most, "\n".join(["", *map(str, files)])


def test_every_module_is_in_a_folder() -> None:
    assert [path.name for path in PACKAGE.glob("*.py")] == ["__init__.py"]


def test_every_folder_says_what_it_holds() -> None:
    offenders = [str(folder) for folder in FOLDERS if not (folder / "__init__.py").is_file()]
    assert_none(offenders)


def test_docstrings_name_only_modules_that_exist() -> None:
    """A name in double backticks that begins with a folder of the package is a module of it."""
    zones = {folder.name for folder in FOLDERS if folder.parent == PACKAGE}
    offenders = []
    for module in modules():
        name = r"``(?:libra_cli\.)?([a-z_]+(?:\.(?!json|html)[a-z_]+)+)``"
        for match in re.finditer(name, module.text):
            zone, *_ = parts = match[1].split(".")
            place = PACKAGE.joinpath(*parts)
            if zone in zones and not (place.is_dir() or place.with_suffix(".py").is_file()):
                offenders.append(f"{module}: {match[1]}")
    assert_none(offenders)


SPECS = [
    value
    for name in sorted(info.name for info in pkgutil.iter_modules(config.__path__))
    for module in [importlib.import_module(f"{config.__name__}.{name}")]
    for value in vars(module).values()
    if isinstance(value, type) and issubclass(value, BaseModel) and value.model_fields
    if value.__module__ == module.__name__
]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.__name__)
def test_every_key_of_a_recipe_has_a_sentence(spec: type[BaseModel]) -> None:
    """A key that holds other keys has the docstring of their class."""
    text = Path(inspect.getfile(spec)).read_text(encoding="utf-8")
    (node,) = (one for one in public(ast.parse(text).body) if one.name == spec.__name__)
    told = {
        line.target.id
        for line, below in zip(node.body, node.body[1:], strict=False)
        if isinstance(line, ast.AnnAssign)
        and isinstance(line.target, ast.Name)
        and isinstance(below, ast.Expr)
        and isinstance(below.value, ast.Constant)
    }
    sections = {name for name, field in spec.model_fields.items() if holds_keys(field.annotation)}
    assert set(spec.model_fields) == told | sections


def holds_keys(annotation: object) -> bool:
    if isinstance(annotation, type):
        return issubclass(annotation, BaseModel)
    return any(holds_keys(argument) for argument in typing.get_args(annotation))


def test_the_page_of_the_code_names_every_folder() -> None:
    page = (PACKAGE / "help/code.md").read_text(encoding="utf-8")
    assert_none([str(one) for one in FOLDERS if not re.search(rf"\b{one.name}/", page)])
