"""Charts as data, without how they are drawn: `svg` draws them for pages, `printed` for papers.

Shares are fractions, which `Axis.percent` writes in percent.
"""

from __future__ import annotations

import math
import operator
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fedshift.errors import visible
from fedshift.report.looks import Look

Values = tuple[float | None, ...]
# A line with more points than this has several for each pixel, and is thinned out.
MOST_POINTS = 400


@dataclass(frozen=True)
class Axis:
    """An axis.

    percent  write 0.5 as 50 %
    zero     start at 0
    log      logarithmic, in a `LineChart` only; values of 0 and below are left out
    """

    label: str
    percent: bool = False
    zero: bool = False
    log: bool = False

    def value(self, place: float) -> float:
        """The value at a place of the axis: the place itself, or 10 to its power if it is `log`."""
        return float(10.0**place) if self.log else place


@dataclass(frozen=True)
class Series:
    """A line or a set of points: x [P], y [P] (None for a missing value).

    low, high  a band around the line, [P] with None where there is none; or () for no band
    look       colour and dash; None for those of the method with which the name begins
    thin       a thin line that goes with the main one of the same method, as its estimate
    line       whether the points are joined
    points     whether a line's points are marked
    """

    name: str
    x: tuple[float, ...]
    y: Values
    low: Values = ()
    high: Values = ()
    look: Look | None = None
    thin: bool = False
    line: bool = True
    points: bool = False


@dataclass(frozen=True)
class Bars:
    """A value for each group [G], None for a missing one; low, high: error bars, [G] or ().

    look: as in `Series`.
    """

    name: str
    values: Values
    low: Values = ()
    high: Values = ()
    look: Look | None = None


@dataclass(frozen=True)
class LineChart:
    """Several series over one pair of axes; missing points break a line."""

    title: str
    series: tuple[Series, ...]
    x: Axis
    y: Axis


@dataclass(frozen=True)
class BarChart:
    """Groups of upright bars from zero; a dash stands for a missing value."""

    title: str
    groups: tuple[str, ...]
    bars: tuple[Bars, ...]
    y: Axis


@dataclass(frozen=True)
class SideBars:
    """A horizontal bar for each name, from zero, and a line at `mark`.

    low, high: error bars, one for each name, or (). of: the methods whose looks the bars have, if
    the names do not begin with these.
    """

    title: str
    names: tuple[str, ...]
    values: Values
    x: Axis
    mark: float | None = None
    low: Values = ()
    high: Values = ()
    of: tuple[str, ...] = ()


@dataclass(frozen=True)
class Shades:
    """How values in [0, 1] become shades.

    label   the text before the legend's ramp
    empty   what a cell without a shade means
    zero    True: 0 has a shade; False: its cell is empty, as for None
    even    True: linear from 0 to 1. False: by the square root, up to the largest value, which
            keeps small shares visible
    apart   draw the last row with a gap above it
    """

    label: str
    empty: str
    zero: bool = False
    even: bool = False
    apart: bool = False

    def strength(self, value: float | None, largest: float) -> float | None:
        """How strong a value's shade is, 0 to 1; None for an empty cell."""
        if value is None or (value <= 0 and not self.zero):
            return None
        return min(1.0, value) if self.even else math.sqrt(min(1.0, value / largest))


LABELS = Shades("share of row, %:", "none", apart=True)
SENT = Shades("share of row, %:", "none")
ACCURACY = Shades("accuracy, %:", "no tests", zero=True, even=True)


@dataclass(frozen=True)
class HeatMap:
    """Values in [0, 1] as shades; None for an empty cell.

    notes: the text of each cell for screen readers and for a mouse that rests on it
    """

    title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    values: tuple[Values, ...]
    notes: tuple[tuple[str, ...], ...]
    shades: Shades = LABELS

    @property
    def largest(self) -> float:
        """The value of the strongest shade."""
        numbers = [v for row in self.values for v in row if v is not None]
        return 1.0 if self.shades.even else max(numbers, default=0.0) or 1.0


Chart = LineChart | BarChart | SideBars | HeatMap


def ticks(low: float, high: float, count: int = 5) -> tuple[float, ...]:
    """About `count` numbers, steps of 1, 2, 2.5 or 5 times a power of ten, that cover a range."""
    if high - low < 1e-12:
        # A single value gets an axis around it; for 0, the axis starts there.
        low, high = low - 0.5 * (low != 0.0), low + 1.0
    # The smallest round step that covers the range in about `count` steps.
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * (1 - 1e-9))
    # 1e-9: a limit that is a multiple of the step up to rounding is a tick, and the last one.
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return tuple(round(k * step, 12) for k in range(first, last + 1))


