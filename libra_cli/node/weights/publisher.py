"""Writes versions behind the trainer's steps, one at a time.

The trainer stands still only while its weights are copied to the memory of the ranks that write
them (``staging``). Writing, hashing and comparing with the version before happen in a thread, while
the next step is computed. There is one copy: a version whose predecessor is still being written
waits for it.

The copy outlives the writing. If the version is gone from the disk, because it was found damaged
there and removed (``weight_server``), it is written again from memory.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from libra_cli.node.weights.chunks import MANIFEST
from libra_cli.node.weights.parts import Share
from libra_cli.node.weights.staging import StagedRows
from libra_cli.node.weights.tensor_rows import RowsKey, TensorRows
from libra_cli.node.weights.versions import ProbeResult, VersionOnDisk, publish

log = logging.getLogger(__name__)

LOOK_S = 0.5
"""Seconds from one look at whether the last version is still on the disk to the next."""


class Publisher:
    """The versions of a trainer, on its rank 0."""

    def __init__(
        self,
        root: Path,
        *,
        trainer_incarnation: int,
        dtype: torch.dtype,
        keep: int,
        published: Callable[[VersionOnDisk], None],
        failed: Callable[[BaseException], None],
        adapter: Mapping[str, object] | None = None,
        share: Share | None = None,
    ) -> None:
        """``published`` and ``failed`` are called by the thread that writes to ``root``;
        ``adapter`` is what versions say of the model whose adapter they are, and ``share`` what
        this rank writes of them, if others write too (``parts``)."""
        self._root = root
        self._incarnation = trainer_incarnation
        self._keep = keep
        self._published = published
        self._failed = failed
        self._adapter = adapter
        self._share = share or Share()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="publisher")
        self._staged = StagedRows(dtype)
        self._writing: Future[VersionOnDisk] | None = None
        self._again: Callable[[], VersionOnDisk]
        #: Held while the copy changes, and while it is looked whether to write it again.
        self._copy = threading.RLock()
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="publisher-watch", daemon=True).start()

    @contextmanager
    def settled(self) -> Iterator[None]:
        """Wait until the version before is complete, and keep it from being written again: from now
        on other ranks may change their parts of the copy.

        Raises:
            OSError, WeightsError: the version before could not be written.
        """
        with self._copy:
            self.wait()
            yield

    def stage(self, pieces: Iterable[TensorRows], *, version: int, probe: ProbeResult) -> None:
        """Copy a version, and have it written; the tensors may change when this returns.

        Raises:
            OSError, WeightsError: the version before could not be written.
        """
        with self._copy:
            self.wait()
            known = self._staged.copy(self._share.of(pieces))
            self._writing = self._pool.submit(self._write, version, probe, known)

    def _write(self, version: int, probe: ProbeResult, sums: dict[RowsKey, int]) -> VersionOnDisk:
        try:
            done = self._publish(version, probe, sums)
        except BaseException as error:
            self._failed(error)
            raise
        self._again = partial(self._publish, version, probe, sums)
        self._published(done)
        return done

    def _publish(self, version: int, probe: ProbeResult, sums: dict[RowsKey, int]) -> VersionOnDisk:
        return publish(
            self._staged.pieces,
            self._root,
            version=version,
            trainer_incarnation=self._incarnation,
            probe=probe,
            keep=self._keep,
            sums=sums,
            adapter=self._adapter,
            share=self._share,
        )

    def _watch(self) -> None:
        while not self._closed.wait(LOOK_S):
            if self._copy.acquire(blocking=False):
                try:
                    self._renew()
                except OSError as error:  # a file system that hangs or is away, for a while
                    log.warning("%s cannot be looked at: %s", self._root, error)
                finally:
                    self._copy.release()

    def _renew(self) -> None:
        """Write the last version again if it was complete and is gone."""
        if self._writing is None or not self._writing.done() or self._writing.exception():
            return
        done = self._writing.result()
        if not (self._root / done.name / MANIFEST).exists():
            self._writing = self._pool.submit(self._write_again, done)

    def _write_again(self, gone: VersionOnDisk) -> VersionOnDisk:
        """A disk that takes nothing now may take it at the next look."""
        try:
            self._again()
            log.warning("%s was gone from %s and is written again", gone.name, self._root)
        except OSError as error:
            log.warning("%s is gone and cannot be written again: %s", gone.name, error)
        return gone

    def wait(self) -> VersionOnDisk | None:
        """Return the version staged last, complete; None if there was none yet.

        Raises:
            OSError, WeightsError: it could not be written.
        """
        return self._writing.result() if self._writing is not None else None

    def close(self) -> None:
        """Wait until the last version is complete, or has failed."""
        self._closed.set()
        with self._copy:
            self._pool.shutdown(wait=True)
