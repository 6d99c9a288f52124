"""Thousands of random moves: nobody else waits, nothing is lost, and every one of them ends."""

from __future__ import annotations

from array import array
from json import loads
from random import Random
from typing import Any

import pytest
from hypothesis import Phase as Part
from hypothesis import given, settings
from hypothesis import strategies as st

from libra_cli.core import actions as a
from libra_cli.core import events as e
from libra_cli.core.cluster.replica import ReplicaState
from libra_cli.core.launch.joined_slots import slot_named
from libra_cli.core.records import GroupRecord, MoveRecord
from libra_cli.core.rollout.active import Stage
from libra_cli.core.run.state import Phase
from libra_cli.core.types import Role, SlotId, TrajectoryId
from tests.world import FEW_RUNS, Faults, World, recipe

HOSTS = {"a": 2, "b": 2}
NODES = {
    "hosts without GPUs": [
        *({"host": host, "slots": slots, "pool": "hybrid"} for host, slots in HOSTS.items()),
        {"host": "c", "pool": "train"},
    ],
    "hosts with GPUs": [
        *(
            {"host": host, "slots": slots, "gpus": slots, "pool": "hybrid"}
            for host, slots in HOSTS.items()
        ),
        {"host": "c", "gpus": 1, "pool": "train"},
    ],
}
SMALL = {"name": "all", "max_num_seqs": 3}
LARGE = {"name": "large", "max_num_seqs": 6, "tensor_parallel": 2, "slots": 0}
ORDERS = (
    ["drain", "stop", "start", "sync", "verify", "join"],
    ["start", "sync", "verify", "drain", "stop", "join"],
)
FAULTS = st.builds(
    Faults,
    server_dies=st.sampled_from([0.0, 0.0, 0.005]),
    start_fails=st.sampled_from([0.0, 0.0, 0.1]),
    sync_fails=st.sampled_from([0.0, 0.0, 0.02, 0.1]),
    turn_fails=st.sampled_from([0.0, 0.0, 0.05]),
    refused=st.sampled_from([0.0, 0.2]),
    environment_breaks=st.sampled_from([0.0, 0.0, 0.05]),
    trainer_dies=st.sampled_from([0.0, 0.0, 0.005]),
    node_lost=st.sampled_from([0.0, 0.01]),
    stop_asked=st.sampled_from([0.0, 0.0, 0.0, 0.001]),
    repeated=st.sampled_from([0.0, 0.1]),
    replanned=st.sampled_from([0.01, 0.05]),
    joined=st.sampled_from([0.0, 0.0, 0.3]),
    ordered=st.sampled_from([0.01, 0.1]),
    worker_dies=st.sampled_from([0.0, 0.0, 0.005]),
    models=st.sampled_from([0.0, 0.3]),
    model_dies=st.sampled_from([0.0, 0.005]),
    share_lost=st.sampled_from([0.0, 0.3]),
    abort_fails=st.sampled_from([0.0, 0.3]),
    gpu_lost=st.sampled_from([0.0, 0.0, 0.1]),
    slow=st.sampled_from([0.0, 0.0, 0.03]),
)


