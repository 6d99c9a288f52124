"""The exceptions that libra raises on purpose.

    LibraError                 the base; has .exit_code and a .hint (the next thing to type)
      InputError               what a command was given is wrong, and nothing was begun
        RecipeError            the recipe; lists all problems as file:line: key: reason
        PluginError            a backend, policy, loss or monitor cannot be found or loaded
          EnvironmentBroken    an environment cannot be found, loaded or used
            SandboxBroken      a sandbox cannot be opened, or has ended
        WrongRun               a directory is no run, or has not what is asked of it
      HostError                a host cannot be reached, trusted or used
        HostKeyError           a host's key is unknown or has changed
        HostLost               the connection to a host dropped and did not come back in time
      StoppedByUser            the user has ended a command before it had a result
      ProcessError             a process on a host did not start, or died
      ServerError              a vLLM server refused, failed or is another than expected
      TrainerError             the trainer refused a step, failed or has the wrong world
      WeightsError             a weight version is incomplete, damaged or does not verify
      AgentFailed              an agent could not be run, failed or was silent for too long
      StateError               files of a run cannot be read or written; WrongRun is one, too
    IllegalMove                a bug in libra: a state machine was given a forbidden transition

Catch ``LibraError`` for anything a user can act on::

    try:
        run(recipe)
    except LibraError as error:
        print(error, error.hint)

A class of errors has the exit code of its base: an ``ExitCode`` is given to classes here alone.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from enum import IntEnum
from typing import Any


class ExitCode(IntEnum):
    """What the exit code of a command says; the page ``commands`` of help tells of each."""

    FINISHED = 0
    FAILED = 1
    WRONG_INPUT = 2
    HOST_PROBLEM = 3
    STOPPED = 4


class LibraError(Exception):
    """Something a user can act on. ``hint`` is the next thing to type, if there is one."""

    exit_code = ExitCode.FAILED

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


class InputError(LibraError):
    """What a command was given is wrong: an argument, a file or its place; nothing was begun."""

    exit_code = ExitCode.WRONG_INPUT


class RecipeError(InputError):
    """The recipe is wrong. The message has a line for each problem: ``file:line: key: reason``."""


class HostError(LibraError):
    """A host cannot be reached, trusted or used."""

    exit_code = ExitCode.HOST_PROBLEM


class HostKeyError(HostError):
    """A host's key is unknown or has changed; the hint is the command that fixes it."""


class HostLost(HostError):
    """The connection to a host dropped, and did not come back in time."""


class StoppedByUser(LibraError):
    """The user has ended a command before it had a result."""

    exit_code = ExitCode.STOPPED


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


class PluginError(InputError):
    """A backend, policy, loss or monitor that a recipe names cannot be found or loaded."""


class EnvironmentBroken(PluginError):
    """An environment cannot be found, loaded or used (not: it answered with an error)."""


class SandboxBroken(EnvironmentBroken):
    """A sandbox cannot be opened on this host, or has ended; the hint says what to type."""

    exit_code = ExitCode.FAILED


class AgentFailed(LibraError):
    """An agent could not be run, failed or was silent for too long; its trajectory is retried."""


class StateError(LibraError):
    """Files of a run cannot be read or written."""


class WrongRun(InputError, StateError):
    """A directory is no run that this libra can read, or has not what a command asks of it."""


class IllegalMove(Exception):
    """A bug in libra: a forbidden transition, which changed nothing; the message has the past."""


NONSENSE = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""Exceptions that reading an answer, a file or a message of an unexpected shape may raise."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of an error's sentence: ``; did you mean 'heddle'?``, or nothing if none is close."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
