"""A page of ``libra help`` in a terminal: nothing is cut off, however narrow it is."""

from __future__ import annotations

from typing import ClassVar

from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import Markdown, MarkdownElement, TableElement
from rich.table import Table

from libra_cli.app.pages import for_terminal


class _FoldedTable(TableElement):
    """A table whose long words go on in the next line; rich would cut them off."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for part in super().__rich_console__(console, options):
            if isinstance(part, Table):
                for column in part.columns:
                    column.overflow = "fold"
            yield part


class PageView(Markdown):
    """A page as rich shows Markdown, with links as commands and tables folded."""

    elements: ClassVar[dict[str, type[MarkdownElement]]] = {
        **Markdown.elements,
        "table_open": _FoldedTable,
    }

    def __init__(self, page: str) -> None:
        super().__init__(for_terminal(page), hyperlinks=False)
