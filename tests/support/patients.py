"""A table of hospitals, and files of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

import fedshift as fs

CLIENTS = ("east", "north", "south", "west")


def patients(n: int = 200) -> pd.DataFrame:
    """A table of hospitals with an age, a dose with decimals, a ward and an outcome."""
    rng = np.random.default_rng(3)
    return pd.DataFrame(
        {
            "hospital": np.array(CLIENTS)[np.arange(n) % 4],
            "age": rng.integers(20, 90, n),
            "dose": rng.normal(2.0, 0.5, n).round(3),
            "ward": np.array(["A", "B", "Kinderklinik Köln"])[rng.integers(0, 3, n)],
            "outcome": np.array(["good", "poor"])[rng.integers(0, 2, n)],
        }
    )


def written(folder: Path, frame: pd.DataFrame, **options: Any) -> Path:
    path = folder / "patients.csv"
    frame.to_csv(path, index=False, **options)
    return path


def read(path: Path, **options: Any) -> fs.Task:
    given: dict[str, Any] = {"client": "hospital", "label": "outcome", "target": "north"}
    return fs.Task.from_csv(path, **given | options)


def spoilt(folder: Path, text: str | bytes) -> Path:
    path = folder / "patients.csv"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


ROWS = "hospital,age,outcome\na,1,x\nb,2,y\na,3,y\nb,4,x\n"
