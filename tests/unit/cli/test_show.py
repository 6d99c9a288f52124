"""libra show, as a user sees it."""

from __future__ import annotations

import json
import shutil
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from libra_cli.cli.main import app
from libra_cli.node.model.tokenizer import build_tokenizer, encode
from libra_cli.report.trajectories.choice import find, step_to_show, trained_in
from libra_cli.runtime.store.journal import Journal
from libra_cli.runtime.store.reader import Reader
from libra_cli.runtime.store.run_directory import RECIPE
from libra_cli.runtime.store.schema import DATABASE
from libra_cli.runtime.store.token_file import TOKENS
from tests.played import trajectory, write_played
from tests.sample_run import START, run_record

OLD = Path(__file__).parents[2] / "fixtures/0.1.0"


def libra(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["show", *arguments], env={"COLUMNS": "80", "NO_COLOR": "1"})
    assert done.exit_code in (0, 1, 2), done.output
    return done.output


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_played(tmp_path_factory.mktemp("show") / "runs/quickstart-1")


def test_without_a_trajectory_those_of_the_newest_step_are_listed(run_dir: Path) -> None:
    shown = libra(str(run_dir))
    assert "step 41  3 trajectories" in shown
    assert "9000.0" in shown
    assert "9001.1" in shown, "a late one is the step's that trained it"
    assert "9001.0" not in shown
    assert f"libra show {run_dir} 9000.0" in shown.replace("\n", ""), "what to type next"


def test_no_line_is_wider_than_the_terminal(run_dir: Path) -> None:
    for more in ((), ("9000.1",), ("--longest", "--color", "version"), ("--step", "3")):
        assert max(map(len, libra(str(run_dir), *more).splitlines())) <= 80


def test_a_trajectory_is_shown_as_a_conversation(run_dir: Path) -> None:
    shown = libra(str(run_dir), "9000.1")
    lines = [line.strip() for line in shown.splitlines()]
    assert lines.index("user") < lines.index("tool")
    assert "look<|im_end|>" in lines
    assert "trained in step 41" in shown
    assert "+0.5 over its group" in shown


def test_what_a_tool_wrote_cannot_command_the_terminal(run_dir: Path) -> None:
    shown = libra(str(run_dir), "9000.1")
    assert "\\x1b]0;owned\\x07\\u202e<script>" in shown
    assert not {"\x1b", "\x07", "\u202e"} & set(shown)


def test_the_best_worst_and_longest_of_a_step_are_found(run_dir: Path) -> None:
    assert "trajectory 9000.0" in libra(str(run_dir), "--worst")
    assert "trajectory 9000.1" in libra(str(run_dir), "--best")
    assert "trajectory 9000.1" in libra(str(run_dir), "--longest", "--step", "41")


@pytest.mark.parametrize(
    ("reward", "said"),
    [(0.0, "the same reward, 0"), (1.0, "the same reward, 1"), (None, "no reward")],
)
def test_none_is_the_best_where_all_are_alike(
    run_dir: Path, tmp_path: Path, reward: float | None, said: str
) -> None:
    alike = shutil.copytree(run_dir, tmp_path / "run")
    with closing(sqlite3.connect(alike / DATABASE)) as connection:
        connection.execute("UPDATE trajectories SET reward = ?", (reward,))
        connection.commit()
    for ranking in ("best", "worst"):
        shown = " ".join(libra(str(alike), f"--{ranking}").split())
        assert f"all 3 trajectories of step 41 have {said}: none is the {ranking}" in shown
        assert f"next: libra show {alike} --step 41 lists them" in shown
    assert "trajectory 9000.1" in libra(str(alike), "--longest")
    assert "--longest --color version" in libra(str(alike))


def test_the_only_trajectory_is_the_best_and_the_worst(tmp_path: Path) -> None:
    with Journal(tmp_path / "run") as journal:
        journal.save(run_record())
        journal.save(trajectory(1, 0))
    assert "trajectory 1.0" in libra(str(tmp_path / "run"), "--best")


def test_versions_stand_in_the_text_where_there_are_no_colours(run_dir: Path) -> None:
    shown = libra(str(run_dir), "9000.0", "--color", "version")
    assert "{v1: look<|im_end|>}" in shown
    assert "{v3: cd<|im_end|>}" in shown
    assert "version: {v1: ...}  {v3: ...}" in shown


