"""A trainer of a low-rank adapter: its numbers are PEFT's, and the rest of the model stays."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest

torch = pytest.importorskip("torch", reason="needs the [cpu] extra")
peft = pytest.importorskip("peft", reason="needs the [cpu] extra")

from safetensors.torch import load_file  # noqa: E402
from torch.distributed.checkpoint import FileSystemReader  # noqa: E402
from transformers import AutoModelForCausalLM, Qwen3Config  # noqa: E402

from libra_cli.config.errors import TrainerError  # noqa: E402
from libra_cli.config.training import LoraSpec  # noqa: E402
from libra_cli.core.costs.architecture import PUBLISHED  # noqa: E402
from libra_cli.node.batch.samples import TokenSample, read_samples  # noqa: E402
from libra_cli.node.checkpoints.contents import COMPLETE, about_bytes, about_of  # noqa: E402
from libra_cli.node.checkpoints.export import export  # noqa: E402
from libra_cli.node.losses.protocol import LossInputs, loss_of  # noqa: E402
from libra_cli.node.model.adapter import add_adapter, published_name  # noqa: E402
from libra_cli.node.trainer import checkpoint  # noqa: E402
from libra_cli.node.trainer.trainer import Trainer  # noqa: E402
from libra_cli.node.weights.adapter import adapted, factors_of  # noqa: E402
from tests.trainers import batch, config_of  # noqa: E402

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),
]
LORA = {"rank": 4, "alpha": 8}
TEMPERATURE = 0.9


@pytest.fixture
def make(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Trainer]:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")

    def made(directory: str = "run", **training: Any) -> Trainer:
        home = tmp_path / directory
        return Trainer(config_of(model_dir, home, {"lora": LORA, **training}))

    return made


def samples(step: int) -> tuple[TokenSample, ...]:
    return read_samples(msgpack.unpackb(msgpack.packb(batch(step))), max_len=128)


def copied(trainer: Trainer) -> dict[str, Any]:
    return {name: one.detach().clone() for name, one in trainer.named_once().items()}


def by_peft(model_dir: Path, trainer: Trainer, step: int) -> tuple[dict[str, Any], Any]:
    """The step's gradients with a PeftModel that has the trainer's adapter: of whole logits, one
    trajectory at a time, the KL term towards PEFT's own disabled adapter; and what it thinks of
    the first trajectory."""
    plain = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    model = peft.get_peft_model(
        plain, peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")
    )
    named = {
        name.removeprefix("base_model.model.").replace(".default", ""): one
        for name, one in model.named_parameters()
        if one.requires_grad
    }
    with torch.no_grad():
        for name, tensor in trainer.whole_weights():
            named[name].copy_(tensor)
    loss, given = loss_of(trainer.config.training), samples(step)
    for sample in given:
        ids = torch.tensor(sample.token_ids.astype("int64"))
        places = torch.tensor(sample.loss_mask.astype(bool)).nonzero()[:, 0]

        def logprobs(ids: Any = ids, places: Any = places) -> Any:
            logits = model(input_ids=ids[None]).logits[0, places - 1] / TEMPERATURE
            return logits.log_softmax(-1).gather(-1, ids[places, None])[:, 0]

        with torch.no_grad(), model.disable_adapter():
            reference = logprobs()
        current, count = logprobs(), len(places)
        loss(
            LossInputs(
                logprobs=current,
                proximal=current.detach(),
                rollout=torch.tensor(sample.logprobs)[places],
                advantages=torch.tensor(sample.advantage_of_tokens())[places],
                trajectories=torch.zeros(count, dtype=torch.int64),
                groups=torch.zeros(count, dtype=torch.int64),
                staleness=torch.zeros(count, dtype=torch.int64),
                over=torch.zeros(count, dtype=torch.bool),
                max_len=128,
                reference=reference,
            )
        ).loss.backward()
    first = torch.tensor(given[0].token_ids.astype("int64"))
    with torch.no_grad():
        scores = model(input_ids=first[None]).logits[0, :-1].log_softmax(-1)
    seen = scores.gather(-1, first[1:, None])[:, 0]
    return {name: one.grad for name, one in named.items()}, seen


def test_gradients_and_logprobs_are_peft_s(make: Callable[..., Trainer], model_dir: Path):
    trainer = make(kl_coef=0.1)
    trainer.train(1, samples(1))  # or B would be zero, and the adapter would change nothing
    trainer.train(2, samples(2))
    wanted, seen = by_peft(model_dir, trainer, 3)
    trainer.gradients_of(samples(3))
    assert wanted.keys() == trainer.parameters().keys()
    for name, parameter in trainer.parameters().items():
        assert float((parameter.grad - wanted[name]).norm() / wanted[name].norm()) < 1e-5, name
    ours = torch.tensor(trainer.logprobs_of(samples(3)[0].token_ids.tolist()))
    assert float((ours - seen).abs().max()) < 1e-5


def test_steps_change_the_adapter_and_nothing_else(make: Callable[..., Trainer]):
    trainer = make(weight_decay=0.1)
    before = copied(trainer)
    trainer.train(1, samples(1))
    after = copied(trainer)
    changed = {name for name in after if not torch.equal(before[name], after[name])}
    assert changed
    published = dict(trainer.whole_weights()).keys()
    assert changed <= published
    assert published == trainer.parameters().keys()
    held = {id(one) for one in trainer.optimizer.state}
    assert held == {id(one) for one in trainer.parameters().values()}


def test_only_the_matrices_that_are_named_have_one(make: Callable[..., Trainer]):
    trainer = make(lora={"rank": 2, "alpha": 2, "target_modules": ["q_proj", "down_proj"]})
    layers = {name.split(".", 3)[3] for name in adapted(dict(trainer.whole_weights()))}
    assert layers == {"self_attn.q_proj.weight", "mlp.down_proj.weight"}


def test_an_adapter_that_was_merged_gives_what_the_trainer_computes(
    make: Callable[..., Trainer], model_dir: Path
):
    trainer = make()
    for step in (1, 2, 3):
        trainer.train(step, samples(step))
    published, base = dict(trainer.whole_weights()), load_file(model_dir / "model.safetensors")
    for name in adapted(published):
        base[name] = factors_of(name, published).merged(base[name], 8 / 4, torch.float32)
    merged = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    merged.load_state_dict(base)
    probe = trainer.probe()
    ids = torch.tensor([list(probe.token_ids)])
    with torch.no_grad():
        scores = merged(input_ids=ids).logits[0, :-1].log_softmax(-1)
    told = scores.gather(-1, ids[0, 1:, None])[:, 0]
    assert float((told - torch.tensor(probe.logprobs)).abs().max()) < 1e-4


def test_a_checkpoint_has_the_adapter_alone_and_resumes_exactly(
    make: Callable[..., Trainer], tmp_path: Path
):
    trainer = make()
    trainer.train(1, samples(1))
    path = checkpoint.save(trainer, tmp_path / "checkpoints", ledger={}, keep=2)
    saved = FileSystemReader(path).read_metadata().state_dict_metadata
    weights = {name.removeprefix("model.") for name in saved if name.startswith("model.")}
    assert {published_name(name) for name in weights} == trainer.parameters().keys()
    moments = [name for name in saved if name.endswith(".exp_avg")]
    assert len(moments) == len(weights)
    other = make(directory="other")
    checkpoint.load(other, path)
    for step in (2, 3):
        losses = [one.train(step, samples(step))["loss"] for one in (trainer, other)]
        assert losses[0] == losses[1]
    ours, theirs = copied(trainer), copied(other)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("lora", [None, {"rank": 8, "alpha": 8}])
def test_a_checkpoint_of_other_parameters_is_refused_with_both(
    make: Callable[..., Trainer], tmp_path: Path, lora: Any
):
    trainer = make()
    path = checkpoint.save(trainer, tmp_path / "checkpoints", ledger={}, keep=2)
    with pytest.raises(TrainerError, match=r'"rank": 4.*, and the recipe has') as caught:
        checkpoint.load(make(directory="other", lora=lora), path)
    assert "the recipe" in caught.value.hint


def test_a_checkpoint_of_another_model_is_refused(make: Callable[..., Trainer], tmp_path: Path):
    trainer = make()
    path = checkpoint.save(trainer, tmp_path / "checkpoints", ledger={}, keep=2)
    about = about_of((path / COMPLETE).read_bytes(), path)
    about["adapter"]["base"] = "0" * 64
    (path / COMPLETE).write_bytes(about_bytes(about))
    with pytest.raises(TrainerError, match="an adapter for another model"):
        checkpoint.load(trainer, path)


@pytest.mark.parametrize("merge", [False, True])
def test_what_is_exported_has_the_trainer_s_log_probabilities(
    make: Callable[..., Trainer], model_dir: Path, tmp_path: Path, merge: bool
):
    trainer = make()
    for step in (1, 2, 3):
        trainer.train(step, samples(step))
    path = checkpoint.save(trainer, tmp_path / "checkpoints", ledger={}, keep=2)
    order = {
        "checkpoint": str(path),
        "urls": [],
        "credentials": {},
        "model_dir": str(model_dir),
        "dtype": "float32",
        "out": str(tmp_path / "out"),
        "merge": merge,
        "card": {"name": "small", "base": "base", "tags": ["libra"], "body": "# small"},
    }
    export(order)
    if merge:
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
        assert not list((tmp_path / "out").glob("adapter*"))
    else:
        plain = AutoModelForCausalLM.from_pretrained(model_dir)
        model = peft.PeftModel.from_pretrained(plain, tmp_path / "out")
        names = sorted(file.name for file in (tmp_path / "out").iterdir())
        assert names == ["README.md", "adapter_config.json", "adapter_model.safetensors"]
        assert "library_name: peft" in (tmp_path / "out" / "README.md").read_text()
    probe = trainer.probe()
    ids = torch.tensor([list(probe.token_ids)])
    with torch.no_grad():
        scores = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
    found = scores.gather(-1, ids[0, 1:, None])[:, 0]
    assert float((found - torch.tensor(probe.logprobs)).abs().mean()) < 1e-4


@pytest.mark.parametrize(
    ("name", "targets"),
    [("8B", "all-linear"), ("14B", "all-linear"), ("14B", ["q_proj", "k_proj", "down_proj"])],
)
def test_the_size_of_an_adapter_is_known_from_the_model_s_config(name: str, targets: Any):
    shape = PUBLISHED[f"Qwen3-{name}"]
    lora = LoraSpec.model_validate({"target_modules": targets})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            Qwen3Config(
                vocab_size=shape.vocabulary,
                hidden_size=shape.hidden,
                intermediate_size=shape.inner,
                num_hidden_layers=shape.layers,
                num_attention_heads=shape.query // 128,
                num_key_value_heads=shape.key // 128,
                head_dim=128,
            ),
            dtype=torch.bfloat16,
        )
        add_adapter(model, lora)
    trained = sum(one.numel() for one in model.parameters() if one.requires_grad)
    assert trained == shape.with_adapter(lora).trained
