"""Diverged training would diverge again: the run is over, and its candidate cannot win."""

from __future__ import annotations

import csv
import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest

from fedshift.engine.run import Round, run
from fedshift.errors import DataError, DivergedError, TrainingError
from fedshift.experiments import engines
from fedshift.record.folder import read_run
from fedshift.record.rounds import Metrics
from fedshift.sweeps import worker
from fedshift.sweeps.diverged import diverged, parsed
from fedshift.sweeps.records import recorded_in
from fedshift.sweeps.store import CONFIG, DIVERGED, LOCK, METRICS, Store
from fedshift_papers.reproduce.reproduce import Reproduced, Request, reproduce
from fedshift_papers.reproduce.results import mean_curve
from fedshift_papers.reproduce.tuning import read_tuned
from support.tables import MINI, cell, results

HIGH = ("model.name=linear", "training.lr=3e38")


def queues(request: Request) -> tuple[Reproduced, list[int]]:
    """The result, and the numbers of runs to do each time."""
    queue_sizes: list[int] = []

    def listen(event: dict[str, Any]) -> None:
        if event["event"] == "queue":
            queue_sizes.append(event["runs"])

    return reproduce(request, listen), queue_sizes


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Reproduced]:
    """FedPALS with all its candidates, one seed."""
    out = tmp_path_factory.mktemp("finished")
    return out, reproduce(replace(MINI, out=out, methods=("fedpals",), seeds=(0,)))


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [1, 2])
def test_a_run_that_diverged_is_not_trained_again(jobs: int, tmp_path: Path) -> None:
    request = replace(
        MINI, out=tmp_path, methods=("fedavg",), seeds=(0,), overrides=HIGH, jobs=jobs
    )
    first, queue_sizes = queues(request)
    assert queue_sizes[0] == 1
    (why,) = first.report.diverged.values()
    assert "its training diverged" in why
    assert first.report.failures == {}
    assert cell(first, "FedAvg").failures == (why,)
    again, queue_sizes = queues(request)
    assert queue_sizes == [0]
    assert again.report == first.report
    drawn = reproduce(replace(request, train=False))
    assert cell(drawn, "FedAvg").failures == (why,)
    (folder,) = (tmp_path / "runs").iterdir()
    shutil.rmtree(folder)
    assert queues(request)[1][0] == 1


def test_what_fails_otherwise_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: Any) -> None:
        raise TrainingError("a process died")

    monkeypatch.setattr(worker, "record", fail)
    request = replace(MINI, out=tmp_path, methods=("fedavg",), seeds=(0,))
    first, _ = queues(request)
    assert list(first.report.failures.values()) == ["a process died"]
    assert first.report.diverged == {}
    assert queues(request)[1][0] == 1


def diverge(out: Path, name: str, **more: Any) -> None:
    """Write the folder of a run that diverged."""
    folder = out / "runs" / name
    for left in folder.iterdir():
        if left.is_dir():
            shutil.rmtree(left)
        elif left.name not in (CONFIG, LOCK):
            left.unlink()
    (folder / DIVERGED).write_text(json.dumps({"error": "client 0 diverged", **more}))


@pytest.mark.slow
def test_a_candidate_that_diverged_is_not_chosen(
    tmp_path: Path, finished: tuple[Path, Reproduced]
) -> None:
    shutil.copytree(finished[0], tmp_path / "one")
    (value,) = cell(finished[1], "FedPALS").values
    assert value.others
    if value.chosen == "lambda=0":  # then the other candidates are known
        lost, chosen = value.others[0].name, value.run.name
    else:
        lost, chosen = value.run.name, None
    diverge(tmp_path / "one", lost)
    request = replace(MINI, out=tmp_path / "one", methods=("fedpals",), seeds=(0,))
    done, queue_sizes = queues(replace(request, publish=tmp_path / "small"))
    assert queue_sizes in ([], [0])
    # What is published knows of it, too.
    reproduce(replace(request, out=tmp_path / "small", train=False))
    assert results(tmp_path / "small") == results(tmp_path / "one")
    here = cell(done, "FedPALS")
    assert here.failures == ()
    assert len(here.diverged) == 1
    assert "candidates that diverged: ess=" in here.note
    assert here.note.endswith(" of seed 0")
    assert len(here.values[0].others) == len(value.others) - 1
    assert here.values[0].run.name != lost
    assert chosen in (None, here.values[0].run.name)
    assert results(tmp_path / "one") != results(finished[0])


