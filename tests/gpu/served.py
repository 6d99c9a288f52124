"""A running server as the checks use it: it loads versions and generates turns of one length."""

from __future__ import annotations

import asyncio
import itertools
import json
from array import array
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from libra_cli.core.actions import Generate
from libra_cli.core.events import TurnFailed, TurnGenerated
from libra_cli.core.types import STARTED_WITH, TrajectoryId, WeightVersion
from libra_cli.node.weights.chunks import MANIFEST
from libra_cli.runtime.rollout.connection import Sampling
from libra_cli.runtime.weights.probe_bounds import probe_gap
from tests.vllm_server import Bench, published

SAMPLED = Sampling(temperature=1.0, top_p=1.0, stop_token_ids=(), to_the_end=True)
GREEDY = Sampling(temperature=0.0, top_p=1.0, stop_token_ids=(), to_the_end=True)
TOKENS = 64
"""Generated tokens of a turn."""
PROMPT = 32
LOAD_S = 120.0
SCENE_S = 900.0
Answer = TypeVar("Answer")


@dataclass
class Server:
    """One server of vLLM, and the newest version that it has loaded."""

    bench: Bench
    version: WeightVersion = STARTED_WITH
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    def play(self, scene: Callable[[], Awaitable[Answer]]) -> Answer:
        """Run a scene on the server's loop."""

        async def played() -> Answer:
            return await scene()

        answer: Answer = self.bench.play(played, timeout_s=SCENE_S)
        return answer

    def load(self, directory: Path) -> float:
        """Load a directory as a new version; returns the seconds that generation stood still."""
        return self.play(lambda: self.loading(directory))

    async def loading(self, directory: Path) -> float:
        """As ``load``, beside other work of the loop."""
        new = self.version.step + 1 if self.version.trainer_incarnation else 0
        seconds = await self.bench.server.load(str(directory), published(new), timeout_s=LOAD_S)
        self.version = WeightVersion(1, new)
        return seconds

    def gap(self, directory: Path) -> float:
        """Between what this server and the trainer of a version say of the version's probe."""
        probe = json.loads((directory / MANIFEST).read_text())["probe"]
        return probe_gap(tuple(probe["logprobs"]), self.scored(probe["token_ids"]))

    def scored(self, token_ids: list[int]) -> list[float]:
        """Log-probabilities of all tokens but the first, as of a prompt."""
        version = published(self.version.step)
        return self.play(lambda: self.bench.server.probe(token_ids, version))

    def whole(self, turns: int, sampling: Sampling = SAMPLED) -> list[TurnGenerated]:
        """So many turns at once, in the order of their prompts; those that came back."""

        async def together() -> list[TurnGenerated | TurnFailed]:
            return await asyncio.gather(*(self.turn(one, sampling) for one in range(turns)))

        return [one for one in self.play(together) if isinstance(one, TurnGenerated)]

    async def turn(
        self, prompt: int, sampling: Sampling = SAMPLED, request: int | None = None
    ) -> TurnGenerated | TurnFailed:
        """One turn after the prompt of that number."""
        request = self.request() if request is None else request
        order = Generate(
            request=request,
            trajectory=TrajectoryId(0, request),
            slot="local/0",
            incarnation=0,
            prompt_ids=array("i", [4 + prompt, *range(5, 4 + PROMPT)]),
            max_tokens=TOKENS,
            cache_key=self.version,
            priority=0,
        )
        return await self.bench.server.generate(order, sampling)

    def request(self) -> int:
        """A number that no other request has."""
        return next(self._numbers)
