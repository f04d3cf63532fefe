"""Differences and bootstrap intervals over seeds; `report.intervals` has Student's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from fedshift.report.intervals import LEVEL, UNBOUNDED, Bounds, Moments, moments
from fedshift.seeds import numpy_generator

RESAMPLES = 10_000


def bootstrapped(
    values: Sequence[float], level: float = LEVEL, within: Bounds = UNBOUNDED
) -> Moments:
    """`moments`, with the percentile bootstrap's interval of the mean.

    low and high are the (1 - level)/2 and (1 + level)/2 quantiles of the means of 10,000 samples of
    n values drawn with replacement (Efron 1979); they never leave the values' range. Which places
    a sample draws depends on n alone, so that all cells over the same seeds are resampled alike.
    With n = 3 the interval is the range of the values, which covers the mean of a symmetric
    distribution in 1 - 2^(1 - n) = 75 % of all cases. There is none if `moments` has none.
    """
    result = moments(values, level, within)
    if result.low is None:
        return result
    rows = numpy_generator(result.n, "bootstrap").integers(result.n, size=(RESAMPLES, result.n))
    means = np.asarray(values, dtype=np.float64)[rows].mean(axis=1)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2]).tolist()
    return replace(result, low=low, high=high)


INTERVALS: Mapping[str, Callable[[Sequence[float], float, Bounds], Moments]] = {
    "t": moments,
    "bootstrap": bootstrapped,
}


def paired(
    values: Mapping[int, float],
    base: Mapping[int, float],
    level: float = LEVEL,
    kind: str = "t",
    within: Bounds = UNBOUNDED,
) -> Moments | None:
    """`moments` of values - base over the seeds that both have; None if there is no such seed.

    A seed fixes split, first model and batches, so what these do to both cancels in the difference.
    kind: "t", or "bootstrap", which resamples seeds and so keeps pairs together. within: the range
    of values and base; differences then lie between -(high - low) and high - low.
    """
    common = sorted(values.keys() & base.keys())
    if not common:
        return None
    farthest = within[1] - within[0]
    differences = [values[s] - base[s] for s in common]
    return INTERVALS[kind](differences, level, UNBOUNDED).cut((-farthest, farthest))
