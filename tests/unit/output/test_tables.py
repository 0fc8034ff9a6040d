"""Tables for a terminal, a pipe and Markdown."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.text import Text

from common.output import tables
from common.system.printable import LOOKALIKES, PLAIN

ROWS = [
    ["planned → taken", "MiB: weights 1.1 → 1.1, total 381.2 → 377.7"],
    ["lookalikes", "".join(LOOKALIKES)],
    ["others", "日本 é [bold]"],
]
HEADED = [["", "×2 ± 1", "b"], *([*row, "1"] for row in ROWS)]


def printed(
    monkeypatch: pytest.MonkeyPatch, encoding: str, is_terminal: bool, rows: list[list[str]]
) -> str:
    """Return what a table prints on an output, with the lookalikes that a run's output has."""
    written = io.BytesIO()
    stream = io.TextIOWrapper(written, encoding, PLAIN, newline="\n")
    monkeypatch.setattr("sys.stdout", stream)
    terminal = Console(force_terminal=is_terminal, width=70, color_system=None)
    monkeypatch.setattr(tables, "CONSOLE", terminal)
    if rows is HEADED:
        tables.print_table(rows)
    else:
        tables.print_facts(rows, title="the title →")
    stream.flush()
    return written.getvalue().decode(encoding)


@pytest.mark.parametrize("rows", [ROWS, HEADED], ids=["facts", "values"])
@pytest.mark.parametrize("is_terminal", [True, False])
@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "latin-1"])
def test_lines_have_the_same_width_without_unicode(
    encoding: str, is_terminal: bool, rows: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An output that has no arrow shows two characters, and the border moves with them."""
    lines = printed(monkeypatch, encoding, is_terminal, rows).splitlines()
    bordered = [line.rstrip() for line in lines if line.startswith(("+", "|"))]
    assert len(bordered) >= 5
    assert len({len(line) for line in bordered}) == 1
    assert any("->" in line for line in bordered) or rows is HEADED


def test_unicode_is_kept_where_the_output_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    text = printed(monkeypatch, "utf-8", True, ROWS)
    assert "planned → taken" in text
    assert "日本 é [bold]" in text


def test_several_columns_fold_long_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """A path of a run does not push the others off the screen; a single value has all the width."""
    path = "x" * 100
    monkeypatch.setattr(tables, "CONSOLE", Console(force_terminal=False))
    written = io.StringIO()
    monkeypatch.setattr("sys.stdout", written)
    tables.print_table([["", "a", "b"], ["path", path, path]])
    assert f" {'x' * tables.WIDEST_CELL} " in written.getvalue()
    written.truncate(0)
    tables.print_table([["", "a"], ["path", path]])
    assert path in written.getvalue()


@pytest.mark.parametrize("width", [60, 80, 100, 200])
@pytest.mark.parametrize("columns", [1, 3, 12, 30])
def test_columns_that_do_not_fit_follow_below(
    width: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No short value is folded, no line is too long, and each table repeats the names."""
    rows = [["run", *(f"a heading of column {index}" for index in range(columns))]]
    for name in ("first", "second"):
        rows.append([name, *(f"{name[0]}{'x' * (index % 10)}{index}" for index in range(columns))])
    monkeypatch.setattr(tables, "CONSOLE", Console(force_terminal=True, width=width))
    written = io.StringIO()
    monkeypatch.setattr("sys.stdout", written)
    tables.print_table(rows, title="the title")
    lines = [Text.from_ansi(line).plain for line in written.getvalue().splitlines()]
    assert max(map(len, lines)) <= width
    cells: dict[str, list[str]] = {"first": [], "second": []}
    for line in lines:
        name, *values = [text.strip() for text in line.strip("│").split("│")]
        if name in cells:
            cells[name] += values
    assert [cells[name] for name, *_ in rows[1:]] == [values for _, *values in rows[1:]]
    assert sum("the title" in line for line in lines) == 1
    natural = tables.table_width([len("second"), *(len(cell) for cell in rows[0][1:])])
    assert (natural <= width) == (len(lines) == 7)  # one table, with one line for the headings


def test_nothing_commands_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    text = printed(monkeypatch, "utf-8", False, [["name", "\x1b[31mred\x1b[0m"]])
    assert "\x1b" not in text
    assert "\\x1b[31mred" in text


def test_markdown_has_one_cell_for_each_column() -> None:
    assert tables.markdown_table([["", "a|b"], ["x", "1"]]) == [
        "|  | a\\|b |",
        "| --- | ---: |",
        "| x | 1 |",
    ]
