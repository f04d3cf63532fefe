"""The backend of a run's numbers: lock.json records it, and a table keeps to one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import torch

import fedshift
from fedshift.cli.app import app
from fedshift.cli.ending import perform
from fedshift.engine.backend_names import ALONE, IN_PYTHON, NAMES, SPREAD
from fedshift.engine.choosing.fastest import check_fit
from fedshift.engine.run import run
from fedshift.errors import DataError, InputError
from fedshift.experiments.config.load import load_config
from fedshift.experiments.engines import InProcess, Way, backend_of
from fedshift.experiments.experiment import federation_of, method_of, record
from fedshift.experiments.folder.run_folder import kept_in
from fedshift.experiments.folder.summary import package_version
from fedshift.experiments.resume import begun_by, reopened
from fedshift.experiments.task.preparing import prepare
from fedshift.sweeps.execute import Report, execute
from fedshift.sweeps.store import Store
from fedshift.sweeps.worker import Means
from fedshift_papers.reproduce.plan import wanted
from fedshift_papers.reproduce.reproduce import make_plan, reproduce
from support.fuzz import different
from support.small_runs import config_of
from support.tables import MINI, cell, results

Printed = pytest.CaptureFixture[str]
ONE = replace(MINI, methods=("fedavg",), seeds=(0,), rounds=4)


def test_every_name_makes_an_engine_and_has_its_words_for_python() -> None:
    assert set(NAMES) <= set(IN_PYTHON)
    for name in NAMES:
        if not name.startswith("cuda"):
            assert backend_of(name, 2 if name in SPREAD else None).backend
    with pytest.raises(InputError, match='Did you mean "dense"'):
        backend_of("dence")
    assert set(ALONE) < set(NAMES)
    with pytest.raises(InputError, match="use channels-last"):
        backend_of("winograd")


def test_a_run_of_winograd_is_not_taken_up_by_it(tmp_path: Path) -> None:
    (tmp_path / "lock.json").write_text('{"format": 1, "backend": "winograd in 2 workers"}')
    with pytest.raises(DataError, match="use channels-last; name the backend with --backend"):
        begun_by(tmp_path)


@pytest.mark.parametrize(
    ("name", "count", "expected"),
    [
        ("loop", None, "loop"),
        ("workers", 2, "loop"),
        ("dense", None, "dense"),
        ("dense", 2, "dense in 2 workers"),
        ("channels-last", 2, "channels-last"),
        ("stacked", None, "stacked"),
    ],
)
def test_names_tell_numbers_apart(name: str, count: int | None, expected: str) -> None:
    engine = backend_of(name, count)
    assert engine.backend == expected
    assert Way.parse(expected).numbers == expected
    assert InProcess().backend == "loop"


def lock(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "lock.json").read_text())
    return content


def typed(place: Path, model: str, method: str, backend: str) -> int:
    """The exit code of `fedshift run` for one round, in the folder "a" of a place."""
    file = place / "one.toml"
    file.write_text(
        '[data]\nname = "fashion-mnist-mini"\n[shift]\nclients = 4\nkind = "iid"\n'
        f'[model]\nname = "{model}"\n[method]\nname = "{method}"\n[training]\nrounds = 1\n'
    )
    return perform(app, ["run", str(file), "--out", str(place / "a"), "--backend", backend])


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("model", "method", "backend", "message"),
    [
        ("lenet", "fedavg", "dense", "the backend dense trains chains of linear layers"),
        ("lenet", "fedavg", "winograd", "the backend winograd is gone"),
        ("lenet", "fedala", "stacked", "clients cannot be stacked"),
    ],
)
def test_a_backend_that_refuses_leaves_nothing(
    model: str,
    method: str,
    backend: str,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert typed(tmp_path, model, method, backend) == 2
    errors = " ".join(capsys.readouterr().err.split())
    assert message in errors
    assert "1 round" not in errors  # refused before a run is announced
    assert not (tmp_path / "a").exists()


@pytest.mark.slow
def test_a_run_is_announced_once_its_backend_fits(tmp_path: Path, capsys: Printed) -> None:
    assert typed(tmp_path, "mlp", "fedavg", "dense") == 0
    assert "run: 1 round" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["dense", "stacked", "channels-last"])
def test_a_backend_is_tried_without_a_trace(backend: str) -> None:
    """The trial takes one step of two clients of the next round; the numbers stay the same."""
    model = "lenet" if backend == "channels-last" else "mlp"
    setting = {"model": {"name": model}, "training": {"rounds": 2, "steps": 2}}
    config = config_of("fedavg", **setting)
    ready = prepare(config)
    algorithm, federation = (
        method_of(config.method, config.training, ready)(),
        federation_of(config.method, ready),
    )
    make = Way(backend).alone
    plain = [played.server for played in run(algorithm, federation, 2, backend=make())]
    servers = []
    after = None
    for _ in range(2):
        check_fit(make(), algorithm, federation, 2, after=after)
        after = next(run(algorithm, federation, 2, backend=make(), after=after))
        servers.append(after.server)
    assert different(servers[-1], plain[-1]) == []
    assert different(servers[0], plain[-1]) != []


@pytest.mark.slow
@pytest.mark.parametrize("checkpoints", [True, False])
def test_what_was_begun_stays_when_another_backend_refuses(
    checkpoints: bool, tmp_path: Path
) -> None:
    folder = interrupted(tmp_path, "loop", "model.name=lenet")
    if not checkpoints:
        shutil.rmtree(folder / "checkpoints")
    before = {name: (folder / name).read_bytes() for name in ("config.resolved.toml", "lock.json")}
    assert perform(app, ["run", "--resume", str(folder), "--backend", "dense"]) == 2
    assert {name: (folder / name).read_bytes() for name in before} == before
    assert (folder / "checkpoints").is_dir() == checkpoints


@pytest.mark.slow
def test_a_run_says_what_auto_chose(tmp_path: Path, capsys: Printed) -> None:
    assert typed(tmp_path, "linear", "fedavg", "auto") == 0
    chosen = lock(tmp_path / "a")["backend"]
    named = capsys.readouterr().err.partition("backend ")[2].partition(":")[0]
    alone = "loop" if named.endswith(" workers") and " in " not in named else named
    assert chosen == (alone if named.startswith("dense") else alone.partition(" in ")[0])


def only(out: Path) -> Path:
    (folder,) = (out / "runs").iterdir()
    return folder


@pytest.mark.slow
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
    assert results(tmp_path / "dense")["command"].endswith(
        "--rounds 4 --backend dense -c model.name=linear"
    )
    assert results(tmp_path / "dense")["notes"][-1].endswith("; backend dense.")
    assert "backend" not in results(tmp_path / "loop")["notes"][-1]
    # What is complete is used, and the foot says by which.
    again = reproduce(replace(ONE, out=tmp_path / "dense"))
    assert again.report.trained == ()
    assert "--backend dense" in again.outcome.command
    mixed = reproduce(replace(ONE, out=tmp_path / "dense", seeds=(0, 1)))
    assert "--backend" not in mixed.outcome.command
    assert [n.endswith("; backend dense.") for n in mixed.outcome.notes[-2:]] == [True, False]
    assert again.outcome.notes[-1].endswith("; backend dense.")


def interrupted(out: Path, backend: str, *overrides: str) -> Path:
    """The folder of a run that was stopped after its second round."""
    stops: Iterator[int | None] = iter([None] * 2 + [2] * 99)
    request = replace(ONE, out=out, backend=backend, overrides=overrides or ONE.overrides)
    assert reproduce(request, asked=lambda: next(stops)).report.interrupted
    assert (only(out) / "checkpoints").is_dir()
    return only(out)


def played(out: Path, backend: str, jobs: int = 1) -> tuple[list[int], Report]:
    """The rounds that are played when a table goes on."""
    played_rounds: list[int] = []

    def listen(event: dict[str, Any]) -> None:
        played_rounds.extend([event["round"]] if event["event"] == "round" else [])

    store = Store(out / "runs")
    runs = wanted(make_plan(replace(ONE, out=out)), store)
    return played_rounds, execute(runs, store, jobs=jobs, means=Means(backend), listen=listen)


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [1, 2])
def test_a_run_goes_on_by_the_backend_that_began_it_alone(jobs: int, tmp_path: Path) -> None:
    folder = interrupted(tmp_path, "dense")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    played_rounds, report = played(tmp_path, "loop", jobs)
    assert played_rounds == []
    (why,) = report.failures.values()
    assert f"{folder}: begun by the backend dense" in why
    assert "go on with --backend dense, or delete the folder" in why
    assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} == before
    played_rounds, report = played(tmp_path, "dense", jobs)
    assert (played_rounds, report.failures) == ([3, 4], {})
    assert lock(folder)["backend"] == "dense"


@pytest.mark.slow
@pytest.mark.parametrize("lost", [True, False], ids=["gone", "damaged"])
def test_a_folder_without_a_readable_lock(lost: bool, tmp_path: Path) -> None:
    path = interrupted(tmp_path, "loop") / "lock.json"
    if lost:
        path.unlink()
    else:
        path.write_text('{"packages": null}')
    played_rounds, report = played(tmp_path, "loop")
    assert played_rounds == ([3, 4] if lost else [])
    assert all("Delete the folder" in why for why in report.failures.values())
    assert len(report.failures) == (not lost)


@pytest.mark.slow
def test_a_refused_backend_leaves_no_run_of_a_table(tmp_path: Path) -> None:
    convolutions = replace(ONE, out=tmp_path, overrides=("model.name=lenet",), backend="dense")
    for jobs in (1, 2):
        (why,) = reproduce(replace(convolutions, jobs=jobs)).report.failures.values()
        assert why.startswith("the backend dense trains chains of linear layers")
        assert list((tmp_path / "runs").iterdir()) == []


@pytest.mark.slow
def test_the_lock_follows_the_backend_that_goes_on(tmp_path: Path, capsys: Printed) -> None:
    """Also for a run that is stopped again, here by a failure in its fourth round."""
    folder = interrupted(tmp_path, "loop")
    capsys.readouterr()
    config, seen = load_config(folder / "config.resolved.toml"), list[str]()
    prepared = prepare(config)

    def listen(event: dict[str, Any]) -> None:
        seen.append(lock(folder)["backend"])
        if event["event"] == "round" and event["round"] == 4:
            raise KeyboardInterrupt

    keeper = kept_in(folder, config, prepared, 1)
    with pytest.raises(KeyboardInterrupt):
        record(folder, config, prepared, listen, backend_of("dense"), keeper)
    assert (seen[0], seen[-1]) == ("loop", "loop, then dense")
    (why,) = played(tmp_path, "dense")[1].failures.values()
    assert "begun by the backend loop, then dense, and a run of a table is made by one; del" in why
    assert begun_by(folder) == ("dense", None)
    with reopened(folder, config, prepared, "dense") as (_, moved):
        assert moved == ""
    assert perform(app, ["run", "--resume", str(folder), "--backend", "stacked"]) == 0
    message = "backend dense then, stacked now"
    assert message in " ".join(capsys.readouterr().err.split())
    assert lock(folder)["backend"] == "loop, then dense, then stacked"
    drawn = reproduce(replace(ONE, out=tmp_path)).outcome
    assert drawn.notes[-1].endswith("; backend loop, then dense, then stacked.")
    assert "--backend" not in drawn.command


@pytest.mark.slow
@pytest.mark.parametrize("recognised", [True, False])
def test_a_run_goes_on_by_its_own_backend(
    recognised: bool, tmp_path: Path, capsys: Printed
) -> None:
    folder = interrupted(tmp_path, "dense")
    if not recognised:
        (folder / "lock.json").write_text(json.dumps({**lock(folder), "backend": "abacus"}))
    code = perform(app, ["run", "--resume", str(folder)])
    errors = " ".join(capsys.readouterr().err.split())
    assert code == (0 if recognised else 3)
    assert ("then," in errors, "name the backend with --backend" in errors) == (
        False,
        not recognised,
    )
    assert lock(folder)["backend"] == ("dense" if recognised else "abacus")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is such a device")
def test_a_device_that_is_not_there_is_met_first(tmp_path: Path) -> None:
    request = replace(ONE, out=tmp_path / "none", backend="cuda")
    with pytest.raises(InputError, match="cuda"):
        reproduce(request)
    assert not (tmp_path / "none").exists()
    reproduce(replace(request, train=False))  # nothing is trained


@pytest.mark.parametrize("name", ["auto", "workers", "densee"])
def test_a_backend_that_is_not_for_tables_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f'unknown backend of a table "{name}"; allowed: .*loop'):
        reproduce(replace(ONE, out=tmp_path / "none", backend=name))
    assert not (tmp_path / "none").exists()


def test_a_source_tree_that_is_not_installed_has_its_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def absent(package: str) -> str:
        raise PackageNotFoundError(package)

    monkeypatch.setattr("fedshift.experiments.folder.summary.version", absent)
    assert package_version("fedshift") == fedshift.__version__
    assert package_version("no-such-package") is None
