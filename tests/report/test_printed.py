"""Figures for papers: fonts that publishers take, the page's colours, legends beside the axes."""

from __future__ import annotations

import re
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedshift.report.charts import (
    ACCURACY,
    Axis,
    BarChart,
    Bars,
    Chart,
    HeatMap,
    LineChart,
    Series,
    SideBars,
)
from fedshift.report.looks import LIGHT, Look, look_of
from fedshift.report.printed import STYLE, draw, save

pytest.importorskip("matplotlib", reason="figures need the extra `report`")

LABELS = ("fedavg", "fedpals, ess=25% of all the clients' examples", "_mine $x_{$", "scaffold")
BARS = BarChart(
    "recall",
    ("cat", "dog"),
    tuple(Bars(b, (0.0, None), (0.0, None), (0.2, None)) for b in LABELS),
    Axis("recall", percent=True),
)
LINES = LineChart(
    "accuracy",
    tuple(Series(b, (1, 2, 3), (0.2, 0.4, 0.5), (0.1, 0.3, 0.4), (0.3, 0.5, 0.6)) for b in LABELS),
    Axis("round"),
    Axis("accuracy", percent=True),
)
SIDE = SideBars("side", LABELS, (0.5, 0.0, None, 1.0), Axis("accuracy", percent=True), mark=0.5)
HEAT = HeatMap(
    "heat", ("a", "b"), ("x", "y"), ((0.0, None), (1.0, 0.5)), (("",) * 2,) * 2, ACCURACY
)


def drawn(*charts: Chart) -> Any:
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained")
    FigureCanvasAgg(figure)
    with rc_context(STYLE):
        draw(charts, figure)
        figure.canvas.draw()
    return figure


@pytest.mark.parametrize("chart", [BARS, LINES])
def test_a_legend_hides_nothing(chart: Chart) -> None:
    figure = drawn(chart)
    (part,) = figure.subfigs
    (legend,), (axes,) = part.legends, part.axes
    box, plot = legend.get_window_extent(), axes.get_tightbbox()
    assert not box.overlaps(plot)
    assert figure.bbox.contains(box.x0, box.y0)
    assert figure.bbox.contains(box.x1, box.y1)
    assert len(legend.get_texts()) == len(LABELS)
    # Control: a legend inside the axes would be seen.
    inside = axes.legend(["x"])
    assert inside.get_window_extent().overlaps(plot)


def test_markers_are_closed() -> None:
    """Hollow ones are outlines."""
    series = [replace(s, line=False, look=Look(1, k)) for k, s in enumerate(LINES.series)]
    (axes,) = drawn(replace(LINES, series=tuple(series))).subfigs[0].axes
    shapes = [line.get_marker() for line in axes.get_lines()]
    assert shapes[0] == "o"
    assert all(len(shape) > 3 and shape[0] == shape[-1] for shape in shapes[1:])


def test_figures_have_the_pages_colours() -> None:
    from matplotlib.colors import to_hex

    (axes,) = drawn(LINES).subfigs[0].axes
    assert [to_hex(line.get_color()) for line in axes.get_lines()] == [
        LIGHT[look_of(name).colour] for name in LABELS
    ]


def test_a_line_of_one_round_is_a_marker_of_its_own() -> None:
    """Equal values stand side by side, with their intervals; lines of several rounds do not."""
    one = replace(LINES, series=tuple(Series(b, (5,), (0.4,), (0.3,), (0.5,)) for b in LABELS))
    (axes,) = drawn(one).subfigs[0].axes
    marked = [line for line in axes.get_lines() if len(line.get_xdata()) == 1]
    assert all(line.get_marker() != "None" for line in marked)
    assert len({float(line.get_xdata()[0]) for line in marked}) == len(LABELS)
    assert len(axes.get_lines()) == 3 * len(LABELS)  # a marker, a whisker and its halo
    assert list(axes.get_xticks()) == [5]
    (several,) = drawn(LINES).subfigs[0].axes
    assert {line.get_marker() for line in several.get_lines()} == {"None"}


def test_neither_a_recall_of_0_nor_a_missing_one_has_a_bar_and_a_dash_tells_them_apart() -> None:
    (axes,) = drawn(BARS).subfigs[0].axes
    zero, missing = axes.patches[:2]
    assert zero.get_height() != zero.get_height()  # NaN: nothing is drawn
    assert missing.get_height() != missing.get_height()
    assert [t.get_text() for t in axes.texts] == ["–"] * len(LABELS)


@pytest.mark.slow
def test_fonts_are_truetype_and_names_no_formulas(tmp_path: Path) -> None:
    written = save({"all": [BARS, LINES, SIDE, HEAT]}, tmp_path)
    pdf = written[0].read_bytes()
    # Objects lie compressed in streams.
    for stream in re.findall(rb"stream\r?\n(.*?)endstream", pdf, re.S):
        try:
            pdf += zlib.decompress(stream)
        except zlib.error:
            continue
    assert re.search(rb"/Subtype\s*/(TrueType|CIDFontType2)", pdf)
    assert not re.search(rb"/Subtype\s*/Type3", pdf)
    assert written[1].read_bytes().startswith(b"\x89PNG")
