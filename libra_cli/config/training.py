"""The sections of a recipe about training: the loss, its batches, adapters, exports and replay."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AliasChoices, BeforeValidator, ConfigDict, Field, JsonValue

from libra_cli.config.algorithms import LOSSES_OF_OWN_BOUNDS, Needs, needs_of
from libra_cli.config.fields import STRICT, Count, Positive, Section, as_tuple
from libra_cli.config.on_resume import MAY_CHANGE, fixed
from libra_cli.config.only_with import not_with, only_with
from libra_cli.config.problems import Problem

Optimizer: TypeAlias = Literal["adamw", "adamw_offload", "muon"]

_Beta: TypeAlias = Annotated[float, Field(ge=0.0, lt=1.0)]

StalenessRule: TypeAlias = Literal["hold", "late", "soft", "cut", "token", "auto"]

AUTO_BOUNDS = (0, 1, 2, 4)
"""The bounds among which ``staleness: auto`` chooses, in versions; and the one of the recipe."""


def _as_rule(value: Any) -> Any:
    return {"rule": value} if isinstance(value, str) else value


class StalenessSpec(Section):
    """The rule that makes a batch: a name, or the name as ``rule`` with its arguments. What each
    guarantees is in ``core.rollout.staleness``."""

    on_resume = MAY_CHANGE

    rule: StalenessRule | None = None
    """hold waits for groups that would get too old, late a little later, soft and token never; cut
    closes them with the members that are finished. token bounds the age of each token instead.
    auto begins at max_staleness and lets the planner choose 0, 1, 2 or 4 while the run goes on, by
    the seconds of a step and by what old tokens are worth; it holds at 0 and cuts otherwise. Null:
    cut, and hold where max_staleness is 0."""
    versions: Annotated[Positive | None, only_with("rule", "late")] = None
    """late: how many versions over max_staleness a group may be. Null: 1."""
    least: Annotated[Annotated[float, Field(gt=0.0, lt=1.0)] | None, only_with("rule", "cut")] = (
        None
    )
    """cut: the share of a group that must be finished before it is closed. Null: 0.5."""
    rest: Annotated[Literal["later", "drop"] | None, only_with("rule", "cut")] = None
    """cut: members that are not finished are trained later, or dropped. Null: later."""
    over: Annotated[Literal["mask", "weight"] | None, only_with("rule", "token")] = None
    """token: leave tokens over max_staleness out of the loss, or
    let them weigh at most 1. Null: mask.
    """

    @property
    def is_chosen(self) -> bool:
        """Whether the planner chooses the bound."""
        return self.rule == "auto"

    @property
    def masks(self) -> bool:
        """Whether tokens over the bound are left out of the loss."""
        return self.rule == "token" and self.over != "weight"

    @property
    def weighs(self) -> bool:
        """Whether tokens over the bound have an importance weight of at most 1."""
        return self.rule == "token" and self.over == "weight"


ExportChoice: TypeAlias = Literal["last", "best"]


class ExportSpec(Section):
    """The checkpoints that are made Hugging Face directories, on a host that trains."""

    on_resume = MAY_CHANGE

    at_end: Annotated[
        tuple[ExportChoice, ...],
        BeforeValidator(as_tuple, json_schema_input_type=ExportChoice | list[ExportChoice]),
    ] = ("last", "best")
    """Checkpoints to export when a run finishes: the last one, the best, or neither: []."""
    every: Count = 0
    """Checkpoints from one export to the next while the run goes on; 0 is none. All of them stay,
    each as large as the model."""
    merge: Annotated[bool, only_with("training.lora", why="there is no adapter to merge")] = False
    """Write the model with the adapter in it, not the adapter, in a run with training.lora."""


LoraTarget: TypeAlias = Literal[
    "all-linear", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"
]


EXPERT_RANK = 8
"""What the rank of an adapter on experts must be a multiple of: grouped products take rows of
multiples of 16 bytes, eight numbers in bfloat16."""


class LoraSpec(Section):
    """A low-rank adapter (arXiv 2106.09685), by PEFT; rank and alpha have TRL's defaults."""

    on_resume = fixed("the checkpoint holds this adapter")

    rank: Annotated[int, Field(ge=1, le=512)] = 16
    """Rows of A and columns of B, where a matrix W of the model becomes W + alpha / rank B A."""
    alpha: Positive = 32
    """The adapter's weight, before it is divided by rank."""
    target_modules: Annotated[
        tuple[LoraTarget, ...],
        BeforeValidator(as_tuple, json_schema_input_type=LoraTarget | list[LoraTarget]),
        Field(min_length=1),
    ] = ("all-linear",)
    """The matrices of every layer that have an adapter: all-linear is all but the output layer, and
    no experts."""
    experts: bool = False
    """Whether the three matrices of each expert of a mixture have one too."""

    def problems(self) -> Iterator[Problem]:
        """Yield matrices that are named twice, and a rank that experts cannot have."""
        targets = self.target_modules
        if "all-linear" in targets and len(targets) > 1:
            yield Problem(
                ("target_modules",),
                f"names all-linear beside {len(targets) - 1} more: leave out one or the other",
            )
        if len(set(targets)) < len(targets):
            yield Problem(("target_modules",), "names a matrix twice")
        if self.experts and self.rank % EXPERT_RANK:
            yield Problem(
                ("rank",),
                f"is {self.rank}, but with experts: true grouped products need a multiple of "
                f"{EXPERT_RANK}",
            )