def test_tokens_are_told_apart_by_what_they_were_weighed_by(run_dir: Path) -> None:
    shown = libra(str(run_dir), "9000.0", "--color", "advantage")
    assert "{-0.50: look<|im_end|>}" in shown
    assert "advantage -0.5" in shown


def test_improbable_tokens_are_told(run_dir: Path) -> None:
    shown = libra(str(run_dir), "9000.0", "--color", "logprob")
    assert "{<50%: look<|im_end|>}" in shown
    assert "{<10%: cd<|im_end|>}" in shown


def test_tokens_are_told_apart_by_how_far_the_trainer_had_moved(run_dir: Path) -> None:
    shown = libra(str(run_dir), "9000.0", "--color", "ratio")
    assert "{<0.5: l}o{>1.25: o}{>2: k}{not trained: <|im_end|>}" in shown
    assert "cd<|im_end|>" in shown.splitlines()[-2], "a ratio next to 1 has no mark"
    legend = "ratio: {<0.5: ...} {<0.8: ...} {>1.25: ...} {>2: ...} {not trained: ...}"
    assert legend in " ".join(shown.split())


def without_ratios(run_dir: Path, made: Path) -> Path:
    """The run as a libra has left it that kept none, or whose trainer told none."""
    copied = shutil.copytree(run_dir, made)
    with closing(sqlite3.connect(copied / DATABASE)) as connection:
        connection.execute("ALTER TABLE credits DROP COLUMN log_ratios_at")
        connection.commit()
    return copied


def test_a_run_that_kept_no_ratios_says_so_and_shows_the_rest(
    run_dir: Path, tmp_path: Path
) -> None:
    old = without_ratios(run_dir, tmp_path / "old-1")
    told = " ".join(libra(str(old), "9000.0", "--color", "ratio").split())
    assert "old-1 kept no ratio of trajectory 9000.0.0: an older libra trained it" in told
    assert "--color version is always known" in told
    assert "{-0.50: look<|im_end|>}" in libra(str(old), "9000.0", "--color", "advantage")
    assert "Its tokens were not kept." in libra(str(OLD), "--longest", "--color", "ratio")


def test_a_run_that_was_copied_without_its_tokens_says_that_they_are_not_there(
    run_dir: Path, tmp_path: Path
) -> None:
    copied = shutil.copytree(run_dir, tmp_path / "run")
    (copied / TOKENS).unlink()
    assert "Its tokens were not kept." in libra(str(copied), "9000.0")
    assert "Its tokens were not kept." in libra(str(copied), "9000.0", "--color", "ratio")


@pytest.mark.parametrize(
    ("recipe", "told"),
    [
        (
            {"training": {"loss": "sft"}, "demonstrations": {"path": "d.jsonl"}, "environment": {}},
            "imitates demonstrations",
        ),
        ({"rollout": {"overlong": {"mask": True}}}, "was left out of the loss: a limit cut it"),
    ],
)
def test_what_has_no_ratio_by_its_recipe_is_said_so(
    run_dir: Path, tmp_path: Path, recipe: dict[str, dict[str, object]], told: str
) -> None:
    other = without_ratios(run_dir, tmp_path / "run")
    document = json.loads((other / RECIPE).read_text())
    (other / RECIPE).write_text(json.dumps(document | recipe))
    with closing(sqlite3.connect(other / DATABASE)) as connection:
        connection.execute("UPDATE trajectories SET truncated = 1")
        connection.commit()
    shown = " ".join(libra(str(other), "9000.0", "--color", "ratio").split())
    assert told in shown


def test_a_trajectory_that_no_step_has_trained_has_no_ratio(tmp_path: Path) -> None:
    made = write_played(tmp_path / "run")
    with Journal(made) as journal:
        journal.save(trajectory(9002, 0))
    shown = " ".join(libra(str(made), "9002.0", "--color", "ratio").split())
    assert "no step has trained trajectory 9002.0.0" in shown


