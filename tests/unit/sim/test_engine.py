"""The engine in virtual time, against a reference that simulates every step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libra_cli.core.costs.server import ServerCost
from libra_cli.sim.engine import Engine, EngineRequest, FinishedRequest

BLOCK = 16


def cost(**changes: Any) -> ServerCost:
    known: dict[str, Any] = {
        "tensor_parallel": 1,
        "step_s": 0.02,
        "sequence_s": 5e-5,
        "kv_token_s": 1e-7,
        "prefill_token_s": 1e-4,
        "prefill_pair_s": 4e-9,
        "kv_tokens": 100_000,
        "chunk_tokens": 512,
        "free_tokens": 40,
    }
    return ServerCost(**{**known, **changes})


def run(
    engine: Engine, requests: list[tuple[float, EngineRequest]], peek: bool = False
) -> dict[int, FinishedRequest]:
    """Submit each at its time, advancing as a driver would; everything that finished, by id."""
    done: list[FinishedRequest] = []
    for at, request in sorted(requests, key=lambda pair: pair[0]):
        if peek:
            engine.next_at()
        done += engine.advance(at)
        engine.submit(request, at)
    while (at_ := engine.next_at()) is not None:
        done += engine.advance(at_)
    assert [f.finished_at for f in done] == sorted(f.finished_at for f in done)
    return {f.id: f for f in done}


# --- the reference: one loop turn a step, nothing clever ---------------------------------------


class Cached:
    """Blocks kept under a key, from block ``start`` of a context."""

    def __init__(self, start: int, blocks: int, refs: int = 0) -> None:
        self.start, self.blocks, self.refs = start, blocks, refs


@dataclass(eq=False)
class Item:
    at: float
    request: EngineRequest
    order: int
    computed: int = 0
    generated: int = 0
    prefix: Cached | None = None
    owner: bool = False
    shared: int = 0
    first: float | None = None
    end: float | None = None
    abort_at: float = float("inf")
    decoding: bool = False

    @property
    def target(self) -> int:
        return self.request.prompt + self.generated

    @property
    def rank(self) -> tuple[int, int]:
        return self.request.priority, self.order


def blocks_of(tokens: int) -> int:
    return -(-tokens // BLOCK)


class Reference:
    """vLLM's scheduling, step by step; `old` holds what nobody uses, oldest first."""

    def __init__(self, cost: ServerCost, max_num_seqs: int) -> None:
        self.cost, self.max_num_seqs = cost, max_num_seqs
        self.total = cost.kv_tokens // BLOCK
        self.running: list[Item] = []
        self.waiting: list[Item] = []
        self.sessions: dict[Any, Cached] = {}
        self.prefixes: dict[Any, Cached] = {}
        self.old: list[tuple[str, Any]] = []
        self.preemptions = 0

    def held(self, also: dict[int, int] | None = None) -> int:
        """Blocks in use, where `also` gives requests the tokens they are about to compute."""
        also = also or {}
        own = sum(
            blocks_of(item.computed + also.get(item.order, 0)) - item.shared
            for item in self.running
        )
        return own + sum(p.blocks for p in self.prefixes.values() if p.refs)

    def fits(self, also: dict[int, int]) -> bool:
        return self.held(also) <= self.total

    def evict(self, also: dict[int, int]) -> None:
        def cached() -> int:
            kept = sum(c.blocks for c in self.sessions.values())
            return kept + sum(p.blocks for p in self.prefixes.values() if not p.refs)

        while self.held(also) + cached() > self.total:
            kind, key = self.old[0]
            table = self.sessions if kind == "session" else self.prefixes
            table[key].blocks -= 1
            if not table[key].blocks:
                del table[key]
                self.old.pop(0)

    def leave(self, item: Item) -> None:
        self.running.remove(item)
        key = (item.request.session, item.request.cache_key)
        kept = item.computed // BLOCK - item.shared
        if kept > 0 and item.request.session is not None:
            if key in self.sessions:
                self.old.remove(("session", key))
            self.sessions[key] = Cached(item.shared, kept)
            self.old.append(("session", key))
        if item.prefix is not None:
            item.prefix.refs -= 1
            if not item.prefix.refs:
                assert item.request.shared is not None
                shared = (item.request.shared[0], item.request.cache_key)
                if item.prefix.blocks:
                    self.old.append(("shared", shared))
                else:
                    del self.prefixes[shared]
        item.prefix, item.shared, item.owner, item.decoding = None, 0, False, False

    def preempt(self) -> Item:
        victim = max(self.running, key=lambda item: item.rank)
        self.leave(victim)
        victim.computed = 0
        self.preemptions += 1
        self.waiting.append(victim)
        return victim

    def plan(self) -> dict[int, int]:
        """Tokens each request computes in the next step."""
        before = self.preemptions
        decoding = sorted((i for i in self.running if i.decoding), key=lambda item: item.order)
        also = {item.order: 1 for item in decoding}
        while not self.fits(also):
            also.pop(self.preempt().order, None)
        budget = self.cost.chunk_tokens - len(also)
        for item in [item for item in self.running if not item.decoding]:
            if item not in self.running or not budget:
                continue
            tokens = min(budget, item.target - item.computed)
            while not self.fits({**also, item.order: tokens}):
                victim = self.preempt()
                budget += also.pop(victim.order, 0) if victim.generated == 0 else 0
                if victim is item:
                    break
            else:
                also[item.order] = tokens
                budget -= tokens
                self.evict(also)
                self.extend(item, tokens)
        if self.preemptions == before:
            self.admit(also, budget)
        return also

    def admit(self, also: dict[int, int], budget: int) -> None:
        self.waiting.sort(key=lambda item: item.rank)
        while self.waiting and budget and len(self.running) < self.max_num_seqs:
            item = self.waiting[0]
            tokens = self.enter(item, also, budget)
            if not tokens:
                return
            self.waiting.pop(0)
            also[item.order] = tokens
            budget -= tokens
            self.evict(also)
            self.extend(item, tokens)

    def enter(self, item: Item, also: dict[int, int], budget: int) -> int:
        request = item.request
        most = (item.target - 1) // BLOCK
        key = (request.session, request.cache_key)
        own = self.sessions.get(key)
        shared_key = (request.shared[0], request.cache_key) if request.shared else None
        length = min(request.shared[1], request.prompt) // BLOCK if request.shared else 0
        prefix = self.prefixes.get(shared_key) if length else None
        shared = min(prefix.blocks, length, most) if prefix else 0
        hit = shared
        if own is not None and own.start <= shared:
            hit = max(hit, min(own.start + own.blocks, most))
        tokens = min(budget, item.target - hit * BLOCK)
        extra = blocks_of(item.target) - (shared if prefix and prefix.refs else 0)
        if self.held(also) + extra > self.total:
            return 0
        if own is not None:
            self.old.remove(("session", key))
            del self.sessions[key]
        if request.shared and length:
            if prefix is None:
                prefix = self.prefixes[shared_key] = Cached(0, 0)
            elif not prefix.refs:
                self.old.remove(("shared", shared_key))
            if not prefix.refs:
                item.owner = True
                prefix.blocks = shared
            prefix.refs += 1
            item.prefix, item.shared = prefix, shared
        item.computed = hit * BLOCK
        self.running.append(item)
        return tokens

    def extend(self, item: Item, tokens: int) -> None:
        if item.owner and item.prefix is not None:
            assert item.request.shared is not None
            length = min(item.request.shared[1], item.request.prompt) // BLOCK
            item.shared = max(item.shared, min(length, (item.computed + tokens) // BLOCK))
            item.prefix.blocks = item.shared

    def price(self, also: dict[int, int]) -> float:
        decoding = [item for item in self.running if item.decoding]
        kv = sum(item.computed + 1 for item in decoding)
        chunks = [
            (item.computed, also[item.order])
            for item in self.running
            if not item.decoding and also.get(item.order)
        ]
        if not chunks:
            return self.cost.decode_step_s(len(decoding), kv)
        total = sum(tokens for _, tokens in chunks)
        pairs = sum(tokens * (context + tokens / 2) for context, tokens in chunks)
        return self.cost.mixed_step_s(len(decoding), kv, total, pairs / total - total / 2)

    def run(self, items: list[Item]) -> None:
        now = 0.0
        pending = sorted(items, key=lambda item: (item.at, item.order))
        while pending or self.waiting or self.running:
            if not self.waiting and not self.running:
                now = max(now, pending[0].at)
            arrived = [item for item in pending if item.at <= now]
            pending = pending[len(arrived) :]
            self.waiting += [item for item in arrived if item.abort_at > now]
            if self.waiting or self.running:
                now = self.step(now)

    def step(self, now: float) -> float:
        also = self.plan()
        now += self.price(also)
        self.evict(also)
        assert self.held(also) <= self.total
        ended = []
        for item in self.running:
            item.computed += also.get(item.order, 0)
            if item.computed == item.target:
                item.decoding = True
                item.generated += 1
                item.first = item.first or now
                if item.generated == item.request.generate and item.abort_at > now:
                    item.end = now
                    ended.append(item)
        # First those that were decoding, then prompts in the order of their chunks.
        for item in sorted(ended, key=lambda item: list(also).index(item.order)):
            self.leave(item)
        self.abort(now)
        return now

    def abort(self, now: float) -> None:
        late = [item for item in [*self.running, *self.waiting] if item.abort_at <= now]
        for item in sorted(late, key=lambda item: (item.abort_at, item.order)):
            (self.leave(item) if item in self.running else self.waiting.remove(item))


requests = st.builds(
    EngineRequest,
    id=st.just(0),
    session=st.none() | st.integers(0, 4),
    prompt=st.integers(1, 300),
    generate=st.integers(1, 120),
    priority=st.integers(0, 2),
    cache_key=st.integers(0, 1),
    shared=st.none() | st.tuples(st.integers(0, 2), st.integers(1, 200)),
    known=st.integers(0, 300),
)
times = st.floats(0, 4, allow_subnormal=False)
workloads = st.lists(st.tuples(times, requests), min_size=1, max_size=20).map(
    lambda load: [
        (at, request._replace(id=i))
        for i, (at, request) in enumerate(sorted(load, key=lambda pair: pair[0]))
    ]
)
servers = st.builds(
    cost,
    kv_tokens=st.integers(27, 120).map(lambda blocks: blocks * BLOCK),
    chunk_tokens=st.sampled_from([16, 40, 128, 512]),
    free_tokens=st.sampled_from([0, 40]),
)


def refer(
    load: list[tuple[float, EngineRequest]], server: ServerCost, seqs: int
) -> tuple[list[Item], Reference]:
    items = [Item(at, request, i) for i, (at, request) in enumerate(load)]
    reference = Reference(server, seqs)
    reference.run(items)
    return items, reference


@settings(max_examples=4 * settings().max_examples)
@given(workloads, servers, st.integers(1, 12), st.booleans())
def test_finish_times_are_those_of_a_simulation_step_by_step(
    load: list[tuple[float, EngineRequest]], server: ServerCost, seqs: int, peek: bool
) -> None:
    engine = Engine(server, max_num_seqs=seqs)
    done = run(engine, load, peek=peek)
    items, reference = refer(load, server, seqs)
    assert done.keys() == {item.order for item in items}
    for item in items:
        assert done[item.order].finished_at == pytest.approx(item.end, abs=1e-6)
        assert done[item.order].first_token_at == pytest.approx(item.first, abs=1e-6)
    assert engine.preemptions == reference.preemptions


@given(workloads, servers, st.integers(1, 12))
def test_no_token_is_lost_and_the_cache_never_overfull(
    load: list[tuple[float, EngineRequest]], server: ServerCost, seqs: int
) -> None:
    engine = Engine(server, max_num_seqs=seqs)
    done: list[FinishedRequest] = []
    pending = list(load)
    while True:
        at = engine.next_at()
        if pending and (at is None or pending[0][0] <= at):
            at, request = pending.pop(0)
            engine.submit(request, at)
        elif at is None:
            break
        done += engine.advance(at)
        assert 0 <= engine.kv_used <= server.kv_tokens
        assert 0 <= engine.kv_cached <= server.kv_tokens - engine.kv_used
        assert engine.running <= seqs
    assert sorted(f.id for f in done) == [request.id for _, request in load]
    assert engine.generated_tokens == sum(request.generate for _, request in load)
    assert engine.prefilled_tokens == sum(f.prefilled for f in done)
    assert engine.reprefilled_tokens == sum(f.reprefilled for f in done)
    assert engine.kv_used == engine.running == engine.waiting == 0
    for f in done:
        request = load[f.id][1]
        assert f.cached % BLOCK == 0
        assert f.cached < request.prompt
        assert f.preemptions or f.prefilled == request.prompt - f.cached
        assert f.preemptions or f.reprefilled == max(
            0, min(request.known, request.prompt) - f.cached
        )
        assert f.submitted_at <= f.admitted_at < f.first_token_at <= f.finished_at


@given(
    workloads,
    servers,
    st.integers(1, 12),
    st.lists(st.tuples(times, st.integers(0, 19)), max_size=6),
)
def test_the_aborted_end_at_the_next_boundary_with_what_they_have_and_the_others_finish(
    load: list[tuple[float, EngineRequest]],
    server: ServerCost,
    seqs: int,
    aborts: list[tuple[float, int]],
) -> None:
    real = [(at, id_) for at, id_ in aborts if id_ < len(load) and at > load[id_][0]]
    first = {id_: at for at, id_ in sorted(real, reverse=True)}
    engine = Engine(server, max_num_seqs=seqs)
    done: list[FinishedRequest] = []
    aborted = set()
    events: list[tuple[float, int, EngineRequest | None]]
    events = [(at, request.id, request) for at, request in load]
    events += [(at, id_, None) for id_, at in first.items()]
    for at, id_, request in sorted(events, key=lambda event: (event[0], not event[2], event[1])):
        if request is not None:
            engine.submit(request, at)
        elif engine.abort(id_, at):
            aborted.add(id_)
            assert not engine.abort(id_, at)
    while (next_at := engine.next_at()) is not None:
        done += engine.advance(next_at)
    done += engine.advance(1e9)
    assert sorted(f.id for f in done) == list(range(len(load)))
    assert engine.kv_used == engine.running == engine.waiting == 0
    items = [
        Item(at, request, i, abort_at=first.get(i, float("inf")))
        for i, (at, request) in enumerate(load)
    ]
    Reference(server, seqs).run(items)
    for f in done:
        assert f.generated == items[f.id].generated
        if f.id not in aborted:
            assert f.finished_at == pytest.approx(items[f.id].end, abs=1e-6)


# --- single facts -------------------------------------------------------------------------------


def test_a_turn_alone_takes_its_prefill_and_its_decode_steps() -> None:
    server = cost()
    engine = Engine(server, max_num_seqs=4)
    done = run(engine, [(1.0, EngineRequest(7, "a", 1000, 50))])[7]
    prefill = server.prefill_s(1000, 0)
    decode = sum(server.decode_step_s(1, 1000 + i) for i in range(1, 50))
    assert done.first_token_at == pytest.approx(1.0 + prefill)
    assert done.finished_at == pytest.approx(1.0 + prefill + decode)
    assert engine.busy_s == pytest.approx(prefill + decode)


def test_the_next_turn_of_a_session_computes_only_what_is_new() -> None:
    engine = Engine(cost(), max_num_seqs=4)
    run(engine, [(0.0, EngineRequest(0, "a", 100, 50))])
    second = run(engine, [(9.0, EngineRequest(1, "a", 300, 5, known=150))])[1]
    # 149 tokens were computed: the last one generated never was an input.
    assert second.cached == 144
    assert second.prefilled == 156
    assert second.reprefilled == 6


def test_another_cache_key_never_hits() -> None:
    engine = Engine(cost(), max_num_seqs=4)
    run(engine, [(0.0, EngineRequest(0, "a", 100, 50, cache_key=1))])
    second = run(engine, [(9.0, EngineRequest(1, "a", 300, 5, cache_key=2, known=150))])[1]
    assert second.cached == 0
    assert second.reprefilled == 150


def test_siblings_share_their_prompt_even_in_one_step() -> None:
    engine = Engine(cost(chunk_tokens=2048), max_num_seqs=8)
    load = [(0.0, EngineRequest(i, i, 1000, 5, shared=("group", 1000))) for i in range(4)]
    done = run(engine, load)
    assert [done[i].cached for i in range(4)] == [0, 992, 992, 992]
    assert engine.prefilled_tokens == 1000 + 3 * 8


def test_what_a_session_left_is_dropped_oldest_first() -> None:
    engine = Engine(cost(kv_tokens=64 * BLOCK), max_num_seqs=4)
    for i, name in enumerate("abc"):
        run(engine, [(10.0 * i, EngineRequest(i, name, 24 * BLOCK, 1))])
    newest = run(engine, [(50.0, EngineRequest(3, "c", 24 * BLOCK, 1))])[3]
    oldest = run(engine, [(60.0, EngineRequest(4, "a", 24 * BLOCK, 1))])[4]
    assert newest.cached == 23 * BLOCK
    assert oldest.cached == 16 * BLOCK


def test_forgetting_and_flushing_empty_the_cache() -> None:
    engine = Engine(cost(), max_num_seqs=4)
    run(engine, [(0.0, EngineRequest(i, i, 160, 2)) for i in range(3)])
    assert engine.kv_cached == 3 * 160
    engine.forget(0)
    engine.forget("never seen")
    assert engine.kv_cached == 2 * 160
    engine.flush()
    assert engine.kv_cached == 0
    assert run(engine, [(9.0, EngineRequest(5, 1, 320, 2))])[5].cached == 0


def test_the_last_admitted_gives_way_when_the_cache_is_full() -> None:
    engine = Engine(cost(kv_tokens=40 * BLOCK), max_num_seqs=4)
    done = run(engine, [(0.0, EngineRequest(i, i, 10 * BLOCK, 15 * BLOCK)) for i in range(2)])
    assert (done[0].preemptions, done[1].preemptions) == (0, 1)
    assert done[1].reprefilled > 0
    assert done[0].finished_at < done[1].finished_at


def test_a_request_turned_out_by_a_prefix_it_shares_comes_back() -> None:
    engine = Engine(cost(kv_tokens=27 * BLOCK), max_num_seqs=4)
    long, short = ("group", 20 * BLOCK), ("group", 5 * BLOCK)
    load = [
        (0.0, EngineRequest(0, 0, 20 * BLOCK, 2, shared=long)),
        (0.0, EngineRequest(1, 1, 6 * BLOCK, 20 * BLOCK, shared=short)),
    ]
    done = run(engine, load)
    assert done[1].preemptions == 1
    assert done[1].cached == 5 * BLOCK


def test_lower_priority_goes_first() -> None:
    load = [(0.0, EngineRequest(0, 0, 10, 100))]
    load += [(0.1, EngineRequest(i, i, 10, 100, priority=5 - i)) for i in range(1, 4)]
    done = run(Engine(cost(), max_num_seqs=1), load)
    assert sorted(done, key=lambda i: done[i].finished_at) == [0, 3, 2, 1]


def test_submitting_late_catches_up_first_and_loses_nothing() -> None:
    engine = Engine(cost(), max_num_seqs=4)
    engine.submit(EngineRequest(0, 0, 100, 10), 0.0)
    engine.submit(EngineRequest(1, 1, 100, 10), 100.0)
    (early,) = engine.advance(100.0)
    assert early.id == 0
    assert early.finished_at < 1.0


def test_a_growing_line_may_hold_for_a_few_steps_only() -> None:
    class Short(ServerCost):
        def decode_line(self, batch: int, kv_tokens: int) -> tuple[float, float, int]:
            step, growth, _ = super().decode_line(batch, kv_tokens)
            return step, growth, 7

    load = [(i / 3, EngineRequest(i, i, 50 * i + 9, 90)) for i in range(6)]
    whole = run(Engine(cost(), max_num_seqs=3), load)
    parts = run(
        Engine(Short(1, 0.02, 5e-5, 1e-7, 1e-4, 4e-9, 100_000, 512, 40), max_num_seqs=3), load
    )
    for i in whole:
        assert parts[i].finished_at == pytest.approx(whole[i].finished_at, abs=1e-6)


@pytest.mark.parametrize(
    ("request_", "word"),
    [
        (EngineRequest(0, 0, 90_000, 10_001), "do not fit"),
        (EngineRequest(0, 0, 0, 5), "at least 1"),
        (EngineRequest(0, 0, 5, 0), "at least 1"),
        (EngineRequest(9, 0, 5, 5), "already here"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused(request_: EngineRequest, word: str) -> None:
    engine = Engine(cost(), max_num_seqs=4)
    engine.submit(EngineRequest(9, 9, 10, 10), 0.0)
    with pytest.raises(ValueError, match=word):
        engine.submit(request_, 0.0)
    assert engine.waiting + engine.running == 1


@pytest.mark.parametrize("seqs", [0, 513])
def test_more_seats_than_tokens_a_step_are_refused(seqs: int) -> None:
    with pytest.raises(ValueError, match="max_num_seqs"):
        Engine(cost(), max_num_seqs=seqs)


# -- what a live run does to a server ------------------------------------------------------------

LIVE = ServerCost(
    tensor_parallel=1,
    step_s=0.01,
    sequence_s=0.0,
    kv_token_s=0.0,
    prefill_token_s=0.0,
    prefill_pair_s=0.0,
    kv_tokens=10_000,
    request_s=0.002,
)


def finished(engine):
    done = []
    while (at := engine.next_at()) is not None:
        done += engine.advance(at)
    return [round(one.finished_at, 6) for one in done]


def test_a_request_costs_something_whatever_its_size():
    engine = Engine(LIVE, max_num_seqs=4)
    for number in range(3):
        engine.submit(EngineRequest(number, number, 10 + number, 2), 0.0)
    assert finished(engine) == [0.026] * 3


def test_a_stalled_server_goes_on_where_it_was():
    engine = Engine(LIVE, max_num_seqs=4)
    engine.submit(EngineRequest(1, 1, 10, 11), 0.0)
    engine.next_at()
    engine.load(0.5, 0.055, clear_cache=False)
    assert finished(engine) == [0.612]


@pytest.mark.parametrize("clear", [True, False])
def test_a_load_lets_running_requests_compute_their_contexts_again_if_it_clears(clear):
    engine = Engine(cost(), max_num_seqs=4)
    shared = ("group", 3 * BLOCK)
    for number in range(3):
        engine.submit(EngineRequest(number, number, 4 * BLOCK, 40, shared=shared), 0.0)
    engine.advance(0.2)
    engine.load(0.5, 0.2, clear_cache=clear, cache_key="new")
    done = []
    while (at := engine.next_at()) is not None:
        done += engine.advance(at)
    assert [one.generated for one in done] == [40] * 3
    assert engine.preemptions == 0
    again = sum(one.reprefilled for one in done)
    # Prompts of four blocks, of which three are computed once, and what was generated by then.
    assert (6 * BLOCK < again < 6 * BLOCK + 3 * 40) if clear else again == 0
    # What was computed since is found again, by the next turn of the new version.
    assert {one.cache_key for one in done} == {"new" if clear else None}
    for number, (session, key) in enumerate(((0, "new"), (1, None)), start=9):
        turn = EngineRequest(number, session, 8 * BLOCK, 2, shared=shared, cache_key=key)
        engine.submit(turn, 9.0 + number)
        assert (run(engine, [])[number].cached > 4 * BLOCK) == (clear == (key == "new"))


@pytest.mark.parametrize("clear", [True, False])
def test_a_load_drops_what_is_idle_if_it_clears(clear):
    engine = Engine(cost(), max_num_seqs=4)
    run(engine, [(0.0, EngineRequest(0, 0, 160, 2))])
    engine.load(0.0, 5.0, clear_cache=clear)
    found = run(engine, [(9.0, EngineRequest(1, 0, 320, 2))])[1].cached
    assert found == (0 if clear else 160)


def test_a_stall_of_an_idle_server_holds_nobody_up():
    engine = Engine(LIVE, max_num_seqs=4)
    engine.load(0.5, 1.0, clear_cache=False)
    engine.submit(EngineRequest(1, 1, 10, 1), 2.0)
    assert finished(engine) == [2.012]


def test_a_new_price_holds_from_the_next_step_on():
    engine = Engine(LIVE, max_num_seqs=4)
    engine.submit(EngineRequest(1, 1, 10, 11), 0.0)
    engine.next_at()
    engine.reprice(replace(LIVE, step_s=0.02), 0.055)
    # The prompt and five of ten steps are over at 0.062.
    assert finished(engine) == [0.162]
