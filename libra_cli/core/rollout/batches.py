"""What a step's batch was: how old its tokens were, who came late, and whom it left out.

``batch_metrics`` names the numbers as they stand in ``StepRecord.batch_json``::

    tokens_over_bound            generated tokens more than training.max_staleness versions behind
    share_over_bound             of all generated tokens of the batch
    token_staleness_mean, _max   versions behind, over generated tokens
    groups_closed                groups trained without members that were not finished
    trajectories_left            those members; they are trained later, or dropped
    trajectories_late            members of groups closed before, trained now
    played_length                mean generated tokens of the trajectories that ended, or were given
                                 up, since the step before; ``mean_length`` is that of trained ones
    reward_std                   mean over its groups of the standard deviation (n - 1) of rewards
    share_truncated              of its trajectories: cut by a limit of turns or tokens
    turns_mean, tools_mean,      turns, tool calls and branches a trajectory, which has at least one
    branches_mean
    share_repeated               of its trajectories: some text occurs again and again
    share_unreadable             of tool calls: they could not be read
    reward_length_correlation    within groups, mean over them

With dynamic sampling also, since the step before::

    groups_filtered              groups without signal, which are not trained
    filtered_tokens              generated tokens of these
    share_filtered               of these and the batch's
    env/NAME/groups_filtered     those of an environment, of a run with several

and with oversampling::

    surplus_tokens               generated tokens of trajectories that were stopped, without those
                                 of the turn that each was in

with hosts that hold so many episodes, since the step before::

    places_full_s                seconds in which a group would have begun, had it had places there

and of each frozen model that the run serves, since the step before::

    models/NAME/servers          servers that serve it
    models/NAME/busy_s           seconds of these with a request, summed
    models/NAME/asked_s          seconds that requests were open, summed

and with a curriculum::

    tasks_played                 of its pool, at least once
    tasks_in_band                of these, neither too hard nor too easy when played last

Over a whole run ``played_length`` and ``mean_length`` agree where no length is trained less often
than it is played.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, stdev

from libra_cli.core.rollout.groups import Group
from libra_cli.core.rollout.text_health import text_metrics
from libra_cli.core.types import Tokens, Version


def batch_metrics(
    batch: Sequence[Group], held: Version, bound: int, played: Sequence[Tokens]
) -> dict[str, float | None]:
    """Metrics of a step taken from version ``held``; ``played`` are lengths in generated tokens."""
    members = [member for group in batch for member in group.members]
    runs = [
        (behind, end - start)
        for member in members
        for branch in member.branches
        for behind, start, end in branch.behind(held)
    ]
    compared = [group.ended for group in batch if len(group.ended) > 1 and not group.is_rest]
    tokens = max(1, sum(count for _, count in runs))
    over = sum(count for behind, count in runs if behind > bound)
    return {
        "tokens_over_bound": over,
        "share_over_bound": over / tokens,
        "token_staleness_mean": sum(behind * count for behind, count in runs) / tokens,
        "token_staleness_max": max((behind for behind, _ in runs), default=0),
        "groups_closed": sum(group.missing > 0 for group in batch),
        "trajectories_left": sum(group.missing for group in batch),
        "trajectories_late": sum(len(group.members) for group in batch if group.is_rest),
        "played_length": fmean(played) if played else None,
        "reward_std": fmean(map(stdev, compared)) if compared else None,
        "share_truncated": fmean(member.truncated for member in members),
        "turns_mean": fmean(member.turns for member in members),
        "tools_mean": fmean(member.tools for member in members),
        "branches_mean": fmean(len(member.branches) for member in members),
        **text_metrics(members),
    }
