"""What a client may call the model that ``libra tinker`` serves, and how Ctrl-C ends it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from libra_cli.app.tinker import _model, _served
from libra_cli.config.recipe import ModelSpec
from libra_cli.runtime.interrupts import CLEARING, Interrupts
from libra_cli.runtime.tinker.adapters import SavedAdapters
from libra_cli.runtime.tinker.service import TinkerService
from libra_cli.runtime.tinker.wire import NotServed
from tests.unit.runtime.test_interrupts import interrupted

SNAPSHOT = "hub/models--Qwen--Qwen3-8B/snapshots/0123abcd"


@pytest.mark.parametrize(
    ("place", "served_as", "understood", "refused"),
    [
        ("models/Qwen3-8B", None, ("Qwen/Qwen3-8B", "Qwen3-8B"), "Qwen/Qwen3-8B-Base"),
        (SNAPSHOT, None, ("Qwen/Qwen3-8B",), "other/Qwen3-8B"),
        ("models/mine", "Qwen/Qwen3-8B", ("Qwen/Qwen3-8B", "any/mine"), "other/Qwen3-8B"),
    ],
)
def test_the_names_of_the_hub_are_understood_and_others_refused_in_words(
    tmp_path: Path, place: str, served_as: str | None, understood: tuple[str, ...], refused: str
) -> None:
    directory = tmp_path / place
    directory.mkdir(parents=True)
    (directory / "tokenizer.json").touch()
    model = _model(ModelSpec(path=str(directory)), "/elsewhere", 32, served_as)
    assert (model.name, model.tokenizer) == (served_as or str(directory), str(directory))
    service = TinkerService(model, None, SavedAdapters(tmp_path))  # type: ignore[arg-type]
    for name in (model.name, str(directory), *understood):
        service._check_base(name)
    with pytest.raises(NotServed, match="is not served here") as told:
        service._check_base(refused)
    assert told.value.hint.endswith(f"--served-model-name {refused}")


def test_a_second_ctrl_c_does_not_interrupt_the_clearing_of_the_hosts() -> None:
    said: list[str] = []
    closed: list[str] = []

    class Held:
        """The hosts and the service at once."""

        async def open(self) -> None:
            await interrupted(said, "")

        async def close(self) -> None:
            await interrupted(said, CLEARING)
            said.append("closed")
            closed.append("closed")

    held = cast("Any", Held())
    asyncio.run(_served(held, held, 0, said.append, Interrupts(said.append)))
    assert closed == ["closed", "closed"]
