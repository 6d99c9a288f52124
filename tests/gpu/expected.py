"""The checks in their order, the numbers that a right machine shows, and what to do about others.

Where the ranges come from: runs of others on these GPUs, bandwidths of their makers and what the
same code shows on CPUs. On an H200 we have made the checks of machine, kernels and trainer; on an
H100 those of machine, trainer, start, versions, decode, speed, loads and lora. Who makes the others
tells us more. After the H100 these were widened to what it showed: the seconds of a version
(2.5 before), the gaps of decode (0.003 and a ratio of 0.7), and memory under loads (50 MiB).

A number outside ``must`` fails its check. One outside ``expect`` is marked to be looked at: it may
be a slower machine, or the range may be wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

Kind: TypeAlias = Literal["H100", "A100", "L40S", "4090", "other", "cpu"]
Range: TypeAlias = tuple[float, float]
KINDS: Mapping[str, Kind] = {
    "H100": "H100",
    "H200": "H100",
    "H800": "H100",
    "A100": "A100",
    "A800": "A100",
    "L40S": "L40S",
    "4090": "4090",
}
MOST = float("inf")


class NoServer(RuntimeError):
    """A server did not start, so no check that needs one can be made."""


def kind_of(gpu: str) -> Kind:
    """The kind of GPU that expectations are known of, by what nvidia-smi calls one; no name is a
    CPU."""
    if not gpu:
        return "cpu"
    return next((kind for word, kind in KINDS.items() if word in gpu), "other")


@dataclass(frozen=True)
class Number:
    """What a number of a check must be, and is expected to be.

    ``expect`` is a range for every GPU, or one for each kind; ``on_cpu`` is that of the rehearsal.
    """

    name: str
    must: Range | None = None
    expect: Range | Mapping[Kind, Range] | None = None
    on_cpu: Range | None = None
    gpu_only: bool = False
    """Whether a CPU cannot show it."""

    def expected(self, kind: Kind) -> Range | None:
        """The range for this kind of device; None if nothing is known."""
        if kind == "cpu":
            return self.on_cpu
        if isinstance(self.expect, Mapping):
            return self.expect.get(kind)
        return self.expect


@dataclass(frozen=True)
class Check:
    """One check: where it belongs, what it shows, its numbers, and what to do about others."""

    name: str
    part: str
    """Checks of one part that follow one another share a process, and its vLLM server."""
    shows: str
    numbers: tuple[Number, ...]
    otherwise: str
    gpus: int = 1
    ends: bool = False
    """Whether nothing after it can work if it fails."""

    def problems(self, measured: Mapping[str, Any], kind: Kind) -> tuple[list[str], list[str]]:
        """The numbers that it fails by, and those to be looked at."""
        failed, odd = list[str](), list[str]()
        for number in self.numbers:
            if kind == "cpu" and number.gpu_only:
                continue
            value = measured.get(number.name)
            if value is None or (number.must is not None and not _within(value, number.must)):
                failed.append(_told(number.name, value, number.must))
            elif (usual := number.expected(kind)) is not None and not _within(value, usual):
                odd.append(_told(number.name, value, usual))
        return failed, odd

    def ranges(self, kind: Kind) -> Iterator[str]:
        """What is expected on this kind of device, in words."""
        for number in self.numbers:
            told = number.expected(kind) or number.must
            if told is not None and not (kind == "cpu" and number.gpu_only):
                yield f"{number.name} {_words(told)}"


def _within(value: float, bounds: Range) -> bool:
    return bounds[0] <= value <= bounds[1]  # so NaN is not


def _told(name: str, value: float | None, bounds: Range | None) -> str:
    found = "missing" if value is None else f"{float(value):.4g}"
    return f"{name} is {found}" + (f", not {_words(bounds)}" if bounds else "")


def _words(bounds: Range) -> str:
    low, high = bounds
    if low == high:
        return f"{low:g}"
    if high == MOST:
        return f"{low:g} or more"
    if low == -MOST:
        return f"{high:g} or less"
    return f"{low:g} to {high:g}"


YES: Range = (1, 1)


def _speeds(h100: Range, a100: Range, rest: Range) -> Mapping[Kind, Range]:
    return {"H100": h100, "A100": a100, "L40S": rest, "4090": rest}


GAP = Number("probe_gap", must=(0, 1), expect=(0.001, 0.03), on_cpu=(0, 0.02))
NO_PROOF = (
    "the server holds or computes something else than was published: `libra help gpus`, and "
    "rollout: {engine: safe} tells whether graphs or scheduling do it"
)

CHECKS = (
    Check(
        "machine",
        "machine",
        "driver, compiler, Python's headers, /dev/shm, a kernel of Triton, imports",
        (
            Number("works", must=YES),
            Number("driver", expect=(580, MOST), gpu_only=True),
            Number("triton_s", must=(0, 120), expect=(0, 10), gpu_only=True),
            Number("shm_gib", expect=(1, MOST), on_cpu=(1, MOST)),
        ),
        "libra help gpus: an old driver, a missing compiler; containers: --shm-size 8g",
        ends=True,
    ),
    Check(
        "kernels",
        "kernels",
        "output layer in blocks, packed attention, checksums, beside whole, single and the CPU's",
        (
            Number("head_error", must=(0, 1e-5), expect=(0, 5e-6), on_cpu=(0, 5e-6)),
            Number("head_memory", must=(0, 0.25), expect=(0.04, 0.12), gpu_only=True),
            Number("attention_error", must=(0, 0.02), expect=(0.002, 0.01), on_cpu=(0, 0.02)),
            Number("checksums_equal", must=YES),
            Number("checksum_gb_per_s", expect=_speeds((75, 170), (80, 105), (35, 50))),
        ),
        "tell us: torch computes something else on this GPU",
    ),
    Check(
        "trainer",
        "trainer",
        "a trainer of one rank: memory beside its law, speed, versions",
        (
            Number("peak_of_law", must=(0.85, 1.15), gpu_only=True),
            Number("peak_gib", expect=(9.5, 12.8), gpu_only=True),
            Number("tokens_per_s", expect=_speeds((15e3, 40e3), (8e3, 18e3), (6e3, 13e3))),
            Number("still_s", expect=(0.05, 0.3)),
            Number("version_s", expect=(0.3, 3.0)),
        ),
        "memory: tell us, the law is wrong; speed: nvidia-smi -q -d CLOCK,POWER while it trains",
    ),
    Check(
        "sharded",
        "sharded",
        "the same batch by one rank of FSDP2, recomputing all of a layer or a part",
        (
            Number("shards", must=YES),
            Number("gradient_gap", must=(0, 0.1), expect=(0, 0.03), on_cpu=(0, 0.05)),
            Number("speed", expect=(1.0, 1.4)),
            Number("selective_speed", expect=(1.05, 1.4)),
            Number("selective_gib", expect=(4, 10), gpu_only=True),
        ),
        "several GPUs train by this path: training.sharding: ddp is the other",
    ),
    Check(
        "compiled",
        "compiled",
        "such a rank with training.compile: gradients and seconds of a step beside plain layers",
        (
            Number("gradient_gap", must=(0, 0.1), expect=(0, 0.03), on_cpu=(0, 0.05)),
            Number("speed", expect=(1.15, 1.4)),
            Number("compile_s", must=(0, 600), expect=(0, 90), gpu_only=True),
        ),
        "training.compile: false, which is the default; tell us what it gains",
    ),
    Check(
        "start",
        "server",
        "a vLLM server of 64 seats starts: by which runner, scheduling and graphs it works",
        (
            Number("start_s", expect=(40, 120)),
            Number("kv_tokens", must=(1, MOST)),
            Number("v2", expect=YES, gpu_only=True),
            Number("asynchronous", expect=YES, gpu_only=True),
            Number("graphs", expect=YES, gpu_only=True),
        ),
        "its log is in gpu-check/work/host; rollout: {engine: safe} leaves graphs out",
    ),
    Check(
        "versions",
        "server",
        "three versions: proved, the one before refused, the probe steady",
        (
            GAP,
            Number("gap_ratio", must=(0, 5), expect=(1, 2), on_cpu=(1, 2)),
            Number("refused", must=YES),
            Number("paused_s", expect=(0.05, 0.6)),
        ),
        NO_PROOF,
    ),
    Check(
        "decode",
        "server",
        "64 turns of 64 tokens: what was said when they were sampled, beside the same as prompts, "
        "and beside the trainer",
        (
            Number("prompt_gap", must=(0, 0.2), expect=(0.001, 0.02), on_cpu=(0, 0.01)),
            Number("trainer_gap", must=(0, 0.2), expect=(0.001, 0.02), on_cpu=(0, 0.01)),
            Number("gap_ratio", expect=(0.4, 1.3)),
        ),
        NO_PROOF,
    ),
    Check(
        "speed",
        "server",
        "many turns of 64 tokens at once",
        (
            Number("whole_turns", must=YES),
            Number("tokens_per_s", expect=_speeds((8e3, 15e3), (4e3, 8e3), (4e3, 8e3))),
        ),
        "below 2,500 tokens a second no CUDA graphs are used",
    ),
    Check(
        "loads",
        "server",
        "many loads while 64 turns run and every fifth is aborted",
        (
            Number("whole_turns", must=YES),
            Number("turns_over_a_load", must=(1, MOST)),
            Number("grew_mib", must=(-MOST, 1000), expect=(-MOST, 250), on_cpu=(-MOST, 300)),
            Number("gap_ratio", must=(0, 5), expect=(0, 2), on_cpu=(0, 2)),
        ),
        "memory: tell us; turns: rollout: {engine: safe} tells whether async scheduling does it",
    ),
    Check(
        "greedy",
        "server",
        "greedy text of a server that loaded the last version, and of one started with it",
        (Number("same", must=(0.9, 1), expect=(0.99, 1), on_cpu=(0.99, 1)),),
        NO_PROOF,
    ),
    Check(
        "killed",
        "server",
        "kill -9 of the server under load: its memory comes back, and it starts again",
        (
            Number("turns_failed", must=(1, MOST)),
            Number("memory_back_s", must=(0, 60), expect=(0, 5), on_cpu=(0, 5)),
            Number("start_s", expect=(20, 60)),
        ),
        "nvidia-smi names who still holds memory; a start as slow as the first: is the cache kept?",
    ),
    Check(
        "lora",
        "server",
        "an adapter of rank 16: a step, a version, merged and proved by the server",
        (GAP, Number("adapter_mb", must=(1e-3, 1000))),
        NO_PROOF,
    ),
    Check(
        "sleep",
        "server",
        "rollout.sleep: a server gives its memory back, takes it again, loads a version and proves "
        "it",
        (
            Number("sleep_s", must=(0, 120), expect=(0.2, 5), on_cpu=(0, 10)),
            Number("back_s", must=(0, 240), expect=(0.5, 8), on_cpu=(0, 60)),
            Number("gave_back_gib", must=(0.5, MOST), on_cpu=(0.5, 2)),
            Number("kept_gib", must=(0, 6), expect=(0.5, 2.5), gpu_only=True),
            Number("whole_turns", must=YES),
            Number("gap_ratio", must=(0, 5), expect=(0.5, 2), on_cpu=(0.5, 2)),
            GAP,
        ),
        "leave rollout.sleep out, and tell us; kept: what `libra doctor` counts is 2 GiB",
    ),
    Check(
        "offload",
        "offload",
        "moments in the host's memory: a step, a checkpoint, resumed, bit by bit the same",
        (
            Number("equal", must=YES),
            Number("resume_peak_ratio", must=(0, 1.3), gpu_only=True),
        ),
        "training.optimizer: adamw",
    ),
    Check(
        "run",
        "run",
        "libra run: 10 steps of the small model, serving and training on this machine",
        (
            Number("finished", must=YES),
            Number("logprob_gap", must=(0, 0.2), expect=(0.001, 0.01), on_cpu=(0, 0.001)),
            Number("step_s", expect=(0.1, 12)),
            Number("reward", must=(0, 1), expect=(0.3, 1)),
        ),
        "libra status RUN_DIR, and the logs in gpu-check/work/runs",
    ),
    Check(
        "all_reduce",
        "all_reduce",
        "NCCL's all-reduce over every GPU",
        (Number("gb_per_s", must=(0, MOST), expect=(8, 900)),),
        "NVLink 200 and more, PCIe 8 to 20; below: NCCL_DEBUG=INFO names the transport",
        gpus=2,
    ),
    Check(
        "two_ranks",
        "two_ranks",
        "FSDP2 of two ranks beside the trainer of one, and its checkpoint resumed by one",
        (
            Number("shards", must=(2, 2)),
            Number("gradient_gap", must=(0, 0.1), expect=(0, 0.03), on_cpu=(0, 0.05)),
            Number("resumed_gap", must=(0, 0.3), expect=(0, 0.1), on_cpu=(0, 0.1)),
        ),
        "training.sharding: ddp; tell us",
        gpus=2,
    ),
    Check(
        "two_gpus",
        "two_gpus",
        "a server of two tensor-parallel ranks: three versions, decode beside prefill",
        (
            GAP,
            Number("refused", must=YES),
            Number("prompt_gap", must=(0, 0.2), expect=(0.001, 0.02), on_cpu=(0, 0.01)),
        ),
        NO_PROOF,
        gpus=2,
    ),
    Check(
        "moves",
        "moves",
        "a hybrid slot computes gradients and serves again: seconds without work of both moves",
        (
            Number("finished", must=YES),
            Number("to_training_s", expect=(20, 70)),
            Number("to_rollout_s", expect=(40, 120)),
        ),
        "the moves' entries in libra status RUN_DIR",
        gpus=3,
    ),
)
BY_NAME = {check.name: check for check in CHECKS}
