"""The charts of a comparison."""

from __future__ import annotations

import pytest

from fedshift.report.charts import Axis
from fedshift.report.intervals import moments
from fedshift.report.svg import svg
from fedshift.sweeps.drawings import drawings


@pytest.mark.parametrize(("rounds", "marks", "bands"), [(1, 2, False), (3, 6, True), (50, 0, True)])
def test_few_rounds_are_points_and_one_has_no_band(rounds: int, marks: int, bands: bool) -> None:
    """A line through one point is not seen; dots of many rounds would hide theirs."""
    of = moments([0.4, 0.5, 0.6])
    curves = {name: dict.fromkeys(range(1, rounds + 1), of) for name in ("fedavg", "fedpals")}
    charts = drawings("t", Axis("accuracy"), dict.fromkeys(curves, of), "fedavg", curves)
    caption, chart = list(charts.items())[1]
    assert ("bands" in caption) is bands
    assert svg(chart).count("</title></circle>") == marks
