"""`fedshift reproduce labelsets/...`: protocols, bootstrap intervals, a small run of each."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from fedshift.errors import InputError
from fedshift.report.intervals import moments
from fedshift.shifts import LabelSetSplit
from fedshift.sweeps.statistics import bootstrapped, paired
from fedshift.sweeps.store import Store, run_of
from fedshift_papers.reproduce.catalogue import studies, study
from fedshift_papers.reproduce.derived import DERIVED
from fedshift_papers.reproduce.plan import Plan, config_of
from fedshift_papers.reproduce.reproduce import Reproduced, Request, make_plan, reproduce

NAMES = sorted(name for name in studies() if name.startswith("labelsets/"))
SMALL = ("model.name=linear", "server.unlabeled=40", "server.validation=20")
MLP = ("model.name=mlp", "model.hidden=[8]", *SMALL[1:])


# --------------------------------------------------------------------------- the protocols


def test_the_studies() -> None:
    all_ = (
        "absent", "clients", "graph", "natural", "open", "overlap", "rounds", "scaling", "sweep",
        "tuning", "variants",
    )  # fmt: skip
    assert [f"labelsets/{name}" for name in all_] == NAMES


def test_overlap_at_fixed_labels_and_labels_per_client() -> None:
    """Connectivity of a ring is 2 - 2 cos(2 pi / 10), of all pairs 10."""
    table = study("labelsets/graph")
    columns = [c for c in table.columns if c.title == "CIFAR-10"]
    shifts = [c.settings["shift"] for c in columns]
    assert [s["reach"] for s in shifts] == [0, 1, 2, 3, 4, 5]
    assert {(s["clients"], s["labels_per_client"], s["samples"]) for s in shifts} == {(90, 2, 200)}
    x = [c.x for c in columns]
    assert x[0] == 0
    assert x[1] == pytest.approx(2 - 2 * np.cos(2 * np.pi / 10), abs=5e-4)
    assert x[5] == 10
    assert x == sorted(x, key=float)
    assert len(set(x)) == 6


def test_rounds_looks_at_every_round_of_the_absent_labels() -> None:
    table = study("labelsets/rounds")
    assert {r.options["tune"] for r in table.rows} == {"pairwise"}
    assert [r.label for r in table.rows] == [
        "public FedAvg + pairwise", "private FedAvg + pairwise",
        "private FedAvg + pairwise over union",
    ]  # fmt: skip
    config = config_of(Plan(table), table.rows[0], table.columns[0], {}, 0)
    assert (config.training.evaluate_every, config.training.cohort) == (1, 5)


def test_clients_have_accuracy_and_bytes() -> None:
    table = study("labelsets/clients")
    assert [c.x for c in table.columns if c.title == "CIFAR-10"] == [10, 100, 1000]
    metrics = {r.label: table.metric_of(r) for r in table.rows}
    assert metrics["private FedAvg"].within == (0.0, 100.0)
    assert metrics["private FedAvg, bytes"].key == "bytes_both"
    assert metrics["private FedAvg, bytes"].within == (-np.inf, np.inf)
    assert {(c.rounds, c.seeds) for c in table.columns} == {(150, 10)}


def test_tuning_has_the_specified_settings() -> None:
    """Losses x C x local epochs x modes: one small setting, two full ones of ten rounds or less."""
    table = study("labelsets/tuning")
    tunes = {
        tuple(r.options.get(k) for k in ("mode", "tune", "tune_part", "tune_rounds"))
        for r in table.rows
    }
    losses = [("none", None, None), ("mse", None, None), ("pairwise", None, None)]
    losses += [("kl", "all", None), ("kl", "all", 3)]
    assert tunes == {(mode, *loss) for mode in ("private", "public") for loss in losses}
    for title, labels, samples, seeds in (
        ("Fashion-MNIST-mini", (2, 3, 5), 300, 10), ("Fashion-MNIST", (3, 5), 2000, 3),
        ("CIFAR-10", (3, 5), 2000, 3),
    ):  # fmt: skip
        columns = [c for c in table.columns if c.title == title]
        assert [c.split for c in columns] == [f"C={c}-E={e}" for c in labels for e in (1, 10)]
        assert {c.seeds for c in columns} == {seeds}
        assert {c.rounds for c in columns} == ({10, 20} if samples == 300 else {4, 10})
        config = config_of(Plan(table), table.rows[0], columns[1], {}, 0)
        assert config.shift.shift() == LabelSetSplit(labels[0], samples=samples)
        t = config.training
        assert (t.epochs, t.lr, t.batch, t.evaluate_every) == (10, 0.1, 32, 1)
    against = {r.label: r.against for r in table.rows}
    assert against["private FedAvg + KL in 3 rounds"] == "private FedAvg"
    assert against["public FedAvg + KL"] == "public FedAvg"
    variants = study("labelsets/variants")
    given = [r.options for r in variants.rows if r.options["mode"] == "private"]
    assert {k for o in given for k in o} == {
        "mode", "tune", "tune_part", "tune_moments", "tune_weights", "tune_temperature",
        "tune_stop", "tune_steps",
    }  # fmt: skip


def test_a_correlation_over_rounds() -> None:
    def summary(losses: list[float | None], absent: list[int]) -> dict[str, Any]:
        rounds = [{"absent": a, "loss_before": b} for a, b in zip(absent, losses, strict=True)]
        return {"label_sets": {"rounds": rounds}}

    of = DERIVED["absent_loss_correlation"]
    assert of(summary([1.0, 3.0, 2.0], [0, 2, 1])) == pytest.approx(1.0)
    assert of(summary([3.0, 1.0, 2.0], [0, 2, 1])) == pytest.approx(-1.0)
    x, y = [0, 2, 1, 5], [1.0, 3.0, 9.0, 2.0]
    assert of(summary(list(y), x)) == pytest.approx(stats.pearsonr(x, y).statistic)
    assert of(summary([1.0, 1.0, 1.0], [0, 2, 1])) is None
    assert of(summary([None, None, None], [0, 2, 1])) is None
    assert of({"label_sets": None}) is None


def test_the_sweep_is_the_papers_conditions() -> None:
    table = study("labelsets/sweep")
    given = {(r.method, r.options["mode"], r.options["tune"]) for r in table.rows}
    methods = ("labelset_fedavg", "labelset_fedprox")
    modes, tunes = ("private", "public"), ("none", "mse", "pairwise")
    assert given == set(product(methods, modes, tunes))
    assert len(table.rows) == 12
    for title in ("Fashion-MNIST", "CIFAR-10"):
        splits = [c.split for c in table.columns if c.title == title]
        assert splits == ["C=2", "C=3", "C=5", "C=7", "C=10"]
    config = config_of(Plan(table), table.rows[0], table.columns[0], {}, 0)
    assert config.shift.shift() == LabelSetSplit(2, samples=2000)
    assert (config.shift.target, config.shift.clients) == ("union", 10)
    assert (config.server.unlabeled, config.training.rounds) == (5000, 150)
    t = config.training
    assert (t.lr, t.batch, t.epochs, t.steps) == (0.1, 32, None, None)  # one epoch
    assert (t.momentum, t.decay, t.optimizer) == (0.0, 0.0, "sgd")
    assert config.model.name == "lenet"
    assert {c.seeds for c in table.columns} == {10}
    assert table.printed == {}  # no number of the paper is known


def test_the_overlap_and_scaling_studies() -> None:
    """Disjoint to full overlap at three labels each; 10 to 1,000 clients of the same examples."""
    overlap, scaling = study("labelsets/overlap"), study("labelsets/scaling")
    for title in ("Fashion-MNIST", "CIFAR-10"):
        shifts = [c.settings["shift"] for c in overlap.columns if c.title == title]
        assert [s["common_labels"] for s in shifts] == [0, 1, 2, 3]
        assert {(s["clients"], s["labels_per_client"]) for s in shifts} == {(3, 3)}
    shifts = [c.settings["shift"] for c in scaling.columns if c.title == "Fashion-MNIST"]
    assert [s["clients"] for s in shifts] == [10, 30, 100, 300, 1000]
    assert all(19_800 <= s["clients"] * s["samples"] <= 20_000 for s in shifts)


@pytest.mark.slow
def test_what_is_compared_with_what() -> None:
    against = {r.label: r.against for r in study("labelsets/sweep").rows}
    assert against["private FedAvg"] == "public FedAvg"
    assert against["private FedProx"] == "public FedProx"
    assert against["public FedProx"] == "public FedAvg"
    assert against["private FedProx + MSE"] == "private FedProx"
    for name in NAMES:
        labels = {r.label for r in study(name).rows}
        assert {r.against for r in study(name).rows} <= {*labels, "-"}
    ours = {r.label: r.against for r in study("labelsets/open").rows}
    assert ours["private Ditto, own models"] == "public Ditto, own models"
    assert ours["public Ditto, own models"] == "public FedAvg, own models"
    assert ours["private SCAFFOLD, global model"] == "public SCAFFOLD, global model"
    assert "private Ditto, global model" not in ours


def test_rows_of_a_seed_have_one_split() -> None:
    """The server keeps its examples back for untuned rows too."""
    table = study("labelsets/sweep")
    configs = [config_of(Plan(table), r, table.columns[0], {}, 1) for r in table.rows]
    assert len({(c.shift, c.server, c.seeds) for c in configs}) == 1
    names = [run_of(c).name for c in configs]
    assert len(set(names)) == 12
    assert any("_fedprox_mu=0.01_private_pairwise_" in n for n in names)
    absent = study("labelsets/absent")
    assert {c.settings["training"]["cohort"] for c in absent.columns} == {5}
    rows = {row.label: row for row in absent.rows}
    kl, pairwise = rows["private FedAvg + KL"], rows["private FedAvg + pairwise"]
    assert kl.options == {"mode": "private", "tune": "kl", "tune_part": "all"}
    assert kl.against == pairwise.against == "private FedAvg"
    assert rows["private FedAvg + KL, mass"].options == kl.options
    assert [row.label for row in study("labelsets/rounds").rows if "KL" in row.label] == []


# --------------------------------------------------------------------------- bootstrap


def test_the_bootstrap_is_the_exact_one() -> None:
    """Against all n^n resamples: quantiles of the mean to within the resampling's error."""
    values = [1.0, 4.0, 2.0, 8.0, 5.5]
    means = np.sort([np.mean(s) for s in product(values, repeat=5)])
    table = bootstrapped(values)
    for quantile, side in ((0.025, table.low), (0.975, table.high)):
        assert side is not None
        below = np.searchsorted(means, side, "left") / len(means)
        upto = np.searchsorted(means, side + 1e-9, "right") / len(means)
        error = 5 * np.sqrt(quantile * (1 - quantile) / 10_000)
        assert below - error <= quantile <= upto + error
    assert (table.n, table.mean, table.sd) == (5, moments(values).mean, moments(values).sd)
    assert table.low != pytest.approx(moments(values).low, abs=0.5)  # not Student's
    assert bootstrapped(values) == table  # the same each time
    tripled = bootstrapped([3 * v + 1 for v in values])
    assert tripled.low == pytest.approx(3 * (table.low or 0) + 1)  # resampled alike
    assert bootstrapped([2.0]) == moments([2.0])


