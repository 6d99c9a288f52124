"""Reads files of ``templates/``."""

from __future__ import annotations

from libra_cli.runtime.package_files import package_file


def template(name: str) -> str:
    """Read ``templates/<name>``.

    Raises:
        StateError: this installation does not have it.
    """
    return package_file("templates", name).read_text(encoding="utf-8")
