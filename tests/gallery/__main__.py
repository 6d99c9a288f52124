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
from tests.gallery.play import play, play_again
from tests.made_page import MadePage, say

WORK = CHECKOUT / "build" / "gallery"


def made(name: str) -> str:
    """Run an entry with each of its seeds, and keep its facts after each."""
    WORK.mkdir(parents=True, exist_ok=True)
    entry = ENTRIES[name]
    facts = play(entry, WORK, say)
    path = kept.write(facts)
    for seed in entry.further_seeds:
        further = {**facts.further, seed: play_again(entry, WORK, say, seed)}
        facts = facts.model_copy(update={"further": further})
        kept.write(facts)
    return f"{facts.seconds.whole:.0f} s, {path.relative_to(CHECKOUT)}"


def commit_of(name: str) -> str | None:
    """Return the commit of the code that an entry was run with, if that was with all its seeds."""
    facts = kept.read(name)
    is_whole = facts is not None and set(facts.further) == set(ENTRIES[name].further_seeds)
    return facts.machine.commit if facts is not None and is_whole else None


def texts() -> Mapping[Path, str]:
    """Return the page and its pictures, from all facts that there are."""
    return files([one for name in ENTRIES if (one := kept.read(name)) is not None])


GALLERY = MadePage("tests.gallery", ENTRIES, commit_of, made, texts)

if __name__ == "__main__":
    GALLERY.main()