def test_of_three_seeds_it_is_the_range() -> None:
    table = bootstrapped([1.0, 2.0, 7.0])
    assert (table.low, table.high) == (1.0, 7.0)


def test_differences_are_resampled_in_pairs() -> None:
    ours, theirs = {0: 50.0, 1: 60.0, 2: 90.0}, {0: 49.0, 1: 59.0, 2: 89.0, 3: 0.0}
    table = paired(ours, theirs, kind="bootstrap")
    assert table is not None
    assert (table.n, table.mean, table.low, table.high) == (3, 1.0, 1.0, 1.0)
    apart = bootstrapped(list(ours.values()))
    assert apart.low is not None
    assert apart.low < apart.mean - 5


# --------------------------------------------------------------------------- small runs


def small(name: str, out: Path, **changes: Any) -> Reproduced:
    request = Request(
        f"labelsets/{name}", out, datasets=("fashion-mnist-mini",), seeds=(0, 1), rounds=1,
        overrides=SMALL,
    )  # fmt: skip
    return reproduce(replace(request, **changes))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "changes", "runs"),
    [
        ("sweep", {"splits": ("C=3",), "methods": ("fedavg",)}, 12),
        ("overlap", {"splits": ("common=1",), "seeds": (0,)}, 6),
        ("absent", {"seeds": (0,)}, 9),
        ("open", {"seeds": (0,), "overrides": ("model.name=linear",)}, 6),
        ("scaling", {"seeds": None, "overrides": ("model.name=linear",)}, 4),
        ("graph", {"seeds": (0,), "splits": ("connectivity=0", "connectivity=10")}, 12),
        ("rounds", {"seeds": (0, 1), "rounds": 4}, 6),
        ("clients", {"seeds": (0,), "overrides": ("model.name=linear",)}, 4),
        ("tuning", {"splits": ("C=3-E=1",), "rounds": 2, "overrides": MLP}, 20),
        ("variants", {"seeds": (0,), "splits": ("C=3-E=1",), "overrides": MLP}, 10),
    ],
)
def test_every_study_runs(name: str, changes: dict[str, Any], runs: int, tmp_path: Path) -> None:
    done = small(name, tmp_path, **changes)
    assert (len(done.report.trained), done.report.failures) == (runs, {})
    # Too few rounds may have as many absent labels in each: no correlation then.
    assert all(c.values or c.absent for c in done.outcome.cells)
    assert list((tmp_path / name).glob("fashion-mnist-mini-*.svg"))
    page = (tmp_path / name / "table.md").read_text()
    assert "not in the paper" in page.lower()
    assert "Chosen: " in page
    assert ("95 % bootstrap interval" in page) == (name != "scaling")
    again = small(name, tmp_path, **changes)
    assert again.report.trained == ()
    if name == "scaling":
        check_bytes(done)
    if name == "clients":
        kb = {c.row.label: c.values[0].value for c in done.outcome.cells}
        assert kb["public FedAvg, bytes"] == pytest.approx(2 * 4 * 785 * 10 / 1000, rel=1e-2)
        assert 0 <= kb["private FedAvg"] <= 100
        assert len(list((tmp_path / name).glob("*.svg"))) == 2
    if name == "tuning":
        page = (tmp_path / name / "table.md").read_text()
        assert "fashion-mnist-mini-C=3-E=1-target_accuracy.svg" in page
        assert "private FedAvg + KL in 3 rounds" in page
        ends = {c.row.label: c.values[0].value for c in done.outcome.cells}
        three, always = (ends[f"private FedAvg + KL{end}"] for end in (" in 3 rounds", ""))
        assert three != always  # the fourth of four rounds
    if name == "rounds":
        assert all(-1 <= v.value <= 1 for c in done.outcome.cells for v in c.values)
        drawings = {p.name for p in (tmp_path / name).glob("*.svg")}
        stem = "fashion-mnist-mini-C=2"
        assert drawings == {f"{stem}.svg", f"{stem}-loss.svg", f"{stem}-absent.svg"}
    if name == "sweep":
        seen = done.outcome.cells[0].values[0]
        final = Store(tmp_path / "runs").read(seen.run).summary["final"]
        assert final["validation_accuracy"] == seen.validation > 0  # --tune goes by these
        assert final["validation_loss"] > 0


