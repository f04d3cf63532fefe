"""The FedDRM paper's tables as data, and the two small experiments on routing."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer

from fedshift.errors import DataError
from fedshift.experiments.measures.served import serving_metrics
from fedshift.record.folder import read_run
from fedshift.record.summary import RouterDetails
from fedshift.report.intervals import Moments
from fedshift.report.page import page
from fedshift.sweeps.records import RECORDS, read_records, write_records
from fedshift.sweeps.store import run_of
from fedshift_papers.command import exit_by_result, show
from fedshift_papers.datasets import heart
from fedshift_papers.protocols import feddrm
from fedshift_papers.reproduce.catalogue import studies, study, targets
from fedshift_papers.reproduce.plan import Plan, config_of, last_rounds
from fedshift_papers.reproduce.reproduce import Reproduced, Request, reproduce
from fedshift_papers.reproduce.results import Cell
from fedshift_papers.reproduce.routing_charts import COVERAGES, mean_defined, mean_risk
from fedshift_papers.reproduce.verdict import verdicts

PAPERS = Path(feddrm.__file__).parent
NAMES = sorted(name for name in studies() if name.startswith("feddrm/"))


def test_every_table_and_figure_of_the_paper_is_there() -> None:
    tables = {f"feddrm/table{n}" for n in (1, 2, 3, 4)}
    figures = {f"feddrm/fig{n}" for n in (3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 14)}
    assert tables | figures <= set(targets())
    others = {"fig3-body", "small", "heart", "lenet", "table1-published", "cifar10"}
    assert set(NAMES) - tables - figures == {f"feddrm/{name}" for name in others}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", NAMES)
def test_every_cell_is_a_valid_experiment(name: str) -> None:
    table = study(name)
    plan = Plan(table)
    for row in table.rows:
        assert row.available
        for column in table.columns:
            config = config_of(plan, row, column, {}, 0)
            assert config.shift.target == "clients"
            share = last_rounds(table.metric.last, column.rounds, table.rounds)
            assert config.training.evaluate_last == share
        assert (row.reads or table.metric.key) in serving_metrics()
    labels = [row.label for row in table.rows]
    assert len(set(labels)) == len(labels)
    assert all((row.against or table.baseline) in ("", "-", *labels) for row in table.rows)


@pytest.mark.parametrize(("number", "cells"), [(1, 66), (2, 66), (3, 24), (4, 66)])
def test_every_printed_number_has_its_cell(number: int, cells: int) -> None:
    table = study(f"feddrm/table{number}")
    places = {(c.title, c.split, r.label) for c in table.columns for r in table.rows}
    assert len(table.printed) == cells
    assert set(table.printed) == places
    with (PAPERS / f"feddrm_table{number}.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    printed = sorted((p.mean, p.sd) for p in table.printed.values())
    assert printed == sorted((float(r["mean"]), float(r["std"])) for r in rows)


def test_tables_1_2_and_4_share_their_runs() -> None:
    """Both metrics come from one run, and alpha = 0.3 of Table 4 is a column of Table 1."""

    def runs(name: str, split: str) -> set[str]:
        table = study(name)
        column = next(c for c in table.columns if c.dataset == "cifar-10" and c.split == split)
        plan = Plan(table)
        return {run_of(config_of(plan, row, column, {}, 0)).name for row in table.rows}

    first = runs("feddrm/table1", "Dir=0.3")
    assert len(first) == 11
    assert first == runs("feddrm/table2", "Dir=0.3") == runs("feddrm/table4", "Dir=0.3")
    assert first.isdisjoint(runs("feddrm/table1", "SPC=5"))


@pytest.mark.parametrize(("rounds", "expected"), [(None, (100, 200)), (80, (10, 20)), (4, (1, 1))])
def test_fine_tuning_keeps_its_share_of_shorter_runs(
    rounds: int | None, expected: tuple[int, int]
) -> None:
    table = study("feddrm/table1")
    plan, column = Plan(table, rounds=rounds), table.columns[0]
    options = {
        row.key: plan.options_of(row, column)["tune_rounds"] for row in table.rows if row.scaled
    }
    assert options["fedavgft"] == options["fedsamft"] == expected[0]
    assert options["fedbabu_drm_repo"] == expected[1]


def test_the_protocol_is_the_papers() -> None:
    table = study("feddrm/table1")
    config = config_of(Plan(table), table.rows[-1], table.columns[0], {}, 0)
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


# --------------------------------------------------------------------------- drawings and the foot


def write_patients(folder: Path) -> tuple[tuple[int, int, int], ...]:
    """Four hospitals of 40 patients each, who differ in age; disease shows in oldpeak.

    Returns each one's patients, ill ones and missing values.
    """
    rng, counts = np.random.default_rng(0), []
    folder.mkdir(parents=True)
    for site, name in enumerate(heart.FILES):
        lines, diagnoses = [], rng.integers(0, 2, 40)
        counts.append((40, int(diagnoses.sum()), 0))
        for sick in diagnoses:
            age, depression = 30 + 10 * site + rng.integers(0, 9), 3 * sick + rng.random()
            lines.append(f"{age},1,1,120,200,0,0,150,0,{depression:.2f},1,0,3,{sick}")
        (folder / name).write_text("\n".join(lines) + "\n")
    return tuple(counts)


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Reproduced]]:
    """feddrm/heart with made-up patients, two rounds and seeds, published; the place and it."""
    place = tmp_path_factory.mktemp("heart")
    counts = write_patients(place / "data" / "heart-disease")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(heart, "OFFICIAL", counts)
        patch.setenv("FEDSHIFT_DATA", str(place / "data"))
        yield place, reproduce(replace(HEART, out=place / "out", publish=place / "small"))


HEART = Request("feddrm/heart", Path(), methods=("feddrm", "fedavg"), seeds=(0, 1), rounds=2)
SVGS = ("", "-own", "-sent", "-risk")


def summaries(place: Path, done: Reproduced) -> list[dict[str, Any]]:
    """The summaries of FedDRM's runs, seed by seed."""
    cell = next(c for c in done.outcome.cells if c.row.label == "FedDRM, mixture")
    paths = (place / "out" / "runs" / v.run.name / "summary.json" for v in cell.values)
    return [json.loads(p.read_text()) for p in paths]


