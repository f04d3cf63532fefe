"""The charts of a comparison."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedshift.report.charts import Axis
from fedshift.report.intervals import moments
from fedshift.report.svg import svg
from fedshift.sweeps.drawings import drawings
from fedshift.sweeps.results import Row
from fedshift.sweeps.table import Table
from fedshift.sweeps.texts import difference


@pytest.mark.parametrize(("rounds", "marks", "bands"), [(1, 2, False), (3, 6, True), (50, 0, True)])
def test_few_rounds_are_points_and_one_has_no_band(rounds: int, marks: int, bands: bool) -> None:
    """A line through one point is invisible; dots of many rounds would hide their line."""
    of = moments([0.4, 0.5, 0.6])
    curves = {name: dict.fromkeys(range(1, rounds + 1), of) for name in ("fedavg", "fedpals")}
    charts = drawings("t", Axis("accuracy"), dict.fromkeys(curves, of), "fedavg", curves)
    caption, chart = list(charts.items())[1]
    assert ("bands" in caption) is bands
    assert svg(chart).count("</title></circle>") == marks


@pytest.mark.slow
def test_a_page_of_many_rounds_is_small(tmp_path: Path) -> None:
    """Control: the table of all rounds is not."""
    of = moments([0.4, 0.5, 0.6])
    names = [f"method {i}" for i in range(12)]
    curves = {name: dict.fromkeys(range(1, 10_001), of) for name in names}
    rows = tuple(Row(name, "", (), of) for name in names)
    table = Table("t", "target_accuracy", names[0], rows, (), (), curves, tmp_path)
    text = table.report(tmp_path / "compare.html").read_text()
    assert len(text) < 2_000_000
    assert "all 10000 are in the folders of the runs" in text
    assert len(table.by_round().rows) == 10_000


def test_the_same_difference_on_every_seed_has_no_interval() -> None:
    assert difference(moments([0.0, 0.0, 0.0]), 1) == "+0.0 on every seed"
    assert difference(moments([0.0, 0.0, 0.3]), 1) == "+0.1 (-0.3 to +0.5)"
    assert difference(moments([0.2]), 1) == "+0.2"
