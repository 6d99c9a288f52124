"""Trajectories that are over, and wait for what the teacher says of their tokens.

    ASKED --answer--> the trajectory ends     --no answer--> HELD --timer--> ASKED, the oldest alone
                                                              ^                 |
                                                              +-- no answer ----+-- answer --> all

Guarantees:

*   **Nothing is made up.** A trajectory ends with log-probabilities that the teacher gave of its
    very tokens, or not at all.
*   **A teacher that is away is waited for**, and is asked about one trajectory at a time, after
    pauses that double up to ``LONGEST_S``. Others go on being played as far as the staleness bound
    lets them. What it is that is waited for is a note, and the run ends as failed once it has not
    answered for ``patience_s``.
*   **One trajectory cannot hold up the others.** One that gets no answer ``STRIKES`` times while
    others do, or that the teacher refuses, is played again from its prompt, as one whose
    environment broke is.
"""

from __future__ import annotations

from array import array

from libra_cli.core.actions import Action, AskTeacher, Save, Wake
from libra_cli.core.events import TeacherFailed
from libra_cli.core.records import NoteRecord
from libra_cli.core.timer_key import TimerKey, TimerOwner
from libra_cli.core.types import Branch, Seconds, Trajectory, TrajectoryId

FIRST_S: Seconds = 2.0
LONGEST_S: Seconds = 60.0
STRIKES = 3


class TeacherQueue:
    """The trajectories that wait for the teacher. Methods return the actions that follow."""

    def __init__(self, url: str, patience_s: Seconds) -> None:
        self._url = url
        self._patience_s = patience_s
        #: What is asked about each trajectory that waits for an answer, in order.
        self._asked: dict[TrajectoryId, AskTeacher] = {}
        #: Those of them that are asked about again when the teacher answers.
        self._held: dict[TrajectoryId, AskTeacher] = {}
        self._silent_since: Seconds | None = None
        self._reason = ""
        #: Pauses that have been made since it last answered.
        self._pauses = 0
        self._paused = False
        #: How many answers there have been; and then, of one without, with its strikes.
        self._answers = 0
        self._strikes: dict[TrajectoryId, tuple[int, int]] = {}
        #: Why the run cannot go on; empty while it can.
        self.given_up = ""

    def __len__(self) -> int:
        return len(self._asked) + len(self._held)

    @property
    def is_silent(self) -> bool:
        """Whether the last thing that it was asked it has not answered."""
        return self._silent_since is not None

    def ask(self, trajectory: Trajectory) -> list[Action]:
        """Ask about a trajectory that is over, or hold it while the teacher does not answer."""
        sequences = tuple(branch.token_ids for branch in taught_branches(trajectory))
        action = AskTeacher(trajectory.id, sequences)
        if self.is_silent and (self._paused or self._asked):
            self._held[trajectory.id] = action
            return []
        self._asked[trajectory.id] = action
        return [action]

    def answered(self, who: TrajectoryId, *, now: Seconds) -> list[Action]:
        """Ask about the trajectories that were held too, since the teacher has answered."""
        self._answers += 1
        self.forget(who)
        if self._silent_since is None:
            return []
        seconds = now - self._silent_since
        self._silent_since, self._pauses, self.given_up = None, 0, ""
        held, self._held = self._held, {}
        self._asked |= held
        told = f"answers again, after {seconds:.0f} s"
        return [Save(NoteRecord("teacher", "", now, told, resolved_at=now)), *held.values()]

    def failed(self, event: TeacherFailed, *, now: Seconds) -> list[Action]:
        """Ask again after a pause about the trajectories that wait,
        since the teacher has not answered.
        """
        action = self._asked.pop(event.trajectory, None)
        if action is not None:
            self._held[event.trajectory] = action
        since = self._silent_since = now if self._silent_since is None else self._silent_since
        self._reason = event.reason
        if now - since >= self._patience_s:
            self.given_up = (
                f"the teacher at {self._url} has not answered for {now - since:.0f} s: "
                f"{event.reason}"
            )
        if self._paused:
            return []
        self._paused, self._pauses = True, self._pauses + 1
        pause_s = min(FIRST_S * 2.0 ** (self._pauses - 1), LONGEST_S)
        return [Save(self._note(since, now)), Wake(TimerKey(TimerOwner.TEACHING).name, pause_s)]

    def _note(self, since: Seconds, now: Seconds) -> NoteRecord:
        left = max(0.0, self._patience_s - (now - since))
        return NoteRecord(
            "teacher",
            "",
            now,
            f"{self._url} does not answer, so {len(self)} trajectories wait for it: "
            f"{self._reason}. It is asked again until {left:.0f} s from now "
            "(teacher.patience_s), then the run ends and can be resumed",
        )

    def strike(self, who: TrajectoryId) -> bool:
        """Count a failure to answer about the trajectory.

        Returns whether that was the last one allowed; only failures while others are answered
        count.
        """
        then, strikes = self._strikes.get(who, (self._answers, 0))
        strikes += self._answers > then
        self._strikes[who] = (self._answers, strikes)
        return strikes >= STRIKES

    def again(self) -> list[Action]:
        """Ask about one of the trajectories that are held, since the pause is over."""
        self._paused = False
        if not self._held:
            return []
        who = next(iter(self._held))
        action = self._asked[who] = self._held.pop(who)
        return [action]

    def forget(self, who: TrajectoryId) -> None:
        """Forget a trajectory that no longer needs the teacher's answer."""
        self._asked.pop(who, None)
        self._held.pop(who, None)
        self._strikes.pop(who, None)


def taught_branches(trajectory: Trajectory) -> list[Branch]:
    """The branches in which the policy has generated something."""
    return [branch for branch in trajectory.branches if branch.spans]


def take_logprobs(trajectory: Trajectory, logprobs: tuple[array[float], ...]) -> None:
    """Store the teacher's log-probabilities of generated tokens, and 0 of all others."""
    for branch, said in zip(taught_branches(trajectory), logprobs, strict=True):
        branch.teacher = array(
            "f",
            [value if mask else 0.0 for value, mask in zip(said, branch.loss_mask, strict=True)],
        )
