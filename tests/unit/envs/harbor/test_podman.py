"""Images that podman fetches: a stand-in for podman that has one image, and podman itself."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from libra_cli.config.errors import EnvironmentBroken
from libra_cli.envs.harbor.builder import UNUSED_S
from libra_cli.envs.harbor.environment import Harbor
from libra_cli.envs.harbor.podman import PodmanImage
from libra_cli.envs.protocol import ToolCall
from tests.sandboxes import needs_sandboxes

NAME = "localhost/libra-tests:1"
ENV = {"PATH": "/opt/own:/usr/bin:/bin", "WORD": "yes=no"}
STAND_IN = """#!/bin/sh
echo "$@" >> {here}/asked
case "$1 $2" in
  "image exists") test -e {here}/pulled;;
  "pull --quiet") if [ "$3" = {name} ]; then touch {here}/pulled; else
                    echo "Trying to pull" >&2; echo "Error: no such image" >&2; exit 125; fi;;
  "image inspect") echo '{config}';;
  "create --pull") echo c1;;
  "export c1") cat {here}/root.tar;;
  "rm c1") ;;
  *) exit 1;;
esac
"""


@pytest.fixture
def cache() -> Iterator[Path]:
    """A directory that the user nobody can reach, as the sandboxes of root have to."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o755)
        yield Path(directory) / "cache"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The files of an image as podman exports them: a shell of the host, and a program."""
    packed = tmp_path / "packed"
    for name, text in {
        "opt/own/hello": "#!/bin/sh\necho hello $WORD\n",
        "etc/apt/apt.conf.d/00": "",
        "dev/console": "no device",
    }.items():
        (packed / name).parent.mkdir(parents=True, exist_ok=True)
        (packed / name).write_text(text)
        (packed / name).chmod(0o755)
    archive = tmp_path / "root.tar"
    with tarfile.open(archive, "w", dereference=True) as tar:
        tar.add(packed, ".")
        for inside, path in programs().items():
            tar.add(path, inside)
    return archive


def programs() -> dict[str, str]:
    """Programs of the host and the libraries that they load, by their paths in an image."""
    found = {f"bin/{name}": str(shutil.which(name)) for name in ("sh", "bash", "mkdir", "cat")}
    for program in list(found.values()):
        told = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
        libraries = [word for word in told.split() if word.startswith("/")]
        found |= {library.lstrip("/"): library for library in libraries}
    return found


@pytest.fixture
def asked(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put the stand-in in podman's place; what it is asked is in the file returned."""
    config = json.dumps({"Env": [f"{name}={value}" for name, value in ENV.items()]})
    (commands := tmp_path / "bin").mkdir()
    podman = commands / "podman"
    podman.write_text(STAND_IN.format(here=tmp_path, name=NAME, config=config))
    podman.chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    return tmp_path / "asked"


def hello(tmp_path: Path, cache: Path) -> str:
    """Begin a task whose image is made upon podman's, and say hello in it."""
    task = tmp_path / "tasks/one"
    for name, text in {
        "task.toml": "",
        "instruction.md": "Say hello.",
        "environment/Dockerfile": f"FROM {NAME}\nRUN hello > /said\n",
        "tests/test.sh": "#!/bin/bash\n",
    }.items():
        (task / name).parent.mkdir(parents=True, exist_ok=True)
        (task / name).write_text(text)
    environment = Harbor(str(task.parent), base="podman", cache=str(cache))
    assert environment.preparations() == [{"task": "one"}]
    environment.prepare({"task": "one"})
    assert environment.preparations() == []
    try:
        environment.reset({"task": "one"}, 0)
        return environment.step(ToolCall("bash", {"command": "cat /said; hello again"}))
    finally:
        environment.close()


