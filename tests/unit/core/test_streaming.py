"""A step that begins on the groups that are READY, while others are still played."""

from __future__ import annotations

from array import array
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from libra_cli.core import actions as a
from libra_cli.core import events as e
from libra_cli.core.cluster.gradient_workers import GradientWorkers
from libra_cli.core.cluster.step_batch import PARTS, StepBatch
from libra_cli.core.cluster.trainer import TrainerGroup
from libra_cli.core.cluster.trainer_life import TrainerState
from libra_cli.core.notices import Result, StepClaimed
from libra_cli.core.rollout.groups import Group, GroupLedger, GroupState
from libra_cli.core.rollout.staleness import hold
from libra_cli.core.types import Pool, Slot, VersionSpan, WeightVersion
from tests.elastic import scene
from tests.world import algorithm

ALGORITHM = algorithm()
ALONE = Slot("a/0", "a", (), Pool.TRAIN)

GROUPS = 8


def ledger(staleness: int = 1) -> GroupLedger:
    return GroupLedger(group_size=2, groups_per_step=GROUPS, rule=hold(staleness), retries=1)


def end(book: GroupLedger, group: Group, version: int = 0) -> None:
    """Every member has a token and a reward."""
    for member in group.members:
        speak(group, member.id.member, version)
        book.finish(member.id, 1.0)


def speak(group: Group, member: int, version: int) -> None:
    """A member has its first token, of this version."""
    trajectory = group.members[member]
    trajectory.token_ids = array("i", [1])
    trajectory.add_span(VersionSpan(version, 0, 1))


def trainer(book: GroupLedger, *, stream: bool) -> TrainerGroup:
    batch = StepBatch(book, ALGORITHM, stream=stream)
    training = TrainerGroup(book, [ALONE], batch, checkpoint_every=100)
    training.start(now=0.0)
    training.started(e.TrainerStarted(1, e.PublishedVersion(WeightVersion(1, 0), 1, 0.0)), now=0.0)
    return training


def answer(training: TrainerGroup, actions: list[Result]) -> None:
    for action in actions:
        if isinstance(action, a.Accumulate):
            training.accumulated(
                e.Accumulated(action.incarnation, action.step, action.part), now=1.0
            )


def groups_of(samples: tuple[a.TrainSample, ...]) -> list[int]:
    return sorted({sample.trajectory.id.group for sample in samples})


@given(order=st.permutations(range(GROUPS)))
def test_the_batch_is_the_same_with_stream_and_without(order):
    batches = []
    for stream in (False, True):
        book = ledger()
        opened = [book.open(version=0, now=0.0) for _ in range(GROUPS)]
        training = trainer(book, stream=stream)
        parts: list[int] = []
        for number in order:
            end(book, opened[number])
            actions = training.claim(now=1.0, target=9)
            answer(training, actions)
            for action in actions:
                if isinstance(action, a.Accumulate):
                    parts += groups_of(action.samples)
                    assert len(action.samples) >= 2 * GROUPS // PARTS
                    assert len(parts) < GROUPS, "nothing is left for the step itself"
                if isinstance(action, StepClaimed):
                    batches.append(sorted(parts + groups_of(action.train.samples)))
                    assert bool(action.train.parts) is stream
            book.check()
    assert batches == [list(range(GROUPS))] * 2


@given(seed=st.integers(0, 2**32), staleness=st.integers(0, 2))
def test_parts_never_exceed_the_batch_and_leave_room_for_last_calls(seed, staleness):
    random = Random(seed)
    book = ledger(staleness)
    step = staleness + 1
    groups = [book.open(version=0, now=0.0) for _ in range((staleness + 1) * GROUPS)]
    # Those with a token of version 0 are too old for any step after this one.
    last_calls = random.sample(groups, random.randint(0, GROUPS - 1))
    for group in last_calls:
        speak(group, 0, 0)
    others = [group for group in groups if group not in last_calls]
    for group in random.sample(others, random.randint(0, len(others))):
        end(book, group, version=step)
        part = book.claim_part(step, least=2)
        assert not part or len(part) >= 2
        claimed = book.count(GroupState.CLAIMED)
        assert claimed + len(last_calls) <= GROUPS
        assert not part or claimed < GROUPS
        book.check()


