"""Models that a run serves beside its policy and never trains: a judge, a customer.

A server of one is vLLM's own, on a slot of the pool ``models``. Whoever needs a model says
``served: NAME`` where the URL of somebody's server could stand, for example in a mapping of an
environment's arguments. Before anything asks, ``Recipe.served_at`` writes the run's own endpoint
there. No I/O.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

from pydantic import Field, SecretStr

from libra_cli.config.errors import did_you_mean
from libra_cli.config.fields import Positive, Section
from libra_cli.config.on_resume import MAY_CHANGE
from libra_cli.config.problems import Problem

if TYPE_CHECKING:
    from libra_cli.config.environment import EnvironmentSpec

POOL = "models"
"""The pool of slots that serve frozen models."""
SERVED = "served"
"""The key whose value is a model's name."""
KEY = "LIBRA_MODELS_KEY"
"""The name of the environment's secret that opens the run's endpoint."""
_RESERVED = frozenset({"--uds", "--host", "--port", "--api-key", "--model", "--served-model-name"})


_ROLES = ("rollout", "train", "gradient")
"""What ``libra rebalance --to`` takes beside names of models."""


def is_loopback(url: str) -> bool:
    """Whether a URL is of this machine, so that no proxy is asked for it, nor hears its key."""
    return urlsplit(url).hostname in ("127.0.0.1", "localhost", "::1")


class FrozenModelSpec(Section):
    """A model that is served beside the policy and never trained, by vLLM's own server."""

    on_resume = MAY_CHANGE

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=64)]
    """What ``served`` calls it, for example judge."""
    path: str
    """A Hugging Face model directory, the same on every host that serves it."""
    slots: Positive = 1
    """Slots of the pool models that have a server of it each, the next ones in the recipe's order.
    """
    max_slots: Positive | None = None
    """The most slots that have a server of it, with those of the pool auto that the planner, or an
    order, gives it while the run goes on. Null: as many as ``slots``."""
    max_len: Positive | None = None
    """The most tokens of a request with its answer. Null: the model's own."""
    kv_gib: Positive = 1
    """GiB of KV cache of a server without GPUs."""
    vllm_args: tuple[str, ...] = ()
    """Further arguments of ``vllm serve``, for example of its parser of tool calls."""

    @property
    def seats(self) -> float:
        """Requests that a server answers at once, where ``--max-num-seqs`` says so; infinity
        where it does not, or each of several ranks has as many."""
        words = [word for argument in self.vllm_args for word in argument.split("=", 1)]
        told = {flag.replace("_", "-"): value for flag, value in itertools.pairwise(words)}
        seats = told.get("--max-num-seqs", "")
        is_one = not any(flag.startswith("--data-parallel") for flag in told)
        return int(seats) if is_one and seats.isdecimal() else math.inf

    @property
    def most_slots(self) -> int:
        """The most servers of it that there may be."""
        return self.slots if self.max_slots is None else self.max_slots

    def problems(self) -> Iterator[Problem]:
        """Yield numbers of slots that contradict, and arguments that libra gives itself."""
        if self.name in _ROLES:
            yield Problem(("name",), f"is {self.name}, the name of a role: choose another")
        if self.most_slots < self.slots:
            why = f"is {self.max_slots}, and slots is {self.slots}: raise it, or leave it out"
            yield Problem(("max_slots", "slots"), why)
        for index, argument in enumerate(self.vllm_args):
            flag = argument.split("=", 1)[0].replace("_", "-")
            if flag in _RESERVED:
                yield Problem((f"vllm_args[{index}]",), f"{flag} is set by libra from other fields")


def variable_of(name: str) -> str:
    """The environment variable that tells an agent the URL of a model."""
    return f"LIBRA_MODEL_{re.sub('[^A-Za-z0-9]', '_', name).upper()}_URL"


@dataclass(frozen=True, slots=True)
class ModelsAddress:
    """Where the models of a run answer, and the token that each request brings."""

    url: str
    token: SecretStr

    def url_of(self, name: str) -> str:
        """The base URL of a model."""
        return _url_of(self.url, name)


def _url_of(endpoint: str, name: str) -> str:
    return f"{endpoint}/{name}/v1"


