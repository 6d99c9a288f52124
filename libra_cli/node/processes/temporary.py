"""The directory for a run's temporary files on one host. Standard library only.

``tmp`` in the run's directory is a link to it: it is elsewhere, where sockets may have long names.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

TMP = Path("tmp")
SHARED_MEMORY = Path("/dev/shm")
STORE = re.compile(r"vllm_dist_[0-9a-f]{32}")
"""The file in which the ranks of a vLLM server meet."""


def remove() -> None:
    """Remove it, from within the run's directory, once nothing of the run is left.

    With it goes the shared memory of servers of several ranks that were killed on a host without
    GPUs: vLLM names it after the file in which the ranks meet.
    """
    if not TMP.is_symlink():
        return
    target = Path(os.readlink(TMP))
    if _is_ours(target):  # /tmp was cleared, and somebody else may have made one of this name
        for store in target.iterdir():
            if STORE.fullmatch(store.name):
                _unlink(SHARED_MEMORY.glob(f"{store.name}*"))
        shutil.rmtree(target, ignore_errors=True)
    TMP.unlink()


def _unlink(segments: Iterable[Path]) -> None:
    for segment in segments:
        with suppress(OSError):  # another user's
            segment.unlink()


def _is_ours(directory: Path) -> bool:
    with suppress(OSError):
        found = directory.lstat()
        return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    return False
