"""A comparison as drawings."""

from __future__ import annotations

from collections.abc import Mapping

from fedshift.report.svg import PALETTE, Axis, Series, line_chart, side_bars

Curves = Mapping[str, Mapping[int, float]]


def drawings(
    title: str, axis: Axis, means: Mapping[str, float | None], base: str, curves: Curves
) -> dict[str, str]:
    """SVG by caption: a bar per method with a line at the base, and the curves over rounds."""
    bars = side_bars(title, list(means), list(means.values()), axis, mark=means[base])
    drawn = {f"{axis.label}, mean over seeds; the line: {base}": bars}
    series = [
        Series(name, tuple(curve), tuple(curve.values()), i % len(PALETTE), i // len(PALETTE))
        for i, (name, curve) in enumerate(curves.items())
        if curve
    ]
    if series:
        caption = f"{axis.label} by round, mean over seeds"
        drawn[caption] = line_chart(f"{title} by round", series, Axis("round"), axis)
    return drawn
