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

**Roles.** Each role of an environment has a conversation of its own (``speakers``), a branch of the
trajectory. After a turn the environment says which role speaks next; ``TurnResult.branch`` is then
where that role's tokens go on. Tool calls after one that passed the turn on are not run.

The reward is the score and whatever rewards there were on the way; with roles the mean of theirs,
and each role's own is the metric ``reward/ROLE``. Latency is that of the call
itself; size is the length of the tool's text in characters, before it is shortened.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from libra_cli.config.environment import EnvironmentSpec
from libra_cli.core.types import (
    INVALID,
    BranchPoint,
    Seconds,
    Tokens,
    ToolOutcome,
    ToolReturn,
    TrajectoryId,
)
from libra_cli.envs.protocol import Message, ToolCall, ToolSchema
from libra_cli.envs.session import Answered, ToolAnswer
from libra_cli.envs.tools import Malformed, objection
from libra_cli.runtime.episodes.calls import CallLine
from libra_cli.runtime.episodes.places import (
    EnvironmentSource,
    EnvironmentSources,
    EpisodeEnvironment,
)
from libra_cli.runtime.episodes.renderer import Renderer
from libra_cli.runtime.episodes.speakers import Speaker, Speakers
from libra_cli.runtime.episodes.tool_formats.formats import GeneratedTurn
from libra_cli.runtime.episodes.workers import OpenOnNode, no_nodes
from libra_cli.runtime.store.images import ImageStore, ShownImage

_TIMED_OUT = "tool timed out"
_PASSED_ON = "not run: the turn has passed to another"
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
    """What the turn has earned on the way, of an episode without roles that is not done."""
    role: str = ""
    """The role that speaks next, of an episode with roles that is not done."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """What roles have earned that was not told before, by name."""


@dataclass(slots=True)
class _Episode:
    source: EnvironmentSource
    environment: EpisodeEnvironment
    line: CallLine
    replies: bool = False
    speakers: Speakers = field(init=False)
    """Who speaks in it, once it has begun."""
    answer: str = ""
    """The text of the last turn."""


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
        self._sources = EnvironmentSources(specs, labels, run_directory, open_on)
        self._episodes: dict[TrajectoryId, _Episode] = {}

    @property
    def num_tasks(self) -> int | None:
        """How many tasks its files have, of several environments the fewest; None without files."""
        return self._sources.num_tasks

    @property
    def running(self) -> int:
        """The number of episodes that were begun and not forgotten."""
        return len(self._episodes)

    @property
    def hung(self) -> int:
        """The number of abandoned calls that have not returned."""
        return sum(source.calls.hung for source in self._sources)

    async def prepare(self, note: Callable[[str], None]) -> None:
        """Have made what environments would else make in their first episodes on each host.

        Raises:
            EnvironmentBroken: it cannot be made.
        """
        for source in self._sources:
            await source.prepare(note)

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

    def role_of(self, trajectory: TrajectoryId) -> str:
        """The role whose turn it is; empty if the environment has none."""
        return self._episodes[trajectory].speakers.current.role

    def turn_limit_of(self, trajectory: TrajectoryId) -> Tokens | None:
        """Return None: an environment does not say how long a turn may be."""
        return None

    def waited_of(self, trajectory: TrajectoryId) -> Seconds:
        """Seconds that the trajectory has waited so far for calls of its environment to begin."""
        return self._episodes[trajectory].line.waited_s

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
        source, index = self._sources.of(group)
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
        line = CallLine()
        environment, task = await source.begin(line), source.task(index, task_seed)
        episode = self._episodes[trajectory] = _Episode(source, environment, line)
        try:
            opening = await episode.source.run(
                episode.line, "reset", lambda: environment.reset(task, index, task_seed, seed)
            )
            episode.replies, episode.speakers = opening.replies, Speakers(opening)
            if opening.replies or opening.roles:
                self._renderer.require("user")
            return self._read(trajectory, episode.speakers.current)
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
        speaker = episode.speakers.current
        turn = self._renderer.read_turn(generated_ids, speaker.tools)
        calls = _complete(turn.calls) if finish_reason == "length" else turn.calls
        episode.answer = turn.text
        speaker.say(generated_ids, _assistant(turn, calls))
        if calls:
            returns, over = await self._run_tools(episode, calls)
        else:
            returns, over = (), await self._reply(episode)
        if over:
            return await self._score(episode, returns)
        return self._go_on(trajectory, episode.speakers, after=speaker, returns=returns)

    def _go_on(
        self,
        trajectory: TrajectoryId,
        speakers: Speakers,
        *,
        after: Speaker,
        returns: tuple[ToolReturn, ...],
    ) -> TurnResult:
        """Let the next one speak, in its branch if that is another than ``after``'s."""
        branch = None if speakers.current is after else speakers.point
        earned, tokens = speakers.take_earned(), self._read(trajectory, speakers.current)
        alone = earned.pop("", 0.0)
        role = speakers.current.role
        return TurnResult(
            tokens, returns, False, None, {}, branch, turn_reward=alone, role=role, rewards=earned
        )

    def _read(self, trajectory: TrajectoryId, speaker: Speaker) -> array[int]:
        """Return the tokens that a speaker reads first: its prompt, or what follows its turn."""
        messages = speaker.read()
        if speaker.last is None:
            tokens = array("i", self._renderer.prompt(messages, speaker.tools))
        else:
            tokens = array("i", self._renderer.extend(messages, after=speaker.last))
        self._keep_images(trajectory, speaker, tokens, messages)
        speaker.tokens += len(tokens)
        return tokens

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
        speaker: Speaker,
        tokens: Sequence[int],
        messages: Sequence[Message],
    ) -> None:
        """Keep the images of messages whose tokens come next in the trajectory."""
        if self._images is not None and trajectory.group != _PROBE.group:
            for start, count, png in self._renderer.images_in(tokens, messages):
                self._images.add(trajectory, ShownImage(speaker.tokens + start, count, png))

    async def _run_tools(
        self, episode: _Episode, calls: Iterable[ToolCall | Malformed]
    ) -> tuple[tuple[ToolReturn, ...], bool]:
        """Run calls in order, until one of them ends the episode; return whether one has."""
        speaker = episode.speakers.current
        returns: list[ToolReturn] = []
        for call in calls:
            returned, over = await self._step(episode, speaker, call)
            returns.append(returned)
            if over:
                return tuple(returns), True
        return tuple(returns), False

    async def _step(
        self, episode: _Episode, speaker: Speaker, call: ToolCall | Malformed
    ) -> tuple[ToolReturn, bool]:
        """Let a speaker hear what its tool says; return what is recorded of that, and whether the
        episode is over.
        """
        speaks = episode.speakers.current is speaker
        refused = _refusal(call, speaker.tools) if speaks else _PASSED_ON
        if refused is not None or isinstance(call, Malformed):
            text = refused or ""
            invalid = ToolReturn(INVALID, ToolOutcome.ERROR, 0.0, len(text))
            return _heard(speaker, text, invalid), False
        if episode.line.hung:
            return _timed_out(speaker, call, 0.0), False
        environment, calls = episode.environment, episode.source.calls
        try:
            seen = await calls.run(episode.line, lambda: environment.step(call))
        except TimeoutError:
            return _timed_out(speaker, call, calls.limit_s), False
        returned = _heard(speaker, seen.text, _returned(call, seen), seen.images)
        _take(episode.speakers, seen)
        return returned, seen.done

    async def _reply(self, episode: _Episode) -> bool:
        """Let the speaker, or the next one, hear what is said to an answer; return whether the
        episode is over.
        """
        if not episode.replies:
            return True
        environment, answer = episode.environment, episode.answer
        said = await episode.source.run(episode.line, "reply", lambda: environment.reply(answer))
        _take(episode.speakers, said)
        return said.done

    async def _score(self, episode: _Episode, returns: tuple[ToolReturn, ...] = ()) -> TurnResult:
        environment, answer, speakers = episode.environment, episode.answer, episode.speakers
        conversation = speakers.conversation
        scored = await episode.source.run(
            episode.line, "score", lambda: environment.score(answer, conversation)
        )
        speakers.earn(scored.rewards or {"": scored.reward})
        named = {**scored.metrics, **speakers.metrics}
        earned = speakers.take_earned() if speakers.roles else {}
        return TurnResult(array("i"), returns, True, speakers.reward, named, rewards=earned)


