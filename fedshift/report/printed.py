"""Charts as figures for papers: PDF and PNG through matplotlib, which is the extra `report`."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedshift.errors import InputError, visible
from fedshift.files import write
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
    letters,
    named,
    number_text,
    pointed,
    shifts,
    shortened,
)
from fedshift.report.looks import (
    DASHES,
    FILLS,
    LIGHT,
    MARKERS,
    THEME,
    Look,
    band_opacity,
    look_of,
    looks,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, HEIGHT = 4.5, 2.8  # inches: a column of most proceedings, and the height of one chart
INK, GRID, HEAT = (THEME[name][0] for name in ("ink", "grid", "heat"))
# 42 is TrueType, which publishers ask for. Names must not be parsed as formulas. The files have no
# dates, so that the same charts give the same bytes.
STYLE: Any = {
    "pdf.fonttype": 42, "text.parse_math": False, "font.size": 8, "axes.edgecolor": INK,
    "axes.labelcolor": INK, "text.color": INK, "xtick.color": INK, "ytick.color": INK,
}  # fmt: skip
_METADATA: dict[str, dict[str, Any]] = {"pdf": {"CreationDate": None}, "png": {"Software": None}}


def save(figures: Mapping[str, Sequence[Chart]], folder: Path) -> tuple[Path, ...]:
    """Write each name's charts, one below the other, as NAME.pdf and NAME.png; returns the files.

    Raises InputError without matplotlib, and if the folder cannot be written.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError('figures need matplotlib: pip install "fedshift[report]"') from None
    except (OSError, RuntimeError) as e:
        # matplotlib makes a folder in the user's home, or in that for temporary files.
        raise InputError(
            f"figures need matplotlib, which cannot begin: {e}; name a folder that it may write to "
            "in $MPLCONFIGDIR"
        ) from None
    written = []
    for name, charts in figures.items():
        with rc_context(STYLE):
            figure = Figure(layout="constrained")
            draw(charts, figure)
            for suffix in ("pdf", "png"):
                buffer = io.BytesIO()
                figure.savefig(buffer, format=suffix, dpi=200, metadata=_METADATA[suffix])
                written.append(folder / f"{name}.{suffix}")
                write(written[-1], buffer.getvalue())
    return tuple(written)


def draw(charts: Sequence[Chart], figure: Figure) -> None:
    """Draw charts one below the other. Legends are below the axes, where they hide nothing."""
    parts = figure.subfigures(len(charts), 1, squeeze=False)[:, 0]
    height = 0.0
    for chart, part in zip(charts, parts, strict=True):
        axes = part.subplots()
        if len(charts) > 1:
            axes.set_title(visible(chart.title), fontsize=8)
        match chart:
            case LineChart():
                height += HEIGHT + _legend(part, _lines(chart, axes))
            case BarChart():
                height += HEIGHT + _legend(part, _columns(chart, axes))
            case SideBars():
                _side_bars(chart, axes)
                height += 0.8 + 0.17 * len(chart.names)
            case HeatMap():
                _heat(chart, axes, part)
                height += 1.2 + 0.2 * len(chart.rows)
    figure.set_size_inches(WIDTH, height)


