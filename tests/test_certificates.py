"""Certificates where they are hardest: on faces of the hull, and for rows that nearly agree."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import scipy.optimize

from fedshift import pals_weights


def norm_objective(counts: np.ndarray, target: np.ndarray, lam: float, a: np.ndarray) -> float:
    """||T - S^T a|| + lam sum_i a_i^2 / n_i."""
    n = counts.sum(1)
    return float(np.linalg.norm(target - a @ (counts / n[:, None])) + lam * np.sum(a * a / n))


def best_found(counts: np.ndarray, target: np.ndarray, lam: float) -> float:
    """The least objective that a general solver finds from several starts."""
    m, rng = len(counts), np.random.default_rng(0)
    found = []
    for start in (np.full(m, 1 / m), *rng.dirichlet(np.ones(m), size=5)):
        done = scipy.optimize.minimize(
            lambda a: norm_objective(counts, target, lam, a), start, method="SLSQP",
            bounds=[(0, 1)] * m, constraints={"type": "eq", "fun": lambda a: a.sum() - 1},
            options={"ftol": 1e-13, "maxiter": 500},
        )  # fmt: skip
        found.append(norm_objective(counts, target, lam, np.maximum(done.x, 0) / done.x.sum()))
    return min(found)


@pytest.mark.parametrize("lam", [1.0, 12.0, 42.0, 93.0, 1e4])
@pytest.mark.parametrize(
    ("counts", "target"),
    [
        ([[20, 20, 0], [9, 0, 9]], [0.5, 0.5, 0.0]),  # a vertex: the first client alone
        ([[100, 0, 0], [0, 100, 0], [0, 0, 100]], [1.0, 0.0, 0.0]),
        ([[30, 30, 0], [0, 25, 25], [40, 0, 40], [9, 9, 9]], [0.25, 0.5, 0.25]),  # an edge
        ([[50, 50, 0, 0], [0, 30, 30, 0], [0, 0, 20, 20]], [0.3, 0.5, 0.2, 0.0]),
    ],
)
def test_the_norm_form_on_faces(counts: list[list[int]], target: list[float], lam: float) -> None:
    table, T = np.array(counts, float), np.array(target)
    found = pals_weights(table, T, lam=lam, fidelity="norm")
    assert found.certified
    ours, other = norm_objective(table, T, lam, found.weights), best_found(table, T, lam)
    assert ours <= other + 1e-9 * max(1.0, other)
    at_zero = pals_weights(table, T, lam=0.0).weights
    if lam == 1e4:  # the control: the lambda = 0 answer, once returned here, is far off
        assert norm_objective(table, T, lam, at_zero) > 1.05 * ours


def exact_mixture(counts: list[list[int]], target: list[float]) -> list[Fraction]:
    """The only a with S^T a = T and sum a = 1, by Cramer's rule on three clients."""
    rows = [[Fraction(c, sum(row)) for c in row] for row in counts]
    t = [Fraction(v) for v in target]

    def det(m: list[list[Fraction]]) -> Fraction:
        a, b, c = m
        return (
            a[0] * (b[1] * c[2] - b[2] * c[1])
            - a[1] * (b[0] * c[2] - b[2] * c[0])
            + a[2] * (b[0] * c[1] - b[1] * c[0])
        )

    whole = det(rows)
    return [det([t if j == i else row for j, row in enumerate(rows)]) / whole for i in range(3)]


NEARLY_DEPENDENT = [[1109, 8453, 1473], [4019, 7611, 4812], [4576, 15015, 5624]]


def test_nearly_dependent_rows_are_not_certified_wrongly() -> None:
    """Three clients whose marginals lie on a line to 1e-13: rounding decides, and is charged."""
    target = [0.18225147205725611, 0.5938527115832326, 0.22389581635951125]
    found = pals_weights(NEARLY_DEPENDENT, target, lam=0.0)
    exact = [float(v) for v in exact_mixture(NEARLY_DEPENDENT, target)]
    error = float(np.abs(found.weights - exact).sum())
    assert error <= 1e-6 or not found.certified
    apart = [[1109, 8453, 1473], [4019, 7611, 9812], [9576, 15015, 5624]]
    mixed = (np.array(apart) / np.array(apart).sum(1)[:, None]).T @ [0.2, 0.3, 0.5]
    clear = pals_weights(apart, mixed, lam=0.0)
    assert clear.certified  # the control: rows that differ are certified, and right
    assert np.abs(clear.weights - [0.2, 0.3, 0.5]).max() < 1e-12


def exact_optimum(counts: list[list[int]], target: list[float], lam: float) -> list[Fraction]:
    """The interior KKT point of ||T - S^T a||^2 + lam sum a_i^2/n_i, sum a = 1, in rationals."""
    n = [sum(row) for row in counts]
    rows = [[Fraction(c, size) for c in row] for row, size in zip(counts, n, strict=True)]
    t, rate, m = [Fraction(v) for v in target], Fraction(lam), len(n)
    system = [
        [sum(x * y for x, y in zip(rows[i], rows[j], strict=True)) + (i == j) * rate / n[i]
         for j in range(m)] + [Fraction(1), sum(x * y for x, y in zip(rows[i], t, strict=True))]
        for i in range(m)
    ] + [[Fraction(1)] * m + [Fraction(0), Fraction(1)]]  # fmt: skip
    for i in range(m + 1):
        pivot = next(r for r in range(i, m + 1) if system[r][i] != 0)
        system[i], system[pivot] = system[pivot], system[i]
        system[i] = [v / system[i][i] for v in system[i]]
        for r in range(m + 1):
            if r != i:
                system[r] = [
                    a - system[r][i] * b for a, b in zip(system[r], system[i], strict=True)
                ]
    return [row[-1] for row in system[:m]]


@pytest.mark.parametrize("scale", [1e-15, 6.5e-15, 1e-14, 1e-13, 1e-11, 1e-9, 1e-6])
def test_tiny_lambdas_are_not_certified_by_the_limit(scale: float) -> None:
    """0 < lam < 1e-12 N may return the limit; it is certified only where it is lam's own answer."""
    counts = [[528, 364, 441], [216, 616, 383], [95, 150, 116]]
    table = np.array(counts, float)
    n = table.sum(1)
    target = (np.full(3, 1 / 3) @ (table / n[:, None])).tolist()
    exact = exact_optimum(counts, target, scale * n.sum())
    assert min(exact) > 0  # so that the KKT point is the optimum
    found = pals_weights(counts, target, lam=scale * n.sum())
    error = float(np.abs(found.weights - [float(v) for v in exact]).sum())
    assert error <= 1e-6 or not found.certified
    if scale >= 1e-6:
        assert found.certified
