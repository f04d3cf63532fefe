"""Reports of what `fit` and `compare` leave: seeds are one line, and the call is on the page."""

from __future__ import annotations

from pathlib import Path

import pytest

import fedshift as fs
from fedshift.record.choosing import choose
from fedshift.record.folder import read_any
from fedshift.report.page import page
from fedshift.report.pools import pools
from support.custom_tasks import Net, hospitals
from support.report_fixtures import Outline


def fit(folder: Path, task: fs.Task, seed: int, net: object = Net, **keys: object) -> None:
    fs.fit(task, net, method="fedavg", seed=seed, rounds=2, steps=1, folder=folder, **keys)  # type: ignore[arg-type]


@pytest.mark.slow
def test_what_differs_in_more_than_the_seed_is_not_one_line(tmp_path: Path) -> None:
    def accuracy(p: object, y: object) -> float:
        return 0.5

    task = hospitals()
    fit(tmp_path / "a", task, 0)
    fit(tmp_path / "b", task, 1)
    fit(tmp_path / "other target", hospitals("south"), 2)
    fit(tmp_path / "other rows", hospitals(n=399), 3)
    fit(tmp_path / "other network", task, 4, "linear")
    fit(tmp_path / "other metric", task, 5, metrics={"half": accuracy})
    runs = [read_any(path) for path in sorted(tmp_path.iterdir())]
    folders = [[run.folder.name for run in line.all] for line in pools(runs)]
    assert folders == [["a", "b"], ["other metric"], ["other network"], ["other rows"],
                       ["other target"]]  # fmt: skip


def test_the_call_is_on_the_page(tmp_path: Path) -> None:
    fs.fit(
        hospitals(), Net, method=fs.method("fedprox", mu=0.1), seed=3, rounds=2, steps=1, lr=0.05,
        folder=tmp_path / "a",
    )  # fmt: skip
    text = "".join(Outline(page([read_any(tmp_path / "a")])).text)
    call = (
        'fs.fit(task, Net, method=fs.method("fedprox", mu=0.1), rounds=2, steps=1, lr=0.05, seed=3)'
    )
    assert call in text
    assert "Target: the client north, held out." in text


@pytest.mark.slow
@pytest.mark.parametrize("vary", ["training", "split"])
def test_the_runs_of_a_comparison_are_a_line_for_each_method(tmp_path: Path, vary: str) -> None:
    fs.compare(
        hospitals(), Net, ["fedavg", "fedpals"], seeds=3, vary=vary, rounds=2, steps=1, ess=0.9,
        folder=tmp_path, progress=False, jobs=1,
    )  # fmt: skip
    chosen = choose([tmp_path])
    lines = pools([read_any(folder) for folder in chosen.folders])
    assert [(line.label, line.seeds) for line in lines] == [
        ("fedavg", ("0", "1", "2")), ("fedpals", ("0", "1", "2")),
    ]  # fmt: skip
