"""Charts as SVG text, without scripts or external resources.

Every chart is an `<svg role="img">` with a `<title>`. Every mark whose value cannot be read off an
axis has a `<title>` of its own. Sizes are in CSS pixels of the drawing's own view box.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from fedshift.report import heat_map
from fedshift.report.charts import (
    Axis,
    BarChart,
    Bars,
    Chart,
    HeatMap,
    LineChart,
    Series,
    SideBars,
    Values,
    drawn_values,
    letters,
    log_ticks,
    logged,
    named,
    number_text,
    pointed,
    shifts,
    shortened,
    span_of,
    thinned,
    ticks,
)
from fedshift.report.columns import column_names
from fedshift.report.looks import Look, band_opacity, look_of, looks
from fedshift.report.shapes import INK, band, bar, document, dot, line, polyline, text, whisker

# Widths of charts: in the text of a page, and on a telephone of 390 px.
WIDE, NARROW = 760.0, 335.0
NOTES = re.compile(r"><title>[^<]*</title></(?:rect|circle|polygon)>")


def svg(chart: Chart, width: float = WIDE) -> str:
    """The chart as the text of an SVG element, `width` pixels wide, with its legend above."""
    match chart:
        case LineChart():
            drawing = _lines(chart, width)
        case BarChart():
            drawing = _columns(chart, width)
        case SideBars():
            drawing = _side_bars(chart, width)
        case HeatMap():
            drawing = heat_map.heat_map(chart, width)
    # Titles of marks show when a mouse rests on them. A telephone has none, so they are left out.
    return drawing if width >= WIDE else NOTES.sub(r"/>", drawing)


@dataclass(frozen=True)
class _Frame:
    """The plot area, and the ranges of data that it shows."""

    left: float
    top: float
    width: float
    height: float
    x: tuple[float, float]
    y: tuple[float, float]

    @property
    def base(self) -> float:
        return self.top + self.height

    def at(self, x: float, y: float) -> tuple[float, float]:
        across = (x - self.x[0]) / (self.x[1] - self.x[0])
        up = (y - self.y[0]) / (self.y[1] - self.y[0])
        return self.left + across * self.width, self.top + (1 - up) * self.height


def _lines(chart: LineChart, width: float) -> str:
    drawn = [pointed(thinned(logged(s, chart.x, chart.y))) for s in chart.series]
    xs = [v for s in drawn for v in s.x]
    ys = drawn_values(*(v for s in drawn for v in (s.y, s.low, s.high)))
    # A chart that says so, because the section around it is on the page in any case.
    if not xs or not drawn_values(*(s.y for s in drawn)):
        return _empty_chart(chart.title, width)
    of = looks([s.name for s in drawn], [s.look for s in drawn], [s.thin for s in drawn])
    pairs = zip(drawn, of, strict=True)
    legend, top = _legend([(s.name, k, s) for s, k in pairs if named(s, k, drawn, of)], width)
    y_ticks = log_ticks(min(ys), max(ys)) if chart.y.log else ticks(*span_of(ys, chart.y))
    # Fewer on a narrow axis, where labels would touch.
    steps = 7 if width == WIDE else 4
    x_ticks = _x_ticks(chart.x, xs, steps)
    left = _left(width)
    across = _span([*x_ticks, *xs])
    frame = _Frame(left, top + 8, width - left - 22, 260, across, _span([*y_ticks, *ys]))
    opacity = band_opacity(sum(bool(s.low) for s in drawn))
    placed = list(zip(drawn, of, shifts(drawn), strict=True))
    # All bands come before all lines: none hides another method's line.
    marks = [_bands(frame, s, look, shift, opacity) for s, look, shift in placed]
    marks += [_line(frame, s, look, chart, shift) for s, look, shift in placed]
    body = [legend, _y_axis(frame, chart.y, y_ticks), _x_axis(frame, chart.x, x_ticks), *marks]
    return document(chart.title, width, frame.base + 48, body)


def _columns(chart: BarChart, width: float) -> str:
    values = drawn_values(*(v for b in chart.bars for v in (b.values, b.high)))
    if not values:
        return _empty_chart(chart.title, width)
    of = looks([b.name for b in chart.bars], [b.look for b in chart.bars])
    legend, top = _legend([(b.name, k, None) for b, k in zip(chart.bars, of, strict=True)], width)
    # 1e-9: even if all bars are 0, the axis needs some length.
    scale = ticks(0.0, max(*values, 1e-9))
    left, groups = _left(width), chart.groups
    frame = _Frame(left, top + 8, width - left - 14, 220, (0.0, len(groups)), _span(scale))
    marks = [
        _bars(frame, chart, b, k, i) for i, (b, k) in enumerate(zip(chart.bars, of, strict=True))
    ]
    step = frame.width / len(groups)
    names, depth = column_names(groups, left, step, frame.base + 6, down=True)
    base = line(left, frame.base, left + frame.width, frame.base, INK)
    body = [legend, _y_axis(frame, chart.y, scale), *marks, base, names]
    return document(chart.title, width, frame.base + depth + 12, body)


def _side_bars(chart: SideBars, width: float) -> str:
    numbers = drawn_values(chart.values, chart.low, chart.high, (chart.mark,))
    if not numbers:
        return _empty_chart(chart.title, width)
    limit = 48 if width == WIDE else 22
    names = [shortened(name, limit) for name in chart.names]
    left = 14 + max(map(letters, names)) * 6.6
    scale = ticks(min(0.0, *numbers), max(1e-9, *numbers), 5 if width == WIDE else 3)
    plot = width - left - 64
    frame = _Frame(left, 6, plot, 19.0 * len(chart.names), _span(scale), (0.0, 1.0))
    body = [_x_axis(frame, chart.x, scale)]
    of = [look_of(name) for name in chart.of or chart.names]
    for i, (name, value) in enumerate(zip(chart.names, chart.values, strict=True)):
        y = frame.top + 19 * i
        body.append(text(left - 6, y + 13, names[i], "end", 11))
        words = "–" if value is None else number_text(value, chart.x.percent)
        zero, end = (frame.at(v, 0.0)[0] for v in (0.0, value or 0.0))
        # A small value is drawn two pixels wide, to be seen; one of exactly 0 is not drawn.
        long = max(2.0, abs(end - zero)) if value else 0.0
        body.append(bar(min(zero, end), y + 2, long, 15, of[i], f"{name}: {words}"))
        body.append(text(width - 8, y + 13, words, "end", 10))
        if (ends := _ends(chart.low, chart.high, i)) is not None:
            low, high = (frame.at(v, 0.0)[0] for v in ends)
            body.append(whisker(low, y + 9.5, high, y + 9.5))
    if chart.mark is not None:
        x, _ = frame.at(chart.mark, 0.0)
        body.append(line(x, frame.top, x, frame.base, INK))
    return document(chart.title, width, frame.base + 48, body)


def _x_ticks(axis: Axis, xs: Sequence[float], steps: int) -> list[float]:
    if axis.log:
        return list(log_ticks(min(xs), max(xs)))
    linear = ticks(*span_of(xs, axis), steps)
    return [t for t in linear if axis.percent or _tick_makes_sense(xs, t)]


def _stretches(series: Series) -> list[list[int]]:
    """The places of a series' values; a missing value ends one stretch and begins the next."""
    runs: list[list[int]] = [[]]
    for i, value in enumerate(series.y):
        if value is None or not math.isfinite(value):
            runs.append([])
        else:
            runs[-1].append(i)
    return [run for run in runs if run]