def _lines(chart: LineChart, axes: Axes) -> dict[str, Any]:
    drawn = [pointed(s) for s in chart.series]
    of = looks([s.name for s in drawn], [s.look for s in drawn], [s.thin for s in drawn])
    opacity = band_opacity(sum(bool(s.low) for s in drawn))
    handles: dict[str, Any] = {}
    for series, look, shift in zip(drawn, of, shifts(drawn), strict=True):
        x, colour = [v + shift for v in series.x], LIGHT[look.colour]
        (line,) = axes.plot(x, _numbers(series.y), color=colour, **_marks(series, look))
        handles |= {series.name: line} if named(series, look, drawn, of) else {}
        if series.low and len(x) == 1:
            # A band over a single point would have no area, so it gets an error bar.
            bars = Bars("", series.y, series.low, series.high)
            _whiskers(axes, x, bars, upright=True)
        elif series.low:
            low, high = _numbers(series.low), _numbers(series.high)
            axes.fill_between(x, low, high, color=colour, alpha=opacity, lw=0)
    _axis(axes.xaxis, chart.x)
    _axis(axes.yaxis, chart.y)
    across = {v for s in drawn for v in s.x}
    if not chart.x.log and all(v == round(v) for v in across):
        # x are rounds: no tick between two of them.
        axes.locator_params(axis="x", integer=True)
    if any(shifts(drawn)):
        axes.set_xticks(list(across))
        axes.set_xlim(min(across) - 0.5, max(across) + 0.5)
    if chart.y.zero:
        axes.set_ylim(bottom=0)
    return handles


def _marks(series: Series, look: Look) -> dict[str, Any]:
    """Dash and marker as matplotlib's arguments, to look as on a page."""
    corners = [(x, -y) for x, y in MARKERS[look.style]]
    # The first corner again at the end: else the outline would have a gap.
    shape = [*corners, corners[0]] if corners else "o"
    # clip_on: markers at the end of an axis are drawn whole.
    hollow = {
        "markerfacecolor": "none", "markersize": 7, "markeredgewidth": 1.6, "clip_on": False,
    }  # fmt: skip
    dash = "1 1.7" if series.thin else DASHES[look.style]
    # matplotlib measures dashes in line widths; the pixels of DASHES are for a width of 2.
    pattern = (0, tuple(float(v) / 2 for v in dash.split())) if dash else "solid"
    return {
        "linestyle": pattern if series.line else "none",
        "linewidth": 0.9 if series.thin else 1.4,
        "marker": shape if series.points or not series.line else None,
        **({"markersize": 2 if series.thin else 3} if series.line else hollow),
    }


def _columns(chart: BarChart, axes: Axes) -> dict[str, Any]:
    of = looks([b.name for b in chart.bars], [b.look for b in chart.bars])
    width, handles = 0.8 / len(chart.bars), {}
    for k, (bars, look) in enumerate(zip(chart.bars, of, strict=True)):
        at = [g + (k - (len(chart.bars) - 1) / 2) * width for g in range(len(chart.groups))]
        handles[bars.name] = axes.bar(at, _heights(bars.values), width * 0.94, **_fill(look))
        _whiskers(axes, at, bars, upright=True)
        for x, value in zip(at, bars.values, strict=True):
            if value is None:
                axes.annotate("–", (x, 0), ha="center", va="bottom", fontsize=6)
    names = [shortened(n, 20) for n in chart.groups]
    fits = max(map(letters, names)) * len(names) <= 70
    axes.set_xticks(range(len(names)), names, rotation=0 if fits else 90)
    if len(names) > 40:
        axes.tick_params(axis="x", labelsize=4)
    _axis(axes.yaxis, chart.y)
    axes.set(xlim=(-0.5, len(names) - 0.5), ylim=(0, None))
    return handles


def _side_bars(chart: SideBars, axes: Axes) -> None:
    of = [look_of(name) for name in chart.of or chart.names]
    for i, (value, look) in enumerate(zip(_heights(chart.values), of, strict=True)):
        axes.barh(i, value, 0.8, **_fill(look))
        if chart.values[i] is None:
            axes.annotate("–", (0, i), ha="left", va="center", fontsize=6)
    bars = Bars("", chart.values, chart.low, chart.high)
    _whiskers(axes, range(len(chart.names)), bars, upright=False)
    if chart.mark is not None:
        axes.axvline(chart.mark, color=INK, linewidth=0.8, zorder=4)
    names = [shortened(n, 32) for n in chart.names]
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    _axis(axes.xaxis, chart.x)


