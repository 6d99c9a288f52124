"""Speculative decoding on a real server: the same tokens and log-probabilities, in fewer steps."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from libra_cli.core.actions import Generate, SyncServer
from libra_cli.core.events import PublishedVersion, TurnFailed, TurnGenerated
from libra_cli.core.types import TrajectoryId, WeightVersion
from libra_cli.node.model.weight_names import names_of
from libra_cli.node.rollout.draft_switch import EXPLORE
from libra_cli.node.weights.tensor_rows import whole
from libra_cli.node.weights.versions import ProbeResult, publish
from libra_cli.runtime.rollout.connection import Sampling
from libra_cli.runtime.rollout.decode_check import EXPECTED, decode_gap
from tests import draft_models
from tests.vllm_server import Bench, bench_of, published

pytestmark = [pytest.mark.integration, pytest.mark.vllm, pytest.mark.timeout(300)]
torch = pytest.importorskip("torch", reason="needs the [cpu] extra")

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12] * 3
TURNS = 4
TOKENS = 96


@dataclass(frozen=True)
class Played:
    """A server that drafts, and the policies of the versions that it was given, by their steps."""

    method: str
    bench: Bench
    policies: dict[int, Any]
    versions: Path

    @property
    def policy(self) -> Any:
        return self.policies[max(self.policies)]

    def publish(self, step: int, policy: Any) -> tuple[str, PublishedVersion]:
        """Write a version; return its directory and what the server is told of it."""
        names, held = names_of(self.versions.parent / "model"), policy.state_dict()
        tensors = {name: one for group in names.groups for name, one in group.to_disk(held).items()}
        done = publish(
            whole(tensors.items()),
            self.versions,
            version=step,
            trainer_incarnation=1,
            probe=ProbeResult([1, 2], [0.0]),
            keep=2,
        )
        self.policies[step] = policy
        return str(self.versions / done.name), published(step)


METHODS = [
    "ngram",
    "eagle",
    "mtp",
    pytest.param("eagle3", marks=pytest.mark.nightly),
]


@pytest.fixture(scope="module", params=METHODS)
def served(request, tmp_path_factory) -> Iterator[Played]:
    """A server of a random model whose policy is peaked, once for each source of drafts."""
    root, method = tmp_path_factory.mktemp("drafts"), request.param
    speculative: dict[str, Any] = {"method": method, "num_speculative_tokens": 3}
    policy = (draft_models.mixture if method == "mtp" else draft_models.dense)(root / "model")
    if method.startswith("eagle"):
        make = getattr(draft_models, method)
        speculative["model"] = str(make(root / "head", policy))
    (root / "versions").mkdir()
    host = tmp_path_factory.mktemp("host")
    with bench_of(root / "model", host, rollout={"speculative": speculative}) as bench:
        served = Played(method, bench, {}, root / "versions")
        directory, version = served.publish(1, policy)
        bench.play(lambda: bench.server.load(directory, version, timeout_s=60))
        yield served


def turn(number: int, tokens: int) -> Generate:
    return Generate(
        request=number,
        trajectory=TrajectoryId(0, number),
        slot="local/0",
        incarnation=0,
        prompt_ids=array("i", PROMPT),
        max_tokens=tokens,
        cache_key=WeightVersion(1, 1),
        priority=0,
    )


def played(bench: Bench, temperature: float, *, turns: int = TURNS) -> list[TurnGenerated]:
    sampling = Sampling(temperature=temperature, top_p=1.0, stop_token_ids=())

    async def scene() -> list[TurnGenerated | TurnFailed]:
        calls = [bench.server.generate(turn(n, TOKENS), sampling) for n in range(turns)]
        return [*await asyncio.gather(*calls)]

    ended = bench.play(scene)
    generated = [one for one in ended if isinstance(one, TurnGenerated)]
    assert len(generated) == turns, ended
    return generated


def logprobs_of(model: Any, token_ids: list[int], temperature: float) -> Any:
    with torch.no_grad():
        logits = model(torch.tensor([token_ids])).logits[0, :-1] / temperature
    return torch.log_softmax(logits, -1)[range(len(token_ids) - 1), token_ids[1:]]


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_log_probabilities_of_drafted_tokens_equal_transformers(served, temperature):
    for done in played(served.bench, temperature):
        tokens = [*PROMPT, *done.token_ids]
        expected = logprobs_of(served.policy, tokens, temperature)[len(PROMPT) - 1 :]
        gap = (expected - torch.tensor(list(done.logprobs))).abs()
        assert len(done.token_ids) == TOKENS
        assert float(gap.max()) < 1e-3


def likeliest(served: Played, done: TurnGenerated) -> list[int]:
    """The tokens that its versions' policies find likeliest, each after those before it."""
    tokens, chosen = [*PROMPT, *done.token_ids], []
    for span in done.spans:
        with torch.no_grad():
            logits = served.policies[span.version](torch.tensor([tokens])).logits[0]
        first = len(PROMPT) - 1
        chosen += logits[first + span.start : first + span.end].argmax(-1).tolist()
    return chosen


