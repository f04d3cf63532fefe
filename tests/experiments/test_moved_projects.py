"""Moved projects, and run folders moved alone: runs and comparisons go on."""

from __future__ import annotations

import json
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest

import fedshift as fs
from fedshift.cli.app import app
from fedshift.cli.ending import perform
from fedshift.errors import DataError
from fedshift.experiments.config.load import dumps, load_config
from fedshift.experiments.resume import configured
from support.custom_files import files_in
from support.small_runs import record_until, results

NAMED = ("patients.csv", "net.py", "mine.py", "m.py")
COMPARE = ("compare", "e.toml", "--methods", "fedavg,mine.py:make", "--seeds", "0,1", "--jobs", "1")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """An experiment on user files, with a run in runs/cut that was killed in round 2."""
    folder = tmp_path / "one"
    (folder / "runs").mkdir(parents=True)
    record_until(folder / "runs" / "cut", load_config(files_in(folder)), 2)
    return folder


def call(*args: object) -> int:
    return perform(app, [str(arg) for arg in args])


def moved(project: Path) -> Path:
    """Move the project to a deeper folder; nothing is left in its old place."""
    place = project.parent / "a" / "b c" / "two"
    place.parent.mkdir(parents=True)
    shutil.move(project, place)
    return place


def paths_in(tables: dict[str, Any]) -> list[str]:
    data, model, method = (tables[name] for name in ("data", "model", "method"))
    return [data["source"], model["name"], method["name"], *tables["metrics"]["extra"]]


def test_paths_are_relative_to_the_run_folder(project: Path) -> None:
    tables = tomllib.loads((project / "runs" / "cut" / "config.resolved.toml").read_text())
    assert paths_in(tables) == [
        "../../patients.csv", "../../net.py:Net", "../../mine.py:make", "../../m.py:brier"
    ]  # fmt: skip
    lock = json.loads((project / "runs" / "cut" / "lock.json").read_text())
    assert set(lock["files"]) == {f"../../{name}" for name in NAMED}


def test_files_that_share_but_the_root_stay_absolute(tmp_path: Path) -> None:
    config = load_config(files_in(tmp_path))
    text = dumps(config, Path("/elsewhere/runs/first"))
    assert paths_in(tomllib.loads(text))[0] == str(tmp_path / "patients.csv")


def test_a_moved_project_goes_on(project: Path) -> None:
    """Its files equal those of a project that stayed; page and models come from the new place."""
    record_until(project / "runs" / "whole", load_config(project / "e.toml"), None)
    runs = moved(project) / "runs"
    assert call("run", "--resume", runs / "cut") == 0
    events = (runs / "cut" / "events.jsonl").read_text()
    assert '"rounds": 3, "after": 1' in events
    cut = results(runs / "cut")
    cut.pop("report.html")
    assert cut == results(runs / "whole")
    assert call("report", runs / "cut") == 0
    result = fs.load(runs / "cut")
    assert len(result.predict({"age": [70.0, 20.0], "sex": ["f", "m"]})) == 2


def test_a_changed_file_of_a_moved_project_is_refused(project: Path) -> None:
    place = moved(project)
    assert configured(place / "runs" / "cut").model.name == f"{place}/net.py:Net"
    (place / "m.py").write_text("")
    with pytest.raises(DataError, match="two/m.py is not what it was when the run began"):
        configured(place / "runs" / "cut")


@pytest.mark.slow
def test_a_run_folder_that_was_moved_alone_goes_on(project: Path, tmp_path: Path) -> None:
    """It records where it was trained, and so where its files are."""
    shutil.move(project / "runs" / "cut", tmp_path / "cut")
    again = configured(tmp_path / "cut")
    assert again == load_config(project / "e.toml")
    record_until(tmp_path / "cut", again, None)
    record_until(tmp_path / "whole", again, None)
    assert results(tmp_path / "cut") == results(tmp_path / "whole")


@pytest.mark.slow
def test_a_moved_comparison_goes_on(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its complete runs are not trained again. Control: after a change of the network they are."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(project)
    assert call(*COMPARE, "--out", "o") == 0
    shutil.rmtree(next((project / "o" / "runs").glob("*fedavg*s1*")))
    (run_folder,) = (project / "o" / "runs").glob("*fedavg*s0*")
    monkeypatch.chdir(project.parent)
    place = moved(project)
    monkeypatch.chdir(place)
    capsys.readouterr()
    assert call(*COMPARE, "--out", "o", "--resume") == 0
    assert "1 run to do, 3 complete" in capsys.readouterr().err
    file = place / "o" / "runs" / run_folder.name / "config.resolved.toml"
    text = file.read_text()
    file.write_text(text.replace("lr = 0.5", "lr = 0.25"))
    assert call(*COMPARE, "--out", "o", "--resume") == 3
    assert "training.lr = 0.25 (now 0.5) is not what the table" in capsys.readouterr().err
    file.write_text(text)
    assert (place / "o" / "runs" / run_folder.name / "summary.json").exists()
    with (place / "net.py").open("a") as net:
        net.write("# changed\n")
    assert call(*COMPARE, "--out", "o", "--resume") == 0
    assert "4 runs to do, 0 complete" in capsys.readouterr().err
