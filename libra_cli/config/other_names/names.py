"""Their names by themselves, for who writes one of them in a recipe."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from libra_cli.config.other_names import prime_rl, trl, verl
from libra_cli.config.other_names.rule import KeyRule

_SHORT: Mapping[str, str] = {
    "adv_tau": "teacher.advantage_coef",
    "batch_size": "training.groups_per_step",
    "beta": "training.kl_coef",
    "context_parallel_size": "training.cp_size",
    "critic.lr": "training.critic.learning_rate",
    "critic.ppo_epochs": "training.critic.epochs",
    "critic_warmup": "training.critic",
    "data": "environment.tasks",
    "enable_expert_parallel": "training.ep_size",
    "expert_model_parallel_size": "training.ep_size",
    "expert_parallel_size": "training.ep_size",
    "gpu_memory_utilization": "rollout.gpu_memory",
    "kl": "training.kl_coef",
    "kl_penalty_coef": "teacher.kl_coef",
    "logger": "run.monitors",
    "lr": "training.learning_rate",
    "max_completion_length": "rollout.max_turn_tokens",
    "per_device_train_batch_size": "training.groups_per_step",
    "reward_funcs": "environment.args",
    "sp_size": "training.cp_size",
    "teacher_model": "teacher",
    "teacher_tau": "teacher.kl_coef",
    "tensor_model_parallel_size": "rollout.buckets.tensor_parallel",
    "train_files": "environment.tasks",
    "trainer": "training",
}
"""Sections of theirs, what people call keys for short, and keys whose first one of libra's is not
the nearest. Near in meaning, not in every detail: ``libra explain`` tells of libra's."""


def _names() -> Iterator[tuple[str, str]]:
    """Yield keys of other trainers without sections, each with the first of libra's it makes.

    A single word says too little without its section, and a word that is a key of libra's too is
    none of theirs.
    """
    tables = (trl.GRPO, trl.RLOO, verl.VERL, prime_rl.RL)
    rules: list[KeyRule] = [rule for table in tables for rule in table.rules if rule.ours]
    ours = {key.rpartition(".")[2] for rule in rules for key in rule.ours}
    for rule in rules:
        for key in rule.theirs:
            name = key.rpartition(".")[2]
            if "_" in name and name not in ours:
                yield name, rule.ours[0]


OTHER_NAMES: Mapping[str, str] = dict([*reversed(list(_names())), *_SHORT.items()])
"""libra's keys by their names. Of a name that several rules have, the first counts."""
