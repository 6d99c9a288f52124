"""Finding what a recipe names: an environment, a loss, a monitor.

A name is one that ships with libra (``shipped`` below), an entry point of the kind's group (how
another package adds one), or an import path ``package.module:attribute``. To ship another one is a
new file and a line here. Shipped names need no entry point, so a checkout that is only on
PYTHONPATH finds them; so does a host, which is sent this package without its metadata.

A package that adds a loss says so in its ``pyproject.toml``::

    [project.entry-points."libra.losses"]
    cispo = "my_package.losses:cispo"
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from libra_cli.config.errors import EnvironmentBroken, LibraError, RecipeError, TrainerError


@dataclass(frozen=True, slots=True)
class Registry:
    """Everything of one kind that a recipe can name."""

    kind: str
    """What a message calls it, in the singular."""
    group: str
    """The entry points' group."""
    shipped: Mapping[str, str]
    """Name -> ``package.module:attribute``."""
    error: type[LibraError]
    """What ``find`` raises."""

    def available(self) -> dict[str, str]:
        """Every name that can be used, and where it leads."""
        installed = {entry.name: entry.value for entry in entry_points(group=self.group)}
        return dict(sorted({**self.shipped, **installed}.items()))

    def check(self, name: str) -> None:
        """Look a name up without importing what it leads to; an import path is believed.

        Raises:
            LibraError: nothing is called that, with what probably was meant.
        """
        known = self.available()
        if ":" not in name and name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            meant = f"; did you mean {close[0]!r}?" if close else ""
            raise self.error(
                f"there is no {self.kind} {name!r}{meant}",
                hint=f"available: {', '.join(known)}; or an import path such as "
                f"my_package.my_module:my_{self.kind}",
            )

    def find(self, name: str) -> Any:
        """Import what a name leads to, something that can be called.

        Raises:
            LibraError: nothing is called that, or what it leads to cannot be imported or called.
        """
        self.check(name)
        target = name if ":" in name else self.available()[name]
        module = target.partition(":")[0]
        try:
            found = EntryPoint(name, target, self.group).load()
        except AttributeError as error:
            raise self._no_attribute(name, target, error) from error
        except Exception as error:  # a module of somebody else may raise anything when imported
            raise self.error(
                f"{self.kind} {name!r}: importing {module} failed: {type(error).__name__}: {error}",
                hint=f'python -c "import {module}"',
            ) from error
        if not callable(found):
            raise self.error(f"{self.kind} {name!r}: {target} is not callable")
        return found

    def _no_attribute(self, name: str, target: str, error: AttributeError) -> LibraError:
        module, _, attribute = target.partition(":")
        try:
            names = [n for n in dir(importlib.import_module(module)) if not n.startswith("_")]
        except Exception:  # noqa: BLE001  the import itself raised the AttributeError
            return self.error(f"{self.kind} {name!r}: importing {module} failed: {error}")
        close = difflib.get_close_matches(attribute, names, n=1)
        meant = f"; did you mean {close[0]!r}?" if close else ""
        return self.error(
            f"{self.kind} {name!r}: {module} has no {attribute!r}{meant}",
            hint=f"{module} has: {', '.join(names)}",
        )


ENVIRONMENTS = Registry(
    "environment",
    "libra.environments",
    {
        "calculator": "libra_cli.envs.calculator:Calculator",
        "pointer-chase": "libra_cli.envs.pointer_chase:PointerChase",
    },
    EnvironmentBroken,
)
"""Imported by the controller; ``envs.protocol`` says what one is."""
LOSSES = Registry(
    "loss",
    "libra.losses",
    {
        "grpo": "libra_cli.node.losses.grpo:grpo",
    },
    TrainerError,
)
"""Imported by the ranks on the train hosts only; ``node.losses.protocol`` says what one is."""
MONITORS = Registry(
    "monitor",
    "libra.monitors",
    {
        "jsonl": "libra_cli.runtime.monitors.jsonl:JsonLines",
    },
    RecipeError,
)
"""Imported by the controller; ``runtime.monitors.protocol`` says what one is."""
