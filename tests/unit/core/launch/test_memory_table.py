"""The lines on memory of a dry run."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from libra_cli.app.dry_run import plan_of
from libra_cli.config.errors import LibraError
from libra_cli.config.recipe import Recipe
from libra_cli.core.costs.architecture import PUBLISHED
from libra_cli.core.costs.memory import trainer_overhead_gib
from libra_cli.core.launch.memory_table import MemoryLine, memory_table, unfit
from libra_cli.core.launch.placement import initial_plan, slots_of
from tests.package_graph import ROOT

RECIPE = """
nodes:
  - {host: gpu, gpus: 2, slots: 2, pool: [rollout, train]}
model: {max_len: 4096, path: %s}
"""


def lines(tmp_path: Path, path: str) -> tuple[str, ...]:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE % path)
    return plan_of(recipe)[1].memory


def test_trainer_and_servers_are_told_with_the_gpus_that_they_fit(tmp_path: Path):
    source, trainer, longest, server, transfers = lines(tmp_path, "/models/Qwen3-1.7B")
    assert "is not on this machine; by what is published of Qwen3-1.7B" in source
    assert "trainer, each of 1 rank, micro-batches of 8,192 tokens" in trainer
    assert "fits GPUs of 40 GB or more" in trainer
    assert "by training.cp_size: 1: 48 GB 36," in longest
    assert "a context of 4,096 tokens 0.44 GiB" in server
    assert "a version 3.44 GB, to a host 2.8 s at 10 Gb/s" in transfers
    assert "a checkpoint 20.65 GB" in transfers


def test_of_a_micro_batch_that_ranks_share_each_holds_its_part(tmp_path: Path):
    recipe = tmp_path / "recipe.yaml"
    found: list[str] = []
    for size in (1, 4):
        recipe.write_text(
            "nodes: [{host: a, gpus: 4, pool: train}, {host: b, gpus: 1, pool: rollout}]\n"
            "model: {max_len: 65536, path: /models/Qwen3-8B}\n"
            f"training: {{cp_size: {size}, micro_batch_tokens: 65536}}\n"
        )
        found += plan_of(recipe)[1].memory[1:3]
    assert "micro-batches of 65,536 tokens" in found[0]
    assert "micro-batches that 4 ranks share, each with 16,384 tokens" in found[2]
    by_degree = [re.findall(r"(\d+): [^;]*80 GB ([\d,]+)", line) for line in (found[1], found[3])]
    assert [degree for degree, _ in by_degree[0]] == ["1"]
    assert [degree for degree, _ in by_degree[1]] == ["4"]
    alone, together = (int(one[0][1].replace(",", "")) for one in by_degree)
    assert together == pytest.approx(4 * alone, rel=0.001)


def test_gradients_of_a_worker_are_told_as_they_are_sent(tmp_path: Path):
    halved = "/models/Qwen3-1.7B}\ntraining: {worker_gradients: bfloat16"
    for path, told in (("/models/Qwen3-1.7B", "6.88"), (halved, "3.44")):
        assert f"gradients of a worker {told} GB" in lines(tmp_path, path)[-1]


def test_of_an_adapter_versions_and_checkpoints_are_small_and_the_model_fits(tmp_path: Path):
    more = "/models/Qwen3-14B}\ntraining: {lora: {}, micro_batch_tokens: 4096}\n#"
    source, trainer, _, _, transfers = lines(tmp_path, more)
    assert "14.8 billion parameters, of an adapter 64.2 million, which are trained" in source
    assert "fits GPUs of 40 GB or more" in trainer
    assert "a version 0.13 GB, to a host 0.1 s at 10 Gb/s" in transfers
    assert "gradients of a worker 0.26 GB; a checkpoint 0.77 GB" in transfers


def test_moments_in_the_host_s_memory_are_told_apart(tmp_path: Path):
    recipe = tmp_path / "recipe.yaml"
    offload = "training: {optimizer: adamw_offload}\n"
    recipe.write_text(RECIPE % "/models/Qwen3-1.7B" + offload)
    trainer = plan_of(recipe)[1].memory[1]
    assert "trainer (and 12.8 GiB in the host's memory), each of 1 rank" in trainer
    assert "moments" not in trainer


def test_activations_that_the_host_holds_are_told(tmp_path: Path):
    """Of 28 layers of 2,048 numbers: a rank of its own has them in float32."""
    recipe = tmp_path / "recipe.yaml"
    more = "training: {activation_offload: true, micro_batch_tokens: 65536}\n"
    recipe.write_text(RECIPE % "/models/Qwen3-1.7B" + more)
    trainer = plan_of(recipe)[1].memory[1]
    held = 28 * 2048 * 4 * 65536 / 2**30
    assert f"(and {held:.1f} GiB of activations locked in its host's memory" in trainer
    assert f"{held:.1f} GiB of a slot of 1)" in trainer


def test_gpus_that_hold_products_too_are_told_once(tmp_path: Path):
    small = "/models/Qwen3-0.6B}\ntraining: {micro_batch_tokens: %d}\n#"
    more = {tokens: lines(tmp_path, small % tokens)[1] for tokens in (8192, 32768)}
    assert more[8192].endswith(
        "; fits GPUs of 24 GB or more, also with activation_checkpointing: selective (auto)"
    )
    assert more[32768].endswith(
        "; fits GPUs of 24 GB or more, and 80 GB or more with "
        "activation_checkpointing: selective (auto)"
    )


def test_a_server_that_fits_the_largest_gpus_alone_is_told_with_them(tmp_path: Path):
    longer = "/models/Qwen3-32B}\nrollout: {gpu_memory: 0.5}\n#"
    assert "on GPUs of 141 GB" in lines(tmp_path, longer)[3]
    server = lines(tmp_path, longer.replace("0.5", "0.3"))[3]
    assert "on GPUs of 268 GB" in server
    assert "server" not in {line.kind for line in plan_of(tmp_path / "recipe.yaml")[1].unfit}


def test_a_replica_of_all_ranks_is_enough_where_one_of_a_host_does_not_fit() -> None:
    host = MemoryLine("", "trainer, 2 replicas of 2 ranks", "trainer", fits=False)
    every = MemoryLine("", "trainer, or else all ranks share one replica", "trainer")
    server = MemoryLine("", "server all", "server", fits=False)
    assert unfit([host, every, server]) == [server]
    assert unfit([host, server]) == [host, server]


def test_the_config_json_of_a_directory_is_read_and_a_missing_one_is_told(tmp_path: Path):
    assert "is not known" in lines(tmp_path, "/models/mine")[0]
    mine = tmp_path / "mine"
    mine.mkdir()
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 1000,
    }
    (mine / "config.json").write_text(json.dumps(sizes))
    assert lines(tmp_path, str(mine))[0].startswith(f"by {mine}/config.json: 0.0 billion")


SHARED = re.compile(
    r"\| (Qwen\S+), (?:all weights|`(training: .*)`) \| `(.*)` "
    r"\| (.*) \+ (.*) of (.*) GiB \| (.*) \|"
)
"""A row of help/gpus.md on a model whose server and trainer share a GPU of 24 GB."""


def test_what_shares_a_gpu_takes_as_much_as_the_page_on_gpus_says(tmp_path: Path) -> None:
    page = (ROOT / "libra_cli/help/gpus.md").read_text(encoding="utf-8")
    rows = SHARED.findall(page)
    assert len(rows) == 2
    recipe = tmp_path / "recipe.yaml"
    for model, training, share, held, assumed, of, contexts in rows:
        recipe.write_text(
            f"nodes: [{{host: local, gpus: 1, share: {share}}}]\n"
            f"model: {{max_len: 4096, path: /models/{model}}}\n{training}\n"
        )
        told, shares = "\n".join(plan_of(recipe)[1].memory), yaml.safe_load(share)
        assert f"8,192 tokens: {held} GiB" in told
        assert f"on {shares['rollout']} of GPUs of 24 GB {contexts}," in told
        assert float(assumed) == trainer_overhead_gib(alone=True)
        assert float(of) == pytest.approx(24 * shares["train"])


WHOLE = yaml.safe_load((ROOT / "tests/fixtures/memory_tables.yaml").read_text())
"""Recipes, and every line that is told of them; the second slot of ``worker`` ones accumulates
gradients."""


@pytest.mark.parametrize("name", WHOLE)
def test_a_whole_table_is_told_as_it_is(name: str) -> None:
    whole = WHOLE[name]
    loaded = Recipe.model_validate(whole["recipe"])
    plan, slots = initial_plan(loaded), slots_of(loaded)
    if name.startswith("worker"):
        first, second = plan.train
        plan = replace(plan, train=(first,), gradient=(second,))
    shape = PUBLISHED[Path(loaded.model.path or "").name]
    table = memory_table(loaded, plan, slots, shape, None)
    assert [line.text for line in table] == whole["lines"]


def test_a_rank_that_gathers_a_part_of_the_experts_fits_smaller_gpus(tmp_path: Path):
    recipe = tmp_path / "recipe.yaml"
    found: list[str] = []
    for size in (1, 8):
        recipe.write_text(
            "nodes: [{host: a, gpus: 8, pool: train}, {host: b, gpus: 1, pool: rollout}]\n"
            "model: {max_len: 8192, path: /models/Qwen3-30B-A3B}\n"
            f"training: {{ep_size: {size}}}\n"
        )
        found.append(plan_of(recipe)[1].memory[1])
    alone, parted = found
    assert "experts" not in alone
    assert "fits GPUs of 94 GB or more" in alone
    assert "trainer (each with 1/8 of the experts), each of 8 ranks" in parted
    assert "fits GPUs of 80 GB or more" in parted


def test_quantized_weights_are_told_as_servers_hold_them(tmp_path: Path):
    quantized = "/models/Qwen3-14B}\nrollout: {quantization: fp8_per_channel"
    whole, fewer = (lines(tmp_path, path)[3] for path in ("/models/Qwen3-14B", quantized))
    assert "weights 27.5 GiB; a context of 4,096 tokens 0.62 GiB" in whole
    assert "weights 15.2 GiB in fp8_per_channel; a context of 4,096 tokens 0.62 GiB" in fewer
    assert "on GPUs of 24 GB 3.5" in fewer
    assert "on GPUs of 40 GB" in whole or "on GPUs of 48 GB" in whole


def test_logits_in_float32_are_told_where_they_take_memory(tmp_path: Path):
    recipe = tmp_path / "recipe.yaml"

    def told(gpus: int, **model: object) -> tuple[str, ...]:
        node = {"host": "a", "slots": 2, "pool": ["rollout", "train"], "gpus": gpus}
        model = {"path": "/models/Qwen3-0.6B", "dtype": "bfloat16"} | model
        recipe.write_text(yaml.safe_dump({"nodes": [node], "model": model}))
        return plan_of(recipe)[1].memory

    without, on_cpus = told(0), told(0, fp32_lm_head=True)
    assert "float32" not in "".join(without[1:])
    assert "of a copy of the output layer in each step 0.58 GiB" in "".join(on_cpus)
    rank, other = (float(re.findall(r"head ([\d.]+)", line[1])[0]) for line in (on_cpus, without))
    assert 0 < rank - other < 0.2
    same, on_gpus = told(2), told(2, fp32_lm_head=True)
    assert on_gpus[1] == same[1], "a GPU sums up products of bfloat16 in float32"
    assert "logits in float32, of weights as they are" in "".join(on_gpus)
    assert told(0, fp32_lm_head=True, dtype="float32") == told(0, dtype="float32")


def test_a_head_is_told_as_servers_hold_it_or_is_said_not_to_be_known(tmp_path: Path):
    head = tmp_path / "head"
    drafts = f"/models/Qwen3-14B}}\nrollout: {{speculative: {{method: eagle, model: {head}}}"
    absent = lines(tmp_path, drafts)
    assert f"{head} is not on this machine" in absent[0]
    assert "head that drafts" not in absent[3]
    head.mkdir()
    config = HEAD | {"hidden_size": 5120}
    (head / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (head / "model.safetensors").write_bytes(bytes(2**20))
    told = lines(tmp_path, drafts)
    assert "of the head that drafts 0.00 GiB; a context of 4,096 tokens 0.64 GiB" in told[3]


def test_a_head_for_another_model_is_refused_before_anything_starts(tmp_path: Path):
    for directory, config in (("model", MODEL), ("head", HEAD | {"hidden_size": 128})):
        (tmp_path / directory).mkdir()
        text = json.dumps(config)
        (tmp_path / directory / "config.json").write_text(text, encoding="utf-8")
    drafts = (
        f"{tmp_path}/model}}\nrollout: {{speculative: {{method: eagle, model: {tmp_path}/head}}"
    )
    with pytest.raises(LibraError, match="it is for a model of hidden_size 128, and this one's is"):
        lines(tmp_path, drafts)


HEAD = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 128,
    "vocab_size": 151936,
    "torch_dtype": "bfloat16",
}
MODEL = HEAD | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
