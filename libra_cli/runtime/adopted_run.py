"""Goes on with a run whose controller was killed, where it was.

    attach        reach its hosts and write what the killed controller had no time to write
    take_over     connect to its processes and say what has happened to them meanwhile

Until every host is reached nothing of the run is changed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from libra_cli.core.actions import End
from libra_cli.core.events import Event
from libra_cli.core.records import Record, RunRecord
from libra_cli.core.run.state import RunIdentity
from libra_cli.core.types import Seconds
from libra_cli.runtime.adoption.run_log import ReplayedRun
from libra_cli.runtime.adoption.takeover import Adoption, connect, findings, replayed_from_prompt
from libra_cli.runtime.hosts.cluster import Cluster
from libra_cli.runtime.performer import Performer


async def attach(
    replayed: ReplayedRun, controller: RunIdentity, cluster: Cluster, model_copy: Path
) -> Adoption:
    """Reach the hosts of a run, which has this controller from now on. Raises HostError."""
    running = await cluster.adopt(replayed.cluster, model_copy)
    replayed.machine.run.controlled_by(controller)
    return Adoption(replayed, running)


def catch_up(
    replayed: ReplayedRun,
    written: Seconds,
    *,
    tell: Callable[[Seconds, Event], None],
    save: Callable[[Record], None],
) -> None:
    """Write what the killed controller had not, whose last event was written at that time."""
    for at, event, saved in replayed.happened:
        if at > written:
            tell(at, event)
        for record in saved if at >= written else ():
            if not isinstance(record, RunRecord):  # it names the controller
                save(record)


def ended_before(adoption: Adoption, save: Callable[[Record], None]) -> End | None:
    """How the run had ended when its controller was killed, if it had; its last row is saved."""
    machine = adoption.replayed.machine
    training = machine.training
    if adoption.end is not None:  # the machine will say nothing more
        row = machine.run.changed_row(training.step, training.published, "")
        if row is not None:
            save(row)
    return adoption.end


async def take_over(
    adoption: Adoption, performer: Performer, cluster: Cluster, *, has_agent: bool
) -> list[Event]:
    """Connect to what runs; returns what the machine must hear first."""
    machine, memory = adoption.replayed.machine, adoption.replayed.memory
    failed = await connect(
        machine,
        memory,
        servers=performer.servers,
        workers=performer.workers,
        models=performer.models,
        trainer=performer.trainer,
    )
    alive = {
        node: None if names is None else await cluster.hosts[node].running()
        for node, names in adoption.running.items()
    }
    anew = replayed_from_prompt(machine) if has_agent else []
    return [*findings(machine, memory, alive), *failed, *anew]
