"""Which arguments of environments are paths, and where relative ones lead."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

HOST = "host"
PODMAN = "podman"
"""What ``base`` of ``harbor`` may be in place of a path: the host's own programs and libraries, or
the image that a task names, unpacked by podman."""
_PATHS: Mapping[str, tuple[str, ...]] = {
    "harbor": ("tasks", "base", "bases", "cache"),
    "textworld": ("games",),
}
"""The arguments of each environment that are a path, or a mapping to paths."""


def absolute(environment: str, arguments: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """Return arguments with their relative paths made absolute.

    They begin in ``directory``, the recipe's, or in the working directory where only that has what
    they name. ``~`` stays, as on another host it is another home.
    """

    def found(path: str) -> str:
        if path in (HOST, PODMAN) or path.startswith("~"):
            return path
        beside = (directory / path).resolve()
        return str(Path(path).resolve() if Path(path).exists() and not beside.exists() else beside)

    return _changed(environment, arguments, found)


def by_name(environment: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments with only the last part of each path, which stays where directories move."""
    return _changed(environment, arguments, lambda path: Path(path).name)


def _changed(
    environment: str, arguments: Mapping[str, Any], change: Callable[[str], str]
) -> dict[str, Any]:
    changed = dict(arguments)
    for name in _PATHS.get(environment, ()):
        match changed.get(name):
            case str(path):
                changed[name] = change(path)
            case dict(several):
                changed[name] = {
                    key: change(path) if isinstance(path, str) else path
                    for key, path in several.items()
                }
            case _:
                pass
    return changed
