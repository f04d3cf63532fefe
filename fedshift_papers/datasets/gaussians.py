"""The synthetic task of the FedPALS paper: three Gaussians, two clients, a target that moves away.

Source: Listo Zec, Breitholtz & Johansson, "Overcoming label shift with target-aware federated
learning", arXiv:2411.03799, Fig. 9; means from the authors' notebook (the figure rounds them).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from fedshift.datasets import Dataset, OwnClients, Samples, Wanted, content_sha256
from fedshift.datasets.base import joined
from fedshift.errors import InputError
from fedshift.seeds import Part, numpy_generator
from fedshift.shifts.base import largest_remainder
from fedshift.sketch import sketched

MEANS = (
    (6.17408799, 4.61730507),
    (1.18873556, -1.59239476),
    (4.58161367, -5.40178567),
)
CLASSES = ("0", "1", "2")
CLIENT_COUNTS = ((20, 20, 0), (9, 0, 9))
N_TEST = 2000

_REACHABLE = (0.5, 0.25, 0.25)
_EXTREME = (0.0, 0.5, 0.5)


@sketched
@dataclass(frozen=True, eq=False)
class Gaussians:
    """One draw of the task: two clients' training data, the target marginal, its test data.

    Shapes: target float64 [3], sums to 1.
    """

    clients: tuple[Samples, Samples]
    target: NDArray[np.float64]
    test: Samples


def gaussians(seed: int = 0, delta: float = 0.0, n_test: int = N_TEST) -> Gaussians:
    """Two clients (n = 40 and 18) and test data that follow the target marginal T_delta.

    x | y ~ N(mean_y, I_2); labels are fixed counts, (20, 20, 0) and (9, 0, 9) for the clients and
    `largest_remainder(n_test T_delta)` for the test data.

    Every class has a stream of its own, keyed (seed, part, class): the clients' data are the same
    for every `delta`, and test sets of two deltas share their examples up to the smaller count, so
    that accuracies along delta are compared on common draws.

    Shapes: x float32 [n, 2], y int64 [n], sorted by label.

    Raises InputError for delta outside [0, 1] or n_test below 1.

    Differs: the authors' notebook draws from numpy's global generator and fits a small MLP; the
    paper's text says logistic regression.
    """
    target = target_marginal(delta)
    if n_test < 1:
        raise InputError(f"n_test = {n_test}; it must be at least 1.")
    first, second = (_draw(counts, seed, "client", i) for i, counts in enumerate(CLIENT_COUNTS))
    counts = tuple(largest_remainder(n_test * target).tolist())
    return Gaussians((first, second), target, _draw(counts, seed, "test"))


def examples() -> tuple[Samples, Samples]:
    """(both clients' data of seed 0 one after the other, test data that follow T_0)."""
    drawn = gaussians()
    return joined(drawn.clients), drawn.test


def clients(wanted: Wanted) -> OwnClients:
    """The task as the catalogue gives it: two clients, and a target moved by `wanted.delta`."""
    drawn = gaussians(wanted.seed, wanted.delta)
    train, cut = joined(drawn.clients), len(drawn.clients[0])
    digest = content_sha256(train, drawn.test)
    data = Dataset("gaussians", train, drawn.test, CLASSES, digest, "generated", "generated")
    parts = np.split(np.arange(len(train)), [cut])
    return OwnClients(data, parts, drawn.target, None, np.arange(len(drawn.test)))


def target_marginal(delta: float) -> NDArray[np.float64]:
    """T_delta = (1 - delta) [1/2, 1/4, 1/4] + delta [0, 1/2, 1/2].

    With S_1 = [1/2, 1/2, 0] and S_2 = [1/2, 0, 1/2], T_0 = (S_1 + S_2)/2 lies in their hull, and
    T_delta - T_0 = delta [-1/2, 1/4, 1/4] is orthogonal to S_1 - S_2, so T_0 stays the nearest
    point of the hull: d^2(T_delta, S) = 3/8 delta^2, with weights (1/2, 1/2) for every delta.

    Shapes: float64 [3].

    Raises InputError for delta outside [0, 1].

    Chosen: distance and weights together leave two end points, [0, 1/2, 1/2] and [1, 0, 0], one on
    either side of the hull; this one keeps two classes in the target, so accuracy still depends on
    telling classes apart.
    """
    if not 0.0 <= delta <= 1.0:
        raise InputError(
            f"delta = {delta}; allowed: 0 (the target is a mixture of the clients) to 1."
        )
    return (1.0 - delta) * np.array(_REACHABLE) + delta * np.array(_EXTREME)


def _draw(counts: tuple[int, ...], seed: int, *part: Part) -> Samples:
    x = [
        np.array(mean) + numpy_generator(seed, "gaussians", *part, label).standard_normal((n, 2))
        for label, (mean, n) in enumerate(zip(MEANS, counts, strict=True))
    ]
    return Samples(
        torch.from_numpy(np.concatenate(x).astype(np.float32)),
        torch.from_numpy(np.repeat(np.arange(len(counts), dtype=np.int64), counts)),
    )
