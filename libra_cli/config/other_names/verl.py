"""verl's keys: those of ``main_ppo`` and of its asynchronous trainers, as hydra composes them.

verl counts prompts, as libra does, and its step is one batch of ``train_batch_size`` prompts with
``rollout.n`` responses each, learned from in updates of ``ppo_mini_batch_size`` prompts. The fully
asynchronous trainer has no train_batch_size: its version is made of trigger_parameter_sync_step x
require_batches updates.

Defaults are those of verl's ppo_trainer.yaml; many of libra's are others (clip_high, betas,
scale_rewards), so they are written where a configuration says nothing.
"""

from __future__ import annotations

import math
from typing import Any

from libra_cli.config.algorithms import LOSSES_OF_OWN_BOUNDS
from libra_cli.config.other_names.common import (
    STEPS_UNKNOWN,
    adapter,
    every,
    hosts,
    lengths,
    model_path,
    monitors,
    run_name,
    stand_in,
    tasks_line,
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

ACTOR, ROLLOUT, MODEL = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "model"))
OPTIM, CORRECTION = f"{ACTOR}.optim", "algorithm.rollout_correction"
ADVANTAGES = {
    "gae": "gae",
    "grpo": "grpo",
    "grpo_vectorized": "grpo",
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
    "reinforce_plus_plus": "reinforce++",
    "reinforce_plus_plus_baseline": "reinforce++-baseline",
}
AVERAGES = {
    "token-mean": "dapo",
    "seq-mean-token-mean": "grpo",
    "seq-mean-token-sum": "dr_grpo",
    "seq-mean-token-sum-norm": "dr_grpo",
}
ESTIMATORS = {
    "kl": "k1",
    "k1": "k1",
    "mse": "k2",
    "k2": "k2",
    "low_var_kl": "k3",
    "k3": "k3",
    "k3+": "k3",
}
DEFAULTS = {
    "data.train_batch_size": 1024,
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "algorithm.adv_estimator": "gae",
    "algorithm.kl_ctrl.kl_coef": 0.001,
    "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 8,
    "trainer.total_epochs": 30,
    f"{MODEL}.lora_alpha": 16,
    f"{ROLLOUT}.n": 1,
    f"{ACTOR}.ppo_mini_batch_size": 256,
    f"{ACTOR}.ppo_epochs": 1,
    f"{ACTOR}.clip_ratio": 0.2,
    f"{ACTOR}.loss_agg_mode": "token-mean",
    f"{ACTOR}.policy_loss.loss_mode": "vanilla",
    f"{ACTOR}.kl_loss_coef": 0.001,
    f"{ACTOR}.kl_loss_type": "low_var_kl",
    f"{OPTIM}.lr": 1e-6,
    f"{OPTIM}.weight_decay": 0.01,
    f"{OPTIM}.betas": [0.9, 0.999],
    "async_training.trigger_parameter_sync_step": 4,
    "async_training.require_batches": 1,
    "trainer.v1.sampler.max_off_policy_threshold": 8,
}


# -- batches and steps -----------------------------------------------------------------------------


def _is_fully_async(given: Given) -> bool:
    return "async_training.staleness_threshold" in given


def _batch(given: Given) -> tuple[int, int]:
    """The prompts of a step, and the updates of a pass over them."""
    mini = int(given.number(f"{ACTOR}.ppo_mini_batch_size"))
    if _is_fully_async(given):
        updates = int(
            given.number("async_training.trigger_parameter_sync_step")
            * given.number("async_training.require_batches")
        )
        return updates * mini, updates
    prompts = int(given.number("data.train_batch_size"))
    return prompts, max(1, math.ceil(prompts / mini))


def _groups(given: Given) -> Made:
    prompts, updates = _batch(given)
    yield Setting("training.groups_per_step", whole(prompts, "prompts of a step"), "prompts")
    if updates > 1:
        yield Setting(
            "training.minibatches", updates, given.told(f"{ACTOR}.ppo_mini_batch_size") + " prompts"
        )


