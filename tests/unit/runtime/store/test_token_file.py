"""Tokens are read as they were written, and only where a row says that they lie."""

from __future__ import annotations

import json
import os
import sqlite3
import stat
import struct
import zlib
from array import array
from contextlib import closing
from dataclasses import replace
from math import isnan
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra_cli.config.errors import StateError
from libra_cli.core.records import CreditRecord, TrajectoryRecord
from libra_cli.core.types import BranchTokens
from libra_cli.runtime.store import journal as journals
from libra_cli.runtime.store.journal import Journal
from libra_cli.runtime.store.reader import Reader
from libra_cli.runtime.store.schema import DATABASE
from libra_cli.runtime.store.token_file import TOKENS, TokenFile, packed, read_tokens
from tests import sample_run
from tests.sample_run import branch

ROW = next(
    record
    for _, record in sample_run.records(steps=1)
    if isinstance(record, TrajectoryRecord) and record.state == "finished"
)
KEY = (ROW.group_id, ROW.member, ROW.attempt)
TWO = (branch(range(9), (3, 2, 5)), branch([7, 300_000], (3, 0, 1), (4, 1, 2), number=1))


@st.composite
def branches(draw: st.DrawFn) -> BranchTokens:
    ids = draw(st.lists(st.integers(0, 2**31 - 1), max_size=40))
    cuts = sorted(draw(st.sets(st.integers(0, len(ids)), max_size=6)))
    pairs = list(zip(cuts[::2], cuts[1::2], strict=False))
    spans = [(draw(st.integers(0, 10**6)), start, end) for start, end in pairs]
    made = branch(ids, *spans, number=draw(st.integers(0, 9)))
    floats = st.floats(-50, 0, width=32)
    said = [draw(floats) if one else 0.0 for one in made.loss_mask]
    return replace(made, logprobs=array("f", said))


@given(st.lists(st.lists(branches(), min_size=1, max_size=3).map(tuple), max_size=4))
def test_what_is_read_equals_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, told: list[tuple[BranchTokens, ...]]
) -> None:
    run_dir = tmp_path_factory.mktemp("run")
    for some in (told[:2], told[2:]):  # the second controller of the run goes on in the file
        file = TokenFile(run_dir)
        assert [read_tokens(run_dir, place) for place in file.append(map(packed, some))] == some
        file.close()


def saved(run_dir: Path, *tokens: tuple[BranchTokens, ...]) -> None:
    with Journal(run_dir, flush_s=60.0) as journal:
        for branches in tokens:
            journal.save(replace(ROW, tokens=branches))
            journal.flush()


def test_a_row_of_the_database_has_no_tokens_and_says_where_they_are(tmp_path: Path) -> None:
    saved(tmp_path, TWO)
    with Reader(tmp_path) as reader:
        assert reader.tokens(*KEY) == TWO
        assert reader.token_ids(*KEY) == [list(range(9)), [7, 300_000]]
        assert reader.tokens(99, 0, 0) == ()
    with closing(sqlite3.connect(tmp_path / DATABASE)) as connection:
        ((row,),) = connection.execute("SELECT tokens_at FROM trajectories").fetchall()
    assert row == 0
    assert stat.S_IMODE((tmp_path / TOKENS).stat().st_mode) == 0o600


def test_what_a_trajectory_was_played_again_as_is_what_is_read(tmp_path: Path) -> None:
    saved(tmp_path, TWO, (branch([1, 2, 3]),))
    saved(tmp_path, (branch([4, 5]),))
    with Reader(tmp_path) as reader:
        assert reader.token_ids(*KEY) == [[4, 5]]


def test_tokens_that_cannot_be_written_wait_with_their_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with Journal(tmp_path, flush_s=60.0) as journal:
        journal.save(replace(ROW, tokens=TWO))
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", full)
            with pytest.raises(StateError, match="No space left"):
                journal.flush()
        monkeypatch.setattr(journals, "_insert", full)  # now they can be, and the row cannot
        with pytest.raises(StateError, match="No space left"):
            journal.flush()
        size = (tmp_path / TOKENS).stat().st_size
        monkeypatch.undo()
    assert (tmp_path / TOKENS).stat().st_size == size  # they were not written again
    with Reader(tmp_path) as reader:
        assert reader.tokens(*KEY) == TWO


