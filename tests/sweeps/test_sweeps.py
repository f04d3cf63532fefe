"""Runs side by side: their bits, runs that are not repeated, and their table."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from fedshift.errors import DataError, InputError, TrainingError
from fedshift.experiments.experiment import record
from fedshift.experiments.task.preparing import prepare
from fedshift.sweeps import compare as comparing
from fedshift.sweeps.compare import Compared, compare, jobs_that_fit
from fedshift.sweeps.from_file import plan_of
from fedshift.sweeps.plan import Plan
from fedshift.sweeps.populations import Populations
from fedshift.sweeps.worker import Means
from support.report_fixtures import drawings
from support.small_runs import results, text_of

SEEDS = (0, 1, 2)


def plan(place: Path, methods: Sequence[str] = ("fedavg", "fedprox"), **more: Any) -> Plan:
    file = place / "f.toml"
    file.write_text(text_of("fedavg"))
    overrides = more.pop("overrides", ("method.mu=0.5",) * ("fedprox" in methods))
    return plan_of(file, methods, more.pop("seeds", SEEDS), overrides, **more)[0]


def compared(plan: Plan, folder: Path, jobs: int = 1, **more: Any) -> Compared:
    populations = Populations()
    return compare(
        plan, folder, Means(prepare=populations, load=populations.load), jobs=jobs, **more
    )


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Plan, Compared]:
    """Two methods, one with a grid, over three seeds."""
    place = tmp_path_factory.mktemp("compare")
    of = plan(place, overrides=("method.mu=0.01,10",))
    return of, compared(of, place / "out")


@pytest.mark.slow
def test_runs_are_those_of_one_alone_whatever_the_jobs(tmp_path: Path) -> None:
    """Control: another seed leaves other files."""
    of = plan(tmp_path, seeds=(0, 1))
    compared(of, tmp_path / "two", jobs=2)
    for number, (name, run) in enumerate(of.runs.items()):
        alone = tmp_path / f"alone-{number}"
        record(alone, run.config, prepare(run.config), lambda event: None)
        here = results(tmp_path / "two" / "runs" / name)
        assert here == results(alone)
        other = of.contenders[0].points[0].runs[1 - run.config.seeds.run]
        assert (
            here["model.safetensors"]
            != results(tmp_path / "two" / "runs" / other.name)["model.safetensors"]
        )


@pytest.mark.slow
@pytest.mark.parametrize("vary", ["training", "split"])
def test_tasks_of_one_population_are_those_that_are_prepared_alone(
    vary: str, tmp_path: Path
) -> None:
    """Control: with vary="training" the clients' data are one object, else they are not."""
    populations, first = Populations(), None
    for run in plan(tmp_path, vary=vary, seeds=(0, 1)).runs.values():
        shared, alone = populations(run), prepare(run.config)
        assert shared.split_sha256 == alone.split_sha256
        assert shared.seeds == alone.seeds
        assert shared.gate == alone.gate
        for one, other in zip(shared.model.init()[0].values(), alone.model.init()[0].values(),
                              strict=True):  # fmt: skip
            assert one.equal(other)
        first = first or shared
        assert (shared.task is first.task) == (vary == "training" or run.config.seeds.run == 0)


def test_the_numbers_of_the_table(done: tuple[Plan, Compared]) -> None:
    """Means, deviations and paired intervals from the runs' files, by scipy."""
    of, (table, _) = done
    values: dict[str, list[float]] = {}
    for row in table.rows:
        point = next(
            p for c in of.contenders if c.label == row.label for p in c.points
            if p.label == row.setting
        )  # fmt: skip
        files = [table.folder / "runs" / run.name / "summary.json" for run in point.runs.values()]
        values[row.label] = [json.loads(f.read_text())["final"]["target_accuracy"] for f in files]
        assert row.moments is not None
        assert math.isclose(row.moments.mean, np.mean(values[row.label]))
        assert math.isclose(row.moments.sd or 0.0, np.std(values[row.label], ddof=1))
    base, prox = table.rows
    assert base.difference is None
    assert prox.difference is not None
    theirs = stats.ttest_rel(values["fedprox"], values["fedavg"]).confidence_interval(0.95)
    assert (prox.difference.low, prox.difference.high) == pytest.approx(tuple(theirs))