def test_an_attempt_that_was_too_old_is_shown_and_was_trained_by_no_step(tmp_path: Path) -> None:
    made = write_played(tmp_path / "run")
    with Journal(made) as journal:  # its group is played again under the same number
        journal.save(trajectory(9000, 1, attempt=1, reward=3.0, ended_at=START + 2))
    with Reader(made) as reader:
        first, again = find(reader, "9000.1.0"), find(reader, "9000.1")
        assert [one.id for one in trained_in(reader, 41)][:2] == [(9000, 0, 0), (9000, 1, 1)]
        assert (9000, 1, 0) not in [one.id for one in trained_in(reader, None)]
    assert (first.step, first.reward, first.over_group) == (None, 1.0, -0.5)
    assert (again.step, again.reward, again.over_group) == (41, 3.0, 1.5)
    assert "finished, not trained" in libra(str(made), "9000.1.0")


def test_a_member_whose_replay_failed_was_trained_by_no_step(tmp_path: Path) -> None:
    made = write_played(tmp_path / "run")
    with Journal(made) as journal:
        journal.save(trajectory(9000, 1, attempt=1, state="failed", reward=None))
    with Reader(made) as reader:
        played = trained_in(reader, 41)
        listed = {
            (row.group_id, row.member, row.attempt): row.step for row in reader.trajectories()
        }
        assert {one.id for one in played} == {who for who, step in listed.items() if step == 41}
        assert [one.over_group for one in played if one.id == (9000, 0, 0)] == [0.0]
        assert [find(reader, name).step for name in ("9000.1.0", "9000.1")] == [None, None]


def test_the_newest_run_is_shown_where_none_is_named(run_dir: Path, monkeypatch) -> None:
    monkeypatch.chdir(run_dir.parents[1])
    assert "trajectory 9000.1" in libra("9000.1")


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (("12",), "names no trajectory"),
        (("99999999999999999999.1",), "names no trajectory"),
        (("99999.1",), "has no trajectory 99999.1"),
        (("9000.2",), "is still played"),
        (("--step", "99"), "has no step 99: it has taken 1 to 41"),
        (("9000.1", "--worst"), "is named"),
        (("--worst", "--best"), "are two trajectories"),
        (("--color", "version"), "is for the tokens of one trajectory"),
        (("9000.1", "--color", "advantage"), "nothing was kept of this trajectory"),
    ],
)
def test_what_cannot_be_shown_is_said(run_dir: Path, asked: tuple[str, ...], told: str) -> None:
    assert told in " ".join(libra(str(run_dir), *asked).split())


def test_without_a_tokenizer_the_ids_are_shown_and_what_is_missing(
    run_dir: Path, tmp_path: Path
) -> None:
    copied = shutil.copytree(run_dir, tmp_path / "run")
    (copied / "model/tokenizer.json").unlink()
    shown = " ".join(libra(str(copied), "9000.1").split())
    assert "there is no tokenizer" in shown
    assert "copy the tokenizer.json of the run's model to" in shown
    assert str(encode(build_tokenizer(), "look<|im_end|>")[0]) in shown


def test_a_run_without_steps_shows_what_has_ended(tmp_path: Path) -> None:
    with Journal(tmp_path / "run") as journal:
        journal.save(run_record())
        journal.save(trajectory(1, 0))
    assert "not trained yet  1 trajectories" in libra(str(tmp_path / "run"))


def test_a_run_of_the_first_version_is_shown() -> None:
    assert "777.0" in libra(str(OLD))
    assert "trained in step 49" in libra(str(OLD), "--longest")


def test_every_trajectory_is_of_the_one_step_that_trained_it(run_dir: Path) -> None:
    with Reader(run_dir) as reader:
        assert step_to_show(reader, None) == 41
        counted = [len(trained_in(reader, step.step)) for step in reader.steps()]
        assert sum(counted) == reader.trajectory_counts().trained


def test_whose_conversation_a_branch_is_stands_over_it(tmp_path: Path) -> None:
    made = write_played(tmp_path / "runs" / "quickstart-1")
    (said,) = trajectory(9100, 0).tokens
    both = (replace(said, number=1), said)
    with Journal(made) as journal:
        journal.save(trajectory(9100, 0, tokens=both, roles_json='["buyer", "seller"]'))
    lines = libra(str(made), "9100.0").splitlines()
    assert [line for line in lines if "branch" in line] == [
        "buyer, branch 1 of 2",
        "seller, branch 2 of 2",
    ]
