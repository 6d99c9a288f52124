"""A task.toml, or one of its [[steps]], with the lines of its keys for errors."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from libra_cli.config.errors import EnvironmentBroken, did_you_mean

_OF_AGENT = frozenset(["timeout_sec", "user", "network_mode", "allowed_hosts"])
_OF_VERIFIER = _OF_AGENT | {"env", "environment_mode", "environment", "collect"}
_OF_TASK: Mapping[str, frozenset[str]] = {
    "": frozenset(
        [
            "version",
            "schema_version",
            "task",
            "metadata",
            "verifier",
            "agent",
            "environment",
            "solution",
            "source",
            "artifacts",
            "steps",
            "multi_step_reward_strategy",
            "multi_step_reward_mode",
        ]
    ),
    "verifier": _OF_VERIFIER,
    "agent": _OF_AGENT,
    "environment": frozenset(
        [
            "build_timeout_sec",
            "docker_image",
            "cpus",
            "memory_mb",
            "memory",
            "storage_mb",
            "storage",
            "gpus",
            "gpu_types",
            "tpu",
            "allow_internet",
            "network_mode",
            "allowed_hosts",
            "mcp_servers",
            "env",
            "skills_dir",
            "healthcheck",
            "workdir",
            "os",
        ]
    ),
    "solution": frozenset(("env",)),
}
"""The keys of each section that are read, or refused where they ask for what is not there."""
_OF_STEP: Mapping[str, frozenset[str]] = {
    "": frozenset(["name", "agent", "verifier", "min_reward", "healthcheck", "artifacts"]),
    "verifier": _OF_VERIFIER,
    "agent": _OF_AGENT,
}
"""The keys of each of the [[steps]], read or refused likewise."""
_ASIDE = {
    "": ("artifacts", "multi_step_reward_mode"),
    "verifier": ("user",),
    "agent": ("user",),
    "environment": ("cpus", "skills_dir"),
}
"""Keys that are known and do nothing here."""
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMG])B?\s*", re.IGNORECASE)
_UNITS = {"K": 1 / 1024, "M": 1.0, "G": 1024.0}
_HEADER = re.compile(r"\s*\[+\s*([^\]]+?)\s*\]+")
_STEPS = "steps"


class TaskToml:
    """The keys of a task, or of one of its steps, whose sections have the same names."""

    def __init__(
        self, path: Path, text: str, values: Mapping[str, Any], step: int | None = None
    ) -> None:
        self.path = path
        self.values = values
        self._text = text
        self._step = step
        """Which of the [[steps]] it is, counted from 0; None: the whole file."""

    @classmethod
    def read(cls, path: Path) -> TaskToml:
        """Read a file.

        Raises:
            EnvironmentBroken: it cannot be read or is no TOML.
        """
        try:
            text = path.read_text(encoding="utf-8")
            return cls(path, text, tomllib.loads(text))
        except tomllib.TOMLDecodeError as error:
            raise EnvironmentBroken(f"{path}: is no TOML: {error}") from error
        except (OSError, UnicodeDecodeError) as error:
            raise EnvironmentBroken(
                f"{path} cannot be read: {error}", hint="libra help harbor says what a task has"
            ) from error

    def steps(self) -> Sequence[TaskToml]:
        """Return the steps of a task; none of a task that is not in steps.

        Raises:
            EnvironmentBroken: they are no list of tables.
        """
        given = self.values.get(_STEPS, [])
        if not isinstance(given, list) or not all(isinstance(one, dict) for one in given):
            raise self.wrong("", _STEPS, "is no list of tables [[steps]]")
        return [TaskToml(self.path, self._text, one, step) for step, one in enumerate(given)]

    def where(self, section: str, key: str = "") -> str:
        """Return ``file:line`` of a key, of its section where the key stands elsewhere, or file."""
        around = "" if self._step is None else _STEPS
        full = ".".join(filter(None, (around, section)))
        found = 0
        for number, within, text in self._lines():
            if text is None:
                found = number if within in (full, f"{full}.{key}") else found
            elif key and within == full and _sets(text, key):
                return f"{self.path}:{number}"
            elif section and within == around and _sets(text, section):
                found = number
        return f"{self.path}:{found}" if found else str(self.path)

    def _lines(self) -> Iterator[tuple[int, str, str | None]]:
        """Yield the lines of the task or step: number, section and text, which a header has not."""
        within, step = "", -1
        for number, text in enumerate(self._text.splitlines(), 1):
            header = _HEADER.match(text)
            if header:
                within = header[1]
                step += within == _STEPS
            if self._step in (None, step):
                yield number, within, None if header else text

    def section(self, name: str) -> Mapping[str, Any]:
        """Return a table, or with an empty name all keys; empty if there is none."""
        found = self.values.get(name, {}) if name else self.values
        if not isinstance(found, Mapping):
            raise self.wrong("", name, f"is {found!r}, not a table [{name}]")
        return found

    def seconds(self, section: str, key: str, default: float | None) -> float | None:
        """Return a positive number of seconds."""
        found = self.section(section).get(key, default)
        if found is None:
            return None
        if not _is_number(found) or found <= 0:
            raise self.wrong(section, key, f"is {found!r}, not a number of seconds above 0")
        return float(found)

    def megabytes(self, kind: str, default: int) -> int:
        """Return ``memory_mb`` or ``storage_mb``, or the older ``memory = "2G"``."""
        settings = self.section("environment")
        found = settings.get(f"{kind}_mb", default)
        if isinstance(older := settings.get(kind), str):
            if not (size := _SIZE.fullmatch(older)):
                raise self.wrong("environment", kind, f"is {older!r}, not a size such as 2G")
            found = int(float(size[1]) * _UNITS[size[2].upper()])
        if isinstance(found, bool) or not isinstance(found, int) or found <= 0:
            raise self.wrong("environment", f"{kind}_mb", f"is {found!r}, not a number of MiB")
        return found

    def variables(self, section: str) -> Mapping[str, str]:
        """Return the environment variables of a section, as they are written."""
        found = self.section(section).get("env", {})
        if not isinstance(found, dict) or not all(isinstance(v, str) for v in found.values()):
            raise self.wrong(section, "env", f"is {found!r}, not names with texts")
        return found

    def rewards(self, key: str) -> Mapping[str, float]:
        """Return rewards by name; a number alone is that of the reward called reward."""
        found = self.values.get(key, {})
        rewards = {"reward": found} if _is_number(found) else found
        if not isinstance(rewards, dict) or not all(map(_is_number, rewards.values())):
            raise self.wrong("", key, f"is {found!r}, neither a number nor names with numbers")
        return rewards

    def notes(self) -> Iterator[str]:
        """Yield what is left aside: keys that are not known, and those that do nothing here."""
        known_here = _OF_TASK if self._step is None else _OF_STEP
        for section, known in known_here.items():
            for key in self.section(section):
                where = self.where(section, key)
                if key in _ASIDE.get(section, ()):
                    yield f"{where}: {key} does nothing here"
                elif key not in known:
                    yield f"{where}: {key} is not known{did_you_mean(key, known)}"

    def wrong(self, section: str, key: str, reason: str) -> EnvironmentBroken:
        """Return the error that names the file, the line and the key."""
        parts = ("" if self._step is None else f"{_STEPS}[{self._step}]", section, key)
        return EnvironmentBroken(
            f"{self.where(section, key)}: {'.'.join(filter(None, parts))}: {reason}",
            hint=f"edit {self.path}",
        )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _sets(text: str, key: str) -> bool:
    return bool(re.match(rf"\s*{re.escape(key)}\s*[.=]", text))
