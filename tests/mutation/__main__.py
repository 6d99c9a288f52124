"""Do the unit tests notice a mistake? ``python -m tests.mutation --number 60 --seed 0 [PATH ...]``.

Makes one small mistake at a time in a copy of the package: a comparison, an operator, a constant, a
condition or a call that is dropped. Runs the tests of ``make check`` that run its function: first
those of the test files of its folder or that name its module, then the others, short ones first.
Tells by folder how many were noticed, and shows the others. One that is alive is a test that is
missing, or a mistake that makes no difference. It first measures which tests run which function
(``tests.mutation.reach``), which takes twice as long as the tests, or is told it: ``--reach FILE``.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from math import sqrt
from pathlib import Path

from tests.mutation.mistakes import ROOT, Mutant, mutants_of
from tests.mutation.reach import Reach

MUTATED = (
    "core",
    "node/agent",
    "node/losses",
    "node/processes",
    "node/rollout/proof.py",
    "node/weights",
    "runtime/adoption",
    "runtime/store",
    "sim",
)
"""Below libra_cli: what decides, and what proves."""
SELECTED = "not integration and not vllm"
"""As `make check` does."""
LIMIT_S = 3600.0
"""Of all tests of a stage; each test has its own, which is shorter."""
OVERTIME = " (a crash or its time limit)"
UNKNOWN = "a test that was not told"
NONE_FAILED = (0, 5)
"""Exit codes of pytest, the second where it was given no test to run."""


def stages_of(mutant: Mutant, reach: Reach, root: Path = ROOT) -> list[list[str]]:
    """Tests that run the function, the nearest first: those in files that name the module or are of
    its folder, then all others. If none does, the files that name it: they may run it in a process
    of their own."""
    path = mutant.path
    module = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
    naming = {
        str(one.relative_to(root))
        for one in (root / "tests/unit").rglob("test_*.py")
        if module in one.read_text()
    }
    folder = str(Path("tests/unit", *path.parts[1:-1]))
    tests = reach.of(path, mutant.function)
    near = [test for test in tests if _file(test) in naming or _folder(test) == folder]
    stages = near, [test for test in tests if test not in {*near}]
    return [stage for stage in (stages if tests else [sorted(naming)]) if stage]


def _file(test: str) -> str:
    return test.split("::")[0]


def _folder(test: str) -> str:
    return str(Path(_file(test)).parent)


class Copy:
    """Of the tracked files, in which mistakes are made."""

    def __init__(self, place: Path) -> None:
        self._place = place
        argv = ["git", "ls-files", "-z"]
        tracked = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True)
        for name in tracked.stdout.split("\0"):
            if (ROOT / name).is_file():
                (place / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, place / name)

    def failed(self, tests: Sequence[str], *options: str) -> set[str]:
        """The names of those tests that fail; one that does not end is said to be."""
        argv = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *tests, *options]
        environment = {**os.environ, "PYTHONPATH": str(self._place), "PYTHONDONTWRITEBYTECODE": "1"}
        try:
            done = subprocess.run(
                [*argv, "-m", SELECTED],
                cwd=self._place,
                env=environment,
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return {UNKNOWN + OVERTIME}
        told = set(re.findall(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", done.stdout, re.MULTILINE))
        gone = re.findall(r"^ERROR: not found: .*?(tests/.*)$", done.stderr, re.MULTILINE)
        if told or gone or done.returncode in NONE_FAILED:
            return {*told, *gone}
        begun = re.findall(r"^(tests/\S+::.*?) *$", done.stdout, re.MULTILINE)
        return {(begun or [UNKNOWN])[-1] + OVERTIME}

    def reach(self) -> Reach:
        """Which tests run which function of the copy."""
        file = self._place / "reach.json"
        measured = "-p", "tests.mutation.reach", "--reach", str(file), "--timeout", "600"
        self.failed(["tests/unit"], *measured)
        return Reach.read(file)

    def noticed_by(self, mutant: Mutant, reach: Reach) -> str:
        """The name of the first test that does; empty if none does."""
        file = self._place / mutant.path
        file.write_text(mutant.after)
        try:
            stages = stages_of(mutant, reach, self._place)
            found = (self.failed(tests, "-x") for tests in stages)
            return next((sorted(names)[0] for names in found if names), "")
        finally:
            file.write_text(mutant.before)


def main() -> int:
    """Make mistakes, tell, and return 1 if a test fails without any."""
    parser = argparse.ArgumentParser(prog="tests.mutation")
    parser.add_argument("paths", nargs="*", default=MUTATED, help="below libra_cli")
    parser.add_argument("--number", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--reach", type=Path, help="as `pytest -p tests.mutation.reach` wrote it")
    told = parser.parse_args()
    trees = [ROOT / "libra_cli" / path for path in told.paths]
    files = [file for tree in trees for file in sorted(tree.rglob("*.py")) or [tree]]
    every = [mutant for file in files for mutant in mutants_of(file.relative_to(ROOT))]
    drawn = random.Random(told.seed).sample(every, min(told.number, len(every)))
    sys.stdout.write(f"{len(drawn)} of {len(every)}, drawn by seed {told.seed}\n")
    with tempfile.TemporaryDirectory() as place:
        copy = Copy(Path(place))
        reach = Reach.read(told.reach) if told.reach else copy.reach()
        noticed = {mutant: _noticed(copy, mutant, reach) for mutant in drawn}
        noticing = {by.removesuffix(OVERTIME) for by in noticed.values()} - {"", UNKNOWN}
        guilty = copy.failed(sorted(noticing)) if noticing else set()
    sys.stdout.write(report(noticed, len(every)))
    if guilty:
        sys.stdout.write(f"fail without a mistake: {', '.join(sorted(guilty))}\n")
    return int(bool(guilty))


def _noticed(copy: Copy, mutant: Mutant, reach: Reach) -> str:
    began = time.monotonic()
    by = copy.noticed_by(mutant, reach)
    unseen = f"ALIVE, of {len(reach.of(mutant.path, mutant.function))} tests\n{mutant.diff}"
    seconds = f"{time.monotonic() - began:.0f} s"
    sys.stdout.write(f"{mutant.path}:{mutant.line} {seconds} {by or unseen}\n")
    sys.stdout.flush()
    return by


def report(noticed: Mapping[Mutant, str], of: int) -> str:
    """By folder how many were killed, and the diffs of the others."""
    rows = [
        _row(folder, [by for mutant, by in noticed.items() if mutant.folder == folder])
        for folder in sorted({mutant.folder for mutant in noticed})
    ]
    total = f"{_row('all', [*noticed.values()])}, of {of} there are"
    diffs = [mutant.diff for mutant, by in noticed.items() if not by]
    return "\n".join(["", *diffs, "", *rows, total, ""])


def _row(name: str, noticed: Sequence[str]) -> str:
    killed, overtime = sum(map(bool, noticed)), sum(by.endswith(OVERTIME) for by in noticed)
    low, high = _interval(killed, len(noticed))
    late = f", {overtime} by a crash or a time limit" if overtime else ""
    return f"{name:28} {killed:4} of {len(noticed):4} killed, {low:.0%} to {high:.0%}{late}"


def _interval(successes: int, of: int, z: float = 1.96) -> tuple[float, float]:
    """In which a share is, 95 % sure (Wilson's score interval)."""
    share, scale = successes / of, 1 + z**2 / of
    middle = share + z**2 / (2 * of)
    half = z * sqrt(share * (1 - share) / of + z**2 / (4 * of**2))
    return (middle - half) / scale, (middle + half) / scale


if __name__ == "__main__":
    sys.exit(main())
