"""The MADE/MOON report's table and figures as data, and each of them in small."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from fedshift.errors import InputError
from fedshift_papers.protocols import made
from fedshift_papers.reproduce.catalogue import studies, study
from fedshift_papers.reproduce.plan import Plan, config_of
from fedshift_papers.reproduce.reproduce import Reproduced, Request, make_plan, reproduce
from support.writer_fixtures import write_digits

# Those of the report.
NAMES = sorted(name for name in made.studies())


def column(name: str, dataset: str, split: str) -> object:
    return next(c for c in study(name).columns if (c.dataset, c.split) == (dataset, split))


def test_the_table_and_figures_are_there() -> None:
    assert NAMES == ["made/baselines", "made/fig2", "made/fig3", "made/table1"]
    others = {name for name in studies() if name.startswith("made/")} - set(NAMES)
    assert others == {"made/participation"}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", NAMES)
def test_every_cell_is_a_valid_experiment(name: str) -> None:
    protocol = study(name)
    for row in protocol.rows:
        assert row.available
        for c in protocol.columns:
            config = config_of(Plan(protocol), row, c, {}, 0)
            t = config.training
            assert t.batch == (320 if c.split == "M=1-batch=320" else 64)
            assert (t.lr, t.optimizer, t.momentum) == (0.1, "sgd", 0.0)
            assert (config.model.name, config.model.hidden) == ("mlp", (200,))
            assert (config.shift.target, config.data.validation) == ("test", 0.0)
    labels = [row.label for row in protocol.rows]
    assert set(protocol.verdict) <= set(labels)
    assert protocol.baseline in labels


def test_the_protocol_of_table_1() -> None:
    """T = 5 rounds of 10 updates with 30 clients and sigma = 0.5; MADE's densities come before."""
    protocol = study("made/table1")
    first = protocol.columns[0]
    fedavg, disk, direct = (config_of(Plan(protocol), row, first, {}, 2) for row in protocol.rows)
    assert (fedavg.training.rounds, fedavg.training.steps, fedavg.shift.clients) == (5, 10, 30)
    assert (fedavg.shift.kind, fedavg.shift.noise) == ("writers", 0.5)
    assert disk.training.rounds == 5 + made.DENSITY_ROUNDS + 1
    assert disk.shift == fedavg.shift == direct.shift
    assert direct.training == disk.training
    assert direct.method.options["estimator"] == "direct"
    # What the notes under the table say is chosen.
    assert direct.method.options["temper"] == 0.02
    assert {c.method.options["least_ess"] for c in (disk, direct)} == {0.05}
    short = Plan(protocol, rounds=2)
    assert [config_of(short, row, first, {}, 0).training.rounds for row in protocol.rows] == [
        2,
        2 + made.DENSITY_ROUNDS + 1,
        2 + made.DENSITY_ROUNDS + 1,
    ]
    noisy = [c for c in protocol.columns if c.split.endswith("noisy")]
    assert all(c.extra and c.settings["shift"]["noisy_test"] for c in noisy)


def test_the_protocol_of_the_figures() -> None:
    second, third = study("made/fig2"), study("made/fig3")
    config = config_of(Plan(second), second.rows[0], second.columns[0], {}, 0)
    assert (config.training.rounds, config.training.steps) == (200, 5)
    assert config.training.evaluate_every == 1
    betas = [c.x for c in third.columns if c.dataset == "mnist-writers"]
    assert betas == [0.1, 0.3, 0.5, 0.7, 1.0]
    config = config_of(Plan(third), third.rows[1], third.columns[0], {}, 0)
    assert (config.shift.kind, config.shift.clients) == ("dirichlet-per-class", 5)
    assert config.shift.min_size == 10
    assert config.method.options == {"mu": 1.0, "tau": 0.5}
    columns = study("made/baselines").columns[:4]
    assert [c.settings["shift"]["clients"] for c in columns] == [1, 5, 1, 1]
    training = [c.settings["training"] for c in columns]
    assert [(t["steps"], t["batch"]) for t in training] == [(10, 64), (10, 64), (50, 64), (10, 320)]


def test_the_printed_numbers_stand_beside_every_data_set() -> None:
    cells = study("made/table1").printed
    for title in made.TITLES.values():
        assert cells[title, "sigma=0.5", "FedAvg"].mean == 81.15
        assert cells[title, "sigma=0.5", "MADE"].mean == 90.68
    assert {p.mean for p in study("made/baselines").printed.values()} == {84.5}
    stand_in = next(c for c in study("made/table1").columns if c.dataset == "mnist-writers")
    assert "for EMNIST-Digits" in stand_in.differs


def test_a_wrong_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(InputError, match='Did you mean "made/table1"'):
        make_plan(Request("made/tabel1", Path()))
    with pytest.raises(InputError, match="split of made/fig3"):
        make_plan(Request("made/fig3", Path(), splits=("beta=0.2",)))


def test_rounds_of_densities_can_be_fewer() -> None:
    """-c method.density_rounds=1 reaches the rows that have densities, and no others."""
    request = Request("made/table1", Path(), overrides=("method.density_rounds=1",))
    plan = make_plan(request)
    column = plan.study.columns[0]
    rounds = {r.key: config_of(plan, r, column, {}, 0).training.rounds for r in plan.study.rows}
    assert rounds == {"fedavg": 5, "made": 5 + 1 + 1, "feddisk": 5 + 1 + 1}
    whole = make_plan(replace(request, overrides=()))
    made_row = plan.study.rows[1]
    assert config_of(whole, made_row, column, {}, 0).training.rounds == 5 + made.DENSITY_ROUNDS + 1