def _responses(given: Given) -> Made:
    count = int(given.number(f"{ROLLOUT}.n"))
    if count == 1 and given.get("algorithm.adv_estimator") != "gae":
        raise Refused("is 1, and libra compares the responses to a prompt: 8 are generated")
    yield Setting("rollout.group_size", count, given.told(f"{ROLLOUT}.n"))


def _steps(given: Given) -> int | None:
    if every(given.get("trainer.total_training_steps")):
        return int(given.number("trainer.total_training_steps"))
    if _is_fully_async(given) and every(given.get("rollout.total_rollout_steps")):
        return math.ceil(float(given.number("rollout.total_rollout_steps")) / _batch(given)[0])
    return None


def _length_of_run(given: Given) -> Made:
    steps = _steps(given)
    if steps is None:
        epochs = given.get("trainer.total_epochs")
        told = f"set it: {epochs} x prompts of the data / groups_per_step"
        yield Setting("run.steps", STEPS_UNKNOWN, told)
    else:
        told = given.told("trainer.total_training_steps", "rollout.total_rollout_steps")
        yield Setting("run.steps", steps, told)


def _staleness(given: Given) -> Made:
    mode = given.get("trainer.v1.trainer_mode", "sync")
    if _is_fully_async(given):
        bound = math.ceil(given.number("async_training.staleness_threshold"))
        told = given.told("async_training.staleness_threshold")
    elif mode in ("colocate_async", "separate_async"):
        key = "trainer.v1.sampler.max_off_policy_threshold"
        bound, told = int(given.number(key)), given.told(key)
    elif given.get("verl.experimental.one_step_off_policy"):
        bound, told = 1, "one step off policy"
    else:
        bound, told = 0, "verl waits for every batch; 1 overlaps (libra help staleness)"
    yield Setting("training.max_staleness", bound, told)


# -- the loss --------------------------------------------------------------------------------------


def _advantage(given: Given) -> Made:
    key = "algorithm.adv_estimator"
    name = one_of(ADVANTAGES, "advantage estimator (libra help advantages)")(given.get(key))
    told = given.told(key) + (", of turns rather than tokens" if name == "gae" else "")
    yield Setting("training.advantage", name, told)
    if name == "gae":
        for theirs in ("algorithm.gamma", "algorithm.lam"):
            if theirs in given:
                ours = f"training.{theirs.rpartition('.')[2]}"
                yield Setting(ours, given.number(theirs), given.told(theirs))
    if name == "grpo" and given.get("algorithm.norm_adv_by_std_in_grpo") is False:
        told = given.told("algorithm.norm_adv_by_std_in_grpo")
        yield Setting("training.scale_rewards", "none", told)


def _clip_range(given: Given) -> tuple[float, float]:
    both = given.number(f"{ACTOR}.clip_ratio")
    return (
        given.number(f"{ACTOR}.clip_ratio_low", both),
        given.number(f"{ACTOR}.clip_ratio_high", both),
    )


def _is_bypass(given: Given) -> bool:
    """Return whether PPO's clip against the policy that generated stands in place of the loss."""
    loss_type = given.get(f"{CORRECTION}.loss_type", "ppo_clip")
    return bool(given.get(f"{CORRECTION}.bypass_mode")) and loss_type == "ppo_clip"


def _loss_mode(given: Given) -> Any:
    """Return the loss that is computed: verl overwrites ``loss_mode`` under ``bypass_mode``."""
    return "vanilla" if _is_bypass(given) else given.get(f"{ACTOR}.policy_loss.loss_mode")


def _clip(given: Given) -> Made:
    if _loss_mode(given) in LOSSES_OF_OWN_BOUNDS:
        return  # in loss_args
    keys = [f"{ACTOR}.{name}" for name in ("clip_ratio", "clip_ratio_low", "clip_ratio_high")]
    low, high = _clip_range(given)
    yield Setting("training.clip_low", low, given.told(*keys))
    yield Setting("training.clip_high", high, given.told(*keys))


