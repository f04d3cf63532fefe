"""Tables, drawings and statistics of reports."""

from __future__ import annotations

import csv
import io
import itertools
import math
import re
import xml.etree.ElementTree as ET

import pytest

from fedshift.errors import InputError
from fedshift.report.charts import (
    ACCURACY,
    MOST_POINTS,
    SENT,
    Axis,
    BarChart,
    Bars,
    HeatMap,
    LineChart,
    Series,
    Shades,
    SideBars,
    thinned,
    ticks,
)
from fedshift.report.looks import LIGHT, look_of
from fedshift.report.shapes import alone, sheet
from fedshift.report.spread import spread
from fedshift.report.svg import NARROW, WIDE, svg
from fedshift.report.tables import Table, csv_text, html_table, latex, markdown, show
from support.report_fixtures import Outline

# --------------------------------------------------------------------------- tables


TABLE = Table(
    ("Name", "Share"), ((r"a|b_*[x]* \ <i>", 0.5), ("[y] & 5%", None)), ("", ".1%"), "C & D"
)


def test_markdown_is_literal() -> None:
    lines = markdown(TABLE).splitlines()
    assert lines[0] == "C &amp; D"
    assert lines[3] == "|---|---:|"
    assert lines[4] == r"| a\|b\_\*\[x\]\* \\ &lt;i&gt; | 50.0% |"
    assert lines[5] == r"| \[y\] &amp; 5% | – |"


def test_csv_reads_back_with_full_precision() -> None:
    table = Table(("Name", "x"), (('say "a,b"\nc', 1 / 3), ("d", math.nan)), ("", ".1f"))
    rows = list(csv.reader(io.StringIO(csv_text(table))))
    assert rows == [["Name", "x"], ['say "a,b"\nc', repr(1 / 3)], ["d", ""]]


def test_latex_is_literal() -> None:
    text = latex(TABLE)
    assert (
        r"a\textbar{}b\_{*}{[}x]{*} \textbackslash{} \textless{}i\textgreater{} & 50.0\% \\" in text
    )
    # A bracket at the start of a row would be an argument of the \\ before it.
    assert r"{[}y] \& 5\% & -- \\" in text
    assert text.startswith("\\begin{table}\n\\centering\n\\caption{C \\& D}\n\\begin{tabular}{lr}")


def test_numbers_in_latex_have_a_minus_sign() -> None:
    """Control: hyphens of names and within words stay."""
    rows = (("run-1 -2", "-0.1 (-1.5 to +2.0)"), ("-3", -0.25), ("x", "a-1"))
    text = latex(Table(("Name", "x"), rows, ("", ".2f")))
    body = text.split("\\midrule\n")[1].split("\n\\bottomrule")[0]
    assert body.splitlines() == [
        r"run-1 -2 & $-$0.1 ($-$1.5 to +2.0) \\", r"-3 & $-$0.25 \\", r"x & a-1 \\",
    ]  # fmt: skip


def test_html_is_literal() -> None:
    outline = Outline(html_table(TABLE))
    assert outline.rows == [["Name", "Share"], [r"a|b_*[x]* \ <i>", "50.0%"], ["[y] & 5%", "–"]]


def test_cells_are_shown_by_their_format() -> None:
    assert [show(v, ".2f") for v in (None, math.nan, math.inf, -math.inf, "x", 2)] == [
        "–", "–", "∞", "-∞", "x", "2.00",
    ]  # fmt: skip
    with pytest.raises(InputError, match=r"row 0 has 1 cells; the header has 2 \(a, b\)"):
        Table(("a", "b"), (("x",),), ("", ""))


# --------------------------------------------------------------------------- drawings


SVG = "{http://www.w3.org/2000/svg}"


def test_bars_are_as_high_as_their_values() -> None:
    chart = BarChart("t", ("p", "q"), (Bars("s", (0.5, 0.25)),), Axis("y"))
    bars = [
        r for r in ET.fromstring(svg(chart)).iter(f"{SVG}rect") if r.find(f"{SVG}title") is not None
    ]
    heights = [float(r.get("height") or 0) for r in bars]
    assert heights[0] == pytest.approx(2 * heights[1], abs=0.02)
    assert [r.findtext(f"{SVG}title") for r in bars] == ["p, s: 0.5", "q, s: 0.25"]


