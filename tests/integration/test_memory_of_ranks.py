"""Two ranks of which one runs out of memory: both halve their micro-batches, and neither waits."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

np = pytest.importorskip("numpy", reason="needs the [cpu] extra")
torch = pytest.importorskip("torch", reason="needs the [cpu] extra")

from accelerate.state import AcceleratorState  # noqa: E402

from libra_cli.node.batch.samples import read_samples  # noqa: E402
from libra_cli.node.model.tokenizer import build_tokenizer, save_tokenizer  # noqa: E402
from libra_cli.node.model.warmup import POSITIONS, new_model  # noqa: E402
from libra_cli.node.trainer.trainer import Trainer  # noqa: E402
from tests.ranks import in_ranks, trainer_config  # noqa: E402
from tests.trainers import batch  # noqa: E402

pytestmark = [
    pytest.mark.integration,
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),
]
TOKENS = 160
"""Of a micro-batch, while there is memory: each rank has several."""
EPSILON = 2.0**-8
"""Half the distance of neighbouring numbers in bfloat16, relative to them."""
SHORT = 1
"""The rank whose memory runs out, once."""


class Case(NamedTuple):
    where: str
    """Where memory runs out."""
    again: str = "full"
    bf16: bool = False
    lora: bool = False
    sharding: str = "fsdp2"


CASES = [
    Case("forward", again="selective", bf16=True),
    Case("loss"),
    Case("computed again", lora=True),
    Case("backward", again="none"),
    Case("backward", again="none", sharding="ddp"),  # not in the last, where replicas reduce
]


def in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


class Shortage:
    """Memory that runs out once, in a layer or in the loss."""

    def __init__(self, trainer: Trainer, where: str) -> None:
        self.times = 0
        self._where = where
        mlp = trainer.model.get_decoder().layers[1].mlp
        self._layer, mlp.forward = mlp.forward, self._in_layer
        self._loss, trainer._loss = trainer._loss, self._in_loss

    def _run_out(self, *_: Any) -> None:
        if not self.times:
            self.times += 1
            raise torch.OutOfMemoryError("CUDA out of memory")

    def _in_layer(self, hidden: Any) -> Any:
        learns = torch.is_grad_enabled()
        if learns and self._where == ("computed again" if in_backward() else "forward"):
            self._run_out()  # before: what needs no more of the layer stops in it
        output = self._layer(hidden)
        if learns and self._where == "backward":
            output.register_hook(self._run_out)
        return output

    def _in_loss(self, inputs: Any) -> Any:
        if self._where == "loss":
            self._run_out()
        return self._loss(inputs)


def steps(host: Path, model_dir: Path, case: Case, *, short: bool) -> dict[str, Any]:
    """How far two steps of plain gradient descent move the weights, and how it went."""
    AcceleratorState._reset_state()
    os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16" if case.bf16 else "no"
    training: dict[str, Any] = {
        "activation_checkpointing": case.again,
        "micro_batch_tokens": TOKENS,
        "sharding": case.sharding,
        "warmup_steps": 0,
        "lora": {"rank": 4} if case.lora else None,
    }
    trainer = Trainer(trainer_config(host, model_dir, 2, training))
    where = case.where if short and trainer.rank == SHORT else ""
    trainer.optimizer = torch.optim.SGD(trainer.parameters().values(), lr=0.5)
    before = whole(trainer)
    shortage = Shortage(trainer, where)
    told = [trainer.train(step, read_samples(batch(step), 128)) for step in (1, 2)]
    return {
        "moved": whole(trainer) - before,
        "losses": [one["loss"] for one in told],
        "tokens": trainer.micro_batch_tokens,
        "times": shortage.times,
    }


def whole(trainer: Trainer) -> Any:
    """All weights in one row."""
    return np.concatenate([one.float().numpy().flatten() for _, one in trainer.whole_weights()])


def every_case(host: Path, model_dir: Path) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    return [
        (
            steps(host / f"{number}-roomy", model_dir, case, short=False),
            steps(host / f"{number}-short", model_dir, case, short=True),
        )
        for number, case in enumerate(CASES)
    ]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    model_dir = tmp_path_factory.mktemp("model")
    new_model(build_tokenizer(), seed=0, width=64).save_pretrained(model_dir)
    save_tokenizer(build_tokenizer(), model_dir, max_len=POSITIONS)
    host = tmp_path_factory.mktemp("host")
    return in_ranks([host] * 2, every_case, [(host, model_dir)] * 2)


@pytest.mark.parametrize("number", range(len(CASES)), ids=["-".join(map(str, c)) for c in CASES])
def test_a_rank_that_runs_out_of_memory_halves_all_micro_batches_and_changes_no_result(
    number: int, found: list[Any], record_property: Any
):
    for rank, of_rank in enumerate(found):
        roomy, short = of_rank[number]
        assert (roomy["times"], roomy["tokens"]) == (0, TOKENS)
        assert (short["times"], short["tokens"]) == (int(rank == SHORT), TOKENS // 2)
        apart = np.linalg.norm(short["moved"] - roomy["moved"]) / np.linalg.norm(roomy["moved"])
        record_property("apart", float(apart))
        close = 12 * EPSILON if CASES[number].bf16 else 1e-4
        assert apart < close
        np.testing.assert_allclose(short["losses"], roomy["losses"], rtol=close, atol=close)
