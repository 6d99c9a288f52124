"""Rules for a host: GPUs, memory, disk, limits, clock, and what dead runs have left."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from libra_cli.config.recipe import NodeSpec
from libra_cli.core.preflight.case import PreflightCase
from libra_cli.core.preflight.findings import ALL, CONTROLLER, Finding, Remedy
from libra_cli.core.preflight.gpu_memory import locked_bytes
from libra_cli.core.preflight.host_report import Gpu, NodeFacts
from libra_cli.core.preflight.needs import GIB, MIB
from libra_cli.core.types import node_of

MAX_CLOCK_SKEW_S = 5.0
BUSY_BYTES = GIB
"""Bytes in use on a GPU from which on it counts as busy: twice what
a driver takes for itself on a GB200.
"""
SHM_FLOOR = GIB
"""Bytes of ``/dev/shm`` for processes that share memory: vLLM 0.32's queue of a server with several
ranks has ten chunks of 16 MiB, and containers have 64 MiB unless they are given more."""
FILES_A_REQUEST = 4
"""Descriptors of a request over SSH: two ends of a socket here, and two of a channel."""
FILES_OF_A_PROCESS = 256
BUBBLEWRAP = "apt-get install bubblewrap"
LIMITS = "/etc/security/limits.d/libra.conf"


def gpus(case: PreflightCase) -> Iterator[Finding]:
    """Check that the GPUs of the recipe are there, and that no other process uses them."""
    used: list[Gpu] = []
    for node, facts in case.looked():
        if len(facts.gpus) < node.gpus:
            yield _too_few(node, facts)
        here = facts.gpus[: node.gpus]
        for gpu in here:
            yield from _held(case, node, gpu)
        if any(gpu.is_instance for gpu in here):
            yield from _instances(node)
        used += here
    names = sorted({gpu.name for gpu in used})
    yield Finding(
        "gpus", ALL, "fine", f"{len(used)} x {', '.join(names)}, free" if names else "none are used"
    )


def _too_few(node: NodeSpec, facts: NodeFacts) -> Finding:
    """The finding that some GPUs of the recipe cannot be used, and why."""
    told = f"the recipe wants {node.gpus} GPUs, nvidia-smi shows {len(facts.gpus)}"
    remedy = Remedy("recipe", f"nodes: {{host: {node.host}, gpus: {len(facts.gpus)}}}")
    if facts.gpus_error:
        told, remedy = facts.gpus_error, Remedy("host", "nvidia-smi")
    elif facts.gpus_missing:
        told = f"it has no GPU {', '.join(facts.gpus_missing)}"
        remedy = Remedy("host", "nvidia-smi -L")
    if facts.gpus_visible is not None:
        told += f" (CUDA_VISIBLE_DEVICES there is {facts.gpus_visible!r})"
    return Finding("gpus", node.name, "stops", told, "slots on the others cannot start", remedy)


def _instances(node: NodeSpec) -> Iterator[Finding]:
    """Stop a process that would need two instances of a GPU: CUDA shows it one (MIG user guide)."""
    training = sum(pool not in ("rollout", "models") for pool in node.slot_pools)
    if node.gpus_per_slot > 1 or training > 1:
        yield Finding(
            "gpus",
            node.name,
            "stops",
            "its GPUs are instances (MIG), and a process can use one instance only",
            "servers with more than one, and a trainer on several, cannot start",
            Remedy(
                "recipe",
                f"nodes: {{host: {node.host}, slots: {node.gpus}, pool: "
                f"[{', '.join(['train', *['rollout'] * (node.gpus - 1)])}]}}",
            ),
        )


def _held(case: PreflightCase, node: NodeSpec, gpu: Gpu) -> Iterator[Finding]:
    used = gpu.mem_total - gpu.mem_free
    if gpu.holders:
        told = ", ".join(f"{one.command} (pid {one.pid}, {one.user})" for one in gpu.holders)
        runs = [one.run for one in gpu.holders if one.run]
        remedy = Remedy("person", "wait, ask its owner, or leave that GPU out of the recipe")
        if runs:
            remedy = Remedy("here", f"libra stop {case.recipe.run.directory}/{runs[0]}")
        yield Finding(
            "gpus",
            node.name,
            "stops",
            f"GPU {gpu.device} is in use by {told}",
            "both would run out of memory; libra never stops what is not its own",
            remedy,
        )
    elif gpu.mem_free and used > BUSY_BYTES:
        yield Finding(
            "gpus",
            node.name,
            "warns",
            f"GPU {gpu.device} has {_gib(used)} in use by nobody who can be seen",
            "a process in another container, or one that is just ending",
            Remedy("person", "on the machine itself, as root: nvidia-smi"),
        )


def memory(case: PreflightCase) -> Iterator[Finding]:
    """Check that hosts have enough main memory, as far as needs can be computed."""
    for node, facts in case.looked():
        need, locked = case.needs(node).memory, int(locked_bytes(case, node.name))
        if locked and facts.mem_free < need + locked:
            yield Finding(
                "memory",
                node.name,
                "stops",
                f"{_gib(facts.mem_free)} of memory are free, its ranks would lock {_gib(locked)} "
                f"for activations (training.activation_offload), beside about {_gib(need)}",
                "locked memory cannot be swapped: processes would be killed in the first long step",
                Remedy(
                    "recipe",
                    "training: {activation_offload: false}, or a smaller micro_batch_tokens, or a "
                    "larger cp_size",
                ),
            )
        elif facts.mem_free < need:
            yield Finding(
                "memory",
                node.name,
                "warns",
                f"{_gib(facts.mem_free)} of memory are free, about {_gib(need)} are needed",
                "processes would be killed, or the host would swap",
                Remedy("person", "free memory there, or give it fewer slots in the recipe"),
            )
    yield _least(case, "memory", "free", lambda facts: facts.mem_free)


def versions_room(case: PreflightCase) -> Iterator[Finding]:
    """Check that there is room for weight versions, which are memory in /dev/shm."""
    where = case.recipe.weight_sync.directory or "/dev/shm"
    for node, facts in case.looked():
        need = case.needs(node).versions
        if facts.shm_free < need:
            fix = "mount -o remount,size="
            yield Finding(
                "shm",
                node.name,
                "stops",
                f"{where} has {_size(facts.shm_free)} free, weight versions need {_size(need)}",
                f"{case.recipe.weight_sync.keep_versions} versions and one that arrives must fit",
                Remedy("person", f"as root: {fix}{_size(need, '')} /dev/shm")
                if facts.shm_total < need
                else Remedy("recipe", "weight_sync: {directory: /a/place/on/disk}"),
            )
        yield from _too_small_shm(case, node, facts)
    yield _least(case, "shm", "free for versions", lambda facts: facts.shm_free)


def _too_small_shm(case: PreflightCase, node: NodeSpec, facts: NodeFacts) -> Iterator[Finding]:
    """Check the floor of ``/dev/shm`` where processes of one server, or ranks, share memory."""
    degrees = [
        bucket.tensor_parallel for slot, bucket in case.plan.servers if node_of(slot) == node.name
    ]
    ranks = sum(node_of(slot) == node.name for slot in case.plan.train)
    together = max(degrees, default=1) > 1 or (node.gpus > 0 and ranks > 1)
    if together and facts.dev_shm_free < SHM_FLOOR:
        yield Finding(
            "shm",
            node.name,
            "stops",
            f"/dev/shm has {_size(facts.dev_shm_free)} free, {_size(SHM_FLOOR)} are needed",
            "vLLM's ranks and NCCL exchange data there, and die of a bus error where it is full",
            Remedy("person", "start the container with --ipc=host, or with --shm-size=8g"),
        )


def disk(case: PreflightCase) -> Iterator[Finding]:
    """Check that hosts that train have the disk for checkpoints."""
    for node, facts in case.looked():
        needs = case.needs(node)
        if facts.disk_free < needs.checkpoints:
            one = facts.disk_free < needs.checkpoint
            yield Finding(
                "disk",
                node.name,
                "stops" if one else "warns",
                f"{node.workdir} has {_gib(facts.disk_free)} free, "
                + (f"a checkpoint needs {_gib(needs.checkpoint)}" if one else "")
                + ("" if one else f"checkpoints need {_gib(needs.checkpoints)}"),
                f"{case.recipe.training.checkpoints_kept} stay (training.keep_checkpoints); the "
                "best one, one that is being written and the exported model come on top",
                Remedy("recipe", f"nodes: {{host: {node.host}, workdir: /a/larger/disk}}"),
            )
    yield _least(case, "disk", "free", lambda facts: facts.disk_free)


def limits(case: PreflightCase) -> Iterator[Finding]:
    """Check how much memory may be locked, and how many files may be open."""
    for node, facts in case.looked():
        if facts.rdma and facts.memlock is not None:
            yield Finding(
                "limits",
                node.name,
                "warns",
                f"processes may lock {_size(facts.memlock)} of memory",
                "NCCL over InfiniBand registers its buffers as locked memory",
                Remedy("person", f"as root: echo '* - memlock unlimited' > {LIMITS}; log in again"),
            )
        yield from _files(case, node.name, facts.open_files, case.seats([node.name]))
    everywhere = case.seats(node.name for node in case.recipe.nodes)
    yield from _files(case, CONTROLLER, case.open_files, everywhere)
    yield Finding("limits", ALL, "fine", "open files and locked memory suffice")


def _files(case: PreflightCase, host: str, most: int | None, seats: int) -> Iterator[Finding]:
    need = FILES_OF_A_PROCESS + FILES_A_REQUEST * seats
    if most is not None and most < need:
        yield Finding(
            "limits",
            host,
            "warns",
            f"a process may have {most} files open, {seats} requests at a time need {need}",
            "connections fail then, and servers are taken for dead",
            Remedy("here", f"ulimit -n {need}")
            if host == CONTROLLER
            else Remedy("person", f"as root: echo '* - nofile 65536' > {LIMITS}; log in again"),
        )


def sandboxes(case: PreflightCase) -> Iterator[Finding]:
    """Check that hosts whose workers have sandboxes can make one.

    Of those that the controller makes it has tried one before it asks any host.
    """
    playing = case.recipe.sandbox_nodes
    for node, facts in case.everyone():
        if node.name in playing and facts.sandbox_missing:
            missing = facts.sandbox_missing == "there is no bwrap"
            yield Finding(
                "sandboxes",
                node.name,
                "stops",
                f"it can make no sandbox: {facts.sandbox_missing}",
                "environment.sandbox asks for them, and workers play there",
                Remedy("person", f"as root: {BUBBLEWRAP}")
                if missing
                else Remedy("person", "libra help sandboxes says what the kernel must allow"),
            )
    told = f"{', '.join(sorted(playing))} can make them" if playing else "no other host needs one"
    yield Finding("sandboxes", ALL, "fine", told)


def clock(case: PreflightCase) -> Iterator[Finding]:
    """Check that the clock of each host is the controller's, within ``MAX_CLOCK_SKEW_S``."""
    most = 0.0
    for node, facts in case.everyone():
        report = case.hosts[node.name]
        skew = clock_skew(facts.clock, report.asked_at, report.answered_at)
        most = max(most, skew)
        if skew > MAX_CLOCK_SKEW_S:
            yield Finding(
                "clock",
                node.name,
                "stops",
                f"its clock is {skew:.0f} s off the controller's",
                "ages of versions, times in logs and certificates would be wrong",
                Remedy("person", "as root: timedatectl set-ntp true (or chronyc makestep)"),
            )
    yield Finding("clock", ALL, "fine", f"within {most:.1f} s of the controller's")


