"""Reads the GPUs of a host from nvidia-smi, once, and chooses those that a run may use.

Without the persistence daemon the driver is loaded anew for every call, which takes 10 to 30 s with
eight GPUs; so one call answers all questions. A GPU in MIG mode counts as its instances. Standard
library only.
"""

from __future__ import annotations

import os
import pwd
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from xml.etree import ElementTree as Xml

from libra_cli.node.processes import proc

NVIDIA_SMI_S = 60.0
"""Seconds that nvidia-smi may take."""
MIB = 1024**2
VISIBLE = "CUDA_VISIBLE_DEVICES"
_LOST = ("GPU is lost", "GPU requires reset")
"""What nvidia-smi prints in the place of every value of a GPU that nobody can use any more."""
_MIG_LINE = re.compile(r"\s+MIG .*Device\s+\d+: \(UUID: (MIG-[^)\s]+)\)")


@dataclass(frozen=True, slots=True)
class ListedGpu:
    """A GPU, or an instance of one; memory in bytes, 0 where it is not told."""

    names: tuple[str, ...]
    """What may stand for it in CUDA_VISIBLE_DEVICES: nvidia-smi's index, which changes where a GPU
    before it is lost, and its UUID; of an instance its UUID."""
    name: str
    mem_total: int
    mem_free: int
    holders: tuple[Mapping[str, object], ...] = ()
    is_split: bool = False
    """Whether it is in MIG mode, and only its instances can be used."""
    is_lost: bool = False
    bus: str = ""
    """Where it, or what it is a part of, is on the PCI bus, such as ``00000000:3B:00.0``."""

    @property
    def uuid(self) -> str:
        """The name that it keeps while others come and go; empty where none is told."""
        return next((name for name in self.names if name.startswith(("GPU-", "MIG-"))), "")

    @property
    def is_usable(self) -> bool:
        """Whether a process may compute on it."""
        return not (self.is_split or self.is_lost)


@dataclass(frozen=True, slots=True)
class GpuListing:
    """The GPUs of a host in nvidia-smi's order, instances behind the GPU that they are parts of."""

    gpus: tuple[ListedGpu, ...] = ()
    driver: str = ""
    """The driver's version, such as ``580.65.06``; empty where there is none."""
    error: str = ""
    """Why nvidia-smi gave no listing, or not of all; empty where there is no nvidia-smi."""


@dataclass(frozen=True, slots=True)
class ChosenGpus:
    """The GPUs that a run may use, in the order in which its slots take them."""

    gpus: tuple[ListedGpu, ...]
    missing: tuple[str, ...] = ()
    """What was asked for and is not there, or not allowed."""
    visible: str | None = None
    """``CUDA_VISIBLE_DEVICES`` of the environment that processes start in; None if it is unset."""


def describe(wanted: Sequence[str]) -> dict[str, object]:
    """Describe the GPUs of this host that a run may use: all visible ones, or those ``wanted``.

    ``index`` counts the GPUs of the answer; ``device`` is the first of a GPU's names. The UUIDs in
    ``gpus_present`` are of all that can be used here, by whomever.
    """
    listing = look()
    chosen = choose(listing.gpus, wanted, os.environ.get(VISIBLE))
    return {
        "gpus": [
            {
                "index": index,
                "device": gpu.names[0],
                "uuid": gpu.uuid,
                "bus": gpu.bus,
                "name": gpu.name,
                "mem_total": gpu.mem_total,
                "mem_free": gpu.mem_free,
                "holders": [*gpu.holders],
            }
            for index, gpu in enumerate(chosen.gpus)
        ],
        "gpus_missing": list(chosen.missing),
        "gpus_present": [gpu.uuid for gpu in listing.gpus if gpu.is_usable and gpu.uuid],
        "gpus_visible": chosen.visible,
        "gpus_error": listing.error,
        "driver": listing.driver,
    }


def look() -> GpuListing:
    """Ask nvidia-smi, and a second time for the UUIDs of instances where a GPU has some."""
    if shutil.which("nvidia-smi") is None:
        return GpuListing()
    try:
        listing = read(_nvidia_smi("-q", "-x"))
        if any(gpu.is_split for gpu in listing.gpus):
            listing = with_instance_ids(listing, _nvidia_smi("-L"))
    except subprocess.TimeoutExpired:
        return GpuListing(error=f"nvidia-smi did not answer within {NVIDIA_SMI_S:.0f} s")
    except subprocess.CalledProcessError as error:
        return GpuListing(error=f"nvidia-smi fails: {_sentence(error)}")
    except Xml.ParseError as error:
        return GpuListing(error=f"what nvidia-smi prints cannot be read: {error}")
    return listing


def _nvidia_smi(*arguments: str) -> str:
    argv = ["nvidia-smi", *arguments]
    done = subprocess.run(
        argv, capture_output=True, text=True, errors="replace", timeout=NVIDIA_SMI_S, check=False
    )
    if "<?xml" not in done.stdout:  # one that also warns, or misses a GPU, has listed the others
        done.check_returncode()
    return done.stdout


