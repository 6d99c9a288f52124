"""The pages of ``libra help`` are found, lead to one another, and what they show works."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from rich.console import Console
from typer.testing import CliRunner

from libra_cli.app import pages
from libra_cli.cli.main import app
from libra_cli.cli.page_view import PageView
from libra_cli.config.errors import RecipeError
from libra_cli.config.recipe import Recipe
from libra_cli.runtime.monitors.protocol import MONITORS
from libra_cli.runtime.recipes.loader import load_recipe
from tests.sample_run import write_whole

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text(encoding="utf-8")
FOLDER = ROOT / "libra_cli/help"
TOPICS = [path.stem for path in sorted(FOLDER.glob("*.md"))]
REST: dict[str, Any] = {"nodes": [{"host": "local", "slots": 2}], "model": {"build": {}}}
NEEDS_A_FILE = ("there is no file", "there is no directory")


def snippets(topic: str, language: str) -> list[str]:
    text = README if topic == "README" else pages.page_of(topic)
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.M | re.S)


SHOWN = [(topic, text) for topic in ("README", *TOPICS) for text in snippets(topic, "yaml")]


@pytest.mark.parametrize(("topic", "text"), SHOWN, ids=[topic for topic, _ in SHOWN])
def test_every_recipe_shown_loads(topic, text, tmp_path):
    shown = yaml.safe_load(text)
    assert set(shown) <= set(Recipe.model_fields), f"{topic}: not a recipe, nor a part of one"
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump({**REST, **shown}))
    names = re.findall(r"\$\{(\w+)\}", text)
    assert problems(path, dict.fromkeys(names, "secret")) == []


def problems(path: Path, environ: dict[str, str]) -> list[str]:
    """What is wrong with a recipe, but for what lies on its user's disk."""
    try:
        load_recipe(path, environ)
    except RecipeError as error:
        told = str(error).splitlines()
        return [line for line in told if not any(words in line for words in NEEDS_A_FILE)]
    return []


def python_topics() -> Iterator[Any]:
    for topic in TOPICS:
        text = "".join(snippets(topic, "python"))
        needs_torch = re.search(r"import torch|pandas", text) is not None
        if text:
            yield pytest.param(topic, marks=[pytest.mark.vllm] if needs_torch else [])


@pytest.mark.parametrize("topic", list(python_topics()))
def test_every_python_snippet_shown_runs(topic, tmp_path, monkeypatch, capsys):
    write_whole(tmp_path / "runs" / "quickstart-1")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": topic}
    for text in snippets(topic, "python"):
        exec(compile(text, f"help/{topic}.md", "exec"), names)


def test_the_page_of_monitors_names_every_one_that_ships():
    text = pages.page_of("monitors")
    assert [name for name in MONITORS.shipped if f"| `{name}` |" not in text] == []


@pytest.mark.parametrize("topic", TOPICS)
def test_a_page_begins_with_its_title(topic):
    page = pages.page_of(topic)
    assert page.startswith(f"# {pages.title_of(page)}\n\n")
    assert 10 < len(pages.title_of(page)) < 80


@pytest.mark.parametrize("topic", TOPICS)
def test_links_lead_somewhere(topic):
    text = re.sub(r"```.*?```|`[^`\n]*`", "", pages.page_of(topic), flags=re.S)
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        if "://" not in target:
            assert (FOLDER / target).exists(), f"{topic}: {target}"


def test_the_list_has_every_topic_with_its_title():
    shown = CliRunner().invoke(app, ["help"]).output
    for topic in TOPICS:
        title = re.escape(pages.title_of(pages.page_of(topic)))
        assert re.search(rf"^{topic} +{title}$", shown, re.M)


def test_a_page_is_shown_as_it_is_where_nobody_looks():
    assert CliRunner().invoke(app, ["help", "models"]).output.startswith("# Models")


@pytest.mark.parametrize("topic", TOPICS)
def test_nothing_of_a_page_is_cut_off_in_a_narrow_terminal(topic):
    shown = io.StringIO()
    console = Console(width=80, file=shown)
    console.print(PageView(pages.page_of(topic)))
    assert shown.getvalue().count("…") == pages.page_of(topic).count("…")


def test_a_link_to_a_page_is_the_command_that_shows_it():
    page = "See [gyms](gyms.md), [judges](frozen-models.md) and [code](../core/a.py), https://a.b, [x](https://c.d)."
    shown = (
        "See `libra help gyms`, `libra help frozen-models` and code, https://a.b, [x](https://c.d)."
    )
    assert pages.for_terminal(page) == shown


def test_a_picture_is_the_path_of_its_file_in_a_terminal():
    (shown,) = re.findall(r"Picture: slots \(`(.*)`\)", pages.for_terminal("![slots](elastic.svg)"))
    assert Path(shown) == FOLDER / "elastic.svg"


def test_an_unknown_topic_names_the_nearest():
    result = CliRunner().invoke(app, ["help", "recipe"])
    assert result.exit_code == 2
    assert "libra help recipes" in result.output


def test_every_recipe_that_ships_is_on_the_page_of_recipes():
    text = pages.page_of("recipes")
    shipped = [path.name for path in sorted((ROOT / "recipes").glob("*.yaml"))]
    assert [name for name in shipped if f"recipes/{name})" not in text] == []


def test_every_command_is_on_the_page_of_commands():
    text = pages.page_of("commands")
    names = list(typer.main.get_group(app).commands)
    assert [name for name in names if f"`libra {name}" not in text] == []


def test_every_page_is_on_the_first_one():
    text = pages.page_of("start")
    assert [topic for topic in TOPICS if f"({topic}.md" not in text and topic != "start"] == []


def test_the_readme_is_short_and_its_links_lead_somewhere():
    assert len(README.splitlines()) <= 120
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", README)
    assert [one for one in targets if "://" not in one and not (ROOT / one).exists()] == []
