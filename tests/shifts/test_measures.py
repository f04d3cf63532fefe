"""Measures of shift against closed forms."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.spatial.distance import jensenshannon
from scipy.stats import norm

from fedshift.errors import InputError
from fedshift.shifts import domain_auc, label_distances
from fedshift.shifts.measures import auc, logistic

COUNTS = np.array([[40, 0, 10], [0, 30, 0], [8, 0, 2], [5, 5, 0], [0, 0, 0]])


def test_label_distances_are_their_definitions() -> None:
    got = label_distances(COUNTS)
    share = COUNTS[:4] / COUNTS[:4].sum(1, keepdims=True)
    for i in range(4):
        for j in range(4):
            p, q = share[i], share[j]
            js = jensenshannon(p, q, base=2) ** 2
            assert got.js[i, j] == pytest.approx(0.0 if i == j else js, abs=1e-12)
            assert got.hellinger[i, j] ** 2 == pytest.approx(1 - np.sqrt(p * q).sum(), abs=1e-12)
            assert got.variation[i, j] == pytest.approx(np.abs(p - q).sum() / 2)
    # By hand: disjoint labels are as far apart as can be, equal marginals are at 0.
    for table in (got.js, got.hellinger, got.variation):
        assert table[0, 1] == pytest.approx(1.0)
        assert table[0, 2] == pytest.approx(0.0, abs=1e-7)
        assert np.array_equal(table, table.T, equal_nan=True)
        assert (np.diag(table)[:4] == 0).all()
        assert np.isnan(table[4]).all()
    assert got.variation[1, 3] == pytest.approx(0.5)
    assert got.hellinger[1, 3] == pytest.approx(np.sqrt(1 - np.sqrt(0.5)))


def test_label_distances_refuse_no_table() -> None:
    with pytest.raises(InputError, match="a table \\[clients, classes\\] of finite numbers"):
        label_distances([[1, -2], [0, 3]])


def test_auc_counts_pairs() -> None:
    rng = np.random.default_rng(0)
    high, low = rng.integers(0, 6, 40), rng.integers(0, 5, 30)
    pairs = high[:, None] - low[None, :]
    assert auc(high, low) == pytest.approx(((pairs > 0) + 0.5 * (pairs == 0)).mean())
    assert auc([2, 3], [0, 1]) == 1.0
    assert auc([0, 1], [2, 3]) == 0.0
    assert auc([1, 1], [1]) == 0.5
    assert np.isnan(auc([], [1.0]))


def test_logistic_regression_is_at_its_minimum() -> None:
    """The gradient vanishes, computed another way; both sides weigh the same."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((90, 3))
    first = np.arange(90) < 20
    x[first] += 0.5
    w, b = logistic(x, first, ridge=2.0)
    p = 1 / (1 + np.exp(-(x @ w + b)))
    weight = np.where(first, 90 / (2 * 20), 90 / (2 * 70))
    slope = weight * (p - first)
    scale = np.abs(x).sum()
    assert np.abs(x.T @ slope + 2.0 * w).max() < 1e-4 * scale
    assert abs(slope.sum()) < 1e-4 * scale
    flat = weight * (0.5 - first)
    assert np.abs(x.T @ flat).max() > 1e-2 * scale  # the control: not at zero weights


def gaussians(means: list[float], n: int, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    out = [rng.standard_normal((n, 2, 2)) for _ in means]
    for x, mean in zip(out, means, strict=True):
        x[:, 0, 1] += mean
    return out


def test_the_auc_of_two_gaussians_is_known() -> None:
    """N(0, I) against N(m, I): Phi(|m| / sqrt 2), and a linear score attains it."""
    table = domain_auc(gaussians([0.0, 0.0, 1.0, 4.0], 400), most=400)
    for i, j, m in ((0, 1, 0.0), (0, 2, 1.0), (1, 2, 1.0), (2, 3, 3.0), (0, 3, 4.0)):
        assert table[i, j] == table[j, i]
        assert table[i, j] == pytest.approx(norm.cdf(m / np.sqrt(2)), abs=0.05)
    assert np.isnan(np.diag(table)).all()


def test_scores_are_of_rows_not_fitted_on() -> None:
    """More features than examples: a fit tells any rows apart that it saw, but not new ones."""
    rng = np.random.default_rng(2)
    one, two = rng.standard_normal((2, 40, 200))
    x, first = np.concatenate([one, two]), np.arange(80) < 40
    w, _ = logistic(x, first, 1.0)
    assert auc(x[first] @ w, x[~first] @ w) == 1.0
    assert abs(domain_auc([one, two])[0, 1] - 0.5) < 0.2


def test_a_pairs_value_depends_on_the_pair_and_the_seed_alone() -> None:
    data = gaussians([0.0, 0.7, 0.2], 60)
    whole = domain_auc(data, most=50)
    assert domain_auc(data[:2], most=50)[0, 1] == whole[0, 1]
    assert domain_auc(data, 1, most=50)[0, 1] != whole[0, 1]
    constant = [np.concatenate([x.reshape(60, -1), np.ones((60, 1))], 1) for x in data]
    assert np.allclose(domain_auc(constant, most=50), whole, atol=1e-6, equal_nan=True)


def test_what_cannot_be_compared_is_refused() -> None:
    one, two = gaussians([0.0, 1.0], 20)
    with pytest.raises(InputError, match="client 1 has 4 examples for 5 folds"):
        domain_auc([one, two[:4]])
    with pytest.raises(InputError, match=r"clients with \[2, 4\] features"):
        domain_auc([one, two[:, 0]])
    with pytest.raises(InputError, match="client 0 has inputs that are not finite"):
        domain_auc([one * np.nan, two])
    with pytest.raises(InputError, match="folds=1; allowed: a whole number of at least 2"):
        domain_auc([one, two], folds=1)
    with pytest.raises(InputError, match="ridge=0.0; allowed: a finite number above 0"):
        domain_auc([one, two], ridge=0.0)
