"""One table, four texts: Markdown, CSV, LaTeX and HTML, each with its own escaping."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from fedshift.errors import InputError, visible
from fedshift.report.shapes import escape

Cell = str | int | float | None

MISSING = "–"

_LATEX = {
    "\\": r"\textbackslash{}",
    "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    # At the start of a row, [ or * would be read as an argument of the \\ before it.
    "[": "{[}",
    "*": "{*}",
    "–": "--",
    "±": r"$\pm$",
    "λ": r"$\lambda$",
    "∞": r"$\infty$",
    **{c: f"\\{c}" for c in "{}$&#_%"},
}


@dataclass(frozen=True)
class Table:
    """Rows under a header, with a format specification for the numbers of every column.

    `formats` has an entry for each column: `""` for text, or else what `format()` takes, such as
    `".1%"`; such a column is aligned to the right. Text is shown as it is in any column. None and
    NaN are shown as an en dash. Raises `InputError` if a row or `formats` is not as long as the
    header.
    """

    header: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    formats: tuple[str, ...]
    caption: str = ""

    def __post_init__(self) -> None:
        # Checked here, because zip would silently cut the longer side.
        parts: list[tuple[str, int]] = [("formats", len(self.formats))]
        parts += [(f"row {i}", len(row)) for i, row in enumerate(self.rows)]
        for what, length in parts:
            if length != len(self.header):
                raise InputError(
                    f"table: {what} has {length} cells; the header has {len(self.header)} "
                    f"({', '.join(self.header)})"
                )


def finite(value: Cell) -> Cell:
    """The cell, with ∞ for the text "inf", as which files hold infinity."""
    return "∞" if value == "inf" else value


def from_columns(
    first: str,
    names: Sequence[str],
    columns: Sequence[tuple[str, Sequence[Cell]]],
    spec: str,
    before: Sequence[tuple[str, Sequence[Cell], str]] = (),
) -> Table:
    """A table from columns of equal length.

    first, names: the first column. before: more columns, each with its own format. columns: the
    others, all with the format `spec`.
    """
    values = [*(v for _, v, _ in before), *(v for _, v in columns)]
    rows = tuple(zip(names, *values, strict=True))
    head = (first, *(b[0] for b in before), *(c[0] for c in columns))
    return Table(head, rows, ("", *(b[2] for b in before), *([spec] * len(columns))))


def show(value: Cell, spec: str = "") -> str:
    """A cell as text: numbers by their format, `–` for None and NaN, `∞` for infinity."""
    if value is None:
        return MISSING
    if isinstance(value, str):
        return value
    if math.isnan(value):
        return MISSING
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    return format(value, spec)


def shown(table: Table) -> tuple[tuple[str, ...], ...]:
    """The rows as text, before any escaping."""
    return tuple(
        tuple(show(cell, spec) for cell, spec in zip(row, table.formats, strict=True))
        for row in table.rows
    )


def markdown(table: Table, last: Sequence[str] = ()) -> str:
    """A GitHub-flavoured Markdown table; numbers are right-aligned, markup in names is escaped.

    last: one more column, its heading first, which is not escaped, for example with links.
    """
    rule = "|".join(["---:" if spec else "---" for spec in table.formats] + ["---"] * bool(last))
    rows = [[escape_markdown(cell) for cell in row] for row in (table.header, *shown(table))]
    lines = ["| " + " | ".join(row) + " |" for row in _with_last(rows, last)]
    text = "\n".join([lines[0], f"|{rule}|", *lines[1:]]) + "\n"
    return f"{escape_markdown(table.caption)}\n\n{text}" if table.caption else text


def _with_last(rows: list[list[str]], last: Sequence[str]) -> list[list[str]]:
    return [[*row, cell] for row, cell in zip(rows, last, strict=True)] if last else rows


def plain(table: Table) -> str:
    """Text in columns of equal width for a terminal, numbers to the right."""
    rows = tuple(tuple(map(visible, row)) for row in (table.header, *shown(table)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [table.caption] if table.caption else []
    for row in rows:
        cells = zip(row, widths, table.formats, strict=True)
        lines.append("  ".join(c.rjust(w) if spec else c.ljust(w) for c, w, spec in cells).rstrip())
    return "\n".join(lines)


def csv_text(table: Table) -> str:
    """RFC 4180 text with full-precision numbers; a missing number is an empty cell."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    rows = (table.header, *table.rows)
    writer.writerows([_csv_cell(cell) for cell in row] for row in rows)
    return out.getvalue()


def latex(table: Table) -> str:
    r"""A booktabs `tabular`; with a caption, inside a `table`."""
    columns = "".join("r" if spec else "l" for spec in table.formats)
    rows = [[escape_latex(cell) for cell in row] for row in (table.header, *shown(table))]
    for row in rows[1:]:
        row[:] = [_minus(c) if spec else c for c, spec in zip(row, table.formats, strict=True)]
    head, *body = (" & ".join(row) + r" \\" for row in rows)
    lines = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", head, r"\midrule", *body]
    lines += [r"\bottomrule", r"\end{tabular}"]
    if table.caption:
        caption = rf"\caption{{{escape_latex(table.caption)}}}"
        lines = [r"\begin{table}", r"\centering", caption, *lines, r"\end{table}"]
    return "\n".join(lines) + "\n"


def html_table(table: Table, last: Sequence[str] = ()) -> str:
    """An HTML `<table>`; cells of numbers have the class `num`. last: as in `markdown`."""
    kinds = [' class="num"' if spec else "" for spec in table.formats] + [""] * bool(last)
    caption = f"<caption>{escape(table.caption)}</caption>" if table.caption else ""
    rows = [[escape(cell) for cell in row] for row in (table.header, *shown(table))]
    names, *cells = (zip(row, kinds, strict=True) for row in _with_last(rows, last))
    head = "".join(f'<th scope="col"{kind}>{cell}</th>' for cell, kind in names)
    body = "\n".join(
        "<tr>" + "".join(f"<td{kind}>{cell}</td>" for cell, kind in row) + "</tr>" for row in cells
    )
    return f"<table>{caption}<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table>"


def escape_markdown(text: str) -> str:
    """Text that a Markdown table shows literally, on one line."""
    one_line = visible(" ".join(text.split()))
    # $ is escaped, too, since several viewers take it for the start of a formula.
    escaped = re.sub(r"([\\`*_{}\[\]|~$#])", r"\\\1", one_line)
    return escaped.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def escape_latex(text: str) -> str:
    """Text that LaTeX typesets literally, on one line."""
    return "".join(_LATEX.get(c, c) for c in visible(" ".join(text.split())))


def _minus(text: str) -> str:
    """The text with "-" before numbers as a minus sign, since LaTeX prints "-" as a hyphen."""
    return re.sub(r"(?<![^ (])-(?=[\d$])", "$-$", text)


def _csv_cell(cell: Cell) -> str:
    if cell is None or (isinstance(cell, float) and math.isnan(cell)):
        return ""
    # repr of a float is its shortest exact form.
    return visible(cell, keep="\n") if isinstance(cell, str) else repr(cell)
