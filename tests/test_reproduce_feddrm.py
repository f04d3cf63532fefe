"""The FedDRM paper's tables as data, and the two small experiments on routing."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from fedshift.experiments.papers import feddrm
from fedshift.experiments.reproduce.catalogue import studies, study
from fedshift.experiments.reproduce.plan import Plan, config_of
from fedshift.experiments.reproduce.store import run_of
from fedshift.experiments.served import measured

PAPERS = Path(feddrm.__file__).parent
NAMES = sorted(name for name in studies() if name.startswith("feddrm/"))


def test_every_table_and_figure_of_the_paper_is_there() -> None:
    tables = {f"feddrm/table{n}" for n in (1, 2, 3, 4)} | {
        f"feddrm/fig{n}" for n in (3, 4, 5, 6, 7)
    }
    assert set(NAMES) == tables | {"feddrm/small", "feddrm/heart", "feddrm/lenet"}


@pytest.mark.parametrize("name", NAMES)
def test_every_cell_is_a_valid_experiment(name: str) -> None:
    found = study(name)
    plan = Plan(found)
    for row in found.rows:
        assert row.available
        for column in found.columns:
            config = config_of(plan, row, column, {}, 0)
            assert config.shift.target == "clients"
            assert config.training.evaluate_last == found.metric.last
        assert (row.reads or found.metric.key) in measured()
    labels = [row.label for row in found.rows]
    assert len(set(labels)) == len(labels)
    assert all((row.against or found.baseline) in ("", "-", *labels) for row in found.rows)


@pytest.mark.parametrize(("number", "cells"), [(1, 66), (2, 66), (3, 24), (4, 66)])
def test_every_printed_number_has_its_cell(number: int, cells: int) -> None:
    found = study(f"feddrm/table{number}")
    places = {(c.title, c.split, r.label) for c in found.columns for r in found.rows}
    assert len(found.printed) == cells
    assert set(found.printed) == places
    with (PAPERS / f"feddrm_table{number}.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    printed = sorted((p.mean, p.sd) for p in found.printed.values())
    assert printed == sorted((float(r["mean"]), float(r["std"])) for r in rows)


def test_tables_1_2_and_4_share_their_runs() -> None:
    """Both metrics come from one run, and alpha = 0.3 of Table 4 is a column of Table 1."""

    def runs(name: str, split: str) -> set[str]:
        found = study(name)
        column = next(c for c in found.columns if c.dataset == "cifar-10" and c.split == split)
        plan = Plan(found)
        return {run_of(config_of(plan, row, column, {}, 0)).name for row in found.rows}

    first = runs("feddrm/table1", "Dir=0.3")
    assert len(first) == 11
    assert first == runs("feddrm/table2", "Dir=0.3") == runs("feddrm/table4", "Dir=0.3")
    assert first.isdisjoint(runs("feddrm/table1", "SPC=5"))


@pytest.mark.parametrize(("rounds", "expected"), [(None, (100, 200)), (80, (10, 20)), (4, (1, 1))])
def test_fine_tuning_keeps_its_share_of_shorter_runs(
    rounds: int | None, expected: tuple[int, int]
) -> None:
    found = study("feddrm/table1")
    plan, column = Plan(found, rounds=rounds), found.columns[0]
    options = {
        row.key: plan.options_of(row, column)["tune_rounds"] for row in found.rows if row.scaled
    }
    assert options["fedavgft"] == options["fedsamft"] == expected[0]
    assert options["fedbabu_drm_repo"] == expected[1]


def test_the_protocol_is_the_papers() -> None:
    found = study("feddrm/table1")
    config = config_of(Plan(found), found.rows[-1], found.columns[0], {}, 0)
    t = config.training
    assert (t.rounds, t.steps, t.batch, t.lr, t.momentum, t.decay) == (
        800,
        10,
        128,
        0.01,
        0.9,
        5e-4,
    )
    assert (t.schedule, t.evaluate_last, config.shift.clients) == ("cosine", 50, 8)
    assert (config.data.test, config.data.validation) == (0.3, 0.0)
    seventh = study("feddrm/fig7")
    tuned = {r.key: r.options["tune_rounds"] for r in seventh.rows if r.scaled}
    assert (tuned["fedavgft"], tuned["fedbabu_drm_repo"]) == (10, 20)
