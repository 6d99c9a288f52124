"""The files of a sandbox: what is written into memory, and what is seen of the host.

A process in a user and a mount namespace of its own mounts a file system in memory, of a bounded
size, and bubblewrap starts from there. The namespaces outlive bubblewrap, so that the files are
still there when every process of the sandbox has been killed.

    STAGE/files     what the sandbox has written: its root, or the upper layer over ``root``
    STAGE/merged    with ``root``, the two of them as one
    STAGE/shm       /dev/shm, so that it counts, too
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from libra_cli.envs.sandbox.helper import kernel
from libra_cli.envs.sandbox.spec import WORK, SandboxSpec

STAGE = "/sys"
"""Where a sandbox's own mount namespace has its files: a directory that every host has, and that
nothing of a sandbox is read from."""
FILES = f"{STAGE}/files"
_MERGED, _LAYER, _SHM = f"{STAGE}/merged", f"{STAGE}/layer", f"{STAGE}/shm"
_INODES_PER_MB = 100
_LEAST_INODES = 10_000
PROGRAMS = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32")
"""Directories of the host's root that a sandbox without a ``root`` sees."""
ETC = (
    "alternatives",
    "ca-certificates",
    "debian_version",
    "java",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "localtime",
    "magic",
    "mime.types",
    "os-release",
    "perl",
    "pki/ca-trust",
    "pki/tls/certs",
    "python3",
    "ssl/certs",
    "ssl/openssl.cnf",
    "terminfo",
    "timezone",
)
"""What is seen of the host's /etc: what programs and libraries need, and no account."""
USER = "user"


def enter_new_namespaces(size_mb: int) -> None:
    """Move this process into its own user and mount namespace, with empty files at ``STAGE``.

    Raises:
        OSError: the host does not allow it.
    """
    uid, gid = os.getuid(), os.getgid()
    kernel.let_nobody_look(hidden=False)  # else the files below belong to root
    kernel.unshare(kernel.NEW_USER | kernel.NEW_MOUNT)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
    Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    kernel.keep_mounts_private()
    inodes = max(_LEAST_INODES, _INODES_PER_MB * size_mb)
    kernel.mount("libra", STAGE, "tmpfs", f"mode=755,size={size_mb}m,nr_inodes={inodes}")
    os.mkdir(FILES)
    os.mkdir(_SHM, 0o777)
    os.chmod(_SHM, 0o1777)


def furnish(spec: SandboxSpec) -> None:
    """Make what every sandbox has: places to work in, and who its user is."""
    for path, mode in ((WORK, 0o755), ("/tmp", 0o1777), ("/var/tmp", 0o1777)):
        _directory(path, mode)
    if spec.root is None:
        for path, text in _accounts(spec.user).items():
            _directory("/etc", 0o755)
            Path(FILES + path).write_text(text)


def lay_over(root: str) -> None:
    """Mount the written files over a directory of the host, which stays as it is.

    Raises:
        OSError: there is no such directory, or the kernel is older than 5.11.
    """
    os.mkdir(_MERGED)
    os.mkdir(_LAYER)
    lower = os.open(root, os.O_PATH | os.O_DIRECTORY)
    try:
        # By its number, as a path may have a comma or a colon.
        options = f"lowerdir=/proc/self/fd/{lower},upperdir={FILES},workdir={_LAYER},userxattr"
        kernel.mount("libra", _MERGED, "overlay", options)
    finally:
        os.close(lower)


def make_way(spec: SandboxSpec) -> None:
    """Put a directory wherever something is mounted on or below, and the sandbox has put a link.

    Bubblewrap follows links on its way to where it mounts, out of the sandbox, and makes what is
    missing there.
    """
    top = FILES if spec.root is None else _MERGED
    seen = [words[2] for words in _in_threes(list(_seen(spec)))]
    for path in ("/dev/shm", "/proc", *seen):
        *above, last = path.strip("/").split("/")
        at = top
        for name in above:
            at = f"{at}/{name}"
            if os.path.islink(at) or (os.path.lexists(at) and not os.path.isdir(at)):
                os.unlink(at)
            os.makedirs(at, exist_ok=True)
        if os.path.islink(f"{at}/{last}"):
            os.unlink(f"{at}/{last}")


def _in_threes(words: list[str]) -> Iterator[list[str]]:
    return (words[first : first + 3] for first in range(0, len(words), 3))


def bubblewrap(program: str, spec: SandboxSpec, info: int, seccomp: int | None) -> list[str]:
    """Return the command line that starts a sandbox from within its namespaces.

    It writes a line once the sandbox is there, which ends when stdin does. Descriptors: ``info`` is
    told the sandbox's process 1, and ``seccomp`` is read for the filter of system calls.
    """
    network = ["--share-net"] if spec.network else []
    filtered = [] if seccomp is None else ["--seccomp", str(seccomp)]
    return [
        program,
        *("--unshare-all", *network, "--unshare-user", "--disable-userns"),
        *("--uid", str(spec.user), "--gid", str(spec.user)),
        *("--hostname", "sandbox", "--clearenv", "--cap-drop", "ALL"),
        *("--die-with-parent", "--new-session", "--info-fd", str(info)),
        *filtered,
        *("--bind", FILES if spec.root is None else _MERGED, "/"),
        *_seen(spec),
        *("--dev", "/dev", "--bind", _SHM, "/dev/shm", "--remount-ro", "/dev"),
        *("--proc", "/proc", "--chdir", "/"),
        *("--", "/bin/sh", "-c", "echo; read -r over"),
    ]


def _seen(spec: SandboxSpec) -> Iterator[str]:
    """What is bound read only, of the host's programs and of what the recipe names."""
    if spec.root is None:
        for name in PROGRAMS:
            # A directory where the host has a link: what is mounted cannot be removed.
            yield from ("--ro-bind-try", os.path.realpath(f"/{name}"), f"/{name}")
        for name in ETC:
            yield from ("--ro-bind-try", f"/etc/{name}", f"/etc/{name}")
    if spec.network:
        yield from ("--ro-bind-try", "/etc/resolv.conf", "/etc/resolv.conf")
    for path in spec.readable:
        yield from ("--ro-bind", path, path)


def _accounts(user: int) -> dict[str, str]:
    people = {0: "root", user: USER if user else "root", 65534: "nobody"}
    lines = [f"{name}:x:{uid}:{uid}::{WORK}:/bin/sh\n" for uid, name in sorted(people.items())]
    return {
        "/etc/passwd": "".join(lines),
        "/etc/group": "".join(f"{name}:x:{gid}:\n" for gid, name in sorted(people.items())),
        "/etc/hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
        "/etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
    }


def _directory(path: str, mode: int) -> None:
    os.makedirs(FILES + path, exist_ok=True)
    os.chmod(FILES + path, mode)