class Watched(World):
    """A world that keeps its own books of what must never happen."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.has_served = False
        #: Groups of every step that still counts, after rollbacks.
        self.history: dict[int, list[int]] = {}
        self.batches: dict[int, list[int]] = {}
        self.prompts: dict[TrajectoryId, array[int]] = {}
        #: Processes that may hold a slot, by kind; those asked to stop, with the incarnation asked
        #: for.
        self.processes: dict[tuple[str, SlotId], int | None] = {}
        #: Slots whose servers hold nothing, but have a process; with the incarnation asked to stop.
        self.asleep: dict[SlotId, int | None] = {}

    def give(self, event: e.Event) -> None:
        counts = isinstance(event, e.TurnGenerated) and self._must_count(event)
        tokens = self._tokens(event)[:] if isinstance(event, e.TurnGenerated) else array("i")
        step = self.machine.training.step
        self._gone(event)
        super().give(event)
        if isinstance(event, e.TurnGenerated):
            now = self._tokens(event)
            assert not now or now[: len(tokens)] == tokens, "tokens were taken away"
            over = self.machine.phase in (Phase.STOPPING, Phase.ENDED)
            kept = now == tokens + event.token_ids
            assert kept or over or not counts, "a reply that counts was lost"
        if isinstance(event, e.StepDone) and self.machine.training.step == step + 1:
            self.history[event.step] = self.batches[event.step]
        self._watch()

    def _watch(self) -> None:
        serving = (s.state is ReplicaState.SERVING for s in self.machine.servers.replicas.values())
        self.has_served = self.has_served or any(serving)
        wanted = self.machine.reconciler.plan(())
        assert wanted.servers or not self.has_served, "no server is wanted any more"

    def _tokens(self, event: e.TurnGenerated) -> array[int]:
        flight = self.machine.rollout.active.get(event.trajectory)
        return flight.trajectory.token_ids if flight else array("i")

    def _must_count(self, event: e.TurnGenerated) -> bool:
        """Whether somebody waits for exactly this reply, and all of it is of a proved version."""
        flight = self.machine.rollout.active.get(event.trajectory)
        status = self.machine.servers.current(event.slot, event.incarnation)
        if flight is None or status is None or status.verified is None:
            return False
        waited_for = flight.stage is Stage.GENERATING and flight.request == event.request
        return waited_for and event.newest <= status.verified.version and not status.unproved

    # -- processes ------------------------------------------------------------------------------

    def _began(self, kind: str, slot: SlotId) -> None:
        known = {slot.id: slot for slot in self._slots}
        mine = slot_named(slot, known)
        others = {key for key in self.processes if slot_named(key[1], known).overlaps(mine)}
        here, gpus = {key for key in others if key[1] == slot}, mine.gpus
        assert others == here, f"a {kind} is started on {slot} beside {others}"
        assert (kind, slot) not in here, f"two processes of kind {kind} on {slot}"
        assert not here or not gpus, f"a {kind} is started on {slot} beside {here}"
        assert kind != "rank" or not here, f"the core is started on {slot} beside {here}"
        self.processes[kind, slot] = None

    def _gone(self, event: e.Event) -> None:
        if isinstance(event, (e.ServerStopped, e.ServerAsleep, e.WorkerStopped, e.ModelStopped)):
            kinds: dict[type, str] = {e.WorkerStopped: "worker", e.ModelStopped: "model"}
            key = (kinds.get(type(event), "server"), event.slot)
            if self.processes.get(key) == event.incarnation:
                del self.processes[key]
                if isinstance(event, e.ServerAsleep):
                    self.asleep[event.slot] = None
        if isinstance(event, e.ServerStopped) and self.asleep.get(event.slot) == event.incarnation:
            del self.asleep[event.slot]
        if isinstance(event, e.TrainerStopped):
            for key in [key for key in self.processes if key[0] == "rank"]:
                if self.processes[key] == event.incarnation:
                    del self.processes[key]

    def _wants_memory(self, kind: str, slot: SlotId) -> None:
        known = {slot.id: slot for slot in self._slots}
        mine = slot_named(slot, known)
        beside = [slot for slot in self.asleep if slot_named(slot, known).overlaps(mine)]
        assert not beside, f"{slot} is started where {beside} sleeps"
        self._began(kind, slot)

    def _do_start_server(self, action: a.StartServer) -> None:
        self._wants_memory("server", action.slot)
        super()._do_start_server(action)

    def _do_start_model(self, action: a.StartModel) -> None:
        self._wants_memory("model", action.slot)
        assert len([key for key in self.processes if key[1] == action.slot]) == 1, "beside another"
        super()._do_start_model(action)

    def _do_stop_model(self, action: a.StopModel) -> None:
        self.processes["model", action.slot] = action.incarnation
        super()._do_stop_model(action)

    def _do_sleep_server(self, action: a.SleepServer) -> None:
        self.processes["server", action.slot] = action.incarnation
        super()._do_sleep_server(action)

    def _do_wake_server(self, action: a.WakeServer) -> None:
        del self.asleep[action.slot]
        self._began("server", action.slot)
        super()._do_wake_server(action)

    def _do_stop_server(self, action: a.StopServer) -> None:
        if action.slot in self.asleep:
            self.asleep[action.slot] = action.incarnation
        else:
            self.processes["server", action.slot] = action.incarnation
        super()._do_stop_server(action)

    def _do_start_worker(self, action: a.StartWorker) -> None:
        self._began("worker", action.slot)
        super()._do_start_worker(action)

    def _do_stop_worker(self, action: a.StopWorker) -> None:
        self.processes["worker", action.slot] = action.incarnation
        super()._do_stop_worker(action)

    def _do_start_trainer(self, action: a.StartTrainer) -> None:
        for slot in action.train:
            self._began("rank", slot)
        super()._do_start_trainer(action)
        self.history = {step: batch for step, batch in self.history.items() if step <= self._step}

    def _do_stop_trainer(self, action: a.StopTrainer) -> None:
        for slot in action.train:
            self.processes["rank", slot] = action.incarnation
        super()._do_stop_trainer(action)

    # -- trajectories and moves -----------------------------------------------------------------

    def _do_generate(self, action: a.Generate) -> None:
        before = self.prompts.get(action.trajectory, array("i"))
        assert action.prompt_ids[: len(before)] == before, "a prompt does not extend the last one"
        self.prompts[action.trajectory] = action.prompt_ids[:]
        super()._do_generate(action)

    def _do_train(self, action: a.Train) -> None:
        before = len(self.trained)
        super()._do_train(action)
        self.batches[action.step] = [group for group, _ in self.trained[before:]]

    def _do_save(self, action: a.Save) -> None:
        super()._do_save(action)
        row = action.record
        if isinstance(row, MoveRecord) and row.state == "failed":
            self._check_failed(row)

    def _check_failed(self, row: MoveRecord) -> None:
        assert row.detail
        if "has something else" in row.detail or row.detail.startswith("the run "):
            return
        role = self.machine.reconciler.role_of(row.slot)
        kept = role is Role.ROLLOUT and len(self.machine.reconciler.plan(()).servers) == 1
        assert role in (row.from_role, Role.IDLE, Role.TRAIN) or kept, row

    def check_books(self) -> None:
        """What must be true of a run that has ended."""
        self._check_groups()
        last = {(r.group_id, r.member, r.attempt): r for r in self.trajectories}
        for who, row in last.items():
            assert row.ended_at is not None, f"trajectory {who} never ends"
            tokens = row.tokens[-1].token_ids
            prompt = self.prompts.get(TrajectoryId(*who), array("i"))
            assert tokens[: len(prompt)] == prompt, f"trajectory {who} ends as something else"
        moves = {row.move: row for row in self.rows(MoveRecord)}
        cut_short: set[str] = set()
        for move in moves.values():
            check_move(move, clean=move.slot not in cut_short)
            if move.state == "failed":
                cut_short.add(move.slot)
            else:
                cut_short.discard(move.slot)

    def _check_groups(self) -> None:
        trained = [group for batch in self.history.values() for group in batch]
        assert len(trained) == len(set(trained)), "a group was trained twice"
        assert self.end is not None
        if self.end.state != "finished":
            return
        steps, size = self.recipe.run.steps, self.recipe.training.groups_per_step
        assert sorted(self.history) == list(range(1, steps + 1))
        assert all(len(batch) == size for batch in self.history.values())
        ledger = self.machine.ledger
        dropped = {row.group_id for row in self.rows(GroupRecord) if row.state == "dropped"}
        known = {*trained, *dropped, *ledger.groups, *ledger.queue}
        assert known == set(range(ledger.next_group)), "a group is lost"


def check_move(row: MoveRecord, *, clean: bool) -> None:
    """It ended, and tells a story that can have happened.

    Only where the slot is ``clean`` of what a move cut short has left is the order of phases fixed.
    """
    assert row.state in ("done", "failed"), f"the move never ends: {row}"
    assert row.ended_at is not None
    phases = loads(row.phases_json)
    names = [phase for phase, _, _ in phases]
    stories = [[name for name in order if name in names] for order in ORDERS]
    assert names in stories or not clean, row
    times = [row.started_at]
    times += [time for _, began, ended in phases for time in (began, ended)]
    times.append(row.ended_at)
    assert times == sorted(times), row


def elastic(nodes: str, *, stream: bool, sleep: bool = False, **planner: Any) -> Any:
    return recipe(
        nodes=NODES[nodes],
        run={"name": "world", "steps": 6},
        rollout={"buckets": [SMALL, LARGE], "sleep": sleep},
        training={
            "groups_per_step": 3,
            "max_staleness": 1,
            "checkpoint_every": 2,
            "stream": stream,
        },
        planner=planner,
    )


# A smaller seed is no simpler world: nothing to shrink.
@pytest.mark.timeout(120)
@pytest.mark.parametrize("nodes", sorted(NODES))
@settings(FEW_RUNS, phases=[Part.explicit, Part.generate])
@given(
    seed=st.integers(0, 2**32),
    faults=FAULTS,
    stream=st.booleans(),
    sleep=st.booleans(),
    interval=st.sampled_from([1, 3, 10]),
)
def test_whatever_moves_nothing_is_lost_and_every_move_ends(
    seed, faults, nodes, stream, sleep, interval
):
    setting = elastic(nodes, stream=stream, sleep=sleep, plan_interval=interval)
    world = Watched(Random(seed), faults, setting)
    world.run(most_events=100_000)
    world.check_books()
    assert not world.asleep, f"left asleep: {world.asleep}"
