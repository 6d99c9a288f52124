"""The sections of a recipe that say how trajectories are generated, and by which servers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from libra_cli.config.fields import Count, Name, Positive, Section, Share
from libra_cli.config.on_resume import MAY_CHANGE, fixed
from libra_cli.config.only_with import only_with
from libra_cli.config.problems import Problem
from libra_cli.config.speculative import SpeculativeSpec

Shapes: TypeAlias = Literal["alike", "mixed", "auto"]
"""Whether servers that the planner proposes have the same number of GPUs each."""
Quantization: TypeAlias = Literal["fp8_per_channel", "int8_per_channel"]
"""Ways in which servers hold weights in fewer bits, by vLLM's names."""
RESERVED_VLLM_FLAGS = frozenset(
    {
        "--api-key",
        "--dtype",
        "--enable-return-routed-experts",
        "--enable-scale-out",
        "--enable-sleep-mode",
        "--enforce-eager",
        "--gpu-memory-utilization",
        "--host",
        "--kv-cache-memory-bytes",
        "--logprobs-mode",
        "--max-model-len",
        "--max-num-seqs",
        "--middleware",
        "--model",
        "--port",
        "--socket",
        "--speculative-config",
        "--scheduling-policy",
        "--seed",
        "--served-model-name",
        "--ssl-keyfile",
        "--tensor-parallel-size",
        "--tokenizer",
        "--uds",
        "--worker-extension-cls",
    }
)
"""Flags that libra sets itself, or of vLLM's own HTTP server, which is not started."""
SAFE_VLLM_FLAGS = frozenset({"--async-scheduling", "--compilation-config", "--no-async-scheduling"})
"""Flags that libra sets itself for rollout.engine: safe, and what is against them."""
_BOTH = "one does nothing without the other, as {penalty: 1.0, buffer: 256}"


class BucketSpec(Section):
    """A group of rollout servers of one shape; buckets are ordered from short to long."""

    on_resume = MAY_CHANGE

    name: Name = "all"
    """The bucket's name in logs and reports."""
    tensor_parallel: Positive = 1
    """GPUs of one server; the slots that serve it have exactly as many. Without GPUs: 1, or of
    joined slots as many as are joined."""
    max_num_seqs: Positive = 32
    """The most requests that a server runs at the same time."""
    slots: Count | None = None
    """The number of slots that serve it. Null, for one bucket of a shape: those that are left. 0:
    none but slots that are joined while the run goes on.
    """
    up_to_tokens: Positive | None = None
    """The bucket is for trajectories with at most so many tokens left. Null: model.max_len."""


class OverlongSpec(Section):
    """Trajectories that a limit has cut, and those that come near model.max_len: ``mask``, a
    ``penalty`` with its ``buffer``, or both.
    """

    on_resume = MAY_CHANGE

    mask: bool = False
    """Leave truncated trajectories out of the loss; their rewards still count in their group. TRL's
    mask_truncated_completions, DAPO's overlong filtering."""
    penalty: Annotated[float, Field(ge=0.0), only_with("buffer", why=_BOTH)] = 0.0
    """The reward that a trajectory of model.max_len tokens loses (DAPO's soft overlong punishment,
    arXiv 2503.14476; its value there is 1).
    """
    buffer: Annotated[Count, only_with("penalty", why=_BOTH)] = 0
    """Tokens before model.max_len from which on the penalty rises from 0, in proportion."""


class CurriculumSpec(Section):
    """Tasks that teach are played more often, by the run's own success: ``{}`` for the defaults.
    Rewards are taken for success rates, so they should be between 0 and 1."""

    on_resume = MAY_CHANGE

    low: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """A task at which the policy was no better than this is too hard for now."""
    high: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """A task at which it was at least this good is too easy for now."""
    revisit: Annotated[int, Field(ge=2)] = 4
    """A task that is too hard or too easy is played once in this many rounds."""
    tasks: Annotated[
        Positive | None, fixed("what is known of each task is known by its place among them")
    ] = None
    """The number of tasks to go through, again and again: the first ones of the stream. Null: all
    rows of environment.tasks; of an environment that makes its tasks it must be said.
    """

    def problems(self) -> Iterator[Problem]:
        """Yield bounds between which no task lies."""
        if self.low >= self.high:
            yield Problem(
                ("low", "high"),
                f"is {self.low}, and high is {self.high}: no task lies between them",
            )


