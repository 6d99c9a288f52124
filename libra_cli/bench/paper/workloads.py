"""Workloads like Search-R1, DAPO-Math-17K and R2E-Gym, as far as is published of them.

Nobody has published the trajectories of the runs of Libra (arXiv 2606.03077), so these are
declared: drawn from kinds of trajectory, each a share of all. From its text are the mean length
(2.5K tokens, which grows to 11.5K over a run: ``GROWTH``), 16 samples a prompt, the limit of 40,960
tokens, and of R2E-Gym the tool tokens that go with lengths: 1K below 8K, 12.5K at 21K, and repeated
failures beyond 40K. From the configurations of its artifact (NetX-lab/Libra @ 577ff07b) are the 12
turns and 2,048 prompt tokens of R2E-Gym and the 32,768 tokens of DAPO. At most 4 searches that
return 500 tokens each are those of Search-R1 (arXiv 2503.09516).

ASSUMED, and published nowhere: the shares of the kinds, the spread of lengths, the tokens of tools
in DAPO, and all tool times. A prompt has a kind that is the likelier for each of its samples
(``ALIKE``), so siblings tell something; of trajectories that grow long, tools fail more often, so
outcomes do too. The published cause of length is built in here, so that it can be found in these
workloads proves nothing about others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import log
from random import Random

from libra_cli.core.types import Seconds, Tokens, ToolOutcome
from libra_cli.sim.drift import Drift
from libra_cli.sim.traces import RecordedEpisode, Trace, Turn

GROUP_SIZE, MAX_LEN = 16, 40_960
GROWTH = Drift(factors=(1.0, 11.5 / 2.5))
"""What changes over a run: generated tokens, evenly, as much as the published mean length."""
TASKS = 96
ALIKE = 0.6
"""Chance that a sample is of its prompt's own kind, whatever the shares."""
TOOL_SPREAD = 0.8
"""Standard deviation of the logarithm of a tool's seconds."""


@dataclass(frozen=True, slots=True)
class TrajectoryKind:
    """A kind of trajectory: its ``share`` of all and what one is like.

    ``generated`` is the median of its generated tokens and ``spread`` the standard deviation of
    their logarithm; ``turns`` the fewest and the most; ``observed`` the mean tokens of all its tool
    returns; ``fails`` the share of these that are failures.
    """

    share: float
    generated: Tokens
    spread: float
    turns: tuple[int, int]
    observed: Tokens
    fails: float


@dataclass(frozen=True, slots=True)
class DeclaredWorkload:
    """Kinds of trajectory, with what they have in common; ``tool_s`` is a tool's median time."""

    name: str
    prompt: Tokens
    most_tokens: Tokens
    tool: str
    tool_s: Seconds
    kinds: tuple[TrajectoryKind, ...]

    @property
    def trace(self) -> Trace:
        """The trajectories of ``TASKS`` prompts, the same every time."""
        random = Random(f"paper/{self.name}")
        episodes: list[RecordedEpisode] = []
        for task in range(TASKS):
            usual = self._kind(random)
            for _ in range(GROUP_SIZE):
                kind = usual if random.random() < ALIKE else self._kind(random)
                episodes.append(self._episode(f"{self.name}/{task}", kind, random))
        return Trace(self.name, tuple(episodes))

    def _kind(self, random: Random) -> TrajectoryKind:
        return random.choices(self.kinds, [kind.share for kind in self.kinds])[0]

    def _episode(self, task: str, kind: TrajectoryKind, random: Random) -> RecordedEpisode:
        number = random.randint(*kind.turns)
        total = random.lognormvariate(log(kind.generated), kind.spread)
        parts = [random.expovariate(1.0) + 0.25 for _ in range(number)]
        turns = [
            self._turn(total * part / sum(parts), kind, last=at == number - 1, random=random)
            for at, part in enumerate(parts)
        ]
        return RecordedEpisode(task, self.prompt, tuple(turns), float(kind is self.kinds[0]))

    def _turn(self, generated: float, kind: TrajectoryKind, *, last: bool, random: Random) -> Turn:
        tokens = max(1, round(generated))
        if last:
            return Turn(tokens, 0, "", None, 0.0)
        failed = random.random() < kind.fails
        calls = (sum(kind.turns) / 2) - 1
        return Turn(
            tokens,
            round(random.lognormvariate(log(max(1.0, kind.observed / calls)), 0.3)),
            self.tool,
            ToolOutcome.ERROR if failed else ToolOutcome.OK,
            random.lognormvariate(log(self.tool_s), TOOL_SPREAD),
        )


SEARCH = DeclaredWorkload(
    "Search-R1-like",
    prompt=256,
    most_tokens=MAX_LEN,
    tool="search",
    tool_s=1.0,
    kinds=(
        TrajectoryKind(0.55, 1_100, 0.5, (2, 3), 750, 0.1),
        TrajectoryKind(0.35, 2_600, 0.5, (3, 4), 1_250, 0.5),
        TrajectoryKind(0.10, 7_500, 0.6, (5, 5), 2_000, 0.9),
    ),
)
DAPO = DeclaredWorkload(
    "DAPO-like",
    prompt=256,
    most_tokens=32_768,
    tool="python",
    tool_s=2.0,
    kinds=(
        TrajectoryKind(0.60, 1_200, 0.7, (1, 2), 200, 0.1),
        TrajectoryKind(0.30, 2_400, 0.7, (2, 4), 600, 0.4),
        TrajectoryKind(0.10, 6_500, 0.8, (4, 6), 1_600, 0.8),
    ),
)
R2E = DeclaredWorkload(
    "R2E-Gym-like",
    prompt=2_048,
    most_tokens=MAX_LEN,
    tool="shell",
    tool_s=5.0,
    kinds=(
        TrajectoryKind(0.75, 1_200, 0.5, (3, 6), 1_000, 0.1),
        TrajectoryKind(0.20, 5_000, 0.4, (6, 10), 12_500, 0.4),
        TrajectoryKind(0.05, 11_000, 0.4, (11, 12), 27_000, 0.9),
    ),
)
WORKLOADS: Mapping[str, DeclaredWorkload] = {one.name: one for one in (SEARCH, DAPO, R2E)}
"""The declared workloads by name, in the published order."""
