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

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

from libra_cli.config.errors import EnvironmentBroken
from libra_cli.envs.harbor.task_toml import TaskToml

TASK_FILE = "task.toml"


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
    found = TaskToml.read(directory / TASK_FILE)
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
        wants_internet=_wants_internet(found),
        env=found.variables("environment"),
        verifier_env=found.variables("verifier"),
        solution_env=found.variables("solution"),
        notes=tuple(found.notes()),
        refused=tuple(_refused(found, directory)),
        only_final=_only_final(found),
    )
    steps = tuple(_steps(found, whole))
    return replace(
        whole,
        steps=steps,
        wants_internet=any(one.wants_internet for one in (whole, *steps)),
        notes=tuple(note for one in (whole, *steps) for note in one.notes),
        refused=tuple(why for one in (whole, *steps) for why in one.refused),
    )


def _only_final(found: TaskToml) -> bool:
    strategy = found.values.get("multi_step_reward_strategy", "mean")
    if strategy not in ("mean", "final"):
        reason = f"is {strategy!r}, neither mean nor final"
        raise found.wrong("", "multi_step_reward_strategy", reason)
    return bool(strategy == "final")


def _steps(found: TaskToml, whole: HarborTask) -> Iterator[HarborTask]:
    names: set[str] = set()
    for step in found.steps():
        name = step.values.get("name")
        if not isinstance(name, str) or not _is_in(whole.directory / "steps", name):
            raise step.wrong("", "name", f"{name!r} is no directory in steps/")
        if name in names:
            raise step.wrong("", "name", f"{name!r} is that of another step too")
        names.add(name)
        yield _step(step, whole, whole.directory / "steps" / name)


def _is_in(directory: Path, name: str) -> bool:
    return Path(name).name == name and (directory / name).is_dir()


def _step(found: TaskToml, whole: HarborTask, directory: Path) -> HarborTask:
    """Read a step; what it does not say is as in the whole task."""
    verifier_s = found.seconds("verifier", "timeout_sec", whole.verifier_timeout_s)
    return replace(
        whole,
        directory=directory,
        instruction=_instruction(directory),
        agent_timeout_s=found.seconds("agent", "timeout_sec", whole.agent_timeout_s),
        verifier_timeout_s=verifier_s or whole.verifier_timeout_s,
        verifier_env={**whole.verifier_env, **found.variables("verifier")},
        wants_internet=_wants_internet(found),
        notes=tuple(found.notes()),
        shared_tests=whole.tests if whole.tests.is_dir() else None,
        min_reward=found.rewards("min_reward"),
        refused=(*_missing(directory, whole), *_unplayable(found, _WANTED_OF_STEPS)),
    )


def _missing(directory: Path, whole: HarborTask) -> Iterator[Refusal]:
    """Yield the files that a step has neither itself nor of the whole task."""
    tested = any((tests / "test.sh").is_file() for tests in (directory / "tests", whole.tests))
    told = (directory / "instruction.md").is_file()
    for path, is_there in (("tests/test.sh", tested), ("instruction.md", told)):
        if not is_there:
            yield Refusal(str(directory / path), "is missing", "libra help harbor")


def _instruction(directory: Path) -> str:
    path = directory / "instruction.md"
    try:
        return path.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return ""  # of a task in steps each step has one; see ``_refused``
    except (OSError, UnicodeDecodeError) as error:
        raise EnvironmentBroken(f"{path} cannot be read: {error}") from error


def _wants_internet(found: TaskToml) -> bool:
    # Harbor's default is a container with the internet, so only what is written is a wish.
    sections = [found.section(name) for name in _WITH_NETWORK]
    public = any(section.get("network_mode") == "public" for section in sections)
    return public or found.section("environment").get("allow_internet") is True


def _refused(found: TaskToml, directory: Path) -> Iterator[Refusal]:
    yield from _unplayable(found, _WANTED)
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


def _unplayable(found: TaskToml, wanted: Sequence[_Wanted]) -> Iterator[Refusal]:
    """Yield what keys of a task or a step ask for that is not there."""
    for section, key, harmless, reason, hint in wanted:
        if found.section(section).get(key) not in harmless:
            yield Refusal(found.where(section, key), f"{key}: {reason}", hint)
    for section in _WITH_NETWORK:
        settings = found.section(section)
        if settings.get("network_mode") == "allowlist" or settings.get("allowed_hosts"):
            yield Refusal(
                found.where(section, "network_mode"),
                "network_mode: a sandbox has the whole network or none of it",
                "write network_mode = 'no-network', or play it with Harbor",
            )


_WITH_NETWORK = ("environment", "agent", "verifier")
"""The sections that may say which network there is."""
_NOTHING: tuple[Any, ...] = (None, False, 0, [], {})
_ELSEWHERE = "play it with Harbor and Docker (libra help agents)"
_INSIDE = "tests run in the task's sandbox"
_READY = "nothing is started to wait for"
_Wanted: TypeAlias = tuple[str, str, tuple[Any, ...], str, str]
"""Section, key, values with which a task is played, why it is not with others, and a hint."""
_WANTED_OF_VERIFIER: tuple[_Wanted, ...] = (
    ("verifier", "environment", _NOTHING, _INSIDE, _ELSEWHERE),
    ("verifier", "environment_mode", (None, "shared"), _INSIDE, _ELSEWHERE),
    ("verifier", "collect", _NOTHING, "nothing is run before the tests", "write it in test.sh"),
)
_WANTED: tuple[_Wanted, ...] = (
    ("environment", "gpus", _NOTHING, "a sandbox has no GPU", _ELSEWHERE),
    ("environment", "tpu", _NOTHING, "a sandbox has no TPU", _ELSEWHERE),
    ("environment", "os", (None, "linux"), "a sandbox runs Linux", _ELSEWHERE),
    ("environment", "mcp_servers", _NOTHING, "they are not started", "environment.mcp has them"),
    ("environment", "healthcheck", _NOTHING, _READY, "leave it out"),
    *_WANTED_OF_VERIFIER,
)
_WANTED_OF_STEPS: tuple[_Wanted, ...] = (
    ("", "healthcheck", _NOTHING, _READY, "leave it out"),
    *_WANTED_OF_VERIFIER,
)