def _bands(frame: _Frame, series: Series, look: Look, shift: float, opacity: float) -> str:
    """The intervals around a line."""
    drawn = []
    for run in _stretches(series) if series.line else ():
        banded = [i for i in run if _ends(series.low, series.high, i) is not None]
        if not banded:
            continue
        low, high = (
            [frame.at(series.x[i] + shift, v[i] or 0.0) for i in banded]
            for v in (series.low, series.high)
        )
        # A band over a single point would have no area, so it gets an error bar.
        wide = len(banded) > 1
        drawn.append(band(high, low, look, opacity) if wide else whisker(*low[0], *high[0]))
    return "".join(drawn)


def _line(frame: _Frame, series: Series, look: Look, chart: LineChart, shift: float) -> str:
    """A line and its points."""
    runs, dots = _stretches(series), []
    for i in itertools.chain(*runs if series.points or not series.line else ()):
        a, b = series.x[i], series.y[i] or 0.0
        radius = 6.0 if not series.line else 2.0 if series.thin else 3.0
        up = number_text(chart.y.value(b), chart.y.percent)
        note = f"{series.name}: {chart.x.value(a):.6g}, {up}"
        dots.append(dot(frame.at(a + shift, b), radius, look, hollow=not series.line, note=note))
    lines = []
    for run in runs if series.line else ():
        points = [frame.at(series.x[i] + shift, series.y[i] or 0.0) for i in run]
        lines.append(polyline(points, look, thin=series.thin))
    return "".join(lines + dots)