def _sentence(failed: subprocess.CalledProcessError) -> str:
    """Return what it printed instead: that there is no driver, or which GPU is lost (its status 15,
    of a GPU that has fallen off the bus)."""
    lines = f"{failed.stdout}\n{failed.stderr}".split("\n")
    told = next(filter(None, map(str.strip, lines)), "there is no driver, or it does not answer")
    return f"{told[:200]} (exit status {failed.returncode})"


def read(text: str) -> GpuListing:
    """Read what ``nvidia-smi -q -x`` prints; nothing is listed of an empty text.

    Raises:
        xml.etree.ElementTree.ParseError: it is no XML.
    """
    if not text.strip():
        return GpuListing(error="nvidia-smi fails: there is no driver, or it does not answer")
    root = Xml.fromstring(text)
    gpus = [one for index, gpu in enumerate(root.iter("gpu")) for one in _listed(index, gpu)]
    lost = ", ".join(dict.fromkeys(gpu.bus for gpu in gpus if gpu.is_lost))
    error = f"nvidia-smi says that the GPU at {lost} is lost" if lost else ""
    return GpuListing(tuple(gpus), root.findtext("driver_version", "").strip(), error)


def _listed(index: int, gpu: Xml.Element) -> Iterable[ListedGpu]:
    """Return a GPU and its instances, whose UUIDs this listing does not tell."""
    name, uuid = gpu.findtext("product_name", ""), gpu.findtext("uuid", "")
    processes = [*gpu.iter("process_info")]
    is_split = gpu.findtext("mig_mode/current_mig") == "Enabled"
    is_lost = any(lost in (one.text or "") for one in gpu.iter() for lost in _LOST)
    bus, held = gpu.get("id", ""), () if is_split else _holders(processes)
    whole = ListedGpu((str(index), uuid), name, *_memory(gpu), held, is_split, is_lost, bus)
    yield whole
    for instance in gpu.iter("mig_device") if is_split else ():
        number = instance.findtext("gpu_instance_id")
        inside = [one for one in processes if one.findtext("gpu_instance_id") == number]
        held = _holders(inside)
        yield ListedGpu((), f"{name} MIG", *_memory(instance), held, False, is_lost, bus)


def _memory(element: Xml.Element) -> tuple[int, int]:
    """Return the total and the free memory in bytes."""
    total, free = (element.findtext(f"fb_memory_usage/{one}", "") for one in ("total", "free"))
    return _bytes(total), _bytes(free)


def _bytes(cell: str) -> int:
    number = cell.removesuffix("MiB").strip()  # or N/A
    return int(number) * MIB if number.isdigit() else 0


def _holders(processes: Iterable[Xml.Element]) -> tuple[Mapping[str, object], ...]:
    """Describe the processes that compute; those that only draw are no hindrance."""
    computing = [one for one in processes if "C" in one.findtext("type", "C")]
    return tuple(holder(one.findtext("pid", "").strip()) for one in computing)


def holder(pid: str) -> dict[str, object]:
    """Describe who a process belongs to. A pid from outside a container cannot be looked up, and
    some drivers do not tell it."""
    if not pid.isdigit():
        return {"pid": 0, "user": "", "command": "", "run": ""}
    number, user = int(pid), ""
    with suppress(OSError, KeyError):
        user = pwd.getpwuid((proc.PROC / pid).stat().st_uid).pw_name
    return {
        "pid": number,
        "user": user,
        "command": proc.command(number),
        "run": proc.run_of(number),
    }


def with_instance_ids(listing: GpuListing, text: str) -> GpuListing:
    """Give instances the UUIDs that ``nvidia-smi -L`` prints, in the same order."""
    ids = iter([match[1] for line in text.splitlines() if (match := _MIG_LINE.match(line))])
    named = (
        gpu if gpu.names else replace(gpu, names=tuple(filter(None, [next(ids, "")])))
        for gpu in listing.gpus
    )
    return replace(listing, gpus=tuple(gpu for gpu in named if gpu.names))


def choose(gpus: Sequence[ListedGpu], wanted: Sequence[str], visible: str | None) -> ChosenGpus:
    """Return the GPUs with the names in ``wanted``, or all that can be used, of those that
    CUDA_VISIBLE_DEVICES allows, in its order."""
    usable = [gpu for gpu in gpus if gpu.is_usable]
    if visible is not None:
        usable = _named(usable, _names_in(visible))
    if not wanted:
        return ChosenGpus(tuple(usable), (), visible)
    found = {name: _named(usable, [name]) for name in wanted}
    missing = tuple(name for name, gpus in found.items() if not gpus)
    return ChosenGpus(tuple(gpu for one in found.values() for gpu in one), missing, visible)


def _names_in(visible: str) -> list[str]:
    """Return the names before the first one that CUDA takes for none."""
    names = [name.strip() for name in visible.split(",")]
    nothing = next((i for i, one in enumerate(names) if one in ("", "-1", "NoDevFiles")), None)
    return names[:nothing]


def _named(gpus: Sequence[ListedGpu], names: Sequence[str]) -> list[ListedGpu]:
    """Return the GPUs of these names in order; a UUID may be cut short, as CUDA allows."""
    return [gpu for name in names for gpu in gpus if any(_means(name, one) for one in gpu.names)]


def _means(name: str, whole: str) -> bool:
    return name == whole or (not name.isdigit() and whole.startswith(name))