class CriticSpec(Section):
    """gae: a linear head on the policy's last hidden states that says what a turn is worth."""

    on_resume = MAY_CHANGE

    learning_rate: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.05
    """AdamW's, about half of how far an update can move a value: the hidden states are scaled, so
    it suits models of all sizes, and is far above those of critics that are whole models."""
    epochs: Positive = 8
    """Updates on a batch, each on all of its turns; verl's critic.ppo_epochs."""
    cliprange_value: Annotated[float, Field(gt=0.0)] = 0.5
    """The change of a value in one step beyond which it gains nothing more, as in PPO and verl."""


SamplerCorrection: TypeAlias = Literal[
    "token_truncate", "token_mask", "token_clip", "sequence_truncate", "sequence_mask", "none"
]


def _with_old_names(schema: dict[str, Any]) -> None:
    for name, kind, told in (
        ("algorithm", "string", "The old name of loss."),
        ("normalize_std", "boolean", "The old name of scale_rewards: true is group, false none."),
    ):
        schema["properties"][name] = {"type": kind, "deprecated": True, "description": told}


RewardScale: TypeAlias = Literal["group", "batch", "none"]


def _as_scale(value: Any) -> Any:
    """TRL's booleans, which were the values of the key's old name too."""
    return {True: "group", False: "none"}[value] if isinstance(value, bool) else value


