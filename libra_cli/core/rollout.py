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
    elsewhere from the tokens of their finished turns.
*   **A failure is never a reward.** A broken environment, or a request a server refuses, replays
    the trajectory from its prompt, and after too many attempts drops the whole group.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from json import dumps

from libra_cli.core.actions import (
    Action,
    AdvanceEpisode,
    FinishEpisode,
    ForgetEpisode,
    Generate,
    Save,
    StartEpisode,
)
from libra_cli.core.events import (
    EpisodeAdvanced,
    EpisodeFailed,
    EpisodeStarted,
    TurnFailed,
    TurnGenerated,
)
from libra_cli.core.fleet import Fleet
from libra_cli.core.ledger import Group, Ledger
from libra_cli.core.policies import Request
from libra_cli.core.records import GroupRecord, TrajectoryRecord, TurnRecord
from libra_cli.core.scheduler import Scheduler
from libra_cli.core.types import (
    Seconds,
    SlotId,
    ToolReturn,
    Trajectory,
    TrajectoryId,
    Version,
    VersionSpan,
)
from libra_cli.errors import IllegalMove


class Stage(StrEnum):
    """Where a trajectory is between its prompt and its reward."""

    RESETTING = "resetting"
    WAITING = "waiting"
    GENERATING = "generating"
    ADVANCING = "advancing"


@dataclass(slots=True)
class Flight:
    """A trajectory that has no reward yet. ``turn`` is the reply the environment is looking at."""

    trajectory: Trajectory
    stage: Stage = Stage.RESETTING
    slot: SlotId | None = None
    #: Of the Generate action it waits for.
    request: int = 0
    queued_at: Seconds = 0.0
    ended_at: Seconds = 0.0
    turn: TurnGenerated | None = None
    returns: list[ToolReturn] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Limits:
    """When a trajectory is cut: turns, tokens a turn, tokens in all."""

    max_turns: int
    max_turn_tokens: int
    max_len: int


