"""Trajectories on their way: reset, wait for a seat, generate, advance, and again.

    RESETTING --demonstration--> ended
    RESETTING --prompt--> WAITING --seat--> GENERATING --turn--> ADVANCING --text--> WAITING
                             ^                  |                    |
                             +--- server out ---+                    +--- done, or a limit --> ended
                                                                     +--- the same --> TAUGHT, ended

The last line is of a run with a teacher, which is asked about the tokens (``teaching``).

Guarantees:

*   **Exact prefix.** A trajectory is only ever appended to, and each turn's prompt must be, token
    for token, everything before it; a reply that was given another prompt is a bug and raises.
    Where an agent leaves its conversation a branch begins, with the exact tokens that it keeps.
*   **Once.** Branches are samples of one reward; what two of them share one of them trains on.
*   **No unproved token.** A server resumes with a new version a moment before it has proved it. A
    reply that holds tokens of a version its server has not proved yet is parked until it has, and
    thrown away if it does not.
*   **Nothing generated is lost with a server.** When one is taken out, its trajectories go on
    elsewhere from the tokens of their finished turns; one that drains gives what there is of an
    unfinished turn too (``abort``), and the turn goes on elsewhere from there.
*   **A failure is never a reward.** A broken environment, or a request a server refuses, begins
    the trajectory again from its prompt, and after too many attempts drops the whole group.
*   **What kills servers is found** (``suspects``), and its group is dropped. So is one whose turn
    breaks off ``MAX_BREAKS`` times where all others are answered. Limit: a prompt that happens to
    be in four servers that somebody kills, in the last two as the only suspect.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, assert_never

from libra_cli.core.actions import (
    AbortTurn,
    AdvanceEpisode,
    AskTeacher,
    EpisodeAction,
    FinishEpisode,
    ForgetEpisode,
    Generate,
    Save,
    StartEpisode,
    TurnAction,
)
from libra_cli.core.evaluation.ledger import Evaluation, EvaluationLedger
from libra_cli.core.events import (
    DemonstrationRead,
    EpisodeAdvanced,
    EpisodeFailed,
    EpisodeStarted,
    RolloutEvent,
    TeacherAnswered,
    TeacherFailed,
    TurnFailed,
    TurnGenerated,
)
from libra_cli.core.notices import RequestBroke, RequestEnded, RequestSent, Result
from libra_cli.core.records import NoteRecord
from libra_cli.core.rollout.active import ActiveTrajectory, Limits, Stage
from libra_cli.core.rollout.fatal_prompts import FatalPromptDetector
from libra_cli.core.rollout.groups import Group, GroupLedger
from libra_cli.core.rollout.rows import (
    dropped_record,
    group_record,
    group_records,
    trajectory_record,
    turn_record,
)
from libra_cli.core.rollout.teaching import TeacherQueue, take_logprobs, taught_branches
from libra_cli.core.rollout.turns import (
    ABORTED,
    LENGTH,
    add_turn,
    append_turn,
    digest_of,
    earned,
    earned_at_last,
    earned_by_roles,
    extend_masked,
    go_on_at,
    joined,
)
from libra_cli.core.scheduling.request_scheduler import RequestScheduler
from libra_cli.core.scheduling.server_queues import Request
from libra_cli.core.types import (
    INVALID,
    GroupId,
    Seconds,
    SlotId,
    Trajectory,
    TrajectoryId,
    Version,
    WeightVersion,
    is_evaluation,
    kv_key,
)

if TYPE_CHECKING:
    from libra_cli.core.cluster.rollout_servers import RolloutServers

DEMONSTRATED = 1.0
"""The reward of a demonstration; all have the same, and ``sft`` does not look at it."""
MAX_DROPPED = 32
"""Groups given up one after the other, with no trajectory finished in between."""
MAX_BREAKS = 5
"""Turns of a trajectory that may break off: fewer than those after which the server would
be taken out (``rollout_servers.MAX_FAILURES``).
"""


class _ForgettingMean:
    """A running mean: of contexts, each weighed by how long it was there."""

    def __init__(self, guess: float) -> None:
        self._sum, self._weight = guess, 1.0

    @property
    def value(self) -> float:
        """The mean so far; what was observed long ago counts less."""
        return self._sum / self._weight

    def add(self, value: float, *, weight: float) -> None:
        """Add a value, and lower the weight of all earlier ones by 1 %."""
        self._sum = 0.99 * self._sum + value * weight
        self._weight = 0.99 * self._weight + weight


class Trajectories:
    """The trajectories in play. Methods return the actions and notices that follow."""

    events: ClassVar[Any] = RolloutEvent
    actions: ClassVar[Any] = TurnAction | EpisodeAction | AskTeacher

    def __init__(
        self,
        ledger: GroupLedger,
        servers: RolloutServers,
        scheduler: RequestScheduler,
        limits: Limits,
        evaluations: EvaluationLedger,
        *,
        needs_seats: bool = True,
        keeps_kv: bool = False,
        teacher: TeacherQueue | None = None,
    ) -> None:
        """Take the parts that trajectories need; ``needs_seats``: whether they are played on
        servers, and ``keeps_kv``: whether these keep their KV cache over loads.
        """
        self.teacher = teacher
        self._ledger = ledger
        self._evaluations = evaluations
        self._servers = servers
        self._scheduler = scheduler
        #: Of what is trained only.
        self._estimator = scheduler.policy.estimator
        self._limits = limits
        self.needs_seats = needs_seats
        self._keeps_kv = keeps_kv
        self.active: dict[TrajectoryId, ActiveTrajectory] = {}
        self._parked: dict[SlotId, dict[int, TurnGenerated]] = {}
        self._requests = 0
        self._fatal_prompts = FatalPromptDetector()
        #: Those that it suspects, which wait until they may be sent to a server.
        self._held: set[TrajectoryId] = set()
        #: Tokens of all trajectories in play; and of one, at a random moment.
        self._context_tokens = 0
        self._mean_context = _ForgettingMean(limits.max_len / 8)
        #: Groups given up since a trajectory last finished, and why the last one was.
        self.dropped_in_a_row = 0
        self.last_failure = ""

    def handle(self, event: RolloutEvent, *, now: Seconds) -> list[Result]:
        """Return what follows from an event of a turn or an episode."""
        match event:
            case TurnGenerated():
                return self.generated(event, now=now)
            case EpisodeAdvanced():
                return self.advanced(event, now=now)
            case EpisodeStarted():
                return self.episode_started(event, now=now)
            case DemonstrationRead():
                return self.demonstrated(event, now=now)
            case TurnFailed():
                return self.turn_failed(event, now=now)
            case EpisodeFailed():
                return self.episode_failed(event, now=now)
            case TeacherAnswered() | TeacherFailed():
                return self.taught(event, now=now)
            case _:
                assert_never(event)

    def wants(self, action: TurnAction | EpisodeAction | AskTeacher) -> bool:
        """Whether the end of the action is still waited for."""
        if isinstance(action, AbortTurn | ForgetEpisode):
            return False  # neither ends in anything
        active = self.active.get(action.trajectory)
        if active is None:
            return False
        match action:
            case StartEpisode():
                return active.stage is Stage.RESETTING
            case Generate():
                return active.stage is Stage.GENERATING and active.request == action.request
            case AdvanceEpisode() | FinishEpisode():
                return active.stage is Stage.ADVANCING
            case AskTeacher():
                return active.stage is Stage.TAUGHT
            case _:
                assert_never(action)

    @property
    def given_up(self) -> str:
        """Why no trajectory can be finished any more; empty while some can."""
        return "" if self.teacher is None else self.teacher.given_up

    @property
    def broken(self) -> str:
        """Why nothing is finished any more, after so many groups in a row; empty while some is."""
        if self.dropped_in_a_row <= MAX_DROPPED:
            return ""
        what = "environment" if self.needs_seats else "demonstration"
        return f"the {what} breaks every time: {self.last_failure}"

    @property
    def waits_for(self) -> str:
        """What trajectories that are over wait for in vain; empty for nothing."""
        silent = self.teacher is not None and self.teacher.is_silent
        return "the teacher, which does not answer" if silent else ""

    def ask_again(self) -> list[Result]:
        """The pause of a teacher that did not answer is over."""
        return [] if self.teacher is None else [*self.teacher.again()]

    # -- opening and placing --------------------------------------------------------------------

    def fill(self, *, version: Version, now: Seconds) -> list[Result]:
        """Open groups while the staleness bound, servers' seats and places of episodes allow it.

        What would wait for a place has not begun.
        """
        actions: list[Result] = []
        while self._may_begin(now):
            group = self._ledger.open(version=version, now=now)
            actions += map(Save, group_records(group, now))
            for trajectory in group.members:
                actions += self._begin(trajectory, group.task)
        return actions

    def _may_begin(self, now: Seconds) -> bool:
        """Whether one more group can be opened."""
        places = self._ledger.places
        if not self._ledger.may_open or (self.needs_seats and not self._has_seats()):
            places.nobody_asks(now=now)
            return False
        playing = len(self.active) - self._with_teacher
        return places.allow(playing, self._ledger.members_started, now=now)

    def _has_seats(self) -> bool:
        """Whether one more group can be played, beside those in play or alone."""
        size = self._ledger.members_started
        seats = max(self._scheduler.queues.seats, size)
        fits = self._ledger.playing - self._with_teacher + size <= seats
        return fits and (not self.active or self._has_room())

    @property
    def _with_teacher(self) -> int:
        """Trajectories that are over and need no seat, but wait for the teacher."""
        return 0 if self.teacher is None else len(self.teacher)

    def evaluate(self, *, now: Seconds) -> list[Result]:
        """Begin trajectories of evaluations, as many as there are seats for them."""
        actions: list[Result] = []
        while self._evaluations.playing < self._scheduler.evaluation_seats:
            trajectory = self._evaluations.next_trajectory(now)
            if trajectory is None:
                break
            actions += self._begin(trajectory)
        return actions

    def _has_room(self) -> bool:
        """Whether the policy has room for the contexts in play and those of one more group."""
        playing = len(self.active) - self._with_teacher + self._ledger.members_started
        expected = max(self._context_tokens, int(playing * self._mean_context.value))
        return self._scheduler.policy.has_room(expected, self._scheduler.queues)

    def _begin(self, trajectory: Trajectory, task: int | None = None) -> list[Result]:
        self.active[trajectory.id] = ActiveTrajectory(trajectory, asked_at=trajectory.started_at)
        return [
            StartEpisode(trajectory.id, task),
            Save(trajectory_record(trajectory, "running", ended_at=None)),
        ]

    def dispatch(self, *, now: Seconds) -> list[Result]:
        """Send every waiting request that has a seat."""
        results: list[Result] = []
        if self._held:
            self._release(now)
        for request, queue in self._scheduler.dispatch(now=now):
            generate = self._send(self.active[request.trajectory], request, queue.slot)
            results += [RequestSent(queue.slot), generate]
        return results

    def _send(self, active: ActiveTrajectory, request: Request, slot: SlotId) -> Generate:
        server = self._servers.replicas[slot]
        assert server.verified is not None, f"{slot} is routed to but has proved no version"
        self._requests += 1
        active.enter(Stage.GENERATING)
        active.slot, active.request, active.asked = slot, self._requests, request
        tokens = active.trajectory.token_ids
        return Generate(
            request=self._requests,
            trajectory=active.trajectory.id,
            slot=slot,
            incarnation=server.incarnation,
            prompt_ids=tokens[:],
            max_tokens=active.left_to_generate(self._limits),
            cache_key=server.verified.version,
            priority=active.trajectory.id.group,
            kv_since=active.kv_since,
            routes_from=0 if active.trajectory.routes is None else active.trajectory.routes.end,
        )

    def _wait(self, active: ActiveTrajectory, now: Seconds) -> None:
        active.enter(Stage.WAITING)
        active.queued_at = now
        if self._fatal_prompts and self._fatal_prompts.is_suspect(active.trajectory.id):
            self._held.add(active.trajectory.id)
        else:
            self._submit(active, now)

    def _submit(self, active: ActiveTrajectory, now: Seconds) -> None:
        self._scheduler.submit(active.next_request(now), now=now)

    # -- the environment ------------------------------------------------------------------------

    def episode_started(self, event: EpisodeStarted, *, now: Seconds) -> list[Result]:
        """Queue a trajectory whose prompt is there for its first turn."""
        active = self.active.get(event.trajectory)
        if active is None or active.stage is not Stage.RESETTING:
            return []
        active.came_back(now, event.waited_s)
        active.trajectory.environment, active.trajectory.role = event.environment, event.role
        active.trajectory.token_ids.extend(event.prompt_ids)
        active.prompt = prompt = len(event.prompt_ids)
        active.shown = digest_of(event.prompt_ids)
        active.turn_limit = event.turn_limit
        self._context_tokens += prompt
        extend_masked(active.trajectory, prompt)
        if prompt >= self._limits.max_len:
            reason = f"the prompt has {prompt} tokens, max_len is {self._limits.max_len}"
            return self._break(active, reason, now)
        if self._estimator is not None and not is_evaluation(event.trajectory.group):
            active.expected = self._estimator.begin(event.trajectory)
        self._wait(active, now)
        return []

    def demonstrated(self, event: DemonstrationRead, *, now: Seconds) -> list[Result]:
        """Let a demonstration wait for training, with no version of its tokens."""
        active = self.active.get(event.trajectory)
        if active is None or active.stage is not Stage.RESETTING:
            return []
        trajectory = active.trajectory
        self._forget(trajectory)
        self.dropped_in_a_row = 0
        trajectory.token_ids.extend(event.token_ids)
        extend_masked(trajectory, len(event.token_ids))
        trajectory.loss_mask[:] = event.loss_mask
        trajectory.generated, trajectory.turns = sum(event.loss_mask), event.turns
        group = self._ledger.finish(trajectory.id, DEMONSTRATED)
        return [
            Save(trajectory_record(trajectory, "finished", ended_at=now)),
            *map(Save, group_records(group, now)),
        ]

    def advanced(self, event: EpisodeAdvanced, *, now: Seconds) -> list[Result]:
        """Append the environment's observation and ask for the next turn, or end the trajectory."""
        active = self.active.get(event.trajectory)
        if active is None or active.stage is not Stage.ADVANCING:
            return []
        active.came_back(now, event.waited_s)
        active.returns += event.returns
        active.trajectory.tools += len(event.returns)
        active.trajectory.unreadable += sum(one.tool == INVALID for one in event.returns)
        if event.done:
            assert event.reward is not None, f"{event.trajectory} is done without a reward"
            active.trajectory.metrics = event.metrics
            earned_by_roles(active.trajectory, event.rewards)
            return [*self._save_turn(active), *self._played(active, event.reward, now)]
        if event.role:
            earned_by_roles(active.trajectory, event.rewards)
        else:
            earned(active.trajectory, event.turn_reward)
        active.shown = digest_of(event.observation_ids)
        active.turn_limit = event.turn_limit
        trajectory, observed = active.trajectory, len(event.observation_ids)
        context = (event.branch.kept if event.branch else len(trajectory.token_ids)) + observed
        if context >= self._limits.max_len or trajectory.turns >= self._limits.max_turns:
            trajectory.truncated = True
            return [FinishEpisode(trajectory.id)]
        if event.branch is not None:
            self._context_tokens -= len(trajectory.token_ids)
            go_on_at(trajectory, event.branch)
            self._context_tokens += len(trajectory.token_ids)
            trajectory.role = event.role
        trajectory.token_ids.extend(event.observation_ids)
        self._context_tokens += observed
        extend_masked(trajectory, observed)
        if self._estimator is not None and not is_evaluation(trajectory.id.group):
            active.expected = self._estimator.returned(
                trajectory.id, generated=trajectory.generated, returns=event.returns
            )
        actions = self._save_turn(active)
        self._wait(active, now)
        return actions

    def episode_failed(self, event: EpisodeFailed, *, now: Seconds) -> list[Result]:
        """Play the trajectory again, since its environment broke;
        after too many attempts drop its group.
        """
        active = self.active.get(event.trajectory)
        if active is None:
            return []
        return self._break(active, event.reason, now, counts=event.counts)

    def _played(self, active: ActiveTrajectory, reward: float, now: Seconds) -> list[Result]:
        """End a trajectory whose episode is over, or ask the teacher
        about it first, in a run with one.
        """
        trajectory = active.trajectory
        if is_evaluation(trajectory.id.group):
            return self._end_evaluated(trajectory, reward, now)
        self._mean_context.add(
            (active.prompt + len(trajectory.token_ids)) / 2, weight=trajectory.turns
        )
        if self._estimator is not None:
            self._estimator.finished(trajectory.id, generated=trajectory.generated)
        penalty = self._limits.penalty_of(len(trajectory.token_ids))
        reward -= penalty
        if trajectory.role:
            earned_by_roles(trajectory, {trajectory.role: -penalty})
        else:
            earned_at_last(trajectory, reward)
        active.reward = reward
        if self.teacher is None or not taught_branches(trajectory):
            return self._end(active, now)
        self._context_tokens -= len(trajectory.token_ids)
        active.enter(Stage.TAUGHT)
        return [ForgetEpisode(trajectory.id), *self.teacher.ask(trajectory)]

    def _end(self, active: ActiveTrajectory, now: Seconds) -> list[Result]:
        trajectory = active.trajectory
        self.dropped_in_a_row = 0
        self._forget(trajectory)
        group = self._ledger.finish(trajectory.id, active.reward)
        actions: list[Result] = [
            ForgetEpisode(trajectory.id),
            Save(trajectory_record(trajectory, "finished", ended_at=now)),
        ]
        if group.reward is not None:
            actions += map(Save, group_records(group, now))
        if group.surplus:
            actions += self._give_up(group.id, "its group was full without it", now)
        return actions

    # -- the teacher ----------------------------------------------------------------------------

    def taught(self, event: TeacherAnswered | TeacherFailed, *, now: Seconds) -> list[Result]:
        """End a trajectory with the teacher's log-probabilities, or
        try again where they did not come.
        """
        teacher, who = self.teacher, event.trajectory
        if teacher is None:
            return []
        if isinstance(event, TeacherFailed) and not event.refused:
            results: list[Result] = [*teacher.failed(event, now=now)]
        else:
            results = [*teacher.answered(who, now=now)]
        active = self.active.get(who)
        if active is None or active.stage is not Stage.TAUGHT:
            return results
        if isinstance(event, TeacherAnswered):
            take_logprobs(active.trajectory, event.logprobs)
            return [*results, *self._end(active, now)]
        if event.refused or teacher.strike(who):
            return [*results, *self._break(active, f"the teacher: {event.reason}", now)]
        return results

    def _end_evaluated(self, trajectory: Trajectory, reward: float, now: Seconds) -> list[Result]:
        self._forget(trajectory)
        row = self._evaluations.finish(trajectory, reward, now=now)
        ended = trajectory_record(trajectory, "finished", ended_at=now)
        return [ForgetEpisode(trajectory.id), Save(ended), Save(row)]

    def closed(self, group: Group, *, now: Seconds) -> list[Result]:
        """Let the unfinished members of a closed group go on as its rest, or give them up."""
        actions: list[Result] = [Save(group_record(group, now))]
        if (rest := self._ledger.rests.get(group.id)) is not None:
            return [*actions, *map(Save, group_records(rest, now))]
        return [*actions, *self._give_up(group.id, "its group was closed without it", now)]

    def _give_up(self, group: GroupId, why: str, now: Seconds) -> list[Result]:
        """End every trajectory of a group that is in play."""
        playing = [a for a in self.active.values() if a.trajectory.id.group == group]
        aborted = [self._abort(a) for a in playing if a.stage is Stage.GENERATING]
        withdrawn = (self._withdraw(active, "dropped", why, now) for active in playing)
        return [*aborted, *(result for results in withdrawn for result in results)]

    def _forget(self, trajectory: Trajectory) -> None:
        active = self.active.pop(trajectory.id)
        self._held.discard(trajectory.id)
        self._fatal_prompts.cleared(trajectory.id)
        if self.teacher is not None:
            self.teacher.forget(trajectory.id)
        if active.stage is not Stage.TAUGHT:
            self._context_tokens -= len(trajectory.token_ids)

    def _break(
        self, active: ActiveTrajectory, reason: str, now: Seconds, *, counts: bool = True
    ) -> list[Result]:
        broken = active.trajectory
        actions = self._withdraw(active, "failed", reason, now)
        if is_evaluation(broken.id.group):
            evaluated = self._evaluations.begin_again(broken.id, now=now, counts=counts)
            again_or_not = (
                self._begin(evaluated) if evaluated else self._failed(broken, reason, now)
            )
            return [*actions, *again_or_not]
        late = broken.id.group in self._ledger.rests
        again = self._ledger.begin_again(broken.id, now=now, counts=counts)
        if again is not None:
            return [*actions, *self._begin(again, self._ledger.group_of(again.id).task)]
        self.dropped_in_a_row, self.last_failure = self.dropped_in_a_row + 1, reason
        actions += self._give_up(broken.id.group, f"{broken.id} failed too often", now)
        # The members that were finished when a group was closed are not dropped with the others.
        detail = f"member {broken.id.member} failed too often: {reason}"
        return actions if late else [*actions, Save(dropped_record(broken, detail, now))]

    def _failed(self, evaluated: Trajectory, why: str, now: Seconds) -> list[Result]:
        """Give up a trajectory of an evaluation; the others only
        where that cannot come to an end.
        """
        row = Save(self._evaluations.give_up(evaluated.id, now=now))
        hopeless = self._evaluations.hopeless(evaluated.id)
        if hopeless is None:
            return [row]
        told = f"{hopeless.failed_in_a_row} trajectories failed in a row, the last: {why}"
        return [row, *self.cut(hopeless, told, now=now)]

    def cut(self, evaluation: Evaluation, why: str, *, now: Seconds) -> list[Result]:
        """Play no more of an evaluation, which will have no result."""
        playing = [self.active[who] for who in evaluation.playing]
        aborted = [self._abort(a) for a in playing if a.stage is Stage.GENERATING]
        withdrawn = (self._withdraw(active, "dropped", why, now) for active in playing)
        told = f"that of step {evaluation.version.step} was cut: {why}; libra eval plays it alone"
        return [
            *aborted,
            *(result for results in withdrawn for result in results),
            Save(self._evaluations.cut(evaluation, now=now)),
            Save(NoteRecord("evaluation", evaluation.plan.name, now, told)),
        ]

    def _drop(self, active: ActiveTrajectory, why: str, now: Seconds) -> list[Result]:
        """Give up the group of a trajectory that does harm; its prompt is not played again."""
        broken = active.trajectory
        if is_evaluation(broken.id.group):
            withdrawn = self._withdraw(active, "dropped", why, now)
            return [*withdrawn, *self._failed(broken, why, now)]
        group = self._ledger.group_of(broken.id)
        self._ledger.give_up(group)
        detail = f"member {broken.id.member} {why}"
        told = f"{detail}; its group is dropped: neither trained nor played again"
        note = NoteRecord("prompt", str(group), now, told)
        record = [] if group.is_rest else [Save(dropped_record(broken, detail, now))]
        return [*self._give_up(group.id, detail, now), *record, Save(note)]

    def _withdraw(
        self, active: ActiveTrajectory, state: str, why: str, now: Seconds
    ) -> list[Result]:
        trajectory = active.trajectory
        self._forget(trajectory)
        estimated = active.stage not in (Stage.RESETTING, Stage.TAUGHT)
        known = estimated and not is_evaluation(trajectory.id.group)
        if self._estimator is not None and known:
            self._estimator.withdrawn(trajectory.id)
        self._scheduler.withdraw(trajectory.id)
        row = trajectory_record(trajectory, state, ended_at=now, detail=why)
        ended = self._ended(active) if active.stage is Stage.GENERATING else []
        return [*ended, ForgetEpisode(trajectory.id), Save(row)]

    # -- the servers ----------------------------------------------------------------------------

    def generated(self, event: TurnGenerated, *, now: Seconds) -> list[Result]:
        """Take in a turn that came back; it is parked if its server
        has yet to prove the version.
        """
        active = self._sent(event)
        if active is None:
            return []
        server = self._servers.replicas[event.slot]
        assert server.verified is not None, f"{event.slot} answered before it proved a version"
        if event.newest > server.verified.version:
            self._parked.setdefault(event.slot, {})[event.request] = event
            return []
        trainer, unproved = event.newest.trainer_incarnation, server.unproved
        if unproved and any(WeightVersion(trainer, s.version) in unproved for s in event.spans):
            return self._again(active, now)
        ended = self._ended(active, answered=True)
        if is_evaluation(event.trajectory.group):
            self._evaluations.went_on_at = now
        active.broke_at.clear()
        if self._fatal_prompts:
            self._fatal_prompts.cleared(active.trajectory.id)
        active.turn_key = self._turn_key(active, event)
        append_turn(active.trajectory, event, kv=active.turn_key)
        self._context_tokens += len(event.token_ids)
        if self._keeps_kv and active.kv_since is None and event.token_ids:
            active.kv_since = event.cache_key
        active.parts.append(event)
        if event.finish_reason == ABORTED and active.left_to_generate(self._limits) > 0:
            self._wait(active, now)
            return ended
        turn = joined(active.parts)
        active.parts = []
        add_turn(active.trajectory, len(turn.token_ids), active.shown)
        active.trajectory.truncated = turn.finish_reason == LENGTH
        active.enter(Stage.ADVANCING)
        active.turn, active.ended_at, active.asked_at = turn, now, now
        advance = AdvanceEpisode(turn.trajectory, turn.token_ids, turn.finish_reason, turn.logprobs)
        return [*ended, advance]

    def _turn_key(self, active: ActiveTrajectory, turn: TurnGenerated) -> WeightVersion:
        """The version under whose name a turn's context is cached: where loads clear the cache, of
        the last one, with which its server has computed it again."""
        served = turn.cache_key if self._keeps_kv else turn.newest
        return kv_key(served, active.kv_since)

    def abort(self, slot: SlotId) -> list[Result]:
        """Break off every turn on a server; what it has said so far is kept."""
        return [
            self._abort(active)
            for active in self.active.values()
            if active.stage is Stage.GENERATING and active.slot == slot
        ]

    def _abort(self, active: ActiveTrajectory) -> AbortTurn:
        assert active.slot is not None, active.trajectory.id
        server = self._servers.replicas[active.slot]
        return AbortTurn(active.request, active.slot, server.incarnation)

    def _ended(self, active: ActiveTrajectory, *, answered: bool = False) -> list[Result]:
        """Tell that the trajectory's request has left its server."""
        assert active.slot is not None, active.trajectory.id
        self._scheduler.left(active.trajectory.id)
        return [RequestEnded(active.slot, answered)]

    def _sent(self, event: TurnGenerated | TurnFailed) -> ActiveTrajectory | None:
        """Return the trajectory that this reply is for; None if it is no longer waited for."""
        active = self.active.get(event.trajectory)
        if active is None or active.stage is not Stage.GENERATING:
            return None
        current = self._servers.current(event.slot, event.incarnation) is not None
        return active if current and active.request == event.request else None

    def proved(self, slot: SlotId, *, now: Seconds) -> list[Result]:
        """Take in the parked replies that waited for the server to prove its version."""
        actions: list[Result] = []
        for event in self._parked.pop(slot, {}).values():
            actions += self.generated(event, now=now)
        return actions

    def turn_failed(self, event: TurnFailed, *, now: Seconds) -> list[Result]:
        """Try a generation again that did not come back, on another server if there is one."""
        active = self._sent(event)
        if active is None:
            return []
        if event.refused:
            return self._break(active, event.reason, now)
        active.broke_at.add(event.slot)
        group = event.trajectory.group
        broke = RequestBroke(event.slot, event.reason, group)
        alone = self._servers.replicas[event.slot].broken <= {group}
        breaks = self._fatal_prompts.broke(event.trajectory) if alone else 0
        if breaks < MAX_BREAKS:
            return [*self._again(active, now), broke]
        why = f"broke off {breaks} times where all others were answered: {event.reason}"
        return [*self._drop(active, why, now), broke]

    def answered(self, slot: SlotId) -> list[Result]:
        """Forget that turns broke off on this server: an answer shows that the server works."""
        for active in self.active.values():
            active.broke_at.discard(slot)
        return []

    def _again(self, active: ActiveTrajectory, now: Seconds) -> list[Result]:
        """Ask for the same turn again, wherever there is a seat."""
        ended = self._ended(active)
        active.slot = None
        self._wait(active, now)
        return ended

    def requeue(self, lost: Mapping[SlotId, bool], *, now: Seconds) -> list[Result]:
        """Queue again what was generating on servers that were taken
        out; ``lost`` says which of them died.
        """
        guilty = [who for slot, died in lost.items() if died for who in self._blame(slot)]
        for slot in lost:
            self._parked.pop(slot, None)
        for active in self.active.values():
            active.broke_at.difference_update(lost)
            if active.stage is Stage.GENERATING and active.slot in lost:
                self._scheduler.left(active.trajectory.id)
                active.slot = None
                self._wait(active, now)
        return [result for who in guilty for result in self._convict(who, now)]

    def _blame(self, slot: SlotId) -> list[TrajectoryId]:
        """Return the trajectories guilty of a server's death:
        inside it, or broken off just then.
        """
        inside = [
            who
            for who, active in self.active.items()
            if slot in active.broke_at or (active.stage is Stage.GENERATING and active.slot == slot)
        ]
        return self._fatal_prompts.died(inside)

    def _convict(self, who: TrajectoryId, now: Seconds) -> list[Result]:
        active = self.active.get(who)
        if active is None:
            return []  # its group is gone already
        deaths = self._fatal_prompts.deaths_of(who)
        why = f"was in {deaths} servers when they died, in the last without other suspects"
        return self._drop(active, why, now)

    def _release(self, now: Seconds) -> None:
        """Queue as many suspects as may be inside servers together: the worst first."""
        suspects = self._fatal_prompts
        out = [who for who in self.active if suspects.is_suspect(who) and who not in self._held]
        for who in sorted(self._held, key=lambda who: (-suspects.deaths_of(who), who)):
            if not suspects.has_room(who, out):
                break
            self._held.discard(who)
            self._submit(self.active[who], now)
            out.append(who)

    def abandon(self, *, now: Seconds) -> list[Result]:
        """Give up what is in play as the run ends; its prompts are in the ledger's position."""
        actions: list[Result] = []
        for active in list(self.active.values()):
            actions += self._withdraw(active, "dropped", "run ended", now)
        running = list(self._evaluations.running.values())
        return [*actions, *(Save(self._evaluations.cut(one, now=now)) for one in running)]

    def _save_turn(self, active: ActiveTrajectory) -> list[Result]:
        turn, returns, asked = active.turn, active.returns, active.asked
        active.turn, active.returns = None, []
        if turn is None or asked is None:
            return []
        return [Save(turn_record(active, turn, asked, returns))]

    def check(self) -> None:
        """Raise AssertionError if tokens, branches or running requests are counted wrongly."""
        for trajectory_id, active in self.active.items():
            trajectory = active.trajectory
            evaluated = is_evaluation(trajectory_id.group)
            ledger = self._evaluations if evaluated else self._ledger
            assert ledger.find(trajectory_id) is trajectory, trajectory_id
            _check_branches(trajectory)
        playing = [one for one in self.active.values() if one.stage is not Stage.TAUGHT]
        total = sum(len(active.trajectory.token_ids) for active in playing)
        assert len(self.active) - len(playing) == self._with_teacher, self._with_teacher
        assert total == self._context_tokens, (
            f"{total} tokens in play, {self._context_tokens} counted"
        )
        generating = (a for a in self.active.values() if a.stage is Stage.GENERATING)
        inside = Counter(active.slot for active in generating)
        for slot, server in self._servers.replicas.items():
            assert inside[slot] == server.running, f"{slot}: {inside[slot]} in, {server.running}"


def _check_branches(trajectory: Trajectory) -> None:
    """Raise AssertionError unless each branch has an entry a token, and
    every generated token is in one mask.
    """
    branches = trajectory.branches
    numbers = {*trajectory.others, trajectory.number}
    assert numbers == set(range(len(branches))), f"{trajectory.id}: branches {numbers}"
    generated = 0
    versions = []
    for branch in branches:
        assert len(branch.token_ids) == len(branch.loss_mask), trajectory.id
        assert len(branch.token_ids) == len(branch.logprobs), trajectory.id
        said, spanned = sum(branch.loss_mask), 0
        for span in branch.spans:
            spanned += span.end - span.start
            versions.append(span.version)
        assert spanned == said, trajectory.id
        generated += said
    assert generated == trajectory.generated, trajectory.id
    assert min(versions, default=None) == trajectory.min_version, trajectory.id
