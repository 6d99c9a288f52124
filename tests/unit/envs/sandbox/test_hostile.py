"""What a model may try, against the real thing: each costs one call, and nothing outside."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from libra_cli.envs.sandbox.helper import commands
from libra_cli.envs.sandbox.helper import place as module
from libra_cli.envs.sandbox.helper.commands import FLOODED, Order, Output, start
from libra_cli.envs.sandbox.helper.place import ALL_ENDED, OPEN_S, InNamespaces, PlaceEnded
from libra_cli.envs.sandbox.helper.system_calls import MACHINES, REFUSED
from libra_cli.envs.sandbox.sandbox import Sandbox
from libra_cli.envs.sandbox.spec import SandboxSpec
from tests.sandboxes import needs_sandboxes, opened

pytestmark = needs_sandboxes

LIMITS = {"memory_mb": 256, "processes": 40, "disk_mb": 32, "output_bytes": 4096}
BOMB = """python3 -c 'import os
while True:
    try: os.fork()
    except OSError: pass'"""
HOST_FILE = "/etc/shadow"
_SEIZE, _CONTINUE, _STOP_AT_EXIT = 0x4206, 7, 0x40
"""Of ptrace."""


@pytest.fixture
def sandbox() -> Iterator[Sandbox]:
    with opened(limits=LIMITS) as one:
        yield one


@pytest.fixture(scope="module")
def shared() -> Iterator[Sandbox]:
    """For what leaves nothing behind, if it is kept in."""
    with opened(limits=LIMITS) as one:
        yield one


def works(sandbox: Sandbox) -> None:
    assert sandbox.run("echo works").stdout == "works\n"


def test_a_fork_bomb_ends_with_its_command(sandbox: Sandbox) -> None:
    sandbox.write("kept", b"1")
    done = sandbox.run(BOMB, timeout_s=0.5)
    assert done.timed_out
    works(sandbox)
    assert sandbox.run("ps axww | grep -c 'os.for[k]'").stdout == "0\n"
    assert sandbox.read("kept") == b"1"


def test_a_bomb_left_behind_ends_soon(sandbox: Sandbox) -> None:
    sandbox.run(f"{BOMB} >/dev/null 2>&1 &")
    deadline = time.monotonic() + 20
    time.sleep(2.5)
    while "there were" not in (done := sandbox.run("echo works")).note:
        assert time.monotonic() < deadline
        time.sleep(2.5)
    assert done.stdout == "works\n"


def test_a_command_for_which_there_may_be_no_further_process_is_told_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(commands, "enter", lambda place: -1)
    monkeypatch.setattr(commands, "start", refused)
    unused: Any = None
    place: Any = SimpleNamespace(spec=SandboxSpec(), work="/", environment={})
    reply, said = commands.run(place, {"command": "true"}, b"", unused)
    assert (reply["code"], said) == (127, b"fork: Resource temporarily unavailable\n")


def test_a_storm_of_zombies_is_reaped(sandbox: Sandbox) -> None:
    done = sandbox.run(
        "for i in $(seq 300); do (setsid true &) ; done; sleep 0.2; ps ax | grep -c Z"
    )
    assert int(done.stdout) <= 3
    works(sandbox)


def test_nothing_of_the_host_can_be_removed(sandbox: Sandbox) -> None:
    before = sorted(os.listdir("/usr/bin"))
    done = sandbox.run("rm -rf --no-preserve-root / 2>/dev/null; ls / | wc -l", timeout_s=1)
    assert done.timed_out or done.code == 0
    assert sorted(os.listdir("/usr/bin")) == before
    works(sandbox)


@pytest.mark.parametrize("path", ["big", "/dev/shm/big", "/tmp/big", "/big"])
def test_a_large_file_is_full_before_the_host_is(sandbox: Sandbox, path: str) -> None:
    done = sandbox.run(f"head -c 10G /dev/zero > {path}", timeout_s=20)
    assert done.code != 0
    size = sandbox.run(f"stat -c %s {path}").stdout.strip()
    assert int(size) <= 32 << 20
    assert "rm" not in sandbox.run(f"rm {path}").stderr
    works(sandbox)


def test_many_files_are_too_many_at_last(shared: Sandbox) -> None:
    done = shared.run(
        'python3 -c \'import os\nos.mkdir("m")\nfor i in range(10**6): open(f"m/{i}", "w")\'',
        timeout_s=20,
    )
    assert "No space left" in done.stderr
    shared.run("rm -r m", timeout_s=20)


