"""Trajectories on their way: reset, wait for a seat, generate, advance, and again.

    RESETTING --prompt--> WAITING --seat--> GENERATING --turn--> ADVANCING --text--> WAITING
                             ^                  |                    |
                             +--- server out ---+                    +--- done, or a limit --> ended

Guarantees:

*   **Exact prefix.** A trajectory is only ever appended to, and each turn's prompt must be, token
    for token, everything before it; a reply that was given another prompt is a bug and raises.
*   **No unproved token.** A server resumes with a new version a moment before it has proved it. A
    reply that holds tokens of a version its server has not proved yet is parked until it has, and
    thrown away if it does not.
*   **Nothing generated is lost with a server.** When one is taken out, its trajectories go on
    elsewhere from the tokens of their finished turns; one that drains gives what there is of an
    unfinished turn too (``abort``), and the turn goes on elsewhere from there.
*   **A failure is never a reward.** A broken environment, or a request a server refuses, replays
    the trajectory from its prompt, and after too many attempts drops the whole group.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from enum import StrEnum
from json import dumps

from libra_cli.config.errors import IllegalMove
from libra_cli.core.actions import (
    AbortTurn,
    Action,
    AdvanceEpisode,
    FinishEpisode,
    ForgetEpisode,
    Generate,
    Save,
    StartEpisode,
)
from libra_cli.core.cluster.rollout_servers import RolloutServers
from libra_cli.core.events import (
    EpisodeAdvanced,
    EpisodeFailed,
    EpisodeStarted,
    TurnFailed,
    TurnGenerated,
)
from libra_cli.core.records import GroupRecord, TrajectoryRecord, TurnRecord
from libra_cli.core.rollout.groups import Group, GroupLedger
from libra_cli.core.scheduling.estimates import Estimate
from libra_cli.core.scheduling.request_scheduler import RequestScheduler
from libra_cli.core.scheduling.server_queues import Request, ServerQueue
from libra_cli.core.types import (
    Seconds,
    SlotId,
    Tokens,
    ToolReturn,
    Trajectory,
    TrajectoryId,
    Version,
    VersionSpan,
    WeightVersion,
)


class Stage(StrEnum):
    """Where a trajectory is between its prompt and its reward."""

    RESETTING = "resetting"
    WAITING = "waiting"
    GENERATING = "generating"
    ADVANCING = "advancing"


ABORTED = "abort"
"""The finish reason of a turn that was broken off because its server drains."""
UNKNOWN = Estimate.point(0)
"""For policies that estimate nothing."""


class _Usual:
    """A running mean: of contexts, each weighed by how long it was there."""

    def __init__(self, guess: float) -> None:
        self._sum, self._weight = guess, 1.0

    @property
    def value(self) -> float:
        """So far; what was observed long ago counts less."""
        return self._sum / self._weight

    def add(self, value: float, *, weight: float) -> None:
        """One more; the hundredth of memory that it takes is taken from all."""
        self._sum = 0.99 * self._sum + value * weight
        self._weight = 0.99 * self._weight + weight


@dataclass(slots=True)
class ActiveTrajectory:
    """A trajectory that has no reward yet. ``turn`` is the reply the environment is looking at."""

    trajectory: Trajectory
    stage: Stage = Stage.RESETTING
    slot: SlotId | None = None
    #: Of the Generate action it waits for.
    request: int = 0
    queued_at: Seconds = 0.0
    ended_at: Seconds = 0.0
    turn: TurnGenerated | None = None
    #: Replies that broke off in this turn because their server drained, in order.
    parts: list[TurnGenerated] = field(default_factory=list)
    #: What it waits for or waited for last, and the cache key of its last turn.
    asked: Request | None = None
    turn_key: WeightVersion | None = None
    prompt: Tokens = 0
    #: Of the tokens it has yet to generate.
    estimate: Estimate = UNKNOWN
    returns: list[ToolReturn] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Limits:
    """When a trajectory is cut: turns, tokens a turn, tokens in all."""

    max_turns: int
    max_turn_tokens: int
    max_len: int


class Trajectories:
    """Every trajectory in flight. Methods return the actions they call for."""

    def __init__(
        self,
        ledger: GroupLedger,
        servers: RolloutServers,
        scheduler: RequestScheduler,
        limits: Limits,
    ) -> None:
        self._ledger = ledger
        self._servers = servers
        self._scheduler = scheduler
        self._estimator = scheduler.policy.estimator
        self._limits = limits
        self.flights: dict[TrajectoryId, ActiveTrajectory] = {}
        self._parked: dict[SlotId, dict[int, TurnGenerated]] = {}
        self._requests = 0
        #: Tokens of all trajectories in play; and of one, at a random moment.
        self._contexts = 0
        self._usual = _Usual(limits.max_len / 8)
        #: Groups given up since a trajectory last finished, and why the last one was.
        self.dropped_in_a_row = 0
        self.last_failure = ""

    # -- opening and placing --------------------------------------------------------------------

    def fill(self, *, version: Version, now: Seconds) -> list[Action]:
        """Open groups while the staleness bound and the servers' seats allow it."""
        actions: list[Action] = []
        size = self._ledger.group_size
        while self._ledger.may_open and self._ledger.playing + size <= max(
            self._scheduler.queues.seats, size
        ):
            if self.flights and not self._fits_beside():
                break
            group = self._ledger.open(version=version, now=now)
            actions.append(Save(group_record(group, now)))
            for trajectory in group.members:
                actions += self._begin(trajectory)
        return actions

    def _fits_beside(self) -> bool:
        """Whether the policy has room for the contexts in play and those of one more group."""
        playing = len(self.flights) + self._ledger.group_size
        expected = max(self._contexts, int(playing * self._usual.value))
        return self._scheduler.policy.has_room(expected, self._scheduler.queues)

    def _begin(self, trajectory: Trajectory) -> list[Action]:
        self.flights[trajectory.id] = ActiveTrajectory(trajectory)
        return [
            StartEpisode(trajectory.id),
            Save(trajectory_record(trajectory, "running", ended_at=None)),
        ]

    def dispatch(self, *, now: Seconds) -> list[Action]:
        """Send every waiting request that has a seat."""
        actions: list[Action] = []
        for request, lane in self._scheduler.dispatch(now=now):
            actions.append(self._send(self.flights[request.trajectory], request, lane, now))
        return actions

    def _send(
        self, flight: ActiveTrajectory, request: Request, lane: ServerQueue, now: Seconds
    ) -> Generate:
        slot = lane.slot
        status = self._servers.slots[slot]
        assert status.verified is not None, f"{slot} is routed to but has proved no version"
        status.count(+1, now=now)
        self._requests += 1
        flight.stage, flight.slot, flight.request = Stage.GENERATING, slot, self._requests
        flight.asked = request
        tokens = flight.trajectory.token_ids
        return Generate(
            request=self._requests,
            trajectory=flight.trajectory.id,
            slot=slot,
            incarnation=status.incarnation,
            prompt_ids=tokens[:],
            max_tokens=self._room(flight),
            cache_key=status.verified.version,
            priority=flight.trajectory.id.group,
        )

    def _room(self, flight: ActiveTrajectory) -> Tokens:
        """Tokens that may yet be generated in this turn."""
        said = sum(len(part.token_ids) for part in flight.parts)
        left = self._limits.max_len - len(flight.trajectory.token_ids)
        return min(self._limits.max_turn_tokens - said, left)

    def _wait(self, flight: ActiveTrajectory, now: Seconds) -> None:
        flight.stage, flight.queued_at = Stage.WAITING, now
        trajectory = flight.trajectory
        request = Request(
            trajectory=trajectory.id,
            context=len(trajectory.token_ids),
            generated=trajectory.generated,
            turns=trajectory.turns,
            tools=trajectory.tools,
            waiting_since=now,
            last_slot=flight.slot,
            last_key=flight.turn_key,
            estimate=flight.estimate,
            p90=flight.estimate.quantile(0.9),
        )
        self._scheduler.submit(request, now=now)

    # -- the environment ------------------------------------------------------------------------

    def episode_started(self, event: EpisodeStarted, *, now: Seconds) -> list[Action]:
        """The prompt is there: queue for the first turn."""
        flight = self.flights.get(event.trajectory)
        if flight is None:
            return []
        flight.trajectory.token_ids.extend(event.prompt_ids)
        flight.prompt = len(event.prompt_ids)
        self._contexts += flight.prompt
        _extend_unlearned(flight.trajectory, len(event.prompt_ids))
        if len(event.prompt_ids) >= self._limits.max_len:
            length, most = len(event.prompt_ids), self._limits.max_len
            reason = f"the prompt has {length} tokens, max_len is {most}"
            return self._break(flight, reason, now)
        if self._estimator is not None:
            prompt = len(event.prompt_ids)
            flight.estimate = self._estimator.begin(event.trajectory, prompt=prompt)
        self._wait(flight, now)
        return []

    def advanced(self, event: EpisodeAdvanced, *, now: Seconds) -> list[Action]:
        """The environment has looked at a turn."""
        flight = self.flights.get(event.trajectory)
        if flight is None:
            return []
        flight.returns += event.returns
        flight.trajectory.tools += len(event.returns)
        if event.done:
            assert event.reward is not None, f"{event.trajectory} is done without a reward"
            return [*self._save_turn(flight, now), *self._end(flight, event.reward, now)]
        trajectory = flight.trajectory
        full = len(trajectory.token_ids) + len(event.observation_ids) >= self._limits.max_len
        if full or trajectory.turns >= self._limits.max_turns:
            return [FinishEpisode(trajectory.id)]
        trajectory.token_ids.extend(event.observation_ids)
        self._contexts += len(event.observation_ids)
        _extend_unlearned(trajectory, len(event.observation_ids))
        if self._estimator is not None:
            flight.estimate = self._estimator.returned(
                trajectory.id,
                generated=trajectory.generated,
                context=len(trajectory.token_ids),
                returns=event.returns,
            )
        actions = self._save_turn(flight, now)
        self._wait(flight, now)
        return actions

    def episode_failed(self, event: EpisodeFailed, *, now: Seconds) -> list[Action]:
        """The environment broke; play the trajectory again."""
        flight = self.flights.get(event.trajectory)
        return [] if flight is None else self._break(flight, event.reason, now)

    def _end(self, flight: ActiveTrajectory, reward: float, now: Seconds) -> list[Action]:
        trajectory = flight.trajectory
        self.dropped_in_a_row = 0
        self._forget(trajectory)
        self._usual.add((flight.prompt + len(trajectory.token_ids)) / 2, weight=trajectory.turns)
        if self._estimator is not None:
            self._estimator.finished(trajectory.id, generated=trajectory.generated)
        group = self._ledger.finish(trajectory.id, reward)
        actions: list[Action] = [
            ForgetEpisode(trajectory.id),
            Save(trajectory_record(trajectory, "finished", ended_at=now)),
        ]
        if group.reward is not None:
            actions.append(Save(group_record(group, now)))
        return actions

    def _forget(self, trajectory: Trajectory) -> None:
        del self.flights[trajectory.id]
        self._contexts -= len(trajectory.token_ids)

    def _break(self, flight: ActiveTrajectory, reason: str, now: Seconds) -> list[Action]:
        broken = flight.trajectory
        actions = self._withdraw(flight, "failed", reason, now)
        again = self._ledger.replay(broken.id, now=now)
        if again is not None:
            return [*actions, *self._begin(again)]
        self.dropped_in_a_row, self.last_failure = self.dropped_in_a_row + 1, reason
        siblings = [f for f in self.flights.values() if f.trajectory.id.group == broken.id.group]
        for sibling in siblings:
            actions += self._withdraw(sibling, "dropped", f"{broken.id} failed too often", now)
        return [*actions, _dropped_record(broken, reason, now)]

    def _withdraw(
        self, flight: ActiveTrajectory, state: str, why: str, now: Seconds
    ) -> list[Action]:
        trajectory = flight.trajectory
        self._forget(trajectory)
        if self._estimator is not None and flight.stage is not Stage.RESETTING:
            self._estimator.withdrawn(trajectory.id)
        self._scheduler.withdraw(trajectory.id)
        if flight.stage is Stage.GENERATING:
            self._left(flight, now)
        row = trajectory_record(trajectory, state, ended_at=now, detail=why)
        return [ForgetEpisode(trajectory.id), Save(row)]

    # -- the servers ----------------------------------------------------------------------------

    def generated(self, event: TurnGenerated, *, now: Seconds) -> list[Action]:
        """A turn came back. Park it if its server has yet to prove the version."""
        flight = self._sent(event)
        if flight is None:
            return []
        status = self._servers.slots[event.slot]
        assert status.verified is not None, f"{event.slot} answered before it proved a version"
        if event.newest > status.verified.version:
            self._parked.setdefault(event.slot, {})[event.request] = event
            return []
        trainer = event.newest.trainer_incarnation
        if any(WeightVersion(trainer, span.version) in status.unproved for span in event.spans):
            return self._again(flight, now)
        status.failures = 0
        self._left(flight, now)
        self._append(flight, event)
        flight.turn_key = event.cache_key
        flight.parts.append(event)
        if event.finish_reason == ABORTED and self._room(flight) > 0:
            self._wait(flight, now)
            return []
        turn = _joined(flight.parts)
        flight.parts = []
        flight.trajectory.turns += 1
        flight.stage, flight.turn, flight.ended_at = Stage.ADVANCING, turn, now
        return [AdvanceEpisode(turn.trajectory, turn.token_ids, turn.finish_reason)]

    def abort(self, slot: SlotId) -> list[Action]:
        """Break off every turn on a server; what it has said so far is kept."""
        return [
            AbortTurn(flight.request, slot, self._servers.slots[slot].incarnation)
            for flight in self.flights.values()
            if flight.stage is Stage.GENERATING and flight.slot == slot
        ]

    def _left(self, flight: ActiveTrajectory, now: Seconds) -> None:
        """The flight's request is no longer inside its server."""
        assert flight.slot is not None, flight.trajectory.id
        self._servers.slots[flight.slot].count(-1, now=now)
        self._scheduler.left(flight.trajectory.id)

    def _sent(self, event: TurnGenerated | TurnFailed) -> ActiveTrajectory | None:
        """The flight this reply is for; None for one that nobody waits for any more."""
        flight = self.flights.get(event.trajectory)
        if flight is None or flight.stage is not Stage.GENERATING:
            return None
        current = self._servers.current(event.slot, event.incarnation) is not None
        return flight if current and flight.request == event.request else None

    def _append(self, flight: ActiveTrajectory, event: TurnGenerated) -> None:
        trajectory = flight.trajectory
        if event.prompt_ids != trajectory.token_ids:
            raise IllegalMove(
                f"trajectory {trajectory.id}, turn {trajectory.turns}: the reply is to a prompt of "
                f"{len(event.prompt_ids)} tokens that is not its {len(trajectory.token_ids)} tokens"
            )
        start = len(trajectory.token_ids)
        trajectory.token_ids.extend(event.token_ids)
        self._contexts += len(event.token_ids)
        trajectory.logprobs.extend(event.logprobs)
        trajectory.loss_mask.frombytes(b"\x01" * len(event.token_ids))
        trajectory.spans += [
            VersionSpan(span.version, start + span.start, start + span.end) for span in event.spans
        ]
        same = all(span.version == event.cache_key.step for span in event.spans)
        key = event.cache_key if same and event.newest == event.cache_key else None
        trajectory.single_version = (
            key if trajectory.generated == 0 or trajectory.single_version == key else None
        )
        trajectory.generated += len(event.token_ids)

    def proved(self, slot: SlotId, *, now: Seconds) -> list[Action]:
        """The server has proved a version: replies that waited for that count now."""
        actions: list[Action] = []
        for event in self._parked.pop(slot, {}).values():
            actions += self.generated(event, now=now)
        return actions

    def turn_failed(self, event: TurnFailed, *, now: Seconds) -> list[Action]:
        """A generation did not come back: try again, elsewhere if there is an elsewhere."""
        flight = self._sent(event)
        if flight is None:
            return []
        status = self._servers.slots[event.slot]
        if event.refused:
            return self._break(flight, event.reason, now)
        self._again(flight, now)
        return self._servers.request_failed(status, event.reason, now=now)

    def _again(self, flight: ActiveTrajectory, now: Seconds) -> list[Action]:
        """Ask for the same turn again, wherever there is a seat."""
        self._left(flight, now)
        flight.slot = None
        self._wait(flight, now)
        return []

    def requeue_lost(self, *, now: Seconds) -> None:
        """Queue again whatever was generating on a server that has been taken out."""
        retired = set(self._servers.retired)
        if not retired:
            return
        self._servers.retired.clear()
        self._parked = {k: parked for k, parked in self._parked.items() if k not in retired}
        for flight in self.flights.values():
            if flight.stage is Stage.GENERATING and flight.slot in retired:
                self._scheduler.left(flight.trajectory.id)
                flight.slot = None
                self._wait(flight, now)

    def abandon(self, *, now: Seconds) -> list[Action]:
        """The run ends: give up what is in flight; its prompts are in the ledger's position."""
        actions: list[Action] = []
        for flight in list(self.flights.values()):
            actions += self._withdraw(flight, "dropped", "run ended", now)
        return actions

    def _save_turn(self, flight: ActiveTrajectory, now: Seconds) -> list[Action]:
        turn, returns, asked = flight.turn, flight.returns, flight.asked
        flight.turn, flight.returns = None, []
        if turn is None or asked is None:
            return []
        who = flight.trajectory.id
        p10, p50 = asked.estimate.quantiles((0.1, 0.5))
        row = TurnRecord(
            group_id=who.group,
            member=who.member,
            attempt=who.attempt,
            turn=flight.trajectory.turns - 1,
            slot=turn.slot,
            incarnation=turn.incarnation,
            queued_at=flight.queued_at,
            started_at=turn.started_at,
            ended_at=flight.ended_at,
            prompt_tokens=len(turn.prompt_ids),
            generated_tokens=len(turn.token_ids),
            finish_reason=turn.finish_reason,
            moved_from=asked.last_slot if asked.last_slot not in (None, turn.slot) else "",
            expected_tokens=asked.estimate.mean,
            expected_p10=p10,
            expected_p50=p50,
            expected_p90=asked.p90,
            tools_json=dumps([[r.tool, r.outcome, round(r.latency_s, 6), r.size] for r in returns]),
        )
        return [Save(row)]

    def check(self) -> None:
        """Invariants that hold between any two events."""
        for trajectory_id, flight in self.flights.items():
            trajectory = flight.trajectory
            assert self._ledger.find(trajectory_id) is trajectory, trajectory_id
            assert len(trajectory.token_ids) == len(trajectory.loss_mask), trajectory_id
            assert len(trajectory.token_ids) == len(trajectory.logprobs), trajectory_id
            assert sum(trajectory.loss_mask) == trajectory.generated, trajectory_id
            spans = sum(span.end - span.start for span in trajectory.spans)
            assert spans == trajectory.generated, trajectory_id
        total = sum(len(flight.trajectory.token_ids) for flight in self.flights.values())
        assert total == self._contexts, f"{total} tokens in play, {self._contexts} counted"
        inside = Counter(f.slot for f in self.flights.values() if f.stage is Stage.GENERATING)
        for slot, status in self._servers.slots.items():
            assert inside[slot] == status.running, f"{slot}: {inside[slot]} in, {status.running}"


