"""Run recipes that need no GPU, keep what came, and make the page of the gallery from it.

    make gallery [ONLY="quickstart agent"] [AGAIN=1]

``tests.made_page`` says what its command takes. What runs leave is in ``build/gallery``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tests.gallery import facts as kept
from tests.gallery.entries import CHECKOUT, ENTRIES
from tests.gallery.page import files
from tests.gallery.play import play
from tests.made_page import MadePage, say

WORK = CHECKOUT / "build" / "gallery"


def made(name: str) -> str:
    """Run an entry and keep its facts."""
    WORK.mkdir(parents=True, exist_ok=True)
    facts = play(ENTRIES[name], WORK, say)
    path = kept.write(facts)
    return f"{facts.seconds.whole:.0f} s, {path.relative_to(CHECKOUT)}"


def commit_of(name: str) -> str | None:
    """Return the commit of the code that an entry was run with."""
    facts = kept.read(name)
    return facts.machine.commit if facts else None


def texts() -> Mapping[Path, str]:
    """Return the page and its pictures, from all facts that there are."""
    return files([one for name in ENTRIES if (one := kept.read(name)) is not None])


GALLERY = MadePage("tests.gallery", ENTRIES, commit_of, made, texts)

if __name__ == "__main__":
    GALLERY.main()
