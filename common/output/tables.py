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
# Characters; a table continues below rather than fold a cell that is not longer than this.
SHORT_CELL = 18
FILE_WIDTH = 160  # characters of a line, where there is no terminal to fit into

Row = Sequence[str]


def print_table(rows: Sequence[Row], *, title: str = "") -> None:
    """Print a table of values to the terminal, or with longer lines into a pipe or a file.

    If the columns do not fit, further ones follow in tables below, with the first column repeated.

    Args:
        rows: the first row is the heading. The first column has names, and the others have values.
    """
    output = console()
    cells = [[cell(text) for text in row] for row in rows]
    natural_widths = widest_cells(cells)
    if len(natural_widths) > 2:
        value_widths = [min(width, WIDEST_CELL) for width in natural_widths[1:]]
        natural_widths = [natural_widths[0], *value_widths]
    smallest_widths = smallest_readable_widths(cells, natural_widths)
    for block in blocks_of_columns(smallest_widths, output.width):
        widths = fitted_widths(
            [smallest_widths[index] for index in block],
            [natural_widths[index] for index in block],
            output.width,
        )
        block_cells = [[row[index] for index in block] for row in cells]
        output.print(rich_table(block_cells, widths, title))
        title = ""


def rich_table(cells: Sequence[Sequence[Text]], widths: Sequence[int], title: str) -> Table:
    """Return a table whose columns have these widths; see `print_table` for its rows."""
    heading, *body = cells
    table = Table(title=cell(title) if title else None, title_justify="left", header_style="bold")
    table.add_column(heading[0], no_wrap=True)
    for name, width in zip(heading[1:], widths[1:], strict=True):
        table.add_column(name, justify="right", overflow="fold", width=width)
    for row in body:
        table.add_row(*row)
    return table


def widest_cells(cells: Sequence[Sequence[Text]]) -> list[int]:
    """Return the width of each column's widest cell, in characters of the terminal."""
    return [max(text.cell_len for text in column) for column in zip(*cells, strict=True)]


def smallest_readable_widths(
    cells: Sequence[Sequence[Text]], natural_widths: Sequence[int]
) -> list[int]:
    """Return the smallest width of each column, in characters of the terminal.

    A heading may be wrapped between words, and a value with more than `SHORT_CELL` characters may
    be folded. The first column is neither wrapped nor folded.
    """
    heading, *body = cells
    widths = [natural_widths[0]]
    for index in range(1, len(heading)):
        words = heading[index].split()
        widest = max(text.cell_len for text in [*words, *(row[index] for row in body)])
        widths.append(min(widest, SHORT_CELL))
    return widths


def blocks_of_columns(widths: Sequence[int], line_width: int) -> list[list[int]]:
    """Return the columns of each table that fits into a line, as indices.

    Each block begins with the first column, and has at least one other.
    """
    blocks: list[list[int]] = []
    for index in range(1, len(widths)):
        current = [*blocks[-1], index] if blocks else []
        if current and table_width([widths[column] for column in current]) <= line_width:
            blocks[-1] = current
        else:
            blocks.append([0, index])
    return blocks


def fitted_widths(smallest: Sequence[int], natural: Sequence[int], line_width: int) -> list[int]:
    """Return the widths of columns: natural ones if they fit, otherwise as wide as a line allows.

    Args:
        smallest: the width that each column needs.
        natural: the width with which nothing in the column is wrapped or folded.
    """
    widths = list(smallest)
    spare = line_width - table_width(widths)
    while spare > 0:
        narrow = [index for index, width in enumerate(widths) if width < natural[index]]
        if not narrow:
            break
        for index in narrow[:spare]:
            widths[index] += 1
            spare -= 1
    return widths


def table_width(widths: Sequence[int]) -> int:
    """Return the width of a table with its borders, from those of its columns."""
    return sum(width + len("│ ") + len(" ") for width in widths) + len("│")


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
