"""Heat maps as SVG text: clients by labels, clients by classes, clients by clients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fedshift.report.shapes import INK, document, rect, text
from fedshift.report.svg import FAINT, WIDTH, column_names, shortened

# Longer names of rows are shortened in the middle.
LONGEST = 48


@dataclass(frozen=True)
class Shades:
    """How values in [0, 1] become shades.

    label   the text before the legend's ramp
    empty   what a cell without a shade means
    zero    0 has a shade; otherwise its cell is empty, like that of None
    even    linear from 0 to 1; otherwise the square root up to the largest value, which keeps
            small shares visible
    apart   the last row is drawn with a gap above it
    """

    label: str
    empty: str
    zero: bool = False
    even: bool = False
    apart: bool = False

    def strength(self, value: float | None, largest: float) -> float | None:
        """How dark, 0 to 1; None for an empty cell."""
        if value is None or (value <= 0 and not self.zero):
            return None
        return min(1.0, value) if self.even else math.sqrt(min(1.0, value / largest))


LABELS = Shades("share of row, %:", "none", apart=True)
SENT = Shades("share of row, %:", "none")
ACCURACY = Shades("accuracy, %:", "no tests", zero=True, even=True)


@dataclass(frozen=True)
class _Row:
    """Position of a row, and size of its cells."""

    left: float
    y: float
    across: float
    down: float


def heat_map(
    title: str,
    rows: Sequence[str],
    columns: Sequence[str],
    values: Sequence[Sequence[float | None]],
    *,
    notes: Sequence[Sequence[str]],
    shades: Shades = LABELS,
) -> str:
    """Values in [0, 1] as shades; None for an empty cell.

    values, notes: one row per name in `rows`; a note is the text alternative of its cell.
    """
    # 6.2 px: a little more than the mean width of a letter at this size.
    left = 14 + min(LONGEST, max(len(r) for r in rows)) * 6.2
    across = min(68.0, (WIDTH - left - 10) / len(columns))
    # All rows on about one screen, as long as they stay legible.
    down = min(24.0, max(9.0, 520 / len(rows)))
    names, top = column_names(columns, left, across, 0.0, down=False)
    numbers = [v for row in values for v in row if v is not None]
    largest = 1.0 if shades.even else max(numbers, default=0.0) or 1.0
    body = [names]
    for i, name in enumerate(rows):
        is_last = shades.apart and i == len(rows) - 1
        place = _Row(left, top + i * down + (8 if is_last else 0), across, down)
        body.append(_name(place, name, is_last))
        body.append(_cells(place, values[i], notes[i], shades, largest))
        if is_last:
            body.append(rect(left, place.y, across * len(columns), down, "none", INK, 1.2))
    bottom = top + len(rows) * down + (20 if shades.apart else 12)
    body.append(_ramp(left, bottom, shades, largest))
    return document(title, WIDTH, bottom + 34, body)


def colour(strength: float) -> str:
    """White-blue at 0 to dark blue at 1."""
    stops = ((222, 235, 247), (107, 174, 214), (8, 48, 107))
    part = strength * 2
    low, high = stops[0 if part < 1 else 1], stops[1 if part < 1 else 2]
    mix = part - (0 if part < 1 else 1)
    return "#" + "".join(f"{round(a + (b - a) * mix):02x}" for a, b in zip(low, high, strict=True))


def _name(place: _Row, name: str, bold: bool) -> str:
    size = min(11.0, place.down - 0.5)
    y = place.y + place.down / 2 + size * 0.35
    return text(place.left - 6, y, shortened(name, LONGEST), "end", size, bold)


def _cells(
    place: _Row,
    values: Sequence[float | None],
    notes: Sequence[str],
    shades: Shades,
    largest: float,
) -> str:
    across, down = place.across, place.down
    parts = [rect(place.left, place.y, across * len(values), down, "#ffffff", FAINT, 0.5)]
    for j, (value, note) in enumerate(zip(values, notes, strict=True)):
        strength = shades.strength(value, largest)
        # The row's frame is drawn below, so an empty cell is white.
        if value is None or strength is None:
            continue
        x = place.left + j * across
        parts.append(rect(x, place.y, across, down, colour(strength), "#ffffff", 0.5, note))
        # In smaller cells numbers would overlap; the cell's title has them all the same.
        if across >= 27 and down >= 14:
            # White text on dark cells, for contrast.
            ink = "#ffffff" if strength > 0.67 else INK
            middle = x + across / 2, place.y + down / 2 + 3.6
            parts.append(text(*middle, _percent(value), "middle", 10, ink=ink))
    return "".join(parts)


def _ramp(left: float, y: float, shades: Shades, largest: float) -> str:
    x = left + 98
    parts = [text(left, y + 9, shades.label, "start", 10)]
    parts.append(rect(x, y, 22, 11, "#ffffff", "#9aa5b1", 0.8))
    parts.append(text(x + 11, y + 22, shades.empty, "middle", 9))
    for k in range(0 if shades.zero else 1, 6):
        share, left_edge = largest * k / 5, x + 12 + 24 * (k + shades.zero)
        parts.append(rect(left_edge, y, 24, 11, colour(shades.strength(share, largest) or 0.0)))
        parts.append(text(left_edge + 12, y + 22, _percent(share), "middle", 9))
    return "".join(parts)


def _percent(share: float) -> str:
    return f"{100 * share:.0f}" if share >= 0.0095 or share == 0 else "<1"
