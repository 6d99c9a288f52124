"""The run's frozen models for its agents, behind the endpoint that answers them for the policy.

    /t/KEY/models/NAME/v1/...

An agent has one port and one key, wherever it runs: in the controller, on another host, in a
sandbox. So what it asks a model is handed on from there, and the key of all models stays here.
"""

from __future__ import annotations

from collections.abc import Collection

import aiohttp
from aiohttp import web

from libra_cli.config.frozen_models import ModelsAddress
from libra_cli.runtime.agents.dialects.conversation import BadRequest
from libra_cli.runtime.frozen.endpoint import handed_back, is_below_v1

PATH = "/models/"
_NO_LIMIT = aiohttp.ClientTimeout(total=None)
"""The endpoint waits for a server of the model; whoever asks has a limit of its own."""


class AgentModels:
    """Hands requests on to the models that the recipe shows its agents."""

    def __init__(self, names: Collection[str], address: ModelsAddress) -> None:
        self._names = names
        self._address = address

    async def handed_on(self, http: web.Request, path: str) -> web.StreamResponse:
        """Return the answer of the model that a path below ``PATH`` names.

        Raises:
            BadRequest: agents see no such model, or nothing is there.
        """
        name, _, rest = path.removeprefix(PATH).partition("/")
        if name not in self._names:
            known = ", ".join(self._names) or "none"
            raise BadRequest(f"agents see no model {name!r}; agent.served: {known}", status=404)
        if not is_below_v1(rest):
            raise BadRequest(f"{path} is not there, but what is below {PATH}{name}/v1", status=404)
        headers = {
            "Content-Type": http.headers.get("Content-Type", "application/json"),
            "Authorization": f"Bearer {self._address.token.get_secret_value()}",
        }
        url, body = f"{self._address.url}/{name}/{rest}", await http.read()
        async with (
            aiohttp.ClientSession(timeout=_NO_LIMIT) as session,
            session.request(
                http.method, url, params=http.query, data=body or None, headers=headers
            ) as answer,
        ):
            return await handed_back(http, answer)
