"""The tokens of a trajectory as messages.

What the policy generated is known from the spans of its versions, and is the assistant's. What lies
between is divided where a chat template begins a message. Templates whose marks are not known give
one message ``context`` for all that lies between two generated turns. Marks that a tool or a user
wrote as plain text divide too: this is for people to read, and the tokens are as they were.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path

from libra_cli.config.errors import StateError
from libra_cli.core.records import TurnRecord
from libra_cli.report.trajectories.choice import PlayedTrajectory
from libra_cli.report.trajectories.tokens import (
    ShownBranch,
    branches_of,
    decoder_of,
    token_texts,
)
from libra_cli.runtime.store.reader import Reader

ASSISTANT = "assistant"
_BEGIN = re.compile(
    r"<\|im_start\|>(?P<chatml>[\w-]+)\n?"  # ChatML: Qwen, SmolLM, Kimi and many more
    r"|<\|start_header_id\|>(?P<llama>[\w-]+)<\|end_header_id\|>\s*"
    r"|<(?:start_of_turn>|\|turn>)(?P<gemma>[\w-]+)\n?"
    r"|<\|start\|>(?P<gpt_oss>[\w.-]+)[^<]*(?:<\|channel\|>\w+)?[^<]*<\|message\|>"
    r"|<\|(?P<glm>system|user|assistant|observation)\|>\n?"
    r"|<｜(?P<deepseek>User|Assistant)｜>"
    r"|\[(?P<mistral>SYSTEM_PROMPT|INST|TOOL_RESULTS|AVAILABLE_TOOLS)\]"
)
_END = re.compile(
    r"(?:<\|im_end\|>|<\|eot_id\|>|<\|eom_id\|>|<end_of_turn>|<turn\|>|<\|end\|>|<\|call\|>"
    r"|<\|endoftext\|>|<｜end▁of▁sentence｜>|</s>|\[/[A-Z_]+\])\s*\Z"
)
_TOOL = re.compile(r"\s*<tool_response>\n?")
_ROLES = {
    "model": ASSISTANT,
    "Assistant": ASSISTANT,
    "User": "user",
    "INST": "user",
    "observation": "tool",
    "ipython": "tool",
    "TOOL_RESULTS": "tool",
    "SYSTEM_PROMPT": "system",
    "AVAILABLE_TOOLS": "system",
    "developer": "system",
}
"""Names of roles that templates give, where they are not the usual ones."""


@dataclass(frozen=True, slots=True)
class ShownToken:
    """The text of a token, or of several of which the same is known."""

    text: str
    version: int | None = None
    advantage: float | None = None
    logprob: float | None = None
    ratio: float | None = None
    """The trainer's probability over the rollout policy's; None where it is not known."""


@dataclass(frozen=True, slots=True)
class ShownMessage:
    """A message; ``turn`` counts the generated ones from 1 and is None for those of others."""

    role: str
    tokens: Sequence[ShownToken]
    turn: int | None = None
    length: int = 0
    """Tokens of a generated message; 0 for messages of others."""

    @property
    def text(self) -> str:
        return "".join(token.text for token in self.tokens)

    @property
    def versions(self) -> list[int]:
        """The versions that generated it, the oldest first."""
        return sorted({token.version for token in self.tokens if token.version is not None})

    @property
    def advantages(self) -> list[float]:
        """The advantages of its tokens, in order, each time that they change."""
        known = [token.advantage for token in self.tokens if token.advantage is not None]
        return [value for value, _ in groupby(known)]


@dataclass(frozen=True, slots=True)
class PlayedConversation:
    """One trajectory to read, branch by branch, last the one that it ended in."""

    run_dir: Path
    played: PlayedTrajectory
    turns: Sequence[TurnRecord]
    tokens: Sequence[ShownBranch]
    """One entry for each branch; empty if the trajectory was never finished."""
    branches: Sequence[Sequence[ShownMessage]]
    """The messages of each branch; empty if there is no tokenizer."""
    problem: str
    """Why there is no tokenizer, and what to do; empty if there is one."""


def conversation_of(
    reader: Reader, played: PlayedTrajectory, *, by_token: bool = True
) -> PlayedConversation:
    """The messages of a trajectory, and what is known of its turns; see ``messages_of``.

    Raises:
        StateError: its tokens cannot be read.
    """
    tokens = branches_of(reader, played.row)
    where = "group_id = ? AND member = ? AND attempt = ?"
    turns = reader.rows(TurnRecord, where, played.id)
    try:
        decode = decoder_of(reader.run_dir)
    except StateError as error:
        problem = f"{error}; {error.hint}"
        return PlayedConversation(reader.run_dir, played, turns, tokens, (), problem)
    told = [list(messages_of(branch, decode, by_token=by_token)) for branch in tokens]
    return PlayedConversation(reader.run_dir, played, turns, tokens, told, "")


def messages_of(
    branch: ShownBranch, decode: Callable[[Sequence[int]], str], *, by_token: bool = True
) -> Iterator[ShownMessage]:
    """The messages of a branch, in order.

    ``by_token``: each generated token by itself, which takes some hundred times as long.
    """
    texts = token_texts(branch.token_ids, decode) if by_token else None

    def plain(start: int, end: int) -> str:
        return "".join(texts[start:end]) if texts else decode(branch.token_ids[start:end])

    def text(start: int, end: int) -> str:
        said, at = "", start
        for one in branch.images:
            if start <= one.start < end:
                shown = f"[image {one.width}x{one.height} {one.name[:8]}]"
                said, at = said + plain(at, one.start) + shown, one.start + one.tokens
        return said + plain(at, end)

    turn, at = 0, 0
    for start, end in _generated(branch):
        yield from _context(text(at, start), first=not turn)
        turn, at = turn + 1, end
        cuts = range(start, end) if texts else _cuts(branch, start, end)
        tokens = [_token(branch, one, text(one, after)) for one, after in pairwise([*cuts, end])]
        yield ShownMessage(ASSISTANT, tokens, turn, end - start)
    yield from _context(text(at, len(branch.token_ids)), first=not turn)


def _cuts(branch: ShownBranch, start: int, end: int) -> list[int]:
    """Return where the version or the advantage changes, as token numbers from ``start`` on."""
    changes = [span.start for span in branch.spans] + [at for at, _ in branch.advantages]
    return sorted({start, *(at for at in changes if start < at < end)})


def _generated(branch: ShownBranch) -> Iterator[tuple[int, int]]:
    """The turns: spans that touch are one, in which the version changed."""
    start = end = -1
    for span in branch.spans:
        if span.start != end:
            if end >= 0:
                yield start, end
            start = span.start
        end = span.end
    if end >= 0:
        yield start, end


def _token(branch: ShownBranch, number: int, text: str) -> ShownToken:
    logprob = branch.logprobs[number] if branch.logprobs else None
    advantage, ratio = branch.advantage(number), branch.ratio(number)
    return ShownToken(text, branch.version(number), advantage, logprob, ratio)


def _context(text: str, *, first: bool) -> Iterator[ShownMessage]:
    """The messages of what was not generated; ends of turns and empty messages are left out."""
    marks = list(_BEGIN.finditer(text))
    role, at = "context", 0
    for begin, end, following in [
        *((mark.start(), mark.end(), _role(mark)) for mark in marks),
        (len(text), len(text), ""),
    ]:
        said = _END.sub("", text[at:begin]).strip("\n")
        if _TOOL.match(said):
            role, said = "tool", _without_marks(said)
        # What is before the first mark is the end of the turn before, or of the template's.
        if said and (role != "context" or not marks or (first and said.strip())):
            yield ShownMessage(role, [ShownToken(said)])
        role, at = following, end


def _without_marks(said: str) -> str:
    """Several tools' answers, without the marks of the template."""
    answers = re.findall(r"<tool_response>\n?(.*?)\n?</tool_response>", said, re.DOTALL)
    return "\n".join(answers) if answers else _TOOL.sub("", said)


def _role(mark: re.Match[str]) -> str:
    name = mark[mark.lastgroup] if mark.lastgroup else "context"
    return _ROLES.get(name, name)
