"""What hosts tell of themselves, and what was measured on and between them. Sizes in bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from libra_cli.core.types import Seconds


@dataclass(frozen=True, slots=True)
class GpuHolder:
    """A process with memory on a GPU. ``user`` is empty if it cannot be looked up."""

    pid: int
    user: str
    command: str
    run: str = ""
    """The run of libra that it belongs to; empty if it is of none."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU that a run may use, or an instance of one; memory in bytes."""

    index: int
    """The number that slots know it by: its place among the GPUs that the run may use."""
    device: str
    """What people call it: nvidia-smi's index, or the UUID of an instance."""
    name: str
    mem_total: int
    mem_free: int
    holders: tuple[GpuHolder, ...]
    uuid: str = ""
    """What it is called whatever becomes of others; empty where nvidia-smi does not tell."""
    bus: str = ""
    """The place on the PCI bus, such as ``00000000:3B:00.0``."""

    @property
    def is_instance(self) -> bool:
        """Whether it is an instance of a GPU in MIG mode."""
        return self.device.startswith("MIG-")


@dataclass(frozen=True, slots=True)
class NetworkRoute:
    """The network route from a host to a peer."""

    peer: str
    """The peer's name in the recipe."""
    interface: str
    address: str
    """The host's own address on that interface."""
    target: str
    """The peer's address, as this host resolves its name."""
    error: str
    """Why the peer cannot be reached; empty if it can."""


@dataclass(frozen=True, slots=True)
class NetworkInterface:
    name: str
    up: bool
    addresses: tuple[str, ...]
    speed_mbit: int
    """Speed by the interface's driver, in Mb/s; 0 where the driver does not say."""


@dataclass(frozen=True, slots=True)
class Remains:
    """A directory of weight versions that a dead run has left."""

    name: str
    bytes: int


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """A description of a host; sizes in bytes, ``clock`` in seconds since the epoch."""

    python: str
    hostname: str
    user: str
    cpus: int
    mem_total: int
    mem_free: int
    disk_free: int
    shm_free: int
    """Bytes free in the directory of weight versions, which is
    memory unless the recipe says otherwise.
    """
    shm_total: int
    dev_shm_free: int
    """Bytes free in ``/dev/shm``, whatever directory the versions have."""
    gpus: tuple[Gpu, ...]
    interface: str
    """The network interface that leads to the first peer."""
    address: str
    """The host's own address on that interface."""
    clock: float
    packages: Mapping[str, str]
    """The requested packages that can be imported there, with their versions."""
    paths: tuple[str, ...]
    """The requested paths that exist on the host."""
    markers: Mapping[str, str] = field(default_factory=dict)
    """Values of the environment markers of requirements (PEP 508), by name."""
    requires: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Requirements of each package on the other packages, by the package's name."""
    driver: str = ""
    """Version of NVIDIA's driver; empty where there is none."""
    gpus_missing: tuple[str, ...] = ()
    """GPUs that the recipe names and that are not there, or not visible."""
    gpus_present: tuple[str, ...] = ()
    """UUIDs of all GPUs that can be used there, by whomever."""
    gpus_visible: str | None = None
    """CUDA_VISIBLE_DEVICES of the login there; None where it is unset."""
    gpus_error: str = ""
    """Why nvidia-smi lists no GPUs, or not all; empty if it does, or is not there."""
    torch_cuda: str = ""
    """The CUDA that torch is built for; empty for a build without."""
    routes: tuple[NetworkRoute, ...] = ()
    interfaces: tuple[NetworkInterface, ...] = ()
    memlock: int | None = None
    """Bytes of memory that a process may lock; None without a limit."""
    open_files: int | None = None
    """Files that a process may have open; None without a limit."""
    cpp_missing: str = ""
    """What there is not of a C++ compiler and Python's headers; empty if both are there."""
    sandbox_missing: str = ""
    """Why bubblewrap makes no sandbox there; empty if it does, or was not asked for one."""
    rdma: bool = False
    """Whether there is an InfiniBand or RoCE device."""
    remains: tuple[Remains, ...] = ()

    @classmethod
    def read(cls, answer: Mapping[str, Any]) -> NodeFacts:
        """Return the facts of an agent's answer, parsed from JSON."""
        gpus = (
            Gpu(**{**gpu, "holders": tuple(GpuHolder(**one) for one in gpu["holders"])})
            for gpu in answer["gpus"]
        )
        interfaces = (
            NetworkInterface(**{**one, "addresses": tuple(one["addresses"])})
            for one in answer["interfaces"]
        )
        parsed = {
            "gpus": tuple(gpus),
            "gpus_missing": tuple(answer["gpus_missing"]),
            "gpus_present": tuple(answer["gpus_present"]),
            "interfaces": tuple(interfaces),
            "routes": tuple(NetworkRoute(**one) for one in answer["routes"]),
            "remains": tuple(Remains(**one) for one in answer["remains"]),
            "paths": tuple(answer["paths"]),
            "requires": {name: tuple(stated) for name, stated in answer["requires"].items()},
        }
        return cls(**{**answer, **parsed})


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model directory: the size and the fingerprint of each file, and its ``config.json``."""

    files: Mapping[str, tuple[int, str]]
    config: Mapping[str, Any]

    @property
    def weight_bytes(self) -> int:
        """Bytes of all files with tensors."""
        tensors = (".safetensors", ".bin", ".pt")
        return sum(size for name, (size, _) in self.files.items() if name.endswith(tensors))


@dataclass(frozen=True, slots=True)
class TorchReport:
    """What importing torch in the Python of a run has shown."""

    version: str
    cuda: str
    available: bool
    devices: tuple[str, ...]
    error: str
    """Why torch cannot be imported, or used on a GPU; empty if it can."""
    nccl: str
    errors: Mapping[str, str]
    """Why a package cannot be imported, by its name; only those that cannot."""
    triton: str = ""
    """Why a kernel of Triton cannot be compiled and launched on a GPU; empty if it can."""


@dataclass(frozen=True, slots=True)
class NamesReport:
    """What mapping the names of a model's files to its tensors, and back, has shown."""

    error: str = ""
    """What cannot be mapped, or built at all; empty if all can."""
    hint: str = ""
    model: str = ""
    """The class that transformers makes of the directory."""
    tensors: int = 0
    """Tensors of the files that it is made of."""
    unused: int = 0
    """Tensors of the files that are other parts': towers that see, heads that draft."""
    untried: str = ""
    """Why there was no answer; then there is nothing else."""


