"""Mean, standard deviation and Student's t-intervals over seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scipy import stats

from fedshift.errors import InputError

LEVEL = 0.95


@dataclass(frozen=True)
class Moments:
    """Over n seeds: the mean, the sample standard deviation, and a t-interval of the mean.

    sd, low and high are None for a single seed.
    """

    n: int
    mean: float
    sd: float | None
    low: float | None
    high: float | None


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


def paired(
    values: Mapping[int, float], base: Mapping[int, float], level: float = LEVEL
) -> Moments | None:
    """`moments` of values - base over the seeds that both have; None where there is no such seed.

    A seed fixes split, first model and batches, so the difference is free of what they share.
    """
    common = sorted(values.keys() & base.keys())
    return moments([values[s] - base[s] for s in common], level) if common else None
