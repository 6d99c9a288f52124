"""What would let somebody in is nowhere in the package; ``libra help security`` says so."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[3] / "libra_cli"
UNPICKLERS = {
    "node/checkpoints/contents.py",
    "node/checkpoints/reader.py",
    "node/model/torch_objects.py",
    "runtime/adoption/snapshot.py",
}
"""Subclasses of ``pickle.Unpickler`` that name what a pickle may name, each with a test."""
RUNS_WHAT_IT_READS = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
OBJECTS = re.compile(r"(broadcast|gather|scatter|send|recv)_object(_list)?$|all_gather_object$")


@pytest.fixture(scope="module")
def trees() -> dict[str, ast.Module]:
    return {
        str(path.relative_to(PACKAGE)): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(PACKAGE.rglob("*.py"))
    }


def imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def calls(tree: ast.Module) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def argument(call: ast.Call, name: str) -> str:
    return next((ast.unparse(one.value) for one in call.keywords if one.arg == name), "")


def test_nothing_is_unpickled_but_where_it_is_said_what_may_be_named(
    trees: dict[str, ast.Module],
) -> None:
    found = {path for path, tree in trees.items() if RUNS_WHAT_IT_READS & {*imported(tree)}}
    assert found <= UNPICKLERS
    for path in found:
        text = (PACKAGE / path).read_text(encoding="utf-8")
        assert "(pickle.Unpickler)" in text
        assert not re.search(r"pickle\.loads?\(", text)


def test_no_collective_sends_objects(trees: dict[str, ast.Module]) -> None:
    used = [(path, name) for path, tree in trees.items() for name, _ in calls(tree)]
    assert [one for one in used if OBJECTS.search(one[1])] == []


def test_what_is_loaded_of_torch_numpy_and_yaml_is_data(trees: dict[str, ast.Module]) -> None:
    for path, tree in trees.items():
        for name, call in calls(tree):
            if name == "torch.load":
                assert argument(call, "weights_only") == "True", path
            assert argument(call, "allow_pickle") in ("", "False"), path
            assert name not in ("yaml.load", "yaml.unsafe_load", "yaml.full_load"), path
            assert argument(call, "trust_remote_code") in ("", "False"), path


def test_nothing_listens_on_every_interface(trees: dict[str, ast.Module]) -> None:
    allowed = {"node/processes/ports.py": "it holds ports and listens on none"}
    places = {
        path
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and node.value in ("0.0.0.0", "::")
    }
    assert places <= set(allowed)