def test_lines_of_one_round_are_markers_side_by_side() -> None:
    names, axis = ("fedavg", "fedpals"), Axis("y")
    series = tuple(Series(n, (5.0,), (0.4,), (0.3,), (0.5,)) for n in names)
    drawing = svg(LineChart("t", series, Axis("round"), axis))
    centres = re.findall(r'<circle cx="([\d.]+)"[^>]*><title>', drawing)
    assert len(set(centres)) == len(names)
    assert all(f"<title>{n}: 5, 0.4</title>" in drawing for n in names)
    assert "<polygon" not in drawing  # a band without area
    longer = tuple(Series(n, (5.0, 6.0), (0.4, 0.4)) for n in names)
    assert "<circle" not in svg(LineChart("t", longer, Axis("round"), axis))


def test_a_missing_point_breaks_a_line() -> None:
    series = Series("s", (0, 1, 2, 3), (0.0, 1.0, None, math.nan))
    drawing = ET.fromstring(svg(LineChart("t", (series,), Axis("x"), Axis("y"))))
    lines = [p.get("points") or "" for p in drawing.iter(f"{SVG}polyline")]
    assert sorted(len(p.split()) for p in lines) == [2, 2]  # the legend's and the two known points
    whole = Series("s", (0, 1, 2, 3), (0.0, 1.0, 1.0, 0.5))
    drawing = ET.fromstring(svg(LineChart("t", (whole,), Axis("x"), Axis("y"))))
    assert max(len((p.get("points") or "").split()) for p in drawing.iter(f"{SVG}polyline")) == 4


def test_no_value_and_zero_are_different_cells() -> None:
    def texts(shades: Shades) -> list[str | None]:
        values, notes = ((0.0, None, 0.5),), (("a", "b", "c"),)
        drawing = svg(HeatMap("t", ("r",), ("x", "y", "z"), values, notes, shades))
        return [r.findtext(f"{SVG}title") for r in ET.fromstring(drawing).iter(f"{SVG}rect")]

    assert [t for t in texts(ACCURACY) if t] == ["a", "c"]
    assert [t for t in texts(SENT) if t] == ["c"]


def test_accuracies_are_shaded_evenly_and_small_shares_stand_out() -> None:
    assert ACCURACY.strength(0.25, 1.0) == 0.25
    assert SENT.strength(0.25, 1.0) == 0.5
    assert SENT.strength(0.0, 1.0) is None
    assert ACCURACY.strength(0.0, 1.0) == 0.0
    assert ACCURACY.strength(None, 1.0) is None


def test_bars_from_the_side_are_as_long_as_their_values() -> None:
    chart = SideBars("t", ("p", "q", "r", "s"), (50.0, 25.0, None, 0.0), Axis("%"), mark=40.0)
    drawing = ET.fromstring(svg(chart))
    bars = [r for r in drawing.iter(f"{SVG}rect") if r.find(f"{SVG}title") is not None]
    widths = [float(r.get("width") or 0) for r in bars]
    assert widths[0] == pytest.approx(2 * widths[1], abs=0.02)
    assert widths[2:] == [0.0, 0.0]
    left = float(bars[0].get("x") or 0)
    marks = [
        float(e.get("x1") or 0) for e in drawing.iter(f"{SVG}line") if e.get("x1") == e.get("x2")
    ]
    assert any(x - left == pytest.approx(0.8 * widths[0], abs=0.02) for x in marks)
    assert "no values recorded" in svg(SideBars("t", ("p",), (None,), Axis("y")))


def test_bars_of_numbers_below_0_end_at_0() -> None:
    drawn = ET.fromstring(svg(SideBars("t", ("p", "q"), (-0.5, 1.0), Axis("R2"))))
    below, above = (
        [float(r.get(k) or 0) for k in ("x", "width")]
        for r in drawn.iter(f"{SVG}rect")
        if r.findtext(f"{SVG}title")
    )
    assert sum(below) == pytest.approx(above[0], abs=0.02)
    assert above[1] == pytest.approx(2 * below[1], abs=0.02)