def test_a_part_is_counted_once_however_often_it_is_told():
    book = ledger()
    opened = [book.open(version=0, now=0.0) for _ in range(GROUPS)]
    training = trainer(book, stream=True)
    for group in opened[:4]:
        end(book, group)
    (first,) = training.claim(now=1.0, target=9)
    assert isinstance(first, a.Accumulate)
    training.accumulated(e.Accumulated(1, 1, first.part), now=1.0)
    for group in opened[4:6]:
        end(book, group)
    (second,) = training.claim(now=1.0, target=9)
    assert isinstance(second, a.Accumulate)
    training.accumulated(e.Accumulated(1, 1, first.part), now=1.0)  # late, or twice
    assert training.state is TrainerState.BUSY
    training.accumulated(e.Accumulated(1, 1, second.part), now=1.0)
    assert str(training.state) == "ready"


def test_waiting_between_parts_is_no_training():
    book = ledger()
    opened = [book.open(version=0, now=0.0) for _ in range(GROUPS)]
    training = trainer(book, stream=True)
    for group in opened[:2]:
        end(book, group)
    (part,) = training.claim(now=10.0, target=9)
    assert isinstance(part, a.Accumulate)
    training.accumulated(e.Accumulated(1, 1, part.part), now=12.0)
    for group in opened[2:]:
        end(book, group)
    training.claim(now=30.0, target=9)
    training.done(e.StepDone(1, 1, None), now=35.0)
    row = training.last
    assert (row.started_at, row.ended_at) == (10.0, 35.0)
    assert (row.waited_s, row.between_parts_s, row.held_s) == (10.0 + 18.0, 18.0, 0.0)
    assert (row.train_s, row.period_s, row.free_at) == (2.0 + 5.0, 35.0, 0.0)
    assert row.tokens_per_s == row.generated_tokens / 35.0


def test_parts_of_a_trainer_that_dies_are_trained_by_the_next():
    world = scene(stream=True)
    world.until(lambda: world.machine.training.streaming)
    claimed = {g.id for g in world.machine.ledger.groups.values() if g.state is GroupState.CLAIMED}
    assert claimed
    step = world.machine.training.step
    world.give(e.TrainerFailed(world.machine.training.incarnation, "killed"))
    world.until(lambda: world.machine.training.step > step)
    trained = {group for group, at in world.trained if at <= step + 1}
    assert claimed <= trained


def test_shares_are_of_the_last_part_only():
    book, workers = ledger(), GradientWorkers(1)
    batch = StepBatch(book, ALGORITHM, stream=True)
    training = TrainerGroup(book, [ALONE], batch, checkpoint_every=100)
    training.start(now=0.0)
    published = e.PublishedVersion(WeightVersion(1, 0), 1, 0.0)
    training.started(e.TrainerStarted(1, published), now=0.0)
    status = workers.at(Slot("w/0", "w", (), Pool.HYBRID), now=0.0)
    workers.publish(published)
    workers.start(status, now=0.0)
    workers.started(e.WorkerStarted("w/0", status.incarnation), now=0.0)
    workers.synced(
        e.WorkerSynced("w/0", status.incarnation, published, 0.0, 0.1, 0.1, 1.0), now=1.0
    )
    groups = [book.open(version=0, now=0.0) for _ in range(GROUPS)]
    for group in groups[:2]:
        end(book, group)
    answer(training, training.claim(now=1.0, target=9))
    for group in groups[2:]:
        end(book, group)
    (step,) = [x for x in training.claim(now=2.0, target=9) if isinstance(x, StepClaimed)]
    assert step.train.parts == 1
    shares = workers.shares(step.train.samples, 1, 1)
    assert shares
    shared = {one.group for share in shares for one in share.trajectories}
    assert shared <= {group.id for group in groups[2:]}
    assert set(groups_of(step.train.samples)) == {group.id for group in groups[2:]}
