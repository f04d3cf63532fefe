"""Sentences on how useful importance weights are, for FedDisk's runs and warnings."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedshift.client.importance import Known, bounded, live
from fedshift.data import ClientData
from fedshift.tree import Params, Parts

# Our limits for the effective share of weights, which is 1 / (1 + s^2) for mean 1 and deviation s.
# Above IDLE, s is below a tenth. Below COSTLY, a client trains as if on fewer than a third of its
# examples; even true weights with such a share raised the loss (made/participation, looks).
IDLE, COSTLY = 0.99, 0.3
# Our limits for an acceptable slope of estimated against true log weights.
LEAST_SLOPE, LARGEST_SLOPE = 0.8, 1.2
ALIKE = 1e-6
# The options of feddisk whose weights follow best in made/slope.
BEST = ('estimator="direct"', "temper=1", 'density="auto"')
# Our choice: the share of runs in which some client may still be left out.
LEFT_OUT = 0.05


@dataclass(frozen=True)
class Estimate:
    """True and estimated log weights [n] of all clients, with each client's mean subtracted."""

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
        """Slope and correlation, with advice if the slope is out of range; "" without a slope.

        differs: those of `BEST` that the run does not have yet
        """
        # If weights are equal up to rounding, their slope means nothing.
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
    """All clients' values in one vector, with each client's mean subtracted."""
    return np.concatenate([v - v.mean() for v in of_clients])


def compare_log_weights(
    server: Parts,
    states: Mapping[int, Parts],
    clients: Sequence[ClientData],
    log_ratios: Sequence[Tensor],
    most: float = 10.0,
) -> Estimate | None:
    """How the log weights that clients use follow the true ones, under the same bounds.

    server, states  of FedDisk after weighing: `last.server` and `last.states` of a run
    log_ratios      the true log p(x) - log q_i(x) [n_i] of each client's examples
    most            that of the method

    Clients that have no weights, or have 1 in place of them, are left out; None where none remains.
    `sentence()` of what comes back says what to change where the slope is not 0.8 to 1.2. Raises
    InputError unless each example of a client has a log ratio, finite.

    >>> import torch
    >>> from fedshift.algorithms.weighing import compare_log_weights
    >>> from fedshift.data import client_data
    >>> one = client_data(torch.zeros(3, 1), torch.zeros(3).long(), 0)
    >>> ratio = torch.tensor([0.0, 0.2, 0.4], dtype=torch.float64)
    >>> a = ratio.mul(0.5).exp()  # half as far apart as they should be
    >>> sizes = {"n": torch.tensor([3.0, 3.0]), "ess": torch.tensor([2.9, 0.0])}
    >>> server = {"importance": {**sizes, "estimated": sizes["ess"]}}
    >>> states = {0: {"importance": {"a": a / a.mean()}}}
    >>> compare_log_weights(server, states, [one], [ratio]).sentence()[:66]
    'estimated log weights follow the true ones with slope 0.50 and cor'
    """
    of = server["importance"]
    shares = zip(of["ess"].tolist(), of["estimated"].tolist(), strict=True)
    # In a federation of machines the weights stay with the clients.
    used = [
        i for i, (ess, estimated) in enumerate(shares)
        if 0 < ess <= estimated and "importance" in states.get(i, {})
    ]  # fmt: skip
    if not used:
        return None
    truth = Known(tuple(log_ratios))
    pairs = [_log_weights(of["n"], states[i], clients[i], truth, most) for i in used]
    true, estimated = (centred(side) for side in zip(*pairs, strict=True))
    return Estimate(true, estimated)


def _log_weights(
    n: Tensor, state: Parts, data: ClientData, truth: Known, most: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """A client's log weights [n_i], true and used; n [N] the clients' sizes."""
    ratio, rows, share = truth.of(data), live(data).cpu(), n[int(data.id)] / n.sum()
    true = bounded(ratio, torch.ones(len(ratio), dtype=torch.bool), share.cpu(), most)
    a = state["importance"]["a"].cpu()[rows]
    return true.log().numpy(), a.double().log().numpy()


def rounds_for_all(done: int, left: int, drawn: float) -> int:
    """W = done + ceil(log(0.05 / left) / log(1 - drawn)): weighing rounds until all are drawn.

    done   weighing rounds so far
    left   clients, at least one, that have not been drawn
    drawn  share of the clients that a round draws, above 0

    Each further round misses a client with probability 1 - drawn. So after r of them some client is
    still missing with probability <= left (1 - drawn)^r (the union bound), which is <= 0.05 at W.
    The mean number of rounds until all are drawn would not do: for one of three clients a round it
    is 5.5, but after 6 rounds a client is missing in 26 % of runs. If a round draws all clients
    (and a reply was lost), it is one more round.

    >>> from fedshift.algorithms.weighing import rounds_for_all
    >>> rounds_for_all(1, left=2, drawn=1 / 3)  # one of three clients a round
    11
    """
    if drawn >= 1.0:
        return done + 1
    return done + max(1, math.ceil(math.log(LEFT_OUT / left) / math.log1p(-drawn)))


def unweighed(importance: Params) -> list[int]:
    """Clients that have not weighed their examples; `importance` is the server's part."""
    n, ess = importance["n"], importance["ess"]
    return [i for i in range(len(n)) if float(n[i]) > 0 and not float(ess[i])]


def cure_for_unweighed(done: int, left: int, drawn: float) -> str:
    """Advice how to get all clients to weigh their examples; arguments as in `rounds_for_all`."""
    more = rounds_for_all(done, left, drawn) - done
    return (
        f"give weighing_rounds = {done + more}, so that all are drawn in "
        f"{100 * (1 - LEFT_OUT):.0f} % of runs, and {more} more rounds to the run"
    )


def notes(importance: Params, clients: Iterable[int]) -> list[str]:
    """Sentences, with advice, on clients whose weights change nothing or cost too much.

    `importance` is the server's part. Clients that have not weighed their examples are left out.
    """
    n, ess, estimated = (importance[name].tolist() for name in ("n", "ess", "estimated"))
    weighed = {i: estimated[i] / n[i] for i in clients if estimated[i] > 0}
    # `useful` has replaced weights by 1 if they are worth more than estimated; nothing else does.
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
        f"importance weights of {_name_smallest(some)} are worth "
        f"{100 * min(some.values()):.3g} % of its examples, {end}"
        for some, end in texts
        if some
    ]


def _name_smallest(clients: Mapping[int, float]) -> str:
    """Name the client with the smallest share: "client 3", or "client 3 (and of 2 more)"."""
    others = f" (and of {len(clients) - 1} more)" if len(clients) > 1 else ""
    return f"client {min(clients, key=lambda i: clients[i])}{others}"
