"""Logarithmic axes of line charts."""

from __future__ import annotations

import math
import re

import pytest

from fedshift.report.charts import Axis, LineChart, Series, log_ticks, logged
from fedshift.report.svg import svg

X = (1.0, 10.0, 100.0)


def drawing(y: tuple[float | None, ...], *, log: bool) -> str:
    axes = Axis("round", log=log), Axis("loss", log=log)
    return svg(LineChart("loss by round", (Series("FedAvg", X, y, points=True),), *axes))


def places(text: str) -> list[tuple[float, ...]]:
    points = re.findall(r'<polyline points="([^"]+)"', text)
    return [tuple(map(float, p.split(","))) for p in max(points, key=len).split()]


def test_a_power_law_is_a_straight_line() -> None:
    """y = 2 x^-1/2 has one slope along logarithmic axes, and not along linear ones."""
    y = tuple(2 * v**-0.5 for v in X)
    for log in (True, False):
        (x1, y1), (x2, y2), (x3, y3) = places(drawing(y, log=log))
        straight = math.isclose((y2 - y1) / (x2 - x1), (y3 - y2) / (x3 - x2), rel_tol=1e-3)
        assert straight == log


def test_ticks_and_notes_have_the_numbers_and_not_their_logarithms() -> None:
    text = drawing((2.0, 0.5, 0.2), log=True)
    shown = re.findall(r">([^<]+)</text>", text)
    assert {"1", "10", "100", "0.2", "0.5", "2"} <= set(shown)
    assert "FedAvg: 10, 0.5" in text


@pytest.mark.parametrize(
    ("low", "high", "numbers"),
    [(0.0, 1.0, [1, 2, 5, 10]), (-1.0, 3.0, [0.1, 1, 10, 100, 1000]), (0.1, 0.2, [])],
)
def test_ticks_are_round_numbers(low: float, high: float, numbers: list[float]) -> None:
    assert [10**t for t in log_ticks(low, high)] == pytest.approx(numbers)


def test_what_has_no_logarithm_is_left_out() -> None:
    series = Series("a", (0.0, 1.0, 10.0), (1.0, 0.0, 100.0), (0.5, -1.0, 10.0), (2.0, 1.0, 1000.0))
    by_both = logged(series, Axis("x", log=True), Axis("y", log=True))
    assert (by_both.x, by_both.y) == ((0.0, 1.0), (None, 2.0))
    assert (by_both.low, by_both.high) == ((None, 1.0), (0.0, 3.0))
    assert logged(series, Axis("x"), Axis("y")) == series