def clock_skew(clock: float, asked_at: float, answered_at: float) -> float:
    """The least seconds that a clock, read between two times here, is off."""
    return max(0.0, asked_at - clock, clock - answered_at)


def remains(case: PreflightCase) -> Iterator[Finding]:
    """Check for weight versions that dead runs have left, which are memory."""
    for node, facts in case.everyone():
        if facts.remains:
            size = sum(one.bytes for one in facts.remains)
            names = ", ".join(one.name for one in facts.remains[:2])
            more = f" and {len(facts.remains) - 2} more" if len(facts.remains) > 2 else ""
            yield Finding(
                "remains",
                node.name,
                "warns",
                f"{_size(size)} are left of dead runs: {names}{more}",
                "it is memory that this run could use",
                Remedy("here", f"libra doctor {case.recipe_path} --fix", fix="remains"),
            )
    yield Finding("remains", ALL, "fine", "nothing is left of dead runs")


def _least(case: PreflightCase, check: str, what: str, of: Callable[[NodeFacts], int]) -> Finding:
    rows = [(of(facts), node.name) for node, facts in case.looked()]
    if not rows:
        return Finding(check, ALL, "fine", "nobody was asked")
    size, name = min(rows)
    told = f"{_size(size)} {what}"
    return Finding(check, ALL, "fine", told if len(rows) == 1 else f"{told} at least ({name})")


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"


def _size(size: float, gap: str = " ") -> str:
    """A size in GiB, or in MiB where it is under 1 GiB."""
    if size < GIB:
        return f"{size / MIB:.0f}{gap}{'MiB' if gap else 'M'}"
    return f"{size / GIB:.1f}{gap}{'GiB' if gap else 'G'}" if gap else f"{-(-size // GIB):.0f}G"
