"""The pages at the top of the repository name commands, targets and files that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer
import yaml

from libra_cli.cli.main import app

CHECKOUT = Path(__file__).parents[3]
TEMPLATES = sorted((CHECKOUT / ".github/ISSUE_TEMPLATE").glob("*.yml"))
PAGES = [CHECKOUT / name for name in ("AGENTS.md", "CONTRIBUTING.md")]
COMMANDS = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


@pytest.mark.parametrize("page", [*PAGES, *TEMPLATES], ids=lambda path: path.name)
def test_a_page_names_commands_that_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = re.findall(r"(?:^|`)libra ([a-z]+)", text, re.MULTILINE)
    assert set(named) <= COMMANDS
    targets = re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE)
    assert all(f"\n{one}:" in (CHECKOUT / "Makefile").read_text() for one in targets)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_a_page_links_and_names_files_that_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = re.findall(r"\]\(([^):]+)\)", text) + re.findall(
        r"`((?:tests|libra_cli)/[\w/.]+)`", text
    )
    assert named
    assert [one for one in named if not (CHECKOUT / one).exists()] == []


def test_reports_of_bugs_ask_for_what_libra_collect_packs() -> None:
    forms = {path.stem: yaml.safe_load(path.read_text(encoding="utf-8")) for path in TEMPLATES}
    assert {"bug", "question"} <= set(forms)
    assert "libra collect RUN_DIR" in str(forms["bug"]["body"])
    for name in ("bug", "question"):
        ids = [part["id"] for part in forms[name]["body"]]
        assert len(ids) == len(set(ids))


def test_the_citation_names_the_papers_of_the_page_about_them() -> None:
    citation = yaml.safe_load((CHECKOUT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["authors"] == [{"name": "The libra authors"}]
    pages = "".join(
        (CHECKOUT / "libra_cli/help" / name).read_text() for name in ("paper.md", "advantages.md")
    )
    for reference in citation["references"]:
        assert f"arXiv {reference['url'].rpartition('/')[2]}" in pages
