"""What would let somebody in is nowhere in the package; ``libra help security`` says so."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.package_graph import modules_with

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
def calls() -> list[tuple[str, str, ast.Call]]:
    """Calls in the package, all that may be refused here: in which file, of what, and the call."""
    return [
        (str(module), ast.unparse(node.func), node)
        for module in modules_with("_object", ".load", "allow_pickle", "trust_remote_code")
        for node in module.nodes
        if isinstance(node, ast.Call)
    ]


def imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def argument(call: ast.Call, name: str) -> str:
    return next((ast.unparse(one.value) for one in call.keywords if one.arg == name), "")


def test_nothing_is_unpickled_but_where_it_is_said_what_may_be_named() -> None:
    suspects = modules_with(*RUNS_WHAT_IT_READS)
    found = [module for module in suspects if RUNS_WHAT_IT_READS & {*imported(module.tree)}]
    assert {str(module) for module in found} <= UNPICKLERS
    for module in found:
        assert "(pickle.Unpickler)" in module.text
        assert not re.search(r"pickle\.loads?\(", module.text)


def test_no_collective_sends_objects(calls: list[tuple[str, str, ast.Call]]) -> None:
    assert [(path, name) for path, name, _ in calls if OBJECTS.search(name)] == []


def test_what_is_loaded_of_torch_numpy_and_yaml_is_data(
    calls: list[tuple[str, str, ast.Call]],
) -> None:
    for path, name, call in calls:
        if name == "torch.load":
            assert argument(call, "weights_only") == "True", path
        assert argument(call, "allow_pickle") in ("", "False"), path
        assert name not in ("yaml.load", "yaml.unsafe_load", "yaml.full_load"), path
        assert argument(call, "trust_remote_code") in ("", "False"), path


def test_nothing_listens_on_every_interface() -> None:
    allowed = {"node/processes/ports.py": "it holds ports and listens on none"}
    places = {
        str(module)
        for module in modules_with('"0.0.0.0"', '"::"')
        for node in module.nodes
        if isinstance(node, ast.Constant) and node.value in ("0.0.0.0", "::")
    }
    assert places <= set(allowed)
