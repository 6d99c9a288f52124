"""How long a trainer stands still for a version of Qwen3-1.7B: its shapes, random, in bfloat16.

    python -m tests.research.weight_publication 28 /dev/shm/measured

publishes so many layers in that directory, and prints the seconds until a trainer may go on: when
it casts, writes, hashes and compares by itself (as before), and when it copies and leaves the rest
to a thread.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from libra_cli.node.weights.publisher import Publisher
from libra_cli.node.weights.tensor_rows import whole
from libra_cli.node.weights.versions import ProbeResult, publish

HIDDEN, INNER, HEADS, KV_HEADS, HEAD, VOCABULARY = 2048, 6144, 16, 8, 128, 151_936
PROBE = ProbeResult([1, 2], [-1.0])


def shapes(layers: int) -> dict[str, tuple[int, ...]]:
    """Those of the tensors of so many of its 28 layers, and of its embedding."""
    matrices = {
        "self_attn.q_proj": (HEADS * HEAD, HIDDEN),
        "self_attn.k_proj": (KV_HEADS * HEAD, HIDDEN),
        "self_attn.v_proj": (KV_HEADS * HEAD, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HEADS * HEAD),
        "mlp.gate_proj": (INNER, HIDDEN),
        "mlp.up_proj": (INNER, HIDDEN),
        "mlp.down_proj": (HIDDEN, INNER),
    }
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for layer in range(layers):
        for name, shape in matrices.items():
            found[f"model.layers.{layer}.{name}.weight"] = shape
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"model.layers.{layer}.{name}.weight"] = (HIDDEN,)
    found["model.norm.weight"] = (HIDDEN,)
    return found


def weights(layers: int) -> dict[str, Tensor]:
    """Its tensors as masters in float32."""
    made = {name: torch.empty(shape) for name, shape in shapes(layers).items()}
    return {name: one.uniform_(-0.1, 0.1) for name, one in made.items()}


def before(masters: dict[str, Tensor], root: Path, version: int) -> tuple[float, float]:
    """Seconds, and those of a core, of a publication that the trainer does by itself."""
    began, used = time.monotonic(), time.process_time()
    cast = ((name, one.to("cpu", torch.bfloat16).contiguous()) for name, one in masters.items())
    known = dict.fromkeys(((name, 0) for name in masters), 0)  # there were no checksums
    publish(
        whole(cast), root, version=version, trainer_incarnation=0, probe=PROBE, keep=2, sums=known
    )
    return time.monotonic() - began, time.process_time() - used


def behind(publisher: Publisher, masters: dict[str, Tensor], version: int) -> tuple[float, float]:
    """Seconds, and those of a core, until the trainer goes on; returns when all is written."""
    began, used = time.monotonic(), time.process_time()
    publisher.stage(whole(masters.items()), version=version, probe=PROBE)
    still = time.monotonic() - began, time.process_time() - used
    publisher.wait()
    return still


def measure(layers: int, root: Path, times: int = 5) -> dict[str, object]:
    """Both, in turn, so that whatever else the machine does meets both."""
    masters = weights(layers)
    publisher = Publisher(
        root / "behind",
        trainer_incarnation=0,
        dtype=torch.bfloat16,
        keep=2,
        published=lambda _: None,
        failed=lambda _: None,
    )
    behind(publisher, masters, 0)  # makes its buffers
    alone, staged = list[tuple[float, float]](), list[tuple[float, float]]()
    before(masters, root / "before", 0)
    for version in range(1, times + 1):
        for one in masters.values():
            one.mul_(1 + 3e-5)  # of the numbers in bfloat16, about one in a hundred changes
        alone.append(before(masters, root / "before", version))
        staged.append(behind(publisher, masters, version))
    publisher.close()
    shutil.rmtree(root, ignore_errors=True)
    told: dict[str, object] = {"parameters": sum(one.numel() for one in masters.values())}
    for index, unit in enumerate(("seconds", "core_seconds")):
        first, second = (sorted(pair[index] for pair in pairs) for pairs in (alone, staged))
        told[unit] = {
            "before": [round(one, 2) for one in first],
            "still": [round(one, 2) for one in second],
            "ratio_of_medians": round(second[times // 2] / first[times // 2], 3),
        }
    return told


def _lines() -> Iterator[str]:
    layers, root = int(sys.argv[1]), Path(sys.argv[2])
    yield json.dumps(measure(layers, root))


if __name__ == "__main__":
    sys.stdout.writelines(f"{line}\n" for line in _lines())
