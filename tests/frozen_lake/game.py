"""The environment: the game's own texts and rules, one move in brackets a turn."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any, TypeAlias

from libra_cli.envs.gyms.packages import imported
from libra_cli.envs.protocol import Message, Reply, Task, ToolCall, ToolFailed, ToolSchema

Place: TypeAlias = tuple[int, int]

_DRAWING = threading.Lock()


class FrozenLake:
    """One game on a board of ``size`` squared cells with so many ``holes``.

    The reward is 1 for the goal, else 0. With ``progress`` it is the game's own: the share of the
    way that was made, which ``turn_rewards`` gives at the turns that made it.
    """

    tools: Sequence[ToolSchema] = ()

    def __init__(
        self, size: int = 4, holes: int = 5, *, progress: bool = False, turn_rewards: bool = False
    ) -> None:
        game = imported("textarena.envs.FrozenLake.env", "pip install textarena")
        self._game: Any = game.FrozenLakeEnv(size=size, num_holes=holes)
        self._progress, self._turn_rewards = progress, turn_rewards
        self._final = self._given = 0.0

    def task(self, index: int, seed: int) -> Task:
        """Name board ``index`` of the stream ``seed``."""
        return {"seed": random.Random(f"{seed} {index}").randrange(1 << 31)}

    def reset(self, task: Task, seed: int) -> list[Message]:
        """Draw the board; the game does so with the random numbers that all threads share."""
        with _DRAWING:
            before = random.getstate()
            random.seed(task["seed"])
            self._game.reset(num_players=1, seed=task["seed"])
            random.setstate(before)
        return [self._said()]

    def step(self, call: ToolCall) -> str:
        """Refuse: there are no tools."""
        raise ToolFailed(f"no tool {call.name!r}")

    def reply(self, text: str) -> Reply:
        """Make the move and show the board."""
        done, _ = self._game.step(text)
        said = self._said()
        if done:
            rewards, _ = self._game.close()
            self._final = float(rewards[0])
            return Reply([], done=True)
        before = self._given
        self._given = self._made() if self._turn_rewards else 0.0
        return Reply([said], self._given - before)

    def score(self, answer: str) -> float:
        """What the game gives at its end, less what was given on the way; 0 in all if cut."""
        return self._final - self._given if self._progress else float(self._final >= 1.0)

    def best_moves(self) -> list[str]:
        """The moves that are on a shortest way to the goal."""
        steps = self._steps_to_goal()
        row, column = self._place
        return [
            name
            for name, (down, right) in self._game.actions.items()
            if steps.get((row + down, column + right)) == steps[row, column] - 1
        ]

    @property
    def won(self) -> bool:
        """Whether the goal was reached."""
        return self._final >= 1.0

    @property
    def _place(self) -> Place:
        place: Place = self._game.state.game_state["player_pos"]
        return place

    def _said(self) -> Message:
        _, seen = self._game.get_observation()
        return {"role": "user", "content": "\n".join(text for who, text, _ in seen if who < 0)}

    def _made(self) -> float:
        """The share of the way that is made; the game gives a tenth to whoever has moved."""
        moved = self._place != self._game.player_pos
        return float(self._game._get_percentage_completion()) if moved else 0.0

    def _steps_to_goal(self) -> dict[Place, int]:
        steps = {self._game.goal_pos: 0}
        ahead = deque(steps)
        while ahead:
            row, column = here = ahead.popleft()
            for down, right in self._game.actions.values():
                there = (row + down, column + right)
                if there not in steps and self._is_ice(there):
                    steps[there] = steps[here] + 1
                    ahead.append(there)
        return steps

    def _is_ice(self, place: Place) -> bool:
        row, column = place
        size = self._game.size
        inside = 0 <= row < size and 0 <= column < size
        return inside and str(self._game.state.game_state["grid"][row][column]) != "H"
