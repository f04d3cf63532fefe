"""What weights of examples are worth, in sentences: of FedDisk's runs and of its warnings."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedshift.tree import Params

# Ours. Weights of mean 1 and deviation s have the share 1 / (1 + s^2): above the first, s is below
# a tenth. Below the second, a client trains as on fewer than a third of its examples; true weights
# of such a share raised the loss (made/participation, looks).
IDLE, COSTLY = 0.99, 0.3
# Ours: the slope of estimated against true log weights that passes for right.
LEAST_SLOPE, LARGEST_SLOPE = 0.8, 1.2
ALIKE = 1e-6
# What follows best in made/slope: feddisk's options where weights do too little.
BEST = ('estimator="direct"', "temper=1", 'density="auto"')
# Ours: the share of runs in which some client is still left out.
LEFT_OUT = 0.05


@dataclass(frozen=True)
class Estimate:
    """Log weights [n] of all clients, each client's less their mean: true and estimated."""

    true: NDArray[np.float64]
    estimated: NDArray[np.float64]

    @property
    def slope(self) -> float:
        """sum_j t_j e_j / sum_j t_j^2."""
        return float(self.true @ self.estimated / (self.true @ self.true))

    @property
    def correlation(self) -> float:
        """Pearson's r."""
        return float(np.corrcoef(self.true, self.estimated)[0, 1])

    def sentence(self, differs: Sequence[str] = BEST) -> str:
        """Slope and correlation, outside 0.8 to 1.2 with the cure; "" where one has no spread.

        differs: those of `BEST` that the run does not have yet
        """
        # Weights that are alike, but for rounding, have no slope to speak of.
        if min(np.ptp(self.true), np.ptp(self.estimated)) < ALIKE:
            return ""
        figures = (
            f"estimated log weights follow the true ones with slope {self.slope:.2f} and "
            f"correlation {self.correlation:.2f}"
        )
        if self.slope < LEAST_SLOPE:
            cure = (
                f"Fit for more rounds (density_rounds), or take feddisk with {_listed(differs)}"
                if differs
                else "More density_rounds or more examples are what is left: the options are the "
                "best that we have"
            )
            return f"{figures}: below {LEAST_SLOPE:g} they do too little. {cure}"
        if self.slope > LARGEST_SLOPE:
            return (
                f"{figures}: above {LARGEST_SLOPE:g} they do too much. Fit for more rounds "
                f"(density_rounds), or take feddisk with temper {1 / self.slope:.2f} times as large"
            )
        return figures


def _listed(texts: Sequence[str]) -> str:
    """ "a", "a and b", "a, b and c"."""
    *others, last = texts
    return f"{', '.join(others)} and {last}" if others else last


def centred(of_clients: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
    """The clients' values, each client's less their mean, in one vector."""
    return np.concatenate([v - v.mean() for v in of_clients])


def rounds_for_all(done: int, left: int, drawn: float) -> int:
    """W = done + ceil(log(0.05 / left) / log(1 - drawn)), weighing rounds that draw every client.

    done   weighing rounds so far
    left   clients, one at least, that none of them has drawn
    drawn  share of the clients that a round draws, above 0

    Each further round misses a client with probability 1 - drawn, so after r of them one or more
    of the `left` are missing with probability <= left (1 - drawn)^r (the union bound), <= 0.05 at
    W. Not the mean number of rounds until all are drawn: of three clients, one a round, that is
    5.5, and after 6 rounds one is left out in 26 % of runs. Where a round draws all, and a reply
    was lost, it is one more.

    >>> from fedshift.algorithms.weighing import rounds_for_all
    >>> rounds_for_all(1, left=2, drawn=1 / 3)  # one of three clients a round
    11
    """
    if drawn >= 1.0:
        return done + 1
    return done + max(1, math.ceil(math.log(LEFT_OUT / left) / math.log1p(-drawn)))


def unweighed(importance: Params) -> list[int]:
    """Clients with examples that have not weighed them; importance: the server's part."""
    n, ess = importance["n"], importance["ess"]
    return [i for i in range(len(n)) if float(n[i]) > 0 and not float(ess[i])]


def cure_for_unweighed(done: int, left: int, drawn: float) -> str:
    """What to give so that all clients weigh their examples; arguments as in `rounds_for_all`."""
    more = rounds_for_all(done, left, drawn) - done
    return (
        f"give weighing_rounds = {done + more}, so that all are drawn in "
        f"{100 * (1 - LEFT_OUT):.0f} % of runs, and {more} more rounds to the run"
    )


def notes(importance: Params, clients: Iterable[int]) -> list[str]:
    """A sentence, with the cure, on clients whose weights do nothing, and on those whose cost much.

    importance: the server's part. Clients that have not weighed their examples are left out.
    """
    n, ess, estimated = (importance[name].tolist() for name in ("n", "ess", "estimated"))
    weighed = {i: estimated[i] / n[i] for i in clients if estimated[i] > 0}
    # Whatever the bound was: nothing else makes weights worth more than was estimated.
    replaced = {i: share for i, share in weighed.items() if ess[i] > estimated[i]}
    kept = {i: share for i, share in weighed.items() if share < COSTLY and i not in replaced}
    idle = {i: share for i, share in weighed.items() if share > IDLE}
    texts = (
        (idle, "and change nothing; take the method without densities, or fit for more rounds"),
        (
            replaced,
            "so they are 1 instead; take the method without densities, or lower temper or useful",
        ),
        (kept, "which costs more than it mends most often; take feddisk with useful = 0.3"),
    )
    return [
        f"importance weights of {_named(some)} are worth {100 * min(some.values()):.3g} % of its "
        f"examples, {end}"
        for some, end in texts
        if some
    ]


def _named(clients: Mapping[int, float]) -> str:
    """ "client 3", or "client 3 (and of 2 more)", the one of the smallest share."""
    others = f" (and of {len(clients) - 1} more)" if len(clients) > 1 else ""
    return f"client {min(clients, key=lambda i: clients[i])}{others}"
