"""The plan a case should have, and whether to move there.

The plan, its price and the verdict are ``slot_plan``'s.
"""

from __future__ import annotations

from dataclasses import asdict
from statistics import fmean

from libra_cli.app.rebalance.cases import Case
from libra_cli.core.cluster.placement import slots_of
from libra_cli.core.costs.profile import ProfileError
from libra_cli.core.planning.search import Times
from libra_cli.core.planning.slot_placement import SlotDecision, layout_of, propose_plan
from libra_cli.core.types import Plan, Pool, Slot
from libra_cli.report.status.rebalance import (
    FORMAT,
    Corrections,
    PlanResult,
    ProfileResult,
    RebalanceResult,
    StageIdle,
    StageTimes,
    Verdict,
    WorkloadResult,
)


def decide(case: Case) -> SlotDecision:
    """The decision, by prices corrected as ``planning.corrections`` has it.

    Raises:
        NothingFits: no plan of the recipe can run; says which constraint fails first.
        ProfileError: a bucket's shape has no prices.
    """
    _require_shapes(case)
    return propose_plan(
        case.recipe,
        case.slots,
        case.plan,
        case.workload,
        case.profile,
        admission=case.admission,
        elastic=case.live,
        measured=case.measured,
    )


def told(case: Case) -> RebalanceResult:
    """Decide, and put it in the words of ``--json``. Raises as ``decide``."""
    slots = slots_of(case.recipe)
    decision = decide(case)
    prices = decision.prices
    measured = _measured_told(case, prices.shown)
    return RebalanceResult(
        format=FORMAT,
        of=case.of,
        name=case.name,
        state=case.state,
        step=case.step,
        target_steps=case.recipe.run.steps,
        profile=_profile_told(case),
        workload=_workload_told(case),
        idle=_idle(measured),
        plan=_plan_told(case.plan, slots),
        proposed=_plan_told(decision.proposed, slots),
        times={
            "measured": measured,
            "priced": _times_told(prices.priced),
            "now": _times_told(decision.before),
            "proposed": _times_told(decision.after),
        },
        corrections=Corrections(
            rollout=prices.correction.rollout, training=prices.correction.training
        ),
        moves=[
            {"slot": move.slot, "from": move.before, "to": move.after, "seconds": move.seconds}
            for move in decision.moves
        ],
        verdict=_verdict(case, decision, slots),
        reasons=list(decision.reasons),
        notes=list(case.notes),
    )


def _require_shapes(case: Case) -> None:
    known = set(case.profile.servers)
    for bucket in dict(case.plan.servers).values():
        if bucket.tensor_parallel not in known:
            degrees = ", ".join(map(str, sorted(known)))
            raise ProfileError(
                f"bucket {bucket.name!r} has servers of {bucket.tensor_parallel} GPUs, for which "
                f"profile {case.profile.name} has no prices (it has {degrees})",
                hint="another --profile, or libra bench --calibrate recipe.yaml",
            )


def _measured_told(case: Case, shown: Times | None) -> StageTimes:
    if shown is None:
        return StageTimes(rollout_s=None, train_s=None, step_s=None)
    step_s = fmean(step.step_s for step in case.measured)
    return StageTimes(rollout_s=shown.rollout_s, train_s=shown.train_s, step_s=step_s)


def _idle(times: StageTimes) -> StageIdle:
    period, rollout, train = times["step_s"], times["rollout_s"], times["train_s"]
    if not period or rollout is None or train is None:
        return StageIdle(rollout=None, training=None)
    return StageIdle(rollout=max(0.0, 1 - rollout / period), training=max(0.0, 1 - train / period))


def _verdict(case: Case, decision: SlotDecision, slots: tuple[Slot, ...]) -> Verdict:
    running = case.of == "run"
    gain_s = decision.before.step_s - decision.after.step_s
    why_not = decision.why_not
    if not decision.moves and not any(slot.pool is Pool.HYBRID for slot in slots):
        why_not = "no slot may change sides: the recipe's pools fix every one (pool: hybrid frees)"
    horizon = case.admission.horizon
    return Verdict(
        move=decision.plan is not None,
        why_not=why_not,
        gain_s=gain_s if gain_s == gain_s and abs(gain_s) < float("inf") else None,
        cost_s=decision.cost_s if running else 0.0,
        payback_steps=decision.payback_steps if running else None,
        horizon_steps=horizon if running else None,
    )


def _plan_told(plan: Plan, slots: tuple[Slot, ...]) -> PlanResult:
    layout = layout_of(plan, slots)
    return PlanResult(
        servers=[
            {
                "slot": slot,
                "bucket": bucket.name,
                "tensor_parallel": bucket.tensor_parallel,
                "max_num_seqs": bucket.max_num_seqs,
                "up_to_tokens": bucket.up_to_tokens,
            }
            for slot, bucket in plan.servers
        ],
        train=list(plan.train),
        gradient=list(plan.gradient),
        rollout_gpus=layout.rollout_gpus,
        training_gpus=layout.training_gpus,
    )


def _profile_told(case: Case) -> ProfileResult:
    profile = case.profile
    used = {bucket.tensor_parallel for _, bucket in case.plan.servers}
    training = profile.training
    return ProfileResult(
        name=profile.name,
        gpu=profile.gpu,
        model=profile.model,
        source=case.source,
        provenance=dict(profile.provenance),
        servers=[asdict(profile.servers[degree]) for degree in sorted(used)],
        training={
            "token_s": training.token_s,
            "pair_s": training.pair_s,
            "step_s": training.step_s,
        },
    )


def _workload_told(case: Case) -> WorkloadResult:
    work = case.workload
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


def _times_told(times: Times) -> StageTimes:
    return StageTimes(rollout_s=times.rollout_s, train_s=times.train_s, step_s=times.step_s)
