"""A machine as bytes: everything it holds, so that it goes on as if nothing had been.

The machine is pure Python objects that share one another, which is what pickle keeps. It is read
back only from a record that this run's token signs (``runtime.store.event_log``), and then makes
only what a machine is made of: classes and functions of ``libra_cli.core``, what is in
``MEMORIES``, and a few containers. The recipe is no part of it, since it may hold secrets, nor is
its algorithm, which may be anybody's: whoever reads a snapshot has the recipe already.

The event loop stands still meanwhile. So what there is most of is reduced by functions for its type
alone: ``persistent_id`` would be called for every integer, too.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from libra_cli.config.errors import StateError
from libra_cli.config.recipe import Recipe
from libra_cli.core.algorithms.algorithm import Algorithm, algorithm_of
from libra_cli.core.run.machine import Machine
from libra_cli.core.types import VersionSpan
from libra_cli.plugins.finding import find
from libra_cli.runtime.adoption import memory
from libra_cli.runtime.adoption.memory import RunMemory
from libra_cli.runtime.episodes import history

CORE = "libra_cli.core."
MEMORIES = (memory.__name__, history.__name__)
"""The modules of what the controller remembers beside its machine."""
CONTAINERS = frozenset(
    {
        ("array", "_array_reconstructor"),
        ("array", "array"),
        ("builtins", "frozenset"),
        ("builtins", "set"),
        ("collections", "Counter"),
        ("collections", "defaultdict"),
        ("collections", "deque"),
        ("collections", "OrderedDict"),
        ("builtins", "dict"),
        ("builtins", "int"),
        ("builtins", "list"),
    }
)
"""What a machine holds that is not of the core, as pickle names it."""


def save_machine(machine: Machine, remembered: RunMemory) -> bytes:
    """The bytes of a machine between two events."""
    file = io.BytesIO()
    _MachinePickler(file, machine.recipe).dump((machine, remembered))
    return file.getvalue()


def load_machine(snapshot: bytes, recipe: Recipe) -> tuple[Machine, RunMemory]:
    """The machine again, with the recipe that it had.

    Raises:
        StateError: the bytes are damaged, or hold something that no machine does.
    """
    try:
        machine, remembered = _MachineUnpickler(io.BytesIO(snapshot), recipe).load()
    except Exception as error:
        raise StateError(f"the snapshot is damaged: {type(error).__name__}: {error}") from error
    if not (isinstance(machine, Machine) and isinstance(remembered, RunMemory)):
        raise StateError("the snapshot is of something else")
    return machine, remembered


def _sections(value: object, path: tuple[str | int, ...] = ()) -> Iterator[tuple[Any, BaseModel]]:
    """Every section of a recipe, with its place."""
    if isinstance(value, BaseModel):
        yield path, value
        for name in type(value).model_fields:
            yield from _sections(getattr(value, name), (*path, name))
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from _sections(item, (*path, number))


def section_at(path: tuple[str | int, ...]) -> BaseModel:
    """Stands in a snapshot for a section; who reads one puts the recipe's own there."""
    raise pickle.UnpicklingError(f"no recipe is there to take {path} from")


def algorithm_again() -> Algorithm:
    """Stands in a snapshot for the machine's algorithm; who reads one makes it of the recipe."""
    raise pickle.UnpicklingError("no recipe is there to make an algorithm of")


_SECTION, _ALGORITHM = (__name__, section_at.__name__), (__name__, algorithm_again.__name__)


def _span(span: VersionSpan) -> tuple[type[VersionSpan], tuple[int, int, int]]:
    # A frozen dataclass with slots lists its fields anew for each object.
    return VersionSpan, (span.version, span.start, span.end)


class _MachinePickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, recipe: Recipe) -> None:
        super().__init__(file, protocol=5)
        places = {id(section): path for path, section in _sections(recipe)}

        def section(value: BaseModel) -> Any:
            path = places.get(id(value))
            return value.__reduce_ex__(5) if path is None else (section_at, (path,))

        kinds = {type(section) for _, section in _sections(recipe)}
        own: dict[type, Any] = {
            VersionSpan: _span,
            Algorithm: lambda value: (algorithm_again, ()),
        }
        self.dispatch_table = {**dict.fromkeys(kinds, section), **own}


class _MachineUnpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, recipe: Recipe) -> None:
        super().__init__(file)
        self._sections = dict(_sections(recipe))
        self._algorithm = algorithm_of(recipe, find)

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == _SECTION:
            return self._sections.__getitem__
        if (module, name) == _ALGORITHM:
            return lambda: self._algorithm
        ours = module.startswith(CORE) or module in MEMORIES
        if ours and "." not in name:
            return _own(super().find_class(module, name), module)
        if (module, name) in CONTAINERS:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is no part of a machine")


def _own(found: Any, module: str) -> Any:
    """What a module of ours itself defines, and not what it has imported."""
    if getattr(found, "__module__", None) != module:
        raise pickle.UnpicklingError(f"{found!r} is not of {module}")
    return found