@pytest.mark.slow
def test_heat_maps_and_risk_are_drawn_with_captions(drawn: tuple[Path, Reproduced]) -> None:
    folder = drawn[0] / "out" / "heart"
    index, markdown = (folder / "index.html").read_text(), (folder / "table.md").read_text()
    for kind in SVGS:
        name = f"heart-disease-M=4{kind}.svg"
        drawing = re.findall(r">([^<]+)</text>", (folder / name).read_text())
        assert drawing
        assert set(drawing) <= set(re.findall(r">([^<]+)</text>", index))
        assert f"]({name})" in markdown
    for caption in (
        "Heart disease M=4: accuracy, %; the line: FedAvg, global model",
        "Accuracy of each client&#x27;s own model by class: FedDRM, Heart disease M=4; mean over 2",
        "Where each client&#x27;s queries (rows) are sent: FedDRM",
        "Risk against coverage, by the posterior of the trained router: Heart disease M=4",
    ):
        assert caption in index
    assert "client 2: switzerland" in (folder / "heart-disease-M=4-own.svg").read_text()


@pytest.mark.slow
def test_heat_maps_are_means_over_seeds(drawn: tuple[Path, Reproduced]) -> None:
    folder, runs = drawn[0] / "out" / "heart", summaries(*drawn)
    for name, values, columns in (
        ("own", [s["serving"]["class_accuracy"] for s in runs], runs[0]["classes"]),
        ("sent", [s["serving"]["router"]["sent"] for s in runs], list("0123")),
    ):
        text = (folder / f"heart-disease-M=4-{name}.svg").read_text()
        for j, column in enumerate(columns):
            mean = (values[0][3][j] + values[1][3][j]) / 2
            shown = f"client 3: va, {column}: {mean:.1%} (seeds: 2)"
            assert (shown in text) == (name == "own" or mean > 0)
    assert runs[0]["serving"]["looks"] == ["cleveland", "hungarian", "switzerland", "va"]


