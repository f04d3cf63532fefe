"""Run folders of many methods are read without a change, and those of another format are refused.

What is read of a run stands in its `expected.json`; `python tests/test_golden.py` writes these
files anew, for a change that is wanted.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from fedshift.errors import DataError
from fedshift.record.folder import read_run

GOLDEN = Path(__file__).parent / "golden"
RUNS = sorted(folder.name for folder in GOLDEN.iterdir() if folder.is_dir())
EXPECTED = "expected.json"


def leaves(value: Any, place: str = "") -> dict[str, Any]:
    """Every number and text by its place, as in "summary.final.round"; absent ones left out."""
    if isinstance(value, dict | list | tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return {k: v for key, x in items for k, v in leaves(x, f"{place}.{key}").items()}
    return {} if value is None else {place.removeprefix("."): value}


def read(name: str) -> dict[str, Any]:
    """All values that a report reads of a run."""
    run = asdict(read_run(GOLDEN / name))
    return {k: v for k, v in run.items() if k not in ("folder", "config")}


def differing(name: str, values: dict[str, Any]) -> dict[str, Any]:
    """The values of expected.json that were read differently; later fields do not count."""
    expected = leaves(json.loads((GOLDEN / name / EXPECTED).read_text()))
    here = leaves(values)
    return {place: value for place, value in expected.items() if here.get(place) != value}


@pytest.mark.parametrize("name", RUNS)
def test_a_report_reads_what_it_always_read(name: str) -> None:
    assert differing(name, read(name)) == {}


def test_a_number_that_is_read_otherwise_is_noticed() -> None:
    """The control."""
    values = read("router")
    values["summary"]["final"]["round"] += 1
    assert differing("router", values) == {"summary.final.round": 2}


@pytest.mark.parametrize("given", [{"format": 2}, {}])
def test_another_format_is_refused(given: dict[str, int], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(GOLDEN / "cohort", folder)
    path = folder / "lock.json"
    lock = {k: v for k, v in json.loads(path.read_text()).items() if k != "format"}
    path.write_text(json.dumps(lock | given))
    with pytest.raises(DataError, match=r'lock.json: its "format" is (2|None), .* reads 1: run'):
        read_run(folder)


if __name__ == "__main__":
    for name in RUNS:
        text = json.dumps(read(name), separators=(",", ":"))
        (GOLDEN / name / EXPECTED).write_text(text + "\n")
