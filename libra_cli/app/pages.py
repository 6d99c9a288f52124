"""The pages of ``libra help``: Markdown files that come with the package, in ``libra_cli/help``."""

from __future__ import annotations

import difflib
import re
from importlib.resources import files

from libra_cli.config.errors import InputError


def pages() -> dict[str, str]:
    """Return the text of every page by its topic, in alphabetical order."""
    found = files("libra_cli").joinpath("help").iterdir()
    return {
        page.name.removesuffix(".md"): page.read_text(encoding="utf-8")
        for page in sorted(found, key=lambda page: page.name)
        if page.name.endswith(".md")
    }


def title_of(page: str) -> str:
    """Return the heading of a page, its first line."""
    return page.partition("\n")[0].lstrip("# ").strip()


def for_terminal(page: str) -> str:
    """Return a page without relative links: another page's becomes the command that shows it, and a
    picture the path of its file in this installation, which a browser opens.
    """
    page = re.sub(r"!\[([^]\n]+)\]\((?!https?:)([^)\n]+)\)", _picture, page)
    named = re.sub(r"\[[^]\n]+\]\(([\w-]+)\.md\)", r"`libra help \1`", page)
    return re.sub(r"\[([^]\n]+)\]\((?!https?:)[^)\n]+\)", r"\1", named)


def _picture(found: re.Match[str]) -> str:
    return f"Picture: {found[1]} (`{files('libra_cli').joinpath('help', found[2])}`)"


def page_of(topic: str) -> str:
    """Return the page of a topic.

    Raises:
        InputError: there is no such page; the hint names the nearest topic.
    """
    known = pages()
    if topic in known:
        return known[topic]
    near = difflib.get_close_matches(topic, known, n=1, cutoff=0.4)
    hint = f"did you mean libra help {near[0]}?" if near else "libra help lists the topics"
    raise InputError(f"libra help has no page {topic!r}", hint=hint)
