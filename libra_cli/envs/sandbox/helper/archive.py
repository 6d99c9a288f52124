"""The files that a sandbox has written, as a tar archive of numbers, names and bytes.

Whoever packs or unpacks has chrooted into the files first, so no link leads out of them, and looks
no account up, for which the C library would load code from there.
"""

from __future__ import annotations

import contextlib
import io
import os
import stat
import tarfile
from collections.abc import Iterator
from typing import IO, Any

_XATTR = "SCHILY.xattr."
_OF_LAYERS = "user.overlay."
"""Extended attributes by which a directory hides the one below it."""


class _FromTheStart(io.RawIOBase):
    """A file by its descriptor, with a position that no other who reads it has."""

    def __init__(self, fd: int) -> None:
        self._fd, self._at = fd, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        size = os.preadv(self._fd, [buffer], self._at)
        self._at += size
        return size

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        bases = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: os.fstat(self._fd).st_size}
        self._at = bases[whence] + offset
        return self._at


def reader(fd: int) -> IO[bytes]:
    """Return what reads an archive from its beginning, whoever else reads it meanwhile."""
    return io.BufferedReader(_FromTheStart(fd))


def pack(file: IO[bytes], top: str = "/") -> None:
    """Write all below a directory into a file.

    Raises:
        OSError: the file cannot be written.
    """
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path in _below(top):
            try:
                member = _described(path, os.path.relpath(path, top))
            except FileNotFoundError:
                continue  # somebody in the sandbox has removed it meanwhile
            if member is None:
                continue
            if not member.isreg():
                archive.addfile(member)
                continue
            with contextlib.suppress(FileNotFoundError), _opened(path) as content:
                member.size = os.fstat(content.fileno()).st_size
                archive.addfile(member, content)


def unpack(file: IO[bytes], top: str = "/") -> None:
    """Write the files of an archive below a directory.

    Raises:
        OSError: they do not fit.
    """
    modes: list[tuple[str, int]] = []
    with tarfile.open(fileobj=file, mode="r:") as archive:
        for member in archive:
            path = os.path.join(top, member.name)
            if member.isdir():
                os.makedirs(path, exist_ok=True)
                modes.append((path, member.mode))
            elif member.issym():
                os.symlink(member.linkname, path)
                continue
            elif member.ischr():  # where a file of the layer below is hidden
                os.mknod(path, stat.S_IFCHR, os.makedev(0, 0))
                continue
            else:
                _write(path, archive.extractfile(member), member)
            for name, value in member.pax_headers.items():
                if name.startswith(_XATTR + _OF_LAYERS):
                    os.setxattr(path, name.removeprefix(_XATTR), value.encode())
            os.utime(path, (member.mtime, member.mtime))
    # Last, as a directory may forbid to write into it.
    for path, mode in reversed(modes):
        os.chmod(path, mode)


def _below(top: str) -> Iterator[str]:
    """All paths below a directory, each after that which it is in."""
    with os.scandir(top) as entries:
        found = sorted(entries, key=lambda entry: entry.name)
    for entry in found:
        yield entry.path
        if entry.is_dir(follow_symlinks=False):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                yield from _below(entry.path)


def _described(path: str, name: str) -> tarfile.TarInfo | None:
    """What an archive says of a path; None of sockets and pipes, which end with their processes."""
    found = os.lstat(path)
    member = tarfile.TarInfo(name)
    member.mode, member.mtime = stat.S_IMODE(found.st_mode), found.st_mtime
    kinds = {
        stat.S_IFREG: tarfile.REGTYPE,
        stat.S_IFDIR: tarfile.DIRTYPE,
        stat.S_IFLNK: tarfile.SYMTYPE,
        stat.S_IFCHR: tarfile.CHRTYPE,
    }
    kind = kinds.get(stat.S_IFMT(found.st_mode))
    if kind is None:
        return None
    member.type = kind
    if member.issym():
        member.linkname = os.readlink(path)
        return member
    layers = {}
    for attribute in os.listxattr(path, follow_symlinks=False):
        if attribute.startswith(_OF_LAYERS):
            value = os.getxattr(path, attribute, follow_symlinks=False)
            layers[_XATTR + attribute] = value.decode()
    member.pax_headers = layers
    return member


def _opened(path: str) -> IO[bytes]:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    return os.fdopen(fd, "rb")


def _write(path: str, content: IO[bytes] | None, member: tarfile.TarInfo) -> None:
    with open(path, "xb") as file:
        while content is not None and (data := content.read(1 << 20)):
            file.write(data)
    os.chmod(path, member.mode)
