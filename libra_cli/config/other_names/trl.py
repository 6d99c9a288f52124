"""TRL's keys: ``GRPOConfig``, ``RLOOConfig`` and ``SFTConfig`` with what transformers adds to them,
``ModelConfig`` and ``ScriptArguments``, and the processes of ``accelerate launch``.

TRL counts completions and optimizer updates, libra prompts and batches. One generation of TRL's is
one step here::

    completions = per_device_train_batch_size x num_processes x steps_per_generation
    groups_per_step = completions / num_generations
    minibatches = steps_per_generation / gradient_accumulation_steps       epochs = num_iterations

so what TRL counts in updates (max_steps, warmup_steps, save_steps) is divided by minibatches x
epochs. Defaults are those of TRL 1.x.
"""

from __future__ import annotations

import math
from typing import Any

from libra_cli.config.algorithms import LOSSES_OF_OWN_BOUNDS
from libra_cli.config.other_names.common import (
    PROMPT_TOKENS,
    STEPS_UNKNOWN,
    adapter,
    every,
    hosts,
    lengths,
    model_path,
    monitors,
    packed_rows,
    run_name,
    stand_in,
    warmup,
)
from libra_cli.config.other_names.rule import (
    Given,
    KeyRule,
    LeftOut,
    Made,
    Refused,
    Setting,
    Table,
    Why,
    joint,
    left,
    one_of,
    same,
    shown,
    turned,
    whole,
)

_ALL = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_processes": 1,
    "num_machines": 1,
    "lr_scheduler_type": "linear",
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "save_steps": 500,
    "learning_rate": 1e-6,
    "lora_r": 16,
    "lora_alpha": 32,
}
_PLAYED = {
    **_ALL,
    "num_generations": 8,
    "num_iterations": 1,
    "epsilon": 0.2,
    "beta": 0.0,
    "loss_type": "dapo",
    "max_completion_length": 512,
    "vllm_importance_sampling_clip_max": 3.0,
}
SCHEDULES = {
    "constant": "constant",
    "constant_with_warmup": "constant",
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "warmup_stable_decay": "warmup_stable_decay",
}
LOSSES = ("dapo", "bnpo", "grpo", "dr_grpo", "cispo", "sapo")


# -- batches and steps -----------------------------------------------------------------------------


def _per_generation(given: Given) -> int:
    """The micro-batches of one generation, of each process."""
    if "generation_batch_size" in given:
        alone = given.number("per_device_train_batch_size") * given.number("num_processes")
        share = given.number("generation_batch_size") / alone
        return whole(share, "generation_batch_size over per_device_train_batch_size and processes")
    accumulated = given.number("gradient_accumulation_steps")
    return int(given.number("steps_per_generation", accumulated))


def _updates(given: Given) -> int:
    """The optimizer updates of one generation."""
    minibatches = _per_generation(given) / given.number("gradient_accumulation_steps")
    return max(1, math.ceil(float(minibatches * given.number("num_iterations", 1))))


def _steps(given: Given) -> int | None:
    if given.get("max_steps", -1) <= 0:
        return None
    return math.ceil(float(given.number("max_steps")) / _updates(given))


