"""Commands, files, shells and snapshots of a sandbox, for real."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from libra_cli.config.errors import SandboxBroken
from libra_cli.envs.sandbox import client
from libra_cli.envs.sandbox.helper.server import NOBODY
from libra_cli.envs.sandbox.sandbox import ANEW, Sandbox, Snapshot, open_sandbox
from libra_cli.envs.sandbox.spec import SandboxSpec
from tests.sandboxes import needs_sandboxes, opened

pytestmark = needs_sandboxes


@pytest.fixture(scope="module", params=["bubblewrap", "none"])
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    with opened(backend=request.param) as one:
        yield one


@pytest.fixture(scope="module")
def closed_in() -> Iterator[Sandbox]:
    with opened() as one:
        yield one


def test_a_command_has_its_output_and_code(sandbox: Sandbox) -> None:
    done = sandbox.run("echo out; echo err >&2; exit 3")
    assert (done.code, done.stdout, done.stderr) == (3, "out\n", "err\n")
    assert not done.timed_out
    assert not done.truncated


def test_words_are_no_text_for_a_shell(sandbox: Sandbox) -> None:
    assert sandbox.run(["echo", "$HOME;", "a b"]).stdout == "$HOME; a b\n"


def test_what_cannot_be_started_is_told(sandbox: Sandbox) -> None:
    done = sandbox.run(["no-such-program"])
    assert (done.code, done.stderr) == (127, "no-such-program: No such file or directory\n")
    done = sandbox.run("true", cwd="/no/such/place")
    assert (done.code, done.stderr) == (127, "/no/such/place: No such file or directory\n")


def test_stdin_variables_and_directory(sandbox: Sandbox) -> None:
    assert sandbox.run("cat", stdin=b"x" * 1_000_000).stdout.startswith("xxx")
    assert sandbox.run("true", stdin=b"x" * 1_000_000).code == 0
    assert sandbox.run("echo $A; pwd", env={"A": "1"}, cwd="/tmp").stdout == "1\n/tmp\n"
    assert "LIBRA_SECRET" not in os.environ
    assert sandbox.run("cat").stdout == ""


def test_no_variable_of_this_process_is_seen(
    monkeypatch: pytest.MonkeyPatch, closed_in: Sandbox
) -> None:
    monkeypatch.setenv("MY_API_KEY", "hush")
    assert "hush" not in closed_in.run("env; cat /proc/*/environ").stdout


def test_a_long_command_is_ended(sandbox: Sandbox) -> None:
    started = time.monotonic()
    done = sandbox.run("echo before; sleep 60; echo after", timeout_s=0.2)
    assert (done.code, done.stdout, done.timed_out) == (137, "before\n", True)
    assert time.monotonic() - started < 10


def test_a_command_that_closes_its_output_is_ended(closed_in: Sandbox) -> None:
    done = closed_in.run("exec >&- 2>&-; sleep 60", timeout_s=0.2)
    assert (done.code, done.timed_out) == (137, True)


def test_what_a_command_leaves_goes_on_until_its_sandbox_is_closed() -> None:
    with opened() as one:
        assert one.run("setsid sleep 1234 & echo $!").code == 0
        assert "sleep 1234" in one.run("ps ax").stdout
    assert not any(b"sleep\x001234" in _argv(pid) for pid in _pids())


def _pids() -> list[str]:
    return [name for name in os.listdir("/proc") if name.isdigit()]


def _argv(pid: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_a_timeout_ends_daemons_of_its_command_and_no_others(closed_in: Sandbox) -> None:
    closed_in.run("setsid sleep 1001 >/dev/null 2>&1 & sleep 0.1")
    closed_in.run("setsid sleep 1002 & setsid -f sleep 1003; sleep 1004", timeout_s=0.2)
    left = closed_in.run("ps ax").stdout
    assert [n for n in (1001, 1002, 1003, 1004) if f"sleep {n}" in left] == [1001]


def test_long_output_has_its_beginning_and_end() -> None:
    with opened(limits={"output_bytes": 100}) as one:
        done = one.run("seq 1 10000; echo end")
        assert done.truncated
        assert done.stdout.startswith("1\n2\n3\n")
        assert done.stdout.endswith("10000\nend\n")
        assert "[... 48,798 bytes left out ...]" in done.stdout


def test_files_go_in_and_come_out(sandbox: Sandbox) -> None:
    sandbox.write("deep/er/file", b"\x00\xff", mode=0o755)
    assert sandbox.read("deep/er/file") == b"\x00\xff"
    assert sandbox.read("deep/er/file", limit=1) == b"\x00"
    assert sandbox.run("stat -c %a deep/er/file; stat -c %s deep/er/file").stdout == "755\n2\n"
    sandbox.write("deep/er/file", b"a")
    assert sandbox.read("deep/er/file") == b"a"


def test_files_that_cannot_be_read_are_errors(closed_in: Sandbox) -> None:
    with pytest.raises(FileNotFoundError):
        closed_in.read("/no/such/file")
    with pytest.raises(IsADirectoryError):
        closed_in.read("/usr")
    closed_in.run("mkfifo pipe")
    with pytest.raises(OSError, match="not a regular file"):
        closed_in.read("pipe")
    with pytest.raises(OSError, match=r"Permission denied|Read-only"):
        closed_in.write("/usr/bin/sh", b"")


def test_a_shell_keeps_its_directory_and_variables(sandbox: Sandbox) -> None:
    shell = sandbox.shell(env={"B": "2"})
    assert shell.run("cd /tmp; A=1; f() { echo f$1; }; echo quiet >&2").stdout == "quiet\n"
    done = shell.run("pwd; echo $A$B; f 'x y'; cat; (exit 5)")
    assert (done.code, done.stdout, done.note) == (5, "/tmp\n12\nfx\n".replace("fx", "fx y"), "")
    shell.close()


def test_a_shell_outlives_a_command_that_hangs(sandbox: Sandbox) -> None:
    shell = sandbox.shell()
    shell.run("A=1")
    for command in ("sleep 60; echo no", "while :; do :; done"):
        done = shell.run(command, timeout_s=0.2)
        assert (done.timed_out, done.stdout.strip()) == (True, "")
        assert shell.run("echo $A").stdout == "1\n"
    shell.close()


def test_a_shell_that_ends_is_started_anew_and_that_is_said(sandbox: Sandbox) -> None:
    shell = sandbox.shell()
    assert shell.run("A=1; exit 7").code == 7
    done = shell.run("echo [$A]")
    assert (done.stdout, done.note) == ("[]\n", ANEW)
    assert shell.run("trap '' INT; while :; do :; done", timeout_s=0.2).timed_out
    assert shell.run("echo [$A]").note == ANEW
    assert shell.run("echo [$A]").note == ""
    shell.close()


def test_a_snapshot_is_what_another_begins_with(closed_in: Sandbox, tmp_path: Path) -> None:
    closed_in.run("mkdir -p d/e; echo 1 > d/e/f; ln -s e d/link; chmod 600 d/e/f; chmod 500 d/e")
    closed_in.snapshot().save(tmp_path / "kept.tar")
    closed_in.run("echo 2 > d/e/f")
    with open_sandbox(SandboxSpec(), Snapshot.load(tmp_path / "kept.tar")) as fork:
        assert fork.run("cat d/link/f; stat -c %a d/e/f d/e").stdout == "1\n600\n500\n"
        fork.run("echo 3 > d/e/f")
    assert closed_in.read("d/e/f") == b"2\n"


def test_a_root_directory_is_begun_with_and_stays_as_it_is(tmp_path: Path) -> None:
    root = _root(tmp_path / "a,b:c")
    with opened(root=str(root)) as one:
        done = one.run("cat /hello; echo x > /hello; rm -r /gone; mkdir /gone; ls /gone; ls /usr")
        assert (done.stdout, done.stderr) == ("1\nbin\nlib\n", "")
        snapshot = one.snapshot()
        with open_sandbox(one.spec, snapshot) as fork:
            assert fork.run("cat /hello; ls /gone; echo end").stdout == "x\nend\n"
    assert (root / "hello").read_text() == "1\n"
    assert (root / "gone/file").exists()


def _root(root: Path) -> Path:
    """A directory with a static shell, and no Python: busybox is not on every machine, so it is
    the host's own programs that are bound from /usr."""
    for name in ("usr/bin", "usr/lib", "gone"):
        (root / name).mkdir(parents=True)
    (root / "hello").write_text("1\n")
    (root / "gone/file").write_text("")
    for program in ("sh", "cat", "rm", "mkdir", "ls"):
        _copy_program(Path(f"/usr/bin/{program}").resolve(), root / "usr/bin" / program, root)
    (root / "bin").symlink_to("usr/bin")
    for path in (root, *root.parents[:-2]):
        os.chmod(path, 0o755)
    if os.geteuid() == 0:
        subprocess.run(["chown", "-R", f"{NOBODY}:{NOBODY}", root], check=True)
    return root


