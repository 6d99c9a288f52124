"""The cluster that is there to be broken does what its verbs say, and nothing else."""

from __future__ import annotations

import errno
import socket
import subprocess
import time
from collections.abc import Callable, Iterator

import pytest

from tests.cluster.cluster import Cluster, cluster
from tests.cluster.processes import Role, processes_of
from tests.netns import SshHost, missing

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(90),
    pytest.mark.skipif(bool(missing()), reason=missing()),
]
RUN = "test-cluster"
DEADLINE_S = 20.0


@pytest.fixture(scope="module")
def made() -> Iterator[Cluster]:
    with cluster(2, disk_mb=8) as c:
        yield c


@pytest.fixture(params=[0, 1])
def host(made, request):
    return made.hosts[request.param]


def ssh(c: Cluster, host: SshHost, command: str) -> subprocess.CompletedProcess[str]:
    argv = ["ssh", "-F", c.net.config, "-o", "ConnectTimeout=2", host.address, command]
    return subprocess.run(argv, capture_output=True, text=True, timeout=DEADLINE_S)


def until(condition: Callable[[], object]) -> None:
    give_up = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.02)


def test_a_reboot_empties_the_memory_of_one_host_and_keeps_its_disk(made):
    first, second = made.hosts
    for host in made.hosts:
        ssh(made, host, f"touch /dev/shm/mine {host.disk}/kept")
        ssh(made, host, f"LIBRA_RUN={RUN} LIBRA_PROCESS=agent setsid sleep 99 >/dev/null 2>&1 &")
    boot_id = "cat /proc/sys/kernel/random/boot_id"
    before = [ssh(made, host, boot_id).stdout for host in made.hosts]
    until(lambda: processes_of(RUN, made.net.machine(first).pids()))
    made.reboot(first)
    assert processes_of(RUN, made.net.machine(first).pids()) == []
    (survivor,) = processes_of(RUN, made.net.machine(second).pids())
    assert survivor.role is Role.AGENT
    memory = [ssh(made, host, "ls /dev/shm").stdout.split() for host in made.hosts]
    assert ["mine" in files for files in memory] == [False, True]
    assert "kept" in ssh(made, first, f"ls {first.disk}").stdout
    after = [ssh(made, host, boot_id).stdout for host in made.hosts]
    assert after[0] != before[0]
    assert after[1] == before[1]


def test_a_full_disk_takes_nothing_until_it_is_emptied(made, host):
    write = f"echo word > {host.disk}/new && cat {host.disk}/new"
    made.fill(host)
    assert "No space left" in ssh(made, host, write).stderr
    made.empty(host)
    assert ssh(made, host, write).stdout == "word\n"


def test_an_sshd_that_refuses_leaves_what_runs_alone(made, host):
    ssh(made, host, "LIBRA_RUN=refused setsid sleep 99 >/dev/null 2>&1 &")
    running = made.net.machine(host).pids
    until(lambda: processes_of("refused", running()))
    made.refuse_sshd(host)
    assert "refused" in ssh(made, host, "true").stderr
    made.restart_sshd(host)
    assert ssh(made, host, "echo back").stdout == "back\n"
    assert processes_of("refused", running())


def test_a_cable_that_is_cut_carries_nothing(made, host):
    made.cut(host)
    with pytest.raises(TimeoutError):
        socket.create_connection((host.address, 22), timeout=0.3)
    made.heal(host)
    until(lambda: ssh(made, host, "echo back").stdout == "back\n")


def test_a_slow_cable_takes_its_time(made, host):
    made.slow(host, 1.0)
    began = time.monotonic()
    ssh(made, host, "head -c 200000 /dev/urandom | base64 -w0")
    assert time.monotonic() - began > 1.0
    made.slow(host, 0.0)


def test_a_port_that_somebody_has_cannot_be_taken(made, host):
    bind = "python3 -c 'import socket; socket.socket().bind((\"127.0.0.1\", 21000))'"
    made.squat(host, 21000)
    assert f"Errno {errno.EADDRINUSE}" in ssh(made, host, bind).stderr
    made.release(host)
    assert ssh(made, host, bind).returncode == 0