def _loss(given: Given) -> Made:
    mode_key, average_key = f"{ACTOR}.policy_loss.loss_mode", f"{ACTOR}.loss_agg_mode"
    mode, average = _loss_mode(given), str(given.get(average_key))
    name = one_of({**dict.fromkeys(LOSSES_OF_OWN_BOUNDS), "vanilla": AVERAGES}, "loss")(mode)
    if name is None:
        loss = str(mode)
    elif average in AVERAGES:
        loss = AVERAGES[average]
    else:
        raise Refused(f"is {shown(average)}, and libra takes means (libra help losses)")
    told = given.told(mode_key, average_key)
    if _is_bypass(given) and given.get(mode_key) != "vanilla":
        told = f"bypass_mode computes PPO's clip in place of {given.get(mode_key)}"
    yield Setting("training.loss", loss, told)
    arguments = _loss_arguments(given, loss, average)
    if arguments:
        yield Setting("training.loss_args", arguments, "of verl's keys for this loss")


def _loss_arguments(given: Given, loss: str, average: str) -> dict[str, Any]:
    """The arguments of a loss, by libra's names for them."""
    low, high = _clip_range(given)
    if loss == "gspo":
        return {"epsilon": low, "epsilon_high": high}
    if loss == "cispo":
        return {"epsilon_high": 1 + high}
    if loss == "sapo":
        taus = {name: given.get(f"{ACTOR}.{name}") for name in ("tau_pos", "tau_neg")}
        return {name: value for name, value in taus.items() if value is not None}
    arguments: dict[str, Any] = {}
    if loss == "dr_grpo":
        longest = given.get(f"{ACTOR}.loss_scale_factor", given.number("data.max_response_length"))
        arguments["max_completion_length"] = 1 if average == "seq-mean-token-sum" else longest
    if _batch(given)[1] * given.number(f"{ACTOR}.ppo_epochs") > 1:
        arguments["delta"] = given.number(f"{ACTOR}.clip_ratio_c", 3.0)
    return arguments


def _kl(given: Given) -> Made:
    in_reward = bool(given.get("algorithm.use_kl_in_reward"))
    in_loss = bool(given.get(f"{ACTOR}.use_kl_loss"))
    key = "algorithm.kl_ctrl.kl_coef" if in_reward else f"{ACTOR}.kl_loss_coef"
    if not (in_reward or in_loss) or given.number(key) <= 0:
        return
    yield Setting("training.kl_coef", given.number(key), given.told(key))
    if in_reward:
        yield Setting("training.kl_in_reward", True, given.told("algorithm.use_kl_in_reward"))
        if in_loss:
            reason = "is on beside use_kl_in_reward, and libra has one of them: the latter is kept"
            yield LeftOut(f"{ACTOR}.use_kl_loss", Why.MISSING, reason)
        return
    kind = f"{ACTOR}.kl_loss_type"
    yield Setting(
        "training.kl_estimator",
        one_of(ESTIMATORS, "estimator of KL")(given.get(kind)),
        given.told(kind),
    )


def _correction(given: Given) -> Made:
    if _is_bypass(given):
        told = given.told(f"{CORRECTION}.bypass_mode")
        yield Setting("training.sampler_correction", "token_clip", told)
        return
    level = given.get(f"{CORRECTION}.rollout_is")
    bounds = str(given.get(f"{CORRECTION}.rollout_is_threshold", 2.0)).split("_")
    told = given.told(f"{CORRECTION}.rollout_is")
    if level is None:
        return
    band = len(bounds) == 2
    if level not in ("token", "sequence"):
        raise Refused(f"is {shown(level)}: libra's are of a token or a sequence")
    kind = "mask" if band else "truncate"
    yield Setting("training.sampler_correction", f"{level}_{kind}", told)
    yield Setting("training.tis_cap", float(bounds[-1]), "rollout_is_threshold")
    if band:
        yield Setting("training.tis_floor", float(bounds[0]), "rollout_is_threshold")


# -- optimizer -------------------------------------------------------------------------------------


def _betas(given: Given) -> Made:
    betas = [float(one) for one in given.get(f"{OPTIM}.betas")]
    yield Setting("training.betas", betas, given.told(f"{OPTIM}.betas"))


