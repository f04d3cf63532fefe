"""FedPALS' tables and figures: the settings of each, and a small run of each that draws it."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sys
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
import torch

from fedshift.models.pretrained import torchvision_names
from fedshift.models.resnet import ResNet
from fedshift.report.charts import LineChart
from fedshift.sweeps.records import RECORDS, recorded_in
from fedshift.sweeps.store import Store
from fedshift_papers.datasets import pacs
from fedshift_papers.protocols.study import Study, narrowed
from fedshift_papers.reproduce.catalogue import study
from fedshift_papers.reproduce.charts import charts
from fedshift_papers.reproduce.plan import Plan, config_of, runs_of
from fedshift_papers.reproduce.reproduce import Reproduced, Request, reproduce
from support import image_fixtures
from support.image_fixtures import count_as_whole, write_tree, write_wildcam

LINEAR = ("model.name=linear",)
PLAIN = (*LINEAR, "model.pretrained=false", "model.freeze_norm=false", "model.projection=")
PUBLISHED = Path(__file__).parents[2] / "results" / "fedpals"


def columns(name: str) -> list[str]:
    """The columns that are the paper's."""
    return [c.key for c in narrowed(study(name), (), (), ()).columns]


def methods(name: str) -> list[str]:
    return [row.label for row in study(name).rows]


@pytest.mark.slow
def test_figures_have_the_papers_data_and_methods() -> None:
    everything = ["FedPALS", "FedAvg", "FedProx", "SCAFFOLD", "AFL", "FedRS", "Oracle"]
    assert columns("fedpals/fig2") == [f"cifar-10 C={c}" for c in range(2, 11)]
    assert columns("fedpals/fig6") == [f"fashion-mnist C={c}" for c in range(2, 11)]
    assert {key.partition("=")[0] for key in columns("fedpals/fig5")} == {"cifar-10 beta"}
    assert columns("fedpals/fig7") == ["fashion-mnist C=6", "cifar-10 beta=0.2"]
    hundred = [f"cifar-10-m100 C={c}" for c in (2, 3, 10)]
    assert columns("fedpals/fig8a") == [*hundred, *(f"cifar-10 M={m}" for m in (10, 50, 100))]
    assert columns("fedpals/fig8b") == [f"cifar-10 E={e}" for e in (1, 5, 10, 20, 40)]
    assert columns("fedpals/fig3a") == ["pacs C=6"]
    assert columns("fedpals/fig3b") == ["iwildcam M=100"]
    for name in ("fig2", "fig5", "fig6", "fig7"):
        assert methods(f"fedpals/{name}") == everything
    assert methods("fedpals/fig8b") == everything[:4]
    assert methods("fedpals/fig8a") == [
        "FedPALS", "FedPALS, lambda=1000", "FedPALS, to the mix so far", "FedAvg", "FedProx",
    ]  # fmt: skip
    assert methods("fedpals/fig3a") == methods("fedpals/table4")
    assert methods("fedpals/fig3b") == methods("fedpals/table3")


def configs(name: str) -> dict[tuple[str, str], Any]:
    shown = narrowed(study(name), (), (), ())
    return {
        (c.key, row.label): config_of(Plan(shown), row, c, {}, 0)
        for c in shown.columns
        for row in shown.rows
        if not row.ess
    }


@pytest.mark.slow
def test_figures_of_curves_have_the_runs_of_their_tables() -> None:
    for figure, table in (("fig3a", "table4"), ("fig3b", "table3")):
        assert configs(f"fedpals/{figure}") == configs(f"fedpals/{table}")
    assert configs("fedpals/fig2") != configs("fedpals/fig6")


