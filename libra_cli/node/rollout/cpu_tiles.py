"""Permission for a process to use AMX, the tile registers of newer Intel CPUs.

vLLM 0.32's kernels for bfloat16 and int8 on CPUs use AMX where the CPU has it, and nobody asks
Linux for it before: a rank then dies by SIGILL at its first token. oneDNN, which torch multiplies
matrices with, asks for itself.
"""

from __future__ import annotations

import torch


def allow() -> None:
    """Ask Linux for AMX, for this process and those that it forks; does nothing without AMX."""
    if torch.cpu.get_capabilities().get("amx_tile"):
        torch.cpu._init_amx()
