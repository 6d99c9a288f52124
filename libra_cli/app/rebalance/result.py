"""Writes a decision of the planner as the object of ``libra rebalance --json``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, replace
from math import inf
from statistics import fmean

from libra_cli.app.idle_servers import PlannedRun
from libra_cli.app.rebalance.cases import Case
from libra_cli.core.explanation import Explanation
from libra_cli.core.planning.planner import Decision
from libra_cli.core.planning.search import Times
from libra_cli.core.records import PlannedServer
from libra_cli.core.types import Plan, Pool, Slot
from libra_cli.report.status.rebalance import (
    FORMAT,
    Corrections,
    PlanResult,
    ProfileResult,
    RebalanceResult,
    SlotMoveTold,
    StageIdle,
    StageTimes,
    TimesPart,
    Verdict,
    WorkloadResult,
)


def result_of(case: Case) -> RebalanceResult:
    """Decide, and say what was decided and why.

    Raises:
        NothingFits: no plan of the recipe can run; says which constraint fails first.
        ProfileError: a bucket's shape has no prices.
    """
    decision = case.planner.decide(case.observation)
    found = decision.found
    measured = _measured(case, found.shown)
    return RebalanceResult(
        format=FORMAT,
        of=case.of,
        name=case.name,
        state=case.state,
        step=case.observation.step if case.of == "run" else None,
        target_steps=case.recipe.run.steps,
        profile=_profile(case),
        workload=_workload(case),
        idle=_idle(measured),
        plan=_plan(case, case.observation.plan, case.observation.slots),
        proposed=_plan(case, decision.proposed, decision.slots),
        times=TimesPart(
            measured=measured,
            priced=_times(found.priced),
            now=_times(decision.before),
            proposed=_times(decision.after),
        ),
        corrections=Corrections(
            rollout=found.recalibration.rollout, training=found.recalibration.training
        ),
        moves=[
            SlotMoveTold(move.slot, move.before, move.after, move.seconds)
            for move in decision.moves
        ],
        verdict=_verdict(case, decision),
        explanation=_explanation(case, decision),
        bounds=list(decision.bounds),
        reasons=list(decision.reasons),
        notes=[*case.notes, *_idle_servers(case, decision)],
    )


def _idle_servers(case: Case, decision: Decision) -> tuple[str, ...]:
    """What servers would earn on the trainer's GPUs, under the plan that there is to be."""
    seen = case.observation
    plan, slots = (decision.plan, decision.slots) if decision.plan else (seen.plan, seen.slots)
    return PlannedRun(case.recipe, plan, slots).advice(decision.found.profile, seen.workload)


def _measured(case: Case, shown: Times | None) -> StageTimes:
    if shown is None:
        return StageTimes(rollout_s=None, train_s=None, step_s=None)
    step_s = fmean(step.step_s for step in case.observation.measured)
    return StageTimes(rollout_s=shown.rollout_s, train_s=shown.train_s, step_s=step_s)


def _idle(times: StageTimes) -> StageIdle:
    period, rollout, train = times.step_s, times.rollout_s, times.train_s
    if not period or rollout is None or train is None:
        return StageIdle(rollout=None, training=None)
    return StageIdle(rollout=max(0.0, 1 - rollout / period), training=max(0.0, 1 - train / period))


def _verdict(case: Case, decision: Decision) -> Verdict:
    running = case.of == "run"
    gain_s = decision.before.step_s - decision.after.step_s
    why_not = decision.why_not
    if not decision.moves and not any(slot.pool is Pool.HYBRID for slot in case.observation.slots):
        why_not = "no slot may change sides: the recipe's pools fix every one (pool: hybrid frees)"
    return Verdict(
        move=decision.plan is not None,
        why_not=why_not,
        gain_s=gain_s if gain_s == gain_s and abs(gain_s) < float("inf") else None,
        cost_s=decision.cost_s if running else 0.0,
        payback_steps=decision.payback_steps if running else None,
        horizon_steps=decision.horizon if running else None,
    )


def _explanation(case: Case, decision: Decision) -> Explanation | None:
    """The object that a live run keeps with its decision; before a run begins, no move costs."""
    if decision.explanation is None:
        return None
    if case.of == "run":
        return decision.explanation
    return replace(decision.explanation, cost_s=0.0, payback_steps=None, horizon_steps=inf)


def _plan(case: Case, plan: Plan, slots: Sequence[Slot]) -> PlanResult:
    layout = case.planner.space.layout_of(plan, slots)
    return PlanResult(
        servers=[PlannedServer(slot, *astuple(bucket)) for slot, bucket in plan.servers],
        train=list(plan.train),
        gradient=list(plan.gradient),
        rollout_gpus=layout.rollout_gpus,
        training_gpus=layout.training_gpus,
    )


def _profile(case: Case) -> ProfileResult:
    profile = case.profile
    used = {bucket.tensor_parallel for _, bucket in case.observation.plan.servers}
    training = profile.training
    return ProfileResult(
        name=profile.name,
        gpu=profile.gpu,
        model=profile.model,
        source=case.source,
        provenance=dict(profile.provenance),
        servers=[profile.servers[degree].to_dict() for degree in sorted(used)],
        training={
            "token_s": training.token_s,
            "pair_s": training.pair_s,
            "step_s": training.step_s,
        },
    )


def _workload(case: Case) -> WorkloadResult:
    work = case.observation.workload
    return WorkloadResult(
        source=case.told_from,
        trajectories=work.trajectories,
        seen=len(work.samples),
        mean_generated=work.mean_generated,
        mean_context=work.mean_context,
        longest_context=work.longest.context,
        tool_s=sum(sample.tool_s for sample in work.samples) / len(work.samples),
        overlap=work.overlap,
    )


def _times(times: Times) -> StageTimes:
    return StageTimes(rollout_s=times.rollout_s, train_s=times.train_s, step_s=times.step_s)
