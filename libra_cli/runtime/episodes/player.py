"""Plays the episodes of all trajectories: generated tokens in, tools' tokens and rewards out.

    event                               what the model reads        recorded as
    the tool returns                    its text                    ok
    it raises ToolFailed                the message                 error
    the call cannot be read, or does    why                         error, tool "invalid"
    not fit the tool's schema
    it takes too long                   "tool timed out"            timeout
    it raises anything else, reset,     nothing                     EnvironmentBroken: the
    reply or score fails, hangs or is                               trajectory is tried again from
    not a finite number                                             the start, and never scored

**After a time-out** the abandoned call may still be inside the environment, where never two may be.
Until it returns, further tool calls of that trajectory time out at once without being run, so that
nobody waits twice for the same hung call, and the model can answer with what it has. If the call
returns, its result is dropped and the environment is used again. A reply or the score needs the
environment, so it waits for the hung call up to ``tool_timeout_s``, and then raises
EnvironmentBroken.

**Where an episode ends.** A turn without a tool call goes to the environment's ``reply``. If there
is none or it says nothing, that turn was the answer and is scored. So is a turn that was cut by its
length, unless it has a complete call: then that is run, the unfinished rest of the turn stays in
the trajectory as generated, and the turn is closed for the model. An environment may end an episode
itself; what it said last is then in the conversation that is scored, but not in the trajectory.

The reward is the score and whatever rewards there were on the way. Latency is that of the call
itself; size is the length of the tool's text in characters, before it is shortened.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from libra_cli.config.environment import EnvironmentSpec
from libra_cli.core.types import INVALID, BranchPoint, ToolOutcome, ToolReturn, TrajectoryId
from libra_cli.envs.protocol import Message, ToolCall, ToolSchema
from libra_cli.envs.session import ToolAnswer
from libra_cli.envs.tools import Malformed, objection
from libra_cli.runtime.episodes.calls import CallLine
from libra_cli.runtime.episodes.places import EnvironmentSource, EpisodeEnvironment
from libra_cli.runtime.episodes.renderer import Renderer
from libra_cli.runtime.episodes.tool_formats.formats import GeneratedTurn
from libra_cli.runtime.episodes.workers import OpenOnNode, no_nodes
from libra_cli.runtime.store.images import ImageStore, ShownImage
from libra_cli.runtime.tasks.weighted_turns import Mixture

_TIMED_OUT = "tool timed out"
_PROBE = TrajectoryId(group=-1, member=0)
"""The episode that is begun to see whether it can be, of which nothing is kept."""


@dataclass(frozen=True, slots=True)
class TurnResult:
    """The outcome of a turn. ``reward`` is set exactly if ``done``."""

    observation_ids: array[int]
    """The token ids that follow the turn, up to and including the next generation prompt."""
    returns: tuple[ToolReturn, ...]
    done: bool
    reward: float | None
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The environment's named numbers, of an episode that is done."""
    branch: BranchPoint | None = None
    """Where the observation follows, if not on all tokens so far."""
    turn_reward: float = 0.0
    """What the turn has earned on the way, of an episode that is not done."""


@dataclass(slots=True)
class _Episode:
    source: EnvironmentSource
    environment: EpisodeEnvironment
    line: CallLine = field(default_factory=CallLine)
    tools: list[ToolSchema] = field(default_factory=list)
    replies: bool = False
    conversation: list[Message] = field(default_factory=list)
    answer: str = ""
    """The text of the last turn."""
    reward: float = 0.0
    """Sum of the rewards before the score."""
    tokens: int = 0
    """Tokens of the trajectory so far."""