class RolloutSpec(Section):
    """How trajectories are generated, and by which servers."""

    on_resume = MAY_CHANGE

    backend: str = "vllm"
    """The server's backend: ``vllm``, an entry point of
    ``libra.rollout_backends``, or module:attr.
    """
    group_size: Annotated[Positive, fixed("groups that were begun have so many trajectories")] = 8
    """Trajectories of one prompt, whose rewards are compared with one another; 1 is for
    training.advantage: gae, which compares them with what its critic expects."""
    oversample: Count = 0
    """Trajectories of each group that are started beyond group_size: the first that end are
    trained, the others are stopped. Batches come sooner, and the longest are trained less often."""
    dynamic_sampling: bool = False
    """Groups in which all rewards are the same are not trained, and the next prompts take their
    places of the batch (DAPO, arXiv 2503.14476; verl's filter_groups)."""
    max_refills: Positive = 10
    """dynamic_sampling: batches' worth of such groups from one step to the next; then the step is
    taken with them, and the run warns. verl's max_num_gen_batches, which ends the run."""
    curriculum: Annotated[
        CurriculumSpec | None, fixed("which group has which task follows from it")
    ] = None
    """Play the tasks more often that the policy solves sometimes. Null: all tasks in their order.
    """
    overlong: OverlongSpec = OverlongSpec()
    """Trajectories that are cut by a limit, or nearly are; {} changes nothing."""
    temperature: Annotated[float, Field(gt=0.0, le=5.0)] = 1.0
    """Sampling temperature; the loss scales logits by the same."""
    top_p: Share = 1.0
    """Nucleus sampling: the share of probability that is sampled from. Only 1 can be trained on."""
    max_turns: Positive = 16
    """The most turns of a trajectory."""
    max_turn_tokens: Positive = 512
    """The most generated tokens of a turn."""
    buckets: Annotated[tuple[BucketSpec, ...], Field(min_length=1)] | None = None
    """The shapes of servers, from short trajectories to long ones. Null: one of one GPU, or on
    nodes without slots whatever the planner chooses; there, only their tensor_parallel counts."""
    shapes: Shapes = "alike"
    """Servers that the planner proposes on nodes without slots: ``alike``, all of one
    tensor-parallel degree; ``mixed``, of several, short trajectories on small servers and long ones
    on large, where prices of several are known; ``auto``, whichever is predicted to have the
    shorter step (``libra help planner``)."""
    gpu_memory: Share | None = None
    """The share of a GPU's memory that vLLM takes. Null: 0.9, of GPUs below 30 GB 0.85, since a
    version is loaded beside it. Of nodes with ``share`` that holds instead."""
    kv_gib: Positive = 1
    """KV cache in GiB of a server on a host without GPUs, unless its node has a ``share``."""
    engine: Annotated[
        Literal["fast", "safe"],
        only_with("backend", "vllm", why="it says how vLLM's engine runs"),
    ] = "fast"
    """How vLLM's engine runs. ``fast``: as vLLM does by default, on GPUs with its second model
    runner, CUDA graphs, and a step scheduled before the last has ended. ``safe``: the first runner
    without either, slower; to tell whether one of them is at fault."""
    quantization: Annotated[
        Quantization | None,
        only_with("backend", "vllm", why="its servers quantize what they load, and can prove it"),
    ] = None
    """Serve weights in fewer bits than they are trained in: linear layers in float8 (e4m3) or int8
    with a scale for each output channel, activations in the same with one for each token; half the
    memory of weights in bfloat16, and another policy than the trainer's by the gap in ``libra
    status``. ``fp8_per_channel`` needs GPUs with FP8 (Ada, Hopper, Blackwell), ``int8_per_channel``
    GPUs from Turing to Hopper; hosts without GPUs model.dtype: bfloat16. Null: as published."""
    sleep: bool = False
    """Keep the process of a server that leaves its slot, asleep, so that it need not start again.
    On GPUs by vLLM's sleep mode: weights and KV cache are given back, about 2 GiB of a GPU stay
    with the process. On hosts without GPUs it gives back its KV cache alone."""
    speculative: SpeculativeSpec | None = None
    """Guess several tokens at a time and check them in one step; null: one token a step."""
    vllm_args: tuple[str, ...] = ()
    """Extra arguments of every vLLM server."""

    def problems(self) -> Iterator[Problem]:
        """Yield a sampler that the loss does not compute with, and what servers cannot have."""
        if self.top_p < 1:
            yield Problem(
                ("top_p",),
                f"is {self.top_p}, and the trainer gives every token its probability among all, "
                "so that ratios of the two would be off by what is cut away: leave it out, which "
                "is 1",
            )
        if self.sleep and self.speculative is not None and self.speculative.has_head:
            yield Problem(
                ("sleep", "speculative"),
                "a server that sleeps gives back all weights, and versions do not bring those of a "
                "head that drafts: leave one of the two out",
            )
        for index, argument in enumerate(self.vllm_args):
            flag = argument.split("=", 1)[0].replace("_", "-")
            if flag in self._reserved_flags:
                yield Problem((f"vllm_args[{index}]",), f"{flag} is set by libra from other fields")
        yield from _bucket_problems(self.buckets or ())

    @property
    def _reserved_flags(self) -> frozenset[str]:
        quantized = {"--quantization"} if self.quantization else set()
        return (
            RESERVED_VLLM_FLAGS | quantized | (SAFE_VLLM_FLAGS if self.engine == "safe" else set())
        )

    def most_filtered(self, groups_per_step: int) -> int:
        """Return how many groups dynamic sampling may filter from one step to the next."""
        return self.max_refills * groups_per_step if self.dynamic_sampling else 0


def _bucket_problems(buckets: Sequence[BucketSpec]) -> Iterator[Problem]:
    """Two buckets of one name, or two that both take what slots are left."""
    names: dict[str, int] = {}
    open_shapes: dict[int, int] = {}
    for index, bucket in enumerate(buckets):
        if (other := names.setdefault(bucket.name, index)) != index:
            yield Problem(
                (f"buckets[{index}].name", f"buckets[{other}].name"),
                f"{bucket.name!r} is also the name of bucket {other}",
            )
        if bucket.slots is not None:
            continue
        if (other := open_shapes.setdefault(bucket.tensor_parallel, index)) != index:
            yield Problem(
                (f"buckets[{index}].slots", f"buckets[{other}].slots"),
                f"is null, as in bucket {other} of the same tensor_parallel "
                f"{bucket.tensor_parallel}: only one can take what is left",
            )
