"""Tables of text, with the same look everywhere: for a terminal, a pipe or a file, and Markdown.

A table is a list of rows, and a row is a list of cells. Cells may have any characters, because
those that a terminal would obey are escaped.
"""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from common.console.messages import CONSOLE
from common.system.printable import for_output, printable

WIDEST_CELL = 40  # characters; longer cells are folded in a table with several columns of values
FILE_WIDTH = 160  # characters of a line, where there is no terminal to fit into

Row = Sequence[str]


def print_table(rows: Sequence[Row], *, title: str = "") -> None:
    """Print a table of values to the terminal, or with longer lines into a pipe or a file.

    Args:
        rows: the first row is the heading. The first column has names, and the others have values.
    """
    heading, *body = rows
    table = Table(title=cell(title) if title else None, title_justify="left", header_style="bold")
    table.add_column(cell(heading[0]), no_wrap=True)
    widest = WIDEST_CELL if len(heading) > 2 else None
    for name in heading[1:]:
        table.add_column(cell(name), justify="right", overflow="fold", max_width=widest)
    for row in body:
        table.add_row(*map(cell, row))
    console().print(table)


def print_facts(rows: Sequence[Row], *, title: str) -> None:
    """Print a table of two columns without a heading.

    Args:
        rows: pairs of a name and a text.
    """
    table = Table(title=cell(title), title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")  # a long path continues on the next line
    for row in rows:
        table.add_row(*map(cell, row))
    console().print(table)


def console() -> Console:
    """Return the console to print on: the terminal, or one with longer lines for a pipe or file."""
    return CONSOLE if CONSOLE.is_terminal else Console(width=max(CONSOLE.width, FILE_WIDTH))


def cell(text: str) -> Text:
    """Return the text of a cell, in characters that the output has.

    Characters are replaced before the width of the columns is measured, because a lookalike may be
    longer: an ASCII terminal shows two characters for an arrow.
    """
    return Text(for_output(printable(text), CONSOLE.encoding))


def markdown_table(rows: Sequence[Row]) -> list[str]:
    """Return the lines of a table in Markdown, with all columns but the first aligned right.

    Args:
        rows: as for `print_table`.
    """
    heading, *body = [[printable(text).replace("|", "\\|") for text in row] for row in rows]
    separator = ["---", *("---:" for _ in heading[1:])]
    return [f"| {' | '.join(row)} |" for row in (heading, separator, *body)]
