"""Writes demonstrations of Kuhn poker by somebody who looks at the card and at what was done.

    python recipes/demonstrations/kuhn_poker.py > recipes/demonstrations/kuhn-poker.jsonl

Of each card and place there are 128 conversations of one game, in which the other player passes
as often as it bets. So who imitates them bets as often as ``BETS`` says, which is near to play at
random. At random itself nobody need look at the card, and a model that was taught not to look did
not learn it within 15,000 games; nor did one that was taught to look at the card alone learn to
look at what was done before.
"""

import json
import sys
from collections import Counter

from libra_cli.envs.gyms.openspiel import OpenSpiel
from libra_cli.envs.protocol import Message

GAMES = 128
BETS = {
    card + moves: share
    for moves, shares in (
        ("", (1 / 2, 3 / 8, 5 / 8)),
        ("p", (1 / 2, 3 / 8, 5 / 8)),
        ("b", (1 / 4, 1 / 2, 5 / 8)),
        ("pb", (1 / 4, 1 / 2, 5 / 8)),
    )
    for card, share in zip("012", shares, strict=True)
}
"""How often the player bets (or calls), by its card and what was done before."""


def games(card: str) -> Counter[tuple[str, str]]:
    """Return how often a card is played by which moves in which place: p a pass, b a bet."""
    found: Counter[tuple[str, str]] = Counter()
    for first, share in (("b", BETS[card]), ("p", 1 - BETS[card])):
        answered = GAMES * share
        found["player_0", f"{first}p"] += int(answered / (2 if first == "p" else 1))
        if first == "p":
            found["player_0", "pbb"] += int(answered / 2 * BETS[f"{card}pb"])
            found["player_0", "pbp"] += int(answered / 2 * (1 - BETS[f"{card}pb"]))
    for first in "pb":
        bets = int(GAMES / 2 * BETS[card + first])
        found["player_1", f"{first}b"] += bets
        found["player_1", f"{first}p"] += GAMES // 2 - bets
    return found


def conversation(card: str, role: str, moves: str) -> list[Message]:
    """Return what a player with this card reads and says when these moves are made."""
    for index in range(64):
        game = OpenSpiel("kuhn_poker", state="information", instructions="")
        turn = game.reset(game.task(index, seed=0), seed=0)
        told: dict[str, list[Message]] = {}
        for move in moves:
            said: Message = {"role": "assistant", "content": {"p": "Pass", "b": "Bet"}[move]}
            told.setdefault(turn.role, []).extend([*turn.messages, said])
            turn = game.reply(said["content"])
            if turn.done:
                break
        if told[role][0]["content"][0] == card:
            return told[role]
    raise LookupError(card)


def main() -> None:
    """Write them all, in the order of cards, places and moves."""
    for card in "012":
        for (role, moves), count in games(card).items():
            line = json.dumps({"messages": conversation(card, role, moves)}) + "\n"
            sys.stdout.write(line * count)


if __name__ == "__main__":
    main()
