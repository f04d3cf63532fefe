"""Pictures of the label splits: clients by labels, for six clients and seed 0."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from plain_bars import WIDTH, Bar, bars

from fedshift import datasets, shifts
from fedshift.report.charts import SENT, HeatMap
from fedshift.report.shapes import document
from fedshift.report.svg import svg
from fedshift.seeds import numpy_generator

CLIENTS, CLASSES = 6, 10
# The least with numbers in the cells: a telephone shrinks labels of 10 px to 9.
NARROWEST = 394.0
SPLITS: dict[str, shifts.Shift] = {
    "iid": shifts.Iid(),
    "sparsity": shifts.Sparsity(3),
    "dirichlet-per-client": shifts.DirichletPerClient(0.3),
    "dirichlet-per-class": shifts.DirichletPerClass(0.3),
    "shards": shifts.Shards(2),
    "label-sets": shifts.LabelSetSplit(3, samples=360),
    "label-sets-common": shifts.LabelSetSplit(3, samples=300, common=2),
    "quantity": shifts.QuantitySkew(0.5),
}


def picture(name: str) -> str:
    """Shares of labels for each client; numbers of rows where these alone differ."""
    labels = datasets.load("fashion-mnist-mini").train.y.numpy()
    parts = SPLITS[name](labels, CLASSES, CLIENTS, numpy_generator(0, "split"))
    counts = shifts.label_counts(labels, parts, CLASSES)
    sizes = counts.sum(1).tolist()
    title = f"Six clients, split by {name.replace('-', ' ')}"
    if name == "quantity":
        rows = [
            Bar(f"client {i}", n / max(sizes), f"{n:,}", "var(--heat)") for i, n in enumerate(sizes)
        ]
        drawing, height = bars("numbers of rows", rows, 20)
        return document(title, WIDTH, height, [drawing])
    names = tuple(f"client {i}: {n:,}" for i, n in enumerate(sizes))
    classes = tuple(str(y) for y in range(CLASSES))
    notes = tuple(tuple(f"{n} of label {y}" for y, n in enumerate(row)) for row in counts.tolist())
    shares = tuple(map(tuple, shifts.marginals(counts).tolist()))
    return svg(HeatMap(title, names, classes, shares, notes, SENT), NARROWEST)


def split_pictures() -> dict[str, Callable[[], str]]:
    """How to draw each split, by the name of its file."""
    return {f"split-{name}": partial(picture, name) for name in SPLITS}
