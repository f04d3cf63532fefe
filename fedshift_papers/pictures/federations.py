"""Label counts of clients and a target to draw: those of a paper, or of a user's file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedshift.csv_counts import read_counts
from fedshift.datasets import find
from fedshift.errors import DataError
from fedshift.shifts import label_counts
from fedshift_papers.datasets import iwildcam
from fedshift_papers.datasets.fedpals_clients import iwildcam_roles

# The row of a file of counts that is not a client: it has the target's counts.
TARGET_ROW = "target"


@dataclass(frozen=True, eq=False)
class Federation:
    """Label counts [M, K] of M clients, the target's marginal [K], and their names.

    source: where the counts come from, a sentence
    """

    counts: NDArray[np.float64]
    target: NDArray[np.float64]
    clients: tuple[str, ...]
    classes: tuple[str, ...]
    source: str


def three_labels() -> Federation:
    """Three clients, and a target that no mixture of them can match."""
    counts = np.array([[60.0, 30.0, 10.0], [30.0, 150.0, 20.0], [30.0, 6.0, 24.0]])
    target = np.array([0.2, 0.25, 0.55])
    return Federation(
        counts, target, ("A", "B", "C"), ("label 1", "label 2", "label 3"),
        "The counts are ours: three clients of 100, 200 and 60 examples, and a target that no "
        "weights reach. --counts FILE draws others.",
    )  # fmt: skip


def cameras(clients: int) -> Federation:
    """iWildCam's cameras dealt to `clients` clients; reads the set's tables, and no images."""
    listing = iwildcam.scan(find("iwildcam"))
    iwildcam.check_complete(listing)
    roles = iwildcam_roles(listing, clients)
    counts = label_counts(listing.y, roles.clients, len(listing.classes)).astype(np.float64)
    names = tuple(map(str, range(clients)))
    return Federation(
        counts, roles.target, names, listing.classes,
        f"The cameras of iWildCam's training images, dealt to {clients} clients as in Table 3; the "
        "target's label shares are those of its test images.",
    )  # fmt: skip


def federation_of(path: Path) -> Federation:
    """The clients and the target of a CSV file of label counts; the target is the row "target".

    Raises DataError for a damaged file, for a file without a target or without clients, and for
    counts that are not whole numbers.
    """
    table = read_counts(path)
    if TARGET_ROW not in table.clients:
        raise DataError(
            f'{path}: no row is named "{TARGET_ROW}"; add one with the target\'s counts or shares, '
            f"below a first line with the labels' names, which is now {', '.join(table.classes)}"
        )
    at = table.clients.index(TARGET_ROW)
    others = [i for i in range(len(table.clients)) if i != at]
    if not others:
        raise DataError(f"{path}: no clients beside the target; add a row for each")
    for i in others:
        row, name = table.counts[i], table.clients[i]
        if (row != row.round()).any():
            raise DataError(
                f'{path}: client "{name}" has {row[row != row.round()][0]:g} examples of a label; '
                "give whole numbers, shares for the target alone"
            )
    total = table.counts[at].sum()
    if not total > 0:
        raise DataError(f"{path}: the target has no examples; give counts or shares above 0")
    return Federation(
        table.counts[others], table.counts[at] / total, tuple(table.clients[i] for i in others),
        table.classes, f"The counts are those of {path.name}.",
    )  # fmt: skip
