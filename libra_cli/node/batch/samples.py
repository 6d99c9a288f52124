"""Decodes the trajectories that the trainer receives. Needs no torch, so rank 0 answers early."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any

import numpy as np
from numpy.typing import NDArray

from libra_cli.config.errors import TrainerError
from libra_cli.config.training import TrainingSpec


@dataclass(frozen=True, slots=True)
class Scores:
    """What the trainer's model of before the first update says of a branch, of N tokens that count;
    ``node.model.scores`` computes them."""

    proximal: NDArray[np.float32]
    """``[N]``: log-probabilities under that model, in nats."""
    reference: NDArray[np.float32]
    """``[N]``: those of the model at the start of the run; 0 where nobody needs them."""
    own_value: float = 0.0
    """The sum of the loss's ``group_value`` over the trajectory, all its branches."""
    own_tokens: int = 0
    """The tokens that this is the sum of."""
    group_mean: float = 0.0
    """The mean of that over the trajectories of the group."""
    excess_kl: float = 0.0
    """Nats of KL from the first policy (k1, summed over the trajectory), less what the advantage
    estimator compares with: the mean of the group, or of its others."""


@dataclass(frozen=True, slots=True)
class SampleImage:
    """An image that ``tokens`` tokens stand for, from ``start`` on."""

    start: int
    tokens: int
    png: bytes


@dataclass(frozen=True, slots=True)
class TokenSample:
    """A branch of a trajectory to train on, of T tokens; most trajectories have one branch."""

    group: int
    member: int
    token_ids: NDArray[np.int32]
    """``[T]``: prompt, generated tokens and tools' returns."""
    logprobs: NDArray[np.float32]
    """``[T]``: log-probabilities under the rollout policy, in nats; 0 where the mask is 0."""
    loss_mask: NDArray[np.int8]
    """``[T]``: 1 on generated tokens that count in the loss; 0 on the first token, which nothing
    predicts."""
    reward: float
    fresh: bool
    """Whether every generated token is of the version the trainer holds now."""
    behind: tuple[tuple[int, int], ...] = ()
    """(token, versions): from this token on, so many versions behind the trainer's; 0 before."""
    advantages: tuple[tuple[int, float], ...] = ()
    """(token, value): from this token on this advantage; 0 before."""
    token_advantages: NDArray[np.float32] | None = None
    """``[T]``: in place of ``advantages``, where each token has its own."""
    scores: Scores | None = None
    """Scores of the branch, where a step needs them before its first update; else None."""
    branch: int = 0
    """The number of this branch among the trajectory's, from 0 on."""
    turns: tuple[tuple[int, int, float], ...] = ()
    """(number, token, reward): turn ``number`` of the trajectory begins at this token, and earned
    this; in order, where a critic estimates the advantages (``node.critic``)."""
    images: tuple[SampleImage, ...] = ()
    """The images that some of the tokens stand for, in order."""
    routes: NDArray[np.unsignedinteger[Any]] | None = None
    """``[n, layers, k]``: the experts that the rollout's routers chose for the first n tokens, of
    every layer (0 in those without experts); None where it chooses itself."""

    @property
    def trajectory(self) -> tuple[int, int]:
        """The numbers of its group and of the member."""
        return self.group, self.member

    @property
    def key(self) -> tuple[int, int, int]:
        """The numbers of its group, of the member and of the branch."""
        return self.group, self.member, self.branch

    @property
    def generated(self) -> int:
        """The number of generated tokens, over which the loss is summed."""
        return int(self.loss_mask.sum())

    def ages(self) -> NDArray[np.int32]:
        """``[T]``: versions behind the trainer's, of each token; without meaning where the mask
        is 0.
        """
        ages: NDArray[np.int32] = np.zeros(len(self.token_ids), dtype=np.int32)
        for start, versions in self.behind:
            ages[start:] = versions
        return ages

    def advantage_of_tokens(self) -> NDArray[np.float32]:
        """``[T]``: the advantage of each token; without meaning where the mask is 0."""
        if self.token_advantages is not None:
            return self.token_advantages
        values: NDArray[np.float32] = np.zeros(len(self.token_ids), dtype=np.float32)
        for start, value in self.advantages:
            values[start:] = value
        return values


def counted(samples: Sequence[TokenSample], training: TrainingSpec) -> tuple[TokenSample, ...]:
    """The samples, without tokens over the bound where the recipe leaves these out of the loss.

    Everybody who computes a part of a step must use it, so that the number of tokens that the
    gradient is divided by is the number that it was summed over.
    """
    if not training.staleness.masks:
        return tuple(samples)
    most = training.max_staleness
    return tuple(
        replace(sample, loss_mask=sample.loss_mask * (sample.ages() <= most)) for sample in samples
    )


