"""A table of three hospitals, and an experiment with a custom network, method and metric on it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

CONFIG = """\
name = "mine"
[data]
source = "patients.csv"
client = "hospital"
label = "outcome"
target = "north"
[model]
name = "net.py:Net"
[method]
name = "mine.py:make"
mu = 0.5
[metrics]
extra = ["m.py:brier"]
[training]
rounds = 3
steps = 2
lr = 0.5
evaluate_every = 1
"""
NET = """\
import math
from torch import nn


class Net(nn.Module):
    def __init__(self, task):
        super().__init__()
        inputs = math.prod(task.input_shape)
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(inputs, 8), nn.ReLU())
        self.head = nn.Linear(8, len(task.classes))

    def forward(self, x):
        return self.head(self.body(x))


def of_shape(input_shape, outputs):
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), outputs))
"""
METHOD = """\
from fedshift import recipes


def make(setting, *, mu=0.1):
    return recipes.fedprox(setting, mu=mu)
"""
METRIC = """\
import numpy as np


def brier(p, y):
    return float(((p - np.eye(p.shape[1])[y]) ** 2).sum(1).mean())
"""
# Python that leaves a mark where it is run.
MARK = 'from pathlib import Path\nPath(__file__).with_name("ran").touch()\n'


def table(seed: int = 0, rows: int = 240) -> str:
    """A CSV table of three hospitals with different outcomes, which depend on age and sex."""
    rng = np.random.default_rng(seed)
    lines = ["hospital,age,sex,ward,outcome"]
    for i in range(rows):
        hospital = ("north", "east", "south")[i % 3]
        ill = rng.random() < {"north": 0.7, "east": 0.5, "south": 0.2}[hospital]
        age, sex = 50 + 10 * ill + 5 * rng.standard_normal(), rng.choice(["f", "m"])
        lines.append(f"{hospital},{age:.2f},{sex},one,{'ill' if ill else 'well'}")
    return "\n".join(lines) + "\n"


def files_in(folder: Path) -> Path:
    """Write all files into a folder; return the experiment's path."""
    names = {"patients.csv": table(), "net.py": NET, "mine.py": METHOD, "m.py": METRIC}
    for name, text in (names | {"e.toml": CONFIG}).items():
        (folder / name).write_text(text)
    return folder / "e.toml"
