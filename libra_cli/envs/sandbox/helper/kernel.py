"""System calls that Python 3.11 lacks, and how a process gives up its rights for good."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import signal
import struct

from libra_cli.envs.sandbox.spec import SandboxLimits

NEW_USER, NEW_MOUNT, NEW_PID = 0x10000000, 0x00020000, 0x20000000
NEW_NETWORK, NEW_IPC, NEW_UTS, NEW_CGROUP = 0x40000000, 0x08000000, 0x04000000, 0x02000000
EVERY_NAMESPACE = NEW_USER | NEW_MOUNT | NEW_PID | NEW_NETWORK | NEW_IPC | NEW_UTS | NEW_CGROUP
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP = 1, 4, 24
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 38, 47, 4
_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, _BYTES_OF_INSTRUCTION = 22, 2, 8
_LAST_CAPABILITY = 63
_CAPABILITY_VERSION_3 = 0x20080522
_MS_NOSUID, _MS_NODEV, _MS_REC, _MS_PRIVATE = 2, 4, 0x4000, 0x40000
_LIBC = ctypes.CDLL(None, use_errno=True)


def _check(returned: int, what: str) -> None:
    if returned != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(kinds: int) -> None:
    """Move this process into new namespaces of these kinds; it must have one thread.

    Raises:
        OSError: the host does not allow it.
    """
    _check(_LIBC.unshare(kinds), "unshare")


def setns(fd: int, kinds: int) -> None:
    """Move this process into namespaces of the process, or of the namespace, that ``fd`` is of.

    Raises:
        OSError: the process has ended, or this one may not.
    """
    _check(_LIBC.setns(fd, kinds), "setns")


def mount(source: str, target: str, kind: str, options: str) -> None:
    """Mount a file system without devices and set-user-ID programs.

    Raises:
        OSError: the host does not allow it.
    """
    flags = _MS_NOSUID | _MS_NODEV
    words = [word.encode() for word in (source, target, kind)]
    _check(_LIBC.mount(*words, ctypes.c_ulong(flags), options.encode()), f"mount {kind}")


def keep_mounts_private() -> None:
    """Let no mount of this mount namespace be seen in another.

    Raises:
        OSError: this process may not mount.
    """
    _check(_LIBC.mount(b"none", b"/", None, ctypes.c_ulong(_MS_REC | _MS_PRIVATE), None), "mount")


def end_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def adopt_orphans() -> None:
    """Become the parent of what the children of this process leave behind.

    Process 1 of a container may reap nobody, and a sandbox with a zombie in it cannot end.
    """
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def let_nobody_look(hidden: bool) -> None:
    """Keep other processes of the user from reading this one's memory, or allow it again."""
    _LIBC.prctl(_PR_SET_DUMPABLE, int(not hidden), 0, 0, 0)


def drop_capabilities() -> None:
    """Give up every capability, and the ways to get one back.

    Raises:
        OSError: the kernel refuses, so nothing of others may be run.
    """
    for capability in range(_LAST_CAPABILITY + 1):
        if _LIBC.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) != 0:
            if ctypes.get_errno() == errno.EINVAL:
                break  # the kernel knows no more of them
            _check(-1, "capability bounding set")
    _LIBC.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    nothing = (ctypes.c_uint32 * 6)()
    _check(_LIBC.capset(header, nothing), "capset")
    _check(_LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")


def refuse_system_calls(filtered: bytes) -> None:
    """Put a seccomp filter on this process and what it starts, for good; none if it is empty.

    Raises:
        OSError: the kernel has no filters, or may get rights back.
    """
    if filtered:
        block = ctypes.create_string_buffer(filtered, len(filtered))
        size = len(filtered) // _BYTES_OF_INSTRUCTION
        program = struct.pack("@HP", size, ctypes.addressof(block))
        _check(_LIBC.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, program, 0, 0), "seccomp")


def become_nobody(uid: int) -> None:
    """Become another user for good, in none of root's groups.

    Raises:
        OSError: this process is not root.
    """
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def limit(limits: SandboxLimits, *, own_processes: bool) -> None:
    """Set the limits of this process and of what it starts.

    Their number is bounded only where it is counted by itself, and not with all of the user's.
    """
    mib = 1 << 20
    bounds = {
        resource.RLIMIT_AS: limits.memory_mb * mib,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_CPU: limits.cpu_s,
        resource.RLIMIT_FSIZE: limits.disk_mb * mib,
        resource.RLIMIT_MEMLOCK: mib,
        resource.RLIMIT_MSGQUEUE: mib,
        resource.RLIMIT_NOFILE: 1024,
    }
    if own_processes:
        bounds[resource.RLIMIT_NPROC] = limits.processes
    for kind, most in bounds.items():
        _, hard = resource.getrlimit(kind)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))