@pytest.mark.slow
def test_without_the_first_candidate_the_seed_has_no_value(
    tmp_path: Path, finished: tuple[Path, Reproduced]
) -> None:
    shutil.copytree(finished[0], tmp_path / "one")
    (value,) = cell(finished[1], "FedPALS").values
    (first,) = (r for r in (value.run, *value.others) if "lam=0" in r.name)
    best = {"round": 1, "target_accuracy": 0.5, "validation_loss": 1.0}
    diverge(tmp_path / "one", first.name, rounds=1, best=best)
    done = reproduce(replace(MINI, out=tmp_path / "one", methods=("fedpals",), seeds=(0,)))
    here = cell(done, "FedPALS")
    assert (here.values, here.failures) == ((), ("client 0 diverged",))


@pytest.mark.slow
def test_a_point_of_a_grid_that_diverged_cannot_win(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = worker.record

    def record(folder: Path, config: Any, *rest: Any) -> Any:
        if config.method.options.get("mu") == 0.1:
            raise DivergedError("gone")
        return plain(folder, config, *rest)

    monkeypatch.setattr(worker, "record", record)
    request = replace(MINI, out=tmp_path, methods=("fedprox",), seeds=(0,), rounds=1, tune=True)
    done = reproduce(request)
    record = read_tuned(tmp_path / "tuned.json")["fashion-mnist-mini C=3", "FedProx"]
    by_mu = {point["options"]["mu"]: point for point in record["grid"]}
    assert by_mu[0.1]["validation_accuracy"] is None
    assert all(p["validation_accuracy"] is not None for mu, p in by_mu.items() if mu != 0.1)
    assert record["options"]["mu"] != 0.1
    assert list(done.report.diverged.values()) == ["gone"]
    assert len(cell(done, "FedProx").values) == 1


def diverging(after: int) -> Callable[..., Iterator[Round]]:
    """The rounds of a run up to one in which training diverges."""

    def play(*given: Any, **options: Any) -> Iterator[Round]:
        for current in run(*given, **options):
            if current.t > after:
                raise DivergedError("client 1 sent non-finite numbers")
            yield current

    return play


FEDAVG = replace(MINI, methods=("fedavg",), seeds=(0, 1), rounds=6)


def measured(out: Path, name: str) -> list[dict[str, float]]:
    with (out / "runs" / name / METRICS).open() as file:
        return [{k: float(v or "nan") for k, v in row.items()} for row in csv.DictReader(file)]


@pytest.mark.slow
@pytest.mark.parametrize("after", [1, 4])
def test_the_only_run_of_a_row_counts_at_its_best_round_before(
    after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = cell(reproduce(replace(FEDAVG, out=tmp_path / "whole")), "FedAvg")
    shutil.copytree(tmp_path / "whole", tmp_path / "one")
    name = whole.values[1].run.name
    shutil.rmtree(tmp_path / "one" / "runs" / name)
    monkeypatch.setattr(engines, "run", diverging(after))
    request = replace(FEDAVG, out=tmp_path / "one")
    done, queue_sizes = queues(request)
    assert (queue_sizes[0], len(done.report.diverged), done.report.failures) == (1, 1, {})

    rounds = measured(tmp_path / "whole", name)[:after]
    assert measured(tmp_path / "one", name) == rounds
    best = min(rounds, key=lambda row: row["validation_loss"])
    here = cell(done, "FedAvg")
    assert here.values[0].value == whole.values[0].value
    assert here.values[1].value == 100 * best["target_accuracy"]
    assert here.values[1].round == best["round"]
    assert (here.failures, here.stopped) == ((), (f"seed 1 after round {after}",))
    assert here.diverged == ()
    assert here.values[1].distance == whole.values[1].distance is not None
    assert "1 diverged, at the best round before" in here.note
    foot = f"Diverged: FedAvg on Fashion-MNIST-mini C=3, seed 1 after round {after}. What was best"
    assert any(note.startswith(foot) for note in done.outcome.notes)
    assert queues(request)[1][0] == 0
    reproduce(replace(request, train=False, publish=tmp_path / "small"))
    reproduce(replace(request, train=False, out=tmp_path / "small"))
    assert results(tmp_path / "small") == results(tmp_path / "one") != results(tmp_path / "whole")
    assert results(tmp_path / "small")["cells"][0]["stopped"] == [f"seed 1 after round {after}"]
    # Trained again, it is complete, and what was published of it before does not stay.
    monkeypatch.setattr(engines, "run", run)
    shutil.rmtree(tmp_path / "one" / "runs" / name)
    reproduce(replace(request, publish=tmp_path / "small"))
    reproduce(replace(request, train=False, out=tmp_path / "small"))
    assert results(tmp_path / "small") == results(tmp_path / "one") == results(tmp_path / "whole")


@pytest.mark.slow
def test_curves_are_those_of_whole_runs_where_there_are_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    curves = replace(FEDAVG, target="fedpals/fig7", out=tmp_path)
    (whole,) = reproduce(replace(curves, seeds=(0,))).outcome.cells
    monkeypatch.setattr(engines, "run", diverging(3))
    done = reproduce(replace(curves, publish=tmp_path / "small"))
    (both,) = done.outcome.cells
    (lost,) = reproduce(replace(curves, seeds=(1,))).outcome.cells
    store, metric = Store(tmp_path / "runs"), done.outcome.plan.study.metric
    assert len(both.stopped) == 1
    assert mean_curve(both, store, metric) == mean_curve(whole, store, metric)
    assert list(mean_curve(lost, store, metric)) == [1, 2, 3]
    with pytest.raises(DataError, match=r"has no summary\.json: its training diverged"):
        read_run(store.path(lost.values[0].run))
    # What is published draws the same.
    again = reproduce(replace(curves, out=tmp_path / "small", train=False))
    small = Store(tmp_path / "small" / "runs", recorded_in(tmp_path / "small"))
    assert mean_curve(again.outcome.cells[0], small, metric) == mean_curve(whole, store, metric)


def noted(t: int, validation: float, target: float) -> Metrics:
    numbers = dict.fromkeys((f.name for f in fields(Metrics)), float("nan"))
    given = {"round": t, "clients_trained": 1, "validation_loss": validation, "target_loss": target}
    return Metrics(**{**numbers, **given, "others": {"auc": 0.5}})  # type: ignore[arg-type]


def test_what_is_kept_of_the_rounds_before() -> None:
    """Every second one was evaluated; the last has no validation loss, the first the best test."""
    measured = [noted(2, 0.9, 0.1), noted(4, 0.5, 0.7), noted(6, 0.5, 0.2), noted(8, nan, nan)]
    end = diverged("gone", measured, 0.25)
    assert (end.rounds, end.best and end.best["round"], end.hull_distance) == (8, 4, 0.25)
    assert end.best is not None
    assert end.best["target_macro_f1"] is None
    assert end.best["auc"] == 0.5
    assert parsed(end.text) == end
    assert "NaN" not in end.text
    endless = [replace(row, target_loss=inf) for row in measured]
    assert parsed(diverged("gone", endless, 0.25).text).best == end.best | {"target_loss": "inf"}
    assert diverged("gone", [], 0.0).best is None
    assert diverged("gone", measured[-1:], 0.0).best is None


DAMAGED = {
    "a list": "[]",
    "not JSON": "{",
    "no error": "{}",
    "rounds": '{"error": "e", "rounds": null}',
    "a word": '{"error": "e", "best": "abc"}',
    "no round": '{"error": "e", "rounds": 3, "best": {"target_accuracy": 0.5}}',
    "round null": '{"error": "e", "rounds": 3, "best": {"round": null}}',
    "true": '{"error": "e", "rounds": 3, "best": {"round": 1, "target_accuracy": true}}',
}


@pytest.mark.slow
@pytest.mark.parametrize("text", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_note_is_one_message(text: str, tmp_path: Path) -> None:
    done = reproduce(replace(FEDAVG, out=tmp_path, seeds=(0,), rounds=1))
    name = cell(done, "FedAvg").values[0].run.name
    diverge(tmp_path, name)
    (tmp_path / "runs" / name / DIVERGED).write_text(text)
    message = rf"{DIVERGED}: .*\. Delete the folder .*{re.escape(name)} to train this run again"
    with pytest.raises(DataError, match=message) as error:
        reproduce(replace(FEDAVG, out=tmp_path, seeds=(0,), rounds=1))
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_where_the_last_round_counts_a_run_that_diverged_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "run", diverging(3))
    request = Request(
        "fedpals/fig9", tmp_path, splits=("delta=0",), methods=("fedavg",), seeds=(0,), rounds=6
    )
    (here,) = reproduce(request).outcome.cells
    assert (here.values, here.stopped) == ((), ())
    assert here.failures == ("client 1 sent non-finite numbers",)


@pytest.mark.slow
def test_a_run_that_goes_on_remembers_what_was_measured_before_it_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stops = iter([None] * 2 + [2] * 99)
    monkeypatch.setattr(engines, "run", diverging(4))
    request = replace(FEDAVG, out=tmp_path, seeds=(0,))
    stopped = reproduce(request, asked=lambda: next(stops))
    assert stopped.report.interrupted
    (folder,) = (tmp_path / "runs").iterdir()
    assert not (folder / DIVERGED).exists()
    done = reproduce(request)
    assert [row["round"] for row in measured(tmp_path, folder.name)] == [1, 2, 3, 4]
    assert cell(done, "FedAvg").stopped == ("seed 0 after round 4",)
