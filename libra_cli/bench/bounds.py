"""A bound that no scheduler can beat: the least makespan of what a run trained, on a fixed plan.

All servers are alike. The bound is the largest of three, in seconds. With ``W`` what must be
computed (below), and ``last`` and ``trained`` the seconds of the last optimizer step and of all::

    capacity   the least T in which the servers can compute W, all full all the time, + last
    path       the longest of the trajectories alone + last
    training   the least that the longest path of a first batch can be + trained

``W`` of a set of trajectories: ``tokens`` generated in decode steps (all but the first of a turn),
``kv`` the tokens of KV cache that these read in all, ``prompt`` the tokens computed in prefill,
each once (a group's prompt once for all). With ``S`` steps in all, servers of the law in
``core.costs.server`` need for W together at least::

    a S + b tokens + c kv + p1 max(0, prompt - free S),    S >= tokens / seats, S >= kv / KV tokens

since no step has more sequences than seats, nor more context than the KV cache.

Guarantee: a true lower bound in the simulator's own costs, for these trajectories and this plan.
Limit: it knows nothing of turns that wait for tools while servers run empty, of recomputed
contexts, and of the rule that makes a batch, so even the best scheduler may be far from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from libra_cli.core.costs.law import ServerLaw
from libra_cli.core.types import Seconds, Tokens
from libra_cli.sim.traces import RecordedEpisode


@dataclass(frozen=True, slots=True)
class ServerShape:
    """The shape of ``servers`` that are all alike, each with ``seats``."""

    cost: ServerLaw
    servers: int
    seats: int


@dataclass(frozen=True, slots=True)
class Work:
    """The work that servers must do, in tokens, named as in the module's formula."""

    tokens: float
    kv: float
    prompt: float


def least_makespan(
    shape: ServerShape,
    groups: Sequence[Sequence[RecordedEpisode]],
    trained_s: Sequence[Seconds],
    *,
    batch: int,
    max_len: Tokens,
) -> Seconds:
    """The bound for these trained groups, ``batch`` of them a step; steps took ``trained_s``."""
    paths = sorted(
        max(path_s(shape.cost, episode, max_len=max_len) for episode in group) for group in groups
    )
    # The first batch holds that many groups, and the quickest there are.
    first = paths[min(batch, len(paths)) - 1]
    capacity = capacity_s(shape, work_of(groups, max_len=max_len))
    return max(max(capacity, paths[-1]) + trained_s[-1], first + sum(trained_s))


def work_of(groups: Iterable[Sequence[RecordedEpisode]], *, max_len: Tokens) -> Work:
    """Return the least work of playing these groups once."""
    tokens = kv = prompt = 0.0
    for group in groups:
        prompt += min(episode.prompt for episode in group)
        for episode in group:
            end = episode.prompt
            for context, generated in _turns(episode, max_len):
                tokens += generated - 1
                kv += (generated - 1) * (context + generated / 2)
                prompt += context - end
                end = context + generated
    return Work(tokens, kv, prompt)


def path_s(cost: ServerLaw, episode: RecordedEpisode, *, max_len: Tokens) -> Seconds:
    """Seconds of a trajectory alone, whose turns no other holds up."""
    turns = _turns(episode, max_len)
    return sum(
        turn.tool_s + _turn_s(cost, context, generated)
        for turn, (context, generated) in zip(episode.turns, turns, strict=False)
    )


def _turn_s(cost: ServerLaw, context: Tokens, generated: Tokens) -> Seconds:
    """Return the seconds of a turn alone, of which the step that
    ends the prompt gives the first token.
    """
    kv = context + generated / 2
    return cost.decode_step_s(0, 0) + (generated - 1) * cost.decode_step_s(1, kv)


def _turns(episode: RecordedEpisode, max_len: Tokens) -> list[tuple[Tokens, Tokens]]:
    """(context before, tokens generated) of every turn, cut where the context is full."""
    played = episode.cut(max_len)
    turns, context = [], played.prompt
    for turn in played.turns:
        turns.append((context, turn.generated))
        context += turn.generated + turn.observation
    return turns


def capacity_s(shape: ServerShape, work: Work) -> Seconds:
    """The least time in which these servers, all full all the time, can compute that work."""
    cost = shape.cost.floor()
    fewest = max(work.tokens / shape.seats, work.kv / cost.kv_tokens)
    # Along the number of steps the time has one bend: from there on all prompt tokens ride free.
    riding = max(fewest, work.prompt / cost.free_tokens) if cost.free_tokens else fewest

    def seconds(steps: float) -> Seconds:
        paid = max(0.0, work.prompt - cost.free_tokens * steps)
        decoding = cost.step_s * steps + cost.sequence_s * work.tokens + cost.kv_token_s * work.kv
        return decoding + cost.prefill_token_s * paid

    return min(seconds(fewest), seconds(riding)) / shape.servers
