"""Finds files that come with libra and are no code: ``templates/`` and ``recipes/``.

The wheel carries both inside the package; an editable install and a checkout have them beside it.
"""

from __future__ import annotations

from pathlib import Path

from libra_cli.config.errors import StateError

_PACKAGE = Path(__file__).resolve().parents[1]
PLACES = (_PACKAGE, _PACKAGE.parent)
"""Directories that hold the two folders, in the order in which they are looked through."""


def package_file(folder: str, name: str) -> Path:
    """Return the path of ``<folder>/<name>``.

    Raises:
        StateError: this installation does not have it.
    """
    paths = [place / folder / name for place in PLACES]
    found = next((path for path in paths if path.is_file()), None)
    if found is None:
        raise StateError(
            f"{folder}/{name} is missing: it is neither {paths[0]} nor {paths[1]}",
            hint="pip install --force-reinstall libra-rl",
        )
    return found
