"""The pages of ``libra help`` as a web site, with the README as its first page.

    python -m tests.site build/pages && uvx zensical build -f build/pages/mkdocs.yml    (make site)

Pages stay as they are, but for links to other files of the repository, which lead to pages that
show these. The menu is the table of all pages in ``help/start.md``.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
HELP = ROOT / "libra_cli/help"
CONFIG = ROOT / "templates/site.yml"
_LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)")
_ROW = re.compile(r"^\| ([^|]+) \| (.*\]\(\w+\.md\).*) \|$", re.MULTILINE)
_LANGUAGES = {".py": "python", ".yaml": "yaml"}


def menu() -> Iterator[dict[str, list[str] | str]]:
    """Yield the headings of the menu, with the pages under each."""
    yield {"libra": "index.md"}
    table = (HELP / "start.md").read_text(encoding="utf-8").partition("\n## All pages\n")[2]
    for heading, pages in _ROW.findall(table):
        names = re.findall(r"\(([\w-]+\.md)\)", pages)
        first = ["start.md"] if heading == "first steps" else []
        yield {heading.capitalize(): first + names}


def write_site(out: Path) -> None:
    """Write the pages, what they show and link to, and mkdocs.yml into a new directory.

    Raises:
        FileExistsError: the directory is there already.
        FileNotFoundError: a page links to a file that does not exist.
    """
    docs = out / "docs"
    docs.mkdir(parents=True)
    for path in sorted(HELP.iterdir()):
        if path.is_dir():
            shutil.copytree(path, docs / path.name)
        elif path.suffix != ".md":
            shutil.copy(path, docs)
    for path in (ROOT / "README.md", *sorted(HELP.glob("*.md"))):
        name = "index.md" if path.name == "README.md" else path.name
        _write(path, docs / name, docs)
    config = yaml.safe_load(CONFIG.read_text(encoding="utf-8")) | {"nav": list(menu())}
    (out / "mkdocs.yml").write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")


def _write(source: Path, page: Path, docs: Path) -> None:
    """Write a page whose links lead to other pages of the site."""

    def found(match: re.Match[str]) -> str:
        target = (source.parent / match[1]).resolve(strict=True)
        if target == ROOT / "README.md":
            there = docs / "index.md"
        elif target.is_relative_to(HELP):
            there = docs / target.relative_to(HELP)
        else:
            there = _shown(target, docs)
        return os.path.relpath(there, page.parent)

    page.write_text(_LINK.sub(found, source.read_text(encoding="utf-8")), encoding="utf-8")


def _shown(target: Path, docs: Path) -> Path:
    """Return the page that shows a file of the repository, which is made the first time."""
    name = str(target.relative_to(ROOT))
    page = docs / (name if target.suffix == ".md" else f"{name}.md")
    if page.exists():
        return page
    page.parent.mkdir(parents=True, exist_ok=True)
    if target.suffix == ".md":
        page.touch()
        _write(target, page, docs)
    else:
        text = target.read_text(encoding="utf-8")
        language = _LANGUAGES.get(target.suffix, "")
        page.write_text(f"# {name}\n\n````{language}\n{text}````\n", encoding="utf-8")
    return page


if __name__ == "__main__":
    write_site(Path(sys.argv[1]))