@dataclass(frozen=True, slots=True)
class HostReport:
    """What a host has reported; what was not asked, or could not be answered, is None."""

    error: str = ""
    """Why the host cannot be reached or used at all; then the rest is empty."""
    hint: str = ""
    facts: NodeFacts | None = None
    asked_at: float = 0.0
    """The controller's clock before it asked for the facts, in seconds since the epoch."""
    answered_at: float = 0.0
    """The controller's clock when it had the facts, in seconds since the epoch."""
    model: ModelFiles | None = None
    head: ModelFiles | None = None
    """The directory of the head that drafts, of a recipe that names one."""
    torch: TorchReport | None = None
    names: NamesReport | None = None
    """What trying the model's names has shown; only the host that publishes versions is asked."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """Data sent from one host to another for a moment."""

    source: str
    target: str
    bytes: int = 0
    seconds: Seconds = 0.0
    error: str = ""

    @property
    def gbit_s(self) -> float:
        """The rate in Gb/s (1e9 bits a second); 0 where no time was measured."""
        return 8 * self.bytes / self.seconds / 1e9 if self.seconds else 0.0


@dataclass(frozen=True, slots=True)
class FabricReport:
    """What came of a process group of all hosts on the interface that the recipe trusts."""

    errors: Mapping[str, str]
    """Why a host did not join, or could not reach the others, by its name."""
    seconds: Seconds = 0.0
    """From the addresses until all had reached one another."""


@dataclass(frozen=True, slots=True)
class TemplateReport:
    """What trying a model's chat template has shown."""

    error: str = ""
    """Why turns cannot be appended to the template exactly; empty if they can."""
    hint: str = ""
    tool_format: str = ""
    """The name of the format in which tool calls are read."""
    misfits: tuple[str, ...] = ()
    """Phrases after "the chat template", on why the model probably cannot use tools."""
    notes: tuple[str, ...] = ()
    """Phrases after "it", on what else the template cannot do."""


@dataclass(frozen=True, slots=True)
class TeacherReport:
    """What asking the recipe's teacher, from the controller, has shown."""

    error: str = ""
    """Why the teacher cannot teach this policy; empty if it can."""
    hint: str = ""
    model: str = ""
    """The teacher's name at its server."""
    compared: bool = False
    """Whether its vocabulary was compared with the policy's."""


@dataclass(frozen=True, slots=True)
class AllReduce:
    """An all-reduce of two ranks, one on each host."""

    hosts: tuple[str, str]
    backend: str
    interface: str
    bytes: int
    seconds: Seconds = 0.0
    error: str = ""
