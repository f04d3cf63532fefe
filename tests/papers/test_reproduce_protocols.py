"""The data behind `fedshift reproduce`: protocols, printed numbers, statistics, selection."""

from __future__ import annotations

import csv
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from fedshift.engine.preflight.method import pals_of
from fedshift.errors import DataError, InputError
from fedshift.experiments.config.load import dumps, validate
from fedshift.experiments.config.schema import Config
from fedshift.experiments.experiment import method_of
from fedshift.experiments.task.preparing import prepare
from fedshift.report.intervals import moments
from fedshift.seeds import numpy_generator
from fedshift.server.pals import pals_weights
from fedshift.sweeps.spans import parse_seeds
from fedshift.sweeps.statistics import paired
from fedshift.sweeps.store import Finished, run_of
from fedshift_papers.protocols import fedpals
from fedshift_papers.protocols.study import Metric, Study, narrowed
from fedshift_papers.reproduce.catalogue import shipped_tuning, studies, study
from fedshift_papers.reproduce.plan import Plan, config_of
from fedshift_papers.reproduce.reproduce import Request, reproduce
from fedshift_papers.reproduce.results import pick
from fedshift_papers.reproduce.tuning import read_tuned, says_nothing

PAPERS = Path(fedpals.__file__).parent


@pytest.mark.parametrize(("table", "cells"), [("1", 42), ("2", 3), ("3", 9), ("4", 9)])
def test_printed_numbers_are_the_files(table: str, cells: int) -> None:
    with (PAPERS / f"fedpals_table{table}.csv").open() as file:
        rows = list(csv.DictReader(file))
    shown = study(f"fedpals/table{table}")
    assert len(rows) == cells == len(shown.printed)
    places = {(c.title, c.split, r.label) for c in shown.columns for r in shown.rows}
    assert set(shown.printed) <= places
    for row, cell in zip(rows, shown.printed.items(), strict=True):
        (dataset, split, label), printed = cell
        assert dataset == row["dataset"]
        assert label.startswith(row.get("method", "FedPALS"))
        assert printed.mean == float(row.get("mean") or row["value"])
        assert printed.sd == (float(row["std"]) if row.get("std") else None)
        wanted_split = row.get("label_split") or (f"delta={float(row['delta']):g}" if "delta" in row
                                                  else split)  # fmt: skip
        assert split == wanted_split
        if row.get("lambda"):
            assert label.endswith(f"lambda={row['lambda']}")


def test_a_corrected_row_reads_the_runs_of_the_row_as_trained() -> None:
    """Also for tuned rows. Control: without `tuned_as` its runs are others."""
    whole = narrowed(study("fedpals/corrected"), ("fashion-mnist-mini",), (), ())
    (column,), rows = whole.columns, {row.label: row for row in whole.rows}
    tuned = {(column.key, label): dict.fromkeys(row.grid, 0.125) for label, row in rows.items()}
    plan = Plan(whole, tuned=tuned)
    pairs = [(row, rows[f"{label}, corrected"]) for label, row in rows.items()
             if f"{label}, corrected" in rows]  # fmt: skip
    assert len(pairs) == len(rows) / 2
    for row, moved in pairs:
        name = run_of(config_of(plan, row, column, {"ess": 0.5} if row.ess else {}, 0)).name
        alike = run_of(config_of(plan, moved, column, {"ess": 0.5} if row.ess else {}, 0)).name
        assert name == alike, row.label
        if row.grid:
            other = replace(moved, tuned_as="")
            assert run_of(config_of(plan, other, column, {}, 0)).name != name


def test_columns_of_other_rounds_scale_alike() -> None:
    plan = Plan(narrowed(study("fedpals/fig8b"), (), (), ()), rounds=30)
    assert [plan.rounds_of(c) for c in plan.study.columns] == [30, 6, 3, 1, 1]


def test_seeds_are_numbers_and_ranges() -> None:
    assert parse_seeds("0-2, 5,1") == (0, 1, 2, 5)
    for bad in ("", "2-1", "a", "0-", "0-5000"):
        with pytest.raises(InputError, match="write numbers and ascending ranges"):
            parse_seeds(bad)


