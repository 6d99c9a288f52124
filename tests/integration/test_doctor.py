"""``libra doctor`` on real SSH hosts finds nothing wrong, and then everything that is made wrong.

No host here can have another clock than this machine (Linux has no namespace for it), nor a GPU:
both are checked by rules alone, in ``tests/unit/core/preflight``.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from libra_cli.node.model.tokenizer import build_tokenizer, save_tokenizer
from tests.families import named_family
from tests.live import LIBRA, _environment, require
from tests.netns import Network, SshHost, missing, network

pytestmark = [
    pytest.mark.integration,
    pytest.mark.vllm,
    pytest.mark.timeout(240),
    pytest.mark.skipif(bool(missing()), reason=missing() or "hosts can be made"),
]
require("vllm")

LIMIT_S = 200.0


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    with network(3, tmp_path_factory.mktemp("net")) as hosts:
        yield hosts


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "tiny"
    positions = {"vocab_size": 300, "max_position_embeddings": 4096}
    replace(named_family("Qwen2.5"), config=positions).write(directory)
    save_tokenizer(build_tokenizer(), directory, max_len=4096)
    return directory


def on(net: Network, host: SshHost, command: str) -> None:
    subprocess.run(["ssh", "-F", net.config, host.address, command], check=True, timeout=20)


def recipe(net: Network, hosts: int, model: Path, base: Path, **changes: Any) -> Path:
    """``changes`` by host: keys of its node."""
    nodes = [
        {
            "host": host.address,
            "identity": net.identity,
            "python": sys.executable,
            "workdir": str(base / host.name),
            "env": {"OMP_NUM_THREADS": "1"},
            "pool": "rollout" if host.name == "host-1" else "train",
            **changes.get(host.name.replace("-", "_"), {}),
        }
        for host in net.hosts[:hosts]
    ]
    text = {
        "nodes": nodes,
        "model": {"path": str(model)},
        "environment": {"name": "calculator", "tasks": str(base / "tasks.jsonl")},
        "training": {"groups_per_step": 2},
        "weight_sync": {"trusted_interface": "eth0"},
    }
    path = base / "recipe.yaml"
    path.write_text(yaml.safe_dump(text))
    (base / "tasks.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n')
    return path


def doctor(net: Network, path: Path, *more: str) -> tuple[int, list[dict[str, Any]]]:
    done = subprocess.run(
        [*LIBRA, "doctor", str(path), "--json", *more],
        cwd=path.parent,
        env=_environment(net.home),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def wrong(findings: list[dict[str, Any]]) -> dict[tuple[str, str], str]:
    return {
        (one["host"], one["check"]): one["what"] for one in findings if one["severity"] != "fine"
    }


def test_three_good_hosts_have_no_finding_and_nothing_is_left_on_them(net, model, tmp_path):
    path = recipe(net, 3, model, tmp_path)
    code, found = doctor(net, path)
    others = wrong(found)
    of_the_model = others.pop(("all hosts", "template"))
    assert "does not show the tools' schemas" in of_the_model, "the small model's shows none"
    assert (code, others) == (0, {})
    told = {one["check"]: one["what"] for one in found}
    assert "gloo over eth0" in told["all-reduce"]
    assert "Gb/s" in told["bandwidth"]
    assert "gloo over eth0, not encrypted, where hosts meet in" in told["fabric"]
    assert "tensors of the files are those of Qwen2ForCausalLM" in told["names"]
    for host in net.hosts:
        assert list((tmp_path / host.name / "runs").iterdir()) == []
        assert net.files(host, "/dev/shm") in ([], ["/dev/shm/libra-root"])


def test_everything_that_is_made_wrong_is_found(net, model, tmp_path):
    first, second, third = net.hosts
    other = tmp_path / "other"
    shutil.copytree(model, other)
    weights = other / "model-00001-of-00002.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"1")
    venv.create(tmp_path / "bare")
    path = recipe(
        net,
        3,
        model,
        tmp_path,
        host_1={"python": str(tmp_path / "bare/bin/python")},
        host_3={"env": {"GLOO_SOCKET_IFNAME": "eth7"}},
    )
    on(net, second, f"mount --bind {other} {model}")
    on(net, third, "mount -o remount,size=64m /dev/shm")
    try:
        code, found = doctor(net, path)
    finally:
        on(net, second, f"umount {model}")
        on(net, third, "mount -o remount,size=50% /dev/shm")
    bad = wrong(found)
    assert code == 3
    assert "vllm" in bad[first.address, "packages"]
    assert weights.name in bad[third.address, "model"], "what the head has is the measure"
    assert "64 MiB" in bad[third.address, "shm"]
    assert "eth7" in bad[third.address, "network"]
    assert "eth7" in bad[f"{second.address} + {third.address}", "all-reduce"]
