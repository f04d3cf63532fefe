"""Digits by writer in LEAF's layout, made up: every label a stripe, every writer an ink."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

WRITERS, OTHERS, EACH = 30, 5, 20


def write_digits(folder: Path) -> Path:
    """femnist/ with 30 writers of 20 digits for training and 5 others for the test."""
    for part, first, count in (("train", 0, WRITERS), ("test", WRITERS, OTHERS)):
        users = {f"f{first + i:04d}_00": _user(first + i) for i in range(count)}
        content = {"users": list(users), "num_samples": [EACH] * count, "user_data": users}
        (folder / "femnist" / part).mkdir(parents=True)
        path = folder / "femnist" / part / "all_data_0.json"
        path.write_text(json.dumps(content))
    return folder


def _user(number: int) -> dict[str, list[object]]:
    rng = np.random.default_rng(number)
    x, y = [], [k % 10 for k in range(EACH)]
    for label in y:
        paper = np.ones((28, 28))
        paper[2 * label + 4 : 2 * label + 6] = 0.2 + 0.02 * (number % 30)
        x.append(np.round(paper - rng.integers(0, 2, (28, 28)) / 10, 2).clip(0, 1).ravel().tolist())
    return {"x": x, "y": y}
