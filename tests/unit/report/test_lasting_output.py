"""What a run says is no fault of the run: whoever stops reading, and however."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from libra_cli.report.terminal import lasting_output
from libra_cli.report.terminal.lasting_output import LastingFile

DEADLINE_S = 20.0


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "console.log"


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    read, write = os.pipe()
    yield read, write
    for descriptor in (read, write):
        try:
            os.close(descriptor)
        except OSError:
            continue


def test_what_nobody_reads_any_more_goes_to_the_log(pipe: tuple[int, int], log: Path) -> None:
    file = LastingFile(pipe[1], log)
    os.close(pipe[0])
    assert file.write(b"one\n") == 4
    file.write(b"two\n")
    os.write(pipe[1], b"three, of a child that has the same descriptor\n")
    assert log.read_bytes().startswith(b"one\ntwo\nthree")
    assert log.stat().st_mode & 0o777 == 0o600


def test_a_full_disk_is_no_error(log: Path) -> None:
    descriptor = os.open("/dev/full", os.O_WRONLY)
    try:
        LastingFile(descriptor, log).write(b"one\n")
    finally:
        os.close(descriptor)
    assert log.read_bytes() == b"one\n"


def test_a_log_that_cannot_be_written_either_is_no_error() -> None:
    descriptor = os.open("/dev/full", os.O_WRONLY)
    try:
        for log in (Path("/dev/full"), Path("/nowhere/console.log")):
            assert LastingFile(descriptor, log).write(b"one\n") == 4
    finally:
        os.close(descriptor)


def test_a_terminal_that_closed_is_none_any_more(log: Path) -> None:
    master, slave = pty.openpty()
    try:
        file = LastingFile(slave, log)
        assert file.isatty()
        os.close(master)
        file.write(b"\x1b[2Ka drawing")
        assert not file.isatty()
        file.write(b"a line\n")
    finally:
        os.close(slave)
    assert log.read_bytes() == b"a line\n"


def test_a_reader_that_stands_still_holds_nothing_up_and_loses_nothing_of_a_pipe(
    pipe: tuple[int, int], log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lasting_output, "PATIENCE_S", 0.01)
    read, write = pipe
    file = LastingFile(write, log)
    sent = b"x" * 100_000
    began = time.monotonic()
    file.write(sent)
    file.write(b"y" * 1000)
    assert time.monotonic() - began < 5.0
    kept = log.read_bytes()
    taken = os.read(read, 200_000)
    assert taken + kept == sent + b"y" * 1000
    file.write(b"again\n")
    assert os.read(read, 100) == b"again\n"


def test_a_file_that_is_written_to_keeps_its_place(tmp_path: Path, log: Path) -> None:
    path = tmp_path / "run.log"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    try:
        os.write(descriptor, b"before\n")
        LastingFile(descriptor, log).write(b"after\n")
    finally:
        os.close(descriptor)
    assert path.read_bytes() == b"before\nafter\n"
    assert not log.exists()


SCRIPT = """
import signal, sys, time
from pathlib import Path
from libra_cli.report.terminal.lasting_output import keep_output
# Not what was inherited: whoever starts the tests may have done it by nohup.
signal.signal(signal.SIGHUP, signal.SIG_IGN if sys.argv[2] == "ignored" else signal.SIG_DFL)
keep_output(Path(sys.argv[1]))
print("ready", flush=True)
if sys.argv[2] == "goes-on":
    time.sleep(0.1)
heard = []
while sys.argv[2] == "heard" and sys.stdout.isatty():
    time.sleep(0.01)
print("the rest \\ud83d")
print("and errors", file=sys.stderr)
"""


@pytest.mark.parametrize("how", ["heard", "ignored"])
def test_a_process_goes_on_when_its_terminal_hangs_up(log: Path, how: str) -> None:
    master, slave = pty.openpty()
    command = [sys.executable, "-c", SCRIPT, str(log), how]
    with subprocess.Popen(command, stdout=slave, stderr=slave) as process:
        try:
            os.close(slave)
            _hang_up(master, process, log, how)
        finally:
            process.kill()


def _hang_up(master: int, process: subprocess.Popen[bytes], log: Path, how: str) -> None:
    shown = os.read(master, 100)
    assert shown.startswith(b"ready")
    process.send_signal(signal.SIGHUP)
    if how == "heard":  # it has, once there is a log; before that a gone terminal takes its words
        deadline = time.monotonic() + DEADLINE_S
        while not log.exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.close(master)
    assert process.wait(timeout=DEADLINE_S) == 0
    if how == "ignored":
        while b"and errors" not in shown:
            shown += os.read(master, 1000)
        os.close(master)
        assert b"the rest" in shown
        assert not log.exists()
    else:
        assert log.read_text() == "the rest ?\nand errors\n"


@pytest.mark.parametrize(
    ("redirection", "kept"), [(">/dev/full", True), ("| true", True), (">&-", False)]
)
def test_a_process_whose_output_cannot_be_written_ends_well(
    log: Path, redirection: str, kept: bool
) -> None:
    script = f'{sys.executable} -c "$1" {log} goes-on 2>&1 {redirection}'
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", script, "-", SCRIPT], timeout=DEADLINE_S, check=False
    )
    assert done.returncode == 0
    assert not kept or "the rest ?\n" in log.read_text()
