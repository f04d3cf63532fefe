"""FedDRM's table with baselines as published, and its CIFAR-10 rows on two cores."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from fedshift.evaluation.serving import serve
from fedshift.experiments.config.load import validate
from fedshift.experiments.experiment import Experiment, method_of, run_experiment
from fedshift.experiments.folder.summary import summary
from fedshift.experiments.measures.served import measure, models, routable
from fedshift.experiments.task.preparing import prepare
from fedshift.report.intervals import Moments
from fedshift.sweeps.store import Store, run_of
from fedshift_papers.protocols import feddrm_two_cores as two
from fedshift_papers.reproduce.catalogue import study
from fedshift_papers.reproduce.plan import Plan, config_of, forecast, seconds_left, tuning_runs
from fedshift_papers.reproduce.reproduce import Request, make_plan, reproduce
from fedshift_papers.reproduce.results import Cell
from fedshift_papers.reproduce.verdict import margins
from support.made_up_images import write_images

TINY = ("training.steps=5", "training.batch=4")


@pytest.fixture(scope="module", autouse=True)
def made_up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        yield write_images(tmp_path_factory.mktemp("images"), patch)


@pytest.mark.slow
def test_baselines_as_published_stand_beside_the_authors_runs() -> None:
    table = study("feddrm/table1-published")
    methods = {r.label: (r.method, r.against) for r in table.rows}
    for name in two.NAMES:
        authors = f"{name}, authors' run"
        assert methods[authors] == (f"{name.lower()}_drm_repo", "")
        assert methods[f"{name}, as published"] == (name.lower(), authors)
    first = study("feddrm/table1")
    assert table.columns[:6] == first.columns
    assert len(table.printed) == 6 * 6
    place = ("CIFAR-10", "Dir=0.3", "FedALA")
    assert table.printed[(*place[:2], "FedALA, authors' run")] == first.printed[place]
    small = next(c for c in table.columns if c.dataset == "fashion-mnist-mini")
    configs = {r.label: config_of(Plan(table), r, small, {}, 0) for r in table.rows}
    assert configs["FedAvgFT"].method.options["tune_rounds"] == 10
    assert {c.training.rounds for c in configs.values()} == {80}
    assert {c.training.evaluate_last for c in configs.values()} == {5}


def test_lambda_is_tuned_on_examples_that_the_grid_does_not_train_on() -> None:
    table = study("feddrm/table1-published")
    row, column = two.BY_VALIDATION, table.columns[0]
    grid = [c.run.config for c in tuning_runs(Plan(table), row, column, 0)]
    assert [c.method.options["lam"] for c in grid] == list(two.LAMBDAS)
    assert {c.data.validation for c in grid} == {0.1}
    assert config_of(Plan(table), row, column, {}, 0).data.validation == 0.0


@pytest.fixture(scope="module")
def trained() -> Experiment:
    config = {
        "data": {"name": "fashion-mnist-mini", "validation": 0.2, "test": 0.3, "limit": 600},
        "shift": {"kind": "shards", "clients": 3, "shards_per_client": 3, "target": "clients"},
        "model": {"name": "lenet-gn-small"},
        "method": {"name": "feddrm"},
        "training": {"rounds": 2, "steps": 5, "batch": 16},
    }
    return run_experiment(validate(config))


@pytest.mark.slow
def test_the_accuracy_held_out_is_that_of_the_validation_examples(trained: Experiment) -> None:
    """As `measure` has it where the validation examples stand for the test examples."""
    outcome, ready = trained.outcome, prepare(trained.config)
    task = ready.task
    last = summary(trained).last
    assert last is not None
    parts = (
        method_of(trained.config.method, trained.config.training, ready)(),
        outcome.last,
        outcome.federation,
    )
    served = serve(parts[0].model, models(*parts), task.validation)
    taken = routable(outcome.last, outcome.federation)
    metrics, _ = measure(2, served, outcome.federation.table["n"], taken, None)
    assert last["validation_system_accuracy"] == metrics.system_accuracy
    assert last["validation_system_accuracy"] != last["system_accuracy"]


@pytest.mark.slow
def test_lambda_by_validation_in_small(tmp_path: Path) -> None:
    request = Request(
        "feddrm/table1-published", tmp_path, ("fashion-mnist-mini",), methods=("feddrm",),
        seeds=(0,), rounds=20, overrides=("data.limit=400", *TINY), tune=True,
    )  # fmt: skip
    done = reproduce(request)
    assert done.report.failures == {}
    note = next(n for n in done.outcome.notes if "Tuned on validation" in n)
    assert "FedDRM, lambda by validation: lam = " in note
    (record,) = json.loads((tmp_path / "tuned.json").read_text())
    assert len(done.report.trained) == 5 + len({0.8, record["options"]["lam"]})
    scores = {g["options"]["lam"]: g["validation_system_accuracy"] for g in record["grid"]}
    assert scores[record["options"]["lam"]] == max(scores.values())


def test_the_margin_over_each_group_of_rivals() -> None:
    table = study("feddrm/table1-published")
    column = table.columns[0]
    values = {"FedDRM": 60.0, **dict(zip(two.AUTHORS, (1.0, 55.0, 3.0, 4.0), strict=True))}
    cells = [
        Cell(row, column, 1, {}, None, moments=Moments(1, values[row.label], None, None, None))
        for row in table.rows
        if row.label in values
    ]
    assert margins(table, cells) == (
        'Margin of "FedDRM" on CIFAR-10 Dir=0.3: +5.00 over the best as the authors run them, '
        '"FedALA, authors\' run".',
    )
    named = [c.row.label.replace("authors' run", "as published") for c in cells]
    rows = [replace(c.row, label=label) for c, label in zip(cells, named, strict=True)]
    published = [replace(c, row=row) for c, row in zip(cells, rows, strict=True)]
    assert "over the best as published" in margins(table, published)[0]
    assert margins(table, cells[1:]) == ()
    assert margins(replace(table, rivals={}), cells) == ()


# ------------------------------------------------------------------------- on two cores


@pytest.mark.slow
def test_six_hours_of_two_cores() -> None:
    """66 runs of 80 rounds at 6.2 s, FedSAMFT's at twice that."""
    table = study("feddrm/cifar10")
    runs, seconds = seconds_left(Plan(table), Store(Path("nowhere")))
    assert (runs, seconds) == (66, pytest.approx(6 * 12 * 80 * 6.2))
    assert seconds / 2 < 6 * 3600
    assert {(c.seeds, c.rounds) for c in table.columns} == {(3, 80)}
    assert len(table.printed) == 2 * 2 * 11
    assert {(c.title, c.split, r.label) for c in table.columns for r in table.rows} == set(
        table.printed
    )
    tuned = {r.key: r.options["tune_rounds"] for r in table.rows if r.scaled}
    assert (tuned["fedavgft"], tuned["fedbabu_drm_repo"]) == (10, 20)


