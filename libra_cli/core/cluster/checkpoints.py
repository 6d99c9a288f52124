"""The trainer's checkpoints: the last one, the one that is being written, and their scores."""

from __future__ import annotations

from statistics import fmean
from typing import Any

SCORE_STEPS = 10
"""A checkpoint's score is the mean reward of so many steps, the last of them its own: over fewer,
which tasks a batch happened to have would decide which checkpoint is the best."""
MAX_SAVES = 2
"""Times that the checkpoint of one step is tried: mostly once with the step, once by itself. A disk
that is full then is full for longer than a run may take to end. Chosen."""


class Checkpoints:
    """The checkpoints of a run; ``path`` and ``step`` are of the last one, -1 for no step."""

    def __init__(self, every: int) -> None:
        self._every = every
        self.path = ""
        self.step = -1
        self._asked = -1
        #: The step whose checkpoint could not be written last, how often, and why; 0 times once a
        #: newer one is there.
        self.failed_step = -1
        self.failures = 0
        self.failure = ""
        #: The mean reward of every step's batch.
        self._rewards: dict[int, float] = {}
        #: The mean reward of every evaluated step; None where the run has no evaluation.
        self.evaluated: dict[int, float] | None = None
        #: Steps whose evaluation goes on: whether one is the best is not known yet.
        self.evaluating: frozenset[int] = frozenset()
        #: The step that each trainer incarnation went on from.
        self._began: dict[int, int] = {}

    @property
    def writing(self) -> bool:
        """Whether a checkpoint was asked for that is not written yet."""
        return self._asked > self.step

    @property
    def newest(self) -> int:
        """The step of the newest checkpoint, written or asked for; 0 where there is none."""
        return max(self.step, self._asked, 0)

    def is_due(self, step: int, last: int) -> bool:
        """Whether this step, of a run that ends with ``last``, is to be saved.

        After a checkpoint that could not be written, every step is due until one was written.
        """
        return step % self._every == 0 or step >= last or self.failures > 0

    def asked(self, step: int) -> None:
        """Note that the trainer was asked to write the checkpoint of ``step``."""
        self._asked = step

    def forget_asked(self) -> None:
        """Drop the checkpoint being written: the trainer that was asked for it is gone."""
        self._asked = self.step

    def failed(self, step: int, reason: str) -> bool:
        """Note that the checkpoint of ``step`` failed; False if it was not the newest asked for."""
        if step != self._asked or not self.writing:
            return False
        self.failures = self.failures + 1 if step == self.failed_step else 1
        self.failed_step, self.failure = step, reason
        self._asked = self.step
        return True

    def given_up(self, step: int) -> bool:
        """Whether that of this step has failed ``MAX_SAVES`` times."""
        return step == self.failed_step and self.failures >= MAX_SAVES

    @property
    def unsaved(self) -> str:
        """A sentence on the checkpoint that could not be written, and on the newest there is."""
        newest = f"is that of step {self.step}" if self.path else "does not exist"
        return (
            f"the checkpoint of step {self.failed_step} could not be written: "
            f"{self.failure}; the newest {newest}"
        )

    def remember(self, path: str, step: int) -> None:
        """Note the checkpoint of ``step`` at ``path`` as the last one."""
        self.path, self.step, self.failures = path, step, 0

    def learn_reward(self, step: int, reward: float) -> None:
        """Note the mean reward of a step's batch, by which checkpoints are scored."""
        self._rewards[step] = reward

    def begins(self, incarnation: int, step: int) -> None:
        """Note that a trainer goes on from a step: evaluations of
        later steps are of weights of the past.
        """
        self._began[incarnation] = min(step, self._began.get(incarnation, step))
        if self.evaluated is not None:
            self.evaluated = {one: score for one, score in self.evaluated.items() if one <= step}

    def still_holds(self, step: int, incarnation: int) -> bool:
        """Whether the weights of a step as that trainer had them are those the run has gone on
        from: no later trainer began before it."""
        later = (began for one, began in self._began.items() if one > incarnation)
        return all(began >= step for began in later)

    def evaluation_began(self, step: int) -> None:
        """The weights of a step are being evaluated."""
        self.evaluating |= {step}

    def evaluation_ended(self, step: int, score: float | None, incarnation: int) -> None:
        """Note the score of the weights that a trainer had at a step;
        None: they will not be evaluated.
        """
        self.evaluating -= {step}
        if score is not None and self.still_holds(step, incarnation):
            self.evaluated = {**(self.evaluated or {}), step: score}

    def told(self, step: int) -> dict[str, Any]:
        """Return what the checkpoint of ``step`` records of scores.

        An evaluation ends after the checkpoint of its weights was written, so each checkpoint
        records the scores of all earlier ones, and the steps whose evaluation goes on.
        """
        told = {"score": self.score(step), "evaluating": sorted(self.evaluating)}
        if self.evaluated is None:
            return told
        return {**told, "evaluated": sorted(self.evaluated.items())}

    def score(self, step: int) -> float | None:
        """Return the score of the step's evaluation, or without evaluations the mean reward of the
        steps up to it; None until there are ``SCORE_STEPS``, and before it is evaluated.
        """
        if self.evaluated is not None:
            return self.evaluated.get(step)
        steps = range(step - SCORE_STEPS + 1, step + 1)
        known = all(one in self._rewards for one in steps)
        return fmean(self._rewards[one] for one in steps) if known else None
