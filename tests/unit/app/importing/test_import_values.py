"""What ``libra import`` makes of values that change their meaning, by trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from libra_cli.app.importing.command import Imported, ImportOrder, import_recipe
from libra_cli.app.importing.translation import grouped, translate
from libra_cli.app.importing.writing import recipe_text
from libra_cli.config.errors import LibraError
from libra_cli.config.other_names.rule import Given, Why
from libra_cli.runtime.recipes.yaml_lines import read_yaml
from tests import migration_page

VERL = "actor_rollout_ref"


class Made:
    """An imported file: its recipe by dotted keys, and why keys were left out."""

    def __init__(self, told: Imported) -> None:
        self.told = told
        self.recipe = read_yaml(told.text).value
        self.why = {one.key: one.why for one in told.left_out}

    def __getitem__(self, key: str) -> Any:
        found: Any = self.recipe
        for part in key.split("."):
            found = found.get(part) if found else None
        return found


@pytest.fixture
def made(tmp_path: Path):
    """Import a file of this name and text, or of these settings as YAML."""

    def make(name: str, settings: str | dict[str, Any], **more: Any) -> Made:
        path = tmp_path / name
        path.write_text(settings if isinstance(settings, str) else yaml.safe_dump(settings))
        return Made(import_recipe(ImportOrder((path,), **more)))

    return make


# -- TRL -------------------------------------------------------------------------------------------


def test_completions_of_trl_become_groups_and_updates_become_steps(made):
    one = made(
        "grpo.yaml",
        {
            "per_device_train_batch_size": 4,
            "num_processes": 8,
            "gradient_accumulation_steps": 2,
            "steps_per_generation": 8,
            "num_iterations": 2,
            "num_generations": 16,
            "max_steps": 800,
            "save_steps": 80,
            "warmup_ratio": 0.1,
        },
    )
    assert one["rollout.group_size"] == 16
    assert one["training.groups_per_step"] == 4 * 8 * 8 / 16
    assert (one["training.minibatches"], one["training.epochs"]) == (4, 2)
    assert one["run.steps"] == 800 / 8
    assert one["training.checkpoint_every"] == 80 / 8
    assert one["training.warmup_steps"] == 10
    assert one["nodes"] == [{"host": "local", "gpus": 8}]
    assert one.told.problems == ""


def test_what_trl_takes_where_nothing_is_said_is_written(made):
    one = made("grpo.yaml", {"num_generations": 8, "learning_rate": "2e-6"})
    assert one["training.learning_rate"] == 2e-6
    assert one["training.betas"] == [0.9, 0.999]
    assert one["training.lr_scheduler_type"] == "linear"
    assert (one["training.clip_low"], one["training.clip_high"]) == (0.2, 0.2)
    assert one["training.max_staleness"] == 0
    assert one.why["num_processes"] is Why.BRING
    assert "TRL's default of adam_beta1" in one.told.text


@pytest.mark.parametrize(
    ("mode", "correction", "floor"),
    [
        (None, "sequence_mask", 0.5),
        ("token_mask", "token_mask", 0.5),
        ("token_truncate",) * 2 + (None,),
    ],
)
def test_bounds_of_weights_of_trl_keep_its_way_of_applying_them(made, mode, correction, floor):
    bounds = {"vllm_importance_sampling_clip_min": 0.5, "vllm_importance_sampling_clip_max": 3}
    more = {"vllm_importance_sampling_mode": mode} if mode else {}
    one = made("grpo.yaml", {"num_generations": 8, **bounds, **more})
    assert one["training.sampler_correction"] == correction
    assert (one["training.tis_cap"], one["training.tis_floor"]) == (3, floor)
    assert ("vllm_importance_sampling_clip_min" in one.why) == (floor is None)
    assert one.told.problems == ""


@pytest.mark.parametrize(
    ("bounds", "cap", "floor"),
    [
        ({"mode": "token_mask"}, 3.0, 0),
        ({"mode": "token_truncate"}, 3.0, None),
        ({"mode": "sequence_mask", "cap": 2.5}, 2.5, 0),
        ({"clip_min": 0.2}, 3.0, 0.2),
        ({"mode": "token_mask", "clip_max": None}, None, 0),
    ],
)
def test_bounds_of_weights_that_trl_is_not_given_are_its_own(made, bounds, cap, floor):
    settings = {f"vllm_importance_sampling_{key}": value for key, value in bounds.items()}
    one = made("grpo.yaml", {"num_generations": 8, **settings})
    assert (one["training.tis_cap"], one["training.tis_floor"]) == (cap, floor)
    assert ("vllm_importance_sampling_clip_max" in one.why) == (cap is None)
    assert one.told.problems == ""


@pytest.mark.parametrize(("loss", "ours"), [("dapo", "token_clip"), ("cispo", None)])
def test_the_asynchronous_trainer_of_trl_clips_against_the_policy_that_generated(made, loss, ours):
    one = made("train_async_grpo.yaml", {"num_generations": 8, "loss_type": loss})
    assert one["training.max_staleness"] == 4
    assert one["training.sampler_correction"] == ours


def test_processes_can_be_said_where_trl_does_not(made):
    one = made("grpo.yaml", {"num_generations": 8}, processes=4)
    assert one["training.groups_per_step"] == 4
    assert "num_processes" not in one.why


@pytest.mark.parametrize(("said", "counted"), [("4", 4), ('"$GPUS"', 2)])
def test_processes_of_a_file_count_before_those_that_are_said(made, said: str, counted: int):
    script = f"accelerate launch --num_processes {said} grpo.py --num_generations 8\n"
    one = made("run.sh", script, processes=2)
    assert one["training.groups_per_step"] == counted
    assert "num_processes" not in one.why


def test_completions_that_make_no_groups_are_refused_with_the_reason(made):
    one = made("grpo.yaml", {"num_generations": 7, "seed": 1})
    assert one["training.groups_per_step"] is None
    reasons = [told.reason for told in one.told.left_out if "--processes" in told.reason]
    assert any("8 completions" in reason for reason in reasons)


@pytest.mark.parametrize(
    ("settings", "loss", "arguments"),
    [
        ({"loss_type": "dr_grpo"}, "dr_grpo", {"max_completion_length": 512}),
        (
            {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4},
            "gspo",
            {"epsilon": 3e-4, "epsilon_high": 3e-4},
        ),
        (
            {"loss_type": "dapo", "importance_sampling_level": "sequence"},
            "dapo",
            {"importance_sampling_level": "sequence"},
        ),
        ({"loss_type": "cispo", "epsilon_high": 5.0}, "cispo", {"epsilon_high": 5.0}),
        ({"loss_type": "bnpo", "delta": 1.5}, "bnpo", {"delta": 1.5}),
    ],
)
def test_losses_of_trl(made, settings, loss, arguments):
    one = made("grpo.yaml", {"num_generations": 8, **settings})
    assert (one["training.loss"], one["training.loss_args"]) == (loss, arguments)
    assert one.told.problems == ""


def test_a_loss_that_libra_has_not_is_left_out(made):
    one = made("grpo.yaml", {"num_generations": 8, "loss_type": "vespo"})
    assert one["training.loss"] is None
    assert one.why["loss_type"] is Why.MISSING


def test_rloo_takes_its_kl_from_the_reward(made):
    one = made("rloo.yaml", {"num_generations": 4, "learning_rate": 1e-5})
    assert one["training.advantage"] == "rloo"
    assert (one["training.kl_coef"], one["training.kl_in_reward"]) == (0.05, True)
    assert one.told.problems == ""


def test_a_sampler_that_cannot_be_trained_on_is_left_out_unless_it_is_off(made):
    one = made("grpo.yaml", {"num_generations": 8, "top_p": 0.95, "top_k": 0, "min_p": None})
    assert one.why["top_p"] is Why.MISSING
    assert "top_k" not in one.why
    assert one["rollout.top_p"] is None


def test_supervised_settings_make_demonstrations_to_be_brought(made):
    one = made("sft.yaml", {"dataset_name": "trl-lib/Capybara", "max_length": 2048})
    assert (one["training.loss"], one["demonstrations"]) == ("sft", "Capybara.jsonl")
    assert one["training.learning_rate"] == 2e-5
    assert one["rollout"] is None
    assert one.told.problems.endswith("demonstrations: there is no file Capybara.jsonl")


@pytest.mark.parametrize("packing", [True, False, None])
def test_packed_rows_of_trl_are_to_be_counted_as_conversations(made, packing: bool | None):
    settings = {"max_length": 2048, "per_device_train_batch_size": 2, "packing": packing}
    one = made("sft.yaml", {"dataset_name": "trl-lib/Capybara", **settings})
    assert one["training.groups_per_step"] == 2
    assert one.why.get("packing") is (Why.BRING if packing else None)
    assert ("# To do: packing: rows are packed blocks" in one.told.text) is bool(packing)


def test_a_script_is_read_and_not_run(made, tmp_path):
    script = f"""
