"""Which ratio of a token a trainer tells: of its model before the update to the rollout policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import pytest

np = pytest.importorskip("numpy", reason="needs the [cpu] extra")
torch = pytest.importorskip("torch", reason="needs the [cpu] extra")

from libra_cli.node.batch.log_ratios import (  # noqa: E402
    of_all_generated,
    pack_log_ratios,
    read_log_ratios,
    rounded,
)
from libra_cli.node.batch.samples import TokenSample, counted, read_samples  # noqa: E402
from libra_cli.node.model.batching import collate  # noqa: E402
from libra_cli.node.trainer.trainer import Trainer  # noqa: E402
from tests.trainers import batch, config_of  # noqa: E402

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]
CPU = torch.device("cpu")


@pytest.fixture
def make(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Trainer]:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")

    def made(**training: Any) -> Trainer:
        settings = {"learning_rate": 0.05, "warmup_steps": 0, **training}
        return Trainer(config_of(model_dir, tmp_path, settings))

    return made


def samples(step: int, **changes: Any) -> tuple[TokenSample, ...]:
    told = [{**one, **changes} for one in batch(step)]
    return read_samples(msgpack.unpackb(msgpack.packb(told)), max_len=128)


def by_the_model(trainer: Trainer, sample: TokenSample) -> Any:
    """exp(trainer - rollout) of the generated tokens of one sample, by itself and in order."""
    with torch.no_grad():
        logits = trainer.model(torch.tensor(sample.token_ids[None].astype(np.int64))).logits[0]
    said = torch.log_softmax(logits.float() / 0.9, dim=-1)[:-1]
    chosen = said.gather(1, torch.tensor(sample.token_ids[1:].astype(np.int64))[:, None])[:, 0]
    (places,) = np.nonzero(sample.loss_mask)
    return np.exp(chosen.numpy()[places - 1] - sample.logprobs[places])


def assert_told(trainer: Trainer, given: Sequence[TokenSample], expected: Sequence[Any]) -> None:
    found = read_log_ratios(trainer.packed_log_ratios)
    assert found.keys() == {one.key for one in given}
    for one, ratios in zip(given, expected, strict=True):
        np.testing.assert_allclose(np.exp(found[one.key].astype(np.float64)), ratios, rtol=4e-3)


@pytest.mark.parametrize(
    "training",
    [
        {},
        {"micro_batch_tokens": 64},
        {"minibatches": 2, "epochs": 2},
        {"loss": "tba"},
        {"kl_coef": 0.1},
    ],
    ids=str,
)
def test_ratios_are_those_of_the_model_before_the_step(
    make: Callable[..., Trainer], training: dict[str, Any]
):
    trainer = make(**training)
    trainer.train(1, samples(1))
    given = samples(2)
    before = [by_the_model(trainer, one) for one in given]
    trainer.train(2, given)
    assert_told(trainer, given, before)
    after = [by_the_model(trainer, one) for one in given]
    assert np.abs(np.concatenate(after) / np.concatenate(before) - 1).max() > 0.02, "it has moved"


def test_those_of_parts_are_told_with_their_step(make: Callable[..., Trainer]):
    trainer, given = make(), samples(1)
    before = [by_the_model(trainer, one) for one in given]
    trainer.accumulate(given[:8])
    trainer.train(1, given[8:])
    assert_told(trainer, given, before)
    trainer.train(2, samples(2)[:4])
    assert len(read_log_ratios(trainer.packed_log_ratios)) == 4, "nothing of the step before"


def test_tokens_that_do_not_count_have_none(make: Callable[..., Trainer]):
    trainer = make(max_staleness=1, staleness="token")
    given = samples(1, behind=[[0, 3], [8, 0]])
    before = [by_the_model(trainer, one) for one in given]
    for one, ratios in zip(given, before, strict=True):
        ratios[: int(one.loss_mask[:8].sum())] = np.nan
    trainer.train(1, given)
    assert_told(trainer, given, before)


def test_memory_that_ran_out_does_not_change_them(
    make: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
):
    trainer, given = make(), samples(1)
    before = [by_the_model(trainer, one) for one in given]
    backward, left = trainer._backward, [2]

    def once(*arguments: Any) -> dict[str, float]:
        left[0] -= 1
        if not left[0]:
            raise torch.OutOfMemoryError("once")
        return backward(*arguments)

    monkeypatch.setattr(trainer, "_backward", once)
    trainer.train(1, given)
    assert left[0] < 0
    assert_told(trainer, given, before)


def test_what_is_imitated_has_none(make: Callable[..., Trainer]):
    trainer = make(loss="sft")
    trainer.train(1, samples(1))
    assert read_log_ratios(trainer.packed_log_ratios) == {}


def test_branches_of_a_trajectory_are_told_apart(make: Callable[..., Trainer]):
    trainer = make()
    given = [replace(one, group=5, member=0, branch=n) for n, one in enumerate(samples(1))]
    before = [by_the_model(trainer, one) for one in given]
    trainer.train(1, given)
    assert_told(trainer, given, before)


# -- without a model -------------------------------------------------------------------------------


def test_what_is_packed_is_read_again():
    found = {
        (3, 1, 0): np.array([0.5, -2, np.nan], dtype=np.float16),
        (2**52 + 1, 0, 2): np.array([], dtype=np.float16),
        (3, 0, 1): np.array([np.inf], dtype=np.float16),
    }
    again = read_log_ratios(pack_log_ratios(found))
    assert list(again) == list(found)
    for key, values in found.items():
        np.testing.assert_array_equal(again[key], values)
    assert read_log_ratios(pack_log_ratios({})) == {}


@pytest.mark.parametrize("counts", [[2], [4], [-1, 4]])
def test_branches_that_do_not_add_up_are_refused(counts: list[int]):
    branches = np.array([(0, 0, n, count) for n, count in enumerate(counts)], dtype="<i8")
    told = {"branches": branches.tobytes(), "values": bytes(6)}
    with pytest.raises(ValueError, match="3 log-ratios are not those"):
        read_log_ratios(msgpack.packb(told))


def test_what_a_worker_has_counted_otherwise_is_left_out():
    training = config_of(Path(), Path(), {}).training
    given = samples(1)[:2]
    found = {
        given[0].key: np.zeros(given[0].generated, dtype=np.float16),
        given[1].key: np.zeros(given[1].generated + 1, dtype=np.float16),
    }
    assert of_all_generated(given, counted(given, training), found).keys() == {given[0].key}


def test_ratios_are_right_to_four_in_a_thousand():
    nats = np.linspace(-8, 8, 10_001).astype(np.float32)
    off = np.exp(rounded(nats).astype(np.float64) - nats) - 1
    assert np.abs(off).max() < 4e-3
    assert not np.signbit(rounded(np.float32([-1e-4, 0.0]))).any()
    far = rounded(np.float32([-np.inf, np.inf, 1e6, np.nan]))
    np.testing.assert_array_equal(far, np.float16([-np.inf, np.inf, np.inf, np.nan]))


def test_a_batch_has_its_samples_in_the_order_in_which_they_are_told():
    given = samples(1)[:3]
    rows = collate(given, CPU).rows
    assert rows.tolist() == [n for n, one in enumerate(given) for _ in range(one.generated)]
