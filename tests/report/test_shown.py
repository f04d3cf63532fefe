"""Pages in a browser: on a telephone, on a screen, in light and dark mode."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedshift.diagnose import diagnose
from fedshift.report.charts import Axis, BarChart, Bars, LineChart, Series, SideBars
from fedshift.report.diagnosis_page import diagnosis_page
from fedshift.report.layout import figure, html_page, section
from fedshift.report.looks import THEME
from fedshift.report.page import page
from support.browser import CHROMIUM, show
from support.report_fixtures import HOSTILE, made

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed here"),
]
LONG = "a_name_without_a_space_" * 6


def one_run(place: Path) -> str:
    return page([made(place / "a", classes=(*HOSTILE, LONG, LONG[1:]))])


def several_runs(place: Path) -> str:
    names = ("FedAvg", "FedPALS", "SCAFFOLD", "Oracle", LONG)
    clients = tuple(f"hospital {i} of a long name" for i in range(40))
    return page([made(place / n[:9], method=n, clients=clients) for n in names])


def charts(place: Path) -> str:
    """Charts of comparisons and tables: many methods, intervals, names that are too long."""
    names = ("fedavg", "fedpals", "ditto", "fedrep", LONG)
    some = (0.9, 0.0, None, 0.7, 1.0)
    low, high = (0.8, 0.0, None, 0.6, 0.9), (1.0, 0.1, None, 0.8, 1.0)
    axis = Axis("accuracy on a target with a name that is much longer than the page is", True)
    rounds = tuple(float(t) for t in range(2000))
    lines = tuple(Series(n, rounds, (0.5,) * 2000, (0.4,) * 2000, (0.6,) * 2000) for n in names)
    drawn = (
        SideBars("a", names, some, axis, 0.9, low, high),
        BarChart("b", names, tuple(Bars(n, some, low, high) for n in names), axis),
        LineChart("c", lines, axis, axis),
    )
    return html_page(LONG, [section("s", LONG, *(figure(c, LONG) for c in drawn))])


def diagnosis(place: Path) -> str:
    counts = np.array([[60, 40, 0], [10, 50, 40], [0, 20, 80]])
    names = ("short", LONG, HOSTILE[0])
    target = [0.5, 0.25, 0.25]
    return diagnosis_page(diagnose(counts, target, classes=names, clients=names, bootstrap=20))


@pytest.mark.parametrize("build", [one_run, several_runs, charts, diagnosis])
def test_pages_are_read_on_a_telephone_and_on_a_screen(tmp_path: Path, build: object) -> None:
    text = build(tmp_path)  # type: ignore[operator]
    papers = {}
    for width, dark in ((390, False), (390, True), (1200, False)):
        shown = show(text, tmp_path, width=width, dark=dark)
        assert shown.width <= shown.inner == width
        assert shown.smallest[0] >= 9.0, shown.smallest
        assert shown.widest <= width
        # Each chart stands there twice, and one of the two is shown.
        assert shown.drawings == text.count("<svg") / 2
        papers[dark] = shown.paper, shown.ink
    for dark in (False, True):
        rgb = [tuple(int(THEME[k][dark][i : i + 2], 16) for i in (1, 3, 5)) for k in THEME]
        named = dict(zip(THEME, rgb, strict=True))
        assert papers[dark] == tuple("rgb({}, {}, {})".format(*named[k]) for k in ("paper", "ink"))


def test_a_page_that_is_too_wide_and_too_small_is_seen(tmp_path: Path) -> None:
    """The control."""
    text = '<body><p style="width: 600px">wide</p><p style="font-size: 6px">small</p></body>'
    shown = show(text, tmp_path)
    assert shown.width >= 600
    assert shown.smallest == [6, "small"]