@pytest.mark.parametrize("place", [0, 4, 9, -1])
def test_a_damaged_file_is_named_and_never_read_as_other_tokens(tmp_path: Path, place: int) -> None:
    saved(tmp_path, TWO)
    data = bytearray((tmp_path / TOKENS).read_bytes())
    data[place] ^= 1
    (tmp_path / TOKENS).write_bytes(data)
    with Reader(tmp_path) as reader, pytest.raises(StateError, match=r"tokens\.bin is damaged"):
        reader.tokens(*KEY)


def test_of_a_database_that_was_copied_without_its_file_there_are_no_tokens(tmp_path: Path) -> None:
    saved(tmp_path, TWO)
    (tmp_path / TOKENS).unlink()
    with Reader(tmp_path) as reader:
        assert reader.tokens(*KEY) == ()


def test_tokens_that_an_older_libra_kept_in_the_row_are_read_there(tmp_path: Path) -> None:
    saved(tmp_path, TWO)
    others = json.dumps([[0, [[3, 0, 2]], [5, 6, 7]]])
    with closing(sqlite3.connect(tmp_path / DATABASE)) as connection:
        connection.execute("ALTER TABLE trajectories DROP COLUMN tokens_at")
        connection.execute("ALTER TABLE trajectories ADD COLUMN token_ids_json TEXT")
        connection.execute(
            "UPDATE trajectories SET token_ids_json = '[8, 9]', spans_json = '[[4, 1, 2]]',"
            " branches_json = ?",
            (others,),
        )
        connection.commit()
    old = branch([5, 6, 7], (3, 0, 2)), branch([8, 9], (4, 1, 2), number=1)
    expected = tuple(replace(one, logprobs=array("f")) for one in old)
    with Reader(tmp_path) as reader:
        assert reader.tokens(*KEY) == expected
    saved(tmp_path, TWO)  # a later libra goes on in it, and migrates it
    with Reader(tmp_path) as reader:
        assert reader.tokens(*KEY) == TWO


CREDIT = CreditRecord(ROW.group_id, ROW.member, ROW.attempt, 3, "[]", "[]")
RATIOS = (struct.pack("<3e", 0.5, -2.0, float("inf")), b"", struct.pack("<1e", float("nan")))


def test_log_ratios_are_read_as_they_were_written_beside_the_tokens(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        journal.save(replace(ROW, tokens=TWO))
        journal.save(replace(CREDIT, log_ratios=RATIOS))
    with Reader(tmp_path) as reader:
        first, second, (third,) = reader.log_ratios(*KEY)
        assert (first, second) == ((0.5, -2.0, float("inf")), ())
        assert isnan(third)
        assert reader.tokens(*KEY) == TWO
        assert reader.log_ratios(99, 0, 0) == ()


def test_log_ratios_of_a_step_that_is_taken_again_stand_for_those_before(tmp_path: Path) -> None:
    for values in (RATIOS, (struct.pack("<2e", 1.0, 2.0),)):
        with Journal(tmp_path) as journal:
            journal.save(replace(CREDIT, log_ratios=values))
    with Reader(tmp_path) as reader:
        assert reader.log_ratios(*KEY) == ((1.0, 2.0),)


def test_an_older_libras_file_has_none_and_takes_them(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        journal.save(CREDIT)
    with closing(sqlite3.connect(tmp_path / DATABASE)) as connection:
        connection.execute("ALTER TABLE credits DROP COLUMN log_ratios_at")
        connection.commit()
    with Reader(tmp_path) as reader:
        assert reader.log_ratios(*KEY) == ()
    with Journal(tmp_path) as journal:
        journal.save(replace(CREDIT, log_ratios=RATIOS))
    with Reader(tmp_path) as reader:
        assert len(reader.log_ratios(*KEY)) == 3


def test_damaged_log_ratios_are_named(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        journal.save(replace(CREDIT, log_ratios=RATIOS))
    data = bytearray((tmp_path / TOKENS).read_bytes())
    data[-1] ^= 1
    (tmp_path / TOKENS).write_bytes(data)
    with Reader(tmp_path) as reader, pytest.raises(StateError, match=r"tokens\.bin is damaged"):
        reader.log_ratios(*KEY)


def test_tokens_take_fewer_bytes_than_their_text() -> None:
    random = Random(0)
    ids = [random.randrange(151_936) for _ in range(3000)]
    spans = [(7, at, at + 200) for at in range(100, 3000, 300)]
    assert len(packed([branch(ids, *spans)])) < len(zlib.compress(json.dumps(ids).encode(), 9))