def test_a_value_of_0_has_no_bar_a_small_one_has_and_a_missing_one_a_dash() -> None:
    bars = (Bars("fedavg", (0.0, None)), Bars("fedpals", (0.5, 1e-4)))
    drawn = ET.fromstring(svg(BarChart("t", ("p", "q"), bars, Axis("recall", percent=True))))
    heights = {
        str(title): float(r.get("height") or 0)
        for r in drawn.iter(f"{SVG}rect")
        if (title := r.findtext(f"{SVG}title"))
    }
    assert heights["p, fedavg: 0.0 %"] == 0.0
    assert heights["q, fedpals: 0.0 %"] == 2.0
    assert "q, fedavg" not in "".join(heights)
    assert "–" in [t.text for t in drawn.iter(f"{SVG}text")]


def test_error_bars_and_bands_end_where_their_intervals_do() -> None:
    low, high = (0.25, None), (0.75, None)
    drawn = ET.fromstring(
        svg(BarChart("t", ("p", "q"), (Bars("s", (0.5, 1.0), low, high),), Axis("y")))
    )
    tall = next(r for r in drawn.iter(f"{SVG}rect") if r.findtext(f"{SVG}title") == "q, s: 1")
    top, whole = float(tall.get("y") or 0), float(tall.get("height") or 0)
    ends = [
        [float(e.get(k) or 0) for k in ("y1", "y2")]
        for e in drawn.iter(f"{SVG}line")
        if e.get("x1") == e.get("x2") and e.get("stroke") == "var(--ink)"
    ]
    assert ends == [[pytest.approx(top + 0.75 * whole, abs=0.02), pytest.approx(top + whole / 4)]]
    line = Series("s", (0, 1, 2), (0.5, 0.5, 0.5), (0.4, None, 0.4), (0.6, None, 0.6))
    drawn = ET.fromstring(svg(LineChart("t", (line,), Axis("x"), Axis("y"))))
    (band,) = (p.get("points") or "" for p in drawn.iter(f"{SVG}polygon"))
    assert len(band.split()) == 4  # the two rounds that have an interval


def test_a_long_line_keeps_its_highs_and_lows() -> None:
    y = [0.5] * 10_000
    y[1234], y[8765] = 0.9, 0.1
    long = Series("s", tuple(map(float, range(10_000))), tuple(y), tuple(y), tuple(y))
    short = thinned(long)
    assert len(short.x) <= MOST_POINTS
    assert {0.1, 0.5, 0.9} == set(short.y)
    assert len(short.low) == len(short.high) == len(short.x)
    assert thinned(short) == short
    gap = thinned(Series("s", long.x, (None,) * 5_000 + (1.0,) * 5_000))
    assert None in gap.y


def test_bands_lie_behind_all_lines_and_grow_paler_with_their_number() -> None:
    def drawn(count: int) -> str:
        series = tuple(
            Series(f"method {i}", (0, 1), (0.5, 0.6), (0.4, 0.5), (0.6, 0.7)) for i in range(count)
        )
        return svg(LineChart("t", series, Axis("x"), Axis("y")))

    seven = drawn(7)
    bands = seven[seven.index("<polygon") : seven.rindex("<polygon")]
    assert "<polyline" not in bands
    assert "<polyline" in seven[seven.rindex("<polygon") :]
    two, many = (
        [float(v) for v in re.findall(r'fill-opacity="([0-9.]+)"', drawn(n))] for n in (2, 7)
    )
    assert two == [0.16] * 2
    # What is left of a line's colour behind all seven bands.
    assert len(many) == 7
    assert (1 - many[0]) ** 7 > 0.6 > (1 - two[0]) ** 7


