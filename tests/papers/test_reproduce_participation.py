"""made/participation and made/slope: what they compare, and each in small."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from fedshift_papers.pictures.figures import figures
from fedshift_papers.protocols import participation
from fedshift_papers.reproduce.catalogue import study
from fedshift_papers.reproduce.figure_pages import draw
from fedshift_papers.reproduce.plan import Plan, config_of
from fedshift_papers.reproduce.reproduce import Request, reproduce

NAME = "made/participation"
WORST = participation.WORST.name


@pytest.mark.slow
def test_rows_of_a_column_share_everything_but_their_weights() -> None:
    table = study(NAME)
    for column in table.columns:
        configs = [config_of(Plan(table), row, column, {}, 3) for row in table.rows]
        first = configs[0]
        for config in configs:
            alike = {"method": first.method, "name": first.name}
            assert config.model_copy(update=alike) == first
            assert config.method.options["weighing_rounds"] == (12, 1)[column.split == "cohort=3"]
            assert config.training.evaluate_every == 1
        before = 20 + first.method.options["weighing_rounds"]
        assert first.training.rounds == column.rounds + before
        assert first.training.cohort == int(column.split[-1])
    assert [row.label for row in participation.RUNS if row.options.get("useful") != 0.0] == [
        "FedAvg",
        "default",
    ]
    # Each row is compared in its own unit.
    for row in table.rows:
        assert (row.shows is not None) == ("worst round" in row.label)
        assert row.against in ("", "-", f"FedAvg, {WORST}")


@pytest.mark.slow
def test_the_study_in_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows and two seeds; cells are the mean, and the least, of the last rounds."""
    short = {row.key: replace(row, options={**row.options, "density_rounds": 1, "hidden": (4,)})
             for row in participation.RUNS}  # fmt: skip
    monkeypatch.setattr(participation, "RUNS", tuple(short.values()))
    worst = tuple(replace(row, options=short[row.key].options) for row in participation.WORSTS)
    monkeypatch.setattr(participation, "WORSTS", worst)
    request = Request(
        NAME, tmp_path, ("binary-world",), ("cohort=3",), ("fedavg", "true"), (0, 1), 3,
        overrides=("training.epochs=1", "training.batch=500"),
    )  # fmt: skip
    done = reproduce(request)
    assert done.report.failures == {}
    assert len(done.report.trained) == 4  # rows of the worst round read the same runs
    cells = {c.row.label: c for c in done.outcome.cells}
    for label, cell in cells.items():
        for value in cell.values:
            lines = (tmp_path / "runs" / value.run.name / "metrics.csv").read_text().splitlines()
            header, rows = lines[0].split(","), [line.split(",") for line in lines[1:]]
            key = "target_accuracy" if "worst" in label else "target_loss"
            curve = [float(row[header.index(key)]) for row in rows]
            assert len(curve) == 1 + 1 + 3
            expected = 100 * min(curve) if "worst" in label else sum(curve) / len(curve)
            assert value.value == pytest.approx(expected)
    assert cells["true weights"].difference is not None
    assert cells[f"true weights, {WORST}"].difference is not None
    assert cells[f"FedAvg, {WORST}"].difference is None
    page = tmp_path / "participation"
    names = {p.name for p in page.glob("*.svg")}
    assert names == {
        "plot.svg", "plot-target_accuracy.svg", "binary-world-cohort=3-target_loss.svg",
    }  # fmt: skip
    # By round, from the first in which the model is trained.
    drawing = (page / "binary-world-cohort=3-target_loss.svg").read_text()
    points = [line.partition('points="')[2] for line in drawing.split("<polyline")[1:]]
    assert all(p.partition('"')[0].count(",") == 3 for p in points[-2:])
    folder = tmp_path / "runs" / cells["true weights"].values[0].run.name
    summary = json.loads((folder / "summary.json").read_text())
    assert 0.2 < summary["importance"]["share"][0] < 0.6
    fedavg = tmp_path / "runs" / cells["FedAvg"].values[0].run.name
    sentences = " ".join(json.loads((fedavg / "summary.json").read_text())["why"])
    assert "Every example weighs 1: this is the control" in sentences
    assert "change nothing" not in sentences


@pytest.mark.slow
def test_the_slopes_are_drawn(tmp_path: Path) -> None:
    draw(figures()["made/slope"], Request("made/slope", tmp_path))
    text = (tmp_path / "slope" / "table.md").read_text()
    rows = {line.split(" | ")[0][2:]: line.split(" | ")[1:] for line in text.splitlines()
            if line.startswith("| ")}  # fmt: skip
    assert 0.8 < float(rows["direct, mixtures"][0]) < 1.2
    assert abs(float(rows["direct, Bernoulli"][0])) < 0.3
    assert (tmp_path / "slope" / "slope.svg").is_file()
