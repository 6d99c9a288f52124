"""One trajectory as its agent plays it: HTTP requests in, one at a time, generated turns out.

    the agent        POST            the next POST          POST, of other messages     ends
    here             ask ... said    ask ... said           ask (a branch) ... said     end
    the machine      prompt, turn    observation, turn      branch point, turn          reward

A request waits in line while another one of its trajectory is answered. It is matched with the
turns before (``matching``): the exact tokens of the turn that it continues are kept, and what is
new is rendered after them. A request that is told to be sent again is answered from the record.

A limit is answered with status 400 and words, which ends the loops of agents; 429 would be tried
again. What would not fit the longest context, or is a branch too many, is refused by itself: the
agent may go on with something shorter. After ``limit`` everything is refused.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import cast

from libra_cli.config.errors import AgentFailed, LibraError
from libra_cli.core.types import BranchPoint, Seconds, Tokens, ToolOutcome, ToolReturn
from libra_cli.envs.protocol import Message, ToolCall
from libra_cli.runtime.agents.dialects.conversation import (
    AgentReply,
    AgentRequest,
    BadRequest,
    FinishReason,
    ReplyCall,
)
from libra_cli.runtime.agents.matching import Conversations, Match, Node, Rule
from libra_cli.runtime.episodes.renderer import Renderer
from libra_cli.runtime.episodes.tool_formats.formats import GeneratedTurn

ENDED = 409
"""The status of a request to a trajectory that has ended."""
THINKING = "agent"
"""The tool of what an agent did between two turns without a single tool call."""


@dataclass(frozen=True, slots=True)
class PlayLimits:
    """The limits of one trajectory that an agent plays."""

    max_len: Tokens
    """Tokens of the longest context, what is generated included."""
    max_branches: int


@dataclass(frozen=True, slots=True)
class SaidTurn:
    """A generated turn. ``finish_reason`` is vLLM's; ``length`` means that it was cut."""

    token_ids: array[int]
    logprobs: Sequence[float]
    finish_reason: str


@dataclass(frozen=True, slots=True)
class Ask:
    """A request for a turn: ``tokens`` follow those of ``branch``, or all that there are."""

    tokens: array[int]
    branch: BranchPoint | None
    chars: int | None
    """Length of the messages that are new; None: another reply to the request before."""
    answer: asyncio.Future[SaidTurn]
    turn_limit: Tokens | None = None
    """The most tokens of the turn, if the agent has said so."""


@dataclass(frozen=True, slots=True)
class AgentEnd:
    """The agent has ended: with a reward of its own, without one, or with an error."""

    reward: float | None = None
    error: AgentFailed | None = None


