"""The page of the gallery is what its facts make, and its facts are those of recipes that exist."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from pydantic import ValidationError

from tests import made_page
from tests.gallery import __main__ as command
from tests.gallery import facts as kept
from tests.gallery.entries import CHECKOUT, ENTRIES, RECIPES, Entry
from tests.gallery.facts import FOLDER, Facts
from tests.gallery.page import ends, files, needs, page
from tests.gallery.picture import picture
from tests.made_page import EntryFailed, MadePage
from tests.played import HOSTILE

LARGEST = 20_000
"""Bytes of a file of facts."""


# -- the page that ships ---------------------------------------------------------------------------


def shipped() -> list[Facts]:
    return [one for name in ENTRIES if (one := kept.read(name)) is not None]


@pytest.mark.parametrize("path", files(shipped()), ids=lambda path: path.name)
def test_page_and_pictures_are_what_the_facts_make(path: Path) -> None:
    assert path.read_text(encoding="utf-8") == files(shipped())[path], "make gallery ONLY=--draw"


def test_every_file_of_the_gallery_is_of_an_entry_with_a_recipe() -> None:
    assert [path.name for path in FOLDER.glob("*") if path.stem not in ENTRIES] == []
    assert [
        path.name for path in FOLDER.glob("*.svg") if not path.with_suffix(".json").exists()
    ] == []
    assert [entry.name for entry in ENTRIES.values() if not entry.recipe.is_file()] == []


def test_facts_are_small() -> None:
    sizes = {path.name: path.stat().st_size for path in FOLDER.glob("*.json")}
    assert {name: size for name, size in sizes.items() if size > LARGEST} == {}


def test_a_recipe_is_run_here_or_needs_a_gpu() -> None:
    neither = [
        name for name, words in needs().items() if name not in ENTRIES and "GPU" not in words
    ]
    both = [name for name, words in needs().items() if name in ENTRIES and "GPU" in words]
    assert (neither, both) == ([], [])


def test_what_an_entry_names_exists() -> None:
    for entry in ENTRIES.values():
        assert not entry.needs or ENTRIES[entry.needs].exports_to in entry.recipe.read_text()
        assert not entry.examined_by or (RECIPES / f"{entry.examined_by}.yaml").is_file()


def test_the_first_page_says_of_its_pictures_what_their_facts_say() -> None:
    readme = (CHECKOUT / "README.md").read_text(encoding="utf-8")
    said = re.findall(
        r"from ([\d.]+) to ([\d.]+) in \d+ steps\]\([^)]*gallery/([\w-]+)\.svg", readme
    )
    known = {one.name: tuple(f"{mean:.2f}" for mean in ends(one)) for one in shipped()}
    assert {name: (first, last) for first, last, name in said} == {
        name: known[name] for _, _, name in said
    }, "README.md tells of another run: write what gallery.md says"


# -- facts of a run --------------------------------------------------------------------------------


def test_facts_are_those_of_the_run(facts: Facts, tmp_path: Path) -> None:
    assert len(facts.curve.values) == len(facts.curve.ended_at) == 41
    assert facts.curve.values[-1] == 0.5
    assert facts.trajectories[-1].step == 41
    assert [part.role for part in facts.trajectories[-1].messages][:2] == ["user", "assistant"]
    kept.write(facts, tmp_path)
    assert kept.read("quickstart", tmp_path) == facts
    assert kept.read("agent", tmp_path) is None


def test_facts_of_another_form_are_refused(facts: Facts, tmp_path: Path) -> None:
    path = kept.write(facts, tmp_path)
    path.write_text(json.dumps({**json.loads(path.read_text()), "seconds": 1}))
    with pytest.raises(ValidationError):
        kept.read("quickstart", tmp_path)


def test_a_page_tells_numbers_machine_and_trajectories(facts: Facts) -> None:
    text = page([facts])
    assert "187 s" in text
    assert "2 cores of Xeon, 24 GiB, no GPU; load 0.5 before it began" in text
    assert "0.50 [0.40, 0.60] after" in text
    assert "user: start ab" in text
    assert "\x1b" not in text
    assert HOSTILE not in text
    assert text.count("```") % 2 == 0


def test_other_work_on_the_machine_is_told(facts: Facts) -> None:
    busy = facts.model_copy(update={"machine": facts.machine.model_copy(update={"load": 3.25})})
    assert "measured on a machine with other work (load 3.25)" in page([busy])


def test_demonstrations_have_no_reward_and_were_not_generated(facts: Facts) -> None:
    curve = facts.curve.model_copy(update={"metric": "train/token_accuracy"})
    text = page([facts.model_copy(update={"curve": curve})])
    assert "A demonstration of step 41:\n" in text
    assert "imitated tokens/s" in text
    assert "A trajectory of step 41, reward 1:\n" in page([facts])


def test_a_picture_has_a_curve_and_is_readable_by_itself(facts: Facts) -> None:
    root = ElementTree.fromstring(picture(facts))
    space = "{http://www.w3.org/2000/svg}"
    assert root.attrib["viewBox"].split()[2] == "400"
    strokes = [path.get("stroke") for path in root.iter(f"{space}path")]
    assert strokes.count("var(--a)") == 2, "points and a line"
    style = root.find(f"{space}style")
    assert style is not None
    assert "prefers-color-scheme: dark" in (style.text or "")


def test_curves_of_further_seeds_are_drawn_and_told(facts: Facts) -> None:
    lower = facts.curve.model_copy(update={"values": [0.25] * 40 + [0.75]})
    several = facts.model_copy(update={"further": {7: lower}})
    assert Facts.model_validate_json(several.model_dump_json()) == several
    assert "| with seed 7 | 0.25 → 0.35: " in page([several])
    assert "with seed" not in page([facts])
    assert "dashed: seeds 7" in picture(several)
    assert picture(several).count("<path") == picture(facts).count("<path") + 1


def test_an_evaluation_is_drawn_with_its_interval(facts: Facts) -> None:
    evaluated = facts.model_copy(update={"evaluations": [facts.exported, facts.exported]})
    assert picture(evaluated).count('fill="var(--b)"') > picture(facts).count('fill="var(--b)"')


# -- the command -----------------------------------------------------------------------------------


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A gallery in a folder of its own, of code that was committed as ``abc``."""
    monkeypatch.setattr(command, "WORK", tmp_path / "work")
    monkeypatch.setattr(command, "CHECKOUT", tmp_path)
    monkeypatch.setattr(made_page, "commit", lambda: "abc")
    monkeypatch.setattr(made_page, "SETTLE_S", 0.0)
    monkeypatch.setattr(MadePage, "draw", lambda self: None)
    monkeypatch.setattr(kept, "path_of", lambda name, folder=None: tmp_path / f"{name}.json")
    return tmp_path


