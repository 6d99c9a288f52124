"""A run directory, read: one consistent snapshot, while the controller goes on writing.

A ``Reader`` opens the database read-only and holds one read transaction, so that every number of
a view belongs to the same instant. It is meant to be short-lived: open, ask, close.

    guarantee  nothing in the run directory is created or changed; the writer waits for a reader
               only where it has no WAL mode (``runtime.store.database``).
    limit      what the controller saved in the last quarter of a second may not be there yet.

A file of an older libra is shown in the shape of this one (``runtime.store.schema``).

SQLite itself would create ``-shm`` beside a database in WAL mode. So one without its ``-wal`` is
opened as immutable, and one that has ``-wal`` but lost its ``-shm`` (a killed run that somebody
copied) is read from a private copy. A file in any other mode may be written just now, and is read
under SQLite's locks; what a writer that died in a transaction has left half done is rolled back.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import sqlite3
import stat
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from libra_cli.config.errors import StateError, WrongRun
from libra_cli.core.records import (
    CreditRecord,
    EvaluationRecord,
    ExportRecord,
    FrozenModelRecord,
    MoveRecord,
    NodeRecord,
    NoteRecord,
    PlanRecord,
    ProcessRecord,
    Record,
    RegretRecord,
    RunRecord,
    SampleRecord,
    SlotRecord,
    SlotStateRecord,
    StepRecord,
    SyncRecord,
    TrajectoryRecord,
    TurnRecord,
    VersionRecord,
    from_metrics_json,
)
from libra_cli.core.trajectory_time import TrajectoryTime
from libra_cli.core.types import EVALUATION_GROUPS, BranchTokens
from libra_cli.core.workload import TrajectorySample
from libra_cli.runtime.store.joined_rows import (
    Length,
    TrajectoryCounts,
    TrajectoryRow,
    TurnPlacement,
)
from libra_cli.runtime.store.nearby_runs import command_for_another
from libra_cli.runtime.store.schema import COLUMNS, DATABASE, Column, check_format, show
from libra_cli.runtime.store.token_file import (
    OLD_TOKENS,
    old_tokens,
    read_log_ratios,
    read_tokens,
)

R = TypeVar("R", bound=Record)

_FOR_TRAINING = f"group_id < {EVALUATION_GROUPS}"
"""Chooses trajectories and turns that are of no evaluation."""
_NEWEST = (
    "SELECT group_id, member, attempt FROM trajectories WHERE state = 'finished'"
    f" AND {_FOR_TRAINING} AND ended_at IS NOT NULL ORDER BY ended_at DESC LIMIT ?"
)

_LAST = (
    "NOT EXISTS (SELECT 1 FROM trajectories n WHERE n.group_id = t.group_id"
    " AND n.member = t.member AND n.attempt > t.attempt)"
)
"""Chooses the last attempts of a group that was played again, since only these were trained on."""
_WAITING = (
    "EXISTS (SELECT 1 FROM late l WHERE l.group_id = t.group_id AND l.member = t.member"
    " AND l.step IS NULL)"
)
"""A member that its group was closed without, and that no step has trained yet."""
_STEP = "coalesce(late.step, g.step)"
"""The step that trained a member of group ``g``, joined with ``late``."""


def has_run(run_dir: Path) -> bool:
    """Whether a run has written into a directory.

    Raises:
        WrongRun: nobody but its owner may look into it.
    """
    path = run_dir / DATABASE
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except PermissionError as error:
        raise WrongRun(
            f"{run_dir} cannot be looked into: {error.strerror}",
            hint=f"ask its owner, or copy it: ls -ld {run_dir}",
        ) from error
    except OSError:
        return False


class Reader:
    """A snapshot of one run. WrongRun, with a hint, if there is none or a newer libra wrote it.

    >>> with Reader(Path("runs/quickstart-1")) as reader:  # doctest: +SKIP
    ...     reader.run().step
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        path = run_dir / DATABASE
        if not has_run(run_dir):
            raise WrongRun(
                f"{run_dir} is not a run directory: it has no {DATABASE}",
                hint=command_for_another(run_dir),
            )
        with ExitStack() as stack:
            try:
                self._connection = _connect(path, stack)
                stack.callback(self._connection.close)
                self._connection.execute("BEGIN")
                self.meta = check_format(self._connection, path)
                show(self._connection)
            except (sqlite3.Error, OSError) as error:
                hint = _hint_of(error, path)
                raise StateError(f"cannot read {path}: {error}", hint=hint) from error
            self._stack = stack.pop_all()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._stack.close()

    def backup(self, target: sqlite3.Connection) -> None:
        """Copy the snapshot into an empty database, as it is in the file."""
        try:
            self._connection.backup(target)
        except sqlite3.Error as error:
            raise StateError(f"cannot copy {self.run_dir / DATABASE}: {error}") from error

    def rows(
        self, kind: type[R], where: str = "1", parameters: Sequence[object] = (), order: str = ""
    ) -> list[R]:
        """The rows of one record class, in the order of its key unless told otherwise."""
        columns = COLUMNS[kind]
        names = ", ".join(f'"{column.name}"' for column in columns)
        keys = ", ".join(kind.KEY)
        query = f"SELECT {names} FROM {kind.TABLE} WHERE {where} ORDER BY {order or keys}"
        as_stored = not any(column.kind is bool for column in columns)
        return [
            kind(*row) if as_stored and None not in row else kind(*map(_value, columns, row))
            for row in self._all(query, parameters)
        ]

    def run(self) -> RunRecord:
        """The run itself.

        Raises:
            StateError: its controller has not written anything yet.
        """
        runs = self.rows(RunRecord)
        if not runs:
            raise StateError(
                f"{self.run_dir}: the run has not written anything yet", hint="try again"
            )
        return runs[-1]

    def steps(self) -> list[StepRecord]:
        """Return the optimizer steps that were taken, in order."""
        return self.rows(StepRecord)

    def slots(self) -> list[SlotRecord]:
        """The slots as they are now, by name."""
        return self.rows(SlotRecord)

    def nodes(self) -> list[NodeRecord]:
        return self.rows(NodeRecord)

    def processes(self) -> list[ProcessRecord]:
        """The processes on the hosts, by host and name."""
        return self.rows(ProcessRecord)

    def samples(self, since: float = 0.0) -> list[SampleRecord]:
        """The readings of all servers from ``since`` on (seconds since the epoch), in order."""
        return self.rows(SampleRecord, "at >= ?", (since,), order="at, slot")

    def latest_samples(self) -> dict[str, SampleRecord]:
        """Return the newest sample of each slot, by slot."""
        newest = "(slot, at) IN (SELECT slot, max(at) FROM samples GROUP BY slot)"
        return {sample.slot: sample for sample in self.rows(SampleRecord, newest)}

    def syncs(self) -> list[SyncRecord]:
        """Every server that took a version, in the order in which they served it."""
        return self.rows(SyncRecord, order="served_at, slot")

    def versions(self) -> list[VersionRecord]:
        """The weight versions, in the order of their publication."""
        return self.rows(VersionRecord, order="published_at")

    def evaluations(self) -> list[EvaluationRecord]:
        """The evaluations, in the order in which they began."""
        return self.rows(EvaluationRecord)

    def exports(self) -> list[ExportRecord]:
        """The checkpoints that the run made models of, in that order."""
        return self.rows(ExportRecord, order="at")

    def frozen_models(self) -> list[FrozenModelRecord]:
        """The files of frozen models on the hosts that serve them, those that were read first
        first."""
        return self.rows(FrozenModelRecord, order="at")

    def regret(self) -> RegretRecord | None:
        """What the run lost to the best plan that stays; None where nobody has found out."""
        rows = self.rows(RegretRecord)
        return rows[-1] if rows else None

    def notes(self) -> list[NoteRecord]:
        """What a person must know, in the order it was told last."""
        return self.rows(NoteRecord, order="at")

    def plans(self) -> list[PlanRecord]:
        """The plans that were adopted, the newest last."""
        return self.rows(PlanRecord)

    def moves(self) -> list[MoveRecord]:
        """Return the moves of slots, the newest last."""
        return self.rows(MoveRecord)

    def slot_history(self) -> list[SlotStateRecord]:
        """Every state every slot was in, by slot, in order."""
        return self.rows(SlotStateRecord)

    def trajectory_counts(self) -> TrajectoryCounts:
        """How many attempts are in which state, without those of evaluations."""
        query = (
            "SELECT state, count(*), sum(attempt > 0) FROM trajectories"
            f" WHERE {_FOR_TRAINING} GROUP BY state"
        )
        rows = self._all(query)
        states = {state: count for state, count, _ in rows}
        trained = self._all(
            "SELECT count(*) FROM trajectories t WHERE state = 'finished'"
            " AND group_id IN (SELECT group_id FROM groups WHERE state = 'trained')"
            f" AND {_LAST} AND NOT {_WAITING}"
        )
        return TrajectoryCounts(
            finished=states.get("finished", 0),
            trained=trained[0][0],
            in_flight=states.get("running", 0),
            retried=sum(retried for _, _, retried in rows),
            failed=states.get("failed", 0),
            dropped=states.get("dropped", 0),
        )

    def staleness_histogram(self) -> dict[int, int]:
        """Staleness -> trained trajectories whose oldest token had it when they were trained.

        The trainer of step s holds version s - 1; the trajectory's oldest token is of
        ``min_version``.
        """
        rows = self._all(
            f"SELECT max(0, {_STEP} - 1 - t.min_version) AS staleness, count(*)"
            " FROM groups g JOIN trajectories t USING (group_id)"
            " LEFT JOIN late USING (group_id, member)"
            " WHERE g.state = 'trained' AND g.step IS NOT NULL"
            f" AND t.state = 'finished' AND t.min_version IS NOT NULL AND {_LAST}"
            f" AND NOT {_WAITING}"
            " GROUP BY staleness ORDER BY staleness"
        )
        return {staleness: count for staleness, count in rows}  # noqa: C416 - the row is a tuple

    def members_of_trained_groups(self) -> list[tuple[int, bool]]:
        """Generated tokens so far, and whether it was trained, of each member."""
        rows = self._all(
            f"SELECT t.generated_tokens, t.state = 'finished' AND NOT {_WAITING}"
            " FROM trajectories t WHERE group_id IN"
            f" (SELECT group_id FROM groups WHERE state = 'trained') AND {_LAST}"
        )
        return [(length, bool(trained)) for length, trained in rows]

    def lengths(self, limit: int = 5000) -> list[Length]:
        """The newest finished trajectories, oldest first, without those of evaluations."""
        rows = self._all(
            "SELECT ended_at, generated_tokens, turns FROM trajectories WHERE state = 'finished'"
            f" AND {_FOR_TRAINING} AND ended_at IS NOT NULL ORDER BY ended_at DESC LIMIT ?",
            (limit,),
        )
        return [Length(*row) for row in reversed(rows)]

    def trajectories(self) -> list[TrajectoryRow]:
        """All attempts, by group, member and attempt; not those of evaluations."""
        trained = f"t.state = 'finished' AND {_LAST} AND NOT {_WAITING} AND g.state = 'trained'"
        rows = self._all(
            "SELECT t.group_id, t.member, t.attempt, t.state,"
            f" CASE WHEN {trained} THEN {_STEP} END, t.reward, t.started_at, t.ended_at, t.turns,"
            " t.generated_tokens, t.context_tokens, t.min_version, t.max_version, t.detail,"
            " t.environment, t.metrics_json"
            " FROM trajectories t LEFT JOIN groups g USING (group_id)"
            f" LEFT JOIN late USING (group_id, member) WHERE t.{_FOR_TRAINING} ORDER BY 1, 2, 3"
        )
        return [TrajectoryRow(*(*known, _named(metrics))) for *known, metrics in rows]

    def tokens(self, group: int, member: int, attempt: int) -> tuple[BranchTokens, ...]:
        """The branches of one trajectory, that which it ended in last; none if it has not.

        Raises:
            StateError: they cannot be read.
        """
        where, key = "group_id = ? AND member = ? AND attempt = ?", (group, member, attempt)
        rows = self.rows(TrajectoryRecord, where, key)
        if not rows:
            return ()
        if (place := rows[0].tokens_at) is not None:
            return read_tokens(self.run_dir, place)
        columns = self._all("SELECT name FROM pragma_table_info('trajectories', 'main')")
        if (OLD_TOKENS,) not in columns:
            return ()
        old = self._all(f"SELECT {OLD_TOKENS} FROM main.trajectories WHERE {where}", key)
        return old_tokens(old[0][0], rows[0].branches_json, rows[0].spans_json)

    def log_ratios(self, group: int, member: int, attempt: int) -> tuple[tuple[float, ...], ...]:
        """For each branch of ``tokens``, what ``LogRatios`` holds of its generated tokens.

        NaN are those that were left out of the loss, and a branch may have none; there are none of
        any if no step has trained the trajectory, or if what trained it did not tell.

        Raises:
            StateError: they cannot be read.
        """
        where, key = "group_id = ? AND member = ? AND attempt = ?", (group, member, attempt)
        rows = self.rows(CreditRecord, where, key)
        if not rows or rows[0].log_ratios_at is None:
            return ()
        return read_log_ratios(self.run_dir, rows[0].log_ratios_at)

    def token_ids(self, group: int, member: int, attempt: int) -> list[list[int]]:
        """The token ids of each branch of ``tokens``."""
        return [list(one.token_ids) for one in self.tokens(group, member, attempt)]

    def tool_outcomes(self) -> dict[str, int]:
        """Return how many tool calls of trajectories for training ended with each outcome."""
        rows = self._all(
            "SELECT json_extract(call.value, '$[1]'), count(*)"
            " FROM turns, json_each(turns.tools_json) AS call"
            f" WHERE {_FOR_TRAINING} GROUP BY 1"
        )
        return {str(outcome): count for outcome, count in rows}

    def ways(self) -> list[TurnPlacement]:
        """All turns by where they were played and where their trajectory had been before."""
        rows = self._all(
            "SELECT slot, moved_from, turn = 0, count(*) FROM turns GROUP BY 1, 2, 3"
            " ORDER BY 1, 2, 3"
        )
        return [
            TurnPlacement(slot, before, bool(first), turns) for slot, before, first, turns in rows
        ]

    def played_in(
        self, groups: Sequence[int] | None = None
    ) -> tuple[list[TrajectoryRecord], list[TurnRecord]]:
        """The trajectories of these groups, of all by default, and their turns; not those of
        evaluations."""
        where, parameters = _FOR_TRAINING, list[object]()
        if groups is not None:
            where += " AND group_id IN (SELECT value FROM json_each(?))"
            parameters.append(json.dumps(list(groups)))
        rows = self.rows(TrajectoryRecord, where, parameters)
        return rows, self.rows(TurnRecord, where, parameters)

    def turn_count(self) -> int:
        """How many turns the run has played, without those of evaluations."""
        ((number,),) = self._all(f"SELECT count(*) FROM turns WHERE {_FOR_TRAINING}")
        return int(number)

    def in_play(self, since: float, until: float) -> list[tuple[float, float]]:
        """When the trajectories that were in play at any moment of that time began and ended."""
        query = (
            "SELECT started_at, coalesce(ended_at, ?1) FROM trajectories"
            " WHERE started_at < ?1 AND coalesce(ended_at, ?1) > ?2"
        )
        return [(float(began), float(ended)) for began, ended in self._all(query, (until, since))]

    def turns_between(self, since: float, until: float) -> list[TurnRecord]:
        """Return the turns that overlap ``since`` to ``until``, in seconds since the epoch."""
        return self.rows(TurnRecord, "ended_at > ? AND started_at < ?", (since, until))

    def played(self, trajectories: int = 1024) -> list[TrajectorySample]:
        """The newest finished trajectories as the planner takes them.

        Their time in tools is from the end of a turn until the next one is asked for.
        """
        lengths = self._all(
            "SELECT group_id, member, attempt, generated_tokens, context_tokens FROM trajectories"
            f" WHERE (group_id, member, attempt) IN ({_NEWEST}) ORDER BY ended_at",
            (trajectories,),
        )
        members = f"(group_id, member, attempt) IN ({_NEWEST})"
        turns: dict[tuple[int, int, int], list[TurnRecord]] = {}
        for turn in self.rows(TurnRecord, members, (trajectories,)):
            turns.setdefault((turn.group_id, turn.member, turn.attempt), []).append(turn)
        return [
            _sample(turns[group, member, attempt], generated, context)
            for group, member, attempt, generated, context in lengths
            if (group, member, attempt) in turns and generated > 0
        ]

    def trajectory_time(self, since: float) -> TrajectoryTime | None:
        """Where the seconds of trajectories went that have finished since then, as means.

        None if there is none that was played on servers and has its time in environments.
        """
        chosen = (
            f"t.state = 'finished' AND t.{_FOR_TRAINING} AND t.ended_at >= ? AND t.turns > 0"
            " AND t.environment_s IS NOT NULL"
        )
        ((number, waiting_s, environment_s),) = self._all(
            "SELECT count(*), sum(t.waited_s), sum(t.environment_s) FROM trajectories t"
            f" WHERE {chosen}",
            (since,),
        )
        ((queue_s, decode_s),) = self._all(
            "SELECT sum(n.started_at - n.queued_at), sum(n.ended_at - n.started_at)"
            f" FROM trajectories t JOIN turns n USING (group_id, member, attempt) WHERE {chosen}",
            (since,),
        )
        if not number or queue_s is None:
            return None
        sums = (waiting_s, environment_s - waiting_s, queue_s, decode_s)
        return TrajectoryTime(int(number), *(max(0.0, float(one)) / number for one in sums))

    def events(self, kind: str, after: int = 0) -> list[tuple[int, dict[str, Any]]]:
        """The number and the fields of every event of a kind that came after the numbered one."""
        query = "SELECT seq, payload_json FROM events WHERE kind = ? AND seq > ? ORDER BY seq"
        return [(seq, json.loads(text)) for seq, text in self._all(query, (kind, after))]

    def last_written(self) -> float | None:
        """The newest time in the run: the best guess at when a killed one ended."""
        times = self._all(
            "SELECT max(at) FROM events UNION ALL SELECT max(ended_at) FROM steps"
            " UNION ALL SELECT max(at) FROM samples UNION ALL SELECT max(since) FROM slot_states"
        )
        return max((at for (at,) in times if at is not None), default=None)

    def _all(self, query: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        try:
            return self._connection.execute(query, tuple(parameters)).fetchall()
        except sqlite3.Error as error:
            raise StateError(f"cannot read {self.run_dir / DATABASE}: {error}") from error


def _named(metrics_json: str) -> dict[str, float]:
    """What an environment has named, by the names of ``core.metric_names``."""
    named = from_metrics_json(metrics_json)
    return {f"env/{name}": value for name, value in named.items() if value is not None}


def _sample(turns: list[TurnRecord], generated: int, context: int) -> TrajectorySample:
    prompt = min(turns[0].prompt_tokens, context - generated)
    waits = [after.queued_at - turn.ended_at for turn, after in pairwise(turns)]
    last = sum(call.latency_s for call in turns[-1].tools)
    return TrajectorySample(
        prompt=max(0, prompt),
        generated=generated,
        observed=max(0, context - generated - max(0, prompt)),
        turns=len(turns),
        tool_s=sum(max(0.0, wait) for wait in waits) + last,
    )


def _value(column: Column, value: Any) -> Any:
    if column.kind is bool:
        return None if value is None else bool(value)
    if value is None and not column.optional:
        return float("nan")  # how SQLite stored it
    return value


def _hint_of(error: BaseException, path: Path) -> str:
    """What to type next, by what the system says of a file that cannot be read."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"free some space: df -h {tempfile.gettempdir()}"
    return f"see who may read it: ls -l {path.parent}"


def _connect(path: Path, stack: ExitStack) -> sqlite3.Connection:
    try:
        return _opened(path, stack)
    except FileNotFoundError:  # its controller ended just now, and took -wal with it
        return _opened(path, stack)


def _opened(path: Path, stack: ExitStack) -> sqlite3.Connection:
    wal, shm = (path.with_name(path.name + suffix) for suffix in ("-wal", "-shm"))
    options = "mode=ro"
    if not wal.exists():
        options = _without_wal(path)
    elif not shm.exists():
        path = _private_copy(path, wal, stack)
    quoted = str(path.resolve()).replace("%", "%25").replace("?", "%3f").replace("#", "%23")
    return sqlite3.connect(f"file:{quoted}?{options}", uri=True, isolation_level=None, timeout=2.0)


def _without_wal(path: Path) -> str:
    """How to open a file beside which no write-ahead log lies.

    One that may be written with a rollback journal (``runtime.store.database``) is read under
    SQLite's locks, or its pages would be of different moments.
    """
    with path.open("rb") as file:
        read_version = file.read(20)[19:]
    if read_version == b"\2" or not os.access(path, os.W_OK):  # \2 is WAL, which nobody writes now
        return "mode=ro&immutable=1"
    # What a writer left behind that died in a transaction is rolled back.
    return "mode=rw" if path.with_name(f"{path.name}-journal").exists() else "mode=ro"


def _private_copy(path: Path, wal: Path, stack: ExitStack) -> Path:
    directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="libra-read-")))
    shutil.copy(path, directory / path.name)
    shutil.copy(wal, directory / wal.name)
    return directory / path.name
