"""Write a comparison as one web page: text, tables, and curves that show values under the pointer.

The page is a single file that loads nothing. Its security policy allows only its own script and
style, by their digests, so a name or note of a run could not run code even if it were not escaped.
"""

import base64
import hashlib
import html
import json
import re
from collections.abc import Sequence
from pathlib import Path

from common.errors import UserError
from common.storage.files import require_writable, write_text
from common.system.printable import printable
from common.tools.compare.comparison import Comparison
from common.tools.compare.group_table import has_repetitions
from common.tools.compare.page_data import page_data
from common.tools.compare.report import Report, TitledTable, report_of

FOLDER = Path(__file__).with_name("web")
SUFFIXES = (".html", ".htm")
PLACEHOLDER = re.compile(r"\{\{(\w+)\}\}")
# The escapes in JSON of characters that end a script element or begin other markup.
SCRIPT_ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"}


def require_page_path(file: Path) -> None:
    """Raise a `UserError` if a path can't be written, or its name is not that of a web page."""
    # If a user names a run's own file by mistake, that file must not be overwritten.
    if file.suffix.lower() not in SUFFIXES:
        raise UserError(
            f"--html {file} is not the name of a web page", advice="pass a name that ends in .html"
        )
    require_writable(file, f"--html {file}")


def write_page(comparison: Comparison, file: Path) -> None:
    """Write a comparison as a web page.

    Args:
        file: a path that `require_page_path` accepts.

    Raises:
        UserError: the file can't be written.
    """
    write_text(file, page_of(comparison))


def page_of(comparison: Comparison) -> str:
    """Return the page as HTML."""
    report = report_of(comparison, most_pairs=None)
    style = read_part("page.css")
    script = read_part("page.js")
    baseline = comparison.runs[0].saved_config
    contents = {
        "style": style,
        "script": script,
        "style_digest": digest_for_policy(style),
        "script_digest": digest_for_policy(script),
        "subject": text_as_html(f"{baseline.recipe} on {baseline.data.name}"),
        # An HTML attribute of the legend's entries for means. It hides them if there are no means.
        "repetitions": "" if has_repetitions(comparison) else "hidden",
        "warnings": warnings_as_html(report),
        "tables": "\n".join(map(table_as_html, report.tables)),
        "lines": "\n".join(f"<p>{text_as_html(line)}</p>" for line in report.lines),
        "data": json_for_script(page_data(comparison)),
    }
    return PLACEHOLDER.sub(lambda match: contents[match[1]], read_part("page.html"))


def read_part(name: str) -> str:
    """Return a part of the page. Its line ends, and so its digest, are the same on every system."""
    return (FOLDER / name).read_text(encoding="utf-8")


def digest_for_policy(text: str) -> str:
    """Return the digest by which a content security policy allows an inline script or style."""
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return f"sha256-{base64.b64encode(digest).decode('ascii')}"


def text_as_html(text: str) -> str:
    """Return HTML that shows a text as it is: no part of the text acts as markup."""
    return html.escape(printable(text))


def json_for_script(value: object) -> str:
    """Return JSON that stays within its script element, whatever its texts are."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    for character, escape in SCRIPT_ESCAPES.items():
        text = text.replace(character, escape)
    return text


def warnings_as_html(report: Report) -> str:
    """Return the warnings as a list in HTML; an empty text if there are none."""
    if not report.warnings:
        return ""
    items = [
        f"<li><strong>{text_as_html(label)}</strong> {text_as_html(text)}</li>"
        for label, text in report.warnings
    ]
    return "\n".join(['<ul class="warnings">', *items, "</ul>"])


def table_as_html(table: TitledTable) -> str:
    """Return a table that scrolls sideways if it is wider than the window."""
    heading, *body = table.rows
    name = table.title or "runs"
    return "\n".join(
        [
            f'<div class="wide" role="region" tabindex="0" aria-label="{text_as_html(name)}">',
            "<table>",
            f"<caption>{text_as_html(table.title)}</caption>" if table.title else "",
            f"<thead>{row_as_html(heading, 'col')}</thead>",
            "<tbody>",
            *(row_as_html(row, "row") for row in body),
            "</tbody>",
            "</table>",
            "</div>",
        ]
    )


def row_as_html(cells: Sequence[str], scope: str) -> str:
    """Return a row of a table.

    Args:
        scope: "col" if all cells are headings of columns, "row" if the first cell is the row's
            heading.
    """
    first, *others = map(text_as_html, cells)
    tag = "th" if scope == "col" else "td"
    attribute = ' scope="col"' if scope == "col" else ""
    # The corner of a table may be empty, and is not a heading then.
    first_cell = f'<th scope="{scope}">{first}</th>' if first else "<td></td>"
    other_cells = "".join(f"<{tag}{attribute}>{cell}</{tag}>" for cell in others)
    return f"<tr>{first_cell}{other_cells}</tr>"
