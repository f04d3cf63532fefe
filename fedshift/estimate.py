"""Target accuracy, or the loss there, without target examples."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedshift.arguments import called
from fedshift.errors import InputError
from fedshift.real import check_labels, label_numbers, numbers
from fedshift.sketch import sketched

# Positive counts outside these limits are refused: sums or quotients could overflow.
LEAST, MOST = 1e-12, 1e18


@sketched
@dataclass(frozen=True, eq=False)
class AccuracyEstimate:
    """Estimated target accuracy and its standard error.

    recall           [K], NaN for a label that no client has
    unmeasured_mass  the target's share of these labels
    """

    accuracy: float
    standard_error: float
    recall: NDArray[np.float64]
    unmeasured_mass: float

    @property
    def interval(self) -> tuple[float, float]:
        """An approximate 95 % interval; its upper end adds the whole unmeasured mass."""
        half = 1.959963984540054 * self.standard_error  # the normal distribution's 97.5 % quantile
        low, high = self.accuracy - half, self.accuracy + half + self.unmeasured_mass
        return max(0.0, low), min(1.0, high)


def estimate_target_accuracy(
    correct: ArrayLike, total: ArrayLike, target: ArrayLike
) -> AccuracyEstimate:
    """sum_y T(y) recall(y), recall(y) = (sum_i correct_iy) / (sum_i total_iy).

    Exact in expectation under label shift: then p(x | y), and with it the recall of each label, is
    the same at the clients and at the target.

    correct  right answers on the clients' validation examples by label: [K], or [M, K], which is
             summed over clients (a secure sum can do that)
    total    how many examples there were, in the same form
    target   T [K]

    >>> estimate = fs.estimate_target_accuracy([90, 10], [100, 20], [0.2, 0.8])
    >>> round(estimate.accuracy, 3), [round(end, 3) for end in estimate.interval]
    (0.58, [0.404, 0.756])

    Standard error: sqrt(sum_y T(y)^2 r(1 - r) / n_y) with r = (correct_y + 1) / (n_y + 2), so that
    a few examples that are all right (or all wrong) do not give certainty.
    A label of T that no client validates counts with recall 0, the lowest possible value (our
    choice); its share of T is returned, and widens the interval upwards. If no label of T is
    validated, estimate and error are NaN.

    Raises InputError for shapes that do not match, counts that are negative or correct > total,
    recalls in place of counts, and a target that is not a distribution.
    """
    check_labels(correct=correct, total=total, target=target)
    count = _counts(total, "total")
    right = _rights(correct, count)
    if right.ndim == count.ndim == 2 and len(right) != len(count):
        counts = f"correct has the counts of {len(right)} clients and total those of {len(count)}"
        raise InputError(f"{counts}; give both for the same clients")
    # Summed: a mean of the clients' recalls would give each client the same weight.
    right, count = (v.sum(0) if v.ndim == 2 else v for v in (right, count))
    t = _numbers(target, "target", label_numbers)
    if not right.shape == count.shape == t.shape:
        raise InputError(
            f"correct, total and target must have the same number of labels, got "
            f"{right.shape[0]}, {count.shape[0]} and {t.shape}"
        )
    if len(wrong := np.flatnonzero(right > count)):
        y = wrong[0]
        raise InputError(f"label {y}: {right[y]:g} right out of {count[y]:g}; correct <= total")
    # An overflow gives infinity, which the checks below refuse in the user's words.
    with np.errstate(over="ignore"):
        mass = float(t.sum())
    if len(wrong := np.flatnonzero(~np.isfinite(t) | (t < 0))):
        y = wrong[0]
        raise InputError(f"target[{y}] is {t[y]:g}; give label shares, 0 or more, that sum to 1")
    if abs(mass - 1.0) > 1e-6:
        raise InputError(f"target must be non-negative and sum to 1, it sums to {mass:g}")
    # Labels without validation examples have no recall; 0 / 0 must not enter the sums.
    tested = count > 0
    recall = np.divide(right, count, out=np.full_like(right, np.nan), where=tested)
    smoothed = (right + 1.0) / (count + 2.0)
    variance = t[tested] ** 2 * (smoothed * (1.0 - smoothed))[tested] / count[tested]
    any_tested = bool(t[tested].sum() > 0)
    return AccuracyEstimate(
        accuracy=float(t[tested] @ recall[tested]) if any_tested else math.nan,
        standard_error=float(np.sqrt(variance.sum())) if any_tested else math.nan,
        recall=recall,
        unmeasured_mass=float(t[~tested].sum()),
    )


@sketched
@dataclass(frozen=True, eq=False)
class LossEstimate:
    """Estimated mean loss at the target and its standard error.

    losses           [K], mean loss of each bin, NaN for a bin that no client has
    unmeasured_mass  the target's share of these bins
    """

    loss: float
    standard_error: float
    losses: NDArray[np.float64]
    unmeasured_mass: float


def estimate_target_loss(
    sums: ArrayLike, squares: ArrayLike, total: ArrayLike, target: ArrayLike
) -> LossEstimate:
    """sum_k T_k l_k / sum_k T_k over the bins k that clients validate; l_k = sums_k / total_k.

    Exact in expectation under label shift between bins, as `estimate_target_accuracy`.

    sums     [K], sum of the losses of the validation examples of each bin
    squares  [K], sum of their squares
    total    [K], how many there are
    target   T [K]

    Standard error: sqrt(sum_k T_k^2 v_k / n_k), where v_k is the variance of the losses in the bin,
    or of all losses if the bin has one example. A bin without examples is left out, since losses
    have no upper bound, and its share of T is returned. If no bin of T is validated, estimate and
    error are NaN.

    >>> from fedshift.estimate import estimate_target_loss
    >>> estimate_target_loss([2.0, 30.0], [2.0, 300.0], [2, 3], [0.5, 0.5]).loss
    5.5

    Raises InputError for shapes that do not match, squares and counts below 0, and a target that is
    not a distribution. Sums that are not finite, as of a model that has diverged, give such a loss.
    """
    check_labels(sums=sums, squares=squares, total=total, target=target)
    s, q, n, t = (
        _numbers(v, "sums, squares, total and target", label_numbers)
        for v in (sums, squares, total, target)
    )
    if not s.shape == q.shape == n.shape == t.shape:
        raise InputError("sums, squares, total and target must have the same number of bins")
    # Not isfinite: the losses of a model that has diverged are NaN, and so is the estimate.
    if (q < 0).any() or not np.isfinite(n).all() or (n < 0).any():
        raise InputError("squares and total must be 0 or more; give sums over the examples of bins")
    if not (t >= 0).all() or not math.isclose(float(t.sum()), 1.0, abs_tol=1e-6):
        raise InputError(f"target must be 0 or more and sum to 1, it sums to {float(t.sum()):g}")
    tested = n > 0
    losses = np.divide(s, n, out=np.full_like(s, np.nan), where=tested)
    mass = float(t[tested].sum())
    if mass <= 0:
        return LossEstimate(math.nan, math.nan, losses, float(t.sum()))
    overall = _variance(s.sum(), q.sum(), n.sum())
    each = [_variance(*one) if one[2] > 1 else overall for one in zip(s, q, n, strict=True)]
    share = t[tested] / mass
    variance = share**2 * np.array(each)[tested] / n[tested]
    return LossEstimate(
        float(share @ losses[tested]),
        float(np.sqrt(variance.sum())),
        losses,
        float(t[~tested].sum()),
    )


def _variance(total: float, squares: float, n: float) -> float:
    """The variance of n values from their sum and sum of squares; NaN for n = 1."""
    # max: rounding may make the difference slightly negative.
    return max(0.0, squares - total**2 / n) / (n - 1) if n > 1 else math.nan


def _counts(counts: ArrayLike, name: str) -> NDArray[np.float64]:
    """Counts [K] or [M, K]. Raises InputError unless they are finite and 0 or more."""
    array = _numbers(counts, name)
    if array.ndim not in (1, 2):
        raise InputError(f"{name} must be [K] or [M, K], got {array.ndim} dimensions")
    if not np.isfinite(array).all() or (array < 0).any():
        raise InputError(f"{name} must hold counts, 0 or more; got a negative or non-finite one")
    extreme = array[(array > 0.0) & ((array < LEAST) | (array > MOST))]
    if extreme.size:
        raise InputError(f"{name} must hold counts, 0 or {LEAST:g} to {MOST:g}; got {extreme[0]:g}")
    return array


def _rights(correct: ArrayLike, total: NDArray[np.float64]) -> NDArray[np.float64]:
    """Counts of right answers. Raises InputError for recalls in place of them.

    Beside a total of weighted examples, which is not whole, fractions are counts.
    """
    right = _counts(correct, "correct")
    weighted = (total != np.rint(total)).any()
    if not weighted and (right <= 1.0).all() and (right != np.rint(right)).any():
        y = float(right[right != np.rint(right)][0])
        raise InputError(
            f"correct holds {y:g}, a share; it must hold counts of right answers: recall * total"
        )
    return right


def _numbers(
    given: ArrayLike, name: str, read: Callable[[ArrayLike], NDArray[np.float64]] = numbers
) -> NDArray[np.float64]:
    """An argument as an array. Raises InputError unless it has numbers in rows of one length."""
    try:
        return read(given)
    except ValueError as error:
        raise InputError(
            f"{name} must be numbers in rows of one length, got {called(given)}: {error}"
        ) from error
