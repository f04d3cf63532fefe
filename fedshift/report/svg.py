"""Charts as SVG text: grouped bars, lines. No script, no external resource.

Every chart is an `<svg role="img">` with a `<title>`, and every mark whose value cannot be read
off an axis has a `<title>` of its own. Sizes are in CSS pixels of the drawing's own view box.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fedshift.report.shapes import INK, document, dot, line, polyline, rect, text

# Okabe and Ito's (2008) hues, distinguishable with common colour-vision deficiencies, darkened
# until each has a contrast of at least 3 to 1 with white (WCAG 2.1, criterion 1.4.11).
PALETTE = ("#5f6b76", "#0072b2", "#d55e00", "#00805a", "#a3548f", "#8a6d00", "#2b8cbe", "#7a3b10")
FAINT = "#e3e8ed"
WIDTH = 760.0


@dataclass(frozen=True)
class Series:
    """A line or a set of points: x [P], y [P] (None where missing); `colour` indexes PALETTE."""

    name: str
    x: tuple[float, ...]
    y: tuple[float | None, ...]
    colour: int = 0
    dash: int = 0
    line: bool = True
    points: bool = False


@dataclass(frozen=True)
class Bars:
    """One value per group [G], None where missing."""

    name: str
    values: tuple[float | None, ...]
    colour: int = 0


@dataclass(frozen=True)
class Axis:
    """What an axis shows: `percent` writes 0.5 as 50 %, `zero` lets it start there."""

    label: str
    percent: bool = False
    zero: bool = False


@dataclass(frozen=True)
class _Frame:
    """The plot area and the data range it shows."""

    left: float
    top: float
    width: float
    height: float
    x: tuple[float, float]
    y: tuple[float, float]

    def at(self, x: float, y: float) -> tuple[float, float]:
        across = (x - self.x[0]) / (self.x[1] - self.x[0])
        up = (y - self.y[0]) / (self.y[1] - self.y[0])
        return self.left + across * self.width, self.top + (1 - up) * self.height


def line_chart(title: str, series: Sequence[Series], x: Axis, y: Axis) -> str:
    """Several series over one pair of axes, with a legend; missing points break a line."""
    xs = [v for s in series for v in s.x]
    ys = [v for s in series for v in s.y if v is not None and math.isfinite(v)]
    # An empty chart with a sentence, since the section around it is there all the same.
    if not xs or not ys:
        return _empty_chart(title)
    legend, top = _legend([(s.name, s.colour, s.dash, s.line) for s in series])
    y_ticks = ticks(*_range(ys, y))
    # Seven on the wide axis, five on the other: labels must not touch.
    x_ticks = [t for t in ticks(*_range(xs, x), 7) if x.percent or _tick_makes_sense(xs, t)]
    frame = _Frame(62, top + 8, WIDTH - 84, 260, _span([*x_ticks, *xs]), _span(y_ticks))
    marks = [_series(frame, s, y) for s in series]
    body = [legend, _y_axis(frame, y, y_ticks), _x_axis(frame, x, x_ticks), *marks]
    return document(title, WIDTH, frame.top + frame.height + 48, body)


def grouped_bars(title: str, groups: Sequence[str], bars: Sequence[Bars], y: Axis) -> str:
    """Bars side by side per group, from zero; a missing value is left out and says so."""
    values = [v for b in bars for v in b.values if v is not None]
    if not values:
        return _empty_chart(title)
    legend, top = _legend([(b.name, b.colour, -1, True) for b in bars])
    # 1e-9: bars that are all 0 still need an axis of some length.
    scale = ticks(0.0, max(*values, 1e-9))
    frame = _Frame(62, top + 8, WIDTH - 76, 220, (0.0, float(len(groups))), _span(scale))
    step = frame.width / len(groups)
    marks = [_bars(frame, groups, b, i, len(bars), y) for i, b in enumerate(bars)]
    names, depth = column_names(groups, frame.left, step, frame.top + frame.height + 6, down=True)
    body = [legend, _y_axis(frame, y, scale), *marks, names]
    return document(title, WIDTH, frame.top + frame.height + depth + 12, body)


def side_bars(
    title: str,
    names: Sequence[str],
    values: Sequence[float | None],
    axis: Axis,
    *,
    mark: float | None = None,
) -> str:
    """A bar per name from the left, from zero, its value on the right edge; a line at `mark`."""
    numbers = [v for v in (*values, mark) if v is not None]
    if not numbers:
        return _empty_chart(title)
    left = 14 + min(48, max(map(len, names))) * 6.2
    scale = ticks(0.0, max(*numbers, 1e-9))
    frame = _Frame(left, 6, WIDTH - left - 64, 19.0 * len(names), _span(scale), (0.0, 1.0))
    body = [_x_axis(frame, axis, scale)]
    for i, (name, value) in enumerate(zip(names, values, strict=True)):
        y = frame.top + 19 * i
        body.append(text(left - 6, y + 13, shortened(name, 48), "end", 11))
        end = left if value is None else frame.at(value, 0.0)[0]
        words = "–" if value is None else _value(value, axis.percent)
        note = f"{name}: {words}"
        body.append(rect(left, y + 2, end - left, 15, PALETTE[1], note=note))
        body.append(text(WIDTH - 8, y + 13, words, "end", 10))
    if mark is not None:
        x, _ = frame.at(mark, 0.0)
        body.append(line(x, frame.top, x, frame.top + frame.height, PALETTE[2]))
    return document(title, WIDTH, frame.top + frame.height + 48, body)


def ticks(low: float, high: float, count: int = 5) -> tuple[float, ...]:
    """About `count` numbers, steps of 1, 2, 2.5 or 5 times a power of ten, that cover a range."""
    if high - low < 1e-12:
        # A single value: an axis around it, but none below 0 if the value is 0.
        low, high = low - 0.5 * (low != 0.0), low + 1.0
    # The smallest round step that covers the range in about `count` steps.
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * (1 - 1e-9))
    # 1e-9: a limit that is a multiple of the step but for rounding is a tick, and none beyond it.
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return tuple(round(k * step, 12) for k in range(first, last + 1))


def _series(frame: _Frame, series: Series, y: Axis) -> str:
    colour = PALETTE[series.colour % len(PALETTE)]
    # A missing value ends one stretch of the line and begins the next.
    runs: list[list[tuple[float, float]]] = [[]]
    dots = []
    for a, b in zip(series.x, series.y, strict=True):
        if b is None or not math.isfinite(b):
            runs.append([])
            continue
        point = frame.at(a, b)
        runs[-1].append(point)
        if series.points or not series.line:
            radius = 3.0 if series.line else 6.0
            note = f"{series.name}: {a:.6g}, {_value(b, y.percent)}"
            dots.append(dot(point, radius, colour, hollow=not series.line, note=note))
    lines = [polyline(run, colour, series.dash) for run in runs if series.line and run]
    return "".join(lines + dots)


def _bars(frame: _Frame, groups: Sequence[str], bars: Bars, index: int, count: int, y: Axis) -> str:
    step = frame.width / len(groups)
    # A fifth of each group is the gap to the next.
    width = step * 0.8 / count
    colour = PALETTE[bars.colour % len(PALETTE)]
    parts = []
    for g, value in enumerate(bars.values):
        x = frame.left + g * step + step * 0.1 + index * width
        if value is None:
            parts.append(text(x + width / 2, frame.top + frame.height - 3, "–", "middle", 9))
            continue
        _, top = frame.at(0.0, value)
        note = f"{groups[g]}, {bars.name}: {_value(value, y.percent)}"
        height = frame.top + frame.height - top
        # A thin gap between bars, so that equal ones do not merge.
        parts.append(rect(x, top, width * 0.94, height, colour, note=note))
    return "".join(parts)


def _y_axis(frame: _Frame, axis: Axis, scale: Sequence[float]) -> str:
    parts = []
    for t in scale:
        x, y = frame.at(frame.x[0], t)
        parts.append(line(x, y, x + frame.width, y, FAINT))
        parts.append(text(x - 6, y + 3.5, _value(t, axis.percent, tick=True), "end", 10))
    middle = frame.top + frame.height / 2
    parts.append(text(13, middle, axis.label, "middle", 11, turn=-90))
    return "".join(parts)


def _x_axis(frame: _Frame, axis: Axis, scale: Sequence[float]) -> str:
    base = frame.top + frame.height
    parts = [line(frame.left, base, frame.left + frame.width, base, INK)]
    for t in scale:
        x, _ = frame.at(t, frame.y[0])
        parts.append(line(x, base, x, base + 4, INK))
        parts.append(text(x, base + 16, _value(t, axis.percent, tick=True), "middle", 10))
    parts.append(text(frame.left + frame.width / 2, base + 36, axis.label, "middle", 11))
    return "".join(parts)


def column_names(
    names: Sequence[str], left: float, step: float, y: float, *, down: bool
) -> tuple[str, float]:
    """Names under (`down`) or over columns, upright, and turned when they would overlap."""
    short = [shortened(n, 20) for n in names]
    longest = max(len(n) for n in short)
    if longest * 5.6 <= step:
        depth = 18.0
        baseline = y + 12 if down else y + depth - 6
        labels = [
            text(left + (i + 0.5) * step, baseline, n, "middle", 10) for i, n in enumerate(short)
        ]
        return "".join(labels), depth
    # Turned names need a line's height each; if there is too little room, write every k-th.
    every = max(1, math.ceil(9.0 / step))
    depth, anchor = longest * 5.8 + 10, "end" if down else "start"
    baseline = y + 2 if down else y + depth - 5
    labels = [
        text(left + (i + 0.5) * step + 3, baseline, n, anchor, min(10.0, max(8.5, step)), turn=-90)
        for i, n in enumerate(short)
        if i % every == 0
    ]
    return "".join(labels), depth


def _legend(entries: Sequence[tuple[str, int, int, bool]]) -> tuple[str, float]:
    """Swatches and names, wrapped over lines, and the height they take; dash -1 draws a box."""
    x, y, parts = 62.0, 14.0, []
    for name, colour, dash, is_line in entries:
        words, ink = shortened(name, 44), PALETTE[colour % len(PALETTE)]
        width = 34 + len(words) * 6.3 + 14
        if x > 62 and x + width > WIDTH:
            x, y = 62.0, y + 18
        if dash < 0:
            parts.append(rect(x + 8, y - 9, 12, 11, ink))
        elif is_line:
            parts.append(polyline([(x, y - 4), (x + 26, y - 4)], ink, dash))
        else:
            parts.append(dot((x + 14, y - 4), 5, ink, hollow=True))
        parts.append(text(x + 31, y, words, "start", 11))
        x += width
    return "".join(parts), y + 6


def _empty_chart(title: str) -> str:
    body = [text(WIDTH / 2, 24, "no values recorded", "middle", 12)]
    return document(title, WIDTH, 40, body)


def _range(values: Sequence[float], axis: Axis) -> tuple[float, float]:
    """The range of an axis. A single value gets five points of a share, else a tenth, on each side.

    For shares the range stays within 0 % and 100 %.
    """
    low, high = 0.0 if axis.zero else min(values), max(values)
    if high - low >= 1e-12:
        return low, high
    if axis.percent:
        return max(low - 0.05, min(low, 0.0)), min(low + 0.05, max(low, 1.0))
    pad = 0.1 * abs(low) or 0.5
    return low - pad, low + pad


def _span(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _tick_makes_sense(xs: Sequence[float], tick: float) -> bool:
    """Whether a tick makes sense: none between two rounds."""
    return tick == round(tick) or any(v != round(v) for v in xs)


def shortened(words: str, limit: int) -> str:
    """Shorten in the middle, since names in a list often share their beginning."""
    half = (limit - 1) // 2
    return words if len(words) <= limit else f"{words[: limit - 1 - half]}…{words[-half:]}"


def _value(value: float, percent: bool, *, tick: bool = False) -> str:
    if not percent:
        return f"{value:.6g}" if tick else f"{value:.4g}"
    return f"{100 * value:.4g} %" if tick else f"{100 * value:.1f} %"
