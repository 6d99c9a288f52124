"""What every process of a run has in common: its host, its specification, its environment.

Contract: pure. Nothing secret is in an argv or in an environment: a process finds the run's token
in the file that LIBRA_TOKEN_FILE names, which the host's agent sets, as it sets the run's markers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

from libra_cli.config.recipe import ModelSpec, NodeSpec
from libra_cli.core.launch.cores import cores_env
from libra_cli.core.types import Slot, SlotId

Dtype: TypeAlias = Literal["float32", "bfloat16"]
VISIBLE = "CUDA_VISIBLE_DEVICES"
Flags: TypeAlias = Mapping[str, str | int | float | None]
"""Command-line flags in order; one whose value is None stands alone."""


class PeerAddress(NamedTuple):
    """The address at which the other hosts of a run reach a host,
    and the one it listens on for them.
    """

    serves_at: str
    """The name or number by which the other hosts reach it."""
    listens_at: str
    """An address of its own; it listens at no other."""

    @classmethod
    def of(cls, address: str, data_address: str, own_address: str) -> PeerAddress:
        """Return the addresses that follow from the fields of ``HostFacts`` with these names."""
        serves_at = data_address or address
        is_own = data_address or address[:1].isdigit()
        return cls(serves_at, serves_at if is_own else own_address or address)


@dataclass(frozen=True, slots=True)
class HostFacts:
    """The facts of a host that the commands of its processes depend on.

    Paths are absolute there.
    """

    node: str
    python: str
    workdir: str
    run_dir: str
    weights_dir: str
    """The directory of versions: ``<weights_dir>/<run id>/<version name>``."""
    address: str
    """The name or number at which the other hosts reach this host."""
    data_address: str = ""
    """The same for weights, gradients and checkpoints; empty: ``address``."""
    own_address: str = ""
    """The number of that interface; the two addresses above may be names."""
    interface: str = ""
    """The network interface that routes to the other hosts."""
    tmp_dir: str = ""
    """The directory of the run's temporary files and sockets, removed with it; empty: the host's
    own place for the former, and ``run_dir`` for the latter.
    """
    cpus: int | None = None
    """Cores the processes of libra may use together; None when nobody has looked."""
    devices: tuple[str, ...] = ()
    """What CUDA_VISIBLE_DEVICES calls the GPUs of the node, in order: by their UUIDs, since numbers
    change where a GPU is lost. Empty when nobody has looked, and they are called as in the recipe.
    """
    gpu_gib: float = 0.0
    """Memory of the smallest GPU that libra may use; 0 when nobody has looked."""
    memory_gib: float = 0.0
    """Memory of the host; 0 when nobody has looked."""

    def socket_of(self, process: str) -> str:
        """Path of the Unix socket on which a process answers the controller."""
        return f"{self.tmp_dir or self.run_dir}/sockets/{process}.sock"

    @property
    def is_guessed(self) -> bool:
        """Whether nobody has looked at the host, and commands are only shown."""
        return self.cpus is None

    @property
    def peer_address(self) -> PeerAddress:
        """The addresses at which others fetch weights, gradients and checkpoints."""
        return PeerAddress.of(self.address, self.data_address, self.own_address)


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One process, ready for the agent of its node to start."""

    node: str
    process: str
    """``server-<slot index>`` (of a joined slot ``server-0-1``), ``trainer-<machine rank>``,
    ``gradient-<slot index>``, ``model``."""
    argv: tuple[str, ...]
    env: Mapping[str, str]
    files: Mapping[str, str] = field(default_factory=dict)
    """The text of each file to write before the start, by its path below the run directory."""
    ports: Mapping[str, int] = field(default_factory=dict)
    """Port numbers, by the name of what listens there."""


def process_of(slot: SlotId) -> str:
    """The name of the server process of a slot."""
    return f"server-{slot.rpartition('/')[2].replace('+', '-')}"


def model_of(slot: SlotId) -> str:
    """The name of the process of a slot that serves a frozen model."""
    return f"model-{slot.rpartition('/')[2]}"


def trainer_of(machine: int) -> str:
    """The name of the process that launches the trainer's ranks on a machine; rank 0 is on 0."""
    return f"trainer-{machine}"


def worker_of(slot: SlotId) -> str:
    """The name of the gradient worker's process of a slot."""
    return f"gradient-{slot.rpartition('/')[2]}"


def worker_ports(slot: Slot) -> tuple[str, str]:
    """The names of a gradient worker's ports: its side channel, its rendezvous."""
    name = f"gradient-{_place(slot)}"
    return f"side-{name}", f"rendezvous-{name}"


def _place(slot: Slot) -> str:
    """Return the slot's index, of a joined slot its first part's, or
    the first GPU of one named after GPUs.
    """
    return str(slot.parts[0]) if slot.parts else f"gpu{slot.gpus[0]}"


def dtype_of(model: ModelSpec, slots: Iterable[Slot]) -> Dtype:
    """The number format on those slots: as the recipe says, else bfloat16 on GPUs."""
    if model.dtype != "auto":
        return model.dtype
    return "bfloat16" if all(slot.gpus for slot in slots) else "float32"


NUMBER_BYTES: Mapping[Dtype, int] = {"float32": 4, "bfloat16": 2}
"""Bytes of a number in each format."""


def common_env(
    node: NodeSpec, slots: Sequence[Slot], facts: HostFacts, *, processes: int = 1
) -> dict[str, str]:
    """The environment of one of ``processes`` equal processes on ``slots`` of a node.

    They see the GPUs of these slots and no other, share their cores, and never go online. What a
    killed one leaves, files of vLLM and of torch's launcher, is where the run's end removes it.
    """
    return {
        **({"TMPDIR": facts.tmp_dir} if facts.tmp_dir else {}),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        VISIBLE: ",".join(_devices(node, slots, facts)),
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        **cores_env(node, slots, facts.cpus, processes=processes),
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_OFFLINE": "1",
    }


def compiler_caches(facts: HostFacts) -> dict[str, str]:
    """Where torch keeps what it compiles: it outlives its run, so that the next start on this host
    is warm. Torch's own place would be ``TMPDIR``, which goes with the run."""
    cache = f"{facts.workdir}/cache"
    return {
        "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor",
        "TRITON_CACHE_DIR": f"{cache}/triton",
    }


def _devices(node: NodeSpec, slots: Sequence[Slot], facts: HostFacts) -> Iterator[str]:
    """Yield what CUDA calls the GPUs of these slots, which have numbers within the node.

    The doctor asks for all that a recipe wants; those that a host lacks have no name.
    """
    names = facts.devices or node.gpu_ids or tuple(map(str, range(node.gpus)))
    return (names[gpu] for slot in slots for gpu in slot.gpus if gpu < len(names))


def interface_env(interface: str) -> dict[str, str]:
    """Makes collectives use that network interface: ``lo`` inside one host."""
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}


def argv_of(flags: Flags) -> Iterator[str]:
    """The flags as words of a command line."""
    for flag, value in flags.items():
        yield flag
        if value is not None:
            yield str(value)
