"""What the log-probabilities of servers and trainer differ by where both compute rightly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from libra_cli.config.recipe import ModelSpec
from libra_cli.config.rollout import RolloutSpec


@dataclass(frozen=True, slots=True)
class ExpectedGap:
    """Bounds of the mean of ``logprob_gap`` over steps, in nats a token."""

    usual: float
    """Up to this a gap that has doubled is another policy's rounding."""
    wrong: float
    """Above this it is something else than rounding."""


_EXPECTED: Mapping[tuple[str, bool], ExpectedGap] = {
    ("float32", False): ExpectedGap(1e-4, 1e-3),
    ("float32", True): ExpectedGap(1e-3, 0.02),
    ("bfloat16", False): ExpectedGap(0.003, 0.05),
    ("bfloat16", True): ExpectedGap(0.008, 0.05),
}
"""The bounds depend on the format and on whether there are GPUs. CPUs had 1e-7 to 2e-5 in float32
and about 0.001 in bfloat16; on GPUs others measured 0.008 to 0.04 in bfloat16 (vime issue 64:
Qwen3-4B 0.011, flat; ServiceNow/Fast-LLM 525: Qwen2.5-0.5B 0.03 to 0.04). We saw 0.0012 and 0.0028
of smaller models on an H100, where the doubling of a gap is not told below 0.008."""
_QUANTIZED = 3.0
"""Factor where servers hold weights in 8 bits: 0.003 to 0.005 was measured on CPUs."""


def expected_gap(model: ModelSpec, rollout: RolloutSpec, *, on_gpus: bool) -> ExpectedGap:
    """Return what is expected of this model's format, of servers ``on_gpus`` or not."""
    dtype = "bfloat16" if on_gpus else "float32"
    expected = _EXPECTED[dtype if model.dtype == "auto" else model.dtype, on_gpus]
    if rollout.quantization is None:
        return expected
    return ExpectedGap(_QUANTIZED * expected.usual, _QUANTIZED * expected.wrong)