def test_memory_is_bounded(shared: Sandbox) -> None:
    done = shared.run("python3 -c 'x = bytearray(10 ** 10)'")
    assert "MemoryError" in done.stderr


def test_memory_of_all_processes_together_is_bounded(sandbox: Sandbox) -> None:
    hog = "python3 -c 'x = b\"1\" * (100 << 20); import time; time.sleep(60)'"
    done = sandbox.run(f"{hog} & {hog} & {hog} & {hog}", timeout_s=20)
    assert (done.code, done.timed_out) == (137, False)
    assert "MiB together, of at most 256" in sandbox.run("echo works").note


def test_there_is_no_network(shared: Sandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        connect = f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 1)"
        assert "refused" in shared.run(["python3", "-c", connect]).stderr
    assert "lo" in shared.run("cat /proc/net/dev").stdout
    assert "eth" not in shared.run("cat /proc/net/dev").stdout


def test_abstract_sockets_of_the_host_are_out_of_reach(shared: Sandbox) -> None:
    name = f"libra-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{name}")
        listener.listen()
        connect = f"import socket\nsocket.socket(socket.AF_UNIX).connect('\\0{name}')"
        assert "refused" in shared.run(["python3", "-c", connect]).stderr


def test_no_process_of_others_can_be_seen_or_killed(shared: Sandbox) -> None:
    with opened() as other:
        other.run("sleep 4321 >/dev/null 2>&1 &")
        assert "4321" not in shared.run("ps axww").stdout
        shared.run("kill -9 -1; for p in $(seq 3 400); do kill -9 $p; done 2>/dev/null")
        assert "4321" in other.run("ps axww").stdout
    assert os.getpid() > 0


def test_a_sandbox_that_kills_itself_goes_on_with_its_files(sandbox: Sandbox) -> None:
    sandbox.write("kept", b"1")
    shell = sandbox.shell()
    shell.run("A=1")
    done = sandbox.run("kill -9 -1; kill -9 2; sleep 5")
    assert done.note in (ALL_ENDED, "")
    assert sandbox.read("kept") == b"1"
    assert shell.run("echo [$A]").stdout == "[]\n"


@pytest.mark.parametrize("kill", ["kill -9 -1", "kill -9 2"])
def test_a_shell_that_kills_its_sandbox_and_lives_is_answered_at_once(
    sandbox: Sandbox, kill: str
) -> None:
    """The sandbox ends once its shell is reaped, by the process that waits for that end."""
    shell, began = sandbox.shell(), time.monotonic()
    done = shell.run(kill)
    assert time.monotonic() - began < OPEN_S / 2
    assert done.note == ALL_ENDED


def test_a_shell_whose_sandbox_ends_as_it_begins_is_started_again(sandbox: Sandbox) -> None:
    once = "[ -e once ] || { : > once; kill -9 2; }"
    done = sandbox.shell(env={"PROMPT_COMMAND": once}).run("echo begun")
    assert (done.stdout, done.note) == ("begun\n", ALL_ENDED)


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_command_that_cannot_start_as_its_sandbox_ends_is_asked_for_again(goes_on: bool) -> None:
    """It has entered before that; no process can be forked where all are being killed."""
    ended: list[bool] = []
    place: Any = SimpleNamespace(settled=lambda: goes_on, wait_ended=lambda: ended.append(True))
    with pytest.raises(FileNotFoundError if goes_on else PlaceEnded):
        start(place, -1, Order(["/no/such/program"], "/", {}), Output(1), None)
    assert ended == ([] if goes_on else [True])


@contextmanager
def started() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "60"])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@contextmanager
def killed_and_not_gone(pid: int) -> Iterator[None]:
    """Kill a child, which cannot end meanwhile, as one that waits for a processor."""
    ptrace = ctypes.CDLL(None, use_errno=True).ptrace
    ptrace.argtypes = [ctypes.c_long] * 4
    if ptrace(_SEIZE, pid, 0, _STOP_AT_EXIT):
        pytest.skip("no process may be traced here")
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSTOPPED(status)
    try:
        yield
    finally:
        ptrace(_CONTINUE, pid, 0, 0)


