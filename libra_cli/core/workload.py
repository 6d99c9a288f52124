"""What the planner knows of the work: recently finished trajectories, and how many make a step.

A ``Workload`` is a sample of trajectories that stands for the ``trajectories`` of a step, each as
likely as the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import ceil, sqrt
from operator import mul
from typing import Any

from libra_cli.core.model_use import ModelDemand
from libra_cli.core.types import Seconds, Tokens

READY_SHARE = 0.5
"""Share of a step's trajectories that lie ready on average, where they come one after the other and
a batch takes as many as it has at once."""


@dataclass(frozen=True, slots=True)
class TrajectorySample:
    """One finished trajectory: its tokens by who wrote them, its turns, its seconds in tools."""

    prompt: Tokens
    generated: Tokens
    observed: Tokens = 0
    turns: int = 1
    tool_s: Seconds = 0.0

    def __post_init__(self) -> None:
        if self.prompt < 0 or self.generated < 1 or self.observed < 0 or self.tool_s < 0:
            raise ValueError(f"a sample has a token or more and nothing negative, not {self}")

    @property
    def context(self) -> Tokens:
        """Tokens of the trajectory at its end."""
        return self.prompt + self.generated + self.observed

    @property
    def mean_context(self) -> float:
        """Tokens that one of its decoding steps attends to, on average, if it grows evenly."""
        return self.prompt + (self.generated + self.observed) / 2


@dataclass(frozen=True, slots=True)
class TrajectoryLimits:
    """The most tokens of a context at its end, the most turns, and the most tokens of a turn.

    A run ends a trajectory, or a turn, there. Who expects longer trajectories than were seen has to
    end them there too: a trainer is otherwise asked for memory, and a server for KV cache, that no
    trajectory will ever need.
    """

    max_len: Tokens
    max_turns: int
    max_turn_tokens: Tokens

    def allow(self, sample: TrajectorySample) -> bool:
        """Whether a run can play such a trajectory to its end; turns are judged by their mean."""
        return (
            sample.context <= self.max_len
            and sample.turns <= self.max_turns
            and sample.generated <= sample.turns * self.max_turn_tokens
        )

    def cut(self, sample: TrajectorySample) -> TrajectorySample:
        """The same as far as a run plays it, as if every turn were alike and it grew evenly."""
        if self.allow(sample):
            return sample
        turns = min(sample.turns, self.max_turns)
        share = turns / sample.turns
        shorter = replace(
            sample,
            generated=min(max(1, int(sample.generated * share)), turns * self.max_turn_tokens),
            observed=int(sample.observed * share),
            turns=turns,
            tool_s=sample.tool_s * share,
        )
        return shorter if shorter.context <= self.max_len else self._within_length(shorter)

    def _within_length(self, sample: TrajectorySample) -> TrajectorySample:
        prompt = min(sample.prompt, self.max_len - 1)
        room = self.max_len - prompt
        share = room / (sample.context - sample.prompt)
        share = min(1.0, share)
        generated = min(max(1, int(sample.generated * share)), room)
        return replace(
            sample,
            prompt=prompt,
            generated=generated,
            observed=min(room - generated, sample.observed),
            turns=max(1, ceil(sample.turns * share)),
            tool_s=sample.tool_s * share,
        )


@dataclass(frozen=True, slots=True)
class BatchOverhead:
    """Work beside a batch: generated tokens for each one that the batch trains.

    ``filtered`` are of groups that dynamic sampling left out, whose places others took; ``surplus``
    of oversampled members that were stopped, which played beside the others; ``replayed`` of groups
    that were trained again. Raises ValueError below 0.
    """

    filtered: float = 0.0
    surplus: float = 0.0
    replayed: float = 0.0

    def __post_init__(self) -> None:
        if min(self.filtered, self.surplus, self.replayed) < 0:
            raise ValueError(f"nothing is played or trained less than not at all, as in {self}")

    @property
    def played(self) -> float:
        """Tokens that rollout plays for a batch, the batch being 1."""
        return 1 + self.filtered + self.surplus

    @property
    def at_once(self) -> float:
        """Tokens played at the same time, the batch being 1."""
        return 1 + self.surplus

    @property
    def trained(self) -> float:
        """Tokens that a step trains, the batch being 1."""
        return 1 + self.replayed


@dataclass(frozen=True, slots=True)
class Workload:
    """The trajectories of a step.

    ``trajectories`` are trained a step. ``overlap`` is how many steps' worth may be open, ready or
    in training at once: 1 + the staleness bound (1: each batch waits for the one before). A batch
    waits for a trajectory that would be ``late`` versions over the bound (infinity: for none).
    ``group_size`` trajectories begin together and have one prompt; their places are free once the
    longest of ``holders`` of them, drawn at random, has ended. ``ready`` is the share of a step's
    that lies in groups of which all have, while a batch fills. ``extras`` is what is played without
    being trained, and trained without being played. ``models`` is what a step asks of frozen
    models. With ``keeps_kv`` new weights do not empty the prefix caches. No sample is beyond the
    ``limits``: it is cut there, whoever made it or stretched it. Raises ValueError without samples
    or work.
    """

    samples: tuple[TrajectorySample, ...]
    trajectories: int
    overlap: float = 2.0
    late: float = 0.0
    group_size: int = 1
    holders: float = 1.0
    ready: float = READY_SHARE
    extras: BatchOverhead = BatchOverhead()
    limits: TrajectoryLimits | None = None
    keeps_kv: bool = False
    models: tuple[ModelDemand, ...] = ()
    # Sums over the samples, made once: planning asks for them thousands of times.
    mean_generated: float = field(init=False, compare=False, repr=False)
    """Mean generated tokens of a trajectory."""
    mean_context: float = field(init=False, compare=False, repr=False)
    """Mean tokens of a trajectory at its end."""
    longest: TrajectorySample = field(init=False, compare=False, repr=False)
    """The sample with the most tokens at its end."""
    longest_expected: float = field(init=False, compare=False, repr=False)
    """Tokens of a step's longest trajectory, on average over steps drawn from the samples: each is
    in a step with the chance w, so the longest but r of all is a step's longest with w (1 - w)^r.
    """
    pairs: float = field(init=False, compare=False, repr=False)
    """Pairs of a token and a token it attends to that a step
    trains: the sum of context squared / 2.
    """

    def __post_init__(self) -> None:
        if not self.samples:
            raise ValueError("a workload needs at least one sample")
        if self.trajectories < 1 or self.overlap < 1 or self.late < 0 or self.group_size < 1:
            raise ValueError(
                "a workload needs trajectories >= 1, overlap >= 1, late >= 0 and group_size >= 1, "
                f"not {self.trajectories}, {self.overlap}, {self.late} and {self.group_size}"
            )
        # The way to set a field of a frozen dataclass.
        put = object.__setattr__
        if self.limits is not None:
            put(self, "samples", tuple(map(self.limits.cut, self.samples)))
        number = len(self.samples)
        squares = sum(sample.context**2 for sample in self.samples) / number
        put(self, "mean_generated", sum(sample.generated for sample in self.samples) / number)
        put(self, "mean_context", sum(sample.context for sample in self.samples) / number)
        put(self, "longest", max(self.samples, key=lambda sample: sample.context))
        w = min(1.0, self.trajectories / number)
        contexts = sorted((sample.context for sample in self.samples), reverse=True)
        weights = [w * (1 - w) ** place for place in range(number)]
        expected = sum(map(mul, weights, contexts)) / sum(weights)
        put(self, "longest_expected", expected)
        put(self, "pairs", squares / 2 * self.trajectories * self.extras.trained)

    @property
    def takes_turns(self) -> bool:
        """Whether the halves never overlap: no batch may be played while another is trained."""
        return self.overlap < 2

    def in_flight(self, training: Any) -> Any:
        """Steps' worth being played, where training takes this share of a step (0 to 1).

        ``overlap`` steps' worth may be open, ready or in training at once, so what is in training
        is not being played. By Little's law a batch of a step of P seconds, of which training takes
        t, has (overlap - t / P) P = overlap P - t seconds from its first request to its last token.
        """
        return 1.0 if self.takes_turns else self.overlap - training

    def open(self, in_flight: Any) -> Any:
        """Steps' worth in groups that are still played, of so many in flight."""
        return in_flight if self.takes_turns else in_flight - self.ready

    @property
    def spread(self) -> float:
        """Standard deviation of a step's mean length, as a share of it.

        Siblings are alike, in part: a group counts for the square root of its number.
        """
        squares = sum(sample.generated**2 for sample in self.samples) / len(self.samples)
        own = sqrt(max(0.0, squares / self.mean_generated**2 - 1))
        return own / sqrt(self.trajectories / sqrt(self.group_size))

    def served_by(self, servers: Mapping[str, float]) -> Workload:
        """The same where frozen models have so many servers: what requests are open for less, its
        trajectories wait less in tools."""
        saved_s = sum(
            one.saved_s(servers[one.model]) for one in self.models if one.model in servers
        )
        if not saved_s:
            return self
        each_s = saved_s / self.finished
        samples = tuple(
            replace(sample, tool_s=max(0.0, sample.tool_s - each_s)) for sample in self.samples
        )
        return replace(self, samples=samples)

    def stretched(self, factor: float) -> Workload:
        """The same with every generation so many times as long, within the limits."""
        samples = tuple(
            replace(sample, generated=max(1, round(sample.generated * factor)))
            for sample in self.samples
        )
        return replace(self, samples=samples)

    @property
    def played(self) -> float:
        """Trajectories that rollout plays for a step, in whole ones."""
        return self.trajectories * self.extras.played

    @property
    def finished(self) -> float:
        """Trajectories that end for a step, with those that are filtered."""
        return self.trajectories * (1 + self.extras.filtered)

    @property
    def tokens(self) -> float:
        """Tokens that a step trains, prompts and tool returns included."""
        return self.mean_context * self.trajectories * self.extras.trained