def pretended(accuracy: float, loss: float, ess: float, target: float) -> Finished:
    best = {"validation_accuracy": accuracy, "validation_loss": loss, "target_accuracy": target}
    return Finished(
        run_of(validate({"method": {"name": "fedavg"}})), {"best": best, "ess": ess}, {}
    )


def test_validation_decides_and_never_the_test_set() -> None:
    metric = Metric()
    assert pick([pretended(0.5, 1, 9, 0.9), pretended(0.6, 2, 1, 0.1)], metric) == 1
    assert pick([pretended(0.6, 1, 1, 0.9), pretended(0.6, 2, 9, 0.1)], metric) == 1  # larger ESS
    assert pick([pretended(0.6, 2, 9, 0.9), pretended(0.6, 1, 9, 0.1)], metric) == 1  # lower loss
    assert pick([pretended(0.6, 1, 9, 0.1), pretended(0.6, 1, 9, 0.9)], metric) == 0  # the first
    nothing = replace(pretended(0, 0, 0, 0), summary={"best": None})
    with pytest.raises(DataError, match="its summary has no best round"):
        pick([nothing, nothing], metric)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fedpals/table1", "feddrm/table1-published"])
def test_tuned_values_ship_with_the_protocol(name: str) -> None:
    shown = study(name)
    shipped = shipped_tuning(shown)
    assert shipped.name == f"{name.partition('/')[0]}_tuned.json"
    records = read_tuned(shipped)
    assert records
    for (column, row), record in records.items():
        assert column in {c.key for c in shown.columns}
        assert set(record["options"]) == set(next(r.grid for r in shown.rows if r.label == row))


def test_a_grid_of_one_validation_accuracy_says_nothing() -> None:
    """Then the default stays, whatever the losses are; one point alone is no grid."""
    metric = Metric()
    alike = [pretended(0.0, loss, 9, 0.1) for loss in (2.0, 1.0, 3.0)]
    assert says_nothing(alike, metric)
    assert not says_nothing([*alike, pretended(0.01, 5.0, 9, 0.1)], metric)
    assert not says_nothing(alike[:1], metric)


def test_shipped_values_are_the_best_of_their_grids_or_the_default() -> None:
    shown = study("fedpals/table1")
    rows = {row.label: row for row in shown.rows}
    undecided = []
    for (column, label), record in read_tuned(shipped_tuning(shown)).items():
        accuracy = [point["validation_accuracy"] for point in record["grid"]]
        best = max(a for a in accuracy if a is not None)
        assert record["undecided"] == (accuracy.count(best) == len(accuracy))
        if record["undecided"]:
            undecided.append((column, label))
            assert record["options"] == {k: rows[label].options[k] for k in rows[label].grid}
        else:
            tops = [p["options"] for p in record["grid"] if p["validation_accuracy"] == best]
            assert record["options"] in tops
    assert undecided == [("cifar-10 C=2", label) for label in ("AFL", "FedProx", "FedRS")]


# --------------------------------------------------------------------------- statistics


def test_intervals_are_scipys() -> None:
    x = [61.2, 70.5, 55.1, 80.3, 66.6]
    y = [60.0, 64.5, 57.1, 71.3, 60.2]
    interval = moments(x)
    low, high = stats.t.interval(0.95, 4, loc=np.mean(x), scale=stats.sem(x))
    assert (interval.n, interval.mean) == (5, pytest.approx(np.mean(x)))
    assert interval.sd == pytest.approx(np.std(x, ddof=1))
    assert (interval.low, interval.high) == (pytest.approx(low), pytest.approx(high))
    assert interval.sd != pytest.approx(np.std(x))  # the divisor can be told apart
    both = paired(dict(enumerate(x)), {**dict(enumerate(y)), 9: 0.0})
    theirs = stats.ttest_rel(x, y).confidence_interval(0.95)
    assert both is not None
    assert (both.n, both.low, both.high) == (5, pytest.approx(theirs.low),
                                             pytest.approx(theirs.high))  # fmt: skip
    apart = stats.ttest_ind(x, y).confidence_interval(0.95)
    assert both.low != pytest.approx(apart.low)


def test_one_seed_has_no_deviation_and_no_seed_is_refused() -> None:
    assert moments([3.0]) == replace(moments([3.0]), sd=None, low=None, high=None)
    assert paired({0: 1.0}, {1: 2.0}) is None
    with pytest.raises(InputError, match="no values; give at least one"):
        moments([])
    with pytest.raises(InputError, match=r"level = 95; allowed: a probability between 0 and 1"):
        moments([1.0], 95)