def _copy_program(program: Path, to: Path, root: Path) -> None:
    shutil.copy(program, to)
    listed = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
    for library in re.findall(r"(/\S+) \(0x", listed):
        there = root / library.lstrip("/")
        there.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(Path(library).resolve(), there)


def test_one_that_is_closed_says_so() -> None:
    one = opened()
    one.close()
    one.close()
    with pytest.raises(SandboxBroken, match="closed"):
        one.run("true")


def test_without_bubblewrap_there_is_the_next_thing_to_type(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxBroken, match="no bwrap") as broken:
        opened()
    assert broken.value.hint == "apt-get install bubblewrap"


def test_a_host_path_that_is_not_there_is_an_error() -> None:
    for shown in ({"readable": ["/no/such"]}, {"root": "/no/such"}):
        with pytest.raises(SandboxBroken, match="this host has no /no/such") as broken:
            opened(**shown)
        assert "leave it out of the recipe" in broken.value.hint, "the host is as it should be"


def test_a_forked_process_has_sandboxes_of_its_own(closed_in: Sandbox) -> None:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            with pytest.raises(SandboxBroken, match="belongs"):
                closed_in.run("true")
            with opened() as one:
                code = one.run("exit 9").code
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    assert closed_in.run("echo on").stdout == "on\n"
    assert len(client._helpers) == 1


