"""Bars with large letters, for pictures that are read on a phone, too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fedshift.report.shapes import INK, line, rect, text

WIDTH, LEFT, LINE, SIZE = 420.0, 66.0, 21.0, 13.0
EMPTY = "var(--grid)"


class Bar(NamedTuple):
    """A share in [0, 1] as a bar; words at its end."""

    name: str
    share: float
    words: str
    colour: str


def bars(
    heading: str, rows: Sequence[Bar], y: float, left: float = LEFT, mark: float | None = None
) -> tuple[str, float]:
    """A heading at y, then a row per bar, from 0 to 100 %; a line at `mark`; where they end."""
    parts = [text(left, y, heading, "start", SIZE)]
    top, long = y + 8, WIDTH - left - 70
    for i, (name, share, words, colour) in enumerate(rows):
        place = top + LINE * i
        parts.append(text(left - 8, place + 15, name, "end", SIZE))
        parts.append(rect(left, place + 1, long, LINE - 3, EMPTY))
        parts.append(rect(left, place + 1, long * share, LINE - 3, colour))
        parts.append(text(WIDTH - 12, place + 15, words, "end", SIZE, bold=True))
    end = top + LINE * len(rows)
    if mark is not None:
        parts.append(line(left + long * mark, top, left + long * mark, end, INK, 2.0))
    return "".join(parts), end + 10
