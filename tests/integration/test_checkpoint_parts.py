"""Hosts that share no directory: each has its own part of a checkpoint, and asks for the rest."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the [cpu] extra")

from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

from libra_cli.node.checkpoints.export import export  # noqa: E402
from libra_cli.node.checkpoints.server import serve  # noqa: E402
from libra_cli.node.model.tokenizer import build_tokenizer, save_tokenizer  # noqa: E402
from libra_cli.node.model.warmup import POSITIONS, new_model  # noqa: E402
from tests.credentials import credentials_of, url_of  # noqa: E402
from tests.ranks import TOKENS, Step, go_on, in_world, train  # noqa: E402
from tests.trainers import free_port  # noqa: E402

pytestmark = [
    pytest.mark.integration,
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),
]
OFFLOAD = {"optimizer": "adamw_offload"}
FIRST, LAST = "step-000001-e1", "step-000003-e1"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    tokenizer = build_tokenizer()
    new_model(tokenizer, seed=0).save_pretrained(directory)
    save_tokenizer(tokenizer, directory, max_len=POSITIONS)
    return directory


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    base = tmp_path_factory.mktemp("hosts")
    (base / "credentials.json").write_text(credentials_of().as_json())
    made = [base / name for name in "abc"]
    for host in made:
        host.mkdir()
    return made


@pytest.fixture(scope="module")
def trained(hosts: list[Path], model_dir: Path) -> tuple[list[float], Step]:
    """Three steps on hosts a and b, each with a checkpoint, of which the first is the best; what
    the policy of the last thinks of ``TOKENS``, and the step after it."""
    first, _ = in_world(hosts[:2], model_dir, train, [0.5, 0.25, None])
    found: tuple[list[float], Step] = first
    return found


@contextmanager
def served(hosts: Sequence[Path], name: str) -> Iterator[list[str]]:
    """The URLs of the hosts' parts of a checkpoint."""
    servers = [
        serve(host / "checkpoints" / name, "127.0.0.1", range(free_port(), 65000), credentials_of())
        for host in hosts
    ]
    try:
        yield [url_of(server.server_address[1]) for server in servers]
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()


def furthest(first: dict[str, Any], second: dict[str, Any]) -> float:
    assert first.keys() == second.keys()
    return max(float(abs(first[name] - second[name]).max()) for name in first)


def test_every_host_keeps_its_part_of_the_last_and_of_the_best(hosts, trained):
    for host in hosts[:2]:
        names = sorted(path.name for path in (host / "checkpoints").iterdir())
        assert names == [FIRST, LAST]
        assert len(list((host / "checkpoints" / LAST).glob("*.distcp"))) == 1
        ledger = json.loads((host / "checkpoints" / LAST / "ledger.json").read_bytes())
        assert ledger == {"step": 3, "score": None}


@pytest.mark.parametrize("world", ["ab", "ac", "ba", "c"])
def test_the_next_step_is_the_same_whatever_part_a_host_lacks(
    hosts, trained, model_dir: Path, world: str
):
    chosen = [host for letter in world for host in hosts if host.name == letter]
    with served(hosts[:2], LAST) as urls:
        found = in_world(chosen, model_dir, go_on, LAST, urls, incarnation=2)[0]
    wanted = trained[1]
    assert found.drawn == wanted.drawn
    if len(world) == 2:
        assert found.loss == wanted.loss
        assert furthest(found.parameters, wanted.parameters) == 0
    else:  # one rank adds up in another order than two
        assert found.loss == pytest.approx(wanted.loss, rel=1e-5)
        assert furthest(found.parameters, wanted.parameters) < 1e-5


@pytest.fixture(scope="module")
def hybrid(
    tmp_path_factory: pytest.TempPathFactory, model_dir: Path
) -> tuple[list[Path], list[tuple[list[float], Step]]]:
    """Two steps of two ranks on each of hosts a and b, which have a replica each; moments are in
    the hosts' memory, and worlds of other sizes go on without that."""
    base = tmp_path_factory.mktemp("hybrid")
    (base / "credentials.json").write_text(credentials_of().as_json())
    a, b = made = [base / name for name in "ab"]
    for host in made:
        host.mkdir()
    scores = [0.5, None]
    hosts = [a, a, b, b]
    return made, in_world(hosts, model_dir, train, scores, dp_shard_size=2, training=OFFLOAD)


@pytest.mark.parametrize(("world", "shards"), [("aabb", 2), ("bbaa", 4), ("ab", None), ("a", None)])
def test_what_replicas_of_shards_wrote_together_goes_on_in_any_world(
    hybrid, model_dir: Path, world: str, shards: int | None
):
    (a, b), trained = hybrid
    name = "step-000002-e1"
    sizes = [
        sum(path.stat().st_size for path in (host / "checkpoints" / name).glob("*.distcp"))
        for host in (a, b)
    ]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.2)  # each tensor on one host only
    wanted = trained[0][1]
    assert all(furthest(step.parameters, wanted.parameters) == 0 for _, step in trained)
    with served([a, b], name) as urls:
        chosen = [{"a": a, "b": b}[letter] for letter in world]
        options: dict[str, Any] = {"dp_shard_size": shards, "training": OFFLOAD if shards else {}}
        found = in_world(chosen, model_dir, go_on, name, urls, incarnation=2, **options)[0]
    assert found.loss == pytest.approx(wanted.loss, rel=1e-5)
    if (world, shards) == ("aabb", 2):
        assert found.drawn == wanted.drawn
        assert furthest(found.parameters, wanted.parameters) == 0
    else:  # other worlds add up in another order
        assert furthest(found.parameters, wanted.parameters) < 1e-5


def test_a_part_that_no_host_gives_is_named(hosts, trained, model_dir: Path):
    with pytest.raises(AssertionError, match=r"b.* has no __0_0\.distcp, and no other host gives"):
        in_world(hosts[1:2], model_dir, go_on, LAST, [], incarnation=2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_exported_model_has_the_trainer_s_log_probabilities(
    hosts, trained, model_dir: Path, tmp_path: Path, dtype: str
):
    with served(hosts[1:2], LAST) as urls:
        order = {
            "checkpoint": str(hosts[0] / "checkpoints" / LAST),
            "urls": urls,
            "credentials": asdict(credentials_of()),
            "model_dir": str(model_dir),
            "dtype": dtype,
            "out": str(tmp_path / "model"),
            "card": {"name": "small", "base": "base", "tags": ["libra"], "body": "# small"},
        }
        export(order)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="auto").eval()
    assert str(model.dtype) == f"torch.{dtype}"
    ids = torch.tensor([TOKENS])
    with torch.no_grad():
        logprobs = model(input_ids=ids).logits[0, :-1].float().log_softmax(-1)
    found = logprobs.gather(-1, ids[0, 1:, None])[:, 0]
    gap = float((found - torch.tensor(trained[0])).abs().mean())
    assert gap < (1e-6 if dtype == "float32" else 1e-2)
    assert AutoTokenizer.from_pretrained(tmp_path / "model").chat_template
    card = (tmp_path / "model" / "README.md").read_text()
    assert "base_model: base" in card
    assert "names no licence" in card
