"""What is measured on hosts ends in words where a host is lost."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from libra_cli.bench.calibration.harness import INCARNATION, MeasurementHarness
from libra_cli.config.errors import ProcessError
from libra_cli.core.events import PublishedVersion, StepDone
from libra_cli.core.types import WeightVersion
from libra_cli.runtime.hosts.agent_messages import LeaseExpired
from tests.world import recipe


def test_a_host_that_is_lost_behind_a_step_ends_the_wait_for_its_version(tmp_path: Path) -> None:
    harness = MeasurementHarness(recipe(), tmp_path, note=lambda text: None)
    harness.published = PublishedVersion(WeightVersion(0, 1), 0, 0.0)

    class Ranks:
        async def perform(self, action: object) -> StepDone:
            asyncio.get_running_loop().call_soon(harness._happened, LeaseExpired("a", "silent"))
            return StepDone(INCARNATION, 1)

    harness._ranks = cast("Any", Ranks())

    async def story() -> None:
        async with asyncio.timeout(5):
            await harness.train([])

    with pytest.raises(ProcessError, match="a: silent"):
        asyncio.run(story())