def _schedule(given: Given) -> Made:
    keys = [f"{OPTIM}.{name}" for name in ("lr_scheduler_type", "warmup_style", "lr_decay_style")]
    named = next((str(given.get(key)) for key in keys if key in given), "constant")
    name = one_of(
        {
            "constant": "constant",
            "linear": "linear",
            "cosine": "cosine",
            "WSD": "warmup_stable_decay",
        },
        "schedule",
    )(named)
    if name != "constant":
        yield Setting("training.lr_scheduler_type", name, given.told(*keys))
    if f"{OPTIM}.min_lr_ratio" in given and name != "constant":
        least = f"{OPTIM}.min_lr_ratio"
        yield Setting("training.min_lr_ratio", given.number(least), given.told(least))
    yield from warmup(
        given, f"{OPTIM}.lr_warmup_steps", f"{OPTIM}.lr_warmup_steps_ratio", _steps(given), 1
    )


def _lora(given: Given) -> Made:
    for section in (f"{MODEL}.lora_rank", f"{MODEL}.lora.rank"):
        if given.get(section, 0) > 0:
            alpha = section.replace("rank", "alpha")
            defaults = {**given.defaults, f"{MODEL}.lora.alpha": 32}
            known = Given(given.trainer, given.values, defaults)
            yield from adapter(known, section, alpha, f"{MODEL}.target_modules")
            return


# -- model, hosts and tasks ------------------------------------------------------------------------


def _model(given: Given) -> Made:
    yield from model_path(given.get(f"{MODEL}.path", "NAME"))


def _lengths(given: Given) -> Made:
    prompt, response = (given.number(f"data.max_{name}_length") for name in ("prompt", "response"))
    told = given.told("data.max_prompt_length", "data.max_response_length")
    yield Setting("rollout.max_turn_tokens", int(response), given.told("data.max_response_length"))
    yield from lengths(prompt, response, told)
    packed = f"{ACTOR}.ppo_max_token_len_per_gpu"
    if packed in given:
        tokens = max(given.number(packed), prompt + response)
        yield Setting("training.micro_batch_tokens", int(tokens), given.told(packed))


def _turns(given: Given) -> Made:
    if not given.get(f"{ROLLOUT}.multi_turn.enable"):
        yield Setting("rollout.max_turns", 1, "verl's multi_turn is off")
        return
    turns = f"{ROLLOUT}.multi_turn.max_assistant_turns"
    if turns in given:
        yield Setting("rollout.max_turns", given.number(turns), given.told(turns))


def _nodes(given: Given) -> Made:
    count, gpus = int(given.number("trainer.nnodes")), int(given.number("trainer.n_gpus_per_node"))
    if "rollout.nnodes" in given or "rollout.n_gpus_per_node" in given:
        more = given.number("rollout.nnodes", 1) * given.number("rollout.n_gpus_per_node", gpus)
        told = f"{count * gpus} GPUs that train and {more:g} that generate"
        total = count * gpus + int(more)
        size = total if total <= 8 else 8
        yield from hosts(math.ceil(total / size), size, told)
        return
    yield from hosts(count, gpus, given.told("trainer.nnodes", "trainer.n_gpus_per_node"))


def _tasks(given: Given) -> Made:
    yield from stand_in(
        "in place of data.train_files and their reward (libra help data)",
        "name: dataset",
        tasks_line(given.get("data.train_files", "FILE")),
        "args: {reward: math}  # or match, or a function of yours",
    )
    yield LeftOut(
        "data.train_files",
        Why.BRING,
        "parquet of verl's is read as it is, and its reward is to be named: uncomment the lines "
        "under environment",
    )


def _evaluation(given: Given) -> Made:
    if not every(given.get("trainer.test_freq")):
        return
    one: dict[str, Any] = {"every": given.number("trainer.test_freq")}
    if given.get("trainer.val_before_train") is False:
        one["at_start"] = False
    values = f"{ROLLOUT}.val_kwargs"
    sampled = given.get(f"{values}.do_sample", False)
    one["temperature"] = given.number(f"{values}.temperature", 0) if sampled else 0
    one["samples"] = int(given.number(f"{values}.n", 1))
    if sampled and f"{values}.top_p" in given:
        one["top_p"] = given.number(f"{values}.top_p")
    told = f"{given.told('trainer.test_freq')}; its tasks are to be brought"
    yield Setting("evaluation", [one], told)


