"""What only a GPU can show, in twenty minutes and without a network, as a table to send to us.

    make gpu-check                            # on a machine with a GPU of 24 GB or more
    make gpu-check AGAIN=--again              # from the beginning, not where the last call ended
    python -m tests.gpu.check --rehearse      # the same checks without a GPU, small, on the CPU

Every check runs in a process that others do not share, but for those of one vLLM server, which go
on in another process if one of them ends theirs. Each writes a line to gpu-check/checks.jsonl when
it ends. Nothing is downloaded: models have random weights.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console

from tests.gpu import machine
from tests.gpu.expected import BY_NAME, CHECKS, Check, Kind, NoServer, kind_of
from tests.gpu.report import line_of, text_of, whole

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 1800.0
"""Seconds that one check may take."""
LOOK_S = 0.5
WIDTH = 120
TAIL = 12
"""Lines of a failed process's log that are shown."""


class Record:
    """A directory with the machine, a line for each check that has ended, and their files."""

    def __init__(self, base: Path) -> None:
        self.base = base.resolve()
        self.work = self.base / "work"
        self.file = self.base / "checks.jsonl"

    def begin(self, about: Mapping[str, Any], *, again: bool) -> None:
        """Go on with what is there, if it is of this machine.

        Raises:
            ValueError: it is of another machine.
        """
        if again:
            shutil.rmtree(self.base, ignore_errors=True)
        self.work.mkdir(parents=True, exist_ok=True)
        facts = self.base / "machine.json"
        if facts.exists() and json.loads(facts.read_text()) != about:
            raise ValueError(f"{facts} is of another machine or other versions; next: --again")
        facts.write_text(json.dumps(about))

    def results(self) -> list[dict[str, Any]]:
        """Those of the checks that have ended, the newest of each."""
        lines = self.file.read_text().splitlines() if self.file.exists() else []
        return list({one["check"]: one for one in map(json.loads, lines)}.values())

    def add(self, result: Mapping[str, Any]) -> None:
        with self.file.open("a") as file:
            told = {**result, "error": machine.anonymous(result["error"])}
            file.write(json.dumps(told) + "\n")


