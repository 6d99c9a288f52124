"""Whatever is printed, the terminal obeys libra alone."""

from __future__ import annotations

import ast
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from libra_cli.cli.terminal import PrintingConsole
from tests.package_graph import modules_with

OBEYED = "\x1b]52;c;aGk=\x07 \x9b31m \u202egnp.exe \x08\x7f"


def printed(*renderables: object) -> str:
    file = io.StringIO()
    console = PrintingConsole(file=file, width=200, force_terminal=True, color_system=None)
    for one in renderables:
        console.print(one, markup=False, highlight=False)
    return file.getvalue()


def table_of(text: str) -> Table:
    table = Table()
    table.add_column(Text(text))
    table.add_row(Text(text))
    return table


@pytest.mark.parametrize("wrap", [str, Text, table_of, lambda text: Panel(Text(text))])
def test_what_a_terminal_obeys_is_shown_as_its_escape(wrap):
    shown = printed(wrap(OBEYED))
    assert "\\x1b]52" in shown
    assert not {"\x1b", "\x07", "\x9b", "\u202e", "\x08", "\x7f"} & set(shown)


@given(text=st.text(st.characters()))
def test_any_text_is_printed_and_can_be_encoded(text):
    printed(text).encode()


def test_rich_itself_still_has_its_colours():
    file = io.StringIO()
    PrintingConsole(file=file, force_terminal=True, color_system="standard").print("[red]a[/]")
    assert "\x1b[31m" in file.getvalue()


def test_no_other_console_is_made():
    makers = {
        str(module)
        for module in modules_with("Console(")
        for node in module.nodes
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "Console"
    }
    assert makers == set()
