"""``libra setup`` on real SSH hosts that have nothing but a shell and a Python: no pip, no uv, no
internet. The wheel is made here, of one line of code."""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from libra_cli.app.hosts import mend
from libra_cli.config.errors import HostError
from libra_cli.config.recipe import NodeSpec, Recipe
from libra_cli.core.preflight.findings import Finding, Remedy
from libra_cli.runtime.doctor.environment import Packages, find_uv
from libra_cli.runtime.doctor.remote_files import LocalFiles, copy_file
from libra_cli.runtime.doctor.setup import Setup, SetupResult
from libra_cli.runtime.hosts.cluster import transport_to
from tests.netns import Network, SshHost, missing, network

HAS_UV = shutil.which("uv") is not None or Path(sys.executable).with_name("uv").is_file()

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(180),
    pytest.mark.skipif(bool(missing()), reason=missing() or "hosts can be made"),
]


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    with network(2, tmp_path_factory.mktemp("net")) as hosts:
        yield hosts


@pytest.fixture(autouse=True)
def home(net, monkeypatch):
    monkeypatch.setenv("HOME", str(net.home))


@pytest.fixture
def model() -> Iterator[Path]:
    """Below /dev/shm, of which every host has one of its own."""
    place = Path(f"/dev/shm/libra-test-{os.getpid()}/tiny")
    place.mkdir(parents=True)
    (place / "config.json").write_text("{}")
    (place / "model.safetensors").write_bytes(os.urandom(40 * 2**20))
    yield place
    shutil.rmtree(place.parent)


class Told:
    """What was told of the progress."""

    def __init__(self) -> None:
        self.copied: Counter[str] = Counter()

    def stage(self, host: str, what: str) -> None:
        pass

    def bytes(self, host: str, count: int) -> None:
        self.copied[host] += count


