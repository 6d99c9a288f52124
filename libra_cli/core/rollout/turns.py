"""The tokens of a turn, as they join those of a trajectory, and the branches of one."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import fields, replace
from hashlib import blake2b

from libra_cli.config.errors import IllegalMove
from libra_cli.core.events import TurnGenerated
from libra_cli.core.types import (
    Branch,
    BranchPoint,
    ChosenExperts,
    Tokens,
    Trajectory,
    TurnReward,
    VersionSpan,
    WeightVersion,
)

ABORTED = "abort"
"""The finish reason of a turn that was broken off because its server drains."""
LENGTH = "length"
"""The finish reason of a turn that had no tokens left."""


def append_turn(
    trajectory: Trajectory, turn: TurnGenerated, *, kv: WeightVersion | None = None
) -> None:
    """Add what was generated, with its log-probabilities and versions; ``kv`` is the oldest version
    whose KV it may have used, None its ``cache_key``.

    Raises:
        IllegalMove: the turn answers another prompt than the trajectory's tokens.
    """
    if turn.prompt_ids != trajectory.token_ids:
        raise IllegalMove(
            f"trajectory {trajectory.id}, turn {trajectory.turns}: the reply is to a prompt of "
            f"{len(turn.prompt_ids)} tokens that is not its {len(trajectory.token_ids)} tokens"
        )
    start, said = len(trajectory.token_ids), len(turn.token_ids)
    trajectory.token_ids.extend(turn.token_ids)
    trajectory.logprobs.extend(turn.logprobs)
    trajectory.loss_mask.frombytes(b"\x01" * said)
    first = not trajectory.spans
    alone = turn.newest == turn.cache_key == (kv or turn.cache_key)
    key: WeightVersion | None = turn.cache_key if alone else None
    for span in turn.spans:
        trajectory.add_span(VersionSpan(span.version, start + span.start, start + span.end))
        if span.version != turn.cache_key.step:
            key = None
    trajectory.single_version = key if first or trajectory.single_version == key else None
    trajectory.generated += said
    if turn.routes is not None:
        _add_routes(trajectory, turn.routes)


def _add_routes(branch: Branch, routes: ChosenExperts) -> None:
    if branch.routes is not None:
        branch.routes.extend(routes)
    elif routes.start == 0:
        branch.routes = routes._replace(ids=routes.ids[:])


def add_turn(trajectory: Trajectory, said: Tokens, anchor: int) -> None:
    """Count the trajectory's last ``said`` tokens as a turn, with a reward of 0 so far."""
    end = len(trajectory.token_ids)
    trajectory.turns += 1
    turn = TurnReward(trajectory.number, end - said, end, anchor=anchor, role=trajectory.role)
    trajectory.turn_rewards.append(turn)


def earned(trajectory: Trajectory, reward: float) -> None:
    """Set the reward of the trajectory's last turn, without those of earlier turns."""
    trajectory.turn_rewards[-1] = trajectory.turn_rewards[-1]._replace(reward=reward)


def earned_at_last(trajectory: Trajectory, reward: float) -> None:
    """Give the last turn what its other turns have not earned of the episode's reward."""
    before = sum(turn.reward for turn in trajectory.turn_rewards[:-1])
    earned(trajectory, reward - before)


def earned_by_roles(trajectory: Trajectory, rewards: Mapping[str, float]) -> None:
    """Add to the last turn of each role what that role has earned."""
    last = {turn.role: place for place, turn in enumerate(trajectory.turn_rewards)}
    for role, reward in rewards.items():
        turn = trajectory.turn_rewards[last[role]]
        trajectory.turn_rewards[last[role]] = turn._replace(reward=turn.reward + reward)


def digest_of(tokens: array[int]) -> int:
    """A number of 48 bits that is the same for the same tokens, on every machine."""
    return int.from_bytes(blake2b(tokens.tobytes(), digest_size=6).digest(), "big")


def go_on_at(trajectory: Trajectory, point: BranchPoint) -> None:
    """Make the first ``kept`` tokens of a branch the trajectory's context; its other tokens are
    kept.

    Raises:
        IllegalMove: there is no such branch, or it has fewer tokens.
    """
    goes_on = point.branch == trajectory.number
    branch = trajectory if goes_on else trajectory.others.get(point.branch)
    if branch is None or not 0 <= point.kept <= len(branch.token_ids):
        raise IllegalMove(f"trajectory {trajectory.id} has no {point.kept} tokens in {point}")
    if point.kept == len(branch.token_ids):
        if branch is not trajectory:
            _switch(trajectory, point.branch, trajectory.others.pop(point.branch))
        return
    begun = Branch(token_ids=branch.token_ids[: point.kept])
    extend_masked(begun, point.kept)
    if branch.routes is not None:
        begun.routes = branch.routes.first(point.kept)
    _switch(trajectory, len(trajectory.others) + 1, begun)


def _switch(trajectory: Trajectory, number: int, branch: Branch) -> None:
    """Make a branch the trajectory's own, and put the one that was among the others."""
    names = [field.name for field in fields(Branch)]
    trajectory.others[trajectory.number] = Branch(
        **{name: getattr(trajectory, name) for name in names}
    )
    trajectory.number = number
    for name in names:
        setattr(trajectory, name, getattr(branch, name))


def extend_masked(branch: Branch, count: int) -> None:
    """Append log-probabilities and mask of ``count`` tokens that are not trained on."""
    branch.logprobs.frombytes(bytes(count * branch.logprobs.itemsize))
    branch.loss_mask.frombytes(bytes(count))


def joined(parts: list[TurnGenerated]) -> TurnGenerated:
    """Return the parts of a turn as one: the prompt of the first, the finish reason of the last."""
    first, last = parts[0], parts[-1]
    if len(parts) == 1 and last.finish_reason != ABORTED:
        return last
    tokens, logprobs, spans = first.token_ids[:], first.logprobs[:], [*first.spans]
    routes = None if first.routes is None else first.routes._replace(ids=first.routes.ids[:])
    for part in parts[1:]:
        if routes is not None and part.routes is not None:
            routes.extend(part.routes)
        spans += [
            VersionSpan(span.version, len(tokens) + span.start, len(tokens) + span.end)
            for span in part.spans
        ]
        tokens.extend(part.token_ids)
        logprobs.extend(part.logprobs)
    return replace(
        last,
        prompt_ids=first.prompt_ids,
        token_ids=tokens,
        logprobs=logprobs,
        spans=tuple(spans),
        routes=routes,
        newest=max(part.newest for part in parts),
        started_at=first.started_at,
        finish_reason=LENGTH if last.finish_reason == ABORTED else last.finish_reason,
    )
