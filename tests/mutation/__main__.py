"""Do the unit tests notice a mistake? ``python -m tests.mutation --number 60 --seed 0 [PATH ...]``.

Makes one small mistake at a time in a copy of the package: a comparison, an operator, a constant, a
condition or a call that is dropped. Runs the unit tests of the folder that it is in, then those of
the folders above. Tells by folder how many were noticed, and shows the others. One that is alive is
a test that is missing, or a mistake that makes no difference.
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
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.mutation.mistakes import ROOT, Mutant, mutants_of

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
LIMIT_S = 1800.0
"""Of the tests of one folder; each test has its own, which is shorter."""
OVERTIME = "a crash or the time limit"


def stages_of(path: Path, root: Path = ROOT) -> list[list[str]]:
    """Paths of the tests that should notice, the nearest first: of its folder with those that name
    the module, then of each folder above."""
    folder = Path("tests/unit", *path.parts[1:-1])
    module = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
    naming = [one for one in (root / "tests/unit").rglob("test_*.py") if module in one.read_text()]
    stages = [{str(one.relative_to(root)) for one in naming}]
    while folder != Path("tests/unit"):
        stages.append({str(one.relative_to(root)) for one in (root / folder).glob("test_*.py")})
        folder = folder.parent
    ran: set[str] = set()
    told = []
    for stage in stages:
        if new := sorted(stage - ran):
            told.append(new)
        ran |= stage
    return told


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
        """The names of those tests that fail; their time may be over before."""
        argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests, *options]
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
            return {OVERTIME}
        told = set(re.findall(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", done.stdout, re.MULTILINE))
        return told or (set() if done.returncode in (0, 5) else {OVERTIME})

    def noticed_by(self, mutant: Mutant) -> str:
        """The name of the first test that does; empty if none does."""
        file = self._place / mutant.path
        file.write_text(mutant.after)
        try:
            found = (self.failed(tests, "-x") for tests in stages_of(mutant.path, self._place))
            return next((sorted(names)[0] for names in found if names), "")
        finally:
            file.write_text(mutant.before)


def main() -> int:
    """Make mistakes, tell, and return 1 if a test fails without any."""
    parser = argparse.ArgumentParser(prog="tests.mutation")
    parser.add_argument("paths", nargs="*", default=MUTATED, help="below libra_cli")
    parser.add_argument("--number", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    told = parser.parse_args()
    trees = [ROOT / "libra_cli" / path for path in told.paths]
    files = [file for tree in trees for file in sorted(tree.rglob("*.py")) or [tree]]
    every = [mutant for file in files for mutant in mutants_of(file.relative_to(ROOT))]
    drawn = random.Random(told.seed).sample(every, min(told.number, len(every)))
    sys.stdout.write(f"{len(drawn)} of {len(every)}, drawn by seed {told.seed}\n")
    with tempfile.TemporaryDirectory() as place:
        copy = Copy(Path(place))
        noticed = {mutant: _noticed(copy, mutant) for mutant in drawn}
        noticing = {*noticed.values()} - {"", OVERTIME}
        guilty = copy.failed(sorted(noticing)) if noticing else set()
    sys.stdout.write(report(noticed, len(every)))
    if guilty:
        sys.stdout.write(f"fail without a mistake: {', '.join(sorted(guilty))}\n")
    return int(bool(guilty))


def _noticed(copy: Copy, mutant: Mutant) -> str:
    began = time.monotonic()
    by = copy.noticed_by(mutant)
    place = mutant.diff.splitlines()[2].split()[1].removeprefix("-")
    sys.stdout.write(f"{mutant.path}:{place} {time.monotonic() - began:.0f} s {by or 'ALIVE'}\n")
    sys.stdout.flush()
    return by


def report(noticed: Mapping[Mutant, str], of: int) -> str:
    """By folder how many were killed, and the diffs of the others."""
    drawn = Counter(mutant.folder for mutant in noticed)
    alive = Counter(mutant.folder for mutant, by in noticed.items() if not by)
    rows = [
        f"{folder:28} {n - alive[folder]:4} of {n:4} killed" for folder, n in sorted(drawn.items())
    ]
    total = (
        f"{'all':28} {len(noticed) - alive.total():4} of {len(noticed):4} killed, of {of} there are"
    )
    diffs = [mutant.diff for mutant, by in noticed.items() if not by]
    return "\n".join(["", *diffs, "", *rows, total, ""])


if __name__ == "__main__":
    sys.exit(main())