class Episodes:
    """Plays all episodes in flight. It belongs to one event loop."""

    def __init__(
        self,
        specs: Sequence[EnvironmentSpec],
        labels: Sequence[str],
        renderer: Renderer,
        *,
        run_directory: Path | None = None,
        images: ImageStore | None = None,
        open_on: OpenOnNode = no_nodes,
    ) -> None:
        """Find the environments, which may keep files in the run's directory; read their tasks.

        ``open_on`` reaches the nodes of workers; ``images`` keeps what environments show.

        Raises:
            EnvironmentBroken: there is no such environment, or the tasks cannot be read.
        """
        self._renderer = renderer
        self._images = images
        self._sources = [
            EnvironmentSource(spec, label, run_directory, open_on)
            for spec, label in zip(specs, labels, strict=True)
        ]
        self._mixture = Mixture([spec.weight for spec in specs])
        self._episodes: dict[TrajectoryId, _Episode] = {}

    @property
    def num_tasks(self) -> int | None:
        """How many tasks its files have, of several environments the fewest; None without files."""
        return min((one.num_tasks for one in self._sources if one.num_tasks), default=None)

    @property
    def running(self) -> int:
        """The number of episodes that were begun and not forgotten."""
        return len(self._episodes)

    @property
    def hung(self) -> int:
        """The number of abandoned calls that have not returned."""
        return sum(source.calls.hung for source in self._sources)

    async def check(self, seed: int) -> int:
        """Begin each first task, forget it, and return the tokens of the longest prompt.

        It finds an environment that cannot work at start-up, before the GPUs are busy.

        Raises:
            EnvironmentBroken: the episode cannot be begun.
        """
        probe, lengths = _PROBE, []
        for source in self._sources:
            try:
                prompt = await self._begin(probe, source, 0, task_seed=seed, seed=seed)
                lengths.append(len(prompt))
            finally:
                self.forget(probe)
        return max(lengths)

    def environment_of(self, trajectory: TrajectoryId) -> str:
        """The label of the environment that was begun; empty if there is only one."""
        return self._episodes[trajectory].source.label if len(self._sources) > 1 else ""

    async def start(
        self, trajectory: TrajectoryId, group: int, *, task_seed: int, seed: int
    ) -> array[int]:
        """Make an environment, reset it to the group's task, and return the prompt's token ids.

        ``group`` counts the groups of the run. ``task_seed`` is the run's, so that the members of a
        group get one task; ``seed`` is the trajectory's own, so that their tools do not all fail at
        the same moment.

        Raises:
            EnvironmentBroken: the environment failed, or too many calls hang.
        """
        number, index = self._mixture.of(group)
        source = self._sources[number]
        return await self._begin(trajectory, source, index, task_seed=task_seed, seed=seed)

    async def _begin(
        self,
        trajectory: TrajectoryId,
        source: EnvironmentSource,
        index: int,
        *,
        task_seed: int,
        seed: int,
    ) -> array[int]:
        environment, task = await source.begin(), source.task(index, task_seed)
        episode = self._episodes[trajectory] = _Episode(source, environment)
        try:
            opening = await episode.source.run(
                episode.line, "reset", lambda: environment.reset(task, index, task_seed, seed)
            )
            episode.tools, episode.replies = opening.tools, opening.replies
            episode.conversation = list(opening.messages)
            if opening.replies:
                self._renderer.require("user")
            prompt = array("i", self._renderer.prompt(opening.messages, opening.tools))
            self._keep_images(trajectory, episode, prompt, opening.messages)
            return prompt
        except BaseException:  # a cancellation too: what reset has opened must be closed
            self.forget(trajectory)
            raise

    async def advance(
        self,
        trajectory: TrajectoryId,
        generated_ids: Sequence[int],
        finish_reason: str,
        logprobs: Sequence[float] = (),
    ) -> TurnResult:
        """Run the tool calls of a generated turn, let the user answer it, or score it.

        ``finish_reason`` is vLLM's; ``length`` means that the turn was cut. ``logprobs`` are not
        used: no environment asks for them, as an agent may.

        Raises:
            EnvironmentBroken: the environment failed.
        """
        episode = self._episodes[trajectory]
        earned_before = episode.reward
        turn = self._renderer.read_turn(generated_ids, episode.tools)
        calls = _complete(turn.calls) if finish_reason == "length" else turn.calls
        episode.answer = turn.text
        episode.conversation.append(_assistant(turn, calls))
        if calls:
            said, returns, over = await self._run_tools(episode, calls)
        else:
            said, over = await self._reply(episode)
            returns = ()
        episode.conversation += said
        if over:
            return await self._score(episode, returns)
        tokens = self._renderer.extend(said, after=generated_ids)
        episode.tokens += len(generated_ids)
        self._keep_images(trajectory, episode, tokens, said)
        earned = episode.reward - earned_before
        return TurnResult(array("i", tokens), returns, False, None, turn_reward=earned)

    async def finish(self, trajectory: TrajectoryId) -> TurnResult:
        """Score the last turn's text, without its tool calls, since a limit is reached.

        Raises:
            EnvironmentBroken: the environment failed.
        """
        return await self._score(self._episodes[trajectory])

    def forget(self, trajectory: TrajectoryId) -> None:
        """Drop the episode, if there is one, and close its environment."""
        episode = self._episodes.pop(trajectory, None)
        if episode is not None:
            episode.environment.close(episode.line)

    async def close(self) -> None:
        """Forget all episodes, and end the threads, except those that hang, and the processes."""
        for trajectory in list(self._episodes):
            self.forget(trajectory)
        await asyncio.gather(*(source.close() for source in self._sources))

    def _keep_images(
        self,
        trajectory: TrajectoryId,
        episode: _Episode,
        tokens: Sequence[int],
        messages: Sequence[Message],
    ) -> None:
        """Keep the images of messages whose tokens come next in the trajectory."""
        if self._images is not None and trajectory.group != _PROBE.group:
            for start, count, png in self._renderer.images_in(tokens, messages):
                image = ShownImage(episode.tokens + start, count, png)
                self._images.add(trajectory, image)
        episode.tokens += len(tokens)

    async def _run_tools(
        self, episode: _Episode, calls: Iterable[ToolCall | Malformed]
    ) -> tuple[list[Message], tuple[ToolReturn, ...], bool]:
        """Run calls in order, until one of them ends the episode."""
        said: list[Message] = []
        returns: list[ToolReturn] = []
        for call in calls:
            message, returned, over = await self._step(episode, call)
            said.append(message)
            returns.append(returned)
            if over:
                return said, tuple(returns), True
        return said, tuple(returns), False

    async def _step(
        self, episode: _Episode, call: ToolCall | Malformed
    ) -> tuple[Message, ToolReturn, bool]:
        """Return what a tool says, what is recorded of it, and whether the episode is over."""
        refused = _refusal(call, episode.tools)
        if refused is not None or isinstance(call, Malformed):
            text = refused or ""
            returned = ToolReturn(INVALID, ToolOutcome.ERROR, 0.0, len(text))
            return _said(text, returned), returned, False
        if episode.line.hung:
            return _timed_out(call, 0.0)
        environment, calls = episode.environment, episode.source.calls
        try:
            seen = await calls.run(episode.line, lambda: environment.step(call))
        except TimeoutError:
            return _timed_out(call, calls.limit_s)
        _take(episode, seen.reward, seen.tools)
        returned = _returned(call, seen)
        return _said(seen.text, returned, seen.images), returned, seen.done

    async def _reply(self, episode: _Episode) -> tuple[list[Message], bool]:
        """What the user says to an answer, and whether the episode is over."""
        if not episode.replies:
            return [], True
        environment, answer = episode.environment, episode.answer
        said = await episode.source.run(episode.line, "reply", lambda: environment.reply(answer))
        _take(episode, said.reward, said.tools)
        return said.messages, said.done

    async def _score(self, episode: _Episode, returns: tuple[ToolReturn, ...] = ()) -> TurnResult:
        environment, answer = episode.environment, episode.answer
        conversation = list(episode.conversation)
        scored = await episode.source.run(
            episode.line, "score", lambda: environment.score(answer, conversation)
        )
        reward = scored.reward + episode.reward
        return TurnResult(array("i"), returns, done=True, reward=reward, metrics=scored.metrics)