def test_a_sandbox_has_ended_once_what_keeps_it_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a host at work that may go on for a while after all else has ended."""
    place = InNamespaces(SandboxSpec(), "bwrap")
    with started() as keeper, started() as init:
        monkeypatch.setattr(module, "KEEPER", keeper.pid)
        place._init = os.pidfd_open(init.pid)
        assert place.settled()
        assert init.poll() is None
        with killed_and_not_gone(keeper.pid):
            assert not place.settled()
        assert init.wait(10.0) == -signal.SIGKILL
        os.close(place._init)


def test_rights_are_none_and_stay_none(shared: Sandbox) -> None:
    caps = shared.run("grep ^Cap /proc/self/status | cut -f2; grep NoNewPrivs /proc/self/status")
    assert caps.stdout.split() == ["0" * 16] * 5 + ["NoNewPrivs:", "1"]
    for command in (
        "mount -t tmpfs none /tmp",
        "unshare -U true",
        "unshare -m true",
        "chroot / true",
        "mknod disk b 254 0",
        "echo 1 > /proc/sys/kernel/panic",
        "echo b > /proc/sysrq-trigger",
        "cat /proc/1/environ | grep .",
        "ls -l /proc/1/fd | grep -e /farm -e socket: -e '/[a-z]*$'",
        "head -c 1 /proc/kcore",
        "head -c 1 /dev/mem",
        "dmesg",
        "hostname mine",
        "date -s 2020-01-01",
        "nice -n -5 true 2>&1 | grep -v denied",
        "chown 0 /work",
        "umount /proc",
        "umount -l /usr",
    ):
        assert shared.run(command).code != 0, command


TRIES = """
import ctypes, errno, os
libc = ctypes.CDLL(None, use_errno=True)
wrong = ctypes.c_long(-1)
for name, number, *given in {calls}:
    libc.syscall(number, *([*map(ctypes.c_long, given), *[wrong] * 6][:6]))
    print(name, errno.errorcode[ctypes.get_errno()])
"""
"""Makes system calls with arguments that would else be found wrong, and prints their errors."""


def test_doors_into_the_kernel_are_shut(shared: Sandbox) -> None:
    column = MACHINES[os.uname().machine].column
    numbers = {name: both[column] for name, both in REFUSED.items() if both[column] is not None}
    tried = shared.run(["python3", "-c", TRIES.format(calls=list(numbers.items()))])
    assert dict(line.split() for line in tried.stdout.splitlines()) == dict.fromkeys(
        numbers, "EPERM"
    ), tried.stderr


@pytest.mark.parametrize("place", ["self", "1", "2"])
def test_every_process_has_the_filter(shared: Sandbox, place: str) -> None:
    assert "Seccomp:\t2\n" in shared.run(["cat", f"/proc/{place}/status"]).stdout


def test_no_namespace_is_made_and_no_socket_leads_past_them(shared: Sandbox) -> None:
    script = """
import socket, threading
for family in (40, 38, 17):
    try:
        socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        print(error.strerror)
