"""The files of ``libra bench``: JSON, and the directory of a report."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from libra_cli.bench.config import BenchError, ExperimentConfig
from libra_cli.bench.results import ExperimentResult

RUNS = Path("runs")
REPORT = "bench.html"


def json_text(body: Any) -> str:
    """The body as JSON text; JSON knows no NaN, so what is not a number is null."""
    return json.dumps(_finite(body), indent=2, allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return value


def write(path: Path, text: str) -> Path:
    """Write a file, and the directory it lies in.

    Raises:
        BenchError: there is no room or no right to.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise BenchError(f"cannot write {path}: {error}", hint=f"ls -ld {path.parent}") from error
    return path


def write_report(
    directory: Path | None,
    results: Sequence[ExperimentResult],
    config: ExperimentConfig,
    command: str,
) -> Path:
    """Write ``bench.html``, under ``runs/`` without a directory; about a second, to draw it.

    Raises:
        LibraError: it cannot be written.
    """
    from libra_cli.bench.report.html import bench_page

    seeds = "1 seed" if config.seeds == 1 else f"{config.seeds} seeds"
    parts = (f"{config.gpus} {config.profile.gpu}", config.profile.model, seeds, config.conditions)
    about = " · ".join((*parts, *(trace.name for trace in config.traces)))
    page = bench_page(results, about=about, command=command, warnings=config.warnings)
    return write_page(directory, page)


def write_page(directory: Path | None, page: str) -> Path:
    """Write a page as ``bench.html``, under ``runs/`` without a directory; raises as ``write``."""
    return write((directory or RUNS / time.strftime("bench-%Y%m%d-%H%M%S")) / REPORT, page)
