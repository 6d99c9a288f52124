"""Plays pointer-chase with plain torch, to measure how often the small model succeeds.

All episodes advance in lockstep, one token at a time: where the text is given (the prompt, a tool's
return) the token is forced, elsewhere it is sampled. So every row is at the same position, and
neither padding nor a scheduler is needed. A run uses vLLM; this needs only the trainer's packages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import DynamicCache

from libra_cli.envs.pointer_chase import CALL_HEAD, CALL_TAIL, PointerChase
from libra_cli.envs.protocol import Task, ToolCall, ToolFailed
from libra_cli.node.model.tokenizer import END, PAD, encode, observation_text, prompt_text, token_id

MAX_TOKENS = 256


@dataclass(slots=True)
class PlayedEpisode:
    """A pointer-chase episode in play, with the tokens that the model is still to be fed."""

    environment: PointerChase
    tokenizer: Tokenizer
    forced: list[int]
    """Given tokens that are still to be fed to the model."""
    said: list[int] = field(default_factory=list)
    """Tokens that the model generated in this turn so far."""
    reward: float | None = None

    @classmethod
    def begin(cls, task: Task, seed: int, tokenizer: Tokenizer) -> PlayedEpisode:
        """Begin an episode at its first prompt token."""
        environment = PointerChase()
        (message,) = environment.reset(task, seed)
        return cls(environment, tokenizer, encode(tokenizer, prompt_text(message["content"])))

    def advance(self, sampled: int, end: int) -> int:
        """Return the token to feed next: a forced one, or else ``sampled``."""
        if self.forced:
            return self.forced.pop(0)
        if sampled == end:
            self._end_turn()
        else:
            self.said.append(sampled)
        return sampled

    def _end_turn(self) -> None:
        text = self.tokenizer.decode(self.said, skip_special_tokens=False)
        self.said = []
        if not (text.startswith(CALL_HEAD) and text.endswith(CALL_TAIL)):
            self.reward = self.environment.score(text)
            return
        key = text[len(CALL_HEAD) : -len(CALL_TAIL)]
        try:
            observation = self.environment.look_up(ToolCall("get", {"key": key}))
        except ToolFailed as failure:
            observation = str(failure)
        self.forced = encode(self.tokenizer, observation_text(observation))


def success_rate(
    model: nn.Module,
    tokenizer: Tokenizer,
    *,
    seed: int,
    episodes: int = 256,
    temperature: float = 1.0,
) -> float:
    """Return the share of episodes that score 1; one that runs over MAX_TOKENS has failed.

    Temperature 0 is greedy. A run plays none of these tasks, which have a stream of their own.
    """
    generator = torch.Generator().manual_seed(seed)
    stream = PointerChase()
    playing = [
        PlayedEpisode.begin(stream.task(index, -1 - seed), index, tokenizer)
        for index in range(episodes)
    ]
    end, pad = token_id(tokenizer, END), token_id(tokenizer, PAD)
    cache = DynamicCache(config=model.config)
    sampled: Sequence[int] = [pad] * episodes
    for _ in range(MAX_TOKENS):
        fed = [
            pad if episode.reward is not None else episode.advance(token, end)
            for episode, token in zip(playing, sampled, strict=True)
        ]
        if all(episode.reward is not None for episode in playing):
            break
        column = torch.tensor(fed)[:, None]
        with torch.inference_mode():
            logits = model(input_ids=column, past_key_values=cache, use_cache=True).logits[:, -1]
            sampled = _sample(logits, temperature, generator).tolist()
    return sum(episode.reward or 0.0 for episode in playing) / episodes


def _sample(logits: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    if temperature == 0:
        return logits.argmax(-1)
    probabilities = torch.softmax(logits.float() / temperature, dim=-1)
    return torch.multinomial(probabilities, 1, generator=generator)[:, 0]
