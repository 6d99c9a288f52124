"""Reading tasks in the formats people have, and which of them a group gets."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import duckdb
import pytest

from libra_cli.config.environment import EnvironmentSpec, TaskSourceSpec
from libra_cli.config.errors import EnvironmentBroken
from libra_cli.runtime.tasks import parquet
from libra_cli.runtime.tasks.mixture import Tasks, tasks_of

VERL_ROWS = [
    {
        "data_source": "openai/gsm8k",
        "prompt": [{"content": f"What is {n} + {n}? Ünd …", "role": "user"}],
        "ability": "math",
        "reward_model": {"ground_truth": str(2 * n), "style": "rule"},
        "extra_info": {"answer": None, "index": n, "question": f"{n} + {n}", "split": "train"},
    }
    for n in range(3000)
]
TRL_ROWS = [
    {"prompt": [{"content": "1 + 1?", "role": "user"}], "solution": "\\frac{4}{2}"},
    {"prompt": [{"content": "1 + 2?", "role": "user"}], "solution": "3"},
]


def tasks(path: Path, **more: Any) -> Tasks:
    return Tasks([TaskSourceSpec(path=str(path), **more)])


def read(path: Path, **more: Any) -> list[dict[str, Any]]:
    source = tasks(path, **more)
    return [source.at(index, 0) for index in range(len(source))]


def write(path: Path, rows: list[Any]) -> Path:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode(), mtime=0))
    else:
        path.write_text(text if path.suffix == ".jsonl" else json.dumps(rows))
    return path


def write_parquet(path: Path, rows: list[Any]) -> Path:
    lines = write(path.with_suffix(".jsonl"), rows)
    with duckdb.connect() as connection:
        connection.execute(f"COPY (FROM read_json('{lines}')) TO '{path}'")
    return path


@pytest.fixture
def only_duckdb(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "find_spec", lambda name: name == "duckdb" or None)


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz", "t.json"])
def test_rows_are_read_from_json_of_every_kind(tmp_path, name):
    rows = [{"question": f"q\u2028{n}", "answer": n} for n in range(5)]
    assert read(write(tmp_path / name, rows)) == rows


def test_a_json_file_may_hold_lines_or_splits(tmp_path):
    lines = tmp_path / "lines.json"
    lines.write_text('{"n": 1}\n{"n": 2}\n')
    assert read(lines) == [{"n": 1}, {"n": 2}]
    splits = tmp_path / "splits.json"
    splits.write_text('{"train": [{"n": 1}], "test": [{"n": 2}]}')
    assert read(splits, split="test") == [{"n": 2}]
    with pytest.raises(EnvironmentBroken, match=r"splits.json: holds the splits test, train") as no:
        read(splits)
    assert no.value.hint == "environment: {tasks: {path: splits.json, split: train}}"


def test_verls_and_trls_parquet_are_read_with_duckdb(tmp_path, only_duckdb):
    assert read(write_parquet(tmp_path / "verl.parquet", VERL_ROWS)) == VERL_ROWS
    assert read(write_parquet(tmp_path / "trl.parquet", TRL_ROWS)) == TRL_ROWS


def test_what_json_lacks_is_written_as_text_or_refused_by_row(tmp_path, only_duckdb):
    path = tmp_path / "t.parquet"
    with duckdb.connect() as connection:
        connection.execute(f"COPY (SELECT DATE '2026-11-22' d, 1.50::DECIMAL(9, 2) c) TO '{path}'")
        assert read(path) == [{"d": "2026-11-22", "c": 1.5}]
        connection.execute(f"COPY (SELECT '\\x89PNG'::BLOB image) TO '{path}'")
    with pytest.raises(EnvironmentBroken, match=r"t.parquet: row 1: it holds bytes"):
        read(path)


def test_parquet_without_a_reader_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "find_spec", lambda name: None)
    with pytest.raises(EnvironmentBroken, match="needs duckdb or pyarrow") as missing:
        read(write_parquet(tmp_path / "t.parquet", TRL_ROWS))
    assert missing.value.hint == "pip install 'libra-rl[parquet]'"


def test_a_damaged_parquet_file_is_named(tmp_path, only_duckdb):
    (tmp_path / "t.parquet").write_bytes(b"PAR1 nothing PAR1")
    with pytest.raises(EnvironmentBroken, match=r"t.parquet: cannot be read as parquet"):
        read(tmp_path / "t.parquet")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.jsonl", b"{}\n[1]\n", r"t.jsonl:2: a task is a JSON object"),
        ("t.jsonl", b"{}\n\n{x\n", r"t.jsonl:3: not JSON: Expecting .* \(column 2\)"),
        ("t.jsonl", b'{}\n{"a": "\xff"}\n', r"t.jsonl:2: not UTF-8 text"),
        ("t.jsonl", b"\n", "holds no task"),
        ("t.json", b"[{},\n{x}]", r"t.json:2: not JSON"),
        ("t.json", b"[{}, 3]", r"t.json: row 2: a task is a JSON object"),
        ("t.json", b"3", "is not a list of tasks"),
        ("t.json", b"{}\n{x}\n", r"t.json:2: not JSON"),
        ("t.jsonl.gz", b"{}\n", r"t.jsonl.gz: the tasks file cannot be read"),
        (
            "t.jsonl.gz",
            gzip.compress(b"{}\n" * 9, mtime=0)[:-9],
            r"t.jsonl.gz: after line \d: the tasks",
        ),
        ("t.csv", b"a,b\n", "are read from .jsonl, .jsonl.gz, .json, .parquet"),
    ],
)
def test_a_file_that_is_wrong_is_named_with_its_line(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(EnvironmentBroken, match=message):
        read(path)


@pytest.mark.parametrize("name", ["none.jsonl", "none.json", "none.parquet"])
def test_a_file_that_is_missing_is_named(tmp_path, name):
    with pytest.raises(EnvironmentBroken, match=f"{name}: the tasks file cannot be read"):
        read(tmp_path / name)


def test_a_directory_gives_the_files_of_a_split(tmp_path):
    write(tmp_path / "train-00000-of-00002.jsonl", [{"n": 1}])
    write(tmp_path / "train-00001-of-00002.jsonl", [{"n": 2}])
    write(tmp_path / "train_sft.jsonl", [{"n": 3}])
    write(tmp_path / "test.json", [{"n": 4}])
    assert read(tmp_path) == [{"n": 1}, {"n": 2}]
    assert read(tmp_path, split="train_sft") == [{"n": 3}]
    assert read(tmp_path, split="test") == [{"n": 4}]
    with pytest.raises(EnvironmentBroken, match="no file of split 'dev', only test, train-00000"):
        read(tmp_path, split="dev")
    write(tmp_path / "train.jsonl.gz", [{"n": 5}])
    with pytest.raises(EnvironmentBroken, match=r"is there as .jsonl and as .jsonl.gz"):
        read(tmp_path)


@pytest.mark.parametrize("folder", ["data", "dev"])
def test_a_split_may_lie_in_a_folder(tmp_path, folder):
    (tmp_path / folder).mkdir()
    write(tmp_path / folder / "dev-0.jsonl", [{"n": 1}])
    assert read(tmp_path, split="dev") == [{"n": 1}]


def test_a_file_gives_the_rows_of_a_split(tmp_path):
    rows = [{"n": 1, "split": "train"}, {"n": 2, "extra_info": {"split": "test"}}, {"n": 3}]
    path = write(tmp_path / "t.jsonl", rows)
    assert read(path, split="test") == rows[1:2]
    with pytest.raises(EnvironmentBroken, match="no row of split 'dev', only of test, train"):
        read(path, split="dev")


@pytest.mark.parametrize("name", ["t.jsonl", "t.json"])
def test_rows_that_say_nothing_of_a_split_are_not_called_none(tmp_path, name):
    (tmp_path / name).write_text('{"a": 1}\n{"a": 2}\n')
    with pytest.raises(EnvironmentBroken, match=r"no row of split 'test'$") as caught:
        read(tmp_path / name, split="test")
    assert "extra_info.split" in caught.value.hint


def test_rows_come_in_order_and_again_when_they_are_used_up(tmp_path):
    source = tasks(write(tmp_path / "t.jsonl", [{"n": n} for n in range(3)]))
    assert [source.at(index, 7)["n"] for index in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_a_shuffled_source_gives_each_row_once_in_a_round_in_an_order_of_the_seed(tmp_path):
    path = write(tmp_path / "t.jsonl", [{"n": n} for n in range(50)])
    source, other = tasks(path, shuffle=True), tasks(path, shuffle=True)
    rounds = [[source.at(i, 1)["n"] for i in range(r * 50, r * 50 + 50)] for r in range(3)]
    assert all(sorted(one) == list(range(50)) for one in rounds)
    assert rounds[0] != rounds[1] != rounds[2]
    assert [other.at(i, 1)["n"] for i in reversed(range(50))] == rounds[0][::-1]
    assert [other.at(i, 2)["n"] for i in range(50)] != rounds[0]
    # What a run of this seed has been given must not change with a version of libra.
    assert rounds[0][:5] == [26, 45, 28, 2, 44]


def test_a_limit_is_the_first_rows_or_a_sample_that_stays(tmp_path):
    path = write(tmp_path / "t.jsonl", [{"n": n} for n in range(50)])
    assert [row["n"] for row in read(path, limit=3)] == [0, 1, 2]
    source = tasks(path, limit=10, shuffle=True)
    sample = {source.at(index, 5)["n"] for index in range(10)}
    assert len(sample) == len(source) == 10
    assert sample != set(range(10))
    assert {source.at(index, 5)["n"] for index in range(10, 40)} == sample
    assert {source.at(index, 6)["n"] for index in range(10)} != sample


def test_sources_get_their_share_of_the_groups_and_none_skips_a_row(tmp_path):
    specs = [
        TaskSourceSpec(path=str(write(tmp_path / f"{name}.jsonl", rows)), weight=weight)
        for name, weight in (("a", 3.0), ("b", 1.0), ("c", 0.5))
        for rows in [[{"source": name, "n": n} for n in range(7)]]
    ]
    mixed = Tasks(specs)
    drawn = [mixed.at(index, 0) for index in range(90)]
    for name, share in (("a", 60), ("b", 20), ("c", 10)):
        numbers = [row["n"] for row in drawn if row["source"] == name]
        assert len(numbers) == share
        assert numbers == [n % 7 for n in range(share)]
    assert [Tasks(specs).at(index, 0) for index in (89, 3, 41)] == [
        drawn[89],
        drawn[3],
        drawn[41],
    ]


def test_a_task_can_be_changed_without_changing_anothers(tmp_path):
    source = tasks(write(tmp_path / "t.jsonl", [{"n": [1]}]))
    source.at(0, 0)["n"].append(2)
    assert source.at(0, 0) == {"n": [1]}


def test_all_rows_of_several_files_are_counted_until_each_was_played(tmp_path):
    small = write(tmp_path / "small.jsonl", [{"n": n} for n in range(3)])
    large = write(tmp_path / "large.jsonl", [{"n": n} for n in range(3, 9)])
    sources = [{"path": str(small), "weight": 1.0}, {"path": str(large), "weight": 3.0}]
    one = EnvironmentSpec.model_validate({"tasks": sources, "weight": 2.0})
    other = EnvironmentSpec.model_validate({"tasks": str(large)})
    assert tasks_of([other]) == 6
    assert tasks_of([one]) == 12
    assert {Tasks(one.tasks).at(index, 0)["n"] for index in range(12)} == set(range(9))
    assert tasks_of([one, other]) == 18
