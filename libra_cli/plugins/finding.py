"""Finding the piece of code that a recipe names: one way for every seam of libra.

A name is that of an entry point of the seam's group (how an installed package adds one), that of an
implementation which ships with libra, or an import path ``package.module:attribute``. Whatever goes
wrong is an error that names what exists and what was probably meant.

What is installed does not change while a process lives, so the same name always gives the same
object.
"""

from __future__ import annotations

import difflib
import importlib
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from libra_cli.config.errors import LibraError
from libra_cli.config.plugins import PluginGroup


def available(group: PluginGroup) -> dict[str, str]:
    """Every name that can be used, and the import path it stands for; libra's own first."""
    installed = sorted((entry.name, entry.value) for entry in entry_points(group=group.name))
    return {**group.shipped, **{k: v for k, v in installed if k not in group.shipped}}


def check(group: PluginGroup, name: str) -> None:
    """Raise ``group.error`` if nothing is called that; an import path is taken for right."""
    if ":" not in name and name not in group.shipped and name not in available(group):
        raise _unknown(group, name)


def find(group: PluginGroup, name: str) -> Any:
    """Import what ``name`` stands for; raises ``group.error`` if that cannot be done."""
    # What ships is not looked for among what is installed: that reads a file of every package.
    target = name if ":" in name else group.shipped.get(name) or available(group).get(name)
    if target is None:
        raise _unknown(group, name)
    module = target.partition(":")[0]
    try:
        return EntryPoint(name, target, group.name).load()
    except AttributeError as error:
        raise _no_attribute(group, name, target, error) from error
    except Exception as error:  # somebody else's module may raise anything while imported
        raise group.error(
            f"{group.noun} {name!r}: importing {module} failed: {type(error).__name__}: {error}",
            hint=f'python -c "import {module}" shows why{_not_found(module, error)}',
        ) from error


def _unknown(group: PluginGroup, name: str) -> LibraError:
    known = list(available(group))
    return group.error(
        f"there is no {group.noun} {name!r}{_meant(name, known)}",
        hint=f"available: {', '.join(known)}; or an import path such as "
        "my_package.my_module:attribute",
    )


def _no_attribute(group: PluginGroup, name: str, target: str, error: AttributeError) -> LibraError:
    module, _, attribute = target.partition(":")
    try:
        names = [n for n in dir(importlib.import_module(module)) if not n.startswith("_")]
    except Exception:  # noqa: BLE001  the import itself raised the AttributeError
        return group.error(f"{group.noun} {name!r}: importing {module} failed: {error}")
    return group.error(
        f"{group.noun} {name!r}: {module} has no {attribute!r}{_meant(attribute, names)}",
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
