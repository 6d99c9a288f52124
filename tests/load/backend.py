"""The rollout backend of a load: libra's servers, with an engine that answers at once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from libra_cli.config.recipe import Recipe
from libra_cli.core.launch.process import ProcessSpec
from libra_cli.core.launch.rollout_backend import ServerLaunch
from libra_cli.core.launch.vllm import Vllm

SERVER = str(Path(__file__).with_name("server.py"))


class AtOnce(Vllm):
    """As vLLM, but for the engine."""

    def server(self, recipe: Recipe, launch: ServerLaunch) -> ProcessSpec:
        """One server, which needs no model."""
        spec = super().server(recipe, launch)
        module = spec.argv.index("-m")
        argv = (*spec.argv[:module], SERVER, *spec.argv[module + 2 :])
        return replace(spec, argv=argv)
