"""Known vulnerabilities of the packages that are installed here: ``python -m tests.audit``.

Asks PyPI through pip-audit. A finding fails. Where nobody answers (offline, or an index that has
packages alone) it says so and does not fail: then nothing was audited.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

LIMIT_S = 120.0
SHARE = 0.5
"""Of all packages, so many must be known to the service for it to count as asked, and one at least:
``--local`` sees none where a virtual environment borrows those of another."""


def main() -> int:
    """Ask, tell, and return the exit code."""
    argv = [sys.executable, "-m", "pip_audit", "--format", "json", "--progress-spinner", "off"]
    argv += ["--local", "--skip-editable", "--vulnerability-service", "pypi", "--timeout", "15"]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        told, failed = f"NOT audited: no answer within {LIMIT_S:.0f} s", False
    else:
        told, failed = verdict(done.stdout, done.stderr)
    sys.stdout.write(told + "\n")
    return int(failed)


def verdict(output: str, errors: str) -> tuple[str, bool]:
    """What to tell of pip-audit's JSON, and whether it is a failure."""
    try:
        packages: Sequence[Mapping[str, Any]] = json.loads(output)["dependencies"]
    except (ValueError, KeyError):
        last = errors.strip().rpartition("\n")[2]
        if "No module named" in last:
            return f"{last}; type: make install-dev", True
        return f"NOT audited, the service cannot be asked: {last}", False
    found = [
        f"{one['name']} {one['version']}: {bug['id']}, mended in {' '.join(bug['fix_versions'])}"
        for one in packages
        for bug in one.get("vulns", ())
    ]
    if found:
        return "\n".join(["known vulnerabilities:", *found]), True
    known = sum("vulns" in one for one in packages)
    if known < max(1, SHARE * len(packages)):
        return f"NOT audited: the service knows {known} of {len(packages)} packages", False
    return f"no known vulnerabilities in {known} of {len(packages)} packages", False


if __name__ == "__main__":
    sys.exit(main())
