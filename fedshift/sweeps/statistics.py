"""Mean, standard deviation and intervals over seeds: Student's t, or bootstrap."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import stats

from fedshift.errors import InputError
from fedshift.seeds import numpy_generator

LEVEL = 0.95
RESAMPLES = 10_000


@dataclass(frozen=True)
class Moments:
    """Over n seeds: the mean, the sample standard deviation, and an interval of the mean.

    sd, low and high are None for a single seed.
    """

    n: int
    mean: float
    sd: float | None
    low: float | None
    high: float | None

    def scaled(self, by: float) -> Moments:
        """The same in another unit, as 100 for percent."""
        sd, low, high = (None if v is None else by * v for v in (self.sd, self.low, self.high))
        return Moments(self.n, by * self.mean, sd, low, high)


def moments(values: Sequence[float], level: float = LEVEL) -> Moments:
    """Mean m, sd and interval m +- t sd / sqrt(n), t the (1 + level)/2 quantile, n - 1 d.o.f.

    sd^2 = sum_i (x_i - m)^2 / (n - 1). Raises InputError without values, and for a level outside
    (0, 1). Student 1908. Chosen: divisor n - 1; the papers do not state theirs.
    """
    n = len(values)
    if not n:
        raise InputError("no values; give at least one")
    if not 0 < level < 1:
        raise InputError(f"level = {level}; allowed: a probability between 0 and 1, as in 0.95")
    mean = math.fsum(values) / n
    if n == 1:
        return Moments(1, mean, None, None, None)
    sd = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1))
    half = float(stats.t.ppf((1 + level) / 2, n - 1)) * sd / math.sqrt(n)
    return Moments(n, mean, sd, mean - half, mean + half)


def bootstrapped(values: Sequence[float], level: float = LEVEL) -> Moments:
    """`moments`, with the percentile bootstrap's interval of the mean.

    low and high are the (1 - level)/2 and (1 + level)/2 quantiles of the means of 10,000 samples of
    n values drawn with replacement (Efron 1979). Which values a sample has depends on n alone, so
    that all cells of the same seeds are resampled alike. With n = 3 it is the range of the values,
    which covers the mean of a symmetric distribution in 1 - 2^(1 - n) = 75 % of all cases.
    """
    result = moments(values, level)
    if result.n == 1:
        return result
    rows = numpy_generator(result.n, "bootstrap").integers(result.n, size=(RESAMPLES, result.n))
    means = np.asarray(values, dtype=np.float64)[rows].mean(axis=1)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2]).tolist()
    return replace(result, low=low, high=high)


INTERVALS: Mapping[str, Callable[[Sequence[float], float], Moments]] = {
    "t": moments,
    "bootstrap": bootstrapped,
}


def paired(
    values: Mapping[int, float],
    base: Mapping[int, float],
    level: float = LEVEL,
    kind: str = "t",
) -> Moments | None:
    """`moments` of values - base over the seeds that both have; None where there is no such seed.

    A seed fixes split, first model and batches, so the difference is free of what they share.
    kind: "t", or "bootstrap", which draws seeds and so keeps the pairs.
    """
    common = sorted(values.keys() & base.keys())
    if not common:
        return None
    return INTERVALS[kind]([values[s] - base[s] for s in common], level)
