"""`fedshift reproduce labelsets/natural`, and the sentences that say which row is ahead."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from fedshift.datasets.natural.loading import find_table, natural_table
from fedshift.sweeps.statistics import paired
from fedshift.sweeps.store import run_of
from fedshift_papers.protocols.study import Study, missing_data
from fedshift_papers.reproduce.catalogue import study
from fedshift_papers.reproduce.plan import Plan, config_of
from fedshift_papers.reproduce.reproduce import Request, reproduce
from fedshift_papers.reproduce.results import Cell, Value
from fedshift_papers.reproduce.verdict import verdicts

PRIVATE = "private FedAvg, global model"
AHEAD = "private SCAFFOLD, global model"


def test_the_protocol() -> None:
    table = study("labelsets/natural")
    assert [c.heading for c in table.columns] == [
        "Penguins E=1", "Penguins E=10", "Flights E=1", "Storms E=1",
    ]  # fmt: skip
    assert [c.seeds for c in table.columns] == [20, 20, 5, 5]
    for column in table.columns:
        configs = [config_of(Plan(table), row, column, {}, 1) for row in table.rows]
        assert len({(c.data, c.shift, c.server, c.model, c.seeds) for c in configs}) == 1
        assert (configs[0].data.source, configs[0].shift.target) == ("natural", "clients")
        assert configs[0].server.unlabeled > 0
        # Own models and the global one are of the same runs.
        assert len({run_of(c).name for c in configs}) == 14


def test_every_row_is_compared_with_what_it_should_be() -> None:
    rows = {row.label: row for row in study("labelsets/natural").rows}
    for method in ("FedAvg", "FedProx", "SCAFFOLD"):
        for model in ("global model", "own models"):
            assert rows[f"private {method}, {model}"].against == f"public {method}, {model}"
    assert rows["private Ditto, own models"].against == "public Ditto, own models"
    tuned = {label: row for label, row in rows.items() if " + " in label}
    assert len(tuned) == 6
    for label, row in tuned.items():
        mode = label.split()[0]
        assert (row.options["mode"], row.against) == (mode, f"{mode} FedAvg, global model")
    for mode in ("private", "public"):
        kl = rows[f"{mode} FedAvg + KL in three rounds, global model"].options
        assert kl == {"mode": mode, "tune": "kl", "tune_part": "all", "tune_rounds": 3}
    within = study("labelsets/natural").metric_of(rows[PRIVATE]).within
    assert within == (0.0, 100.0)
    assert {row.against for row in rows.values()} <= {*rows, ""}


def cells(table: Study, **values: tuple[float, ...]) -> list[Cell]:
    """Cells of the first column with one value for each seed, by the rows' labels."""
    column, made = table.columns[0], []
    for row in table.rows:
        if row.label in values:
            run = run_of(config_of(Plan(table), row, column, {}, 0))
            of = [Value(seed, v, 20, run, {}, "") for seed, v in enumerate(values[row.label])]
            made.append(Cell(row, column, 20, {}, None, values=tuple(of)))
    return made


@pytest.mark.parametrize(
    ("ahead", "verdict"),
    [
        ((92.0, 93.0, 95.0), "beats"),
        ((88.0, 89.0, 89.5), "is worse than"),
        ((88.0, 93.0, 90.0), "does not clearly beat"),
    ],
)
def test_the_foot_says_which_method_is_ahead(ahead: tuple[float, ...], verdict: str) -> None:
    """By the difference paired by seed. Control: seeds of only one method do not count."""
    table, base = study("labelsets/natural"), (90.0, 90.0, 90.0, 0.0)
    made = cells(table, **{PRIVATE: base, AHEAD: ahead})
    d = paired(dict(enumerate(ahead)), dict(enumerate(base)), kind="bootstrap", within=(0, 100))
    assert d is not None
    wins = sum(v > 90 for v in ahead)
    assert verdicts(table, made) == (
        f'Found on Penguins E=1: "{AHEAD}" {verdict} "{PRIVATE}": {d.mean:+.1f} '
        f"({d.low:+.1f} to {d.high:+.1f}), 3 seeds, ahead on {wins}.",
    )
    assert verdicts(table, made[:1]) == ()
    assert verdicts(table, [made[0], replace(made[1], values=())]) == ()
    assert verdicts(replace(table, compared=()), made) == ()


def test_the_question_is_asked_of_drawn_sets_too() -> None:
    assert study("labelsets/open").compared == study("labelsets/natural").compared
    assert study("labelsets/natural").compared == ((AHEAD, PRIVATE),)


def test_a_package_that_is_absent_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", [])
    # Another test of this process may have imported it.
    monkeypatch.delitem(sys.modules, "palmerpenguins", raising=False)
    assert find_table(natural_table("penguins")) is None
    sentence = missing_data("penguins")
    assert sentence is not None
    assert sentence.startswith('data set "penguins" was not found. Get it: pip install')


@pytest.mark.slow
def test_the_study_runs(tmp_path: Path) -> None:
    if missing_data("penguins") is not None:
        pytest.skip("palmerpenguins is not installed (extra data)")
    request = Request(
        "labelsets/natural", tmp_path, datasets=("penguins",), splits=("E=1",), seeds=(0, 1, 2),
        rounds=1, overrides=("model.name=mlp", "model.hidden=[4]"), methods=("fedavg", "scaffold"),
    )  # fmt: skip
    done = reproduce(request)
    assert (len(done.report.trained), done.report.failures) == (30, {})
    assert all(0 <= v.value <= 100 for c in done.outcome.cells for v in c.values)
    page = (tmp_path / "natural" / "table.md").read_text()
    assert f'Found on Penguins E=1: "{AHEAD}"' in page
    assert (tmp_path / "natural" / "penguins-E=1.svg").exists()
    assert reproduce(request).report.trained == ()


def test_the_methods_page_says_what_was_found() -> None:
    """Its sentences on natural and drawn label sets match these verdicts."""
    root = Path(__file__).parents[2]
    on_page = {}
    for name in ("natural", "open"):
        page = (root / "results" / "labelsets" / name / "table.md").read_text()
        on_page |= dict(re.findall(rf'^- Found on (.+?): "{AHEAD}" (.+?) "', page, re.M))
    assert on_page == {
        "Penguins E=1": "does not clearly beat",
        "Penguins E=10": "beats",
        "Flights E=1": "beats",
        "Storms E=1": "does not clearly beat",
        "Fashion-MNIST C=2": "is worse than",
        "Fashion-MNIST C=3": "is worse than",
        "Fashion-MNIST C=5": "does not clearly beat",
    }
    text = " ".join((root / "docs" / "methods" / "labelsets.md").read_text().split())
    assert "behind private FedAvg with 2 and 3 labels a client, and level with 5" in text
    assert "ahead on flights, and on penguins with ten local epochs, and level on storms" in text
