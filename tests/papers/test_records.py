"""Published tables: their records stand for run folders, and damage to them is named."""

from __future__ import annotations

import gzip
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedshift.errors import DataError
from fedshift.sweeps.records import RECORDS, read_records
from fedshift_papers.reproduce.reproduce import Reproduced, Request, reproduce

MINI = Request(
    "fedpals/table1", Path("unset"), ("fashion-mnist-mini",), ("C=3",), ("fedavg", "fedrs"), (0, 1),
    1, overrides=("model.name=linear",),
)  # fmt: skip


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Reproduced]:
    """A table of two methods and two seeds, trained once and published."""
    place = tmp_path_factory.mktemp("records")
    return place / "small", reproduce(replace(MINI, out=place / "out", publish=place / "small"))


@pytest.fixture
def small(published: tuple[Path, Reproduced], tmp_path: Path) -> Path:
    """A copy of what was published."""
    shutil.copytree(published[0], tmp_path / "small")
    return tmp_path / "small"


def numbers(done: Reproduced) -> Any:
    return [(cell.row.label, cell.by_seed, cell.difference) for cell in done.outcome.cells]


def keep(path: Path, wanted: Callable[[str], bool]) -> None:
    """Only some of the records of a file."""
    lines = gzip.decompress(path.read_bytes()).decode().splitlines(keepends=True)
    chosen = [line for line in lines if wanted(json.loads(line)["run"])]
    assert 0 < len(chosen) < len(lines)
    path.write_bytes(gzip.compress("".join(chosen).encode()))


@pytest.mark.slow
def test_a_table_goes_on_from_records(small: Path, published: tuple[Path, Reproduced]) -> None:
    """What is recorded is not trained, in other tables either; publishing again changes nothing."""
    before = {p.name: p.read_bytes() for p in (small / "table1").iterdir()}
    done = reproduce(replace(MINI, out=small, publish=small))
    assert done.report.trained == ()
    assert numbers(done) == numbers(published[1])
    assert {name: (small / "table1" / name).read_bytes() for name in before} == before
    assert reproduce(replace(MINI, target="fedpals/fig2", out=small)).report.trained == ()


@pytest.mark.parametrize("jobs", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_only_what_is_not_recorded_is_trained(
    jobs: int, small: Path, published: tuple[Path, Reproduced]
) -> None:
    keep(small / "table1" / RECORDS, lambda run: "_s1-" not in run)
    done = reproduce(replace(MINI, out=small, jobs=jobs))
    assert set(done.report.trained) == {n for n in published[1].report.trained if "_s1-" in n}
    assert {p.name for p in (small / "runs").iterdir()} == set(done.report.trained)
    assert numbers(done) == numbers(published[1])
    # The page links to the folders of these, and has the ids of the others.
    page = (small / "table1" / "table.md").read_text()
    for value in (v for cell in done.outcome.cells for v in cell.values):
        link = f"[{value.seed}](../runs/{value.run.name})"
        assert (link in page) == (value.seed == 1)
        assert (f"{value.seed} `{value.run.id}`" in page) == (value.seed == 0)


@pytest.mark.slow
def test_records_that_a_part_does_not_read_stay(small: Path) -> None:
    whole = (small / "table1" / RECORDS).read_bytes()
    reproduce(replace(MINI, out=small, publish=small, seeds=(1,)))
    assert (small / "table1" / RECORDS).read_bytes() == whole


@pytest.mark.slow
def test_a_folder_comes_before_a_record(
    small: Path, published: tuple[Path, Reproduced], tmp_path: Path
) -> None:
    """For a run that was trained again."""
    value = published[1].outcome.cells[0].values[0]
    shutil.copytree(
        published[0].parent / "out" / "runs" / value.run.name, small / "runs" / value.run.name
    )
    path = small / "runs" / value.run.name / "summary.json"
    summary = json.loads(path.read_text())
    summary["best"]["target_accuracy"] = 0.125
    path.write_text(json.dumps(summary))
    done = reproduce(replace(MINI, out=small, publish=tmp_path / "new", train=False))
    assert done.outcome.cells[0].by_seed[0] == 12.5 != value.value
    record = read_records(tmp_path / "new" / "table1" / RECORDS)[value.run.name]
    assert json.loads(record.files["summary.json"]) == summary


def without(name: str, key: str = "") -> Callable[[bytes], bytes]:
    """Take a file from every record, or a key from that file."""

    def change(data: bytes) -> bytes:
        lines = [json.loads(line) for line in gzip.decompress(data).splitlines()]
        for line in lines:
            _ = line["files"][name].pop(key) if key else line["files"].pop(name)
        return gzip.compress("\n".join(map(json.dumps, lines)).encode())

    return change


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:-20], r": Compressed file ended.*\. Restore it, or delete it"),
        (lambda data: b"{}", r": Not a gzipped file.*\. Restore it"),
        (
            lambda data: gzip.compress(b"{}\n"),
            r": a line is no record of a run \('run'\)\. Restore",
        ),
        (lambda data: gzip.compress(b"[\n"), r": a line is no record of a run \(Expecting"),
        (lambda data: gzip.compress(b"\xff\n"), r": a line is no record of a run \('utf-8'"),
        (
            without("summary.json", "final"),
            r': \S+/summary\.json: "final": Field required\. Train it again under another --out',
        ),
        (without("config.resolved.toml"), r"/config\.resolved\.toml: the record does not hold it"),
    ],
)
def test_damaged_records_are_named(
    small: Path, damage: Callable[[bytes], bytes], message: str
) -> None:
    path = small / "table1" / RECORDS
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=f"^{re.escape(str(path))}.*{message}"):
        reproduce(replace(MINI, out=small))
    assert not list((small / "runs").glob("*"))