def test_means_leave_out_seeds_without_a_value() -> None:
    mean, count = mean_defined([[[0.5, None, 1.0]], [[1.0, None, None]]])
    assert mean[0, [0, 2]].tolist() == [0.75, 1.0]
    assert np.isnan(mean[0, 1])
    assert count.tolist() == [[2, 0, 1]]


def test_risk_is_averaged_at_the_same_coverage() -> None:
    one = RouterDetails((), (), (0.25, 1.0), (0.0, 0.75), 0.0, 0.0, 0.0)
    other = RouterDetails((), (), (0.5, 1.0), (0.25, 0.25), 0.0, 0.0, 0.0)
    mean = mean_risk([one, other])
    assert mean[0] == pytest.approx((0.0 + 0.25) / 2)
    assert mean[-1] == pytest.approx(0.5)
    half = mean[np.argmin(np.abs(np.array(COVERAGES) - 0.525))]
    assert half == pytest.approx((0.275 + 0.25) / 2)


@pytest.mark.slow
def test_the_foot_says_whether_routing_beats_the_global_model(
    drawn: tuple[Path, Reproduced],
) -> None:
    outcome = drawn[1].outcome
    note = outcome.notes[0]
    assert note.startswith("Found on Heart disease M=4: ")
    cells = {c.row.label: c for c in outcome.cells}
    base = cells["FedAvg, global model"].by_seed
    for label in outcome.plan.study.verdict:
        d = cells[label].difference
        assert d is not None
        assert d.mean == pytest.approx(sum(cells[label].by_seed[s] - base[s] for s in (0, 1)) / 2)
        assert f'"{label}"' in note
        assert f"on 2 seeds: {d.mean:+.2f}" in note
    assert note in (drawn[0] / "out" / "heart" / "index.html").read_text().replace("&quot;", '"')


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("moments", "verdict"),
    [
        (Moments(3, 1.0, 0.1, 0.75, 1.25), '"FedDRM, mixture" beats "FedAvg, global model": +1.00'),
        (Moments(3, -1.0, 0.1, -1.25, -0.75), '"FedDRM, mixture" is worse than "FedAvg'),
        (Moments(3, 1.0, 2.0, -1.0, 3.0), '"FedDRM, mixture" does not clearly beat "FedAvg'),
        (Moments(3, -1.0, 2.0, -3.0, 1.0), '"FedDRM, mixture" does not clearly beat "FedAvg'),
        (Moments(1, 1.0, None, None, None), 'is above "FedAvg, global model" on a single seed: +1'),
        (Moments(1, 0.0, None, None, None), 'is not above "FedAvg, global model" on a single'),
    ],
)
def test_the_sentence_follows_the_interval(moments: Moments, verdict: str) -> None:
    table = study("feddrm/heart")
    row = next(r for r in table.rows if r.label == "FedDRM, mixture")
    cell = Cell(row, table.columns[0], 2, {}, None, difference=moments)
    assert verdict in verdicts(table, [cell])[0]
    assert verdicts(table, [replace(cell, difference=None)]) == ()
    assert verdicts(replace(table, verdict=()), [cell]) == ()


@pytest.mark.slow  # tests/papers/test_results.py draws other tables from their records
def test_the_published_table_draws_the_same(drawn: tuple[Path, Reproduced]) -> None:
    place = drawn[0]
    again = reproduce(replace(HEART, out=place / "small", train=False))
    assert again.report.trained == ()
    for kind in SVGS:
        name = f"heart/heart-disease-M=4{kind}.svg"
        assert (place / "small" / name).read_bytes() == (place / "out" / name).read_bytes()
    assert not list((place / "small").rglob("*.safetensors"))


