"""The environment ``textworld``: text adventures made to measure, played by one tool, ``command``.

A task is ``{"seed": int}``, and may have any of ``rooms``, ``objects`` and ``quest_length``, which
are the horizon and the difficulty. The same task is the same game. To make one takes some seconds
(Inform 7 compiles it), so it is kept in ``games`` and made once, by whichever episode needs it
first; raise ``environment.tool_timeout_s``, in which the first must be made.

**The reward** is the game's score as a share of its highest: with one quest 1 if it is won, else 0.
The game ends when it is won. An answer without a command ends it as well.

``save``, ``restart`` and other commands to the interpreter are refused, and a command is one line.
"""

from __future__ import annotations

import fcntl
import os
import random
import re
import tempfile
import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from libra_cli.config.errors import EnvironmentBroken
from libra_cli.envs.gyms.packages import imported
from libra_cli.envs.protocol import (
    Message,
    StepResult,
    Task,
    ToolCall,
    ToolFailed,
    ToolSchema,
    function,
)

INSTALL = "pip install 'libra-rl[textworld]' && pip install --no-deps textworld jericho"
INSTRUCTIONS = (
    "You play a text adventure. Give one command at a time, such as `look`, `inventory`, "
    "`go east`, `open chest`, `take key from chest`, `unlock door with key` or `put cup on table`."
)
COMMAND = function(
    "command",
    "Give the game one command and read what happens.",
    {"text": {"type": "string", "description": "For example: take key from chest"}},
)
LONGEST_COMMAND = 200
"""Characters; the interpreter reads lines of about so many."""

_REFUSED = frozenset(
    ("save", "restore", "restart", "quit", "q", "script", "transcrip", "undo", "verify", "oops")
)
_READ = 9
"""Characters of a word that the interpreter reads."""
_BETWEEN = re.compile(r"[^\w\s-]|\bthen\b")
_FIRST = re.compile(r"[\w-]+")
_PROMPT = re.compile(r"\n\s*>[^\n]*\s*\Z|\n *-= .* =-\d+/\d+\s*\Z")
_BLANK = re.compile(r"\n\s*\n\s*")
_LOCKS = 64
_MAKING = threading.Lock()


class TextWorld:
    """The environment of one TextWorld game.

    ``rooms``, ``objects`` and ``quest_length`` (commands that a quest takes at least) are those of
    ``task``. ``all_steps`` tells every step of the quest at the start, in place of its last only.
    ``games`` is the directory in which games are kept.

    Raises:
        EnvironmentBroken: textworld is not installed, or a number is not positive.
    """

    def __init__(
        self,
        rooms: int = 3,
        objects: int = 5,
        quest_length: int = 3,
        all_steps: bool = True,
        games: str = "~/.libra/textworld",
    ) -> None:
        imported("textworld", INSTALL)
        self._options = {"rooms": rooms, "objects": objects, "quest_length": quest_length}
        if min(self._options.values()) < 1:
            raise EnvironmentBroken(
                f"textworld: rooms, objects and quest_length are at least 1, not {self._options}"
            )
        self._all_steps = all_steps
        self._directory = Path(games).expanduser()
        self._play: Any = None
        self._state: Mapping[str, Any] = {}

    @property
    def tools(self) -> Sequence[ToolSchema]:
        return (COMMAND,)

    def task(self, index: int, seed: int) -> Task:
        """Return the options of game ``index`` of the stream ``seed``, and a seed of its own."""
        return {"seed": random.Random(f"{seed} {index}").randrange(1 << 31), **self._options}

    def reset(self, task: Task, seed: int) -> list[Message]:
        """Make the game if need be, and begin with its goal and its first room."""
        textworld = imported("textworld", INSTALL)
        wanted = {"seed": 0, **self._options, **task}
        numbers = [int(wanted[name]) for name in ("seed", "rooms", "objects", "quest_length")]
        file = _game(self._directory, *numbers, all_steps=self._all_steps)
        infos = textworld.EnvInfos(description=True, objective=True, score=True, max_score=True)
        self._play = textworld.start(str(file), infos)
        self._play.seed(numbers[0])
        self._state = self._play.reset()
        goal, room = self._state["objective"].strip(), _readable(self._state["description"])
        return [{"role": "user", "content": f"{INSTRUCTIONS}\n\n{goal}\n\n{room}"}]

    def step(self, call: ToolCall) -> StepResult:
        """Give the game a command; ToolFailed if it is empty, too long or not for the game."""
        text = " ".join(str(call.arguments.get("text", "")).split())
        if not text or len(text) > LONGEST_COMMAND:
            raise ToolFailed(f"a command has 1 to {LONGEST_COMMAND} characters")
        if not is_for_game(text):
            raise ToolFailed(f"{text!r} is not a command of the game")
        self._state, _, done = self._play.step(text)
        return StepResult(_readable(self._state["feedback"]), done=bool(done))

    def score(self, answer: str) -> float:
        """Return the share of the highest score that was reached."""
        return float(self._state["score"] or 0) / float(self._state["max_score"])

    def close(self) -> None:
        if self._play is not None:
            self._play.close()


def is_for_game(text: str) -> bool:
    """Say whether each of the commands in a line, which may be several, is one of the game."""
    firsts = [_FIRST.search(part) for part in _BETWEEN.split(text.lower())]
    words = [first[0] for first in firsts if first]
    return not any(word[:_READ] in _REFUSED or word.startswith("tw-") for word in words)


def walkthrough(file: Path) -> Sequence[str]:
    """Return the commands that win the game in ``file``, in order."""
    game = imported("textworld", INSTALL).Game.load(str(file.with_suffix(".json")))
    return tuple(game.metadata["walkthrough"])


def _game(
    directory: Path, seed: int, rooms: int, objects: int, quest_length: int, *, all_steps: bool
) -> Path:
    """Return the file of a game, which is made if it does not exist."""
    version = imported("textworld", INSTALL).__version__
    steps = "all" if all_steps else "last"
    file = directory / f"{version}-{seed}-{rooms}-{objects}-{quest_length}-{steps}.z8"
    with _alone(file):
        if not file.exists():
            _make(file, seed, rooms, objects, quest_length, all_steps=all_steps)
    return file


def _make(
    file: Path, seed: int, rooms: int, objects: int, quest_length: int, *, all_steps: bool
) -> None:
    generator = imported("textworld.generator", INSTALL)
    options = imported("textworld", INSTALL).GameOptions()
    options.seeds = seed
    options.nb_rooms, options.nb_objects, options.quest_length = rooms, objects, quest_length
    options.grammar.only_last_action = not all_steps
    with tempfile.TemporaryDirectory(dir=file.parent) as directory:
        options.path = str(Path(directory) / file.name)
        with _MAKING:  # what games are made of is shared
            game = generator.make_game(options)
        compiled = Path(generator.compile_game(game, options))
        # The game last: another process that sees it must find what belongs to it.
        for suffix in (".json", ".z8"):
            os.replace(compiled.with_suffix(suffix), file.with_suffix(suffix))


@contextmanager
def _alone(file: Path) -> Iterator[None]:
    """Keep other threads and processes from making the same game."""
    file.parent.mkdir(parents=True, exist_ok=True)
    name = f".{zlib.crc32(file.name.encode()) % _LOCKS}.lock"
    with (file.parent / name).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until it is closed
        yield


def _readable(text: str) -> str:
    """Return what the game says without its prompt, its status line and runs of empty lines."""
    return _BLANK.sub("\n\n", _PROMPT.sub("", _PROMPT.sub("", text))).strip()
