"""Files of tasks hold anything: every row is a task, or the file is refused with its line."""

from __future__ import annotations

import gzip
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra_cli.config.environment import TaskSourceSpec
from libra_cli.config.errors import EnvironmentBroken
from libra_cli.runtime.tasks.mixture import Tasks
from tests.unit.fuzz import nonsense

ROW = {"question": "1+1", "answer": "2", "split": "train", "extra_info": {"split": "train"}}
lines = st.lists(nonsense.json_like(ROW), min_size=1, max_size=4).map(b"\n".join)
whole = nonsense.json_like([ROW, ROW]) | nonsense.json_like({"train": [ROW], "test": [ROW]})


@given(
    data=st.one_of(
        st.tuples(st.just(".jsonl"), lines),
        st.tuples(st.just(".json"), whole | lines),
        st.tuples(st.just(".jsonl.gz"), nonsense.broken(lines.map(gzip.compress))),
        st.tuples(st.just(".parquet"), st.binary(max_size=99).map(lambda rest: b"PAR1" + rest)),
        st.tuples(st.just(".txt"), lines),
    ),
    split=st.sampled_from([None, "train", "\ud83d"]),
    shuffle=st.booleans(),
)
def test_tasks_are_read_or_refused(data, split, shuffle, tmp_path_factory):
    suffix, content = data
    path = tmp_path_factory.mktemp("tasks") / f"tasks{suffix}"
    path.write_bytes(content)
    with nonsense.thrown_at("tasks"):
        tasks = Tasks([TaskSourceSpec(path=str(path), split=split, shuffle=shuffle)])
        for number in range(len(tasks)):
            assert isinstance(tasks.at(number, 0), dict)


@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
@pytest.mark.parametrize(
    "content", ["[" * 100_000, '{"a":' * 100_000, "9" * 10_000], ids=lambda c: c[:5]
)
def test_a_file_that_is_nested_thousands_deep_is_refused(suffix, content, tmp_path):
    path = tmp_path / f"tasks{suffix}"
    path.write_text(content)
    with pytest.raises(EnvironmentBroken):
        Tasks([TaskSourceSpec(path=str(path))])


@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
def test_half_a_character_in_a_task_is_no_damage(suffix, tmp_path):
    path = tmp_path / f"tasks{suffix}"
    text = json.dumps({"question": "\ud83d 1+1"})
    path.write_text(f"[{text}]" if suffix == ".json" else text)
    assert "1+1" in Tasks([TaskSourceSpec(path=str(path))]).at(0, 0)["question"]
