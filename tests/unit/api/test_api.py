"""A run is rows in Python: one that is over, one that goes on, and one of libra 0.1.0."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from libra_cli.api import LoadedRun, RowTable, StepRow, load_run
from libra_cli.config.errors import StateError
from libra_cli.core.records import (
    GroupRecord,
    StepRecord,
    TrajectoryRecord,
    TurnRecord,
    to_metrics_json,
)
from libra_cli.node.model.tokenizer import build_tokenizer, save_tokenizer
from libra_cli.runtime.store.journal import Journal
from tests import sample_run

OLD_RUN = Path(__file__).parents[2] / "fixtures" / "0.1.0"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> LoadedRun:
    return load_run(sample_run.write_moving(tmp_path_factory.mktemp("runs") / "run"))


def saved(kind: type) -> int:
    return sum(isinstance(record, kind) for _, record in sample_run.moving())


def test_steps_have_the_metrics_that_monitors_are_told(run: LoadedRun) -> None:
    assert (run.id, run.state) == ("quickstart-1", "finished")
    assert [step.step for step in run.steps] == list(range(1, 41))
    last = [record for _, record in sample_run.moving() if isinstance(record, StepRecord)][-1]
    assert run.steps[-1].metrics["reward/mean"] == last.reward
    assert run.steps[-1].metrics["train/entropy"] == last.metrics["entropy"]
    assert repr(run.steps[2:4]) == "<2 rows of StepRow>"


def test_trajectories_say_which_step_trained_them(run: LoadedRun) -> None:
    assert len(run.trajectories) == saved(TrajectoryRecord)
    by_group = {
        record.group_id: record.step
        for _, record in sample_run.moving()
        if isinstance(record, GroupRecord)
    }
    for one in run.trajectories:
        assert one.step == (by_group[one.group] if one.state == "finished" else None)


def test_turns_and_moves_have_their_parts_in_words(run: LoadedRun) -> None:
    assert len(run.turns) == saved(TurnRecord)
    assert (run.turns[0].tools[0].tool, run.turns[0].tools[0].latency_s) == ("get", 0.01)
    first, second = run.moves
    assert (first.from_role, first.to_role, second.to_role) == ("rollout", "gradient", "rollout")
    assert first.phases[0].began == first.started_at


@pytest.mark.vllm
def test_rows_are_data_frames(run: LoadedRun) -> None:
    pytest.importorskip("pandas", reason="comes with the [cpu] extra")
    frame = run.steps.to_pandas()
    assert list(frame.columns[:3]) == ["step", "started_at", "ended_at"]
    assert frame["reward/mean"].iloc[-1] == run.steps[-1].metrics["reward/mean"]
    assert len(run.turns.to_pandas()) == len(run.turns)
    assert "step" in RowTable(StepRow, []).to_pandas().columns


def test_the_text_of_a_trajectory_is_what_the_model_saw(tmp_path: Path) -> None:
    text = "<|im_start|>user\nfind \u00fc<|im_end|>\n"
    tokenizer = build_tokenizer()
    (tmp_path / "model").mkdir()
    save_tokenizer(tokenizer, tmp_path / "model", max_len=512)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    life = [record for _, record in sample_run.records(steps=1)]
    with Journal(tmp_path) as journal:
        for record in life:
            if isinstance(record, TrajectoryRecord):
                left = sample_run.branch(ids[:5])
                record = replace(record, tokens=(left, sample_run.branch(ids, number=1)))
            journal.save(record)
    run = load_run(tmp_path)
    assert run.token_ids(run.trajectories[3]) == [ids[:5], ids]
    assert run.text(run.trajectories[3]) == text
    assert text.startswith(run.text(run.trajectories[3], branch=0))


def test_text_without_a_tokenizer_says_what_is_missing(run: LoadedRun) -> None:
    with pytest.raises(StateError, match=r"there is no .*tokenizer\.json"):
        run.text(run.trajectories[0])


def test_a_run_that_goes_on_is_read_while_it_is_written(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        seen: list[int] = []
        for _, record in sample_run.records():
            journal.save(record)
            if isinstance(record, StepRecord):
                journal.flush()
                seen.append(len(load_run(tmp_path).steps))
            if len(seen) == 3:
                break
    assert seen == [1, 2, 3]
    assert load_run(tmp_path).state == "running"


def test_a_run_of_an_older_libra_is_read() -> None:
    run = load_run(OLD_RUN)
    assert (run.state, len(run.steps), len(run.moves)) == ("finished", 50, 2)
    assert run.recipe["run"]["name"] == "elastic"
    assert run.steps[-1].metrics["train/kl"] == pytest.approx(0.0713, abs=1e-4)
    assert run.trajectories[0].turns == 6
    assert run.token_ids(run.trajectories[0]) == [[]]


def test_metrics_of_a_step_may_be_none(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        journal.save(sample_run.run_record())
        journal.save(sample_run.step_record(1, 5.0, metrics_json=to_metrics_json({"kl": None})))
    assert "train/kl" not in load_run(tmp_path).steps[0].metrics


def test_a_directory_without_a_run_is_told_of(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="is not a run directory"):
        load_run(tmp_path)


def test_loading_imports_no_pandas_and_no_tokenizer() -> None:
    code = (
        "import sys; from libra_cli.api import load_run; load_run(sys.argv[1]).steps;"
        "print([m for m in ('pandas', 'numpy', 'tokenizers', 'aiohttp') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, OLD_RUN], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