@dataclass(slots=True)
class AgentPlay:
    """The requests of one agent and the turns that they were answered with."""

    key: str
    model: str
    renderer: Renderer
    limits: PlayLimits
    rule: Rule = "strict"
    inbox: asyncio.Queue[Ask | AgentEnd] = field(default_factory=asyncio.Queue)
    """What the agent did, in order, for ``AgentEpisodes`` to take."""
    taken: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once an agent has begun with the task."""
    reward: float | None = None
    """What the agent has said its reward is."""
    refusal: str = ""
    """Why the last request that was refused was."""
    forgotten: bool = False
    """Whether nobody waits for what the agent does any more."""
    _conversations: Conversations = field(init=False)
    _line: asyncio.Lock = field(default_factory=asyncio.Lock)
    _asked: Ask | None = None
    _closed: BadRequest | None = None
    _last: Node | None = None
    _generated: int = 0
    """Turns that were generated; each becomes a reply, unless it cannot be read."""
    _over: bool = False
    """Whether the last request was more than the limits allow."""
    _lengths: dict[int, Tokens] = field(default_factory=dict)
    """Tokens of each branch, by its number."""

    def __post_init__(self) -> None:
        self._conversations = Conversations(self.rule)

    # -- the agent's side -------------------------------------------------------------------------

    async def answer(self, request: AgentRequest) -> tuple[AgentReply, ...]:
        """Answer a request when those before it have been answered.

        Raises:
            BadRequest: it cannot be answered; why is in words.
        """
        async with self._line:
            try:
                return await self._answer(request)
            except LibraError as error:  # of the renderer
                raise BadRequest(str(error)) from error

    async def _answer(self, request: AgentRequest) -> tuple[AgentReply, ...]:
        if recorded := self._conversations.recorded(request):
            return recorded
        if self._closed is not None:
            raise self._closed
        match = self._conversations.find(request)
        chars: int | None = self._chars_of(match, counts=request.counts)
        branch, tokens = self._place(match)
        if request.counts:
            return (self._counted((branch.kept if branch else 0) + len(tokens)),)
        replies: list[AgentReply] = []
        # The event that tells it has room for 64 bits, and an agent may ask for any number.
        most = None if request.max_tokens is None else min(request.max_tokens, self.limits.max_len)
        for _ in range(request.n):
            begun = branch.kept if branch else 0
            said = await self._turn(tokens, branch, chars, most)
            reply = self._reply(request, match, said, begun + len(tokens))
            if request.return_token_ids:
                reply = replace(reply, prompt_ids=self._prompt_ids(match))
            node = self._last = self._conversations.add(match, request, reply)
            self._lengths[node.branch] = node.tokens
            replies.append(reply)
            # Another reply to the same request begins where this one did.
            branch, tokens = BranchPoint(self._last.branch, reply.prompt_tokens), array("i")
            chars = None
        return tuple(replies)

    def asked_too_much(self) -> None:
        """Take in that its last request was longer than any that is read."""
        self._over = True

    def _chars_of(self, match: Match, *, counts: bool) -> int:
        """The length of what is new; raises BadRequest if no context has room for so much.

        Nothing else is answered while it is encoded, a second for every million or two.
        """
        new = "".join(message["content"] for message in match.new)
        fewest = self.renderer.fewest_tokens(new, self.limits.max_len)
        if fewest >= self.limits.max_len:
            self._over = self._over or not counts
            raise _too_long(f"at least {fewest}", self.limits.max_len)
        return len(new)

    def _counted(self, tokens: Tokens) -> AgentReply:
        return AgentReply(id=_new_id(), model=self.model, text="", prompt_tokens=tokens)

    def _place(self, match: Match) -> tuple[BranchPoint | None, array[int]]:
        """Return where a request goes on, None for the beginning, and the tokens that follow."""
        if match.node is not None:
            point: BranchPoint | None = BranchPoint(match.node.branch, match.node.tokens)
        else:
            point = BranchPoint(0, 0) if self._conversations.turns else None
        return point, self._rendered(match.node, match)

    def _rendered(self, after: Node | None, part: Match | Node) -> array[int]:
        """The tokens of the new messages after a node's reply; without one, from the beginning."""
        if after is None:
            return array("i", self.renderer.prompt(part.new, part.tools))
        said = after.reply.token_ids
        return array("i", self.renderer.extend(part.new, after=said))

    def _prompt_ids(self, match: Match) -> array[int]:
        """All tokens before a reply. Rendering is a function, so they need not be kept."""
        whole, part, after = array("i"), cast("Match | Node", match), match.node
        while True:
            whole = self._rendered(after, part) + whole
            if after is None:
                return whole
            whole = array("i", after.reply.token_ids) + whole
            part, after = after, after.parent

    async def _turn(
        self,
        tokens: array[int],
        branch: BranchPoint | None,
        chars: int | None,
        turn_limit: Tokens | None,
    ) -> SaidTurn:
        if self._closed is not None:  # between two replies to one request
            raise self._closed
        if self._generated != self._conversations.turns:  # tokens are there that nobody knows of
            raise BadRequest("a turn could not be read: the trajectory cannot go on", status=500)
        self._check_limits(tokens, branch)
        future: asyncio.Future[SaidTurn] = asyncio.get_running_loop().create_future()
        self._asked = Ask(tokens, branch, chars, future, turn_limit)
        self.inbox.put_nowait(self._asked)
        try:
            return await future
        finally:
            self._asked = None

    def _check_limits(self, tokens: array[int], branch: BranchPoint | None) -> None:
        length, most = (branch.kept if branch else 0) + len(tokens), self.limits.max_len
        self._over = True
        if length >= most:
            raise _too_long(f"{length}", most)
        begins = branch is not None and self._lengths[branch.branch] != branch.kept
        if begins and self._conversations.branches >= self.limits.max_branches:
            raise BadRequest(
                f"this trajectory has {self._conversations.branches} branches, and no more are "
                "allowed (agent.max_branches of the recipe): go on from one of them"
            )
        self._over = False

    def _reply(
        self, request: AgentRequest, match: Match, said: SaidTurn, prompt: Tokens
    ) -> AgentReply:
        turn = self.renderer.read_turn(said.token_ids, match.tools)
        calls = tuple(call for call in turn.calls if isinstance(call, ToolCall))
        text, stop = _until(self._text(turn, calls), request.stop if not calls else ())
        # What was cut is beyond the text to stop at, and the agent does not see it.
        is_cut = said.finish_reason == "length" and not stop
        cut: FinishReason = "length" if is_cut else "stop"
        return AgentReply(
            id=_new_id(),
            model=self.model,
            text=text,
            prompt_tokens=prompt,
            reasoning=turn.reasoning,
            calls=tuple(ReplyCall(f"call_{_new_id()}", one.name, one.arguments) for one in calls),
            finish_reason="tool_calls" if calls else cut,
            stop=stop,
            token_ids=said.token_ids,
            logprobs=said.logprobs,
            created_s=int(time.time()),
        )

    def _text(self, turn: GeneratedTurn, calls: Sequence[ToolCall]) -> str:
        """What the agent reads; a call that cannot be read is text, unless others can be."""
        return turn.visible if turn.calls and not calls else turn.text

    # -- the machine's side -----------------------------------------------------------------------

    def said(self, turn: SaidTurn) -> None:
        """The turn that was asked for last is there."""
        if self._asked is not None and not self._asked.answer.done():
            self._generated += 1
            self._asked.answer.set_result(turn)

    def limit(self, words: str) -> None:
        """Refuse the request that waits, and every other: the agent is to end."""
        self._close(BadRequest(words))

    def close(self) -> None:
        """Refuse the request that waits and all to come, since the trajectory has ended."""
        self.forgotten = True
        self._close(BadRequest("this trajectory has ended", status=ENDED))
        self.end(AgentEnd())

    def _close(self, why: BadRequest) -> None:
        self._closed = why
        if self._asked is not None and not self._asked.answer.done():
            self._asked.answer.set_exception(why)

    def end(self, end: AgentEnd) -> None:
        """Take in that the agent has ended, perhaps before it began."""
        self.inbox.put_nowait(end)
        self.taken.set()

    @property
    def limited(self) -> bool:
        """Whether an agent that fails may have failed for the sake of a limit."""
        cut = self._last is not None and self._last.reply.finish_reason == "length"
        return self._closed is not None or self._over or cut

    @property
    def turn_limit(self) -> Tokens | None:
        """The most tokens of the turn that is asked for; None: as many as the recipe allows."""
        return self._asked.turn_limit if self._asked else None

    @property
    def turns(self) -> int:
        """How many turns the agent was answered with."""
        return self._conversations.turns

    @property
    def conversation(self) -> list[Message]:
        """The messages that led to the last turn, and the turn."""
        return self._last.conversation() if self._last else []

    @property
    def text(self) -> str:
        """The text of the last turn, without thinking and tool calls."""
        return self._last.reply.text if self._last else ""

    def returned(self, ask: Ask, seconds: Seconds) -> tuple[ToolReturn, ...]:
        """What the agent did between the last turn and this request, as one tool call."""
        if ask.chars is None:
            return ()
        calls = self._last.reply.calls if self._last else ()
        tool = calls[0].name if calls else THINKING
        return (ToolReturn(tool, ToolOutcome.OK, seconds, ask.chars),)


def _too_long(tokens: str, most: Tokens) -> BadRequest:
    return BadRequest(
        f"prompt is too long: {tokens} tokens >= {most} maximum; this model's maximum context "
        f"length is {most} tokens (model.max_len of the recipe)"
    )


def _until(text: str, stops: Sequence[str]) -> tuple[str, str]:
    """Return the text before the first of ``stops`` in it, and that stop, empty without one."""
    found = [(text.index(stop), stop) for stop in stops if stop and stop in text]
    if not found:
        return text, ""
    place, stop = min(found)
    return text[:place], stop


def _new_id() -> str:
    return uuid.uuid4().hex[:24]