def test_a_setting_is_chosen_by_validation_alone(done: tuple[Plan, Compared]) -> None:
    """The setting that is best on the target's test examples is not chosen for that."""
    table = done[1].table
    row = table.row("fedprox")
    means: dict[str, dict[str, float]] = {}
    for name in ("estimated_accuracy", "target_accuracy"):
        for setting in ("mu=0.01", "mu=10"):
            runs = [m for m in table.runs if (m.method, m.setting) == ("fedprox", setting)]
            means.setdefault(name, {})[setting] = math.fsum(m.facts[name] for m in runs) / len(runs)
    assert row.validation == pytest.approx(means["estimated_accuracy"])
    assert row.setting == max(row.validation, key=lambda s: row.validation[s] or 0.0)
    # Control: turned round, validation chooses the other one, whatever the test says.
    turned = [
        replace(m, facts={**m.facts, "estimated_accuracy": 1 - m.facts["estimated_accuracy"]})
        for m in table.runs
    ]
    other = comparing.rows_of(done[0], turned, "target_accuracy")[1]
    assert other.setting != row.setting


@pytest.mark.slow
def test_two_seeds_have_no_interval(tmp_path: Path) -> None:
    table = compared(plan(tmp_path, seeds=(0, 1)), tmp_path / "o").table
    difference = table.row("fedprox").difference
    assert difference is not None
    assert (difference.n, difference.low, difference.high) == (2, None, None)
    assert "(" not in table.shown().rows[1][3]  # type: ignore[operator]


def test_every_form_has_the_same_numbers(done: tuple[Plan, Compared]) -> None:
    table = done[1].table
    mean = table.rows[1].moments.mean  # type: ignore[union-attr]
    for text in (table.markdown(), table.latex(), repr(table), table._repr_html_()):
        assert f"{100 * mean:.1f}" in text
        assert "fedprox" in text
    assert [row["method"] for row in csv.DictReader(table.csv().splitlines())] == [
        "fedavg", "fedprox",
    ]  # fmt: skip
    frame = table.frame()
    assert frame.loc[frame.method == "fedprox", "mean"].item() == mean
    assert len(table.frame(runs=True)) == 9
    assert set(table.frame(runs=True).state) == {"done"}
    page = (table.folder / "compare.html").read_text()
    assert len(drawings(page)) == 2
    assert "What was tried" in page
    written = {p.name for p in table.folder.iterdir() if p.is_file()}
    assert written == {
        "table.md", "table.csv", "runs.csv", "table.tex", "results.json", "compare.html",
    }  # fmt: skip


@pytest.mark.slow
def test_a_comparisons_drawings_are_figures_for_papers(
    done: tuple[Plan, Compared], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib", reason="figures need the extra `report`")
    written = done[1].table.figures(tmp_path)
    assert {p.name for p in written} == {
        "means.pdf", "means.png", "rounds.pdf", "rounds.png",
    }  # fmt: skip


def test_a_report_elsewhere(done: tuple[Plan, Compared], tmp_path: Path) -> None:
    table = done[1].table
    assert table.report(tmp_path / "page.html").read_text().startswith("<!DOCTYPE html>")
    with pytest.raises(InputError, match="ends in .html"):
        table.report(tmp_path / "page.pdf")
    with pytest.raises(InputError, match='unknown method of this table "fedprx".*"fedprox"'):
        table.row("fedprx")


@pytest.mark.slow
def test_what_is_complete_is_not_trained_again(tmp_path: Path) -> None:
    first = compared(plan(tmp_path, ("fedavg",)), tmp_path / "o")
    assert len(first.report.trained) == 3
    more = compared(plan(tmp_path), tmp_path / "o")
    assert len(more.report.trained) == 3
    assert more.table.row("fedavg").moments == first.table.row("fedavg").moments


@pytest.mark.slow
def test_a_run_that_fails_is_a_line_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = comparing.execute.__globals__["perform"]

    def perform(run: Any, *args: Any, **more: Any) -> None:
        if (run.config.method.name, run.config.seeds.run) == ("fedprox", 1):
            raise TrainingError("client 3 sent\nnonsense")
        real(run, *args, **more)

    monkeypatch.setattr("fedshift.sweeps.execute.perform", perform)
    table = compared(plan(tmp_path), tmp_path / "o").table
    assert table.row("fedprox").note == "seed 1 failed: client 3 sent nonsense"
    assert table.row("fedprox").moments.n == 2  # type: ignore[union-attr]
    assert table.row("fedavg").note == ""
    assert "seed 1 failed" in repr(table)


@pytest.mark.slow
def test_training_that_diverged_is_a_line_and_is_not_chosen(tmp_path: Path) -> None:
    """A learning rate of 3e38 ends at once; control: alone, its row says so and has no number."""
    of = plan(tmp_path, ("fedavg",), overrides=("training.lr=3e38,0.05",), seeds=(0, 1))
    table = compared(of, tmp_path / "o").table
    assert table.rows[0].setting == "lr=0.05"
    assert [m.state for m in table.runs] == ["diverged", "diverged", "done", "done"]
    alone = compared(plan(tmp_path, ("fedavg",), overrides=("training.lr=3e38",)), tmp_path / "o2")
    (row,) = alone.table.rows
    assert row.moments is None
    assert row.note.startswith("seeds 0 to 2 diverged: ")
    assert len(alone.report.diverged) == 3
    assert "–" in repr(alone.table)


@pytest.mark.slow
def test_runs_of_other_data_are_not_mixed_in(tmp_path: Path) -> None:
    of = plan(tmp_path, ("fedavg",), seeds=(0,))
    compared(of, tmp_path / "o")
    (lock,) = (tmp_path / "o" / "runs").glob("*/lock.json")
    lock.write_text(lock.read_text().replace('"data_sha256": "', '"data_sha256": "0'))
    with pytest.raises(DataError, match="trained on other data"):
        compared(of, tmp_path / "o")


def test_jobs_never_exceed_the_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2, 3}, raising=False)
    of = plan(tmp_path)  # six runs
    assert jobs_that_fit(None, None, of) == (4, "")
    assert jobs_that_fit(None, None, plan(tmp_path, ("fedavg",), seeds=(0, 1))) == (2, "")
    assert jobs_that_fit(2, 2, of) == (2, "")
    assert jobs_that_fit(8, None, of) == (4, "jobs = 8 became 4: this machine has 4 cores.")
    assert jobs_that_fit(3, 2, of) == (
        2, "jobs = 3 became 2: this machine has 4 cores, and each run 2 workers."
    )  # fmt: skip
    assert jobs_that_fit(2, 9, of)[0] == 1
    for bad in ((0, None), (1, 0)):
        with pytest.raises(InputError, match="give 1 or more"):
            jobs_that_fit(*bad, of)
    threaded = plan(tmp_path, overrides=("training.threads=2",))
    assert jobs_that_fit(2, None, threaded)[0] == 1
    with pytest.raises(InputError, match=r"training.threads = 2, and workers have one thread"):
        jobs_that_fit(2, 2, threaded)
    monkeypatch.setattr(comparing, "forks_safely", lambda: False)
    assert jobs_that_fit(None, None, of) == (1, "")
    assert jobs_that_fit(2, None, of) == (
        1, "jobs = 2 became 1: no copies of this process can train (a Mac, a GPU, or a thread)."
    )  # fmt: skip


