"""Writes the demonstrations and the model; the package says how they are used."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from libra_cli.envs.protocol import Message
from libra_cli.node.model.tokenizer import SPECIAL, START, save_tokenizer
from libra_cli.node.model.warmup import POSITIONS, new_model
from tests.frozen_lake.game import FrozenLake

COUNT = 3200
"""Games, each of which is shown once in 200 steps of 16."""
SEED = 777
"""Of the boards; not that of any run."""
SIZE, HOLES = 4, 5
RULES = "Please resubmit a valid move and remember to follow the game rules to avoid penalties."


def demonstration(index: int, rng: random.Random) -> list[Message]:
    """A game that is won by a shortest way, chosen at random where there are several."""
    game = FrozenLake(SIZE, HOLES)
    messages = game.reset(game.task(index, SEED), 0)
    while not game.won:
        said = f"[{rng.choice(game.best_moves())}]"
        messages.append({"role": "assistant", "content": said})
        messages += game.reply(said).messages
    return messages


def texts(first: str) -> list[str]:
    """The texts that are one token each: those between the cells, cells, moves and refusals."""
    head, _, _ = first.partition("+-")
    line = "+-----" * SIZE + "+"
    moves = ("up", "down", "left", "right")
    tail = "\n\n" + first.rpartition("\n\n")[2]
    return [
        head,
        *("\n\nCurrent Board:\n\n", "\nCurrent Board:\n\n", "Current Board:\n\n"),
        *(f"{line}\n|", f"\n{line}\n|", f"\n{line}{tail}", tail),
        *("  P  |", "     |", "  H  |", "  G  |", "You moved ", " to position ("),
        *(f"[{move}]" for move in moves),
        *moves,
        *(f"{START}user\n", f"\n{START}user\n", f"\n{START}assistant\n"),
        "You attempted an invalid move. Reason: You tried to move ",
        f" but hit a wall! {RULES}\n",
    ]


def tokenizer_of(first: str) -> Tokenizer:
    """A token for every byte, as the small model's, and one for each of the texts."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in texts(first)])
    return tokenizer


def main() -> None:
    """Write them into the directory that was typed."""
    directory = Path(sys.argv[1]).expanduser()
    directory.mkdir(parents=True, exist_ok=True)
    rng = random.Random("demonstrations 777")
    games = [demonstration(index, rng) for index in range(COUNT)]
    lines = [json.dumps({"messages": messages}) + "\n" for messages in games]
    (directory / "demonstrations.jsonl").write_text("".join(lines), encoding="utf-8")
    tokenizer = tokenizer_of(games[0][0]["content"])
    model = new_model(tokenizer, 0)
    model.save_pretrained(directory / "model")
    save_tokenizer(tokenizer, directory / "model", max_len=POSITIONS)


if __name__ == "__main__":
    main()