def _take(speakers: Speakers, said: ToolAnswer | Answered) -> None:
    """Take in what roles have earned, who speaks next, and what that one reads and can call."""
    speakers.earn({speakers.current.role: said.reward})
    speakers.earn(said.rewards)
    speakers.pass_to(said.role or speakers.current.role, said.messages)
    if said.tools is not None:
        speakers.current.tools = said.tools


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


def _timed_out(speaker: Speaker, call: ToolCall, seconds: float) -> ToolReturn:
    returned = ToolReturn(call.name, ToolOutcome.TIMEOUT, seconds, len(_TIMED_OUT))
    return _heard(speaker, _TIMED_OUT, returned)


def _heard(
    speaker: Speaker, text: str, returned: ToolReturn, images: Sequence[bytes] = ()
) -> ToolReturn:
    """Let a speaker hear a tool's text; returns what is recorded of it."""
    message: Message = {"role": "tool", "content": text, "name": returned.tool}
    if images:
        message["images"] = images
    speaker.hear([message])
    return returned


def _refusal(call: ToolCall | Malformed, tools: Sequence[ToolSchema]) -> str | None:
    """Say why a call is not run, for the model to read; None if it is."""
    if isinstance(call, Malformed):
        return f"invalid tool call: {call.reason}"
    return objection(call, tools)


def _complete(calls: Iterable[ToolCall | Malformed]) -> list[ToolCall | Malformed]:
    """Return the complete calls of a turn that was cut by its length."""
    return [call for call in calls if isinstance(call, ToolCall) or not call.cut]
