"""The sandbox of one task, with the directory and the variables in which all of it is run."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from libra_cli.config.errors import EnvironmentBroken
from libra_cli.envs.sandbox.sandbox import Completed, Sandbox, Shell

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
HOME = "/root"
COPY_S = 60.0
"""Seconds that copying a task's files into its sandbox may take."""


class TaskSandbox:
    """A sandbox in which scripts of a task are run, as Docker would run them in its image."""

    def __init__(self, sandbox: Sandbox, workdir: str, env: Mapping[str, str]) -> None:
        self.sandbox = sandbox
        self.workdir = workdir
        self.env = {"PATH": PATH, "HOME": HOME, **env}

    def run(
        self, script: str, *, env: Mapping[str, str] | None = None, timeout_s: float = COPY_S
    ) -> Completed:
        """Run a script by ``/bin/sh`` in the task's directory, or in / if that is not there."""
        script = f"cd -- {quoted(self.workdir)} 2>/dev/null || cd /\n{script}"
        return self.sandbox.run(
            ["/bin/sh", "-c", script],
            cwd="/",
            env={**self.env, **(env or {})},
            timeout_s=timeout_s,
        )

    def shell(self) -> Shell:
        """Return a shell that stays, in the task's directory."""
        return self.sandbox.shell(cwd=self.directory(), env=self.env)

    def directory(self) -> str:
        """Return the task's directory, or / if that is not there."""
        there = self.run(f"test -d {quoted(self.workdir)}").code == 0
        return self.workdir if there else "/"

    def put(self, source: Path, target: str) -> None:
        """Copy what is in a directory of the host into one of the sandbox, modes and links too.

        Raises:
            OSError: it does not fit, or the sandbox has no tar.
        """
        copy_in(self.sandbox, [(path.name, path) for path in sorted(source.iterdir())], target)

    def read(self, path: str, limit: int) -> bytes | None:
        """Return the beginning of a file; None if there is none."""
        try:
            return self.sandbox.read(path, limit)
        except OSError:
            return None


def copy_in(
    sandbox: Sandbox, files: list[tuple[str, Path]], target: str, mode: int | None = None
) -> None:
    """Copy files and directories of the host into a directory of the sandbox, each by its name.

    Raises:
        OSError: it does not fit, or the sandbox has no tar.
        EnvironmentBroken: it took too long, which is the host's doing.
    """
    script = f"mkdir -p -- {quoted(target)} && exec tar -xf - -C {quoted(target)}"
    done = sandbox.run(
        ["/bin/sh", "-c", script],
        cwd="/",
        env={"PATH": PATH},
        stdin=_archive(files, mode),
        timeout_s=COPY_S,
    )
    if done.timed_out:
        raise EnvironmentBroken(
            f"files could not be copied to {target} within {COPY_S:g} s",
            hint="environment.workers: fewer episodes at once",
        )
    if done.code:
        raise OSError(f"files cannot be copied to {target}: {said(done) or done.code}")


def quoted(path: str) -> str:
    """Return a path as one word of a shell."""
    return "'" + path.replace("'", "'\\''") + "'"


def said(done: Completed) -> str:
    """Return the end of what a command wrote, and what else happened to it."""
    text = f"{done.stdout}\n{done.stderr}".strip()[-2000:]
    return f"{text} ({done.note})".strip() if done.note else text


def _archive(files: list[tuple[str, Path]], mode: int | None) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, path in _below(files):
            member = archive.gettarinfo(path, name)
            member.uid = member.gid = 0
            member.uname = member.gname = ""
            if member.islnk():  # to what is in it already: a file like others, as COPY makes it
                member.type, member.linkname = tarfile.REGTYPE, ""
                member.size = path.stat().st_size
            if mode is not None and not member.issym():
                member.mode = mode | (0o111 if member.isdir() else 0)
            if member.isreg():
                with path.open("rb") as content:
                    archive.addfile(member, content)
            elif member.isdir() or member.issym():
                archive.addfile(member)
    return made.getvalue()


def _below(files: list[tuple[str, Path]]) -> Iterator[tuple[str, Path]]:
    for name, path in files:
        yield name, path
        if path.is_dir() and not path.is_symlink():
            yield from _below([(f"{name}/{one.name}", one) for one in sorted(path.iterdir())])
