"""A session of a run that another controller has begun."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from libra_cli.runtime.credentials.run_secrets import RunSecrets
from libra_cli.runtime.run_records import Listeners, open_records
from libra_cli.runtime.session import Session
from libra_cli.runtime.store.journal import Journal
from tests import sample_run, world


def test_what_happens_after_the_clock_was_set_back_is_dated_after_what_was_told(
    tmp_path: Path,
) -> None:
    """A controller after this one takes for written what is dated before the last that was."""
    told_at = time.time() + 1000.0
    with Journal(tmp_path) as journal:
        journal.event(told_at, "RunStarted", {})
    recipe, row = world.recipe(), sample_run.run_record()
    unused: Any = None
    nobody = Listeners(lambda record: None, lambda text: None, str)
    with open_records(recipe, tmp_path, row, nobody) as records:
        secrets = RunSecrets.of(tmp_path)
        session = Session(recipe, tmp_path, records, secrets, unused, unused)
        assert session._clock() >= told_at
