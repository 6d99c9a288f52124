"""The tokens of a trajectory with what is known of each: version, advantage, log-probability."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from math import exp, isnan, nan
from pathlib import Path

from libra_cli.config.errors import LibraError, StateError
from libra_cli.core.records import CreditRecord, TrajectoryRecord
from libra_cli.core.types import BranchTokens, TrajectoryId, VersionSpan
from libra_cli.runtime.monitors.samples import Decoder
from libra_cli.runtime.store.images import KeptImage, read_places
from libra_cli.runtime.store.reader import Reader
from libra_cli.runtime.store.run_directory import recipe_of

UNFINISHED = "\ufffd"
"""What a decoder makes of the first bytes of a character whose others are in later tokens."""
_MOST_NATS = 700.0
"""Most nats whose exponential a float holds."""


@dataclass(frozen=True, slots=True)
class ShownBranch:
    """The tokens of one branch of a trajectory, and what the run kept of each of them."""

    token_ids: Sequence[int]
    spans: Sequence[VersionSpan]
    """Which version generated which tokens, in order of the tokens."""
    logprobs: Sequence[float]
    """Log-probabilities under the rollout policy in nats, 0 for others' tokens; empty if not
    kept."""
    advantages: Sequence[tuple[int, float]]
    """Pairs of a token and the advantage from that token on; empty if the run kept none."""
    log_ratios: Sequence[float] = ()
    """Log-ratios of the trainer's probability over the rollout policy's (``LogRatios``) in nats,
    one a token, NaN for tokens that no step has trained; empty if the run kept none."""
    images: Sequence[KeptImage] = ()
    """The images that some of the tokens stand for, in order."""
    role: str = ""
    """The role of the environment whose conversation it is; empty if it has none."""

    def version(self, token: int) -> int | None:
        """The version that generated the token; None of tokens of others."""
        at = bisect_right(self.spans, token, key=lambda span: span.start) - 1
        inside = at >= 0 and token < self.spans[at].end
        return self.spans[at].version if inside else None

    def advantage(self, token: int) -> float | None:
        """Return the advantage of a token; None if the run kept none."""
        at = bisect_right(self.advantages, token, key=lambda entry: entry[0]) - 1
        return self.advantages[at][1] if at >= 0 else None

    def ratio(self, token: int) -> float | None:
        """How much likelier the trainer's model found the token; None if it did not count."""
        value = self.log_ratios[token] if self.log_ratios else nan
        return None if isnan(value) else exp(min(value, _MOST_NATS))


def branches_of(reader: Reader, row: TrajectoryRecord) -> list[ShownBranch]:
    """Return the branches of a trajectory, last the one it ended in; none while it is played, or
    without the file of its tokens.

    Raises:
        StateError: its tokens cannot be read.
    """
    key = (row.group_id, row.member, row.attempt)
    kept = reader.tokens(*key)
    if not kept:
        return []
    credit = reader.rows(CreditRecord, "group_id = ? AND member = ? AND attempt = ?", key)
    weighed = json.loads(credit[0].advantages_json) if credit else [()] * len(kept)
    said = reader.log_ratios(*key) or [()] * len(kept)
    roles = json.loads(row.roles_json) or [""] * len(kept)
    images = tuple(read_places(reader.run_dir).get(TrajectoryId(*key), ()))
    return [
        ShownBranch(
            branch.token_ids,
            branch.spans,
            branch.logprobs,
            [(at, a) for at, a in one],
            _by_token(branch, ratios),
            images,
            role,
        )
        for branch, one, ratios, role in zip(kept, weighed, said, roles, strict=True)
        if branch.token_ids
    ]


def _by_token(branch: BranchTokens, of_generated: Sequence[float]) -> Sequence[float]:
    """What is known of generated tokens, with NaN between; nothing if nothing is known."""
    if not of_generated:
        return ()
    values, known = [nan] * len(branch.token_ids), iter(of_generated)
    for span in branch.spans:
        values[span.start : span.end] = islice(known, span.end - span.start)
    return values


def decoder_of(run_dir: Path) -> Decoder:
    """The tokenizer of the run's model: the run's own copy, or the one beside a model on this host.

    Raises:
        StateError: there is none; the hint says where to put one.
    """
    candidates = [run_dir / "model"]
    try:
        path = recipe_of(run_dir).model.path
        candidates += [Path(path).expanduser()] if path else []
    except LibraError:
        pass  # the run's own copy is enough
    for directory in candidates:
        if (directory / "tokenizer.json").is_file():
            return Decoder(directory)
    missing = " or ".join(f"{directory}/tokenizer.json" for directory in candidates)
    raise StateError(
        f"there is no tokenizer, which would be {missing}",
        hint=f"copy the tokenizer.json of the run's model to {run_dir / 'model'}/",
    )


def token_texts(token_ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> list[str]:
    """What each token adds to the text; a character of several tokens belongs to the last of them.

    A token is decoded with the one before it, since some tokenizers leave out a leading blank.
    """
    texts: list[str] = []
    start = end = 0
    for token in range(1, len(token_ids) + 1):
        before = decode(token_ids[start:end])
        now = decode(token_ids[start:token])
        done = not now.endswith(UNFINISHED) or token == len(token_ids) or token - end > 8
        texts.append(now[len(before) :] if done else "")
        if done:
            start, end = end, token
    return texts
