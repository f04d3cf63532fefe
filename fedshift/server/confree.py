"""ConFREE: a common direction with the conflicts between clients' changes removed.

The method uses only inner products of the changes u_i, and its result is a combination of them. So
the changes, with millions of entries, are first reduced to coordinates in their span, [n, r] with
r <= n, and the result is n coefficients.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import scipy.optimize
import torch
from torch import Tensor

from fedshift.arguments import NotNegative, check_fields
from fedshift.errors import check_name
from fedshift.seeds import numpy_generator
from fedshift.server.combine import Weighed
from fedshift.server.dual import Floats
from fedshift.server.hull import project
from fedshift.tree import Params, weighted_sum

Scope = Literal["tensor", "model"]
# Entries of the changes that are reduced at a time; n times as many float64 are in memory.
BLOCK = 65536
# A guidance that is shorter than this, relative to the longest change, is rounding: zero.
NOTHING = 1e-12
# The search for the shortest combination u_w stops at this length, relative to the longest change.
SHORTEST = 1e-7


def coordinates(leaves: Iterable[Tensor]) -> Floats:
    """Rows [n, r], r <= n, with the same inner products as the changes; leaves [n, ...] of a model.

    They are R' of a QR decomposition whose columns are the changes, block by block. (The matrix of
    inner products would square the condition number.)
    """
    triangle = torch.zeros(0, 0, dtype=torch.float64)
    for leaf in leaves:
        for block in torch.split(leaf.flatten(1), BLOCK, dim=1):
            columns = block.T.double()
            # R of (R of the earlier rows, stacked on new rows) is R of all of them.
            tall = torch.cat([triangle, columns]) if len(triangle) else columns
            triangle = torch.linalg.qr(tall, mode="r").R
    rows: Floats = triangle.T.numpy()
    return rows


def guidance(rows: Floats, rng: np.random.Generator, normalise: bool = True) -> Floats:
    """Coefficients [n] of g_0 = (1/n) sum_i v_i, rows [n, r] being the changes u_i.

        v_i <- u_i;  for all other j in random order:
        v_i <- v_i - min(0, <v_i, u_j>) u_j / ||u_j||^2

    Yu et al. 2020, "Gradient surgery for multi-task learning" (PCGrad), arXiv 2001.06782,
    Algorithm 1. normalise=False does not divide, as in ConFREE's authors' code.
    """
    n = len(rows)
    gram = rows @ rows.T
    square = np.diag(gram)
    # Only coefficients are updated: v_i is row i of `mixes` times `rows`.
    mixes = np.eye(n)
    for i in range(n):
        for j in rng.permutation(n):
            product = float(mixes[i] @ gram[j])
            if j != i and product < 0.0 and square[j] > 0.0:
                mixes[i, j] -= product / square[j] if normalise else product
    mean: Floats = mixes.mean(axis=0)
    return mean if np.linalg.norm(mean @ rows) > NOTHING * _longest(rows) else np.zeros(n)


def _longest(rows: Floats) -> float:
    """max_i ||u_i||."""
    return float(np.sqrt(np.einsum("ij,ij->i", rows, rows).max(initial=0.0)))


def fairest(rows: Floats, start: Floats, alpha: float) -> Floats:
    """Coefficients [n] of d = argmax min_i <u_i, d> subject to ||d - g_0|| <= alpha ||g_0||.

    rows [n, r] are the u_i, `start` [n] the coefficients of g_0. Its dual is

        min over the simplex of <u_w, g_0> + alpha ||g_0|| ||u_w||,    u_w = sum_i w_i u_i,

    and d = g_0 + alpha ||g_0|| u_w / ||u_w||; Liu et al. 2021 (CAGrad), arXiv 2110.14048.

    Solved by a search over s, with ||u|| = min over s > 0 of (||u||^2/s + s)/2. For a fixed s, u_w
    is the point of the changes' hull nearest to -(s/alpha) g_0/||g_0||, which is unique although w
    may not be. ||u_w||/s falls in s, and the right s is where it is 1. If there is none, the dual
    has its minimum at u_w = 0, where w does not determine d: then u_w / s at a small s is used, at
    a loss of at most alpha ||g_0|| s / 4.
    """
    longest, reach = _longest(rows), alpha * float(np.linalg.norm(start @ rows))
    if reach <= alpha * NOTHING * longest:
        return start
    unit = rows / longest
    towards = (start @ rows) / (reach / alpha)

    def nearest(s: float) -> Floats:
        shifted = unit + (s / alpha) * towards
        shifted /= np.abs(shifted).max()  # the solver expects rows of size 1
        return project(shifted)

    def excess(log_s: float) -> float:
        length = float(np.linalg.norm(nearest(math.exp(log_s)) @ unit))
        return math.log(max(length, 1e-300)) - log_s

    s = SHORTEST
    if excess(math.log(SHORTEST)) > 0.0:
        # No point of the hull is longer than 1, so the root is at log s <= 0. The upper end is a
        # little above 0 because of rounding.
        s = math.exp(scipy.optimize.brentq(excess, math.log(SHORTEST), 1e-9, xtol=1e-13))
    w = nearest(s)
    length = max(s, float(np.linalg.norm(w @ unit)))
    d: Floats = start + reach / (length * longest) * w
    return d


@dataclass(frozen=True)
class ConFree(Weighed):
    """theta <- theta + d / (1 + alpha^2), d as in `fairest` from g_0 as in `guidance`.

    Zheng et al. 2025, "ConFREE: conflict-free client update aggregation for personalized federated
    learning", AAAI, doi 10.1609/aaai.v39i21.34449. All clients of the cohort count alike, whatever
    their sizes; buffers are averaged with the same 1/C. With d the worst client's improvement
    min_i <u_i, d> is at least that with g_0.

    alpha      how far d may be from g_0, relative to its length; 0 takes g_0. Neither the paper's
               abstract nor the authors' code says which value they use; 0.5 is CAGrad's
    normalise  False projects without division by ||u_j||^2, as the authors' code does: for changes
               much shorter than 1 that does nearly nothing, and the result depends on their scale
    scope      "tensor" treats every parameter tensor by itself, as the authors' code does; "model"
               all together

    The order of PCGrad's projections is drawn from the server's seed. The server must see each
    change: no secure aggregation. Raises InputError for alpha outside [0, inf) and unknown
    scopes.
    """

    alpha: NotNegative = 0.5
    normalise: bool = True
    scope: Scope = "tensor"

    def __post_init__(self) -> None:
        check_fields(self)
        check_name("scope of ConFree", self.scope, ("tensor", "model"))

    def __call__(self, weights: Tensor, stacked: Params, seed: int) -> Params:
        # Sort names, so that the result does not depend on the order of the parameters.
        groups = [[name] for name in sorted(stacked)]
        if self.scope == "model":
            groups = [sorted(stacked)]
        combined: Params = {}
        for names in groups:
            group = {name: stacked[name] for name in names}
            rng = numpy_generator(seed, "confree", *names)
            combined |= weighted_sum(self._coefficients(coordinates(group.values()), rng), group)
        return {name: combined[name] for name in stacked}

    def _coefficients(self, rows: Floats, rng: np.random.Generator) -> Tensor:
        """The coefficients [n] of the combined change, from the changes' coordinates [n, r]."""
        start = guidance(rows, rng, self.normalise)
        d = fairest(rows, start, self.alpha) if self.alpha else start
        return torch.from_numpy(d / (1.0 + self.alpha**2))
