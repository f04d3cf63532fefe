"""Which backend made a run's numbers: lock.json says so, and a table keeps to one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from test_reproduce import MINI, cell, results

from fedshift.cli.app import app
from fedshift.cli.choices import How, HowAlone
from fedshift.cli.ending import perform
from fedshift.engine.shelf import Shelf
from fedshift.errors import InputError
from fedshift.experiments.experiment import in_process, trained_by
from fedshift.experiments.reproduce.execute import execute
from fedshift.experiments.reproduce.plan import wanted
from fedshift.experiments.reproduce.reproduce import make_plan, reproduce
from fedshift.experiments.reproduce.store import Run, Store
from fedshift.experiments.shelved import Shelved
from fedshift.experiments.side_by_side import ALONE, Name, backend_of

Printed = pytest.CaptureFixture[str]
ONE = replace(MINI, methods=("fedavg",), seeds=(0,), rounds=4)


def test_options_are_the_names() -> None:
    assert [one.value for one in How] == list(get_args(Name))
    assert [one.value for one in HowAlone] == list(ALONE)


@pytest.mark.parametrize(
    ("name", "count", "told"),
    [
        ("loop", None, "loop"),
        ("workers", 2, "loop"),
        ("dense", None, "dense"),
        ("dense", 2, "dense in 2 workers"),
        ("channels-last", 2, "channels-last"),
        ("stacked", None, "stacked"),
    ],
)
def test_names_tell_numbers_apart(name: str, count: int | None, told: str, tmp_path: Path) -> None:
    engine = backend_of(name, count)
    assert trained_by(engine) == trained_by(Shelved(engine, Shelf(0, tmp_path))) == told
    assert trained_by(in_process) == "loop"


def lock(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "lock.json").read_text())
    return found


def typed(place: Path, model: str, method: str, backend: str) -> int:
    """The exit code of `fedshift run` of one round, in the folder "a" of a place."""
    file = place / "one.toml"
    file.write_text(
        '[data]\nname = "fashion-mnist-mini"\n[shift]\nclients = 4\nkind = "iid"\n'
        f'[model]\nname = "{model}"\n[method]\nname = "{method}"\n[training]\nrounds = 1\n'
    )
    return perform(app, ["run", str(file), "--out", str(place / "a"), "--backend", backend])


@pytest.mark.parametrize(
    ("model", "method", "backend", "told"),
    [
        ("lenet", "fedavg", "dense", "the backend dense trains chains of linear layers"),
        ("lenet", "fedavg", "winograd", "winograd is for convolutions 3 x 3"),
        ("lenet", "fedala", "stacked", "clients cannot be stacked"),
    ],
)
def test_a_backend_that_refuses_leaves_nothing(
    model: str,
    method: str,
    backend: str,
    told: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert typed(tmp_path, model, method, backend) == 2
    assert told in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "a").exists()


def test_what_was_begun_stays_when_another_backend_refuses(tmp_path: Path) -> None:
    asked: Iterator[int | None] = iter([None] * 2 + [2] * 99)
    convolutions = replace(ONE, out=tmp_path, overrides=("model.name=lenet",))
    reproduce(convolutions, asked=lambda: next(asked))
    folder = only(tmp_path)
    kept = (folder / "config.resolved.toml").read_bytes()
    assert perform(app, ["run", "--resume", str(folder), "--backend", "dense"]) == 2
    assert (folder / "config.resolved.toml").read_bytes() == kept
    assert (folder / "checkpoints").is_dir()


def test_a_run_says_what_auto_chose(tmp_path: Path, capsys: Printed) -> None:
    assert typed(tmp_path, "linear", "fedavg", "auto") == 0
    chosen = lock(tmp_path / "a")["backend"]
    assert chosen != "auto"
    named = capsys.readouterr().err.partition("backend ")[2].partition(":")[0]
    assert chosen in (named, "loop")
    assert chosen != "loop" or named in ("loop", "2 workers")


def only(out: Path) -> Path:
    (folder,) = (out / "runs").iterdir()
    return folder


def test_a_table_by_another_backend(tmp_path: Path) -> None:
    done = reproduce(replace(ONE, out=tmp_path / "dense", backend="dense"))
    plain = reproduce(replace(ONE, out=tmp_path / "loop"))
    assert (lock(only(tmp_path / "dense"))["backend"], only(tmp_path / "dense").name) == (
        "dense",
        only(tmp_path / "loop").name,
    )
    one, other = cell(done, "FedAvg").values[0], cell(plain, "FedAvg").values[0]
    assert one.value == pytest.approx(other.value, abs=0.5)
    assert one.lock["backend"] != other.lock["backend"] == "loop"
    assert "--backend dense" in results(tmp_path / "dense")["command"]
    assert results(tmp_path / "dense")["notes"][-1].endswith("; backend dense.")
    assert "backend" not in results(tmp_path / "loop")["notes"][-1]
    # What is complete is used, and the foot says by which.
    again = reproduce(replace(ONE, out=tmp_path / "dense"))
    assert again.report.trained == ()
    assert again.outcome.notes[-1].endswith("; backend dense.")


@pytest.mark.parametrize("jobs", [1, 2])
@pytest.mark.parametrize("then", ["loop", "dense"])
def test_a_run_goes_on_by_the_backend_that_began_it_alone(
    then: str, jobs: int, tmp_path: Path
) -> None:
    asked = iter([None] * 2 + [2] * 99)
    stopped = reproduce(replace(ONE, out=tmp_path, backend="dense"), asked=lambda: next(asked))
    assert stopped.report.interrupted
    folder = only(tmp_path)
    assert (folder / "checkpoints").is_dir()
    heard: list[int] = []

    def listen(event: dict[str, Any]) -> None:
        heard.extend([event["round"]] if event["event"] == "round" else [])

    runs, store = runs_of(tmp_path)
    execute(runs, store, jobs=jobs, backend=then, listen=listen)
    assert heard == ([1, 2, 3, 4] if then == "loop" else [3, 4])
    assert lock(folder)["backend"] == then


def runs_of(out: Path) -> tuple[dict[str, Run], Store]:
    store = Store(out / "runs")
    return wanted(make_plan(replace(ONE, out=out)), store), store


def test_a_folder_without_a_readable_lock_goes_on(tmp_path: Path) -> None:
    asked: Iterator[int | None] = iter([None] * 2 + [2] * 99)
    reproduce(replace(ONE, out=tmp_path), asked=lambda: next(asked))
    (only(tmp_path) / "lock.json").write_text("{")
    heard: list[int] = []
    reproduce(
        replace(ONE, out=tmp_path),
        lambda e: heard.append(e["round"]) if e["event"] == "round" else None,
    )
    assert heard[0] > 1
    assert lock(only(tmp_path))["backend"] == "loop"


@pytest.mark.parametrize("name", ["auto", "workers", "densee"])
def test_a_backend_that_is_not_for_tables_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f'unknown backend of a table "{name}"; allowed: channels'):
        reproduce(replace(ONE, out=tmp_path / "none", backend=name))
    assert not (tmp_path / "none").exists()
