"""The trainer backend accelerate: libra's own ranks, started with ``accelerate launch``.

- Its launcher gives every machine the same number of processes (``num_processes`` is divided by
  ``num_machines``). Where nodes are uneven, torch's own launcher starts the ranks, which accelerate
  calls for the others too; accelerate's settings are then in the environment.
- With ``--cpu`` and several machines it silently makes several worlds of one; the path that forms
  one world is ``--multi_gpu`` with ACCELERATE_USE_CPU. A world of one needs ``--cpu``.
- Torch's store for the rendezvous would listen on every interface; ``node.rendezvous`` has it
  listen at the address alone at which the ranks meet.
- ``--config_file`` is ours, so that a configuration in somebody's home directory changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from libra_cli.core.launch.process import HostFacts, argv_of
from libra_cli.core.launch.trainer import Command, MachineRanks, NativeTrainer

CONFIG = """\
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: 'NO'
mixed_precision: 'no'
use_cpu: false
"""


RENDEZVOUS = "libra_cli.node.rendezvous"
"""Runs a launcher of torch's whose ranks meet at the address that is named, and nowhere else."""


class Accelerate(NativeTrainer):
    """The pure half of the backend; see the module."""

    def refuses(self, ranks: Mapping[str, int]) -> str:
        """Return nothing: any number of ranks on any node forms one world."""
        return ""

    def command(self, facts: HostFacts, world: MachineRanks, module: str, config: str) -> Command:
        """Return one machine's ``accelerate launch``, or ``torchrun`` where nodes are uneven."""
        launcher = (facts.python, "-m", RENDEZVOUS)
        env = {} if world.gpus else {"ACCELERATE_USE_CPU": "true"}
        if not world.even:
            flags = argv_of(_torch_flags(world))
            argv = (*launcher, "torch.distributed.run", *flags, "-m", module, config)
            return Command(argv, env | {"ACCELERATE_MIXED_PRECISION": _precision(world)})
        flags = argv_of(_flags(facts, world))
        argv = (*launcher, "accelerate.commands.launch", *flags, "-m", module, config)
        return Command(argv, env, {"accelerate.yaml": CONFIG})


def _flags(facts: HostFacts, world: MachineRanks) -> dict[str, str | int | float | None]:
    flags: dict[str, str | int | float | None] = {
        "--config_file": f"{facts.run_dir}/accelerate.yaml"
    }
    if world.ranks > 1:
        flags["--multi_gpu"] = None
    elif not world.gpus:
        flags["--cpu"] = None
    flags |= {
        "--num_processes": world.ranks,
        "--num_machines": world.machines,
        "--machine_rank": world.machine,
        "--main_process_port": world.rendezvous_port,
        "--mixed_precision": _precision(world),
        "--dynamo_backend": "no",
    }
    if world.machines > 1:
        flags["--main_process_ip"] = world.head_address
    return flags


def _torch_flags(world: MachineRanks) -> dict[str, str | int | float | None]:
    return {
        "--nnodes": world.machines,
        "--node-rank": world.machine,
        "--nproc-per-node": world.ranks_here,
        "--master-addr": world.head_address,
        "--master-port": world.rendezvous_port,
    }


def _precision(world: MachineRanks) -> str:
    return "bf16" if world.dtype == "bfloat16" else "no"
