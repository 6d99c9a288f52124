"""Usages write arguments in one way."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import typer.main
from typer.core import TyperCommand, TyperGroup

from libra_cli.cli.main import app

ARGUMENT = re.compile(r"(\[[A-Z_|]+\]|\{[A-Z_|]+\})(\.\.\.)?")
"""As {RECIPE}, which must be given, [RUN_DIR|RECIPE], which may, and [HOST]..., several."""


def commands(group: TyperGroup, name: str = "libra") -> Iterator[tuple[str, TyperCommand]]:
    for command in group.commands.values():
        path = f"{name} {command.name}"
        if isinstance(command, TyperGroup):
            yield from commands(command, path)
        elif isinstance(command, TyperCommand):
            yield path, command


def all_commands() -> dict[str, TyperCommand]:
    whole = typer.main.get_command(app)
    assert isinstance(whole, TyperGroup)
    return dict(commands(whole))


@pytest.mark.parametrize("name", all_commands())
def test_an_argument_is_a_word_in_capitals(name):
    command = all_commands()[name]
    context = typer.Context(command)
    pieces = [piece for piece in command.collect_usage_pieces(context) if piece != "[OPTIONS]"]
    assert [piece for piece in pieces if not ARGUMENT.fullmatch(piece)] == []
