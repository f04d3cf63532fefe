"""Arrays of four clients of different label shares, and tasks of them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

import fedshift as fs

CLIENTS = ("east", "north", "south", "west")


def drawn_arrays(n: int = 120) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """(x [n, 3], y [n] "ill" or "well", the client of each row)."""
    rng = np.random.default_rng(5)
    client = np.array(CLIENTS)[np.arange(n) % 4]
    ill = rng.random(n) < np.array([0.2, 0.5, 0.6, 0.8])[np.arange(n) % 4]
    x = rng.normal(size=(n, 3)) + ill[:, None]
    return x, np.where(ill, "ill", "well"), client


def drawn_task(target: Any, **options: Any) -> fs.Task:
    """A task of those arrays."""
    x, y, client = drawn_arrays()
    return fs.Task.from_arrays(x, y, client=client, target=target, **options)