def test_the_likeliest_tokens_are_those_without_drafts(served):
    for done in played(served.bench, 0.0):
        assert list(done.token_ids) == likeliest(served, done)
        assert len(done.token_ids) == TOKENS


def test_tokens_are_drawn_as_often_as_the_policy_says(served):
    """The mean log-probability of what is drawn is minus the entropy of the policy there."""
    drawn = played(served.bench, 1.0, turns=8)
    means, variances = [], []
    for done in drawn:
        tokens = [*PROMPT, *done.token_ids]
        with torch.no_grad():
            logits = served.policy(torch.tensor([tokens])).logits[0, len(PROMPT) - 1 : -1]
        logprobs = torch.log_softmax(logits, -1)
        surprise = logprobs[range(TOKENS), tokens[len(PROMPT) :]]
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        means.append((surprise + entropy).sum())
        spread = (logprobs.exp() * logprobs**2).sum(-1) - entropy**2
        variances.append(spread.sum())
    # A sum of martingale differences: its standard deviation is known.
    assert abs(float(sum(means))) < 4 * float(sum(variances)) ** 0.5


def metrics_of(bench: Bench) -> Any:
    async def sample() -> Any:
        return await bench.server.sample()

    return bench.play(sample).metrics


def test_drafts_are_accepted_and_told(served):
    """Of turns alone. Where a server has found steps without drafts to be quicker, as one that
    others slow down may for the last turn of a test before, it tries drafts in 16 of 512 steps.
    N-grams find nothing at the beginning of a turn, where nothing is repeated yet, and the first
    trial may fall there: the next begins 32 tokens later in a turn."""
    # A token in 268 by chance; the head of EAGLE-3 is random.
    least = {"ngram": 0.2, "eagle": 0.05, "mtp": 0.02, "eagle3": -1}[served.method]
    metrics = metrics_of(served.bench)  # of the tests before
    for _ in range(1 + 3 * EXPLORE // TOKENS):
        played(served.bench, 0.0, turns=1)
        metrics = metrics_of(served.bench)
        told = metrics["draft_acceptance"]
        if told is not None and told > least:
            break
    assert metrics["draft_acceptance"] > least
    assert 0 < metrics["draft_steps"] <= 1
    assert metrics.get("draft_lag") == (None if served.method == "ngram" else 1)


def test_decoding_with_drafts_is_not_taken_for_other_weights(served):
    """After the test before, since it plays one turn alone, too."""
    sync = SyncServer("local/0", 0, published(1))
    gap = served.bench.play(lambda: decode_gap(served.bench.server, sync, PROMPT))
    assert gap < EXPECTED["float32", False].first


def test_a_version_in_the_middle_changes_the_policy_and_not_the_head(served):
    policy = deepcopy(served.policy)
    with torch.no_grad():
        for one in policy.parameters():
            one.add_(0.3 * one.std() * torch.randn_like(one) if one.ndim > 1 else 0)
    directory, version = served.publish(2, policy)
    sampling = Sampling(temperature=0.0, top_p=1.0, stop_token_ids=())

    async def scene() -> list[Any]:
        """Play turns until it is loaded, so that some are under way then."""
        server = served.bench.server
        loading = asyncio.create_task(server.load(directory, version, timeout_s=60))
        numbers, ended = count(), []

        async def some() -> None:
            while not loading.done():
                ended.append(await server.generate(turn(next(numbers), TOKENS), sampling))

        await asyncio.gather(loading, *(some() for _ in range(TURNS)))
        return ended

    ended = served.bench.play(scene)
    for done in [*ended, *played(served.bench, 0.0)]:
        assert list(done.token_ids) == likeliest(served, done)
    assert [1, 2] in [[span.version for span in done.spans] for done in ended]
    if served.method != "ngram":
        assert metrics_of(served.bench)["draft_lag"] == 2
