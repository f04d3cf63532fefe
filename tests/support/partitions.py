"""Generators, and the label counts of a shift."""

from __future__ import annotations

import numpy as np

from fedshift.shifts import (
    Shift,
    label_counts,
)


def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def table(shift: Shift, labels: np.ndarray, clients: int, seed: int) -> np.ndarray:
    return label_counts(labels, shift(labels, 10, clients, rng(seed)), 10)