def test_an_image_is_pulled_and_unpacked_once(asked: Path, cache: Path) -> None:
    image = PodmanImage(NAME, cache)
    assert not image.is_unpacked
    image.unpack()
    assert image.env == ENV
    assert (image.root / "opt/own/hello").stat().st_mode & 0o777 == 0o755
    assert not (image.root / "dev/console").exists()
    assert "root" in (image.root / "etc/apt/apt.conf.d/90sandbox").read_text()
    if os.geteuid() == 0:
        assert (image.root / "opt/own/hello").stat().st_uid == 65534
    commands = [line.split()[:2] for line in asked.read_text().splitlines()]
    made = [["image", "inspect"], ["create", "--pull"], ["export", "c1"], ["rm", "c1"]]
    assert commands == [["image", "exists"], ["pull", "--quiet"], *made]
    asked.unlink()
    image.unpack()
    assert not asked.exists()
    left = {path.name.partition("-")[0] for path in cache.iterdir()}
    assert left == {"base"}


def test_an_image_that_nobody_uses_goes_with_the_next(asked: Path, cache: Path) -> None:
    (old := PodmanImage(NAME, cache)).unpack()
    long_ago = time.time() - UNUSED_S - 60
    (used := cache / "base-used").mkdir()
    os.utime(old.root.parent, (long_ago, long_ago))
    other = PodmanImage(f"{NAME}0", cache)
    (asked.parent / "pulled").touch()
    other.unpack()
    assert other.is_unpacked
    assert not old.is_unpacked
    assert used.exists()


def test_what_a_killed_process_had_unpacked_goes(asked: Path, cache: Path) -> None:
    image = PodmanImage(NAME, cache)
    left = Path(f"{image.root.parent}.unfinished-left")
    (left / "made/root/bin").mkdir(parents=True)
    image.unpack()
    assert image.is_unpacked
    assert not left.exists()


def test_an_image_that_is_not_there_is_told_with_the_next_thing_to_type(
    asked: Path, cache: Path
) -> None:
    image = PodmanImage("nobody/has:it", cache)
    with pytest.raises(
        EnvironmentBroken, match="podman pull --quiet nobody/has:it: Error: no such"
    ):
        image.unpack()
    assert not image.is_unpacked


def test_without_podman_it_says_what_to_install(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EnvironmentBroken, match="podman is not installed") as told:
        PodmanImage(NAME, cache).unpack()
    assert told.value.hint
    assert "apt-get install podman" in told.value.hint


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's sandboxes are of another user")
def test_a_cache_that_sandboxes_cannot_reach_is_refused(asked: Path, cache: Path) -> None:
    cache.parent.chmod(0o700)
    with pytest.raises(EnvironmentBroken, match="is closed to others, and the sandboxes of root"):
        PodmanImage(NAME, cache).unpack()


@needs_sandboxes
def test_a_task_is_played_upon_what_podman_has_unpacked(
    asked: Path, tmp_path: Path, cache: Path
) -> None:
    assert hello(tmp_path, cache).split() == ["hello", "yes=no", "hello", "yes=no"]


@needs_sandboxes
@pytest.mark.skipif(shutil.which("podman") is None, reason="podman is not installed")
def test_podman_itself_unpacks_an_image(
    root: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = {
        "driver": "vfs",
        "graphroot": str(tmp_path / "store"),
        "runroot": str(tmp_path / "run"),
    }
    lines = [f'{key} = "{value}"' for key, value in store.items()]
    (tmp_path / "storage.conf").write_text("\n".join(["[storage]", *lines, ""]))
    monkeypatch.setenv("CONTAINERS_STORAGE_CONF", str(tmp_path / "storage.conf"))
    changes = [f"--change=ENV {name}={value}" for name, value in ENV.items()]
    subprocess.run(["podman", "import", *changes, str(root), NAME], check=True, timeout=120)
    assert hello(tmp_path, cache).split() == ["hello", "yes=no", "hello", "yes=no"]
    left = subprocess.run(["podman", "ps", "-aq"], capture_output=True, check=True, timeout=60)
    assert not left.stdout, "a container is left"
