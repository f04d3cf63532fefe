"""The charts of a comparison."""

from __future__ import annotations

from collections.abc import Mapping

from fedshift.report.by_round import FEW
from fedshift.report.charts import Axis, Chart, LineChart, Series, SideBars
from fedshift.report.intervals import Moments
from fedshift.report.means import with_intervals

Curves = Mapping[str, Mapping[int, Moments]]


def drawings(
    title: str, axis: Axis, rows: Mapping[str, Moments | None], base: str, curves: Curves,
    units: str = "seeds",
) -> dict[str, Chart]:  # fmt: skip
    """Charts by caption: a bar for each method with a line at the base, and curves over rounds.

    units  what means are taken over: "seeds" or "targets"
    """
    means, low, high = with_intervals(tuple(rows.values()))
    mark = None if (m := rows[base]) is None else m.mean
    bars = SideBars(title, tuple(rows), means, axis, mark, low, high)
    what = f"{axis.label}, mean over {units}"
    whiskers = ", with its 95 % interval" * any(v is not None for v in low)
    drawn: dict[str, Chart] = {f"{what}{whiskers}; the line: {base}": bars}
    series = tuple(_series(name, curve) for name, curve in curves.items() if curve)
    if series:
        spans = {len(s.x) > 1 for s in series if any(v is not None for v in s.low)}
        shape = "bands" if True in spans else "upright lines"
        bands = f"; the {shape}: 95 % intervals" * bool(spans)
        lines = LineChart(f"{title} by round", series, Axis("round"), axis)
        drawn[f"{axis.label} by round, mean over {units}{bands}"] = lines
    return drawn


def _series(name: str, curve: Mapping[int, Moments]) -> Series:
    over, few = with_intervals(tuple(curve.values())), len(curve) <= FEW
    return Series(name, tuple(map(float, curve)), *over, points=few)
