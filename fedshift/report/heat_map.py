"""Heat maps as SVG text: clients by labels, clients by classes, clients by clients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedshift.report.charts import HeatMap, Shades, Values, letters, shortened
from fedshift.report.columns import column_names
from fedshift.report.shapes import INK, document, rect, text

# On stronger shades than this, light ink has the higher contrast.
STRONG = 0.6


@dataclass(frozen=True)
class _Row:
    """The position of a row, and the size of its cells."""

    left: float
    y: float
    across: float
    down: float


def heat_map(chart: HeatMap, width: float) -> str:
    """The map, `width` pixels wide."""
    rows, columns, shades, largest = chart.rows, chart.columns, chart.shades, chart.largest
    # Names are shortened to this many letters. 6.6 px is a little more than a letter's mean width.
    longest = 48 if width > 500 else 18
    short = [shortened(row, longest) for row in rows]
    left = 14 + max(map(letters, short)) * 6.6
    across = min(68.0, (width - left - 10) / len(columns))
    # As high as fits all rows on one screen, but never too low to read.
    down = min(24.0, max(10.0, 520 / len(rows)))
    names, top = column_names(columns, left, across, 0.0, down=False)
    body = [names]
    for i, name in enumerate(short):
        is_last = shades.apart and i == len(rows) - 1
        place = _Row(left, top + i * down + (8 if is_last else 0), across, down)
        size = min(11.0, max(9.5, down - 0.5))
        y = place.y + down / 2 + size * 0.35
        body.append(text(left - 6, y, name, "end", size, is_last))
        body.append(_cells(place, chart.values[i], chart.notes[i], shades, largest))
        if is_last:
            frame = f'stroke="{INK}" stroke-width="1.2"'
            body.append(rect(left, place.y, across * len(columns), down, "none", style=frame))
    bottom = top + len(rows) * down + (20 if shades.apart else 12)
    body.append(_ramp(left if width > 500 else 8.0, bottom, shades, largest))
    return document(chart.title, width, bottom + 34, body)


def _cells(
    place: _Row, values: Values, notes: Sequence[str], shades: Shades, largest: float
) -> str:
    across, down = place.across, place.down
    edge = 'stroke="var(--grid)" stroke-width="0.5"'
    # One rectangle for the whole row, which shows through empty cells.
    parts = [rect(place.left, place.y, across * len(values), down, "var(--paper)", style=edge)]
    for j, (value, note) in enumerate(zip(values, notes, strict=True)):
        strength = shades.strength(value, largest)
        if value is None or strength is None:
            continue
        x = place.left + j * across
        parts.append(_shade(x, place.y, across, down, strength, note))
        # In smaller cells numbers would overlap. The cell's title still has them.
        if across >= 27 and down >= 14:
            ink = "var(--strong)" if strength > STRONG else "var(--weak)"
            middle = x + across / 2, place.y + down / 2 + 3.6
            parts.append(text(*middle, _percent(value), "middle", 10, ink=ink))
    return "".join(parts)


def _shade(x: float, y: float, width: float, height: float, strength: float, note: str = "") -> str:
    # At least 0.12, so that the weakest shade still differs from an empty cell.
    opacity = f'fill-opacity="{0.12 + 0.88 * strength:.3f}"'
    gap = min(0.5, width / 8)
    return rect(x + gap / 2, y + gap / 2, width - gap, height - gap, "var(--heat)", note, opacity)


def _ramp(left: float, y: float, shades: Shades, largest: float) -> str:
    x = left + 98
    parts = [text(left, y + 9, shades.label, "start", 10)]
    parts.append(rect(x, y, 22, 11, "var(--paper)", style='stroke="var(--rule)"'))
    parts.append(text(x + 11, y + 22, shades.empty, "middle", 10))
    for k in range(0 if shades.zero else 1, 6):
        share, left_edge = largest * k / 5, x + 12 + 24 * (k + shades.zero)
        parts.append(_shade(left_edge, y, 24, 11, shades.strength(share, largest) or 0.0))
        parts.append(text(left_edge + 12, y + 22, _percent(share), "middle", 10))
    return "".join(parts)


def _percent(share: float) -> str:
    return f"{100 * share:.0f}" if share >= 0.0095 or share == 0 else "<1"
