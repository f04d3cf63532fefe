"""Intervals over seeds: Student's, cut where a measurement ends."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from fedshift.errors import InputError
from fedshift.report.intervals import LEAST, UNBOUNDED, bounds_of, moments
from fedshift.sweeps.statistics import bootstrapped, paired
from fedshift.sweeps.texts import difference

SHARE = (0.0, 1.0)


def test_an_interval_inside_the_bounds_is_students() -> None:
    x = [0.61, 0.70, 0.55, 0.80]
    low, high = stats.t.interval(0.95, 3, loc=np.mean(x), scale=stats.sem(x))
    interval = moments(x, within=SHARE)
    assert (interval.low, interval.high) == (pytest.approx(low), pytest.approx(high))
    assert interval == moments(x)
    # By hand, with t = 4.302653 for two degrees of freedom.
    three = moments([0.4, 0.5, 0.6])
    assert three.high == pytest.approx(0.5 + 4.302653 * 0.1 / math.sqrt(3))


def test_an_interval_ends_where_the_measurement_ends() -> None:
    whole, cut = moments([0.86, 0.98, 1.0]), moments([0.86, 0.98, 1.0], within=SHARE)
    assert whole.high is not None
    assert whole.high > 1.0  # the control
    assert (cut.low, cut.high) == (whole.low, 1.0)
    low = moments([0.0, 0.02, 0.1], within=SHARE)
    assert low.low == 0.0
    assert moments([-3.0, -2.0, 5.0]).low == pytest.approx(-10.83, abs=0.01)  # no share


def test_few_or_equal_seeds_have_none() -> None:
    assert LEAST == 3
    assert moments([0.1, 0.9], within=SHARE).low is None
    assert moments([0.1, 0.9]).low is None
    # A recall of 0 in all of three runs is no proof that the fourth will have 0.
    for value in (0.0, 0.5, 1.0):
        assert moments([value] * 3, within=SHARE).high is None
        assert bootstrapped([value] * 3, within=SHARE).high is None
    assert moments([0.0, 0.0, 0.1], within=SHARE).high is not None


def test_differences_lie_between_minus_and_plus_the_whole_range() -> None:
    ours, theirs = {0: 0.0, 1: 0.9, 2: 0.0}, {0: 0.9, 1: 0.0, 2: 0.8}
    cut, whole = paired(ours, theirs, within=SHARE), paired(ours, theirs)
    assert cut is not None
    assert whole is not None
    assert (cut.low, cut.high) == (-1.0, 1.0)
    assert whole.low is not None
    assert whole.low < -1.0
    # Runs that are the same differ by nothing.
    one_less = paired(
        {0: 114 / 120, 1: 115 / 120, 2: 0.8}, {0: 115 / 120, 1: 116 / 120, 2: 97 / 120}
    )
    assert one_less is not None
    assert difference(one_less.scaled(100), 1) == "-0.8 on every seed"
    near = paired({0: 0.5, 1: 0.6, 2: 0.7}, {0: 0.5, 1: 0.6, 2: 0.7 + 1e-9})  # the control
    assert near is not None
    assert near.sd
    same = paired(ours, ours, within=SHARE)
    assert same is not None
    assert (same.low, same.high) == (0.0, 0.0)


def test_values_outside_the_bounds_are_refused() -> None:
    with pytest.raises(InputError, match=r"1.2 is not between 0 and 1"):
        moments([0.5, 1.2], within=SHARE)
    assert moments([1.0 + 1e-12, 0.5, 0.7], within=SHARE).n == 3  # a mean's rounding


def test_shares_are_known_by_name() -> None:
    for name in ("target_accuracy", "target_macro_f1", "recall", "source_accuracy"):
        assert bounds_of(name, scale=100.0) == (0.0, 100.0)
    assert bounds_of("sets_outside_after", scale=100.0) == (0.0, 100.0)
    assert bounds_of("absent_loss_correlation") == (-1.0, 1.0)
    for name in ("rmse", "target_loss", "bytes_up", "drift_client"):
        assert bounds_of(name) == (-math.inf, math.inf)
    # The user's, in percent, and one below 0.
    assert bounds_of("my_accuracy", [0.5, 1.0]) == (0.0, 1.0)
    assert bounds_of("my_accuracy", [50.0]) == bounds_of("accuracy_lost", [-0.1]) == UNBOUNDED


@pytest.mark.parametrize(("a", "b", "least"), [(20, 20, 0.93), (8, 2, 0.89), (2, 0.5, 0.72)])
def test_cutting_costs_no_coverage(a: float, b: float, least: float) -> None:
    """Accuracies of four seeds from a Beta distribution: symmetric, skewed, and mostly 100 %."""
    draws = np.random.default_rng(5).beta(a, b, size=(2000, 4)).tolist()
    true = a / (a + b)

    def covered(within: tuple[float, float]) -> list[bool]:
        intervals = [moments(x, within=within) for x in draws]
        return [m.low is not None and m.low <= true <= (m.high or 0.0) for m in intervals]

    cut = covered(SHARE)
    assert cut == covered((-math.inf, math.inf))
    assert sum(cut) / len(cut) >= least
