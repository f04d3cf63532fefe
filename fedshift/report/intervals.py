"""Mean, standard deviation and Student's t-interval over seeds."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from scipy import stats

from fedshift.errors import InputError

LEVEL = 0.95
# Fewer seeds get no interval: with two, it would be twelve standard errors to each side.
LEAST = 3
# Values that differ by less, relative to the larger of 1 and their mean, count as equal.
EQUAL = 1e-12
Bounds = tuple[float, float]
UNBOUNDED = (-math.inf, math.inf)


@dataclass(frozen=True)
class Moments:
    """The mean over n seeds, the sample standard deviation, and an interval of the mean.

    sd is None for a single seed. low and high are None if there is no interval.
    """

    n: int
    mean: float
    sd: float | None
    low: float | None
    high: float | None

    def cut(self, within: Bounds) -> Moments:
        """The same with the interval cut to the part within bounds."""
        if self.low is None or self.high is None:
            return self
        return replace(self, low=max(within[0], self.low), high=min(within[1], self.high))

    def scaled(self, by: float) -> Moments:
        """The same in another unit, for example by 100 for percent."""
        sd, low, high = (None if v is None else by * v for v in (self.sd, self.low, self.high))
        return Moments(self.n, by * self.mean, sd, low, high)


def bounds_of(name: str, values: Iterable[float] = (), scale: float = 1.0) -> Bounds:
    """The range of a measurement, by its name.

    It is [0, scale] for an accuracy, an F1, a recall or a mass of probability, and [-scale, scale]
    for a correlation. A user's metric of such a name, but with values outside, has no bounds.
    """
    if name.endswith("correlation"):
        return (-scale, scale)
    share = "accuracy" in name or name.endswith(("f1", "recall")) or "outside" in name
    return (0.0, scale) if share and all(_is_in(v, (0.0, scale)) for v in values) else UNBOUNDED


def _is_in(value: float, bounds: Bounds) -> bool:
    # 1e-9: means of shares may pass their bound by rounding.
    return bounds[0] - 1e-9 <= value <= bounds[1] * (1 + 1e-9)


def moments(values: Sequence[float], level: float = LEVEL, within: Bounds = UNBOUNDED) -> Moments:
    """Mean m, sd and interval m +- t sd / sqrt(n), t the (1 + level)/2 quantile, n - 1 d.o.f.

    sd^2 = sum_i (x_i - m)^2 / (n - 1). Student 1908. Chosen: divisor n - 1; the papers do not
    state theirs.

    within: the range of the values, and so of their mean. The interval is cut to it. This removes
    only values that the mean cannot have, so that the coverage stays exactly the same. There is no
    interval below three values, nor for equal values of a bounded measurement, since these do not
    say how far other seeds would be.

    Raises InputError without values, for a level outside (0, 1) and for values that are not within.

    >>> from fedshift.report.intervals import moments
    >>> moments([0.90, 0.95, 1.00], within=(0.0, 1.0)).high
    1.0
    """
    n = len(values)
    if not n:
        raise InputError("no values; give at least one")
    if not 0 < level < 1:
        raise InputError(f"level = {level}; allowed: a probability between 0 and 1, as in 0.95")
    outside = [v for v in values if not _is_in(v, within)]
    if outside and within != UNBOUNDED:
        raise InputError(f"{outside[0]} is not between {within[0]:g} and {within[1]:g}")
    mean = math.fsum(values) / n
    if n == 1:
        return Moments(1, mean, None, None, None)
    sd = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1))
    # Equal differences, such as 114/120 - 115/120 and 115/120 - 116/120, differ by rounding.
    sd = 0.0 if sd <= EQUAL * max(1.0, abs(mean)) else sd
    if n < LEAST or (sd == 0.0 and within != UNBOUNDED):
        return Moments(n, mean, sd, None, None)
    half = _quantile(level, n) * sd / math.sqrt(n)
    return Moments(n, mean, sd, mean - half, mean + half).cut(within)


@functools.cache
def _quantile(level: float, n: int) -> float:
    """Student's quantile with n - 1 degrees of freedom; cached, since curves ask for it often."""
    return float(stats.t.ppf((1 + level) / 2, n - 1))
