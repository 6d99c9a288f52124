"""The controller's log file, and what the user is told of it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from _pytest.logging import LogCaptureHandler

from libra_cli.config.secrets import masker
from libra_cli.runtime.supervision.controller_log import FILE, controller_log, log_of_loop

log = logging.getLogger("libra_cli.runtime.anything")


@pytest.fixture
def notes() -> list[str]:
    return []


@pytest.fixture
def text(tmp_path: Path, notes: list[str]) -> Callable[[Callable[[], object]], str]:
    """Run the function of the test inside a log; what it wrote."""

    def run(work: Callable[[], object]) -> str:
        with controller_log(tmp_path, note=notes.append, mask=masker(["s3cret-value"])):
            work()
        return (tmp_path / FILE).read_text()

    return run


@pytest.fixture
def unreported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what is logged out of pytest's report: xdist cannot send half a character."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, LogCaptureHandler):
            monkeypatch.setattr(handler, "emit", lambda record: None)


def fail(word: str = "broken") -> None:
    try:
        raise ValueError(word)
    except ValueError:
        log.exception("advancing failed: %s", word)


def test_an_error_is_told_once_and_logged_each_time_with_its_traceback(text, notes, tmp_path):
    def work() -> None:
        for _ in range(5):
            fail()

    written = text(work)
    assert notes == [f"advancing failed: broken (more in {tmp_path / FILE})"]
    assert written.count("Traceback") == 5


def test_only_its_owner_may_read_it(text, tmp_path):
    text(fail)
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600


@pytest.mark.usefixtures("unreported")
def test_it_has_no_secret_and_nothing_that_a_terminal_obeys(text, notes):
    written = text(lambda: fail("\x1b]52;c;bad\x07 \udcff s3cret-value \u202etxt.exe"))
    for said in (written, *notes):
        assert "s3cret" not in said
        assert not {"\x1b", "\x07", "\u202e", "\udcff"} & set(said)
        assert "\\x1b]52" in said


def test_what_asyncio_and_threads_would_print_is_in_it(text, notes):
    def work() -> None:
        async def main() -> None:
            asyncio.get_running_loop().set_exception_handler(log_of_loop)
            asyncio.get_running_loop().call_soon(fail_now)
            await asyncio.sleep(0.01)

        def fail_now() -> None:
            raise ValueError("in the loop")

        def fail_in_thread() -> None:
            raise ValueError("in the thread")

        asyncio.run(main())
        thread = threading.Thread(target=fail_in_thread, name="mine")
        thread.start()
        thread.join()

    written = text(work)
    assert "in the loop" in written
    assert "in the thread" in written
    assert len(notes) == 2


def test_a_bug_that_ends_the_run_is_in_it(text, tmp_path, notes):
    with contextlib.suppress(KeyError):
        text(lambda: os.environ["MISSING"])
    assert "KeyError: 'MISSING'" in (tmp_path / FILE).read_text()


def test_errors_of_other_packages_are_logged_and_not_told(text, notes):
    written = text(lambda: logging.getLogger("another.package").error("banner"))
    assert "banner" in written
    assert notes == []


def test_a_note_that_cannot_be_printed_is_no_error(tmp_path):
    def note(_: str) -> None:
        raise OSError("full")

    with controller_log(tmp_path, note=note):
        fail()
