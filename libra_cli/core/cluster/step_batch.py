"""The batch of a step: which groups it has, what of it the trainer is sent, and how it is weighed.

A batch that is in the trainer when it dies may be what kills it. Groups that have been in two such
messages are sent one at a time from then on; if the trainer dies of one of them alone, that group
is dropped, and the run goes on.

With ``stream`` a step begins on the groups that are READY while others are still played: their
gradients are sums, divided once at the end, so what comes out does not depend on it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from json import dumps
from typing import Any

from libra_cli.core.actions import Save, TrainSample, without_advantage
from libra_cli.core.advantages.estimates import advantage_metrics, runs_of
from libra_cli.core.algorithms.algorithm import Algorithm
from libra_cli.core.algorithms.replay import ReplayBuffer, replay_metrics
from libra_cli.core.cluster.fatal_groups import FatalGroupDetector
from libra_cli.core.cluster.step_record import mean_reward
from libra_cli.core.events import Accumulated, StepDone
from libra_cli.core.notices import GroupClosed, Result
from libra_cli.core.records import CreditRecord, NoteRecord, StepRecord
from libra_cli.core.rollout.groups import Group, GroupLedger
from libra_cli.core.rollout.rows import credit_record, group_record
from libra_cli.core.types import Branch, Seconds, Trajectory, TrajectoryId, WeightVersion

PARTS = 4
"""A streamed part is at least this fraction of a batch: each costs a round trip to the trainer."""


class StepBatch:
    """The batch that is trained, or was trained last."""

    def __init__(
        self,
        ledger: GroupLedger,
        algorithm: Algorithm,
        *,
        stream: bool = False,
        mask_truncated: bool = False,
        replay: ReplayBuffer | None = None,
    ) -> None:
        self._ledger = ledger
        self._algorithm = algorithm
        self._stream = stream
        self._masks = mask_truncated
        self._replay = replay
        self.groups: list[Group] = []
        #: What the step under way, or the last one, trains again.
        self.replayed: list[Group] = []
        #: Parts that are accumulated, or being so; the one whose end is waited for, 0 for none.
        self.parts = 0
        self._awaited = 0
        #: Groups of the last message; groups that are yet to be sent alone.
        self._sent: list[Group] = []
        self._apart: list[Group] = []
        self._fatal_groups = FatalGroupDetector()
        self._advantages: dict[TrajectoryId, tuple[float, ...]] = {}
        #: Whether the last batch had groups that dynamic sampling would have left out.
        self._without_signal = False

    # -- what is sent ---------------------------------------------------------------------------

    @property
    def is_full(self) -> bool:
        """Whether the next step has a whole batch that nothing was sent of."""
        return not self._apart and self._ledger.batch_is_full

    def claim(self, step: int, *, now: Seconds) -> tuple[list[Result], list[Group], bool]:
        """Return what follows, the groups to send now, and whether
        the step is complete with them.
        """
        if self._apart:
            return [], *self._next_alone()
        closed: list[Result] = [GroupClosed(group) for group in self._ledger.close(step)]
        last = self._weighed(self._ledger.claim(step))
        if last and self._fatal_groups.include(last):
            self._apart = last
            return closed, *self._next_alone()
        if last:
            return [*closed, *self._tell_signal(step, last, now)], last, True
        return [], self._claim_part(step), False

    def _next_alone(self) -> tuple[list[Group], bool]:
        """The next group of a batch in which the trainer has died, by itself."""
        return [self._apart.pop(0)], not self._apart

    def _claim_part(self, step: int) -> list[Group]:
        if not self._stream or self._fatal_groups:
            return []
        least = -(-self._ledger.groups_per_step // PARTS)
        return self._weighed(self._ledger.claim_part(step, least=least))

    def _weighed(self, groups: list[Group]) -> list[Group]:
        """Estimate the advantages of a batch, or of a part of one that the others do not change.

        Before it is cut up: groups that are sent alone are compared with the whole batch.
        """
        if groups:
            before = self._advantages if self.parts else {}
            self._advantages = {**before, **self._algorithm.advantages(groups)}
        return groups

    def _tell_signal(self, step: int, last: list[Group], now: Seconds) -> list[Result]:
        """Whether dynamic sampling had to let groups without signal into the batch."""
        most = self._ledger.filtered.most
        groups = [*self.groups, *last] if self.parts else last
        finds = self._ledger.filtered.finds_signal
        without = [one for one in groups if not (one.is_rest or finds(one.compared))]
        if not most or (not without and not self._without_signal):
            return []
        self._without_signal = bool(without)
        if not without:
            text = f"all groups of step {step} have signal again"
            return [Save(NoteRecord("sampling", "", now, text, resolved_at=now))]
        text = (
            f"step {step} trains on {len(without)} groups in which all rewards are the same, "
            f"{mean_reward(without):.2g} on average: {most} such groups had been left out since "
            "the step before. Give the policy tasks of which it solves some: libra help data"
        )
        return [Save(NoteRecord("sampling", "", now, text))]

    def send(self, groups: list[Group]) -> None:
        """Note that these groups are being sent to the trainer."""
        self.groups = [*self.groups, *groups] if self.parts else groups
        self._sent = groups

    def send_part(self) -> int:
        """Count one more part of a streamed batch, and return its number, from 1."""
        self.parts += 1
        self._awaited = self.parts
        return self.parts

    def accumulated(self, event: Accumulated) -> bool:
        """Note that a part is accumulated; returns whether it is the one waited for."""
        if event.part != self._awaited:
            return False
        self._awaited = 0
        return True

    def draw_again(self, step: int, trained: int) -> list[Group]:
        """Draw the replayed groups of a step; none while groups are
        sent one by one to find a fatal one.
        """
        if self._replay is None or self._fatal_groups:
            self.replayed = []
        else:
            self.replayed = self._replay.draw(step, trained, self.groups)
        self._advantages = {**self._algorithm.advantages(self.replayed), **self._advantages}
        return self.replayed

    # -- what becomes of it ---------------------------------------------------------------------

    def begin(self, step: int, *, now: Seconds) -> list[Result]:
        """Begin at the step of a trainer that has started: later batches are given to it again.

        What was trained since is not replayed before it is trained again; a buffer that is lost is
        told.
        """
        self._ledger.rollback(step)
        self.groups, self.parts, self._awaited, self._apart = [], 0, 0, []
        if self._replay is None:
            return []
        self._replay.rollback(step)
        if step == 0 or len(self._replay):
            return []
        told = f"goes on from step {step} with none of the groups that it held; it fills again"
        return [Save(NoteRecord("batch", "the replay buffer", now, told, resolved_at=now))]

    def done(self, step: int) -> None:
        """Take in that the step has trained the batch."""
        self.parts = 0
        self._ledger.trained(step)
        if self._replay is not None:
            self._replay.add(self.groups, step)
        self._fatal_groups.cleared(self.groups)

    def died(self, reason: str, *, now: Seconds) -> list[Result]:
        """Count a death of the trainer; a group that it died of alone is dropped."""
        if self._replay is not None:
            self._replay.discard(self.replayed)
        results: list[Result] = []
        for group in self._fatal_groups.died_with(self._sent):
            self._ledger.give_up(group)
            why = f"the trainer died of it alone, after it had died with it twice: {reason}"
            told = f"{why}; it is dropped: neither trained nor played again"
            rows = [] if group.is_rest else [Save(group_record(group, now, detail=why))]
            results += [*rows, Save(NoteRecord("batch", str(group), now, told))]
        return results

    # -- how it is weighed ----------------------------------------------------------------------

    def samples_of(self, groups: list[Group], held: WeightVersion) -> tuple[TrainSample, ...]:
        """Return the samples of the groups for a trainer that holds this version; without truncated
        trajectories where the recipe masks them.

        Where all are truncated, all are returned, without an advantage.
        """
        samples = self.samples(groups, held)
        if not self._masks:
            return samples
        whole = tuple(sample for sample in samples if not sample.trajectory.truncated)
        return whole or tuple(map(without_advantage, samples))

    def samples(self, groups: list[Group], held: WeightVersion) -> tuple[TrainSample, ...]:
        """Return a sample of every branch of the groups that there is to learn from."""
        return tuple(sample for group in groups for sample in self._samples_of(group, held))

    def _samples_of(self, group: Group, held: WeightVersion) -> Iterator[TrainSample]:
        """Yield each member's own tokens, and each other branch that there is to learn from."""
        for trajectory in group.members:
            yield self._sample(trajectory, trajectory, None, held)
            for number, branch in trajectory.others.items():
                if branch.spans:
                    yield self._sample(trajectory, branch, number, held)

    def _sample(
        self, trajectory: Trajectory, branch: Branch, number: int | None, held: WeightVersion
    ) -> TrainSample:
        runs = runs_of(trajectory, self._advantages[trajectory.id], number)
        by_token = self._algorithm.objective.by_token(branch, runs)
        fresh = branch.single_version == held
        turns = self._algorithm.advantage.turns_of(trajectory, number)
        return TrainSample(trajectory, held.step, fresh, runs, number, by_token, turns)

    def learn_advantages(self, event: StepDone) -> None:
        """Take in the advantages that a critic in the trainer has estimated of the batch."""
        said = {(one.group, one.member): one.values for one in event.advantages}
        for group in self.groups:
            for member in group.members:
                values = said.get((member.id.group, member.id.member), ())
                if len(values) == len(member.turn_rewards) > 0:
                    self._advantages[member.id] = values

    def credits(self, event: StepDone) -> Iterator[CreditRecord]:
        """Yield the record of each trajectory of the batch: its advantages and its log-ratios.

        Replayed groups have none: their records are of the step that trained them first.
        """
        log_ratios = event.log_ratios.by_branch() if event.log_ratios else {}
        for group in self.groups:
            for member in group.members:
                branches: dict[int, Branch] = {**member.others, member.number: member}
                runs = {number: self._told(member, number, one) for number, one in branches.items()}
                yield credit_record(member, event.step, runs, log_ratios)

    def _told(self, member: Trajectory, number: int, branch: Branch) -> Sequence[tuple[int, float]]:
        runs = runs_of(member, self._advantages[member.id], number)
        return self._algorithm.objective.told(branch, runs)

    def complete(self, row: StepRecord) -> StepRecord:
        """Return the row of the step, with the groups that were trained again."""
        return replace(row, replayed_json=dumps([group.id for group in self.replayed]))

    def metrics(self, samples: Sequence[TrainSample], trained: int) -> dict[str, Any]:
        """Return the metrics of advantages, sampling, replay and
        the loss, after ``trained`` steps.
        """
        metrics = dict(advantage_metrics(self.groups, self._advantages))
        members = (member for group in self.groups for member in group.members)
        metrics |= self._ledger.take_sampling(sum(member.generated for member in members))
        if self._replay is not None:
            metrics |= replay_metrics(self.replayed, trained)
        return {**metrics, **self._algorithm.objective.metrics_of(samples)}
