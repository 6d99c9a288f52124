"""The one list of checks, of which every run makes the quick ones and ``libra doctor`` all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from libra_cli.core.preflight import (
    cores,
    draft_heads,
    fabric,
    gpu_memory,
    host_checks,
    model_checks,
    network_checks,
    python_checks,
    quantization,
    shares,
)
from libra_cli.core.preflight.case import PreflightCase
from libra_cli.core.preflight.findings import CONTROLLER, Finding


@dataclass(frozen=True, slots=True)
class Check:
    """One check of the list: its name, when it is made, and its rule."""

    name: str
    quick: bool
    """Whether every run makes it: what hosts tell of themselves takes a second. Torch, which takes
    seconds, is loaded by a run on hosts with GPUs only; by the doctor on all, with vLLM and all
    else that stands on it. The model's names are tried on the head, where torch is loaded."""
    rule: Callable[[PreflightCase], Iterator[Finding]]


CHECKS = (
    Check("reach", True, python_checks.reached),
    Check("packages", True, python_checks.packages),
    Check("versions", True, python_checks.same_versions),
    Check("driver", True, python_checks.driver),
    Check("gpus", True, host_checks.gpus),
    Check("torch", True, python_checks.torch),
    Check("cores", True, cores.cores),
    Check("compiler", True, python_checks.compiler),
    Check("memory", True, host_checks.memory),
    Check("gpu memory", True, gpu_memory.gpu_memory),
    Check("shares", True, shares.shares),
    Check("shm", True, host_checks.versions_room),
    Check("disk", True, host_checks.disk),
    Check("limits", True, host_checks.limits),
    Check("sandboxes", True, host_checks.sandboxes),
    Check("clock", True, host_checks.clock),
    Check("model", True, model_checks.model),
    Check("frozen models", True, model_checks.frozen_models),
    Check("family", True, model_checks.family),
    Check("names", True, model_checks.names),
    Check("shape", True, model_checks.shape),
    Check("quantization", True, quantization.quantization),
    Check("drafts", True, draft_heads.drafts),
    Check("template", False, model_checks.template),
    Check("teacher", False, model_checks.teacher),
    Check("network", True, network_checks.network),
    Check("bandwidth", False, network_checks.bandwidth),
    Check("all-reduce", False, network_checks.all_reduce),
    Check("fabric", True, fabric.fabric),
    Check("remains", True, host_checks.remains),
)


def examine(case: PreflightCase, *, quick: bool) -> list[Finding]:
    """Return all findings, check by check; a check that found something has no ``fine`` line.

    Where hosts do not answer, a check of hosts is ``unknown`` and not ``fine``.
    """
    found: list[Finding] = []
    silent = case.silent()
    for check in (one for one in CHECKS if one.quick or not quick):
        of_check = list(check.rule(case))
        wrong = [one for one in of_check if one.severity != "fine"]
        found += wrong or [_as_far_as_looked(one, case, silent) for one in of_check[:1]]
    return found


def _as_far_as_looked(fine: Finding, case: PreflightCase, silent: Sequence[str]) -> Finding:
    """What hosts told is fine; of those that are ``silent`` it is unknown."""
    if fine.host == CONTROLLER or not silent:
        return fine
    told = f"fine on the others, not looked at on {', '.join(silent)}"
    if len(silent) == len(case.recipe.nodes):
        told = "not looked at: no host answers"
    return replace(fine, severity="unknown", what=told)