def read_sample(message: Mapping[str, Any], *, max_len: int) -> TokenSample:
    """Decode one trajectory of ``POST /train``; ``max_len`` is in tokens.

    Raises:
        TrainerError: the trajectory is malformed; the message names it and the reason.
    """
    name = f"trajectory {message.get('group')}.{message.get('member')}"
    try:
        sample = TokenSample(
            group=int(message["group"]),
            member=int(message["member"]),
            token_ids=np.frombuffer(message["token_ids"], dtype="<i4"),
            logprobs=np.frombuffer(message["logprobs"], dtype="<f4"),
            loss_mask=np.frombuffer(message["loss_mask"], dtype="<i1"),
            reward=float(message["reward"]),
            fresh=bool(message["fresh"]),
            behind=tuple((int(start), int(age)) for start, age in message["behind"]),
            advantages=tuple((int(start), float(value)) for start, value in message["advantages"]),
            token_advantages=_floats(message.get("token_advantages")),
            branch=int(message.get("branch", 0)),
            turns=tuple(
                (int(number), int(token), float(reward))
                for number, token, reward in message.get("turns", ())
            ),
            routes=_routes(message.get("routes")),
            images=tuple(
                SampleImage(int(start), int(tokens), bytes(png))
                for start, tokens, png in message.get("images", ())
            ),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise TrainerError(f"{name} cannot be read: {error!r}") from error
    problem = _problem(sample, max_len)
    if problem:
        raise TrainerError(f"{name} {problem}")
    return sample


def _floats(given: bytes | None) -> NDArray[np.float32] | None:
    return None if given is None else np.frombuffer(given, dtype="<f4")


def _routes(given: Mapping[str, Any] | None) -> NDArray[np.unsignedinteger[Any]] | None:
    """``ids``, of ``layers`` and ``chosen`` each, in ``bytes`` each."""
    if given is None:
        return None
    numbers = np.frombuffer(given["ids"], dtype=f"<u{int(given['bytes'])}")
    return numbers.reshape(-1, int(given["layers"]), int(given["chosen"]))


def read_samples(messages: Sequence[Mapping[str, Any]], max_len: int) -> tuple[TokenSample, ...]:
    """Decode the trajectories of one message.

    Raises:
        TrainerError: a trajectory is malformed; the message names the first of them.
    """
    return tuple(read_sample(message, max_len=max_len) for message in messages)


def _problem(sample: TokenSample, max_len: int) -> str:
    tokens, logprobs, mask = len(sample.token_ids), sample.logprobs, sample.loss_mask
    if not tokens == len(logprobs) == len(mask):
        return f"has {tokens} tokens, {len(logprobs)} log-probabilities, {len(mask)} mask entries"
    if not 2 <= tokens <= max_len:
        return f"has {tokens} tokens, allowed are 2 to {max_len}"
    if not bool(np.isin(mask, (0, 1)).all()) or mask[0]:
        return "has a loss mask with something other than 0 and 1, or a 1 on the first token"
    if sample.routes is not None and len(sample.routes) > tokens:
        return f"has {tokens} tokens, but routes of {len(sample.routes)}"
    if not _fits(sample.images, tokens):
        return "has images that overlap, or are outside of its tokens"
    starts = [start for start, _ in sample.behind]
    if starts != sorted(set(starts)) or any(age < 0 for _, age in sample.behind):
        return "has ages that are not by rising token, or one below 0"
    if not bool(np.isfinite(logprobs).all()) or not np.isfinite(sample.reward):
        return "has a reward or log-probabilities that are not finite"
    return _advantage_problem(sample)


def _fits(images: Sequence[SampleImage], tokens: int) -> bool:
    """Whether each image begins where the one before has ended, or later, and ends in time."""
    ends = [0, *(one.start + one.tokens for one in images)]
    begins = [*(one.start for one in images), tokens]
    counts = all(one.tokens > 0 for one in images)
    return counts and all(end <= begin for end, begin in zip(ends, begins, strict=True))


def _advantage_problem(sample: TokenSample) -> str:
    by_token, starts = sample.token_advantages, [start for start, _ in sample.advantages]
    if by_token is not None and len(by_token) != len(sample.token_ids):
        return f"has {len(sample.token_ids)} tokens, but {len(by_token)} token advantages"
    if starts != sorted(set(starts)):
        return "has advantages that are not by rising token"
    if not bool(np.isfinite(sample.advantage_of_tokens()).all()):
        return "has an advantage that is not finite"
    return _turn_problem(sample)


def _turn_problem(sample: TokenSample) -> str:
    """Say what is wrong with the turns, none of which may begin at the first token or where another
    does; empty if nothing is.
    """
    numbers = [number for number, *_ in sample.turns]
    begins = [token for _, token, _ in sample.turns]
    rising = begins == sorted(set(begins)) and numbers == sorted(set(numbers))
    if not rising or not all(1 <= token < len(sample.token_ids) for token in begins):
        return "has turns that are not by rising number and token, or outside of its tokens"
    if not all(isfinite(reward) for *_, reward in sample.turns):
        return "has a turn with a reward that is not finite"
    return ""
