"""The seams of libra: a recipe names a piece of code, and a group says which there are.

A module opens a seam with a ``PluginGroup``; ``plugins.finding`` imports what a name stands for::

    ENVIRONMENTS = PluginGroup("libra.environments", "environment", {"toy": "toys:Toy"})
    factory = find(ENVIRONMENTS, recipe.environment.name)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from libra_cli.config.errors import LibraError, PluginError


@dataclass(frozen=True, slots=True)
class PluginGroup:
    """A seam: the group of its entry points, and the noun for one of them in an error.

    ``shipped`` maps the names of libra's own to their import paths. They are no entry points, which
    a checkout that is only on PYTHONPATH does not have; a package cannot take their names.
    """

    name: str
    noun: str
    shipped: Mapping[str, str]
    error: type[LibraError] = PluginError
