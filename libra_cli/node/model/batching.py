"""Splits the global batch over ranks and into packed micro-batches.

``deal`` gives each rank its share and cuts it: a micro-batch is one row of whole trajectories, one
after the other and without padding, of at most the budget's tokens. Every rank gets the same number
of micro-batches (empty ones if need be), because a sharded model's collectives run in every forward
pass. The sum over all ranks is the same however the batch is split.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from libra_cli.config.errors import TrainerError
from libra_cli.node.batch.samples import TokenSample
from libra_cli.node.model.images import ImageReader, RowImages, positions_of, row_images
from libra_cli.node.model.packed_attention import PackedSequences
from libra_cli.node.model.routers import Routes
from libra_cli.node.model.scoring import ScoringRequest


def deal(lengths: Sequence[int], *, shares: int, budget: int) -> list[list[list[int]]]:
    """Return for each share its micro-batches, each a list of indices into ``lengths``.

    The longest sample goes first, each to the share with the fewest tokens so far; then each share
    is cut. ``lengths`` and ``budget`` are in tokens; a longer sample is a micro-batch by itself.
    """
    dealt: list[list[int]] = [[] for _ in range(shares)]
    tokens = [0] * shares
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        share = min(range(shares), key=lambda s: (tokens[s], s))
        dealt[share].append(index)
        tokens[share] += lengths[index]
    cuts = [_cut(indices, lengths, budget) for indices in dealt]
    most = max(map(len, cuts))
    return [cut + [[]] * (most - len(cut)) for cut in cuts]


def _cut(indices: Sequence[int], lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Cut a share; indices come longest first, and each goes where it fits first."""
    batches: list[list[int]] = []
    tokens: list[int] = []
    for index in indices:
        length = lengths[index]
        for number, held in enumerate(tokens):
            if held + length <= budget:
                batches[number].append(index)
                tokens[number] += length
                break
        else:
            batches.append([index])
            tokens.append(length)
    return batches


@dataclass(frozen=True, slots=True)
class TokenScores:
    """``Scores`` of the N generated tokens of a micro-batch, ``[N]`` each."""

    proximal: Tensor
    reference: Tensor
    own_value: Tensor
    own_tokens: Tensor
    group_mean: Tensor
    excess_kl: Tensor


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Whole trajectories in one row, and vectors ``[N]`` over their generated tokens."""

    request: ScoringRequest
    """The row, and the places of the generated tokens."""
    rows: Tensor
    """``[N]``: the number of each generated token's trajectory, from 0 on."""
    groups: Tensor
    """``[N]``, int64: the number of each generated token's group."""
    rollout: Tensor
    """``[N]``: log-probabilities under the rollout policy, in nats."""
    advantages: Tensor
    """``[N]``: the advantage of each generated token."""
    fresh: Tensor
    """``[N]``, bool: whether the trajectory is wholly of the trainer's current version."""
    ages: Tensor
    """``[N]``, int64: versions that the token is behind the trainer's."""
    scores: TokenScores | None = None

    def weights(self, divisor: Tensor | None) -> Tensor:
        """What each sequence adds to the loss's divisor, ``[sequences]``: its generated tokens, or,
        of a divisor that the loss says, an equal part if it has any."""
        sequences = len(self.request.packed.lengths)
        tokens = torch.bincount(self.rows, minlength=sequences).float()
        if divisor is None:
            return tokens
        scored = tokens > 0
        return divisor * scored / scored.sum().clamp(min=1)


def collate(
    samples: Sequence[TokenSample],
    device: torch.device,
    *,
    scored: bool = False,
    turns: bool = False,
    reader: ImageReader | None = None,
) -> MicroBatch:
    """Put samples into one row; no samples become one of two tokens without a loss.

    With ``scored``, all of them have scores. With ``turns`` the request asks for the hidden states
    before theirs. ``reader`` makes patches of the samples' images.
    """
    lengths = [len(sample.token_ids) for sample in samples] or [2]
    token_ids = _row([sample.token_ids for sample in samples], np.int64)
    mask = _row([sample.loss_mask for sample in samples], np.bool_)
    rollout = _row([sample.logprobs for sample in samples], np.float32)
    ages = _row([sample.ages() for sample in samples], np.int64)
    (places,) = np.nonzero(mask)
    rows = np.repeat(np.arange(len(lengths)), lengths)[places]
    advantages = _row([sample.advantage_of_tokens() for sample in samples], np.float32)
    groups = np.asarray([sample.group for sample in samples], dtype=np.int64)
    fresh = np.asarray([sample.fresh for sample in samples], dtype=bool)
    starts = np.cumsum([0, *lengths]).astype(np.int32)

    def here(values: NDArray[Any]) -> Tensor:
        return torch.from_numpy(values).to(device)

    return MicroBatch(
        request=ScoringRequest(
            token_ids=here(token_ids)[None],
            positions=here(_positions(samples, lengths, reader)),
            images=_images(samples, starts, reader, device),
            packed=PackedSequences(tuple(lengths), here(starts)),
            places=here(places),
            turns=here(_turns(samples, starts)) if turns else None,
            routes=_routes(samples, lengths, device),
        ),
        rows=here(rows),
        groups=here(groups[rows]),
        rollout=here(rollout[places]),
        advantages=here(advantages[places]),
        fresh=here(fresh[rows]),
        ages=here(ages[places]),
        scores=_token_scores(samples, rows, device) if scored else None,
    )