def test_a_hundred_clients_have_cohorts_and_every_ess(tmp_path: Path) -> None:
    """Within a cohort lambda = 0 reaches a smaller ESS than over all, so that none is left out."""
    shown = study("fedpals/fig8a")
    store = Store(tmp_path)
    for column in shown.columns:
        config = config_of(Plan(shown), shown.rows[1], column, {}, 0)
        clients, cohort = config.shift.clients, config.training.cohort
        assert cohort == (None if clients == 9 else (clients + 1) // 10)
        assert config.method.options == {"lam": 1000.0}
        # Of the first seed nothing is there: only lambda = 0 is wanted.
        wanted, whole = runs_of(Plan(shown), shown.rows[0], column, 0, store)
        assert ([c.label for c in wanted], whole) == (["lambda=0"], False)


# --------------------------------------------------------------------------- small runs of each


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PACS of 8-pixel images and an iWildCam of 102 cameras, both small, as complete sets."""
    monkeypatch.setenv("FEDSHIFT_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # Enough for each part of the split to have some.
    monkeypatch.setattr(image_fixtures, "PER_CLASS", 10)
    monkeypatch.setattr(pacs, "COUNTS", dict.fromkeys(pacs.DOMAINS, (10,) * 7))
    monkeypatch.setattr(pacs, "ID_SIZES", dict.fromkeys(pacs.ID_SIZES, (14, 14)))
    write_tree(tmp_path / "data" / "pacs")
    cameras = (1,) * 100 + (8, 8)
    write_wildcam(tmp_path / "data" / "iwildcam_v2.0", cameras, 3, (8, 8))
    count_as_whole(monkeypatch, cameras, 3)
    return tmp_path


def small(target: str, out: Path, *given: str, rounds: int = 1, **more: Any) -> Reproduced:
    dataset, *splits = given
    request = Request(
        f"fedpals/{target}", out, (dataset,), tuple(splits), seeds=(0,), rounds=rounds, **more
    )
    done = reproduce(request)
    assert done.report.failures == {}
    assert all(len(cell.values) == 1 for cell in done.outcome.cells), target
    return done


MINI = "fashion-mnist-mini"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "given", "drawings"),
    [
        ("table1", (MINI, "C=3"), ["plot.svg"]),
        ("corrected", (MINI, "C=3"), ["plot.svg"]),
        ("fig2", (MINI, "C=10"), [f"{MINI}-C-projection.svg", f"{MINI}-C.svg"]),
        ("fig5", (MINI, "beta=1"), [f"{MINI}-beta-projection.svg", f"{MINI}-beta.svg"]),
        ("fig7", (MINI, "C=6"), [f"{MINI}-C=6.svg"]),
        ("fig8a", (f"{MINI}-m100", "C=3"), [f"{MINI}-m100-C.svg"]),
        ("fig8b", (MINI, "E=1", "E=5"), [f"{MINI}-E.svg"]),
        ("fig9", ("gaussians", "delta=0", "delta=1"), ["gaussians-projection.svg"]),
    ],
)
def test_each_starts_finishes_and_draws(
    target: str, given: tuple[str, ...], drawings: list[str], tmp_path: Path
) -> None:
    done = small(target, tmp_path, *given, overrides=LINEAR)
    shown = (tmp_path / target / "table.md").read_text()
    assert re.findall(r"!\[(.*?)\]\(\1\)", shown) == drawings
    assert all("<svg" in (tmp_path / target / name).read_text() for name in drawings)
    assert done.outcome.problems == ()
    if target == "fig8a":
        pals = done.outcome.cells[0].values[0]
        assert len(pals.others) == 4


@pytest.mark.slow
@pytest.mark.parametrize("target", ["table1", "table2", "table4", "fig3a"])
def test_each_of_pacs_starts_finishes_and_draws(target: str, data: Path) -> None:
    """Both columns: the paper's protocol with another network, the oracle included."""
    for dataset in ("pacs-96", "pacs") if target == "table1" else ("pacs",):
        overrides = (*PLAIN, "data.size=8", "data.augment=none")
        done = small(target, data / "out", dataset, rounds=2, overrides=overrides)
        assert {cell.column.dataset for cell in done.outcome.cells} == {dataset}
        name = f"{dataset}-C=6.svg" if target == "fig3a" else "plot.svg"
        assert "<svg" in (data / "out" / target / name).read_text()


@pytest.mark.slow
@pytest.mark.parametrize("target", ["table3", "fig3b"])
def test_each_of_iwildcam_starts_finishes_and_draws(target: str, data: Path) -> None:
    overrides = (*PLAIN, "data.size=8", "data.augment=none", "training.cohort=5")
    small(target, data / "out", "iwildcam", rounds=2, overrides=overrides)
    name = "iwildcam-M=100.svg" if target == "fig3b" else "plot.svg"
    assert "<svg" in (data / "out" / target / name).read_text()


@pytest.mark.slow
def test_pacs_runs_with_weights_of_a_file_and_no_torchvision(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The paper's column but for depth and pixels; its lock has the file's checksum."""
    monkeypatch.setitem(sys.modules, "torchvision", None)
    monkeypatch.delitem(sys.modules, "torchvision.models", raising=False)
    monkeypatch.chdir(data)
    net = ResNet(18, 7)
    values = [v.clone() for v in net.body.state_dict().values()]
    torch.save(dict(zip(torchvision_names(18), values, strict=True)), "resnet18.pth")
    given = ("data.size=8", "data.augment=none", "model.name=resnet18", "model.projection=16")
    without = Request("fedpals/table1", data / "out", ("pacs",), train=False, overrides=given)
    (problem,) = reproduce(without).outcome.problems
    assert "torchvision" in problem
    overrides = (*given, "model.weights=resnet18.pth")
    done = small("table1", data / "out", "pacs", methods=("fedavg",), overrides=overrides)
    (name,) = done.report.trained
    lock = json.loads((data / "out" / "runs" / name / "lock.json").read_text())
    digest = hashlib.sha256(Path("resnet18.pth").read_bytes()).hexdigest()
    assert lock["files"] == {"../../../resnet18.pth": digest}
    assert "torchvision" not in lock["packages"]
    again = small("table1", data / "out", "pacs", methods=("fedavg",), overrides=overrides)
    assert again.report.trained == ()


# --------------------------------------------------------------------------- what is drawn


def drawn(shown: Study, done: Reproduced, out: Path) -> dict[str, LineChart]:
    """The charts of a table by file name."""
    store = Store(out / "runs", recorded_in(out))
    made = charts(shown, done.outcome.cells, store)
    return {name: chart.chart for name, chart in made.items() if isinstance(chart.chart, LineChart)}


@pytest.mark.slow
def test_figure_9_is_drawn_by_the_optimum_of_equation_7(tmp_path: Path) -> None:
    """From the published records: 3/8 delta^2 across, mean and deviation of five runs up."""
    (tmp_path / "fig9").mkdir()
    shutil.copy(PUBLISHED / "fig9" / RECORDS, tmp_path / "fig9")
    done = reproduce(Request("fedpals/fig9", tmp_path, train=False))
    (chart,) = drawn(done.outcome.plan.study, done, tmp_path).values()
    assert chart.x.label == "projection distance, ||T - S'a||²"
    for series, label in zip(chart.series, ("FedPALS", "FedAvg"), strict=True):
        assert series.x == pytest.approx([0.375 * (d / 10) ** 2 for d in range(11)], abs=1e-9)
        cells = [c for c in done.outcome.cells if c.row.label == label]
        for k, cell in enumerate(cells):
            values = [v.value for v in cell.values]
            assert len(values) == 5
            mean, sd = fmean(values), stdev(values)
            assert (series.y[k], series.low[k], series.high[k]) == pytest.approx(
                (mean, mean - sd, mean + sd)
            )


@pytest.mark.slow
def test_panel_a_is_the_squared_distance_of_the_splits(tmp_path: Path) -> None:
    """As the runs' summaries say, but for the oracle, whose clients follow the target."""
    done = small("fig6", tmp_path, MINI, "C=3", "C=10", overrides=LINEAR)
    shown = (tmp_path / "fig6" / "table.md").read_text()
    assert re.findall(r"!\[(.*?)\]\(\1\)", shown) == [f"{MINI}-C-projection.svg", f"{MINI}-C.svg"]
    made = drawn(done.outcome.plan.study, done, tmp_path)
    (series,) = made[f"{MINI}-C-projection.svg"].series
    for k, split in enumerate(("C=3", "C=10")):
        by_label = {c.row.label: c for c in done.outcome.cells if c.column.split == split}
        run = tmp_path / "runs" / by_label["FedAvg"].values[0].run.name / "summary.json"
        distance = json.loads(run.read_text())["hull_distance"]
        assert series.y[k] == pytest.approx(distance**2, abs=1e-12)
        assert by_label["Oracle"].values[0].distance == pytest.approx(0, abs=0.02)
    assert series.y[0] != pytest.approx(0, abs=1e-3)
