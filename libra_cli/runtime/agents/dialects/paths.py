"""Which dialect a path speaks, and the list of models that every dialect's clients can read."""

from __future__ import annotations

from libra_cli.runtime.agents.dialects.anthropic import AnthropicMessages
from libra_cli.runtime.agents.dialects.chat import ChatCompletions
from libra_cli.runtime.agents.dialects.conversation import BadRequest, Dialect, Json
from libra_cli.runtime.agents.dialects.responses import Responses

_DIALECTS: tuple[tuple[str, Dialect], ...] = (
    ("/chat/completions", ChatCompletions()),
    ("/responses", Responses()),
    ("/messages", AnthropicMessages()),
    ("/messages/count_tokens", AnthropicMessages()),
)


def dialect_of(path: str) -> Dialect:
    """Return the dialect of a request's path; what stands before its last parts does not matter.

    Raises:
        BadRequest: no dialect has such a path; its status is 404.
    """
    bare = path.partition("?")[0].rstrip("/")
    for ending, dialect in _DIALECTS:
        if bare.endswith(ending):
            return dialect
    served = ", ".join(f"/v1{ending}" for ending, _ in _DIALECTS)
    raise BadRequest(f"{bare} is not served here; there are {served}", status=404)


def models(name: str, max_model_len: int) -> Json:
    """Return the answer to ``GET /v1/models`` in OpenAI's words and Anthropic's at once.

    ``max_model_len`` is the longest context in tokens, in vLLM's words.
    """
    model = {
        "id": name,
        "object": "model",
        "type": "model",
        "display_name": name,
        "created": 0,
        "created_at": "1970-01-01T00:00:00Z",
        "owned_by": "libra",
        "max_model_len": max_model_len,
    }
    return {"object": "list", "data": [model], "has_more": False, "first_id": name, "last_id": name}
