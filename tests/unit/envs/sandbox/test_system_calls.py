"""The filter of system calls, read as the kernel reads it, for machines of both kinds."""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Callable

import pytest

from libra_cli.envs.sandbox.helper import kernel
from libra_cli.envs.sandbox.helper.system_calls import MACHINES, filter_of

ALLOWED, ENDED, FAILED = 0x7FFF0000, 0x80000000, 0x00050000
MOST_INSTRUCTIONS = 4096
CALLS = {
    "x86_64": {
        "add_key": 248,
        "bpf": 321,
        "clone": 56,
        "clone3": 435,
        "execve": 59,
        "fork": 57,
        "io_uring_setup": 425,
        "ioctl": 16,
        "keyctl": 250,
        "kexec_load": 246,
        "mount": 165,
        "perf_event_open": 298,
        "ptrace": 101,
        "read": 0,
        "setns": 308,
        "socket": 41,
        "unshare": 272,
        "userfaultfd": 323,
    },
    "aarch64": {
        "add_key": 217,
        "bpf": 280,
        "clone": 220,
        "clone3": 435,
        "execve": 221,
        "io_uring_setup": 425,
        "ioctl": 29,
        "keyctl": 219,
        "kexec_load": 104,
        "mount": 40,
        "perf_event_open": 241,
        "ptrace": 117,
        "read": 63,
        "setns": 268,
        "socket": 198,
        "unshare": 97,
        "userfaultfd": 282,
    },
}
"""Numbers of some system calls, of the kernel's own headers."""


def ruled(program: bytes, number: int, arguments: tuple[int, ...], audit: int) -> int:
    """Run a filter upon a system call; returns what it returns."""
    told = struct.pack("=IIQ6Q", number, audit, 0, *(*arguments, *[0] * 6)[:6])
    at, loaded = 0, 0
    holds: dict[int, Callable[[int], bool]] = {
        0x15: lambda operand: loaded == operand,
        0x35: lambda operand: loaded >= operand,
        0x45: lambda operand: bool(loaded & operand),
    }
    while True:
        code, yes, no, operand = struct.unpack_from("=HBBI", program, 8 * at)
        at += 1
        if code == 0x06:
            return int(operand)
        if code == 0x20:
            (loaded,) = struct.unpack_from("=I", told, operand)
        else:
            at += yes if holds[code](operand) else no


@pytest.fixture(params=MACHINES)
def rule(request: pytest.FixtureRequest) -> Callable[..., int]:
    """Ask the filter of a machine about a system call by its name."""
    machine = MACHINES[request.param]
    program, calls = filter_of(machine), CALLS[request.param]
    assert len(program) % 8 == 0
    assert len(program) // 8 <= MOST_INSTRUCTIONS

    def asked(call: str | int, *arguments: int, audit: int = machine.audit) -> int:
        number = call if isinstance(call, int) else calls[call]
        return ruled(program, number, arguments, audit)

    return asked


def test_doors_into_the_kernel_are_refused(rule: Callable[..., int]) -> None:
    refused = ("keyctl", "add_key", "bpf", "perf_event_open", "userfaultfd", "io_uring_setup")
    for call in (*refused, "mount", "setns", "kexec_load"):
        assert rule(call) == FAILED | errno.EPERM, call


def test_what_programs_need_is_allowed(rule: Callable[..., int]) -> None:
    for call in ("read", "execve", "ptrace"):
        assert rule(call) == ALLOWED, call


@pytest.mark.parametrize("call", ["clone", "unshare"])
def test_namespaces_are_refused_and_threads_are_not(rule: Callable[..., int], call: str) -> None:
    threads = 0x003D0F00  # what a C library asks for
    assert rule(call, threads) == ALLOWED
    assert rule(call, 17) == ALLOWED, "SIGCHLD, as of fork"
    kinds = [kernel.NEW_USER, kernel.NEW_MOUNT, kernel.NEW_PID, kernel.NEW_NETWORK]
    for kind in (*kinds, kernel.NEW_IPC, kernel.NEW_UTS, kernel.NEW_CGROUP):
        assert rule(call, kind | 17) == FAILED | errno.EPERM
    assert rule("unshare", 0x80) == FAILED | errno.EPERM, "of time"


def test_flags_that_cannot_be_read_are_none(rule: Callable[..., int]) -> None:
    assert rule("clone3") == FAILED | errno.ENOSYS


def test_nobody_types_into_a_terminal(rule: Callable[..., int]) -> None:
    for request in (0x5412, 0x541C, 1 << 32 | 0x5412):
        assert rule("ioctl", 0, request) == FAILED | errno.EPERM
    assert rule("ioctl", 0, 0x5413) == ALLOWED, "the size of a terminal"
    assert rule("ioctl", 0x5412, 0) == ALLOWED, "a descriptor of that number"


def test_sockets_are_of_families_that_namespaces_keep_apart(rule: Callable[..., int]) -> None:
    for known in (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK):
        assert rule("socket", known, 1, 0) == ALLOWED
    for family in (socket.AF_VSOCK, socket.AF_ALG, socket.AF_PACKET):
        assert rule("socket", family, 1, 0) == FAILED | errno.EAFNOSUPPORT


def test_another_interface_of_the_kernel_ends_the_process(rule: Callable[..., int]) -> None:
    for audit in (0x40000003, 0x40000028):  # x86 and ARM of 32 bits
        assert rule("read", audit=audit) == ENDED


def test_the_interface_with_short_pointers_is_not_there() -> None:
    machine = MACHINES["x86_64"]
    for number in (0, CALLS["x86_64"]["keyctl"]):
        told = ruled(filter_of(machine), 0x40000000 | number, (), machine.audit)
        assert told == FAILED | errno.ENOSYS
