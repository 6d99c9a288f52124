"""Which system calls a sandbox is refused: a seccomp filter, as the kernel reads it.

Refused with EPERM are doors into the kernel for which programs of a sandbox have no use, and in
which holes were found again and again. A sandbox has no right that most of them ask for; without
the filter it could still try them. ``clone3`` and the x32 interface do not exist (ENOSYS), as what
they ask for cannot be read here: C libraries then take ``clone``. Sockets are of the families that
namespaces keep apart; one of another (EAFNOSUPPORT) could reach the host's hypervisor.

A filter is a program of classic BPF, instructions of 8 bytes, which falls through to the next rule
or returns. Not by libseccomp: its bindings want that library on every host that plays.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from libra_cli.envs.sandbox.helper import kernel

REFUSED: dict[str, tuple[int | None, int | None]] = {
    # keys, which the kernel keeps for a user and not for a namespace
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    # programs and counters within the kernel, and faults that it waits for
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    # input and output past the system calls
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    # file systems
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "open_tree_attr": (467, 467),
    "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    # namespaces, beside those of ``clone`` and ``unshare`` below
    "setns": (308, 268),
    # the kernel, its modules, its clock and its machine
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "syslog": (103, 116),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "iopl": (172, None),
    "ioperm": (173, None),
}
"""The numbers of system calls that are always refused, on x86_64 and on aarch64."""
_CLONE, _UNSHARE, _CLONE3, _IOCTL, _SOCKET = (56, 220), (272, 97), (435, 435), (16, 29), (41, 198)
_NEW_TIME = 0x80
"""A namespace of ``unshare``; in the flags of ``clone`` it is part of a signal's number."""
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C
"""Requests by which a program types into a terminal that it shares with others."""
_FAMILIES = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK)
_X32 = 0x40000000
"""The bit of system calls of x86_64's interface with short pointers."""

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
"""Offsets in what the kernel tells of a system call (struct seccomp_data)."""
_ALLOWED, _ENDED, _FAILED = 0x7FFF0000, 0x80000000, 0x00050000

_Instruction: TypeAlias = tuple[int, int, int, int]
"""Code, instructions to skip if a test holds and if not, and an operand."""
_Block: TypeAlias = Sequence[_Instruction]


@dataclass(frozen=True, slots=True)
class MachineKind:
    """A kind of machine: its name in seccomp, and its column of the numbers above."""

    audit: int
    column: int


MACHINES = {"x86_64": MachineKind(0xC000003E, 0), "aarch64": MachineKind(0xC00000B7, 1)}
"""The machines for which numbers are known, as uname names them; others have no filter."""


def filter_of(machine: MachineKind) -> bytes:
    """Return the filter for a machine, as the kernel and bubblewrap read it."""
    column = machine.column
    always = [numbers[column] for numbers in REFUSED.values()]
    block = [
        _load(_ARCHITECTURE),
        # Another interface of the same kernel, such as that of 32 bits, has other numbers.
        *_unless(_EQUAL, machine.audit, [_return(_ENDED)]),
        _load(_NUMBER),
        *(_when(_AT_LEAST, _X32, [_fail(errno.ENOSYS)]) if column == 0 else ()),
        *_each(_when(_EQUAL, one, [_refuse()]) for one in always if one is not None),
        *_when(_EQUAL, _CLONE3[column], [_fail(errno.ENOSYS)]),
        *_argument(_CLONE[column], 0, _when(_ANY_BIT, kernel.EVERY_NAMESPACE, [_refuse()])),
        *_argument(
            _UNSHARE[column], 0, _when(_ANY_BIT, kernel.EVERY_NAMESPACE | _NEW_TIME, [_refuse()])
        ),
        *_argument(
            _IOCTL[column],
            1,
            _each(_when(_EQUAL, one, [_refuse()]) for one in (_TIOCSTI, _TIOCLINUX)),
        ),
        *_argument(
            _SOCKET[column],
            0,
            [
                *_each(_when(_EQUAL, one, [_return(_ALLOWED)]) for one in _FAMILIES),
                _fail(errno.EAFNOSUPPORT),
            ],
        ),
        _return(_ALLOWED),
    ]
    return b"".join(struct.pack("=HBBI", *one) for one in block)


def own_filter() -> bytes:
    """Return the filter for this machine; empty where its numbers are not known."""
    machine = MACHINES.get(os.uname().machine)
    return b"" if machine is None else filter_of(machine)


def _load(offset: int) -> _Instruction:
    return (_LOAD, 0, 0, offset)


def _return(what: int) -> _Instruction:
    return (_RETURN, 0, 0, what)


def _fail(number: int) -> _Instruction:
    return _return(_FAILED | number)


def _refuse() -> _Instruction:
    return _fail(errno.EPERM)


def _when(code: int, operand: int, block: _Block) -> _Block:
    """Run a block if a test of what is loaded holds."""
    return [(code, 0, len(block), operand), *block]


def _unless(code: int, operand: int, block: _Block) -> _Block:
    """Run a block if a test of what is loaded does not hold."""
    return [(code, len(block), 0, operand), *block]


def _argument(number: int, argument: int, block: _Block) -> _Block:
    """Run a block upon the lower half of an argument of one system call."""
    return _when(_EQUAL, number, [_load(_ARGUMENTS + 8 * argument), *block, _load(_NUMBER)])


def _each(blocks: Iterable[_Block]) -> _Block:
    return [one for block in blocks for one in block]
