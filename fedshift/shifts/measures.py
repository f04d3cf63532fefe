"""How different clients are: in their labels, and in how well a classifier separates their inputs.

Shapes: M clients, K classes; tables [M, M] are symmetric, float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import minimize
from scipy.special import expit, rel_entr

from fedshift.errors import InputError
from fedshift.seeds import numpy_generator
from fedshift.shifts.base import Floats, Ints, check_count, marginals
from fedshift.sketch import sketched


@sketched
@dataclass(frozen=True, eq=False)
class LabelDistances:
    """Between the label marginals of each two clients, all in [0, 1]; [M, M], 0 on the diagonal.

    js          JS = (KL(S_i || m) + KL(S_j || m)) / 2 in bits, m = (S_i + S_j) / 2
    hellinger   sqrt(1 - sum_y sqrt(S_iy S_jy))
    variation   total variation, sum_y |S_iy - S_jy| / 2

    NaN in the row and column of a client without examples, which has no marginal. JS is the
    divergence; its square root is a metric (Endres and Schindelin 2003).
    """

    js: Floats
    hellinger: Floats
    variation: Floats


def label_distances(counts: ArrayLike) -> LabelDistances:
    """The distances between the rows of a label table: counts [M, K].

    >>> from fedshift.shifts import label_distances
    >>> label_distances([[50, 50], [100, 0]]).variation.tolist()
    [[0.0, 0.5], [0.5, 0.0]]

    Raises InputError for negative, non-finite or non-rectangular counts.
    """
    share = marginals(counts)
    a, b = share[:, None, :], share[None, :, :]
    middle = (a + b) / 2
    js = (rel_entr(a, middle) + rel_entr(b, middle)).sum(-1) / (2 * np.log(2))
    overlap = np.sqrt(a * b).sum(-1)
    variation = np.abs(a - b).sum(-1) / 2
    # Rounding can take an overlap of equal rows above 1.
    tables = (js, np.sqrt(np.maximum(1 - overlap, 0)), variation)
    absent = share.sum(1) == 0
    unknown = absent[:, None] | absent[None, :]
    js, hellinger, variation = (np.where(unknown, np.nan, np.clip(t, 0, 1)) for t in tables)
    np.fill_diagonal(hellinger, np.where(absent, np.nan, 0.0))  # 1 - sum S is not exactly 0
    return LabelDistances(js, hellinger, variation)


def domain_auc(
    inputs: Sequence[ArrayLike],
    seed: int = 0,
    *,
    folds: int = 5,
    most: int = 500,
    ridge: float = 1.0,
) -> Floats:
    """P(f(x) > f(x')) + P(=)/2, x from client i, x' from client j, f separating i from j; [M, M].

    The area under the ROC curve of a classifier of which client an input is from, one for each
    pair: 1/2 means that it cannot separate them, 1 that it always can. f is logistic regression
    with penalty (ridge/2) ||w||^2 on standardised features, fitted on all folds but the one that it
    scores; the AUC is the mean over folds, because scores of different fits do not compare. Below
    1/2 is chance, not a reversed classifier. NaN on the diagonal.

    inputs[i] is [n_i, ...], flattened; of more than `most` examples, `most` are drawn. All draws
    are keyed by (seed, client), so a pair's value does not depend on the other clients. Both sides
    weigh the same whatever their sizes. A linear f misses curved borders, so the value
    is a lower bound for what a better classifier finds.

    Lopez-Paz and Oquab 2017, "Revisiting classifier two-sample tests", arXiv 1610.06545, with AUC
    in place of accuracy. Raises InputError for clients with fewer examples than folds, different
    features or values that are not finite, and for settings out of range.
    """
    check_count("folds", folds, 2)
    check_count("most", most, folds)
    if not 0.0 < ridge < float("inf"):
        raise InputError(f"ridge={ridge!r}; allowed: a finite number above 0")
    drawn = [_drawn(values, i, seed, folds, most) for i, values in enumerate(inputs)]
    if len({x.shape[1] for x, _ in drawn}) > 1:
        raise InputError(
            f"clients with {sorted({x.shape[1] for x, _ in drawn})} features; give all the same"
        )
    table = np.full((len(drawn), len(drawn)), np.nan)
    for i in range(len(drawn)):
        for j in range(i):
            table[i, j] = table[j, i] = _pair_auc(drawn[i], drawn[j], folds, ridge)
    return table


def auc(high: ArrayLike, low: ArrayLike) -> float:
    """P(a > b) + P(a = b)/2 for a among `high` [m] and b among `low` [n]: Mann-Whitney's U / (m n).

    NaN where one of them is empty.
    """
    # Imported here, because it takes a tenth of the time in which a client's process starts, and
    # most processes do not need it.
    from scipy.stats import rankdata

    up, down = np.asarray(high, dtype=np.float64), np.asarray(low, dtype=np.float64)
    if not up.size or not down.size:
        return float("nan")
    # Equal values get the mean of their ranks, so that each tie counts as one half.
    ranks = rankdata(np.concatenate([up, down]))[: up.size].sum()
    return float((ranks - up.size * (up.size + 1) / 2) / (up.size * down.size))


def logistic(x: Floats, first: NDArray[np.bool_], ridge: float) -> tuple[Floats, float]:
    """(w [d], b): argmin sum_r c_r log(1 + e^{-s_r (w . x_r + b)}) + (ridge/2) ||w||^2.

    x [n, d]; s_r = 1 where `first` [n], else -1; c_r = n / (2 n_s), n_s the number of rows with the
    sign of r, so that both sides weigh the same; b has no penalty. By L-BFGS.
    """
    sign = np.where(first, 1.0, -1.0)
    share = np.where(first, first.mean(), 1 - first.mean())
    weight = 1 / (2 * share)

    def loss(theta: Floats) -> tuple[float, Floats]:
        margin = sign * (x @ theta[:-1] + theta[-1])
        # The derivative in the score, row by row.
        slope = -weight * sign * expit(-margin)
        value = weight @ np.logaddexp(0, -margin) + ridge / 2 * theta[:-1] @ theta[:-1]
        return float(value), np.append(x.T @ slope + ridge * theta[:-1], slope.sum())

    fit = minimize(loss, np.zeros(x.shape[1] + 1), jac=True, method="L-BFGS-B")
    return fit.x[:-1], float(fit.x[-1])


def _drawn(values: ArrayLike, client: int, seed: int, folds: int, most: int) -> tuple[Floats, Ints]:
    """(features [n, d] of the examples in use, the fold of each)."""
    array = np.asarray(values, dtype=np.float64)
    if len(array) < folds:
        raise InputError(
            f"client {client} has {len(array)} examples for {folds} folds; give it {folds} or "
            "more, or leave it out"
        )
    x = array.reshape(len(array), -1)
    if not np.isfinite(x).all():
        raise InputError(f"client {client} has inputs that are not finite")
    # A random order, so that folds are random and of nearly equal size.
    order = numpy_generator(seed, "domain", client).permutation(len(x))[:most]
    return x[order], np.arange(len(order), dtype=np.int64) % folds


def _pair_auc(
    one: tuple[Floats, Ints], other: tuple[Floats, Ints], folds: int, ridge: float
) -> float:
    x, fold = (np.concatenate(pair) for pair in zip(one, other, strict=True))
    first = np.arange(len(x)) < len(one[0])
    areas = []
    for k in range(folds):
        training = fold != k
        mean, scale = x[training].mean(0), x[training].std(0)
        # Standardised by the training folds alone: the scored fold must not leak into the fit.
        z = (x - mean) / np.where(scale > 0, scale, 1.0)
        w, _ = logistic(z[training], first[training], ridge)
        areas.append(auc(z[~training & first] @ w, z[~training & ~first] @ w))
    return float(np.mean(areas))
