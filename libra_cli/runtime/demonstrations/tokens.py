"""Renders a conversation to the tokens that the policy would have seen and said.

The tokens are put together as those of a trajectory (``runtime.episodes.renderer``): the prompt up
to the first turn, then for each turn the tokens that the template writes of it, to the one that
ends it, and what others say until the next. So a policy that has imitated a conversation is asked
in reinforcement learning with the very tokens that it has learned to answer, and the loss is of the
same tokens as there: those of turns, the token that ends a turn among them.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from libra_cli.config.errors import LibraError
from libra_cli.runtime.demonstrations.conversations import Conversation
from libra_cli.runtime.episodes.renderer import Renderer


@dataclass(slots=True)
class RenderedConversation:
    """Tokens, with a mask that is 1 on the ``turns`` turns that are imitated."""

    token_ids: array[int] = field(default_factory=lambda: array("i"))
    loss_mask: array[int] = field(default_factory=lambda: array("b"))
    turns: int = 0

    def add(self, token_ids: list[int], *, imitated: bool) -> None:
        self.token_ids.extend(token_ids)
        self.loss_mask.extend([int(imitated)] * len(token_ids))


def render_conversation(
    renderer: Renderer, conversation: Conversation, *, max_len: int
) -> RenderedConversation:
    """Render one, up to its last imitated turn and at most ``max_len`` tokens.

    A longer one is cut at its end, as TRL cuts it.

    Raises:
        LibraError: the template cannot render it, or no imitated token is within ``max_len``.
    """
    messages, tools = conversation.messages, conversation.tools
    turns = [index for index, one in enumerate(messages) if one["role"] == "assistant"]
    last = max(index for index, imitated in enumerate(conversation.imitated) if imitated)
    rendered = RenderedConversation()
    rendered.add(renderer.prompt(messages[: turns[0]], tools), imitated=False)
    for index, following in zip(turns, [*turns[1:], len(messages)], strict=True):
        said = renderer.turn(messages[:index], messages[index], tools)
        imitated = conversation.imitated[index]
        rendered.add(said, imitated=imitated)
        rendered.turns += imitated
        if index == last or len(rendered.token_ids) >= max_len:
            break
        rendered.add(renderer.extend(messages[index + 1 : following], after=said), imitated=False)
    del rendered.token_ids[max_len:], rendered.loss_mask[max_len:]
    if not any(rendered.loss_mask):
        raise LibraError(
            f"none of the assistant's tokens is among the first {max_len}, which is all that "
            "model.max_len has room for"
        )
    return rendered