@pytest.mark.slow
def test_a_forecast_counts_what_is_left(tmp_path: Path) -> None:
    plan = make_plan(Request("feddrm/cifar10", tmp_path, rounds=8, methods=("feddrm",)))
    store = Store(tmp_path)
    assert seconds_left(plan, store) == (6, pytest.approx(6 * 8 * 6.2))
    text = forecast(plan, store, 2)
    assert text is not None
    assert "6 runs, about 5 min of one core as measured for this table, 2 min with --jobs 2" in text
    for row, column in ((plan.study.rows[0], c) for c in plan.study.columns):
        for seed in range(3):
            name = tuning_name(plan, row, column, seed)
            (tmp_path / name).mkdir()
            (tmp_path / name / "summary.json").write_text("{}")
            left = forecast(plan, store, 2)
    assert left is None
    assert forecast(Plan(study("feddrm/table1")), store, 2) is None


def tuning_name(plan: Plan, row: object, column: object, seed: int) -> str:
    return run_of(config_of(plan, row, column, {}, seed)).name  # type: ignore[arg-type]


@pytest.mark.slow
def test_its_rows_in_small(tmp_path: Path) -> None:
    messages: list[str] = []
    request = Request(
        "feddrm/cifar10", tmp_path, splits=("SPC=5",), methods=("feddrm", "fedavgft"), seeds=(0,),
        rounds=2, overrides=("model.name=lenet-gn-small", *TINY),
    )  # fmt: skip
    done = reproduce(request, tell=messages.append)
    assert (done.report.failures, len(done.report.trained)) == ({}, 2)
    assert messages[0].startswith("forecast: 2 runs, about 0 min")
    page = done.page.with_name("table.md").read_text()
    assert "LeNet and 80 rounds for ResNet-18 and 800" in page
    assert "| 58.50 ± 0.23 |" in page  # the paper's FedDRM at SPC=5
