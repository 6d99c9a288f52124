"""What becomes of an episode that is forgotten while it begins, or while its tool answers."""

from __future__ import annotations

import asyncio
from array import array

import pytest

from libra_cli.config.environment import EnvironmentSpec
from libra_cli.core.actions import AdvanceEpisode, ForgetEpisode, StartEpisode
from libra_cli.core.types import TrajectoryId
from libra_cli.node.model.tokenizer import build_tokenizer, save_tokenizer
from libra_cli.runtime.episodes.in_process import InProcessEnvironment
from libra_cli.runtime.episodes.performer import EpisodePerformer
from libra_cli.runtime.episodes.places import EnvironmentSource
from libra_cli.runtime.episodes.player import Episodes
from libra_cli.runtime.episodes.renderer import Renderer

ONE = TrajectoryId(group=0, member=0)


@pytest.mark.parametrize("slow", [(EnvironmentSource, "begin"), (InProcessEnvironment, "reset")])
def test_an_episode_that_is_forgotten_while_it_begins_leaves_nothing(tmp_path, monkeypatch, slow):
    reached, go_on = held(monkeypatch, *slow)

    async def go():
        episodes = playing(tmp_path)
        performer = EpisodePerformer(episodes, run_seed=0)
        starting = asyncio.create_task(performer.perform(StartEpisode(ONE)))
        await reached.wait()
        await performer.perform(ForgetEpisode(ONE))
        go_on.set()
        assert await starting is None
        assert episodes.running == 0
        await episodes.close()

    asyncio.run(go())


def test_an_answer_to_an_episode_that_was_forgotten_is_none(tmp_path, monkeypatch):
    reached, go_on = held(monkeypatch, Episodes, "_reply")

    async def go():
        episodes = playing(tmp_path)
        performer = EpisodePerformer(episodes, run_seed=0)
        await performer.perform(StartEpisode(ONE))
        advance = AdvanceEpisode(ONE, array("i", [1]), "stop", array("d", [0.0]))
        advancing = asyncio.create_task(performer.perform(advance))
        await reached.wait()
        await performer.perform(ForgetEpisode(ONE))
        go_on.set()
        assert await advancing is None
        await episodes.close()

    asyncio.run(go())


def playing(directory):
    save_tokenizer(build_tokenizer(), directory, max_len=512)
    spec = EnvironmentSpec(name="pointer-chase")
    return Episodes([spec, spec], ["a", "b"], Renderer(directory))


def held(monkeypatch, place, name):
    """Have a method wait for the second event once it is called, of which the first one tells."""
    done = getattr(place, name)
    reached, go_on = asyncio.Event(), asyncio.Event()

    async def waits(self, *arguments):
        reached.set()
        await go_on.wait()
        return await done(self, *arguments)

    monkeypatch.setattr(place, name, waits)
    return reached, go_on