def _token_scores(
    samples: Sequence[TokenSample], rows: NDArray[np.int64], device: torch.device
) -> TokenScores:
    scores = [one.scores for one in samples if one.scores is not None]

    def of_tokens(parts: Sequence[NDArray[np.float32]]) -> Tensor:
        whole = np.concatenate(parts) if parts else np.zeros(0, dtype=np.float32)
        return torch.from_numpy(whole).to(device)

    def of_rows(values: Sequence[float]) -> Tensor:
        return torch.from_numpy(np.asarray(values, dtype=np.float32)[rows]).to(device)

    return TokenScores(
        proximal=of_tokens([one.proximal for one in scores]),
        reference=of_tokens([one.reference for one in scores]),
        own_value=of_rows([one.own_value for one in scores]),
        own_tokens=of_rows([one.own_tokens for one in scores]),
        group_mean=of_rows([one.group_mean for one in scores]),
        excess_kl=of_rows([one.excess_kl for one in scores]),
    )


def _routes(
    samples: Sequence[TokenSample], lengths: Sequence[int], device: torch.device
) -> Routes | None:
    """The routes of a row, if any of its samples has some."""
    given = [sample.routes for sample in samples]
    shape = next((one.shape[1:] for one in given if one is not None), None)
    if shape is None:
        return None
    experts = np.zeros((sum(lengths), *shape), dtype=np.int64)
    known: NDArray[np.bool_] = np.zeros(sum(lengths), dtype=bool)
    for start, routes in zip(np.cumsum([0, *lengths]), given, strict=False):
        if routes is not None:
            experts[start : start + len(routes)] = routes
            known[start : start + len(routes)] = True
    return Routes(torch.from_numpy(experts).to(device), torch.from_numpy(known).to(device))


def _positions(
    samples: Sequence[TokenSample], lengths: Sequence[int], reader: ImageReader | None
) -> NDArray[np.int64]:
    """``[1, T]``: of each token in its sequence; or, if a sequence has images, ``[4, 1, T]``, of
    which the others are those of M-RoPE."""
    plain = np.concatenate([np.arange(length) for length in lengths])[None]
    if reader is None or not any(sample.images for sample in samples):
        return plain
    seen = [
        positions_of(
            len(sample.token_ids),
            [(one.start, reader.sides(reader.read(one.png))) for one in sample.images],
        )
        for sample in samples
    ]
    return np.stack([plain, *(one[None] for one in np.concatenate(seen, 1))])


def _images(
    samples: Sequence[TokenSample],
    starts: NDArray[np.int32],
    reader: ImageReader | None,
    device: torch.device,
) -> RowImages | None:
    """The images of a row."""
    given = [
        (start, one)
        for start, sample in zip(starts.tolist(), samples, strict=False)
        for one in sample.images
    ]
    if reader is None or not given:
        return None
    patches = [reader.read(one.png) for _, one in given]
    for (_, one), found in zip(given, patches, strict=True):
        if reader.tokens(found) != one.tokens:
            raise TrainerError(
                f"an image is {reader.tokens(found)} tokens, and its prompt has {one.tokens}",
                hint="give the trainer's host the same preprocessor_config.json",
            )
    places = [(start + one.start, one.tokens) for start, one in given]
    return row_images(patches, places, int(starts[-1]), device)


def _turns(samples: Sequence[TokenSample], starts: NDArray[np.int32]) -> NDArray[np.int64]:
    """Where in the row the turns of the samples begin, in order."""
    begins = zip(starts.tolist(), samples, strict=False)  # there is one start more
    found = [start + token for start, sample in begins for _, token, _ in sample.turns]
    return np.asarray(found, dtype=np.int64)


def _row(parts: Sequence[NDArray[Any]], dtype: type[np.generic]) -> NDArray[Any]:
    """The parts one after the other; without any, two zeros."""
    return np.concatenate(parts).astype(dtype) if parts else np.zeros(2, dtype=dtype)
