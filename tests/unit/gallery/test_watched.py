"""A long command tells how far it is, and none goes on when who waits for it is stopped."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.gallery import watched
from tests.gallery.watched import run_watched


def test_status_output_and_errors_are_those_of_the_command(tmp_path: Path) -> None:
    code = "import sys; print('done'); print('wrong', file=sys.stderr); sys.exit(3)"
    log, errors = tmp_path / "out", tmp_path / "errors"
    status = run_watched(
        [sys.executable, "-c", code], cwd=tmp_path, log=log, errors=errors, say=lambda text: None
    )
    assert (status, log.read_text(), errors.read_text()) == (3, "done\n", "wrong\n")


def test_one_that_goes_on_is_told_and_ends_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watched, "TELL_S", 1)
    monkeypatch.setattr(watched, "LONGEST_S", 3)
    code = "import time; print('step 1', flush=True); time.sleep(60)"
    told: list[str] = []
    with pytest.raises(TimeoutError, match="more than 3 s"):
        run_watched(
            [sys.executable, "-c", code], cwd=tmp_path, log=tmp_path / "out", say=told.append
        )
    assert told[-1] == "  step 1"


def test_it_ends_with_who_waits_for_it(tmp_path: Path) -> None:
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"

    def stopped() -> None:
        if (tmp_path / "out").read_text():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_watched(
            [sys.executable, "-c", code],
            cwd=tmp_path,
            log=tmp_path / "out",
            say=lambda text: None,
            meanwhile=stopped,
        )
    assert not Path("/proc", (tmp_path / "out").read_text().strip()).exists()
