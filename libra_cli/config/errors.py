"""The exceptions that libra raises on purpose.

    LibraError                 the base; has .exit_code and a .hint (the next thing to type)
      RecipeError              the recipe is wrong; lists all problems as file:line: key: reason
      HostError                a host cannot be reached, trusted or used
        HostKeyError           a host's key is unknown or has changed
        HostLost               the connection to a host dropped and did not come back in time
      ProcessError             a process on a host did not start, or died
      ServerError              a vLLM server refused, failed or is another than expected
      TrainerError             the trainer refused a step, failed or has the wrong world
      WeightsError             a weight version is incomplete, damaged or does not verify
      PluginError              a backend, policy, loss or monitor cannot be found or loaded
        EnvironmentBroken      an environment cannot be found, loaded or used
          SandboxBroken        a sandbox cannot be opened, or has ended
      AgentFailed              an agent could not be run, failed or was silent for too long
      StateError               a run directory is missing, damaged or of another version
    IllegalMove                a bug in libra: a state machine was given a forbidden transition

Catch ``LibraError`` for anything a user can act on::

    try:
        run(recipe)
    except LibraError as error:
        print(error, error.hint)

Exit codes (``libra help commands``): 0 finished, 1 a failed run, 2 a wrong recipe or argument,
3 a host problem, 4 stopped by the user.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any


class LibraError(Exception):
    """Something a user can act on. ``hint`` is the next thing to type, if there is one."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint

    def __reduce__(self) -> tuple[Any, ...]:
        """An error of another process arrives as it was, whatever its own ``__init__`` takes."""
        return _as_it_was, (type(self), self.args, self.__dict__)


def _as_it_was(
    kind: type[LibraError], args: tuple[object, ...], state: Mapping[str, object]
) -> LibraError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error


class RecipeError(LibraError):
    """The recipe is wrong. The message has a line for each problem: ``file:line: key: reason``."""

    exit_code = 2


class HostError(LibraError):
    """A host cannot be reached, trusted or used."""

    exit_code = 3


class HostKeyError(HostError):
    """A host's key is unknown or has changed; the hint is the command that fixes it."""


class HostLost(HostError):
    """The connection to a host dropped, and did not come back in time."""


class ProcessError(LibraError):
    """A process on a host did not start, or died."""


class ServerError(LibraError):
    """A vLLM server refused a request or is not in the state it must be in."""


class TrainerError(LibraError):
    """The trainer refused a step or failed in one."""


class TeacherError(LibraError):
    """The teacher cannot be reached, refuses, or is not one for this policy."""


class WeightsError(LibraError):
    """A weight version is incomplete or damaged, or a server does not compute with it."""


class PluginError(LibraError):
    """A backend, policy, loss or monitor that a recipe names cannot be found or loaded."""

    exit_code = 2


class EnvironmentBroken(PluginError):
    """An environment cannot be found, loaded or used (not: it answered with an error)."""


class SandboxBroken(EnvironmentBroken):
    """A sandbox cannot be opened on this host, or has ended; the hint says what to type."""


class AgentFailed(LibraError):
    """An agent could not be run, failed or was silent for too long; its trajectory is retried."""


class StateError(LibraError):
    """A run directory is missing, damaged or of another version of libra."""


class IllegalMove(Exception):
    """A bug in libra: a forbidden transition, which changed nothing; the message has the past."""


NONSENSE = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""Exceptions that reading an answer, a file or a message of an unexpected shape may raise."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of an error's sentence: ``; did you mean 'heddle'?``, or nothing if none is close."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
