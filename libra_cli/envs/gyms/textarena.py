"""The environment ``textarena``: a game of TextArena, of which each player is a role.

A task is ``{"seed": int}``, from which the game draws all that it leaves to chance. Each player
reads what the game says to it and what the others do, in the game's own words, and answers in the
game's own form, which is mostly a move in brackets. An answer that is no move is told why, and may
be given again as often as the game allows (most: once); then the game ends.

**The reward** of a role is the game's own: in most games 1 for the winner, -1 for the others and 0
for a draw; -1 for whoever ends it by an answer that is no move. A game that a limit cuts gives 0.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from libra_cli.config.errors import EnvironmentBroken
from libra_cli.envs.gyms.packages import imported
from libra_cli.envs.protocol import Message, NextTurn, Task, ToolCall, ToolFailed, ToolSchema

INSTALL = "pip install 'libra-rl[textarena]'"

_DRAWING = threading.Lock()


class TextArena:
    """One game of TextArena.

    ``game`` is its id, as ``KuhnPoker-v0``, and ``players`` are how many play it.

    Raises:
        EnvironmentBroken: textarena is not installed, or has no such game.
    """

    tools: Sequence[ToolSchema] = ()

    def __init__(self, game: str = "KuhnPoker-v0", players: int = 2) -> None:
        textarena: Any = imported("textarena", INSTALL)
        known = imported("textarena.envs.registration", INSTALL).ENV_REGISTRY
        raw = f"{game.removesuffix('-raw')}-raw"  # without wrappers, which repeat what was read
        if raw not in known:
            raise EnvironmentBroken(
                f"textarena has no game {game!r}",
                hint="environment.args.game: for example KuhnPoker-v0, TicTacToe-v0 or "
                "SimpleNegotiation-v2",
            )
        self._game: Any = textarena.make(raw)
        self.roles = tuple(f"player_{n}" for n in range(players))
        self._numbers: object = None
        self._rewards: Mapping[str, float] = dict.fromkeys(self.roles, 0.0)

    def task(self, index: int, seed: int) -> Task:
        """Return the seed of game ``index`` of the stream ``seed``."""
        return {"seed": random.Random(f"{seed} {index}").randrange(1 << 31)}

    def reset(self, task: Task, seed: int) -> NextTurn:
        """Begin the game, and let the first player read its rules."""
        self._numbers = random.Random(int(task["seed"])).getstate()
        with self._drawn():
            self._game.reset(num_players=len(self.roles), seed=int(task["seed"]))
        return self._next()

    def step(self, call: ToolCall) -> str:
        """Refuse: there are no tools."""
        raise ToolFailed("there are no tools here; answer with a move")

    def reply(self, text: str) -> NextTurn:
        """Make the move that an answer is."""
        with self._drawn():
            done, _ = self._game.step(text)
        if not done:
            return self._next()
        rewards, _ = self._game.close()
        told = {self.roles[player]: float(reward) for player, reward in (rewards or {}).items()}
        self._rewards = {**self._rewards, **told}
        return NextTurn(done=True)

    def score(self, answer: str) -> Mapping[str, float]:
        """Return what the game gives each player; nothing before its end."""
        return self._rewards

    def _next(self) -> NextTurn:
        player, seen = self._game.get_observation()
        said: list[str] = []
        for who, text, _ in seen:
            line = str(text).strip() if who < 0 else f"[Player {who}] {str(text).strip()}"
            if who != player and line not in said[-1:]:  # its own moves are its own turns
                said.append(line)
        message: Message = {"role": "user", "content": "\n".join(said)}
        return NextTurn(self.roles[player], [message])

    @contextmanager
    def _drawn(self) -> Iterator[None]:
        """Let the game draw the random numbers of this episode: it uses those of all threads."""
        with _DRAWING:
            others = random.getstate()
            random.setstate(self._numbers)  # type: ignore[arg-type]
            try:
                yield
            finally:
                self._numbers = random.getstate()
                random.setstate(others)