def _overlong(given: Given) -> Made:
    for root in ("reward.reward_kwargs", "reward_model.reward_kwargs"):
        buffer = f"{root}.overlong_buffer_cfg"
        if given.get(f"{buffer}.enable") and every(given.get(f"{buffer}.len")):
            told = given.told(f"{buffer}.len", f"{buffer}.penalty_factor")
            penalty = float(given.number(f"{buffer}.penalty_factor", 1.0))
            overlong = {"penalty": penalty, "buffer": int(given.number(f"{buffer}.len"))}
            yield Setting("rollout.overlong", overlong, told)


def _dashboards(given: Given) -> Made:
    yield from monitors("trainer.logger", given.get("trainer.logger"))


def _filtered(given: Given) -> Made:
    if given.get("algorithm.filter_groups.enable"):
        told = given.told("algorithm.filter_groups.enable")
        yield Setting("rollout.dynamic_sampling", True, told)
        refills = "algorithm.filter_groups.max_num_gen_batches"
        if every(given.get(refills)):
            yield Setting("rollout.max_refills", given.number(refills), given.told(refills))


def _on(value: Any) -> Any:
    return True if value else None


def _nonzero(value: Any) -> Any:
    return value or None


def _more_than_one(value: Any) -> Any:
    return value if isinstance(value, int) and value > 1 else None


