"""Known vulnerabilities of the packages that are installed here: ``python -m tests.audit``.

Asks PyPI through pip-audit, and says of how many packages it was told, and why not of the others:
offline, and behind an index that has packages alone, of none. Only a finding fails.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

LIMIT_S = 120.0
NAMED = 3
"""The packages that are named of those that were not audited for the same reason."""
REASON = re.compile(r"Dependency (.*): \S+ \(.*\)")
"""What pip-audit says of a package that it could not audit, its name and version at the end."""


def main() -> int:
    """Ask, tell, and return the exit code."""
    argv = [sys.executable, "-m", "pip_audit", "--format", "json", "--progress-spinner", "off"]
    argv += ["--local", "--skip-editable", "--vulnerability-service", "pypi", "--timeout", "15"]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        told, failed = f"audited 0 packages: pypi.org gave no answer within {LIMIT_S:.0f} s", False
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
        return f"audited 0 packages: pypi.org cannot be asked: {last}", False
    found = [
        f"{one['name']} {one['version']}: {bug['id']}, mended in {' '.join(bug['fix_versions'])}"
        for one in packages
        for bug in one.get("vulns", ())
    ]
    known = sum("vulns" in one for one in packages)
    told = [f"audited {known} of {len(packages)} packages", *_not_audited(packages)]
    if found:
        return "\n".join(["; ".join(told), "known vulnerabilities:", *found]), True
    return "; ".join([*told, "no known vulnerabilities"] if known else told), False


def _not_audited(packages: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a part of a sentence for each reason: how many packages, which, and why."""
    by_reason: dict[str, list[str]] = {}
    for one in packages:
        if reason := one.get("skip_reason"):
            match = REASON.fullmatch(reason)
            by_reason.setdefault(match[1] if match else reason, []).append(one["name"])
    for reason, names in by_reason.items():
        shown = [*names[:NAMED], "..."] if len(names) > NAMED else names
        yield f"not {len(names)}, {reason} ({', '.join(shown)})"


if __name__ == "__main__":
    sys.exit(main())