def check_bytes(done: Reproduced) -> None:
    """784 x 10 and 10 of a linear model, 2 of 10 rows in private mode; clients do not matter."""
    kb = {(c.column.split, c.row.label): c.values[0].value for c in done.outcome.cells}
    for split in ("M=10", "M=100"):
        assert kb[split, "whole model"] == pytest.approx(4 * 785 * 10 / 1000)
        assert kb[split, "public, up"] == pytest.approx((4 * 785 * 10 + 12) / 1000)
        assert kb[split, "private, up"] == pytest.approx((4 * 785 * 2 + 12) / 1000)
        assert kb[split, "private, down"] == pytest.approx((4 * 785 * 2 + 16) / 1000)


@pytest.mark.slow
def test_what_is_reduced_is_reported(tmp_path: Path) -> None:
    done = small("sweep", tmp_path, splits=("C=3",), methods=("fedavg",), seeds=(0,), train=False)
    notes = " ".join(done.outcome.notes)
    assert "Changed from the protocol: server.unlabeled=40." in notes
    assert "Changed from the protocol: model.name=linear." in notes
    assert "covers a mean in 75 % of cases" in notes
    record = json.loads((tmp_path / "sweep" / "results.json").read_text())
    assert "server.unlabeled=40" in record["changed"]


def test_what_a_table_sets_itself_is_refused(tmp_path: Path) -> None:
    request = Request("labelsets/sweep", tmp_path, overrides=("shift.samples=10",))
    with pytest.raises(InputError, match="-c shift.samples: reproduce sets it itself; use --split"):
        make_plan(request)
    with pytest.raises(InputError, match='unknown key "server.unlabelled"'):
        make_plan(replace(request, overrides=("server.unlabelled=10",)))
    with pytest.raises(InputError, match="method of labelsets/sweep"):
        make_plan(replace(request, overrides=(), methods=("scaffold",)))
