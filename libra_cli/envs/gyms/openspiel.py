"""The environment ``openspiel``: a game of OpenSpiel, of which each player is a role.

A task is ``{"seed": int}``. What chance decides (cards, dice) is drawn from it, so the members of a
group are dealt the same. Games in which players move at once are played in turns, as OpenSpiel
converts them: nobody sees a move before all have moved.

A player is shown what it observes and its legal actions by name, and answers with one: an answer
that is none of them takes the last that it names. An answer that names none is told so, and may be
given again ``retries`` times; then the episode ends with the least that the game pays for that
player, and 0 for the others.

**The reward** of a role is the game's return for that player.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from libra_cli.config.errors import EnvironmentBroken
from libra_cli.envs.gyms.packages import imported
from libra_cli.envs.protocol import (
    Finished,
    Message,
    NextTurn,
    Reply,
    Task,
    ToolCall,
    ToolFailed,
    ToolSchema,
)

INSTALL = "pip install 'libra-rl[openspiel]'"
INSTRUCTIONS = "You are player {player} of {game}. Answer with one of the actions.\n\n"


class OpenSpiel:
    """One game of OpenSpiel.

    ``game`` is its name, with parameters if it has any: ``leduc_poker(players=3)``. ``state`` is
    what a player is shown: its observation, or its information state, which has all that it ever
    observed. ``instructions`` come before what a player is shown first, with its number for
    ``{player}`` and the game's name for ``{game}``.

    Raises:
        EnvironmentBroken: open_spiel is not installed, there is no such game, or the game does not
            say what players see.
    """

    tools: Sequence[ToolSchema] = ()

    def __init__(
        self,
        game: str = "kuhn_poker",
        state: Literal["observation", "information"] = "observation",
        instructions: str = INSTRUCTIONS,
        retries: int = 0,
    ) -> None:
        pyspiel: Any = imported("pyspiel", INSTALL)
        try:
            self._game: Any = pyspiel.load_game_as_turn_based(game)
        except pyspiel.SpielError as error:
            raise EnvironmentBroken(
                f"openspiel has no game {game!r}: {str(error).partition('. ')[0]}",
                hint="environment.args.game: for example kuhn_poker, tic_tac_toe or leduc_poker",
            ) from error
        kind = self._game.get_type()
        shown = {
            "observation": kind.provides_observation_string,
            "information": kind.provides_information_state_string,
        }
        if not shown.get(state, False):
            can = [name for name, known in shown.items() if known]
            raise EnvironmentBroken(
                f"openspiel's {game} cannot show a player its {state}",
                hint=f"environment.args.state: {' or '.join(can) or 'none; take another game'}",
            )
        self.roles = tuple(f"player_{n}" for n in range(self._game.num_players()))
        self._name, self._shows, self._instructions = game, state, instructions
        self._retries = retries
        self._at: Any = None
        self._chance = random.Random()
        self._begun: set[int] = set()
        self._refused = 0
        self._rewards: Mapping[str, float] | None = None

    def task(self, index: int, seed: int) -> Task:
        """Return the seed of what chance decides in game ``index`` of the stream ``seed``."""
        return {"seed": random.Random(f"{seed} {index}").randrange(1 << 31)}

    def reset(self, task: Task, seed: int) -> NextTurn:
        """Deal, and let the first player see."""
        self._chance.seed(int(task["seed"]))
        self._at, self._rewards, self._refused = self._game.new_initial_state(), None, 0
        self._begun.clear()
        return self._next()

    def step(self, call: ToolCall) -> str:
        """Refuse: there are no tools."""
        raise ToolFailed("there are no tools here; answer with an action")

    def reply(self, text: str) -> NextTurn | Reply:
        """Take the action that an answer names."""
        names = self.actions()
        action = named(text, names)
        if action is None:
            return self._refuse(names)
        self._refused = 0
        self._at.apply_action(names[action])
        return self._next()

    def score(self, answer: str) -> Mapping[str, float]:
        """Return what the game pays each player, as far as it has been played."""
        if self._rewards is not None:
            return self._rewards
        return dict(zip(self.roles, self._at.returns(), strict=True))

    def actions(self) -> dict[str, int]:
        """Return the legal actions of the player to move, by name."""
        player = self._at.current_player()
        return {self._at.action_to_string(player, one): one for one in self._at.legal_actions()}

    def _next(self) -> NextTurn:
        """Let chance decide, and the next player see."""
        while self._at.is_chance_node():
            outcomes, weights = zip(*self._at.chance_outcomes(), strict=True)
            self._at.apply_action(self._chance.choices(outcomes, weights)[0])
        if self._at.is_terminal():
            return NextTurn(done=True)
        player = self._at.current_player()
        first = "" if player in self._begun else self._instructions
        self._begun.add(player)
        said = first.format(player=player, game=self._name)
        return NextTurn(self.roles[player], [_user(f"{said}{self._seen(player)}{self._choice()}")])

    def _seen(self, player: int) -> str:
        if self._shows == "observation":
            seen = self._at.observation_string(player)
        else:
            seen = self._at.information_state_string(player)
        return f"{str(seen).rstrip()}\n"

    def _choice(self) -> str:
        return f"Actions: {', '.join(self.actions())}"

    def _refuse(self, names: Mapping[str, int]) -> Reply:
        """Tell that an answer is no action, or end the game over it."""
        self._refused += 1
        if self._refused <= self._retries:
            return Reply([_user(f"That is no action.\n{self._choice()}")])
        lost = self.roles[self._at.current_player()]
        self._rewards = dict.fromkeys(self.roles, 0.0) | {lost: self._game.min_utility()}
        raise Finished(f"That is no action; they were {', '.join(names)}.")


def named(text: str, names: Mapping[str, int]) -> str | None:
    """Return the name that an answer is or, whatever else it says, names last; None if none.

    Case counts where two names differ by that alone, as a pawn's bxc3 and a bishop's Bxc3 in chess.
    """
    if text.strip() in names:
        return text.strip()
    known = {name.casefold(): name for name in names}
    said = text.strip().casefold()
    if said in known:
        return known[said]
    longest = sorted(known, key=len, reverse=True)
    any_name = "|".join(map(re.escape, longest))
    found = re.findall(rf"(?<!\w)(?:{any_name})(?!\w)", text, re.IGNORECASE)
    if not found:
        return None
    return found[-1] if found[-1] in names else known.get(found[-1].casefold())


def _user(text: str) -> Message:
    return {"role": "user", "content": text}
