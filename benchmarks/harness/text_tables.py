"""Tables of results: Markdown for documents, and aligned columns for a terminal or a log."""

from __future__ import annotations

from collections.abc import Sequence

Row = Sequence[str]
RULES = {"l": "---", "c": ":-:", "r": "--:"}


def markdown_table(rows: Sequence[Row], alignment: str) -> list[str]:
    """Return the lines of a table in Markdown. A `|` in a cell is escaped.

    Args:
        rows: the first is the heading.
        alignment: a letter for each column: `l` for left, `c` for centred, `r` for right.
    """
    heading, *body = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    names = "".join(f" {name} |" if name else " |" for name in heading)
    rule = "|".join(RULES[letter] for letter in alignment)
    return [f"|{names}", f"|{rule}|", *(f"| {' | '.join(row)} |" for row in body)]


def aligned_table(rows: Sequence[Row], names: int) -> str:
    """Return a table in columns of equal width.

    Args:
        rows: the first is the heading.
        names: how many columns, from the left, are aligned to the left. The others are aligned to
            the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row[:names], widths[:names], strict=True)]
        cells += [
            cell.rjust(width) for cell, width in zip(row[names:], widths[names:], strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
