"""Reads files of ``templates/``.

The wheel carries them as ``libra_cli/templates``; an editable install and a checkout have them
beside the package.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from libra_cli.config.errors import StateError


def template(name: str) -> str:
    """Read ``templates/<name>``.

    Raises:
        StateError: this installation does not have it.
    """
    installed = resources.files("libra_cli") / "templates" / name
    checkout = Path(__file__).resolve().parents[3] / "templates" / name
    for place in (installed, checkout):
        if place.is_file():
            return place.read_text(encoding="utf-8")
    raise StateError(
        f"the template {name} is in neither {installed} nor {checkout}",
        hint="pip install --force-reinstall libra-rl",
    )
