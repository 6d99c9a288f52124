"""The prices of a run whose GPU nobody has profiled, taken from what it has done so far.

**Servers.** Of every turn it is known when it began and ended, on which server, and so how many
others were there meanwhile. With B(t) requests and K(t) tokens of context on a server at t, g
tokens generated and ``fresh`` prompt tokens computed there between begin and end::

    seconds of a turn = g (a + b mean B + c mean K) + p1 fresh

fitted as in ``refine``, to ``prior``'s proportions where the turns cannot tell. The KV cache is at
least what has been in use; a server that never was full shows no limit.

**Training.** ``seconds of a step = step_s + (token_s x tokens + pair_s x pairs) / ranks``.

Limit: shapes that have not served or trained have no prices; memory is not known, so a plan priced
here is not checked for it, other than by the shapes being those that run now.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from libra_cli.config.errors import WrongRun
from libra_cli.core.costs.online import ForgettingLeastSquares
from libra_cli.core.costs.profile import MemoryModel, MoveCost, Profile, TrainingCost
from libra_cli.core.costs.server import ServerCost, guessed_cost
from libra_cli.core.evidence import CostEvidence, PlayedTurn, Starts, TrainedStep
from libra_cli.core.types import Plan, Seconds, SlotId, Tokens

UNCHECKED_GIB = 1e9
"""GiB of a GPU whose memory is not known: it never binds."""
NODE_BANDWIDTH, NETWORK_BANDWIDTH = 1e11, 1e10
"""Bytes a second inside a node and between nodes; assumed, not measured."""
CORRELATED = 1e-2
"""Weight of the prior's proportions, in turns for each turn: turns side by side tell the same."""
MOVE_S: Seconds = 60.0
"""A server or a trainer started, where none has been seen to."""


def server_cost(turns: Sequence[PlayedTurn], prior: ServerCost) -> ServerCost:
    """Prices of the servers that played these turns; the prior without any."""
    line = ForgettingLeastSquares(
        (prior.step_s, prior.sequence_s, prior.kv_token_s, prior.prefill_token_s),
        memory=max(1.0, len(turns)),
        trust=len(turns) * CORRELATED,
    )
    most = 0.0
    for played in _by_slot(turns):
        load = _Load(played)
        most = max(most, load.most)
        for turn in played:
            line.observe(load.amounts(turn), turn.ended - turn.began)
    if not line.seen:
        return prior
    step_s, sequence_s, kv_token_s, prefill_token_s = line.prices()
    return replace(
        prior,
        step_s=step_s,
        sequence_s=sequence_s,
        kv_token_s=kv_token_s,
        prefill_token_s=prefill_token_s,
        prefill_pair_s=prior.prefill_pair_s * line.level,
        request_s=prior.request_s * line.level,
        kv_tokens=max(prior.kv_tokens, int(most)),
    )


def training_cost(
    steps: Sequence[TrainedStep], ranks: int, facts: MemoryModel, *, micro_tokens: Tokens
) -> TrainingCost:
    """Prices of a trainer with ``ranks`` ranks that took these steps; ValueError without any."""
    if not steps:
        raise ValueError("no step has been trained yet")
    mean_s = sum(step.seconds for step in steps) / len(steps)
    tokens = max(1.0, sum(step.tokens for step in steps) / len(steps))
    pairs = max(1.0, sum(step.pairs for step in steps) / len(steps))
    # Proportions to hold to where steps are too much alike: mostly the tokens.
    prior = (0.15 * mean_s, 0.8 * mean_s / tokens, 0.05 * mean_s / pairs)
    line = ForgettingLeastSquares(prior, memory=max(20.0, len(steps)))
    for step in steps:
        line.observe((1.0, step.tokens, step.pairs), step.seconds)
    step_s, token_s, pair_s = line.prices()
    return TrainingCost(
        token_s=token_s * ranks,
        pair_s=pair_s * ranks,
        step_s=step_s,
        facts=facts,
        node_bandwidth=NODE_BANDWIDTH,
        network_bandwidth=NETWORK_BANDWIDTH,
        micro_tokens=micro_tokens,
    )


def measured_profile(
    servers: Mapping[int, ServerCost],
    training: TrainingCost,
    starts: Starts,
    *,
    name: str,
    gpu: str,
    model: str,
    provenance: Mapping[str, str],
) -> Profile:
    """Return the profile of the measured servers, training and starts;
    ``MOVE_S`` where a start was never seen.
    """
    server_s = MOVE_S if starts.server_s is None else starts.server_s
    trainer_s = MOVE_S if starts.trainer_s is None else starts.trainer_s
    moves = MoveCost(
        to_training_s=trainer_s if starts.to_training_s is None else starts.to_training_s,
        to_rollout_s=server_s if starts.to_rollout_s is None else starts.to_rollout_s,
        resize_s=trainer_s,
        start_s=dict.fromkeys(servers, server_s),
    )
    return Profile(name, gpu, model, dict(servers), training, moves, 0.0, dict(provenance))


