"""A real vLLM server: it loads versions and proves them, and what it says of tokens is compared."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Awaitable, Callable, Sequence
from statistics import fmean
from typing import Any

import psutil

from libra_cli.config.errors import ServerError
from libra_cli.core.events import TurnFailed, TurnGenerated
from libra_cli.node.weights.chunks import MANIFEST
from tests.gpu import trainer
from tests.gpu.machine import asked
from tests.gpu.place import Place
from tests.gpu.served import GREEDY, TOKENS, Server

TURNS = 64
BACK_S = 60.0
SETTLED_LOADS = 3
"""Loads after which memory is measured first: the buffers of a load stay."""
ABORTED_EVERY = 5
TIE = 0.05
"""Nats between two tokens of which either may be the most likely one, in bfloat16."""
BEFORE_IT_DIES_S = 0.3


def start(place: Place) -> dict[str, Any]:
    """Start a server, cold unless this machine has served this model before."""
    server, seconds = place.start(place.model)
    facts = server.play(server.bench.server.facts)
    return {
        "start_s": seconds,
        "kv_tokens": facts.kv_tokens,
        "v2": "runner V2" in facts.engine,
        "asynchronous": "no async" not in facts.engine,
        "graphs": "no CUDA graphs" not in facts.engine,
        "engine": facts.engine,
    }


def versions(place: Place) -> dict[str, Any]:
    """Load what the trainer has published; then weights of one version as those of another."""
    server, gaps, paused = place.server(), list[float](), list[float]()
    for directory in place.versions:
        paused.append(server.load(directory))
        gaps.append(server.gap(directory))
    return {
        "probe_gap": fmean(gaps),
        "gap_ratio": max(gaps) / max(min(gaps), 1e-9),
        "refused": _refuses(place),
        "paused_s": min(paused),
    }


def decode(place: Place) -> dict[str, Any]:
    """What a token's log-probability was when it was sampled, beside the same text as a prompt."""
    server = _with_last(place)
    turns = server.whole(TURNS)
    texts = [[*turn.prompt_ids, *turn.token_ids] for turn in turns]
    scored = [server.scored(text) for text in texts]
    told = trainer.scored(place, place.last_version(), texts)
    prompt_gap, trainer_gap = (_apart(turns, values) for values in (scored, told))
    return {
        "prompt_gap": prompt_gap,
        "trainer_gap": trainer_gap,
        "gap_ratio": prompt_gap / max(trainer_gap, 1e-9),
    }


def speed(place: Place) -> dict[str, Any]:
    """Tokens a second of many turns at once, of which some wait for a seat."""
    server = _with_last(place)
    server.whole(TURNS)  # warm
    began = time.monotonic()
    turns = server.whole(place.size.turns)
    seconds = time.monotonic() - began
    tokens = sum(len(turn.token_ids) for turn in turns)
    return {
        "whole_turns": tokens == place.size.turns * TOKENS,
        "tokens_per_s": tokens / seconds,
    }


def loads(place: Place) -> dict[str, Any]:
    """Load version after version while turns run, some of which are aborted."""
    server = _with_last(place)
    first = server.gap(place.versions[-1])
    under = _UnderLoad(server, place)
    server.play(under.run)
    last = server.load(place.versions[-1])
    whole = [turn for turn in under.turns if isinstance(turn, TurnGenerated)]
    to_the_end = [turn for turn in whole if turn.request not in under.aborted]
    return {
        "whole_turns": len(whole) == len(under.turns)
        and all(len(turn.token_ids) == TOKENS for turn in to_the_end),
        "turns": len(whole),
        "aborted": len(under.aborted),
        "turns_over_a_load": sum(len(turn.spans) > 1 for turn in whole),
        "grew_mib": under.grew_mib,
        "gap_ratio": server.gap(place.versions[-1]) / max(first, 1e-9),
        "paused_s": last,
    }


def greedy(place: Place) -> dict[str, Any]:
    """The most likely text after some prompts, of a server that loaded and one that began so."""
    loaded = _with_last(place).whole(TURNS, GREEDY)
    server, _ = place.start(place.last_version())
    pairs = zip(loaded, server.whole(TURNS, GREEDY), strict=True)
    counts = [_until_a_tie(one, other) for one, other in pairs]
    compared = sum(of for _, of in counts)
    return {"same": sum(same for same, _ in counts) / compared, "compared": compared}


def killed(place: Place) -> dict[str, Any]:
    """Kill the server while it generates, wait for its memory, and start it again."""
    server = place.server()
    family = _family(server)
    held = _memory_mib(place, family)

    async def under_load() -> list[TurnGenerated | TurnFailed]:
        turns = [asyncio.ensure_future(server.turn(number)) for number in range(TURNS)]
        await asyncio.sleep(BEFORE_IT_DIES_S)
        family[0].kill()
        return list(await asyncio.gather(*turns))

    failed = [turn for turn in server.play(under_load) if isinstance(turn, TurnFailed)]
    began = time.monotonic()
    psutil.wait_procs(family, timeout=BACK_S)
    while (left := _memory_mib(place, family)) > held / 2 and time.monotonic() - began < BACK_S:
        time.sleep(0.1)
    back_s = time.monotonic() - began
    _, seconds = place.start(place.model)
    return {
        "turns_failed": len(failed),
        "held_mib": held,
        "left_mib": left,
        "memory_back_s": back_s,
        "start_s": seconds,
    }


