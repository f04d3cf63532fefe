"""`fedshift reproduce`: what is trained, what is shown, and the notes on missing parts."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedshift.errors import DataError, InputError
from fedshift.record.folder import read_run
from fedshift.sweeps.execute import execute
from fedshift.sweeps.records import read_records
from fedshift.sweeps.store import Store
from fedshift_papers.protocols.study import narrowed
from fedshift_papers.reproduce.catalogue import study
from fedshift_papers.reproduce.plan import Plan, wanted
from fedshift_papers.reproduce.reproduce import (
    Reproduced,
    reproduce,
)
from fedshift_papers.reproduce.tuning import read_tuned
from support.tables import MINI, cell, results


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Reproduced]:
    """A table of three methods and two seeds, trained once; tests that change it take a copy."""
    out = tmp_path_factory.mktemp("reproduced")
    return out, reproduce(replace(MINI, out=out))


@pytest.fixture
def copied(finished: tuple[Path, Reproduced], tmp_path: Path) -> Path:
    shutil.copytree(finished[0], tmp_path / "copy")
    return tmp_path / "copy"


# --------------------------------------------------------------------------- what is trained


@pytest.mark.slow
def test_running_again_trains_nothing(copied: Path, finished: tuple[Path, Reproduced]) -> None:
    out, first = finished
    assert len(first.report.trained) == len(list((out / "runs").iterdir())) >= 8
    again = reproduce(replace(MINI, out=copied))
    assert again.report.trained == ()
    for name in ("results.json", "table.md", "table.csv", "seeds.csv", "table.tex", "index.html"):
        assert (copied / "table1" / name).read_bytes() == (out / "table1" / name).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("whole", [True, False], ids=["folder deleted", "summary missing"])
def test_one_run_that_is_not_complete_is_trained_alone(
    whole: bool, copied: Path, finished: tuple[Path, Reproduced]
) -> None:
    victim = cell(finished[1], "FedPALS").values[1].run
    folder = copied / "runs" / victim.name
    if whole:
        shutil.rmtree(folder)
    else:
        (folder / "summary.json").unlink()
    again = reproduce(replace(MINI, out=copied))
    assert again.report.trained == (victim.name,)
    assert results(copied) == results(finished[0])
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    assert [e["event"] for e in events].count("start") == 1


@pytest.mark.slow
def test_an_interrupted_table_goes_on(tmp_path: Path, finished: tuple[Path, Reproduced]) -> None:
    request = replace(MINI, out=tmp_path, methods=("fedavg", "fedprox"), seeds=(0, 1))

    def stop(event: dict[str, Any]) -> None:
        if event["event"] == "round" and "s1" in event["run"]:
            raise KeyboardInterrupt

    first = reproduce(request, stop)
    assert first.report.interrupted
    assert len(first.report.trained) == 2
    assert {len(c.values) for c in first.outcome.cells} == {1}
    assert "1 of 8 seeds" in (tmp_path / "table1" / "table.md").read_text()
    second = reproduce(request)
    assert len(second.report.trained) == 2
    assert not set(second.report.trained) & set(first.report.trained)
    assert cell(second, "FedProx").by_seed == cell(finished[1], "FedProx").by_seed


@pytest.mark.slow
def test_two_jobs_give_the_same_numbers(tmp_path: Path, finished: tuple[Path, Reproduced]) -> None:
    done = reproduce(replace(MINI, out=tmp_path, methods=("fedavg", "fedprox"), seeds=(0,), jobs=2))
    assert len(done.report.trained) == 2
    for label in ("FedAvg", "FedProx"):
        ours, theirs = cell(done, label).values[0], cell(finished[1], label).values[0]
        assert ours.value == theirs.value
        same = [
            (place / "runs" / ours.run.name / "model.safetensors").read_bytes()
            for place in (tmp_path, finished[0])
        ]
        assert same[0] == same[1]


def test_stopping_leaves_no_process(tmp_path: Path) -> None:
    plan = Plan(narrowed(study(MINI.target), MINI.datasets, MINI.splits, ("fedavg",)), (0, 1), 1)

    def stop(event: dict[str, Any]) -> None:
        if event["event"] == "start":
            raise KeyboardInterrupt

    store = Store(tmp_path)
    report = execute(wanted(plan, store), store, jobs=2, listen=stop)
    assert report.interrupted
    assert multiprocessing.active_children() == []


@pytest.mark.slow
def test_a_process_that_dies_is_a_failed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = Plan(narrowed(study(MINI.target), MINI.datasets, MINI.splits, ("fedavg",)), (0,), 1)
    monkeypatch.setattr("fedshift.sweeps.starting.work", print)
    store = Store(tmp_path)
    report = execute(wanted(plan, store), store, jobs=2)
    assert list(report.failures.values()) == ["the process ended without a result, exit code 0"]


@pytest.mark.slow
def test_tables_share_runs_and_figures_are_drawn(copied: Path) -> None:
    for target, drawing in (
        ("fig2", "fashion-mnist-mini-C.svg"),
        ("fig6", "fashion-mnist-mini-C-projection.svg"),
        ("fig7", "fashion-mnist-mini-C=3.svg"),
    ):
        done = reproduce(replace(MINI, out=copied, target=f"fedpals/{target}"))
        assert done.report.trained == ()
        assert "<svg" in (copied / target / drawing).read_text()
        assert f"![{drawing}]({drawing})" in (copied / target / "table.md").read_text()


@pytest.mark.slow
def test_nothing_is_trained_when_the_table_is_only_drawn(tmp_path: Path) -> None:
    done = reproduce(replace(MINI, out=tmp_path, train=False))
    assert done.report.trained == ()
    assert [len(c.values) for c in done.outcome.cells] == [0, 0, 0]


@pytest.mark.parametrize("place", ["out", "publish"])
def test_a_table_of_another_paper_is_not_replaced(tmp_path: Path, place: str) -> None:
    lies = tmp_path / place / "table1" / "table.md"
    lies.parent.mkdir(parents=True)
    lies.write_text("# made/table1: accuracy\n")
    request = replace(MINI, out=tmp_path / "out", publish=tmp_path / "publish", train=False)
    with pytest.raises(InputError, match=f"holds made/table1, not fedpals/table1; .* --{place}"):
        reproduce(request)
    assert [p.name for p in lies.parent.iterdir()] == ["table.md"]


# --------------------------------------------------------------------------- what is shown


@pytest.mark.slow
def test_reduced_cells_say_so_and_the_papers_rounds_do_not(
    finished: tuple[Path, Reproduced],
) -> None:
    done = finished[1]
    assert cell(done, "FedAvg").note == "not in the paper, 2 of 150 rounds, 2 of 8 seeds"
    whole = replace(cell(done, "FedAvg"), rounds=150, values=cell(done, "FedAvg").values * 4)
    assert replace(whole, column=replace(whole.column, extra=False)).note == ""
    assert "Changed from the protocol: model.name=linear." in done.outcome.notes


@pytest.mark.slow
def test_every_cell_links_to_its_runs(finished: tuple[Path, Reproduced]) -> None:
    folder = finished[0] / "table1"
    for page, pattern in (("table.md", r"\]\((\.\./runs/[^)]*)\)"), ("index.html", 'href="(.*?)"')):
        links = re.findall(pattern, (folder / page).read_text())
        assert len(links) == 3 * 2
        assert all((folder / link / "summary.json").is_file() for link in links)


@pytest.mark.slow
def test_results_are_small_and_say_where_numbers_come_from(
    finished: tuple[Path, Reproduced],
) -> None:
    out, done = finished
    text = (out / "table1" / "results.json").read_text()
    assert len(text) < 20_000
    assert str(out) not in text
    record = json.loads(text)
    assert record["command"] == done.outcome.command
    for row in record["cells"]:
        values = [s["value"] for s in row["seeds"]]
        assert row["here"]["mean"] == pytest.approx(np.mean(values), abs=1e-12)
        for seed in row["seeds"]:
            folder = out / "runs" / seed["run"]
            whole = (folder / "config.resolved.toml").read_bytes()
            assert hashlib.sha256(whole).hexdigest() == seed["config_sha256"]
            best = json.loads((folder / "summary.json").read_text())["best"]
            assert seed["value"] == 100 * best["target_accuracy"]
            assert seed["round"] == best["round"]
    assert any("torch" in note and note.startswith("Run with: Python") for note in record["notes"])


@pytest.mark.slow
def test_methods_are_paired(finished: tuple[Path, Reproduced]) -> None:
    """One seed, one split, first model and batches whatever the method; another seed, others."""
    done = finished[1]
    assert done.outcome.plan.study.baseline == "FedAvg"
    for seed in (0, 1):
        locks = [c.values[seed].lock for c in done.outcome.cells]
        assert len({lock["split_sha256"] for lock in locks}) == 1
        assert len({str(lock["seeds"]) for lock in locks}) == 1
    first, second = (cell(done, "FedAvg").values[i].lock for i in (0, 1))
    assert first["split_sha256"] != second["split_sha256"]
    avg, prox = cell(done, "FedAvg").by_seed, cell(done, "FedProx")
    assert prox.difference is not None
    assert prox.difference.mean == pytest.approx(np.mean([prox.by_seed[s] - avg[s] for s in avg]))
    assert cell(done, "FedAvg").difference is None


# --------------------------------------------------------------------------- choosing


@pytest.mark.slow
def test_each_seed_takes_the_ess_of_best_validation(finished: tuple[Path, Reproduced]) -> None:
    out, done = finished
    for value in cell(done, "FedPALS").values:
        runs = (value.run, *value.others)
        assert value.chosen.startswith(("lambda=0", "ess="))
        accuracies = [
            json.loads((out / "runs" / r.name / "summary.json").read_text())["best"][
                "validation_accuracy"
            ]
            for r in runs
        ]
        assert accuracies[0] == max(accuracies)
        assert value.validation == accuracies[0]


@pytest.mark.slow
def test_tuning_keeps_the_best_of_the_grid_for_later(tmp_path: Path) -> None:
    request = replace(MINI, out=tmp_path, methods=("fedprox",), seeds=(0,), rounds=1, tune=True)
    first = reproduce(request)
    assert len(first.report.trained) == 4  # the table's own run is one of them
    record = read_tuned(tmp_path / "tuned.json")["fashion-mnist-mini C=3", "FedProx"]
    grid = record["grid"]
    assert [g["options"]["mu"] for g in grid] == [0.001, 0.01, 0.1, 1.0]
    assert (record["seed"], record["rounds"]) == (0, 1)
    best = max(grid, key=lambda g: (g["validation_accuracy"], -g["validation_loss"]))
    assert len({g["validation_accuracy"] for g in grid}) > 1
    assert record["undecided"] is False
    assert record["options"] == best["options"] == dict(cell(first, "FedProx").options)
    note = f"mu = {best['options']['mu']:g} (seed 0, 1 round)."
    assert any(n.startswith("Tuned on validation") and note in n for n in first.outcome.notes)
    worst = min(grid, key=lambda g: g["validation_accuracy"])["options"]
    text = json.dumps([record | {"options": worst}])
    (tmp_path / "tuned.json").write_text(text)
    later = reproduce(replace(request, tune=False))
    assert later.report.trained == ()
    assert dict(cell(later, "FedProx").options) == worst
    assert (tmp_path / "tuned.json").read_text() == text


# --------------------------------------------------------------------------- what cannot be done


def test_a_missing_method_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("fedshift.recipes.__all__", ["fedavg"])
    done = reproduce(replace(MINI, out=tmp_path, methods=(), train=False))
    assert cell(done, "Oracle").note == 'this version has no method "oracle"'
    with pytest.raises(InputError, match='this version has no method "fedprox"; `fedshift methods'):
        reproduce(replace(MINI, out=tmp_path, methods=("fedprox",)))


@pytest.mark.slow
def test_a_damaged_run_is_named(copied: Path, finished: tuple[Path, Reproduced]) -> None:
    name = cell(finished[1], "FedAvg").values[0].run.name
    (copied / "runs" / name / "summary.json").write_text("{")
    with pytest.raises(DataError, match=rf"{re.escape(name)}.*Delete the folder .* train this run"):
        reproduce(replace(MINI, out=copied))


@pytest.mark.slow
def test_a_run_of_another_configuration_is_refused(
    copied: Path, finished: tuple[Path, Reproduced]
) -> None:
    """A default that has changed since is noticed; a new key does no harm."""
    name = cell(finished[1], "FedAvg").values[0].run.name
    path = copied / "runs" / name / "config.resolved.toml"
    text = path.read_text()
    path.write_text(text.replace("server_lr = 1.0\n", ""))
    assert reproduce(replace(MINI, out=copied)).report.trained == ()
    path.write_text(text.replace("server_lr = 1.0", "server_lr = 0.5"))
    with pytest.raises(DataError, match=r"training.server_lr = 0.5 \(now 1.0\) is not what"):
        reproduce(replace(MINI, out=copied))


@pytest.mark.slow
def test_runs_of_versions_that_measured_less_are_still_read(
    copied: Path, finished: tuple[Path, Reproduced]
) -> None:
    """Folders without macro F1 and without the keys that came with it: nothing is trained."""
    for folder in (copied / "runs").iterdir():
        path = folder / "summary.json"
        whole = json.loads(path.read_text())
        for part in ("final", "best"):
            assert 0 <= whole[part].pop("target_macro_f1") <= 1
        path.write_text(json.dumps(whole))
        rows = [line.split(",") for line in (folder / "metrics.csv").read_text().splitlines()]
        k = rows[0].index("target_macro_f1")
        shortened = [",".join([*row[:k], *row[k + 1 :]]) for row in rows]
        (folder / "metrics.csv").write_text("\n".join(shortened) + "\n")
        config = folder / "config.resolved.toml"
        lines = config.read_text().splitlines()
        new = ('augment = "none"', 'optimizer = "sgd"')
        assert set(new) <= set(lines)
        config.write_text("\n".join(line for line in lines if line not in new) + "\n")
        assert read_run(folder).summary.final.target_macro_f1 is None
    for target in ("fedpals/table1", "fedpals/fig7"):
        assert reproduce(replace(MINI, out=copied, target=target)).report.trained == ()
    values = [[s["value"] for s in c["seeds"]] for c in results(copied)["cells"]]
    assert values == [[s["value"] for s in c["seeds"]] for c in results(finished[0])["cells"]]


@pytest.mark.slow
def test_a_published_table_draws_itself_from_records(
    copied: Path, finished: tuple[Path, Reproduced], tmp_path: Path
) -> None:
    small = tmp_path / "published"
    done = reproduce(replace(MINI, out=copied, publish=small))
    assert done.page == small / "table1" / "table.md"
    written = {p.name for p in small.rglob("*") if p.is_file()}
    assert written == {"plots.svg", "runs.jsonl.gz", "table.md", "tuned.json"}
    page, records = (done.page.read_text(), (small / "table1" / "runs.jsonl.gz").read_bytes())
    values = [v for c in done.outcome.cells for v in c.values]
    assert all(f"{v.seed} `{v.run.id}`" in page for v in values)
    assert len(records) / len(read_records(small / "table1" / "runs.jsonl.gz")) < 5_000
    again = reproduce(replace(MINI, out=small))
    assert again.report.trained == ()
    assert results(small) == results(finished[0])
    reproduce(replace(MINI, out=small, train=False, publish=small))
    assert done.page.read_text() == page
    assert (small / "table1" / "runs.jsonl.gz").read_bytes() == records