def test_one_that_fails_is_told_and_does_not_stop_the_others(
    work: Path, facts: Facts, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    played = []

    def play(entry: Entry, root: Path, say: object) -> Facts:
        played.append(entry.name)
        if entry.name == "quickstart":
            raise EntryFailed("libra run recipes/quickstart.yaml ended with 1")
        return facts.model_copy(update={"name": entry.name})

    monkeypatch.setattr(command, "play", play)
    monkeypatch.setattr(sys, "argv", ["gallery", "agent", "quickstart"])
    with pytest.raises(SystemExit, match="failed: quickstart"):
        command.GALLERY.main()
    assert played == ["quickstart", "agent"]
    assert "quickstart: libra run recipes/quickstart.yaml ended with 1" in capsys.readouterr().out
    assert (work / "agent.json").is_file()

    with pytest.raises(SystemExit):
        command.GALLERY.main()
    assert played == ["quickstart", "agent", "quickstart"], "what is fresh is not run again"


def test_facts_of_other_code_are_not_fresh(
    work: Path, facts: Facts, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not command.GALLERY.is_fresh("quickstart")
    kept.write(facts)
    assert command.GALLERY.is_fresh("quickstart")
    for now in ("def", "abc+"):
        monkeypatch.setattr(made_page, "commit", lambda now=now: now)
        assert not command.GALLERY.is_fresh("quickstart")
