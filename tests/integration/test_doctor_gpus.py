"""``libra doctor`` on a host whose GPUs are troubled: in under 30 seconds it names what is wrong
and the next thing to type.

No GPU is here: nvidia-smi prints listings of ours, and torch sees those of ``tests.fake_gpus``.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import yaml

from libra_cli.node.model.tokenizer import build_tokenizer, save_tokenizer
from tests.fake_gpus import SEES, python_for_cuda
from tests.families import named_family
from tests.live import CHECKOUT, LIBRA, require
from tests.unit.node.test_nvidia import LISTED, SPLIT, gpu, log, process

pytestmark = [
    pytest.mark.integration,
    pytest.mark.vllm,
    pytest.mark.nightly,
    pytest.mark.timeout(180),
]
require("vllm")

LIMIT_S = 30.0
TWO = log(gpu(0), gpu(1))


@dataclass(frozen=True)
class Trouble:
    """What is wrong with a host, and what the doctor says of it."""

    told: str
    next: str
    xml: str = TWO
    seconds: float = 0.0
    env: Mapping[str, str] = field(default_factory=dict)
    without: str = ""
    """A program that is not on PATH."""
    shm: str = ""
    """The size of /dev/shm."""
    pools: tuple[str, ...] = ("rollout", "train")
    shared: bool = False
    """Whether a server and a rank share the first GPU."""
    severity: str = "stops"


SEEN = {**SEES, "FAKE_GPUS": "0 1"}
TROUBLES = {
    "nvidia-smi takes 25 s and torch sees none": Trouble(
        "torch sees 0 GPUs, the recipe uses 2", "nvidia-smi; echo $CUDA_VISIBLE_DEVICES", seconds=25
    ),
    "a holder whose pid is not told": Trouble(
        "GPU 0 is in use by",
        "leave that GPU out of the recipe",
        log(gpu(0, inside=f"<processes>{process('[N/A]')}</processes>"), gpu(1)),
        env=SEEN,
    ),
    "one of two is split into instances": Trouble(
        "process can use one instance only",
        "pool: [train, rollout, rollout]",
        log(gpu(0), SPLIT),
        env={**SEEN, "FAKE_GPUS": "0 1 2"},
        pools=("rollout", "train", "train"),
    ),
    "no compiler": Trouble(
        "there is no C compiler (neither gcc nor clang)",
        "apt-get install gcc python3-dev",
        env=SEEN,
        without="gcc clang cc",
    ),
    "driver 535": Trouble(
        "driver 535.183.01 is older than CUDA 13.0 of its torch needs (580 or newer)",
        "libra help gpus",
        TWO.replace("580.65.06", "535.183.01"),
    ),
    "driver 535 and the compatibility package": Trouble(
        "driver 535.183.01, torch for CUDA 13.0",
        "",
        TWO.replace("580.65.06", "535.183.01"),
        env=SEEN,
        severity="fine",
    ),
    "64 MB of /dev/shm": Trouble(
        "/dev/shm has 64 MiB free, 1.0 GiB are needed",
        "--ipc=host",
        log(gpu(0), gpu(1), gpu(2)),
        env={**SEEN, "FAKE_GPUS": "0 1 2"},
        shm="64m",
        pools=("rollout", "train", "train"),
    ),
    "a shared GPU half of which is taken": Trouble(
        "11.7 GiB of 24.0 GiB of GPU 0 are free, its shares are 21.6 GiB",
        "share: {rollout: 0.15, train: 0.3}",
        log(gpu(0, free="12000 MiB")).replace("81559 MiB", "24564 MiB"),
        env={**SEEN, "FAKE_GPUS": "0"},
        shared=True,
    ),
    "a shared GPU of 24 GB that is free": Trouble(
        "what is shared is free",
        "",
        log(gpu(0, free="24100 MiB")).replace("81559 MiB", "24564 MiB"),
        env={**SEEN, "FAKE_GPUS": "0"},
        shared=True,
        severity="fine",
    ),
}


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment of Python with this one's packages, its torch as a build for CUDA."""
    return python_for_cuda(tmp_path_factory.mktemp("cuda"))


def programs(directory: Path, without: str) -> str:
    """A PATH with every program of this one but some."""
    directory.mkdir()
    for place in os.environ["PATH"].split(":"):
        for entry in Path(place).glob("*"):
            link = directory / entry.name
            if not link.is_symlink() and entry.name not in without.split():
                link.symlink_to(entry)
    return str(directory)


def nvidia_smi(directory: Path, trouble: Trouble) -> str:
    """A directory with an nvidia-smi that prints ``trouble.xml``."""
    directory.mkdir()
    (directory / "xml").write_text(trouble.xml)
    (directory / "list").write_text(LISTED)
    place = directory / "nvidia-smi"
    place.write_text(
        f"#!/bin/sh\nsleep {trouble.seconds}\n"
        f'case "$1" in -L) cat {directory}/list;; *) cat {directory}/xml;; esac\n'
    )
    place.chmod(0o755)
    return str(directory)


def recipe(base: Path, trouble: Trouble, python: Path) -> Path:
    positions = {"vocab_size": 300, "max_position_embeddings": 4096}
    replace(named_family("Qwen2.5"), config=positions).write(base / "model")
    save_tokenizer(build_tokenizer(), base / "model", max_len=4096)
    gpus, pools = len(trouble.pools), list(trouble.pools)
    node = {"gpus": gpus, "slots": gpus, "pool": pools}
    if trouble.shared:
        node = {"gpus": 1, "share": {"rollout": 0.3, "train": 0.6}}
    text = {
        "nodes": [{"host": "local", "python": str(python), **node}],
        "model": {"path": str(base / "model")},
        "environment": {"name": "calculator", "tasks": str(base / "tasks.jsonl")},
        "training": {"groups_per_step": 2},
    }
    (base / "tasks.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n')
    (base / "recipe.yaml").write_text(yaml.safe_dump(text))
    return base / "recipe.yaml"


@pytest.mark.parametrize("trouble", [pytest.param(one, id=name) for name, one in TROUBLES.items()])
def test_what_is_wrong_is_named_in_time(trouble: Trouble, python: Path, tmp_path: Path):
    place = nvidia_smi(tmp_path / "smi", trouble)
    path = programs(tmp_path / "bin", trouble.without) if trouble.without else os.environ["PATH"]
    argv = [*LIBRA, "doctor", str(recipe(tmp_path, trouble, python)), "--json"]
    if trouble.shm:
        mount = f'mount -t tmpfs -o size={trouble.shm} tmpfs /dev/shm && exec "$@"'
        argv = ["unshare", "-m", "sh", "-c", mount, "sh", *argv]
    started = time.monotonic()
    done = subprocess.run(
        argv,
        cwd=tmp_path,
        env={
            **os.environ,
            "HOME": str(tmp_path),
            "PATH": f"{place}:{path}",
            "PYTHONPATH": str(CHECKOUT),
            **trouble.env,
        },
        capture_output=True,
        text=True,
        timeout=150,
    )
    seconds = time.monotonic() - started
    findings = json.loads(done.stdout)
    named = [one for one in findings if trouble.told in one["what"]]
    assert [one["severity"] for one in named] == [trouble.severity], findings
    assert trouble.next in (named[0]["remedy"] or {"command": ""})["command"]
    assert seconds < LIMIT_S + trouble.seconds
