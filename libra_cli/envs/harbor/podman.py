"""Unpacks images by podman, which needs neither root nor a daemon; sandboxes begin with the files.

    CACHE/base-DIGEST/root           the files of an image
    CACHE/base-DIGEST/config.json    the rest of it, of which ENV is used
    CACHE/base-DIGEST.lock           held by whoever unpacks it; others wait

The digest is of the image's name: on a host it is pulled and unpacked once, whatever becomes of the
name. podman runs nothing of an image. Where libra runs as root its files belong to nobody, as the
sandboxes do.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from libra_cli.config.errors import EnvironmentBroken
from libra_cli.envs.harbor.builder import UNUSED_S, alone, unfinished

PULL_S = 3600.0
"""Seconds that pulling an image may take, which has gigabytes in the worst case."""
QUICK_S = 300.0
_NOBODY = 65534
_NOT_FILES = ("dev/*", "proc/*", "sys/*")
"""What a sandbox has of its own; devices could be made by root only."""
_APT = "etc/apt/apt.conf.d"
_ONE_USER = 'APT::Sandbox::User "root";\n'
"""apt-get becomes another user to fetch, and a sandbox has one."""


@dataclass(frozen=True, slots=True)
class PodmanImage:
    """An image by its ``name``, and the directory ``cache`` that it is unpacked in."""

    name: str
    cache: Path

    @property
    def root(self) -> Path:
        """Where its files are, once it is unpacked."""
        return self._place / "root"

    @property
    def is_unpacked(self) -> bool:
        """Whether its files are on this host."""
        return self.root.is_dir()

    @property
    def env(self) -> dict[str, str]:
        """The variables that it sets (ENV)."""
        config: Mapping[str, Any] = json.loads((self._place / "config.json").read_bytes()) or {}
        pairs = (one.partition("=") for one in config.get("Env") or ())
        return {name: value for name, _, value in pairs}

    def unpack(self) -> None:
        """Pull it unless podman has it, and unpack it unless that was done before.

        Raises:
            EnvironmentBroken: there is no podman, no such image, or no room for it.
        """
        try:
            with alone(self._place):
                if not self.is_unpacked:
                    _check_reach(self.cache.resolve())
                    self._unpack()
                    self._remove_unused()
                os.utime(self._place)
        except OSError as error:
            raise EnvironmentBroken(
                f"image {self.name} cannot be unpacked in {self.cache}: {error}",
                hint="environment.args: {cache: DIRECTORY}",
            ) from error

    def _unpack(self) -> None:
        if _podman("image", "exists", self.name, may_fail=True).returncode:
            _podman("pull", "--quiet", self.name, timeout_s=PULL_S)
        config = _podman("image", "inspect", "--format", "{{json .Config}}", self.name).stdout
        with (
            unfinished(self._place) as directory,
            _container(self.name) as container,
        ):
            made = directory / "made"
            (root := made / "root").mkdir(parents=True)
            made.chmod(0o755)
            root.chmod(0o755)
            _extract(container, root)
            (made / "config.json").write_bytes(config)
            os.replace(made, self._place)

    def _remove_unused(self) -> None:
        """Remove images that no episode has begun with for as long as what is made upon them."""
        oldest = time.time() - UNUSED_S
        for place in self.cache.glob("base-*/"):
            if place != self._place and place.stat().st_mtime < oldest:
                shutil.rmtree(place, ignore_errors=True)

    @property
    def _place(self) -> Path:
        return self.cache / f"base-{hashlib.sha256(self.name.encode()).hexdigest()[:32]}"


def _check_reach(cache: Path) -> None:
    """Raise EnvironmentBroken if libra runs as root, and nobody cannot reach the directory."""
    if os.geteuid():
        return
    for place in (cache, *cache.parents):
        if not place.stat().st_mode & stat.S_IXOTH:
            raise EnvironmentBroken(
                f"{place} is closed to others, and the sandboxes of root are nobody's",
                hint="environment.args: {cache: /var/cache/libra}",
            )


@contextmanager
def _container(image: str) -> Iterator[str]:
    """Make a container of an image, which never runs, and remove it in the end."""
    name = _podman("create", "--pull", "never", image, "/none").stdout.decode().strip()
    try:
        yield name
    finally:
        _podman("rm", name, may_fail=True)


def _extract(container: str, root: Path) -> None:
    """Write the files of a container to a directory, without those of devices."""
    as_root = os.geteuid() == 0
    if as_root:
        os.chown(root, _NOBODY, _NOBODY)
    left_out = [f"--exclude={one}" for one in _NOT_FILES]
    with tempfile.TemporaryFile(dir=root.parent) as archive:
        _podman("export", container, timeout_s=PULL_S, output=archive)
        archive.seek(0)
        done = subprocess.run(
            ["tar", "-x", "--no-same-owner", *left_out],
            cwd=root,
            stdin=archive,
            capture_output=True,
            timeout=PULL_S,
            user=_NOBODY if as_root else None,
            group=_NOBODY if as_root else None,
            extra_groups=[] if as_root else None,
        )
    if done.returncode:
        raise EnvironmentBroken(f"tar: {_last_line(done.stderr)}")
    if (apt := root / _APT).is_dir():
        (apt / "90sandbox").write_text(_ONE_USER)


def _podman(
    *arguments: str, timeout_s: float = QUICK_S, may_fail: bool = False, output: Any = None
) -> subprocess.CompletedProcess[bytes]:
    """Run podman; its output goes to the file ``output``, or is returned.

    Raises:
        EnvironmentBroken: there is none, or it fails where it may not.
    """
    try:
        done = subprocess.run(
            ["podman", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output or subprocess.PIPE,
            stderr=subprocess.PIPE,
            timeout=timeout_s,
        )
    except FileNotFoundError as error:
        raise EnvironmentBroken(
            "podman is not installed on this host",
            hint="apt-get install podman; or environment.args: {bases: {IMAGE: DIR}}",
        ) from error
    except subprocess.TimeoutExpired as error:
        raise EnvironmentBroken(
            f"podman {' '.join(arguments)}: no end in {timeout_s:g} s"
        ) from error
    if done.returncode and not may_fail:
        raise EnvironmentBroken(
            f"podman {' '.join(arguments)}: {_last_line(done.stderr)}",
            hint=f"podman pull {arguments[-1]}, or environment.args: {{bases: {{IMAGE: DIR}}}}",
        )
    return done


def _last_line(text: bytes) -> str:
    lines = text.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it failed and says nothing"