_BATCH: tuple[KeyRule, ...] = (
    joint(
        f"data.train_batch_size {ACTOR}.ppo_mini_batch_size "
        "async_training.trigger_parameter_sync_step async_training.require_batches",
        "training.groups_per_step training.minibatches",
        "prompts; minibatches = train_batch_size / ppo_mini_batch_size. Fully asynchronous: "
        "trigger_parameter_sync_step x require_batches updates of ppo_mini_batch_size",
        _groups,
    ),
    joint(f"{ROLLOUT}.n", "rollout.group_size", "the same; 1 is only for gae", _responses),
    turned(f"{ACTOR}.ppo_epochs", "training.epochs", "the same", _more_than_one),
    joint(
        "trainer.total_training_steps rollout.total_rollout_steps trainer.total_epochs",
        "run.steps",
        "steps; rollout steps are prompts; epochs are not counted",
        _length_of_run,
    ),
    joint(
        "async_training.staleness_threshold verl.experimental.one_step_off_policy "
        "trainer.v1.trainer_mode "
        "trainer.v1.sampler.max_off_policy_threshold",
        "training.max_staleness",
        "0 of the synchronous trainer, 1 one step off policy; the threshold rounded up, or "
        "max_off_policy_threshold",
        _staleness,
    ),
    joint(
        f"data.max_prompt_length data.max_response_length {ACTOR}.ppo_max_token_len_per_gpu",
        "model.max_len rollout.max_turn_tokens training.micro_batch_tokens",
        "prompt + response; the response; tokens of a micro-batch, at least a trajectory",
        _lengths,
    ),
)
_LEARNING: tuple[KeyRule, ...] = (
    joint(
        "algorithm.adv_estimator algorithm.norm_adv_by_std_in_grpo algorithm.gamma algorithm.lam",
        "training.advantage training.scale_rewards training.gamma training.lam",
        "grpo, rloo and gae by name, reinforce_plus_plus is reinforce++; gae is of turns; gamma "
        "and lam with gae only",
        _advantage,
    ),
    joint(
        f"{ACTOR}.policy_loss.loss_mode {ACTOR}.loss_agg_mode {ACTOR}.loss_scale_factor "
        f"{ACTOR}.clip_ratio_c {ACTOR}.tau_pos {ACTOR}.tau_neg",
        "training.loss training.loss_args",
        "vanilla by its mean: token-mean is dapo, seq-mean-token-mean grpo, seq-mean-token-sum "
        "dr_grpo; gspo, cispo, sapo by name, but vanilla with bypass_mode; clip_ratio_c is delta",
        _loss,
    ),
    joint(
        f"{ACTOR}.clip_ratio {ACTOR}.clip_ratio_low {ACTOR}.clip_ratio_high",
        "training.clip_low training.clip_high",
        "the same; verl's default is 0.2 on both sides",
        _clip,
    ),
    joint(
        f"{ACTOR}.use_kl_loss {ACTOR}.kl_loss_coef {ACTOR}.kl_loss_type "
        "algorithm.use_kl_in_reward algorithm.kl_ctrl.kl_coef",
        "training.kl_coef training.kl_estimator training.kl_in_reward",
        "the coefficient of the one that is on; low_var_kl is k3, kl k1, mse k2",
        _kl,
    ),
    turned(f"{ACTOR}.entropy_coeff", "training.entropy_coef", "the same", _nonzero),
    joint(
        f"{CORRECTION}.rollout_is {CORRECTION}.rollout_is_threshold {CORRECTION}.bypass_mode "
        f"{CORRECTION}.loss_type",
        "training.sampler_correction training.tis_cap training.tis_floor",
        "truncate by one bound, mask by two, token_clip with bypass_mode and its ppo_clip; where "
        "it is off libra's default is kept",
        _correction,
        always=False,
    ),
    same(f"{OPTIM}.lr", "training.learning_rate", always=True),
    same(f"{OPTIM}.weight_decay", "training.weight_decay", always=True),
    joint(f"{OPTIM}.betas", "training.betas", "the same", _betas),
    same(f"{ACTOR}.grad_clip", "training.max_grad_norm"),
    same(f"{OPTIM}.clip_grad", "training.max_grad_norm"),
    joint(
        f"{OPTIM}.lr_scheduler_type {OPTIM}.warmup_style {OPTIM}.lr_decay_style "
        f"{OPTIM}.min_lr_ratio {OPTIM}.lr_warmup_steps {OPTIM}.lr_warmup_steps_ratio",
        "training.lr_scheduler_type training.min_lr_ratio training.warmup_steps",
        "the same; a ratio needs total_training_steps",
        _schedule,
        always=False,
    ),
    joint(
        f"{MODEL}.lora_rank {MODEL}.lora_alpha {MODEL}.target_modules {MODEL}.lora.rank "
        f"{MODEL}.lora.alpha",
        "training.lora",
        "the same; rank 0 is none",
        _lora,
        always=False,
    ),
    left(
        "critic",
        Why.NOT_NEEDED,
        "libra's critic is a head on the policy's hidden states, whose learning_rate (0.05) and "
        "epochs (8) are far above those of a model",
        idle=(1, True),
    ),
    same("critic.cliprange_value", "training.critic.cliprange_value"),
)
_PLACES: tuple[KeyRule, ...] = (
    joint(f"{MODEL}.path", "model.path", "a directory on every host, not a name", _model),
    turned("trainer.experiment_name", "run.name", "in the letters of a file's name", run_name),
    joint(
        "trainer.nnodes trainer.n_gpus_per_node rollout.nnodes rollout.n_gpus_per_node",
        "nodes",
        "all GPUs; the planner says which train and which generate",
        _nodes,
    ),
    joint("trainer.logger", "run.monitors", "those that libra has", _dashboards, always=False),
    same("data.seed", "run.seed"),
    same(f"{ROLLOUT}.temperature", "rollout.temperature"),
    joint(
        f"{ROLLOUT}.multi_turn.enable {ROLLOUT}.multi_turn.max_assistant_turns",
        "rollout.max_turns",
        "1 where it is off",
        _turns,
    ),
    left(
        f"{ROLLOUT}.gpu_memory_utilization {ROLLOUT}.free_cache_engine {ROLLOUT}.load_format",
        Why.NOT_NEEDED,
        "servers share no GPU with the trainer, unless nodes.share says so, and take 0.9 of theirs",
    ),
    turned("trainer.save_freq", "training.checkpoint_every", "the same", every),
    same("trainer.max_actor_ckpt_to_keep", "training.keep_checkpoints"),
    joint(
        f"trainer.test_freq trainer.val_before_train {ROLLOUT}.val_kwargs.n "
        f"{ROLLOUT}.val_kwargs.temperature {ROLLOUT}.val_kwargs.top_p "
        f"{ROLLOUT}.val_kwargs.do_sample",
        "evaluation",
        "every test_freq steps; without do_sample at temperature 0",
        _evaluation,
        always=False,
    ),
    joint(
        "algorithm.filter_groups.enable algorithm.filter_groups.max_num_gen_batches",
        "rollout.dynamic_sampling rollout.max_refills",
        "the same",
        _filtered,
        always=False,
    ),
    joint(
        " ".join(
            f"{root}.reward_kwargs.overlong_buffer_cfg.{name}"
            for root in ("reward", "reward_model")
            for name in ("enable", "len", "penalty_factor")
        ),
        "rollout.overlong",
        "penalty and buffer, before model.max_len",
        _overlong,
        always=False,
    ),
    turned(f"{ROLLOUT}.enable_rollout_routing_replay", "training.rollout_routes", "the same", _on),
    turned(f"{MODEL}.enable_activation_offload", "training.activation_offload", "the same", _on),
    *(
        turned(
            f"{key}.ulysses_sequence_parallel_size", "training.cp_size", "the same", _more_than_one
        )
        for key in (ACTOR, f"{ACTOR}.fsdp_config")
    ),
    joint(
        "data.train_files data.val_files",
        "environment",
        "rows and rewards are to be brought",
        _tasks,
    ),
)
_LEFT: tuple[KeyRule, ...] = (
    left(
        f"{ROLLOUT}.top_p {ROLLOUT}.top_k {ROLLOUT}.repetition_penalty",
        Why.MISSING,
        "only the whole distribution can be trained on: ratios would be off by what is cut away",
        idle=(1, 1.0, 0, -1),
    ),
    left(
        "reward reward_model custom_reward_function reward_manager data.reward_fn_key "
        f"{ROLLOUT}.multi_turn {ROLLOUT}.agent data.tool_config_path data.custom_cls",
        Why.BRING,
        "rewards, tools and agent loops belong to the environment (libra help data, environments)",
        idle=("naive", 0),
    ),
    left(
        "data",
        Why.NOT_NEEDED,
        "tasks are read by environment.tasks, with shuffle and limit (libra help data)",
        idle=("prompt", "error", True, -1),
    ),
    left(
        f"{ROLLOUT}.tensor_model_parallel_size {ROLLOUT}.data_parallel_size {ROLLOUT}.mode "
        f"{ROLLOUT}.expert_parallel_size {ROLLOUT}.pipeline_model_parallel_size "
        f"{ROLLOUT}.max_num_batched_tokens {ROLLOUT}.max_num_seqs {ROLLOUT}.name {ROLLOUT} rollout",
        Why.PLANNED,
        "libra starts vLLM's servers; rollout.buckets fixes their shape (libra help planner)",
        idle=("vllm", 1),
    ),
    left(
        f"{ACTOR}.ppo_micro_batch_size {ACTOR}.ppo_micro_batch_size_per_gpu "
        f"{ACTOR}.use_dynamic_bsz {ACTOR}.fsdp_config {ACTOR}.megatron {ACTOR}.veomni "
        f"{ACTOR}.strategy {ACTOR}.checkpoint {ACTOR}.use_torch_compile {MODEL} "
        "actor_rollout_ref.ref actor_rollout_ref.hybrid_engine actor_rollout_ref.nccl_timeout "
        "model_engine hybrid_engine",
        Why.PLANNED,
        "micro-batches are packed by tokens, and ranks shard by FSDP2 (libra help gpus)",
        idle=(True, 1),
    ),
    left(
        "trainer ray_kwargs ray_init global_profiler profiler hydra transfer_queue defaults skip",
        Why.NOT_NEEDED,
        "there is no Ray; a run directory holds metrics, trajectories and checkpoints",
    ),
    left(
        "async_training.partial_rollout",
        Why.NOT_NEEDED,
        "turns in flight go on with the weights of a new version",
    ),
    left(
        f"algorithm {MODEL}.mtp {MODEL}.lora {MODEL}.exclude_modules {ACTOR} {OPTIM} distillation "
        f"async_training {ROLLOUT}.quantization",
        Why.MISSING,
        "libra has nothing like it, or does it otherwise",
        idle=("kl", "fixed", 0, 0.0, -1, "disabled"),
    ),
)

VERL = Table("verl", (*_BATCH, *_LEARNING, *_PLACES, *_LEFT), DEFAULTS)
