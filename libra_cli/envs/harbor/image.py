"""Reads of a Dockerfile what its image is: a base, and steps that are taken in a sandbox.

    FROM                       one stage, of a base that the recipe names
    ENV ARG WORKDIR USER SHELL what later steps, the agent and the tests see
    COPY ADD                   of files beside the Dockerfile, and of here-documents
    RUN                        in the shell form, as a list, or as here-documents
    CMD LABEL EXPOSE VOLUME MAINTAINER STOPSIGNAL HEALTHCHECK
                               mean nothing to a sandbox, and are left aside

Everything else changes what the image is, and is refused with its line.
"""

from __future__ import annotations

import hashlib
import json
import posixpath
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from libra_cli.config.errors import EnvironmentBroken
from libra_cli.envs.harbor.dockerfile import Instruction, instructions, substituted, words

_ASIDE = frozenset(["CMD", "EXPOSE", "HEALTHCHECK", "LABEL", "MAINTAINER", "STOPSIGNAL", "VOLUME"])
_CACHES = re.compile(r"type=(cache|tmpfs)\b")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class CopyStep:
    """Files of the task, or of here-documents, that are put into the image."""

    where: str
    sources: tuple[Path, ...]
    documents: tuple[tuple[str, str], ...]
    """Names and texts of here-documents."""
    target: str
    """An absolute path; with a slash at its end it is a directory."""
    mode: int | None
    """The permissions of ``--chmod``; None: those of the sources."""


@dataclass(frozen=True, slots=True)
class RunStep:
    """A command that is run in the image."""

    where: str
    command: tuple[str, ...]
    cwd: str
    env: Mapping[str, str]

    @property
    def shown(self) -> str:
        """Return the command's last word, which is its script, on one line."""
        return " ".join(self.command[-1].split())