def test_rounds_of_densities_need_a_row_that_has_them() -> None:
    one = "method.density_rounds=1"
    request = Request("made/table1", Path(), methods=("fedavg",), overrides=(one,))
    with pytest.raises(InputError, match="no row of --methods has it; add one of made, feddisk$"):
        make_plan(request)
    make_plan(replace(request, methods=("fedavg", "made")))


@pytest.mark.parametrize(
    ("target", "override", "message"),
    [
        ("made/table1", "method.mu=1", "use --methods; -c sets method.density_rounds and "),
        ("made/table1", "method.density_rounds=x", "'x' is no number of rounds; give 1 or more"),
        ("made/table1", "method.density_rounds=0", "0 is no number of rounds; give 1 or more"),
        ("made/table1", "method.density_rounds=true", "True is no number of rounds"),
        ("made/table1", "method.density_rounds=", "None is no number of rounds"),
        ("made/fig3", "method.density_rounds=1", "reproduce sets it itself; use --methods$"),
    ],
)  # fmt: skip
def test_other_options_of_methods_are_refused(target: str, override: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make_plan(Request(target, Path(), overrides=(override,)))


# ---------------------------------------------------------------- each in small


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where made-up FEMNIST digits are found, with one round of densities."""
    folder = tmp_path_factory.mktemp("made")
    few = replace(made.MADE, options={**made.FITTED, "density_rounds": 1})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(made, "MADE", few)
        patch.setenv("FEDSHIFT_DATA", str(write_digits(folder / "data")))
        yield folder


def small_request(place: Path, name: str, *splits: str, rounds: int = 2) -> Request:
    short, rows = ("training.steps=2",), ("fedavg", "made")
    return Request(
        name, place / "out", ("femnist-digits",), splits,
        () if name in ("made/fig3", "made/baselines") else rows, (0,), rounds, overrides=short,
    )  # fmt: skip


@pytest.fixture(scope="module")
def table(place: Path) -> Reproduced:
    return reproduce(small_request(place, "made/table1", "sigma=0.5"))


@pytest.mark.slow
def test_table_1_in_small(place: Path, table: Reproduced) -> None:
    assert table.report.failures == {}
    fedavg, disk = table.outcome.cells
    assert fedavg.difference is None
    assert disk.difference is not None
    text = (place / "out" / "table1" / "table.md").read_text()
    for line in (
        "paper 90.68",
        "2 of 5 rounds, 1 of 5 seeds",
        "LEAF's FEMNIST digits for EMNIST-Digits",
        "Chosen: MADE: one hidden layer of 500",
        "--rounds does not shorten them",
        "on a single seed",
    ):
        assert line in text.replace("\\", ""), line
    for name in ("table.tex", "table.csv", "seeds.csv", "results.json", "index.html", "plot.svg"):
        assert (place / "out" / "table1" / name).is_file()
    run = place / "out" / "runs" / disk.values[0].run.name
    assert json.loads((run / "summary.json").read_text())["importance"] is not None


@pytest.mark.slow
def test_complete_runs_are_not_trained_again(place: Path, table: Reproduced) -> None:
    again = reproduce(small_request(place, "made/table1", "sigma=0.5"))
    assert again.report.trained == ()
    assert len(table.report.trained) == 2
    assert [c.by_seed for c in again.outcome.cells] == [c.by_seed for c in table.outcome.cells]


@pytest.mark.slow
def test_fig_2_counts_rounds_from_the_first_of_training(place: Path, table: Reproduced) -> None:
    done = reproduce(small_request(place, "made/fig2", rounds=3))
    drawing = (place / "out" / "fig2" / "femnist-digits-sigma=0.5.svg").read_text()
    disk = done.outcome.cells[1]
    metrics = (place / "out" / "runs" / disk.values[0].run.name / "metrics.csv").read_text()
    assert len(metrics.splitlines()) == 1 + 3 + 2
    # One point a round for both methods, the density's rounds left out.
    assert (place / "out" / "fig2" / "femnist-digits-sigma=0.5-log.svg").is_file()
    lines = [line for line in drawing.split("<polyline") if "points=" in line]
    counts = sorted(line.partition('points="')[2].partition('"')[0].count(",") for line in lines)
    assert counts[-2:] == [3, 3]


@pytest.mark.slow
def test_fig_3_and_the_baselines_in_small(place: Path, table: Reproduced) -> None:
    third = reproduce(small_request(place, "made/fig3", "beta=0.5", "beta=1"))
    assert third.report.failures == {}
    assert len(third.outcome.cells) == 8
    assert third.outcome.notes[0].startswith("Found on FEMNIST digits beta=0.5: ")
    assert (place / "out" / "fig3" / "femnist-digits-beta.svg").is_file()
    both = reproduce(small_request(place, "made/baselines"))
    assert both.report.failures == {}
    assert [c.printed.mean for c in both.outcome.cells if c.printed] == [84.5, 84.5]
    assert [c.note.endswith("not in the report, 2 of 5 rounds, 1 of 5 seeds") for c in
            both.outcome.cells] == [False, False, True, True]  # fmt: skip
