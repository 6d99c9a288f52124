"""What a loss is: a pure function of generated tokens, which the ranks of the trainer call.

    def reinforce(inputs: LossInputs, training: TrainingSpec) -> LossOutputs:
        weight = torch.exp(inputs.proximal - inputs.rollout).clamp(max=2.0)
        loss = -weight * inputs.advantages * inputs.logprobs
        return LossOutputs(loss.sum(), {"weight_mean": weight.sum()})

**What it is given.** ``LossInputs``: flat vectors with one entry for each of the T tokens that the
policy generated in some trajectories, whole ones, of a micro-batch of one rank. Prompts and what
tools returned are left out, and so are tokens over the staleness bound where the recipe masks them
(``training.staleness``). T can be 0, on a rank that has nothing to do while others have. Then
the recipe's ``training``, and what the recipe says in ``training.loss_args`` as keywords. A copy of
the model as it was at the start, ``LossInputs.reference``, is only kept where ``training.kl_coef``
is above 0, or where the loss has an attribute ``needs_reference`` that is true.

**What it may ask of a group.** A loss with an attribute ``group_value``, a function of
``LossInputs`` that returns a number for each token, ``(T,)``, is given ``own_value``, the sum of
these over the token's trajectory, and ``group_mean``, the mean of that over the trajectories of its
group, wherever those are; ``own_tokens`` is how many tokens the sum is over. They are of the model
as it is before this update: with several updates a batch, each after the first costs one more pass
without gradient over its minibatch.

**What it returns.** ``LossOutputs``: the loss **summed** over these tokens, and sums by name. libra
adds them up over micro-batches, ranks and gradient workers, and divides each by the number of such
tokens of the whole batch. The loss and its gradient are divided by the batch's sum of
``LossOutputs.divisor``; without one, by the number of tokens too. So the gradient is the same
however the batch is cut and whoever computes which part; a mean over T would break that. It must
name the same metrics every time.

**Where the metrics go.** Each named sum, divided so, is a metric of the step under that name: in
``StepRecord.metrics_json``, ``libra status`` and its ``--json``, ``report.html`` and every monitor.
No list of names has to be extended. Names in ``RESERVED`` are those of libra's own metrics.

**How a recipe names it.** ``training.loss`` is a name that ships with libra, an entry point of
group ``libra.losses``, or ``package.module:attribute`` (``config.plugins``). Hosts are sent
libra's own code and nothing else: a package of yours must be installed for the Python of every
train host (``nodes[].python``). The controller imports no loss. It refuses a name that is no entry
point there, so install the package there too, or give the import path, which only the hosts need.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

from torch import Tensor

from libra_cli.config.algorithms import LOSSES
from libra_cli.config.errors import TrainerError
from libra_cli.config.training import TrainingSpec
from libra_cli.plugins.finding import find

RESERVED = frozenset(
    {
        *("loss", "divisor", "entropy", "gap", "gap_tokens", "grad_norm", "learning_rate"),
        *("skipped_in_a_row", "micro_batch_tokens", "update_ratio", "rollout_kl", "ppo_kl"),
        *("effective_sample_size", "rollout_ratio_sum", "rollout_ratio_square_sum"),
        *("value_loss", "explained_variance", "advantages", "routes_told", "routes_differ"),
    }
)
"""Sums and metrics that libra adds to those of a loss."""


@dataclass(frozen=True, slots=True)
class LossInputs:
    """The T generated tokens of S whole trajectories; vectors of shape (T,) on the rank's device.

    Log-probabilities are in nats, at the sampling temperature. Only ``logprobs`` has a gradient.
    """

    logprobs: Tensor
    """Log-probabilities under the model that is being trained."""
    proximal: Tensor
    """Log-probabilities under the trainer's model before the first update of the step; with one
    update they equal ``logprobs``."""
    rollout: Tensor
    """Log-probabilities under the server's model that generated the token."""
    advantages: Tensor
    """The token's advantage, as ``training.advantage`` has estimated it (``core.advantages``)."""
    trajectories: Tensor
    """int64: the number, from 0 on, of the token's trajectory among these S; never falls. Each
    branch of one (``core.types.Branch``) counts by itself."""
    groups: Tensor
    """int64: the number of the token's group."""
    staleness: Tensor
    """int64: versions between the one that produced the token and the trainer's."""
    over: Tensor
    """bool: whether ``staleness`` is more than ``training.max_staleness``; where the bound is
    chosen, than the greatest that may be."""
    max_len: int
    """The most tokens that a trajectory may have, prompt and all."""
    reference: Tensor | None = None
    """Log-probabilities under the model at the start of the run; None if nobody needs them."""
    entropy: Tensor | None = None
    """Entropy of each token's distribution in nats, with gradient; None if ``entropy_coef`` is
    0."""
    greedy: Tensor | None = None
    """1 where the token is the one that the model finds likeliest, else 0; None while scores are
    computed (``group_value``)."""
    own_value: Tensor | None = None
    """The sum of the loss's ``group_value`` over the token's trajectory, all its branches."""
    own_tokens: Tensor | None = None
    """How many tokens ``own_value`` is the sum over."""
    group_mean: Tensor | None = None
    """The mean of ``own_value`` over the trajectories of the group."""


@dataclass(frozen=True, slots=True)
class LossOutputs:
    """What a loss returns: sums over the tokens of its inputs, which libra divides later."""

    loss: Tensor
    """A scalar with gradient; not divided by anything."""
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    """Scalars by name; divided by the number of tokens of the batch, each is a metric."""
    divisor: Tensor | None = None
    """A scalar, whose sum over the batch the loss is divided by; None: the number of tokens."""


Loss: TypeAlias = Callable[..., LossOutputs]
"""Called with ``LossInputs``, a ``TrainingSpec`` and ``training.loss_args`` as keywords."""


def loss_of(training: TrainingSpec) -> Callable[[LossInputs], LossOutputs]:
    """The loss that a recipe names, with everything but its inputs.

    Raises:
        PluginError: it is not installed on this host.
        TrainerError: it does not take ``training.loss_args``.
    """
    loss: Loss = find(LOSSES, training.loss)
    try:
        inspect.signature(loss).bind(None, training, **training.loss_args)
    except TypeError as error:
        raise TrainerError(
            f"loss {training.loss!r} was given training.loss_args {sorted(training.loss_args)}: "
            f"{error}",
            hint=f"it takes: {inspect.signature(loss)}",
        ) from error
    return partial(_checked, loss, training)


def needs_reference(training: TrainingSpec) -> bool:
    """Whether a copy of the model as it was at the start is kept."""
    return training.kl_coef > 0 or bool(
        getattr(find(LOSSES, training.loss), "needs_reference", False)
    )


def group_value_of(training: TrainingSpec) -> Callable[[LossInputs], Tensor] | None:
    """What the loss compares the trajectories of a group by; None if it does not."""
    found: Callable[[LossInputs], Tensor] | None = getattr(
        find(LOSSES, training.loss), "group_value", None
    )
    return found


def _checked(loss: Loss, training: TrainingSpec, inputs: LossInputs) -> LossOutputs:
    outputs = loss(inputs, training, **training.loss_args)
    if taken := sorted(RESERVED & outputs.metrics.keys()):
        raise TrainerError(f"loss {training.loss!r} names a metric {taken[0]!r}, which is libra's")
    return outputs
