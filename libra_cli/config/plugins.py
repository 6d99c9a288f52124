"""Finding the piece of code that a recipe names: one way for every seam of libra.

A name is that of an entry point of the seam's group (how an installed package adds one), that of an
implementation which ships with libra, or an import path ``package.module:attribute``. Whatever goes
wrong is an error that names what exists and what was probably meant.

A module opens a seam with a ``PluginGroup`` and asks it::

    ENVIRONMENTS = PluginGroup("libra.environments", "environment", {"toy": "toys:Toy"})
    factory = ENVIRONMENTS.find(recipe.environment.name)

What is installed does not change while a process lives, so the same name always gives the same
object.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from libra_cli.config.errors import LibraError, PluginError


@dataclass(frozen=True, slots=True)
class PluginGroup:
    """One seam: the group of its entry points, and what one of them is called in an error.

    ``shipped`` maps the names of libra's own to their import paths. They are no entry points, which
    a checkout that is only on PYTHONPATH does not have; a package cannot take their names.
    """

    name: str
    noun: str
    shipped: Mapping[str, str]
    error: type[LibraError] = PluginError

    def available(self) -> dict[str, str]:
        """Every name that can be used, and the import path it stands for; libra's own first."""
        installed = sorted((entry.name, entry.value) for entry in entry_points(group=self.name))
        return {**self.shipped, **{k: v for k, v in installed if k not in self.shipped}}

    def check(self, name: str) -> None:
        """Raise ``error`` if nothing is called that; imports nothing, so an import path is fine."""
        if ":" not in name and name not in self.shipped and name not in self.available():
            raise self._unknown(name)

    def find(self, name: str) -> Any:
        """Import what ``name`` stands for; raises ``error`` if that cannot be done."""
        # What ships is not looked for among what is installed: that reads a file of every package.
        target = name if ":" in name else self.shipped.get(name) or self.available().get(name)
        if target is None:
            raise self._unknown(name)
        module = target.partition(":")[0]
        try:
            return EntryPoint(name, target, self.name).load()
        except AttributeError as error:
            raise self._no_attribute(name, target, error) from error
        except Exception as error:  # somebody else's module may raise anything while imported
            raise self.error(
                f"{self.noun} {name!r}: importing {module} failed: {type(error).__name__}: {error}",
                hint=f'python -c "import {module}" shows why{_not_found(module, error)}',
            ) from error

    def _unknown(self, name: str) -> LibraError:
        known = list(self.available())
        return self.error(
            f"there is no {self.noun} {name!r}{_meant(name, known)}",
            hint=f"available: {', '.join(known)}; or an import path such as "
            "my_package.my_module:attribute",
        )

    def _no_attribute(self, name: str, target: str, error: AttributeError) -> LibraError:
        module, _, attribute = target.partition(":")
        try:
            names = [n for n in dir(importlib.import_module(module)) if not n.startswith("_")]
        except Exception:  # noqa: BLE001  the import itself raised the AttributeError
            return self.error(f"{self.noun} {name!r}: importing {module} failed: {error}")
        return self.error(
            f"{self.noun} {name!r}: {module} has no {attribute!r}{_meant(attribute, names)}",
            hint=f"{module} has: {', '.join(names)}",
        )


def _not_found(module: str, error: Exception) -> str:
    """What to do about a module that is nowhere; nothing if it is another error."""
    if not isinstance(error, ModuleNotFoundError) or error.name != module.partition(".")[0]:
        return ""
    return "; install its package, or in its directory: export PYTHONPATH=$PWD"


def _meant(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