def changed(drawn: tuple[Path, Reproduced], place: Path, change: Callable[[Any], None]) -> Request:
    """The published records once more, with every summary changed."""
    records = read_records(drawn[0] / "small" / "heart" / RECORDS)
    files = {name: dict(record.files) for name, record in records.items()}
    for texts in files.values():
        data = json.loads(texts["summary.json"])
        change(data)
        texts["summary.json"] = json.dumps(data)
    write_records(place / "heart" / RECORDS, files)
    return replace(HEART, out=place, train=False)


@pytest.mark.slow
def test_runs_of_versions_without_details_have_a_table_and_bars(
    drawn: tuple[Path, Reproduced], tmp_path: Path
) -> None:
    done = reproduce(changed(drawn, tmp_path, lambda data: data.pop("serving")))
    assert len(done.outcome.cells[1].values) == 2
    assert [p.name for p in (tmp_path / "heart").glob("*.svg")] == ["heart-disease-M=4.svg"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seeds", "pattern"),
    [
        ((0,), " on a single seed: {difference} (1 more without a value)"),
        ((0, 1), " has no value (2 of 2 seeds)"),
    ],
)
def test_a_router_that_was_not_refitted_is_reported_with_its_reason(
    drawn: tuple[Path, Reproduced],
    tmp_path: Path,
    capsys: Any,
    seeds: tuple[int, ...],
    pattern: str,
) -> None:
    def lose(data: Any) -> None:
        if data["method"] == "feddrm" and any(f"_s{s}-" in data["name"] for s in seeds):
            data["last"]["refitted_accuracy"] = None
            data["why"].append("The router has no refitted layer: it stands still.")

    done = reproduce(changed(drawn, tmp_path, lose))
    cell = next(c for c in done.outcome.cells if c.row.label == "FedDRM, refitted router")
    assert cell.absent == tuple(
        f"seed {s}: The router has no refitted layer: it stands still." for s in seeds
    )
    assert cell.note.endswith(f"{len(seeds)} without a value")
    difference = "" if cell.difference is None else f"{cell.difference.mean:+.2f}"
    assert pattern.format(difference=difference) in done.outcome.notes[0]
    note = 'No value of "FedDRM, refitted router" on Heart disease M=4, seed 0: The router has no'
    assert done.outcome.notes[1].startswith(note)
    assert note.replace('"', "&quot;") in done.page.read_text()
    show(done, False)
    printed = capsys.readouterr().out
    assert note in " ".join(printed.split())
    assert "0 runs trained now" in printed
    with pytest.raises(typer.Exit) as left:
        exit_by_result(done)
    assert left.value.exit_code == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("class_accuracy", [[0.5, 0.5]], '"serving.class_accuracy" has 1 entries, 4 are needed'),
        ("class_accuracy", "x", '"serving.class_accuracy": Input should be'),
        ("router", {"sent": []}, '"serving.router.auc": Field required'),
    ],
)
def test_damaged_details_are_named(
    drawn: tuple[Path, Reproduced], tmp_path: Path, key: str, value: Any, message: str
) -> None:
    def damage(data: Any) -> None:
        data["serving"][key] = value

    with pytest.raises(DataError, match=message) as caught:
        reproduce(changed(drawn, tmp_path, damage))
    assert "Train it again under another --out" in str(caught.value)


@pytest.mark.slow
def test_its_runs_have_pages(drawn: tuple[Path, Reproduced]) -> None:
    value = next(c for c in drawn[1].outcome.cells if c.row.label == "FedDRM, mixture").values[0]
    run = read_run(drawn[0] / "out" / "runs" / value.run.name)
    text = page([run])
    assert run.summary.last is not None
    assert f"{run.summary.last['mixture_accuracy']:.1%}" in text
    assert value.value == pytest.approx(100 * float(run.summary.last["mixture_accuracy"] or 0))
    assert "client 1: hungarian" in text


def test_a_shorter_run_is_measured_over_the_same_share_of_its_rounds() -> None:
    assert [last_rounds(50, n, 800) for n in (800, 400, 40, 20, 1, 1600)] == [50, 25, 2, 1, 1, 50]
    assert last_rounds(1, 20, 800) == 1
