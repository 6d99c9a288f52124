"""What is written of trajectories, their turns and their groups."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from json import dumps

from libra_cli.core.events import TurnGenerated
from libra_cli.core.records import (
    CreditRecord,
    GroupRecord,
    LateRecord,
    TrajectoryRecord,
    TurnRecord,
    to_metrics_json,
)
from libra_cli.core.rollout.active import ActiveTrajectory
from libra_cli.core.rollout.groups import Group, GroupState
from libra_cli.core.scheduling.server_queues import Request
from libra_cli.core.types import BranchTokens, Seconds, ToolReturn, Trajectory


def turn_record(
    active: ActiveTrajectory, turn: TurnGenerated, asked: Request, returns: list[ToolReturn]
) -> TurnRecord:
    """Return the row of a turn; ``returns`` are those of its tools."""
    who = active.trajectory.id
    return TurnRecord(
        group_id=who.group,
        member=who.member,
        attempt=who.attempt,
        turn=active.trajectory.turns - 1,
        slot=turn.slot,
        incarnation=turn.incarnation,
        queued_at=active.queued_at,
        started_at=turn.started_at,
        ended_at=active.ended_at,
        prompt_tokens=len(turn.prompt_ids),
        generated_tokens=len(turn.token_ids),
        finish_reason=turn.finish_reason,
        moved_from=asked.last_slot if asked.last_slot not in (None, turn.slot) else "",
        tools_json=_tools_json(returns),
    )


def _tools_json(returns: list[ToolReturn]) -> str:
    told = [[r.tool, r.outcome, round(r.latency_s, 6), r.characters] for r in returns]
    return dumps(told) if told else "[]"


def trajectory_record(
    trajectory: Trajectory, state: str, *, ended_at: Seconds | None, detail: str = ""
) -> TrajectoryRecord:
    """Return the trajectory's row; its tokens are written once it has ended."""
    ended = ended_at is not None
    return TrajectoryRecord(
        group_id=trajectory.id.group,
        member=trajectory.id.member,
        attempt=trajectory.id.attempt,
        state=state,
        started_at=trajectory.started_at,
        ended_at=ended_at,
        reward=trajectory.reward,
        turns=trajectory.turns,
        generated_tokens=trajectory.generated,
        context_tokens=trajectory.all_tokens,
        min_version=trajectory.min_version,
        max_version=trajectory.max_version,
        spans_json=dumps([[s.version, s.start, s.end] for s in trajectory.spans]),
        detail=detail,
        branches_json=_branches_json(trajectory) if ended and trajectory.others else "[]",
        environment=trajectory.environment,
        metrics_json=to_metrics_json(trajectory.metrics),
        tokens=_tokens(trajectory) if ended else (),
        truncated=trajectory.truncated,
        roles_json=_roles_json(trajectory) if ended and trajectory.role else "[]",
        environment_s=trajectory.environment_s if ended else None,
        waited_s=trajectory.waited_s if ended else None,
    )


def _branches_json(trajectory: Trajectory) -> str:
    return dumps(
        [
            [number, [[s.version, s.start, s.end] for s in branch.spans]]
            for number, branch in sorted(trajectory.others.items())
        ]
    )


def _roles_json(trajectory: Trajectory) -> str:
    others = [branch.role for _, branch in sorted(trajectory.others.items())]
    return dumps([*others, trajectory.role])


def credit_record(
    trajectory: Trajectory,
    step: int,
    runs: Mapping[int, Sequence[tuple[int, float]]],
    log_ratios: Mapping[tuple[int, int, int], bytes],
) -> CreditRecord:
    """Return the row of a trajectory that a step has trained; ``runs`` are advantages by branch.

    ``log_ratios`` are those of all of the step, as ``LogRatios.by_branch`` has them.
    """
    branches = [*sorted(trajectory.others), trajectory.number]
    turns = [
        [branches.index(turn.branch), turn.start, turn.end, turn.reward]
        for turn in trajectory.turn_rewards
    ]
    return CreditRecord(
        group_id=trajectory.id.group,
        member=trajectory.id.member,
        attempt=trajectory.id.attempt,
        step=step,
        advantages_json=dumps([runs[number] for number in branches]),
        turns_json=dumps(turns),
        log_ratios=_log_ratios(trajectory, branches, log_ratios),
    )


def _log_ratios(
    trajectory: Trajectory, numbers: Sequence[int], of_step: Mapping[tuple[int, int, int], bytes]
) -> tuple[bytes, ...]:
    """The log ratios of these branches; none if no branch has one for each generated token."""
    group, member, _ = trajectory.id
    found = []
    for number in numbers:
        branch = trajectory.others.get(number, trajectory)
        values = of_step.get((group, member, number), b"")
        tokens = sum(span.end - span.start for span in branch.spans)
        found.append(values if len(values) == 2 * tokens else b"")
    return tuple(found) if any(found) else ()


def _tokens(trajectory: Trajectory) -> tuple[BranchTokens, ...]:
    """Return the tokens of each branch without copying them: no array changes after the end."""
    branches = [*sorted(trajectory.others.items()), (trajectory.number, trajectory)]
    return tuple(
        BranchTokens(number, one.token_ids, one.loss_mask, one.logprobs, tuple(one.spans))
        for number, one in branches
    )


def group_records(group: Group, now: Seconds) -> list[GroupRecord] | list[LateRecord]:
    """Return the group's row; of a rest, a row for each of its members."""
    if not group.is_rest:
        return [group_record(group, now)]
    return [LateRecord(group.id, member.id.member, group.step) for member in group.members]


def group_record(group: Group, now: Seconds, *, detail: str = "") -> GroupRecord:
    detail = detail or "; ".join(_details(group))
    return GroupRecord(
        group_id=group.id,
        state=group.state,
        started_at=group.started_at,
        ended_at=None if group.reward is None else now,
        started_version=group.started_version,
        step=group.step,
        reward=group.reward,
        detail=detail,
        task=group.task,
    )


def _details(group: Group) -> Iterator[str]:
    if group.missing:
        yield f"closed without {group.missing} unfinished members"
    if group.surplus:
        yield f"{group.surplus} surplus members were stopped"
    if group.state is GroupState.FILTERED:
        yield f"all rewards are {group.ended[0]:g}: there is nothing to learn from"


def dropped_record(broken: Trajectory, detail: str, now: Seconds) -> GroupRecord:
    """Return the row of a group that is dropped because of one of its members."""
    return GroupRecord(
        group_id=broken.id.group,
        state="dropped",
        started_at=broken.started_at,
        ended_at=now,
        started_version=broken.min_version or 0,
        step=None,
        reward=None,
        detail=detail,
    )
