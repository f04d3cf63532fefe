"""Pictures of the label splits: clients by labels, for six clients and seed 0."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from fedshift import datasets, shifts
from fedshift.report.heat_map import SENT, heat_map
from fedshift.report.svg import Axis, side_bars
from fedshift.seeds import numpy_generator

CLIENTS, CLASSES = 6, 10
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
    names = [f"client {i}: {size:,} rows" for i, size in enumerate(sizes)]
    if name == "quantity":
        most = max(sizes)
        return side_bars(
            title,
            names,
            [size / most for size in sizes],
            Axis("rows, of the largest client's", True),
        )
    classes = [str(y) for y in range(CLASSES)]
    notes = [[f"{n} of label {y}" for y, n in enumerate(row)] for row in counts.tolist()]
    return heat_map(
        title, names, classes, shifts.marginals(counts).tolist(), notes=notes, shades=SENT
    )


def split_pictures() -> dict[str, Callable[[], str]]:
    """How to draw each split, by the name of its file."""
    return {f"split-{name}": partial(picture, name) for name in SPLITS}