class Rollout:
    """Every trajectory in flight. Methods return the actions they call for."""

    def __init__(self, ledger: Ledger, fleet: Fleet, scheduler: Scheduler, limits: Limits) -> None:
        self._ledger = ledger
        self._fleet = fleet
        self._scheduler = scheduler
        self._limits = limits
        self.flights: dict[TrajectoryId, Flight] = {}
        self._parked: dict[SlotId, dict[int, TurnGenerated]] = {}
        self._requests = 0
        #: Groups given up since a trajectory last finished, and why the last one was.
        self.dropped_in_a_row = 0
        self.last_failure = ""

    # -- opening and placing --------------------------------------------------------------------

    def fill(self, *, version: Version, now: Seconds) -> list[Action]:
        """Open groups while the staleness bound and the servers' seats allow it."""
        actions: list[Action] = []
        size = self._ledger.group_size
        while self._ledger.may_open and self._ledger.playing + size <= max(self._fleet.seats, size):
            group = self._ledger.open(version=version, now=now)
            actions.append(Save(group_record(group, now)))
            for trajectory in group.members:
                actions += self._begin(trajectory)
        return actions

    def _begin(self, trajectory: Trajectory) -> list[Action]:
        self.flights[trajectory.id] = Flight(trajectory)
        return [
            StartEpisode(trajectory.id),
            Save(trajectory_record(trajectory, "running", ended_at=None)),
        ]

    def dispatch(self, *, now: Seconds) -> list[Action]:
        """Send every waiting request that has a seat."""
        actions: list[Action] = []
        for request, slot in self._scheduler.dispatch(self._fleet.views()):
            actions.append(self._send(self.flights[request.trajectory], slot, now))
        self._fleet.gate = len(self._scheduler)
        return actions

    def _send(self, flight: Flight, slot: SlotId, now: Seconds) -> Generate:
        status = self._fleet.slots[slot]
        assert status.verified is not None, f"{slot} is routed to but has proved no version"
        status.count(+1, now=now)
        self._requests += 1
        flight.stage, flight.slot, flight.request = Stage.GENERATING, slot, self._requests
        tokens = flight.trajectory.token_ids
        return Generate(
            request=self._requests,
            trajectory=flight.trajectory.id,
            slot=slot,
            epoch=status.epoch,
            prompt_ids=tokens[:],
            max_tokens=min(self._limits.max_turn_tokens, self._limits.max_len - len(tokens)),
            cache_key=status.verified.key,
            priority=flight.trajectory.id.group,
        )

    def _wait(self, flight: Flight, now: Seconds) -> None:
        flight.stage, flight.queued_at = Stage.WAITING, now
        trajectory = flight.trajectory
        self._scheduler.submit(
            Request(
                trajectory=trajectory.id,
                context=len(trajectory.token_ids),
                turns=trajectory.turns,
                waiting_since=now,
                last_slot=flight.slot,
            )
        )

    # -- the environment ------------------------------------------------------------------------

    def episode_started(self, event: EpisodeStarted, *, now: Seconds) -> list[Action]:
        """The prompt is there: queue for the first turn."""
        flight = self.flights.get(event.trajectory)
        if flight is None:
            return []
        flight.trajectory.token_ids.extend(event.prompt_ids)
        _extend_unlearned(flight.trajectory, len(event.prompt_ids))
        if len(event.prompt_ids) >= self._limits.max_len:
            length, most = len(event.prompt_ids), self._limits.max_len
            reason = f"the prompt has {length} tokens, max_len is {most}"
            return self._break(flight, reason, now)
        self._wait(flight, now)
        return []

    def advanced(self, event: EpisodeAdvanced, *, now: Seconds) -> list[Action]:
        """The environment has looked at a turn."""
        flight = self.flights.get(event.trajectory)
        if flight is None:
            return []
        flight.returns += event.returns
        if event.done:
            assert event.reward is not None, f"{event.trajectory} is done without a reward"
            return [*self._save_turn(flight, now), *self._end(flight, event.reward, now)]
        trajectory = flight.trajectory
        full = len(trajectory.token_ids) + len(event.observation_ids) >= self._limits.max_len
        if full or trajectory.turns >= self._limits.max_turns:
            return [FinishEpisode(trajectory.id)]
        trajectory.token_ids.extend(event.observation_ids)
        _extend_unlearned(trajectory, len(event.observation_ids))
        actions = self._save_turn(flight, now)
        self._wait(flight, now)
        return actions

    def episode_failed(self, event: EpisodeFailed, *, now: Seconds) -> list[Action]:
        """The environment broke; play the trajectory again."""
        flight = self.flights.get(event.trajectory)
        return [] if flight is None else self._break(flight, event.reason, now)

    def _end(self, flight: Flight, reward: float, now: Seconds) -> list[Action]:
        trajectory = flight.trajectory
        self.dropped_in_a_row = 0
        del self.flights[trajectory.id]
        group = self._ledger.finish(trajectory.id, reward)
        actions: list[Action] = [
            ForgetEpisode(trajectory.id),
            Save(trajectory_record(trajectory, "finished", ended_at=now)),
        ]
        if group.reward is not None:
            actions.append(Save(group_record(group, now)))
        return actions

    def _break(self, flight: Flight, reason: str, now: Seconds) -> list[Action]:
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

    def _withdraw(self, flight: Flight, state: str, why: str, now: Seconds) -> list[Action]:
        trajectory = flight.trajectory
        del self.flights[trajectory.id]
        self._scheduler.withdraw(trajectory.id)
        if flight.stage is Stage.GENERATING and flight.slot is not None:
            self._fleet.slots[flight.slot].count(-1, now=now)
        row = trajectory_record(trajectory, state, ended_at=now, detail=why)
        return [ForgetEpisode(trajectory.id), Save(row)]

    # -- the servers ----------------------------------------------------------------------------

    def generated(self, event: TurnGenerated, *, now: Seconds) -> list[Action]:
        """A turn came back. Park it if its server has yet to prove the version."""
        flight = self._sent(event)
        if flight is None:
            return []
        status = self._fleet.slots[event.slot]
        assert status.verified is not None, f"{event.slot} answered before it proved a version"
        if event.newest > status.verified.key:
            self._parked.setdefault(event.slot, {})[event.request] = event
            return []
        epoch = event.newest[0]
        if any((epoch, span.version) in status.unproved for span in event.spans):
            return self._again(flight, now)
        status.failures = 0
        status.count(-1, now=now)
        self._append(flight, event)
        flight.stage, flight.turn, flight.ended_at = Stage.ADVANCING, event, now
        return [AdvanceEpisode(event.trajectory, event.token_ids, event.finish_reason)]

    def _sent(self, event: TurnGenerated | TurnFailed) -> Flight | None:
        """The flight this reply is for; None for one that nobody waits for any more."""
        flight = self.flights.get(event.trajectory)
        if flight is None or flight.stage is not Stage.GENERATING:
            return None
        current = self._fleet.current(event.slot, event.epoch) is not None
        return flight if current and flight.request == event.request else None

    def _append(self, flight: Flight, event: TurnGenerated) -> None:
        trajectory = flight.trajectory
        if event.prompt_ids != trajectory.token_ids:
            raise IllegalMove(
                f"trajectory {trajectory.id}, turn {trajectory.turns}: the reply is to a prompt of "
                f"{len(event.prompt_ids)} tokens that is not its {len(trajectory.token_ids)} tokens"
            )
        start = len(trajectory.token_ids)
        trajectory.token_ids.extend(event.token_ids)
        trajectory.logprobs.extend(event.logprobs)
        trajectory.loss_mask.extend([1] * len(event.token_ids))
        trajectory.spans += [
            VersionSpan(span.version, start + span.start, start + span.end) for span in event.spans
        ]
        same = all(span.version == event.cache_key[1] for span in event.spans)
        key = event.cache_key if same and event.newest == event.cache_key else None
        trajectory.pure = key if trajectory.turns == 0 or trajectory.pure == key else None
        trajectory.turns += 1

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
        status = self._fleet.slots[event.slot]
        if event.refused:
            return self._break(flight, event.reason, now)
        self._again(flight, now)
        return self._fleet.stumbled(status, event.reason, now=now)

    def _again(self, flight: Flight, now: Seconds) -> list[Action]:
        """Ask for the same turn again, wherever there is a seat."""
        assert flight.slot is not None, flight.trajectory.id
        self._fleet.slots[flight.slot].count(-1, now=now)
        flight.slot = None
        self._wait(flight, now)
        return []

    def evacuate(self, *, now: Seconds) -> None:
        """Queue again whatever was generating on a server that has been taken out."""
        for flight in self.flights.values():
            if flight.stage is Stage.GENERATING and flight.slot is not None:
                status = self._fleet.slots[flight.slot]
                if status.verified is None:
                    self._parked.pop(flight.slot, None)
                    flight.slot = None
                    self._wait(flight, now)

    def abandon(self, *, now: Seconds) -> list[Action]:
        """The run ends: give up what is in flight; its prompts are in the ledger's position."""
        actions: list[Action] = []
        for flight in list(self.flights.values()):
            actions += self._withdraw(flight, "dropped", "run ended", now)
        return actions

    def _save_turn(self, flight: Flight, now: Seconds) -> list[Action]:
        turn, returns = flight.turn, flight.returns
        flight.turn, flight.returns = None, []
        if turn is None:
            return []
        who = flight.trajectory.id
        row = TurnRecord(
            group_id=who.group,
            member=who.member,
            attempt=who.attempt,
            turn=flight.trajectory.turns - 1,
            slot=turn.slot,
            epoch=turn.epoch,
            queued_at=flight.queued_at,
            started_at=turn.started_at,
            ended_at=flight.ended_at,
            prompt_tokens=len(turn.prompt_ids),
            generated_tokens=len(turn.token_ids),
            finish_reason=turn.finish_reason,
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
        for status in self._fleet.slots.values():
            here = sum(
                f.stage is Stage.GENERATING and f.slot == status.slot.id
                for f in self.flights.values()
            )
            assert here == status.running, f"{status.slot.id}: {here} in flight, {status.running}"


def _extend_unlearned(trajectory: Trajectory, count: int) -> None:
    trajectory.logprobs.extend([0.0] * count)
    trajectory.loss_mask.extend([0] * count)


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