def _bars(frame: _Frame, chart: BarChart, bars: Bars, look: Look, index: int) -> str:
    step = frame.width / len(chart.groups)
    # A fifth of each group is the gap to the next.
    width = step * 0.8 / len(chart.bars)
    parts = []
    for g, value in enumerate(bars.values):
        x = frame.left + g * step + step * 0.1 + index * width
        if value is None:
            parts.append(text(x + width / 2, frame.base - 3, "–", "middle", 9.5))
            continue
        # A small value is drawn two pixels high, to be seen; one of exactly 0 is not drawn.
        height = max(2.0, frame.base - frame.at(0.0, value)[1]) if value else 0.0
        note = f"{chart.groups[g]}, {bars.name}: {number_text(value, chart.y.percent)}"
        # 0.94 leaves a thin gap, so that equal bars do not merge.
        parts.append(bar(x, frame.base - height, width * 0.94, height, look, note))
        if (ends := _ends(bars.low, bars.high, g)) is not None:
            low, high = (frame.at(0.0, v)[1] for v in ends)
            parts.append(whisker(x + width * 0.47, low, x + width * 0.47, high))
    return "".join(parts)


def _ends(low: Values, high: Values, i: int) -> tuple[float, float] | None:
    """The i-th interval, or None."""
    a, b = (low[i], high[i]) if low and high else (None, None)
    return None if a is None or b is None else (a, b)


def _left(width: float) -> float:
    return 62.0 if width == WIDE else 60.0


def _y_axis(frame: _Frame, axis: Axis, scale: Sequence[float]) -> str:
    parts = []
    for t in scale:
        x, y = frame.at(frame.x[0], t)
        parts.append(line(x, y, x + frame.width, y, "var(--grid)"))
        words = number_text(axis.value(t), axis.percent, tick=True)
        parts.append(text(x - 6, y + 3.5, words, "end", 10))
    middle = frame.top + frame.height / 2
    parts.append(text(12, middle, shortened(axis.label, 44), "middle", 11, turn=-90))
    return "".join(parts)


def _x_axis(frame: _Frame, axis: Axis, scale: Sequence[float]) -> str:
    parts = [line(frame.left, frame.base, frame.left + frame.width, frame.base, INK)]
    for t in scale:
        x, _ = frame.at(t, frame.y[0])
        parts.append(line(x, frame.base, x, frame.base + 4, INK))
        words = number_text(axis.value(t), axis.percent, tick=True)
        parts.append(text(x, frame.base + 16, words, "middle", 10))
    # Under the middle of the axis, or as far to the left as a long label needs.
    right = frame.left + frame.width
    label = shortened(axis.label, int(right / 5.8))
    middle = min(frame.left + frame.width / 2, right + 10 - letters(label) * 2.9)
    parts.append(text(middle, frame.base + 36, label, "middle", 11))
    return "".join(parts)


def _legend(entries: Sequence[tuple[str, Look, Series | None]], page: float) -> tuple[str, float]:
    """(swatches and names, wrapped over lines; the height they take); a Series of None is a bar."""
    start = 62.0 if page == WIDE else 8.0
    x, y, parts = start, 14.0, []
    for name, look, series in entries:
        words = shortened(name, 44)
        width = 34 + letters(words) * 6.3 + 14
        if x > start and x + width > page:
            x, y = start, y + 18
        if series is None:
            parts.append(bar(x + 8, y - 9, 12, 11, look))
        elif series.line:
            parts.append(polyline([(x, y - 4), (x + 26, y - 4)], look, thin=series.thin))
        if series is not None and (series.points or not series.line):
            radius = 5.0 if not series.line else 3.0
            parts.append(dot((x + 14, y - 4), radius, look, hollow=not series.line))
        parts.append(text(x + 31, y, words, "start", 11))
        x += width
    return "".join(parts), y + 6


def _empty_chart(title: str, width: float) -> str:
    body = [text(width / 2, 24, "no values recorded", "middle", 12)]
    return document(title, width, 40, body)


def _span(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _tick_makes_sense(xs: Sequence[float], tick: float) -> bool:
    """Whether a tick makes sense: if all x are whole, there is none between two of them."""
    return tick == round(tick) or any(v != round(v) for v in xs)
