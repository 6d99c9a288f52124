"""One vLLM server over HTTP: a ``libra_cli.runtime.rollout.connection.ServerConnection``."""

from __future__ import annotations

import asyncio
import json
import re
import time
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp

from libra_cli.config.errors import ServerError
from libra_cli.core.actions import Generate
from libra_cli.core.events import PublishedVersion, ServerSampled, TurnFailed, TurnGenerated
from libra_cli.core.rollout.turns import ABORTED
from libra_cli.core.types import SlotId, VersionSpan, WeightVersion
from libra_cli.runtime.hosts.transport import Endpoint
from libra_cli.runtime.http import describe, open_session
from libra_cli.runtime.rollout.connection import (
    RequestRefused,
    Sampling,
    ServerFacts,
    ServerUnreachable,
    turn_failed,
)
from libra_cli.runtime.vllm.metrics import named

REQUEST_PREFIX = "generate-tokens-"
"""What vLLM puts before the request id of its token route, and expects in an abort."""
GENERATE_TIMEOUT_S = 1800.0
CONTROL_TIMEOUT_S = 30.0
POLL_S = 0.25
_LABEL = re.compile(r'(\w+)="([^"]*)"')


def parse_label(text: str) -> WeightVersion:
    """The version that a server calls so.

    Raises:
        ServerError: the server generated with weights libra did not give it.
    """
    incarnation, _, version = text.removeprefix("e").partition("v")
    if not (text.startswith("e") and incarnation.isdigit() and version.isdigit()):
        raise ServerError(f"tokens of the unknown weight version {text!r}")
    return WeightVersion(int(incarnation), int(version))


