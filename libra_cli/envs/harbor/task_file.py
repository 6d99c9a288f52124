"""Reads one task directory of Harbor's format, and says what of it cannot be played.

    task.toml          timeouts, resources and metadata; schema_version 1.0 to 1.4
    instruction.md     what the model is told
    environment/       the Dockerfile, and the files that it copies
    tests/             test.sh, which writes the reward; the model never sees this directory
    steps/NAME/        of a task with [[steps]]: instruction.md, tests/ and solution/ of each
    solution/          solve.sh, the reference solution; optional

A key that is not known is left aside and told in ``notes``. What would make another task of it (a
GPU, several containers, the internet) is in ``refused``, with the reason.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from libra_cli.config.errors import EnvironmentBroken, did_you_mean

TASK_FILE = "task.toml"
_SECTIONS: Mapping[str, frozenset[str]] = {
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
    "verifier": frozenset(
        ["timeout_sec", "env", "user", "environment_mode", "environment", "network_mode"]
    ),
    "agent": frozenset(["timeout_sec", "user", "network_mode"]),
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
_ASIDE = {
    "": ("artifacts",),
    "verifier": ("user",),
    "agent": ("user",),
    "environment": ("cpus", "skills_dir"),
}
"""Keys that are known and do nothing here."""
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMG])B?\s*", re.IGNORECASE)
_UNITS = {"K": 1 / 1024, "M": 1.0, "G": 1024.0}


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a task cannot be played here, and what would help."""

    where: str
    """The file and the line."""
    reason: str
    hint: str


@dataclass(frozen=True, slots=True)
class HarborTask:
    """One task as its directory says it; times are in seconds, sizes in MiB."""

    directory: Path
    instruction: str
    metadata: Mapping[str, Any]
    agent_timeout_s: float | None
    """How long the agent may work; None: as long as it likes."""
    verifier_timeout_s: float
    build_timeout_s: float
    memory_mb: int
    storage_mb: int
    docker_image: str | None
    """The image of the task, where it is not made by ``environment/Dockerfile``."""
    workdir: str | None
    """The directory in which everything begins; None: the Dockerfile's WORKDIR."""
    wants_internet: bool
    """Whether the task says in so many words that it needs the internet."""
    env: Mapping[str, str]
    verifier_env: Mapping[str, str]
    solution_env: Mapping[str, str]
    notes: tuple[str, ...]
    """What the task says and is left aside, as ``file:line: reason``."""
    refused: tuple[Refusal, ...]
    steps: tuple[HarborTask, ...] = ()
    """The steps of a task in several, each as a task in the same sandbox; empty of any other."""
    only_final: bool = False
    """Whether the last step's rewards are the task's, and not the mean of all."""
    shared_tests: Path | None = None
    """The whole task's tests, over which those of a step are laid; None if it
    is no step."""
    min_reward: Mapping[str, float] = field(default_factory=dict)
    """The rewards by name that a step needs for the next one to begin."""

    @property
    def name(self) -> str:
        return self.directory.name

    @property
    def environment(self) -> Path:
        return self.directory / "environment"

    @property
    def tests(self) -> Path:
        return self.directory / "tests"

    @property
    def solution(self) -> Path:
        return self.directory / "solution"


def read_task(directory: Path) -> HarborTask:
    """Read a task's directory; what cannot be played is in ``refused`` and raises nothing.

    Raises:
        EnvironmentBroken: a file is missing or is not what the format says.
    """
    found = _TaskFile(directory / TASK_FILE)
    settings = found.section("environment")
    whole = HarborTask(
        directory=directory,
        instruction=_instruction(directory),
        metadata=found.section("metadata"),
        agent_timeout_s=found.seconds("agent", "timeout_sec", None),
        verifier_timeout_s=found.seconds("verifier", "timeout_sec", 600.0) or 600.0,
        build_timeout_s=found.seconds("environment", "build_timeout_sec", 600.0) or 600.0,
        memory_mb=found.megabytes("memory", 2048),
        storage_mb=found.megabytes("storage", 10240),
        docker_image=settings.get("docker_image"),
        workdir=settings.get("workdir"),
        wants_internet=_wants_internet(settings),
        env=found.variables("environment"),
        verifier_env=found.variables("verifier"),
        solution_env=found.variables("solution"),
        notes=tuple(found.notes()),
        refused=tuple(_refused(found, directory)),
        only_final=found.values.get("multi_step_reward_strategy") == "final",
    )
    steps = tuple(_steps(found, whole))
    refused = whole.refused + tuple(why for step in steps for why in step.refused)
    return replace(whole, steps=steps, refused=refused)


def _steps(found: _TaskFile, whole: HarborTask) -> Iterator[HarborTask]:
    given = found.values.get("steps", [])
    if not isinstance(given, list):
        raise found.wrong("", "steps", "is no list of tables [[steps]]")
    for table in given:
        name = table.get("name") if isinstance(table, dict) else None
        if not isinstance(name, str) or not (whole.directory / "steps" / name).is_dir():
            raise found.wrong("steps", "name", f"{name!r} is no directory in steps/")
        yield _step(found, whole, table, whole.directory / "steps" / name)