def main() -> int:
    """Make the checks that are left; 0 if none of all failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rehearse", action="store_true", help="small, on the CPU")
    parser.add_argument("--again", action="store_true", help="from the beginning")
    parser.add_argument("--only", nargs="+", metavar="CHECK", choices=BY_NAME, default=[])
    parser.add_argument("--one-process", nargs="+", metavar="CHECK", help=argparse.SUPPRESS)
    given = parser.parse_args()
    about = machine.about()
    gpus = 0 if given.rehearse else len(about["gpus"])
    if not gpus and not given.rehearse:
        parser.error("nvidia-smi finds no GPU here; next: python -m tests.gpu.check --rehearse")
    kind = kind_of(about["gpus"][0] if gpus else "")
    record = Record(Path("gpu-check"))
    if given.one_process:
        _make(given.one_process, record, gpus, kind)
        return 0
    try:
        record.begin(about, again=given.again)
    except ValueError as error:
        parser.error(str(error))
    try:
        return _all(record, about, gpus, kind, given.only)
    except KeyboardInterrupt:
        sys.stderr.write("broken off; the same command goes on after the last check that ended\n")
        return 130


def _all(
    record: Record, about: Mapping[str, Any], gpus: int, kind: Kind, only: Sequence[str]
) -> int:
    console = Console()
    console.width = max(console.width, WIDTH)
    for result in record.results():
        console.print(line_of(result), style="dim", soft_wrap=True)
    for check, result in _checks(record, gpus, only):
        console.print(line_of(result), soft_wrap=True)
        if check.ends and result["verdict"] == "failed":
            break
    results = record.results()
    shown = whole(about, results, kind)
    console.print(shown)
    report = record.base / "report.txt"
    report.write_text(text_of(shown))
    failed = any(result["verdict"] == "failed" for result in results)
    if not failed and not list(_left(record, gpus)):
        shutil.rmtree(record.work, ignore_errors=True)
    if left := len(list(_left(record, gpus))):
        console.print(f"{left} checks are left; next: python -m tests.gpu.check")
    console.print(f"please attach to an issue: {os.path.relpath(report)}")
    return int(failed)


def _checks(
    record: Record, gpus: int, only: Sequence[str]
) -> Iterator[tuple[Check, dict[str, Any]]]:
    """The checks that are left and that this machine allows, as they end. The rehearsal makes those
    of several GPUs too: there ranks are processes."""
    left = _left(record, gpus, only)
    while left:
        _, together = next(groupby(left, lambda check: check.part))
        group = list(together)
        for check, result in _in_a_process(group, record, gpus):
            left.remove(check)
            yield check, result
            if result["error"].startswith(NoServer.__name__):
                left = [one for one in left if one.part != check.part]


def _left(record: Record, gpus: int, only: Sequence[str] = ()) -> list[Check]:
    """The checks that this machine allows and that are to be made: those named, or all that have
    not been made."""
    done = {result["check"] for result in record.results()}
    return [
        check
        for check in CHECKS
        if (check.name in only if only else check.name not in done)
        if not gpus or check.gpus <= gpus
    ]


def _in_a_process(
    group: Sequence[Check], record: Record, gpus: int
) -> Iterator[tuple[Check, dict[str, Any]]]:
    """Those of these checks that a process makes until one raises an error or ends it."""
    command = [sys.executable, "-m", "tests.gpu.check", "--one-process", *(c.name for c in group)]
    log = record.base / f"{group[0].part}.log"
    seen, waiting, since, broken = _lines(record), list(group), time.monotonic(), False
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, *([] if gpus else ["--rehearse"])],
            cwd=record.base.parent,
            env=os.environ | _environment(gpus),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            while waiting:
                ended = process.poll() is not None
                lines = _lines(record)
                for result in map(json.loads, lines[len(seen) :]):
                    yield waiting.pop(0), result
                    since, broken = time.monotonic(), bool(result["error"])
                seen = lines
                if ended or broken or time.monotonic() - since > LIMIT_S:
                    break
                time.sleep(LOOK_S)
        finally:
            _end(process, patient=broken or not waiting)
    if waiting and not broken:
        told = "\n".join(log.read_text().splitlines()[-TAIL:])
        why = f"its process ended with {process.returncode}; {log.name} ends:\n{told}"
        result = _result(waiting[0], {}, "cpu", time.monotonic() - since, why)
        record.add(result)
        yield waiting[0], result


def _environment(gpus: int) -> dict[str, str]:
    """Without GPUs a process has one thread: ranks, a server and a trainer share few cores."""
    threads = {} if gpus else {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    return {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", **threads}


def _lines(record: Record) -> list[str]:
    return record.file.read_text().splitlines() if record.file.exists() else []


def _end(process: subprocess.Popen[Any], *, patient: bool) -> None:
    """Wait for a process that has done its work; end another, with all of its session."""
    for number, wait_s in ((0, 120 if patient else 0), (signal.SIGINT, 30), (signal.SIGKILL, 30)):
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            if number:
                os.killpg(process.pid, number)
            process.wait(wait_s)
            return


# -- in a process of checks ------------------------------------------------------------------------


def _make(names: Sequence[str], record: Record, gpus: int, kind: Kind) -> None:
    """Make checks in this process, and add a line for each as it ends."""
    from tests.gpu.model import ON_GPU, REHEARSED
    from tests.gpu.place import Place

    place = Place(record.work, ON_GPU if gpus else REHEARSED, gpus)
    works = _works()
    try:
        for name in names:
            began, measured, error = time.monotonic(), dict[str, Any](), ""
            try:
                measured = works[name](place)
            except Exception as problem:  # noqa: BLE001  whatever it is, it is the check's answer
                error = f"{type(problem).__name__}: {problem}"
            record.add(_result(BY_NAME[name], measured, kind, time.monotonic() - began, error))
            if error:  # what it has left of this process and its server is not known
                break
    finally:
        place.stop()


def _works() -> Mapping[str, Callable[[Any], dict[str, Any]]]:
    from tests.gpu import kernels, ranks, run, server, trainer

    return {
        "machine": machine.machine,
        "kernels": kernels.kernels,
        "trainer": trainer.trainer,
        "sharded": ranks.sharded,
        "compiled": ranks.compiled_layers,
        "start": server.start,
        "versions": server.versions,
        "decode": server.decode,
        "speed": server.speed,
        "loads": server.loads,
        "greedy": server.greedy,
        "killed": server.killed,
        "lora": server.lora,
        "sleep": server.sleep,
        "offload": trainer.offload,
        "run": run.run,
        "all_reduce": ranks.all_reduce,
        "two_ranks": ranks.two_ranks,
        "two_gpus": server.two_gpus,
        "moves": run.moves,
    }


def _result(
    check: Check, measured: Mapping[str, Any], kind: Kind, took_s: float, error: str
) -> dict[str, Any]:
    failed, odd = ([], []) if error else check.problems(measured, kind)
    return {
        "check": check.name,
        "verdict": "failed" if error or failed else "look" if odd else "ok",
        "took_s": round(took_s, 1),
        "measured": measured,
        "problems": [*failed, *odd],
        "error": error,
    }


if __name__ == "__main__":
    sys.exit(main())
