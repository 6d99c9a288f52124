"""Digests of chunks: SHA-256, and BLAKE3 where its package is installed.

BLAKE3 takes about a third of the time, and its package comes with vLLM. An agent may run where
nothing is installed: so a version is published with each digest that its trainer knows, SHA-256 of
the standard library among them, and a host checks the quickest that it knows. Either finds damage
and forgery.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable, Collection
from typing import Any


def _known() -> dict[str, Callable[..., Any]]:
    """What makes a digest, by its name in a manifest; the quickest first."""
    try:
        quick = {"blake3": importlib.import_module("blake3").blake3}
    except ImportError:
        quick = {}
    return {**quick, "sha256": hashlib.sha256}


ALGORITHMS = _known()


def quickest(named: Collection[str]) -> str:
    """The quickest algorithm of these that is known here.

    Raises:
        KeyError: there is none.
    """
    for name in ALGORITHMS:
        if name in named:
            return name
    raise KeyError("no digest that is known here")


def digest_of(algorithm: str, data: memoryview) -> str:
    digest: str = ALGORITHMS[algorithm](data).hexdigest()
    return digest
