"""Exercises of the shoulder, recorded by a smartwatch on ten people.

All do the same exercises equally often, so there is no label shift: only people differ.
Source: Burns et al. (2018), arXiv:1802.01489.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedshift.datasets.natural.entry import Natural, Rows
from fedshift.datasets.natural.package import Package
from fedshift.datasets.pickled_tables import load_object

# The shortest of the recordings has 947 steps: 9 windows of 2 s, at 50 steps a second.
STEPS, WINDOWS = 100, 9


def read(place: Path) -> Rows:
    """Windows [steps, channels] = [100, 6] of acceleration and rotation, 9 of each recording.

    The windows of a recording are evenly spread over it and do not overlap; as many of each keep
    the labels balanced.
    """
    data = load_object(place / "data" / "watch_dataset.npy")
    exercises = [data["y_labels"][k] for k in data["y"]]
    parts = [_windows(recording) for recording in data["X"]]
    return Rows(
        np.concatenate(parts).astype(np.float32),
        [name for name in exercises for _ in range(WINDOWS)],
        [str(subject) for subject in data["subject"] for _ in range(WINDOWS)],
    )


def _windows(recording: np.ndarray) -> np.ndarray:
    starts = np.linspace(0, len(recording) - STEPS, WINDOWS).astype(int)
    return np.stack([recording[start : start + STEPS] for start in starts])


WATCH = Natural(
    name="watch",
    summary="shoulder exercises recorded by a smartwatch, by person",
    classes=("PEN", "ABD", "FEL", "IR", "ER", "TRAP", "ROW"),
    label="exercise",
    by="subject",
    rows=1_260,
    clients=10,
    inputs="windows of 100 steps x 6 channels",
    licence="BSD (seglearn)",
    package=Package("seglearn", "1.2.5"),
    read=read,
)
