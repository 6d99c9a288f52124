"""The loss of demonstrations: the mean cross-entropy of what the assistant says in them.

    name    L =
    sft     - sum over the batch's imitated tokens of log current / their number

That is the loss of TRL's ``SFTTrainer`` with ``assistant_only_loss``. A demonstration has no
reward, no rollout policy and no group, so advantages, ratios and guards have no part in it.
"""

from __future__ import annotations

from libra_cli.config.training import TrainingSpec
from libra_cli.node.losses.protocol import LossInputs, LossOutputs


def sft(inputs: LossInputs, training: TrainingSpec) -> LossOutputs:
    """Cross-entropy, in nats a token; ``token_accuracy`` is the share of tokens that greedy
    decoding would have said, TRL's ``mean_token_accuracy``."""
    greedy = inputs.greedy
    return LossOutputs(
        -inputs.logprobs.sum(), {} if greedy is None else {"token_accuracy": greedy.sum()}
    )
