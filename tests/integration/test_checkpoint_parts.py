"""Two hosts' ranks that share no directory: each has its own part of a checkpoint, and asks.

The ranks are forked from this process, which has imported torch, and meet over gloo; each takes
itself for the first rank of its host.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the [cpu] extra")

from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

from libra_cli.config.errors import TrainerError  # noqa: E402
from libra_cli.node.checkpoints.export import export  # noqa: E402
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
TOKENS = list(range(5, 69))


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


@contextmanager
def served(hosts: Sequence[Path], name: str) -> Iterator[list[str]]:
    """The URLs of the hosts' parts of a checkpoint."""
    servers = [
        serve(host / "checkpoints" / name, "127.0.0.1", range(free_port(), 65000), TOKEN)
        for host in hosts
    ]
    try:
        yield [f"http://127.0.0.1:{server.server_address[1]}" for server in servers]
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    base = tmp_path_factory.mktemp("hosts")
    (base / "token").write_text(TOKEN)
    made = [base / name for name in "abc"]
    for host in made:
        host.mkdir()
    return made


LAST = "step-000003-e1"


@pytest.fixture(scope="module")
def saved(hosts: list[Path], model_dir: Path) -> list[Any]:
    """Three steps on hosts a and b, each with a checkpoint, of which the first is the best."""

    def train(trainer: Trainer, host: Path) -> Any:
        for number, score in ((1, 0.5), (2, 0.25), (3, None)):
            step(trainer, number)
            save(trainer, host, score)
        return trainer.logprobs_of(TOKENS)

    return in_world(hosts[:2], model_dir, train, incarnation=1)


def test_every_host_keeps_its_part_of_the_last_and_of_the_best(hosts, saved):
    for host in hosts[:2]:
        names = sorted(path.name for path in (host / "checkpoints").iterdir())
        assert names == ["step-000001-e1", LAST]
        assert len(list((host / "checkpoints" / LAST).glob("*.distcp"))) == 1
        assert json.loads((host / "checkpoints" / LAST / "ledger.json").read_bytes()) == {
            "step": 3,
            "score": None,
        }


def test_hosts_that_share_nothing_go_on_exactly_and_ask_for_what_they_lack(
    hosts, saved, model_dir: Path
):
    def on(trainer: Trainer, host: Path) -> Any:
        for number in (1, 2, 3):
            step(trainer, number)
        return step(trainer, 4)

    loss, parameters = in_world(hosts[:2], model_dir, on, incarnation=2)[0]
    a, b, c = hosts
    with served([a, b], LAST) as urls:

        def again(trainer: Trainer, host: Path) -> Any:
            checkpoint.load(trainer, host / "checkpoints" / LAST, urls)
            assert trainer.step == 3
            return step(trainer, 4)

        for incarnation, world in enumerate(([a, b], [a, c], [b, a]), start=3):
            found = in_world(world, model_dir, again, incarnation=incarnation)[0]
            assert found[0] == loss
            assert worse(found[1], parameters) == 0
        (alone,) = in_world([c], model_dir, again, incarnation=6)
    # One rank adds up in another order than two.
    assert alone[0] == pytest.approx(loss, rel=1e-5)
    assert worse(alone[1], parameters) < 1e-5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_exported_model_has_the_trainer_s_log_probabilities(
    hosts, saved, model_dir: Path, tmp_path: Path, dtype: str
):
    with served(hosts[1:2], LAST) as urls:
        order = {
            "checkpoint": str(hosts[0] / "checkpoints" / LAST),
            "urls": urls,
            "token": TOKEN,
            "model_dir": str(model_dir),
            "dtype": dtype,
            "out": str(tmp_path / "model"),
            "card": {"name": "small", "base": "base", "tags": ["libra"], "body": "# small"},
        }
        export(order)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="auto").eval()
    assert str(model.dtype) == f"torch.{dtype}"
    with torch.no_grad():
        ids = torch.tensor([TOKENS])
        logprobs = model(input_ids=ids).logits[0, :-1].float().log_softmax(-1)
    found = logprobs.gather(-1, ids[0, 1:, None])[:, 0]
    gap = float((found - torch.tensor(saved[0])).abs().mean())
    assert gap < (1e-6 if dtype == "float32" else 2e-2)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer.chat_template
    card = (tmp_path / "model" / "README.md").read_text()
    assert "base_model: base" in card
    assert "names no licence" in card


def test_a_part_that_no_host_has_is_named(model_dir: Path, tmp_path: Path):
    host = tmp_path / "a"
    host.mkdir()

    def load(trainer: Trainer, host: Path) -> Any:
        save(trainer, host, None)
        directory = host / "checkpoints" / "step-000000-e1"
        next(directory.glob("*.distcp")).unlink()
        with pytest.raises(TrainerError, match=r"has no __0_0\.distcp, and no other host gives it"):
            checkpoint.load(trainer, directory)

    in_world([host], model_dir, load, incarnation=1)
