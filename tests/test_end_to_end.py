"""The commands as processes on real data, from start to report. Minutes, hence slow."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fedshift import datasets

pytestmark = pytest.mark.slow
SCRIPT = Path(sys.executable).with_name("fedshift")


def fedshift(folder: Path, *args: str) -> Any:
    """Run the installed script; its JSON."""
    done = subprocess.run(
        [SCRIPT, *args, "--format", "json"], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def needs(name: str) -> None:
    found = {one.name: one for one in datasets.known()}[name]
    if not found.available:
        pytest.skip(f"{name} is not in any search folder: {found.how}")


def test_the_demo_shows_what_it_promises(tmp_path: Path) -> None:
    """Oracle >= FedPALS > FedAvg on the target, the estimate near the truth, and the reason."""
    told = fedshift(tmp_path, "demo", "--out", "demo")
    runs = {r["method"]: r for r in told["runs"]}
    assert runs["oracle"]["target_accuracy"] >= runs["fedpals"]["target_accuracy"]
    assert runs["fedpals"]["target_accuracy"] > runs["fedavg"]["target_accuracy"]
    for r in runs.values():
        off = abs(r["estimated_accuracy"] - r["target_accuracy"])
        assert off < 3 * r["estimated_se"] + 0.02
    assert any("train too little on" in sentence for sentence in told["why"])
    # The README quotes this table; another processor may round a few images differently.
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    quoted = re.findall(r"│ (FedAvg|FedPALS|Oracle) +│ +([\d.]+) │", readme)
    assert {name.lower() for name, _ in quoted} == runs.keys()
    for name, accuracy in quoted:
        assert abs(float(accuracy) / 100 - runs[name.lower()]["target_accuracy"]) < 0.02
    assert (tmp_path / "demo" / "report.html").stat().st_size > 10_000


@pytest.mark.parametrize("name", ["fashion-mnist", "cifar-10", "mnist"])
def test_two_rounds_on_a_whole_data_set(name: str, tmp_path: Path) -> None:
    needs(name)
    told = fedshift(
        tmp_path, "demo", "--out", "o", "-c", f"data.name={name}", "-c", "training.rounds=2",
        "-c", "selection.grid=[0.5]",
    )  # fmt: skip
    assert [r["method"] for r in told["runs"]] == ["fedavg", "fedpals", "oracle"]
    assert all(0 < r["target_accuracy"] <= 1 for r in told["runs"])
    again = fedshift(tmp_path, "report", "o/fedavg", "o/oracle", "--out", "two.html")
    assert Path(tmp_path, again["report"]).exists()
