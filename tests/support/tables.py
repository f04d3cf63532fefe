"""A table of six small runs, and the files that it writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fedshift_papers.reproduce.reproduce import (
    Reproduced,
    Request,
)
from fedshift_papers.reproduce.results import Cell

MINI = Request(
    "fedpals/table1",
    Path("unset"),
    datasets=("fashion-mnist-mini",),
    splits=("C=3",),
    methods=("fedpals", "fedavg", "fedprox"),
    seeds=(0, 1),
    rounds=2,
    overrides=("model.name=linear",),
)


def cell(done: Reproduced, label: str) -> Cell:
    return next(c for c in done.outcome.cells if c.row.label == label)


def results(out: Path, table: str = "table1") -> Any:
    return json.loads((out / table / "results.json").read_text())
