"""Tools that work in a sandbox: a shell that stays, Python, and an editor of text files.

tools = SandboxTools(sandbox)
tools.schemas          what a model is shown
tools.step(call)       what it reads; ToolFailed is raised where it has to do better
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from libra_cli.envs.protocol import ToolCall, ToolFailed, ToolSchema, function
from libra_cli.envs.sandbox.sandbox import Completed, Sandbox, Shell

_TEXT = {"type": "string"}
BASH = function(
    "bash",
    "Run a command in a shell that stays: directory and variables are kept from call to call.",
    {"command": {"type": "string", "description": "For example: ls -l && cat notes.txt"}},
)
PYTHON = function(
    "python",
    "Run a program in a fresh Python and return what it prints; files stay.",
    {"code": {"type": "string", "description": "The program"}},
)
EDITOR = function(
    "editor",
    "View a text file with line numbers, create one, or replace a text that occurs once in it.",
    {
        "command": {"type": "string", "enum": ["view", "create", "str_replace"]},
        "path": _TEXT,
        "text": {"type": "string", "description": "Of create: what the file shall be"},
        "old": {"type": "string", "description": "Of str_replace: what occurs once"},
        "new": {"type": "string", "description": "Of str_replace: what it becomes"},
        "first": {"type": "integer", "description": "Of view: the first line"},
        "last": {"type": "integer", "description": "Of view: the last line"},
    },
    required=["command", "path"],
)
SCHEMAS = {"bash": BASH, "python": PYTHON, "editor": EDITOR}
"""The schemas of all tools by name."""
PYTHONS = ("python3", "python")
_VIEW_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ToolText:
    """How much of a command or a file a model reads."""

    most: int = 8_000
    """Characters; of what is longer, the first half and the last."""

    def of(self, text: str) -> str:
        """Return a text that is no longer than that, but for a line which says so."""
        if len(text) <= self.most:
            return text
        half = self.most // 2
        left_out = len(text) - 2 * half
        return f"{text[:half]}\n[... {left_out:,} characters left out ...]\n{text[-half:]}"


class SandboxTools:
    """What a model is offered to work in a sandbox with."""

    def __init__(
        self,
        sandbox: Sandbox,
        names: Sequence[str] = ("bash", "editor"),
        *,
        text: ToolText | None = None,
        timeout_s: float | None = None,
        shell: Shell | None = None,
    ) -> None:
        """Offer tools by their names; each command has ``timeout_s`` seconds, or the sandbox's."""
        self._sandbox = sandbox
        self._text = text or ToolText()
        self._timeout_s = timeout_s
        self._shell = shell or sandbox.shell()
        all_tools: dict[str, tuple[ToolSchema, Callable[[Mapping[str, Any]], str]]] = {
            "bash": (BASH, self._bash),
            "python": (PYTHON, self._python),
            "editor": (EDITOR, self._edit),
        }
        self._tools = {name: all_tools[name] for name in names}

    @property
    def schemas(self) -> list[ToolSchema]:
        """The schemas that a model is shown."""
        return [schema for schema, _ in self._tools.values()]

    def step(self, call: ToolCall) -> str:
        """Do what a model asks for, and return what it reads.

        Raises:
            ToolFailed: the model should read the message instead.
            SandboxBroken: the sandbox can do no more.
        """
        if call.name not in self._tools:
            raise ToolFailed(f"no tool {call.name!r}, only {', '.join(self._tools)}")
        return self._text.of(self._tools[call.name][1](call.arguments))

    def _bash(self, arguments: Mapping[str, Any]) -> str:
        command = _without_nul(arguments["command"])
        try:
            return told(self._shell.run(command, timeout_s=self._timeout_s))
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):  # of this process, and nobody's command
                raise
            raise ToolFailed(f"no shell can be started: {error.strerror}") from error

    def _python(self, arguments: Mapping[str, Any]) -> str:
        code = str(arguments["code"]).encode(errors="replace")
        for program in PYTHONS:
            done = self._sandbox.run([program, "-"], stdin=code, timeout_s=self._timeout_s)
            if done.code != 127 or not done.stderr.startswith(f"{program}:"):
                return told(done)
        raise ToolFailed("there is no Python in this sandbox")

    def _edit(self, arguments: Mapping[str, Any]) -> str:
        path = _without_nul(arguments["path"])
        commands = {"view": self._view, "create": self._create, "str_replace": self._replace}
        wanted = str(arguments["command"])
        if wanted not in commands:
            raise ToolFailed(f"no command {wanted!r}, only {', '.join(commands)}")
        try:
            return commands[wanted](path, arguments)
        except OSError as error:
            raise ToolFailed(f"{path}: {error.strerror}") from error

    def _view(self, path: str, arguments: Mapping[str, Any]) -> str:
        lines = self._content(path).splitlines()
        first = max(1, int(arguments.get("first") or 1))
        last = min(len(lines), int(arguments.get("last") or len(lines)))
        return "\n".join(f"{n:6}  {lines[n - 1]}" for n in range(first, last + 1)) or "(empty)"

    def _create(self, path: str, arguments: Mapping[str, Any]) -> str:
        text = str(arguments.get("text") or "")
        self._sandbox.write(path, text.encode(errors="replace"))
        return f"{path}: {len(text.splitlines())} lines written"

    def _replace(self, path: str, arguments: Mapping[str, Any]) -> str:
        old, new = str(arguments.get("old") or ""), str(arguments.get("new") or "")
        content = self._content(path)
        found = content.count(old) if old else 0
        if found != 1:
            raise ToolFailed(f"{path}: old must occur once, and occurs {found} times")
        self._sandbox.write(path, content.replace(old, new).encode(errors="replace"))
        return f"{path}: replaced in line {content[: content.index(old)].count(chr(10)) + 1}"

    def _content(self, path: str) -> str:
        data = self._sandbox.read(path, _VIEW_BYTES + 1)
        if len(data) > _VIEW_BYTES:
            raise ToolFailed(f"{path}: it is over {_VIEW_BYTES:,} bytes, too large for the editor")
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise ToolFailed(f"{path}: it is no text in UTF-8") from error


def told(done: Completed) -> str:
    """Return what a command has written, and how it ended where that was not as it should."""
    written = done.stdout + done.stderr
    ends = ["its time was over, and it was ended"] if done.timed_out else []
    ends += [f"exit code {done.code}"] if done.code and not done.timed_out else []
    ends += [done.note] if done.note else []
    if ends:
        separator = "" if not written or written.endswith("\n") else "\n"
        written += f"{separator}[{'; '.join(ends)}]"
    return written or "(no output)"


def _without_nul(value: object) -> str:
    text = str(value)
    if "\x00" in text:
        raise ToolFailed("a NUL character cannot be in a command or a path")
    return text
