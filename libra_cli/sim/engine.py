"""One vLLM server in virtual time.

The law is that of vLLM's scheduler: at every step boundary each decoding request gets one token;
what is left of the step's token budget goes to prompts, first those begun, then the waiting in
order, while there is a place (``max_num_seqs``) and room in the KV cache for the whole context. A
prompt longer than the budget is computed in chunks. When the cache cannot hold the next tokens, the
request admitted last gives up its place, waits at its old position and computes its context again.

The cache (``sim.kv_cache``) keeps what a finished turn has computed until room is needed, and the
next turn of the same session starts from there; a sibling's prompt prefix is shared, also between
requests that are running. Only full blocks hit, never the last token of a context (its step must
produce a token), and never those of another ``cache_key``.

Between two changes of membership the steps are summed in closed form (the time of a step is linear
in the tokens cached, so n steps are an arithmetic series): the work is a few heap operations a
turn, however many tokens it generates.

Guarantee: the same finish times as a simulation step by step, to rounding; the cache is never
overfull; every request submitted finishes or is aborted. Limit: a request joins at the next step
boundary, where vLLM's asynchronous scheduling takes one more step.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from heapq import heappop, heappush
from math import ceil, sqrt
from typing import NamedTuple, Protocol

from libra_cli.core.types import Seconds, Tokens
from libra_cli.sim.kv_cache import KvCache, PrefixHolder


class StepTimes(Protocol):
    """The seconds of an engine's steps, and what they may hold; ``ServerCost`` is one."""

    @property
    def kv_tokens(self) -> Tokens:
        """Tokens that the KV cache holds."""

    @property
    def chunk_tokens(self) -> Tokens:
        """The most tokens that a step computes."""

    def decode_line(self, batch: int, kv_tokens: Tokens) -> tuple[Seconds, Seconds, int]:
        """Time of the next decode step, its growth a step, and for how many steps that holds."""

    def mixed_step_s(
        self,
        batch: float,
        kv_tokens: float,
        chunk: int,
        chunk_context: float,
        requests: int = 0,
    ) -> Seconds:
        """Time of a step that decodes a batch and computes ``chunk`` prompt tokens, the first ones
        of so many requests."""


class EngineRequest(NamedTuple):
    """A turn to serve: ``generate`` tokens after a context of ``prompt`` tokens.

    ``session`` is the trajectory, whose earlier turns may be cached; ``cache_key`` the weight
    version, whose KV no other may use; ``shared`` a key and a length: the first tokens of the
    prompt, which siblings have too. ``known`` tokens of the context were computed before, here or
    elsewhere. Lower ``priority`` goes first, and of equals who was there first, as in vLLM with
    ``--scheduling-policy priority``, by which libra's servers run.
    """

    id: int
    session: Hashable
    prompt: Tokens
    generate: Tokens
    priority: int = 0
    cache_key: Hashable = None
    shared: tuple[Hashable, Tokens] | None = None
    known: Tokens = 0


class FinishedRequest(NamedTuple):
    """A request that is done or aborted, and how. ``cached`` is what it found in the cache when
    admitted; an ``admitted_at`` or ``first_token_at`` that never came is negative. What it computed
    is cached under ``cache_key``."""

    id: int
    generated: Tokens
    submitted_at: Seconds
    admitted_at: Seconds
    first_token_at: Seconds
    finished_at: Seconds
    cached: Tokens
    prefilled: Tokens
    reprefilled: Tokens
    preemptions: int
    cache_key: Hashable


class _Live(PrefixHolder):
    """A request inside the engine.

    ``target`` tokens must be computed before the next one is produced. While decoding, ``computed``
    is the value of when that began, at step ``joined``, and ``ends`` the step it finishes with.
    """

    __slots__ = (
        "aborted",
        "admitted_at",
        "cache_key",
        "cached",
        "computed",
        "decoding",
        "ends",
        "first_token_at",
        "generated",
        "joined",
        "known",
        "preemptions",
        "prefilled",
        "reprefilled",
        "request",
        "seq",
        "submitted_at",
        "target",
    )

    def __init__(self, request: EngineRequest, seq: int, now: Seconds, block_tokens: int) -> None:
        shareable = 0
        if request.shared is not None:
            shareable = min(request.shared[1], request.prompt) // block_tokens
        super().__init__(None, None, shareable)
        self.request = request
        self.cache_under(request.cache_key)
        self.seq = seq
        self.submitted_at = now
        self.target = request.prompt
        self.known = request.known
        self.admitted_at = self.first_token_at = -1.0
        self.generated = self.computed = self.joined = self.ends = 0
        self.cached = self.prefilled = self.reprefilled = self.preemptions = 0
        self.decoding = self.aborted = False

    def cache_under(self, cache_key: Hashable) -> None:
        """Cache under this key what is computed from now on. Nothing may be held under another."""
        request, self.cache_key = self.request, cache_key
        self.session = None if request.session is None else (request.session, cache_key)
        shared = request.shared if self.shareable else None
        self.shared_key = None if shared is None else (shared[0], cache_key)