def _take(episode: _Episode, reward: float, tools: list[ToolSchema] | None) -> None:
    episode.reward += reward
    if tools is not None:
        episode.tools = tools


def _assistant(turn: GeneratedTurn, calls: Iterable[ToolCall | Malformed]) -> Message:
    message: Message = {"role": "assistant", "content": turn.text}
    readable = [call for call in calls if isinstance(call, ToolCall)]
    if readable:
        message["tool_calls"] = readable
    if turn.reasoning:
        message["reasoning"] = turn.reasoning
    return message


def _returned(call: ToolCall, seen: ToolAnswer) -> ToolReturn:
    outcome = ToolOutcome.ERROR if seen.failed else ToolOutcome.OK
    return ToolReturn(call.name, outcome, seen.seconds, seen.size)


def _timed_out(call: ToolCall, seconds: float) -> tuple[Message, ToolReturn, bool]:
    returned = ToolReturn(call.name, ToolOutcome.TIMEOUT, seconds, len(_TIMED_OUT))
    return _said(_TIMED_OUT, returned), returned, False


def _said(text: str, returned: ToolReturn, images: Sequence[bytes] = ()) -> Message:
    message: Message = {"role": "tool", "content": text, "name": returned.tool}
    if images:
        message["images"] = images
    return message


def _refusal(call: ToolCall | Malformed, tools: Sequence[ToolSchema]) -> str | None:
    """Say why a call is not run, for the model to read; None if it is."""
    if isinstance(call, Malformed):
        return f"invalid tool call: {call.reason}"
    return objection(call, tools)


def _complete(calls: Iterable[ToolCall | Malformed]) -> list[ToolCall | Malformed]:
    """Return the complete calls of a turn that was cut by its length."""
    return [call for call in calls if isinstance(call, ToolCall) or not call.cut]
