"""How far a model's Kuhn poker is from an equilibrium: its exploitability, by OpenSpiel.

    python -m tests.kuhn_poker MODEL_DIR [MODEL_DIR ...]

At each of the twelve information states the model's probabilities of the legal moves, each with the
token that ends a turn, are those of its policy; what it gives to anything else is left out, and
told as ``illegal``. Exploitability is what a best response wins of it a game, the mean over both
places: 0 of an equilibrium, 0.458 of play at random. The value of the game is -1/18 for the first.
``against_first`` is what a model wins of the first that was typed, the mean over both places: no
more than that one's exploitability.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pyspiel
import torch
from open_spiel.python import policy
from open_spiel.python.algorithms import expected_game_score, exploitability
from transformers import AutoModelForCausalLM

from libra_cli.envs.gyms.openspiel import OpenSpiel
from libra_cli.envs.protocol import Message, NextTurn
from libra_cli.runtime.episodes.renderer import Renderer

MOVES = ("Pass", "Bet")
NUMBERS = ("exploitability", "first", "illegal", "against_first")


def decisions() -> dict[str, list[Message]]:
    """Return what a player has read and said at each information state, by its name."""
    return {
        state: conversation
        for index, moves in product(range(64), product(MOVES, repeat=3))
        for state, conversation in _played(index, moves)
    }


def _played(index: int, moves: Sequence[str]) -> Iterator[tuple[str, list[Message]]]:
    game = OpenSpiel("kuhn_poker", state="information", instructions="")
    turn = game.reset(game.task(index, seed=0), seed=0)
    told: dict[str, list[Message]] = {role: [] for role in game.roles}
    for move in moves:
        told[turn.role] += turn.messages
        yield turn.messages[-1]["content"].partition("\n")[0], [*told[turn.role]]
        told[turn.role].append({"role": "assistant", "content": move})
        answer = game.reply(move)
        assert isinstance(answer, NextTurn)
        if answer.done:
            return
        turn = answer


def tokens_of(conversation: Sequence[Message], renderer: Renderer) -> list[int]:
    """Return the tokens of a conversation as they are when it is played, turn by turn."""
    tokens = renderer.prompt(conversation[:1])
    for said, heard in zip(conversation[1::2], conversation[2::2], strict=True):
        turn = [*renderer.encode(said["content"]), renderer.end_of_turn]
        tokens += [*turn, *renderer.extend([heard], after=turn)]
    return tokens


def probability(model: Any, context: list[int], turn: list[int]) -> float:
    """Return the probability of a turn after a context."""
    with torch.no_grad():
        logits = model(torch.tensor([context + turn])).logits[0, len(context) - 1 : -1]
    chosen = logits.log_softmax(-1).gather(1, torch.tensor(turn)[:, None])
    return float(chosen.sum().exp())


def measured(directory: Path, opponent: policy.TabularPolicy | None = None) -> dict[str, Any]:
    """Return a model's exploitability, what its first player gains, what it wins of an opponent in
    both places (itself, if there is none), and its probability of Bet.
    """
    renderer = Renderer(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    game = pyspiel.load_game("kuhn_poker")
    table = policy.TabularPolicy(game)
    start = game.new_initial_state()
    turns = [[*renderer.encode(move), renderer.end_of_turn] for move in MOVES]
    illegal, bets = 0.0, {}
    for state, conversation in decisions().items():
        context = tokens_of(conversation, renderer)
        both = [probability(model, context, turn) for turn in turns]
        illegal = max(illegal, 1 - sum(both))
        bets[state] = both[1] / sum(both)
        table.action_probability_array[table.state_lookup[state]] = [1 - bets[state], bets[state]]
    score = expected_game_score.policy_value(start, [table, table])
    met = opponent or table
    as_first = expected_game_score.policy_value(start, [table, met])[0]
    as_second = expected_game_score.policy_value(start, [met, table])[1]
    return {
        "exploitability": float(exploitability.exploitability(game, table)),
        "first": float(score[0]),
        "illegal": illegal,
        "against_first": float(as_first + as_second) / 2,
        "bets": bets,
        "table": table,
    }


def main() -> None:
    """Print a line for each model that was typed."""
    first: policy.TabularPolicy | None = None
    for name in sys.argv[1:]:
        told = measured(Path(name).expanduser(), first)
        first = first or told["table"]
        bets = " ".join(f"{state} {bet:.2f}" for state, bet in sorted(told["bets"].items()))
        numbers = " ".join(f"{key} {told[key]:.4f}" for key in NUMBERS)
        sys.stdout.write(f"{name}: {numbers}  {bets}\n")


if __name__ == "__main__":
    main()
