"""What an exception that nobody expected means for the action it came from.

An action of the machine ends in an event, and most may end in a failure. Whatever an action raises
becomes that failure: of one server, turn, episode or worker, or of the trainer. The machine then
does what it does when one of these fails in an expected way, and the run goes on.
"""

from __future__ import annotations

from typing import assert_never

from libra_cli.core import actions as a
from libra_cli.core import events as e

MOST_CHARACTERS = 500
"""Of an exception's words in a reason; the whole of it is in the controller's log."""


def words_of(error: BaseException) -> str:
    """What went wrong, in one line that begins with the kind of the exception."""
    kind, said = type(error).__name__, " ".join(str(error).split())[:MOST_CHARACTERS]
    return f"{kind}: {said}" if said else kind


def failure_of(action: a.RuntimeAction, error: BaseException) -> e.Event | None:
    """The failure that the action ends in, since it raised this.

    None where no event is waited for, and for what ``must_end``.
    """
    match action:
        case a.StartServer() | a.CheckServer() | a.SyncServer() | a.StopServer():
            return _of_server(action, words_of(error))
        case a.Generate() | a.AbortTurn():
            return _of_turn(action, words_of(error))
        case a.StartTrainer() | a.Train() | a.Accumulate() | a.Checkpoint() | a.StopTrainer():
            return _of_trainer(action, words_of(error))
        case a.StartWorker() | a.SyncWorker() | a.StopWorker():
            return _of_worker(action, words_of(error))
        case (
            a.StartEpisode()
            | a.AdvanceEpisode()
            | a.FinishEpisode()
            | a.ForgetEpisode()
            | a.AskTeacher()
        ):
            return _of_episode(action, words_of(error))
        case a.Propose():
            return e.PlanKept(f"the planner failed: {words_of(error)}", action.order)
        case a.AnswerOrder() | a.Wake():
            return None
        case _:
            assert_never(action)


def must_end(action: a.RuntimeAction) -> bool:
    """Whether the machine waits for the end of the action, and there is no failure to end in.

    That a process is gone is either so or not: such an action is carried out again.
    """
    return isinstance(action, a.StopServer | a.StopTrainer | a.StopWorker | a.Wake)


def _of_server(
    action: a.StartServer | a.CheckServer | a.SyncServer | a.StopServer, reason: str
) -> e.Event | None:
    match action:
        case a.StartServer() | a.CheckServer():
            return e.ServerFailed(action.slot, action.incarnation, reason)
        case a.SyncServer():
            # As if the server itself had said so: it is tried once more, then in a new process.
            return e.SyncFailed(
                action.slot, action.incarnation, action.published, reason, answered=True
            )
        case a.StopServer():
            return None
        case _:
            assert_never(action)


def _of_turn(action: a.Generate | a.AbortTurn, reason: str) -> e.Event | None:
    match action:
        case a.Generate():
            return e.TurnFailed(
                action.request, action.trajectory, action.slot, action.incarnation, reason
            )
        case a.AbortTurn():
            return None
        case _:
            assert_never(action)


def _of_trainer(action: a.TrainerAction, reason: str) -> e.Event | None:
    match action:
        case a.StartTrainer() | a.Train() | a.Accumulate():
            return e.TrainerFailed(action.incarnation, reason)
        case a.Checkpoint():
            return e.CheckpointFailed(action.incarnation, action.step, reason)
        case a.StopTrainer():
            return None
        case _:
            assert_never(action)


def _of_worker(action: a.WorkerAction, reason: str) -> e.Event | None:
    match action:
        case a.StartWorker() | a.SyncWorker():
            return e.WorkerFailed(action.slot, action.incarnation, reason)
        case a.StopWorker():
            return None
        case _:
            assert_never(action)


def _of_episode(action: a.EpisodeAction | a.AskTeacher, reason: str) -> e.Event | None:
    match action:
        case a.StartEpisode() | a.AdvanceEpisode() | a.FinishEpisode():
            return e.EpisodeFailed(action.trajectory, reason)
        case a.AskTeacher():
            return e.TeacherFailed(action.trajectory, reason)
        case a.ForgetEpisode():
            return None
        case _:
            assert_never(action)
