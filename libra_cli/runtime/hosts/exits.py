"""Says of a process how it ended, by its exit code and the end of its log."""

from __future__ import annotations

import re

from libra_cli.runtime.hosts.agent_messages import Exited

_RANK = r"(?:\[rank\d+\]:\s*)?"
"""What torch writes before every line of an error in a process of a group, even of one."""
_ERROR = re.compile(
    rf"^{_RANK}((?!subprocess\.CalledProcessError)[\w.]*(?:Error|Exception|Interrupt)\b.*"
    r"(?:(?<=Config)\n.*)?)",  # pydantic says on the next line what is wrong
    re.M,
)


def how_it_ended(event: Exited) -> str:
    """Describe an exit, with the last line of its log that names an error, or the last of all."""
    if event.exit_code is None or event.exit_code < 0:
        by = "by nobody knows what" if event.exit_code is None else f"by signal {-event.exit_code}"
        return f"was ended {by}"
    return f"ended with exit code {event.exit_code}: {error_in(event.tail)}"


def error_in(text: str) -> str:
    """The last line of a log that names an error, or the last of all."""
    errors = [" ".join(match[1].split()) for match in _ERROR.finditer(text)]
    lines = [line for line in text.splitlines() if line.strip()]
    return (errors or lines or ["it wrote nothing"])[-1].strip()[:500]
