"""Figures that show clients and weights: nothing is trained for them, label counts are enough."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fedshift.datasets import find
from fedshift.papers.datasets import iwildcam
from fedshift.papers.datasets.fedpals_clients import iwildcam_roles
from fedshift.shifts import label_counts


@dataclass(frozen=True, eq=False)
class Federation:
    """Label counts [M, K] of M clients, the target's marginal [K], and their names."""

    counts: NDArray[np.float64]
    target: NDArray[np.float64]
    clients: tuple[str, ...]
    classes: tuple[str, ...]


@dataclass(frozen=True)
class Picture:
    """A figure that is drawn from label counts.

    kind    "simplex": marginals of three labels in their triangle; "weights" by effective sample
            size
    counts  the federation that it shows where no other is given; raises DataError without its data
    source  where those counts come from
    ess     effective sample sizes as fractions, 0 for lambda = 0
    chosen  what the paper leaves open, and what we took
    """

    name: str
    title: str
    kind: Literal["simplex", "weights"]
    counts: Callable[[], Federation]
    source: str
    ess: tuple[float, ...]
    chosen: tuple[str, ...]

    @property
    def folder(self) -> str:
        """The name of its folder: "fig1" for "fedpals/fig1"."""
        return self.name.rpartition("/")[2]


def pictures() -> dict[str, Picture]:
    """Every picture by name."""
    made = (
        Picture(
            "fedpals/fig1",
            "Clients, target and weights in the simplex of three labels",
            "simplex",
            _three_labels,
            "The counts are ours: three clients of 100, 200 and 60 examples, and a target that no "
            "weights reach. --counts FILE draws others.",
            (0.0, 0.25, 0.5, 0.75),
            (
                "The path of FedPALS goes from lambda = 0, the point of the clients' hull nearest "
                "to T, to FedAvg's mixture at lambda = infinity.",
            ),
        ),
        Picture(
            "fedpals/fig4",
            "Weights on iWildCam by effective sample size",
            "weights",
            lambda: _cameras(100),
            "The cameras of iWildCam's training images, dealt to 100 clients as in Table 3; the "
            "target's label shares are those of its test images.",
            (0.0, 0.25, 0.5, 0.75),
            (
                "Clients are in the order of their size, the largest first.",
                "ESS of 25, 50 and 75 % are reached by the smallest lambda; the paper's lambdas of "
                "600, 2500 and 5800 are stated to give these.",
            ),
        ),
    )
    return {picture.name: picture for picture in made}


def _three_labels() -> Federation:
    counts = np.array([[60.0, 30.0, 10.0], [30.0, 150.0, 20.0], [30.0, 6.0, 24.0]])
    target = np.array([0.2, 0.25, 0.55])
    return Federation(counts, target, ("A", "B", "C"), ("label 1", "label 2", "label 3"))


def _cameras(clients: int) -> Federation:
    """iWildCam's cameras dealt to so many clients, from its tables alone."""
    listing = iwildcam.scan(find("iwildcam"))
    iwildcam.check_complete(listing)
    roles = iwildcam_roles(listing, clients)
    counts = label_counts(listing.y, roles.clients, len(listing.classes)).astype(np.float64)
    names = tuple(map(str, range(clients)))
    return Federation(counts, roles.target, names, listing.classes)
