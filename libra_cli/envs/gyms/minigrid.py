"""The environment ``minigrid``: a grid world that the model sees, and walks by one word a turn.

A task is ``{"seed": int}``: the layout of the world, and where one stands in it. Each turn the
model is shown what the agent sees, as minigrid draws it for people, and answers with the name of an
action; the last such name in its answer counts. An answer without one is told so and costs a turn,
and the world does not move.

**The reward** is minigrid's own: 1 - 0.9 x (actions / those that the world allows) where the goal
is reached, else 0. The episode ends there, or where the world ends it. ``env/reached`` is whether
the goal was.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

from libra_cli.config.errors import EnvironmentBroken
from libra_cli.envs.gyms.packages import imported
from libra_cli.envs.png import png_of
from libra_cli.envs.protocol import Message, Reply, Task, ToolCall, ToolFailed, ToolSchema

INSTALL = "pip install 'libra-rl[minigrid]'"


class MiniGrid:
    """An episode of one world of minigrid.

    ``world`` is its name in gymnasium. ``actions`` are those that the model may take, by minigrid's
    names. ``tile`` is the width of a cell in pixels. ``whole`` shows the whole world in place of
    what the agent sees of it.

    Raises:
        EnvironmentBroken: minigrid is not installed, or has no such world or action.
    """

    tools: Sequence[ToolSchema] = ()

    def __init__(
        self,
        world: str = "MiniGrid-Empty-5x5-v0",
        actions: Sequence[str] = ("left", "right", "forward"),
        tile: int = 16,
        whole: bool = False,
    ) -> None:
        imported("minigrid", INSTALL)
        gymnasium: Any = imported("gymnasium", INSTALL)
        try:
            self._world: Any = gymnasium.make(world).unwrapped
        except gymnasium.error.Error as error:
            raise EnvironmentBroken(
                f"minigrid has no world {world!r}: {error}",
                hint="environment.args.world: for example MiniGrid-Empty-5x5-v0",
            ) from error
        known = {one.name: one for one in self._world.actions}
        unknown = [one for one in actions if one not in known]
        if unknown or not actions:
            raise EnvironmentBroken(
                f"minigrid has no action {', '.join(unknown) or 'without a name'}",
                hint=f"environment.args.actions: some of {', '.join(known)}",
            )
        self._actions = {name: known[name] for name in actions}
        self._words = re.compile(rf"\b({'|'.join(map(re.escape, actions))})\b", re.IGNORECASE)
        self._tile, self._whole = tile, whole
        self._reward = 0.0

    def task(self, index: int, seed: int) -> Task:
        """Return the seed of world ``index`` of the stream ``seed``."""
        return {"seed": random.Random(f"{seed} {index}").randrange(1 << 31)}

    def reset(self, task: Task, seed: int) -> list[Message]:
        """Lay the world out, and show it with what is to be done."""
        seen, _ = self._world.reset(seed=int(task["seed"]))
        return [self._shown(f"{seen['mission']}. Answer with one word of: {self._named}.")]

    def _shown(self, text: str) -> Message:
        frame = self._world.get_frame(
            highlight=self._whole, tile_size=self._tile, agent_pov=not self._whole
        )
        return {"role": "user", "content": text, "images": [png_of(frame)]}

    def step(self, call: ToolCall) -> str:
        """Refuse: there are no tools."""
        raise ToolFailed("there are no tools here; answer with one word")

    def reply(self, text: str) -> Reply | None:
        """Take the action that an answer names, and show what is seen then."""
        said = self._words.findall(text)
        if not said:
            return Reply([self._shown(f"No action. Answer with one word of: {self._named}.")])
        _, reward, ended, cut, _ = self._world.step(self._actions[said[-1].lower()])
        self._reward += float(reward)
        return None if ended or cut else Reply([self._shown(said[-1].lower())])

    @property
    def _named(self) -> str:
        return ", ".join(self._actions)

    def score(self, answer: str) -> float:
        """Return the reward of the world so far."""
        return self._reward

    def metrics(self) -> dict[str, float]:
        """Return ``reached``: 1 if the goal was."""
        return {"reached": float(self._reward > 0)}

    def close(self) -> None:
        """Close the world and its window."""
        self._world.close()