def test_a_forked_process_may_use_the_helper_and_its_sandboxes_end_with_it(
    closed_in: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    (helper,) = client._helpers
    monkeypatch.setattr(helper, "shared", False)  # as it is again afterwards
    client.share_helper()
    before = served_by(helper._process.pid)
    heard, told = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            first = opened()
            os.write(told, f"{first.run('exit 9').code} {client._helpers == [helper]}\n".encode())
            helper._asked.close()  # as if it had died: there is another then
            one = opened()
            os.write(told, f"{one.run('exit 8').code} {client._helpers == [helper]}\n".encode())
            time.sleep(60.0)
        finally:
            os._exit(1)
    os.close(told)
    with os.fdopen(heard) as lines:
        assert lines.readline() == "9 True\n"
        assert len(served_by(helper._process.pid)) == len(before) + 1
        assert lines.readline() == "8 False\n"
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    deadline = time.monotonic() + 20.0
    while served_by(helper._process.pid) != before:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert closed_in.run("echo on").stdout == "on\n"


def served_by(helper: int) -> set[str]:
    """The servers of a helper's sandboxes."""
    return set(Path(f"/proc/{helper}/task/{helper}/children").read_text().split())


def test_a_socket_of_its_loopback_is_answered_from_outside(closed_in: Sandbox) -> None:
    with closed_in.listen() as listener:
        host, port = listener.getsockname()
        with pytest.raises(ConnectionRefusedError):  # it is no port of this host
            socket.create_connection((host, port), 1)
        connect = f"import socket\nprint(socket.create_connection(('{host}', {port}), 5).recv(9))"
        with ThreadPoolExecutor(1) as threads:
            asking = threads.submit(closed_in.run, ["python3", "-c", connect])
            listener.settimeout(10.0)
            answering, _ = listener.accept()
            with answering:
                answering.sendall(b"from here")
            assert asking.result().stdout == "b'from here'\n"
    assert "refused" in closed_in.run(["python3", "-c", connect]).stderr