# --------------------------------------------------------------------------- the protocols


@pytest.mark.few(2)
@pytest.mark.parametrize("shown", studies().values(), ids=lambda s: s.name)
def test_protocols_are_valid_experiments(shown: Study) -> None:
    """With and without the data."""
    plan = Plan(shown)
    assert len({r.label for r in shown.rows}) == len(shown.rows)
    assert len({c.key for c in shown.columns}) == len(shown.columns)
    for column in shown.columns:
        for row in shown.rows if column is shown.columns[0] or column.by_method else shown.rows[:1]:
            if not row.available:
                continue
            options = {"lam": 0.0} if row.ess else {}
            config = config_of(plan, row, column, options, 3)
            assert config.seeds.resolved().split == 3
            before = row.rounds_before(plan.options_of(row, column))
            assert config.training.rounds == column.rounds + before
            again = validate(tomllib.loads(dumps(config)) | {"name": "another name"})
            assert run_of(config).name == run_of(again).name


def gaussians(**shift: Any) -> Config:
    return validate(
        {
            "data": {"name": "gaussians", "validation": 0.0},
            "shift": {"kind": "natural", "clients": 2, **shift},
            "model": {"name": "linear"},
            "method": {"name": "fedpals", "lam": 0.0},
        }
    )


@pytest.mark.parametrize("delta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("lam", [0.0, 1.0, 25.0])
def test_weights_of_the_synthetic_task_are_the_closed_form(delta: float, lam: float) -> None:
    """a_1 = 1/2 + 11 lam / (360 + 58 lam) for every delta; d^2(T, S) = 0.375 delta^2."""
    ready = prepare(gaussians(delta=delta))
    solved = pals_weights(ready.task.table()["labels"].numpy(), ready.announced, lam=lam)
    assert solved.weights[0] == pytest.approx(0.5 + 11 * lam / (360 + 58 * lam), abs=1e-12)
    assert solved.distance**2 == pytest.approx(0.375 * delta**2, abs=1e-12)


@pytest.mark.slow
def test_fig9_runs(tmp_path: Path) -> None:
    request = Request("fedpals/fig9", tmp_path, splits=("delta=0", "delta=1"), seeds=(0,), rounds=1)
    done = reproduce(request)
    assert len(done.report.trained) == 4
    assert all("1 of 300 rounds, 1 of 5 seeds" in c.note for c in done.outcome.cells)


def test_natural_clients_come_with_the_data() -> None:
    assert [len(c.y) for c in prepare(gaussians()).task.clients] == [40, 18]
    with pytest.raises(InputError, match="gaussians comes with 2 clients; set shift.clients = 2"):
        prepare(gaussians(clients=3))
    with pytest.raises(InputError, match='data set with clients of its own "fashion-mnist"'):
        prepare(validate({"data": {"name": "fashion-mnist"}, "method": {"name": "fedavg"},
                          "shift": {"kind": "natural"}}))  # fmt: skip
    for wrong in ({"target": "uniform"}, {"beta": 0.1}):
        with pytest.raises(InputError, match='kind "natural"'):
            gaussians(**wrong)


def test_the_server_can_be_given_a_noisy_target() -> None:
    """T_p = normalise(T + noise max(eps, 0)); the test set and T itself stay."""
    exact, noisy = prepare(gaussians()), prepare(gaussians(target_noise=0.5))
    assert exact.announced == tuple(exact.task.target.tolist())
    assert noisy.task.target.tolist() == exact.task.target.tolist()
    assert noisy.task.test.y.tolist() == exact.task.test.y.tolist()
    eps = numpy_generator(0, "target noise").standard_normal(3)
    moved = exact.task.target.numpy() + 0.5 * np.maximum(eps, 0.0)
    assert noisy.announced == pytest.approx(tuple(moved / moved.sum()), abs=1e-15)
    assert noisy.announced != pytest.approx(exact.announced, abs=1e-3)
    config = gaussians(target_noise=0.5)
    rule = pals_of(method_of(config.method, config.training, noisy)(lam=0.0))
    assert rule is not None
    assert rule.target == noisy.announced