def _step(
    found: _TaskFile, whole: HarborTask, table: Mapping[str, Any], directory: Path
) -> HarborTask:
    """Read a step; what it does not say is as in the whole task."""
    agent, verifier = table.get("agent", {}), table.get("verifier", {})
    least = table.get("min_reward", {})
    shared = whole.tests if whole.tests.is_dir() else None
    tested = any((tests / "test.sh").is_file() for tests in (directory / "tests", whole.tests))
    missing = [] if tested else [directory / "tests/test.sh"]
    missing += [] if (directory / "instruction.md").is_file() else [directory / "instruction.md"]
    refused = [Refusal(str(path), "is missing", "libra help harbor") for path in missing]
    if "healthcheck" in table:
        where = found.where("steps.healthcheck")
        refused.append(
            Refusal(where, "healthcheck: nothing is started to wait for", "leave it out")
        )
    return replace(
        whole,
        directory=directory,
        instruction=_instruction(directory),
        agent_timeout_s=agent.get("timeout_sec", whole.agent_timeout_s),
        verifier_timeout_s=verifier.get("timeout_sec", whole.verifier_timeout_s),
        verifier_env={**whole.verifier_env, **verifier.get("env", {})},
        shared_tests=shared,
        min_reward={"reward": least} if isinstance(least, int | float) else least,
        refused=tuple(refused),
    )


class _TaskFile:
    """A task.toml with the lines of its keys, for errors."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._text = path.read_text(encoding="utf-8")
            self.values = tomllib.loads(self._text)
        except tomllib.TOMLDecodeError as error:
            raise EnvironmentBroken(f"{path}: is no TOML: {error}") from error
        except (OSError, UnicodeDecodeError) as error:
            raise EnvironmentBroken(
                f"{path} cannot be read: {error}", hint="libra help harbor says what a task has"
            ) from error

    def where(self, section: str, key: str = "") -> str:
        """Return ``file:line`` of a key, of its section where the key stands elsewhere, or file."""
        within, line = "", 0
        for number, text in enumerate(self._text.splitlines(), 1):
            if header := re.match(r"\s*\[+\s*([^\]]+?)\s*\]+", text):
                within = header[1]
                line = number if within == section else line
            elif within == section and key and re.match(rf"\s*{re.escape(key)}\s*[.=]", text):
                return f"{self.path}:{number}"
        return f"{self.path}:{line}" if line else str(self.path)

    def section(self, name: str) -> Mapping[str, Any]:
        """Return a table of the file; empty if it has none."""
        found = self.values.get(name, {})
        if not isinstance(found, dict):
            raise self.wrong("", name, f"is {found!r}, not a table [{name}]")
        return found

    def seconds(self, section: str, key: str, default: float | None) -> float | None:
        """Return a positive number of seconds."""
        found = self.section(section).get(key, default)
        if found is None:
            return None
        if isinstance(found, bool) or not isinstance(found, int | float) or found <= 0:
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

    def notes(self) -> Iterator[str]:
        """Yield what is left aside: keys that are not known, and those that do nothing here."""
        for section, known in _SECTIONS.items():
            for key in self.values if not section else self.section(section):
                where = self.where(section, key)
                if key in _ASIDE.get(section, ()):
                    yield f"{where}: {key} does nothing here"
                elif key not in known:
                    yield f"{where}: {key} is not known{did_you_mean(key, known)}"

    def wrong(self, section: str, key: str, reason: str) -> EnvironmentBroken:
        """Return the error that names the file, the line and the key."""
        dotted = f"{section}.{key}" if section else key
        return EnvironmentBroken(
            f"{self.where(section, key)}: {dotted}: {reason}", hint=f"edit {self.path}"
        )


def _instruction(directory: Path) -> str:
    path = directory / "instruction.md"
    try:
        return path.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return ""  # of a task in steps each step has one; see ``_refused``
    except (OSError, UnicodeDecodeError) as error:
        raise EnvironmentBroken(f"{path} cannot be read: {error}") from error


def _wants_internet(settings: Mapping[str, Any]) -> bool:
    # Harbor's default is a container with the internet, so only what is written is a wish.
    return settings.get("allow_internet") is True or settings.get("network_mode") == "public"


def _refused(found: _TaskFile, directory: Path) -> Iterator[Refusal]:
    settings = found.section("environment")
    for section, key, harmless, reason, hint in _WANTED:
        if (found.section(section) if section else found.values).get(key) not in harmless:
            yield Refusal(found.where(section, key), f"{key}: {reason}", hint)
    if settings.get("network_mode") == "allowlist" or settings.get("allowed_hosts"):
        yield Refusal(
            found.where("environment", "network_mode"),
            "network_mode: a sandbox has the whole network or none of it",
            "write network_mode = 'no-network', or play it with Harbor",
        )
    for name in ("docker-compose.yaml", "docker-compose.yml"):
        if (directory / "environment" / name).exists():
            yield Refusal(
                str(directory / "environment" / name),
                "it wants several containers, and a sandbox is one",
                _ELSEWHERE,
            )
    for needed in ("instruction.md", "tests/test.sh"):
        if not (directory / needed).is_file() and not found.values.get("steps"):
            yield Refusal(str(directory / needed), "is missing", "libra help harbor")


_NOTHING: tuple[Any, ...] = (None, False, 0, [], {})
_ELSEWHERE = "play it with Harbor and Docker (libra help agents)"
_WANTED: tuple[tuple[str, str, tuple[Any, ...], str, str], ...] = (
    ("environment", "gpus", _NOTHING, "a sandbox has no GPU", _ELSEWHERE),
    ("environment", "tpu", _NOTHING, "a sandbox has no TPU", _ELSEWHERE),
    ("environment", "os", (None, "linux"), "a sandbox runs Linux", _ELSEWHERE),
    ("environment", "mcp_servers", _NOTHING, "they are not started", "environment.mcp has them"),
    ("environment", "healthcheck", _NOTHING, "nothing is started to wait for", "leave it out"),
    ("verifier", "environment", _NOTHING, "tests run in the task's sandbox", _ELSEWHERE),
    (
        "verifier",
        "environment_mode",
        (None, "shared"),
        "tests run in the task's sandbox",
        _ELSEWHERE,
    ),
)
"""Section, key, values with which a task is played, and why it is not with others."""
