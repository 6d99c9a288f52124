"""An adapter on experts of a mixture: its passes are those of matrices that it was merged into."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the [cpu] extra")
peft = pytest.importorskip("peft", reason="needs the [cpu] extra")

from safetensors.torch import save_file  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

from libra_cli.config.errors import TrainerError, WeightsError  # noqa: E402
from libra_cli.config.training import LoraSpec  # noqa: E402
from libra_cli.core.costs.architecture import architecture_of  # noqa: E402
from libra_cli.node.batch.samples import TokenSample, read_samples  # noqa: E402
from libra_cli.node.checkpoints.contents import COMPLETE, about_bytes, about_of  # noqa: E402
from libra_cli.node.checkpoints.export import export  # noqa: E402
from libra_cli.node.model.adapter import add_adapter  # noqa: E402
from libra_cli.node.model.weight_names import Conversion  # noqa: E402
from libra_cli.node.rollout.merged_weights import MergedWeights  # noqa: E402
from libra_cli.node.trainer import checkpoint  # noqa: E402
from libra_cli.node.trainer.trainer import Trainer  # noqa: E402
from libra_cli.node.weights.adapter import A, B, adapted  # noqa: E402
from libra_cli.node.weights.checksum import described  # noqa: E402
from libra_cli.node.weights.model_files import tensors_in  # noqa: E402
from tests.families import Family, named_family  # noqa: E402
from tests.trainers import batch, config_of  # noqa: E402

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),
]
LORA = {"rank": 8, "alpha": 16, "experts": True}
MIXTURE = named_family("Qwen3-MoE")
SERVED = ["Qwen3-MoE", "Mixtral", "OLMoE", "GLM 4.5"]


def smaller(family: Family) -> Family:
    return replace(family, config={**family.config, "hidden_size": 64, "vocab_size": 512})


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("mixture")
    smaller(MIXTURE).write(directory)
    return directory


@pytest.fixture
def make(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Trainer]:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")

    def made(directory: str = "run", model: Path = model_dir, **training: Any) -> Trainer:
        given = {"lora": LORA, "learning_rate": 1e-2, "warmup_steps": 0, **training}
        return Trainer(config_of(model, tmp_path / directory, given))

    return made


def samples(step: int) -> list[TokenSample]:
    return list(read_samples(batch(step, groups=1), 128))


def logprobs(model: Any, tokens: Any) -> Any:
    ids = torch.tensor(tokens)[None].long()
    scores = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
    return scores.gather(-1, ids[0, 1:, None])[:, 0]


def merged(trainer: Trainer, directory: Path) -> dict[str, Any]:
    """What a server makes of a version and its own copy of the model, which it proves."""
    directory.mkdir()
    tensors = {name: one.detach().clone() for name, one in trainer.whole_weights()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    told = {name: described(one) for name, one in tensors.items()}
    manifest = {"tensors": told, "adapter": trainer.adapter_manifest()}
    served = MergedWeights(Path(trainer.config.model_dir), directory, manifest, torch.device("cpu"))
    found = {name: one.clone() for name, one in served}
    assert not served.wrong
    return found


def loaded(model_dir: Path, files: dict[str, Any], directory: Path) -> Any:
    """The model of these tensors, one expert after the other."""
    directory.mkdir()
    save_file(files, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_bytes((model_dir / "config.json").read_bytes())
    return AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, experts_implementation="eager"
    )


def test_a_step_changes_the_adapter_and_nothing_else(make: Callable[..., Trainer], model_dir: Path):
    trainer = make()
    before = {name: one.detach().clone() for name, one in trainer.named_once().items()}
    trainer.train(1, samples(1))
    after = trainer.named_once()
    changed = {name for name in after if not torch.equal(before[name], after[name])}
    trained = set(trainer.parameters())
    assert changed == {name for name in trained if name.endswith(B)}  # A's gradient was 0
    trainer.train(2, samples(2))
    changed = {name for name in after if not torch.equal(before[name], after[name])}
    assert changed == trained
    files = {name for name, one in tensors_in(model_dir) if one.ndim == 2}
    outer = {name for name in files if "layers" not in name or ".gate." in name}
    assert adapted(dict(trainer.whole_weights())) == files - outer


@pytest.mark.parametrize("family", SERVED)
def test_merged_matrices_of_the_hub_s_names_compute_what_was_trained(
    family: str, make: Callable[..., Trainer], tmp_path: Path
):
    directory = tmp_path / "files"
    smaller(named_family(family)).write(directory)
    trainer = make(model=directory)
    for step in (1, 2):
        trainer.train(step, samples(step))
    model = loaded(directory, merged(trainer, tmp_path / "version"), tmp_path / "whole")
    probe = trainer.probe()
    with torch.no_grad():
        ours, first = logprobs(model, probe.token_ids), torch.tensor(probe.logprobs)
        base = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        assert float((logprobs(base, probe.token_ids) - first).abs().max()) > 1e-3
    assert float((ours - first).abs().max()) < 1e-5


def test_gradients_are_those_of_matrices_with_their_factors(
    make: Callable[..., Trainer], model_dir: Path, tmp_path: Path
):
    trainer = make(loss="sft")
    for step in (1, 2):
        trainer.train(step, samples(step))
    published = {name: one.detach().clone() for name, one in trainer.whole_weights()}
    leaves = {name: one.requires_grad_() for name, one in published.items()}
    plain = loaded(model_dir, dict(tensors_in(model_dir)), tmp_path / "whole")
    weights = {name: one.detach() for name, one in plain.named_parameters()}
    groups = {name: group for group in trainer._names.groups for name in group.memory}
    for name in weights:
        group, files = groups[name], dict(tensors_in(model_dir))
        parts = {
            one: files[one] + 2.0 * leaves[one[:-7] + B] @ leaves[one[:-7] + A]
            for one in group.disk
            if one in adapted(published)
        }
        if isinstance(group.conversion, Conversion):  # transformers' own would lose the gradients
            experts = zip(*group.conversion.matrices, strict=True)
            weights[name] = torch.stack([torch.cat([parts[one] for one in ex]) for ex in experts])
        elif parts:
            (weights[name],) = parts.values()
    total = torch.zeros(())
    for sample in samples(3):
        ids = torch.tensor(sample.token_ids)[None].long()
        mask = torch.tensor(sample.loss_mask)[1:].bool()
        out = torch.func.functional_call(plain, weights, kwargs={"input_ids": ids})
        scores = (out.logits[0, :-1] / 0.9).log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        total = total - scores[mask].sum()
    total.backward()
    trainer.gradients_of(samples(3))
    found = {name: one.grad for name, one in trainer.parameters().items()}
    for group in trainer.published():
        for name, part in group.to_disk({one: found[one] for one in group.memory}).items():
            apart = (part - leaves[name].grad).norm()
            assert float(apart) < 1e-5 * max(1e-2, float(leaves[name].grad.norm())), name


def test_the_reference_is_the_model_without_it(make: Callable[..., Trainer]):
    trainer = make(kl_coef=0.1)
    assert abs(trainer.train(1, samples(1))["kl"]) < 1e-6
    assert trainer.train(2, samples(2))["kl"] > 1e-6


def test_what_is_cut_for_files_is_put_together_again(make: Callable[..., Trainer]):
    trainer = make()
    named = trainer.named_once()
    for group in trainer.published():
        held = {name: named[name].detach() for name in group.memory}
        back = group.to_memory(group.to_disk(held))
        assert all(torch.equal(back[name], one) for name, one in held.items())
        shapes = {name: tuple(one.shape) for name, one in group.to_disk(held).items()}
        assert shapes == group.disk


@pytest.mark.parametrize("merge", [False, True])
def test_what_is_exported_has_the_trainer_s_log_probabilities(
    merge: bool, make: Callable[..., Trainer], model_dir: Path, tmp_path: Path
):
    trainer = make()
    for step in (1, 2):
        trainer.train(step, samples(step))
    path = checkpoint.save(trainer, tmp_path / "checkpoints", ledger={}, keep=2)
    out = tmp_path / "out"
    export(
        {
            "checkpoint": str(path),
            "urls": [],
            "credentials": {},
            "model_dir": str(model_dir),
            "dtype": "float32",
            "out": str(out),
            "merge": merge,
            "card": {"name": "small", "base": "base", "tags": ["libra"], "body": "# small"},
        }
    )
    if merge:
        model = AutoModelForCausalLM.from_pretrained(out)
    else:
        plain = AutoModelForCausalLM.from_pretrained(model_dir)
        model = peft.PeftModel.from_pretrained(plain, out)
    probe = trainer.probe()
    with torch.no_grad():
        found = logprobs(model, probe.token_ids)
    assert float((found - torch.tensor(probe.logprobs)).abs().max()) < 1e-5


def test_a_checkpoint_resumes_and_one_of_an_older_libra_too(
    make: Callable[..., Trainer], tmp_path: Path
):
    trainer = make()
    trainer.train(1, samples(1))
    path = checkpoint.save(trainer, tmp_path / "checkpoints", ledger={}, keep=2)
    other = make(directory="other")
    checkpoint.load(other, path)
    losses = [one.train(2, samples(2))["loss"] for one in (trainer, other)]
    assert losses[0] == losses[1]
    plain = {"rank": 8, "alpha": 16}
    without = make(directory="without", lora=plain)
    with pytest.raises(TrainerError, match=r'"experts": true.*"experts": false'):
        checkpoint.load(without, path)
    older = checkpoint.save(without, tmp_path / "older", ledger={}, keep=2)
    about = about_of((older / COMPLETE).read_bytes(), older)
    del about["adapter"]["lora"]["experts"]
    (older / COMPLETE).write_bytes(about_bytes(about))
    checkpoint.load(make(directory="again", lora=plain), older)


@pytest.mark.parametrize(
    ("family", "told"),
    [("qwen3", "the experts of Qwen3ForCausalLM are none"), ("gpt_oss", "tensors of another form")],
)
def test_other_models_are_refused(family: str, told: str):
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 64}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes))
    with pytest.raises(TrainerError, match=told):
        add_adapter(model, LoraSpec.model_validate(LORA))


def test_files_that_have_all_experts_in_one_tensor_are_refused(
    make: Callable[..., Trainer], tmp_path: Path
):
    smaller(named_family("Qwen3.5-MoE")).write(tmp_path / "files")
    trainer = make(model=tmp_path / "files")
    with pytest.raises(WeightsError, match="not a matrix each in the model's files"):
        trainer.published()


@pytest.mark.parametrize("family", ["Qwen3-MoE", "GLM 4.5"])
def test_its_size_is_known_from_the_model_s_config(family: str, tmp_path: Path):
    lora = LoraSpec.model_validate(LORA)
    config = named_family(family).text_config()
    with torch.device("meta"):
        model = add_adapter(AutoModelForCausalLM.from_config(config), lora)
    trained = sum(one.numel() for one in model.parameters() if one.requires_grad)
    assert trained == architecture_of(config.to_dict(), family).with_adapter(lora).trained
