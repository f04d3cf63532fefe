"""Run folders of earlier versions and of many methods are read without a change.

`tests/golden/` holds runs that every version must understand. Some are as published, without
`clients.csv` or `metrics.csv`: these are completed from the summary before they are read. What is
read of a run stands in its `expected.json`; `python tests/test_golden.py` writes these files anew,
for a change that is wanted.
"""

from __future__ import annotations

import csv
import json
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from fedshift.experiments.config.load import load_config
from fedshift.record.folder import ROUND_COLUMNS, SERVED_COLUMNS, read_run
from fedshift.sweeps.store import Store, run_of

GOLDEN = Path(__file__).parent / "golden"
RUNS = sorted(folder.name for folder in GOLDEN.iterdir() if folder.is_dir())
EXPECTED = "expected.json"
WITH_SUMMARY = [name for name in RUNS if (GOLDEN / name / "summary.json").exists()]
# As `reproduce --publish` left them, under the names that their configurations give them.
PUBLISHED = [name for name in RUNS if not (GOLDEN / name / "clients.csv").exists()]


def completed(name: str, tmp: Path) -> Path:
    """Copy a run, adding the files that a published run lacks, made from its summary."""
    folder = tmp / name
    shutil.copytree(GOLDEN / name, folder)
    summary = json.loads((folder / "summary.json").read_text())
    if not (folder / "clients.csv").exists():
        header = ["client", "n", "weight", "fedavg_weight", "accuracy", "n_validation"]
        of_clients = zip(
            summary["label_counts"], summary["weights"], summary["fedavg_weights"], strict=True
        )
        rows = [[i, sum(n), w, f, "", "", *n] for i, (n, w, f) in enumerate(of_clients)]
        table(folder / "clients.csv", [*header, *(f"label_{c}" for c in summary["classes"])], rows)
    for file, columns in (("metrics.csv", ROUND_COLUMNS), ("served.csv", SERVED_COLUMNS)):
        if not (folder / file).exists():
            final = summary["final"]
            table(folder / file, columns, [[final.get(column) for column in columns]])
    return folder


def table(path: Path, header: Any, rows: Any) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([header, *rows])


def leaves(value: Any, place: str = "") -> dict[str, Any]:
    """Every number and text by its place, as in "summary.final.round"; absent ones left out."""
    if isinstance(value, dict | list | tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return {k: v for key, x in items for k, v in leaves(x, f"{place}.{key}").items()}
    return {} if value is None else {place.removeprefix("."): value}


def read(name: str, tmp: Path) -> dict[str, Any]:
    """All values that a report reads of a run."""
    run = asdict(read_run(completed(name, tmp)))
    return {k: v for k, v in run.items() if k not in ("folder", "config")}


def differing(name: str, values: dict[str, Any]) -> dict[str, Any]:
    """The values of expected.json that were read differently; later fields do not count."""
    expected = leaves(json.loads((GOLDEN / name / EXPECTED).read_text()))
    here = leaves(values)
    return {place: value for place, value in expected.items() if here.get(place) != value}


@pytest.mark.parametrize("name", WITH_SUMMARY)
def test_a_report_reads_what_it_always_read(name: str, tmp_path: Path) -> None:
    assert differing(name, read(name, tmp_path)) == {}


def test_a_number_that_is_read_otherwise_is_noticed(tmp_path: Path) -> None:
    """The control."""
    values = read("router", tmp_path)
    values["summary"]["final"]["round"] += 1
    assert differing("router", values) == {"summary.final.round": 2}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_table_goes_on_from_a_published_run(name: str, tmp_path: Path) -> None:
    """It is the complete run of its configuration, with the values of its files."""
    store, run = Store(tmp_path), run_of(load_config(GOLDEN / name / "config.resolved.toml"))
    shutil.copytree(GOLDEN / name, tmp_path / run.name)
    config = (GOLDEN / name / "config.resolved.toml").read_text()
    assert f'name = "{run.name}"' in config
    assert store.over(run)
    finished, ended = store.read(run), store.diverged(run)
    assert finished.lock == json.loads((GOLDEN / name / "lock.json").read_text())
    assert (ended is not None) == (GOLDEN / name / "diverged.json").exists()
    if ended is None:
        assert finished.summary == json.loads((GOLDEN / name / "summary.json").read_text())
    else:
        note = json.loads((GOLDEN / name / "diverged.json").read_text())
        assert (ended.error, ended.rounds) == (note["error"], note["rounds"])
        assert finished.summary["best"] == note["best"]


if __name__ == "__main__":
    for name in WITH_SUMMARY:
        with tempfile.TemporaryDirectory() as tmp:
            text = json.dumps(read(name, Path(tmp)), separators=(",", ":"))
        (GOLDEN / name / EXPECTED).write_text(text + "\n")