@dataclass(frozen=True, slots=True)
class Image:
    """What a sandbox begins with."""

    where: str
    """The path of the Dockerfile."""
    base: str
    """The name after FROM."""
    steps: tuple[CopyStep | RunStep, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    workdir: str = "/"
    directories: tuple[str, ...] = ()
    """Every WORKDIR, which is made where it is not there."""

    @property
    def digest(self) -> str:
        """Return 32 hexadecimal digits that differ when anything of the image does."""
        found = hashlib.sha256(json.dumps([self.base, self.workdir, self.directories]).encode())
        for step in self.steps:
            if isinstance(step, RunStep):
                ran = [step.command, step.cwd, sorted(step.env.items())]
                found.update(json.dumps(ran).encode())
                continue
            copied = [step.documents, step.target, step.mode]
            found.update(json.dumps(copied).encode())
            for source in step.sources:
                _add_files(found, source)
        return found.hexdigest()[:32]


def read_image(environment: Path) -> Image:
    """Read the Dockerfile of a task's ``environment`` directory, which is also what COPY sees.

    Raises:
        EnvironmentBroken: it cannot be read, or has an instruction that cannot be played.
    """
    stage = _Stage(environment)
    for one in instructions(environment / "Dockerfile"):
        stage.take(one)
    if stage.base is None:
        raise EnvironmentBroken(f"{environment / 'Dockerfile'}: has no FROM")
    return Image(
        str(environment / "Dockerfile"),
        stage.base,
        tuple(stage.steps),
        dict(stage.env),
        stage.workdir,
        tuple(stage.directories),
    )


class _Stage:
    """An image as far as its Dockerfile has been read."""

    def __init__(self, context: Path) -> None:
        self._context = context.resolve()
        self._args: dict[str, str] = {}
        self._shell: tuple[str, ...] = ("/bin/sh", "-c")
        self.base: str | None = None
        self.env: dict[str, str] = {}
        self.workdir = "/"
        self.directories: list[str] = []
        self.steps: list[CopyStep | RunStep] = []

    def take(self, one: Instruction) -> None:
        """Read the next instruction."""
        if one.keyword in _ASIDE:
            return
        if (read := _READ.get(one.keyword)) is None:
            raise one.refused(_REFUSED.get(one.keyword, "this instruction is not known"))
        if self.base is None and one.keyword not in ("ARG", "FROM"):
            raise one.refused("stands before FROM")
        read(self, one)

    @property
    def _variables(self) -> dict[str, str]:
        return {**self._args, **self.env}

    def read_from(self, one: Instruction) -> None:
        if self.base is not None:
            raise one.refused("a second stage is not built", "unpack the image; give it as a base")
        name = substituted(one.text, self._variables).split()
        if not name or len(name) not in (1, 3):
            raise one.refused("it is not FROM IMAGE, or FROM IMAGE AS NAME")
        self.base, self._args = name[0], {}

    def read_arg(self, one: Instruction) -> None:
        for word in words(one.text):
            name, _, value = word.partition("=")
            self._args[name] = substituted(value, self._variables)

    def read_env(self, one: Instruction) -> None:
        before = self._variables
        if not (pairs := [_ASSIGNMENT.fullmatch(word) for word in words(one.text)])[:1]:
            raise one.refused("it is not ENV NAME=VALUE")
        if pairs[0] is None:  # the older ENV NAME VALUE
            name, _, value = one.text.partition(" ")
            self.env[name] = substituted(value.strip(), before)
            return
        for pair in pairs:
            if pair is None:
                raise one.refused("it is not ENV NAME=VALUE")
            self.env[pair[1]] = substituted(pair[2], before)

    def read_workdir(self, one: Instruction) -> None:
        self.workdir = self._inside(" ".join(words(substituted(one.text, self._variables))))
        self.directories.append(self.workdir)

    def read_shell(self, one: Instruction) -> None:
        if not (form := one.json_form):
            raise one.refused('it is not SHELL ["program", "argument"]')
        self._shell = tuple(form)

    def read_user(self, one: Instruction) -> None:
        """Take it for read: a sandbox has one user, who may do in it what root may."""

    def read_run(self, one: Instruction) -> None:
        for flag, value in one.flags.items():
            if flag != "mount" or not _CACHES.match(value):
                raise one.refused(f"--{flag} is not played")
        env = self._variables
        if one.heredocs:
            for document in self._scripts(one):
                self.steps.append(RunStep(one.where, (*self._shell, document), self.workdir, env))
            return
        command = tuple(one.json_form or (*self._shell, one.text))
        self.steps.append(RunStep(one.where, command, self.workdir, env))

    def _scripts(self, one: Instruction) -> Iterator[str]:
        if len(one.heredocs) == 1 and not re.fullmatch(r"<<-?['\"]?\w+['\"]?", one.text):
            document = one.heredocs[0]  # such as: cat <<EOF > file
            yield f"{one.text}\n{document.text}{document.name}\n"
            return
        yield from (document.text for document in one.heredocs)

    def read_copy(self, one: Instruction) -> None:
        for flag in one.flags:
            if flag not in ("chmod", "chown", "link"):
                raise one.refused(f"--{flag} is not played", "copy it into environment/ instead")
        given = one.json_form or words(substituted(one.text, self._variables))
        sources, target = given[:-1], given[-1] if given else ""
        if not sources:
            raise one.refused("it has no source or no target")
        files = [name for name in sources if not name.startswith("<<")]
        if any("://" in name or name.startswith("git@") for name in files):
            raise one.refused("nothing is fetched", "put the file into environment/ and COPY it")
        found = tuple(path for name in files for path in self._found(one, name))
        documents = tuple(
            (d.name, d.text if d.verbatim else substituted(d.text, self._variables))
            for d in one.heredocs
        )
        place = self._inside(target) + "/" * (target.endswith(("/", ".")) or len(given) > 2)
        self.steps.append(CopyStep(one.where, found, documents, place, _mode(one)))

    def read_add(self, one: Instruction) -> None:
        if re.search(r"\.(tar|tar\.\w+|tgz|tbz2?|txz)(\s|$)", one.text):
            raise one.refused("archives are not unpacked", "unpack it into environment/ and COPY")
        self.read_copy(one)

    def _found(self, one: Instruction, name: str) -> Sequence[Path]:
        """The files of the task that a source stands for; a directory stands for what is in it."""
        relative = posixpath.normpath(name.lstrip("/") or ".")
        found = sorted(self._context.glob(relative)) if relative != "." else [self._context]
        inside = [path for path in found if path.resolve().is_relative_to(self._context)]
        if not inside:
            raise one.refused(f"{name} is not in {self._context}", "add the file, or mend the line")
        if (self._context / ".dockerignore").exists() and any(path.is_dir() for path in inside):
            raise one.refused(
                ".dockerignore is not read, and might keep files of the directory out",
                "remove .dockerignore, with the files that it names",
            )
        return inside

    def _inside(self, path: str) -> str:
        return posixpath.normpath(posixpath.join(self.workdir, path))


_READ: Mapping[str, Callable[[_Stage, Instruction], None]] = {
    "ADD": _Stage.read_add,
    "ARG": _Stage.read_arg,
    "COPY": _Stage.read_copy,
    "ENV": _Stage.read_env,
    "FROM": _Stage.read_from,
    "RUN": _Stage.read_run,
    "SHELL": _Stage.read_shell,
    "USER": _Stage.read_user,
    "WORKDIR": _Stage.read_workdir,
}
_REFUSED = {
    "ENTRYPOINT": "no program is started in a sandbox; a RUN step or tests/test.sh can do it",
    "ONBUILD": "no other image is built upon this one",
}


def _mode(one: Instruction) -> int | None:
    if not (given := one.flags.get("chmod")):
        return None
    try:
        return int(given, 8)
    except ValueError:
        raise one.refused(f"--chmod={given} is not an octal number") from None


def _add_files(found: hashlib._Hash, source: Path) -> None:
    for path in [source, *sorted(source.rglob("*"))] if source.is_dir() else [source]:
        kind = path.lstat().st_mode
        name = path.relative_to(source.parent).as_posix()
        found.update(json.dumps([name, kind]).encode())
        if path.is_symlink():
            found.update(str(path.readlink()).encode())
        elif path.is_file():
            found.update(hashlib.sha256(path.read_bytes()).digest())