def log_ticks(low: float, high: float) -> tuple[float, ...]:
    """log10 of the powers of ten in [10^low, 10^high], or of 1, 2 and 5 times these if few."""
    steps = (1, 2, 5) if high - low < 2.5 else (1,)
    powers = range(math.floor(low), math.ceil(high) + 1)
    places = (k + math.log10(step) for k in powers for step in steps)
    # 1e-9: a limit that is a tick up to rounding counts as one.
    return tuple(p for p in places if low - 1e-9 <= p <= high + 1e-9)


def logged(series: Series, x: Axis, y: Axis) -> Series:
    """The series with log10 of its values along logarithmic axes, without values of 0 or less."""
    kept = [i for i, v in enumerate(series.x) if not x.log or v > 0]
    places = tuple(math.log10(v) if x.log else v for v in (series.x[i] for i in kept))
    y_of, low, high = (_logged(v, kept, y) for v in (series.y, series.low, series.high))
    return replace(series, x=places, y=y_of, low=low, high=high)


def _logged(values: Values, kept: Sequence[int], axis: Axis) -> Values:
    chosen = [values[i] for i in kept] if values else []
    if not axis.log:
        return tuple(chosen)
    return tuple(math.log10(v) if v is not None and v > 0 else None for v in chosen)


def span_of(values: Sequence[float], axis: Axis) -> tuple[float, float]:
    """The range of an axis for these values.

    A single value gets some room on each side: five points for a share, else a tenth of it. The
    range of shares stays within 0 % and 100 %.
    """
    low, high = 0.0 if axis.zero else min(values), max(values)
    if high - low >= 1e-12:
        return low, high
    if axis.percent:
        return max(low - 0.05, min(low, 0.0)), min(low + 0.05, max(low, 1.0))
    pad = 0.1 * abs(low) or 0.5
    return low - pad, low + pad


def thinned(series: Series) -> Series:
    """The series, with only the highest and lowest point of each stretch if it has too many."""
    if len(series.x) <= MOST_POINTS:
        return series
    each = math.ceil(2 * len(series.x) / MOST_POINTS)
    kept: list[int] = []
    for start in range(0, len(series.x), each):
        part = range(start, min(start + each, len(series.x)))
        valued = [(y, i) for i in part if (y := series.y[i]) is not None and math.isfinite(y)]
        # A stretch without values keeps a point, which draws a gap.
        kept += sorted({min(valued)[1], max(valued)[1]}) if valued else [start]
    at = operator.itemgetter(*kept)
    low, high = (at(v) if v else () for v in (series.low, series.high))
    return replace(series, x=at(series.x), y=at(series.y), low=low, high=high)


def pointed(series: Series) -> Series:
    """The series, with a marker if it has a single value, which as a line would draw nothing."""
    return replace(series, points=True) if len(drawn_values(series.y)) == 1 else series


def shifts(series: Sequence[Series]) -> list[float]:
    """How far to the right each line is drawn: side by side if all have one and the same x."""
    alone = len({x for one in series for x in one.x}) == 1 and all(one.line for one in series)
    middle = (len(series) - 1) / 2
    return [(k - middle) * 0.5 / len(series) if alone else 0.0 for k in range(len(series))]


def named(series: Series, look: Look, others: Sequence[Series], looks: Sequence[Look]) -> bool:
    """Whether a legend names the series: not if it is thin, and its method's main line is there."""
    beside = zip(others, looks, strict=True)
    return not series.thin or all(other.thin or its != look for other, its in beside)


def drawn_values(*columns: Values) -> list[float]:
    """The finite numbers of all columns."""
    return [v for column in columns for v in column if v is not None and math.isfinite(v)]


def letters(words: str) -> float:
    """The width of a text in Latin letters; East Asian letters are nearly twice as wide."""
    return len(words) + 0.8 * sum(unicodedata.east_asian_width(c) in "WF" for c in words)


def shortened(words: str, limit: int) -> str:
    """The text cut in the middle, since names in a list often share their beginning.

    limit: in Latin letters.
    """
    words = visible(words)  # before counting: a control character is shown by several letters
    limit = int(limit * len(words) / max(1.0, letters(words)))
    half = (limit - 1) // 2
    return words if len(words) <= limit else f"{words[: limit - 1 - half]}…{words[-half:]}"


def number_text(value: float, percent: bool, *, tick: bool = False) -> str:
    """A value as charts write it; tick: at an axis."""
    if not percent:
        return f"{value:.6g}" if tick else f"{value:.4g}"
    return f"{100 * value:.4g} %" if tick else f"{100 * value:.1f} %"
