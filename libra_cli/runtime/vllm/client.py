"""One vLLM server over its stream: a ``libra_cli.runtime.rollout.connection.ServerConnection``."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Mapping, Sequence
from math import isfinite

from libra_cli.config.errors import NONSENSE, ServerError
from libra_cli.core.actions import Generate
from libra_cli.core.events import PublishedVersion, ServerSampled, TurnFailed, TurnGenerated
from libra_cli.core.rollout.turns import ABORTED
from libra_cli.core.types import (
    STARTED_WITH,
    ChosenExperts,
    SlotId,
    Tokens,
    VersionSpan,
    WeightVersion,
)
from libra_cli.runtime.hosts.transport import Endpoint
from libra_cli.runtime.processes.control import ControlClient
from libra_cli.runtime.processes.stream import Answer, Stream, StreamErrors
from libra_cli.runtime.rollout.connection import (
    SLEEP_S,
    RequestRefused,
    Sampling,
    ServerFacts,
    ServerUnreachable,
    turn_failed,
)
from libra_cli.runtime.store.images import ShownImage
from libra_cli.runtime.supervision.answers import finite, reads_answers
from libra_cli.runtime.supervision.failures import words_of
from libra_cli.runtime.vllm.metrics import named

ERRORS = StreamErrors(ServerError, RequestRefused, ServerUnreachable)
GENERATE_TIMEOUT_S = 1800.0
"""Seconds for a turn, and of silence: a server that compiles or loads says nothing for minutes."""
CONTROL_TIMEOUT_S = 30.0
PROBE_TIMEOUT_S = 300.0
"""Seconds for a probe: the first one may compile kernels that the warm-up has left out."""
POLL_S = 0.25
PREPARED_EVERY_S = 0.02
"""How often a server is asked whether it has a version in memory."""


UNLOADED = "default"
"""What a server calls the weights it was started with (``node.rollout.engine``)."""


def _version_of(label: str, asked: WeightVersion) -> WeightVersion:
    """Return the version of a label; weights that the server began with count only if asked for."""
    return asked if (label, asked) == (UNLOADED, STARTED_WITH) else parse_label(label)


def parse_label(text: str) -> WeightVersion:
    """The version that a server calls so.

    Raises:
        ServerError: the server generated with weights libra did not give it.
    """
    incarnation, _, version = text.removeprefix("e").partition("v")
    if not (text.startswith("e") and incarnation.isdigit() and version.isdigit()):
        raise ServerError(f"tokens of the unknown weight version {text!r}")
    return WeightVersion(int(incarnation), int(version))


class ServerClient(ControlClient):
    """Gives the orders of the controller to one vLLM server."""

    def __init__(self, slot: SlotId, incarnation: int, endpoint: Endpoint, token: str) -> None:
        super().__init__(slot, endpoint, token, ERRORS, silence_s=GENERATE_TIMEOUT_S)
        self.slot = slot
        self.incarnation = incarnation
        self._turns: dict[int, tuple[Stream, int]] = {}
        """Stream and number of the call that generates, by the request in flight."""
        self._counters: Mapping[str, float] = {}
        """The server's counters at the last reading; empty before the first."""

    async def _call(
        self, operation: str, order: Answer, *, timeout_s: float | None = CONTROL_TIMEOUT_S
    ) -> Answer:
        return await super()._call(operation, order, timeout_s=timeout_s)

    @reads_answers(ServerError)
    async def wait_ready(self, *, timeout_s: float) -> None:
        """Wait until the server is healthy *and* able to generate one token.

        Raises:
            ServerError: not ready in time; names what was missing.
        """
        give_up = time.monotonic() + timeout_s
        while True:
            try:
                await self.check()
                break
            except ServerError as error:
                if time.monotonic() > give_up:
                    raise ServerError(f"not ready after {timeout_s:.0f} s: {error}") from error
            await asyncio.sleep(POLL_S)
        order = _order([1], max_tokens=1, cache_salt="first")
        await self._repeat("generate", order, timeout_s=give_up - time.monotonic())

    async def _repeat(self, operation: str, order: Answer, *, timeout_s: float) -> Answer:
        """The answer to an order that may be given twice, which it is where the host is out of
        reach meanwhile. Raises ServerError; ServerUnreachable after ``timeout_s``, but not before
        ``CONTROL_TIMEOUT_S``."""
        left_s = max(CONTROL_TIMEOUT_S, timeout_s)
        give_up = time.monotonic() + left_s
        while True:
            try:
                return await self._call(operation, order, timeout_s=left_s)
            except ServerUnreachable:
                left_s = give_up - time.monotonic()
                if self._closed or left_s <= POLL_S:
                    raise
            await asyncio.sleep(POLL_S)

    @reads_answers(ServerError)
    async def check(self) -> None:
        """Raises ServerError unless it answers, which it does between two steps."""
        await self._call("check", {})

    async def generate(
        self, action: Generate, sampling: Sampling, images: Sequence[ShownImage] = ()
    ) -> TurnGenerated | TurnFailed:
        """Generate one turn. Never raises: a failure is an event of its own."""
        order = _order(
            action.prompt_ids,
            max_tokens=action.max_tokens,
            cache_salt=action.kv_key.label,
            priority=action.priority,
            sampling=sampling,
            routes_from=action.routes_from,
            images=images,
        )
        started_at = time.time()
        try:
            stream = await self._connected()
            call, future = stream.begin("generate", order)
            self._turns[action.request] = (stream, call)
            try:
                answer = await self._answer(stream, call, future, "generate", GENERATE_TIMEOUT_S)
            except (ServerUnreachable, asyncio.CancelledError):
                stream.tell("abort", {"call": call})
                raise
            finally:
                del self._turns[action.request]
            return _turn(action, answer, started_at, sampling.vocabulary)
        except (ServerError, *NONSENSE) as error:
            return turn_failed(
                action,
                words_of(error),
                refused=isinstance(error, RequestRefused),
                unreachable=isinstance(error, ServerUnreachable),
            )

    @reads_answers(ServerError)
    async def add_adapter(self, name: str, config: str, tensors: bytes) -> None:
        """Give it an adapter, in PEFT's files, that orders may name; it must take adapters.

        Raises:
            ServerError: it does not take this one.
        """
        order = {"name": name, "config": config, "tensors": tensors}
        await self._call("adapter", order, timeout_s=PROBE_TIMEOUT_S)

    @reads_answers(ServerError)
    async def remove_adapter(self, name: str) -> None:
        """Have it let go of an adapter that no turn names any more; raises ServerError."""
        await self._call("remove adapter", {"name": name}, timeout_s=PROBE_TIMEOUT_S)

    @reads_answers(ServerError)
    async def sample_tokens(self, order: Answer) -> Answer:
        """Have it generate by an order of ``node.rollout.server``, as it is; whoever gives up
        waiting has the turn aborted. Raises ServerError."""
        whole = {**_order([], max_tokens=1, cache_salt=UNLOADED), **order}
        stream = await self._connected()
        call, future = stream.begin("generate", whole)
        try:
            return await self._answer(stream, call, future, "generate", GENERATE_TIMEOUT_S)
        except (ServerUnreachable, asyncio.CancelledError):
            stream.tell("abort", {"call": call})
            raise

    @reads_answers(ServerError)
    async def abort(self, request: int) -> None:
        """End a generation; its reply then has what there is. Raises ServerError."""
        if request in self._turns:
            _, call = self._turns[request]
            await self._call("abort", {"call": call})

    @reads_answers(ServerError)
    async def load(
        self,
        directory: str,
        published: PublishedVersion,
        *,
        timeout_s: float,
        partly: bool = False,
        clear_cache: bool = True,
    ) -> float:
        """Load a version in place, in flight. Returns the seconds generation stood still.

        Raises:
            ServerError: it could not, or holds other tensors than were published.
        """
        loads = await self._prepare(directory, timeout_s)
        label = published.version.label
        order = {
            "directory": directory,
            "label": label,
            "partly": partly,
            "clear_cache": clear_cache,
            "loads": loads,
        }
        answer = await self._call("load", order, timeout_s=timeout_s)
        if answer["different"]:
            raise ServerError(f"{self.slot}: {_first_of(answer['different'])}")
        if answer["untraced"] and not partly:
            raise ServerError(
                f"{self.slot} cannot prove what it holds: {_first_of(answer['untraced'])}; to have "
                "the probe alone decide, set weight_sync.tolerance"
            )
        return finite(answer["paused_s"])

    @reads_answers(ServerError)
    async def sleep(self) -> None:
        """Have it give back weights and KV cache; it does nothing then until ``wake``."""
        await self._repeat("sleep", {}, timeout_s=SLEEP_S)

    @reads_answers(ServerError)
    async def wake(self) -> None:
        """Have it take memory again; a version must be loaded next."""
        await self._repeat("wake", {}, timeout_s=SLEEP_S)

    async def _prepare(self, directory: str, timeout_s: float) -> int:
        """Wait until its workers have a version in memory; it goes on generating.

        Returns how many loads have begun there.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            answer = await self._call("prepare", {"directory": directory})
            if answer["done"]:
                return int(answer["loads"])
            if time.monotonic() > deadline:
                raise ServerError(f"{self.slot} did not read {directory} in {timeout_s:.0f} s")
            await asyncio.sleep(PREPARED_EVERY_S)

    @reads_answers(ServerError)
    async def probe(self, token_ids: Sequence[int], published: PublishedVersion) -> list[float]:
        """Log-probabilities of ``token_ids[1:]``, each given everything before it."""
        salt = f"probe-{published.version.label}"
        order = _order(token_ids, max_tokens=1, cache_salt=salt, priority=-1, score_prompt=True)
        answer = await self._call("generate", order, timeout_s=PROBE_TIMEOUT_S)
        logprobs = array("f", answer["prompt_logprobs"])
        if len(logprobs) != len(token_ids) - 1 or not isfinite(sum(logprobs)):
            raise ServerError(f"{self.slot}: the probe has {len(logprobs)} log-probabilities")
        return logprobs.tolist()

    @reads_answers(ServerError)
    async def facts(self) -> ServerFacts:
        """Ask for the server's release, the size of its KV cache in tokens, and what of it runs.

        Raises:
            ServerError: it does not say.
        """
        answer = await self._repeat("facts", {}, timeout_s=CONTROL_TIMEOUT_S)
        words = str(answer["version"]), int(answer["kv_tokens"]), str(answer["engine"])
        return ServerFacts(*words)

    @reads_answers(ServerError)
    async def sample(self) -> ServerSampled:
        """Read the server's counters; rates are of the time since the reading before.

        Raises:
            ServerError: it does not say.
        """
        counters = await self._call("counters", {})
        before, self._counters = self._counters, counters
        queries = counters.get("prefix_queries", 0)
        return ServerSampled(
            slot=self.slot,
            incarnation=self.incarnation,
            running=int(counters["running"]),
            waiting=int(counters["waiting"]),
            kv_use=finite(counters["kv_use"]),
            prefix_hit_rate=counters.get("prefix_hits", 0) / queries if queries else None,
            preemptions=int(counters.get("preemptions", 0)),
            generated_tokens=int(counters.get("generated_tokens", 0)),
            metrics=named(before, counters),
        )


PLAIN = Sampling(temperature=1.0, top_p=1.0, stop_token_ids=())


def _order(
    prompt_ids: Sequence[int],
    *,
    max_tokens: int,
    cache_salt: str,
    priority: int = 0,
    sampling: Sampling = PLAIN,
    score_prompt: bool = False,
    routes_from: Tokens = 0,
    images: Sequence[ShownImage] = (),
) -> Answer:
    return {
        "prompt_ids": array("i", prompt_ids).tobytes(),
        "max_tokens": max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "stop_token_ids": sampling.stop_token_ids,
        "to_the_end": sampling.to_the_end,
        "score_prompt": score_prompt,
        "routes_from": routes_from,
        "images": [list(one) for one in images],
        "cache_salt": cache_salt,
        "priority": priority,
    }


def _first_of(sentences: Sequence[str]) -> str:
    more = len(sentences) - 1
    return f"{sentences[0]} (and {more} more)" if more else sentences[0]


def _covers(spans: Sequence[VersionSpan], tokens: int) -> bool:
    """Whether spans follow one another from the first token to the last."""
    at = 0
    for span in spans:
        if span.start != at or span.end < at:
            return False
        at = span.end
    return at == tokens


def _turn(action: Generate, answer: Answer, started_at: float, vocabulary: int) -> TurnGenerated:
    if answer["finish_reason"] not in ("stop", "length", ABORTED):
        raise ServerError(f"{action.slot}: generation ended with {answer['finish_reason']!r}")
    token_ids, logprobs = array("i", answer["token_ids"]), array("f", answer["logprobs"])
    labels = [_version_of(label, action.cache_key) for label, _, _ in answer["spans"]]
    spans = tuple(
        VersionSpan(version.step, start, end)
        for version, (_, start, end) in zip(labels, answer["spans"], strict=True)
    )
    if len(logprobs) != len(token_ids) or not _covers(spans, len(token_ids)):
        raise ServerError(f"{action.slot}: log-probabilities or versions miss some tokens")
    beyond = min(token_ids, default=0) < 0 or max(token_ids, default=0) >= vocabulary
    if len(token_ids) > action.max_tokens or beyond:
        raise ServerError(f"{action.slot}: tokens that nobody asked for, or that there are not")
    if not isfinite(sum(logprobs)):  # quickly: no sum of finite 32-bit numbers overflows 64 bits
        raise ServerError(f"{action.slot}: a log-probability is not a finite number")
    return TurnGenerated(
        request=action.request,
        trajectory=action.trajectory,
        slot=action.slot,
        incarnation=action.incarnation,
        prompt_ids=action.prompt_ids,
        token_ids=token_ids,
        logprobs=logprobs,
        spans=spans,
        newest=max(labels, default=action.cache_key),  # aborted before the first token
        cache_key=action.cache_key,
        finish_reason=answer["finish_reason"],
        started_at=started_at,
        routes=_routes(answer.get("routes"), len(action.prompt_ids) + len(token_ids)),
    )


def _routes(told: Answer | None, tokens: Tokens) -> ChosenExperts | None:
    """The experts of a turn. Raises ServerError where they are of more than its tokens."""
    if told is None:
        return None
    ids = array("B" if told["bytes"] == 1 else "H", told["ids"])
    routes = ChosenExperts(told["start"], told["layers"], told["chosen"], ids)
    if len(ids) % (routes.layers * routes.chosen) or routes.end > tokens:
        raise ServerError(f"experts of {routes.end} tokens were told, of a context of {tokens}")
    return routes