class Engine:
    """A server with a queue. Times must not go back from call to call.

    ``next_at`` says when something will happen if nothing is submitted before; ``advance`` to that
    time or an earlier one. Raises ValueError where ``max_num_seqs`` exceeds the tokens of a step.
    """

    def __init__(
        self,
        cost: StepTimes,
        *,
        max_num_seqs: int,
        block_tokens: int = 16,
    ) -> None:
        if not 0 < max_num_seqs <= cost.chunk_tokens:
            raise ValueError(
                f"max_num_seqs must be 1 to {cost.chunk_tokens}, the tokens of a step, "
                f"not {max_num_seqs}"
            )
        self.cost = cost
        self.max_num_seqs = max_num_seqs
        self.block_tokens = block_tokens
        self._cache = KvCache(cost.kv_tokens // block_tokens, block_tokens)
        self.busy_s: Seconds = 0.0
        self.generated_tokens: Tokens = 0
        self.prefilled_tokens: Tokens = 0
        self.reprefilled_tokens: Tokens = 0
        self.preemptions = 0
        self._submitted = 0
        self._requests: dict[int, _Live] = {}
        self._waiting: list[tuple[int, int, _Live]] = []
        self._running: OrderedDict[int, _Live] = OrderedDict()
        self._prefilling: list[_Live] = []
        # Decoding requests: a heap by the step that ends them, and sums over them. A request takes
        # a block at every step that leaves the remainder under which `_takes` counts it.
        self._ending: list[tuple[int, int, _Live]] = []
        self._decoding = 0
        self._decoding_kv = 0
        self._takes = [0] * block_tokens
        self._steps = 0
        # The segment under way: steps from _start to _end; one mixed step if _chunks, else _count
        # decode steps that take _first, _first + _growth, ... Planned as late as possible, so that
        # everything submitted at a boundary joins there.
        self._planned = False
        self._start: Seconds = 0.0
        self._end: Seconds = 0.0
        self._count = 0
        self._first: Seconds = 0.0
        self._growth: Seconds = 0.0
        self._chunks: list[tuple[_Live, int]] = []
        self._chunk = 0
        self._pairs = 0.0
        # Of its requests, those that begin in it; and how long the next one is held up.
        self._entered = 0
        self._held_s: Seconds = 0.0
        # Whether nothing that was computed may be used by the next one, and what that caches under.
        self._clears = False
        self._loaded: Hashable = None
        # Whether a request submitted now could join before this segment's end.
        self._open = True
        self._aborted: list[_Live] = []
        self._done: list[FinishedRequest] = []

    # -- what the outside sees ------------------------------------------------

    @property
    def kv_used(self) -> Tokens:
        """Tokens' worth of blocks that live requests hold."""
        return self._cache.held * self.block_tokens

    @property
    def kv_cached(self) -> Tokens:
        """Tokens' worth of blocks kept for later turns."""
        return self._cache.idle * self.block_tokens

    @property
    def running(self) -> int:
        """The number of requests that have a place in the batch."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """The number of requests without a place, new or preempted."""
        return len(self._requests) - len(self._running)

    def submit(self, request: EngineRequest, now: Seconds) -> None:
        """Queue a request; it may join at the first step boundary not before ``now``.

        Raises ValueError for a request that never fits, is empty, or whose id is in use.
        """
        room = self._cache.total * self.block_tokens
        if request.prompt < 1 or request.generate < 1:
            raise ValueError(f"request {request.id}: prompt and generate must be at least 1")
        if request.prompt + request.generate > room:
            raise ValueError(
                f"request {request.id}: {request.prompt} + {request.generate} tokens do not fit "
                f"a KV cache of {room}"
            )
        self._progress(now, self._done)
        if request.id in self._requests:
            raise ValueError(f"request {request.id} is already here")
        if not self._requests:
            self._start = now
        live = _Live(request, self._submitted, now, self.block_tokens)
        self._submitted += 1
        self._requests[request.id] = live
        heappush(self._waiting, (request.priority, live.seq, live))
        if self._planned and self._open:
            self._interrupt(now)

    def abort(self, id: int, now: Seconds) -> bool:  # noqa: A002
        """End a request at the next step boundary with what it has; what it computed stays cached.

        False: it is not here, or has just finished. Either way ``advance`` tells.
        """
        self._progress(now, self._done)
        live = self._requests.get(id)
        if live is None or live.aborted:
            return False
        live.aborted = True
        self._aborted.append(live)
        if self._planned and not self._chunks:
            self._truncate(now)
        if not self._planned:
            self._drop_aborted(self._done)
        return True

    def forget(self, session: Hashable, cache_key: Hashable = None) -> None:
        """Drop what is cached of a session that will not come back."""
        self._cache.forget((session, cache_key))

    def flush(self) -> None:
        """Drop everything cached that no live request uses (a new weight version)."""
        self._cache.flush()

    def reprice(self, cost: StepTimes, now: Seconds) -> None:
        """Let steps cost this from the next step boundary on; the KV cache stays as it is."""
        self._cut(now)
        self.cost = cost

    def load(
        self, seconds: Seconds, now: Seconds, *, clear_cache: bool, cache_key: Hashable = None
    ) -> None:
        """Load weights at the next step boundary, for so long; with ``clear_cache`` everything is
        dropped that was computed with the ones before, of live requests too, which compute it again
        and cache it under ``cache_key``."""
        self._cut(now)
        if clear_cache:
            self._clears, self._loaded = True, cache_key
        if self._requests:
            self._held_s += seconds

    def _cut(self, now: Seconds) -> None:
        self._progress(now, self._done)
        if self._planned and not self._chunks:
            self._truncate(now)

    def next_at(self) -> Seconds | None:
        """When the next request finishes, or something changes earlier; None: nothing to do."""
        if not self._planned:
            if not self._requests:
                return None
            self._plan()
        return self._end

    def advance(self, now: Seconds) -> list[FinishedRequest]:
        """Return all requests that finished up to ``now``, in order of time."""
        done = self._done
        self._progress(now, done)
        self._done = []
        return done

    def _progress(self, now: Seconds, done: list[FinishedRequest]) -> None:
        while True:
            if not self._planned:
                if not self._requests or self._start >= now:
                    return
                self._plan()
            if self._end > now:
                return
            if self._chunks:
                self._complete_mixed(done)
            else:
                self._complete_decode(done)
            if self._aborted:
                self._drop_aborted(done)

    # -- planning -------------------------------------------------------------

    def _plan(self) -> None:
        """Decide the next segment of steps, from ``_start`` on."""
        self._planned = True
        self._start += self._held_s
        self._held_s = 0.0
        self._chunks = []
        self._chunk = self._entered = 0
        self._pairs = 0.0
        if self._clears:
            self._clear()
        before = self.preemptions
        if self._cache.held + self._takes[self._steps % self.block_tokens] > self._cache.total:
            self._make_room_to_decode()
        if self._prefilling:
            self._continue_prompts()
        # As in vLLM nobody is let in by a step that turned somebody out; unless nobody is left.
        preempted = self.preemptions != before and bool(self._running)
        if self._waiting and not preempted:
            self._admit()
        self._set_open(preempted)
        if self._chunks:
            self._price_mixed()
        else:
            self._plan_decode(1 if preempted else None)

    def _set_open(self, preempted: bool) -> None:
        self._open = not preempted and len(self._running) < self.max_num_seqs

    def _plan_decode(self, most: int | None) -> None:
        ending = self._ending
        while not ending[0][2].decoding or ending[0][2].ends != ending[0][0]:
            heappop(ending)
        batch = self._decoding
        count = ending[0][0] - self._steps
        first, growth, holds = self.cost.decode_line(batch, self._decoding_kv + batch)
        count = min(count, holds)
        if most is not None:
            count = min(count, most)
        room = self._cache.total - self._cache.held
        if batch * ((count + self.block_tokens - 1) // self.block_tokens) > room:
            count = self._steps_within(count, room)
        self._count = count
        self._first = first
        self._growth = growth
        self._end = self._start + count * first + growth * (count * (count - 1) / 2)

    def _steps_within(self, count: int, room: int) -> int:
        """The most of ``count`` decode steps that take ``room`` blocks at most."""
        size = self.block_tokens
        cycles = min(room // self._decoding, count // size)
        steps = cycles * size
        room -= cycles * self._decoding
        while steps < count:
            room -= self._takes[(self._steps + steps) % size]
            if room < 0:
                break
            steps += 1
        return steps

    def _blocks_taken(self, count: int) -> int:
        """Blocks that ``count`` decode steps from now take."""
        size = self.block_tokens
        cycles, rest = divmod(count, size)
        taken = cycles * self._decoding
        if rest:
            first = self._steps % size
            last = first + rest
            takes = self._takes
            if last <= size:
                taken += sum(takes[first:last])
            else:
                taken += sum(takes[first:]) + sum(takes[: last - size])
        return taken

    def _price_mixed(self) -> None:
        chunk = self._chunk
        batch = self._decoding
        self._end = self._start + self.cost.mixed_step_s(
            batch, self._decoding_kv + batch, chunk, self._pairs / chunk - chunk / 2, self._entered
        )

    def _schedule_chunk(self, live: _Live, tokens: Tokens) -> None:
        """Let a step compute ``tokens`` of a prompt."""
        self._chunks.append((live, tokens))
        self._chunk += tokens
        self._pairs += tokens * (live.computed + tokens / 2)
        # The blocks that decoding requests take in this step are booked when it ends.
        due = self._takes[self._steps % self.block_tokens]
        self._cache.grow(live, live.computed + tokens, due)

    def _continue_prompts(self) -> None:
        """Give prompts that were begun their next chunks."""
        budget = self.cost.chunk_tokens - self._decoding
        size = self.block_tokens
        cache = self._cache
        for live in list(self._prefilling):
            if budget <= 0:
                return
            if live.blocks == 0:
                continue
            tokens = min(budget, live.target - live.computed)
            blocks = -(-(live.computed + tokens) // size) - live.blocks
            while cache.held + blocks + self._takes[self._steps % size] > cache.total:
                victim = self._victim()
                self._preempt(victim)
                if victim is live:
                    return
            self._schedule_chunk(live, tokens)
            budget -= tokens

    def _admit(self) -> None:
        """Give the waiting places, in order, until one does not fit."""
        waiting = self._waiting
        budget = self.cost.chunk_tokens - self._decoding - self._chunk
        while waiting and budget > 0:
            live = waiting[0][2]
            if live.aborted:
                heappop(waiting)
                continue
            if len(self._running) >= self.max_num_seqs:
                return
            tokens = self._enter(live, budget)
            if not tokens:
                return
            heappop(waiting)
            budget -= tokens

    def _enter(self, live: _Live, budget: Tokens) -> Tokens:
        """Place one request and its first chunk; the chunk's tokens, 0 where there is no room."""
        due = self._takes[self._steps % self.block_tokens]
        found = self._cache.place(live, live.target, due)
        if found is None:
            return 0
        live.computed = found
        if live.admitted_at < 0:
            live.admitted_at = self._start
            live.cached = found
        self._running[live.seq] = live
        self._prefilling.append(live)
        self._entered += 1
        tokens = min(budget, live.target - found)
        self._schedule_chunk(live, tokens)
        return tokens

    # -- what happens at the end of a segment ---------------------------------

    def _complete_decode(self, done: list[FinishedRequest]) -> None:
        count = self._count
        self._take_blocks(self._blocks_taken(count))
        self._advance_decoding(count)
        if self._ending[0][0] <= self._steps:
            self._finish_ended(done)

    def _take_blocks(self, count: int) -> None:
        cache = self._cache
        cache.held += count
        if cache.held + cache.idle > cache.total:
            cache.trim()

    def _complete_mixed(self, done: list[FinishedRequest]) -> None:
        # The chunks' blocks are held since they were scheduled; the decoding ones' are due.
        self._take_blocks(self._takes[self._steps % self.block_tokens])
        chunks = self._chunks
        self._advance_decoding(1)
        self.prefilled_tokens += self._chunk
        for live, tokens in chunks:
            computed = live.computed
            reached = live.computed = computed + tokens
            live.prefilled += tokens
            known = live.known
            if computed < known:
                again = (known if known < reached else reached) - computed
                live.reprefilled += again
                self.reprefilled_tokens += again
        if self._ending and self._ending[0][0] <= self._steps:
            self._finish_ended(done)
        for live, _ in chunks:
            if live.computed == live.target:
                self._begin_decoding(live, done)

    def _advance_decoding(self, count: int) -> None:
        batch = self._decoding
        self._steps += count
        self._decoding_kv += batch * count
        self.generated_tokens += batch * count
        self.busy_s += self._end - self._start
        self._start = self._end
        self._planned = False

    def _finish_ended(self, done: list[FinishedRequest]) -> None:
        ending = self._ending
        steps = self._steps
        while ending and ending[0][0] <= steps:
            ends, _, live = heappop(ending)
            if live.decoding and live.ends == ends:
                self._stop_decoding(live)
                self._finish(live, done)

    def _begin_decoding(self, live: _Live, done: list[FinishedRequest]) -> None:
        """Let a request decode whose context is computed: that step has produced a token."""
        self._prefilling.remove(live)
        if live.first_token_at < 0:
            live.first_token_at = self._start
        live.generated += 1
        self.generated_tokens += 1
        left = live.request.generate - live.generated
        if not left:
            self._finish(live, done)
            return
        steps = self._steps
        live.decoding = True
        live.joined = steps
        live.ends = steps + left
        heappush(self._ending, (live.ends, live.seq, live))
        self._decoding += 1
        self._decoding_kv += live.computed
        self._takes[(steps - live.computed) % self.block_tokens] += 1

    def _stop_decoding(self, live: _Live) -> None:
        """Take a request out of the sums, and bring its own numbers up to date."""
        steps = self._steps - live.joined
        self._takes[(live.joined - live.computed) % self.block_tokens] -= 1
        live.computed += steps
        live.generated += steps
        live.blocks = -(-live.computed // self.block_tokens)
        live.decoding = False
        self._decoding -= 1
        self._decoding_kv -= live.computed

    def _finish(self, live: _Live, done: list[FinishedRequest]) -> None:
        if live.aborted:
            # It goes with the others, at this very boundary.
            return
        self._leave(live)
        self._tell(live, done)

    def _tell(self, live: _Live, done: list[FinishedRequest]) -> None:
        request = live.request
        del self._requests[request.id]
        done.append(
            FinishedRequest(
                request.id,
                live.generated,
                live.submitted_at,
                live.admitted_at,
                live.first_token_at,
                self._start,
                live.cached,
                live.prefilled,
                live.reprefilled,
                live.preemptions,
                live.cache_key,
            )
        )

    def _leave(self, live: _Live) -> None:
        """Give up a place; what was computed stays cached."""
        del self._running[live.seq]
        self._cache.release(live, live.computed)

    # -- preemption, interruption, abortion ----------------------------------

    def _victim(self) -> _Live:
        return max(self._running.values(), key=lambda live: (live.request.priority, live.seq))

    def _make_room_to_decode(self) -> None:
        cache = self._cache
        while cache.held + self._takes[self._steps % cache.size] > cache.total:
            self._preempt(self._victim())

    def _clear(self) -> None:
        """Push back everything that runs, so that nothing holds the cache, and drop that."""
        self._clears = False
        for live in list(self._running.values()):
            self._push_back(live)
        self._ending.clear()
        self._cache.flush()
        for live in self._requests.values():
            live.cache_under(self._loaded)

    def _preempt(self, live: _Live) -> None:
        """Take a running request's place, for want of memory."""
        live.preemptions += 1
        self.preemptions += 1
        self._push_back(live)

    def _push_back(self, live: _Live) -> None:
        """Send a running request back to its old place in the queue."""
        if live.decoding:
            self._stop_decoding(live)
        else:
            self._unschedule(live)
        self._leave(live)
        live.known = max(live.known, live.computed)
        live.target = live.request.prompt + live.generated
        live.computed = 0
        heappush(self._waiting, (live.request.priority, live.seq, live))

    def _unschedule(self, live: _Live) -> None:
        """Take a prompt that is being computed out of this step."""
        self._prefilling.remove(live)
        self._cache.shrink(live, live.computed)
        for index, (other, tokens) in enumerate(self._chunks):
            if other is live:
                del self._chunks[index]
                self._chunk -= tokens
                self._pairs -= tokens * (live.computed + tokens / 2)
                return

    def _interrupt(self, now: Seconds) -> None:
        """Let what was just submitted join at the next boundary, or at this one."""
        if not self._chunks:
            self._truncate(now)
        elif now <= self._start:
            self._admit()
            self._set_open(preempted=False)
            self._price_mixed()

    def _truncate(self, now: Seconds) -> None:
        """End a run of decode steps with the step that is under way."""
        passed = now - self._start
        if passed <= 0:
            self._planned = False
            return
        first, growth = self._first, self._growth
        # first x n + growth x n (n - 1) / 2 = passed, solved so that no growth is no trouble.
        half = first - growth / 2
        root = half + sqrt(half * half + 2 * growth * passed)
        steps = 2 * passed / root if root > 0 else 1.0
        count = max(1, ceil(steps - 1e-9))
        if count < self._count:
            self._count = count
            self._end = self._start + count * first + growth * (count * (count - 1) / 2)

    def _drop_aborted(self, done: list[FinishedRequest]) -> None:
        """Let go of what was aborted; only at a boundary."""
        for live in self._aborted:
            if live.seq in self._running:
                if live.decoding:
                    self._stop_decoding(live)
                elif live in self._prefilling:
                    self._prefilling.remove(live)
                self._leave(live)
            self._tell(live, done)
        self._aborted.clear()