from trl import GRPOConfig, GRPOTrainer
open({str(tmp_path / "ran")!r}, "w")
NAME = "Qwen/Qwen3-0.6B"
arguments = GRPOConfig(
    num_generations=4, learning_rate=LR, chat_template_kwargs={{"enable_thinking": False}}
)
lora = LoraConfig(r=8, target_modules=["q_proj", "fc1"])
GRPOTrainer(model=NAME, args=arguments, peft_config=lora)
"""
    one = made("train.py", script)
    assert not (tmp_path / "ran").exists()
    assert one["model.path"] == "/models/Qwen3-0.6B"
    assert one["model.template_args"] == {"enable_thinking": False}
    assert one["training.lora"] == {"rank": 8, "alpha": 32, "target_modules": ["q_proj"]}
    assert one.why["learning_rate"] is Why.COMPUTED
    assert one.why["lora_target_modules"] is Why.MISSING


def test_rewards_and_environments_of_a_script_are_named_to_be_used_as_they_are(made):
    script = """
from trl.rewards import accuracy_reward as exact
class Game: ...
def brevity(completions, **columns): ...
GRPOTrainer(model="/m", reward_funcs=[brevity, exact], environment_factory=Game,
            args=GRPOConfig(num_generations=8, max_steps=5))
"""
    one = made("games.py", script)
    assert one["environment"] == {"name": "calculator"}
    assert "# name: trl" in one.told.text
    rewards = "rewards: [games:brevity, trl.rewards:accuracy_reward]"
    assert f"# args: {{factory: games:Game, {rewards}}}" in one.told.text


def test_the_arguments_of_a_command_line(made):
    one = made(
        "run.sh",
        """accelerate launch --num_processes 4 \\
    --config_file zero3.yaml grpo.py \\
    --model_name_or_path Qwen/Qwen3-8B --learning-rate=1e-5 --use_peft \\
    --lora_target_modules "q_proj", "v_proj" --num_generations 8 --bf16
