"""Two hosts' ranks that share no directory: each has its own part of a checkpoint, and asks.

The ranks are forked from this process, which has imported torch, and meet over gloo; each takes
itself for the first rank of its host.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the [cpu] extra")

from libra_cli.node.checkpoints.server import serve  # noqa: E402
from libra_cli.node.model.tokenizer import build_tokenizer, save_tokenizer  # noqa: E402
from libra_cli.node.model.warmup import POSITIONS, new_model  # noqa: E402
from libra_cli.node.trainer import checkpoint  # noqa: E402
from libra_cli.node.trainer.config import TrainerConfig  # noqa: E402
from libra_cli.node.trainer.samples import read_samples  # noqa: E402
from libra_cli.node.trainer.trainer import Trainer  # noqa: E402
from tests.trainers import TOKEN, batch, free_port, training_spec  # noqa: E402

pytestmark = [
    pytest.mark.integration,
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),
]
WORLD_S = 400


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    tokenizer = build_tokenizer()
    new_model(tokenizer, seed=0).save_pretrained(directory)
    save_tokenizer(tokenizer, directory, max_len=POSITIONS)
    return directory


Work = Callable[[Trainer, Path], Any]


def in_world(hosts: Sequence[Path], model_dir: Path, work: Work, *, incarnation: int) -> list[Any]:
    """What ``work`` returns on every rank; rank i is alone on host i, which has its directory."""
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    port = free_port()
    ranks = [
        context.Process(
            target=_rank,
            args=(rank, len(hosts), port, host, model_dir, work, incarnation, answers),
            daemon=True,
        )
        for rank, host in enumerate(hosts)
    ]
    for rank in ranks:
        rank.start()
    try:
        found = dict(answers.get(timeout=WORLD_S) for _ in ranks)
    finally:
        for rank in ranks:
            rank.kill()
    assert not [problem for problem in found.values() if isinstance(problem, str)], found
    return [found[rank] for rank in range(len(hosts))]


def _rank(
    rank: int,
    world: int,
    port: int,
    host: Path,
    model_dir: Path,
    work: Work,
    incarnation: int,
    answers: Any,
) -> None:
    os.environ |= {
        "ACCELERATE_USE_CPU": "true",
        "GLOO_SOCKET_IFNAME": "lo",
        "LIBRA_TOKEN_FILE": str(host.parent / "token"),
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
    }
    torch.set_num_threads(1)
    try:
        answers.put((rank, work(Trainer(_config(host, model_dir, world, incarnation)), host)))
    except BaseException:  # noqa: BLE001  the parent must hear of it
        answers.put((rank, traceback.format_exc()))


def _config(host: Path, model_dir: Path, world: int, incarnation: int) -> TrainerConfig:
    return TrainerConfig.from_json(
        {
            "run_id": "run",
            "model_dir": str(model_dir),
            "weights_dir": str(host / "weights"),
            "checkpoint_dir": str(host / "checkpoints"),
            "port": 0,
            "world_size": world,
            "trainer_incarnation": incarnation,
            "seed": 0,
            "dtype": "float32",
            "temperature": 0.9,
            "training": training_spec({"sharding": "fsdp2", "keep_checkpoints": 1}),
            "max_len": 128,
        }
    )


def step(trainer: Trainer, number: int) -> tuple[float, dict[str, Any]]:
    """The loss of a step, and all parameters after it."""
    metrics = trainer.train(number, read_samples(batch(number), 128))
    return metrics["loss"], {name: tensor.numpy().copy() for name, tensor in trainer.tensors()}


def save(trainer: Trainer, host: Path, score: float | None) -> str:
    ledger = {"step": trainer.step, "score": score}
    return checkpoint.save(trainer, host / "checkpoints", ledger=ledger, keep=1).name


def worse(first: dict[str, Any], second: dict[str, Any]) -> float:
    assert first.keys() == second.keys()
    return max(float(abs(first[name] - second[name]).max()) for name in first)


def test_hosts_that_share_nothing_go_on_exactly_and_others_ask_for_what_they_lack(
    model_dir: Path, tmp_path: Path
):
    hosts = [tmp_path / name for name in "abc"]
    for host in hosts:
        host.mkdir()
    (tmp_path / "token").write_text(TOKEN)

    def first(trainer: Trainer, host: Path) -> Any:
        step(trainer, 1)
        name = save(trainer, host, 0.5)
        step(trainer, 2)
        save(trainer, host, 0.25)
        step(trainer, 3)
        save(trainer, host, None)
        # The last one stays, and the best.
        kept = sorted(path.name for path in (host / "checkpoints").iterdir())
        return name, kept, len(list((host / "checkpoints" / name).glob("*.distcp"))), host

    for name, kept, files, _ in in_world(hosts[:2], model_dir, first, incarnation=1):
        assert (name, kept, files) == ("step-000001-e1", [name, "step-000003-e1"], 1)

    name = "step-000003-e1"
    servers = [
        serve(host / "checkpoints" / name, "127.0.0.1", range(free_port(), 65000), TOKEN)
        for host in hosts[:2]
    ]
    urls = [f"http://127.0.0.1:{server.server_address[1]}" for server in servers]

    def again(trainer: Trainer, host: Path) -> Any:
        checkpoint.load(trainer, host / "checkpoints" / name, urls)
        assert trainer.step == 3
        ledger = json.loads((hosts[0] / "checkpoints" / name / "ledger.json").read_bytes())
        assert ledger == {"step": 3, "score": None}
        return step(trainer, 4)

    def on(trainer: Trainer, host: Path) -> Any:
        for number in (1, 2, 3):
            step(trainer, number)
        return step(trainer, 4)

    try:
        # Two hosts in the same order, one of them new, the other way round, and one alone.
        wanted = in_world(hosts[:2], model_dir, on, incarnation=2)[0]
        same, _ = in_world(hosts[:2], model_dir, again, incarnation=3)
        moved, _ = in_world([hosts[0], hosts[2]], model_dir, again, incarnation=4)
        turned, _ = in_world([hosts[1], hosts[0]], model_dir, again, incarnation=5)
        (alone,) = in_world([hosts[2]], model_dir, again, incarnation=6)
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()
    for loss, parameters in (same, moved, turned):
        assert loss == wanted[0]
        assert worse(parameters, wanted[1]) == 0
    assert alone[0] == pytest.approx(wanted[0], rel=1e-5)
    assert worse(alone[1], wanted[1]) < 1e-5


def test_a_part_that_no_host_has_is_named(model_dir: Path, tmp_path: Path):
    host = tmp_path / "a"
    host.mkdir()

    def load(trainer: Trainer, host: Path) -> Any:
        save(trainer, host, None)
        directory = host / "checkpoints" / "step-000000-e1"
        next(directory.glob("*.distcp")).unlink()
        with pytest.raises(Exception, match="has no __0_0.distcp, and no other host gives it"):
            checkpoint.load(trainer, directory)
        return None

    in_world([host], model_dir, load, incarnation=1)
