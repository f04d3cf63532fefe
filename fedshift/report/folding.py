"""Long tables on a page: folded away, and thinned out before the page gets too large to open."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fedshift.record.folder import CLIENTS
from fedshift.report.layout import fold, table
from fedshift.report.means import pool_rows
from fedshift.report.pools import Pool
from fedshift.report.shapes import escape
from fedshift.report.splits import Split
from fedshift.report.tables import Table

# Cells of all tables of a section. At 25 bytes each they take half a megabyte.
MOST_CELLS = 20_000


def sampled(whole: Table, where: str, cells: int = MOST_CELLS) -> Table:
    """The table; if it is too long, every k-th row and the last one.

    The caption then says so, and that all rows are in `where`.
    """
    most = max(2, cells // len(whole.header))
    if len(whole.rows) <= most:
        return whole
    step = -(-len(whole.rows) // most)
    rows = (*whole.rows[:-1:step], whole.rows[-1])
    words = f"every {step}. row and the last one; all {len(whole.rows)} are in {where}"
    return replace(whole, rows=rows, caption=f"{whole.caption} ({words})".strip())


def each_run(tables: Sequence[Table], lines: int, where: str) -> list[str]:
    """The tables of single runs; folded into one if any line of the page has several runs."""
    shown = [fold(sampled(t, where, MOST_CELLS // len(tables))) for t in tables]
    if len(shown) <= lines:
        return shown
    return [folded(f"Each of the {len(shown)} runs", "".join(shown))]


def folded(name: str, content: str) -> str:
    """Content that is hidden until a reader clicks on `name`."""
    return f"<details><summary>{escape(name)}</summary>{content}</details>"


def pool_tables(each: Table, lines: Sequence[Pool]) -> list[str]:
    """A table with a row for each line, and below it, folded, one with a row for each run."""
    over = pool_rows(each, lines)
    if over is each:
        return [table(each)]
    return [table(over), folded(f"Each of the {len(each.rows)} runs", table(each))]


def of_clients(rows: Table, split: Split) -> Table:
    """A table with a row for each client, and perhaps more rows below.

    If it is too long for a page, only the clients with the largest weights are kept.
    """
    count, kept = len(split.runs[0].clients), split.drawn(len(rows.header))
    if len(rows.rows) * len(rows.header) <= MOST_CELLS or len(kept) == count:
        return rows
    words = f"the {len(kept)} clients with the largest weights; all {count} are in {CLIENTS}"
    shown = (*(rows.rows[i] for i in kept), *rows.rows[count:])
    return replace(rows, rows=shown, caption=f"{rows.caption} ({words})".strip())
