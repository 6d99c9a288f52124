"""Runs the programs that try a host's torch, and the model on it, and reads what they say."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from libra_cli.config.errors import HostError, ProcessError
from libra_cli.config.recipe import NodeSpec
from libra_cli.core.launch.process import HostFacts, ProcessSpec
from libra_cli.core.preflight.host_report import NamesReport, TorchReport
from libra_cli.core.preflight.probes import names_probe, torch_probe
from libra_cli.core.types import Seconds
from libra_cli.runtime.supervision.answers import understood

PROBE_S = 180.0
"""Seconds for importing torch, vLLM or transformers from a slow disk."""
Ask: TypeAlias = Callable[[ProcessSpec, Seconds], Awaitable[Any]]
"""Runs a process to its end within a time and returns the JSON of its last line."""


async def torch_of(
    ask: Ask, node: NodeSpec, facts: HostFacts, packages: tuple[str, ...]
) -> TorchReport:
    """Import torch and these packages on a node. Raises HostError if the answer makes no sense."""
    try:
        answer = await ask(torch_probe(node, facts, packages), PROBE_S)
    except ProcessError as error:  # it was killed, or crashed where Python cannot catch it
        return TorchReport("", "", False, (), str(error).partition("\n")[0], "", {})
    with understood(HostError, f"{node.name}: what torch says"):
        return TorchReport(**{**answer, "devices": tuple(answer["devices"])})


async def names_of(ask: Ask, node: NodeSpec, facts: HostFacts, path: str) -> NamesReport:
    """Map the names of a model's files on a node. Raises HostError as above."""
    try:
        answer = await ask(names_probe(node, facts, path), PROBE_S)
    except ProcessError as error:
        return NamesReport(untried=str(error).partition("\n")[0])
    with understood(HostError, f"{node.name}: what the model's names are"):
        return NamesReport(**answer)
