"""Gives a rank's part to every version that rank 0 of its host begins, behind the steps.

A part goes to whichever directory of its version lacks it: the first one, and one that rank 0 makes
later because the version was damaged.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from pathlib import Path

import torch

from libra_cli.node.weights.layout import FileLayout, layout_of
from libra_cli.node.weights.parts import LOOK_S, Share
from libra_cli.node.weights.staging import StagedRows
from libra_cli.node.weights.tensor_rows import RowsKey, TensorRows
from libra_cli.node.weights.versions import version_name

log = logging.getLogger("libra.weights")


class PartWriter:
    """A rank's part of every version, beside rank 0's ``Publisher``."""

    def __init__(
        self, root: Path, *, trainer_incarnation: int, dtype: torch.dtype, share: Share
    ) -> None:
        self._root = root
        self._incarnation = trainer_incarnation
        self._share = share
        self._staged = StagedRows(dtype)
        self._version = -1
        self._sums: dict[RowsKey, int] = {}
        self._layout: FileLayout
        #: The directory that has this part of ``_version`` already.
        self._given: Path | None = None
        #: Held while the copy changes, and while it is written.
        self._copy = threading.Lock()
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="part-writer", daemon=True).start()

    def stage(self, pieces: Iterable[TensorRows], *, version: int) -> None:
        """Copy this rank's part of a version; the tensors may change when this returns.

        Rank 0 must have settled (``Publisher.settled``): the copy of the version before goes.
        """
        with self._copy:
            self._sums = self._staged.copy(self._share.of(pieces))
            self._layout = layout_of(self._staged.pieces, files=self._share.writers)
            self._version, self._given = version, None

    def close(self) -> None:
        """Have the thread end that writes parts; it finishes the one that it is writing."""
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.wait(LOOK_S):
            with self._copy:
                try:
                    if self._version >= 0:
                        self._look()
                except OSError as error:  # a file system that hangs or is away, for a while
                    log.warning("%s cannot be looked at: %s", self._root, error)

    def _look(self) -> None:
        name = version_name(self._version, self._incarnation)
        for directory in self._root.glob(f".{name}.*"):
            if directory != self._given:
                self._write(directory)
                self._given = directory

    def _write(self, directory: Path) -> None:
        base = self._root / version_name(self._version - 1, self._incarnation)
        try:
            self._share.write(self._staged.pieces, self._layout, directory, base, self._sums)
        except Exception as error:  # noqa: BLE001  rank 0 must hear of it, or would wait
            try:
                self._share.tell_problem(directory, f"{type(error).__name__}: {error}")
            except OSError as gone:  # rank 0 has given the directory up, or waits in vain
                log.warning("no part was given to %s: %s", directory, gone)