""",
    )
    assert one["nodes"] == [{"host": "local", "gpus": 4}]
    assert one["training.learning_rate"] == 1e-5
    assert one["training.lora.target_modules"] == ["q_proj", "v_proj"]
    assert one["training.groups_per_step"] == 4


def test_tokens_that_are_left_out_are_not_shown(made):
    settings = {
        "hub_token": "hf_abcdefghijklmnopqrstuv",
        "unknown": "hf_zyxwvutsrqponmlkj",
        "wandb_api_key": "0123456789abcdef0123456789abcdef01234567",
        "service": "https://user:hf_passw0rd@example.org",
    }
    one = made("grpo.yaml", {"num_generations": 8, **settings})
    told = [keys for _, found in grouped(one.told.left_out) for keys, _ in found]
    assert settings.keys() <= set(one.why)
    for shown in ("hf_", "0123"):
        assert shown not in f"{told} {one.told.text}"


def test_a_path_keeps_what_looks_like_a_number_in_it(made):
    one = made(
        "grpo.yaml",
        {"model_name_or_path": "/out/lr-1.0e-05/7e08", "num_generations": 8, "learning_rate": 2e-6},
    )
    assert one["model.path"] == "/out/lr-1.0e-05/7e08"
    assert one["training.learning_rate"] == 2e-6
    assert "learning_rate: 2e-6" in one.told.text


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"eval_strategy": "steps"}, "eval_strategy"),
        ({"eval_strategy": "epoch"}, "eval_strategy"),
        ({"eval_steps": 0.1}, "eval_steps"),
        ({"eval_strategy": "no", "eval_steps": 10}, None),
        ({"eval_strategy": False}, None),
    ],
)
def test_evaluations_of_trl_without_a_number_of_steps_are_told(made, settings, key):
    one = made("grpo.yaml", {"num_generations": 8, **settings})
    assert one["evaluation"] is None
    assert set(settings) & set(one.why) == ({key} if key else set())
    assert one.told.problems == ""


@pytest.mark.parametrize(
    ("strategy", "why"),
    [("epoch", Why.BRING), ("no", Why.MISSING), (False, Why.MISSING), ("best", Why.NOT_NEEDED)],
)
def test_checkpoints_of_trl_that_go_by_no_steps_are_told(made, strategy: str | bool, why: Why):
    one = made("grpo.yaml", {"num_generations": 8, "save_strategy": strategy, "save_steps": 50})
    assert one["training.checkpoint_every"] is None
    assert (one.why["save_strategy"], one.why["save_steps"]) == (why, Why.NOT_NEEDED)
    assert not {"save_strategy", "save_steps"} & set(one.told.translated)
    assert one.told.problems == ""


@pytest.mark.parametrize(
    ("settings", "count"),
    [
        ({"save_strategy": "steps", "save_steps": 50}, 50),
        ({"save_steps": 0.1, "max_steps": 200}, 20),
        ({"save_steps": 0.1}, None),
        ({"save_steps": 0, "max_steps": 200}, None),
    ],
)
def test_a_share_of_steps_of_trl_is_counted_where_the_steps_are_known(made, settings, count):
    one = made("grpo.yaml", {"num_generations": 8, **settings})
    assert one["training.checkpoint_every"] == count
    assert ("save_steps" in one.why) == (count is None)


def test_a_correction_of_trl_that_names_no_mode_is_told(made):
    key = "vllm_importance_sampling_correction"
    one = made("grpo.yaml", {"num_generations": 8, key: True})
    assert one["training.sampler_correction"] is None
    assert one.why[key] is Why.NOT_NEEDED
    assert key not in one.told.translated
    more = made("grpo.yaml", {"num_generations": 8, key: True, f"{key[:-10]}cap": 2.0})
    assert more["training.sampler_correction"] == "sequence_mask"
    assert key not in more.why


@pytest.mark.parametrize("scale", ["none", "batch", False])
def test_a_scale_of_trl_that_divides_by_nothing_is_written(made, scale: str | bool):
    one = made("grpo.yaml", {"num_generations": 8, "scale_rewards": scale, "top_p": "None"})
    assert one["training.scale_rewards"] == scale
    assert "top_p" not in one.why
    assert one.told.problems == ""


@pytest.mark.parametrize("name", ["dpo.yaml", "kto.yaml"])
def test_algorithms_that_libra_has_not_are_refused(made, name):
    with pytest.raises(LibraError, match="libra trains by GRPO"):
        made(name, {"learning_rate": 1e-5, "beta": 0.1})


# -- verl ------------------------------------------------------------------------------------------


def verl(**keys: Any) -> dict[str, Any]:
    found = {"algorithm": {"adv_estimator": "grpo"}, f"{VERL}": {"rollout": {"n": 8}}}
    for key, value in keys.items():
        *sections, name = key.split("__")
        inside: Any = found
        for section in sections:
            inside = inside.setdefault(section, {})
        inside[name] = value
    return found


@pytest.mark.parametrize(
    ("correction", "ours"),
    [
        ({"bypass_mode": True}, "token_clip"),
        ({"bypass_mode": True, "loss_type": "ppo_clip"}, "token_clip"),
        ({"bypass_mode": True, "loss_type": "reinforce", "rollout_is": "token"}, "token_truncate"),
        ({"bypass_mode": False, "rollout_is": "token"}, "token_truncate"),
    ],
)
def test_verl_clips_against_the_policy_that_generated_where_it_bypasses_the_other(
    made, correction: dict[str, Any], ours: str
):
    settings = verl(algorithm__rollout_correction=correction)
    assert made("ppo.yaml", settings)["training.sampler_correction"] == ours


def test_a_loss_that_verl_s_bypass_mode_overwrites_is_not_taken_over(made):
    asked = {"loss_mode": "gspo"}
    bypass = {"bypass_mode": True}
    kept = made("ppo.yaml", verl(actor_rollout_ref__actor__policy_loss=asked))
    assert kept["training.loss"] == "gspo"
    one = made(
        "ppo.yaml",
        verl(actor_rollout_ref__actor__policy_loss=asked, algorithm__rollout_correction=bypass),
    )
    assert (one["training.loss"], one["training.sampler_correction"]) == ("dapo", "token_clip")
    assert (one["training.clip_low"], one["training.clip_high"]) == (0.2, 0.2)


def test_prompts_of_verl_stay_prompts_and_minibatches_are_counted(made):
    one = made(
        "ppo.yaml",
        verl(
            data__train_batch_size=512,
            data__max_prompt_length=1024,
            data__max_response_length=8192,
            actor_rollout_ref__actor__ppo_mini_batch_size=128,
            actor_rollout_ref__actor__clip_ratio_high=0.28,
            trainer__total_training_steps=200,
            actor_rollout_ref__actor__optim={"lr": "1e-6", "lr_warmup_steps_ratio": 0.05},
            trainer__nnodes=2,
        ),
    )
    assert (one["training.groups_per_step"], one["training.minibatches"]) == (512, 4)
    assert one["rollout.group_size"] == 8
    assert (one["model.max_len"], one["rollout.max_turn_tokens"]) == (9216, 8192)
    assert (one["training.clip_low"], one["training.clip_high"]) == (0.2, 0.28)
    assert one["training.loss_args"] == {"delta": 3.0}
    assert one["training.warmup_steps"] == 10
    assert one["nodes"] == [{"host": "gpu-[01-02]", "gpus": 8}]
    assert one.told.problems == ""


@pytest.mark.parametrize(
    ("keys", "settings"),
    [
        ({}, {}),
        ({"use_kl_loss": True}, {"kl_coef": 0.001, "kl_estimator": "k3"}),
        ({"use_kl_loss": True, "kl_loss_type": "mse"}, {"kl_coef": 0.001, "kl_estimator": "k2"}),
        ({"use_kl_loss": True, "kl_loss_coef": 0}, {}),
    ],
)
def test_kl_counts_where_it_is_on(made, keys, settings):
    one = made("ppo.yaml", verl(actor_rollout_ref__actor=keys))
    training = one["training"]
    assert {key: training[key] for key in training if key.startswith("kl")} == settings


def test_kl_in_the_reward_is_kept_beside_one_in_the_loss(made):
    keys = verl(algorithm__use_kl_in_reward=True, actor_rollout_ref__actor={"use_kl_loss": True})
    one = made("ppo.yaml", keys)
    assert (one["training.kl_coef"], one["training.kl_in_reward"]) == (0.001, True)
    assert one.why[f"{VERL}.actor.use_kl_loss"] is Why.MISSING
    assert one.told.problems == ""


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("reinforce_plus_plus", "reinforce++"),
        ("reinforce_plus_plus_baseline", "reinforce++-baseline"),
        ("rloo", "rloo"),
        ("gae", "gae"),
        ("remax", None),
    ],
)
def test_advantage_estimators_of_verl(made, theirs, ours):
    one = made("ppo.yaml", verl(algorithm__adv_estimator=theirs))
    assert one["training.advantage"] == ours
    assert (one.why.get("algorithm.adv_estimator") is Why.MISSING) == (ours is None)


@pytest.mark.parametrize(
    ("average", "loss"),
    [
        ("token-mean", "dapo"),
        ("seq-mean-token-mean", "grpo"),
        ("seq-mean-token-sum-norm", "dr_grpo"),
        ("token-sum", None),
    ],
)
def test_means_of_verl_are_losses(made, average, loss):
    assert made("ppo.yaml", verl(actor_rollout_ref__actor={"loss_agg_mode": average}))[
        "training.loss"
    ] == (loss)


def test_a_fully_asynchronous_step_is_the_updates_of_one_version(made):
    one = made(
        "ppo.yaml",
        verl(
            data__train_batch_size=0,
            actor_rollout_ref__actor__ppo_mini_batch_size=32,
            async_training={"staleness_threshold": 0.5, "trigger_parameter_sync_step": 4},
            rollout={"total_rollout_steps": 51200, "nnodes": 1, "n_gpus_per_node": 4},
            trainer={"nnodes": 1, "n_gpus_per_node": 4},
        ),
    )
    assert (one["training.groups_per_step"], one["training.minibatches"]) == (128, 4)
    assert (one["training.max_staleness"], one["run.steps"]) == (1, 400)
    assert one["nodes"] == [{"host": "local", "gpus": 8}]


def test_one_step_off_policy_is_a_staleness_of_one(made):
    script = "python3 -m verl.experimental.one_step_off_policy.main_ppo \\\n"
    script += "  algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=8 \\\n"
    script += "  trainer.n_gpus_per_node=2 rollout.nnodes=1 rollout.n_gpus_per_node=6 $@\n"
    one = made("run.sh", script)
    assert one["training.max_staleness"] == 1
    assert one["nodes"] == [{"host": "local", "gpus": 8}]


def test_files_of_verl_are_named_to_be_read_as_they_are(made):
    files = {"train_files": "['~/a.parquet', '~/b.parquet']"}
    script = f'python -m verl.trainer.main_ppo data.train_files="{files["train_files"]}" '
    one = made("run.sh", script + "actor_rollout_ref.rollout.n=8 algorithm.adv_estimator=grpo")
    assert "# tasks: [~/a.parquet, ~/b.parquet]" in one.told.text
    assert one.told.problems == ""


def test_sections_of_verl_that_end_in_kwargs_are_read(made):
    sampled = {"n": 16, "do_sample": True, "temperature": 0.6, "top_p": 0.7}
    buffer = {"enable": True, "len": 4096, "penalty_factor": 1.0}
    one = made(
        "ppo.yaml",
        verl(
            trainer__test_freq=5,
            actor_rollout_ref__rollout__val_kwargs=sampled,
            reward_model__reward_kwargs__overlong_buffer_cfg=buffer,
            data__max_response_length=8192,
        ),
    )
    assert one["evaluation"] == [{"every": 5, "samples": 16, "temperature": 0.6, "top_p": 0.7}]
    assert one["rollout.overlong"] == {"penalty": 1.0, "buffer": 4096}
    assert one.told.problems == ""


def test_the_share_of_memory_of_servers_that_share_gpus_is_left_out(made):
    one = made("ppo.yaml", verl(actor_rollout_ref__rollout__gpu_memory_utilization=0.5))
    assert one["rollout.gpu_memory"] is None
    assert one.why[f"{VERL}.rollout.gpu_memory_utilization"] is Why.NOT_NEEDED


def test_references_of_hydra_are_followed(made):
    keys = verl(data__max_response_length="${data.max_prompt_length}", data__max_prompt_length=700)
    keys["trainer"] = {"experiment_name": "${now:%Y}", "project_name": "x"}
    one = made("ppo.yaml", keys)
    assert one["rollout.max_turn_tokens"] == 700
    assert one.why["trainer.experiment_name"] is Why.COMPUTED


# -- prime-rl --------------------------------------------------------------------------------------

RL = """
max_steps = 50
seq_len = 4096
[model]
name = "Qwen/Qwen3-4B"
[deployment]
num_train_gpus = 2
num_infer_gpus = 6
[orchestrator]
batch_size = 512
group_size = 16
[orchestrator.train.sampling]
max_completion_tokens = 1024
[[orchestrator.train.source]]
name = "search"
ratio = 2
[orchestrator.train.source.env.taskset]
id = "wiki-search"
max_turns = 5
[trainer.optim]
lr = 3e-6
[trainer.scheduler]
type = "linear"
warmup_steps = 5
decay_steps = 20
min_lr = 3e-7
"""


def test_samples_of_prime_rl_become_groups(made):
    one = made("rl.toml", RL)
    assert (one["training.groups_per_step"], one["rollout.group_size"]) == (32, 16)
    assert one["training.max_staleness"] == 8
    assert one["training.scale_rewards"] == "none"
    assert one["nodes"] == [{"host": "local", "gpus": 8}]
    assert (one["model.max_len"], one["rollout.max_turn_tokens"]) == (4096, 1024)
    assert one.told.problems == ""


def test_a_batch_size_at_the_top_of_prime_rl_counts(made):
    text = "batch_size = 512\n[orchestrator]\ngroup_size = 16\n"
    assert made("rl.toml", text)["training.groups_per_step"] == 32
    both = f"{text}batch_size = 64\n"
    assert made("rl.toml", both)["training.groups_per_step"] == 4


def test_a_linear_schedule_of_prime_rl_stays_until_it_falls(made):
    training = made("rl.toml", RL)["training"]
    assert training["lr_scheduler_type"] == "warmup_stable_decay"
    assert (training["warmup_steps"], training["decay_steps"]) == (5, 20)
    assert training["min_lr_ratio"] == pytest.approx(0.1)


def test_a_taskset_is_played_by_its_own_loop(made):
    one = made("rl.toml", RL)
    arguments = {"taskset": "wiki-search", "config": {"max_turns": 5}}
    assert one["environment"] == [
        {"name": "verifiers", "args": arguments, "label": "search", "weight": 2.0}
    ]
    assert one["agent.function"] == "libra_cli.envs.adapters.verifiers:agent"


def test_evaluations_of_prime_rl_play_their_own_tasksets(made):
    asked = "[orchestrator.eval]\ninterval = 25\ngroup_size = 2\n"
    held = '[[orchestrator.eval.source]]\nname = "held"\n'
    held += '[orchestrator.eval.source.env.taskset]\nid = "wiki-held"\n'
    one = made("rl.toml", RL + asked + held)
    played = {"name": "verifiers", "args": {"taskset": "wiki-held"}, "label": "held"}
    assert one["evaluation"] == [{"every": 25, "samples": 2, "environment": played}]
    assert one.told.problems == ""
    alone = made("rl.toml", RL + asked)
    assert "evaluation" not in alone.recipe
    assert alone.why["orchestrator.eval.source"] is Why.BRING


def test_an_environment_of_the_old_verifiers_is_to_be_brought(made):
    old = "[orchestrator]\nbatch_size = 64\nrollouts_per_example = 8\n"
    old += '[[orchestrator.env]]\nid = "gsm8k"\n'
    one = made("rl.toml", old)
    assert one["environment.name"] == "calculator"
    assert one["rollout.group_size"] == 8
    assert one.why["orchestrator.train.source"] is Why.BRING


def test_a_teacher_of_prime_rl(made):
    teacher = '[orchestrator]\nbatch_size = 64\ngroup_size = 4\n[orchestrator.algo]\ntype = "opd"\n'
    teacher += '[orchestrator.algo.teacher]\nname = "big"\nbase_url = "http://host:8001/v1"\n'
    one = made("rl.toml", teacher)
    assert one["training.loss"] == "distill"
    assert one["teacher"] == {"url": "http://host:8001/v1", "model": "big"}
    assert one.told.problems == ""


@pytest.mark.parametrize("packed", ["", 'pack_function = "stack"\n'])
def test_rows_of_prime_rl_s_sft_are_packed_and_to_be_counted(made, packed: str):
    one = made("sft.toml", f'[data]\nname = "a/b"\nbatch_size = 16\nseq_len = 4096\n{packed}')
    assert (one["training.loss"], one["training.groups_per_step"]) == ("sft", 16)
    assert one.why["data.batch_size"] is Why.BRING
    assert "data.pack_function" not in one.why


def test_the_files_of_the_parts_are_read_together(tmp_path):
    parts = {
        "orch.toml": "batch_size = 64\nrollouts_per_example = 8\nmax_async_level = 2\n",
        "train.toml": "[optim]\nlr = 1e-5\n[model.lora]\nrank = 8\n",
        "infer.toml": '[model]\nname = "Qwen/Qwen3-0.6B"\n[parallel]\ntp = 1\n',
    }
    for name, text in parts.items():
        (tmp_path / name).write_text(text)
    one = Made(import_recipe(ImportOrder(tuple(tmp_path / name for name in parts))))
    assert (one["training.learning_rate"], one["training.max_staleness"]) == (1e-5, 2)
    assert one["training.lora"] == {"rank": 8, "alpha": 32}
    assert one["rollout.group_size"] == 8


KEYS = sorted(
    {key for tables in migration_page.TABLES.values() for one in tables for key in one.theirs()}
)
VALUES = st.none() | st.booleans() | st.integers(-2, 9) | st.floats(0, 2) | st.text(max_size=5)
ANY = st.recursive(VALUES, lambda inner: st.lists(inner, max_size=2), max_leaves=3)


@given(
    table=st.sampled_from([one for tables in migration_page.TABLES.values() for one in tables]),
    values=st.dictionaries(st.sampled_from(KEYS), ANY | st.just({"type": "x"}), max_size=8),
)
def test_values_of_any_kind_are_translated_or_left_out(table, values):
    made = translate(table, Given(table.trainer, values, table.defaults))
    told = {*made.translated, *(one.key for one in made.left_out)}
    assert told <= {*values, *table.theirs()} | {one.key for one in made.left_out}
    assert recipe_text("x", made.settings, made.left_out)


# -- files -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("a.yaml", "services: {web: {image: x}}", "its keys .services.web.image. are not those"),
        ("a.yaml", "[1, 2]", "holds no mapping"),
        ("a.toml", "x = ", "is no .toml file"),
        ("a.sh", "echo hello", "gives no settings"),
        ("a.py", "print(1)", "gives no settings"),
        ("a.toml", "[vllm]\nx = 1", "has neither an orchestrator"),
        ("config.yaml", "learning_rate: 1e-5", "tells GRPO"),
        ("grpo.py", "GRPOConfig(learning_rate=x)", "has no value that libra can read"),
    ],
)
def test_files_that_are_nobodys_are_refused_with_the_reason(made, name, text, reason):
    with pytest.raises(LibraError, match=reason):
        made(name, text)


def test_a_recipe_that_is_there_stays(made, tmp_path):
    there = tmp_path / "recipe.yaml"
    there.write_text("mine")
    with pytest.raises(LibraError, match="is there already"):
        made("grpo.yaml", {"num_generations": 8}, output=there)
    assert there.read_text() == "mine"
    made("grpo.yaml", {"num_generations": 8}, output=there, force=True)
    assert there.read_text().startswith("# Made by libra import of grpo.yaml (TRL);")