class ServerClient:
    """One vLLM server, seen from the controller."""

    def __init__(self, slot: SlotId, incarnation: int, endpoint: Endpoint, token: str) -> None:
        self.slot = slot
        self.incarnation = incarnation
        self._session = open_session(endpoint, token)
        self._counters: Mapping[str, float] = {}
        """Of the last reading."""

    async def close(self) -> None:
        """Drop the connections; the server itself is not touched."""
        await self._session.close()

    async def _call(
        self, method: str, path: str, body: Any = None, *, timeout_s: float = CONTROL_TIMEOUT_S
    ) -> Any:
        if self._session.closed:
            raise ServerUnreachable(f"{self.slot} is being stopped")
        deadline = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._session.request(method, path, json=body, timeout=deadline) as reply:
                raw = await reply.read()
                status = reply.status
        except TimeoutError as error:
            raise ServerUnreachable(
                f"{self.slot}: no answer to {path} in {timeout_s:.0f} s"
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            raise ServerUnreachable(f"{self.slot}: {path}: {describe(error)}") from error
        if status == 400:
            raise RequestRefused(f"{self.slot} refused {path}: {_reason(raw)}")
        if status != 200:
            raise ServerError(f"{self.slot}: {path} answered {status}: {_reason(raw)}")
        return json.loads(raw) if raw[:1] in (b"{", b"[") else raw.decode()

    async def wait_ready(self, *, timeout_s: float) -> None:
        """Healthy *and* able to generate one token.

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
        body = {"token_ids": [1], "sampling_params": {"max_tokens": 1}}
        await self._call("POST", "/inference/v1/generate", body)

    async def check(self) -> None:
        """Raises ServerError unless it says that it is healthy."""
        await self._call("GET", "/health")

    async def generate(self, action: Generate, sampling: Sampling) -> TurnGenerated | TurnFailed:
        """One turn. Never raises: a failure is an event of its own."""
        body = {
            "request_id": f"libra-{action.request}",
            "token_ids": action.prompt_ids.tolist(),
            "priority": action.priority,
            # KV of one version is never reused under another. (vLLM's /reset_prefix_cache does
            # nothing, silently, while any request is running.)
            "cache_salt": action.cache_key.label,
            "sampling_params": {
                "max_tokens": action.max_tokens,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "logprobs": 0,
                "stop_token_ids": sampling.stop_token_ids,
                "ignore_eos": sampling.to_the_end,
            },
        }
        started_at = time.time()
        try:
            path = "/inference/v1/generate"
            answer = await self._call("POST", path, body, timeout_s=GENERATE_TIMEOUT_S)
            return _turn(action, answer["choices"][0], started_at)
        except (ServerError, KeyError, TypeError, ValueError) as error:
            reason = f"{type(error).__name__}: {error}"
            refused = isinstance(error, RequestRefused)
            return turn_failed(action, reason, refused=refused)

    async def abort(self, request: int) -> None:
        """End a generation; its reply then has what there is. Raises ServerError."""
        body = {"request_ids": [f"{REQUEST_PREFIX}libra-{request}"]}
        await self._call("POST", "/inference/v1/abort_requests", body)

    async def load(
        self, directory: str, published: PublishedVersion, *, timeout_s: float, partly: bool = False
    ) -> float:
        """Load a version in place, in flight. Returns the seconds generation stood still.

        Raises:
            ServerError: it could not, or holds other tensors than were published.
        """
        body = {"directory": directory, "label": published.version.label, "partly": partly}
        answer = await self._call("POST", "/libra/load", body, timeout_s=timeout_s)
        if answer["different"]:
            raise ServerError(f"{self.slot}: {_first_of(answer['different'])}")
        if answer["untraced"] and not partly:
            raise ServerError(
                f"{self.slot} cannot prove what it holds: {_first_of(answer['untraced'])}; to have "
                "the probe alone decide, set weight_sync.tolerance"
            )
        return float(answer["paused_s"])

    async def probe(self, token_ids: Sequence[int], published: PublishedVersion) -> list[float]:
        """Log-probabilities of ``token_ids[1:]``, each given everything before it."""
        body = {
            "token_ids": list(token_ids),
            "cache_salt": f"probe-{published.version.label}",
            "priority": -1,
            "sampling_params": {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0},
        }
        answer = await self._call("POST", "/inference/v1/generate", body)
        try:
            pairs = zip(token_ids[1:], answer["prompt_logprobs"][1:], strict=True)
            return [float(row[str(token)]["logprob"]) for token, row in pairs]
        except (KeyError, TypeError, ValueError) as error:
            raise ServerError(
                f"{self.slot}: the probe's answer is unreadable: {error!r}"
            ) from error

    async def facts(self) -> ServerFacts:
        """Its release and the size of its KV cache.

        Raises:
            ServerError: it does not say.
        """
        version = await self._call("GET", "/version")
        kv_tokens = _kv_tokens(await self._call("GET", "/metrics"))
        if not kv_tokens or not isinstance(version, dict):
            raise ServerError(f"{self.slot} does not say how large its KV cache is")
        return ServerFacts(str(version.get("version", "?")), kv_tokens)

    async def sample(self) -> ServerSampled:
        """One reading of the server's counters."""
        counters = parse_metrics(await self._call("GET", "/metrics"))
        before, self._counters = self._counters, counters
        queries = counters.get("vllm:prefix_cache_queries_total", 0.0)
        hits = counters.get("vllm:prefix_cache_hits_total", 0.0)
        return ServerSampled(
            slot=self.slot,
            incarnation=self.incarnation,
            running=int(counters.get("vllm:num_requests_running", 0)),
            waiting=int(counters.get("vllm:num_requests_waiting", 0)),
            kv_use=counters.get("vllm:kv_cache_usage_perc", 0.0),
            prefix_hit_rate=hits / queries if queries else None,
            preemptions=int(counters.get("vllm:num_preemptions_total", 0)),
            generated_tokens=int(counters.get("vllm:generation_tokens_total", 0)),
            metrics=named(before, counters),
        )


def _first_of(sentences: Sequence[str]) -> str:
    more = len(sentences) - 1
    return f"{sentences[0]} (and {more} more)" if more else sentences[0]


def _kv_tokens(page: str) -> int:
    """From the labels of the gauge that describes the cache; 0 if it is not there."""
    line = next((x for x in page.splitlines() if x.startswith("vllm:cache_config_info{")), "")
    labels = dict(_LABEL.findall(line))
    sizes = (labels.get("num_gpu_blocks", ""), labels.get("block_size", ""))
    return int(sizes[0]) * int(sizes[1]) if all(size.isdigit() for size in sizes) else 0


def parse_metrics(text: str) -> dict[str, float]:
    """The plain gauges and counters of a Prometheus page, summed over labels.

    Histograms are nine tenths of the page and are left out; this is why a general parser, which
    takes tens of milliseconds for it, is not used here.
    """
    counters: dict[str, float] = {}
    for line in text.splitlines():
        if not line.startswith("vllm:") or "_bucket{" in line:
            continue
        name, _, rest = line.partition("{")
        value = rest.rpartition("}")[2].strip()
        counters[name] = counters.get(name, 0.0) + float(value)
    return counters


def _turn(action: Generate, choice: dict[str, Any], started_at: float) -> TurnGenerated:
    if choice["finish_reason"] not in ("stop", "length", ABORTED):
        raise ServerError(f"{action.slot}: generation ended with {choice['finish_reason']!r}")
    token_ids = array("i", choice["token_ids"])
    content = choice["logprobs"]["content"]
    labels = [parse_label(span["version"]) for span in choice["weight_versions"]]
    spans = tuple(
        VersionSpan(version.step, span["start"], span["end"])
        for version, span in zip(labels, choice["weight_versions"], strict=True)
    )
    if len(content) != len(token_ids) or sum(s.end - s.start for s in spans) != len(token_ids):
        raise ServerError(f"{action.slot}: log-probabilities or versions miss some tokens")
    return TurnGenerated(
        request=action.request,
        trajectory=action.trajectory,
        slot=action.slot,
        incarnation=action.incarnation,
        prompt_ids=action.prompt_ids,
        token_ids=token_ids,
        logprobs=array("f", [entry["logprob"] for entry in content]),
        spans=spans,
        newest=max(labels, default=action.cache_key),  # aborted before the first token
        cache_key=action.cache_key,
        finish_reason=choice["finish_reason"],
        started_at=started_at,
    )


def _reason(raw: bytes) -> str:
    return raw[:300].decode(errors="replace").strip()