def _fill(look: Look) -> dict[str, Any]:
    """A bar as on a page: pale with a dashed edge if another method has its colour, too."""
    colour = LIGHT[look.colour]
    # Drawn above the axis.
    style = {"facecolor": colour, "edgecolor": colour, "linewidth": 1.2, "zorder": 3}
    if not look.style:
        return style
    dash = (0, tuple(float(v) for v in DASHES[look.style].split()))
    return style | {"facecolor": (colour, FILLS[look.style]), "linestyle": dash}


def _whiskers(axes: Axes, at: Sequence[float], bars: Bars, *, upright: bool) -> None:
    if not bars.low:
        return
    ends = zip(_numbers(bars.low), _numbers(bars.high), strict=True)
    # Lines instead of matplotlib's error bars, which take lengths: these must not be negative, and
    # an interval need not contain the value.
    for x, (low, high) in zip(at, ends, strict=True):
        xy = ([x, x], [low, high]) if upright else ([low, high], [x, x])
        # Dark with a light rim, so that it can be seen on bars of any colour.
        axes.plot(*xy, color="white", linewidth=2.2, zorder=4)
        axes.plot(*xy, color=INK, linewidth=0.9, zorder=4)


def _heat(chart: HeatMap, axes: Axes, part: Any) -> None:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LinearSegmentedColormap

    # Begins at a pale grey, so that the weakest shade differs from an empty cell.
    shades = LinearSegmentedColormap.from_list("shades", ["#e1e6ed", HEAT])
    strength = [
        [math.nan if (s := chart.shades.strength(v, chart.largest)) is None else s for v in row]
        for row in chart.values
    ]
    axes.imshow(strength, cmap=shades, vmin=0, vmax=1, aspect="auto")
    columns = [shortened(n, 20) for n in chart.columns]
    axes.set_xticks(range(len(columns)), columns, rotation=90, fontsize=6)
    names = [shortened(n, 48) for n in chart.rows]
    axes.set_yticks(range(len(names)), names, fontsize=6)
    if chart.shades.apart:
        axes.axhline(len(names) - 1.5, color=INK, linewidth=0.8)
    bar = part.colorbar(ScalarMappable(cmap=shades), ax=axes)
    marks = [chart.largest * k / 5 for k in range(6)]
    at = [chart.shades.strength(v, chart.largest) or 0.0 for v in marks]
    bar.set_ticks(at, labels=[f"{100 * v:.0f}" for v in marks], fontsize=6)
    bar.set_label(f"{chart.shades.label.rstrip(':')}\nwhite: {chart.shades.empty}", fontsize=6)


def _legend(part: Any, handles: Mapping[str, Any]) -> float:
    """Draw the legend; the height in inches that it takes."""
    if not handles:
        return 0.0
    names = [shortened(n, 44) for n in handles]
    # Fourteen letters to an inch, and half an inch for the line and the gap.
    columns = max(1, min(len(names), int(WIDTH / (0.5 + max(map(letters, names)) / 14))))
    # matplotlib leaves out names that begin with "_".
    shown = [f" {n}" if n.startswith("_") else n for n in names]
    part.legend(
        list(handles.values()), shown, loc="outside lower center", ncols=columns, frameon=False,
        fontsize=7,
    )  # fmt: skip
    return 0.15 * math.ceil(len(names) / columns)


def _axis(axis: Any, of: Axis) -> None:
    axis.set_label_text(visible(of.label))
    if of.percent:
        axis.set_major_formatter(lambda value, _: number_text(value, percent=True, tick=True))
    if of.log:
        getattr(axis.axes, f"set_{axis.axis_name}scale")("log")
    axis.axes.set_axisbelow(True)
    axis.axes.grid(axis=axis.axis_name, color=GRID, linewidth=0.6)


def _heights(values: Values) -> list[float]:
    """Heights of bars; one of 0 is not drawn, since its edge would look like a small value."""
    return [v or math.nan for v in _numbers(values)]


def _numbers(values: Values) -> list[float]:
    return [math.nan if v is None else v for v in values]
