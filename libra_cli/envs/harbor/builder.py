"""Makes images in sandboxes, each once on a host, and keeps them as snapshots.

    CACHE/DIGEST.tar      the files that the steps of an image have written
    CACHE/DIGEST.lock     held by whoever makes it; others wait

The digest is of the base, of all steps and of every file that they copy. An image with which no
episode has begun for ``UNUSED_S`` is removed when another one is made.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from libra_cli.config.errors import EnvironmentBroken
from libra_cli.envs.harbor.image import CopyStep, Image, RunStep
from libra_cli.envs.harbor.task_sandbox import HOME, PATH, copy_in, quoted, said
from libra_cli.envs.sandbox.sandbox import Sandbox, Snapshot, open_sandbox
from libra_cli.envs.sandbox.spec import SandboxSpec

UNUSED_S = 30 * 86400.0
"""Seconds for which an image is kept that nobody begins with: longer than any run of ours goes on
with the same tasks."""
_UNFINISHED = ".unfinished-"


@dataclass(frozen=True, slots=True)
class Builder:
    """Where images are kept, and what they are made in: a sandbox, and ``env``, the variables of
    the base."""

    cache: Path
    spec: SandboxSpec
    env: Mapping[str, str] = field(default_factory=dict)

    def is_made(self, image: Image) -> bool:
        """Say whether the files of an image are here already."""
        has_base = self.spec.root is None or Path(self.spec.root).is_dir()
        return has_base and self._file(image).exists()

    def make(self, image: Image, timeout_s: float) -> None:
        """Make an image unless it was made before; a step may take ``timeout_s`` seconds.

        Raises:
            EnvironmentBroken: a step failed, or the host has no room for it.
        """
        with self._made(image, timeout_s):
            pass

    def opened(self, image: Image, timeout_s: float) -> Sandbox:
        """Open a sandbox with the files of an image, made now if they were not made before.

        Raises:
            EnvironmentBroken: a step failed, or the host has no room for it.
        """
        with self._made(image, timeout_s) as file:
            snapshot = Snapshot.load(file)
        try:
            return open_sandbox(self.spec, snapshot)
        finally:
            snapshot.close()

    @contextmanager
    def _made(self, image: Image, timeout_s: float) -> Iterator[Path]:
        """Hold the file of an image, which nobody removes meanwhile."""
        file = self._file(image)
        try:
            with alone(file):
                if not file.exists():
                    self._make(image, file, timeout_s)
                    _remove_unused(self.cache)
                os.utime(file)
                yield file
        except OSError as error:
            raise EnvironmentBroken(
                f"the image of {image.where} cannot be kept in {self.cache}: {error}",
                hint="environment.args: {cache: DIRECTORY}",
            ) from error

    def _file(self, image: Image) -> Path:
        return self.cache / f"{self._digest(image)}.tar"

    def _digest(self, image: Image) -> str:
        root = Path(self.spec.root or "/usr")
        base = [self.spec.root, root.stat().st_mtime_ns, self.spec.user, self.spec.network]
        return hashlib.sha256(json.dumps([image.digest, base]).encode()).hexdigest()[:32]

    def _make(self, image: Image, file: Path, timeout_s: float) -> None:
        with open_sandbox(self.spec) as sandbox:
            _make_directories(sandbox, image)
            for step in image.steps:
                if isinstance(step, CopyStep):
                    _copy(sandbox, step)
                else:
                    _run(sandbox, step, self.env, timeout_s)
            _keep(sandbox.snapshot(), file)


def _keep(snapshot: Snapshot, file: Path) -> None:
    """Save it under another name until it is whole, as a killed process would leave a part."""
    with contextlib.closing(snapshot), unfinished(file) as directory:
        snapshot.save(made := directory / file.name)
        os.replace(made, file)


def _remove_unused(cache: Path) -> None:
    """Remove images that were not begun with for long, and what was begun then and not finished.

    Who still reads an image keeps it until then.
    """
    oldest = time.time() - UNUSED_S
    for file in cache.glob("*.tar"):
        with contextlib.suppress(OSError):  # another process may have removed it
            if file.stat().st_mtime < oldest:
                file.unlink()
    for left in cache.glob(f"*{_UNFINISHED}*/"):
        with contextlib.suppress(OSError):
            if left.stat().st_mtime < oldest:
                shutil.rmtree(left, ignore_errors=True)


def _make_directories(sandbox: Sandbox, image: Image) -> None:
    """Make every WORKDIR, what Harbor mounts, and root's home."""
    places = [*image.directories, HOME, "/logs/verifier", "/logs/agent", "/logs/artifacts"]
    sandbox.run("mkdir -p -- " + " ".join(map(quoted, places)), cwd="/", env={"PATH": PATH})


def _copy(sandbox: Sandbox, step: CopyStep) -> None:
    try:
        whole = [path for path in step.sources if path.is_dir()]
        single = [path for path in step.sources if not path.is_dir()]
        for directory in whole:
            inside = [(path.name, path) for path in sorted(directory.iterdir())]
            copy_in(sandbox, inside, step.target, step.mode)
        if single or step.documents:
            _copy_files(sandbox, step, single)
    except OSError as error:
        raise EnvironmentBroken(f"{step.where}: {error}") from error


def _copy_files(sandbox: Sandbox, step: CopyStep, single: list[Path]) -> None:
    into = step.target.endswith("/") or _is_directory(sandbox, step.target)
    where, _, name = step.target.rstrip("/").rpartition("/")
    directory = step.target if into else where or "/"
    if single:
        named = [(path.name if into else name, path) for path in single]
        copy_in(sandbox, named, directory, step.mode)
    for document, text in step.documents:
        path = f"{directory.rstrip('/')}/{document if into else name}"
        sandbox.write(path, text.encode(), mode=step.mode or 0o644)


def _is_directory(sandbox: Sandbox, path: str) -> bool:
    return sandbox.run(["/bin/sh", "-c", f"test -d {quoted(path)}"], cwd="/").code == 0


def _run(sandbox: Sandbox, step: RunStep, base: Mapping[str, str], timeout_s: float) -> None:
    env = {"PATH": PATH, "HOME": HOME, **base, **step.env}
    done = sandbox.run(step.command, cwd=step.cwd, env=env, timeout_s=timeout_s)
    if not done.code and not done.timed_out:
        return
    how = f"no end in {timeout_s:g} s" if done.timed_out else f"exit status {done.code}"
    offline = not sandbox.spec.network and any(one in step.shown for one in _FETCHERS)
    raise EnvironmentBroken(
        f"{step.where}: RUN {step.shown[:120]}: {how}: {said(done)}",
        hint="the sandbox has no network: make a base that has it (environment.args.bases), or "
        "environment.sandbox: {network: true}"
        if offline
        else "libra help harbor says what a Dockerfile may do",
    )


_FETCHERS = ("apt", "pip", "uv ", "curl", "wget", "npm", "git clone", "apk")
"""Words of commands that mostly want a network."""


@contextmanager
def alone(file: Path) -> Iterator[None]:
    """Keep other threads and processes from making the same image."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until it is closed
        yield


@contextmanager
def unfinished(place: Path) -> Iterator[Path]:
    """A directory beside what is made in it, for whoever makes that ``alone``.

    One that was killed meanwhile has left its own, with up to all files of the image.
    """
    for left in place.parent.glob(f"{place.name}{_UNFINISHED}*/"):
        shutil.rmtree(left, ignore_errors=True)
    prefix = f"{place.name}{_UNFINISHED}"
    with tempfile.TemporaryDirectory(prefix=prefix, dir=place.parent) as directory:
        yield Path(directory)