def lora(place: Place) -> dict[str, Any]:
    """Train an adapter for a step, and have a server merge and prove it."""
    directory = trainer.lora(place)
    server = place.server()
    paused = server.load(directory)
    size = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    return {"probe_gap": server.gap(directory), "adapter_mb": size / 1e6, "paused_s": paused}


def sleep(place: Place) -> dict[str, Any]:
    """Have a server that may sleep give its memory back, take it again, and load and prove a
    version."""
    server, start_s = place.start(place.model, rollout={"sleep": True})
    newest, family = place.versions[-1], _family(server)
    server.load(newest)
    server.whole(TURNS)
    gap, awake_mib = server.gap(newest), _memory_mib(place, family)
    sleep_s = _seconds(server, server.bench.server.sleep)
    kept_mib = _memory_mib(place, family)
    wake_s = _seconds(server, server.bench.server.wake)
    began = time.monotonic()
    server.load(newest)
    after = server.gap(newest)
    load_s = time.monotonic() - began
    turns = server.whole(TURNS)
    return {
        "sleep_s": sleep_s,
        "wake_s": wake_s,
        "back_s": wake_s + load_s,
        "start_s": start_s,
        "gave_back_gib": (awake_mib - kept_mib) / 1024,
        "kept_gib": kept_mib / 1024,
        "probe_gap": after,
        "gap_ratio": after / max(gap, 1e-9),
        "whole_turns": [len(turn.token_ids) for turn in turns] == [TOKENS] * TURNS,
    }


def _seconds(server: Server, order: Callable[[], Awaitable[None]]) -> float:
    began = time.monotonic()
    server.play(order)
    return time.monotonic() - began


def two_gpus(place: Place) -> dict[str, Any]:
    """A server of two ranks: versions, and decode beside prefill."""
    place.start(place.model, ranks=2)
    found = versions(place) | decode(place)
    del found["gap_ratio"]
    return found


def _with_last(place: Place) -> Server:
    server = place.server()
    server.load(place.versions[-1])
    return server


def _refuses(place: Place) -> bool:
    """Whether weights of one version under the checksums of the next are noticed."""
    mixed, server = place.base / "mixed", place.server()
    shutil.rmtree(mixed, ignore_errors=True)
    shutil.copytree(place.versions[-2], mixed)
    shutil.copy(place.versions[-1] / MANIFEST, mixed / MANIFEST)
    try:
        server.load(mixed)
    except ServerError:
        server.load(place.versions[-1])
        return True
    return False


def _apart(turns: Sequence[TurnGenerated], told: Sequence[Sequence[float]]) -> float:
    """Mean |difference| of generated tokens' log-probabilities, in nats."""
    return fmean(
        abs(one - other)
        for turn, values in zip(turns, told, strict=True)
        for one, other in zip(turn.logprobs, values[-len(turn.logprobs) :], strict=True)
    )


def _until_a_tie(one: TurnGenerated, other: TurnGenerated) -> tuple[int, int]:
    """Tokens that agree before the first that does not, and those that were to agree: after a
    choice between equals the texts are others."""
    told = zip(one.token_ids, other.token_ids, one.logprobs, other.logprobs, strict=True)
    for place, (token, second, sure, as_sure) in enumerate(told):
        if token != second:
            tied = abs(sure - as_sure) < TIE
            return place, place if tied else len(one.token_ids)
    return len(one.token_ids), len(one.token_ids)


class _UnderLoad:
    """As many turns as there are seats, one after the other, while versions are loaded."""

    def __init__(self, server: Server, place: Place) -> None:
        self.turns: list[TurnGenerated | TurnFailed] = []
        self.aborted: set[int] = set()
        self.grew_mib = 0.0
        self._server, self._place = server, place
        self._over = False

    async def run(self) -> None:
        """Return when every load is done and every turn has ended."""
        seats = [asyncio.ensure_future(self._seat(number)) for number in range(TURNS)]
        try:
            await self._load()
        finally:
            self._over = True
            await asyncio.gather(*seats)

    async def _load(self) -> None:
        directories, family = self._place.versions, await _family_of(self._server)
        settled = 0.0
        for number in range(self._place.size.loads):
            await self._server.loading(directories[number % len(directories)])
            if number == SETTLED_LOADS - 1:
                settled = _memory_mib(self._place, family)
            await asyncio.sleep(0.05)
        self.grew_mib = _memory_mib(self._place, family) - settled

    async def _seat(self, number: int) -> None:
        while not self._over:
            request = self._server.request()
            turn = asyncio.ensure_future(self._server.turn(number, request=request))
            if request % ABORTED_EVERY == 0:
                await asyncio.sleep(0.01 * (request % 7))
                self.aborted.add(request)
                await self._server.bench.server.abort(request)
            self.turns.append(await turn)


def _family(server: Server) -> list[psutil.Process]:
    return server.play(lambda: _family_of(server))


async def _family_of(server: Server) -> list[psutil.Process]:
    """The server's process, and those of its ranks."""
    found = await server.bench.host.processes()
    leader = psutil.Process(next(one.pid for one in found if one.process.startswith("server")))
    return [leader, *leader.children(recursive=True)]


def _memory_mib(place: Place, family: Sequence[psutil.Process]) -> float:
    """Memory in use: of the first GPU, or of the processes that are left."""
    if place.gpus:
        return float(asked("memory.used")[0])
    total = 0
    for process in family:
        try:
            total += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total / 2**20
