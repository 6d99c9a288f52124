"""Rows of one kind, as a sequence and as a data frame."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from libra_cli.config.errors import LibraError
from libra_cli.core.json_form import shown

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from pandas import DataFrame

RowT = TypeVar("RowT", bound="DataclassInstance")


class RowTable(Sequence[RowT], Generic[RowT]):
    """Rows in order; ``rows[0]``, ``for row in rows`` and ``len(rows)`` as with a tuple."""

    def __init__(self, kind: type[RowT], rows: Iterable[RowT]) -> None:
        self._kind = kind
        self._rows = tuple(rows)

    @overload
    def __getitem__(self, index: int) -> RowT: ...
    @overload
    def __getitem__(self, index: slice) -> RowTable[RowT]: ...
    def __getitem__(self, index: int | slice) -> RowT | RowTable[RowT]:
        if isinstance(index, slice):
            return RowTable(self._kind, self._rows[index])
        return self._rows[index]

    def __iter__(self) -> Iterator[RowT]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        return f"<{len(self)} rows of {self._kind.__name__}>"

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return one flat mapping a row; what a field maps has
        columns of its own, as ``reward/mean``.
        """
        names = shown(self._kind)
        flat: list[dict[str, Any]] = []
        for row in self._rows:
            flat.append({})
            for name, attribute in names.items():
                value = getattr(row, attribute)
                flat[-1].update(value if isinstance(value, Mapping) else {name: value})
        return flat

    def to_pandas(self) -> DataFrame:
        """A data frame of ``to_dicts``, with its columns where there is no row too.

        Raises:
            LibraError: pandas is not installed.
        """
        try:
            from pandas import DataFrame
        except ImportError as error:
            raise LibraError("pandas is not installed", hint="pip install pandas") from error
        rows = self.to_dicts()
        columns = None if rows else list(shown(self._kind))
        return DataFrame(rows, columns=columns)