def test_a_drawing_alone_is_on_white_paper_with_plain_colours() -> None:
    chart = LineChart("t", (Series("fedavg", (0, 1), (0.5, 0.6)),), Axis("x"), Axis("y"))
    text = alone(svg(chart))
    assert "var(" not in text
    assert LIGHT[look_of("fedavg").colour] in text
    first = ET.fromstring(text).find(f"{SVG}rect")
    assert first is not None
    assert (first.get("width"), first.get("fill")) == ("100%", "#fff")
    assert "var(--ink)" in svg(chart)  # the control: in a page, its style sheet decides


def test_a_sheet_has_drawings_below_one_another() -> None:
    """Each with its size, its title and a caption; the sheet is as wide as the widest."""
    bars = BarChart("b", ("p",), (Bars("fedavg", (0.5,)),), Axis("y"))
    line = LineChart("t", (Series("fedavg", (0, 1), (0.5, 0.6)),), Axis("x"), Axis("y"))
    drawings = [svg(bars, NARROW), svg(line, WIDE), svg(bars, WIDE)]
    long = "a caption of more than one line, " * 5
    text = sheet("all", [*zip(drawings, ("<1>", long, "3"), strict=True)])
    assert "var(" not in text
    whole, sizes = ET.fromstring(text), [ET.fromstring(d).attrib for d in drawings]
    parts = whole.findall(f"{SVG}svg")
    assert [part.attrib["height"] for part in parts] == [size["height"] for size in sizes]
    assert [t.text for t in whole.iter(f"{SVG}title") if t.text in {"b", "t"}] == ["b", "t", "b"]
    first, *between, last = [t.text or "" for t in whole.findall(f"{SVG}text")]
    assert (first, " ".join(between), last) == ("<1>", long.strip(), "3")
    assert 1 < len(between) == math.ceil(len(long) / (WIDE / 8))
    heights = [float(size["height"]) for size in sizes]
    line_height = float(parts[0].attrib["y"])
    lines = [line_height * n for n in (1, 1 + len(between), 2 + len(between))]
    tops = [lines[0], lines[1] + heights[0], lines[2] + sum(heights[:2])]
    assert [float(part.attrib["y"]) for part in parts] == tops
    assert float(whole.attrib["height"]) == lines[2] + sum(heights)
    assert float(whole.attrib["width"]) == WIDE


def test_a_telephone_has_narrow_drawings_without_notes() -> None:
    bars = (Bars("fedavg", (0.5,)),)
    wide, narrow = (svg(BarChart("t", ("p",), bars, Axis("y")), w) for w in (WIDE, NARROW))
    assert f'width="{NARROW:.0f}"' in narrow
    assert "p, fedavg: 0.5" in wide
    assert "p, fedavg: 0.5" not in narrow
    assert len(list(ET.fromstring(narrow).iter(f"{SVG}rect"))) == len(
        list(ET.fromstring(wide).iter(f"{SVG}rect"))
    )


@pytest.mark.slow
def test_names_do_not_overlap_on_crowded_axes() -> None:
    for K in (10, 62):
        columns = tuple(f"class {k}" for k in range(K))
        rows = (*(f"client {i}" for i in range(100)), "target")
        values, notes = ((1 / K,) * K,) * 101, (("n",) * K,) * 101
        drawing = ET.fromstring(svg(HeatMap("t", rows, columns, values, notes)))
        words = [t for t in drawing.iter(f"{SVG}text") if str(t.text).startswith("class")]
        at = sorted(float(t.get("x") or 0) for t in words)
        assert min(b - a for a, b in itertools.pairwise(at)) >= 8.5
        width = float((drawing.get("viewBox") or "").split()[2])
        assert all(0 <= x <= width for x in at)


def test_empty_drawings_say_so() -> None:
    for chart in (
        LineChart("t", (), Axis("x"), Axis("y")),
        LineChart("t", (Series("s", (1.0,), (None,)),), Axis("x"), Axis("y")),
        BarChart("t", ("p",), (Bars("s", (None,)),), Axis("y")),
    ):
        assert "no values recorded" in "".join(ET.fromstring(svg(chart)).itertext())
    ET.fromstring(svg(LineChart("t", (Series("s", (1.0,), (0.0,)),), Axis("x"), Axis("y"))))