def _joined(parts: list[TurnGenerated]) -> TurnGenerated:
    """One turn that began with the first part's prompt; the last part says how it ended."""
    first, last = parts[0], parts[-1]
    if len(parts) == 1 and last.finish_reason != ABORTED:
        return last
    tokens, logprobs, spans = first.token_ids[:], first.logprobs[:], [*first.spans]
    for part in parts[1:]:
        spans += [
            VersionSpan(span.version, len(tokens) + span.start, len(tokens) + span.end)
            for span in part.spans
        ]
        tokens.extend(part.token_ids)
        logprobs.extend(part.logprobs)
    return replace(
        last,
        prompt_ids=first.prompt_ids,
        token_ids=tokens,
        logprobs=logprobs,
        spans=tuple(spans),
        newest=max(part.newest for part in parts),
        started_at=first.started_at,
        finish_reason="length" if last.finish_reason == ABORTED else last.finish_reason,
    )


def _extend_unlearned(trajectory: Trajectory, count: int) -> None:
    trajectory.logprobs.frombytes(bytes(count * trajectory.logprobs.itemsize))
    trajectory.loss_mask.frombytes(bytes(count))


def trajectory_record(
    trajectory: Trajectory, state: str, *, ended_at: Seconds | None, detail: str = ""
) -> TrajectoryRecord:
    """The trajectory's row; its tokens are written once it has ended."""
    ended = ended_at is not None
    return TrajectoryRecord(
        group_id=trajectory.id.group,
        member=trajectory.id.member,
        attempt=trajectory.id.attempt,
        state=state,
        started_at=trajectory.started_at,
        ended_at=ended_at,
        reward=trajectory.reward,
        turns=trajectory.turns,
        generated_tokens=trajectory.generated,
        context_tokens=len(trajectory.token_ids),
        min_version=trajectory.min_version,
        max_version=trajectory.max_version,
        spans_json=dumps([[s.version, s.start, s.end] for s in trajectory.spans]),
        token_ids_json=dumps(trajectory.token_ids.tolist()) if ended else "",
        detail=detail,
    )


def group_record(group: Group, now: Seconds, *, detail: str = "") -> GroupRecord:
    """The group's row."""
    return GroupRecord(
        group_id=group.id,
        state=group.state,
        started_at=group.started_at,
        ended_at=None if group.reward is None else now,
        started_version=group.started_version,
        step=group.step,
        reward=group.reward,
        detail=detail,
    )


def _dropped_record(broken: Trajectory, reason: str, now: Seconds) -> Action:
    detail = f"member {broken.id.member} failed too often: {reason}"
    return Save(
        GroupRecord(
            group_id=broken.id.group,
            state="dropped",
            started_at=broken.started_at,
            ended_at=now,
            started_version=broken.min_version or 0,
            step=None,
            reward=None,
            detail=detail,
        )
    )