thread = threading.Thread(target=print, args=("a thread",))
thread.start()
thread.join()
socket.socketpair()
"""
    done = shared.run(["python3", "-c", script])
    none = "Address family not supported by protocol"
    assert done.stdout.splitlines() == [none, none, none, "a thread"], done.stderr
    assert "Operation not permitted" in shared.run("unshare --user true").stderr


SEEN = "/usr/local/bin:/usr/bin:/bin"
ORDINARY = {
    "git": "git init -q r && cd r && echo 1 > a && git add a && "
    "git -c user.name=a -c user.email=a@b commit -qm a && git log --oneline | grep a",
    "python3": "cat > a.py <<'.'\n"
    "import asyncio, ctypes, multiprocessing, sqlite3, ssl, subprocess\n"
    "if __name__ == '__main__':\n"
    "    with multiprocessing.Pool(2) as pool:\n"
    "        print(asyncio.run(asyncio.to_thread(pool.map, len, [[1], []])))\n"
    ".\npython3 a.py | grep -F '[1, 0]'",
    "pip3": "mkdir p-1.dist-info && echo N = 3 > p.py && cd p-1.dist-info && "
    "printf 'Metadata-Version: 2.1\\nName: p\\nVersion: 1\\n' > METADATA && "
    "printf 'Wheel-Version: 1.0\\nTag: py3-none-any\\n' > WHEEL && "
    "printf 'p.py,,\\np-1.dist-info/METADATA,,\\n' > RECORD && cd .. && "
    "python3 -m zipfile -c p-1-py3-none-any.whl p.py p-1.dist-info && "
    "pip3 install -q --target t --no-index p-1-py3-none-any.whl && "
    "cd t && python3 -c 'import p; print(p.N)'",
    "gcc": "echo 'int main(){return 0;}' > a.c && gcc a.c -o a && ./a",
    "gdb": "gdb -batch -ex run /bin/true 2>&1 | grep 'exited normally'",
    "strace": "strace -f -o /dev/null true",
    "node": 'node -e \'require("fs").readFile("/etc/passwd", () => console.log(1))\'',
    "tar": "tar -cf a.tar /etc/passwd && tar -xf a.tar",
}


@pytest.mark.parametrize("program", [one for one in ORDINARY if shutil.which(one, path=SEEN)])
def test_ordinary_programs_run(program: str) -> None:
    with opened(limits={"disk_mb": 64}) as sandbox:
        done = sandbox.run(ORDINARY[program], timeout_s=30)
        assert done.code == 0, f"{done.stdout}\n{done.stderr}"


def test_process_1_has_nothing_that_others_have_not(shared: Sandbox) -> None:
    same = "ls -di /proc/1/root/ | cut -d' ' -f1; ls -di / | cut -d' ' -f1"
    assert len(set(shared.run(same).stdout.split())) == 1
    assert shared.run("grep ^CapEff /proc/1/status").stdout.split()[1] == "0" * 16


def test_there_is_no_terminal_to_write_into(shared: Sandbox) -> None:
    assert shared.run("echo x > /dev/tty").code != 0
    push = "import fcntl, termios\nfcntl.ioctl(0, termios.TIOCSTI, b'x')"
    assert "Error" in shared.run(["python3", "-c", push]).stderr


def test_links_lead_nowhere(shared: Sandbox) -> None:
    assert Path(HOST_FILE).exists()
    shared.run(f"ln -sf {HOST_FILE} out; ln -sfn / top; ln -sf ../../../../../../etc/shadow up")
    for path in ("out", "top/etc/shadow", "up", "/proc/1/root/etc/shadow"):
        with pytest.raises(OSError, match=r"No such file|denied"):
            shared.read(path)
    for link in ("self/environ", "self/fd/0", "self/fd/3", "self/mem", "thread-self/environ"):
        shared.run(["ln", "-sf", f"/proc/{link}", "leak"])
        with pytest.raises(OSError, match="No such file"):
            shared.read("leak")
    shared.run("ln -sfn / way")
    shared.write("way/written", b"x")
    assert not Path("/written").exists()


def test_a_root_that_is_moved_away_makes_nothing_on_the_host(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    """Bubblewrap would follow links on its way to where it mounts, when it starts again."""
    victim = tmp_path / "victim"
    victim.mkdir(mode=0o777)
    for path in (victim, *victim.parents[:-2]):
        path.chmod(0o777)
    sandbox.run(f"mv /etc /gone; ln -s /oldroot{victim} /etc; kill -9 -1; sleep 5")
    works(sandbox)
    with pytest.raises(FileNotFoundError):
        sandbox.read("/etc/none")
    assert list(victim.iterdir()) == []
    with_links = sandbox.snapshot()
    assert with_links.fd >= 0


def test_endless_output_is_ended(sandbox: Sandbox) -> None:
    done = sandbox.run("yes", timeout_s=30)
    assert not done.timed_out
    assert done.note == FLOODED
    assert len(done.stdout) < 5000
    shell = sandbox.shell()
    assert shell.run("A=1; yes", timeout_s=30).note == FLOODED
    assert shell.run("echo $A").stdout == "1\n"


def test_escape_sequences_are_only_text(shared: Sandbox) -> None:
    assert shared.run(r"printf '\033[2J\000\377'").stdout == "\x1b[2J\x00\ufffd"


def test_a_shell_cannot_be_told_a_wrong_end(shared: Sandbox) -> None:
    shell = shared.shell()
    done = shell.run("echo 2 0 >&9; false")
    assert done.code == 1
    done = shell.run("(echo 3 0 >/proc/$$/fd/9); false")
    assert shell.run("echo next").stdout == "next\n"


def test_cpu_is_bounded() -> None:
    with opened(limits={"cpu_s": 1}) as one:
        started = time.monotonic()
        done = one.run("while :; do :; done", timeout_s=30)
        assert (done.code, done.timed_out) in ((128 + 24, False), (128 + 9, False))
        assert time.monotonic() - started < 25