NOWHERE = ModelsAddress("http://127.0.0.1:9", SecretStr("not-served-yet"))
"""Stands for the endpoint while environments are only tried, and nothing is served."""


def frozen_model_problems(
    models: Sequence[FrozenModelSpec],
    pools: Sequence[str],
    asked: Mapping[str, object],
) -> Iterator[Problem]:
    """Yield models without slots, slots without a model, and names that nothing has or asks for.

    ``pools`` are those of all slots; ``asked`` has the name that each key asks for.
    """
    names = [one.name for one in models]
    given, wanted = pools.count(POOL), sum(one.slots for one in models)
    if given != wanted:
        yield Problem(
            ("models" if models else "nodes", "nodes"),
            f"take {wanted} slots, and {given} slots of nodes are of the pool models: give as many "
            "(nodes[].pool: [auto, models])",
        )
    for key, name in asked.items():
        if name not in names:
            told = did_you_mean(str(name), names) if names else ": models names none"
            yield Problem((key, "models"), f"there is no model {name!r}{told}")
    for index, one in enumerate(models):
        if one.most_slots > one.slots and not {"auto", "hybrid"} & {*pools}:
            why = "is more than slots, and no slot is of the pool auto: leave it out, or name one"
            yield Problem((f"models[{index}].max_slots", "nodes"), why)
        if one.name in names[:index]:
            yield Problem((f"models[{index}].name",), f"{one.name!r} is named twice")
        if one.name not in asked.values():
            yield Problem(
                (f"models[{index}].name",),
                f"nothing asks for {one.name!r}: say served: {one.name} where a URL would stand, "
                "as in environment.args, or leave it out",
            )


def open_node_problems(models: Sequence[FrozenModelSpec]) -> Iterator[Problem]:
    """Yield models that are to have slots of nodes which the planner cuts up."""
    for index, one in enumerate(models):
        if one.most_slots > one.slots:
            why = "needs slots that keep their GPUs: say how many slots the nodes have, or leave it"
            yield Problem((f"models[{index}].max_slots", "nodes"), f"{why} out")


def served_in(value: Any, path: str = "") -> dict[str, object]:
    """Return the model's name at every place of arguments that names one, by its key."""
    found: dict[str, object] = {}
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if key == SERVED:
                found[f"{path}.{key}"] = inner
            else:
                found |= served_in(inner, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            found |= served_in(inner, f"{path}[{index}]")
    return found


def environment_at(environment: EnvironmentSpec, address: ModelsAddress) -> EnvironmentSpec:
    """Return the environment with the endpoint's URLs and key wherever it names a model."""
    if not served_in(environment.args):
        return environment
    args = _with_urls(environment.args, address)
    secrets = {**environment.secrets, KEY: address.token}
    return environment.model_copy(update={"args": args, "secrets": secrets})


def _with_urls(value: Any, address: ModelsAddress) -> Any:
    if isinstance(value, list | tuple):
        return [_with_urls(one, address) for one in value]
    if not isinstance(value, Mapping):
        return value
    told = {key: _with_urls(one, address) for key, one in value.items() if key != SERVED}
    if SERVED not in value:
        return told
    name = str(value[SERVED])
    return {**told, "url": address.url_of(name), "model": name, "api_key": KEY}


def endpoint_in(value: Any) -> str | None:
    """The URL of the endpoint that arguments name, once ``environment_at`` has written it there;
    None if they name no model of the run."""
    if isinstance(value, Mapping):
        if _is_of_run(value):
            return str(value["url"]).removesuffix(_url_of("", str(value["model"])))
        value = list(value.values())
    found = map(endpoint_in, value) if isinstance(value, list | tuple) else ()
    return next((one for one in found if one is not None), None)


def arguments_at(value: Any, endpoint: str) -> Any:
    """Return the same arguments for a place where the endpoint has another URL."""
    if isinstance(value, list | tuple):
        return [arguments_at(one, endpoint) for one in value]
    if not isinstance(value, Mapping):
        return value
    told = {key: arguments_at(one, endpoint) for key, one in value.items()}
    return told | ({"url": _url_of(endpoint, str(value["model"]))} if _is_of_run(value) else {})


def _is_of_run(value: Mapping[str, Any]) -> bool:
    return value.get("api_key") == KEY and {"url", "model"} <= value.keys()
