"""The exit code of an error is decided in one place, and is what ``libra help commands`` says."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from libra_cli.app.pages import page_of
from libra_cli.cli.main import app
from libra_cli.config.errors import ExitCode
from tests.package_graph import modules
from tests.sample_run import write

RECIPE = "nodes: [{host: local, slots: 2}]\nmodel: {build: {}}\nenvironment: {name: calculator}\n"
WRONG = {
    "agent.yaml": RECIPE + "agent: {directory: ., function: 'no_such:agent'}\n",
    "command.yaml": RECIPE + "agent: {command: [no-such-program]}\n",
    "environment.yaml": RECIPE.replace("calculator", "'no_such:It'"),
    "key.yaml": RECIPE + "stepz: 1\n",
}


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in {**WRONG, "right.yaml": RECIPE, "x.txt": "nothing\n"}.items():
        Path(name).write_text(text)
    Path("empty").mkdir()
    write(tmp_path / "run")


def test_the_page_says_what_each_code_means():
    rows = re.findall(r"^\| (\d) \| ([\w ]+)", page_of("commands"), re.MULTILINE)
    told = {int(code): words.strip() for code, words in rows}
    assert told.keys() == {*ExitCode}
    for code in ExitCode:
        assert told[code].startswith(code.name.lower().replace("_", " ")), code


def test_no_other_module_decides_the_code_of_an_error():
    """Commands exit with members of ``ExitCode``, and classes of errors inherit theirs."""
    offenders = []
    for module in modules():
        for node in module.nodes:
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "typer.Exit":
                numbers = [one for one in ast.walk(node) if isinstance(one, ast.Constant)]
                if any(type(one.value) is int and one.value for one in numbers):
                    offenders.append(f"{module}:{node.lineno}")
            elif isinstance(node, ast.ClassDef) and module.path != Path("config/errors.py"):
                given = [one.targets for one in node.body if isinstance(one, ast.Assign)]
                if "exit_code" in [ast.unparse(target) for targets in given for target in targets]:
                    offenders.append(f"{module}:{node.lineno}")
    assert not offenders


@pytest.mark.parametrize("command", ["attach", "collect", "export", "serve", "show", "status"])
@pytest.mark.parametrize("directory", ["nowhere", "empty"])
def test_a_wrong_run_directory_is_wrong_input(command, directory):
    done = CliRunner().invoke(app, [command, directory])
    assert done.exit_code == ExitCode.WRONG_INPUT, done.output


@pytest.mark.parametrize(
    "typed",
    [
        "stop nowhere",
        "rebalance nowhere",
        "rebalance nowhere --dry-run",
        "bench run nowhere",
        "eval nowhere right.yaml",
        "logs gpu-99",
        "logs gpu-99 --run nowhere",
        "logs gpu-99 --run run",
        "show run 99.9",
        "show run --step 999",
        "status",
        "run right.yaml --resume nowhere",
        "ps",
        "ps nowhere",
        "gc nowhere",
        "doctor nowhere.yaml",
        "setup nowhere.yaml",
        "explain nonsense",
        "help nonsense",
        "import x.txt",
        "import right.yaml",
        "import nowhere.yaml",
        "init -o right.yaml",
        "init -o nowhere/x.yaml",
        "init gpu-[03-01]",
        "init --model no/such",
        "tasks check nowhere",
        "tasks check right.yaml",
        "bench --trace nowhere",
        *(f"run --dry-run {name}" for name in WRONG),
        "run --dry-run right.yaml --nonsense",
        "nonsense",
    ],
)
def test_what_is_wrong_with_what_was_typed_is_wrong_input(typed):
    done = CliRunner().invoke(app, typed.split())
    assert done.exit_code == ExitCode.WRONG_INPUT, done.output
    assert "\nnext: " in done.output or "Usage: " in done.output
