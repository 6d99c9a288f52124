"""The site that ``make site`` builds: every page is in its menu, and every link leads to a file."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from tests.site import HELP, menu, write_site


def test_every_page_is_in_the_menu_once() -> None:
    pages = [name for heading in menu() for names in heading.values() for name in names]
    nested = [name for name in pages if len(name) > 1]
    assert sorted(nested) == sorted(path.name for path in HELP.glob("*.md"))


def test_every_link_leads_to_a_file(tmp_path: Path) -> None:
    write_site(tmp_path / "pages")
    docs = tmp_path / "pages/docs"
    config = yaml.safe_load((tmp_path / "pages/mkdocs.yml").read_text())
    assert config["nav"][0] == {"libra": "index.md"}
    for page in docs.rglob("*.md"):
        targets = re.findall(r"\]\((?!\w+:|#)([^)#\s]+)", page.read_text())
        assert [one for one in targets if not (page.parent / one).is_file()] == [], page.name