def _groups(given: Given) -> Made:
    alone = given.number("per_device_train_batch_size") * given.number("num_processes")
    completions, size = alone * _per_generation(given), given.number("num_generations")
    if completions % size:
        way = "give libra import the processes that train by --processes"
        way = "correct num_processes" if "num_processes" in given else way
        raise Refused(
            f"are {completions:g} completions a generation, which {size:g} of a prompt do not "
            f"divide: {way}"
        )
    told = f"{completions:g} completions / {size:g}"
    yield Setting("rollout.group_size", int(size), given.told("num_generations"))
    yield Setting("training.groups_per_step", int(completions // size), told)
    if "num_processes" not in given:
        yield LeftOut(
            "num_processes",
            Why.BRING,
            "is not said and taken for 1: batches grow with it. Give libra import the file of "
            "accelerate too, or --processes 8",
        )
    minibatches = _per_generation(given) / given.number("gradient_accumulation_steps")
    if minibatches != 1:
        count = whole(minibatches, "steps_per_generation / gradient_accumulation_steps")
        yield Setting("training.minibatches", count, "updates of one generation")


def _length_of_run(given: Given) -> Made:
    steps = _steps(given)
    if steps is not None:
        updates = _updates(given)
        told = given.told("max_steps") + (f" / {updates} updates a step" if updates > 1 else "")
        yield Setting("run.steps", steps, told)
        return
    epochs = given.get("num_train_epochs", 3)
    told = f"set it: {epochs:g} x prompts of the data / groups_per_step"
    yield Setting("run.steps", STEPS_UNKNOWN, told)


_SAVED_OTHERWISE = {
    "no": (Why.MISSING, "a run always has checkpoints, by which it goes on after any end"),
    "epoch": (Why.BRING, "gives no number of steps: set training.checkpoint_every"),
    "best": (Why.NOT_NEEDED, "the best checkpoint stays in any case"),
}


def _checkpoints(given: Given) -> Made:
    strategy = given.get("save_strategy", "steps") or "no"
    if strategy != "steps":
        yield LeftOut("save_strategy", *one_of(_SAVED_OTHERWISE, "strategy")(strategy))
        if "save_steps" in given:
            yield LeftOut("save_steps", Why.NOT_NEEDED, "TRL reads it with save_strategy: steps")
        return
    steps, total = given.number("save_steps"), _steps(given)
    if steps >= 1:
        count = math.ceil(steps / _updates(given))
    elif steps > 0 and total is not None:
        count = math.ceil(steps * total)
    else:
        yield LeftOut("save_steps", Why.BRING, "gives no number: set training.checkpoint_every")
        return
    yield Setting("training.checkpoint_every", count, given.told("save_steps"))


def _evaluation(given: Given) -> Made:
    strategy = given.get("eval_strategy", "steps" if "eval_steps" in given else "no")
    if strategy in ("no", False):
        return
    if strategy != "steps" or not every(given.get("eval_steps")):
        key = "eval_strategy" if "eval_strategy" in given else "eval_steps"
        yield LeftOut(key, Why.BRING, "gives no number of steps: set evaluation: {every: 10}")
        return
    one: dict[str, Any] = {"every": math.ceil(given.number("eval_steps") / _updates(given))}
    if "num_generations_eval" in given:
        one["samples"] = given.number("num_generations_eval")
    yield Setting("evaluation", [one], given.told("eval_steps"))


def _staleness(given: Given) -> Made:
    bound = given.get("max_staleness")
    if bound is None:
        told = "TRL waits for every batch; 1 overlaps (libra help staleness)"
        yield Setting("training.max_staleness", 0, told)
    else:
        yield Setting("training.max_staleness", bound, given.told("max_staleness"))
        if _loss_name(given) not in LOSSES_OF_OWN_BOUNDS:
            told = "AsyncGRPOTrainer clips against the policy that generated"
            yield Setting("training.sampler_correction", "token_clip", told)


# -- the loss --------------------------------------------------------------------------------------


def _loss(given: Given) -> Made:
    name = _loss_name(given)
    if name not in (*LOSSES, "gspo"):
        raise Refused(f"is {shown(name)}, and libra has no such loss (libra help losses)")
    by_sequence = given.get("importance_sampling_level") == "sequence"
    yield Setting("training.loss", name, given.told("loss_type", "importance_sampling_level"))
    arguments = dict(_loss_arguments(given, name))
    if by_sequence and name in ("dapo", "bnpo", "dr_grpo"):
        arguments["importance_sampling_level"] = "sequence"
    if arguments:
        yield Setting("training.loss_args", arguments, "of TRL's keys for this loss")


def _loss_name(given: Given) -> str:
    """libra's name of the loss; grpo with a ratio of the whole sequence is GSPO."""
    kind = str(given.get("loss_type"))
    by_sequence = given.get("importance_sampling_level") == "sequence"
    return "gspo" if by_sequence and kind == "grpo" else kind


def _loss_arguments(given: Given, name: str) -> dict[str, Any]:
    """The arguments of a loss, by libra's names for them."""
    low = given.number("epsilon")
    high = given.get("epsilon_high", low)
    own: dict[str, dict[str, Any]] = {
        "gspo": {"epsilon": low, "epsilon_high": high},
        "cispo": {"epsilon_high": given.get("epsilon_high")},
        "sapo": {
            "tau_pos": given.get("sapo_temperature_pos"),
            "tau_neg": given.get("sapo_temperature_neg"),
        },
        "dr_grpo": {"max_completion_length": given.get("max_completion_length")},
    }
    clipped = {"delta": given.get("delta")} if name in ("dapo", "bnpo", "grpo", "dr_grpo") else {}
    named = {**own.get(name, {}), **clipped}
    return {key: value for key, value in named.items() if value is not None}


def _clip(given: Given) -> Made:
    if _loss_name(given) in LOSSES_OF_OWN_BOUNDS:
        return  # in loss_args
    low = given.number("epsilon")
    yield Setting("training.clip_low", low, given.told("epsilon"))
    if "epsilon_high" in given:
        high = given.number("epsilon_high")
        yield Setting("training.clip_high", high, given.told("epsilon_high"))
    else:
        yield Setting("training.clip_high", low, "TRL's is epsilon's unless it is given")


def _importance(given: Given) -> Made:
    if given.get(_CORRECTION) is False:
        yield Setting("training.sampler_correction", "none", "as given")
        return
    key = "vllm_importance_sampling_mode"
    if not any(one in given for one in (key, _FLOOR, *_CAPS)):
        if _CORRECTION in given:
            reason = "names no mode: libra corrects by its own (training.sampler_correction)"
            yield LeftOut(_CORRECTION, Why.NOT_NEEDED, reason)
        return
    mode = str(given.get(key, "sequence_mask"))
    yield Setting("training.sampler_correction", mode, given.told(key))
    yield from _bounds_of_weights(given, mode)


_CORRECTION = "vllm_importance_sampling_correction"
_CAPS = ("vllm_importance_sampling_cap", "vllm_importance_sampling_clip_max")
_FLOOR = "vllm_importance_sampling_clip_min"


def _bounds_of_weights(given: Given, mode: str) -> Made:
    """TRL's bounds where none are given, too: libra's defaults are others, by the mode."""
    cap = next((key for key in _CAPS if key in given), _CAPS[-1])
    if cap in given or cap not in given.values:
        yield Setting("training.tis_cap", given.number(cap), given.told(cap))
    else:
        yield LeftOut(cap, Why.MISSING, "is null, and libra bounds every weight: training.tis_cap")
    if mode.endswith("mask"):
        yield Setting("training.tis_floor", given.number(_FLOOR), given.told(_FLOOR))
    elif _FLOOR in given:
        yield LeftOut(_FLOOR, Why.MISSING, "libra bounds a truncated weight above only")


def _schedule(given: Given) -> Made:
    name = one_of(SCHEDULES, "schedule")(str(given.get("lr_scheduler_type")))
    if name != "constant":
        yield Setting("training.lr_scheduler_type", name, given.told("lr_scheduler_type"))
    more = given.get("lr_scheduler_kwargs") or {}
    if isinstance(more, dict):
        least = more.get("min_lr_rate", more.get("min_lr_ratio"))
        if least is None and "min_lr" in more:
            least = more["min_lr"] / given.number("learning_rate")
        if least is not None:
            yield Setting("training.min_lr_ratio", least, given.told("lr_scheduler_kwargs"))
        if "num_decay_steps" in more:
            count = math.ceil(more["num_decay_steps"] / _updates(given))
            yield Setting("training.decay_steps", count, given.told("lr_scheduler_kwargs"))
    yield from warmup(given, "warmup_steps", "warmup_ratio", _steps(given), _updates(given))


def _betas(given: Given) -> Made:
    betas = [given.number("adam_beta1"), given.number("adam_beta2")]
    yield Setting("training.betas", betas, given.told("adam_beta1", "adam_beta2"))


# -- model, hosts and tasks ------------------------------------------------------------------------


def _model(given: Given) -> Made:
    name = given.get("model_name_or_path")
    if name is None:
        yield Setting("model.path", "/models/NAME", "no model is named: write its directory")
        return
    yield from model_path(name)


def _lengths(given: Given) -> Made:
    generated = given.number("max_completion_length")
    yield Setting("rollout.max_turn_tokens", generated, given.told("max_completion_length"))
    if "vllm_max_model_length" in given:
        prompt = given.number("vllm_max_model_length") - generated
        yield from lengths(prompt, generated, given.told("vllm_max_model_length"))
        return
    prompt = given.number("max_prompt_length", PROMPT_TOKENS)
    told = given.told("max_prompt_length") if "max_prompt_length" in given else "512 for a prompt"
    yield from lengths(prompt, generated, f"{told}, and max_completion_length")


def _nodes(given: Given) -> Made:
    count, ranks = int(given.number("num_machines")), int(given.number("num_processes"))
    told = "the processes that train" if "num_processes" in given else "not said: write how many"
    serve = "num_generations" in given.defaults
    yield from hosts(count, max(1, ranks // count), told, serve=serve)


def _lora(given: Given) -> Made:
    if given.get("use_peft"):
        yield from adapter(given, "lora_r", "lora_alpha", "lora_target_modules")


def _tasks(given: Given) -> Made:
    data, rewards = given.get("dataset_name"), given.get("reward_funcs")
    factory = given.get("environment_factory")
    arguments = [f"factory: {factory}"] if factory else []
    if rewards:
        named = rewards if isinstance(rewards, list) else [rewards]
        arguments.append(f"rewards: [{', '.join(map(str, named))}]")
    told = f"in place of {shown(data or 'your data')} and its rewards (libra help data, adapters)"
    yield from stand_in(
        told,
        f"name: {'trl' if arguments else 'dataset'}",
        f"args: {{{', '.join(arguments) or 'reward: match'}}}",
        f"tasks: FILE  # rows of {data}" if data else "tasks: FILE  # rows as TRL has them",
    )
    yield LeftOut(
        "dataset_name",
        Why.BRING,
        "rows in a file, and what rewards them: uncomment the lines under environment",
    )


def _dashboards(given: Given) -> Made:
    yield from monitors("report_to", given.get("report_to"))


def _turns(value: Any) -> Any:
    return value + 1


def _optimizer(value: Any) -> None:
    if not str(value).startswith("adamw"):
        raise Refused(f"is {value}: libra's are adamw, adamw_offload and muon")


_MODEL_AND_OPTIMIZER: tuple[KeyRule, ...] = (
    joint("model_name_or_path", "model.path", "a directory on every host, not a name", _model),
    turned("run_name", "run.name", "in the letters of a file's name", run_name),
    same("seed", "run.seed"),
    joint(
        "max_steps num_train_epochs",
        "run.steps",
        "updates / (minibatches x epochs); epochs are not counted",
        _length_of_run,
    ),
    joint(
        "num_processes num_machines",
        "nodes",
        "GPUs of the processes; servers take theirs from the same, or from more",
        _nodes,
    ),
    same("learning_rate", "training.learning_rate", always=True),
    joint("adam_beta1 adam_beta2", "training.betas", "the same", _betas),
    same("weight_decay", "training.weight_decay"),
    same("max_grad_norm", "training.max_grad_norm"),
    turned("optim", "training.optimizer", "AdamW of any build is adamw", _optimizer),
    joint(
        "lr_scheduler_type lr_scheduler_kwargs warmup_steps warmup_ratio",
        "training.lr_scheduler_type training.min_lr_ratio training.decay_steps "
        "training.warmup_steps",
        "steps of libra's, as run.steps; a ratio needs max_steps",
        _schedule,
    ),
    joint(
        "save_steps save_strategy",
        "training.checkpoint_every",
        "updates / (minibatches x epochs), below 1 a share of max_steps; only of steps",
        _checkpoints,
    ),
    same("save_total_limit", "training.keep_checkpoints"),
    joint(
        "use_peft lora_r lora_alpha lora_target_modules",
        "training.lora",
        "the same; of a LoraConfig in a script too",
        _lora,
    ),
    turned("cast_lm_head_to_fp32", "model.fp32_lm_head", "the same", lambda value: value or None),
    turned(
        "activation_offloading",
        "training.activation_offload",
        "the same",
        lambda value: value or None,
    ),
    turned("torch_compile", "training.compile", "the same", lambda value: value or None),
    joint("report_to", "run.monitors", "those that libra has", _dashboards, always=False),
    same("chat_template_kwargs", "model.template_args"),
    left(
        "output_dir overwrite_output_dir logging_steps logging_first_step logging_dir "
        "logging_strategy log_level log_completions num_completions_to_print log_multimodal "
        "log_unique_prompts log_completions_hub_repo push_to_hub hub_model_id hub_strategy "
        "hub_private_repo hub_model_revision trackio_space_id project wandb_project wandb_entity "
        "wandb_run_group disable_tqdm benchmarks callbacks do_eval do_train remove_unused_columns "
        "dataset_num_proc torch_empty_cache_steps resume_from_checkpoint do_predict "
        "per_device_eval_batch_size batch_eval_metrics enable_jit_checkpoint "
        "eval_accumulation_steps eval_delay eval_do_concat_batches eval_on_start "
        "eval_use_gather_object full_determinism greater_is_better hub_always_push hub_revision "
        "hub_token ignore_data_skip include_for_metrics include_num_input_tokens_seen label_names "
        "length_column_name load_best_model_at_end log_level_replica log_on_each_node "
        "logging_nan_inf_filter metric_for_best_model prediction_loss_only "
        "restore_callback_states_from_checkpoint save_on_each_node save_only_model "
        "skip_memory_metrics trackio_bucket_id trackio_static_space_id use_cache data_seed",
        Why.NOT_NEEDED,
        "a run directory holds metrics, trajectories and checkpoints",
    ),
    left(
        "bf16 fp16 tf32 dtype torch_dtype attn_implementation model_init_kwargs "
        "gradient_checkpointing gradient_checkpointing_kwargs use_liger_kernel model_revision "
        "trust_remote_code use_reentrant disable_dropout optim_args chat_template",
        Why.PLANNED,
        "bfloat16 on GPUs, recomputation by what memory there is, the template of model.path",
        idle=(True,),
    ),
    left(
        "deepspeed fsdp fsdp_config deepspeed_config deepspeed_config_file zero_stage "
        "ds3_gather_for_generation config_file distributed_type mixed_precision machine_rank "
        "main_process_port main_process_ip compute_environment num_cpu_threads_per_process "
        "parallelism_config rdzv_backend same_network use_cpu downcast_bf16 tpu_env "
        "main_training_function enable_cpu_affinity dynamo_backend multi_gpu gpu_ids "
        "main_process_hostname tpu_use_cluster tpu_use_sudo debug accelerator_config "
        "auto_find_batch_size average_tokens_across_devices bf16_full_eval fp16_full_eval "
        "ddp_backend ddp_broadcast_buffers ddp_bucket_cap_mb ddp_static_graph ddp_timeout "
        "ddp_find_unused_parameters dataloader_drop_last dataloader_in_order "
        "dataloader_multiprocessing_context dataloader_num_workers dataloader_persistent_workers "
        "dataloader_pin_memory dataloader_prefetch_factor liger_kernel_config local_rank "
        "torch_compile_backend torch_compile_mode train_sampling_strategy",
        Why.PLANNED,
        "libra starts the ranks, and training.sharding: auto is FSDP2 on several GPUs",
    ),
    left(
        "dataset_config dataset_train_split dataset_test_split dataset_prompt_column "
        "dataset_streaming dataset_kwargs dataset_text_field dataset_mixture datasets",
        Why.BRING,
        "data is a file: environment.tasks, or demonstrations (libra help data)",
    ),
    left(
        "load_in_4bit load_in_8bit bnb_4bit_quant_type use_bnb_nested_quant lora_dropout "
        "lora_modules_to_save lora_task_type use_rslora use_dora lora_target_parameters "
        "neftune_noise_alpha router_aux_loss_coef label_smoothing_factor optim_target_modules "
        "adam_epsilon",
        Why.MISSING,
        "adapters are plain LoRA on weights in bfloat16, and AdamW's epsilon is 1e-8",
        idle=(0, 0.0, 1e-8, "CAUSAL_LM"),
    ),
)

_PLAYED_RULES: tuple[KeyRule, ...] = (
    joint(
        "per_device_train_batch_size gradient_accumulation_steps steps_per_generation "
        "generation_batch_size num_generations",
        "training.groups_per_step rollout.group_size training.minibatches",
        "completions of one generation / num_generations; minibatches are its updates",
        _groups,
    ),
    turned(
        "num_iterations", "training.epochs", "the same", lambda value: value if value > 1 else None
    ),
    joint(
        "epsilon epsilon_high",
        "training.clip_low training.clip_high",
        "the same; without epsilon_high both are epsilon",
        _clip,
    ),
    joint(
        "max_completion_length max_prompt_length vllm_max_model_length",
        "rollout.max_turn_tokens model.max_len",
        "a turn's, and with the prompt's a trajectory's",
        _lengths,
    ),
    turned("max_tool_calling_iterations", "rollout.max_turns", "one turn more than calls", _turns),
    same("temperature", "rollout.temperature"),
    turned(
        "mask_truncated_completions",
        "rollout.overlong.mask",
        "the same",
        lambda value: value or None,
    ),
    joint(
        "vllm_importance_sampling_correction vllm_importance_sampling_mode "
        "vllm_importance_sampling_cap vllm_importance_sampling_clip_max "
        "vllm_importance_sampling_clip_min",
        "training.sampler_correction training.tis_cap training.tis_floor",
        "the same where one is given, between TRL's bounds (0 and 3); TRL's default of the mode is "
        "not carried over",
        _importance,
        always=False,
    ),
    same("entropy_coef", "training.entropy_coef"),
    joint(
        "eval_strategy eval_steps num_generations_eval",
        "evaluation",
        "updates / (minibatches x epochs)",
        _evaluation,
        always=False,
    ),
    joint(
        "dataset_name reward_funcs environment_factory",
        "environment",
        "rows are to be brought; rewards and the factory are used as they are",
        _tasks,
    ),
    joint(
        "max_staleness",
        "training.max_staleness training.sampler_correction",
        "the same of AsyncGRPOConfig, with token_clip, as it clips against the policy that "
        "generated; others train on what was just generated: 0",
        _staleness,
    ),
    left(
        "top_p top_k min_p repetition_penalty generation_kwargs",
        Why.MISSING,
        "only the whole distribution can be trained on: ratios would be off by what is cut away",
        idle=(1, 1.0, 0, -1),
    ),
    left(
        "use_vllm vllm_mode vllm_server_host vllm_server_port vllm_server_base_url "
        "vllm_server_timeout vllm_group_port vllm_gpu_memory_utilization vllm_device "
        "vllm_tensor_parallel_size vllm_enable_sleep_mode vllm_model_impl vllm_max_model_len "
        "use_transformers_paged use_transformers_continuous_batching cache_implementation "
        "transformers_continuous_batching_config vllm_dtype vllm_enable_prefix_caching",
        Why.PLANNED,
        "libra starts vLLM's servers, on how many GPUs the planner says (libra help planner)",
    ),
    left(
        "reward_weights reward_model_name_or_path reward_funcs_names cosine_min_value_wrong "
        "cosine_max_value_wrong cosine_min_value_correct cosine_max_value_correct cosine_max_len "
        "reward_clip_range system_prompt tools think_format "
        "multi_objective_aggregation",
        Why.BRING,
        "rewards and tools belong to the environment: args.reward_weights of environment: "
        "{name: trl} (libra help adapters)",
        idle=("sum_then_normalize",),
    ),
    left(
        "sync_ref_model ref_model_mixup_alpha ref_model_sync_steps top_entropy_quantile "
        "use_adaptive_entropy off_policy_mask_threshold use_bias_correction_kl "
        "vllm_structured_outputs_regex vespo_k_pos vespo_k_neg vespo_lambda_pos vespo_lambda_neg "
        "entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target",
        Why.MISSING,
        "libra has nothing like it",
        idle=(1.0,),
    ),
    left(
        "pad_to_multiple_of queue_maxsize max_inflight_tasks weight_sync_steps "
        "fork_threshold_tokens request_timeout heartbeat_stale_after_s token_budget",
        Why.NOT_NEEDED,
        "libra's scheduler keeps servers and trainer busy (libra help scheduler)",
    ),
    left(
        "shuffle_dataset",
        Why.BRING,
        "tasks: {path: FILE, shuffle: true} draws rows by run.seed (libra help data)",
    ),
)


_GRPO_RULES: tuple[KeyRule, ...] = (
    joint(
        "loss_type importance_sampling_level delta sapo_temperature_pos sapo_temperature_neg",
        "training.loss training.loss_args",
        "the same names; grpo with sequence is gspo; luspo and vespo are not here",
        _loss,
    ),
    turned("beta", "training.kl_coef", "the same, k3", lambda value: value or None),
    same("scale_rewards", "training.scale_rewards"),
)


def _rloo_kl(given: Given) -> Made:
    if given.number("beta") > 0:
        yield Setting("training.kl_coef", given.number("beta"), given.told("beta"))
        yield Setting("training.kl_in_reward", True, "as RLOOTrainer takes it from the reward")


def _rloo(given: Given) -> Made:
    yield Setting("training.advantage", "rloo", "RLOOConfig")
    yield Setting("training.loss", "dr_grpo", "the sum over a completion's tokens")
    yield Setting("training.loss_args", {"max_completion_length": 1}, "divided by no length")


def _normalized(value: Any) -> Any:
    if value:
        raise Refused("is true: libra's rloo divides by no standard deviation")


_RLOO_RULES: tuple[KeyRule, ...] = (
    joint(
        "",
        "training.advantage training.loss training.loss_args",
        "rloo, the sum over a completion's tokens; ratios are of tokens",
        _rloo,
    ),
    joint(
        "beta",
        "training.kl_coef training.kl_in_reward",
        "the same, taken from the reward",
        _rloo_kl,
    ),
    turned("normalize_advantages", "training.scale_rewards", "only false", _normalized),
)


# -- supervised ------------------------------------------------------------------------------------


def _demonstrations(given: Given) -> Made:
    name = str(given.get("dataset_name", "conversations")).rpartition("/")[2]
    yield Setting(
        "demonstrations",
        f"{name}.jsonl",
        "to be brought: rows of messages (libra help demonstrations)",
    )
    yield Setting("training.loss", "sft", "SFTConfig")


def _rows(given: Given) -> Made:
    rows = (
        given.number("per_device_train_batch_size")
        * given.number("num_processes")
        * given.number("gradient_accumulation_steps")
    )
    packed = bool(given.get("packing"))
    unit = "blocks, not conversations," if packed else "conversations"
    yield Setting("training.groups_per_step", int(rows), f"{unit} of an update")
    if packed:
        yield packed_rows("packing", "max_length")
    longest = given.number("max_length", given.number("max_seq_length", 1024))
    yield from lengths(longest, 0, given.told("max_length"))


_SFT_RULES: tuple[KeyRule, ...] = (
    joint(
        "dataset_name", "demonstrations training.loss", "a file of conversations", _demonstrations
    ),
    joint(
        "per_device_train_batch_size gradient_accumulation_steps max_length max_seq_length packing",
        "training.groups_per_step model.max_len",
        "rows of one update, and the longest of them in tokens; with packing a row is a block of "
        "several conversations, which are to be counted",
        _rows,
    ),
    left(
        "packing_strategy padding_free eval_packing pad_to_multiple_of eos_token pad_token "
        "shuffle_dataset group_by_length",
        Why.NOT_NEEDED,
        "rows are packed by tokens (training.micro_batch_tokens)",
        idle=(),
    ),
    left(
        "completion_only_loss assistant_only_loss truncation_mode chat_template_path loss_type",
        Why.MISSING,
        "every turn of the assistant is learned, by the model's own template",
        idle=(True, "nll", "keep_start"),
    ),
    left(
        "eval_strategy eval_steps",
        Why.BRING,
        "evaluation plays tasks (libra help evaluation)",
        idle=("no",),
    ),
)

GRPO = Table("TRL", (*_PLAYED_RULES, *_GRPO_RULES, *_MODEL_AND_OPTIMIZER), _PLAYED)
ASYNC_GRPO = Table(
    "TRL",
    GRPO.rules,
    {**_PLAYED, "max_completion_length": 2048, "lr_scheduler_type": "constant", "max_staleness": 4},
)
RLOO = Table(
    "TRL",
    (*_PLAYED_RULES, *_RLOO_RULES, *_MODEL_AND_OPTIMIZER),
    {**_PLAYED, "num_generations": 2, "beta": 0.05},
)
SFT = Table("TRL", (*_SFT_RULES, *_MODEL_AND_OPTIMIZER), {**_ALL, "learning_rate": 2e-5})