def unchecked_facts(parameters: float) -> MemoryModel:
    """The memory model of a model of known size on unknown GPUs: all of it fits."""
    return MemoryModel(
        parameters=parameters,
        layers=1,
        hidden=1,
        vocabulary=1,
        kv_bytes=1e-9,
        gpu_gib=UNCHECKED_GIB,
        server_overhead_gib=0.0,
        trainer_overhead_gib=0.0,
    )


@dataclass(frozen=True, slots=True)
class ObservedCosts:
    """The cost source of a run whose GPU nobody has profiled: what it has shown itself.

    ``gpu`` and ``model`` are names for people; ``micro_tokens`` is the recipe's
    ``training.micro_batch_tokens``; ``parameter_bytes`` what a weight version holds for each
    parameter. Of an adapter, a version says nothing of the model's size: what shards of the model
    exchange is then part of what a step costs whatever is in it.
    """

    gpu: str
    model: str
    micro_tokens: Tokens
    parameter_bytes: int

    def __call__(self, plan: Plan, evidence: CostEvidence) -> Profile:
        """The costs so far. Raises WrongRun before the first step."""
        if not evidence.steps:
            raise WrongRun(
                "no step has been trained yet, so training has no price",
                hint="try again after the first step, or name prices: --profile NAME",
            )
        parameters = evidence.version_bytes / self.parameter_bytes
        training = training_cost(
            evidence.steps,
            evidence.ranks,
            unchecked_facts(parameters),
            micro_tokens=self.micro_tokens,
        )
        return measured_profile(
            _server_costs(plan, evidence.turns),
            training,
            evidence.starts,
            name="this run",
            gpu=self.gpu,
            model=self.model,
            provenance={
                "servers": f"fitted to {len(evidence.turns):,} turns of this run",
                "training": f"fitted to {len(evidence.steps):,} steps of this run; bandwidths "
                "assumed",
                "moves": "how long servers and trainer took to start in this run",
            },
        )


def _server_costs(plan: Plan, turns: Sequence[PlayedTurn]) -> dict[int, ServerCost]:
    """Return the prices by tensor-parallel degree, each from the turns that its servers played."""
    costs: dict[int, ServerCost] = {}
    ordered = sorted(turns, key=lambda turn: turn.ended)
    for bucket in dict(plan.servers).values():
        degree = bucket.tensor_parallel
        slots = {slot for slot, other in plan.servers if other.tensor_parallel == degree}
        played = [turn for turn in ordered if turn.slot in slots]
        costs[degree] = server_cost(played, guessed_cost(bucket))
    return costs


class _Load:
    """The load of one server over time: B, K and computed prompt tokens as running sums."""

    def __init__(self, turns: Sequence[PlayedTurn]) -> None:
        changes = [(turn.began, 1, _held(turn)) for turn in turns]
        changes += [(turn.ended, -1, -_held(turn)) for turn in turns]
        changes.sort()
        self._times = [at for at, _, _ in changes]
        running = list(accumulate(change for _, change, _ in changes))
        held = list(accumulate(change for _, _, change in changes))
        self.most = max(held)
        lasted = [after - at for at, after in zip(self._times, self._times[1:], strict=False)]
        self._request_s = [0.0, *accumulate(map(_product, running, lasted))]
        self._token_s = [0.0, *accumulate(map(_product, held, lasted))]
        began = sorted((turn.began, turn.fresh) for turn in turns)
        self._began = [at for at, _ in began]
        self._fresh = [0, *accumulate(fresh for _, fresh in began)]

    def amounts(self, turn: PlayedTurn) -> tuple[float, float, float, float]:
        """Steps, steps x requests, steps x tokens, prompt tokens: of this turn's time."""
        begin, end = (bisect_left(self._times, at) for at in (turn.began, turn.ended))
        seconds = max(turn.ended - turn.began, 1e-9)
        running = (self._request_s[end] - self._request_s[begin]) / seconds
        held = (self._token_s[end] - self._token_s[begin]) / seconds
        first, last = (bisect_left(self._began, at) for at in (turn.began, turn.ended))
        fresh = self._fresh[last] - self._fresh[first]
        return turn.generated, turn.generated * running, turn.generated * held, float(fresh)


def _held(turn: PlayedTurn) -> float:
    return turn.prompt + turn.generated / 2


def _product(one: float, other: float) -> float:
    return one * other


def _by_slot(turns: Iterable[PlayedTurn]) -> list[list[PlayedTurn]]:
    slots: dict[SlotId, list[PlayedTurn]] = {}
    for turn in turns:
        slots.setdefault(turn.slot, []).append(turn)
    return list(slots.values())