class TrainingSpec(Section):
    """Asynchronous policy gradients on groups (GRPO, arXiv 2402.03300)."""

    model_config = ConfigDict(**STRICT, json_schema_extra=_with_old_names)
    on_resume = MAY_CHANGE

    loss: Annotated[str, Field(validation_alias=AliasChoices("loss", "algorithm"))] = "dapo"
    """dapo, bnpo, grpo, dr_grpo, gspo, cispo or sapo, as TRL calls them; tba, trajectory balance;
    sft, which imitates the conversations of ``demonstrations``; distill, which learns from the
    ``teacher`` on the policy's own trajectories; an entry point of group
    ``libra.losses``; or module:attr. What one is and where it must be installed is in
    ``node.losses.protocol``. The key's old name is algorithm, whose grpo is dapo."""
    loss_args: dict[str, JsonValue] = {}
    """Keyword arguments of the loss; those below reach it too."""
    backend: str = "accelerate"
    """The trainer's backend: ``accelerate``, an entry point of
    ``libra.trainer_backends``, or module:attr.
    """
    groups_per_step: Positive = 16
    """Prompts in the global batch, each with a group of trajectories; or demonstrations."""
    optimizer: Annotated[
        Optimizer, fixed("the checkpoint lacks second moments of matrices", where="muon")
    ] = "adamw"
    """adamw, or adamw_offload: the same steps with its moments in the memory of the host, which
    frees half of what a GPU holds for each parameter and moves 16 bytes of each every step; or
    muon for hidden matrices and AdamW for the rest, which wants sharding: ddp."""
    learning_rate: Annotated[float, Field(gt=0.0, lt=1.0)] = 1e-6
    """The learning rate of AdamW."""
    betas: tuple[_Beta, _Beta] = (0.9, 0.95)
    """AdamW's decay rates of the first and second moments."""
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.0
    """The decoupled weight decay of AdamW."""
    warmup_steps: Count = 0
    """Steps over which the learning rate rises linearly."""
    lr_scheduler_type: Literal["constant", "linear", "cosine", "warmup_stable_decay"] = "constant"
    """The shape of the learning rate afterwards, until the last step of the run."""
    decay_steps: Positive | None = None
    """Steps at the end over which warmup_stable_decay falls. Null: a tenth of the run."""
    min_lr_ratio: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """The share of the learning rate that is left in the last step, of schedules that fall."""
    clip_low: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.2
    """PPO's clip range: the probability ratio is clipped below at 1 - clip_low."""
    clip_high: Annotated[float, Field(gt=0.0)] = 0.28
    """The ratio is clipped above at 1 + clip_high; DAPO's "clip-higher" (arXiv 2503.14476)."""
    sampler_correction: SamplerCorrection | None = None
    """The use of the ratio of trainer to rollout probability, of a token or the product over a
    trajectory: a weight of at most tis_cap (truncate); one that is 0 outside of tis_floor to
    tis_cap (mask); one that is 0 where the token has already moved past clip_low or clip_high in
    the direction of its advantage (clip); none. Null: token_clip, which was measured (libra help
    losses); token_mask with tis_floor, and with losses that have no clip of tokens: cispo, gspo,
    sapo, and others with importance_sampling_level: sequence.
    """
    tis_cap: Annotated[float, Field(ge=1.0)] | None = None
    """The greatest importance weight, the ratio of trainer to rollout probability. Null: 5 with
    token_clip and token_mask, 2 with the others."""
    tis_floor: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    """The least weight that sampler_correction masks nothing at. Null: 0.5 with token_mask, as
    IcePop's band, and 0 with sequence_mask."""
    minibatches: Positive = 1
    """Optimizer updates of a pass over a batch, each on an equal part of its groups. verl says how
    many prompts are in one (ppo_mini_batch_size), TRL how many batches (steps_per_generation)."""
    epochs: Positive = 1
    """Passes over a batch, each with its groups in another order; ppo_epochs, num_iterations."""
    entropy_coef: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Weight of the mean entropy of the policy, which is subtracted from the loss."""
    kl_coef: Annotated[float, Field(ge=0.0)] = 0.0
    """Weight of the KL term towards the first policy; 0 keeps no reference model."""
    kl_in_reward: bool = False
    """Take kl_coef times a trajectory's KL from the first policy (k1, summed over its tokens) from
    its reward, and add nothing to the loss."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """The estimator of the KL term at each token (Schulman 2020)."""
    max_grad_norm: Annotated[float, Field(gt=0.0)] = 1.0
    """The gradient's L2 norm is clipped to this."""
    advantage: str = "grpo"
    """The baseline that rewards are compared with: grpo, rloo, reinforce++ or reinforce++-baseline,
    or for each turn by itself turn or gigpo, or by a critic gae; an entry point of group
    ``libra.advantages``; or module:attr. What each does is in ``libra help advantages``.
    """
    gamma: Annotated[float, Field(ge=0.0, le=1.0)] = 1.0
    """turn, gigpo, gae: what a reward is worth one turn before it is given."""
    lam: Annotated[float, Field(ge=0.0, le=1.0)] = 1.0
    """gae: how much of what comes later is taken as it was played, and not as the critic expects
    it; the name and the value are verl's."""
    critic: CriticSpec = CriticSpec()
    """gae: the settings of the critic."""
    scale_rewards: Annotated[
        RewardScale | None,
        BeforeValidator(_as_scale, json_schema_input_type=RewardScale | bool | None),
        Field(validation_alias=AliasChoices("scale_rewards", "normalize_std")),
    ] = None
    """The standard deviation that advantages are divided by: of the group's rewards, the batch's,
    or none, as Dr. GRPO (2503.20783) has it. Null: group; with rloo none, with reinforce++ batch.
    The key's old name is normalize_std: true is group, false none."""
    micro_batch_tokens: Positive = 8192
    """The most tokens of one forward pass. Left out where model.max_len is more: model.max_len,
    since a trajectory is never divided over two."""
    activation_checkpointing: Literal["auto", "none", "selective", "full"] = "auto"
    """What a backward pass computes again: nothing, what is between matrix products, or each layer.
    auto is none without GPUs; on them selective where memory suffices by what --dry-run counts, and
    else full, as it is with activation_offload or tiled_mlp.
    """
    activation_offload: Annotated[
        bool, not_with("activation_checkpointing", "none", why="no layer is computed again")
    ] = False
    """On GPUs, keep the inputs of layers that are computed again in the memory of the host: two
    copies of each for every pass, and of a long context most of what a GPU holds is free."""
    tiled_mlp: Annotated[
        bool,
        not_with(
            "activation_checkpointing",
            "selective",
            why="it keeps the products that tiles compute again",
        ),
    ] = False
    """Compute the feed-forward part of layers for 4,096 tokens at a time, and once more backward;
    not of mixtures of experts. The name is that of ALST (arXiv 2506.13996) and Axolotl."""
    compile: Annotated[
        bool,
        not_with("tiled_mlp", True, why="a graph would be of one number of tiles"),
    ] = False
    """Let torch compile the decoder layers of the trainer and of gradient workers, for GPUs: norms,
    rotary embeddings and activations become few kernels. Hosts that train need a C++ compiler; the
    first steps take up to a minute more. Dense models only.
    """
    max_staleness: Count = 1
    """Versions that a token may be behind the step that trains on it; 0 is on-policy. How strictly
    it is kept is the matter of staleness, and with staleness: auto a run only begins with it."""
    staleness: Annotated[
        StalenessSpec,
        BeforeValidator(_as_rule, json_schema_input_type=StalenessRule | StalenessSpec),
    ] = StalenessSpec()
    """The rule that makes a batch: hold, late, soft, cut, token, {rule: NAME, ARGUMENT: ...}, or
    auto, which chooses the bound too."""
    checkpoint_every: Positive = 10
    """Steps between checkpoints; the last step always has one."""
    keep_checkpoints: Positive = 2
    """The number of checkpoints that stay on disk, besides the best: by the recipe's first
    evaluation, or without any by the mean reward of 10 steps. Of 1 the one before stays too.
    """
    export: ExportSpec = ExportSpec()
    """When the model is written for use elsewhere; ``libra export`` does so at any time."""
    sharding: Literal["auto", "fsdp2", "ddp"] = "auto"
    """auto is FSDP2 on several GPUs, data parallel without, and autocast on one; fsdp2 shards a
    single rank too, which then computes as several do."""
    dp_shard_size: Annotated[
        Annotated[int, Field(ge=2)] | None,
        not_with("sharding", "ddp", why="each rank has a replica"),
    ] = None
    """FSDP2: ranks that hold one replica of the model and its optimizer together, a host's or a
    multiple of it or an equal part; a trainer to which it does not fit is one replica. Null: those
    of a host, where several hosts train with as many ranks each and a host has the memory for it;
    else all. The name is accelerate's, and dp_replicate_size is the number of replicas."""
    cp_size: Positive | None = None
    """Context parallelism (Ulysses): so many neighbouring ranks of a replica share every forward
    pass, each with an equal part of its tokens. It must divide the model's attention heads; of
    ranks that are no multiple of it, as many share as divide both. Null: as few as have the memory
    for micro_batch_tokens, and 1 where GPUs do not say theirs. Elsewhere sp_size (accelerate) and
    ulysses_sequence_parallel_size (verl)."""
    ep_size: Annotated[
        Positive | None,
        not_with("sharding", "ddp", why="each rank has a replica with all experts"),
    ] = None
    """Expert parallelism of a mixture: so many neighbouring ranks of a replica hold other experts
    of each layer, and tokens travel to them. It must divide the experts; of ranks that are no
    multiple of it, as many as divide both, and 1 where the ranks do not divide the experts.
    Null: 1, every rank gathers all experts of a layer."""
    rollout_routes: Annotated[
        bool,
        not_with("rollout.speculative", None, why="drafted tokens are routed before they are kept"),
    ] = False
    """Train each token of a mixture of experts with the experts that the rollout's routers chose
    for it (R3, arXiv 2510.11370), so that the two policies do not differ by other choices. A token
    takes layers x chosen experts more bytes.
    """
    worker_gradients: Literal["float32", "bfloat16"] = "float32"
    """The format in which gradient workers send gradients; bfloat16 is half the bytes. Sums are
    float32 either way.
    """
    lora: Annotated[LoraSpec | None, fixed("the checkpoint holds these parameters only")] = None
    """Train an adapter and leave the model's weights as they are: {} for one with the defaults.
    Null: all weights are trained. An adapter wants a learning rate about 10 times as high."""
    stream: bool = False
    """Begin a step on the groups that are finished while others are still played."""

    def problems(self) -> Iterator[Problem]:
        """Yield what compiled layers, and a bound that is chosen, cannot be beside."""
        if self.staleness.is_chosen:
            yield from self._unknown_worth()
        if self.compile:
            yield from self._not_compiled()

    def _unknown_worth(self) -> Iterator[Problem]:
        """Yield why a run could not tell what its old tokens are worth."""
        if self.needs.offline:
            yield Problem(
                ("staleness", "loss"),
                f"is auto, and {self.loss} trains on tokens that no version of the run generated: "
                "leave out training.staleness",
            )
        elif self.sampler_correction == "none":
            yield Problem(
                ("staleness", "sampler_correction"),
                "is auto, which takes old tokens to be weighted by the ratio of probabilities, and "
                "training.sampler_correction: none leaves them as they are: leave that out, or "
                "name a rule",
            )

    def _not_compiled(self) -> Iterator[Problem]:
        for name, size in (("cp_size", self.cp_size), ("ep_size", self.ep_size)):
            if (size or 1) > 1:
                yield Problem(
                    ("compile", name),
                    f"is true, but ranks with {name}: {size} exchange tokens inside of a layer: "
                    f"set training.{name}: 1, or leave out training.compile",
                )
        if self.activation_offload and self.activation_checkpointing == "selective":
            yield Problem(
                ("compile", "activation_offload"),
                "is true, and what a compiled layer keeps with activation_checkpointing: selective "
                "is not taken to the host: set training.activation_checkpointing: full",
            )

    @property
    def bounds(self) -> tuple[int, ...]:
        """Every bound that the run may have, ascending; one unless it is chosen."""
        if not self.staleness.is_chosen:
            return (self.max_staleness,)
        return tuple(sorted({*AUTO_BOUNDS, self.max_staleness}))

    @property
    def needs(self) -> Needs:
        """The needs of the loss, the advantage and the KL term together."""
        of_kl = Needs(reference=self.kl_coef > 0, whole_groups=self.kl_in_reward)
        return needs_of(self.advantage, self.loss) | of_kl

    @property
    def checkpoints_kept(self) -> int:
        """The number of newest checkpoints that stay: from the last but one a trainer starts again
        that died before the controller heard of the last."""
        return max(self.keep_checkpoints, 2)

    @property
    def updates(self) -> int:
        """Optimizer updates of a step, at most: one each minibatch of each epoch."""
        return self.minibatches * self.epochs

    @property
    def scores_first(self) -> bool:
        """Whether a pass without gradient over the whole batch comes before the first update: with
        a critic; and where there are several updates, and trajectories of a group are compared, or
        the first policy is asked, which later passes over the batch need not do again."""
        needs = self.needs
        compares = needs.group_values or self.kl_in_reward
        once = compares or (needs.reference and self.epochs > 1)
        return needs.critic or (self.updates > 1 and once)

    @property
    def correction(self) -> SamplerCorrection:
        """``sampler_correction``, or what it is where the recipe does not say."""
        if self.sampler_correction is not None:
            return self.sampler_correction
        of_sequences = self.loss_args.get("importance_sampling_level") == "sequence"
        clips_no_token = of_sequences or self.loss in LOSSES_OF_OWN_BOUNDS
        return "token_mask" if clips_no_token or self.tis_floor is not None else "token_clip"

    @property
    def importance_bounds(self) -> tuple[float, float]:
        """``tis_floor`` and ``tis_cap``, or what they are where the recipe does not say."""
        floor = 0.5 if self.correction == "token_mask" else 0.0
        cap = 5.0 if self.correction in ("token_mask", "token_clip") else 2.0
        return (
            floor if self.tis_floor is None else self.tis_floor,
            cap if self.tis_cap is None else self.tis_cap,
        )

    @property
    def shares_steps(self) -> bool:
        """Whether gradient workers can compute some trajectories of a step's first update by
        themselves: not where a critic weighs the whole batch, or nothing is played."""
        return not (self.needs.critic or self.needs.offline)


class ReplaySpec(Section):
    """Groups that were trained, kept and trained again beside new ones."""

    on_resume = MAY_CHANGE

    groups: Positive
    """The number of kept groups that every step trains again,
    on top of training.groups_per_step.
    """
    capacity: Positive = 64
    """The number of groups that are kept. They are in the controller's memory with all their
    tokens, nine bytes each.
    """
    sampling: Literal["recent", "reward", "advantage"] = "recent"
    """The groups that are drawn most: the last ones, those with the highest mean reward, or those
    whose rewards differ most. The r-th is drawn with a probability proportional to 1 / r.
    """
    most_staleness: Positive | None = None
    """Groups whose oldest token is more versions behind are not drawn. Null: none is too old."""
