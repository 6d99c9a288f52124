"""What TRL's ``GRPOConfig`` and verl's configuration call things, and libra's key for the same."""

from __future__ import annotations

from collections.abc import Mapping

OTHER_NAMES: Mapping[str, str] = {
    "activation_offloading": "training.activation_offload",
    "adv_estimator": "training.advantage",
    "adv_tau": "teacher.advantage_coef",
    "batch_size": "training.groups_per_step",
    "beta": "training.kl_coef",
    "context_parallel_size": "training.cp_size",
    "critic.lr": "training.critic.learning_rate",
    "critic.ppo_epochs": "training.critic.epochs",
    "critic_warmup": "training.critic",
    "data": "environment.tasks",
    "enable_expert_parallel": "training.ep_size",
    "enable_fp32_lm_head": "model.fp32_lm_head",
    "entropy_coeff": "training.entropy_coef",
    "expert_model_parallel_size": "training.ep_size",
    "expert_parallel_size": "training.ep_size",
    "gpu_memory_utilization": "rollout.gpu_memory",
    "kl": "training.kl_coef",
    "kl_loss_coef": "training.kl_coef",
    "logger": "run.monitors",
    "kl_penalty_coef": "teacher.kl_coef",
    "loss_type": "training.loss",
    "lr": "training.learning_rate",
    "max_completion_length": "rollout.max_turn_tokens",
    "max_steps": "run.steps",
    "model_name_or_path": "model.path",
    "n_gpus_per_node": "nodes.gpus",
    "num_generations": "rollout.group_size",
    "num_iterations": "training.epochs",
    "ppo_epochs": "training.epochs",
    "ppo_mini_batch_size": "training.minibatches",
    "report_to": "run.monitors",
    "reward_funcs": "environment.args",
    "save_steps": "training.checkpoint_every",
    "sp_size": "training.cp_size",
    "teacher_model": "teacher",
    "teacher_tau": "teacher.kl_coef",
    "tensor_model_parallel_size": "rollout.buckets.tensor_parallel",
    "total_training_steps": "run.steps",
    "train_batch_size": "training.groups_per_step",
    "train_files": "environment.tasks",
    "trainer": "training",
    "ulysses_sequence_parallel_size": "training.cp_size",
    "use_kl_in_reward": "training.kl_in_reward",
}
"""libra's keys by their keys, with a section where another has one of that name, and by what people
call them for short. Near in meaning, not in every detail: ``libra explain`` tells of libra's.
"""