@pytest.mark.parametrize("value", [0.0, 0.031, 0.5, 0.98, 1.0])
def test_an_axis_around_one_share_stays_close_and_within_0_and_1(value: float) -> None:
    """One evaluated round, or several with the same accuracy."""

    axis = Axis("y", percent=True)
    chart = LineChart("t", (Series("s", (1.0,), (value,)),), Axis("x"), axis)
    words = [t.text or "" for t in ET.fromstring(svg(chart)).iter(f"{SVG}text")]
    shown = [float(w.removesuffix(" %")) / 100 for w in words if w.endswith(" %")]
    assert len(shown) >= 2
    assert 0.0 <= min(shown) <= value <= max(shown) <= 1.0
    assert max(shown) - min(shown) <= 0.13


def test_an_axis_around_one_loss_stays_above_0() -> None:
    def scale(value: float) -> list[str]:
        chart = LineChart("t", (Series("s", (1.0,), (value,)),), Axis("x"), Axis("loss"))
        return [t.text or "" for t in ET.fromstring(svg(chart)).iter(f"{SVG}text")]

    assert [w for w in scale(0.002) if w.startswith("-")] == []
    assert "0.0018" in scale(0.002)


def test_ticks_cover_the_range_in_round_steps() -> None:
    assert ticks(0.0, 1.0) == (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    for low, high in ((0.0, 0.37), (3.0, 149.0), (-2.0, 5.0), (0.7, 0.7), (1e-7, 2e-7)):
        t = ticks(low, high)
        assert t[0] <= low + 1e-15
        assert t[-1] >= high
        assert 2 <= len(t) <= 12


def test_a_legend_names_a_method_once() -> None:
    def words(*series: Series) -> list[str]:
        drawn = svg(LineChart("t", series, Axis("x"), Axis("y")))
        return [t.text or "" for t in ET.fromstring(drawn).iter(f"{SVG}text")]

    thick = Series("fedavg", (0, 1), (0.5, 0.6))
    thin = Series("fedavg, estimated", (0, 1), (0.4, 0.5), thin=True)
    assert "fedavg, estimated" not in words(thick, thin)
    assert "fedavg" in words(thick, thin)
    assert "fedavg, estimated" in words(thin)  # alone, nothing else names it


# --------------------------------------------------------------------------- statistics


def test_spread_by_hand() -> None:
    s = spread([0.2, None, 0.6, 0.4])
    assert (s.clients, s.worst, s.bottom_decile) == (3, 0.2, 0.2)
    assert s.mean == pytest.approx(0.4)
    assert s.sd == pytest.approx(math.sqrt(0.08 / 3))
    # sum_ij |x_i - x_j| = 2 (0.2 + 0.4 + 0.2) = 1.6; over 2 * 9 * 0.4.
    assert s.gini == pytest.approx(1.6 / 7.2)
    assert spread([0.5, 0.5]).gini == 0.0
    assert spread([0.0, 0.0]).gini == 0.0
    assert spread([None]).worst is None
    assert spread([k / 20 for k in range(20)]).bottom_decile == pytest.approx(0.025)


@pytest.mark.parametrize("name", ["恶性肿瘤样本数据集合", "\u202e\u200f" * 20, "latin", "w" * 300])
def test_names_have_the_room_that_they_are_drawn_in(name: str) -> None:
    """An East Asian letter is as wide as it is high; an unprintable one is shown by several."""
    chart = HeatMap("t", (name, "b"), (name,), ((0.5,), (0.2,)), (("",), ("",)), SENT)
    for width in (WIDE, NARROW):
        (label,) = re.findall(
            r'<text x="([\d.]+)"[^>]*text-anchor="end" font-size="11"[^>]*>([^<]+)<',
            svg(chart, width).replace(">b<", "><"),
        )
        wide = sum(11.0 if ord(c) > 0x2E80 else 6.3 for c in label[1])
        assert float(label[0]) - wide > 0