@pytest.mark.slow
def test_a_metric_of_ones_choice(tmp_path: Path) -> None:
    of = plan(tmp_path, ("fedavg",), seeds=(0,), metric="target_loss")
    table = compared(of, tmp_path / "o").table
    assert table.metric == "target_loss"
    assert "Target loss" in table.shown().header
    with pytest.raises(InputError, match='unknown metric "target_los".*"target_loss"'):
        plan(tmp_path, ("fedavg",), metric="target_los")
    with pytest.raises(InputError, match='unknown metric "router_accuracy"'):  # of other methods
        compared(replace(of, metric="router_accuracy"), tmp_path / "o")


@pytest.mark.slow
def test_a_table_and_python_of_the_users(tmp_path: Path) -> None:
    """Runs with a custom method, network and metrics equal those of each alone."""
    rng = np.random.default_rng(0)
    rows = [f"{'abc'[i % 3]},{rng.normal():.3f},{rng.normal():.3f},{i % 2}" for i in range(120)]
    (tmp_path / "rows.csv").write_text("site,x,z,y\n" + "\n".join(rows) + "\n")
    (tmp_path / "mine.py").write_text(
        "from fedshift.recipes import fedprox\nfrom torch import nn\n\n\n"
        "def slow(setting, *, mu=9.0):\n    return fedprox(setting, mu=mu)\n\n\n"
        "def net(task):\n    return nn.Linear(task.input_shape[0], len(task.classes))\n\n\n"
        "def mass(p, y):\n    return float(p[:, 1].sum())\n"
    )
    file = tmp_path / "f.toml"
    file.write_text(
        '[data]\nsource = "rows.csv"\nclient = "site"\nlabel = "y"\ntarget = "c"\n'
        '[model]\nname = "mine.py:net"\n[metrics]\nextra = ["mine.py:mass"]\n'
        "[training]\nrounds = 2\nsteps = 2\n"
    )
    of, _ = plan_of(file, ["fedavg", "mine.py:slow"], [0, 1], metric="mass")
    table = compared(of, tmp_path / "o", jobs=2).table
    assert [row.label for row in table.rows] == ["fedavg", "slow"]
    assert table.rows[0].moments != table.rows[1].moments
    for number, (name, run) in enumerate(of.runs.items()):
        # As deep as the table's, since paths in a run folder are relative to it.
        alone = tmp_path / "alone" / "runs" / str(number)
        record(alone, run.config, prepare(run.config), lambda event: None)
        assert results(table.folder / "runs" / name) == results(alone)
