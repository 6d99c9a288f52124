"""Finds environments by name, and makes them.

A name is an entry point of group ``libra.environments`` (with which a package adds one), the name
of one that ships with libra, or an import path (``config.plugins``). Every failure is an
``EnvironmentBroken`` that names what exists and what was probably meant.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

from libra_cli.config.errors import EnvironmentBroken
from libra_cli.config.plugins import PluginGroup
from libra_cli.envs.protocol import Environment
from libra_cli.envs.sandbox.sandboxes import Sandboxes
from libra_cli.plugins import finding

ENVIRONMENTS = PluginGroup(
    "libra.environments",
    "environment",
    {
        "bfcl": "libra_cli.envs.gyms.bfcl:Bfcl",
        "calculator": "libra_cli.envs.calculator:Calculator",
        "dataset": "libra_cli.envs.dataset.environment:Dataset",
        "harbor": "libra_cli.envs.harbor.environment:Harbor",
        "minigrid": "libra_cli.envs.gyms.minigrid:MiniGrid",
        "openenv": "libra_cli.envs.adapters.openenv:OpenEnvEpisode",
        "openspiel": "libra_cli.envs.gyms.openspiel:OpenSpiel",
        "opponents": "libra_cli.envs.adapters.opponents:WithOpponents",
        "opposites": "libra_cli.envs.opposites:Opposites",
        "pointer-chase": "libra_cli.envs.pointer_chase:PointerChase",
        "reasoning-gym": "libra_cli.envs.gyms.reasoning:ReasoningGym",
        "shell": "libra_cli.envs.shell.environment:ShellTasks",
        "tau2": "libra_cli.envs.gyms.tau2:Tau2",
        "textarena": "libra_cli.envs.gyms.textarena:TextArena",
        "textworld": "libra_cli.envs.gyms.textworld:TextWorld",
        "trl": "libra_cli.envs.adapters.trl:TrlEnvironment",
        "verifiers": "libra_cli.envs.adapters.verifiers:VerifiersTasks",
    },
    error=EnvironmentBroken,
)
_PACKAGES = {
    "bfcl": "bfcl_eval",
    "minigrid": "minigrid",
    "openspiel": "pyspiel",
    "reasoning-gym": "reasoning_gym",
    "tau2": "tau2",
    "textarena": "textarena",
    "textworld": "textworld",
    "verifiers": "verifiers",
}
"""The module that an environment which ships with libra imports once it is used."""
_MEMBERS = ("tools", "task", "reset", "step", "score")


class Factory(Protocol):
    """A callable that makes the environment of one trajectory, as the recipe names it."""

    def __call__(self, **arguments: Any) -> Environment:
        """Make one from ``environment.args``, and ``secrets`` if the recipe has any."""


def installed_environments() -> list[str]:
    """Return the names of environments whose packages are here; imports none of them."""
    found = []
    for name, path in sorted(finding.available(ENVIRONMENTS).items()):
        module = _PACKAGES.get(name, path.partition(":")[0]).partition(".")[0]
        if importlib.util.find_spec(module) is not None:
            found.append(name)
    return found


def find(name: str) -> Factory:
    """Import the factory of an environment.

    Raises:
        EnvironmentBroken: there is none of this name, or it cannot be imported.
    """
    factory = finding.find(ENVIRONMENTS, name)
    if not callable(factory):
        raise EnvironmentBroken(f"environment {name!r}: {factory!r} is not callable")
    return factory  # type: ignore[no-any-return]


def maker(
    name: str,
    arguments: Mapping[str, Any],
    run_directory: str | None,
    sandbox: Mapping[str, Any] | None = None,
) -> Callable[[], Environment]:
    """Import the factory of an environment, and return what makes one with these arguments.

    A factory with a parameter ``run_directory`` gets that, if it is known; one with a parameter
    ``sandbox`` gets ``Sandboxes`` of what the recipe says of them.

    Raises:
        EnvironmentBroken: there is none of this name, it cannot be imported, or it takes no
            sandbox where the recipe has one.
        SandboxBroken: this host can have no sandbox.
    """
    factory = find(name)
    if sandbox is not None:
        if not takes(factory, "sandbox"):
            raise EnvironmentBroken(
                f"environment {name!r} runs no commands: it has no parameter sandbox",
                hint="remove environment.sandbox, or see libra help sandboxes",
            )
        arguments = {**arguments, "sandbox": Sandboxes.of(sandbox)}
    if run_directory is not None and takes(factory, "run_directory"):
        arguments = {**arguments, "run_directory": run_directory}
    return partial(make, name, factory, arguments)


def takes(factory: Factory, parameter: str) -> bool:
    """Say whether a factory has a parameter of this name."""
    try:
        return parameter in inspect.signature(factory).parameters
    except (TypeError, ValueError):  # some callables have no signature
        return False


def make(name: str, factory: Factory, arguments: Mapping[str, Any]) -> Environment:
    """Make one environment.

    Raises:
        EnvironmentBroken: the arguments do not fit, or it lacks a member of the protocol.
    """
    try:
        inspect.signature(factory).bind(**arguments)
    except TypeError as error:
        raise EnvironmentBroken(
            f"environment {name!r} was given {sorted(arguments)}: {error}",
            hint=f"it takes: {inspect.signature(factory)}",
        ) from error
    except ValueError:
        pass  # some callables have no signature; then the call itself shows what is wrong
    environment = factory(**arguments)
    missing = [member for member in _MEMBERS if not hasattr(environment, member)]
    if missing:
        raise EnvironmentBroken(
            f"environment {name!r} has no {', '.join(missing)}",
            hint="see libra_cli/envs/protocol.py for what an environment is",
        )
    return environment
