"""Long tables on a page: folded away, and cut where a page would grow beyond what browsers open."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fedshift.report.layout import fold
from fedshift.report.shapes import escape
from fedshift.report.tables import Table

# Cells of all tables of one section: 25 bytes each, so half a megabyte.
MOST_CELLS = 20_000


def sampled(table: Table, where: str, cells: int = MOST_CELLS) -> Table:
    """The table, or every k-th row and the last one, as its caption then says; where: all of it."""
    most = max(2, cells // len(table.header))
    if len(table.rows) <= most:
        return table
    step = -(-len(table.rows) // most)
    rows = (*table.rows[:-1:step], table.rows[-1])
    words = f"every {step}. row and the last one; all {len(table.rows)} are in {where}"
    return replace(table, rows=rows, caption=f"{table.caption} ({words})".strip())


def each_run(tables: Sequence[Table], lines: int, where: str) -> list[str]:
    """The tables of single runs; folded together where some of the page's lines have several."""
    shown = [fold(sampled(t, where, MOST_CELLS // len(tables))) for t in tables]
    if len(shown) <= lines:
        return shown
    name = escape(f"Each of the {len(shown)} runs")
    return [f"<details><summary>{name}</summary>{''.join(shown)}</details>"]
