"""Where a command finds its task: a directory of its own, and an environment of its own.

ROOT/JOB/task.json      the task, as ``LIBRA_TASK`` says
ROOT/JOB/work           the working directory and HOME, a copy of the recipe's ``directory``
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from libra_cli.config.frozen_models import variable_of
from libra_cli.envs.agents.command import CommandEnd, GroupCommand


@dataclass(frozen=True, slots=True)
class CommandJob:
    """What a command is told: its task, and the endpoint that answers for the model."""

    id: str
    """The name of the job's directory."""
    task: str
    """The task as JSON."""
    root_url: str
    api_key: str
    model: str
    models: Sequence[str] = ()
    """Names of the run's frozen models that it may ask there."""


@dataclass(frozen=True, slots=True)
class Workplace:
    """Starts commands in directories of their own, and removes these; its methods block."""

    command: Sequence[str]
    env: Mapping[str, str]
    """The recipe's variables, secrets included."""
    directory: Path | None
    """What a working directory begins with; None: nothing."""
    root: Path

    def missing(self) -> str:
        """Return the program's name if it cannot be found; empty if it is there."""
        return missing_program(self.command, self.directory)

    def begin(self, job: CommandJob) -> GroupCommand:
        """Make the directories and start the command.

        Raises:
            OSError: that cannot be done.
        """
        home = self.root / job.id
        work = home / "work"
        home.mkdir(parents=True, mode=0o700)
        (home / "task.json").write_text(job.task)
        if self.directory is None:
            work.mkdir()
        else:
            shutil.copytree(self.directory, work, symlinks=True)
        return GroupCommand(self.command, work, self._environment(job, home, work))

    def clear(self, job: CommandJob) -> None:
        """Remove the job's directory; a file that cannot be removed stays."""
        shutil.rmtree(self.root / job.id, ignore_errors=True)

    def clear_all(self) -> None:
        """Remove the directories of all jobs."""
        shutil.rmtree(self.root, ignore_errors=True)

    def _environment(self, job: CommandJob, home: Path, work: Path) -> dict[str, str]:
        return inherited() | told_variables(job, str(work), str(home / "task.json")) | {**self.env}


def told_variables(job: CommandJob, home: str, task_file: str) -> dict[str, str]:
    """Return the variables by which a command finds its task and the endpoint."""
    return {
        "HOME": home,
        "OPENAI_BASE_URL": f"{job.root_url}/v1",
        "OPENAI_API_BASE": f"{job.root_url}/v1",
        "OPENAI_API_KEY": job.api_key,
        "ANTHROPIC_BASE_URL": job.root_url,
        "ANTHROPIC_API_KEY": job.api_key,
        "LIBRA_MODEL": job.model,
        "LIBRA_TASK": task_file,
        "LIBRA_REWARD_URL": f"{job.root_url}/reward",
        **{variable_of(name): f"{job.root_url}/models/{name}/v1" for name in job.models},
    }


def missing_program(command: Sequence[str], directory: Path | str | None) -> str:
    """Return a command's program if it is neither on PATH nor in the directory; else nothing."""
    program = command[0]
    beside = Path(directory or "") / program
    return "" if shutil.which(program) or beside.is_file() else program


class StoppableJob:
    """One job from before its start to its end. ``run`` belongs to one thread, ``kill`` to all."""

    def __init__(self, workplace: Workplace, job: CommandJob) -> None:
        self._workplace = workplace
        self._job = job
        self._lock = threading.Lock()
        self._command: GroupCommand | None = None
        self._killed = False

    def run(self) -> CommandEnd:
        """Start it, wait for its end, and remove its directories.

        Raises:
            OSError: it cannot be started.
        """
        try:
            command = self._workplace.begin(self._job)
            with self._lock:
                self._command = command
                if self._killed:
                    command.kill()
            return command.run()
        finally:
            self._workplace.clear(self._job)

    def kill(self) -> None:
        """End it now, or as soon as it has begun."""
        with self._lock:
            self._killed = True
            if self._command is not None:
                self._command.kill()


def inherited() -> dict[str, str]:
    """Return what a command of others may see of this process's environment variables."""
    return {name: value for name, value in os.environ.items() if _may_see(name)}


def _may_see(name: str) -> bool:
    """The marks of a run are among it: by them a host finds what has escaped from its group."""
    marks = ("LIBRA_RUN", "LIBRA_NODE", "LIBRA_PROCESS")
    return name in ("PATH", "LANG", "TZ", "TERM", "TMPDIR", *marks) or name.startswith("LC_")
