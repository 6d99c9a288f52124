"""The settings of an experiment of ``libra bench``: names looked up, and wrong ones refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, cast, get_args

from libra_cli.bench.conditions import MAX_LEN, NETWORK, STALENESS, Conditions
from libra_cli.bench.contenders import ABLATIONS, POLICIES
from libra_cli.bench.jobs import Job, longest_of, playable
from libra_cli.config.errors import InputError, did_you_mean
from libra_cli.config.rollout import Shapes
from libra_cli.core.costs.profile import Profile
from libra_cli.core.planning.baselines import PLANNERS
from libra_cli.core.rollout.staleness import default_rule
from libra_cli.core.types import Tokens
from libra_cli.sim.drift import KINDS, NO_DRIFT, Drift
from libra_cli.sim.profiles import load_profile
from libra_cli.sim.traces import DEFAULT_TRACE, Trace, load_trace, shipped_traces

RULES: Mapping[str, str | Mapping[str, object]] = {
    "hold": "hold",
    "late-1": {"rule": "late", "versions": 1},
    "late-2": {"rule": "late", "versions": 2},
    "soft": "soft",
    "cut": "cut",
    "cut-drop": {"rule": "cut", "rest": "drop"},
    "token": "token",
}
"""Rules that make a batch, as ``training.staleness`` of a recipe."""

SHAPES: tuple[Shapes, ...] = get_args(Shapes)
"""The values that ``rollout.shapes`` may have."""
_NAMED = tuple(dict.fromkeys((*POLICIES, *ABLATIONS)))
"""Policies that are compared if they are asked for by name."""

Progress: TypeAlias = Callable[[str], None]
"""A function that is told in a few words what is being done."""


class BenchError(InputError):
    """An argument of ``libra bench`` that means nothing."""


@dataclass(frozen=True, slots=True)
class ExperimentConfig:
    """The contenders, traces and settings of an experiment, looked up.

    ``policies`` and ``planners`` are the contenders; ``policy`` is the one that planners are
    compared under. ``drifts`` are what changes over a run, one comparison each. ``seeds`` is the
    number of workloads. ``bound`` is training.max_staleness, ``rule`` one of ``RULES`` (empty: the
    recipe's default), ``stream`` training.stream; ``network`` is in gigabits a second of a
    host, and the prices have it already. ``most_tokens`` cuts trajectories earlier than memory.
    ``shapes`` are rollout.shapes.
    """

    traces: tuple[Trace, ...]
    profile: Profile
    gpus: int
    seeds: int
    policies: tuple[str, ...]
    planners: tuple[str, ...]
    policy: str
    drifts: tuple[Drift, ...]
    bound: int = STALENESS
    rule: str = ""
    network: float = NETWORK
    stream: bool = False
    most_tokens: Tokens = MAX_LEN
    shapes: Shapes = "alike"

    @classmethod
    def parse(cls, asked: Conditions) -> ExperimentConfig:
        """Return the configuration asked for, with every name looked up.

        Raises:
            BenchError: an unknown policy, planner or rule, or a drift that is none.
            TraceError: a trace that cannot be read, with file and line.
            ProfileError: a profile that is none.
        """
        prices = load_profile(asked.profile).on_network(asked.network)
        longest = min(asked.max_len, longest_of(prices, asked.gpus))
        drifts = [parse_drift(one, longest) for one in asked.drift.replace(", ", ",").split()]
        return cls(
            traces=tuple(load_trace(name) for name in asked.traces or (DEFAULT_TRACE,)),
            profile=prices,
            gpus=asked.gpus,
            seeds=asked.seeds,
            policies=parse_names("policy", asked.policies, _NAMED) if asked.policies else POLICIES,
            planners=parse_names("planner", asked.planners, PLANNERS),
            policy=parse_names("policy", asked.policy, POLICIES)[0],
            drifts=tuple(drifts) or (NO_DRIFT,),
            bound=asked.bound,
            rule=parse_names("rule", asked.rule, tuple(RULES))[0] if asked.rule else "",
            network=asked.network,
            stream=asked.stream,
            most_tokens=asked.max_len,
            shapes=cast(Shapes, parse_names("value of --shapes", asked.shapes, SHAPES)[0]),
        )

    def job(self, trace: Trace, *, steps: int) -> Job:
        """Return the job of libra on this trace under these conditions, seed 0."""
        return Job(
            trace,
            self.profile,
            self.profile,
            self.gpus,
            self.policy,
            "libra",
            0,
            steps=steps,
            bound=self.bound,
            staleness=RULES[self.rule] if self.rule else {},
            stream=self.stream,
            most_tokens=self.most_tokens,
            shapes=self.shapes,
        )

    @property
    def conditions(self) -> str:
        """The settings that all contenders have in common, in words."""
        made = self.rule or f"{default_rule(self.bound)} (the default)"
        stream = ", streamed" if self.stream else ""
        servers = "" if self.shapes == "alike" else f", {self.shapes} servers"
        return (
            f"max_staleness {self.bound}, rule {made}{stream}{servers}, "
            f"{self.network:g} Gb/s a host, trajectories of up to {self.max_len:,} tokens"
        )

    @property
    def max_len(self) -> Tokens:
        """The number of tokens at which trajectories are cut."""
        return min(self.most_tokens, longest_of(self.profile, self.gpus))

    @property
    def warnings(self) -> list[str]:
        """Sentences that the reader should know before the numbers."""
        lines = [
            f"{trace.name} has no {', no '.join(trace.lacks)}: what would use them, cannot"
            for trace in self.traces
            if trace.lacks
        ]
        lines += [note for trace in self.traces for note in trace.notes]
        if self.seeds < 2:
            line = "one seed gives no intervals, and nothing to tell luck by: --seeds 3 or more"
            lines.append(line)
        return lines


def traces_of(names: Sequence[str]) -> tuple[Trace, ...]:
    """The traces of these names, or all that are shipped. Raises TraceError."""
    return tuple(load_trace(name) for name in names or shipped_traces())


def parse_names(kind: str, wanted: str, known: Sequence[str]) -> tuple[str, ...]:
    """Return the names separated by commas, in the order given; all if none is given.

    Raises:
        BenchError: one is unknown; says which there are.
    """
    names = tuple(dict.fromkeys(name.strip() for name in wanted.split(",") if name.strip()))
    for name in names:
        if name not in known:
            raise BenchError(
                f"there is no {kind} {name!r}{did_you_mean(name, known)}",
                hint=f"choose among {', '.join(known)}",
            )
    return names or tuple(known)


def parse_drift(text: str, max_len: Tokens = MAX_LEN) -> Drift:
    """Return the drift of ``1,4``, ``tools:1/20``, ``filtered:0,0.5``, ``task:TRACE`` or ``none``.

    See ``sim.drift``. A single factor is the last one. A task's prompts are shorter than
    ``max_len``.

    Raises:
        BenchError: not numbers above zero, or of something that does not change.
        TraceError: a trace that cannot be read.
    """
    kind, colon, rest = text.strip().partition(":")
    if not colon:
        kind, rest = "lengths", kind
    if kind not in KINDS:
        raise BenchError(
            f"--drift {text!r}: there is no {kind!r} to change{did_you_mean(kind, KINDS)}",
            hint=f"choose among {', '.join(KINDS)}, as in --drift tools:1,20",
        )
    if kind == "task":
        return Drift(kind, task=playable(load_trace(rest), max_len)[0])
    if rest.lower() in ("", "none", "1"):
        return NO_DRIFT
    sudden = "/" in rest
    factors = _factors(text, rest, "/" if sudden else ",", filtered=kind == "filtered")
    return Drift(kind, factors, sudden=sudden)


def _factors(text: str, numbers: str, between: str, *, filtered: bool) -> tuple[float, ...]:
    """The factors of a drift, at least two: before a single one there was no change."""
    try:
        factors = tuple(float(part) for part in numbers.split(between))
    except ValueError:
        factors = (math.nan,)
    if filtered and not all(0 <= factor < 1 for factor in factors):
        raise BenchError(
            f"--drift {text!r} is not a list of shares of the groups, from 0 to below 1",
            hint="--drift filtered:0,0.5 ends leaving out half of the groups that are played",
        )
    if not filtered and not all(0 < factor < math.inf for factor in factors):
        raise BenchError(
            f"--drift {text!r} is not a list of factors above zero",
            hint="--drift 1,4 lets generations grow to four times their length, 1/4 at once; none",
        )
    return factors if len(factors) > 1 else (float(not filtered), *factors)