def wheel(directory: Path) -> None:
    """A wheel of the package ``tiny``, which says hello."""
    directory.mkdir()
    info = "tiny-1.0.dist-info"
    files = {
        "tiny.py": "print('hello')\n",
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{name},,\n" for name in files) + f"{info}/RECORD,,\n"
    with zipfile.ZipFile(directory / "tiny-1.0-py3-none-any.whl", "w") as archive:
        for name, text in {**files, f"{info}/RECORD": record}.items():
            archive.writestr(name, text)


def recipe(net: Network, base: Path, path: Path | None = None) -> Recipe:
    nodes = [
        {
            "host": host.address,
            "identity": net.identity,
            "python": str(base / host.name / "env/bin/python"),
            "workdir": str(base / host.name),
            "pool": pool,
        }
        for host, pool in zip(net.hosts, ("rollout", "train"), strict=True)
    ]
    built: dict[str, Any] = {"path": str(path)} if path else {"build": {}}
    return Recipe.model_validate({"nodes": nodes, "model": built})


def prepare(wanted: Recipe, *, wheels: Path | None = None) -> tuple[list[SetupResult], Told]:
    """Environments if there are wheels for them, or else the model."""
    names = [node.name for node in wanted.nodes]
    told = Told()
    environments, models = (names, []) if wheels else ([], names)
    job = Setup(wanted, told, environments=environments, models=models)
    return asyncio.run(job.run(lambda node: Packages(["tiny==1.0"], wheels))), told


def on(net: Network, host: SshHost, command: str) -> str:
    argv = ["ssh", "-F", net.config, host.address, command]
    return subprocess.run(argv, check=True, timeout=20, capture_output=True, text=True).stdout


@pytest.mark.skipif(not HAS_UV, reason="needs uv")
def test_hosts_without_pip_uv_and_internet_get_an_environment_from_wheels(net, tmp_path):
    wheel(tmp_path / "wheels")
    wanted = recipe(net, tmp_path)
    results, told = prepare(wanted, wheels=tmp_path / "wheels")
    assert [one.error for one in results] == ["", ""]
    size = find_uv().stat().st_size + (tmp_path / "wheels/tiny-1.0-py3-none-any.whl").stat().st_size
    assert set(told.copied.values()) == {size}
    for host, node in zip(net.hosts, wanted.nodes, strict=True):
        assert on(net, host, f"{node.python} -c 'import tiny'") == "hello\n"
    again, told = prepare(wanted, wheels=tmp_path / "wheels")
    assert [one.error for one in again] == ["", ""]
    assert sum(told.copied.values()) == 0, "what is there is not copied again"


@pytest.mark.skipif(not HAS_UV, reason="needs uv")
def test_an_environment_of_somebody_else_is_left_alone(net, tmp_path):
    wheel(tmp_path / "wheels")
    theirs = tmp_path / net.hosts[0].name / "env"
    theirs.mkdir(parents=True)
    results, _ = prepare(recipe(net, tmp_path), wheels=tmp_path / "wheels")
    assert "was not made by libra setup" in results[0].error
    assert (list(theirs.iterdir()), results[1].error) == ([], "")


def test_the_model_is_copied_to_hosts_that_lack_it_and_mended_where_it_differs(
    net, tmp_path, model
):
    wanted = recipe(net, tmp_path, model)
    results, told = prepare(wanted)
    assert [one.error for one in results] == ["", ""]
    assert set(told.copied.values()) == {40 * 2**20 + 2}
    on(net, net.hosts[1], f"printf x | dd of={model}/model.safetensors bs=1 seek=99 conv=notrunc")
    results, told = prepare(wanted)
    first, second = (result.done for result in results)
    assert "was there, whole" in first[0]
    assert "1 of 2 files copied" in second[0]
    assert list(told.copied.values()) == [40 * 2**20]
    for host in net.hosts:
        on(net, host, f"rm -r {model}")


def test_a_model_that_only_another_host_has_comes_from_there(net, tmp_path, model):
    wanted = recipe(net, tmp_path, model)
    first, second = net.hosts
    on(net, first, f"mkdir -p {model}; cp /proc/version {model}/config.json")
    shutil.rmtree(model)
    results, _ = prepare(wanted)
    model.mkdir()
    assert [one.error for one in results] == ["", ""]
    assert on(net, second, f"cat {model}/config.json") == Path("/proc/version").read_text()
    for host in net.hosts:
        on(net, host, f"rm -r {model}")


def test_a_file_the_model_does_not_have_is_told_and_not_removed(net, tmp_path, model):
    host = net.hosts[0]
    on(net, host, f"mkdir -p {model}; touch {model}/model-2.safetensors")
    results, _ = prepare(recipe(net, tmp_path, model))
    assert "has model-2.safetensors, which the model does not have" in results[0].error
    assert results[0].hint.endswith(f"rm {model}/model-2.safetensors")
    for host in net.hosts:
        on(net, host, f"rm -r {model}")


@pytest.mark.parametrize("rest", ["ours", "of another file"])
def test_a_copy_that_broke_off_goes_on_where_it_can(net, tmp_path, rest):
    data = os.urandom(20 * 2**20)
    (tmp_path / "file").write_bytes(data)
    target = tmp_path / "there"
    target.mkdir()
    begun = data[: 9 * 2**20] if rest == "ours" else bytes(9 * 2**20)
    (target / "file.part").write_bytes(begun)
    node = recipe(net, tmp_path).nodes[0]
    sent: list[int] = []

    async def scene(node: NodeSpec) -> None:
        transport = transport_to(node)
        await transport.connect()
        try:
            digest = hashlib.sha256(data).hexdigest()
            source = LocalFiles(tmp_path)
            await copy_file(source, "file", digest, transport, str(target), on_bytes=sent.append)
            with pytest.raises(HostError, match="damaged"):
                await copy_file(source, "file", "0", transport, str(target), on_bytes=sent.append)
        finally:
            await transport.close()

    asyncio.run(scene(node))
    assert (target / "file").read_bytes() == data
    assert sent[:2] == [9 * 2**20, 11 * 2**20]
    assert not (target / "file.part").exists()


def test_what_needs_no_root_is_mended_by_the_doctor(net, tmp_path, model):
    keys = {"host", "identity", "workdir", "pool"}
    nodes = [
        {**node.model_dump(mode="json", include=keys), "python": sys.executable}
        for node in recipe(net, tmp_path).nodes
    ]
    text = {"nodes": nodes, "model": {"path": str(model)}}
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(text))
    first, second = net.hosts
    on(net, first, f"mkdir -p /dev/shm/libra-root/dead {tmp_path}/{first.name}/runs/dead/node")
    on(net, first, f"touch {tmp_path}/{first.name}/runs/dead/node/agent.lock")
    found = [
        Finding("remains", first.address, "warns", "", "", Remedy("here", "", fix="remains")),
        Finding("model", second.address, "stops", "", "", Remedy("here", "", fix="model")),
    ]
    told = mend(path, found, Told())
    assert told == [
        f"{second.address}: {model}: 2 of 2 files copied",
        f"{first.address}: removed what is left of dead",
    ]
    assert net.files(first, "/dev/shm/libra-root") == []
    assert net.files(first, str(model)) == []
    on(net, second, f"rm -r {model}")
